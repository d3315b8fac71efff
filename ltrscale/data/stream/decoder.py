"""Turn tables of row groups into windows: decode, check against the manifest, keep in memory.

A column of the data set may say how many times its query groups are served per epoch.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, R rows of the tables (all groups, also those not served).
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from ltrscale.arrays import Doubles, Floats, Ints, offsets, runs
from ltrscale.config import Config
from ltrscale.data.columns import is_number, texts, value_type, without_dictionary
from ltrscale.data.dataset import scores
from ltrscale.data.dataset.columns import GOAL, LISTS, TokenField, from_columns, goal_column, laid_out, weighed
from ltrscale.data.dataset.manifest import Feature, stored_places
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.scores import SCORES
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.readers import PREPARE_AGAIN, RowGroupReader, column_names
from ltrscale.data.stream.windows import Window
from ltrscale.errors import InputError, nearest

_OPTIONAL = ("weights", "positions", "gains")
_LABELS_REMEDY = "set the split's labels to `labels`, or name a data set that was relabelled as a whole"


class Decoder:
    """Turns tables of a selection's row groups into windows, and checks them against the manifest.

    Only features are handled table by table; all other work is done once per window, on concatenated columns.

    Args:
        selection: the selection to read; a labelled one may have no features, and then none are read.
        documents: False to find only the served rows, which needs few columns.
    """

    def __init__(self, selection: Selection, *, documents: bool = True) -> None:
        self.selection = selection
        self._all_labelled = selection.reads_scores
        labels_column = ["labels"] if selection.labelled and not self._all_labelled else []
        self._goals = {name: goal_column(name, selection.known_goals) for name in selection.goals}
        of_labels = [*(name for name, _ in selection.label_weights), *self._goals.values()]
        of_labels = [*dict.fromkeys(of_labels)] if selection.labelled else []
        self._further = [name for name in of_labels if name not in ("labels", SCORES)]
        values = [name for name in of_labels if name not in labels_column]
        features = ["features"] if selection.features else []
        of_tokens = [column for key in selection.tokens for column in key.columns]
        self.columns = (
            ["gid", *features, *_OPTIONAL, *of_tokens, *labels_column, *values]
            if documents
            else ["gid", *labels_column]
        )
        self._types: dict[str, pa.DataType] = {}
        self._places: dict[tuple[Feature, ...], Ints | None] = {}
        self._last: tuple[tuple[Feature, ...], Ints | None] = (), None

    def served_rows(self, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table]) -> Ints:
        """The rows that are served, numbered over all tables: all rows, or the kept labelled ones.

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
        firsts = offsets(np.array([len(table) for table in tables]))[:-1]
        counts = np.add.reduceat(labelled_R, firsts, dtype=np.int64)
        for row_group, n in zip(row_groups, counts.tolist(), strict=True):
            if n != row_group.labelled:
                expected = f"the manifest lists {row_group.labelled}"
                raise mismatch(row_group, f"it has {n} labelled query groups where {expected}")
        rows_Q: Ints = np.flatnonzero(labelled_R)[kept]
        return rows_Q

    def decode(self, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table], rows_Q: Ints) -> Window:
        """Decode the groups in the rows `rows_Q` of some row groups' tables, in this order; a row may repeat.

        Raises:
            InputError: a table differs from its manifest, or a group's values do not fit its documents.
        """
        if self.selection.features:
            features, lengths_Q = self._features(row_groups, tables, rows_Q)
        else:
            column = self.selection.label_weights[0][0]
            lengths_Q = np.diff(_concat(tables, column).offsets.to_numpy())[rows_Q].astype(np.int64)
            features = [np.empty(0, np.float32)] * len(rows_Q)
        columns_N = {
            name: _gather(name, row_groups, tables, rows_Q, lengths_Q) for name in _OPTIONAL if name in self._types
        }
        if self.selection.labelled:
            for column in self._further:
                _check_present(column, row_groups, tables, rows_Q)
            columns_N["labels"] = weighed(
                self.selection.label_weights, lambda name: _gather(name, row_groups, tables, rows_Q, lengths_Q)
            )
            for name, column in self._goals.items():
                columns_N[f"{GOAL}{name}"] = _gather(column, row_groups, tables, rows_Q, lengths_Q)
        ids_Q = group_ids(row_groups, tables)[rows_Q]
        tokens = {key: self._tokens(key, row_groups, tables, rows_Q, lengths_Q) for key in self.selection.tokens}
        return Window(ids_Q, offsets(lengths_Q), features, columns_N, tokens=tokens)

    def _tokens(
        self,
        key: TokenField,
        row_groups: Sequence[RowGroup],
        tables: Sequence[pa.Table],
        rows_Q: Ints,
        lengths_Q: Ints,
    ) -> pa.ListArray:
        """The lists of tokens of some groups, or of their documents, checked against the vocabulary."""
        assert self.selection.vocabulary is not None
        columns = [_concat(tables, column) for column in key.columns]
        try:
            if any(column.type != LISTS or column.null_count or column.values.null_count for column in columns):
                raise ValueError("it must have a list of int32 in every row")
            if key.of == "query":
                lists = columns[0].take(pa.array(rows_Q))
            else:
                documents_R = pc.list_value_length(columns[1]).to_numpy()
                if not np.array_equal(documents_R[rows_Q], lengths_Q):
                    raise ValueError("it does not have one list of tokens for each document")
                lists = from_columns(*columns).take(pa.array(runs(offsets(documents_R)[rows_Q], lengths_Q)))
            _check_ids(lists.flatten().to_numpy(), self.selection.vocabulary.size)
        except ValueError as error:
            raise mismatch(row_groups[0], f"column {key.column!r} cannot be used: {error}") from error
        return lists

    def _check_types(self, row_group: RowGroup, table: pa.Table) -> None:
        types = {field.name: field.type for field in table.schema if field.name in self.columns}
        for name in self._further:
            if name in self.columns and name not in types:
                raise mismatch(row_group, f"there is no column {name!r}", _LABELS_REMEDY)
        if not self._types:
            for name in self.columns:
                if not _is_usable(name, types.get(name)):
                    actual_type = types.get(name, "not there")
                    raise mismatch(row_group, f"column {name!r} cannot be used: it is {actual_type}", _remedy(name))
            self._types = types
        for name in types.keys() | self._types.keys():
            if types.get(name) != self._types.get(name):
                raise mismatch(row_group, f"column {name!r} is not as in the other files, or in some of them only")

    def _features(
        self, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table], rows_Q: Ints
    ) -> tuple[list[Floats], Ints]:
        """Views of the features of some rows, and the number of documents of each row."""
        buffers, bounds, widths, places = [], [], [], []
        for row_group, table in zip(row_groups, tables, strict=True):
            stored = row_group.file.stored or self.selection.features
            n_features = len(stored)
            widths.append(n_features)
            places.append(self._places_in(stored))
            column = table.column("features")
            array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            buffers.append(_values(row_group, "features", array))
            bounds.append(array.offsets.to_numpy())  # of a slice they do not begin with 0
            values = int(bounds[-1][-1]) - int(bounds[-1][0])
            if values != row_group.documents * n_features:
                expected = f"{row_group.documents} documents of {n_features} features"
                raise mismatch(row_group, f"it has {values} feature values where the manifest lists {expected}")
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
            features.append(view if columns is None else laid_out(view.reshape(-1, widths[owner]), columns).reshape(-1))
        return features, lengths_Q

    def _places_in(self, stored: tuple[Feature, ...]) -> Ints | None:
        """The places of the served features in a file with these features; its data set has all of them."""
        if stored is not self._last[0]:  # the files of a data set share them, and their hash takes long
            if stored not in self._places:
                self._places[stored] = stored_places(self.selection.features, stored)
            self._last = stored, self._places[stored]
        return self._last[1]


def group_ids(row_groups: Sequence[RowGroup], tables: Sequence[pa.Table]) -> Ints:
    """The ids of all rows of some tables, unique over the data sets of a split, shape [R]."""
    bases_R = np.repeat([row_group.file.gid_base for row_group in row_groups], [len(table) for table in tables])
    ids_R: Ints = _concat(tables, "gid").to_numpy() + bases_R
    return ids_R


def mismatch(row_group: RowGroup, what: str, remedy: str = PREPARE_AGAIN) -> InputError:
    """The error for a row group with unexpected content."""
    return InputError(f"{row_group.file.url}: row group {row_group.index}: {what}; {remedy}")


def _is_usable(name: str, column_type: pa.DataType | None) -> bool:
    """True if a column has the required type, or is missing and optional."""
    if column_type is None:
        return name in _OPTIONAL
    if name == "gid":
        return bool(column_type == pa.int64())
    if name.startswith(("query_tokens_", "document_tokens_", "document_lengths_")):
        return bool(column_type == LISTS)
    return pa.types.is_list(column_type) and bool(
        column_type.value_type == (pa.float64() if name == SCORES else pa.float32())
    )


def _remedy(name: str) -> str:
    return scores.SCORE_AGAIN if name == SCORES else PREPARE_AGAIN


def _check_present(name: str, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table], rows_Q: Ints) -> None:
    """Check that served labelled groups have values in the column that serves as labels."""
    lists = _concat(tables, name)
    if not lists.null_count:
        return
    absent_Q = lists.is_null().to_numpy(zero_copy_only=False)[rows_Q]
    if absent_Q.any():
        row = int(rows_Q[absent_Q.argmax()])
        gid = _concat(tables, "gid")[row]
        owner = _owner(row, row_groups, tables)
        raise mismatch(owner, f"query group {gid} has labels and no {name!r}", _LABELS_REMEDY)


def _gather(
    name: str,
    row_groups: Sequence[RowGroup],
    tables: Sequence[pa.Table],
    rows_Q: Ints,
    lengths_Q: Ints,
) -> Floats:
    """The values of some rows of a column with one value per document, concatenated; NaN for a null row."""
    lists = _concat(tables, name)
    values = _values(row_groups[0], name, lists)
    starts_R1 = lists.offsets.to_numpy().astype(np.int64)
    present_Q = lists.is_valid().to_numpy(zero_copy_only=False)[rows_Q] if lists.null_count else None
    uneven_Q = np.diff(starts_R1)[rows_Q] != lengths_Q
    if present_Q is not None:
        uneven_Q &= present_Q
    if uneven_Q.any():
        owner = _owner(int(rows_Q[uneven_Q.argmax()]), row_groups, tables)
        raise mismatch(owner, f"column {name!r} does not have one value for each document", _remedy(name))
    if present_Q is None:
        return values[runs(starts_R1[rows_Q], lengths_Q)].astype(np.float32, copy=False)  # scores are float64
    values_N = np.full(lengths_Q.sum(), np.nan, np.float32)
    values_N[np.repeat(present_Q, lengths_Q)] = values[runs(starts_R1[rows_Q][present_Q], lengths_Q[present_Q])]
    return values_N


def _owner(row: int, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table]) -> RowGroup:
    """The row group of a row that is numbered over all tables."""
    return row_groups[int(np.searchsorted(np.cumsum([*map(len, tables)]), row, side="right"))]


def _concat(tables: Sequence[pa.Table], name: str) -> pa.Array:
    return pa.concat_arrays([chunk for table in tables for chunk in table.column(name).chunks])


def _values(row_group: RowGroup, name: str, lists: pa.ListArray) -> Floats:
    """A view of the values of all lists; the whole child of a sliced array, because the offsets refer to that."""
    if lists.values.null_count:
        raise mismatch(row_group, f"column {name!r} has a null in a list, where NaN is meant", _remedy(name))
    values: Floats = lists.values.to_numpy()
    return values


def _check_ids(ids_T: NDArray[np.int32], size: int) -> None:
    bad_T = (ids_T < 0) | (ids_T >= size)
    if bad_T.any():
        raise ValueError(f"token {ids_T[bad_T][0]} is not in the vocabulary of {size:,}")


class Memory:
    """Decoded groups of the row groups read so far, so that they are not read again.

    It copies the served groups. Order, batches and accounting of an epoch are the same with and without it. One worker
    fills it, in any order; all epochs and phases of a run may share it.
    """

    def __init__(self, selection: Selection) -> None:
        self.decoder = Decoder(selection)
        self.groups: dict[RowGroup, Window] = {}


def memory_for(selection: Selection, gigabytes: float) -> Memory | None:
    """An empty memory for a selection of labelled groups; None if they may exceed it, by the manifest's counts.

    Groups without labels are never kept.
    """
    of_tokens = sum(key.max_tokens for key in selection.tokens if key.of == "document")  # at most
    size = 4 * selection.n_documents * (len(selection.features) + of_tokens)
    return Memory(selection) if selection.labelled and size <= 1e9 * gigabytes else None


_MOST_TIMES = 1000.0
"""The largest mean number of times per epoch for a group; a larger value suggests the wrong column."""


def _text_keys(times: Any) -> Any:
    """Convert keys to text in YAML's spelling: `{1: 2}` has a number as key."""
    if not isinstance(times, dict):
        return times
    return {key if isinstance(key, str) else json.dumps(key): value for key, value in times.items()}


_Times = Annotated[float, Field(ge=0, le=_MOST_TIMES)]


class Repeat(Config):
    """Times that a query group is served per epoch, by a column of the data set (SUN23 repeats frequent queries).

    A fraction is the probability of one more time: 2.3 means twice, and a third time with probability .3.
    """

    by: str = Field(pattern="^meta_.")
    """Column with one value per group: its number of times, or its class, a key of `times`."""
    times: Annotated[dict[str, _Times], BeforeValidator(_text_keys)] = Field(default_factory=dict)
    """Number of times for each class; groups of other classes are served once. Empty: the column has the numbers."""


def mean_repeats(row_group: RowGroup, table: pa.Table, repeat: Repeat) -> Doubles:
    """The number of times that each row of a table is served per epoch on average, shape [R].

    Raises:
        InputError: the column is missing, or must have the numbers of times and does not.
    """
    if repeat.by not in table.column_names:
        raise InputError(f"{row_group.file.url}: no column {repeat.by!r}; {_nearest_meta(row_group, repeat.by)}")
    if repeat.times:
        return np.array([repeat.times.get(name, 1.0) for name in _classes(table, repeat).to_pylist()])
    column = table.column(repeat.by).combine_chunks()
    if not is_number(value_type(column.type)):
        remedy = "say under stream.repeat.times how often each of its values is served"
        raise mismatch(row_group, f"column {repeat.by!r} is {column.type} and no number", remedy)
    values = without_dictionary(column).cast(pa.float64(), safe=False)
    times_R: Doubles = values.fill_null(np.nan).to_numpy(zero_copy_only=False)
    bad_R = ~((times_R >= 0) & (times_R <= _MOST_TIMES))  # NaN too
    if bad_R.any():
        row = int(bad_R.argmax())
        problem = f"column {repeat.by!r} of query group {table.column('gid')[row]} is {values[row].as_py()}"
        raise mismatch(
            row_group, problem, f"it must be from 0 to {_MOST_TIMES:,.0f}, or a class named under stream.repeat.times"
        )
    return times_R


def survey_repeats(selection: Selection, repeat: Repeat, reader: RowGroupReader) -> Doubles:
    """Read the column of a whole selection: the mean number of times over each row group's served groups, shape [R].

    Raises:
        InputError: the column cannot be used, a class named in `times` occurs nowhere, or no group would be served.
    """
    decoder = Decoder(selection, documents=False)
    tables = reader(selection.row_groups, [*decoder.columns, repeat.by])
    means: list[float] = []
    classes: set[str] = set()
    for row_group, table in zip(selection.row_groups, tables, strict=True):
        rows_Q = decoder.served_rows([row_group], [table])
        means.append(float(mean_repeats(row_group, table, repeat)[rows_Q].mean()))
        if repeat.times:
            classes.update(_classes(table, repeat).drop_null().unique().to_pylist())
    for name in repeat.times:
        if name not in classes:
            closest = nearest(name, sorted(classes))
            hint = f"the nearest is {closest!r}" if closest is not None else "it is empty"
            raise InputError(f"stream.repeat.times: column {repeat.by!r} has no value {name!r}; {hint}")
    if not any(means):
        raise InputError(f"stream.repeat: by {repeat.by!r} no query group is served; raise some of its times above 0")
    return np.array(means)


def _classes(table: pa.Table, repeat: Repeat) -> pa.StringArray:
    return texts(table.column(repeat.by).combine_chunks())[0]


def _nearest_meta(row_group: RowGroup, name: str) -> str:
    """The most similar column of a file, as the end of an error message."""
    names = column_names(row_group.file.url)
    closest = nearest(name, [column for column in names if column.startswith("meta_")])
    return (
        f"the nearest is {closest!r}"
        if closest
        else "the data set has no meta_* column; prepare it with `columns.meta`"
    )
