"""Which of the labelled groups of a split are used: a sample, and of that a fold or the rest."""

from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.draws import permutation
from ltrscale.errors import InputError


class Fold(Config):
    """One of the folds that labelled groups are dealt to at random, whose sizes differ by at most one; or the rest."""

    number: int = Field(ge=0)
    """Which fold, from 0."""
    of: int = Field(ge=2)
    """Number of folds."""
    held_out: bool = False
    """Whether the groups of the fold are served, or all others."""
    seed: int = 0
    """Seed of the dealing."""

    @model_validator(mode="after")
    def _is_there(self) -> Self:
        if self.number >= self.of:
            raise ValueError(f"there is no fold {self.number} of {self.of}; number them from 0 to {self.of - 1}")
        return self


def keep_sample(n: int, *, fraction: float, sample: Literal["random", "first"], seed: int) -> NDArray[np.bool_]:
    """Which of n labelled groups are in the sample, shape [n]; at least one of them."""
    keep = max(1, round(fraction * n))
    kept = np.zeros(n, dtype=np.bool_)
    match sample:
        case "random" if keep < n:
            kept[permutation(n, "labelled", seed)[:keep]] = True
        case _:
            kept[:keep] = True
    return kept


def keep_fold(kept: NDArray[np.bool_], fold: Fold, where: str) -> NDArray[np.bool_]:
    """Which of the groups that are kept are in a fold, or in none but it, by the fold's `held_out`; same shape.

    Args:
        kept: groups to deal to the folds, of the groups there are.
        fold: which.
        where: the split, for errors.

    Raises:
        InputError: there are fewer groups than folds.
    """
    numbers = np.flatnonzero(kept)
    if len(numbers) < fold.of:
        raise InputError(f"{where}: {len(numbers)} labelled groups cannot fill {fold.of} folds; lower fold.of")
    is_in_fold = permutation(len(numbers), "fold", fold.seed) % fold.of == fold.number
    served = np.zeros_like(kept)
    served[numbers[is_in_fold == fold.held_out]] = True
    return served
