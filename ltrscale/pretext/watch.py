"""Watching pretraining: how well the projections of two views distinguish documents, and whether that is too easy.

An encoder that recognises a document by a unique value, or maps all documents to one point, has a good loss but has
learnt nothing. Both show in the geometry of the projections.

Shapes: N documents, D projection, Q1 = Q + 1 offsets; A anchors, which are compared with C documents.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from ltrscale.batch import at_least_float32

ANCHORS = 64
"""Documents of a micro-batch that are measured; all of them would cost as much as the loss."""
EVERY = 8
"""Micro-batches of a worker of which one is measured: that costs a GPU's host a tenth of a step."""
NEGATIVES = 256
"""Documents of a micro-batch that anchors are compared with, if the contrast is within groups."""

_SOLVED, _COLLAPSED = 0.9, -0.05
"""Bounds of the warnings. Accuracy means the same at every temperature, unlike the share of the loss: at 1 the loss
cannot fall to a quarter, at .01 it may rise while the encoder learns."""

MIN_NORM = 1e-8
"""Vectors shorter than this count as zero vectors."""


def unit_vectors(z_ND: Tensor) -> Tensor:
    """Vectors scaled to length 1, in float32 at least; a zero vector stays zero and has gradient 0.

    The norm of a zero vector is replaced by infinity, because dividing by a small constant would give a gradient of
    about 1e8 when all units of a network are dead.

    Example:
        >>> unit_vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    z_ND = at_least_float32(z_ND)
    norm_N1: Tensor = torch.linalg.vector_norm(z_ND, dim=-1, keepdim=True)
    return z_ND / norm_N1.masked_fill(norm_N1 < MIN_NORM, torch.inf)


class Sums(NamedTuple):
    """Sums over anchors, over pairs of an anchor with another document's view, and over documents."""

    anchors: float
    distance: float
    """Squared distances of the unit vectors of an anchor's two views."""
    pairs: float
    nearness: float
    """`exp(-2 d^2)` of the pairs, d the distance of the unit vectors."""
    contrasted: float
    """Anchors with another document in their group."""
    found: float
    """Anchors whose first view is closer to its second view than to any view of another document."""
    loss: float
    uninformed: float
    """Losses that documents would have if all similarities were equal."""


class Geometry(NamedTuple):
    """Figures of an epoch; None where undefined."""

    alignment: float | None
    """Mean squared distance of the unit vectors of a document's two views, from 0 to 4 (Wang and Isola 2020)."""
    uniformity: float | None
    """`log mean exp(-2 d^2)` over pairs of different documents of a group: 0 if all vectors are equal, below -2 if they
    are spread over the sphere (Wang and Isola 2020, t = 2, within groups)."""
    accuracy: float | None
    """Share of the documents whose other view is the closest of all views of the group."""
    loss_left: float | None
    """The loss divided by that of an encoder that knows nothing; None if contrast is not the whole loss."""

    @classmethod
    def from_sums(cls, sums: Sums) -> Self:
        """Compute the figures from sums."""
        ratio = torch.tensor([sums.distance, sums.nearness, sums.found, sums.loss], dtype=torch.float64)
        ratio /= torch.tensor([sums.anchors, sums.pairs, sums.contrasted, sums.uninformed], dtype=torch.float64)
        ratio[1].log_()
        return cls(*(value if abs(value) < torch.inf else None for value in ratio.tolist()))


def warning_of(epoch: Geometry, if_solved: str) -> str | None:
    """The warning about an epoch, with the remedy; None if nothing is wrong."""
    if epoch.uniformity is not None and epoch.uniformity > _COLLAPSED:
        return (
            f"the embeddings have collapsed (uniformity {epoch.uniformity:.3f}, alignment {epoch.alignment:.3f}): all "
            "documents look alike; lower optimizer.learning_rate, or set projector.batch_norm for simsiam"
        )
    if epoch.accuracy is not None and epoch.accuracy > _SOLVED:
        left = "" if epoch.loss_left is None else f", {epoch.loss_left:.0%} of the loss is left"
        return (
            f"the contrast is solved (the other view is found for {epoch.accuracy:.0%} of documents{left}), {if_solved}"
        )
    return None


@torch.no_grad()
def collapse_measures(
    z0_ND: Tensor,
    z1_ND: Tensor,
    offsets_Q1: Tensor,
    *,
    anchors: int = ANCHORS,
    negatives: int = NEGATIVES,
    real_N: Tensor | None = None,
) -> Tensor:
    """The first six of `Sums` for the first documents of a micro-batch, float64, shape [6].

    The first `anchors` documents are compared with the other documents of their groups among the first `negatives`.
    Nothing is copied from the device.

    Args:
        z0_ND: projections of the first view.
        z1_ND: projections of the second view.
        offsets_Q1: offsets of the groups to contrast documents within.
        anchors: documents to measure.
        negatives: documents to compare with.
        real_N: where a document is no padding; None if all are real.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> measured = collapse_measures(z, z, torch.tensor([0, 2, 3]))
        >>> [round(value, 4) for value in measured.tolist()]  # exp(-4) for each pair
        [3.0, 0.0, 4.0, 0.0733, 2.0, 2.0]
    """
    n = min(negatives, len(z0_ND))
    place_C = torch.arange(n, device=z0_ND.device)
    group_C = torch.searchsorted(offsets_Q1[1:].contiguous(), place_C, right=True)
    first_CD, second_CD = unit_vectors(z0_ND[:n]), unit_vectors(z1_ND[:n])
    anchors_AD = first_CD[:anchors]
    positive_A = (anchors_AD * second_CD[:anchors]).sum(1)
    negative_AC = (group_C[:anchors, None] == group_C) & (place_C[:anchors, None] != place_C)
    if real_N is not None:
        negative_AC &= real_N[: len(negative_AC), None]
    negative_AU = torch.cat([negative_AC, negative_AC], 1)
    with torch.autocast(z0_ND.device.type, enabled=False):
        cosine_AU = anchors_AD @ torch.cat([first_CD, second_CD]).T
    contrasted_A = negative_AC.any(1)
    matched_A = contrasted_A & (positive_A[:, None] > cosine_AU).logical_or_(~negative_AU).all(1)
    nearness_AU = torch.exp(4 * cosine_AU - 4).masked_fill_(~negative_AU, 0.0)  # d^2 = 2 - 2 cos
    ones_A, distance_A = torch.ones_like(positive_A), 2 - 2 * positive_A
    if real_N is not None:
        ones_A, distance_A = (values_A * real_N[: len(values_A)] for values_A in (ones_A, distance_A))
    parts = (
        ones_A.sum(),
        distance_A.sum(),
        negative_AU.sum(),
        nearness_AU.sum(),
        contrasted_A.sum(),
        matched_A.sum(),
    )
    return torch.stack([part.double() for part in parts])


class CollapseWatch:
    """Sums over every eighth micro-batch of an epoch, or since a resume; they stay on the device until taken."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._seen = 0

    @property
    def next_is_due(self) -> bool:
        """Whether to measure the next micro-batch: the first after `take`, and every eighth after it."""
        return self._seen % EVERY == 0

    def is_due(self) -> bool:
        """Whether to measure this micro-batch."""
        due, self._seen = self.next_is_due, self._seen + 1
        return due

    def add(self, of_views: Tensor, losses_N: Tensor, uninformed_N: Tensor) -> None:
        """Add a micro-batch: its `collapse_measures` and the losses of its documents."""
        losses = torch.stack([losses_N.detach().double().sum(), uninformed_N.double().sum()])
        sums = torch.cat([of_views, losses])
        if self._sums is None:
            self._sums = torch.zeros_like(sums)
        self._sums += sums  # in place, as a replayed graph adds to the same memory

    def take(self) -> Tensor:
        """The sums so far on the CPU, shape [8], zeros before the first micro-batch; resets them."""
        self._seen = 0
        if self._sums is None:
            return torch.zeros(len(Sums._fields), dtype=torch.float64)
        taken = self._sums.to("cpu", copy=True)
        self._sums.zero_()
        return taken
