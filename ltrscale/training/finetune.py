"""Finetuning with a ranking loss: first the head, then the whole network, with early stopping on validation (HOU24).

Without a pretrained bundle the same network starts from random weights: the `no pretraining` baseline, and every
supervised ranker of the papers. Probing is finetuning with `epochs: 0`: the pretrained encoder stays fixed under a head
of one layer (linear probing) or several (multilayer probing).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale import bundle
from ltrscale.config import Config
from ltrscale.data.dataset.disjoint import joined_splits
from ltrscale.data.dataset.manifest import open_dataset, places
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.stream.batches import check_batches
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.models.choices import ContextConfig, NetworkConfig
from ltrscale.models.features import FeatureTransform
from ltrscale.models.layers import depths
from ltrscale.models.ranker import Architecture, HeadConfig, MeanRanker, Ranker
from ltrscale.origin import is_current
from ltrscale.progress import Report, log
from ltrscale.ranking.choices import metric_label
from ltrscale.runtime.launch import cluster_for, launch, run_for
from ltrscale.runtime.workers import WorkerContext
from ltrscale.stages.inputs import BundleUrl, bundle_hashes
from ltrscale.stages.stage import LabelledStage, Origin
from ltrscale.storage import children, join, read_manifest
from ltrscale.training.auxiliary import AuxiliaryConfig, AuxiliaryObjective, Unlabelled
from ltrscale.training.best import Best, Constraints, GoalsConfig, validate_goals
from ltrscale.training.fitting import fitted, fitted_to, load_initial, with_tokens
from ltrscale.training.memory import built
from ltrscale.training.phases import Phase, Training
from ltrscale.training.ranking import LabelledData, ListLossConfig, RankingConfig, RankingObjective
from ltrscale.training.resumption import EPOCHS, PROBES, TRANSFORM, TrainingStage, begin
from ltrscale.training.settings import set_up


class RatesConfig(Config):
    """Learning rates of phases and layers, as factors of `optimizer.learning_rate`.

    In the phase `full` the k-th pretrained layer from the top has the factor `encoder * layer_decay^k`, the head 1.
    A residual block is one layer. Without a pretrained bundle all layers have the full rate.
    """

    head_phase: float = Field(1.0, gt=0)
    """Factor of the phase that trains only the layers without pretrained weights; 1 as in HOU24. These are random at
    first, and may learn at 10 times the rate that pretrained layers tolerate."""
    encoder: float = Field(1.0, gt=0)
    """Factor of the pretrained layers in the phase `full`; 1 as in HOU24."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """How much slower a pretrained layer learns than the one above it; 1 for no difference, as in HOU24. Howard and
    Ruder 2018 have 1 / 2.6; .65 to .9 are usual for transformers."""

    def factors(self, rankers: Sequence[Ranker]) -> dict[nn.Parameter, float]:
        """Factors of the pretrained layers of the rankers in the phase `full`."""
        factors = {}
        for ranker in rankers:
            from_top = reversed([*depths(ranker.encoder), *depths(ranker.neck)])
            for k, layer in enumerate(from_top, start=1):
                factors.update(dict.fromkeys(layer, self.encoder * self.layer_decay**k))
        return factors


class FinetuneConfig(RankingConfig):
    """Settings of a finetuning run."""

    list_loss: ListLossConfig | None = None
    """A second loss on whole lists, for a context that embeds them (rankformer)."""
    head: HeadConfig = HeadConfig()
    context: ContextConfig | None = None
    """Lets scores depend on the rest of the list; empty scores each document independently."""
    network: NetworkConfig = NetworkConfig()
    """The network without a pretrained bundle; a pretrained bundle brings its own."""
    goals: GoalsConfig | None = Field(default=None, exclude_if=lambda goals: goals is None)
    """A head for each of several goals; empty learns the labels of the split alone. Training then reads the groups of
    all these goals, and validation too where some are kept."""
    heads: int = Field(1, ge=1, le=100)
    """Heads with different initial weights, each on its own copy of the encoder; their mean score ranks (QIN21's
    ensembles have 3 to 5). They train side by side on the same batches, and validation judges the mean. Memory and
    time of a step grow with their number."""
    projector_layers: int = Field(0, ge=0)
    """Hidden layers of the pretrained projector to keep and finetune; HOU23 keeps the first of a large projector."""
    keep_head: bool = False
    """Also start from the head and the list context of the named bundle, a finetuned ranker with the same `head`,
    `context` and goals. Its own weights are kept unless validation finds better ones. By default head and context start
    from random weights, because a pretrained encoder has none."""
    noise: float = Field(0.0, ge=0)
    """Standard deviation of normal noise on numeric inputs in training (DASALC)."""
    probe_epochs: int = Field(0, ge=0)
    """Start from the best encoder that pretraining has kept (`keep_every`), its last one included: a linear probe of
    this many epochs on the labelled groups is trained on each, and validation chooses. 0 starts from the last one."""
    head_epochs: int = Field(100, ge=0)
    """Epochs that train only head and list context; skipped without a pretrained bundle."""
    epochs: int = Field(100, ge=0)
    """Epochs that train the whole network; 0 with a pretrained bundle is probing."""

    rates: RatesConfig = RatesConfig()
    auxiliary: AuxiliaryConfig | None = None
    """A pretext loss on all groups of the training split, beside the ranking loss in the phase `full`; empty for none,
    as in the papers."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.epochs == self.head_epochs == 0:
            raise ValueError("head_epochs and epochs are both 0: nothing would be trained")
        if self.keep_head and (self.heads > 1 or self.probe_epochs):
            raise ValueError("keep_head resumes the one head of the named bundle: set heads to 1, probe_epochs to 0")
        if self.list_loss is not None and (self.context is None or not self.context.embeds_lists):
            raise ValueError("list_loss needs a context that embeds lists: set context.kind to rankformer")
        if self.list_loss is not None and self.relevant_only:
            raise ValueError("list_loss also learns from lists without a relevant document: set relevant_only to false")
        if self.goals is not None and (self.list_loss is not None or self.debias is not None):
            raise ValueError("goals: list_loss and debias are of the labels alone; leave them out")
        return self

    def check_start(self, projector_layers: int | None) -> None:
        """Check that the settings fit the start: a pretrained bundle or random weights.

        `projector_layers` are the hidden layers of the pretrained projector, None without pretraining.

        Raises:
            ValueError: probing without a pretrained encoder, or more layers of the projector than it has.
        """
        if projector_layers is None and self.epochs == 0:
            raise ValueError("finetune.epochs is 0, which is probing, but there is nothing pretrained; name a bundle")
        if self.projector_layers > (projector_layers or 0):
            raise ValueError(
                f"finetune.projector_layers asks for {self.projector_layers} hidden layers of a pretrained projector "
                f"that has {projector_layers or 0}; lower it, or pretrain with more"
            )


class FinetuneJob(LabelledStage, TrainingStage):
    """Finetune a ranker on labelled groups, from a pretrained bundle or from random weights."""

    stage: ClassVar = "finetune"
    pretrained: BundleUrl | None = None
    """Bundle to start from; empty starts from random weights."""
    finetune: FinetuneConfig = FinetuneConfig()

    def inputs(self) -> dict[str, str]:
        """Content of the data sets and the pretrained bundle, with its kept encoders if probes choose among them."""
        probed = _kept_encoders(self.pretrained) if self.pretrained and self.finetune.probe_epochs else []
        return super().inputs() | bundle_hashes(probed)

    def work(self, origin: Origin, report: Report, *, epochs: Mapping[str, int] | None = None) -> None:
        """Finetune, and commit the bundle; resumes from the newest checkpoint below `out`.

        With `epochs`, it trains each phase for this many epochs on both splits together, and keeps the last weights.

        Raises:
            InputError: a split has no labelled group, the pretrained bundle was made for other features or lacks the
                requested layers or head, nothing would be trained, or an interrupted run into `out` read other data.
            Stopped: the run was asked to stop.
        """
        config, workers, start = self.finetune, self.workers, self._start(origin, report)
        train, validation = self.splits.train, self.splits.validation
        if config.goals is not None:
            train, validation = config.goals.reading(train), config.goals.reading(validation, judged=epochs is None)
        splits = {"train": train, "validation": validation}
        if epochs is not None:
            splits = {"train": joined_splits(train, validation)}
        preflight = begin(splits, config.preflight, self.out, origin=origin, report=report)
        data = LabelledData.from_splits(
            splits["train"], splits.get("validation"), without=preflight.without, config=config
        )
        if config.goals is not None:
            goals = tuple(config.goals.initial)
            data = data.each(lambda groups: groups.with_goals(goals))
        documents = select(splits["train"], labelled=False, without=preflight.without)
        read: Callable[[Selection], Selection]
        if start is not None:
            documents = documents.serving(start.features, whose=start.url)
            read = partial(bundle.with_tokens_of, opened=[start])
        else:
            config = config.replace(network=fitted_to(config.network, documents))
            read = partial(with_tokens, encoder=config.network.encoder)
        data = data.each(read)
        check_batches(data.train, config.stream, world=workers.most, title="finetuning")
        if config.auxiliary is not None:
            check_batches(read(documents), config.auxiliary.stream, world=workers.most, title="auxiliary loss")
        with cluster_for(workers):  # one cluster for the fit and the workers
            run = run_for(workers)
            if start is not None:
                transform = start.transform()
            else:
                transform = fitted(documents, config.network, join(self.out, TRANSFORM), run=run)
            auxiliary = config.auxiliary
            unlabelled = None if auxiliary is None else auxiliary.groups(read(documents), transform, run=run)
            job = self.model_copy(update={"finetune": config, "pretrained": start.url if start else None})
            work = partial(job._train, data, transform.state_dict(), unlabelled, origin, epochs)
            launch(work, workers=workers, report=report)

    def _train(
        self,
        data: LabelledData,
        transform: dict[str, Tensor],
        unlabelled: Unlabelled | None,
        origin: Origin,
        epochs: Mapping[str, int] | None,
        worker: WorkerContext,
    ) -> None:
        """The work of one worker; rank 0 writes checkpoints and the bundle."""
        config = self.finetune
        start = bundle.load(self.pretrained, bundle.EncoderBundle) if self.pretrained else None
        if start is not None:
            data = data.serving(start.features, whose=start.url)
        device = set_up(config)
        seeds = [mix("head", config.seed, head) % 2**31 for head in range(1, config.heads)]
        rankers = [_ranker(config, seed, transform, start, device) for seed in (config.seed, *seeds)]
        ranker = (rankers[0] if len(rankers) == 1 else MeanRanker(rankers)).to(device)
        auxiliary = None if unlabelled is None else AuxiliaryObjective(unlabelled, rankers, start)
        objective = RankingObjective(ranker, config, config.list_loss, auxiliary).to(device)
        fixed = [m for r in rankers for m in (r.transform, r.encoder, r.neck)] + ([auxiliary] if auxiliary else [])
        in_head = dict.fromkeys(objective.parameters(), config.rates.head_phase)
        in_full = {} if start is None else config.rates.factors(rankers)
        best = Best(ranker, config, data, self._constraints(data))
        if config.keep_head:
            best.update("start", 0)  # already a ranker: training must beat it
        head, full = (None if epochs is None else epochs.get(name, 0) for name in ("head", "full"))
        Training(objective, config, data.train, self.out, origin, worker, best).run(
            Phase(
                "head",
                "finetuning (head)",
                config.head_epochs if start else 0,
                head,
                frozen=tuple(fixed),
                factors=in_head,
                epochs_key="head_epochs",
            ),
            Phase("full", "finetuning (full)", config.epochs, full, factors=in_full, auxiliary=auxiliary),
        )
        probed: dict[str, str] = {"start": start.url} if start and config.probe_epochs else {}
        best.commit(self.out, origin=origin, **probed)

    def _constraints(self, data: LabelledData) -> Constraints | None:
        """The floors of the goals to keep, from the bundle in service on the validation groups; None without any."""
        goals, judged = self.finetune.goals, data.judged
        if goals is None or goals.maximise is None or judged is None:
            return None
        if goals.production is None:
            log.warning("finetune.goals: nothing is in service, so that nothing is kept yet")
            return Constraints(goals, {})
        opened = bundle.load(goals.production)
        url = self.splits.validation.data[0]
        # it may read features that this training leaves out, but none that the data have not
        places(opened.features, open_dataset(url).manifest.features, whose=opened.url, where=url, on_purpose=True)
        read = bundle.with_tokens_of(replace(judged, features=opened.features, tokens=()), [opened])
        values = validate_goals(opened.scorer(), read, self.finetune.validation_metric, torch.device("cpu"))
        return Constraints(goals, {goal: values[goal] + allowed for goal, allowed in goals.keep.items()})

    def _start(self, origin: Origin, report: Report) -> bundle.EncoderBundle | None:
        """The bundle to start from, the best of several if probes choose; None for random weights."""
        config, start = self.finetune, bundle.load(self.pretrained, bundle.EncoderBundle) if self.pretrained else None
        try:
            config.check_start(start.projector_layers() if start else None)
            if config.auxiliary is not None:
                config.auxiliary.method.check_encoder(start.architecture.encoder if start else config.network.encoder)
        except ValueError as error:
            raise InputError(f"{self.pretrained or 'no pretrained bundle'}: {error}") from error
        architecture = None if start is None else start.architecture
        if config.keep_head and (
            architecture is None
            or (architecture.head, architecture.context) != (config.head, config.context)
            or [*architecture.goals] != [*(config.goals.initial if config.goals else ())]
        ):
            raise InputError(
                f"{start.url if start else 'no pretrained bundle'}: keep_head needs a finetuned ranker with the same "
                "head and context as in finetune; name one, or set keep_head to false"
            )
        if start is None:
            return None
        select(self.splits.train, labelled=True).serving(start.features, whose=start.url)  # before any work starts
        if not config.probe_epochs:
            return start
        return bundle.load(self._best_of(_kept_encoders(start.url), origin, report), bundle.EncoderBundle)

    def _best_of(self, encoders: Sequence[str], origin: Origin, report: Report) -> str:
        """The encoder whose linear probe validates best, the last of equals; a resumed run reuses finished probes."""
        config = self.finetune
        shared: dict[str, Any] = {name: value for name, value in config if name in RankingConfig.model_fields}
        probe = FinetuneConfig(
            **shared, head=HeadConfig(layers=1), noise=config.noise, head_epochs=config.probe_epochs, epochs=0
        )
        metric, values = f"validation_{config.validation_metric}", {}
        for number, url in enumerate(encoders):
            out, of_probe = join(self.out, PROBES, f"{number:05d}"), {**origin, "probe": url}
            if not is_current(out, of_probe):
                job = self.model_copy(update={"out": out, "pretrained": url, "finetune": probe})
                job.work(of_probe, report=lambda _: None)
            values[url] = float(str(bundle.load(out).metrics[metric]))
            report({"probe": url, metric: values[url]})
        best = max(reversed(values), key=values.__getitem__)
        log.info(
            "starts from %s: validation %s %.4f of a linear probe, of %s",
            best, metric_label(config.validation_metric), values[best], [round(v, 4) for v in values.values()],
        )  # fmt: skip
        return best


def _kept_encoders(pretrained: str) -> list[str]:
    """The bundles that a pretraining kept, oldest first, and its last one."""
    made_by = bundle.load(pretrained).made_by
    kept = [url for url in children(join(pretrained, EPOCHS)) if read_manifest(url) is not None]
    return [*(url for url in kept if {**bundle.load(url).made_by, "epoch": 0} == {**made_by, "epoch": 0}), pretrained]


def _ranker(
    config: FinetuneConfig,
    seed: int,
    fitted_state: dict[str, Tensor],
    pretrained: bundle.EncoderBundle | None,
    device: torch.device,
) -> Ranker:
    """A ranker before finetuning, with pretrained or random weights; checks device memory for all heads."""
    torch.manual_seed(seed)
    network, kept = config.network if pretrained is None else pretrained.architecture.network, config.projector_layers
    architecture = Architecture(
        transform=network.transform,
        numbers=network.numbers,
        encoder=network.encoder,
        projector=pretrained.architecture.projector if pretrained and kept else None,
        projector_layers=kept,
        context=config.context,
        head=config.head,
        goals=config.goals.initial if config.goals else {},
        grades=config.list_loss.grades if config.list_loss else 0,
        noise=config.noise,
    )
    transform = pretrained.transform() if pretrained else FeatureTransform.from_state(fitted_state, network.transform)
    trained = config.optimizer if config.epochs else None  # probing trains only the head
    ranker = built(lambda: Ranker(architecture, transform), trained, device=device, networks=config.heads)
    if pretrained is None:
        load_initial(ranker.encoder, network.initial)
    else:
        pretrained.initialise(ranker, head=config.keep_head)
        if config.keep_head and config.goals is not None and config.goals.maximise is not None:
            ranker.weigh(pretrained.goals)  # those that were found before
    return ranker
