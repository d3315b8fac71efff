"""The stage that puts the metrics of an evaluation, period by period, beside the drift of its periods."""

from functools import cached_property
from typing import ClassVar, Self

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.evaluation.decay import Decay, decay, document
from ltrscale.evaluation.drift import DriftSettings, measure_drift
from ltrscale.evaluation.evaluate import EvaluateConfig
from ltrscale.evaluation.report import Evaluation
from ltrscale.progress import Report
from ltrscale.reports.findings import print_report, write_report
from ltrscale.stages.origins import bundle_hashes, content_of, dataset_hashes
from ltrscale.stages.stage import Origin, Stage


class DriftJob(DriftSettings, Stage):
    """Report the metrics of an evaluation by period, and the drift of its periods from training."""

    stage: ClassVar = "drift"
    out: Operational[str]
    """Directory of the report."""
    evaluation: str
    """Directory that jobs.evaluate made with `slice_by: [period]`; its splits, bundles and settings are used."""

    def run(self, *, show: bool = True) -> bool:
        """Make the report, and print its tables if `show` is set."""
        ran = super().run()
        if show:
            print_report(self.out, document(Decay.read(self.out), self.evaluation))
        return ran

    def own_settings(self) -> Self:
        """All settings."""
        return self

    def inputs(self) -> dict[str, str]:
        """Content of the evaluation, the data sets and the bundles."""
        config, splits = self._config, self._config.splits
        data = dataset_hashes([splits.train, splits.validation, splits.test])
        return {self.evaluation: content_of(self.evaluation)} | data | bundle_hashes(config.bundles)

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Measure drift, and commit the report."""
        evaluation = Evaluation.read(self.evaluation)
        settings = DriftSettings(documents=self.documents, docs_per_batch=self.docs_per_batch)
        found = decay(evaluation, self._config, measure_drift(self._config, settings))
        with storage.Commit(self.out) as commit:
            write_report(commit, found, document(found, self.evaluation))
            commit.finish({"made_by": origin})

    @cached_property
    def _config(self) -> EvaluateConfig:
        """The config that the evaluation records."""
        return EvaluateConfig.recorded(self.evaluation)
