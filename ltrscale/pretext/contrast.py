"""Contrastive pretext objectives over documents: SimCLR-Rank, SimCLR, SCARF and DACL+, one value per document.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, D embedding, V = 2N views (document n has views n and N + n); in a
chunk of M groups, U = 2L views a group; a tile holds the similarities of R rows and C columns.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltrscale.batch import length_chunks
from ltrscale.models.ranker import Projector, ProjectorConfig
from ltrscale.pretext.augment import MIXUPS, Augmentation, Draw, MarginalConfig, Mixup, MixupConfig
from ltrscale.pretext.objective import Parts, Pretrainer
from ltrscale.pretext.siamese import Siamese
from ltrscale.pretext.watch import unit_vectors

SIMILARITIES_PER_BLOCK = 1 << 18
"""Similarities handled at once, in a chunk of groups or a tile: few enough to stay in the cache, so memory does not
grow with the list length."""


class Contrastive(Siamese):
    """The base of the objectives with an InfoNCE loss."""

    temperature: float = Field(0.1, gt=0)
    """Divides the cosine similarities."""
    projector: ProjectorConfig = ProjectorConfig()

    @property
    def projector_layers(self) -> int:
        """Hidden layers of the projector."""
        return self.projector.layers

    def parts(self, width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> Parts:  # noqa: ARG002
        """A projector."""
        return Parts(projector=Projector(width, self.projector))

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, offsets_Q1: Tensor) -> Tensor:  # noqa: ARG002
        """See `simclr_rank`; `simclr` is the same with all documents in one group."""
        return simclr_rank(z0_NP, z1_NP, self.among(offsets_Q1), temperature=self.temperature)

    def uninformed(self, rivals_N: Tensor) -> Tensor:
        """`2 log(2L - 1)` for L documents: both views choose among 2L - 1 others."""
        return 2 * torch.log1p(2 * rivals_N)


class _TwoViews(Contrastive):
    """The base of SimCLR, SimCLR-Rank and SimCLR-Sample, which differ in the groups that they contrast within."""

    with_positive: bool = True
    """Whether the sum over other views includes the document's own second view: HOU24's formula 3 and both public
    codes include it, HOU23's section D.1 leaves it out."""

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, offsets_Q1: Tensor) -> Tensor:  # noqa: ARG002
        """See `simclr_rank`."""
        return simclr_rank(
            z0_NP, z1_NP, self.among(offsets_Q1), temperature=self.temperature, with_positive=self.with_positive
        )

    def uninformed(self, rivals_N: Tensor) -> Tensor:
        """`2 log(2L - 1)` for L documents, `2 log(2L - 2)` without the positive; 0 for a document alone."""
        return 2 * torch.log((2 * rivals_N + self.with_positive).clamp(min=1))


class SimCLRRankConfig(_TwoViews):
    """SimCLR-Rank: distinguish a document's two views from the other documents of its query group (HOU24).

    Source: HOU24, formula 3.
    Proof: loops; chunks; gradients; memory.
    """

    kind: Literal["simclr_rank"] = "simclr_rank"


class SimCLRSampleConfig(_TwoViews):
    """SimCLR-Sample: SimCLR-Rank on documents regrouped at random inside each shuffle window (HOU24).

    Source: HOU24.
    Proof: each document once an epoch (`tests/data/stream/test_windows.py`).
    """

    kind: Literal["simclr_sample"] = "simclr_sample"
    regroups: ClassVar[bool] = True


def simclr_rank(
    z0_ND: Tensor, z1_ND: Tensor, offsets_Q1: Tensor, *, temperature: float, with_positive: bool = True
) -> Tensor:
    """SimCLR-Rank: distinguish a document's two views from all other views of its query group, shape [N].

    `sum over a = 0, 1 of -cos(z_a, z_a') / tau + log sum over v of exp(cos(z_a, v) / tau)` where a' = 1 - a and v
    runs over the other 2L - 1 views of the same group, including the positive z_a' but not z_a itself (Hou et al.
    2024, formula 3, both views summed). Without the positive, v runs over the 2L - 2 views of other documents (the
    workshop version, section D.1), and the loss may be negative.

    Time is O(sum of L^2). Forward and backward each compute the similarities in tiles of a fixed size and keep none,
    so memory is O(N D). Similarities are float32 (or float64) even for half precision input and under autocast: at
    small temperatures, bfloat16 would round their differences away.

    Args:
        z0_ND: projections of the first view, not normalised. A zero vector has cosine 0 to everything.
        z1_ND: projections of the second view.
        offsets_Q1: offsets of the groups. A document alone in its group has loss 0 and gradient 0.
        temperature: tau > 0.
        with_positive: whether v takes the value z_a'.

    Raises:
        ValueError: the temperature is not positive.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> simclr_rank(z, z, torch.tensor([0, 2, 3]), temperature=1.0)  # 2 log(1 + 2 / e) twice; a document alone
        tensor([1.1029, 1.1029, 0.0000])
        >>> simclr_rank(z, z, torch.tensor([0, 2, 3]), temperature=1.0, with_positive=False)  # 2 log(2 / e)
        tensor([-0.6137, -0.6137,  0.0000])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    n = len(z0_ND)
    with torch.autocast(z0_ND.device.type, enabled=False):  # autocast would compute matmuls in bfloat16
        views_VD = torch.cat([unit_vectors(z0_ND), unit_vectors(z1_ND)])
        positive_N = (views_VD[:n] * views_VD[n:]).sum(-1) / temperature
        total_V: Tensor = _GroupLogSumExp.apply(views_VD, offsets_Q1, temperature, with_positive)  # type: ignore[no-untyped-call]
        loss_N = total_V[:n] + total_V[n:] - 2 * positive_N
        # without the positive, a document alone has nothing to sum over
        return loss_N if with_positive else loss_N.masked_fill(total_V[:n] == -torch.inf, 0.0)


class SimCLRConfig(_TwoViews):
    """SimCLR: distinguish a document's two views from all other documents of the micro-batch.

    Source: Chen et al. 2020.
    Proof: loops; chunks; gradients; memory.
    """

    kind: Literal["simclr"] = "simclr"
    contrasts_batch: ClassVar[bool] = True


def simclr(z0_ND: Tensor, z1_ND: Tensor, *, temperature: float) -> Tensor:
    """SimCLR: distinguish a document's two views from all other views of the micro-batch, shape [N].

    `sum over a = 0, 1 of -cos(z_a, z_a') / tau + log sum over v of exp(cos(z_a, v) / tau)` where v runs over the other
    2N - 1 views, including the positive but not z_a itself (Chen et al. 2020, equation 1, both views summed). It is
    computed as SimCLR-Rank with all documents in one group: time is O(N^2), memory O(N D), and the matrix of all
    similarities never exists.

    Raises:
        ValueError: the temperature is not positive.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> simclr(z, z, temperature=1.0)  # 2 log(1 + 2 / e)
        tensor([1.1029, 1.1029])
    """
    return simclr_rank(z0_ND, z1_ND, torch.tensor([0, len(z0_ND)], device=z0_ND.device), temperature=temperature)


class ScarfConfig(Contrastive):
    """SCARF: SimCLR between documents and copies with values drawn from the features' training marginals.

    Source: Bahri et al. 2022; HOU24.
    Proof: loop; marginals are the training ones.
    """

    kind: Literal["scarf"] = "scarf"
    contrasts_batch: ClassVar[bool] = True
    temperature: float = Field(1.0, gt=0)
    """Divides the cosine similarities."""
    rate: float = Field(0.6, ge=0, le=1)
    """Share of the features that are corrupted; HOU24 tries .3, .6 and .9."""
    fixed_count: bool = True
    """Corrupt the same number of features of every document, instead of drawing each independently (HOU24)."""

    def needs_marginals(self, augmentation: Augmentation) -> bool:  # noqa: ARG002
        """Always True: the corruption draws from them, whatever the augmentation."""
        return True

    def views(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The documents as they are, and their corrupted copies."""
        corruption = MarginalConfig(probability=self.rate, fixed_count=self.fixed_count)
        return x_NF, draw.masked(corruption.view(x_NF, draw))

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, offsets_Q1: Tensor) -> Tensor:  # noqa: ARG002
        """See `scarf`."""
        return scarf(z0_NP, z1_NP, temperature=self.temperature)

    def uninformed(self, rivals_N: Tensor) -> Tensor:
        """`log N`: one of N corrupted views is the document's own."""
        return torch.log1p(rivals_N)


def scarf(z_ND: Tensor, corrupted_ND: Tensor, *, temperature: float) -> Tensor:
    """SCARF: find a document's corrupted view among the corrupted views of the micro-batch, shape [N].

    `-cos(z_i, c_i) / tau + log sum over k of exp(cos(z_i, c_k) / tau)`, with z of the original documents and c of
    their corrupted views (Bahri et al. 2022, Algorithm 1). The sum runs over the N corrupted views only, including the
    document's own, and in one direction only: this is neither `simclr` nor the mean of both directions. The algorithm
    takes the mean over k, which only subtracts log N; with the sum, a single document has loss 0.

    Time is O(N^2), memory O(N D): similarities are computed in tiles, and again for the gradient. They are float32 (or
    float64) even for half precision input and under autocast.

    Raises:
        ValueError: the temperature is not positive.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> scarf(z, z, temperature=1.0)  # log(1 + 1 / e)
        tensor([0.3133, 0.3133])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    with torch.autocast(z_ND.device.type, enabled=False):
        unit_ND, others_ND = unit_vectors(z_ND), unit_vectors(corrupted_ND)
        total_N: Tensor = _CrossLogSumExp.apply(unit_ND, others_ND, temperature)  # type: ignore[no-untyped-call]
        return total_N - (unit_ND * others_ND).sum(-1) / temperature


class DaclConfig(Contrastive):
    """DACL+: SimCLR between two mixtures of a document with other documents.

    Source: Verma et al. 2021; HOU24.
    Proof: `tests/pretext/test_augment.py`.
    """

    kind: Literal["dacl"] = "dacl"
    contrasts_batch: ClassVar[bool] = True
    draws_views: ClassVar[bool] = False
    amount: float = Field(0.3, ge=0, le=1)
    """The largest share of the other document; HOU24 tries .3, .6 and .9."""
    forms: tuple[Mixup, ...] = Field(MIXUPS, min_length=1)
    """Ways to mix, one drawn for each document; HOU24's public code has `linear` and `binary`."""

    def views(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Two mixtures of each document, see `mixup`."""
        mixture = MixupConfig(amount=self.amount, forms=self.forms)
        first_NF = draw.masked(mixture.view(x_NF, draw))
        return first_NF, draw.masked(mixture.view(x_NF, draw))


class _GroupLogSumExp(torch.autograd.Function):
    """`log sum over v of exp(<u, v> / tau)` of each view u over the other views v of its group, shape [V].

    Without the positive, the other view of the same document is left out too, and a document alone has -inf.
    Similarities are symmetric, so a tile above the diagonal also serves as the tile below it. Backward computes them
    again: with P_ij the softmax of row i and g the incoming gradient, the gradient of u_i is
    `sum over j of (g_i P_ij + g_j P_ji) u_j / tau`.
    """

    @staticmethod
    def forward(ctx: Any, views_VD: Tensor, offsets_Q1: Tensor, temperature: float, with_positive: bool) -> Tensor:
        total_V = views_VD.new_empty(len(views_VD))
        for rows_MU, mask_MU in _view_chunks(offsets_Q1):
            views_MUD = views_VD[rows_MU]
            total_MU = _chunk_totals(views_MUD, mask_MU, temperature=temperature, with_positive=with_positive)
            total_V[rows_MU[mask_MU]] = total_MU[mask_MU]
        ctx.save_for_backward(views_VD, offsets_Q1, total_V)
        ctx.temperature, ctx.with_positive = temperature, with_positive
        return total_V

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_V: Tensor) -> tuple[Tensor, None, None, None]:
        views_VD, offsets_Q1, total_V = ctx.saved_tensors
        total_V = total_V.masked_fill(total_V == -torch.inf, torch.inf)  # a sum of nothing: its softmax row is 0
        grad_VD = torch.empty_like(views_VD)
        with torch.autocast(views_VD.device.type, enabled=False):
            for rows_MU, mask_MU in _view_chunks(offsets_Q1):
                grad_VD[rows_MU[mask_MU]] = _chunk_gradient(
                    views_VD[rows_MU],
                    torch.where(mask_MU, total_V[rows_MU], torch.inf),
                    torch.where(mask_MU, grad_V[rows_MU], 0.0) / ctx.temperature,
                    mask_MU,
                    temperature=ctx.temperature,
                    with_positive=ctx.with_positive,
                )[mask_MU]
        return grad_VD, None, None, None


def _chunk_totals(views_MUD: Tensor, mask_MU: Tensor, *, temperature: float, with_positive: bool) -> Tensor:
    """Log-sum-exp of each view of a chunk over the other views of its group, tile by tile, shape [M, U]."""
    total_MU = views_MUD.new_full(mask_MU.shape, -torch.inf)
    barred_M1U = torch.where(mask_MU, 0.0, -torch.inf).to(views_MUD.dtype)[:, None]
    for r, c in _tiles(mask_MU):
        logits_MRC = torch.baddbmm(barred_M1U[..., c], views_MUD[:, r], views_MUD[:, c].mT, alpha=1 / temperature)
        for diagonal in _left_out(logits_MRC, r, c, mask_MU.shape[1], with_positive=with_positive):
            diagonal.fill_(-torch.inf)
        if r != c:
            total_MU[:, c] = torch.logaddexp(total_MU[:, c], logits_MRC.logsumexp(1))
        total_MU[:, r] = torch.logaddexp(total_MU[:, r], logits_MRC.logsumexp(2))
    return total_MU


def _chunk_gradient(
    views_MUD: Tensor,
    total_MU: Tensor,
    grad_MU: Tensor,
    mask_MU: Tensor,
    *,
    temperature: float,
    with_positive: bool,
) -> Tensor:
    """Gradient of the views of a chunk; `total_MU` is infinite in padding, which makes its softmax rows 0."""
    grad_MUD = torch.zeros_like(views_MUD)
    barred_M1U = torch.where(mask_MU, 0.0, -torch.inf).to(views_MUD.dtype)[:, None]
    for r, c in _tiles(mask_MU):
        views_MRD, views_MCD = views_MUD[:, r], views_MUD[:, c]
        logits_MRC = torch.baddbmm(barred_M1U[..., c], views_MRD, views_MCD.mT, alpha=1 / temperature)
        weight_MRC = (logits_MRC - total_MU[:, r, None]).exp_().mul_(grad_MU[:, r, None])
        if r != c:
            weight_MRC += logits_MRC.sub_(total_MU[:, None, c]).exp_().mul_(grad_MU[:, None, c])
        for diagonal in _left_out(weight_MRC, r, c, mask_MU.shape[1], with_positive=with_positive):
            diagonal.zero_()
        if r == c:
            weight_MRC = weight_MRC + weight_MRC.mT
        else:
            grad_MUD[:, c].baddbmm_(weight_MRC.mT, views_MRD)
        grad_MUD[:, r].baddbmm_(weight_MRC, views_MCD)
    return grad_MUD


def _left_out(tile_MRC: Tensor, r: slice, c: slice, width: int, *, with_positive: bool) -> Iterator[Tensor]:
    """The entries of a tile whose column is not contrasted with its row: the view itself and, if so set, its positive.

    Of the U views of a group, those that are U / 2 apart belong to the same document.
    """
    shift = r.start - c.start
    if r == c:
        yield tile_MRC.diagonal(0, 1, 2)
    if not with_positive:
        yield from (tile_MRC.diagonal(shift + other, 1, 2) for other in (width // 2, -(width // 2)))


class _CrossLogSumExp(torch.autograd.Function):
    """`log sum over k of exp(<u, w_k> / tau)` of each row u over all rows w of another matrix, shape [N]."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, others_ND: Tensor, temperature: float) -> Tensor:
        total_N = rows_ND.new_full((len(rows_ND),), -torch.inf)
        for r, c in product(_slices(len(rows_ND)), _slices(len(others_ND))):
            logits_RC = rows_ND[r] @ others_ND[c].mT / temperature
            total_N[r] = torch.logaddexp(total_N[r], logits_RC.logsumexp(1))
        ctx.save_for_backward(rows_ND, others_ND, total_N)
        ctx.temperature = temperature
        return total_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_ND, others_ND, total_N = ctx.saved_tensors
        grad_rows_ND, grad_others_ND = torch.zeros_like(rows_ND), torch.zeros_like(others_ND)
        with torch.autocast(rows_ND.device.type, enabled=False):
            for r, c in product(_slices(len(rows_ND)), _slices(len(others_ND))):
                logits_RC = rows_ND[r] @ others_ND[c].mT / ctx.temperature
                softmax_RC = logits_RC.sub_(total_N[r, None]).exp_().mul_(grad_N[r, None] / ctx.temperature)
                grad_rows_ND[r].addmm_(softmax_RC, others_ND[c])
                grad_others_ND[c].addmm_(softmax_RC.mT, rows_ND[r])
        return grad_rows_ND, grad_others_ND, None


def _view_chunks(offsets_Q1: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields rows and mask of the views of groups of similar length, with both views of a group side by side."""
    n = int(offsets_Q1[-1])
    # A list of L documents has 2L views, so four times as many similarities as pairs of documents.
    for chunk in length_chunks(offsets_Q1, budget=SIMILARITIES_PER_BLOCK // 4):
        yield torch.cat([chunk.rows_ML, chunk.rows_ML + n], 1), torch.cat([chunk.mask_ML, chunk.mask_ML], 1)


def _tiles(mask_MU: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the square tiles on and above the diagonal; a chunk of several groups is a single tile."""
    slices = _slices(mask_MU.shape[1])
    assert len(slices) == 1 or len(mask_MU) == 1  # only a chunk of one group, which has no padding, spans several tiles
    return combinations_with_replacement(slices, 2)


def _slices(length: int) -> list[slice]:
    """Consecutive slices, any two of which span a tile of at most SIMILARITIES_PER_BLOCK similarities."""
    size = max(1, math.isqrt(SIMILARITIES_PER_BLOCK))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
