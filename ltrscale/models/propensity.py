"""The probability that a user examines a position, learned together with a ranker.

Shapes: N documents, P positions.
"""

import torch
from torch import Tensor, nn

from ltrscale.ranking.clicks import position_index


class PropensityModel(nn.Module):
    """One learned examination logit for each position, relative to position 1, whose logit is 0.

    The softmax that turns logits into propensities does not change when all logits shift, so fixing the first loses
    nothing. The weight of a click, `propensity_1 / propensity_p = exp(-logit_p)`, then depends on its own position
    only. All logits start at 0: every position is equally likely to be examined, and the first step of the dual
    learning algorithm (Ai et al. 2018) uses unweighted clicks.

    Args:
        positions: number of positions with their own logit; later positions share the last one.

    Raises:
        ValueError: fewer than 2 positions, which leave nothing to learn.

    Example:
        >>> model = PropensityModel(3)
        >>> model(torch.tensor([1.0, 3.0, 8.0, torch.nan])).tolist()
        [0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, positions: int) -> None:
        super().__init__()
        if positions < 2:
            raise ValueError(f"positions must be at least 2, but is {positions}")
        self.later = nn.Parameter(torch.zeros(positions - 1))

    def forward(self, positions_N: Tensor) -> Tensor:
        """Logits [N] of positions, which count from 1; 0 without gradient for NaN, a document that was not shown.

        Raises:
            InputError: a position is below 1.
        """
        logits_P = torch.cat([self.later.new_zeros(1), self.later])
        return logits_P[position_index(positions_N, len(logits_P))]
