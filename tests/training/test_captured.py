"""Steps of the same shapes: padding changes neither loss nor gradient, and no step asks anything else or waits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from nightly import nightly
from pydantic import ValidationError
from small_trainers import make_trainer, pretrain, run_epochs, splits
from torch import Tensor

from jobs.bench.measure import mslr_offsets
from jobs.bench.pretend import PretendTensor, counting, pretending
from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.data.stream.batches import MicroBatches, StreamConfig
from ltrscale.errors import InputError
from ltrscale.layout import Frame, frame_of
from ltrscale.models.batch_norm import MicroBatchNorm, moments
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform
from ltrscale.models.layers import Dropout
from ltrscale.pretext.augment import Augmentation, Draw, SwapInGroupConfig, ZeroingConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Objective, Pretrainer, SimSiamConfig
from ltrscale.training.captured import WARM_UP, CapturedTrainer
from ltrscale.training.checkpoint import Buffers, Progress, restore, take
from ltrscale.training.loop import StepResult, Trainer
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.settings import OptimizerConfig

FEATURES = 6
FRAME = Frame(40, ((3, 4), (3, 10), (1, 16)))
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet": {"encoder": {"width": 8, "blocks": 2, "dropout": 0.0}, "transform": {"numeric": "none"}},
    "tabm": {
        # without kinks: lists of one document have values of exactly 0
        "encoder": {
            "kind": "tabm",
            "members": 3,
            "hidden": [8],
            "batch_norm": True,
            "activation": "gelu",
            "dropout": 0.0,
        },
        "numbers": {"kind": "plain", "within_lists": True},
        "transform": {"per_query": True},
    },
}
METHODS: list[Objective] = [
    SimCLRRankConfig(),
    SimCLRRankConfig(temperature=0.01),
    SimCLRRankConfig(with_positive=False),
    SimSiamConfig(),
]
every_network = pytest.mark.parametrize("network", NETWORKS)


class Columns(Augmentation):
    """Hides the same features of every document, so that its draws do not depend on the number of documents."""

    kind: Literal["columns"] = "columns"

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        return x_NF * (torch.rand(FEATURES, generator=draw.generator) < 0.7)


class Served:
    """A stream of given batches."""

    config = StreamConfig(prefetch=0)
    groups_per_epoch = 20

    def __init__(self, batches: Sequence[QueryGroups]) -> None:
        self.batches = batches

    def epoch(self, *_: object) -> Iterator[MicroBatches]:
        return (MicroBatches({0: groups}, {}) for groups in self.batches)


def lists(*lengths: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> QueryGroups:
    """Lists of random documents of these lengths."""
    draws = torch.Generator().manual_seed(seed)
    features_NF = torch.randn(sum(lengths), FEATURES, generator=draws, dtype=dtype)
    return QueryGroups(features_NF, torch.tensor([0, *lengths]).cumsum(0))


def pretrainer(method: Objective, network: str, augmentation: Augmentation) -> Pretrainer:
    config = NetworkConfig.model_validate(NETWORKS[network])
    torch.manual_seed(0)
    transform = FeatureTransform(config.transform, ["numeric"] * FEATURES, [])
    return Pretrainer(transform, config, method, augmentation)


def captured(net: Pretrainer, batches: Sequence[QueryGroups], frame: Frame = FRAME) -> CapturedTrainer:
    return CapturedTrainer(frame, net, net, Served(batches), OptimizerConfig(clip_norm=1.0), epochs=1, seed=0)


def differentiated(net: Pretrainer, groups: QueryGroups) -> list[Tensor]:
    """Loss, count, gradients, moments of the norms and what is watched of a micro-batch."""
    net.zero_grad()
    loss, count = net(groups, torch.Generator().manual_seed(1))
    loss.backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    norms = [module for module in net.modules() if isinstance(module, MicroBatchNorm)]
    watched = net.watch.take()
    return [loss.detach(), torch.as_tensor(count, dtype=torch.float64), *gradients, moments(norms), watched]


@pytest.mark.slow
@every_network
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_padding_changes_neither_loss_nor_gradient_nor_statistics(method: Objective, network: str) -> None:
    net = pretrainer(method, network, Columns()).double()
    with torch.no_grad():
        for parameter in net.parameters():  # so that documents of zeros have an embedding
            parameter += 0.1 * torch.randn_like(parameter)
    for lengths in ((3, 9, 1, 4, 16, 2), (8, 16), (10, 10, 9, 11)):
        groups = lists(*lengths)
        padded = groups.padded(FRAME)
        assert padded is not None
        assert (padded.n_documents, padded.n_groups) == (40, 8)
        for value, expected in zip(differentiated(net, padded), differentiated(net, groups), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def test_groups_that_do_not_fit_a_frame_are_not_padded() -> None:
    for lengths in ((17, 9), (16, 7), (16, 16), (9, 9, 9, 9, 5), (5,) * 5, (4, 4, 4, 4, 4, 4, 1, 1), (11, 12, 3)):
        assert lists(*lengths).padded(FRAME) is None, lengths


def test_nearly_all_batches_of_a_log_fit_the_frame_of_its_first_lists_with_little_padding() -> None:
    lengths_Q = np.diff(mslr_offsets(6000).numpy())
    for documents, most in ((65_536, 2.0), (8_192, 4.2)):
        frame = frame_of(lengths_Q[: 4 * documents // 120], documents=documents, longest=734, entries=10**9)
        fitting, needed = [], []
        ends = np.flatnonzero(np.diff(lengths_Q.cumsum() // documents)) + 1
        for batch in np.split(lengths_Q, ends)[1:-1]:
            fitting.append(frame.dealt(batch) is not None)
            needed.append((batch**2).sum())
        assert np.mean(fitting) > 0.98
        assert sum(m * length**2 for m, length in frame.shapes) < most * np.mean(needed)


def undrawn(trainer: Trainer) -> Trainer:
    """The same trainer without draws, which depend on the padding."""
    assert isinstance(trainer.model, Pretrainer)
    trainer.model.augmentation = ZeroingConfig(probability=0.0)
    for module in trainer.model.modules():
        if isinstance(module, Dropout):
            module.probability = 0.0
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simclr_rank", "simsiam", "simclr_rank of tabm", "simclr_sample"])
def test_a_training_without_draws_is_that_without_graphs(synthetic_dataset: str, method: str) -> None:
    trainer, plain = (undrawn(make_trainer(synthetic_dataset, name)) for name in (f"{method} with graphs", method))
    assert isinstance(trainer, CapturedTrainer)
    assert trainer.frame is not None
    first = run_epochs(trainer, 1)
    assert trainer.unfit < 0.5 * trainer.fitting  # the last ones of streams
    trainer.frame = trainer.frame._replace(documents=190)  # too few for many: they are not padded
    trainer.static = None
    second, expected = run_epochs(trainer, 1), run_epochs(plain)
    assert trainer.unfit > 3
    for result, other in zip([*first, *second], expected, strict=True):
        assert (result.step, result.groups, result.count) == (other.step, other.groups, other.count)
        assert result.loss == pytest.approx(other.loss, rel=1e-6)
        assert result.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-5)
    assert trainer.past.mean_loss == pytest.approx(plain.past.mean_loss, rel=1e-6)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_training_is_bit_equal_to_one_that_never_stopped(synthetic_dataset: str, stop: int) -> None:
    def trainer() -> Trainer:
        return make_trainer(synthetic_dataset, "simclr_rank with graphs")

    whole, first, second = trainer(), trainer(), trainer()
    expected = run_epochs(whole)
    first.requests = lambda: (first.state.step + 1 == stop, False, False)
    done: list[StepResult] = []
    for result in first.epoch():
        done.append(result)
        if result.checkpoint_due:
            break
    assert [result.step for result in done] == [*range(1, stop + 1)]  # what is saved has been awaited
    snapshot = take(first, Progress(), Buffers())
    assert snapshot is not None
    restore(second, snapshot)
    assert second.state.loss == first.state.loss != 0
    done += run_epochs(second)
    assert [replace(result, checkpoint_due=False) for result in done] == expected
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name


def test_a_step_that_diverges_updates_nothing_and_is_named_one_step_later() -> None:
    batches = [lists(3, 9, 4, 10, seed=seed) for seed in range(5)]
    batches[2].features_NF[0] = torch.inf
    trainer = captured(pretrainer(SimCLRRankConfig(), "resnet", Columns()).double(), batches)
    results = trainer.epoch()
    assert [next(results).step for _ in range(2)] == [1, 2]  # of the third the work is under way
    weights = [parameter.detach().clone() for parameter in trainer.parameters]
    with pytest.raises(InputError, match="step 3: the loss is nan, training has diverged"):
        next(results)
    assert trainer.state.step == 4
    assert all(parameter.isfinite().all() for parameter in trainer.parameters)
    before, after = torch.cat([w.flatten() for w in weights]), trainer.flat
    assert before.isfinite().all()
    assert after.isfinite().all()


class Asked(counting):
    """Also notes each operation with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, list[list[int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        if on_device := [list(value.shape) for value in values if isinstance(value, PretendTensor)]:
            self.operations.append((func.name(), on_device))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.slow
@every_network
@pytest.mark.parametrize(
    ("method", "augmentation"),
    [
        *((METHODS[0], SwapInGroupConfig()), (METHODS[-1], ZeroingConfig())),
        *(nightly(METHODS[0], ZeroingConfig()), nightly(METHODS[-1], SwapInGroupConfig())),
    ],
    ids=repr,
)
def test_steps_of_other_lengths_ask_the_same_and_wait_for_nothing(
    method: Objective, network: str, augmentation: Augmentation
) -> None:
    batches = [
        lists(*lengths, seed=seed, dtype=torch.float32)
        for seed, lengths in enumerate(((3, 9, 13), (4, 4, 16, 1), (10, 9, 8, 2), (5, 3, 16), (16, 8)))
    ]
    with pretending() as device:
        trainer = captured(pretrainer(method, network, augmentation).to(device), batches)
        steps, asked = trainer.epoch(), []
        for _ in range(2):  # the first one makes the layout, and measures the views
            next(steps)
        for _ in range(2):
            with Asked() as counted:
                next(steps)
            assert counted.counts.waits.total() == 0, counted.counts.waits
            asked.append(counted.operations)
        with counting() as counted:
            for due in (0, 1):
                trainer.watch._seen = due
                trainer._of_static()
            trainer._from_sums()
        assert counted.counts.copies == counted.counts.waits.total() == 0  # a graph replays no copy from the host
        steps.close()
    assert len(asked[0]) > 100
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": {"kind": "simclr"}}, "method simclr"),
        ({"augment": {"kind": "compose", "steps": [{"kind": "mixup"}]}}, "augmentation compose, which mixes groups"),
        ({"optimizer": {"kind": "sgd"}}, "optimizer sgd"),
        ({"compile": True, "network": {"transform": {"host_rows": 5}}}, "transform.host_rows, compile"),
    ],
)
def test_what_has_no_graphs_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=f"cuda_graphs does not go together with {reason}; leave"):
        PretrainConfig.model_validate({"cuda_graphs": True, **settings})


@pytest.mark.slow
def test_a_job_pretrains_with_graphs(synthetic_dataset: str, tmp_path: Path) -> None:
    config = {"cuda_graphs": True, "epochs": 2, "stream": {"docs_per_batch": 800, "streams": 4}}
    records: list[dict[str, Any]] = []
    train, _, _ = splits(synthetic_dataset)
    out = str(tmp_path / "out")
    pretrain(PretrainConfig.model_validate(config), train, out, origin={}, report=records.append)
    steps = [record["step"] for record in records if "step" in record]
    assert steps == [*range(1, len(steps) + 1)]
    losses = [record["loss"] for record in records if "epoch" in record]
    assert bundle.load(out).metrics["loss"] == losses[-1] < losses[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("method", [METHODS[0], METHODS[-1]], ids=repr)
@every_network
def test_replayed_steps_on_a_real_gpu_are_those_that_are_not_captured(method: Objective, network: str) -> None:
    batches = [lists(3 + i % 7, 9, 1 + i % 3, 16, seed=i, dtype=torch.float32) for i in range(8 * (WARM_UP + 2))]
    device = torch.device("cuda")
    trainer, other = (captured(pretrainer(method, network, SwapInGroupConfig()).to(device), batches) for _ in range(2))
    for repeated in (*other._add_static.values(), other._update):
        repeated.graphs.on_gpu = False  # the same work, never captured
    for result, expected in zip(trainer.epoch(), other.epoch(), strict=True):
        assert result.loss == pytest.approx(expected.loss, rel=1e-4)
        assert result.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-3)
    assert all(repeated.graph is not None for repeated in (*trainer._add_static.values(), trainer._update))
    torch.testing.assert_close(trainer.watch.take(), other.watch.take(), rtol=1e-3, atol=1e-3)
