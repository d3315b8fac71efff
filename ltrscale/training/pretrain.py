"""Pretraining without labels (HOU24, section 3): every document of every group of a split, labelled or not.

The same job pretrains in-context networks, on synthetic problems (`pretrain_in_context`).
"""

import functools
import operator
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ltrscale import bundle
from ltrscale.config import Operational, overlay
from ltrscale.data.dataset.periods import resolve_periods
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import StreamConfig, check_batches
from ltrscale.errors import InputError
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform
from ltrscale.origin import is_current
from ltrscale.pretext.augment import AugmentConfig, MaskConfig, SwapInGroupConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer
from ltrscale.pretext.watch import Geometry, Sums, warning_of
from ltrscale.progress import Report, log
from ltrscale.runtime.launch import cluster_for, launch, run_for
from ltrscale.runtime.workers import WorkerContext, rank_and_world
from ltrscale.stages.inputs import dataset_hashes, hashes_of
from ltrscale.stages.stage import Origin
from ltrscale.storage import join
from ltrscale.training.fitting import fitted, fitted_to, load_initial, masked_features, sample_inputs, with_tokens
from ltrscale.training.memory import built
from ltrscale.training.phases import Phase, Record, Training
from ltrscale.training.pretrain_in_context import InContextPretrainConfig, pretrain_in_context
from ltrscale.training.reduce import sum_over_workers
from ltrscale.training.resumption import EPOCHS, TRANSFORM, TrainingStage, begin, finish
from ltrscale.training.settings import OptimizerConfig, Preset, TrainingConfig, preset, set_up


class PretrainConfig(TrainingConfig):
    """Settings of a pretraining run."""

    preset: Preset | None = None
    """Start from published settings: `paper` as HOU24's text has them, `hou24` as its public code does."""
    method: MethodConfig = SimCLRRankConfig()
    """What the encoder learns without labels."""
    augment: AugmentConfig = SwapInGroupConfig()
    """How a view differs from the document, for SimCLR, SimCLR-Rank, SimCLR-Sample and SimSiam. By default .6 of its
    values are those of other documents of its group: zeroing few of them is nearly a shortcut, and on validation
    nowhere better for SimCLR-Rank (docs/methods.md). SimSiam had better have `gaussian` or `zeroing`."""
    mask: MaskConfig = MaskConfig()
    """Values that the views of every method hide, on top of its augmentation; VIME, which has no views, hides none."""
    network: NetworkConfig = NetworkConfig()
    epochs: int = Field(20, ge=1)
    """Passes over all groups of the training split (HOU24: 300)."""
    keep_every: Operational[int | None] = Field(None, ge=1)
    """Also commit the encoder every this many epochs, as a separate bundle: `epochs/00020` below the output."""
    stream: StreamConfig = StreamConfig(docs_per_batch=8192, streams=8)
    """Batch size and order of the data."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-4, clip_norm=2.0)
    cuda_graphs: bool = Field(default=False, exclude_if=operator.not_)
    """Let a GPU repeat steps by itself, as CUDA graphs, where launching operations takes longer than computing them:
    batches below some 250,000 documents, best with one stream for each worker. Micro-batches are padded to
    `docs_per_batch / streams` documents and to numbers and lengths of lists that nearly all of them fit; others are
    computed as usual. Divergence is reported one step late. Draws are others than without. For `simclr_rank`,
    `simclr_sample` and `simsiam`, with `adam` or `adamw`."""

    def order(self, phase: str) -> StreamConfig:
        """The order of any training; some methods also regroup the documents."""
        return super().order(phase).replace(regroup=self.stream.regroup or self.method.regroups)

    def noise_seed(self, phase: str) -> int:  # noqa: ARG002
        """The seed of the run, because there is only one phase."""
        return self.seed

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.method.check_encoder(self.network.encoder)
        refused = {
            f"method {self.method.kind}": not self.method.pads,
            f"augmentation {self.augment.kind}, which mixes groups": self.augment.mixes_groups,
            f"optimizer {self.optimizer.kind}": self.optimizer.kind not in ("adam", "adamw"),
            "transform.host_rows": self.network.transform.host_rows is not None,
            "compile": self.compile,
        }
        if self.cuda_graphs and (reasons := [what for what, is_so in refused.items() if is_so]):
            raise ValueError(f"cuda_graphs does not go together with {', '.join(reasons)}; leave one of them out")
        return self

    @model_validator(mode="before")
    @classmethod
    def _over_the_preset(cls, values: Any) -> Any:
        """Let the config's settings override those of its preset."""
        if not isinstance(values, Mapping) or values.get("preset") not in typing.get_args(Preset):
            return values  # no preset, or an unknown one, which the field's validation refuses
        method = values.get("method", SimCLRRankConfig())
        kind = method.get("kind", SimCLRRankConfig().kind) if isinstance(method, Mapping) else method.kind
        return overlay(preset(values["preset"], kind), values)


class PretrainJob(TrainingStage):
    """Pretrain an encoder without labels, or an in-context network on synthetic problems."""

    stage: ClassVar = "pretrain"
    train: Split | None = None
    """Split of the encoder's documents; labels are not read."""
    pretrain: PretrainConfig = PretrainConfig()
    """How an encoder is pretrained."""
    in_context: InContextPretrainConfig | None = None
    """Pretrain the network of `kind: in_context` instead, which ranks by labelled groups that it reads. It learns from
    synthetic problems and needs no data."""

    def check(self) -> None:
        """Refuse missing data sets and periods, and settings that fit no kind of pretraining."""
        if (self.train is None) == (self.in_context is None):
            raise InputError(
                "train: name the documents for an encoder, or set in_context for a network that reads none, not both"
            )
        if self.in_context is not None and self.pretrain != PretrainConfig():
            raise InputError("pretrain: has settings of an encoder; those of an in-context network are in_context")
        if self.in_context is not None and self.workers.most > 1:
            raise InputError("workers: an in-context network is pretrained by one worker; leave workers out")
        for split in self.splits_read():
            resolve_periods(split, "train")

    def own_settings(self) -> PretrainConfig | InContextPretrainConfig:
        """How the encoder or the in-context network is pretrained."""
        return self.in_context or self.pretrain

    def splits_read(self) -> list[Split]:
        """The encoder's split without its label settings, which pretraining ignores."""
        if self.train is None or self.in_context is not None:
            return []
        return [Split(data=self.train.data, periods=self.train.periods, leave_out=self.train.leave_out)]

    def inputs(self) -> dict[str, str]:
        """Content of the data sets, or of the weights that an in-context network starts from."""
        return dataset_hashes(self.splits_read()) if self.in_context is None else hashes_of(self.in_context)

    def work(self, origin: Origin, report: Report) -> None:
        """Pretrain an encoder and commit it as a bundle; resumes from the newest checkpoint below `out`.

        An in-context network is committed as its weights alone.

        Raises:
            InputError: there are fewer canonical streams than workers, the data cannot be read, or an interrupted run
                into `out` read other data.
            Stopped: the run was asked to stop.
        """
        if self.in_context is not None:
            pretrain_in_context(self.in_context, self.out, origin, report)
            return
        config, workers, (documents,) = self.pretrain, self.workers, self.splits_read()
        preflight = begin({"train": documents}, config.preflight, self.out, origin=origin, report=report)
        selection, marginals_SF = select(documents, labelled=False, without=preflight.without), None
        config = config.replace(network=fitted_to(config.network, selection))
        read = with_tokens(selection, config.network.encoder)
        check_batches(read, config.stream, world=workers.most, title="pretraining")
        with cluster_for(workers):
            run = run_for(workers)
            transform = fitted(selection, config.network, join(self.out, TRANSFORM), run=run)
            if not config.method.reads_tokens:
                config = config.replace(mask=masked_features(config.mask, selection, transform.kinds, run=run))
            if config.method.needs_marginals(config.augment):
                marginals_SF = sample_inputs(selection, transform, run=run)
            job = self.model_copy(update={"pretrain": config})
            work = functools.partial(job._train, read, transform.state_dict(), marginals_SF, origin)
            launch(work, workers=workers, report=report)

    def _train(
        self,
        selection: Selection,
        fitted_state: dict[str, Tensor],
        marginals_SF: Tensor | None,
        origin: Origin,
        worker: WorkerContext,
    ) -> None:
        """The work of one worker; rank 0 writes checkpoints and the bundle."""
        config = self.pretrain
        torch.manual_seed(config.seed)
        transform = FeatureTransform.from_state(fitted_state, config.network.transform)
        names = [feature.name for feature in selection.features]
        rates_F = torch.tensor(config.mask.rates(transform.kinds, names))
        device, augment = set_up(config), config.augment
        make = functools.partial(Pretrainer, transform, config.network, config.method, augment, marginals_SF, rates_F)
        model = built(make, config.optimizer, device=device)
        load_initial(model.encoder, config.network.initial)
        model.to(device)
        keep = functools.partial(self._keep, model, selection, origin, worker.report)
        training = Training(
            model,
            config,
            selection,
            self.out,
            origin,
            worker,
            keep=keep,
            watch=_Watcher(model),
            graphs=config.cuda_graphs,
        )
        loss = training.run(Phase("pretrain", "pretraining", config.epochs))
        if rank_and_world()[0] == 0:
            self._save(model, selection, self.out, loss, origin)
            finish(self.out)
            log.info("pretrained on %d groups, loss %.4f: %s", selection.n_groups, loss, self.out)

    def _keep(
        self, model: Pretrainer, selection: Selection, origin: Origin, report: Report, epoch: int, loss: float
    ) -> None:
        """Commit and report the encoder every `keep_every` epochs; keeps bundles that already exist."""
        config, interval = self.pretrain, self.pretrain.keep_every
        if interval is None or epoch % interval or epoch == config.epochs or rank_and_world()[0] != 0:
            return
        url, of_epoch = join(self.out, EPOCHS, f"{epoch:05d}"), {**origin, "epoch": epoch}
        if not is_current(url, of_epoch):
            self._save(model, selection, url, loss, of_epoch)
        report({"epoch": epoch, "bundle": url})

    def _save(self, model: Pretrainer, selection: Selection, url: str, loss: float, origin: Origin) -> None:
        """Commit the encoder with its current weights."""
        about = bundle.BundleFacts(
            config=self.pretrain.model_dump(mode="json"),
            features=selection.features,
            dataset_hash=selection.hash,
            read_as=selection.read_as,
            present=selection.present(),
            metrics={"loss": loss},
            made_by=origin,
        )
        bundle.save_pretrained(url, model, about)


class _Watcher:
    """Measures the geometry of the projections after each epoch, and warns once if nothing is learnt."""

    def __init__(self, model: Pretrainer) -> None:
        self.model, self.warned = model, False

    def __call__(self) -> Record:
        """The figures for the epoch record; empty if the method does not compare two views."""
        sums = Sums(*sum_over_workers(self.model.watch.take()).tolist())
        if not sums.anchors:
            return {}
        geometry = Geometry.from_sums(sums)
        warning = warning_of(geometry, self.model.method.if_solved)
        if warning and not self.warned and rank_and_world()[0] == 0:
            log.warning("pretraining: %s", warning)
            self.warned = True
        return geometry._asdict()
