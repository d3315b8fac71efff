"""Convert Arrow columns of raw logs to the types of a data set, and find the rows with unusable values.

Columns of vectors, such as embeddings, have a list of numbers in each row. Text may be a list too, as CSV files have
it: numbers within brackets, between commas or blanks.

Shapes: N rows, M rows with a vector, D numbers of a vector, L numbers of all vectors.
"""

import math
import re
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale.arrays import Bools, Doubles, Floats, Ints
from ltrscale.errors import InputError

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)
Similarity = Literal["cosine", "dot"]

_STRAY = 0.05
"""Share of lists that may have another length in a column of vectors."""
_AT_ONCE = 1 << 20
"""Products in memory at once."""
_BLANK = r"[ \t\r\n]"
_WITHIN = rf"(?s)^{_BLANK}*\[.*\]{_BLANK}*$"
_ENDS = rf"^{_BLANK}*\[{_BLANK}*|{_BLANK}*\]{_BLANK}*$"
_BETWEEN = rf"{_BLANK}*,{_BLANK}*|{_BLANK}+"
_LISTED_NUMBER = r"(?i)^[-+]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|inf(inity)?)$"


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type can be read as numbers; a column of nulls can."""
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal, pa.types.is_null)
    return any(test(kind) for test in tests)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text or bytes."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    further_tests = (pa.types.is_string_view, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return any(test(kind) for test in tests + further_tests)


def is_id(kind: pa.DataType) -> bool:
    """Whether a column of this type can name things: text or whole numbers."""
    return is_text(kind) or is_number(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, whether dictionary-encoded or not."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


_NUMBER = re.compile(
    r"\s*[-+]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|inf(inity)?|nan)\s*", re.IGNORECASE | re.ASCII
)


def is_number_text(text: str) -> bool:
    """True if a text is a number in Arrow's grammar, which all readers share.

    Python's `float` would also read 1_000 and the digits of other scripts.

    Example:
        >>> [is_number_text(text) for text in ("1.5", " -2e3", ".5", "inf", "1_000", "１２", "0x10", "1,5", "")]
        [True, True, True, True, False, False, False, False, False]
    """
    return _NUMBER.fullmatch(text) is not None


def is_single(kind: pa.DataType) -> bool:
    """Whether a column of this type holds values that can be read: text, numbers, booleans, times, dates, durations.

    Lists, intervals, unions and extension types are not; `plain` makes some of these readable first.
    """
    tests = (is_id, pa.types.is_timestamp, pa.types.is_date, pa.types.is_time, pa.types.is_duration)
    return any(test(value_type(kind)) for test in tests)


def is_kept(kind: pa.DataType) -> bool:
    """Whether Parquet can hold a column of this type: single values, and lists and structs of them."""
    if not pa.types.is_nested(kind) or pa.types.is_union(kind):
        return is_single(kind)
    return all(is_kept(kind.field(i).type) for i in range(kind.num_fields))


def plain(rows: Rows) -> Rows:
    """Convert columns to types that all readers know, where there is one for their values.

    UUIDs and string views become text, narrow decimals wider ones; run-end encoded, JSON, 8-bit boolean and
    one-dimensional tensor columns become their plain values. Columns of other types stay as they are.
    """
    kinds = plain_schema(rows.schema)
    if kinds.types == rows.schema.types:
        return rows
    columns = [
        column if column.type == kind else _plain_column(column, kind)
        for column, kind in zip(rows.columns, kinds.types, strict=True)
    ]
    return type(rows).from_arrays(columns, schema=kinds)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema that `plain` gives these columns."""
    return pa.schema([each.with_type(_plain_type(each.type)) for each in schema], schema.metadata)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.UuidType):
        return pa.string()
    if isinstance(kind, pa.JsonType) or (isinstance(kind, pa.FixedShapeTensorType) and len(kind.shape) == 1):
        return _plain_type(kind.storage_type)
    if isinstance(kind, pa.Bool8Type):
        return pa.bool_()
    if pa.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):  # Arrow cannot take rows of these
        return pa.string() if pa.types.is_string_view(kind) else pa.binary()
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):  # Arrow cannot count their values
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_dictionary(kind):  # such as the categories of polars
        return pa.dictionary(kind.index_type, _plain_type(kind.value_type), kind.ordered)
    return kind


def _plain_column(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([_plain_column(chunk, kind) for chunk in column.chunks], kind)
    if isinstance(column.type, pa.UuidType):
        return pa.array(map(_uuid_text, column.storage.to_pylist()), pa.string())
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return column if column.type == kind else column.cast(kind)


def _uuid_text(value: bytes | None) -> str | None:
    if value is None:
        return None
    digits = value.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def without_dictionary(column: pa.Array) -> pa.Array:
    """The column without dictionary encoding."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def wider_type(column: str, kind: pa.DataType, other: pa.DataType, file: str, first: str) -> pa.DataType:
    """The type that holds the values of both; null fits any, and numbers fit numbers.

    Raises:
        InputError: there is no such type; names the column, the file with the other type, and the first file.

    Example:
        >>> wider_type("age", pa.int64(), pa.float64(), "b.parquet", "a.parquet")
        DataType(double)
    """
    if kind == other:
        return kind
    schemas = [pa.schema([("", each)]) for each in (kind, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException as error:
        raise _unlike(column, file, f"{other} where it is {kind} in {first}") from error


def in_type(column: str, values: pa.Array, kind: pa.DataType, file: str) -> pa.Array:
    """Cast values to a wider type.

    Raises:
        InputError: the type does not hold them all, such as a whole number beyond 2^53 as a double.
    """
    if values.type == kind:
        return values
    try:
        return values.cast(kind)
    except pa.ArrowException as error:
        problem = f"{values.type} here and {kind} elsewhere, which does not hold all values"
        raise _unlike(column, file, problem) from error


def _unlike(column: str, file: str, problem: str) -> InputError:
    return InputError(f"{file}: column {column!r} is {problem}; write all files with one type of this column")


def floats(column: pa.Array) -> pa.FloatArray:
    """A numeric column in float32, to the nearest; values beyond its range are infinite, nulls stay null."""
    column = without_dictionary(column)
    if pa.types.is_decimal(column.type):  # Arrow multiplies by a rounded power of ten, but reads text exactly
        column = column.cast(pa.string())
    return column.cast(pa.float32(), safe=False)


def float_column(column: pa.Array) -> Floats:
    """A numeric column in float32 with NaN for null."""
    values_N: Floats = floats(column).fill_null(math.nan).to_numpy(zero_copy_only=False)
    return values_N


def doubles(column: pa.Array) -> pa.DoubleArray:
    """A numeric column in float64; null where it has no value or one that is not finite."""
    values = without_dictionary(column).cast(pa.float64())
    return pc.if_else(pc.is_finite(values), values, pa.scalar(None, pa.float64()))


def texts(column: pa.Array) -> tuple[pa.StringArray, Bools]:
    """A column as text, null where it has no value, and the rows whose bytes are not UTF-8 (null there too).

    Whole numbers are written without a decimal point, even floats: many tools turn a column of integers into floats
    as soon as it has a null.
    """
    column = without_dictionary(column)
    good_N = np.zeros(len(column), dtype=bool)
    if pa.types.is_floating(column.type):
        return pa.array([_number_text(value) for value in column.to_pylist()], pa.string()), good_N
    if not is_text(column.type):
        return column.cast(pa.string()), good_N
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    raw = column.cast(pa.large_binary() if column.nbytes > 1 << 30 else pa.binary())  # 32-bit offsets end at 2 GiB
    try:
        return raw.cast(pa.string()), good_N
    except pa.ArrowInvalid:  # the cast does not name the row, so decode one by one
        values = [_decoded(value) for value in raw.to_pylist()]
        text = pa.array(values, pa.string())
        bad_N = text.is_null().to_numpy(zero_copy_only=False) & raw.is_valid().to_numpy(zero_copy_only=False)
        return text, bad_N


def _number_text(value: float | None) -> str | None:
    if value is None or math.isnan(value):
        return None
    return str(int(value)) if value.is_integer() else repr(value)


def _decoded(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def is_per_document(column: pa.Array, lengths_Q: Ints) -> bool:
    """True if each list of a group, unless it is null, has a value for each of its documents.

    Example:
        >>> [is_per_document(pa.array([[1, 2], None]), np.array(lengths)) for lengths in ([2, 1], [3, 1], [1, 1])]
        [True, False, False]
    """
    counts_Q = pc.list_value_length(column).fill_null(-1).to_numpy(zero_copy_only=False)
    return not ((counts_Q != lengths_Q) & (counts_Q >= 0)).any()


def spread_over_documents(column: pa.Array, lengths_Q: Ints) -> pa.Array:
    """The values of all groups' lists, with null for each document of a group without a list.

    Example:
        >>> spread_over_documents(pa.array([[1, 2], None]), np.array([2, 1])).to_pylist()
        [1, 2, None]
    """
    if not column.null_count:
        return column.flatten()
    valid_N = np.repeat(column.is_valid().to_numpy(zero_copy_only=False), lengths_Q)
    index_N = np.where(valid_N, np.cumsum(valid_N) - 1, 0)
    return column.flatten().take(pa.array(index_N, mask=~valid_N))


class Vectors:
    """The vectors of a column, in float32.

    `lengths_N` is the length of each row's list, -1 in a row without one.

    Example:
        >>> found = Vectors(pa.array([[1.0, 2.0], None, [3.0]]))
        >>> found.lengths_N.tolist(), found.rows_of_length(2).tolist()
        ([2, -1, 1], [[1.0, 2.0], [nan, nan], [nan, nan]])
    """

    def __init__(self, column: pa.Array) -> None:
        column = without_dictionary(column)
        if pa.types.is_null(column.type):  # a file in which no row has one
            column = column.cast(pa.list_(pa.float32()))
        lengths_N = pc.list_value_length(column).cast(pa.int64()).fill_null(-1).to_numpy()
        self.lengths_N: Ints = lengths_N
        self._numbers_L = float_column(column.flatten())
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
    texts_N, broken_N = texts(column)
    listed_N = pc.match_substring_regex(texts_N, _WITHIN)
    inner_N = pc.replace_substring_regex(pc.if_else(listed_N, texts_N, None), _ENDS, "")
    parts_N = pc.split_pattern_regex(inner_N, _BETWEEN)
    lengths_N = pc.list_value_length(parts_N).fill_null(0).to_numpy()
    parts_L = parts_N.flatten()
    none_N = pc.equal(inner_N, "").fill_null(False).to_numpy(zero_copy_only=False)  # [] has one part, an empty text
    parts_L, lengths_N = parts_L.filter(pa.array(~np.repeat(none_N, lengths_N))), np.where(none_N, 0, lengths_N)
    numbers_L = pc.if_else(pc.match_substring_regex(parts_L, _LISTED_NUMBER), parts_L, None).cast(pa.float32())
    offsets_N1 = pa.array(np.append(0, np.cumsum(lengths_N)), pa.int32())
    lists_N = pa.ListArray.from_arrays(offsets_N1, numbers_L, mask=parts_N.is_null())
    return lists_N, broken_N | ~listed_N.fill_null(True).to_numpy(zero_copy_only=False)


def is_vector(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold vectors; one of nulls can."""
    return bool(pa.types.is_null(kind)) or (is_list(kind) and is_number(value_type(kind.value_type)))


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
