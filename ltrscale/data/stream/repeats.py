"""Repeats: query groups that are served several times per epoch, by a column of their data set.

Shapes: Q groups, R rows of a table.
"""

import json
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.data import columns
from ltrscale.data.dataset.selection import RowGroup, Selection
from ltrscale.data.stream.readers import RowGroupReader
from ltrscale.data.stream.windows import Decoder, mismatch
from ltrscale.errors import InputError, nearest

MOST = 1000.0
"""The most times that a group may be served per epoch on average; a larger value hints at the wrong column."""


def _text_keys(times: Any) -> Any:
    """The mapping with all keys as texts, in YAML's spelling: `{1: 2}` has a number for a key."""
    if not isinstance(times, dict):
        return times
    return {key if isinstance(key, str) else json.dumps(key): value for key, value in times.items()}


RepeatTimes = Annotated[float, Field(ge=0, le=MOST)]


class Repeat(Config):
    """Times that a query group is served per epoch, by a column of the data set (SUN23 repeats frequent queries).

    A fraction is the probability of one more time: 2.3 means twice, and a third time with probability .3.
    """

    by: str = Field(pattern="^meta_.")
    """Column with one value per group: its number of times, or its class, a key of `times`."""
    times: Annotated[dict[str, RepeatTimes], BeforeValidator(_text_keys)] = Field(default_factory=dict)
    """Number of times for each class; groups of other classes are served once. Empty: the column has the numbers."""


def mean_repeats(row_group: RowGroup, table: pa.Table, repeat: Repeat) -> NDArray[np.float64]:
    """The number of times that each row of a table is served per epoch on average, shape [R].

    Raises:
        InputError: the column is missing, or must have the numbers of times and does not.
    """
    if repeat.by not in table.column_names:
        raise InputError(f"{row_group.url}: no column {repeat.by!r}; {_remedy(row_group, repeat.by)}")
    if repeat.times:
        return np.array([repeat.times.get(name, 1.0) for name in _classes(table, repeat).to_pylist()])
    column = table.column(repeat.by).combine_chunks()
    if not columns.is_number(columns.value_type(column.type)):
        remedy = "say under stream.repeat.times how often each of its values is served"
        raise mismatch(row_group, f"column {repeat.by!r} is {column.type} and no number", remedy)
    values = columns.without_dictionary(column).cast(pa.float64(), safe=False)
    times_R: NDArray[np.float64] = values.fill_null(np.nan).to_numpy(zero_copy_only=False)
    bad_R = ~((times_R >= 0) & (times_R <= MOST))  # NaN too
    if bad_R.any():
        row = int(bad_R.argmax())
        what = f"column {repeat.by!r} of query group {table.column('gid')[row]} is {values[row].as_py()}"
        raise mismatch(row_group, what, f"it must be from 0 to {MOST:,.0f}, or a class named under stream.repeat.times")
    return times_R


def survey_repeats(selection: Selection, repeat: Repeat, reader: RowGroupReader) -> dict[RowGroup, float]:
    """Read the column of a whole selection: the mean number of times of each row group's served groups.

    Raises:
        InputError: the column cannot be used, a class named in `times` occurs nowhere, or no group would be served.
    """
    decoder = Decoder(selection, documents=False)
    tables = reader(selection.row_groups, [*decoder.columns, repeat.by])
    means: dict[RowGroup, float] = {}
    classes: set[str] = set()
    for row_group, table in zip(selection.row_groups, tables, strict=True):
        rows_Q = decoder.served_rows([row_group], [table])
        means[row_group] = float(mean_repeats(row_group, table, repeat)[rows_Q].mean())
        if repeat.times:
            classes.update(_classes(table, repeat).drop_null().unique().to_pylist())
    for name in repeat.times:
        if name not in classes:
            near = nearest(name, sorted(classes))
            hint = f"the nearest is {near!r}" if near is not None else "it is empty"
            raise InputError(f"stream.repeat.times: column {repeat.by!r} has no value {name!r}; {hint}")
    if not any(means.values()):
        raise InputError(f"stream.repeat: by {repeat.by!r} no query group is served; raise some of its times above 0")
    return means


def _classes(table: pa.Table, repeat: Repeat) -> pa.StringArray:
    return columns.texts(table.column(repeat.by).combine_chunks())[0]


def _remedy(row_group: RowGroup, name: str) -> str:
    """The column of a file that is probably meant, for the end of an error."""
    filesystem, path = storage.arrow_filesystem(row_group.url)
    with storage.named_errors(row_group.url):
        names = storage.patiently(lambda: pq.read_schema(path, filesystem=filesystem)).names
    known = [known for known in names if known.startswith("meta_")]
    near = nearest(name, known)
    return f"the nearest is {near!r}" if near else "the data set has no meta_* column; prepare it with `columns.meta`"
