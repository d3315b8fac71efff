"""The stages of data sets, networks, scores and evaluations; each can also run as a separate job."""

from typing import ClassVar, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.data.dataset.periods import chosen_files
from ltrscale.data.dataset.split import Split
from ltrscale.launch import under_torchrun
from ltrscale.launch.workers import ONE, Workers
from ltrscale.progress import Report
from ltrscale.scoring import ScoreConfig, is_scored, score
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.origins import bundle_hashes, dataset_hashes
from ltrscale.stages.stage import LabelledStage, Origin, Stage
from ltrscale.training import resumption
from ltrscale.training.combine import CombineConfig, combine
from ltrscale.training.finetune import FinetuneConfig, finetune, kept_encoders
from ltrscale.training.pretrain import PretrainConfig, pretrain


class TrainingStage(Stage):
    """A stage that resumes from checkpoints after an interruption."""

    workers: Operational[Workers] = ONE
    """Data-parallel workers; more than one run under Ray Train."""
    fresh: Operational[bool] = False
    """Start anew even if `out` is up to date; removes the checkpoints of an unfinished run."""

    def clear(self) -> None:
        """Remove checkpoints and everything else that a resume needs."""
        if self._starts_anew():
            resumption.start_anew(self.out)

    def is_done(self, origin: Origin) -> bool:
        """Whether the bundle is committed, and no checkpoint of this origin remains to resume from."""
        if self._starts_anew() or resumption.is_unfinished(self.out, origin):
            return False
        return super().is_done(origin)

    def recorded_as(self) -> Self:
        """The config without `fresh`: repeating the run must not delete it."""
        return self.replace(fresh=False)

    def _starts_anew(self) -> bool:
        # a restart by torchrun repeats the command, but must resume the run that it has begun
        return self.fresh and not under_torchrun.is_restarted()


class PretrainJob(TrainingStage):
    """Pretrain an encoder without labels."""

    stage: ClassVar = "pretrain"
    train: Split
    """Split of the documents; labels are not read."""
    pretrain: PretrainConfig = PretrainConfig()

    def check(self) -> None:
        """Refuse data sets and periods that are not there."""
        chosen_files(self._documents, "train")

    def splits_read(self) -> list[Split]:
        """The documents."""
        return [self._documents]

    def inputs(self) -> dict[str, str]:
        """Content of the data sets."""
        return dataset_hashes([self._documents])

    def work(self, origin: Origin, report: Report) -> None:
        """Pretrain, and commit the bundle."""
        pretrain(self.pretrain, self._documents, self.out, origin=origin, report=report, workers=self.workers)

    @property
    def _documents(self) -> Split:
        """The split without its settings for labels, which do not concern pretraining."""
        return Split(data=self.train.data, periods=self.train.periods, leave_out=self.train.leave_out)


class FinetuneJob(LabelledStage, TrainingStage):
    """Finetune a ranker on labelled groups, from a pretrained bundle or from random weights."""

    stage: ClassVar = "finetune"
    pretrained: BundleUrl | None = None
    """Bundle to start from; empty starts from random weights."""
    finetune: FinetuneConfig = FinetuneConfig()

    def inputs(self) -> dict[str, str]:
        """Content of the data sets and of the pretrained bundle, and of those that it has kept if probes choose."""
        probed = kept_encoders(self.pretrained) if self.pretrained and self.finetune.probe_epochs else []
        return super().inputs() | bundle_hashes(probed)

    def work(self, origin: Origin, report: Report) -> None:
        """Finetune, and commit the bundle."""
        finetune(
            self.finetune,
            self.splits.train,
            self.splits.validation,
            self.out,
            pretrained=self.pretrained,
            origin=origin,
            report=report,
            workers=self.workers,
        )


class CombineJob(LabelledStage, TrainingStage):
    """Combine several finetuned rankers into one."""

    stage: ClassVar = "combine"
    bundles: tuple[BundleUrl, ...] = Field(min_length=1)
    """Finetuned neural rankers of the same features."""
    combine: CombineConfig = CombineConfig()

    def work(self, origin: Origin, report: Report) -> None:
        """Combine, which may train, and commit the bundle."""
        combine(
            self.combine,
            self.bundles,
            self.splits.train,
            self.splits.validation,
            self.out,
            origin=origin,
            report=report,
            workers=self.workers,
        )


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
