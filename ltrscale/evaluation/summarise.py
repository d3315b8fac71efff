"""From the metrics of every group and trial to means, intervals and comparisons: is one method better than another?

The query group is the unit: a method with several trials enters with each group's mean over its trials, so that a
difference generalises to new queries, not to new seeds. Both resamplings draw the same groups or signs for all columns,
which keeps methods and metrics paired.

Shapes: Q groups, t trials of one method, K methods, M metrics or columns (methods, metrics), S resamples. NaN marks a
group that a metric leaves undefined.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ltrscale.config import Config

Floats = NDArray[np.float64]
_BLOCK = 1 << 22
_INTERVAL = (0.025, 0.975)


def bootstrap_means(values_QM: Floats, *, samples: int, seed: int) -> Floats:
    """Means of each column over bootstrap resamples of the groups, shape [S, M] (Efron 1979).

    Each resample draws Q of the Q groups with replacement; its mean leaves out undefined values, and is NaN if it drew
    no others. Percentiles of column differences give paired intervals; with fewer than about 30 groups these are too
    narrow.

    Example:
        >>> means_SM = bootstrap_means(np.array([[0.0], [1.0]]), samples=1000, seed=0)
        >>> sorted(set(means_SM[:, 0].tolist()))
        [0.0, 0.5, 1.0]
    """
    rng, (q, m) = np.random.default_rng(seed), values_QM.shape
    if q == 0:
        return np.full((samples, m), np.nan)
    defined_QM = ~np.isnan(values_QM)
    columns_Q2M = np.concatenate([np.where(defined_QM, values_QM, 0.0), defined_QM], axis=1)
    sums_S2M = np.zeros((samples, 2 * m))
    for first, last in _blocks(samples, q):
        draws_SQ = rng.integers(0, q, size=(last - first, q))
        draws_SQ += np.arange(last - first)[:, None] * q  # separate ranges, so that one bincount counts all resamples
        times_SQ = np.bincount(draws_SQ.ravel(), minlength=draws_SQ.size).reshape(draws_SQ.shape)
        sums_S2M[first:last] = times_SQ.astype(np.float64) @ columns_Q2M
    with np.errstate(invalid="ignore"):
        return np.asarray(sums_S2M[:, :m] / sums_S2M[:, m:])


def sign_flip_p(differences_QM: Floats, *, samples: int, seed: int) -> Floats:
    """Two-sided p value of each column's mean difference by the paired randomisation test, shape [M] (Fisher 1935).

    If two methods are equally good, the sign of each group's difference is a coin toss. So p is the share of random
    sign patterns whose mean is at least as far from 0; the observed pattern counts as one of them, so that p is never
    0. Columns without a difference, or without a group, have p = 1.

    Example:
        >>> p_M = sign_flip_p(np.array([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [1.0, -1.0]]), samples=10_000, seed=0)
        >>> [round(float(p), 2) for p in p_M]  # 2 of the 16 patterns are as far out as the first column
        [0.12, 1.0]
    """
    rng, (q, m) = np.random.default_rng(seed), differences_QM.shape
    filled_QM = np.nan_to_num(differences_QM, nan=0.0)
    total_M = filled_QM.sum(axis=0)
    limit_M = np.abs(total_M) * (1 - 1e-9)  # equal sums differ by rounding
    as_far_M = np.ones(m)
    for first, last in _blocks(samples, q):
        kept_SQ = rng.integers(0, 2, size=(last - first, q), dtype=np.int8).astype(np.float64)
        # the sum with random signs is that of the kept groups minus that of the others: twice the first minus all
        as_far_M += (np.abs(2 * kept_SQ @ filled_QM - total_M) >= limit_M).sum(axis=0)
    return np.asarray(as_far_M / (samples + 1))


def holm(p_M: Floats) -> Floats:
    """P values adjusted for testing several methods (Holm 1979), shape [M].

    Example:
        >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
        [0.03, 0.06, 0.06]
    """
    order_M = np.argsort(p_M, kind="stable")
    factors_M = np.arange(len(p_M), 0, -1)
    adjusted_M = np.empty_like(p_M)
    adjusted_M[order_M] = np.minimum(np.maximum.accumulate(p_M[order_M] * factors_M), 1.0)
    return adjusted_M


def _blocks(samples: int, groups: int) -> Iterator[tuple[int, int]]:
    """Cut the resamples into blocks that draw about four million groups each, which bounds memory."""
    size = max(1, _BLOCK // max(groups, 1))
    for first in range(0, samples, size):
        yield first, min(first + size, samples)


class Summary(Config):
    """A metric of one method over query groups; None where no group defines it."""

    mean: float | None
    """Mean over the groups where the metric is defined, and over trials."""
    low: float | None
    """Lower end of the 95% bootstrap interval of the mean over groups."""
    high: float | None
    """Upper end."""
    trials: tuple[float | None, ...]
    """The mean of each trial."""
    std_error: float | None
    """Standard error of the mean over trials; None with one trial."""
    groups: int
    """Groups where the metric is defined."""
    undefined: int
    """Groups without a relevant document, where it is undefined."""
    as_zero: float | None
    """The mean with undefined values counted as 0."""
    as_one: float | None
    """The mean with undefined values counted as 1."""


class Comparison(Config):
    """A method against the baseline, on the groups where both are defined; positive differences favour the method."""

    difference: float
    low: float
    """Lower end of the 95% bootstrap interval of the difference."""
    high: float
    """Upper end."""
    p: float
    """Two-sided p value of the sign-flip test."""
    p_holm: float
    """The p value, adjusted for the number of compared methods."""


class Scope(Config):
    """Results on some of the groups, by metric."""

    summaries: dict[str, Summary]
    comparisons: dict[str, Comparison]
    """Comparisons with the baseline; none for the baseline itself, nor for a metric that no group defines."""


def scopes(
    values_K: Sequence[Floats], metrics: Sequence[str], *, baseline: int | None, samples: int, seed: int
) -> list[Scope]:
    """Summaries of each method over the given groups, and comparisons with the baseline.

    Args:
        values_K: for each method the metrics of every group and trial, [Q, t, M]; methods may differ in t.
        metrics: names of the M metrics.
        baseline: index of the method to compare the others with, or None.
        samples: bootstrap resamples, and random sign patterns of the test.
        seed: of the resampling.

    Example:
        >>> worse, better = scopes([np.zeros((9, 1, 1)), np.ones((9, 2, 1))], ["map"], baseline=0, samples=99, seed=0)
        >>> better.summaries["map"].mean, better.comparisons["map"].difference
        (1.0, 1.0)
    """
    values_QKM = np.stack([values_QtM.mean(axis=1) for values_QtM in values_K], axis=1)
    q, k, m = values_QKM.shape
    means_SKM = bootstrap_means(values_QKM.reshape(q, k * m), samples=samples, seed=seed).reshape(samples, k, m)
    comparisons: list[dict[str, Comparison]] = [{} for _ in values_K]
    if baseline is not None:
        p_KM = _p_values(values_QKM, baseline, samples, seed)
        comparisons = _comparisons(values_QKM, means_SKM, p_KM, metrics, baseline)
    return [
        Scope(
            summaries={metric: _summary(values_K[i][:, :, j], means_SKM[:, i, j]) for j, metric in enumerate(metrics)},
            comparisons=comparisons[i],
        )
        for i in range(k)
    ]


def _summary(values_Qt: Floats, means_S: Floats) -> Summary:
    """One metric of one method; it is defined on the same groups in all trials, for that depends only on labels."""
    defined_Q = ~np.isnan(values_Qt[:, 0])
    n, undefined = int(defined_Q.sum()), int((~defined_Q).sum())
    total_t = values_Qt[defined_Q].sum(axis=0)
    trials = [total / n if n else math.nan for total in total_t.tolist()]
    mean = float(np.mean(trials))
    low, high = np.nanquantile(means_S, _INTERVAL) if n else (math.nan, math.nan)
    return Summary(
        mean=_known(mean),
        low=_known(low),
        high=_known(high),
        trials=tuple(map(_known, trials)),
        std_error=_known(np.std(trials, ddof=1) / math.sqrt(len(trials))) if len(trials) > 1 else None,
        groups=n,
        undefined=undefined,
        as_zero=_known(float(np.mean(total_t)) / (n + undefined)) if n + undefined else None,
        as_one=_known((float(np.mean(total_t)) + undefined) / (n + undefined)) if n + undefined else None,
    )


def _p_values(values_QKM: Floats, baseline: int, samples: int, seed: int) -> Floats:
    """P values of each method's difference from the baseline, shape [K, M]."""
    q, k, m = values_QKM.shape
    differences_QKM = values_QKM - values_QKM[:, [baseline]]
    return sign_flip_p(differences_QKM.reshape(q, k * m), samples=samples, seed=seed).reshape(k, m)


def _comparisons(
    values_QKM: Floats, means_SKM: Floats, p_KM: Floats, metrics: Sequence[str], baseline: int
) -> list[dict[str, Comparison]]:
    """Comparisons of each method with the baseline, for each metric that at least one group defines."""
    k = values_QKM.shape[1]
    found: list[dict[str, Comparison]] = [{} for _ in range(k)]
    others = [i for i in range(k) if i != baseline]
    differences_QKM = values_QKM - values_QKM[:, [baseline]]
    for j, metric in enumerate(metrics):
        defined_Q = ~np.isnan(differences_QKM[:, baseline, j])
        if not defined_Q.any():
            continue
        adjusted = holm(p_KM[others, j])
        for i, p_holm in zip(others, adjusted, strict=True):
            low, high = np.nanquantile(means_SKM[:, i, j] - means_SKM[:, baseline, j], _INTERVAL)
            difference = differences_QKM[defined_Q, i, j].mean()
            found[i][metric] = Comparison(difference=difference, low=low, high=high, p=p_KM[i, j], p_holm=p_holm)
    return found


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
