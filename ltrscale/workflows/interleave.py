"""Offline interleaving as a stage."""

from typing import ClassVar

from ltrscale.config import Operational
from ltrscale.evaluation.interleave import InterleaveConfig, interleave
from ltrscale.evaluation.interleave_page import Interleaved, document
from ltrscale.progress import Report
from ltrscale.reports.findings import print_report
from ltrscale.stages.origins import bundle_hashes, check_unseen, dataset_hashes, scored_by
from ltrscale.stages.stage import Origin, Stage


class InterleaveJob(InterleaveConfig, Stage):
    """Compare rankers by simulated interleaving: credit, lift, and the impressions that it takes to see it."""

    stage: ClassVar = "interleave"
    out: Operational[str]
    """Directory of the report."""

    def run(self) -> bool:
        """Make the report, and print its table."""
        ran = super().run()
        print_report(self.out, document(Interleaved.read(self.out)))
        return ran

    def check(self) -> None:
        """Refuse rankers that have seen test periods."""
        scored = [self.test.with_scores(url) for url in self.scores.values()]
        for url in [*self.models.values(), *(url for split in scored for url in scored_by(split))]:
            check_unseen(url, self.test)

    def inputs(self) -> dict[str, str]:
        """Content of the data sets, the scores and the bundles."""
        scored = [self.test.with_scores(url) for url in self.scores.values()]
        return dataset_hashes([self.test, *scored]) | bundle_hashes(self.models.values())

    def work(self, origin: Origin, report: Report) -> None:
        """Interleave, and commit the report."""
        interleave(self._settings(), self.out, made_by=origin, report=report)

    def _settings(self) -> InterleaveConfig:
        return InterleaveConfig.model_validate(self.model_dump(exclude={"out"}))
