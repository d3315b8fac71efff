"""Small trainers for tests."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle, load
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import GroupStream
from ltrscale.pretext.objective import Pretrainer
from ltrscale.progress import Report
from ltrscale.runtime.workers import ONE, WorkersConfig
from ltrscale.training.captured import CapturedTrainer, frame_for
from ltrscale.training.combine import CombineConfig, CombineJob
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob
from ltrscale.training.fitting import fit, sample_inputs
from ltrscale.training.loop import StepResult, Trainer
from ltrscale.training.pretrain import PretrainConfig, PretrainJob
from ltrscale.training.settings import CosineConfig, OptimizerConfig
from ltrscale.trees.configs import GBDTConfig
from ltrscale.trees.gbdt import GBDTJob

WEEKS = ("2026-W01", "2026-W02")
Records = list[dict[str, Any]]


def splits(data: str) -> tuple[Split, Split, Split]:
    """Training, validation and test in the four weeks of the synthetic data set."""
    train = Split(data=(data,), periods=("2026-W01..2026-W02",))
    return train, Split(data=(data,), periods=("2026-W03",)), Split(data=(data,), periods=("2026-W04",))


def pretrain(
    config: PretrainConfig,
    train: Split,
    out: str,
    *,
    origin: Mapping[str, Any],
    report: Report,
    workers: WorkersConfig = ONE,
) -> None:
    """Do the work of a job of pretraining, whether or not `out` is up to date."""
    PretrainJob(out=out, train=train, pretrain=config, workers=workers).work(origin, report)


def finetune(
    config: FinetuneConfig,
    train: Split,
    validation: Split,
    out: str,
    *,
    pretrained: str | None,
    origin: Mapping[str, Any],
    report: Report,
    workers: WorkersConfig = ONE,
) -> None:
    """Do the work of a job of finetuning, whether or not `out` is up to date."""
    splits = Splits(train=train, validation=validation)
    FinetuneJob(out=out, splits=splits, finetune=config, pretrained=pretrained, workers=workers).work(origin, report)


def combine(
    config: CombineConfig,
    bundles: Sequence[str],
    train: Split,
    validation: Split,
    out: str,
    *,
    origin: Mapping[str, Any],
    report: Report,
) -> None:
    """Do the work of a job that combines rankers, whether or not `out` is up to date."""
    splits = Splits(train=train, validation=validation)
    CombineJob(out=out, splits=splits, bundles=tuple(bundles), combine=config).work(origin, report)


def grow_trees(
    config: GBDTConfig, splits: Splits, out: Path | str, *, report: Report = lambda _: None, **job: Any
) -> Bundle:
    """Do the work of a job of trees, whether or not `out` is up to date; returns the bundle."""
    GBDTJob(out=str(out), splits=splits, gbdt=config, **job).work({}, report)
    return load(str(out))


def finetuned(
    data: str, out: Path | str, config: FinetuneConfig, pretrained: str | None = None, *, workers: WorkersConfig = ONE
) -> Records:
    """Finetune on these splits; returns the records of the epochs."""
    train, validation, _ = splits(data)
    records: Records = []
    finetune(
        config,
        train,
        validation,
        str(out),
        pretrained=pretrained,
        origin={},
        report=lambda record: records.append(dict(record)),
        workers=workers,
    )
    return [record for record in records if "epoch" in record]


NETWORKS: dict[str, dict[str, Any]] = {
    "": {"encoder": {"width": 8, "blocks": 1}},
    "tabm": {
        "encoder": {"kind": "tabm", "members": 3, "hidden": [8], "batch_norm": True},
        "numbers": {"kind": "ple", "bins": 5, "within_lists": True},
    },
}


def config_of(method: str, transform: Mapping[str, Any] | None = None) -> PretrainConfig:
    """Settings of a method, as in `simclr_rank`, or of one with another network, as in `simclr_rank of tabm`."""
    method, _, name = method.partition(" of ")
    network = {**NETWORKS[name], "transform": transform or {}}
    return PretrainConfig.model_validate(
        {"method": {"kind": method}, "network": network, "stream": {"docs_per_batch": 800, "streams": 4, "window": 2}}
    )


def make_trainer(
    data: str,
    method: str,
    *,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    transform: Mapping[str, Any] | None = None,
    **optimizer: Any,
) -> Trainer:
    """A float64 trainer on two weeks of data, so that rounding does not hide a difference.

    The steps of `simclr_rank with graphs` are those that a GPU captures.
    """
    method, _, graphs = method.partition(" with ")
    config = config_of(method, transform)
    split = Split(data=(data,), periods=WEEKS)
    torch.manual_seed(seed)
    fitted = fit(select(split, labelled=False), config.network)
    wanted = config.method.needs_marginals(config.augment)
    marginals_SF = sample_inputs(select(split, labelled=False), fitted) if wanted else None
    model = Pretrainer(fitted, config.network, config.method, config.augment, marginals_SF).double()
    order = config.stream.replace(regroup=config.method.regroups)
    stream = GroupStream(select(split, labelled=False), order, rank=rank, world=world)

    def objective(groups: QueryGroups, generator: torch.Generator) -> tuple[Tensor, float]:
        features_NF = groups.features_NF.double()
        return model(QueryGroups(features_NF, groups.offsets_Q1), generator)

    # The rate changes with every step, so a resumed run must restore its step.
    settings = OptimizerConfig(learning_rate=1e-3, clip_norm=2.0, schedule=CosineConfig()).replace(**optimizer)
    make: Callable[..., Trainer] = Trainer
    if graphs:
        make = partial(CapturedTrainer, frame_for(stream.selection, stream, torch.device("cpu")))
    return make(model, objective, stream, settings, epochs=2, seed=seed)


def run_epochs(trainer: Trainer, epochs: int = 2) -> list[StepResult]:
    return [result for _ in range(epochs) for result in trainer.epoch()]
