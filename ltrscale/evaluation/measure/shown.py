"""The order in which lists were shown, as a method of its own: what a ranker is compared with before it replaces it."""

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.readers import read_direct
from ltrscale.errors import InputError

AS_SHOWN = "as_shown"
"""The name of the method."""
POSITIONS = "positions"
"""The column that it ranks by, which stands where others have a bundle or scores."""
FAVOURED = (
    f"`{AS_SHOWN}` is the order in which the lists were shown, by the column `{POSITIONS}`. Labels of people who saw "
    "it, such as clicks and purchases, favour it: what stands on top is looked at most, whatever it is worth. A ranker "
    "that is level with it may well be better."
)


def order_shown(groups: QueryGroups) -> Tensor:
    """Scores that fall with the position at which a document was shown; documents without one come last, all tied.

    Example:
        >>> features_NF, offsets_Q1 = torch.zeros(3, 1), torch.tensor([0, 3])
        >>> order_shown(QueryGroups(features_NF, offsets_Q1, positions_N=torch.tensor([2.0, torch.nan, 1.0]))).argsort()
        tensor([1, 0, 2])
    """
    assert groups.positions_N is not None
    return -groups.positions_N.nan_to_num(nan=torch.finfo(torch.float32).max).double()


def has_positions(selection: Selection) -> bool:
    """Whether any group of some row groups has positions; it reads them until it finds one."""
    for table in read_direct(selection.row_groups, [POSITIONS]):
        if POSITIONS not in table.column_names:
            return False
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
            f"evaluate.{key}: {test.row_groups[0].url} has no positions; map the column in prepare as "
            "columns.positions, or leave it out"
        )
