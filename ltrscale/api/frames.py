"""Tables in memory as data sets: prepares data frames, Arrow tables and arrays like the files of a log.

Shapes: N rows, Q query groups.
"""

import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.bundle import Bundle
from ltrscale.config import validate
from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.split import Split
from ltrscale.draws import permutation
from ltrscale.errors import InputError
from ltrscale.ingest.assembly import completed
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import doubtful, row_numbers
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.items import read_table as read_rows
from ltrscale.ingest.mapping import ColumnMapping, named_columns
from ltrscale.ingest.prepare import PrepareJob, RowsJob
from ltrscale.ingest.profile import LogColumn, columns_of
from ltrscale.ingest.remarks import RejectedRowsError
from ltrscale.ingest.structure import Structure, table_structure
from ltrscale.progress import log
from ltrscale.serving.columns import ROW
from ltrscale.stages.tracking import untracked

LABEL, QUERY = "__label__", "__query__"
"""Columns for labels and query ids that were given as arrays."""


def to_raw_table(rows: Any, labels: Any = None, group: Any = None) -> pa.Table:
    """Rows as an Arrow table, with labels and groups given as arrays in the columns `LABEL` and `QUERY`.

    Rows are a data frame of pandas or polars, an Arrow table or anything else that exports Arrow's C stream; or an
    array [N, F], with columns named 1, 2, ... as the features of LETOR files are. A group is a query id for each row,
    or the lengths of the groups, one after the other.

    Example:
        >>> to_raw_table(np.zeros((3, 1)), labels=[1, 0, 2], group=[2, 1]).to_pydict()
        {'1': [0.0, 0.0, 0.0], '__label__': [1, 0, 2], '__query__': [0, 0, 1]}
    """
    table = cols.plain(_arrow(rows))
    if own := [name for name in table.column_names if name in (LABEL, QUERY, ROW)]:
        raise InputError(f"X: column {own[0]!r} has a name that Ranker gives to a column of its own; rename it")
    if twice := [name for name in table.column_names if table.column_names.count(name) > 1]:
        raise InputError(f"X: {len(twice)} columns are named {twice[0]!r}; rename all but one")
    if labels is not None:
        values_N = _real(labels, "y")
        if values_N.shape != (len(table),):
            raise InputError(f"y has the shape {values_N.shape}, X has {len(table):,} rows; give one label a row")
        with _one_type("y"):
            table = table.append_column(LABEL, pa.array(values_N, from_pandas=True))  # NaN means no label
    if group is not None:
        with _one_type("group"):
            table = table.append_column(QUERY, _query_ids(_real(group, "group"), len(table)))
    return table


def width(rows: Any) -> int | None:
    """Number of columns of an array; None for a table, where columns have names."""
    has_names = _is_pandas(rows) or _exports_arrow(rows) or hasattr(rows, "to_arrow")
    return None if has_names else int(_matrix(rows).shape[1])


def check_width(rows: Any, expected: int | None, name: str = "X") -> None:
    """Refuse an array with another number of columns than the fitted one; only their position identifies columns."""
    given_n = width(rows)
    if given_n is not None and expected is not None and given_n != expected:
        raise InputError(
            f"{name} has {given_n} features, but Ranker is expecting {expected} features as input; give the columns of "
            "fit, in its order"
        )


def _arrow(rows: Any) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if _is_pandas(rows) and hasattr(rows, "columns"):  # its Arrow stream would have the index as a column
        return _from_pandas(rows)
    if type(rows).__module__.partition(".")[0] == "polars" and hasattr(rows, "columns"):
        polars = sys.modules["polars"]  # Arrow has no 128-bit integers, and gets addresses for Python's objects
        rows = rows.select(polars.exclude(polars.Object)).cast({polars.Int128: polars.Decimal(38, 0)}, strict=False)
    if _exports_arrow(rows):
        try:
            return pa.table(rows)
        except pa.ArrowInvalid as error:  # such as of a series
            raise InputError(f"the rows are no table: {error}") from error
    if hasattr(rows, "to_arrow"):
        return rows.to_arrow()
    values_NF = _matrix(rows)
    with _one_type("X"):
        return pa.table({str(i + 1): values_NF[:, i] for i in range(values_NF.shape[1])})


def _is_pandas(rows: Any) -> bool:
    return type(rows).__module__.partition(".")[0] == "pandas"


def _from_pandas(rows: Any) -> pa.Table:
    """A data frame as a table: sparse columns become dense, complex numbers are left out."""
    kinds = dict(enumerate(rows.dtypes))
    changed = {i: np.float64 for i, kind in kinds.items() if kind == np.longdouble}
    changed |= {i: kind.subtype for i, kind in kinds.items() if str(kind).startswith("Sparse")}
    columns = {i: rows.iloc[:, i].astype(changed[i]) if i in changed else rows.iloc[:, i] for i in kinds}
    kept = [i for i, column in columns.items() if column.dtype.kind != "c"]
    arrays, names = [], [str(name) for name in rows.columns]
    for i in kept:
        with _one_type(f"X: column {names[i]} of type {kinds[i]}"):
            arrays.append(pa.Array.from_pandas(columns[i]))
    return pa.table(arrays, [names[i] for i in kept])


def _exports_arrow(rows: Any) -> bool:
    return hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__")


@contextmanager
def _one_type(name: str) -> Iterator[None]:
    """Turn errors of Arrow or numpy for values that cannot be a column into `InputError`s."""
    try:
        yield
    except (ValueError, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        why = "; ".join(reversed([str(part) for part in error.args]))
        raise InputError(f"{name}: {why}; give all values of the column one type") from error


def _matrix(rows: Any) -> NDArray[Any]:
    """Rows without names as an array [N, F]; errors are worded like scikit-learn's."""
    if hasattr(rows, "toarray"):
        raise InputError(f"X is a sparse {type(rows).__name__}; features are read dense: give X.toarray()")
    values = _real(rows, "X")
    if values.ndim != 2:
        reshape = ". Reshape your data: X.reshape(1, -1) is one row, X.reshape(-1, 1) one column"
        raise InputError(
            f"X is a {type(rows).__name__}; give a data frame, an Arrow table or a two-dimensional array"
            f"{reshape if hasattr(rows, 'reshape') else ''}"
        )
    if not values.shape[1]:
        raise InputError(f"X has 0 feature(s) (shape={values.shape}) while a minimum of 1 is required; give one")
    return values


def _real(values: Any, name: str) -> NDArray[Any]:
    with _one_type(name):
        array = np.asarray(values)
    if np.iscomplexobj(array):
        raise InputError(f"{name}: Complex data not supported ({array.dtype}); give real numbers")
    return array.astype(np.float64) if array.dtype == np.longdouble else array


def _query_ids(group: NDArray[Any], n_rows: int) -> pa.Array:
    if group.shape == (n_rows,):
        return pa.array(group, from_pandas=True)
    if group.ndim == 1 and np.issubdtype(group.dtype, np.integer) and (group >= 0).all() and group.sum() == n_rows:
        return pa.array(np.repeat(np.arange(len(group)), group))
    raise InputError(
        f"group fits no {n_rows:,} rows; give a query id for each row, or the lengths of the groups, whose sum is "
        f"{n_rows:,}"
    )


_FIRST_ROWS = 100_000
"""First rows that decide whether a column looks like a feature, as in `jobs.init`."""
_SMALL = 10_000
"""Maximum rows of a table that is scored without writing it."""


def rows_as_table(
    rows: Any, labels: Any, group: Any, columns: Mapping[str, Any], *, labels_needed: bool = False, name: str = "X"
) -> tuple[pa.Table, dict[str, Any]]:
    """Rows as a table, and the uses of its columns; arrays of labels and groups stand for the columns of these uses."""
    table = to_raw_table(rows, labels, group)
    columns = {use: _as_names(value) if use in _NAMING else value for use, value in columns.items()}
    replaced = {columns.get(use) for use, given in (("label", labels), ("query", group)) if given is not None}
    if labels is not None:
        if columns.get("label", LABEL) != LABEL:
            columns.pop("grades", None)  # they map values of that column
        columns["label"] = LABEL
    if group is not None:
        columns["query"] = QUERY
    for use, argument in (("query", "group"), *([("label", "y")] if labels_needed else [])):
        if columns.get(use) not in table.column_names:
            quoted = f" {columns[use]!r}" if columns.get(use) not in (None, LABEL, QUERY) else ""
            raise InputError(
                f"{name} has no {use} column{quoted}; give {argument}, or name its column: {use}=... "
                f"(columns: {', '.join(table.column_names)[:300]})"
            )
    table = _without_unread(table, columns, name)
    return table, with_features(columns, table.select([each for each in table.column_names if each not in replaced]))


def _without_unread(table: pa.Table, columns: Mapping[str, Any], name: str) -> pa.Table:
    """A table without the columns of types that no use reads; an `InputError` if one of them is named."""
    unread = {each.name: each.type for each in table.schema if not cols.is_kept(each.type)}
    if unread and (named := unread.keys() & _mapping(columns, name).used()):
        of = min(named)
        raise InputError(f"{name}: column {of!r} is {unread[of]}, which no use reads; convert it to text or numbers")
    return table.drop_columns([*unread])


def _mapping(columns: Mapping[str, Any], name: str) -> ColumnMapping:
    """The uses of columns; features that are still to be found are a star."""
    return validate(ColumnMapping, {"features": ["*"], **columns, "optional": ()}, name)


_NAMING = {*ColumnMapping.model_fields} - {"grades"}
"""Uses that name columns; `grades` names values."""


def _as_names(value: Any) -> Any:
    """Column names as text; a data frame may have numbers as names, which Arrow has as text.

    Example:
        >>> _as_names(1), _as_names(np.array([2, 5])), _as_names({3: ["hour"]}), _as_names({4: 0.5}), _as_names(None)
        ('1', ['2', '5'], {'3': ['hour']}, {'4': 0.5}, None)
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_names(each) for each in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def with_features(columns: Mapping[str, Any], table: pa.Table) -> dict[str, Any]:
    """A column mapping with features; if it names none, all columns without another use become features.

    Numbers, booleans and lists of numbers of one length (`vectors`) are numeric features, unless the lists could be
    token ids. Text and dictionaries, such as pandas categories, are categorical features. Other types, such as time
    stamps, are left out, and so are row numbers, with a warning. Columns that look like labels, ids or times become
    features, with a warning.

    Example:
        >>> table = pa.table({"q": ["a"], "price": [1.5], "shop": ["x"], "y": [1]})
        >>> with_features({"query": "q", "label": "y"}, table)
        {'query': 'q', 'label': 'y', 'features': ['price'], 'categorical': ['shop']}
    """
    if "features" in columns or "categorical" in columns:
        return dict(columns)
    if not len(table):
        raise InputError("X has no rows; give some")
    first = table.slice(0, _FIRST_ROWS)
    log_columns, seen = columns_of(first, table.schema, Dialect()), table_structure(first)
    free = _unused(columns, table.schema, log_columns, seen)
    # sorted by name, like the columns of a pattern in a config: the order of a table's columns does not matter
    categorical = sorted(
        n for n, kind in free.items() if cols.is_single(kind) and (pa.types.is_dictionary(kind) or cols.is_text(kind))
    )
    numeric = sorted(n for n, kind in free.items() if cols.is_number(kind) and not pa.types.is_null(kind))
    sizes = {each.name: each.size for each in log_columns if each.size and each.name in free}
    vectors = columns.get("vectors") or dict(sorted(sizes.items()))
    if not numeric and not categorical and not vectors:
        raise InputError(f"X has no feature among its columns {', '.join(table.column_names)[:300]}; name some")
    roles = {use: columns.get(use) for use in ("query", "item", "label", "time")}
    roles = {use: name for use, name in roles.items() if name in table.column_names}
    if "query" in roles:
        _warn_of_doubtful(doubtful(log_columns, seen, roles), {*numeric, *categorical})
    return {**columns, "features": numeric, "categorical": categorical, **({"vectors": vectors} if vectors else {})}


def _unused(
    columns: Mapping[str, Any], schema: pa.Schema, log_columns: Sequence[LogColumn], seen: Structure
) -> dict[str, pa.DataType]:
    """The types of columns without a use, except bytes that are not text, and row numbers, of which it warns."""
    mapping = _mapping(columns, "X")
    used = {*mapping.used(), *named_columns(schema.names, mapping.exclude)}
    used |= {each.name for each in log_columns if not (each.distinct or each.missing or each.size)}  # such bytes
    free = {each.name: each.type for each in schema if each.name not in used}
    for name, why in row_numbers(log_columns, seen).items():
        if name in free and not name.isdecimal():  # digits name the columns of an array
            log.warning("column %r is left out: %s; name the features if it is one", name, why)
            free.pop(name)
    return free


def in_order_of(table: pa.Table, columns: Mapping[str, Any], features: Sequence[Feature]) -> list[str]:
    """Feature names in the order of their source columns.

    Example:
        >>> table = pa.table({"q": ["a"], "z": ["x"], "listed": [0], "b": [1.5]})
        >>> columns = {"query": "q", "features": ["b"], "categorical": ["z"], "dates": {"listed": ["hour"]}}
        >>> in_order_of(table, columns, [Feature(name=name) for name in ("b", "z", "listed.hour")])
        ['z', 'listed.hour', 'b']
    """
    made = validate(ColumnMapping, columns, "Ranker").sources()
    places = {name: place for place, name in enumerate(table.column_names)}
    return sorted((each.name for each in features), key=lambda name: places[made.get(name, (name,))[0]])


def _warn_of_doubtful(reasons: Mapping[str, str], features: Collection[str]) -> None:
    """Warn of features that `jobs.init` would not take, such as a second label."""
    if reasons := {name: why for name, why in reasons.items() if name in features}:
        log.warning(
            "taken as features: %s; leave out what is not known before the ranking: exclude=%s",
            *(", ".join(f"{name} ({why})" for name, why in reasons.items()), [*reasons]),
        )


def validation_table(validation: Any, columns: Mapping[str, Any], width: int | None) -> pa.Table:
    """A table of validation groups, given in the way of the training rows: `width` and `columns` are of these."""
    parts = validation if isinstance(validation, tuple) else (validation,)
    if not 1 <= len(parts) <= 3:
        raise InputError(f"validation has {len(parts)} parts; give a table with the columns of X, or (X, y, group)")
    rows, labels, group = (*parts, None, None)[:3]
    check_width(rows, width, "validation")
    table, as_given = rows_as_table(rows, labels, group, columns, labels_needed=True, name="validation")
    if apart := [use for use in ("label", "query") if as_given[use] != columns[use]]:
        raise InputError(
            f"validation has another {apart[0]} than X, whose {apart[0]} is column {columns[apart[0]]!r}; name the "
            "columns of both, or give arrays for both"
        )
    return table


def held_out(table: pa.Table, columns: Mapping[str, Any], share: float, seed: int) -> tuple[pa.Table, pa.Table]:
    """Training rows, and the rows of a random share of the labelled query groups, at least one; groups stay whole."""
    missing_N = pc.is_null(table[columns["label"]], nan_is_null=True).to_numpy()
    query_N = _value_codes(table, columns["query"])
    labelled_M = np.unique(query_N[~missing_N & (query_N >= 0)])  # `prepare` rejects rows without a query
    if len(labelled_M) < 2:
        raise InputError(
            f"{len(labelled_M)} query groups of X have labels, and one must be left for training when others are held "
            "out; give more, or a table of validation groups as validation"
        )
    n = min(max(1, round(share * len(labelled_M))), len(labelled_M) - 1)
    chosen_N = np.isin(query_N, labelled_M[permutation(len(labelled_M), "validation", seed)[:n]])
    return table.filter(pa.array(~chosen_N)), table.filter(pa.array(chosen_N))


def _value_codes(table: pa.Table, column: str) -> NDArray[np.int64]:
    """The values of a column as numbers by first appearance; -1 for a missing value."""
    encoded = cols.without_dictionary(table[column].combine_chunks()).dictionary_encode()
    codes_N: NDArray[np.int64] = encoded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    return codes_N


def prepare_tables(
    tables: Mapping[str, pa.Table],
    columns: Mapping[str, Any],
    settings: Mapping[str, Any],
    out: str,
    *,
    job: type[PrepareJob] = PrepareJob,
) -> None:
    """Make a data set from tables by period; `jobs.prepare`, or another `job`, reads them as Parquet files.

    `columns` are the keys of `prepare.source.columns`, `settings` further keys of `prepare`.
    """
    if taken := {"inputs", "source"} & settings.keys():
        raise InputError(
            f"prepare: {', '.join(sorted(taken))} follow from X and the uses of its columns; leave them out"
        )
    source = {"kind": "items", "columns": columns}
    apart = any(_is_apart(table, columns) for table in tables.values())
    with storage.scratch.directory() as folder:
        paths = {period: str(folder / f"{period}.parquet") for period in tables}
        for period, table in tables.items():
            pq.write_table(table, paths[period])
        inputs = [{"path": path, "period": period} for period, path in paths.items()]
        config = validate(PrepareConfig, {"sort": apart, **settings, "inputs": inputs, "source": source}, "prepare")
        try:
            job(out=out, prepare=config).run()
        except RejectedRowsError as error:
            message = _as_given(str(error), paths)
            if error.rules.get("infinite"):
                message += '; prepare={"infinite": "missing"} has Ranker read infinite numbers as missing'
            raise InputError(message) from error
        except InputError as error:
            raise type(error)(_as_given(str(error), paths)) from error


def _as_given(message: str, paths: Mapping[str, str]) -> str:
    """An error with our files of tables, by period, named as the user gave them: X or validation."""
    for period, path in paths.items():
        message = message.replace(path, "validation" if period == "validation" else "X")
    return message


def _is_apart(table: pa.Table, columns: Mapping[str, Any]) -> bool:
    """Whether the rows of some query are not contiguous."""
    names = [columns.get("query"), *columns.get("within", ())]
    if not len(table) or not {*names} <= {*table.column_names}:
        return False  # `prepare` names what is missing
    codes_N = np.zeros(len(table), np.int64)
    for name in names:
        own_N = _value_codes(table, name)
        codes_N = codes_N * (own_N.max() + 2) + own_N
    return 1 + int(np.count_nonzero(np.diff(codes_N))) > len(np.unique(codes_N))


def in_memory(table: pa.Table, config: PrepareConfig, bundle: Bundle) -> tuple[QueryGroups, NDArray[np.int64]] | None:
    """The query groups of a small table and the row of each document; a fast path with the result of `prepared`.

    None where `prepare` is needed: for many rows, texts and positions, and for rows that it would report.
    """
    if len(table) > _SMALL or bundle.reads_positions or bundle.reads_tokens:
        return None
    assert config.source.mapping is not None
    try:
        block = read_rows(table, config.source.mapping, bundle.features)
    except InputError:
        return None
    block = completed(block, config, bundle.features)
    if block.rejected or np.isinf(block.features_NF).any():
        return None
    query_N = block.query_ids_N.dictionary_encode().indices.to_numpy()
    rows_N, lengths_Q = np.argsort(query_N, kind="stable"), np.bincount(query_N)
    if lengths_Q.max() > config.max_group:
        return None
    features_NF = torch.from_numpy(block.features_NF[rows_N])
    return QueryGroups(features_NF, to_offsets(torch.from_numpy(lengths_Q))), rows_N


@contextmanager
def prepared(table: pa.Table, columns: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Split]:
    """A table to score as a data set for the block; after an error it is kept, with the rows in quarantine."""
    folder = storage.scratch.make()
    with untracked():
        prepare_tables({"all": table}, columns, {**settings, "expect": {}}, str(folder), job=RowsJob)
    yield Split(data=(str(folder),))
    shutil.rmtree(folder, ignore_errors=True)
