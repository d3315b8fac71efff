"""Resampling over query groups: the bootstrap, the sign-flip test, and Holm's adjustment for several tests.

Bootstrap and test draw the same groups or signs for all columns, which keeps methods and metrics paired.

Shapes: Q groups, B blocks of groups, M columns (methods, metrics), S resamples. NaN marks a group that a metric leaves
undefined.
"""

from collections.abc import Iterator

import numpy as np

from ltrscale.arrays import Doubles

_DRAWS = 1 << 22
"""Random signs that are drawn at once."""
_RESAMPLED = 1 << 18
"""Blocks that are drawn at once: their counts then stay in the cache."""


def bootstrap_means(sums_BM: Doubles, defined_BM: Doubles, *, samples: int, seed: int) -> Doubles:
    """Means of each column over bootstrap resamples of the blocks, shape [S, M] (Efron 1979).

    Each resample draws B of the B blocks with replacement, and divides the sum of their values by the number of groups
    that define them; it is NaN if there are none. Percentiles of column differences give paired intervals; with fewer
    than about 30 groups these are too narrow.

    Args:
        sums_BM: sum over the groups of a block.
        defined_BM: groups of the block that the sum is over.
        samples: number of resamples.
        seed: of the resampling.

    Example:
        >>> means_SM = bootstrap_means(np.array([[0.0], [1.0]]), np.ones((2, 1)), samples=1000, seed=0)
        >>> sorted(set(means_SM[:, 0].tolist()))
        [0.0, 0.5, 1.0]
    """
    rng, (b, m) = np.random.default_rng(seed), sums_BM.shape
    if b == 0:
        return np.full((samples, m), np.nan)
    columns_B2M = np.concatenate([sums_BM, defined_BM], axis=1)
    sums_S2M = np.zeros((samples, 2 * m))
    for first, last in _parts(samples, b, _RESAMPLED):
        draws_SB = rng.integers(0, b, size=(last - first, b))
        draws_SB += np.arange(last - first)[:, None] * b  # separate ranges, so that one bincount counts all resamples
        times_SB = np.bincount(draws_SB.ravel(), minlength=draws_SB.size).reshape(draws_SB.shape)
        sums_S2M[first:last] = times_SB.astype(np.float64) @ columns_B2M
    with np.errstate(invalid="ignore"):
        return np.asarray(sums_S2M[:, :m] / sums_S2M[:, m:])


def sign_flip_p(differences_QM: Doubles, *, samples: int, seed: int) -> Doubles:
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
    for first, last in _parts(samples, q, _DRAWS):
        kept_SQ = rng.integers(0, 2, size=(last - first, q), dtype=np.int8).astype(np.float64)
        # the sum with random signs is that of the kept groups minus that of the others: twice the first minus all
        as_far_M += (np.abs(2 * kept_SQ @ filled_QM - total_M) >= limit_M).sum(axis=0)
    return np.asarray(as_far_M / (samples + 1))


def holm(p_M: Doubles) -> Doubles:
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


def _parts(samples: int, groups: int, draws: int) -> Iterator[tuple[int, int]]:
    """Cut the resamples into parts that draw about so many groups each, which bounds memory."""
    size = max(1, draws // max(groups, 1))
    for first in range(0, samples, size):
        yield first, min(first + size, samples)
