"""SimSiam: predict one view of a document from the other, without negatives, one value per document.

Shapes: N documents, D projection.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from ltrscale.models.heads import Projector, ProjectorConfig
from ltrscale.models.layers import MicroBatchNorm
from ltrscale.pretext.objective import Parts, Pretrainer
from ltrscale.pretext.siamese import Siamese
from ltrscale.pretext.watch import unit_vectors


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


class Predictor(nn.Sequential):
    """SimSiam's predictor: one hidden layer with BatchNorm and ReLU and without bias, output of the input's size.

    Args:
        width: size P of the projection.
        bottleneck: size of the hidden layer; a quarter of the width by default (the public code of HOU24: 136 to 34).
        bias: whether the output layer has a bias.
    """

    def __init__(self, width: int, bottleneck: int | None = None, *, bias: bool = False) -> None:
        hidden = bottleneck or max(1, width // 4)
        first, second = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=bias)
        super().__init__(first, MicroBatchNorm(hidden), nn.ReLU(), second)


class SimSiamConfig(Siamese):
    """SimSiam: predict one view from the other, without negatives.

    Source: Chen and He 2021; HOU24, A.2.5.
    Proof: formula, stopped gradients.
    """

    kind: Literal["simsiam"] = "simsiam"
    projector: ProjectorConfig = ProjectorConfig(batch_norm=True)
    bottleneck: int | None = Field(None, ge=1)
    """Size of the predictor's hidden layer; a quarter of the projection by default."""
    predictor_bias: bool = False
    """Whether the predictor's output layer has a bias: HOU24's text has none, its public code has one."""

    @property
    def projector_layers(self) -> int:
        """Hidden layers of the projector."""
        return self.projector.layers

    def parts(self, width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> Parts:  # noqa: ARG002
        """A projector, and a predictor on top of it."""
        projector = Projector(width, self.projector)
        return Parts(
            projector=projector, predictor=Predictor(projector.width, self.bottleneck, bias=self.predictor_bias)
        )

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, offsets_Q1: Tensor) -> Tensor:  # noqa: ARG002
        """See `simsiam`."""
        return simsiam(net.predictor(z0_NP), net.predictor(z1_NP), z0_NP, z1_NP)
