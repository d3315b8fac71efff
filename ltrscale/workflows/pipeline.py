"""The pipeline: from a raw log to an evaluated comparison of methods, one stage after the other.

Every method is trained once a seed; a seed draws its own sample of labelled groups, initial weights and order. All
methods of a seed see the same labelled groups. Stages that are up to date are skipped, so a pipeline that was stopped
or whose config changed in one place does only the rest.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.data.prepare import PrepareConfig
from ltrscale.data.split import Split, Splits, check_disjoint, select
from ltrscale.evaluation.evaluate import EvaluateConfig, EvaluateSettings
from ltrscale.progress import log
from ltrscale.simulate.synthetic import SyntheticLogConfig
from ltrscale.storage import join
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.launch import ray_cluster
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.trees.gbdt import GBDTConfig
from ltrscale.workflows.runs import recorded
from ltrscale.workflows.stages import (
    EvaluateJob,
    FinetuneJob,
    GBDTJob,
    PrepareJob,
    PretrainJob,
    evaluate_stage,
    finetune_stage,
    gbdt_stage,
    prepare_stage,
    pretrain_stage,
)


class GBDTMethod(Config):
    """Gradient boosted trees on the labelled groups."""

    kind: Literal["gbdt"] = "gbdt"
    gbdt: GBDTConfig = GBDTConfig()


class NeuralMethod(Config):
    """A network finetuned on the labelled groups, after pretraining or from random weights."""

    kind: Literal["neural"] = "neural"
    pretrain: PretrainConfig | None = None
    """Empty for the baseline without pretraining."""
    finetune: FinetuneConfig = FinetuneConfig()


MethodName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
"""Also a directory's name."""
Method = Annotated[GBDTMethod | NeuralMethod, Field(discriminator="kind")]


class PipelineConfig(Config):
    """A comparison of methods on one data set."""

    out: str
    """Directory for everything: `data/`, `seed-0/METHOD/...`, `evaluation/report.md`."""
    synthetic: SyntheticLogConfig | None = None
    """Make a synthetic log and prepare that."""
    prepare: PrepareConfig
    """How the raw log becomes a data set."""
    splits: Splits
    """Periods for training, validation and test; splits that name no data set read the one prepared here."""
    seeds: tuple[int, ...] = (0,)
    """One trial of every method for each."""
    methods: dict[MethodName, Method] = Field(min_length=1)
    """What is compared, by the name it has in the table."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Metrics, baseline and outliers."""
    workers: int = Field(1, ge=1)
    """Data-parallel workers of the neural stages."""

    @model_validator(mode="after")
    def _check(self) -> "PipelineConfig":
        if self.evaluate.baseline not in (None, *self.methods):
            raise ValueError(
                f"evaluate.baseline {self.evaluate.baseline!r} is none of the methods ({', '.join(self.methods)})"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds must be different numbers, at least one")
        for name, method in self.methods.items():
            if isinstance(method, NeuralMethod):
                streams = [method.finetune.stream.streams]
                streams += [method.pretrain.stream.streams] if method.pretrain else []
                if min(streams) < self.workers:
                    raise ValueError(
                        f"methods.{name} has {min(streams)} streams for {self.workers} workers; "
                        f"set stream.streams of its stages to a multiple of {self.workers}"
                    )
        return self


def run_pipeline(config: PipelineConfig) -> None:
    """Prepare, train every method with every seed, evaluate; skips what is up to date.

    Raises:
        InputError: as the stages; a split that cannot be read is told before anything is trained.
    """
    with recorded(config.out, config), ray_cluster(config.workers):  # one cluster for all stages
        _run(config)


def _run(config: PipelineConfig) -> None:
    data = join(config.out, "data")
    prepare_stage(PrepareJob(out=data, prepare=config.prepare, synthetic=config.synthetic))
    _check(_splits(config.splits, data, 0))
    models: dict[str, list[str]] = {name: [] for name in config.methods}
    for seed in config.seeds:
        splits = _splits(config.splits, data, seed)
        for name, method in config.methods.items():
            log.info("seed %d: %s", seed, name)
            models[name].append(_train(config, method, splits, join(config.out, f"seed-{seed}", name), seed))
    settings = config.evaluate.model_dump()
    evaluation = EvaluateConfig(**settings, models=models, splits=_splits(config.splits, data, 0))
    evaluate_stage(EvaluateJob(out=join(config.out, "evaluation"), evaluate=evaluation))


def _check(splits: Splits) -> None:
    """Check that the splits are disjoint and all have labelled groups."""
    check_disjoint(splits)
    for split in (splits.train, splits.validation, splits.test):
        select(split, labelled=True)


def _splits(splits: Splits, data: str, seed: int) -> Splits:
    """The splits of a trial: on the prepared data set, with the trial's own sample of labelled groups."""

    def on_data(split: Split) -> dict[str, object]:
        return {**split.model_dump(), "data": split.data or (data,)}

    train = {**on_data(splits.train), "labelled_seed": splits.train.labelled_seed + seed}
    return splits.replace(train=train, validation=on_data(splits.validation), test=on_data(splits.test))


def _train(config: PipelineConfig, method: Method, splits: Splits, out: str, seed: int) -> str:
    """Train one method with one seed; returns its bundle's directory."""
    model = join(out, "model")
    match method:
        case GBDTMethod():
            gbdt_stage(GBDTJob(out=model, splits=splits, gbdt=method.gbdt.replace(seed=seed)))
        case NeuralMethod():
            pretrained = None
            if method.pretrain is not None:
                pretrained = join(out, "pretrained")
                settings = method.pretrain.replace(seed=seed)
                pretrain_stage(
                    PretrainJob(out=pretrained, train=splits.train, pretrain=settings, workers=config.workers)
                )
            finetune_stage(
                FinetuneJob(
                    out=model,
                    pretrained=pretrained,
                    splits=splits,
                    finetune=method.finetune.replace(seed=seed),
                    workers=config.workers,
                )
            )
    return model
