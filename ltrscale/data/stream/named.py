"""Query groups with the columns that name them, for reports and explanations.

Shapes: M chosen groups.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ltrscale.arrays import Ints
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.decoder import Decoder
from ltrscale.data.stream.readers import read_direct
from ltrscale.data.stream.windows import Cut, assemble

_IDS = ("query_id", "doc_ids")


class NamedGroups(NamedTuple):
    """The stored groups of one row group."""

    row_group: RowGroup
    groups: QueryGroups
    ids: pa.Table
    """`query_id`, `doc_ids` if present, and other requested columns: a row for each group."""


def read_named(
    selection: Selection, also: Sequence[str] = (), *, chosen_M: Ints | None = None
) -> Iterator[NamedGroups]:
    """The groups of a selection, a row group at a time in its order, with the columns `also` where a file has them.

    `chosen_M` are the sorted numbers of the groups to read, counted in this order; all if it is left out.
    """
    decoder, first = Decoder(selection), 0
    for row_group, served in zip(selection.row_groups, selection.served_groups_R.tolist(), strict=True):
        wanted_M = np.arange(served)
        if chosen_M is not None:
            wanted_M = chosen_M[slice(*np.searchsorted(chosen_M, [first, first + served]))] - first
        first += served
        if chosen_M is not None and not len(wanted_M):
            continue
        (table,) = read_direct([row_group], list(dict.fromkeys([*decoder.columns, *_IDS, *also])))
        rows_M = decoder.served_rows([row_group], [table])[wanted_M]
        window = decoder.decode([row_group], [table], rows_M)
        groups = assemble([Cut(window, 0, len(rows_M))], len(selection.features))
        names = [name for name in (*_IDS, *also) if name in table.column_names]
        yield NamedGroups(row_group, groups, table.select(names).take(pa.array(rows_M)))
