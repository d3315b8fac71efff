"""The error of a mean over crossed samples, by the sums of an analysis of variance; and experiments to judge it on."""

import math
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats

from ltrscale.arrays import Doubles

Table = Sequence[Sequence[float]]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mean_squares(table: Table) -> list[tuple[float, int]]:
    """Mean squares and degrees of freedom of the groups (rows), the draws (columns) and the rest."""
    n, t = len(table), len(table[0])
    rows = [mean(row) for row in table]
    columns = [mean([row[j] for row in table]) for j in range(t)]
    whole = mean(rows)
    groups = sum(t * (row - whole) ** 2 for row in rows)
    draws = sum(n * (column - whole) ** 2 for column in columns)
    rest = sum((table[i][j] - rows[i] - columns[j] + whole) ** 2 for i in range(n) for j in range(t))
    dfs = (n - 1, t - 1, (n - 1) * (t - 1))
    return [(total / df, df) for total, df in zip((groups, draws, rest), dfs, strict=True)]


def mean_error_df(folds: Sequence[Table]) -> tuple[float, float, float]:
    """The mean over all groups, its standard error, and Satterthwaite's degrees of freedom."""
    n = sum(len(table) for table in folds)
    parts = []
    for table in folds:
        share = len(table) / n
        cells = len(table) * len(table[0])
        parts.append([(share**2 * square / cells, df) for square, df in mean_squares(table)])
    groups, draws, rest = (sum(fold[kind][0] for fold in parts) for kind in range(3))
    variance = max(groups, rest) + max(draws, rest) - rest
    spread = sum(part**2 / df for fold in parts for part, df in fold)
    total = sum(mean(row) for table in folds for row in table)
    return total / n, math.sqrt(variance), variance**2 / spread


def skewness(draws: Sequence[float]) -> float:
    """Of the draws, with as much weight on symmetry as five have."""
    off = [value - mean(draws) for value in draws]
    return mean([x**3 for x in off]) / mean([x**2 for x in off]) ** 1.5 * len(draws) / (len(draws) + 5)


def interval(table: Table) -> tuple[float, float, float]:
    """The mean and the ends of its 95% interval: the means that Hall's (1992) transformation does not reject."""
    middle, error, df = mean_error_df([table])
    (_, _), (draws, _), (rest, _) = mean_squares(table)
    of_draws = max(draws - rest, 0.0) / (len(table) * len(table[0]))
    k = skewness([mean(column) for column in zip(*table, strict=True)]) / math.sqrt(len(table[0]))
    k *= (of_draws / error**2) ** 1.5
    limit = float(scipy.stats.t.ppf(0.975, df))

    def beyond(t: float, end: float) -> float:
        return t + k * t**2 / 3 + k**2 * t**3 / 27 + k / 6 - end

    high, low = (scipy.optimize.brentq(beyond, -99, 99, args=(end,)) for end in (-limit, limit))
    return middle, middle - low * error, middle - high * error


def three_way(table: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float, float]:
    """The mean over groups, draws and pretrainings, its standard error, and Satterthwaite's degrees of freedom."""
    sizes = (len(table), len(table[0]), len(table[0][0]))
    cells = {(i, j, k): table[i][j][k] for i in range(sizes[0]) for j in range(sizes[1]) for k in range(sizes[2])}
    n = math.prod(sizes)

    def cell_mean(cell: tuple[int, ...], axes: tuple[int, ...]) -> float:
        """The mean of the cells that agree with one in some axes."""
        return mean([value for other, value in cells.items() if all(other[a] == cell[a] for a in axes)])

    q, t, p = (sizes[axis] - 1 for axis in range(3))
    dfs = {(0,): q, (1,): t, (2,): p, (0, 1): q * t, (0, 2): q * p, (1, 2): t * p, (0, 1, 2): q * t * p}
    squares = dict.fromkeys(dfs, 0.0)
    for cell in cells:
        whole = cell_mean(cell, ())
        a, b, c = (cell_mean(cell, (axis,)) - whole for axis in range(3))
        ab, ac, bc = (
            cell_mean(cell, (0, 1)) - a - b - whole,
            cell_mean(cell, (0, 2)) - a - c - whole,
            cell_mean(cell, (1, 2)) - b - c - whole,
        )
        rest = cells[cell] - whole - a - b - c - ab - ac - bc
        for axes, effect in zip(dfs, (a, b, c, ab, ac, bc, rest), strict=True):
            squares[axes] += effect**2 / dfs[axes]
    e = squares[0, 1, 2]
    ab, ac, bc = (max(squares[pair] - e, 0.0) for pair in ((0, 1), (0, 2), (1, 2)))
    a = max(squares[(0,)] - ab - ac - e, 0.0)
    b = max(squares[(1,)] - ab - bc - e, 0.0)
    c = max(squares[(2,)] - ac - bc - e, 0.0)
    variance = a + b + c + ab + ac + bc + e
    spread = sum(squares[axes] ** 2 / dfs[axes] for axes in dfs)
    return mean(list(cells.values())), math.sqrt(variance / n), variance**2 / spread


def hall_p(sample: Sequence[float]) -> float:
    """Two-sided p of a mean of 0 by Hall's (1992) transformation of Student's t of a skewed sample."""
    n, g = len(sample), skewness(sample)
    s = mean(sample) / math.sqrt(sum((value - mean(sample)) ** 2 for value in sample) / (n - 1))
    transformed = s + g * s**2 / 3 + g**2 * s**3 / 27 + g / (6 * n)
    return 2 * float(scipy.stats.t.sf(abs(transformed) * math.sqrt(n), n - 1))


def drawn(
    seed: int, shape: tuple[int, int, int], *, groups: float, draws: float, rest: float, skewed: bool = False
) -> Doubles:
    """Experiments side by side [Q, T, M] with mean 0: effects of groups, of draws and of both together."""
    rng, (q, t, m) = np.random.default_rng(seed), shape

    def effect(*size: int) -> Doubles:
        return rng.gamma(4.0, 0.5, size=size) - 2.0 if skewed else rng.normal(size=size)  # variance 1, skewness 1 or 0

    return groups * effect(q, 1, m) + draws * effect(1, t, m) + rest * effect(q, t, m)


def promise(df: float, power: float = 0.8) -> float:
    """The number of estimated standard errors that a t test of 5% sees with this power on average, by bisection."""
    below = (np.arange(200) + 0.5) / 200
    estimates = np.sqrt(scipy.stats.chi2.ppf(below, df) / df)
    limit = scipy.stats.t.ppf(0.975, df)
    low, high = 2.0, 1000.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        seen = 1 - scipy.special.nctdtr(df, middle * estimates, limit).mean()
        low, high = (middle, high) if seen < power else (low, middle)
    return high
