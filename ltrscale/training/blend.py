"""The blend of rankers of any kind: the mean of their scores, with weights that validation chooses.

Equal weights of all but clearly poor members, or the choice of Caruana et al. (2004) with a guard against luck.

Shapes: M members, N documents, Q groups, Q1 = Q + 1 offsets, K folds.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from scipy import stats
from torch import Tensor

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.batch import standardise_by_group
from ltrscale.bundle import Blend, Bundle, MetricValue, facts, load, member_files, save_blend, with_tokens_of
from ltrscale.config import Config
from ltrscale.data.dataset.selection import Selection, only_relevant, select
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.scored import score_selection
from ltrscale.draws import random_bits
from ltrscale.errors import InputError
from ltrscale.progress import Report, log
from ltrscale.ranking.choices import metric_named
from ltrscale.stages.stage import BundleUrl, LabelledStage, Origin, check_member

_BEYOND_CHANCE = 2.0
"""Standard errors. With one, some hundred groups of MQ2008 took the luckiest member in two folds of three."""
_CLEARLY_WORSE = 2.5
"""Standard errors. With two, one of eight members that are alike seemed so in every fifth sample of 60 groups."""
Judge = Callable[[Tensor], Doubles]
"""The metric [Q] of each group from scores [N]."""


_LEARNT = (
    "has learnt from groups of the validation split, which would give it too much weight; set blend.weights to equal, "
    "or name other validation periods"
)


class BlendConfig(Config):
    """How the weights of a mean are chosen."""

    weights: Literal["greedy", "equal"] | dict[str, Annotated[float, Field(gt=0)]] = "greedy"
    """`greedy` adds the member that helps validation most, again and again, so that a member may count several times;
    that must be better than equal weights, beyond chance, on groups that chose nothing. Until then weights are equal,
    without members that are clearly worse than the best one and that the blend is better without, on validation.
    `equal` takes all members alike. Or the weights themselves, by the names of the members."""
    rounds: int = Field(25, ge=1)
    """Members that are added, at most; it ends where none helps."""
    folds: int = Field(5, ge=2)
    """Parts of the validation groups: the mean that the others choose is judged on each."""
    groups: int = Field(5000, ge=2)
    """Validation groups with a relevant document that choose: a random sample if there are more."""
    metric: str = "ndcg@5"
    """What the weights raise: ndcg@K, mrr, map or another one of `jobs.evaluate`."""
    seed: int = 0
    """Of the folds."""


class _Blend(Config):
    settings: BlendConfig
    names: tuple[str, ...]


class BlendJob(LabelledStage):
    """Make a mean of trained rankers one bundle, which holds them all."""

    stage: ClassVar = "blend"
    bundles: dict[str, BundleUrl] = Field(min_length=1)
    """Rankers by name; their features may differ."""
    blend: BlendConfig = BlendConfig()

    def check(self) -> None:
        """Refuse splits that overlap, weights of other members, and a choice by groups that a member has learnt."""
        super().check()
        if isinstance(self.blend.weights, dict) and self.blend.weights.keys() != self.bundles.keys():
            raise InputError(f"blend.weights: name the members {', '.join(self.bundles)}, each with its weight")
        if self.blend.weights == "greedy":
            for name, url in self.bundles.items():
                check_member(name, url, self.splits.validation, _LEARNT, chosen_on=True)

    def own_settings(self) -> _Blend:
        """The settings, and the names of the members, which decide between equals."""
        return _Blend(settings=self.blend, names=tuple(self.bundles))

    def work(self, origin: Origin, report: Report) -> None:
        """Score the validation groups with each member, choose weights, and commit the bundle.

        Raises:
            InputError: a bundle is no ranker or has features that the data lack, or a split has no labelled group.
        """
        train = select(self.splits.train, labelled=True)
        opened = {name: load(url) for name, url in self.bundles.items()}
        weights, metrics = self._weighed(opened)
        log.info("blend: %s", ", ".join(f"{weight:.2f} {name}" for name, weight in weights.items()))
        if without := [name for name in opened if name not in weights]:
            log.info("blend: without %s, for validation is no better with it", ", ".join(without))
        read = {feature.name for name in weights for feature in opened[name].features}
        train = train.serving([feature for feature in train.features if feature.name in read], whose=self.out)
        report(metrics)
        about = facts(train, self.blend, metrics=metrics, made_by=origin)
        about["files"] = {
            path: data for name in weights for path, data in member_files(name, self.bundles[name]).items()
        }
        save_blend(self.out, Blend(weights=weights), **about)

    def _weighed(self, opened: Mapping[str, Bundle]) -> tuple[dict[str, float], dict[str, MetricValue]]:
        """The weights, and the metrics of validation; none where weights are given, which it does not judge."""
        config = self.blend
        if isinstance(config.weights, dict):
            total = sum(config.weights.values())
            return {name: config.weights[name] / total for name in opened}, {}
        judged = self._judged()
        judge, scores_MN = _scores(judged, opened, config.metric)
        bits_Q = random_bits((config.seed, "blend"), np.arange(judged.n_groups))
        folds_Q = (bits_Q % np.uint64(config.folds)).astype(np.int64)
        given_M = np.full(len(opened), 1 / len(opened)) if config.weights == "equal" else None
        chosen = choose(scores_MN, judge, folds_Q, config, given_M)
        weights = {name: weight for name, weight in zip(opened, chosen.weights_M.tolist(), strict=True) if weight}
        return weights, {f"validation_{config.metric}": chosen.value, "held_out": chosen.held_out}

    def _judged(self) -> Selection:
        """The validation groups that choose."""
        split = self.splits.validation
        judged = only_relevant(select(split, labelled=True))
        if judged.n_groups <= self.blend.groups or split.size:
            return judged
        return only_relevant(select(split.replace(relevant_groups=self.blend.groups), labelled=True))


def _scores(judged: Selection, opened: Mapping[str, Bundle], metric: str) -> tuple[Judge, Tensor]:
    """The metric of the judged groups, and the standardised scores of each member, shape [M, N]."""
    judged = with_tokens_of(judged, opened.values())
    parts = [groups.labels_N for groups in iterate(judged)]
    scores = [score_selection(judged, member.scorer(features=judged.features), name) for name, member in opened.items()]
    first = scores[0]
    labels_N = torch.cat([labels_N for labels_N in parts if labels_N is not None])  # in the order of files, as scores
    named = metric_named(metric)
    scores_MN = torch.stack([standardise_by_group(each.scores_N, first.offsets_Q1) for each in scores])
    return lambda scores_N: named.of(scores_N, labels_N, first.offsets_Q1).double().numpy(), scores_MN


class Chosen(NamedTuple):
    """Weights that add up to 1, and the metric of the groups that chose, and of the same by others' choice."""

    weights_M: Doubles
    value: float
    held_out: float


def choose(
    scores_MN: Tensor, judge: Judge, folds_Q: Ints, config: BlendConfig, given_M: Doubles | None = None
) -> Chosen:
    """The weights of the members: equal, unless a greedy choice is better, beyond chance, on groups that chose nothing.

    A greedy choice overfits the groups that choose, the more the more members there are. So each fold is judged by the
    weights that are chosen on the others, and the choice is taken, on all groups, only if its mean is above that of
    equal weights by more than two standard errors of the difference. Equal weights are those of all members but
    clearly poor ones, which would spoil the mean. Given weights stay.

    Example:
        >>> scores_MN = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]])
        >>> alone = choose(scores_MN[:1], lambda scores_N: scores_N.double().numpy(), np.arange(3), BlendConfig())
        >>> alone.weights_M.tolist(), alone.value
        ([1.0], 0.5)
    """

    def equal(among_Q: Bools) -> Doubles:
        return _without_poor(scores_MN, judge, among_Q)

    def greedy(among_Q: Bools) -> Doubles:
        return _greedy(scores_MN, judge, among_Q, config.rounds)

    def values(weights_M: Doubles) -> Doubles:
        return judge(torch.from_numpy(weights_M) @ scores_MN.double())

    def held_out(rule: Callable[[Bools], Doubles]) -> Doubles:
        values_Q = np.zeros(len(folds_Q))
        for fold in np.unique(folds_Q):
            out_Q: Bools = np.asarray(folds_Q == fold)
            values_Q[out_Q] = values(rule(~out_Q))[out_Q]
        return values_Q

    everything_Q = np.ones(len(folds_Q), np.bool_)
    if given_M is not None or len(scores_MN) == 1 or len(np.unique(folds_Q)) < 2:
        weights_M = equal(everything_Q) if given_M is None else given_M
        return Chosen(weights_M, value := float(values(weights_M).mean()), value)
    of_equal_Q, of_greedy_Q = held_out(equal), held_out(greedy)
    gains_Q = of_greedy_Q - of_equal_Q
    mean, error = gains_Q.mean(), gains_Q.std(ddof=1) / len(gains_Q) ** 0.5
    log.info("blend: greedy - equal %+.4f, error %.4f, on groups that chose nothing", mean, error)
    is_taken = mean > _BEYOND_CHANCE * error
    weights_M = (greedy if is_taken else equal)(everything_Q)
    of_rule_Q = of_greedy_Q if is_taken else of_equal_Q
    return Chosen(weights_M, float(values(weights_M).mean()), float(of_rule_Q.mean()))


def _without_poor(scores_MN: Tensor, judge: Judge, among_Q: Bools) -> Doubles:
    """Equal weights of all members but those clearly worse than the best one that the mean is better without."""
    values_MQ = np.stack([judge(scores_N) for scores_N in scores_MN])[:, among_Q]
    behind_MQ = values_MQ - values_MQ[values_MQ.mean(1).argmax()]
    others = behind_MQ.shape[1] - 1
    # one group alone shows nothing, and few groups know their spread badly
    error_M = behind_MQ.std(1) / others**0.5 if others else np.full(len(scores_MN), np.inf)
    clearly = stats.t.isf(stats.norm.sf(_CLEARLY_WORSE), max(others, 1))
    taken_M = np.ones(len(scores_MN), np.bool_)

    def of_mean() -> float:
        return float(judge(scores_MN[torch.from_numpy(taken_M)].mean(0))[among_Q].mean())

    for member in behind_MQ.mean(1).argsort():  # the worst first
        if behind_MQ[member].mean() < -clearly * error_M[member]:
            before = of_mean()
            taken_M[member] = False
            taken_M[member] = of_mean() <= before
    return np.asarray(taken_M / taken_M.sum())


def _greedy(scores_MN: Tensor, judge: Judge, among_Q: Bools, rounds: int) -> Doubles:
    """The weights of the members that help most, added one by one, with replacement; the first of equals."""
    counts_M = np.zeros(len(scores_MN))
    total_N, before = torch.zeros(scores_MN.shape[1], dtype=torch.float64), -np.inf
    for _ in range(rounds):
        values_M = [judge(total_N + scores_N)[among_Q].mean() for scores_N in scores_MN]
        added = int(np.argmax(values_M))
        if values_M[added] <= before:
            break
        before, total_N = values_M[added], total_N + scores_MN[added]
        counts_M[added] += 1
    return np.asarray(counts_M / counts_M.sum())
