"""Targets of trees: how labels, above all a teacher's scores, are transformed before training.

Shapes: N documents, Q1 = groups + 1 offsets.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from ltrscale.arrays import Doubles
from ltrscale.batch import standardise_by_group
from ltrscale.config import Config


class Targets(Config):
    """How labels become targets."""

    kind: str
    of_all_groups: ClassVar[bool] = False
    """Whether a target depends on the documents of other groups too."""

    def of(self, labels_N: Doubles, offsets_Q1: NDArray[np.int64]) -> Doubles:
        """The targets of some groups, shape [N]."""
        raise NotImplementedError


class StandardisedConfig(Targets):
    """Deviations from the group's mean in units of its standard deviation: a teacher may shift all scores of a list."""

    kind: Literal["standardised"] = "standardised"

    def of(self, labels_N: Doubles, offsets_Q1: NDArray[np.int64]) -> Doubles:
        """See `standardised`."""
        return standardised(labels_N, offsets_Q1)


class QuantisedConfig(Targets):
    """Grades 0, 1, ..., for objectives that need grades."""

    kind: Literal["quantised"] = "quantised"
    of_all_groups: ClassVar[bool] = True
    grades: int = Field(31, ge=2, le=10_000)
    """Number of grades; HOU24 cuts pseudo-labels into 31, its public code into 5."""
    bins: Literal["even", "equal_frequency"] = "even"
    """Bins of equal width between the lowest and the highest score, or of equally many documents."""
    standardise: bool = False
    """Standardise scores per group first: a listwise teacher may shift all scores of a list."""

    def of(self, labels_N: Doubles, offsets_Q1: NDArray[np.int64]) -> Doubles:
        """See `quantised`."""
        scores_N = standardised(labels_N, offsets_Q1) if self.standardise else labels_N
        return quantised(scores_N, grades=self.grades, bins=self.bins)


TargetsConfig = Annotated[StandardisedConfig | QuantisedConfig, Field(discriminator="kind")]


def make_targets(config: TargetsConfig | None, labels_N: Doubles, offsets_Q1: NDArray[np.int64]) -> Doubles:
    """Labels transformed as a config sets, shape [N]."""
    return labels_N if config is None else config.of(labels_N, offsets_Q1)


def standardised(scores_N: Doubles, offsets_Q1: NDArray[np.int64]) -> Doubles:
    """Scores minus their group's mean, divided by its standard deviation, shape [N]; 0 in a group of equal scores.

    Example:
        >>> standardised(np.array([1.0, 3.0, 5.0, 5.0]), np.array([0, 2, 4])).tolist()
        [-1.0, 1.0, 0.0, 0.0]
    """
    scores_N = np.ascontiguousarray(scores_N, np.float64)
    return standardise_by_group(torch.from_numpy(scores_N), torch.from_numpy(offsets_Q1)).numpy()


def quantised(scores_N: Doubles, *, grades: int, bins: Literal["even", "equal_frequency"]) -> Doubles:
    """Grades 0 to `grades - 1` that rise with the scores, shape [N]; equal scores have equal grades.

    `even`: bins of equal width from the lowest to the highest score (HOU24, A.2.3). `equal_frequency`: bins of equally
    many documents; many equal scores lead to fewer grades.

    Example:
        >>> scores_N = np.array([0.0, 1.0, 2.0, 10.0])
        >>> quantised(scores_N, grades=2, bins="even").tolist()
        [0.0, 0.0, 0.0, 1.0]
        >>> quantised(scores_N, grades=2, bins="equal_frequency").tolist()
        [0.0, 0.0, 1.0, 1.0]
    """
    if not len(scores_N):
        return scores_N
    match bins:
        case "even":
            edges = np.linspace(scores_N.min(), scores_N.max(), grades + 1)[1:-1]
        case "equal_frequency":
            edges = np.quantile(scores_N, np.arange(1, grades) / grades, method="higher")
    if scores_N.min() == scores_N.max():  # all edges are equal, and the search would give the highest grade
        return np.zeros_like(scores_N)
    return np.searchsorted(edges, scores_N, side="right").astype(np.float64)
