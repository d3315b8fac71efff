"""How the columns of a log divide its rows into runs of equal values, and into lists in which other columns vary.

Shapes: N rows, V different values, L rows of a sample of whole lists, Q lists in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.data import columns as cols
from ltrscale.data.times import Clock, instants
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.names import word_grades
from ltrscale.ingest.profile import LogColumn, batches_of, rows_looked_at, without_nan

_LOOKED_AT = 1 << 20
_FEWEST_LISTS = 10
"""Minimum number of lists for a statistic."""
SAMPLED = 200_000
"""Approximate number of rows sampled from the lists of a key."""


@dataclass(frozen=True)
class KeyLists:
    """The rows of some values of a key, grouped by value."""

    rows_L: Ints
    starts_Q: Ints
    distinct: int
    """Values of the key, in all rows."""
    paired: float
    """Share of all rows with a value that occurs more than once."""
    together: float
    """Share of rows next to a row of the same value, among the places where that is possible."""
    runs: int
    """Runs of equal values, in all rows."""

    @classmethod
    def from_codes(cls, codes_N: Ints, sample: int = SAMPLED) -> "KeyLists":
        """The lists of a key, for a sample of about `sample` rows; code -1 means no value."""
        valid_N = codes_N[codes_N >= 0]
        n, lengths_V = len(valid_N), np.bincount(valid_N)
        distinct = int(np.count_nonzero(lengths_V))
        runs = 1 + int(np.count_nonzero(np.diff(valid_N))) if n else 0
        together = (n - runs) / (n - distinct) if n > distinct else 0.0
        # whole lists of a sample of the values, list by list
        stride = -(-len(codes_N) // sample) or 1
        rows = np.flatnonzero((codes_N >= 0) & (codes_N % stride == 0))
        rows_L = rows[np.argsort(codes_N[rows], kind="stable")]
        starts_Q = np.flatnonzero(np.diff(codes_N[rows_L], prepend=-1))
        paired = float(lengths_V[lengths_V > 1].sum() / max(n, 1))
        return cls(rows_L, starts_Q, distinct, paired, together, runs)

    def constant(self, codes_N: Ints) -> float:
        """Share of the lists with several rows in which a column has a single value."""
        least_Q, most_Q, several_Q = self._ends(codes_N)
        return float((least_Q == most_Q)[several_Q].mean()) if several_Q.any() else 1.0

    def spread(self, seconds_N: Ints) -> float:
        """Seconds from the first to the last time of a list, the median over lists with several rows."""
        least_Q, most_Q, several_Q = self._ends(seconds_N)
        return float(np.median((most_Q - least_Q)[several_Q])) if several_Q.any() else 0.0

    def having(self, true_N: Bools) -> Ints:
        """The number of rows in each list for which something holds."""
        return np.asarray(np.add.reduceat(true_N[self.rows_L].astype(np.int64), self.starts_Q))

    def repeats(self, codes_N: Ints) -> float:
        """Share of the rows with a value that occurred before in their list."""
        codes_L = codes_N[self.rows_L]
        valid_L = codes_L >= 0
        if not valid_L.any():
            return 0.0
        pairs = np.sort(self._list_L[valid_L] * (int(codes_L.max()) + 1) + codes_L[valid_L])
        return float(np.count_nonzero(pairs[1:] == pairs[:-1])) / len(pairs)

    def pairs(self, codes_N: Ints) -> tuple[int, float]:
        """Pairs of rows of one list with the same value, and the number expected if values were dealt at random.

        Example:
            >>> lists = KeyLists.from_codes(np.array([0, 0, 1, 1]))
            >>> lists.pairs(np.array([5, 5, 6, 7])), lists.pairs(np.array([5, 6, 5, 6]))
            ((1, 0.3333333333333333), (0, 0.6666666666666666))
        """
        valid_N = codes_N[codes_N >= 0]
        counts_V = np.bincount(valid_N).astype(np.float64)
        codes_L = codes_N[self.rows_L]
        list_L = self._list_L[codes_L >= 0]
        lengths_Q = np.bincount(list_L).astype(np.float64)
        same = np.unique(list_L * (int(codes_L.max(initial=0)) + 1) + codes_L[codes_L >= 0], return_counts=True)[1]
        of_all = max(len(valid_N) * (len(valid_N) - 1.0), 1.0)
        dealt = (lengths_Q * (lengths_Q - 1) / 2).sum() * (counts_V * (counts_V - 1)).sum() / of_all
        return int((same * (same - 1) // 2).sum()), float(dealt)

    def counted(self, numbers_N: Doubles, codes_N: Ints) -> float:
        """Share of the lists with three or more rows in which numbers count the rows from 0 or 1, with few gaps.

        It is 0 if numbers recur within lists.
        """
        if not len(self.rows_L):
            return 0.0
        numbers_L = np.nan_to_num(numbers_N[self.rows_L], nan=-1.0)
        least_Q, most_Q = (end.reduceat(numbers_L, self.starts_Q) for end in (np.minimum, np.maximum))
        n_Q = self._lengths_Q
        long_Q = n_Q >= 3
        counted_Q = (least_Q >= 0) & (least_Q <= 2) & (most_Q <= np.maximum(n_Q + 1, 1.1 * n_Q))
        share = float(counted_Q[long_Q].mean()) if long_Q.any() else 0.0
        return share if share > 0.5 and self.repeats(codes_N) < 0.01 else 0.0

    def alike(self, true_N: Bools) -> float | None:
        """Share of rows for which something holds, in lists of several rows in which it holds for at least one.

        None if there are too few such lists.
        """
        n_Q, having_Q = self._lengths_Q, self.having(true_N)
        some_Q = (n_Q > 1) & (having_Q > 0)
        return float(having_Q[some_Q].sum() / n_Q[some_Q].sum()) if some_Q.sum() >= _FEWEST_LISTS else None

    def height(self, places_N: Doubles, above_N: Bools) -> float:
        """How many deviations further up than the mean place of their lists some rows are, on average."""
        places_L, above_L = places_N[self.rows_L], above_N[self.rows_L]
        known_L = ~np.isnan(places_L)
        places, above, groups = places_L[known_L], above_L[known_L], self._list_L[known_L]
        n_Q = np.maximum(np.bincount(groups), 1)
        mean_Q = np.bincount(groups, places) / n_Q
        variance_Q = np.bincount(groups, places**2) / n_Q - mean_Q**2
        deviation = np.sqrt(variance_Q[groups][above].sum())
        return float((mean_Q[groups] - places)[above].sum() / deviation) if deviation > 0 else 0.0

    def _ends(self, values_N: Ints) -> tuple[Ints, Ints, Bools]:
        values_L = values_N[self.rows_L]
        if not len(values_L):
            return values_L, values_L, values_L > 0
        ends = np.minimum.reduceat(values_L, self.starts_Q), np.maximum.reduceat(values_L, self.starts_Q)
        return *ends, self._lengths_Q > 1

    @property
    def _lengths_Q(self) -> Ints:
        return np.diff([*self.starts_Q, len(self.rows_L)])

    @property
    def _list_L(self) -> Ints:
        return np.repeat(np.arange(len(self.starts_Q)), self._lengths_Q)


@dataclass(frozen=True)
class Structure:
    """Columns of many rows as codes from 0: equal values have equal codes, and -1 means no value."""

    codes: Mapping[str, Ints]
    values: Mapping[str, pa.Array]
    """The distinct values of each column, by code."""
    files: tuple[int, ...] = (0,)
    """The first row of each file."""
    whole: bool = True
    """True if these are all rows."""
    dialect: Dialect = field(default_factory=Dialect)
    """How text files write numbers."""
    _lists: dict[str, KeyLists] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.codes

    def lists(self, name: str) -> KeyLists:
        """The lists of a column."""
        if name not in self._lists:
            self._lists[name] = KeyLists.from_codes(self.codes[name])
        return self._lists[name]

    def numbers(self, name: str) -> Doubles:
        """A column as numbers, by row; NaN if not a number."""
        values = self.values[name]
        if cols.is_text(values.type):
            numbers_V = np.array([self.dialect.value(text) for text in values.to_pylist()])
        else:
            numbers_V = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return np.asarray(np.append(numbers_V, np.nan)[self.codes[name]], np.float64)

    def amounts(self, column: LogColumn) -> Doubles:
        """A column as numbers, by row (words as their grades); NaN if there is no number."""
        if column.numeric:
            return self.numbers(column.name)
        texts = [str(value) for value in self.values[column.name].to_pylist()]
        grades = word_grades(texts)
        values_V = [np.nan if (grade := grades[text]) is None else grade for text in texts]
        return np.array([*values_V, np.nan])[self.codes[column.name]]

    def seconds(self, column: LogColumn) -> Ints:
        """A time column in seconds since 1970, by row; 0 if not a time."""
        seconds_V, _ = instants(self.values[column.name], Clock(formats=column.formats[:1]))
        return np.asarray(np.append(seconds_V, 0)[self.codes[column.name]])

    def decides(self, name: str, other: str) -> bool:
        """True if each value of a column always has the same value of another; a few slips do not count."""
        codes_N, other_N = self.codes[name], self.codes[other]
        lists = self.lists(name)
        return len(lists.rows_L) > len(lists.starts_Q) and lists.constant(other_N) > 0.97 and codes_N is not other_N

    def joined(self, name: str, others: Sequence[str]) -> Ints:
        """The codes of the combinations of several columns; -1 if one of them has no value."""
        codes_N = self.codes[name]
        for other in others:
            valid_N = (codes_N >= 0) & (self.codes[other] >= 0)
            pairs = codes_N[valid_N] * (int(self.codes[other].max()) + 1) + self.codes[other][valid_N]
            codes_N = np.full(len(codes_N), -1, np.int64)
            codes_N[valid_N] = np.unique(pairs, return_inverse=True)[1]
        return codes_N


def table_structure(rows: pa.Table) -> Structure:
    """The structure of at least one row in memory, without columns of lists and the like."""
    plain = [each.name for each in rows.schema if cols.is_single(each.type)]
    return _built({name: [_dictionary(chunk) for chunk in rows[name].chunks] for name in plain}, [0], whole=True)


def read_structure(
    urls: Sequence[str],
    names: Sequence[str],
    dialect: Dialect,
    rows: int | None = _LOOKED_AT,
    kept_N: Bools | None = None,
) -> Structure:
    """The structure of some columns in the first rows of a log, in all rows, or in the rows of the mask `kept_N`.

    Memory grows with the kept rows, 8 bytes per value, and with the distinct values.
    """
    parts: dict[str, list[pa.DictionaryArray]] = {name: [] for name in names}
    most = None if rows is None else rows_looked_at(len(names), rows)
    n, last = 0, most if kept_N is None else int(np.flatnonzero(kept_N).max(initial=0)) + 1
    files: list[int] = []
    for url in urls:
        files.append(n)
        for batch in batches_of(url, names, dialect, first=urls[0]):
            kept = batch if kept_N is None else batch.filter(pa.array(kept_N[n : n + len(batch)]))
            for name, chunks in parts.items():
                chunks.append(_dictionary(kept.column(name)))
            n += len(batch)
            if last is not None and n >= last:
                return replace(_built(parts, files, whole=False), dialect=dialect)
    return replace(_built(parts, files, whole=True), dialect=dialect)


def _dictionary(column: pa.Array) -> pa.DictionaryArray:
    column = cols.without_dictionary(column)
    if pa.types.is_null(column.type):
        return pa.DictionaryArray.from_arrays(pa.nulls(len(column), pa.int32()), pa.nulls(0))
    if cols.is_text(column.type):
        column = cols.texts(column)[0]
    return without_nan(column).dictionary_encode()


def _built(parts: Mapping[str, Sequence[pa.DictionaryArray]], files: Sequence[int], *, whole: bool) -> Structure:
    codes, values = {}, {}
    for name, chunks in parts.items():
        one = pa.chunked_array(_alike(chunks)).unify_dictionaries().combine_chunks()
        codes[name] = one.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        values[name] = one.dictionary
    return Structure(codes, values, tuple(files), whole)


def _alike(chunks: Sequence[pa.DictionaryArray]) -> Sequence[pa.DictionaryArray]:
    """The chunks with values of one type: one file may have integers or nulls, another fractions."""
    kinds = {chunk.type.value_type for chunk in chunks}
    if len(kinds) == 1:
        return chunks
    try:
        schemas = [pa.schema([("values", kind)]) for kind in kinds]
        kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowTypeError:
        kind = pa.string()  # an id is a number in one file and text in another
    return [pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(kind)) for chunk in chunks]
