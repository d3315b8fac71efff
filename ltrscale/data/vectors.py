"""Columns of vectors, such as embeddings: a list of numbers in each row. Reading them, and their similarity.

Text may be a list too, as CSV files have it: numbers within brackets, between commas or blanks.

Shapes: N rows, M rows with a vector, D numbers of a vector, L numbers of all vectors.
"""

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale.arrays import Bools, Doubles, Floats, Ints
from ltrscale.data import columns as cols

Similarity = Literal["cosine", "dot"]

_STRAY = 0.05
"""Share of lists that may have another length in a column of vectors."""
_AT_ONCE = 1 << 20
"""Products in memory at once."""
_BLANK = r"[ \t\r\n]"
_WITHIN = rf"(?s)^{_BLANK}*\[.*\]{_BLANK}*$"
_ENDS = rf"^{_BLANK}*\[{_BLANK}*|{_BLANK}*\]{_BLANK}*$"
_BETWEEN = rf"{_BLANK}*,{_BLANK}*|{_BLANK}+"
_NUMBER = r"(?i)^[-+]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|inf(inity)?)$"


class Vectors:
    """The vectors of a column, in float32.

    `lengths_N` is the length of each row's list, -1 in a row without one.

    Example:
        >>> found = Vectors(pa.array([[1.0, 2.0], None, [3.0]]))
        >>> found.lengths_N.tolist(), found.rows_of_length(2).tolist()
        ([2, -1, 1], [[1.0, 2.0], [nan, nan], [nan, nan]])
    """

    def __init__(self, column: pa.Array) -> None:
        column = cols.without_dictionary(column)
        if pa.types.is_null(column.type):  # a file in which no row has one
            column = column.cast(pa.list_(pa.float32()))
        lengths_N = pc.list_value_length(column).cast(pa.int64()).fill_null(-1).to_numpy()
        self.lengths_N: Ints = lengths_N
        self._numbers_L = cols.float_column(column.flatten())
        taken_N = np.maximum(lengths_N, 0)
        self._starts_N = np.cumsum(taken_N) - taken_N

    @property
    def broken_N(self) -> Bools:
        """The rows whose list has a null or NaN."""
        broken_N = np.zeros(len(self.lengths_N), bool)
        places = np.flatnonzero(np.isnan(self._numbers_L))
        broken_N[np.searchsorted(self._starts_N, places, side="right") - 1] = True  # the last row that begins there
        return broken_N

    def rows_of_length(self, size: int) -> Floats:
        """The vectors of this length as rows [N, D], NaN in all other rows."""
        has_N = self.lengths_N == size
        if has_N.all():
            return self._numbers_L.reshape(-1, size)
        x_ND = np.full((len(has_N), size), np.nan, np.float32)
        x_ND[has_N] = self.rows(np.flatnonzero(has_N), size)
        return x_ND

    def rows(self, rows_M: Ints, size: int) -> Floats:
        """The vectors of some rows, all of this length [M, D]."""
        found_MD: Floats = self._numbers_L[self._starts_N[rows_M][:, None] + np.arange(size)]
        return found_MD

    @property
    def counting(self) -> bool:
        """True if all numbers are whole and none is negative, like token ids."""
        x_L = self._numbers_L
        return bool(np.all((x_L >= 0) & (x_L == np.floor(x_L)) | np.isnan(x_L)))


def lists_of_texts(column: pa.Array) -> tuple[pa.ListArray, Bools]:
    """Parse texts as lists, null for items that are not numbers; also the rows whose text is not a list or not UTF-8.

    Example:
        >>> lists_of_texts(pa.array(["[1, 2.5]", None, "[.5 x]", "[]", "7"]))[0].to_pylist()
        [[1.0, 2.5], None, [0.5, None], [], None]
    """
    texts_N, broken_N = cols.texts(column)
    listed_N = pc.match_substring_regex(texts_N, _WITHIN)
    inner_N = pc.replace_substring_regex(pc.if_else(listed_N, texts_N, None), _ENDS, "")
    parts_N = pc.split_pattern_regex(inner_N, _BETWEEN)
    lengths_N = pc.list_value_length(parts_N).fill_null(0).to_numpy()
    parts_L = parts_N.flatten()
    none_N = pc.equal(inner_N, "").fill_null(False).to_numpy(zero_copy_only=False)  # [] has one part, an empty text
    parts_L, lengths_N = parts_L.filter(pa.array(~np.repeat(none_N, lengths_N))), np.where(none_N, 0, lengths_N)
    numbers_L = pc.if_else(pc.match_substring_regex(parts_L, _NUMBER), parts_L, None).cast(pa.float32())
    offsets_N1 = pa.array(np.append(0, np.cumsum(lengths_N)), pa.int32())
    lists_N = pa.ListArray.from_arrays(offsets_N1, numbers_L, mask=parts_N.is_null())
    return lists_N, broken_N | ~listed_N.fill_null(True).to_numpy(zero_copy_only=False)


def is_vector(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold vectors; one of nulls can."""
    return bool(pa.types.is_null(kind)) or (cols.is_list(kind) and cols.is_number(cols.value_type(kind.value_type)))


def vector_size(column: pa.Array) -> int:
    """The usual length of a column's vectors, ignoring a few strays; 0 if the column does not hold vectors.

    Lists of whole numbers from 0 on do not count, because they may be token ids.
    """
    if not is_vector(column.type) or pa.types.is_null(column.type):
        return 0
    found = Vectors(column)
    sizes, counts = np.unique(found.lengths_N[found.lengths_N >= 0], return_counts=True)
    if not len(sizes) or counts.max() < (1 - _STRAY) * counts.sum():
        return 0
    return 0 if found.counting else int(sizes[counts.argmax()])


def similarity(kind: Similarity, x: Vectors, y: Vectors) -> Floats:
    """The similarity of the two vectors of each row [N]; NaN where one is missing or their lengths differ.

    A cosine with a zero vector is NaN; both similarities are infinite where a vector is.

    Example:
        >>> x, y = Vectors(pa.array([[3.0, 4.0], [0.0, 0.0]])), Vectors(pa.array([[4.0, 3.0], [1.0, 1.0]]))
        >>> similarity("cosine", x, y).tolist(), similarity("dot", x, y).tolist()
        ([0.9599999785423279, nan], [24.0, 0.0])
    """
    found_N = np.full(len(x.lengths_N), np.nan)
    both_N = (x.lengths_N == y.lengths_N) & (x.lengths_N > 0)
    for size in np.unique(x.lengths_N[both_N]).tolist():
        rows = np.flatnonzero(both_N & (x.lengths_N == size))
        for some in np.array_split(rows, -(-len(rows) * size // _AT_ONCE)):
            found_N[some] = _alike(kind, x.rows(some, size), y.rows(some, size))
    with np.errstate(over="ignore"):  # what float32 does not hold is infinite
        return found_N.astype(np.float32)


def _alike(kind: Similarity, x_MD: Floats, y_MD: Floats) -> Doubles:
    with np.errstate(invalid="ignore", divide="ignore"):
        dot_M = _dot(x_MD, y_MD)
        found_M = dot_M if kind == "dot" else dot_M / (np.sqrt(_dot(x_MD, x_MD)) * np.sqrt(_dot(y_MD, y_MD)))
    return np.where(np.isfinite(dot_M), found_M, np.inf)


def _dot(x_MD: Floats, y_MD: Floats) -> Doubles:
    """Dot products summed from the left in float64, bit for bit as exported transformers do."""
    products_MD = x_MD.astype(np.float64) * y_MD
    sums_M: Doubles = np.cumsum(products_MD, axis=1)[:, -1]
    return sums_M + 0.0  # no negative zero
