"""What a GPU is asked in a step, counted on a device that pretends, and the rate that follows for known GPUs.

Counts do not depend on the machine. A step costs the host a fixed time a launch and a wait, and the device the time to
move its bytes or to multiply its matrices; the largest of the three bounds the rate.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from jobs.bench.measure import N_FEATURES, Row, apart, mslr_offsets
from jobs.bench.pretend import Counts, counting, pretending
from ltrscale.batch import QueryGroups
from ltrscale.config import kind_of, members
from ltrscale.data.stream.batches import MicroBatches, StreamConfig
from ltrscale.devices import choose_device, round_to_tf32
from ltrscale.models.choices import ContextConfig, FeatureEncoderConfig, NetworkConfig
from ltrscale.models.contexts import ContextSettings, DLCMConfig
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.models.layers import EncoderSettings
from ltrscale.models.ranker import Architecture, Ranker
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Objective, Pretrainer, SimSiamConfig
from ltrscale.pretext.watch import EVERY
from ltrscale.ranking.loss import Loss
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.ranking.pairwise import LambdaRankConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.loop import StepResult, Trainer
from ltrscale.training.ranking import RankingObjective
from ltrscale.training.settings import OptimizerConfig, Precision

RESNET = ResNetConfig(width=N_FEATURES, blocks=3)
FEW, MANY = 64, 512
"""Lists of a batch: 8,011 and 62,523 documents."""
SHORT = 20
"""Documents of each list in the other distribution of lengths."""

LAUNCH_S, WAIT_S = 25e-6, 20e-6
"""Of the host: an operation from Python with its gradient, as steps bound by the host took it beside an H200, and a
wait with the copy that it is for."""


class Gpu(NamedTuple):
    """A GPU by its data sheet: bytes a second, and float32 or TF32 operations a second of dense products."""

    name: str
    bandwidth: float
    flops: float
    reached: float = 0.5
    """Share of the bandwidth that large steps reach: on an H200 half, as measured, which is taken for its kin too."""


GPUS = (
    Gpu("V100", 900e9, 15.7e12, reached=0.9),
    Gpu("A100", 2039e9, 156e12),
    Gpu("H100", 3350e9, 495e12),
    Gpu("H200", 4800e9, 495e12),
)

GOALS = {
    "method simclr_rank": 420,
    "method simsiam": 450,
    "method simclr": 500,
    "method scarf": 500,
    "method dacl": 500,
    "method subtab": 900,
    "encoder tabm": 700,
    "loss lambdarank": 800,
    "loss pirank": 800,
}
"""Launches of a step at 62,523 documents, in the mean over steps with and without the watch of the contrast."""

GIGABYTES = {
    "method simclr_rank": 10,
    "method simclr": 40,
    "method dacl": 40,
    "method subtab": 120,
    "encoder tabm": 250,
}
"""Gigabytes that such a step moves, as goals."""

COMPILED: dict[Precision, int] = {"float32": 160, "bf16": 105}
"""Goals of SimCLR-Rank with `compile`, in kilobytes a document."""


class Counted(NamedTuple):
    """A step at one size."""

    documents: int
    counts: Counts

    def rate(self, gpu: Gpu) -> tuple[float, str]:
        """Documents a second, and what bounds them: the host, the memory, or the products."""
        counts = self.counts
        seconds = {
            "host": counts.launches * LAUNCH_S + counts.waits.total() * WAIT_S,
            "memory": counts.touched / (gpu.reached * gpu.bandwidth),
            "products": counts.flops / gpu.flops,
        }
        bound = max(seconds, key=lambda name: seconds[name])
        return self.documents / seconds[bound], bound


class Step(Protocol):
    """Puts a model on a device, and returns one step on these groups, as often as it is called."""

    def __call__(
        self, device: torch.device, groups: QueryGroups, precision: Precision = "float32"
    ) -> Callable[[], object]:
        """The precision is that of training; scoring has none."""
        ...


def steps(resnet: ResNetConfig = RESNET) -> dict[str, Step]:
    """Every objective, encoder, list context and ranking loss, and scoring, by name; most of them on this encoder.

    But for DLCM: of a GRU, torch has a kernel for CPUs and cuDNN's, and none that a pretended device could run.
    """
    pretexts = {f"method {kind_of(cls)}": partial(pretext_step, cls(), resnet) for cls in members(FeatureMethodConfig)}
    encoders = {
        f"encoder {kind_of(cls)}": partial(pretext_step, SimSiamConfig(), cls.model_validate({}))
        for cls in members(FeatureEncoderConfig)
    }
    contexts = {
        f"context {kind_of(cls)}": partial(_finetune, resnet, cls, None)
        for cls in members(ContextConfig)
        if cls is not DLCMConfig
    }
    losses = {f"loss {kind_of(cls)}": partial(_finetune, resnet, None, cls) for cls in members(LossConfig)}
    losses["negatives of other lists"] = partial(_finetune, resnet, None, None, negatives=2)
    deep = {"kind": "pirank", "depth": 3, "k": 10}
    losses["loss pirank of depth 3"] = partial(_finetune, resnet, None, None, loss=deep)
    return {**pretexts, **encoders, **contexts, **losses, "scoring": partial(_score, resnet)}


def bench_device(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Launches, waits, bytes and products of every step, and the rates that follow; on a real GPU also its rate.

    Args:
        quick: count only the steps that have a goal.
        device: a GPU on which each step is timed too, in every precision.
    """
    names = [name for name in steps() if not quick or name in GOALS]
    # where a device has pretended, torch cannot pin memory for a real one
    counted = _counted(names) if device == "cpu" else apart(_counted, names)
    for name, sizes in counted.items():
        yield _launches(name, sizes)
        if device != "cpu":
            yield _on_gpu(name, sizes[MANY], device)
    for name, goal in GIGABYTES.items():
        documents, counts = counted[name][MANY]
        moved, note = round(counts.touched / 1e9, 1), f"{documents:,} documents"
        yield Row(f"gigabytes of a step, {name}", moved, goal=goal, at_least=False, note=note)
    yield from _compiled() if device == "cpu" else apart(_compiled)
    yield from _worst(counted)


def _counted(names: Sequence[str]) -> dict[str, dict[int, Counted]]:
    """Each step by size; large ones in the mean over steps with and without the watch, the others without it."""
    batches = {FEW: lists(FEW), MANY: lists(MANY), SHORT: lists(MANY * 5, SHORT)}
    return {
        name: {
            size: count(steps()[name], groups, number=EVERY if size == MANY else 1) for size, groups in batches.items()
        }
        for name in names
    }


def _launches(name: str, by_size: dict[int, Counted]) -> Row:
    documents, counts = by_size[MANY]
    rates = [f"{gpu.name} {rate / 1e6:.1f} ({bound})" for gpu in GPUS for rate, bound in [by_size[MANY].rate(gpu)]]
    per_document = f"{counts.touched / documents / 1e3:.0f} kB, {counts.flops / documents / 1e6:.1f} MFLOP a document"
    return Row(
        name=f"launches of a step, {name}",
        figure=counts.launches,
        goal=GOALS.get(name),
        at_least=False,
        ours=f"{counts.waits.total()} waits, {counts.copies} copies, {per_document}",
        peer=f"predicted M docs/s: {', '.join(rates)}",
        note=f"{documents:,} documents; without the watch {by_size[FEW].counts.launches} at "
        f"{by_size[FEW].documents:,}, {by_size[SHORT].counts.launches} in lists of {SHORT}",
    )


def _compiled() -> list[Row]:
    from jobs.bench.compiled import bytes_compiled  # loads the compiler

    groups, network = lists(FEW), NetworkConfig.model_validate({"encoder": RESNET.model_dump()})
    net = Pretrainer(plain_transform(), network, SimCLRRankConfig(), ZeroingConfig())
    return [
        Row(
            name=f"kilobytes of a document, simclr_rank compiled, {precision}",
            figure=round(bytes_compiled(net, groups, precision) / 1e3),
            goal=goal,
            at_least=False,
            note=f"by Inductor's count, {groups.n_documents:,} documents",
        )
        for precision, goal in COMPILED.items()
    ]


def _worst(counted: dict[str, dict[int, Counted]]) -> Iterator[Row]:
    """What no step may exceed: launches that grow with the lists, waits, and bytes beside those of SimSiam."""
    growth = {name: sizes[MANY].counts.launches / sizes[FEW].counts.launches for name, sizes in counted.items()}
    name, worst = f"launches at {MANY} lists / at {FEW}, the largest of all steps", max(growth, key=growth.__getitem__)
    yield Row(name, growth[worst], note=worst, goal=1.3, at_least=False)
    waits = max((one.counts.waits for sizes in counted.values() for one in sizes.values()), key=Counter.total)
    name = "waits of a step, the most of all steps"
    yield Row(name, waits.total(), note=", ".join(waits), goal=1, at_least=False)
    ours, peer = (counted[f"method {kind}"][MANY].counts.touched for kind in ("simclr_rank", "simsiam"))
    yield Row.ratio("bytes of a step, SimCLR-Rank / SimSiam", ours / 1e9, peer / 1e9, "{:.1f} GB", goal=1.3)


class Measured(NamedTuple):
    """Steps on a real GPU, whose batches a thread sends ahead, as in training."""

    rate: float
    """Documents a second."""
    waiting: float
    """Share of the time in which the next batch was not there yet."""
    peak_bytes: int
    """The most memory of the GPU that tensors had."""

    def __str__(self) -> str:
        return f"{self.rate / 1e6:.2f} M docs/s ({self.waiting:.0%} waiting, {self.peak_bytes / 1e9:.1f} GB)"


def measure(step: Step, groups: QueryGroups, device: str, precision: Precision = "float32") -> Measured:
    """Time steps on a real GPU; the precision is that of training, and of products outside autocast."""
    chosen, before = choose_device(device), torch.get_float32_matmul_precision()
    round_to_tf32(precision == "tf32")
    try:
        work = step(chosen, groups, precision)
        _taken(work, chosen, _WARM_UP_S)  # until clocks are up, memory is allocated and layouts are made ahead
        torch.cuda.reset_peak_memory_stats(chosen)
        number, seconds, waited_s = _taken(work, chosen, _MEASURED_S)
    finally:
        round_to_tf32(before != "highest")
    peak_bytes = torch.cuda.max_memory_allocated(chosen)
    return Measured(number * groups.n_documents / seconds, waited_s / seconds, peak_bytes)


def _taken(work: Callable[[], object], device: torch.device, at_least_s: float) -> tuple[int, float, float]:
    """Take steps for some time; returns their number, their seconds, and those of waiting for a batch."""
    torch.cuda.synchronize(device)
    number, waited_s, start = 0, 0.0, time.perf_counter()
    while number < _FEWEST or time.perf_counter() - start < at_least_s:
        result = work()
        waited_s += result.wait_s if isinstance(result, StepResult) else 0.0
        number += 1
    torch.cuda.synchronize(device)
    return number, time.perf_counter() - start, waited_s


_FEWEST, _WARM_UP_S, _MEASURED_S = 3, 0.3, 0.6


def _on_gpu(name: str, counted: Counted, device: str) -> Row:
    """What a step reaches on this GPU, in each precision, beside the prediction if its data sheet is known."""
    step, groups = steps()[name], lists(MANY)
    measured = {precision: measure(step, groups, device, precision) for precision in get_args(Precision)}
    full_name = torch.cuda.get_device_name(choose_device(device))
    known = next((gpu for gpu in GPUS if gpu.name in full_name), None)
    predicted = counted.rate(known)[0] if known else None
    return Row(
        name=f"documents a second on {full_name}, {name}: measured in TF32 / predicted",
        figure=measured["tf32"].rate / predicted if predicted else None,
        ours=", ".join(f"{precision} {one}" for precision, one in measured.items()),
        peer=f"predicted {predicted / 1e6:.2f} M docs/s" if predicted else "",
        note=f"{groups.n_documents:,} documents" + ("" if known else "; no data sheet"),
    )


def count(step: Step, groups: QueryGroups, *, number: int = 1, values: bool = False) -> Counted:
    """What a step asks, the mean of some after one that warms up; without values the sizes may be anything.

    Raises:
        RuntimeError: an operation had tensors of two devices.
    """
    with pretending(values=values) as device:
        work = step(device, groups)
        work()
        with counting() as counted:
            for _ in range(number):
                work()
    return Counted(groups.n_documents, counted.counts.mean(number))


def lists(n_groups: int, length: int | None = None) -> QueryGroups:
    """Labelled lists of random documents; of web search lengths, or all of one length."""
    offsets_Q1 = mslr_offsets(n_groups) if length is None else torch.arange(n_groups + 1) * length
    generator = torch.Generator().manual_seed(0)
    n = int(offsets_Q1[-1])
    return QueryGroups(
        torch.randn(n, N_FEATURES, generator=generator),
        offsets_Q1,
        labels_N=torch.randint(5, (n,), generator=generator).float(),
        ids_Q=torch.arange(n_groups),
        positions_N=torch.cat([torch.arange(1.0, 1 + length) for length in offsets_Q1.diff().tolist()]),
    )


class Repeated:
    """A stream that serves the same groups again and again."""

    groups_per_epoch = documents_per_epoch = 1

    def __init__(self, groups: QueryGroups, prefetch: int = 0) -> None:
        self.groups, self.config = groups, StreamConfig(docs_per_batch=1, prefetch=prefetch)

    def epoch(self, *_: object) -> Iterator[MicroBatches]:
        """Steps without an end."""
        while True:
            yield MicroBatches({0: self.groups}, {})


def plain_transform() -> FeatureTransform:
    """Numbers as they are."""
    return FeatureTransform(TransformConfig(), ["numeric"] * N_FEATURES, [])


def _trained(
    model: Pretrainer | RankingObjective, groups: QueryGroups, device: torch.device, precision: Precision
) -> Callable[[], object]:
    prefetch = 2 if device.type == "cuda" else 0  # as in training; what is counted must happen in one thread
    stream, optimizer = Repeated(groups, prefetch), OptimizerConfig(clip_norm=1.0)
    trainer = Trainer(model, model, stream, optimizer, epochs=1, seed=0, precision=precision)  # type: ignore[arg-type]
    taken = trainer.epoch()
    return lambda: next(taken)


def pretext_step(
    method: Objective,
    encoder: EncoderSettings,
    device: torch.device,
    groups: QueryGroups,
    precision: Precision = "float32",
) -> Callable[[], object]:
    """A step of pretraining."""
    network = NetworkConfig.model_validate({"encoder": encoder.model_dump()})
    marginals_SF = groups.features_NF[:1000]
    model = Pretrainer(plain_transform(), network, method, ZeroingConfig(), marginals_SF).to(device)
    return _trained(model, groups, device, precision)


def _ranker(resnet: ResNetConfig, context: type[ContextSettings] | None = None) -> Ranker:
    torch.manual_seed(0)
    parts = {"transform": {}, "encoder": resnet.model_dump(), "head": {}}
    of_context = {}
    if context is not None:
        dropout = {"dropout": resnet.dropout} if "dropout" in context.model_fields else {}
        of_context = {"context": {"kind": kind_of(context), **dropout}}
    return Ranker(Architecture.model_validate(parts | of_context), plain_transform())


def _finetune(
    resnet: ResNetConfig,
    context: type[ContextSettings] | None,
    kind: type[Loss] | None,
    device: torch.device,
    groups: QueryGroups,
    precision: Precision = "float32",
    **settings: object,
) -> Callable[[], object]:
    config = FinetuneConfig.model_validate({"loss": {"kind": kind_of(kind or LambdaRankConfig)}} | settings)
    model = RankingObjective(_ranker(resnet, context), config).to(device)
    return _trained(model, groups, device, precision)


def _score(
    resnet: ResNetConfig,
    device: torch.device,
    groups: QueryGroups,
    precision: Precision = "float32",  # noqa: ARG001 - as every step
) -> Callable[[], Tensor]:
    ranker = _ranker(resnet).to(device).eval()

    def work() -> Tensor:
        with torch.no_grad():
            scores_N: Tensor = ranker(groups.to(device, non_blocking=True)).cpu()
        return scores_N

    return work
