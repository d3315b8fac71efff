"""Pretraining without labels (HOU24, section 3): every document of every group of a split, labelled or not."""

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import Field, model_validator

from ltrscale import bundle
from ltrscale.config import is_current, overlay, validate
from ltrscale.data.split import Selection, Split, select
from ltrscale.data.stream import GroupStream, StreamConfig
from ltrscale.draws import mix
from ltrscale.launch.ranks import rank_and_world
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
from ltrscale.training.resumption import EPOCHS, TRANSFORM, begin, checkpoints_of, finish
from ltrscale.training.schedules import OptimizerConfig
from ltrscale.training.settings import TrainingConfig, set_up
from ltrscale.training.snapshot import restore


class PretrainConfig(TrainingConfig):
    """Settings of a pretraining run."""

    preset: Preset | None = None
    """Start from published settings: `paper` as HOU24's text has them, `hou24` as its public code does."""
    method: MethodConfig = SimCLRRankConfig()
    """What the encoder is to learn without labels."""
    augment: AugmentConfig = ZeroingConfig()
    """How a view differs from the document, for SimCLR, SimCLR-Rank, SimCLR-Sample and SimSiam."""
    network: NetworkConfig = NetworkConfig()
    epochs: int = Field(20, ge=1)
    """Passes over all groups of the training split (HOU24: 300)."""
    keep_every: int | None = Field(None, ge=1)
    """Commit the encoder every so many epochs too, as a bundle of its own: `epochs/00020` below the output."""
    stream: StreamConfig = StreamConfig(docs_per_batch=8192, streams=8)
    """Batch size and order of the data."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-4, clip_norm=2.0)

    def identity(self) -> Self:
        """As for any training; what is kept along the way changes nothing in the result either."""
        return super().identity().replace(keep_every=None)

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
        InputError: there is less than one canonical stream a worker, the data cannot be read, or a run that was cut
            short here read other data.
        Stopped: the run was asked to stop.
    """
    good = begin({"train": train}, config.preflight, out, origin=origin, report=report)
    selection, marginals_SF = select(train, labelled=False, without=good.without), None
    GroupStream(selection, config.stream, world=workers.most)  # refuses before anything is started
    with cluster_for(workers):
        run = run_for(workers)
        transform = fitted(selection, config.network, join(out, TRANSFORM), run=run)
        if draws_from_marginals(config.method, config.augment):
            marginals_SF = sample_inputs(selection, transform, run=run)
        arguments = {
            "config": config.model_dump(mode="json"),
            "selection": selection,
            "transform": transform.state_dict(),
            "marginals": marginals_SF,
            "out": out,
            "origin": dict(origin),
        }
        launch(pretrain_worker, arguments, workers=workers, report=report)


def pretrain_worker(arguments: Mapping[str, Any], context: Context) -> None:
    """One worker's part of `pretrain`; rank 0 writes checkpoints and the bundle."""
    config = validate(PretrainConfig, arguments["config"], "pretrain")
    selection: Selection = arguments["selection"]
    out, origin = arguments["out"], arguments["origin"]
    torch.manual_seed(config.seed)
    transform = FeatureTransform.from_state(arguments["transform"], config.network.transform)
    model = Pretrainer(transform, config.network, config.method, config.augment, arguments["marginals"])
    model.to(set_up(config))
    with checkpoints_of(config, out, origin=origin, data=selection.hash, context=context) as checkpoints:
        trainer = _trainer(model, config, selection, checkpoints, context)
        keep = _Keeper(model, config, selection, out, origin, context.report)
        loss = _train(trainer, config, checkpoints, context.report, keep)
    if rank_and_world()[0] == 0:
        keep.save(out, loss, origin)
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


@dataclass(frozen=True)
class _Keeper:
    """Commits the encoder as a bundle, at the end of the run and along the way."""

    model: Pretrainer
    config: PretrainConfig
    selection: Selection
    out: str
    origin: Mapping[str, Any]
    report: Report

    def save(self, url: str, loss: float, origin: Mapping[str, Any]) -> None:
        """Commit the encoder as it stands."""
        bundle.save_pretrained(
            url,
            self.model,
            config=self.config.model_dump(mode="json"),
            features=self.selection.features,
            dataset_hash=self.selection.hash,
            metrics={"loss": loss},
            made_by=origin,
        )

    def after(self, epoch: int, loss: float) -> None:
        """Commit the encoder where it is to be kept after this epoch, unless a run before has, and say so."""
        every = self.config.keep_every
        if every is None or epoch % every or epoch == self.config.epochs or rank_and_world()[0] != 0:
            return
        url, origin = join(self.out, EPOCHS, f"{epoch:05d}"), {**self.origin, "epoch": epoch}
        if not is_current(url, origin):
            self.save(url, loss, origin)
        self.report({"epoch": epoch, "bundle": url})


def _train(trainer: Trainer, config: PretrainConfig, checkpoints: Checkpoints, report: Report, keep: _Keeper) -> float:
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
            keep.after(trainer.state.epoch, loss)
    return loss
