"""How likely a document is examined at its position, learned beside a ranker.

Shapes: N documents, P positions.
"""

import torch
from torch import Tensor, nn

from ltrscale.ranking.clicks import position_index


class PropensityModel(nn.Module):
    """One learned examination logit for each position, relative to position 1, whose logit is 0.

    The softmax that turns logits into propensities does not change when all of them are shifted, so that fixing the
    first loses nothing; it makes the weight of a click, `propensity_1 / propensity_p = exp(-logit_p)`, a matter of its
    own position. All logits start at 0: every position is examined alike, and the first step of the dual learning
    algorithm (Ai et al. 2018) is one on clicks as they are.

    Args:
        positions: how many are told apart; those beyond have the logit of the last.

    Raises:
        ValueError: fewer than 2 positions, which leaves nothing to learn.

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
        """Logits [N] of positions that count from 1; 0 without gradient for NaN, a document that was not shown.

        Raises:
            InputError: a position is not a number from 1 on.
        """
        logits_P = torch.cat([self.later.new_zeros(1), self.later])
        return logits_P[position_index(positions_N, len(logits_P))]
