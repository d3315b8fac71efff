"""Rows as users give them, data frames, Arrow tables or arrays, as one Arrow table with labels and query ids.

Shapes: N rows, F features.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.errors import InputError
from ltrscale.serving.columns import ROW

LABEL, QUERY = "__label__", "__query__"
"""Columns for labels and query ids that were given as arrays."""


def to_raw_table(rows: Any, labels: Any = None, group: Any = None) -> pa.Table:
    """Rows as an Arrow table, with labels and groups given as arrays in the columns `LABEL` and `QUERY`.

    Args:
        rows: a data frame of pandas or polars, an Arrow table or anything else that exports Arrow's C stream; or an
            array [N, F], with columns named 1, 2, ... as the features of LETOR files are.
        labels: N labels, or None.
        group: a query id for each row, or the lengths of the groups, one after the other; or None.

    Raises:
        InputError: the rows are no table, labels or groups do not fit them, or values are complex or of several types.

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
        polars = sys.modules["polars"]  # Arrow has no 128-bit integers
        rows = rows.cast({polars.Int128: polars.Decimal(38, 0)}, strict=False)
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
