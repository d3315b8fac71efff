"""The stages of data sets, networks, scores and evaluations; each can also run as a separate job."""

from typing import ClassVar, Self

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.progress import Report
from ltrscale.scoring import ScoreConfig, is_scored, score
from ltrscale.stages.stage import Origin, Stage


class ScoreJob(ScoreConfig, Stage):
    """Score periods of a data set with a bundle."""

    stage: ClassVar = "score"
    record: ClassVar = storage.HIDDEN_RUN
    out: Operational[str]
    """Directory of the scores."""

    def own_settings(self) -> Self:
        """All settings; each period records its own origin."""
        return self

    def inputs(self) -> dict[str, str]:
        """None; each period records its own inputs."""
        return {}

    def is_done(self, origin: Origin) -> bool:  # noqa: ARG002
        """Whether every period is scored from its current data."""
        return is_scored(self, self.out)

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Score the remaining periods, and commit each."""
        score(self, self.out, report=report)
