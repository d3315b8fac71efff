"""Checks that trees can be grown: of the process, the labels, the positions, and the validation groups."""

import numpy as np

from ltrscale.arrays import Doubles
from ltrscale.errors import InputError
from ltrscale.runtime.workers import rank_and_world
from ltrscale.trees.configs import GBDTConfig
from ltrscale.trees.data import Labelled
from ltrscale.trees.library import HIGHEST_EXPONENTIAL


def check_alone(config: GBDTConfig) -> None:
    """Check that the library is installed and this process is the only one, for trainers that are not distributed.

    Raises:
        InputError: the library is not installed, or there are other processes.
    """
    config.check_workers(1)
    if rank_and_world()[1] > 1:
        raise InputError("semi-supervised and stacked trees train in one process; start the job without torchrun")


def check_labels(config: GBDTConfig, groups: Labelled, targets_N: Doubles) -> None:
    """Check that every target has a gain, if the objective uses gains.

    Raises:
        InputError: a target has none; the message names the group, the label and the remedy.
    """
    highest = config.highest_label()
    if highest is None:
        return
    if misfit := _first_misfit(groups, targets_N, highest):
        raise InputError(
            f"{misfit}, and gains are for integers from 0 to {highest}; map the labels to grades in prepare, give "
            "gbdt.label_gain a gain for each label, or set gbdt.targets.kind=quantised"
        )


def _first_misfit(groups: Labelled, labels_N: Doubles, highest: int) -> str | None:
    """Describes the first document whose label is not an integer from 0 to the highest; None if there is none."""
    rows = np.flatnonzero((labels_N != labels_N.round()) | (labels_N < 0) | (labels_N > highest))
    if not len(rows):
        return None
    row = int(rows[0])
    return f"{groups.split}: group {groups.group_of(row)} has label {labels_N[row]:g}"


def check_positions(groups: Labelled) -> None:
    """Check that every document has a position, a whole number, and no two of a group have the same.

    Raises:
        InputError: one has none, or two have the same; the message names the group and the remedy.
    """
    if groups.positions_N is None:
        raise InputError(f"{groups.split}: unbiased trees need positions; map the column in prepare, or unset unbiased")
    positions_N = groups.positions_N
    for row in np.flatnonzero(~(positions_N == positions_N.round()))[:1]:  # NaN equals nothing
        raise InputError(
            f"{groups.split}: group {groups.group_of(row)} has position {positions_N[row]:g}, and unbiased trees need "
            "a whole number for every document; prepare the documents that were shown only, or unset unbiased"
        )
    group_N = np.repeat(np.arange(len(groups.ids_Q)), groups.lengths_Q)
    order_N = np.lexsort((positions_N, group_N))
    same_N = (np.diff(group_N) == 0) & (np.diff(positions_N[order_N]) == 0)
    for row in order_N[np.flatnonzero(same_N)][:1]:
        raise InputError(
            f"{groups.split}: group {groups.group_of(row)} has position {positions_N[row]:g} twice; give each document "
            "its own position, or unset unbiased"
        )


def check_validation(validation: Labelled) -> None:
    """Check that NDCG is defined on the validation groups.

    Raises:
        InputError: no group has a relevant document, or a label is not a grade.
    """
    if misfit := _first_misfit(validation, validation.labels_N, HIGHEST_EXPONENTIAL):
        raise InputError(
            f"{misfit}, and NDCG is of integers from 0 to {HIGHEST_EXPONENTIAL}; leave scores out of the validation "
            "split, or map its labels to grades in prepare"
        )
    if not validation.labels_N.any():
        raise InputError(
            f"{validation.split}: none of its labelled groups has a relevant document, so NDCG is undefined; "
            "choose other validation periods"
        )
