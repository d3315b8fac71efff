"""Cost of a pretraining step for every objective and encoder; SimCLR-Rank and the encoder of text against padded forms.

Shapes: N documents, D embedding; S sequences, L tokens of the longest, T tokens, E width of a head.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.measure import Row, mslr_offsets, peak_bytes, same_draws
from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.config import kind_of, members
from ltrscale.models.bert import Bert, BertConfig, BertLayer
from ltrscale.models.choices import FeatureEncoderConfig, NetworkConfig
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.layers import EncoderSettings
from ltrscale.models.ranker import ProjectorConfig
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.contrast import SimCLRRankConfig, simclr_rank
from ltrscale.pretext.objective import Objective, Pretrainer, SimSiamConfig
from ltrscale.processor import cpu_seconds

WIDTH = 136
GROUPS = 8  # about 1,000 documents; some objectives contrast all of them with each other
RESNET = ResNetConfig(width=WIDTH, blocks=3)


def bench_networks() -> Iterator[Row]:
    """One row per objective and per encoder."""
    yield from map(measure_objective, members(FeatureMethodConfig))
    yield from map(measure_encoder, members(FeatureEncoderConfig))


def measure_objective(cls: type[Objective], groups: int = GROUPS) -> Row:
    """A step of an objective with its default settings, on the ResNet."""
    return _row(f"method {kind_of(cls)}", cls(), RESNET, groups)


def measure_encoder(cls: type[EncoderSettings], groups: int = GROUPS) -> Row:
    """A step of SimSiam through an encoder with its default settings."""
    return _row(f"encoder {kind_of(cls)}", SimSiamConfig(), cls.model_validate({}), groups)


def _row(what: str, method: Objective, encoder: EncoderSettings, groups: int) -> Row:
    batch = _batch(groups)
    works = step_work(batch, method, encoder), step_work(batch, SimSiamConfig(), RESNET)
    note = f"{batch.n_documents:,} documents; augmentation, network, loss, gradient and Adam"
    name = f"pretraining step, {what}: cost, ours / SimSiam on a 3-block ResNet"
    return Row.cost(name, batch.n_documents, *cpu_seconds(*works, repeats=3), note=note)


def _batch(groups: int) -> QueryGroups:
    offsets_Q1 = mslr_offsets(groups)
    return QueryGroups(torch.randn(int(offsets_Q1[-1]), WIDTH, generator=same_draws()), offsets_Q1)


def step_work(groups: QueryGroups, method: Objective, encoder: EncoderSettings) -> Callable[[], None]:
    """A function that runs one pretraining step on these groups, with zeroing if the method does not make its views."""
    transform = fit_transform([groups.features_NF], ["numeric"] * WIDTH, TransformConfig())
    network = NetworkConfig.model_validate({"encoder": encoder.model_dump()})
    marginals_SF = transform(groups.features_NF, groups.offsets_Q1)
    model = Pretrainer(transform, network, method, ZeroingConfig(), marginals_SF)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    generator = same_draws()

    def work() -> None:
        loss, count = model(groups, generator)
        optimizer.zero_grad()
        torch.autograd.backward(loss / count)
        optimizer.step()

    return work


TEMPERATURE = 0.1
EMBEDDING = 64
CONTRASTED_GROUPS = 128
DOCUMENTS = 1 << 15  # of the memory measurements, whose lists all have the same length


def bench_contrast() -> Iterator[Row]:
    """The loss of SimCLR-Rank against its padded form and by the length of lists, and its step against SimSiam's."""
    yield _against_padding()
    short, long = (peak_bytes(_loss_at_length, 8, length) / DOCUMENTS for length in (32, 512))
    yield Row(
        name="within-group InfoNCE: peak memory per document, L = 512 / L = 32",
        figure=long / short,
        goal=1.2,
        at_least=False,
        ours=f"{long:.0f} B/doc",
        peer=f"{short:.0f} B/doc",
        note="growth of peak resident memory, one process each",
    )
    works = [_loss_work(torch.full((4096 // length,), length), simclr_rank)[0] for length in (512, 128)]
    yield Row.cost("within-group InfoNCE: time per document, L = 512 / L = 128", 4096, *cpu_seconds(*works), goal=3.2)
    yield _contrast_step()


def _against_padding() -> Row:
    lengths_Q = mslr_offsets(CONTRASTED_GROUPS).diff()
    offsets_Q1, z0_ND, z1_ND = _projections(lengths_Q[:4])
    expected_N = _simclr_rank_padded(z0_ND, z1_ND, offsets_Q1, temperature=TEMPERATURE)
    assert torch.allclose(simclr_rank(z0_ND, z1_ND, offsets_Q1, temperature=TEMPERATURE), expected_N, atol=1e-4)
    work, n = _loss_work(lengths_Q, simclr_rank)
    padded, _ = _loss_work(lengths_Q, _simclr_rank_padded)
    return Row.speed(
        "within-group InfoNCE, forward and backward: speed, fused / padded to the longest list",
        n,
        *cpu_seconds(work, padded, repeats=3),
        goal=7.0,
        note=f"{CONTRASTED_GROUPS} groups of web search lengths, the longest {int(lengths_Q.max())}",
    )


def _contrast_step() -> Row:
    groups = _batch(CONTRASTED_GROUPS)
    # the authors' networks: projectors as deep as in the public code; SimSiam adds a predictor
    simclr = SimCLRRankConfig(temperature=TEMPERATURE, projector=ProjectorConfig(layers=3, output=EMBEDDING))
    simsiam = SimSiamConfig(projector=ProjectorConfig(layers=2, batch_norm=True))
    return Row.cost(
        "pretraining step, 3-block ResNet of width 136: cost, SimCLR-Rank / SimSiam",
        groups.n_documents,
        *cpu_seconds(*(step_work(groups, method, RESNET) for method in (simclr, simsiam)), repeats=5),
        goal=1.15,
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
    z0_ND, z1_ND = torch.randn(2, int(offsets_Q1[-1]), EMBEDDING, generator=same_draws())
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


SEQUENCES = 256
SMALL = BertConfig(layers=2, width=128, heads=2)
VOCABULARY = 8000
MEDIAN, SPREAD, LONGEST = 45, 0.6, 128
"""Tokens of a pair of query and document: lognormal, cut at the longest."""


def bench_text(sequences: int = SEQUENCES) -> Iterator[Row]:
    """Tokens per second and peak memory of a step, forward and backward."""
    yield _text_speed(sequences)
    ours, peer = (peak_bytes(partial(_run_step, form), 8, sequences) for form in (ragged, padded))
    yield Row.memory("encoder of text, forward and backward: peak memory, ragged / padded to the longest", ours, peer)


class _Text(NamedTuple):
    """Sequences end to end, and the same ones padded."""

    ids_T: Tensor
    types_T: Tensor
    offsets_S1: Tensor
    mask_SL: Tensor


def _text(sequences: int) -> _Text:
    generator = same_draws()
    drawn_S = (torch.randn(sequences, generator=generator) * SPREAD).exp() * MEDIAN
    lengths_S = drawn_S.long().clamp(8, LONGEST)
    tokens = int(lengths_S.sum())
    ids_T = torch.randint(VOCABULARY, (tokens,), generator=generator)
    types_T = torch.randint(2, (tokens,), generator=generator)
    mask_SL = torch.arange(int(lengths_S.max())) < lengths_S[:, None]
    return _Text(ids_T, types_T, to_offsets(lengths_S), mask_SL)


def _bert() -> Bert:
    torch.manual_seed(0)
    return Bert(SMALL.replace(dropout=0.0), VOCABULARY)


def padded(bert: Bert, batch: _Text) -> Tensor:
    """Embeddings [T, D] by the same weights on padded sequences, the usual form."""
    mask_SL = batch.mask_SL
    ids_SL, types_SL = (torch.zeros(mask_SL.shape, dtype=torch.int64) for _ in range(2))
    ids_SL[mask_SL], types_SL[mask_SL] = batch.ids_T, batch.types_T
    x_SLD = bert.tokens(ids_SL) + bert.positions(torch.arange(mask_SL.shape[1])) + bert.types(types_SL)
    x_SLD = bert.norm(x_SLD)
    for layer in bert.layers:
        assert isinstance(layer, BertLayer)
        bias = torch.cat([layer.query_bias, torch.zeros_like(layer.query_bias), layer.value_bias])
        qkv = F.linear(x_SLD, layer.qkv.weight, bias)
        query, key, value = qkv.view(*mask_SL.shape, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
        heads_SHLE = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_SL[:, None, None, :])
        x_SLD = layer.attention_norm(x_SLD + layer.output(heads_SHLE.transpose(1, 2).flatten(2)))
        x_SLD = layer.feedforward_norm(x_SLD + layer.second(F.gelu(layer.first(x_SLD))))
    h_TD: Tensor = x_SLD[mask_SL]
    return h_TD


def ragged(bert: Bert, batch: _Text) -> Tensor:
    """Embeddings [T, D] by the encoder as it is."""
    h_TD: Tensor = bert(batch.ids_T, batch.types_T, batch.offsets_S1)
    return h_TD


def _step(form: Callable[[Bert, _Text], Tensor], batch: _Text) -> Callable[[], None]:
    bert = _bert()

    def work() -> None:
        bert.zero_grad()
        torch.autograd.backward(form(bert, batch).square().mean())

    return work


def _text_speed(sequences: int) -> Row:
    batch = _text(sequences)
    torch.testing.assert_close(ragged(_bert(), batch), padded(_bert(), batch), rtol=1e-4, atol=1e-4)
    tokens = len(batch.ids_T)
    return Row.speed(
        "encoder of text, forward and backward: tokens per second, ragged / padded to the longest",
        tokens,
        *cpu_seconds(_step(ragged, batch), _step(padded, batch), repeats=5),
        goal=1.5,
        what="tokens",
        note=f"{sequences} sequences of {tokens / sequences:.0f} tokens on average, the longest "
        f"{batch.mask_SL.shape[1]}; {SMALL.layers} layers of {SMALL.width}",
    )


def _run_step(form: Callable[[Bert, _Text], Tensor], sequences: int) -> None:
    _step(form, _text(sequences))()
