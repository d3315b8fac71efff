"""Is one method better than another on the same query groups? Resampling of groups, and its corrections.

The query group is the unit: a method that was trained several times enters with each group's mean over its trials, so
that a difference speaks of queries to come and not of seeds. Both resamplings draw the same groups or signs for all
columns, which keeps methods and metrics paired.

Shapes: Q groups, M columns (methods, metrics), S resamples. NaN marks a group that a metric leaves undefined.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BLOCK = 1 << 22


def bootstrap_means(values_QM: Floats, *, samples: int, seed: int) -> Floats:
    """Means of each column over bootstrap resamples of the groups, shape [S, M] (Efron 1979).

    Each resample draws Q of the Q groups with replacement; undefined values are left out of its mean. A mean of
    nothing is NaN. Percentiles of column differences give paired intervals; with fewer than about 30 groups these are
    too narrow.

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
        draws_SQ += np.arange(last - first)[:, None] * q
        times_SQ = np.bincount(draws_SQ.ravel(), minlength=draws_SQ.size).reshape(draws_SQ.shape)
        sums_S2M[first:last] = times_SQ.astype(np.float64) @ columns_Q2M
    with np.errstate(invalid="ignore"):
        return np.asarray(sums_S2M[:, :m] / sums_S2M[:, m:])


def sign_flip_p(differences_QM: Floats, *, samples: int, seed: int) -> Floats:
    """Two-sided p value of each column's mean difference by the paired randomisation test, shape [M] (Fisher 1935).

    Without a difference between two methods the sign of each group's difference is a coin toss: p is the share of
    random sign patterns whose mean is at least as far from 0, the observed pattern counted as one of them, so that p
    is never 0. Columns without a difference, or without a group, have p = 1.

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
        as_far_M += (np.abs(2 * kept_SQ @ filled_QM - total_M) >= limit_M).sum(axis=0)
    return np.asarray(as_far_M / (samples + 1))


def holm(p_M: Floats) -> Floats:
    """P values adjusted for having tested several methods (Holm 1979), shape [M].

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
    """Cut the resamples so that a block of them draws about four million groups."""
    size = max(1, _BLOCK // max(groups, 1))
    for first in range(0, samples, size):
        yield first, min(first + size, samples)
