"""Rankers made of several: networks as one network (HOU24, A.3.7), or the mean of the scores of rankers of any kind.

Networks have their mean score, or a linear layer over their embeddings. The weights of a blend, the mean of rankers of
any kind, are chosen by validation: by greedy selection (Caruana et al. 2004) on resamples of the groups; half of each
weight is equal.

Shapes: M members, N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ltrscale.arrays import Doubles, Ints
from ltrscale.batch import standardise_by_group
from ltrscale.bundle import (
    Blend,
    Bundle,
    MetricValue,
    RankerBundle,
    facts,
    load,
    save_blend,
    with_tokens_of,
)
from ltrscale.config import Config
from ltrscale.data.dataset.relevant import at_most, only_relevant
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.stream.batches import check_batches, iterate
from ltrscale.data.stream.scored import score_selection
from ltrscale.draws import random_bits
from ltrscale.errors import InputError
from ltrscale.models.ranker import How, combine_rankers
from ltrscale.origin import settings_of
from ltrscale.progress import Report, log
from ltrscale.ranking.choices import MetricName, metric_named
from ltrscale.runtime.launch import launch
from ltrscale.runtime.workers import ONE, WorkerContext
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.stage import LabelledStage, Origin, Settings
from ltrscale.stages.unseen import check_member, check_unseen
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
        data = data.each(partial(with_tokens_of, opened=opened))
        device = set_up(config)
        model = combine_rankers([one.ranker() for one in opened], how=config.how, dropout=config.dropout).to(device)
        best = Best(model, config, data)
        if config.how == "concat":
            objective = RankingObjective(model, config).to(device)
            phase = Phase("concat", "finetuning (concat)", config.epochs, frozen=tuple(model.parts))
            Training(objective, config, data.train, self.out, origin, worker, best).run(phase)
        else:
            best.update("mean", 0)
        best.commit(self.out, origin=origin)


def _opened(bundles: Sequence[str]) -> list[RankerBundle]:
    """The bundles to combine; all must have the features of the first, because the combined network has one input."""
    opened = [load(url, RankerBundle) for url in bundles]
    for one in opened[1:]:
        if one.features != opened[0].features:
            raise InputError(
                f"{one.url}: its features are not those of {opened[0].url} in the same order; combine rankers that "
                "were trained on the same features, or name these as bundles of a method of kind stack"
            )
    return opened


Judge = Callable[[Tensor], Doubles]
"""Maps scores [N] to the metric of each group [Q]."""


_LEARNT = (
    "has learnt from groups of the validation split, which would give it too much weight; set blend.weights to equal, "
    "or name other validation periods"
)

ROUNDS, RESAMPLES = 25, 20
"""Members that a greedy choice adds, at most; and choices, each on as many groups, drawn with replacement."""
_GROUPS = 5000
"""Validation groups with a relevant document that choose: a random sample if there are more."""


class BlendConfig(Config):
    """How the weights of a mean are chosen."""

    fixed: ClassVar = {"rounds": 25, "resamples": 20, "groups": 5000}

    weights: Literal["greedy", "equal"] | dict[str, Annotated[float, Field(gt=0)]] = "greedy"
    """`greedy` lets validation choose, on each of several resamples of its groups: the member that helps most is added,
    again and again, so that it may count several times. Half of a weight is the mean of these choices, half is equal
    among all that were ever chosen; others have none. `equal` takes all members alike. Or the weights themselves, by
    the names of the members."""
    metric: MetricName = "ndcg@5"
    """What the weights raise: ndcg@K, mrr, map or another one of `jobs.evaluate`."""
    seed: int = 0
    """Of the resamples."""


class BlendJob(LabelledStage):
    """Make a mean of trained rankers one bundle, which holds them all."""

    stage: ClassVar = "blend"
    bundles: dict[str, BundleUrl] = Field(min_length=1, max_length=100)
    """Rankers by name; their features may differ."""
    blend: BlendConfig = BlendConfig()

    def check(self) -> None:
        """Refuse overlapping splits, weights of other members, and choosing on groups that a member has learnt from."""
        super().check()
        if isinstance(self.blend.weights, dict) and self.blend.weights.keys() != self.bundles.keys():
            raise InputError(f"blend.weights: name the members {', '.join(self.bundles)}, each with its weight")
        if self.blend.weights == "greedy":
            for name, url in self.bundles.items():
                check_member(name, url, self.splits.validation, _LEARNT, chosen_on=True)

    def own_settings(self) -> Settings:
        """The settings, and the names of the members, whose order breaks ties."""
        return {"settings": settings_of(self.blend), "names": list(self.bundles)}

    def work(self, origin: Origin, report: Report) -> None:
        """Score the validation groups with each member, choose weights, and commit the bundle.

        Raises:
            InputError: a bundle is not a ranker or has features that the data lack, or a split has no labelled group.
        """
        train = select(self.splits.train, labelled=True)
        opened = {name: load(url) for name, url in self.bundles.items()}
        for member in opened.values():
            member.scorer(features=train.features)  # raises for other bundles and missing features
        weights, metrics = self._weighed(opened)
        log.info("blend: %s", ", ".join(f"{weight:.2f} {name}" for name, weight in weights.items()))
        if without := [name for name in opened if name not in weights]:
            log.info("blend: without %s, which no resample of the validation groups chose", ", ".join(without))
        read = {feature.name for name in weights for feature in opened[name].features}
        train = train.serving(
            [feature for feature in train.features if feature.name in read], whose=self.out, on_purpose=True
        )
        report(metrics)
        about = facts(train, self.blend, metrics=metrics, made_by=origin)
        save_blend(self.out, Blend(weights=weights), about, {name: self.bundles[name] for name in weights})

    def _weighed(self, opened: Mapping[str, Bundle]) -> tuple[dict[str, float], dict[str, MetricValue]]:
        """The weights and validation metrics; no metrics if weights are given or a member has learnt the groups."""
        config = self.blend
        if isinstance(config.weights, dict):
            total = sum(config.weights.values())
            return {name: config.weights[name] / total for name in opened}, {}
        if config.weights == "equal" and not self._is_unseen():
            return dict.fromkeys(opened, 1 / len(opened)), {}
        judged = only_relevant(select(self.splits.validation, labelled=True))
        judge, scores_MN = _scores(at_most(judged, _GROUPS, config.seed, "blend"), opened, config.metric)
        equal_M = np.full(len(opened), 1 / len(opened))
        weights_M = choose(scores_MN, judge, config) if config.weights == "greedy" else equal_M
        values_Q = judge(torch.from_numpy(weights_M) @ scores_MN.double())
        metrics: dict[str, MetricValue] = {f"validation_{config.metric}": values_Q.mean()} if len(values_Q) else {}
        return {name: weight for name, weight in zip(opened, weights_M.tolist(), strict=True) if weight}, metrics

    def _is_unseen(self) -> bool:
        """True if no member has learnt from the validation groups."""
        try:
            for url in self.bundles.values():
                check_unseen(url, self.splits.validation, chosen_on=True)
        except InputError as error:
            log.info("blend: nothing is measured on validation: %s", error)
            return False
        return True


def _scores(judged: Selection, opened: Mapping[str, Bundle], metric: str) -> tuple[Judge, Tensor]:
    """The metric of the judged groups that define it, and the standardised scores of each member, shape [M, N]."""
    judged = with_tokens_of(judged, opened.values())
    parts = [groups.labels_N for groups in iterate(judged)]
    scores = [score_selection(judged, member.scorer(features=judged.features), name) for name, member in opened.items()]
    first = scores[0]
    labels_N = torch.cat([labels_N for labels_N in parts if labels_N is not None])  # in file order, like the scores
    named = metric_named(metric)
    scores_MN = torch.stack([standardise_by_group(each.scores_N, first.offsets_Q1) for each in scores])
    defined_Q = ~named.values(labels_N, labels_N, first.offsets_Q1).isnan()

    def judge(scores_N: Tensor) -> Doubles:
        return named.values(scores_N, labels_N, first.offsets_Q1)[defined_Q].double().numpy()

    return judge, scores_MN


def choose(scores_MN: Tensor, judge: Judge, config: BlendConfig) -> Doubles:
    """The weights [M] of the members, summing to 1: half equal, half the mean of greedy choices on resamples.

    A member that no resample chooses gets weight 0. A greedy choice overfits the groups it sees, and equal weights give
    a poor member as much say as a good one. The mean over resamples reduces the overfitting (Caruana, Munson and
    Niculescu-Mizil 2006, who draw members). With some hundred groups, half of it was best (docs/auto.md).

    Raises:
        InputError: no group defines the metric.

    Example:
        >>> scores_MN = torch.tensor([[1.0, 0.0, 0.9], [0.0, 1.0, 0.9]])
        >>> choose(scores_MN[:1], lambda scores_N: scores_N.double().numpy(), BlendConfig()).tolist()
        [1.0]
    """

    @cache
    def values_of(counts: tuple[int, ...]) -> Doubles:
        """The metric [Q] of the scores summed with each member counted this often."""
        return judge(torch.tensor(counts, dtype=torch.float64) @ scores_MN.double())

    members = len(scores_MN)
    groups = len(values_of((1,) * members))
    if groups == 0:
        raise InputError(f"blend.metric: no validation group defines {config.metric}; name another, or equal weights")
    resampled = np.zeros(members)
    for number in range(RESAMPLES):
        drawn_Q = random_bits((config.seed, "blend", number), np.arange(groups)) % np.uint64(groups)
        times_Q = np.bincount(drawn_Q.astype(np.int64), minlength=groups)
        resampled += _greedy(values_of, members, times_Q)
    chosen = resampled > 0
    return np.asarray((chosen / chosen.sum() + resampled / RESAMPLES) / 2)


def _greedy(values_of: Callable[[tuple[int, ...]], Doubles], members: int, times_Q: Ints) -> Doubles:
    """Weights from adding the best member one by one, the first of equals; `times_Q` counts each group."""
    counts, highest = (0,) * members, -np.inf
    for _ in range(ROUNDS):
        more = [(*counts[:m], counts[m] + 1, *counts[m + 1 :]) for m in range(members)]
        values = [float(values_of(each) @ times_Q) for each in more]
        best = int(np.argmax(values))
        if values[best] <= highest:
            break
        counts, highest = more[best], values[best]
    return np.array(counts) / sum(counts)
