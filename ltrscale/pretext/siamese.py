"""Objectives that compare two views of each document: their base, and SimSiam, which needs no negatives.

Shapes: N documents, F features, D and P projection, Q1 = Q + 1 offsets; R = M * N documents of M members.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ltrscale.batch import real_documents, repeated
from ltrscale.models.batch_norm import MicroBatchNorm
from ltrscale.models.encoder import Encoder
from ltrscale.models.layers import Size
from ltrscale.models.ranker import Projector, ProjectorConfig
from ltrscale.pretext.augment import Augmentation, Draw
from ltrscale.pretext.objective import AddedModules, Objective, Pretrainer
from ltrscale.pretext.watch import NEGATIVES, collapse_measures, unit_vectors


class Siamese(Objective):
    """The base of the objectives that compare the projections of two views of each document."""

    draws_views: ClassVar[bool] = True
    """Whether the configured augmentation makes the views."""
    if_solved: ClassVar[str] = (
        "so further epochs teach little; let a short run go on, and jobs.explain then reports which features solve "
        "it; stop a long one, and hide such features with pretrain.mask, or make views differ more: pretrain.augment, "
        "for scarf and dacl the rate of pretrain.method"
    )
    projector: ProjectorConfig = ProjectorConfig()

    @property
    def projector_layers(self) -> int:
        """Hidden layers of the projector."""
        return self.projector.layers

    def needs_marginals(self, augmentation: Augmentation) -> bool:
        """Whether the configured augmentation makes the views and needs marginals."""
        return self.draws_views and augmentation.needs_marginals

    def views(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Two random views of documents, both of shape [N, F]: by default, two of the configured augmentation."""
        first_NF = draw.masked(net.augmentation.view(x_NF, draw))
        return first_NF, draw.masked(net.augmentation.view(x_NF, draw))

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, among_Q1: Tensor) -> Tensor:
        """The loss of each document, shape [N], from the projections of its views, contrasted within these groups."""
        raise NotImplementedError

    def among(self, offsets_Q1: Tensor) -> Tensor:
        """Offsets of what documents are contrasted within: by default, the query groups."""
        return offsets_Q1

    def uninformed(self, negatives_N: Tensor) -> Tensor:
        """The loss of a document, shape [N], if all similarities are equal; 0 if the objective has no contrast.

        Args:
            negatives_N: number of other documents that each document is contrasted with.
        """
        return torch.zeros_like(negatives_N, dtype=torch.float32)

    def losses(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> Tensor:
        """Draw the views and compare their projections within each member; `net.watch` measures the first member.

        As the projector, the predictor of SimSiam is shared: its norms take all members of a micro-batch together.
        """
        n, among_Q1 = len(x_NF), self.among(draw.offsets_Q1)
        first_NF, second_NF = self.views(net, x_NF, draw)
        z0_RP, z1_RP = (_by_member(net, net.project(view_NF, draw)) for view_NF in (first_NF, second_NF))
        losses_R = self.compare(net, z0_RP, z1_RP, repeated(among_Q1, net.encoder.members))
        losses_MN = losses_R.view(net.encoder.members, n)
        real_N = real_documents(draw.offsets_Q1)
        if real_N is not None:
            losses_MN = losses_MN.masked_fill(~real_N, 0.0)
        if net.training and net.watch.is_due():
            others = n if self.contrasts_batch else NEGATIVES
            of_views = collapse_measures(z0_RP[:n], z1_RP[:n], among_Q1, negatives=others, real_N=real_N)
            uninformed_N = self.uninformed(negatives(among_Q1, n))
            net.watch.add(of_views, losses_MN[0], uninformed_N if real_N is None else uninformed_N * real_N)
        return losses_MN.mean(0)


def _by_member(net: Pretrainer, z_NP: Tensor) -> Tensor:
    """Projections of one member after the other, [R, P']: each member of the encoder has its own contrast."""
    return z_NP if net.encoder.members == 1 else torch.cat(z_NP.chunk(net.encoder.members, 1))


def negatives(offsets_Q1: Tensor, n: int) -> Tensor:
    """The number of other documents in the group of each of n documents, shape [N].

    Example:
        >>> negatives(torch.tensor([0, 2, 2, 5]), 5)
        tensor([1, 1, 2, 2, 2])
    """
    group_N = torch.searchsorted(offsets_Q1[1:].contiguous(), torch.arange(n, device=offsets_Q1.device), right=True)
    return offsets_Q1.diff()[group_N] - 1


def simsiam(p0_ND: Tensor, p1_ND: Tensor, z0_ND: Tensor, z1_ND: Tensor) -> Tensor:
    """SimSiam: align each view's prediction with the other view's projection, shape [N].

    `-(cos(p_0, sg z_1) + cos(p_1, sg z_0))`, where sg stops the gradient (Chen and He 2021). Half precision is
    computed, and returned, in float32; a zero vector has cosine 0 to everything.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> simsiam(z, z.flip(0), z, z)  # p_0 agrees with z_1, p_1 is at right angles to z_0
        tensor([-1., -1.])
    """

    def cosine(p_ND: Tensor, z_ND: Tensor) -> Tensor:
        return (unit_vectors(p_ND) * unit_vectors(z_ND.detach())).sum(-1)

    return -(cosine(p0_ND, z1_ND) + cosine(p1_ND, z0_ND))


class _Predictor(nn.Sequential):
    """SimSiam's predictor: one hidden layer with BatchNorm and ReLU and without bias, output of the input's size."""

    def __init__(self, width: int, bottleneck: int | None = None, *, bias: bool = False) -> None:
        hidden = bottleneck or max(1, width // 4)
        first, second = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=bias)
        super().__init__(first, MicroBatchNorm(hidden, members_first=True), nn.ReLU(), second)


class SimSiamConfig(Siamese):
    """SimSiam: predict one view from the other, without negatives.

    Source: Chen and He 2021; HOU24, A.2.5.
    Proof: formula, stopped gradients.
    """

    kind: Literal["simsiam"] = "simsiam"
    pads: ClassVar[bool] = True
    projector: ProjectorConfig = ProjectorConfig(batch_norm=True)
    bottleneck: Size | None = None
    """Size of the predictor's hidden layer; a quarter of the projection by default."""
    predictor_bias: bool = False
    """Whether the predictor's output layer has a bias: HOU24's text has none, its public code has one."""

    def added_modules(self, encoder: Encoder, numeric_F: Tensor, cardinalities: Sequence[int]) -> AddedModules:  # noqa: ARG002
        """A projector, and a predictor on top of it."""
        projector = Projector(encoder.member_width, self.projector)
        return AddedModules(
            projector=projector, predictor=_Predictor(projector.width, self.bottleneck, bias=self.predictor_bias)
        )

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, among_Q1: Tensor) -> Tensor:  # noqa: ARG002
        """The SimSiam loss of each document."""
        return simsiam(net.predictor(z0_NP), net.predictor(z1_NP), z0_NP, z1_NP)
