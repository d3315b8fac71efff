"""Contrastive pretext objectives over documents: SimCLR-Rank, SimCLR, SCARF and DACL+, one value per document.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, D embedding; M groups of a chunk with U = 2L views each, the views of
a document side by side; R rows and C columns of a tile of similarities.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltrscale.batch import joined, length_chunks
from ltrscale.devices import block_entries
from ltrscale.layout import Chunks
from ltrscale.models.layers import Encoder
from ltrscale.models.ranker import Projector
from ltrscale.pretext import fused
from ltrscale.pretext.augment import MIXUPS, Augmentation, Draw, MarginalConfig, Mixup, MixupConfig
from ltrscale.pretext.objective import CONTRAST_DOCUMENTS, AddedModules, ContrastDocuments, Pretrainer, Siamese
from ltrscale.pretext.watch import unit_vectors

SIMILARITIES_PER_BLOCK = 1 << 18
"""Similarities that a CPU handles at once, in a chunk of groups or a tile: few enough to stay in the cache, so memory
does not grow with the list length; see `block_entries` for a GPU."""


class Contrastive(Siamese):
    """The base of the objectives with an InfoNCE loss."""

    with_positive: ClassVar[bool]
    """Whether the sum over other views includes the document's own second view."""
    temperature: float = Field(0.1, gt=0)
    """Divides the cosine similarities."""

    def added_modules(self, encoder: Encoder, numeric_F: Tensor, cardinalities: Sequence[int]) -> AddedModules:  # noqa: ARG002
        return AddedModules(projector=Projector(encoder.member_width, self.projector))

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, among_Q1: Tensor) -> Tensor:
        kept, on_gpu = self.with_positive, z0_NP.device.type != "cpu"  # on a CPU the number of chunks varies too much
        compiled = on_gpu and net.compiled
        return simclr_rank(z0_NP, z1_NP, among_Q1, temperature=self.temperature, with_positive=kept, compiled=compiled)

    def uninformed(self, negatives_N: Tensor) -> Tensor:
        """`2 log(2L - 1)` for L documents, `2 log(2L - 2)` without the positive; 0 for a document alone."""
        return 2 * torch.log((2 * negatives_N + self.with_positive).clamp(min=1))


class _TwoViews(Contrastive):
    """The base of SimCLR, SimCLR-Rank and SimCLR-Sample, which differ in the groups that they contrast within."""

    with_positive: bool = True  # type: ignore[misc]
    """Whether the sum over other views includes the document's own second view: HOU24's formula 3 and both public
    codes include it, HOU23's section D.1 leaves it out."""


class _AcrossGroups(Contrastive):
    """The base of the objectives that contrast documents of different query groups too."""

    contrasts_batch: ClassVar[bool] = True
    contrast_documents: ContrastDocuments = CONTRAST_DOCUMENTS
    """Documents are contrasted in runs of neighbouring groups of about this many; null takes the whole micro-batch."""

    def among(self, offsets_Q1: Tensor) -> Tensor:
        return joined(offsets_Q1, self.contrast_documents)


class SimCLRRankConfig(_TwoViews):
    """SimCLR-Rank: distinguish a document's two views from the other documents of its query group (HOU24).

    Source: HOU24, formula 3.
    Proof: loops; chunks; gradients; memory.
    """

    kind: Literal["simclr_rank"] = "simclr_rank"
    pads: ClassVar[bool] = True


class SimCLRSampleConfig(_TwoViews):
    """SimCLR-Sample: SimCLR-Rank on documents regrouped at random inside each shuffle window (HOU24).

    Source: HOU24.
    Proof: each document once an epoch (`tests/data/stream/test_windows.py`).
    """

    kind: Literal["simclr_sample"] = "simclr_sample"
    pads: ClassVar[bool] = True
    regroups: ClassVar[bool] = True


def simclr_rank(
    z0_ND: Tensor,
    z1_ND: Tensor,
    offsets_Q1: Tensor,
    *,
    temperature: float,
    with_positive: bool = True,
    compiled: bool = False,
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
        compiled: compute it by `fused.info_nce`, unless that would keep too many similarities; in float16 where
            products may be rounded to TF32, or under autocast.

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
    device, chunks = z0_ND.device, _view_chunks(offsets_Q1)
    half = torch.is_autocast_enabled(device.type) or torch.get_float32_matmul_precision() != "highest"
    with torch.autocast(device.type, enabled=False):  # autocast would compute matmuls in bfloat16
        if compiled and sum(4 * m * length**2 for m, length in chunks.shapes) <= 4 * block_entries(device):
            similar = fused.Similarities(1 / temperature, with_positive, half)
            return fused.compiled()(z0_ND, z1_ND, chunks, similar)
        views_N2D = unit_vectors(torch.stack([z0_ND, z1_ND], 1))
        positive_N = (views_N2D[:, 0] * views_N2D[:, 1]).sum(-1) / temperature
        total_N2: Tensor = _GroupLogSumExp.apply(views_N2D, offsets_Q1, temperature, with_positive)  # type: ignore[no-untyped-call]
        loss_N = total_N2.sum(1) - 2 * positive_N
        # without the positive, a document alone has nothing to sum over
        return loss_N if with_positive else loss_N.masked_fill(total_N2[:, 0] == -torch.inf, 0.0)


class SimCLRConfig(_AcrossGroups, _TwoViews):
    """SimCLR: distinguish a document's two views from other documents of the micro-batch, of any query group.

    It is SimCLR-Rank on runs of query groups; see `contrast_documents`.

    Source: Chen et al. 2020, equation 1, both views summed.
    Proof: loops; chunks; gradients; memory.
    """

    kind: Literal["simclr"] = "simclr"


class ScarfConfig(_AcrossGroups):
    """SCARF: SimCLR between documents and copies with values drawn from the features' training marginals.

    Source: Bahri et al. 2022; HOU24.
    Proof: loop; marginals are the training ones.
    """

    kind: Literal["scarf"] = "scarf"
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

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, among_Q1: Tensor) -> Tensor:  # noqa: ARG002
        return scarf(z0_NP, z1_NP, among_Q1, temperature=self.temperature)

    def uninformed(self, negatives_N: Tensor) -> Tensor:
        """`log N`: one of N corrupted views is the document's own."""
        return torch.log1p(negatives_N)


def scarf(z_ND: Tensor, corrupted_ND: Tensor, offsets_Q1: Tensor, *, temperature: float) -> Tensor:
    """SCARF: find a document's corrupted view among the corrupted views of its run of groups, shape [N].

    `-cos(z_i, c_i) / tau + log sum over k of exp(cos(z_i, c_k) / tau)`, with z of the original documents and c of
    their corrupted views (Bahri et al. 2022, Algorithm 1). The sum runs over the L corrupted views only, including the
    document's own, and in one direction only: this is neither SimCLR nor the mean of both directions. The algorithm
    takes the mean over k, which only subtracts log L; with the sum, a single document has loss 0.

    Time is O(sum of L^2), memory O(N D): similarities are computed in tiles, and recomputed for the gradient. They are
    float32 (or float64) even for half precision input and under autocast.

    Args:
        z_ND: projections of the documents as they are, not normalised.
        corrupted_ND: projections of their corrupted views.
        offsets_Q1: the runs to contrast a document in: `[0, N]`, the whole micro-batch, is SCARF.
        temperature: tau > 0.

    Raises:
        ValueError: the temperature is not positive.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> scarf(z, z, torch.tensor([0, 2]), temperature=1.0)  # log(1 + 1 / e)
        tensor([0.3133, 0.3133])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    with torch.autocast(z_ND.device.type, enabled=False):
        unit_ND, others_ND = unit_vectors(z_ND), unit_vectors(corrupted_ND)
        total_N: Tensor = _CrossLogSumExp.apply(unit_ND, others_ND, offsets_Q1, temperature)  # type: ignore[no-untyped-call]
        return total_N - (unit_ND * others_ND).sum(-1) / temperature


class DaclConfig(_AcrossGroups):
    """DACL+: SimCLR between two mixtures of a document with other documents.

    Source: Verma et al. 2021; HOU24.
    Proof: `tests/pretext/test_augment.py`.
    """

    kind: Literal["dacl"] = "dacl"
    draws_views: ClassVar[bool] = False
    with_positive: ClassVar[bool] = True
    amount: float = Field(0.3, ge=0, le=1)
    """The largest share of the other document; HOU24 tries .3, .6 and .9."""
    forms: tuple[Mixup, ...] = Field(MIXUPS, min_length=1, max_length=100)
    """Ways to mix, one drawn for each document; HOU24's public code has `linear` and `binary`."""

    def views(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        mixture = MixupConfig(amount=self.amount, forms=self.forms)
        first_NF = draw.masked(mixture.view(x_NF, draw))
        return first_NF, draw.masked(mixture.view(x_NF, draw))


class _GroupLogSumExp(torch.autograd.Function):
    """`log sum over v of exp(<u, v> / tau)` of each view u over the other views v of its group, [N, 2, D] to [N, 2]."""

    @staticmethod
    def forward(ctx: Any, views_N2D: Tensor, offsets_Q1: Tensor, temperature: float, with_positive: bool) -> Tensor:
        similar = _Similarities(1 / temperature, with_positive)
        chunks = _view_chunks(offsets_Q1)
        parts = [similar.totals(*of_chunk) for of_chunk in zip(*similar.views(chunks, views_N2D), strict=True)]
        total_N2 = chunks.ragged([_by_document(total_MU) for total_MU in parts])
        ctx.save_for_backward(views_N2D, offsets_Q1, total_N2)
        ctx.similar = similar
        return total_N2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N2: Tensor) -> tuple[Tensor, None, None, None]:
        # gradient of u_i, with P the softmax and g the incoming gradient: sum over j of (g_i P_ij + g_j P_ji) u_j / tau
        views_N2D, offsets_Q1, total_N2 = ctx.saved_tensors
        chunks, scale = _view_chunks(offsets_Q1), ctx.similar.scale
        total_N2 = total_N2.masked_fill(total_N2 == -torch.inf, torch.inf)  # an empty sum: its softmax row is 0
        # in padding, an infinite total makes softmax rows 0, and the gradient is 0
        total_S2, grad_S2 = chunks.pad(total_N2, torch.inf), chunks.pad(grad_N2 * scale)
        with torch.autocast(views_N2D.device.type, enabled=False):
            parts = [
                ctx.similar.gradient(*of_chunk)
                for of_chunk in zip(*ctx.similar.views(chunks, views_N2D, total_S2, grad_S2), strict=True)
            ]
        return chunks.ragged([_by_document(grad_MUD) for grad_MUD in parts]), None, None, None


def _view_chunks(offsets_Q1: Tensor) -> Chunks:
    # A list of L documents has 2L views, so four times as many similarities as pairs of documents.
    return length_chunks(offsets_Q1, budget=SIMILARITIES_PER_BLOCK // 4)


def _by_document(values_MU: Tensor) -> Tensor:
    """Values of views, [M, U, ...], as [M, L, 2, ...]."""
    m, views = values_MU.shape[:2]
    return values_MU.view(m, views // 2, 2, *values_MU.shape[2:])


class _Similarities(NamedTuple):
    """The exponentials of a chunk's similarities, tile by tile; cosines are at most 1, so `exp(x - scale)` is too."""

    scale: float
    """1 / tau."""
    with_positive: bool

    @property
    def bounded(self) -> bool:
        """True if `exp(-2 scale)`, the least exponential, is a normal float32: then no maximum is subtracted."""
        return 2 * self.scale < fused.LARGEST_EXPONENT

    def views(self, chunks: Chunks, views_N2D: Tensor, *slots: Tensor) -> Iterator[list[Tensor]]:
        """Yield the views [M, U, D], what is added to their logits [M, U], and values of slots, each in chunks."""
        barred_S2 = views_N2D.new_full((len(chunks.mask_S), 2), -self.shift)
        barred_S2.masked_fill_(~chunks.mask_S[:, None], -torch.inf)
        for values in (chunks.pad(views_N2D), barred_S2, *slots):
            yield [part.flatten(1, 2) for part in chunks.split(values)]

    def totals(self, views_MUD: Tensor, barred_MU: Tensor) -> Tensor:
        """Log-sum-exp of each view over the other views of its group, shape [M, U]; arbitrary in padding."""
        total_MU = torch.full_like(barred_MU, 0.0 if self.bounded else -torch.inf)
        for r, c in _tiles(views_MUD):
            logits_MRC = self.logits(views_MUD, barred_MU, r, c)
            sides = [(r, 2)] if r == c else [(c, 1), (r, 2)]
            if self.bounded:
                logits_MRC.exp_()
                for side, dim in sides:
                    total_MU[:, side] += logits_MRC.sum(dim)
            else:
                for side, dim in sides:
                    total_MU[:, side] = torch.logaddexp(total_MU[:, side], logits_MRC.logsumexp(dim))
        return total_MU.log_().add_(self.shift) if self.bounded else total_MU

    def gradient(self, views_MUD: Tensor, barred_MU: Tensor, total_MU: Tensor, grad_MU: Tensor) -> Tensor:
        """Gradient of the views of a chunk; `total_MU` is infinite in padding, and `grad_MU` 0."""
        grad_MUD = torch.zeros_like(views_MUD)
        share_MU = grad_MU * (self.shift - total_MU).exp() if self.bounded else grad_MU
        if self.bounded and views_MUD.device.type != "cpu" and views_MUD.shape[1] > 8 * views_MUD.shape[2]:
            return self._gradient_of_long(views_MUD, barred_MU, share_MU)
        for r, c in _tiles(views_MUD):
            logits_MRC = self.logits(views_MUD, barred_MU, r, c)
            if self.bounded:
                weight_MRC = logits_MRC.exp_().mul_(share_MU[:, r, None] + share_MU[:, None, c])
            else:
                weight_MRC = (logits_MRC - total_MU[:, r, None]).exp_().mul_(grad_MU[:, r, None])
                weight_MRC += logits_MRC.sub_(total_MU[:, None, c]).exp_().mul_(grad_MU[:, None, c])
            if r != c:
                grad_MUD[:, c].baddbmm_(weight_MRC.mT, views_MUD[:, r])
            grad_MUD[:, r].baddbmm_(weight_MRC, views_MUD[:, c])
        return grad_MUD

    def _gradient_of_long(self, views_MUD: Tensor, barred_MU: Tensor, share_MU: Tensor) -> Tensor:
        """`E (s v) + s (E v)` of exponentials E and shares s: two products move fewer bytes than a weight a pair."""
        grad_MUD, shares_MU1 = torch.zeros_like(views_MUD), share_MU[..., None]
        both_MUE = torch.cat([shares_MU1 * views_MUD, views_MUD], -1)
        for r, c in _tiles(views_MUD):
            exponentials_MRC = self.logits(views_MUD, barred_MU, r, c).exp_()
            sides = [(r, c, exponentials_MRC)] if r == c else [(r, c, exponentials_MRC), (c, r, exponentials_MRC.mT)]
            for side, other, of_side in sides:
                scaled_MRD, plain_MRD = (of_side @ both_MUE[:, other]).chunk(2, -1)
                grad_MUD[:, side] += scaled_MRD.addcmul(shares_MU1[:, side], plain_MRD)
        return grad_MUD

    @property
    def shift(self) -> float:
        return self.scale if self.bounded else 0.0

    def logits(self, views_MUD: Tensor, barred_MU: Tensor, r: slice, c: slice) -> Tensor:
        """Similarities of a tile, -inf where a row is not contrasted with a column."""
        logits_MRC = torch.baddbmm(barred_MU[:, None, c], views_MUD[:, r], views_MUD[:, c].mT, alpha=self.scale)
        for diagonal in _left_out(logits_MRC, r, c, with_positive=self.with_positive):
            diagonal.fill_(-torch.inf)
        return logits_MRC


def _left_out(tile_MRC: Tensor, r: slice, c: slice, *, with_positive: bool) -> Iterator[Tensor]:
    """The entries of a tile that are not contrasted: a view with itself and, without the positive, with that."""
    if r == c:  # views of the same document are neighbours, and slices begin with a first view
        yield tile_MRC.diagonal(0, 1, 2)
        if not with_positive:
            yield tile_MRC.diagonal(1, 1, 2)[:, ::2]
            yield tile_MRC.diagonal(-1, 1, 2)[:, ::2]


class _CrossLogSumExp(torch.autograd.Function):
    """`log sum over k of exp(<u, w_k> / tau)` of each row u over rows w of its run in another matrix, shape [N]."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, others_ND: Tensor, offsets_Q1: Tensor, temperature: float) -> Tensor:
        chunks, totals = length_chunks(offsets_Q1, budget=SIMILARITIES_PER_BLOCK), []
        for mask_ML, rows_MLD, others_MLD in _padded(chunks, rows_ND, others_ND):
            totals.append(total_ML := rows_MLD.new_full(mask_ML.shape, -torch.inf))
            for r, c in _tiles(rows_MLD, symmetric=False):
                logits_MRC = _cross_logits(rows_MLD[:, r], others_MLD[:, c], mask_ML[:, c], temperature)
                total_ML[:, r] = torch.logaddexp(total_ML[:, r], logits_MRC.logsumexp(2))
        total_N = chunks.ragged(totals)
        ctx.save_for_backward(rows_ND, others_ND, total_N)
        ctx.chunks, ctx.temperature = chunks, temperature
        return total_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_ND, others_ND, total_N = ctx.saved_tensors
        grads = []
        with torch.autocast(rows_ND.device.type, enabled=False):
            for mask_ML, rows_MLD, others_MLD, total_ML, grad_ML in _padded(
                ctx.chunks, rows_ND, others_ND, total_N, grad_N / ctx.temperature
            ):
                grad_rows_MLD, grad_others_MLD = torch.zeros_like(rows_MLD), torch.zeros_like(others_MLD)
                for r, c in _tiles(rows_MLD, symmetric=False):
                    logits_MRC = _cross_logits(rows_MLD[:, r], others_MLD[:, c], mask_ML[:, c], ctx.temperature)
                    softmax_MRC = logits_MRC.sub_(total_ML[:, r, None]).exp_().mul_(grad_ML[:, r, None])
                    grad_rows_MLD[:, r].baddbmm_(softmax_MRC, others_MLD[:, c])
                    grad_others_MLD[:, c].baddbmm_(softmax_MRC.mT, rows_MLD[:, r])
                grads.append((grad_rows_MLD, grad_others_MLD))
        grad_rows_ND, grad_others_ND = (ctx.chunks.ragged(parts) for parts in zip(*grads, strict=True))
        return grad_rows_ND, grad_others_ND, None, None


def _padded(chunks: Chunks, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The mask of each chunk, [M, L], and values of documents in its slots, 0 in padding."""
    return zip(chunks.split(chunks.mask_S), *(chunks.split(chunks.pad(values_N)) for values_N in values), strict=True)


def _cross_logits(rows_MRD: Tensor, others_MCD: Tensor, mask_MC: Tensor, temperature: float) -> Tensor:
    """Similarities of a tile, -inf for others in padding."""
    logits_MRC = (rows_MRD @ others_MCD.mT).div_(temperature)
    return logits_MRC.masked_fill_(~mask_MC[:, None], -torch.inf) if len(mask_MC) > 1 else logits_MRC


def _tiles(values_MUD: Tensor, *, symmetric: bool = True) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of square tiles; where they are symmetric, those on and above the diagonal serve all."""
    slices = _slices(values_MUD.shape[1], values_MUD.device)
    assert len(slices) == 1 or len(values_MUD) == 1  # only a chunk of one group, without padding, has several tiles
    return combinations_with_replacement(slices, 2) if symmetric else product(slices, slices)


def _slices(length: int, device: torch.device) -> list[slice]:
    """Consecutive slices of even size, any two of which span a tile of at most one block of similarities."""
    entries = SIMILARITIES_PER_BLOCK if device.type == "cpu" else 4 * block_entries(device)
    size = max(1, math.isqrt(entries) // 2) * 2
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
