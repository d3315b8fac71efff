"""What all rows of a log say of its first configs: counts of lists, and questions about features that rank too well.

Shapes: N rows, Q lists, V distinct values, M rows with a list and a label, L those in a sample, F features, Q1 = Q + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.ids import parts
from ltrscale.data.times import ISO, Clock, PeriodUnit, instants, periods
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import Guess, grades_of
from ltrscale.ingest.mapping import PeriodKind
from ltrscale.ingest.profile import rows_looked_at
from ltrscale.ingest.structure import SAMPLED, KeyLists, Structure, read_structure
from ltrscale.late import Late
from ltrscale.progress import progress

if TYPE_CHECKING:
    import torch

    from ltrscale.ingest import leaks
    from ltrscale.ranking import single_feature
else:
    torch, leaks = Late("torch"), Late("ltrscale.ingest.leaks")
    single_feature = Late("ltrscale.ranking.single_feature")

FEWEST_PERIODS = 3
"""Minimum number of periods: one each to train, validate and test."""
_UNITS: tuple[PeriodUnit, ...] = ("week", "day", "hour")


@dataclass(frozen=True)
class LogCounts:
    """Counts over all rows of a log, with lists by the guessed columns."""

    rows: int
    queries: int
    together: bool
    repeated: int
    """Rows that repeat an item of their query."""
    median: int
    longest: int
    informative_rows: int
    """Rows of lists with different labels, the only ones that trees and networks learn from."""
    informative_queries: int
    """Number of these lists."""
    unjudged: int
    """Rows without a label in lists where other rows have one."""
    unit: PeriodKind
    """What the log is divided by: `part` where it has no times over enough periods."""
    periods: tuple[str, ...]
    """The periods with labels; empty without labels or a time."""


def count_lists(guessed: Guess, structure: Structure) -> LogCounts:
    """Count the lists of all rows; `structure` has the columns with roles."""
    codes_N = structure.joined(guessed.query.name, [column.name for column in guessed.within])
    lengths_Q = np.bincount(codes_N[codes_N >= 0])
    lengths_Q = lengths_Q[lengths_Q > 0]
    repeated = 0
    if guessed.item is not None:
        items_N = structure.codes[guessed.item.name]
        known_N = (items_N >= 0) & (codes_N >= 0)
        pairs = (codes_N * (items_N.max() + 1) + items_N)[known_N]
        repeated = len(pairs) - len(np.unique(pairs))
    labels_N, unjudged = row_labels(guessed, structure, codes_N)
    apart_Q = informative_lists(codes_N, labels_N)
    unit, names = _divided(guessed, structure, codes_N, labels_N)
    return LogCounts(
        rows=len(codes_N),
        queries=len(lengths_Q),
        together=_together(codes_N, structure.files),
        repeated=repeated,
        median=int(np.median(lengths_Q)),
        longest=int(lengths_Q.max()),
        informative_rows=int(apart_Q[codes_N[codes_N >= 0]].sum()),
        informative_queries=int(apart_Q.sum()),
        unjudged=unjudged,
        unit=unit,
        periods=names,
    )


def row_labels(guessed: Guess, structure: Structure, lists_N: NDArray[np.int64]) -> tuple[NDArray[np.float64], int]:
    """The label of each row as the config reads it, NaN for none; and the number of unjudged rows, which count 0."""
    if guessed.label is None:
        return np.full(len(lists_N), np.nan), 0
    labels_N, grades = structure.amounts(guessed.label), grades_of(guessed.label)
    if isinstance(grades, tuple):
        labels_N = np.where(np.isnan(labels_N), np.nan, np.searchsorted(grades, labels_N, side="right"))
    judged_Q = np.zeros(int(lists_N.max()) + 1, np.bool_)
    judged_Q[lists_N[(lists_N >= 0) & ~np.isnan(labels_N)]] = True
    unjudged_N = np.isnan(labels_N) & (lists_N >= 0) & judged_Q[lists_N]
    return np.where(unjudged_N, 0.0, labels_N), int(unjudged_N.sum())


def _together(codes_N: NDArray[np.int64], files: Sequence[int]) -> bool:
    """Whether the rows of each list are contiguous in one file."""
    begins_N = np.diff(codes_N, prepend=-2) != 0
    begins_N[[row for row in files if row < len(codes_N)]] = True
    runs = codes_N[begins_N & (codes_N >= 0)]
    return len(runs) == len(np.unique(runs))


def informative_lists(lists_N: NDArray[np.int64], labels_N: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each list has different labels, by list number; -1 means no list, and NaN no label."""
    known_N = (lists_N >= 0) & ~np.isnan(labels_N)
    lists_M, labels_M = lists_N[known_N], labels_N[known_N]
    first_Q, apart_Q = np.zeros(int(lists_N.max()) + 1), np.zeros(int(lists_N.max()) + 1, np.bool_)
    first_Q[lists_M] = labels_M
    apart_Q[lists_M[labels_M != first_Q[lists_M]]] = True
    return apart_Q


def _divided(
    guessed: Guess, structure: Structure, lists_N: NDArray[np.int64], labels_N: NDArray[np.float64]
) -> tuple[PeriodKind, tuple[str, ...]]:
    """The longest unit of time that gives enough periods with labels; or parts of the queries, if there are enough."""
    unit, names = _periods(guessed, structure, lists_N, labels_N)
    if len(names) >= FEWEST_PERIODS or guessed.label is None:
        return unit, names
    of_queries = structure.codes[guessed.query.name][(lists_N >= 0) & ~np.isnan(labels_N)]
    queries_V, _ = cols.texts(structure.values[guessed.query.name].take(pa.array(np.unique(of_queries))))
    dealt = tuple(sorted({*parts(queries_V.fill_null("").to_pylist())}))
    return ("part", dealt) if len(dealt) >= FEWEST_PERIODS else (unit, names)


def _periods(
    guessed: Guess, structure: Structure, lists_N: NDArray[np.int64], labels_N: NDArray[np.float64]
) -> tuple[PeriodUnit, tuple[str, ...]]:
    """The longest unit that gives enough periods, by the first row of each list; none without a time."""
    if guessed.time is None:
        return "week", ()
    formats = guessed.time.formats[:1] or (ISO,)
    clock, times_V = Clock(formats=formats), structure.values[guessed.time.name]
    times_N = structure.codes[guessed.time.name]
    usable_N = (lists_N >= 0) & ~np.append(instants(times_V, clock)[1], True)[times_N]
    if guessed.label is not None:
        usable_N &= ~np.isnan(labels_N)
    rows = np.flatnonzero(usable_N)
    rows_Q = rows[np.unique(lists_N[rows], return_index=True)[1]]
    times_V = times_V.take(pa.array(np.unique(times_N[rows_Q])))
    for unit in _UNITS:
        names_V, _ = periods(times_V, unit, clock)
        names = tuple(sorted({*names_V.to_pylist()} - {None}))
        if len(names) >= FEWEST_PERIODS:
            return unit, names
    return "week", names


_AT_ONCE = 64
"""Features that are evaluated at once."""


def asked_of(guessed: Guess, structure: Structure, urls: Sequence[str], dialect: Dialect) -> dict[str, str]:
    """Questions about suspicious features, by name, of a sample of whole lists; empty without a label."""
    features = [*guessed.features, *guessed.categorical]
    if guessed.label is None or not features:
        return {}
    key = [column.name for column in (guessed.query, *guessed.within)]
    names = dict.fromkeys([*key, guessed.label.name, *(column.name for column in features)])
    lists_N = structure.joined(key[0], key[1:])
    kept_N = np.zeros(len(lists_N), np.bool_)
    kept_N[KeyLists.from_codes(lists_N, rows_looked_at(len(names), SAMPLED)).rows_L] = True
    sample = read_structure(urls, [*names], dialect, kept_N=kept_N)
    query_N = sample.joined(key[0], key[1:])
    labels_N, _ = row_labels(guessed, sample, query_N)
    rows_L = np.flatnonzero((query_N >= 0) & np.isfinite(labels_N) & (labels_N >= 0))
    rows_L = rows_L[np.argsort(query_N[rows_L], kind="stable")]
    labels_L = torch.from_numpy(labels_N[rows_L].astype(np.float32))
    offsets_Q1 = np.append(0, np.cumsum(np.unique(query_N[rows_L], return_counts=True)[1]))
    found: list[single_feature.SingleFeature] = []
    with progress("features alone", len(features), "features") as advance:
        for first in range(0, len(features), _AT_ONCE):
            some = features[first : first + _AT_ONCE]
            categorical = [first + i >= len(guessed.features) for i in range(len(some))]
            of_each = zip(some, categorical, strict=True)
            x_LF = np.stack([_values(sample, one.name, codes)[rows_L] for one, codes in of_each], axis=1)
            names_F = [column.name for column in some]
            found += single_feature.single_features(
                torch.from_numpy(x_LF), labels_L, torch.from_numpy(offsets_Q1), names=names_F, categorical=categorical
            )
            advance(len(some))
    return leaks.questions(found)


def _values(structure: Structure, name: str, codes: bool) -> NDArray[np.float32]:
    """A column as numbers, or as codes of its values; NaN if missing."""
    if not codes:
        return structure.numbers(name).astype(np.float32)
    codes_N = structure.codes[name]
    return np.where(codes_N < 0, np.nan, codes_N).astype(np.float32)
