"""Rank-biased precision. The policy is that of `metrics`.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group and the first K ranks.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ltrscale.ranking.metrics import Metric
from ltrscale.ranking.ranked import rankings, undefined


class RBPConfig(Metric):
    """Rank-biased precision: the share of relevant documents among those that a user sees who may stop at each rank.

    Source: Moffat and Zobel 2008.
    Proof: laws; mean over all orders that ties allow.
    """

    kind: Literal["rbp"] = "rbp"
    definition: ClassVar[str] = (
        "RBP is the expected share of relevant documents among those seen by a user who goes from each rank to the "
        "next with probability `persistence`."
    )
    normalised: ClassVar[bool] = False
    k: int | None = Field(None, ge=1)
    """Cut-off: the first ranks that count; empty takes the whole list."""
    threshold: float = Field(1.0, gt=0)
    """Documents are relevant from this label on."""
    persistence: float = Field(0.8, gt=0, lt=1)
    """The chance that a user goes on to the next rank: .95 if patient, .5 if not."""

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """See `rbp`."""
        return rbp(scores_N, labels_N, offsets_Q1, k=self.k, persistence=self.persistence, threshold=self.threshold)


def rbp(
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    k: int | None = None,
    persistence: float = 0.8,
    threshold: float = 1.0,
) -> Tensor:
    """Rank-biased precision of the first k ranks, or of all, shape [Q] (Moffat and Zobel 2008, equation 4).

    `(1 - p) * sum over ranks r of p^(r - 1) [y >= threshold]`; no list of n documents is worth more than `1 - p^n`.

    Raises:
        ValueError: k is below 1, or a score is NaN.

    Example:
        >>> scores, labels = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0])
        >>> rbp(scores, labels, torch.tensor([0, 3]), persistence=0.5)  # 1/2 (1 + 1/4)
        tensor([0.6250], dtype=torch.float64)
    """
    values_Q = undefined(offsets_Q1)
    for ranking in rankings(scores_N, labels_N, offsets_Q1, 1 if k is None else k):
        relevant_ML = (ranking.values_ML >= threshold).double()
        weights_K = (1 - persistence) * persistence ** (ranking.rank_L[:k] - 1).double()
        value_M = ranking.expected(relevant_ML, k) @ weights_K
        values_Q[ranking.groups_M] = torch.where(ranking.best_ML[:, 0] >= threshold, value_M, torch.nan)
    return values_Q
