"""Converting Arrow columns of raw logs to the types of a data set, with the rows whose values cannot be used.

Shapes: N rows.
"""

import math
import re
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ltrscale.errors import InputError

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)


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
    """Whether a text is a number, by the one grammar of all readers, which is Arrow's.

    Python's `float` would also read 1_000 and the digits of other scripts.

    Example:
        >>> [is_number_text(text) for text in ("1.5", " -2e3", ".5", "inf", "1_000", "１２", "0x10", "1,5", "")]
        [True, True, True, True, False, False, False, False, False]
    """
    return _NUMBER.fullmatch(text) is not None


def without_views(rows: Rows) -> Rows:
    """The rows with string views as plain text: Arrow cannot take rows of string views."""
    kinds = [_without_view(kind) for kind in rows.schema.types]
    return rows if kinds == rows.schema.types else rows.cast(pa.schema(zip(rows.schema.names, kinds, strict=True)))


def _without_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.string() if pa.types.is_string_view(kind) else pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_without_view(kind.value_type)))
    if pa.types.is_dictionary(kind):  # such as the categories of polars
        return pa.dictionary(kind.index_type, _without_view(kind.value_type), kind.ordered)
    return kind


def without_dictionary(column: pa.Array) -> pa.Array:
    """The column without dictionary encoding."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def wider_type(column: str, kind: pa.DataType, other: pa.DataType, file: str, first: str) -> pa.DataType:
    """The type that holds the values of both; null fits any, and numbers fit numbers.

    Raises:
        InputError: there is none; names the column, the file that has the other type, and the first one.

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
    """Values in a wider type.

    Raises:
        InputError: it does not hold them all, such as a whole number beyond 2^53 as a double.
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


def float_column(column: pa.Array) -> NDArray[np.float32]:
    """A numeric column in float32 with NaN for null."""
    values_N: NDArray[np.float32] = floats(column).fill_null(math.nan).to_numpy(zero_copy_only=False)
    return values_N


def texts(column: pa.Array) -> tuple[pa.StringArray, NDArray[np.bool_]]:
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


def spread_over_documents(column: pa.Array, lengths_Q: NDArray[np.int64]) -> pa.Array:
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
