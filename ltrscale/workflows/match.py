"""The stage that appends exact-match features to a data set with tokens."""

from typing import ClassVar

from ltrscale.config import Operational
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.origin import STATISTICS
from ltrscale.derive.matching.match import MatchConfig, match
from ltrscale.progress import Report
from ltrscale.stages.inputs import DataUrl
from ltrscale.stages.stage import Origin, Stage
from ltrscale.workflows.stages import check_elsewhere


class MatchJob(Stage):
    """Append exact-match features to a data set."""

    stage: ClassVar = "match"
    makes_data: ClassVar = True
    out: Operational[str]
    """Directory of the new data set."""
    data: DataUrl
    """Data set directory with tokens to start from; it is not changed."""
    match: MatchConfig

    def check(self) -> None:
        """Refuse to replace the data set itself."""
        check_elsewhere(self.out, self.data)

    def inputs(self) -> dict[str, str]:
        """Content of the data set, and of the statistics of another one."""
        found = super().inputs()
        if self.match.statistics is not None:
            known = open_dataset(self.match.statistics).manifest.statistics
            found[STATISTICS] = known.sha256 if known else ""
        return found

    def work(self, origin: Origin, report: Report) -> None:
        """Make the data set with more features."""
        match(self.match, self.data, self.out, origin=origin, report=report)
