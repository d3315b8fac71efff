"""The order in which documents were shown, by their positions: its scores, and whether the data has it.

Shapes: N documents.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from ltrscale.data.dataset.row_groups import RowGroups
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.readers import read_direct
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.settings import POSITIONS

if TYPE_CHECKING:
    from torch import Tensor

    from ltrscale.batch import QueryGroups


def order_shown(groups: QueryGroups) -> Tensor:
    """Scores that fall with the position at which a document was shown; documents without one are last, all tied."""
    return -groups.shown_N.nan_to_num(nan=float(np.finfo(np.float32).max)).double()


def has_positions(selection: Selection) -> bool:
    """Whether any group of some row groups has positions; reads until it finds one."""
    for _, of_data_set in itertools.groupby(selection.row_groups, key=lambda row_group: row_group.file.gid_base):
        for table in read_direct(RowGroups.from_iterable(of_data_set), [POSITIONS]):
            if POSITIONS not in table.column_names:
                break  # a data set has the column in all files or in none
            if table[POSITIONS].null_count < len(table):
                return True
    return False


def check_shown(test: Selection, key: str) -> None:
    """Check that the order that was shown is known; `key` is the setting of the evaluation that needs it.

    Raises:
        InputError: the test groups have no positions.
    """
    if not has_positions(test):
        raise InputError(
            f"evaluate.{key}: {test.row_groups[0].file.url} has no positions; map the column in prepare as "
            "columns.positions, or leave it out"
        )
