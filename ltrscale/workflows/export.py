"""The stage that exports a bundle for another program."""

from typing import ClassVar

from ltrscale.bundle import load
from ltrscale.config import Operational
from ltrscale.data.dataset.split import Periods, Split
from ltrscale.progress import Report
from ltrscale.serving.export import ParityConfig, check_parity, publish
from ltrscale.serving.features import Format
from ltrscale.workflows.origins import bundle_hashes, dataset_hashes
from ltrscale.workflows.stage import Origin, Stage


class _Exported(ParityConfig):
    """The settings of an export."""

    to: Format
    periods: Periods


class ExportJob(ParityConfig, Stage):
    """Export a bundle for a program that serves it, with a description of its features."""

    stage: ClassVar = "export"
    out: Operational[str]
    """Directory of the export."""
    bundle: str
    """Bundle of one model."""
    to: Format = "lightgbm"
    """What it is for: LightGBM's text, XGBoost's UBJ and JSON, an ONNX graph of a network, a model of the Learning to
    Rank plugin of Elasticsearch or OpenSearch, LightGBM's dump for Vespa, or a treelite checkpoint for Triton."""
    data: str
    """Data set directory; scores are compared on its documents, and it has the texts of categories."""
    periods: Periods = None
    """Periods, ranges or periods counted from the newest, as in a split; all if it is left out."""

    def identity(self) -> _Exported:
        """The format, the documents to compare, and the tolerance."""
        return _Exported(to=self.to, rows=self.rows, tolerance=self.tolerance, periods=self.periods)

    def inputs(self) -> dict[str, str]:
        """Content of the data set and the bundle."""
        return dataset_hashes([self._split]) | bundle_hashes([self.bundle])

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Compare scores, then publish the files, unless the scores differ by more than the tolerance."""
        files, parity = check_parity(self.to, load(self.bundle), self._split, self)
        publish(files, parity, self.out, made_by=origin)

    @property
    def _split(self) -> Split:
        return Split(data=(self.data,), periods=self.periods)
