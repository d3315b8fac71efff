"""What a GPU is asked in a step, counted on a device that pretends, and the rate that follows for known GPUs.

Counts do not depend on the machine. A step costs the host a fixed time a launch and a wait, and the device the time to
move its bytes or to multiply its matrices; the largest of the three bounds the rate.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from jobs.bench.measure import N_FEATURES, mslr_lengths
from jobs.bench.networks import RESNET
from jobs.bench.pretend import Counts, counting, pretending
from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.config import kind_of, members
from ltrscale.data.stream.batches import MicroBatches, StreamConfig
from ltrscale.models.choices import ContextConfig, FeatureEncoderConfig, NetworkConfig
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.models.layers import EncoderSettings
from ltrscale.models.ranker import Architecture, Ranker
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.objective import Objective, Pretrainer
from ltrscale.pretext.siamese import SimSiamConfig
from ltrscale.ranking.choices import LossConfig
from ltrscale.ranking.loss import Loss
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.loop import Trainer
from ltrscale.training.ranking import RankingObjective
from ltrscale.training.settings import OptimizerConfig, Precision

FEW, MANY = 64, 512
"""Lists of a batch: 8,011 and 62,523 documents."""
SHORT = 20
"""Documents of each list in the other distribution of lengths."""

LAUNCH_S, WAIT_S = 7e-6, 20e-6
"""Of the host: an operation from Python, and a wait with the copy that it is for."""
REACHED = 0.9
"""Share of a memory's bandwidth that streaming kernels reach."""


class Gpu(NamedTuple):
    """A GPU by its data sheet: bytes a second, and float32 or TF32 operations a second of dense products."""

    name: str
    bandwidth: float
    flops: float


GPUS = (Gpu("V100", 900e9, 15.7e12), Gpu("A100", 2039e9, 156e12), Gpu("H200", 4800e9, 495e12))

GOALS = {
    "method simclr_rank": 700,
    "method simsiam": 450,
    "method simclr": 2000,
    "method scarf": 2000,
    "method dacl": 2000,
    "method subtab": 2000,
    "loss lambdarank": 800,
    "loss pirank": 800,
}
"""Launches of a step at 62,523 documents."""


class Counted(NamedTuple):
    """A step at one size."""

    documents: int
    counts: Counts

    def rate(self, gpu: Gpu) -> tuple[float, str]:
        """Documents a second, and what bounds them: the host, the memory, or the products."""
        counts = self.counts
        seconds = {
            "host": counts.launches * LAUNCH_S + counts.waits.total() * WAIT_S,
            "memory": counts.touched / (REACHED * gpu.bandwidth),
            "products": counts.flops / gpu.flops,
        }
        bound = max(seconds, key=lambda name: seconds[name])
        return self.documents / seconds[bound], bound


Step = Callable[[torch.device, QueryGroups], Callable[[], object]]
"""Puts a model on a device, and returns one step on these groups, as often as it is called."""


def steps() -> dict[str, Step]:
    """Every objective, encoder, list context and ranking loss, and scoring, by name."""
    pretexts = {f"method {kind_of(cls)}": partial(_pretext, cls(), RESNET) for cls in members(FeatureMethodConfig)}
    encoders = {
        f"encoder {kind_of(cls)}": partial(_pretext, SimSiamConfig(), cls.model_validate({}))
        for cls in members(FeatureEncoderConfig)
    }
    contexts = {f"context {kind_of(cls)}": partial(_finetune, cls, None) for cls in members(ContextConfig)}
    losses = {f"loss {kind_of(cls)}": partial(_finetune, None, cls) for cls in members(LossConfig)}
    return {**pretexts, **encoders, **contexts, **losses, "scoring": _score}


def count(step: Step, groups: QueryGroups, *, values: bool = False) -> Counted:
    """What one step asks, after a first one that warms up; without values the sizes may be anything.

    Raises:
        RuntimeError: an operation had tensors of two devices.
    """
    with pretending(values=values) as device:
        work = step(device, groups)
        work()
        with counting() as counted:
            work()
    return Counted(groups.n_documents, counted.counts)


def lists(n_groups: int, length: int | None = None) -> QueryGroups:
    """Labelled lists of random documents; of web search lengths, or all of one length."""
    lengths_Q = torch.from_numpy(mslr_lengths(n_groups, seed=0)) if length is None else torch.full((n_groups,), length)
    offsets_Q1, generator = to_offsets(lengths_Q), torch.Generator().manual_seed(0)
    n = int(offsets_Q1[-1])
    return QueryGroups(
        torch.randn(n, N_FEATURES, generator=generator),
        offsets_Q1,
        labels_N=torch.randint(5, (n,), generator=generator).float(),
        ids_Q=torch.arange(n_groups),
        positions_N=torch.cat([torch.arange(1.0, 1 + length) for length in lengths_Q.tolist()]),
    )


class _Repeated:
    """A stream that serves the same groups again and again."""

    config = StreamConfig(docs_per_batch=1, prefetch=0)
    groups_per_epoch = documents_per_epoch = 1

    def __init__(self, groups: QueryGroups) -> None:
        self.groups = groups

    def epoch(self, *_: object) -> Iterator[MicroBatches]:
        while True:
            yield MicroBatches({0: self.groups}, {})


def _transform() -> FeatureTransform:
    return FeatureTransform(TransformConfig(), ["numeric"] * N_FEATURES, [])


def _trained(model: Pretrainer | RankingObjective, groups: QueryGroups, precision: Precision) -> Callable[[], object]:
    stream, optimizer = _Repeated(groups), OptimizerConfig(clip_norm=1.0)
    trainer = Trainer(model, model, stream, optimizer, epochs=1, seed=0, precision=precision)  # type: ignore[arg-type]
    taken = trainer.epoch()
    return lambda: next(taken)


def _pretext(
    method: Objective,
    encoder: EncoderSettings,
    device: torch.device,
    groups: QueryGroups,
    precision: Precision = "float32",
) -> Callable[[], object]:
    network = NetworkConfig.model_validate({"encoder": encoder.model_dump()})
    marginals_SF = groups.features_NF[:1000]
    model = Pretrainer(_transform(), network, method, ZeroingConfig(), marginals_SF).to(device)
    return _trained(model, groups, precision)


def _ranker(context: type | None) -> Ranker:
    parts = {"transform": {}, "encoder": RESNET.model_dump(), "head": {}}
    of_context = {"context": {"kind": kind_of(context)}} if context else {}
    return Ranker(Architecture.model_validate(parts | of_context), _transform())


def _finetune(
    context: type | None,
    loss: type[Loss] | None,
    device: torch.device,
    groups: QueryGroups,
    precision: Precision = "float32",
) -> Callable[[], object]:
    config = FinetuneConfig.model_validate({"loss": {"kind": kind_of(loss)}} if loss else {})
    return _trained(RankingObjective(_ranker(context).to(device), config).to(device), groups, precision)


def _score(device: torch.device, groups: QueryGroups) -> Callable[[], object]:
    ranker = _ranker(None).to(device).eval()

    def work() -> None:
        with torch.no_grad():
            ranker(groups.to(device)).cpu()

    return work
