"""Windows: query groups of some row groups, decoded from Arrow without copying features, and cut into micro-batches.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, R rows of the tables (all groups, also those not served).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ltrscale.batch import QueryGroups, Tokens
from ltrscale.data.dataset import scores
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.manifest import places as find_places
from ltrscale.data.dataset.scores import SCORES
from ltrscale.data.dataset.selection import RowGroup, Selection
from ltrscale.data.dataset.tokens import LISTS, Owner, TokenField
from ltrscale.data.stream import tokens
from ltrscale.data.stream.readers import PREPARE_AGAIN
from ltrscale.data.stream.tokens import TokenRows
from ltrscale.errors import InputError

Scalar = TypeVar("Scalar", bound=np.generic)

_OPTIONAL = ("weights", "positions", "gains")
_LABELS_REMEDY = "set the split's labels to `labels`, or name a data set that was relabelled as a whole"


@dataclass(frozen=True)
class Window:
    """Query groups, in file order or in the order in which they are served.

    `features` has for each group a flat view of an Arrow buffer, or a copy of the features served; `columns_N` has the
    labels, weights, positions and gains if present, NaN where a group has none. `ids_Q` is None if groups mix documents
    of different queries (`regroup`).
    """

    ids_Q: NDArray[np.int64] | None
    offsets_Q1: NDArray[np.int64]
    features: list[NDArray[np.float32]]
    columns_N: dict[str, NDArray[np.float32]]
    mean_times_Q: NDArray[np.float64] | None = None
    """How often each group is served per epoch on average, where a column says so."""
    tokens: Mapping[TokenField, TokenRows] = field(default_factory=dict)
    """The token lists of queries and documents, views like `features`."""

    @property
    def tokens_Q(self) -> NDArray[np.int64]:
        """Tokens of each group as pairs: those of its documents, and of its query once for each document."""
        lengths_Q = np.diff(self.offsets_Q1)
        total_Q = np.zeros(len(lengths_Q), np.int64)
        for key, rows in self.tokens.items():
            if key.of == "query":
                total_Q += rows.lengths_R * lengths_Q
            else:
                ends_N1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows.lengths_R)])
                total_Q += np.diff(ends_N1[self.offsets_Q1])
        return total_Q

    def take(self, groups_M: NDArray[np.int64]) -> "Window":
        """The groups with these numbers, in this order; a number may repeat."""
        lengths_M = np.diff(self.offsets_Q1)[groups_M]
        rows_N = _runs(self.offsets_Q1[groups_M], lengths_M)
        return Window(
            None if self.ids_Q is None else self.ids_Q[groups_M],
            _offsets(lengths_M),
            [self.features[group] for group in groups_M.tolist()],
            {name: column_N[rows_N] for name, column_N in self.columns_N.items()},
            None if self.mean_times_Q is None else self.mean_times_Q[groups_M],
            {key: rows.take(groups_M if key.of == "query" else rows_N) for key, rows in self.tokens.items()},
        )

    def copied(self) -> "Window":
        """The same groups without Arrow's buffers, which may hold many more."""
        copies = {key: rows.copied() for key, rows in self.tokens.items()}
        return replace(self, features=[view.copy() for view in self.features], tokens=copies)

    @staticmethod
    def joined(windows: Sequence["Window"]) -> "Window":
        """The groups of several windows, which have the same columns, one window after the other."""
        columns_N = {
            name: np.concatenate([window.columns_N[name] for window in windows]) for name in windows[0].columns_N
        }
        return Window(
            _concatenated([window.ids_Q for window in windows]),
            _offsets(np.concatenate([np.diff(window.offsets_Q1) for window in windows])),
            list(itertools.chain.from_iterable(window.features for window in windows)),
            columns_N,
            _concatenated([window.mean_times_Q for window in windows]),
            {key: TokenRows.joined([window.tokens[key] for window in windows]) for key in windows[0].tokens},
        )


def _concatenated(parts: Sequence[NDArray[Scalar] | None]) -> NDArray[Scalar] | None:
    """The parts as one array; None if one of them is."""
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if len(there) == len(parts) else None


class Cut(NamedTuple):
    """The groups `first` to `last`, exclusive, of a window."""

    window: Window
    first: int
    last: int


def assemble(cuts: Sequence[Cut], n_features: int) -> QueryGroups:
    """Copy groups out of the Arrow buffers into a micro-batch: the only copy of a document that a stream makes."""
    lengths_Q = np.concatenate([np.diff(window.offsets_Q1[first : last + 1]) for window, first, last in cuts])
    columns_N = {
        name: torch.from_numpy(
            np.concatenate([w.columns_N[name][w.offsets_Q1[first] : w.offsets_Q1[last]] for w, first, last in cuts])
        )
        for name in cuts[0].window.columns_N
    }
    values = np.concatenate([view for window, first, last in cuts for view in window.features[first:last]])
    ids = [window.ids_Q[first:last] for window, first, last in cuts if window.ids_Q is not None]
    return QueryGroups(
        torch.from_numpy(values).view(int(lengths_Q.sum()), n_features),
        torch.from_numpy(_offsets(lengths_Q)),
        columns_N.get("labels"),
        torch.from_numpy(np.concatenate(ids)) if ids else None,
        columns_N.get("weights"),
        columns_N.get("positions"),
        columns_N.get("gains"),
        _tokens(cuts, "query"),
        _tokens(cuts, "document"),
    ).checked()


def _tokens(cuts: Sequence[Cut], of: Owner) -> dict[str, Tokens]:
    """The tokens of the queries or documents of some groups, by the name of their field."""
    ends = [(first, last) if of == "query" else window.offsets_Q1[[first, last]] for window, first, last in cuts]
    return {
        key.name: TokenRows.to_batch([cut.window.tokens[key].part(*rows) for cut, rows in zip(cuts, ends, strict=True)])
        for key in cuts[0].window.tokens
        if key.of == of
    }


def regroup(window: Window, order_N: NDArray[np.int64], n_features: int) -> Window:
    """The documents of a window dealt to new groups of the same lengths, in the same places.

    Document n of the window goes to place `order_N[n]`. The new groups are no queries, so they have no ids and no
    tokens of a query. This copies each document, in addition to the copy in `assemble`.
    """
    bounds = list(itertools.pairwise(window.offsets_Q1.tolist()))
    values_NF = np.empty((len(order_N), n_features), np.float32)
    for view, (first, last) in zip(window.features, bounds, strict=True):
        values_NF[order_N[first:last]] = view.reshape(-1, n_features)
    columns_N = {name: np.empty_like(column_N) for name, column_N in window.columns_N.items()}
    for name, column_N in window.columns_N.items():
        columns_N[name][order_N] = column_N
    features = [values_NF[first:last].reshape(-1) for first, last in bounds]
    back_N = np.argsort(order_N)
    of_documents = {key: rows.take(back_N) for key, rows in window.tokens.items() if key.of == "document"}
    return replace(window, ids_Q=None, features=features, columns_N=columns_N, tokens=of_documents)


class Decoder:
    """Turns tables of a selection's row groups into windows, and checks them against the manifest.

    Only the feature buffer is handled table by table; all other work is done once per window, on concatenated columns.

    Args:
        selection: the selection to read; of labelled groups it may have no feature, and then none is read.
        documents: False to find the served rows only, which needs few columns.
    """

    def __init__(self, selection: Selection, *, documents: bool = True) -> None:
        self.selection = selection
        self._all_labelled = selection.label_column == SCORES
        who = ["labels"] if selection.labelled and not self._all_labelled else []
        values = [selection.label_column] if selection.labelled and selection.label_column not in who else []
        features = ["features"] if selection.features else []
        of_tokens = [column for key in selection.tokens for column in key.columns]
        self.columns = ["gid", *features, *_OPTIONAL, *of_tokens, *who, *values] if documents else ["gid", *who]
        self._types: dict[str, pa.DataType] = {}
        self._places: dict[tuple[Feature, ...], list[int] | None] = {}

    def served_rows(self, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table]) -> NDArray[np.int64]:
        """The rows that are served, numbered over all tables: all rows, or the kept ones among the labelled rows.

        Raises:
            InputError: a table differs from its manifest, or has other columns than the tables before it.
        """
        for row_group, table in zip(row_groups, tables, strict=True):
            self._check_types(row_group, table)
        if not self.selection.labelled:
            return np.arange(sum(map(len, tables)))
        kept = np.concatenate([self.selection.kept(row_group) for row_group in row_groups])
        if self._all_labelled:
            return np.flatnonzero(kept)
        labelled_R = _concat(tables, "labels").is_valid().to_numpy(zero_copy_only=False)
        firsts = _offsets(np.array([len(table) for table in tables]))[:-1]
        counts = np.add.reduceat(labelled_R, firsts, dtype=np.int64)
        for row_group, n in zip(row_groups, counts.tolist(), strict=True):
            if n != row_group.labelled:
                listed = f"the manifest lists {row_group.labelled}"
                raise mismatch(row_group, f"it has {n} labelled query groups where {listed}")
        rows_Q: NDArray[np.int64] = np.flatnonzero(labelled_R)[kept]
        return rows_Q

    def decode(self, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table], rows_Q: NDArray[np.int64]) -> Window:
        """The groups in the rows `rows_Q` of some row groups' tables, in this order; a row may repeat.

        Raises:
            InputError: a table differs from its manifest, or a group's values do not fit its documents.
        """
        if self.selection.features:
            features, lengths_Q = self._features(row_groups, tables, rows_Q)
        else:
            lengths_Q = np.diff(_concat(tables, self.selection.label_column).offsets.to_numpy())[rows_Q].astype(
                np.int64
            )
            features = [np.empty(0, np.float32)] * len(rows_Q)
        columns_N = {
            name: _gather(name, row_groups, tables, rows_Q, lengths_Q) for name in _OPTIONAL if name in self._types
        }
        if self.selection.labelled:
            column = self.selection.label_column
            if column == "relevance":
                _check_present(column, row_groups, tables, rows_Q)
            columns_N["labels"] = _gather(column, row_groups, tables, rows_Q, lengths_Q)
        ids_Q = group_ids(row_groups, tables)[rows_Q]
        tokens = {key: self._tokens(key, row_groups, tables, rows_Q, lengths_Q) for key in self.selection.tokens}
        return Window(ids_Q, _offsets(lengths_Q), features, columns_N, tokens=tokens)

    def _tokens(
        self,
        key: TokenField,
        row_groups: Sequence[RowGroup],
        tables: Sequence[pa.Table],
        rows_Q: NDArray[np.int64],
        lengths_Q: NDArray[np.int64],
    ) -> TokenRows:
        """The tokens of a field, checked against the vocabulary."""
        assert self.selection.vocabulary is not None
        try:
            rows = tokens.decode(key, [_concat(tables, column) for column in key.columns], rows_Q, lengths_Q)
            tokens.check_ids(rows, self.selection.vocabulary.size)
        except ValueError as error:
            raise mismatch(row_groups[0], f"column {key.column!r} cannot be used: {error}") from error
        return rows

    def _check_types(self, row_group: RowGroup, table: pa.Table) -> None:
        types = {field.name: field.type for field in table.schema if field.name in self.columns}
        if "relevance" in self.columns and "relevance" not in types:
            raise mismatch(row_group, "there is no column 'relevance'", _LABELS_REMEDY)
        if not self._types:
            for name in self.columns:
                if not _is_usable(name, types.get(name)):
                    found = types.get(name, "not there")
                    raise mismatch(row_group, f"column {name!r} cannot be used: it is {found}", _remedy(name))
            self._types = types
        for name in types.keys() | self._types.keys():
            if types.get(name) != self._types.get(name):
                raise mismatch(row_group, f"column {name!r} is not as in the other files, or in some of them only")

    def _features(
        self, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table], rows_Q: NDArray[np.int64]
    ) -> tuple[list[NDArray[np.float32]], NDArray[np.int64]]:
        """Views of the features of some rows, and the rows' numbers of documents."""
        buffers, bounds, widths, places = [], [], [], []
        for row_group, table in zip(row_groups, tables, strict=True):
            stored = row_group.stored or self.selection.features
            n_features = len(stored)
            widths.append(n_features)
            places.append(self._places_in(stored))
            column = table.column("features")
            array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            buffers.append(_values(row_group, "features", array))
            bounds.append(array.offsets.to_numpy())  # of a slice they do not begin with 0
            found = int(bounds[-1][-1]) - int(bounds[-1][0])
            if found != row_group.documents * n_features:
                listed = f"{row_group.documents} documents of {n_features} features"
                raise mismatch(row_group, f"it has {found} feature values where the manifest lists {listed}")
        starts_Q = np.concatenate([b[:-1] for b in bounds])[rows_Q]
        stops_Q = np.concatenate([b[1:] for b in bounds])[rows_Q]
        owners_Q = np.repeat(np.arange(len(tables)), [len(table) for table in tables])[rows_Q]
        lengths_Q, rest_Q = np.divmod((stops_Q - starts_Q).astype(np.int64), np.array(widths)[owners_Q])
        if rest_Q.any():
            owner = owners_Q[rest_Q.argmax()]
            raise mismatch(row_groups[owner], f"a list is no multiple of {widths[owner]} features")
        features = []
        for owner, start, stop in zip(owners_Q.tolist(), starts_Q.tolist(), stops_Q.tolist(), strict=True):
            view, columns = buffers[owner][start:stop], places[owner]
            features.append(view if columns is None else view.reshape(-1, widths[owner])[:, columns].reshape(-1))
        return features, lengths_Q

    def _places_in(self, stored: tuple[Feature, ...]) -> list[int] | None:
        """The places of the served features in a file with these features (see `manifest.places`)."""
        if stored not in self._places:
            self._places[stored] = find_places(self.selection.features, stored, whose="the selection")
        return self._places[stored]


def group_ids(row_groups: Sequence[RowGroup], tables: Sequence[pa.Table]) -> NDArray[np.int64]:
    """The ids of all rows of some tables, unique over the data sets of a split, shape [R]."""
    bases_R = np.repeat([row_group.gid_base for row_group in row_groups], [len(table) for table in tables])
    ids_R: NDArray[np.int64] = _concat(tables, "gid").to_numpy() + bases_R
    return ids_R


def mismatch(row_group: RowGroup, what: str, remedy: str = PREPARE_AGAIN) -> InputError:
    """The error for a row group with unexpected content."""
    return InputError(f"{row_group.url}: row group {row_group.index}: {what}; {remedy}")


def _is_usable(name: str, found: pa.DataType | None) -> bool:
    """Whether a column has the type that it must have, or is missing and may be."""
    if found is None:
        return name in _OPTIONAL
    if name == "gid":
        return bool(found == pa.int64())
    if name.startswith(("query_tokens_", "document_tokens_", "document_lengths_")):
        return bool(found == LISTS)
    return pa.types.is_list(found) and bool(found.value_type == (pa.float64() if name == SCORES else pa.float32()))


def _remedy(name: str) -> str:
    """The remedy for a bad column."""
    return scores.SCORE_AGAIN if name == SCORES else PREPARE_AGAIN


def _check_present(
    name: str, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table], rows_Q: NDArray[np.int64]
) -> None:
    """Check that groups with labels, which are served, have values in the column that serves as labels."""
    lists = _concat(tables, name)
    if not lists.null_count:
        return
    absent_Q = lists.is_null().to_numpy(zero_copy_only=False)[rows_Q]
    if absent_Q.any():
        row = rows_Q[absent_Q.argmax()]
        owners_R = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        gid = _concat(tables, "gid")[row]
        raise mismatch(row_groups[owners_R[row]], f"query group {gid} has labels and no {name!r}", _LABELS_REMEDY)


def _gather(
    name: str,
    row_groups: Sequence[RowGroup],
    tables: Sequence[pa.Table],
    rows_Q: NDArray[np.int64],
    lengths_Q: NDArray[np.int64],
) -> NDArray[np.float32]:
    """The values of some rows, one after the other, of a column with one value per document; NaN for a null row."""
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
        raise mismatch(owner, f"column {name!r} does not have one value for each document", _remedy(name))
    if present_Q is None:
        return values[_runs(starts_R1[rows_Q], lengths_Q)].astype(np.float32, copy=False)  # scores are float64
    values_N = np.full(lengths_Q.sum(), np.nan, np.float32)
    values_N[np.repeat(present_Q, lengths_Q)] = values[_runs(starts_R1[rows_Q][present_Q], lengths_Q[present_Q])]
    return values_N


def _runs(starts_Q: NDArray[np.int64], lengths_Q: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indices of runs with these starts and lengths, one run after the other."""
    index_N: NDArray[np.int64] = np.repeat(starts_Q - _offsets(lengths_Q)[:-1], lengths_Q)
    index_N += np.arange(len(index_N))
    return index_N


def _concat(tables: Sequence[pa.Table], name: str) -> pa.Array:
    """A column of all tables as one array."""
    return pa.concat_arrays([chunk for table in tables for chunk in table.column(name).chunks])


def _values(row_group: RowGroup, name: str, lists: pa.ListArray) -> NDArray[np.float32]:
    """A view of the values of all lists; for a sliced array all of the child, since the offsets refer to that."""
    if lists.values.null_count:
        raise mismatch(row_group, f"column {name!r} has a null in a list, where NaN is meant", _remedy(name))
    values: NDArray[np.float32] = lists.values.to_numpy()
    return values


def _offsets(lengths_Q: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_Q)])
