"""Pretraining without labels (HOU24, section 3): every document of every group of a split, labelled or not."""

import math
import typing
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field, model_validator

from ltrscale import bundle
from ltrscale.config import overlay, validate
from ltrscale.data.preflight import checked
from ltrscale.data.split import Selection, Split, select
from ltrscale.data.stream import GroupStream, StreamConfig
from ltrscale.draws import mix
from ltrscale.launch.workers import ONE, Context, WorkersConfig, cluster_for, launch, run_for
from ltrscale.models.features import FeatureTransform
from ltrscale.pretext.augment import AugmentConfig, ZeroingConfig
from ltrscale.progress import Report, log, progress
from ltrscale.storage import join
from ltrscale.training.account import listed
from ltrscale.training.checkpoint import Checkpoints
from ltrscale.training.epochs import EpochLog, run_epoch
from ltrscale.training.loop import Trainer
from ltrscale.training.network import NetworkConfig, fitted, sample_inputs
from ltrscale.training.presets import Preset, preset
from ltrscale.training.pretexts import (
    MethodConfig,
    Pretrainer,
    SimCLRRankConfig,
    SimCLRSampleConfig,
    draws_from_marginals,
)
from ltrscale.training.reduce import rank_and_world
from ltrscale.training.resumption import PREFLIGHT, TRANSFORM, checkpoints_of, finish
from ltrscale.training.schedules import OptimizerConfig
from ltrscale.training.settings import TrainingConfig, set_up
from ltrscale.training.snapshot import restore


class PretrainConfig(TrainingConfig):
    """Settings of a pretraining run."""

    preset: Preset | None = None
    """Start from published settings: `paper` as HOU24's text has them, `hou24` as its public code does."""
    method: MethodConfig = SimCLRRankConfig()
    augment: AugmentConfig = ZeroingConfig()
    """How a view differs from the document, for SimCLR, SimCLR-Rank, SimCLR-Sample and SimSiam."""
    network: NetworkConfig = NetworkConfig()
    epochs: int = Field(300, ge=1)
    """Passes over all groups of the training split."""
    stream: StreamConfig = StreamConfig(docs_per_batch=65_536, streams=8)
    """Batch size and order of the data."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-4, clip_norm=2.0)

    @model_validator(mode="before")
    @classmethod
    def _over_the_preset(cls, values: Any) -> Any:
        """What the config says stands over the preset."""
        if not isinstance(values, Mapping) or values.get("preset") not in typing.get_args(Preset):
            return values
        method = values.get("method", SimCLRRankConfig())
        kind = method.get("kind", SimCLRRankConfig().kind) if isinstance(method, Mapping) else method.kind
        return overlay(preset(values["preset"], kind), values)


def pretrain(
    config: PretrainConfig,
    train: Split,
    out: str,
    *,
    origin: Mapping[str, Any],
    report: Report,
    workers: WorkersConfig = ONE,
) -> None:
    """Pretrain an encoder on a split and commit it as a bundle.

    Interrupted, the same call goes on from the newest checkpoint below `out`.

    Args:
        config: method, network, optimizer.
        train: where the documents come from; its labels are not read.
        out: directory of the bundle.
        origin: recorded in the bundle's manifest; tells the run from others.
        report: receives a record of the pre-flight, one a step and one an epoch.
        workers: data-parallel workers; the updates do not depend on their number.

    Raises:
        InputError: there is less than one canonical stream a worker, or the data cannot be read.
        Stopped: the run was asked to stop.
    """
    good = checked({"train": train}, config.preflight, join(out, PREFLIGHT), origin, report=report)
    selection, marginals_SF = select(train, labelled=False, without=good.without), None
    GroupStream(selection, config.stream, world=workers.most)  # refuses before anything is started
    with cluster_for(workers):
        run = run_for(workers)
        transform = fitted(selection, config.network, join(out, TRANSFORM), run=run)
        if draws_from_marginals(config.method, config.augment):
            marginals_SF = sample_inputs(selection, transform, run=run)
        arguments = {
            "config": config.model_dump(mode="json"),
            "train": train.model_dump(mode="json"),
            "without": sorted(good.without),
            "transform": transform.state_dict(),
            "marginals": marginals_SF,
            "out": out,
            "origin": dict(origin),
        }
        launch(pretrain_worker, arguments, workers=workers, report=report)


def pretrain_worker(arguments: Mapping[str, Any], context: Context) -> None:
    """One worker's part of `pretrain`; rank 0 writes checkpoints and the bundle."""
    config = validate(PretrainConfig, arguments["config"], "pretrain")
    train = validate(Split, arguments["train"], "train")
    out, origin = arguments["out"], arguments["origin"]
    selection = select(train, labelled=False, without=arguments["without"])
    torch.manual_seed(config.seed)
    transform = FeatureTransform.from_state(arguments["transform"], config.network.transform)
    model = Pretrainer(transform, config.network, config.method, config.augment, arguments["marginals"])
    model.to(set_up(config))
    with checkpoints_of(config, out, origin=origin, data=selection.hash, context=context) as checkpoints:
        trainer = _trainer(model, config, selection, checkpoints, context)
        loss = _train(trainer, config, checkpoints, context.report)
    if rank_and_world()[0] == 0:
        bundle.save_pretrained(
            out,
            model,
            config=config.model_dump(mode="json"),
            features=selection.features,
            dataset_hash=selection.hash,
            metrics={"loss": loss},
            made_by=origin,
        )
        finish(out)
        log.info("pretrained on %d groups, loss %.4f: %s", selection.n_groups, loss, out)


def _trainer(
    model: Pretrainer, config: PretrainConfig, selection: Selection, checkpoints: Checkpoints, context: Context
) -> Trainer:
    rank, world = rank_and_world()
    order = config.stream.replace(
        seed=mix("pretrain", config.seed, config.stream.seed),
        regroup=config.stream.regroup or isinstance(config.method, SimCLRSampleConfig),
    )
    return Trainer(
        model,
        model,
        GroupStream(selection, order, rank=rank, world=world, reader=context.reader),
        config.optimizer,
        epochs=config.epochs,
        seed=config.seed,
        precision=config.precision,
        expected=None if order.regroup or order.repeat else listed(selection, context.reader),
        due=checkpoints.due,
        stopping=context.stopping,
        failed=checkpoints.failed,
    )


def _train(trainer: Trainer, config: PretrainConfig, checkpoints: Checkpoints, report: Report) -> float:
    """Run the epochs that remain; returns the last one's mean loss."""
    if (saved := checkpoints.newest()) is not None:
        restore(trainer, saved)
    tell = EpochLog("pretraining", config.epochs, exact=trainer.expected is not None)
    left = (config.epochs - trainer.state.epoch) * trainer.stream.documents_per_epoch
    loss = math.nan
    with progress(f"pretrain {config.method.kind}", left - trainer.state.account.documents) as advance:
        while trainer.state.epoch < config.epochs:
            record = run_epoch(trainer, checkpoints, report=report, advance=advance)
            report(record)
            tell(record)
            loss = trainer.past.mean_loss
    return loss
