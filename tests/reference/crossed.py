"""The error of a mean over groups and draws, by the sums of a two-way analysis of variance."""

import math
from collections.abc import Sequence

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
