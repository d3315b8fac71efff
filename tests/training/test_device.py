"""On a GPU nothing is left on the CPU, no step waits but once, and values are those of a CPU.

A device that pretends refuses an operation over two devices, as a GPU does, and counts waits and launches.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from nightly import nightly
from small_trainers import finetune, pretrain, splits
from torch import Tensor

from jobs.bench import device as bench
from jobs.bench.pretend import NAME, Counts, counting, pretending
from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.models.encoders import ResNetConfig
from ltrscale.training import settings
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.loop import StepResult
from ltrscale.training.pretrain import PretrainConfig

STEPS = bench.steps(ResNetConfig(width=16, blocks=1, dropout=0.0))
OTHER_DRAWS = ("method vime", "method subtab", "encoder")
"""Steps that permute columns or drop out, by other draws on a GPU."""
OF_THE_PAPERS = {"method simclr_rank", "method simsiam", "loss lambdarank", "loss pirank", "encoder mlp", "scoring"}


@pytest.fixture(scope="module")
def small() -> QueryGroups:
    return QueryGroups.concat([bench.lists(2, length) for length in (20, 3, 1, 12)])


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_once_and_has_the_values_of_the_cpu(name: str, small: QueryGroups) -> None:
    with pretending() as device:
        torch.manual_seed(0)
        there = STEPS[name](device, small)
        results = []
        for _ in range(2):  # the first one is watched, and makes the layout of the batch
            with counting() as counted:
                results.append(there())
            assert counted.counts.launches > 10
            assert counted.counts.waits.total() <= 1, counted.counts.waits
    torch.manual_seed(0)
    here = STEPS[name](torch.device("cpu"), small)
    expected = [here()]
    # backward passes ask less where operations are counted; here a step runs as it is
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        expected.append(here())
    asked = [event for event in profile.events() if event.name == "aten::item"]
    inside = {event.cpu_parent.name for event in asked if event.cpu_parent is not None}
    assert not {name for name in inside if "Backward" in name}
    if not name.startswith(OTHER_DRAWS):
        check_same(results, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in OF_THE_PAPERS else nightly(name) for name in STEPS])
def test_launches_do_not_grow_with_the_number_of_lists(name: str) -> None:
    few, many = (bench.count(STEPS[name], bench.lists(n)).counts for n in (bench.FEW, bench.MANY))
    assert many.launches <= 1.3 * few.launches
    assert many.launches <= bench.GOALS.get(name, math.inf)
    assert many.waits.total() <= 1, many.waits


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings(  # torch's own, where its compiler is loaded
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:The .grad:UserWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
)
def test_the_steps_with_goals_reach_them_but_for_some_that_move_more() -> None:
    rows = [*bench.bench_device(quick=True)]
    assert {row.name.removeprefix("launches of a step, ") for row in rows} >= set(bench.GOALS)
    far = {f"gigabytes of a step, {name}" for name in ("method simclr_rank", "method subtab", "encoder tabm")}
    far |= {f"kilobytes of a document, simclr_rank compiled, {precision}" for precision in bench.COMPILED}
    for row in rows:
        assert row.figure is not None
        assert row.goal is None or row.figure <= row.goal or row.name in far, row


SEEDED = [name for name in STEPS if not name.startswith(("method", "encoder"))]
"""Steps whose weights do not depend on what was drawn before."""
DRAWN = {
    "context gsf",
    "loss softmax_negatives",
    "loss gumbel_approx_ndcg",
    "loss gumbel_neural_sort_ndcg",
    "negatives of other lists",
}
"""Steps with draws, which a real GPU makes in its own way."""
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def two_steps(name: str, device: torch.device, groups: QueryGroups) -> Any:
    work = STEPS[name](device, groups)
    return work(), work()


def check_same(results: Any, expected: Any) -> None:
    for result, other in zip(results, expected, strict=True):
        if isinstance(result, Tensor):
            torch.testing.assert_close(result, other)
            continue
        assert isinstance(result, StepResult)
        assert result.loss == pytest.approx(other.loss, rel=1e-4)
        assert result.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-3)
        assert result.count == other.count


@on_gpu
@pytest.mark.parametrize("name", [name for name in SEEDED if name not in DRAWN])
def test_values_on_a_real_gpu_are_those_of_the_cpu(name: str, small: QueryGroups) -> None:
    check_same(two_steps(name, torch.device("cuda"), small), two_steps(name, torch.device("cpu"), small))


@on_gpu
def test_steps_are_timed_on_a_real_gpu(small: QueryGroups) -> None:
    for precision in get_args(settings.Precision):
        step = bench.steps(ResNetConfig(width=16, blocks=1))["loss lambdarank"]
        measured = bench.measure(step, small, "cuda", precision)
        assert measured.rate > 0
        assert 0 <= measured.waiting < 1
        assert measured.peak_bytes > small.features_NF.nbytes


def test_an_operation_over_two_devices_is_refused_and_a_look_is_counted() -> None:
    with pretending() as device:
        x_N = torch.arange(3.0).to(device)
        with pytest.raises(RuntimeError, match=r"aten::add: expected all tensors on one device, but \[\[3\]\] lie on"):
            x_N + torch.arange(3.0)
        with counting() as counted:
            assert bool(x_N[0] == 0)
            assert x_N[x_N > 0].cpu().tolist() == [1, 2]
        assert counted.counts.waits.total() == 3  # the comparison, the boolean index, and the copy to the host
        assert counted.counts.launches > 0


def trained_on(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> Counts:
    """What a whole training asks of the device."""
    with pretending() as device:
        monkeypatch.setattr(settings, "choose_device", lambda _: device)
        with counting() as counted:
            work()
        monkeypatch.undo()
    return counted.counts


@pytest.mark.slow
def test_whole_trainings_run_on_the_device(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, validation, _ = splits(synthetic_dataset)
    stream = {"docs_per_batch": 900, "streams": 2, "prefetch": 0}
    records: list[dict[str, Any]] = []
    pretraining = PretrainConfig.model_validate({"epochs": 1, "stream": stream})
    out = str(tmp_path / "pretrained")
    counts = trained_on(monkeypatch, lambda: pretrain(pretraining, train, out, origin={}, report=records.append))
    steps = sum("step" in record for record in records)
    assert steps > 2
    in_steps = counts.waits["training/loop.py:" + line_of("self.rows.beside(")]
    assert in_steps == steps + 1  # the last one finds that all is read
    finetuning = FinetuneConfig.model_validate({"epochs": 1, "head_epochs": 1, "stream": stream, "average": 0.5})
    tuned = str(tmp_path / "tuned")
    counts = trained_on(
        monkeypatch,
        lambda: finetune(finetuning, train, validation, tuned, pretrained=out, origin={}, report=records.append),
    )
    assert counts.launches > 100
    assert bundle.load(tuned).metrics["validation_ndcg@5"] > 0


def line_of(text: str) -> str:
    """The line of the training loop with this text."""
    lines = (Path(settings.__file__).parent / "loop.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return str(number)


def test_the_name_of_the_device_is_its_own() -> None:
    with pretending() as device:
        assert device.type == NAME
        assert torch.zeros(2, device=device).device == device
