"""The base of the objectives that compare two views of each document.

Shapes: N documents, F features, P projection, Q1 = Q + 1 offsets.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ltrscale.pretext.augment import Augmentation, Draw
from ltrscale.pretext.objective import Objective, Pretrainer
from ltrscale.pretext.watch import RIVALS, collapse_measures


class Siamese(Objective):
    """The base of the objectives that compare the projections of two views of each document."""

    draws_views: ClassVar[bool] = True
    """Whether the configured augmentation makes the views."""
    if_solved: ClassVar[str] = (
        "so further epochs teach little; let a short run go on, and jobs.contrast then reports which features solve "
        "it; stop a long one, and hide such features with pretrain.mask, or make views differ more: pretrain.augment, "
        "for scarf and dacl the rate of pretrain.method"
    )

    def needs_marginals(self, augmentation: Augmentation) -> bool:
        """Whether the augmentation needs them, if it makes the views."""
        return self.draws_views and augmentation.needs_marginals

    def views(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Two random views of documents, both of shape [N, F]: by default, two of the configured augmentation."""
        first_NF = draw.masked(net.augmentation.view(x_NF, draw))
        return first_NF, draw.masked(net.augmentation.view(x_NF, draw))

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The loss of each document, shape [N], from the projections of its views."""
        raise NotImplementedError

    def among(self, offsets_Q1: Tensor) -> Tensor:
        """Offsets of the documents that are told apart: the query groups, or the whole micro-batch as one group."""
        return offsets_Q1[[0, -1]] if self.contrasts_batch else offsets_Q1

    def uninformed(self, rivals_N: Tensor) -> Tensor:
        """The loss of a document, shape [N], if all similarities are equal; 0 if the objective has no contrast.

        Args:
            rivals_N: number of other documents that each document is told apart from.
        """
        return torch.zeros_like(rivals_N, dtype=torch.float32)

    def losses(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> Tensor:
        """Draw the views and compare their projections; `net.watch` sees them in training."""
        first_NF, second_NF = self.views(net, x_NF, draw)
        z0_NP, z1_NP = net.project(first_NF), net.project(second_NF)
        losses_N = self.compare(net, z0_NP, z1_NP, draw.offsets_Q1)
        if net.training:
            among_Q1 = self.among(draw.offsets_Q1)
            of_views = collapse_measures(z0_NP, z1_NP, among_Q1, rivals=len(x_NF) if self.contrasts_batch else RIVALS)
            net.watch.add(of_views, losses_N, self.uninformed(rivals(among_Q1, len(x_NF))))
        return losses_N


def rivals(offsets_Q1: Tensor, n: int) -> Tensor:
    """The number of other documents in the group of each of n documents, shape [N].

    Example:
        >>> rivals(torch.tensor([0, 2, 2, 5]), 5)
        tensor([1, 1, 2, 2, 2])
    """
    group_N = torch.searchsorted(offsets_Q1[1:].contiguous(), torch.arange(n, device=offsets_Q1.device), right=True)
    return offsets_Q1.diff()[group_N] - 1
