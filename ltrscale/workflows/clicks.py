"""The look at a click log as a stage."""

from typing import ClassVar

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.evaluation.clicks import ClicksConfig, understand
from ltrscale.evaluation.clicks_page import PICTURE, UnderstoodLog, chart, page, tables
from ltrscale.evaluation.pages import print_page, write_page
from ltrscale.progress import Report
from ltrscale.stages.stage import Origin, Stage


class ClicksJob(ClicksConfig, Stage):
    """Look at a click log before training on it: exposure, overlap, propensities, trust, click models."""

    stage: ClassVar = "clicks"
    out: Operational[str]
    """Directory of the report."""

    def run(self) -> bool:
        """Make the report, and print its tables."""
        ran = super().run()
        print_page(self.out, tables(UnderstoodLog.read(self.out)))
        return ran

    def work(self, origin: Origin, report: Report) -> None:
        """Look at the log, and commit the report."""
        found = understand(self._settings())
        with storage.Commit(self.out) as commit:
            write_page(commit, found, page=page(found), picture=PICTURE, chart=chart(found))
            commit.finish({"made_by": origin})
        for model in found.models:
            report({"model": model.name, "perplexity": model.perplexity, "conditional": model.conditional})

    def _settings(self) -> ClicksConfig:
        return ClicksConfig.model_validate(self.model_dump(exclude={"out"}))
