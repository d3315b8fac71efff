"""The look at a click log as a stage."""

from typing import ClassVar

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.evaluation.clicks import ClicksConfig, understand
from ltrscale.evaluation.clicks_page import UnderstoodLog, document
from ltrscale.progress import Report
from ltrscale.reports.findings import print_report, write_report
from ltrscale.stages.stage import Origin, Stage


class ClicksJob(ClicksConfig, Stage):
    """Look at a click log before training on it: exposure, overlap, propensities, trust, click models."""

    stage: ClassVar = "clicks"
    out: Operational[str]
    """Directory of the report."""

    def run(self) -> bool:
        """Make the report, and print its tables."""
        ran = super().run()
        print_report(self.out, document(UnderstoodLog.read(self.out)))
        return ran

    def work(self, origin: Origin, report: Report) -> None:
        """Look at the log, and commit the report."""
        found = understand(self._settings())
        with storage.Commit(self.out) as commit:
            write_report(commit, found, document(found))
            commit.finish({"made_by": origin})
        for model in found.models:
            report({"model": model.name, "perplexity": model.perplexity, "conditional": model.conditional})

    def _settings(self) -> ClicksConfig:
        return ClicksConfig.model_validate(self.model_dump(exclude={"out"}))
