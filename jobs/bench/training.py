"""Steps of training: the contrast of a list and the encoder of text against padded forms, and those of two workers.

Shapes: N documents, D embedding; S sequences, L tokens of the longest, T tokens, E width of a head.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.device import RESNET, lists, pretext_step
from jobs.bench.measure import Row, clean_processes, costs, mslr_offsets, same_draws, select_all, write_dataset
from ltrscale import storage
from ltrscale.batch import to_offsets
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.readers import RowGroupReader, read_direct
from ltrscale.models.bert import Bert, BertConfig, BertLayer
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.models.ranker import ProjectorConfig
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.pretext.contrast import SimCLRRankConfig, simclr_rank
from ltrscale.pretext.objective import Pretrainer, SimSiamConfig
from ltrscale.processor import cpu_seconds
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.on_ray import read_with_ray
from ltrscale.training.loop import Trainer
from ltrscale.training.settings import OptimizerConfig

TEMPERATURE = 0.1
EMBEDDING = 64
CONTRASTED_GROUPS = 128
DOCUMENTS = 1 << 15  # of the memory measurements, whose lists all have the same length


def bench_contrast() -> Iterator[Row]:
    """The loss of SimCLR-Rank against its padded form and by the length of lists, and its step against SimSiam's."""
    yield _against_padding()
    short, long = (costs(_loss_at_length, 8, length)[-1].memory / DOCUMENTS for length in (32, 512))
    name = "within-group InfoNCE: peak memory per document, L = 512 / L = 32"
    note = "growth of peak resident memory, one process each"
    yield Row.ratio(name, long, short, "{:.0f} B/doc", goal=1.2, note=note)
    works = [_loss_work(torch.full((4096 // length,), length), simclr_rank)[0] for length in (512, 128)]
    long_s, short_s = (seconds / (4096 / 1e6) for seconds in cpu_seconds(*works))
    name = "within-group InfoNCE: time per document, L = 512 / L = 128"
    yield Row.ratio(name, long_s, short_s, "{:.1f} us/doc", goal=3.2)
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
    groups = lists(CONTRASTED_GROUPS)
    # the authors' networks: projectors as deep as in the public code; SimSiam adds a predictor
    simclr = SimCLRRankConfig(temperature=TEMPERATURE, projector=ProjectorConfig(layers=3, output=EMBEDDING))
    simsiam, cpu = SimSiamConfig(projector=ProjectorConfig(layers=2, batch_norm=True)), torch.device("cpu")
    works = (pretext_step(method, RESNET, cpu, groups) for method in (simclr, simsiam))
    ours_s, peer_s = (seconds / (groups.n_documents / 1e6) for seconds in cpu_seconds(*works, repeats=5))
    name = "pretraining step, 3-block ResNet of width 136: cost, SimCLR-Rank / SimSiam"
    note = "float32; augmentation, network, loss, gradient and update"
    return Row.ratio(name, ours_s, peer_s, "{:.1f} us/doc", goal=1.15, note=note)


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
    ours, peer = (costs(partial(_run_step, form), 8, sequences)[-1].memory for form in (ragged, padded))
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
        *cpu_seconds(_step(ragged, batch), _step(padded, batch), repeats=3),
        goal=1.5,
        what="tokens",
        note=f"{sequences} sequences of {tokens / sequences:.0f} tokens on average, the longest "
        f"{batch.mask_SL.shape[1]}; {SMALL.layers} layers of {SMALL.width}",
    )


def _run_step(form: Callable[[Bert, _Text], Tensor], sequences: int) -> None:
    _step(form, _text(sequences))()


METHODS: tuple[MethodConfig, ...] = (SimSiamConfig(), SimCLRRankConfig())
_DOCS_A_WORKER = 16_384
_STREAMS_A_WORKER = 2
_STEPS = 6
_WARM_UP = 2


class _Times(NamedTuple):
    """Seconds of a worker's steps: wall clock, processor time, and waiting for data."""

    wall: float
    processor: float
    wait: float


def bench_ddp() -> Iterator[Row]:
    """The share of time that a step waits for Ray Data, and the speedup of two workers."""
    with storage.scratch.directory() as folder:
        data = f"{folder}/data"
        write_dataset(data, "zstd", groups=3_200)
        yield from (_scaling(method, data) for method in METHODS)
        with ray_cluster(cpus=4):
            yield from (_waiting(method, data) for method in METHODS)


def _waiting(method: MethodConfig, data: str) -> Row:
    times = _run(method, data, rank=0, world=1, reader=read_with_ray)
    return Row(
        name=f"waiting for data, {method.kind}",
        figure=times.wait / times.wall,
        goal=0.05,
        at_least=False,
        ours=f"{1e3 * times.wait / _STEPS:.1f} ms per step",
        peer=f"{times.wall / _STEPS:.2f} s per step",
        note=f"Ray Data, one worker, {_DOCS_A_WORKER:,} documents per step, default network",
    )


def _scaling(method: MethodConfig, data: str) -> Row:
    """The time of one worker divided by that of two, with equal work per worker and one core each."""
    single, of_two = (_spawn(method, data, world) for world in (1, 2))
    (one,), slowest = single, max(of_two)
    busier = statistics.mean(times.processor for times in of_two) / one.processor - 1
    idle = statistics.mean(1 - times.processor / times.wall for times in of_two)
    return Row(
        name=f"1 -> 2 workers, {method.kind}",
        figure=one.wall / slowest.wall,
        goal=0.85,
        ours=f"{2 * _STEPS * _DOCS_A_WORKER / slowest.wall / 1e3:.1f} k docs/s",
        peer=f"{_STEPS * _DOCS_A_WORKER / one.wall / 1e3:.1f} k docs/s",
        note=f"gloo, one core each; processor time {busier:+.0%}, idle {idle:.0%}",
    )


def _spawn(method: MethodConfig, data: str, world: int) -> list[_Times]:
    with (
        storage.scratch.directory() as folder,
        ProcessPoolExecutor(world, mp_context=clean_processes()) as pool,
    ):
        return list(pool.map(partial(_worker, world, method, data, str(folder)), range(world)))


def _worker(world: int, method: MethodConfig, data: str, folder: str, rank: int) -> _Times:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # otherwise a single worker could use the second core too
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    times = _run(method, data, rank=rank, world=world, reader=read_direct)
    dist.destroy_process_group()
    return times


def _run(method: MethodConfig, data: str, *, rank: int, world: int, reader: RowGroupReader) -> _Times:
    """Train some steps, with an equal share for each worker."""
    selection = select_all(data)
    torch.manual_seed(0)
    transform = FeatureTransform(TransformConfig(numeric="none"), ["numeric"] * len(selection.features), [])
    model = Pretrainer(transform, NetworkConfig(), method, ZeroingConfig(), None)
    order = StreamConfig(docs_per_batch=_DOCS_A_WORKER * world, streams=_STREAMS_A_WORKER * world)
    stream = GroupStream(selection, order, rank=rank, world=world, reader=reader)
    steps = Trainer(model, model, stream, OptimizerConfig(), epochs=1, seed=0).epoch()
    for _ in range(_WARM_UP):
        next(steps)
    wall, processor, wait = time.perf_counter(), time.process_time(), 0.0
    for _ in range(_STEPS):
        wait += next(steps).wait_s
    times = _Times(time.perf_counter() - wall, time.process_time() - processor, wait)
    steps.close()
    return times
