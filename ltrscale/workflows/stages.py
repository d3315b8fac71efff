"""The stages of data sets, networks, scores and evaluations; each can also run as a separate job."""

from typing import ClassVar, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.periods import chosen_files
from ltrscale.data.dataset.split import Split
from ltrscale.data.ingest.inputs import PrepareConfig, input_fingerprints
from ltrscale.data.ingest.prepare import is_prepared, prepare
from ltrscale.data.stream.parts import run_with_ray
from ltrscale.engine import ray_cluster
from ltrscale.errors import InputError
from ltrscale.evaluation import contrast as contrasts
from ltrscale.evaluation.evaluate import EvaluateConfig, evaluate
from ltrscale.evaluation.judged import judged_split
from ltrscale.evaluation.leaks import look, of_queries, questions
from ltrscale.evaluation.page import document
from ltrscale.evaluation.report import Evaluation
from ltrscale.launch import under_torchrun
from ltrscale.launch.workers import ONE, Workers
from ltrscale.progress import Report, log
from ltrscale.reports.findings import print_report
from ltrscale.scoring import ScoreConfig, is_scored, score
from ltrscale.simulate.relabel import RelabelConfig, relabel
from ltrscale.simulate.synthetic import GENERATOR, SyntheticLogConfig, write_log
from ltrscale.stages.inputs import BundleUrl, DataUrl
from ltrscale.stages.origins import bundle_hashes, check_unseen, content_of, dataset_hashes, scored_by
from ltrscale.stages.stage import LabelledStage, Origin, Stage
from ltrscale.training import resumption
from ltrscale.training.combine import CombineConfig, combine
from ltrscale.training.finetune import FinetuneConfig, finetune, kept_encoders
from ltrscale.training.pretrain import PretrainConfig, pretrain


class SyntheticLog(Stage):
    """Make a synthetic log."""

    stage: ClassVar = "synthetic_log"
    makes_data: ClassVar = True
    log: SyntheticLogConfig

    def inputs(self) -> dict[str, str]:
        """The version of the generator."""
        return GENERATOR

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Write the files."""
        write_log(self.log, self.out, report=report)


class PrepareJob(Stage):
    """Turn raw logs into a data set directory."""

    stage: ClassVar = "prepare"
    makes_data: ClassVar = True
    for_scoring: ClassVar[bool] = False
    """Whether the rows are only scored, by a job whose own keys are the settings of `prepare`."""
    out: Operational[str]
    """Directory of the data set."""
    prepare: PrepareConfig
    synthetic: SyntheticLogConfig | None = None
    """Make this synthetic log first, below `out` with `-log` appended, and read it as input."""
    ray: Operational[bool] = False
    """Handle the units of the input in parallel on a Ray cluster; the output is the same."""

    def run(self) -> bool:
        """Make the synthetic log, if there is one, then the data set."""
        if self.synthetic is not None:
            SyntheticLog(out=self._log, log=self.synthetic).run()
        return super().run()

    def own_settings(self) -> PrepareConfig:
        """All settings of the data set."""
        if self.synthetic is None:
            return self.prepare
        return self.prepare.replace(inputs=[{"path": storage.join(self._log, "*", "*.parquet")}])

    def inputs(self) -> dict[str, str]:
        """Fingerprints of the input files."""
        return input_fingerprints(self.own_settings())

    def is_done(self, origin: Origin) -> bool:
        """Whether the data set holds the inputs, possibly beside others that were added."""
        return is_prepared(self.out, origin)

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Make the data set, or add to it; and ask of features that may be known only after users have acted."""
        made = prepare(self.own_settings(), self.out, ray=self.ray, report=report, for_scoring=self.for_scoring)
        if not self.for_scoring and made.manifest.counts().labelled:
            found = look(Split(data=self.out))
            for line in of_queries(found):
                log.info("prepare: %s", line)
            for question in questions(found).values():
                log.warning("prepare: %s If not, leave it out of prepare.source.columns", question)

    @property
    def _log(self) -> str:
        return f"{self.out.rstrip('/')}-log"


class RowsJob(PrepareJob):
    """Turn rows to score into a data set directory."""

    for_scoring: ClassVar = True


class RelabelJob(Stage):
    """Simulate or clean the labels of a data set."""

    stage: ClassVar = "relabel"
    makes_data: ClassVar = True
    out: Operational[str]
    """Directory of the new data set."""
    data: DataUrl
    """Data set directory to start from; it is not changed."""
    relabel: RelabelConfig

    def check(self) -> None:
        """Refuse to replace the data set itself."""
        check_elsewhere(self.out, self.data)

    def work(self, origin: Origin, report: Report) -> None:
        """Make the data set with the new labels."""
        relabel(self.relabel, self.data, self.out, origin=origin, report=report)


def check_elsewhere(out: str, data: str) -> None:
    """Refuse to replace the data set that a stage starts from.

    Raises:
        InputError: both are the same directory.
    """
    if _place(out) == _place(data):
        raise InputError(f"{out}: out is the data set itself; choose another directory")


def _place(url: str) -> str:
    """A text that is equal for equal directories."""
    return str(storage.local_path(url).resolve()) if storage.is_local(url) else url.rstrip("/")


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


class EvaluateJob(Stage):
    """Evaluate bundles on the test split, with slices and significance."""

    stage: ClassVar = "evaluate"
    out: Operational[str]
    """Directory of the report."""
    evaluate: EvaluateConfig
    ray: Operational[bool] = False
    """Measure parts of the test split in parallel on a Ray cluster, a CPU each; the figures are the same."""

    def run(self, *, show: bool = True) -> bool:
        """Evaluate, and print the table if `show` is set."""
        ran = super().run()
        if show:
            print_report(self.out, document(Evaluation.read(self.out), self.out))
        return ran

    def check(self) -> None:
        """Refuse splits that overlap, and bundles that have seen test periods."""
        config = self.evaluate
        check_disjoint(config.splits)
        for url in [*config.bundles, *(url for split in config.scored for url in scored_by(split))]:
            check_unseen(url, config.splits.test)

    def inputs(self) -> dict[str, str]:
        """Content of the data sets, the scores and the bundles."""
        config = self.evaluate
        judged = [] if config.judged is None else [judged_split(config.judged, config.splits.test)]
        splits = [config.splits.validation, config.splits.test, *config.scored, *judged]
        looked_at = [] if config.propensities is None else [config.propensities.clicks]
        return dataset_hashes(splits) | bundle_hashes(config.bundles) | {url: content_of(url) for url in looked_at}

    def work(self, origin: Origin, report: Report) -> None:
        """Evaluate, and commit the report."""
        if not self.ray:
            evaluate(self.evaluate, self.out, made_by=origin, report=report)
            return
        with ray_cluster(1):
            evaluate(self.evaluate, self.out, made_by=origin, report=report, run=run_with_ray, threads=1)


class ContrastJob(contrasts.ContrastConfig, Stage):
    """Report which features solve the contrast of a pretrained bundle."""

    stage: ClassVar = "contrast"
    out: Operational[str]
    """Directory of the report."""

    def run(self) -> bool:
        """Make the report, and print its first rows."""
        ran = super().run()
        print_report(self.out, contrasts.document(contrasts.Contrast.read(self.out)))
        return ran

    def splits_read(self) -> list[Split]:
        """The documents."""
        return [self._documents]

    def inputs(self) -> dict[str, str]:
        """Content of the data set and the bundle."""
        return dataset_hashes([self._documents]) | bundle_hashes([self.bundle])

    def work(self, origin: Origin, report: Report) -> None:
        """Measure, and commit the report."""
        contrasts.contrast(self._settings(), self.out, made_by=origin, report=report)

    def _settings(self) -> contrasts.ContrastConfig:
        return contrasts.ContrastConfig.model_validate(self.model_dump(exclude={"out"}))

    @property
    def _documents(self) -> Split:
        return Split(data=(self.data,), periods=self.periods)
