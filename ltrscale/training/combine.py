"""Networks combined by their mean score, or by a linear layer over their embeddings (HOU24, A.3.7)."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field

from ltrscale import bundle
from ltrscale.data.dataset.selection import select
from ltrscale.data.stream.batches import check_batches
from ltrscale.errors import InputError
from ltrscale.models.combine import How, combine_rankers
from ltrscale.progress import Report
from ltrscale.runtime.launch import launch
from ltrscale.runtime.workers import ONE, WorkerContext
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.stage import LabelledStage, Origin
from ltrscale.training.best import Best
from ltrscale.training.phases import Phase, Training
from ltrscale.training.ranking import LabelledData, RankingConfig, RankingObjective
from ltrscale.training.resumption import TrainingStage, begin
from ltrscale.training.settings import OptimizerConfig, set_up


class CombineConfig(RankingConfig):
    """How to combine finetuned rankers; every setting but `how` concerns the layer that `concat` trains."""

    how: How = "mean"
    """`mean` of the scores, nothing to train; `concat` trains one linear layer over the rankers' last embeddings."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout between the joint embedding and the layer; HOU24 has .7 on MSLR-WEB30K and Istella-S, 0 on Yahoo."""
    epochs: int = Field(100, ge=1)
    """Epochs of the layer's training."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)


class CombineJob(LabelledStage, TrainingStage):
    """Combine several finetuned rankers into one."""

    stage: ClassVar = "combine"
    bundles: tuple[BundleUrl, ...] = Field(min_length=1, max_length=100)
    """Finetuned neural rankers of the same features."""
    combine: CombineConfig = CombineConfig()

    def work(self, origin: Origin, report: Report) -> None:
        """Combine, which may train, and commit a bundle that holds all the rankers.

        Raises:
            InputError: a bundle is not that of one network that scores, or was made for other features, a split has no
                labelled group, or an interrupted run into `out` read other data.
            Stopped: the run was asked to stop.
        """
        config, (train, validation) = self.combine, (self.splits.train, self.splits.validation)
        (first, *_) = _opened(self.bundles)
        select(train, labelled=True).serving(first.features, whose=first.url)  # raises before any work starts
        splits = {"train": train, "validation": validation}
        preflight = begin(splits, config.preflight, self.out, origin=origin, report=report)
        data = LabelledData.from_splits(train, validation, without=preflight.without, config=config)
        trains = config.how == "concat"
        if trains:
            check_batches(data.train, config.stream, world=self.workers.most, title="combining")
        work = partial(self._combine, data, origin)
        launch(work, workers=self.workers if trains else ONE, report=report)

    def _combine(self, data: LabelledData, origin: Origin, worker: WorkerContext) -> None:
        """The work of one worker; rank 0 writes checkpoints and the bundle."""
        config, opened = self.combine, _opened(self.bundles)
        torch.manual_seed(config.seed)
        data = data.serving(opened[0].features, whose=opened[0].url)
        data = data.each(partial(bundle.with_tokens_of, opened=opened))
        device = set_up(config)
        model = combine_rankers([one.ranker() for one in opened], how=config.how, dropout=config.dropout).to(device)
        best = Best(model, config, data)
        if model.learns:
            objective = RankingObjective(model, config).to(device)
            phase = Phase("concat", "finetuning (concat)", config.epochs, frozen=tuple(model.parts))
            Training(objective, config, data.train, self.out, origin, worker, best).run(phase)
        else:
            best.update("mean", 0)
        best.commit(self.out, origin=origin)


def _opened(bundles: Sequence[str]) -> list[bundle.RankerBundle]:
    """The bundles to combine; all must have the features of the first, because the combined network has one input."""
    opened = [bundle.load(url, bundle.RankerBundle) for url in bundles]
    for one in opened[1:]:
        if one.features != opened[0].features:
            raise InputError(
                f"{one.url}: its features are not those of {opened[0].url} in the same order; combine rankers that "
                "were trained on the same features, or name these as bundles of a method of kind stack"
            )
    return opened
