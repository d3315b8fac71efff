"""Converting Arrow columns of raw logs to the types of a data set, with the rows whose values cannot be used.

Shapes: N rows.
"""

import math
from datetime import UTC, datetime
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Period = Literal["week", "day", "hour"]

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EPOCH_SECONDS = 10**11  # the year 5138: a larger number must have a finer unit


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type can be read as numbers; a column of nulls can."""
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal, pa.types.is_null)
    return any(test(kind) for test in tests)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text or bytes."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    more = (pa.types.is_string_view, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return any(test(kind) for test in tests + more)


def is_time(kind: pa.DataType) -> bool:
    """Whether a column of this type can be read as instants: time stamps, dates, epochs, ISO-8601 text."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind)) or is_number(kind) or is_text(kind)


def is_id(kind: pa.DataType) -> bool:
    """Whether a column of this type can name things: text or whole numbers."""
    return is_text(kind) or is_number(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, whether dictionary-encoded or not."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def plain(column: pa.Array) -> pa.Array:
    """The column without dictionary encoding."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def floats(column: pa.Array) -> pa.FloatArray:
    """A numeric column in float32; values beyond its range are infinite, nulls stay null."""
    return plain(column).cast(pa.float32(), safe=False)


def numbers(column: pa.Array) -> NDArray[np.float32]:
    """A numeric column in float32 with NaN for null."""
    values_N: NDArray[np.float32] = floats(column).fill_null(math.nan).to_numpy(zero_copy_only=False)
    return values_N


def texts(column: pa.Array) -> tuple[pa.StringArray, NDArray[np.bool_]]:
    """A column as text, null where it has no value, and the rows whose bytes are not UTF-8 (null there too).

    Whole numbers are written without a decimal point, even floats: many tools turn a column of integers into floats
    as soon as it has a null.
    """
    column = plain(column)
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


def spread(column: pa.Array, lengths_Q: NDArray[np.int64]) -> pa.Array:
    """The values of all groups' lists, with null for each document of a group without a list.

    Example:
        >>> spread(pa.array([[1, 2], None]), np.array([2, 1])).to_pylist()
        [1, 2, None]
    """
    if not column.null_count:
        return column.flatten()
    valid_N = np.repeat(column.is_valid().to_numpy(zero_copy_only=False), lengths_Q)
    index_N = np.where(valid_N, np.cumsum(valid_N) - 1, 0)
    return column.flatten().take(pa.array(index_N, mask=~valid_N))


def periods(column: pa.Array, period: Period) -> tuple[pa.StringArray, NDArray[np.bool_]]:
    """The period of each instant in UTC, and the rows without a time stamp or with one that cannot be read.

    Time stamps and text without a zone count as UTC. Numbers are time since 1970: seconds below 10**11, otherwise
    milli-, micro- or nanoseconds, the first unit in which they are below 10**11 seconds; so milliseconds are
    distinguished from seconds from March 1973 on.

    Example:
        >>> names, bad = periods(pa.array(["2026-02-14T09:30:00+01:00", "1771057800", "soon"]), "hour")
        >>> names.to_pylist(), bad.tolist()
        (['2026-02-14T08', '2026-02-14T08', None], [False, False, True])
    """
    seconds_N, bad_N = _instants(plain(column))
    hours, index_N = np.unique(seconds_N // 3600, return_inverse=True)
    names_N = pa.array([_period_name(int(hour), period) for hour in hours], pa.string()).take(pa.array(index_N))
    names_N = pc.if_else(pa.array(bad_N), pa.scalar(None, pa.string()), names_N)
    return names_N, names_N.is_null().to_numpy(zero_copy_only=False)


def _period_name(hour: int, period: Period) -> str | None:
    try:
        instant = datetime.fromtimestamp(hour * 3600, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    match period:
        case "week":
            year, week, _ = instant.isocalendar()
            return f"{year:04d}-W{week:02d}"
        case "day":
            return f"{instant:%Y-%m-%d}"
        case "hour":
            return f"{instant:%Y-%m-%dT%H}"


def _instants(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Seconds since 1970, 0 for rows without a time, and which rows these are."""
    missing_N = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("s"), safe=False)
    if pa.types.is_timestamp(column.type):
        ticks_N = column.cast(pa.int64()).fill_null(0).to_numpy()
        return ticks_N // _PER_SECOND[column.type.unit], missing_N
    if not is_text(column.type):
        return _epochs(column)
    text, _ = texts(column)
    # the casts are fast, and fail where one value has another form: with a zone, without one, a number
    for target in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        try:
            return _instants(text.cast(target))
        except pa.ArrowInvalid:
            continue
    return _epochs(pa.array([_epoch(value) for value in text.to_pylist()], pa.float64()))


def _epochs(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Numbers as seconds since 1970; float64 is exact enough, since a period lasts an hour at least."""
    values_N = column.cast(pa.float64(), safe=False).fill_null(math.nan).to_numpy(zero_copy_only=False)
    for _ in ("ms", "us", "ns"):
        values_N = np.where(np.abs(values_N) >= _EPOCH_SECONDS, values_N / 1000, values_N)
    bad_N = ~(np.abs(values_N) < _EPOCH_SECONDS)
    return np.floor(np.where(bad_N, 0, values_N)).astype(np.int64), bad_N


def _epoch(text: str | None) -> float | None:
    """Seconds since 1970 of one time stamp in a column of mixed forms; None where it cannot be read."""
    text = (text or "").strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        instant = datetime.fromisoformat(text)
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
