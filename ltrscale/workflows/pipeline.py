"""The pipeline: from a raw log to an evaluated comparison of methods, one stage after the other.

Every method is trained once a seed; a seed draws its own sample of labelled groups, initial weights and order. All
methods of a seed see the same labelled groups. Stages that are up to date are skipped, so a pipeline that was stopped
or whose config changed in one place does only the rest.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.data.manifest import open_dataset
from ltrscale.data.prepare import PrepareConfig
from ltrscale.data.rewrite import column_names
from ltrscale.data.split import LabelColumn, Split, Splits, check_disjoint, select
from ltrscale.data.stream import StreamConfig
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.evaluation.evaluate import EvaluateConfig, EvaluateSettings
from ltrscale.launch.workers import ONE, Workers, cluster_for
from ltrscale.progress import log
from ltrscale.simulate.relabel import RelabelConfig
from ltrscale.simulate.synthetic import SyntheticLogConfig
from ltrscale.storage import join
from ltrscale.training.combine import CombineConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.pretexts import VimeConfig
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.workflows.runs import recorded
from ltrscale.workflows.stages import (
    CombineJob,
    EvaluateJob,
    FinetuneJob,
    GBDTJob,
    PrepareJob,
    PretrainJob,
    RelabelJob,
    combine_stage,
    evaluate_stage,
    finetune_stage,
    gbdt_stage,
    prepare_stage,
    pretrain_stage,
    relabel_stage,
)


class GBDTMethod(Config):
    """Gradient boosted trees on the labelled groups."""

    kind: Literal["gbdt"] = "gbdt"
    gbdt: GBDTConfig = LightGBMConfig()


class NeuralMethod(Config):
    """A network finetuned on the labelled groups, after pretraining or from random weights."""

    kind: Literal["neural"] = "neural"
    pretrain: PretrainConfig | None = None
    """Empty for the baseline without pretraining."""
    pretrained_as: str | None = None
    """Start from the pretrained encoder of this other method, which is then pretrained once for both."""
    finetune: FinetuneConfig = FinetuneConfig()

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.pretrain is not None and self.pretrained_as is not None:
            raise ValueError("pretrain and pretrained_as exclude each other; leave one of them out")
        return self

    def projector_layers(self) -> int | None:
        """Hidden layers of the projector that it pretrains; None where it does not pretrain."""
        if self.pretrain is None:
            return None
        method = self.pretrain.method
        return 0 if isinstance(method, VimeConfig) else method.projector.layers


class CombinedMethod(Config):
    """One ranker of several neural methods' rankers of the same seed."""

    kind: Literal["combined"] = "combined"
    parts: tuple[str, ...] = Field(min_length=2)
    """Names of neural methods."""
    combine: CombineConfig = CombineConfig(how="concat")


class EnsembleMethod(Config):
    """The mean score of several runs of one neural method, each with weights and order of its own."""

    kind: Literal["ensemble"] = "ensemble"
    of: str
    """Name of a neural method, whose own run is the first."""
    runs: int = Field(3, ge=2)
    """Runs in all; DASALC-ens takes 3 to 5."""


MethodName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
"""Also a directory's name."""
Method = Annotated[GBDTMethod | NeuralMethod | CombinedMethod | EnsembleMethod, Field(discriminator="kind")]


class PipelineConfig(Config):
    """A comparison of methods on one data set."""

    out: str
    """Directory for everything: `data/`, `relabelled/`, `seed-0/METHOD/...`, `evaluation/report.md`."""
    synthetic: SyntheticLogConfig | None = None
    """Make a synthetic log and prepare that."""
    prepare: PrepareConfig | None = None
    """How the raw log becomes a data set."""
    data: str | None = None
    """A data set directory that jobs.prepare made, in place of `prepare`."""
    relabel: RelabelConfig | None = None
    """Simulate feedback on the prepared data set, or clean clicks; empty takes it as it is."""
    splits: Splits
    """Periods for training, validation and test; splits that name no data set read this one."""
    seeds: tuple[int, ...] = (0,)
    """One trial of every method for each; they stand in for the seeds of the stages."""
    methods: dict[MethodName, Method] = Field(min_length=1)
    """What is compared, by the name it has in the table."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Metrics, baseline and outliers."""
    evaluate_on: tuple[LabelColumn, ...] = Field(("labels",), min_length=1)
    """Labels of the test split, one evaluation for each: `relevance` are those before relabelling."""
    workers: Workers = ONE
    """Data-parallel workers of the neural stages."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.evaluate.baseline not in (None, *self.methods):
            names = ", ".join(self.methods)
            raise ValueError(
                f"evaluate.baseline {self.evaluate.baseline!r} is none of the methods {names}; or set null"
            )
        if (self.prepare is None) == (self.data is None):
            raise ValueError("name a prepared data set as data, or say with prepare how to make one; not both")
        if self.synthetic is not None and self.prepare is None:
            raise ValueError("synthetic makes a log that must be prepared; say how under prepare, in place of data")
        if self.splits.test.labels != "labels":
            raise ValueError("splits.test.labels: leave it out; evaluate_on says which labels methods are tested on")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds must be different numbers, at least one")
        if len(set(self.evaluate_on)) < len(self.evaluate_on):
            raise ValueError("evaluate_on names a column twice")
        for name, method in self.methods.items():
            self._check_names(name, method)
            for stream in _streams(method):
                if stream.streams < self.workers.most:
                    raise ValueError(
                        f"methods.{name} has {stream.streams} streams for {self.workers.most} workers; "
                        f"set stream.streams of its stages to a multiple of {self.workers.most}"
                    )
        return self

    def _check_names(self, name: str, method: Method) -> None:
        """Check that the methods a method builds on are there and of the right kind."""
        match method:
            case NeuralMethod(pretrained_as=other):
                start = method if other is None else self.methods.get(other)
                if not isinstance(start, NeuralMethod) or (other is not None and start.pretrain is None):
                    raise ValueError(f"methods.{name}.pretrained_as {other!r} is no method that pretrains")
                try:
                    method.finetune.check_start(start.projector_layers())
                except ValueError as error:
                    raise ValueError(f"methods.{name}.{error}") from error
            case CombinedMethod(parts=parts):
                if wrong := [part for part in parts if not isinstance(self.methods.get(part), NeuralMethod)]:
                    raise ValueError(f"methods.{name}.parts: {wrong[0]!r} is no neural method")
            case EnsembleMethod(of=of):
                if not isinstance(self.methods.get(of), NeuralMethod):
                    raise ValueError(f"methods.{name}.of: {of!r} is no neural method")


def _streams(method: Method) -> list[StreamConfig]:
    """The streams of data that a method's stages read."""
    match method:
        case NeuralMethod(pretrain=pretrain, finetune=finetune):
            return [finetune.stream, *([pretrain.stream] if pretrain else [])]
        case CombinedMethod(combine=combine) if combine.how == "concat":
            return [combine.stream]
    return []


def run_pipeline(config: PipelineConfig) -> None:
    """Prepare, relabel, train every method with every seed, evaluate; skips what is up to date.

    Raises:
        InputError: as the stages; a split that cannot be read is told before anything is trained.
    """
    with recorded(config.out, config), cluster_for(config.workers):  # one cluster for all stages
        _run(config)


def _run(config: PipelineConfig) -> None:
    data = config.data or join(config.out, "data")
    if config.prepare is not None:
        prepare_stage(PrepareJob(out=data, prepare=config.prepare, synthetic=config.synthetic))
    if config.relabel is not None:
        relabelled = join(config.out, "relabelled")
        relabel_stage(RelabelJob(data=data, out=relabelled, relabel=config.relabel))
        data = relabelled
    _check(_splits(config.splits, data, 0), config.evaluate_on)
    models: dict[str, list[str]] = {name: [] for name in config.methods}
    for seed in config.seeds:
        trial = _Trial(config, _splits(config.splits, data, seed), seed)
        for name in config.methods:
            log.info("seed %d: %s", seed, name)
            models[name].append(trial.model(name))
    for column in config.evaluate_on:
        splits = _splits(config.splits, data, 0)
        splits = splits.replace(test={**splits.test.model_dump(), "labels": column})
        evaluation = EvaluateConfig(**config.evaluate.model_dump(), models=models, splits=splits)
        evaluate_stage(EvaluateJob(out=join(config.out, evaluation_on(column)), evaluate=evaluation))


def evaluation_on(column: LabelColumn) -> str:
    """The name of the directory, below a pipeline's own, of the evaluation on these labels."""
    return "evaluation" if column == "labels" else f"evaluation-{column}"


def _check(splits: Splits, tested_on: tuple[LabelColumn, ...]) -> None:
    """Check that the splits are disjoint, and that all have labelled groups and the labels to test on."""
    check_disjoint(splits)
    for split in (splits.train, splits.validation, splits.test):
        select(split, labelled=True)
    for url in splits.test.data:
        if missing := set(tested_on) - set(column_names(open_dataset(url))):
            raise InputError(
                f"evaluate_on: {url} has no {missing.pop()!r}, which relabelled data sets have; leave it out"
            )


def _splits(splits: Splits, data: str, seed: int) -> Splits:
    """The splits of a trial: on the prepared data set, with the trial's own sample of labelled groups."""

    def on_data(split: Split) -> dict[str, object]:
        return {**split.model_dump(), "data": split.data or (data,)}

    train = {**on_data(splits.train), "labelled_seed": splits.train.labelled_seed + seed}
    return splits.replace(train=train, validation=on_data(splits.validation), test=on_data(splits.test))


@dataclass(frozen=True)
class _Trial:
    """All methods trained with one seed; what a method builds on is trained first, and nothing twice."""

    config: PipelineConfig
    splits: Splits
    seed: int

    def model(self, name: str) -> str:
        """Train a method; returns its bundle's directory."""
        method, out = self.config.methods[name], self._folder(name, "model")
        match method:
            case GBDTMethod():
                gbdt_stage(GBDTJob(out=out, splits=self.splits, gbdt=method.gbdt.replace(seed=self.seed)))
            case NeuralMethod():
                self._finetune(method, self._pretrained(name), out, self.seed)
            case CombinedMethod():
                self._combine([self.model(part) for part in method.parts], method.combine, out)
            case EnsembleMethod():
                self._combine(self._runs(method, name), CombineConfig(how="mean"), out)
        return out

    def _folder(self, *names: str) -> str:
        return join(self.config.out, f"seed-{self.seed}", *names)

    def _pretrained(self, name: str) -> str | None:
        """The pretrained encoder that a method starts from."""
        method = self.config.methods[name]
        assert isinstance(method, NeuralMethod)
        if method.pretrained_as is not None:
            return self._pretrained(method.pretrained_as)
        if method.pretrain is None:
            return None
        out, settings = self._folder(name, "pretrained"), method.pretrain.replace(seed=self.seed)
        pretrain_stage(PretrainJob(out=out, train=self.splits.train, pretrain=settings, workers=self.config.workers))
        return out

    def _finetune(self, method: NeuralMethod, pretrained: str | None, out: str, seed: int) -> None:
        settings = method.finetune.replace(seed=seed)
        finetune_stage(
            FinetuneJob(
                out=out, pretrained=pretrained, splits=self.splits, finetune=settings, workers=self.config.workers
            )
        )

    def _runs(self, ensemble: EnsembleMethod, name: str) -> list[str]:
        """The runs of an ensemble: the method's own, and others from the same pretrained encoder."""
        method = self.config.methods[ensemble.of]
        assert isinstance(method, NeuralMethod)
        runs = [self.model(ensemble.of)]
        for run in range(1, ensemble.runs):
            runs.append(self._folder(name, f"run-{run}"))
            self._finetune(method, self._pretrained(ensemble.of), runs[-1], mix("run", self.seed, run) % 2**31)
        return runs

    def _combine(self, bundles: list[str], settings: CombineConfig, out: str) -> None:
        settings = settings.replace(seed=self.seed)
        combine_stage(
            CombineJob(
                out=out, bundles=tuple(bundles), splits=self.splits, combine=settings, workers=self.config.workers
            )
        )
