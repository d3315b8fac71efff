"""The labelled groups of a split that are used: a sample, and of that one fold or all others."""

from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.draws import permutation
from ltrscale.errors import InputError


class OuterFold(Config):
    """One fold of some groups, or all others. Groups are dealt at random; fold sizes differ by at most one."""

    number: int = Field(ge=0)
    """Number of the fold, from 0."""
    of: int = Field(ge=2)
    """Number of folds."""
    held_out: bool = False
    """True serves the groups of the fold, False all others."""
    seed: int = 0
    """Seed by which groups are dealt to folds."""

    @model_validator(mode="after")
    def _is_there(self) -> Self:
        if self.number >= self.of:
            raise ValueError(f"there is no fold {self.number} of {self.of}; number them from 0 to {self.of - 1}")
        return self


class Fold(OuterFold):
    """One fold of the labelled groups, or all others. Groups are dealt at random; fold sizes differ by at most one."""

    within: OuterFold | None = None
    """Deal only the groups that this fold serves; empty for all labelled groups that are used."""


def order_of(n: int, *, sample: Literal["random", "first"], seed: int) -> NDArray[np.int64]:
    """The order in which n labelled groups join a sample, so that a smaller one is part of a larger one, shape [n]."""
    return permutation(n, "labelled", seed) if sample == "random" else np.arange(n)


def to_reach(n_relevant: int, relevant: NDArray[np.bool_]) -> int | None:
    """How many groups of an order must join until so many of them have a relevant document; None if too few have one.

    Example:
        >>> to_reach(2, np.array([False, True, False, True, True])), to_reach(4, np.array([True]))
        (4, None)
    """
    places = np.flatnonzero(relevant)
    return int(places[n_relevant - 1]) + 1 if n_relevant <= len(places) else None


def keep_fold(kept: NDArray[np.bool_], fold: OuterFold, where: str) -> NDArray[np.bool_]:
    """Which of the kept groups are in the fold if it is `held_out`, else which are not; same shape.

    Args:
        kept: which of all groups are dealt to the folds, or to those of `fold.within` first.
        fold: the fold.
        where: the split, for errors.

    Raises:
        InputError: there are fewer groups than folds.
    """
    if isinstance(fold, Fold) and fold.within is not None:
        kept = keep_fold(kept, fold.within, where)
    numbers = np.flatnonzero(kept)
    if len(numbers) < fold.of:
        raise InputError(f"{where}: {len(numbers)} labelled groups cannot fill {fold.of} folds; lower fold.of")
    is_in_fold = permutation(len(numbers), "fold", fold.seed) % fold.of == fold.number
    served = np.zeros_like(kept)
    served[numbers[is_in_fold == fold.held_out]] = True
    return served
