"""The column `features` of data files: for each group the values of its documents, one after the other, in float32.

Files hold it as lists, or as bytes, little-endian: one value of Parquet for each group, so that reading takes a
fraction of the time. In memory it is lists, which of bytes are a view.

Shapes: Q groups, Q1 = Q + 1 bounds of their values, N documents, F features, S of them stored.
"""

import numpy as np
import pyarrow as pa

from ltrscale.arrays import Floats, Ints
from ltrscale.data.columns import Rows

FEATURES = "features"
_LISTS = pa.list_(pa.field("element", pa.float32()))  # the name that elements have in lists from Parquet
_WIDTH = 4


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold values as bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def with_lists(schema: pa.Schema, name: str = FEATURES) -> pa.Schema:
    """The schema that `as_lists` gives these columns."""
    place = schema.get_field_index(name)
    return schema.set(place, pa.field(name, _LISTS)) if place >= 0 and is_bytes(schema.types[place]) else schema


def as_lists(rows: Rows, name: str = FEATURES) -> Rows:
    """The rows with a column of bytes as lists that share their memory; other columns stay as they are.

    Raises:
        pa.ArrowInvalid: bytes are no whole number of values; names the row, from 0.

    Example:
        >>> as_lists(pa.table({"features": [np.float32([1.5, -0.0]).tobytes(), None, b""]}))["features"].to_pylist()
        [[1.5, -0.0], None, []]
    """
    place = rows.schema.get_field_index(name)
    if place < 0 or not is_bytes(rows.schema.types[place]):
        return rows
    column: pa.Array | pa.ChunkedArray = rows.column(place)
    if isinstance(column, pa.ChunkedArray):
        return rows.set_column(place, name, pa.chunked_array([*map(_lists, column.chunks)], _LISTS))
    return rows.set_column(place, name, _lists(column))


def _lists(column: pa.Array) -> pa.ListArray:
    if not len(column):
        return pa.array([], _LISTS)
    bits = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    _, bounds, content = column.buffers()
    bounds_Q1 = np.frombuffer(bounds, bits)[column.offset :][: len(column) + 1]
    cut_Q = np.diff(bounds_Q1) % _WIDTH > 0
    if cut_Q.any():
        row = int(cut_Q.argmax())
        size = bounds_Q1[row + 1] - bounds_Q1[row]
        raise pa.ArrowInvalid(f"row {row} has features of {size} bytes, which is no whole number of float32 values")
    first, last = int(bounds_Q1[0]), int(bounds_Q1[-1])
    content = pa.py_buffer(b"") if content is None else content.slice(first, last - first)
    values = pa.Array.from_buffers(pa.float32(), (last - first) // _WIDTH, [None, content])
    bounds = pa.array((bounds_Q1 - first) // _WIDTH, pa.int32())
    return pa.ListArray.from_arrays(bounds, values, _LISTS, mask=column.is_null() if column.null_count else None)


def laid_out(stored_NS: Floats, places_F: Ints | None) -> Floats:
    """The values of features by their places in a file, missing at -1; the stored values themselves if None."""
    if places_F is None:
        return stored_NS
    features_NF = stored_NS[:, places_F]
    features_NF[:, places_F < 0] = np.nan
    return features_NF


def as_bytes(table: pa.Table) -> pa.Table:
    """The rows with `features` as bytes that share the memory of the lists, of which none is null and none has a null.

    The bytes have 64-bit bounds, because those of a table may pass 2 GiB.
    """
    lists = table.column(FEATURES).combine_chunks()
    assert not lists.null_count
    assert not lists.values.null_count
    bounds_Q1 = (lists.offsets.to_numpy().astype(np.int64) + lists.values.offset) * _WIDTH
    content = lists.values.buffers()[1] or pa.py_buffer(b"")
    values = pa.Array.from_buffers(pa.large_binary(), len(lists), [None, pa.py_buffer(bounds_Q1), content])
    return table.set_column(table.schema.get_field_index(FEATURES), FEATURES, values)
