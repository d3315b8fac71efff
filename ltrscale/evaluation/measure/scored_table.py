"""Scores and labels from a table of documents: a row has a query, an item, a label and a score.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import group_index, to_offsets
from ltrscale.config import Config
from ltrscale.errors import InputError, nearest


class TableSource(Config):
    """A table with a row for each document, in Parquet or CSV; the rows of a query may lie apart."""

    kind: Literal["table"] = "table"
    path: str
    """File or URL; a name that ends in .parquet is Parquet, any other CSV with a header, which may be packed (.gz)."""
    query: str = "query"
    """Column of the query: the rows with the same value are one group."""
    item: str = "item"
    """Column of the item's name, by which trec_eval orders ties; different within a query."""
    label: str = "label"
    """Column of the label, 0 or more."""
    score: str = "score"
    """Column of the score."""


@dataclass(frozen=True)
class Lists:
    """Scored and labelled groups, with the names of queries and the order of the items' names."""

    queries: Sequence[str]
    offsets_Q1: Tensor
    scores_N: Tensor
    labels_N: Tensor
    names_N: Tensor
    """Integers in the order of the items' names."""

    @property
    def group_N(self) -> Tensor:
        """The group of each document."""
        return group_index(self.offsets_Q1)


def read_lists(source: TableSource) -> Lists:
    """Read a table; groups are in the order of their first rows, and documents in the order of the rows.

    Raises:
        InputError: a column is missing, a value is missing or no number, a label is negative, or a query has an item
            twice; the message names the row, from 1 after the header.
    """
    table = _read(source)
    queries = table[source.query].cast(pa.string()).combine_chunks()
    items = table[source.item].cast(pa.string()).combine_chunks()
    labels, scores = _numbers(table, source.label, source), _numbers(table, source.score, source)
    if (negative := np.flatnonzero(labels < 0)).size:
        raise InputError(f"{source.path}: row {negative[0] + 1}: {source.label} is below 0; labels are 0 or more")
    coded = queries.dictionary_encode()  # codes are in the order of the first rows
    codes = coded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    # UTF-8 orders bytes as strcmp does
    names = np.empty(len(items), np.int64)
    by_name = np.asarray(pc.sort_indices(items.cast(pa.binary())))
    names[by_name] = np.arange(len(items))
    _check_items(source, codes, items)
    return Lists(
        coded.dictionary.to_pylist(),
        to_offsets(torch.from_numpy(np.bincount(codes, minlength=len(coded.dictionary)))),
        *(torch.from_numpy(values[order]) for values in (scores, labels, names)),
    )


def _read(source: TableSource) -> pa.Table:
    columns = [source.query, source.item, source.label, source.score]
    data = storage.read_bytes(source.path)
    try:
        if source.path.endswith(".parquet"):
            there = pq.read_schema(pa.BufferReader(data)).names
        else:
            stream: Any = pa.input_stream(
                pa.BufferReader(data), compression="gzip" if source.path.endswith(".gz") else None
            )
            # names as text: a query 007 is not 7
            texts = pyarrow.csv.ConvertOptions(column_types={source.query: pa.string(), source.item: pa.string()})
            table = pyarrow.csv.read_csv(stream, convert_options=texts)
            there = table.column_names
        if missing := [name for name in columns if name not in there]:
            near = nearest(missing[0], there)
            raise InputError(f"{source.path}: no column {missing[0]!r}; did you mean {near!r}? Set it in source")
        if source.path.endswith(".parquet"):
            table = pq.read_table(pa.BufferReader(data), columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{source.path}: neither Parquet nor CSV as its name says ({error})") from error
    if not len(table):
        raise InputError(f"{source.path}: has no rows; name another file")
    for name in columns[:2]:
        _check_there(source, table[name].is_null().to_numpy(), name)
    return table


def _numbers(table: pa.Table, name: str, source: TableSource) -> np.ndarray[Any, np.dtype[np.float64]]:
    column = table[name]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
        raise InputError(f"{source.path}: column {name!r} has values that are no numbers ({column.type}); correct them")
    values = column.cast(pa.float64(), safe=False).to_numpy()
    _check_there(source, ~np.isfinite(values), name)
    return np.ascontiguousarray(values)


def _check_there(source: TableSource, bad: np.ndarray[Any, Any], name: str) -> None:
    if bad.any():
        raise InputError(
            f"{source.path}: row {int(bad.argmax()) + 1}: {name} is missing or not finite; leave the row out"
        )


def _check_items(source: TableSource, codes: np.ndarray[Any, Any], items: pa.Array) -> None:
    """Refuse a query with an item twice."""
    pairs = np.stack([codes, items.dictionary_encode().indices.to_numpy()], axis=1)
    _, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        row = int(first[counts > 1].min())
        raise InputError(
            f"{source.path}: row {row + 1}: its query has item {items[row].as_py()!r} in another row too; keep one"
        )
