"""Shared parts of all trainings with labels: settings, loss and data."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.config import Config, by_kind
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.relevant import check_teaches, only_relevant
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.data.stream.weighing import check_weights
from ltrscale.errors import InputError
from ltrscale.models.ranker import AnyRanker, RankerScores, side_by_side
from ltrscale.ranking.choices import METRICS, MetricName
from ltrscale.ranking.clicks import PropensityModel, dla_propensity_loss, dla_ranking_loss, with_negatives
from ltrscale.ranking.loss import Scored
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.ranking.losses import ordinal
from ltrscale.ranking.pairwise import LambdaRankConfig
from ltrscale.training.settings import OptimizerConfig, TrainingConfig


class ListLossConfig(Config):
    """RankFormer's second loss: predict the best label of each list, also of lists in which nothing is relevant."""

    alpha: float = Field(0.25, gt=0)
    """Weight of this loss beside the ranking loss (BUYL23: 0, .25 or 1)."""
    grades: int = Field(4, ge=1, le=10_000)
    """The highest label; higher labels count as this one."""


class WeightsConfig(Config):
    """Multiply each document's term by the `weights` column, such as inverse propensities of clicks."""

    kind: Literal["weights"] = "weights"
    clip: float | None = Field(None, gt=0)
    """Upper limit of the weights; empty leaves them unchanged."""


class DLAConfig(Config):
    """Dual learning algorithm: a model of which positions are examined, trained along with the ranker (Ai 2018)."""

    kind: Literal["dla"] = "dla"
    positions: int = Field(10, ge=2, le=1_000_000)
    """Positions with separate propensities; later ones share the last."""
    clip: float = Field(10.0, ge=1)
    """Upper limit of inverse propensities and inverse relevances."""


DebiasConfig = Annotated[WeightsConfig | DLAConfig, Field(discriminator="kind")]


class RankingConfig(TrainingConfig):
    """Settings of all trainings with labels."""

    loss: LossConfig = LambdaRankConfig()
    """The ranking loss to minimise."""
    debias: DebiasConfig | None = None
    """How to correct clicks for their dependence on the position; empty uses the labels unchanged."""
    negatives: int = Field(0, ge=0, le=1_000_000)
    """Random documents of other groups of the micro-batch that join each list in training, drawn anew in every step:
    label 0, weight 1, no position (SUN23, section 2.2). They keep their own features, also those that depend on the
    query, which are of another query."""
    relevant_only: bool = False
    """Learn only from the labelled groups with a relevant document. The others have no pairwise and no listwise loss;
    where most have none, as in a log of purchases, reading them takes most of the time and leaves little to learn from
    in a batch."""
    patience: int = Field(20, ge=1)
    """Stop a phase after this many epochs without a better validation metric."""
    average: float = Field(0.0, ge=0, lt=1)
    """Validate and keep a running mean of the weights after each epoch of a phase, in which earlier epochs have this
    weight; .9 averages about ten epochs, .999 all (Izmailov et al. 2018). BatchNorm statistics are computed anew for
    the mean. 0 keeps the weights of a single epoch, as in the papers."""
    validation_metric: MetricName = Field("ndcg@5", description=f"Chooses the epoch whose weights are kept: {METRICS}.")
    stream: StreamConfig = StreamConfig(docs_per_batch=1024, streams=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, clip_norm=1.0)

    @model_validator(mode="after")
    def _loss_takes_the_debiasing(self) -> Self:
        if isinstance(self.debias, WeightsConfig) and not self.loss.weighted:
            names = ", ".join(kind for kind, cls in by_kind(LossConfig).items() if cls.weighted)
            raise ValueError(f"loss.kind {self.loss.kind} takes no document weights; take one of {names}")
        if isinstance(self.debias, DLAConfig) and not self.loss.dual:
            raise ValueError(f"debias.kind dla is defined for the softmax loss, not {self.loss.kind}")
        return self


class RankingObjective(nn.Module):
    """The loss of a micro-batch, for a ranker and its propensity model, if any.

    `auxiliary` is trained beside the ranker on other data and is not part of this loss.
    """

    def __init__(
        self,
        ranker: AnyRanker,
        config: RankingConfig,
        list_loss: ListLossConfig | None = None,
        auxiliary: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.ranker, self.config, self.list_loss = ranker, config, list_loss
        # after the ranker, with which it shares the encoder: weights have the ranker's names
        self.auxiliary = auxiliary
        self.propensity = PropensityModel(config.debias.positions) if isinstance(config.debias, DLAConfig) else None

    def forward(self, groups: QueryGroups, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The summed loss of the groups with something to rank, and their number.

        The loss of a mean ranker is the mean of its parts' losses, so each part learns as if it were alone. The same
        holds for the members of one network.
        """
        if self.config.negatives:
            groups = with_negatives(groups, self.config.negatives, generator)
        scores = [scores for part in side_by_side(self.ranker) for scores in part.score(groups).by_member()]
        with torch.autocast(groups.features_NF.device.type, enabled=False):  # bfloat16 would round ranks and gains
            losses = [self._of_goals(each, groups, generator) for each in scores]
        loss_Q = torch.stack([loss_Q for loss_Q, _ in losses]).mean(0)
        return loss_Q.sum(), losses[0][1].sum()

    def _of_goals(self, scores: RankerScores, groups: QueryGroups, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The losses of one head; of several their weighted sum, in the groups in which any has something to rank."""
        if scores.weights_G is None:
            return self._losses(scores, groups, generator)
        assert groups.goals_NG is not None
        labels = groups.goals_NG.unbind(1)
        each = [
            self._losses(of_head, replace(groups, labels_N=labels_N), generator)
            for of_head, labels_N in zip(scores.by_goal(), labels, strict=True)
        ]
        loss_GQ = torch.stack([loss_Q for loss_Q, _ in each])
        return scores.weights_G @ loss_GQ, torch.stack([defined_Q for _, defined_Q in each]).any(0)

    def _losses(self, scores: RankerScores, groups: QueryGroups, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The loss of each group, 0 where there is nothing to rank, and a mask of the groups with something to rank."""
        scores_N, grades_QC = scores.scores_N, scores.grades_QC
        assert groups.labels_N is not None
        if self.propensity is not None:
            loss_Q, defined_Q = self._dual(scores_N, groups)
        else:
            scored = Scored(scores_N, groups.labels_N, groups.offsets_Q1, self._weights(groups), generator)
            loss_Q, defined_Q = self.config.loss.losses(scored), self.config.loss.counted(*scored[1:3])
        if self.list_loss is not None and grades_QC is not None:
            defined_Q = groups.lengths_Q > 0  # the best label is defined even if there is nothing to rank
            best_Q = torch.segment_reduce(groups.labels_N, "max", offsets=groups.offsets_Q1)
            loss_Q = loss_Q + self.list_loss.alpha * defined_Q * ordinal(grades_QC, best_Q)
        return loss_Q, defined_Q

    def _weights(self, groups: QueryGroups) -> Tensor | None:
        if not isinstance(self.config.debias, WeightsConfig):
            return None
        if groups.weights_N is None:
            raise InputError(
                "debias.kind weights: the data set has no `weights` column; write one with jobs.relabel, or map one in "
                "prepare"
            )
        weights_N = groups.weights_N.nan_to_num(1.0)  # NaN where a group has no weights
        return weights_N if self.config.debias.clip is None else weights_N.clamp(max=self.config.debias.clip)

    def _dual(self, scores_N: Tensor, groups: QueryGroups) -> tuple[Tensor, Tensor]:
        """Both losses of the dual learning algorithm, summed, and a mask of the groups with clicks."""
        assert self.propensity is not None
        assert isinstance(self.config.debias, DLAConfig)
        assert groups.labels_N is not None
        if groups.positions_N is None:
            raise InputError("debias.kind dla: the data set has no `positions` column; map one in prepare")
        clip = self.config.debias.clip
        clicks_N = groups.labels_N  # not refined ones, which are all above 0
        examination_N = self.propensity(groups.positions_N)
        loss_Q = dla_ranking_loss(
            scores_N, clicks_N, groups.offsets_Q1, examination_logits_N=examination_N, clip=clip
        ) + dla_propensity_loss(
            examination_N,
            clicks_N,
            groups.offsets_Q1,
            positions_N=groups.positions_N,
            scores_N=scores_N,
            clip=clip,
        )
        return loss_Q, torch.segment_reduce(clicks_N, "max", offsets=groups.offsets_Q1) > 0


@dataclass(frozen=True)
class LabelledData:
    """The groups that train a ranker, and those that choose the epoch whose weights are kept."""

    train: Selection
    validation: Selection | None = None
    """None if the last epoch's weights are kept."""
    judged: Selection | None = None
    """The validation groups with a relevant document; only these define a metric."""

    @classmethod
    def from_splits(
        cls,
        train: Split,
        validation: Split | None,
        *,
        without: Collection[str],
        config: RankingConfig | None = None,
    ) -> Self:
        """The labelled groups of the splits, with the features of the training split, without the files `without`.

        The config says whether to use only training groups with a relevant document, and whether to check the weights:
        weights that leave documents out cause a warning.

        Raises:
            InputError: as `select`, no list of a split has two labels, or the validation split lacks a feature.
        """
        groups = select(train, labelled=True, without=without)
        relevant = config is not None and config.relevant_only
        if validation is None:
            return cls(only_relevant(groups) if relevant else groups)
        judges = select(validation, labelled=True, without=without)
        check_teaches(groups, "train")
        check_teaches(judges, "validation")
        data = cls(only_relevant(groups) if relevant else groups, judges, only_relevant(judges))
        if config is not None and isinstance(config.debias, WeightsConfig):
            check_weights(data.train)
        return data.serving(data.train.features, whose="the training split", where="the validation split")

    def serving(
        self, features: Sequence[Feature], *, whose: str, where: str = "the data", on_purpose: bool = False
    ) -> Self:
        """The same groups with these features, as in `Selection.serving`."""
        return self.each(lambda groups: groups.serving(features, whose=whose, where=where, on_purpose=on_purpose))

    def each(self, change: Callable[[Selection], Selection]) -> Self:
        """The same data with a function applied to every selection."""
        return type(self)(**{name: groups and change(groups) for name, groups in vars(self).items()})
