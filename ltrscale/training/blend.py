"""Blends: the mean of scores of rankers of any kind, with weights that validation chooses.

It chooses by greedy selection (Caruana et al. 2004) on resamples of the groups; half of each weight is equal.

Shapes: M members, N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ltrscale.arrays import Doubles, Ints
from ltrscale.batch import standardise_by_group
from ltrscale.bundle import Blend, Bundle, MetricValue, facts, load, save_blend, with_tokens_of
from ltrscale.config import Config
from ltrscale.data.dataset.relevant import at_most, only_relevant
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.scored import score_selection
from ltrscale.draws import random_bits
from ltrscale.errors import InputError
from ltrscale.origin import settings_of
from ltrscale.progress import Report, log
from ltrscale.ranking.choices import MetricName, metric_named
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.provenance import check_member, check_unseen
from ltrscale.stages.stage import LabelledStage, Origin, Settings

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
