"""Simulated users: what they find relevant, and what they click in a list that they see.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from ltrscale.arrays import Bools, Doubles, Floats, Ints, place_in_group
from ltrscale.config import Config
from ltrscale.errors import InputError


class PositionBased(Config):
    """A position is examined with probability (1 / position)^eta, whatever clicks are above it (PBM)."""

    kind: Literal["pbm"] = "pbm"
    eta: float = Field(default=1.0, ge=0)
    """Strength of the position bias; 0 for none."""
    trust: float = Field(default=0.0, ge=0, le=1)
    """Probability of a click on the first document, if it is examined, just because it is first; trust / position
    further down (trust bias, Agarwal et al. 2019)."""

    def clicks(self, draw_N: Doubles, attraction_N: Doubles, positions_N: Doubles, offsets_Q1: Ints) -> Bools:  # noqa: ARG002
        """The examined documents that attract or are trusted, by uniform numbers; none has position NaN."""
        trusted_N = self.trust * examination(positions_N, eta=1.0)
        perceived_N = trusted_N + (1 - trusted_N) * attraction_N
        return np.asarray(draw_N < perceived_N * examination(positions_N, eta=self.eta))

    @property
    def assumed_eta(self) -> float:
        """The position bias that debiased credit assumes: that of these users."""
        return self.eta

    @property
    def examines(self) -> str:
        """How positions are examined, in words."""
        return f"examines position p with p^-{self.eta:g}"

    @property
    def trusts(self) -> str:
        """What else makes them click, in words; "" for nothing."""
        return f", or, with probability {self.trust:g} / p, because it stands at position p" if self.trust else ""

    @property
    def beyond_credit(self) -> str:
        """The users that debiased credit does not cover, in words; "" for none."""
        return "; users who trust the order are none of them" if self.trust else ""


class Cascade(Config):
    """Positions are examined from the top; the first click ends the session (Craswell et al., 2008)."""

    kind: Literal["cascade"] = "cascade"
    assumed_eta: ClassVar = 1.0
    examines: ClassVar = "reads from the top to the first click"
    trusts: ClassVar = ""
    beyond_credit: ClassVar = "; a cascade is none of them"

    def clicks(self, draw_N: Doubles, attraction_N: Doubles, positions_N: Doubles, offsets_Q1: Ints) -> Bools:
        """The first document of each list that attracts, by uniform numbers; none has position NaN."""
        candidate_N = (draw_N < attraction_N) & ~np.isnan(positions_N)
        return np.asarray(candidate_N & (place_in_group(offsets_Q1, ~candidate_N, positions_N) == 0))


User = Annotated[PositionBased | Cascade, Field(discriminator="kind")]


def highest_grade(given: float | None, label_counts: Mapping[str, int]) -> float:
    """The grade of a perfect document: the given one, or else the highest label that a manifest counts.

    Raises:
        InputError: no grade is given, and the manifest has no counts of labels or none above 0.

    Example:
        >>> highest_grade(None, {"0": 9, "0.5": 2, "2": 1}), highest_grade(4, {"0": 9})
        (2.0, 4)
    """
    top = max(map(float, label_counts), default=0.0) if given is None else given
    if top <= 0:
        raise InputError("the manifest does not state the highest label; give it as max_relevance")
    return top


def relevance_probability(relevance_N: Floats | Doubles, *, top: float) -> Doubles:
    """The probability that a user finds a document of this grade relevant, `(2^r - 1) / (2^top - 1)`.

    BUYL23, eq. 10, after Chapelle et al. (2009). NaN stays NaN.

    Raises:
        ValueError: top is not above 0.

    Example:
        >>> relevance_probability(np.array([0.0, 1.0, 4.0]), top=4).round(4).tolist()
        [0.0, 0.0667, 1.0]
    """
    if top <= 0:
        raise ValueError("the top grade must be above 0")
    return np.asarray((np.exp2(relevance_N, dtype=np.float64) - 1) / (2.0**top - 1))


def examination(positions_N: Doubles, *, eta: float) -> Doubles:
    """The probability that a position is examined, `(1 / position)^eta`; 0 without a position.

    Example:
        >>> examination(np.array([1.0, 2.0, np.nan]), eta=1.0).tolist()
        [1.0, 0.5, 0.0]
    """
    return np.where(np.isnan(positions_N), 0.0, positions_N**-eta)


def attraction(rho_N: Doubles, *, noise: float) -> Doubles:
    """The probability of a click on an examined document, `epsilon + (1 - epsilon) rho` (Ai et al., 2018)."""
    return noise + (1 - noise) * rho_N
