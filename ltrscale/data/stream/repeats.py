"""Query groups that are served several times per epoch, by a column of the data set.

Shapes: R rows of a table or row groups of a selection.
"""

import json
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import BeforeValidator, Field

from ltrscale.arrays import Doubles
from ltrscale.config import Config
from ltrscale.data.columns import is_number, texts, value_type, without_dictionary
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.decoder import Decoder, mismatch
from ltrscale.data.stream.readers import RowGroupReader, column_names
from ltrscale.errors import InputError, nearest

_MOST = 1000.0
"""The largest mean number of times per epoch for a group; a larger value suggests the wrong column."""


def _text_keys(times: Any) -> Any:
    """Convert keys to text in YAML's spelling: `{1: 2}` has a number as key."""
    if not isinstance(times, dict):
        return times
    return {key if isinstance(key, str) else json.dumps(key): value for key, value in times.items()}


_Times = Annotated[float, Field(ge=0, le=_MOST)]


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
    bad_R = ~((times_R >= 0) & (times_R <= _MOST))  # NaN too
    if bad_R.any():
        row = int(bad_R.argmax())
        problem = f"column {repeat.by!r} of query group {table.column('gid')[row]} is {values[row].as_py()}"
        raise mismatch(
            row_group, problem, f"it must be from 0 to {_MOST:,.0f}, or a class named under stream.repeat.times"
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
