"""SimCLR-Rank: the fused loss against padding to the longest list, its memory, and whole steps against SimSiam."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.measure import Row, mslr_lengths, peak_bytes
from jobs.bench.networks import RESNET, WIDTH, step_work
from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.devices import cpu_seconds
from ltrscale.models.heads import ProjectorConfig
from ltrscale.pretext.contrast import SimCLRRankConfig, simclr_rank
from ltrscale.pretext.simsiam import SimSiamConfig

TEMPERATURE = 0.1
EMBEDDING = 64
GROUPS = 128
DOCUMENTS = 1 << 15  # of the memory measurements, whose lists all have the same length


def bench_contrast() -> list[Row]:
    """The ratios of the loss and of the pretraining step."""
    return [_against_padding(), _memory(), _time_by_length(), _step()]


def _against_padding() -> Row:
    lengths_Q = torch.from_numpy(mslr_lengths(GROUPS, seed=0))
    offsets_Q1, z0_ND, z1_ND = _projections(lengths_Q[:4])
    expected_N = _simclr_rank_padded(z0_ND, z1_ND, offsets_Q1, temperature=TEMPERATURE)
    assert torch.allclose(simclr_rank(z0_ND, z1_ND, offsets_Q1, temperature=TEMPERATURE), expected_N, atol=1e-4)
    work, n = _loss_work(lengths_Q, simclr_rank)
    padded, _ = _loss_work(lengths_Q, _simclr_rank_padded)
    seconds, padded_seconds = cpu_seconds(work, padded, repeats=3)
    return Row(
        name="within-group InfoNCE, forward and backward: speed, fused / padded to the longest list",
        ratio=padded_seconds / seconds,
        goal=7.0,
        at_least=True,
        ours=f"{seconds / n * 1e6:.1f} us/doc",
        peer=f"{padded_seconds / n * 1e6:.1f} us/doc",
        note=f"{GROUPS} groups of web search lengths, the longest {int(lengths_Q.max())}",
    )


def _memory() -> Row:
    short, long = peak_bytes(_loss_at_length, 8, [32, 512])
    return Row(
        name="within-group InfoNCE: peak memory per document, L = 512 / L = 32",
        ratio=long / short,
        goal=1.2,
        at_least=False,
        ours=f"{long / DOCUMENTS:.0f} B/doc",
        peer=f"{short / DOCUMENTS:.0f} B/doc",
        note="growth of peak resident memory, one process each",
    )


def _time_by_length() -> Row:
    (short, n), (long, _) = (_loss_work(torch.full((4096 // length,), length), simclr_rank) for length in (128, 512))
    short_seconds, long_seconds = cpu_seconds(short, long)
    return Row(
        name="within-group InfoNCE: time per document, L = 512 / L = 128",
        ratio=long_seconds / short_seconds,
        goal=3.2,
        at_least=False,
        ours=f"{long_seconds / n * 1e6:.1f} us/doc",
        peer=f"{short_seconds / n * 1e6:.1f} us/doc",
    )


def _step() -> Row:
    offsets_Q1 = to_offsets(torch.from_numpy(mslr_lengths(GROUPS, seed=0)))
    groups = QueryGroups(torch.randn(int(offsets_Q1[-1]), WIDTH, generator=_generator()), offsets_Q1)
    # the authors' networks: projectors as deep as in the public code; SimSiam adds a predictor
    simclr = SimCLRRankConfig(temperature=TEMPERATURE, projector=ProjectorConfig(layers=3, output=EMBEDDING))
    simsiam = SimSiamConfig(projector=ProjectorConfig(layers=2, batch_norm=True))
    seconds, simsiam_seconds = cpu_seconds(
        *(step_work(groups, method, RESNET) for method in (simclr, simsiam)), repeats=5
    )
    n = groups.n_documents
    return Row(
        name="pretraining step, 3-block ResNet of width 136: cost, SimCLR-Rank / SimSiam",
        ratio=seconds / simsiam_seconds,
        goal=1.15,
        at_least=False,
        ours=f"{seconds / n * 1e6:.1f} us/doc",
        peer=f"{simsiam_seconds / n * 1e6:.1f} us/doc",
        note="float32; augmentation, network, loss, gradient and Adam",
    )


def _loss_work(lengths_Q: Tensor, loss: Callable[..., Tensor]) -> tuple[Callable[[], None], int]:
    """A function that computes loss and gradient for random projections of such groups, and the number of documents."""
    offsets_Q1, z0_ND, z1_ND = _projections(lengths_Q)

    def work() -> None:
        torch.autograd.grad(loss(z0_ND, z1_ND, offsets_Q1, temperature=TEMPERATURE).sum(), [z0_ND, z1_ND])

    return work, len(z0_ND)


def _projections(lengths_Q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    offsets_Q1 = to_offsets(lengths_Q)
    z0_ND, z1_ND = torch.randn(2, int(offsets_Q1[-1]), EMBEDDING, generator=_generator())
    return offsets_Q1, z0_ND.requires_grad_(), z1_ND.requires_grad_()


def _loss_at_length(length: int) -> None:
    """Loss and gradient of lists of one length."""
    documents = DOCUMENTS if length > 8 else 1024  # length 8 is the warm-up, which must stay small
    work, _ = _loss_work(torch.full((documents // length,), length), simclr_rank)
    work()


def _simclr_rank_padded(z0_ND: Tensor, z1_ND: Tensor, offsets_Q1: Tensor, *, temperature: float) -> Tensor:
    """The usual formulation: all groups padded to the longest list, one masked log-sum-exp, autograd."""
    lengths_Q = offsets_Q1.diff()
    longest = int(lengths_Q.max())
    mask_QL = torch.arange(longest) < lengths_Q[:, None]

    def pad(z_ND: Tensor) -> Tensor:
        padded_QLD = z_ND.new_zeros((*mask_QL.shape, z_ND.shape[1]))
        padded_QLD[mask_QL] = F.normalize(z_ND, dim=-1)
        return padded_QLD

    views_QVD = torch.cat([pad(z0_ND), pad(z1_ND)], 1)
    logits_QVV = torch.bmm(views_QVD, views_QVD.mT) / temperature
    barred_QVV = ~torch.cat([mask_QL, mask_QL], 1)[:, None] | torch.eye(2 * longest, dtype=torch.bool)
    total_QV = logits_QVV.masked_fill(barred_QVV, -1e9).logsumexp(-1)
    positive_QL = (views_QVD[:, :longest] * views_QVD[:, longest:]).sum(-1) / temperature
    return (total_QV[:, :longest] + total_QV[:, longest:] - 2 * positive_QL)[mask_QL]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
