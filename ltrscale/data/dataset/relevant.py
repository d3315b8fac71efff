"""The labelled groups of a selection that can teach or test an order, or a sample of them; this reads labels."""

import numpy as np

from ltrscale.data.dataset.labelled import relevant_in
from ltrscale.data.dataset.selection import Selection
from ltrscale.draws import among_first
from ltrscale.errors import InputError


def only_relevant(selection: Selection) -> Selection:
    """The labelled groups of a selection that have a relevant document; metrics are defined on no others.

    In a log of purchases most groups have none, and need not be read again and again. A selection without any such
    group, or with scores as labels, is returned unchanged.

    Raises:
        InputError: a file cannot be read, or has other groups than its manifest lists.
    """
    if selection.reads_scores:
        return selection
    relevant_queries = relevant_in(selection.row_groups, selection.label_weights)
    of_served = [
        relevant_Q[selection.kept(row_group)]
        for row_group, relevant_Q in zip(selection.row_groups, relevant_queries, strict=True)
    ]
    relevant = np.concatenate(of_served)
    return selection.taking(relevant) if relevant.any() else selection


def at_most(selection: Selection, n: int, *parts: int | str) -> Selection:
    """All labelled groups of a selection if there are at most n, else a random sample of n, seeded by `parts`.

    A smaller split would not do: it deals its folds within the sample, which contains groups of other folds.
    """
    if selection.n_groups <= n:
        return selection
    return selection.taking(among_first(selection.n_groups, n, *parts))


def check_teaches(selection: Selection, name: str) -> None:
    """Raise an `InputError` if `nothing_to_learn` finds that no served labelled group teaches an order."""
    if wrong := nothing_to_learn(selection):
        remedy = "check which columns prepare takes as the query and the label, or name more periods or labels"
        raise InputError(f"{name}: {wrong}; {remedy}")


def nothing_to_learn(selection: Selection) -> str:
    """Explain why no order can be learnt: no served labelled group has two labels, one above 0; "" if one has.

    It reads labels until it finds one. Scores that serve as labels are assumed to differ.
    """
    if selection.reads_scores:
        return ""

    def some(*, differing: bool) -> bool:
        return any(
            (
                relevant_in([row_group], selection.label_weights, differing=differing)[0] & selection.kept(row_group)
            ).any()
            for row_group in selection.row_groups
        )

    if some(differing=True):
        return ""
    groups, row_groups = f"its {selection.n_groups:,} labelled groups", selection.row_groups
    if not some(differing=False):
        wrong = f"all labels of {groups} are 0"
    elif (row_groups.documents_R == row_groups.groups_R).all():
        wrong = f"each of {groups} has one document, as where the query is the id of a row"
    else:
        wrong = f"the documents of each of {groups} have one label"
    return f"{wrong}, so there is nothing to learn or to choose by"
