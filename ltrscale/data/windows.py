"""Windows: query groups of some row groups, decoded from Arrow without copying features, and cut into micro-batches.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, R rows of the tables (groups before the unserved ones are left out).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ltrscale.batch import QueryGroups
from ltrscale.data.readers import REMEDY
from ltrscale.data.split import RowGroup, Selection
from ltrscale.errors import InputError

_OPTIONAL = ("weights", "positions")


@dataclass(frozen=True)
class Window:
    """Query groups in the order in which they are served.

    `features` holds for each group a flat view of an Arrow buffer; `columns_N` the labels, weights and positions that
    there are, NaN where a group has none.
    """

    ids_Q: NDArray[np.int64]
    offsets_Q1: NDArray[np.int64]
    features: list[NDArray[np.float32]]
    columns_N: dict[str, NDArray[np.float32]]


class Cut(NamedTuple):
    """The groups `first` to `last`, exclusive, of a window."""

    window: Window
    first: int
    last: int


def assemble(cuts: Sequence[Cut], n_features: int) -> QueryGroups:
    """Copy groups out of the Arrow buffers into a micro-batch: the one copy of a document that a stream makes."""
    lengths_Q = np.concatenate([np.diff(window.offsets_Q1[first : last + 1]) for window, first, last in cuts])
    columns_N = {
        name: torch.from_numpy(
            np.concatenate([w.columns_N[name][w.offsets_Q1[first] : w.offsets_Q1[last]] for w, first, last in cuts])
        )
        for name in cuts[0].window.columns_N
    }
    values = np.concatenate([view for window, first, last in cuts for view in window.features[first:last]])
    return QueryGroups(
        torch.from_numpy(values).view(-1, n_features),
        torch.from_numpy(_offsets(lengths_Q)),
        columns_N.get("labels"),
        torch.from_numpy(np.concatenate([window.ids_Q[first:last] for window, first, last in cuts])),
        columns_N.get("weights"),
        columns_N.get("positions"),
    )


class Decoder:
    """Turns tables of a selection's row groups into windows, and checks them against the manifest.

    Work on each table is kept to its feature buffer; all else is done once a window, on its columns put together.
    """

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.columns = ["gid", "features", *_OPTIONAL, *(["labels"] if selection.labelled else [])]
        self._types: dict[str, pa.DataType] = {}

    def decode(self, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table], order_Q: NDArray[np.int64]) -> Window:
        """The served groups of some row groups; `order_Q` puts those of all in the order of serving.

        Raises:
            InputError: a table does not hold what the manifest lists, or has other columns than the tables before it.
        """
        for row_group, table in zip(row_groups, tables, strict=True):
            self._check_types(row_group, table)
        rows_Q = self._served_rows(row_groups, tables)[order_Q]
        features, lengths_Q = self._features(row_groups, tables, rows_Q)
        columns_N = {
            name: _gather(name, row_groups, tables, rows_Q, lengths_Q)
            for name in self.columns
            if name in self._types and name not in ("gid", "features")
        }
        bases_R = np.repeat([row_group.gid_base for row_group in row_groups], [len(table) for table in tables])
        ids_Q = (_concat(tables, "gid").to_numpy() + bases_R)[rows_Q]
        return Window(ids_Q, _offsets(lengths_Q), features, columns_N)

    def _check_types(self, row_group: RowGroup, table: pa.Table) -> None:
        types = {field.name: field.type for field in table.schema}
        if not self._types:
            for name in self.columns:
                if not _is_usable(name, types.get(name)):
                    raise _mismatch(row_group, f"column {name!r} is {types.get(name, 'not there')}, which it cannot be")
            self._types = types
        for name in types.keys() | self._types.keys():
            if types.get(name) != self._types.get(name):
                raise _mismatch(row_group, f"column {name!r} is not as in the other files, or in some of them only")

    def _served_rows(self, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table]) -> NDArray[np.int64]:
        """The rows that are served, of all tables put together: all, or the kept ones of those that have labels."""
        if not self.selection.labelled:
            return np.arange(sum(map(len, tables)))
        labelled_R = _concat(tables, "labels").is_valid().to_numpy(zero_copy_only=False)
        firsts = _offsets(np.array([len(table) for table in tables]))[:-1]
        counts = np.add.reduceat(labelled_R, firsts, dtype=np.int64)
        for row_group, n in zip(row_groups, counts.tolist(), strict=True):
            if n != row_group.labelled:
                listed = f"the manifest lists {row_group.labelled}"
                raise _mismatch(row_group, f"it has {n} labelled query groups where {listed}")
        kept = np.concatenate([self.selection.kept(row_group) for row_group in row_groups])
        rows_Q: NDArray[np.int64] = np.flatnonzero(labelled_R)[kept]
        return rows_Q

    def _features(
        self, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table], rows_Q: NDArray[np.int64]
    ) -> tuple[list[NDArray[np.float32]], NDArray[np.int64]]:
        """Views of the features of some rows, and their documents."""
        n_features = len(self.selection.features)
        buffers, bounds = [], []
        for row_group, table in zip(row_groups, tables, strict=True):
            column = table.column("features")
            array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            buffers.append(_values(row_group, "features", array))
            bounds.append(array.offsets.to_numpy())
            found = int(bounds[-1][-1]) - int(bounds[-1][0])
            if found != row_group.documents * n_features:
                listed = f"{row_group.documents} documents of {n_features} features"
                raise _mismatch(row_group, f"it has {found} feature values where the manifest lists {listed}")
        starts_Q = np.concatenate([b[:-1] for b in bounds])[rows_Q]
        stops_Q = np.concatenate([b[1:] for b in bounds])[rows_Q]
        lengths_Q, rest_Q = np.divmod((stops_Q - starts_Q).astype(np.int64), n_features)
        owners_Q = np.repeat(np.arange(len(tables)), [len(table) for table in tables])[rows_Q]
        if rest_Q.any():
            raise _mismatch(row_groups[owners_Q[rest_Q.argmax()]], f"a list is no multiple of {n_features} features")
        places = zip(owners_Q.tolist(), starts_Q.tolist(), stops_Q.tolist(), strict=True)
        return [buffers[owner][start:stop] for owner, start, stop in places], lengths_Q


def _is_usable(name: str, found: pa.DataType | None) -> bool:
    """Whether a column has the type that it must have, or may be missing."""
    if found is None:
        return name in _OPTIONAL
    if name == "gid":
        return bool(found == pa.int64())
    return pa.types.is_list(found) and bool(found.value_type == pa.float32())


def _gather(
    name: str,
    row_groups: Sequence[RowGroup],
    tables: Sequence[pa.Table],
    rows_Q: NDArray[np.int64],
    lengths_Q: NDArray[np.int64],
) -> NDArray[np.float32]:
    """The values of a column with one value a document, of some rows one after the other; NaN where a row is null."""
    lists = _concat(tables, name)
    values = _values(row_groups[0], name, lists)
    starts_R1 = lists.offsets.to_numpy().astype(np.int64)
    present_Q = lists.is_valid().to_numpy(zero_copy_only=False)[rows_Q] if lists.null_count else None
    uneven_Q = np.diff(starts_R1)[rows_Q] != lengths_Q
    if present_Q is not None:
        uneven_Q &= present_Q
    if uneven_Q.any():
        owners_R = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        owner = row_groups[owners_R[rows_Q[uneven_Q.argmax()]]]
        raise _mismatch(owner, f"column {name!r} does not have one value for each document")
    if present_Q is None:
        return values[_runs(starts_R1[rows_Q], lengths_Q)]
    values_N = np.full(lengths_Q.sum(), np.nan, np.float32)
    values_N[np.repeat(present_Q, lengths_Q)] = values[_runs(starts_R1[rows_Q][present_Q], lengths_Q[present_Q])]
    return values_N


def _runs(starts_Q: NDArray[np.int64], lengths_Q: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of runs that start here and are so long, one run after the other."""
    index_N: NDArray[np.int64] = np.repeat(starts_Q - _offsets(lengths_Q)[:-1], lengths_Q)
    index_N += np.arange(len(index_N))
    return index_N


def _concat(tables: Sequence[pa.Table], name: str) -> pa.Array:
    """A column of all tables as one array."""
    return pa.concat_arrays([chunk for table in tables for chunk in table.column(name).chunks])


def _values(row_group: RowGroup, name: str, lists: pa.ListArray) -> NDArray[np.float32]:
    """A view of the values of all lists; of a sliced array it is the whole child, which the offsets refer to."""
    if lists.values.null_count:
        raise _mismatch(row_group, f"column {name!r} has a null in a list, where NaN is meant")
    values: NDArray[np.float32] = lists.values.to_numpy()
    return values


def _offsets(lengths_Q: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_Q)])


def _mismatch(row_group: RowGroup, what: str) -> InputError:
    return InputError(f"{row_group.url}: row group {row_group.index}: {what}; {REMEDY}")
