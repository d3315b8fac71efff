"""Pretraining of the in-context network: what it leaves does not depend on kills or processes, and it learns."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_until

from jobs.bench.pretend import Counts, counting, pretending
from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.split import Splits
from ltrscale.errors import InputError, Stopped
from ltrscale.models.in_context import InContextNetwork, InContextSizes
from ltrscale.stages.runs import heard_by
from ltrscale.training.checkpoint import list_checkpoints
from ltrscale.training.loop import StepResult
from ltrscale.training.pretrain import PretrainJob
from ltrscale.training.pretrain_in_context import InContextPretrainConfig, Learner
from ltrscale.training.untrained import InContextConfig, InContextJob, pretrained_network

SMALL: dict[str, Any] = {
    "network": {"token": 16, "state": 8, "shown": 4, "heads": 2, "layers": 2},
    "problems": {
        "examples": (8, 12),
        "questions": 8,
        "features": (4, 6),
        "documents": (160, 200),
        "values": 6000,
    },
    "steps": 20,
    "validation": 2,
    "validate_every": 4,
    "processes": 0,
    "device": "cpu",
}


def job(out: Path, **changes: Any) -> PretrainJob:
    return validate(PretrainJob, {"out": str(out), "in_context": {**SMALL, **changes}}, "test")


def run(out: Path, **changes: Any) -> list[dict[str, Any]]:
    """Pretrain; the figures of each validation."""
    records: list[dict[str, Any]] = []
    with heard_by(lambda record: records.append(dict(record))):
        assert job(out, **changes).run()
    return [record for record in records if "loss" in record]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return pretrained_network(str(out)).state_dict()


def same(one: Path, other: Path) -> bool:
    pairs = zip(weights(one).values(), weights(other).values(), strict=True)
    return all(a.equal(b) for a, b in pairs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    run(out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 12])
def test_stopped_and_resumed_gives_the_same_weights(whole: Path, tmp_path: Path, at: int) -> None:
    out = tmp_path / "out"

    def stop(record: Mapping[str, object]) -> None:
        if record.get("step") == at:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped, match=f"after step {at + 1}") as stopped, heard_by(stop):
        job(out).run()
    assert stopped.value.status == 128 + signal.SIGTERM
    assert len(list_checkpoints(str(out / "checkpoints"))) == 1
    records = run(out)
    assert [record["step"] for record in records] == [step for step in (4, 8, 12, 16, 20) if step > at]
    assert same(out, whole)
    assert not list_checkpoints(str(out / "checkpoints"))
    assert not job(out).run()


@pytest.mark.nightly
def test_other_processes_draw_the_same_problems(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", processes=2)
    assert same(tmp_path / "out", whole)


@pytest.mark.nightly
def test_killed_it_leaves_no_process_and_resumes_to_the_same_weights(whole: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "out", tmp_path / "config.yaml"
    settings = {**SMALL, "processes": 1, "checkpoint_minutes": 0.001}
    config.write_text(json.dumps({"out": str(out), "in_context": settings}))

    def children(pid: int) -> list[Path]:
        return [Path(f"/proc/{child}") for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    moments: list[Callable[[int], object]] = [
        lambda pid: any("libtorch" in (child / "maps").read_text() for child in children(pid)),  # while it starts
        lambda _: list_checkpoints(str(out / "checkpoints")),
    ]
    for moment in moments:
        process = subprocess.Popen([sys.executable, "-m", "jobs.pretrain", "--config", str(config)])
        wait_until(lambda pid=process.pid, moment=moment: moment(pid))
        left = children(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda left=left: not any(child.exists() for child in left))
    job(out, **settings).run()
    assert same(out, whole)
    assert not list_checkpoints(str(out / "checkpoints"))


@pytest.mark.slow
def test_another_seed_gives_other_weights(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", seed=1)
    assert not same(tmp_path / "out", whole)


def test_other_ranges_of_problems_make_another_origin(tmp_path: Path) -> None:
    identities = [
        job(tmp_path, problems={**SMALL["problems"], name: pair}).identity()
        for name, pair in (
            ("examples", (8, 12)),
            ("examples", (8, 11)),
            ("features", (4, 5)),
            ("documents", (160, 190)),
        )
    ]
    assert all(identities[0] != other for other in identities[1:])


@pytest.mark.nightly
def test_it_learns_and_keeps_the_best_average(tmp_path: Path) -> None:
    def figures(name: str, rate: float, number: int) -> tuple[list[float], list[float], list[int]]:
        optimizer = {"kind": "adamw", "learning_rate": rate}
        records = run(
            tmp_path / name, steps=number, validate_every=20, validation=6, optimizer=optimizer, keep_every=40
        )
        losses, values, steps = zip(*((r["loss"], r["validation_ndcg@5"], r["step"]) for r in records), strict=True)
        return [*losses], [*values], [*steps]

    untrained_losses, untrained_values, _ = figures("untrained", 1e-9, 20)
    losses, values, steps = figures("out", 4e-3, 80)
    assert losses[-1] < min(untrained_losses) - 0.1
    assert min(values) > max(untrained_values) + 0.1
    manifest = storage.read_manifest(str(tmp_path / "out"))
    assert manifest is not None
    assert manifest["validation_ndcg@5"] == max(values)
    assert manifest["step"] == steps[values.index(max(values))]
    last, kept = tmp_path / "out" / "steps" / "00000080", tmp_path / "out" / "steps" / "00000040"
    assert not same(kept, last)
    assert same(tmp_path / "out", last) == (manifest["step"] == 80)


@pytest.mark.slow
def test_minutes_end_it_early_with_a_validated_network(tmp_path: Path) -> None:
    records = run(tmp_path / "out", steps=1_000_000, minutes=0.02, validate_every=1000)
    assert 0 < records[-1]["step"] < 1_000_000
    assert weights(tmp_path / "out")


@pytest.mark.slow
def test_it_starts_from_other_weights(whole: Path, tmp_path: Path) -> None:
    slow = {"kind": "adamw", "learning_rate": 1e-9}
    run(tmp_path / "out", start=str(whole), optimizer=slow, steps=4)
    for one, other in zip(weights(tmp_path / "out").values(), weights(whole).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    with pytest.raises(InputError, match="other sizes"):
        job(tmp_path / "wide", start=str(whole), network={**SMALL["network"], "state": 16}).run()


@pytest.mark.slow
def test_a_ranker_reads_with_the_weights_that_were_pretrained(
    whole: Path, tmp_path: Path, synthetic_dataset: str
) -> None:
    values = {"train": {"data": synthetic_dataset, "periods": ["2026-W01"], "labelled_groups": 20}}
    splits = Splits.model_validate(values | {"validation": {"data": synthetic_dataset, "periods": ["2026-W03"]}})
    own = InContextConfig(pretrained=str(whole))
    assert InContextJob(out=str(tmp_path / "own"), splits=splits, in_context=own).run()
    assert json.loads((tmp_path / "own" / "config.json").read_text())["part"]["sizes"] == SMALL["network"]
    origins = [InContextJob(out="x", splits=splits, in_context=c).inputs() for c in (own, InContextConfig())]
    assert origins[0][str(whole)] != origins[1]["network"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_context": None}, "train: name the documents"),
        ({"train": {"data": "x"}}, "not both"),
        ({"workers": 2}, "pretrained by one worker"),
        ({"pretrain": {"seed": 9}}, "pretrain: has settings of an encoder"),
    ],
)
def test_settings_of_no_kind_of_pretraining_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        job(tmp_path).replace(**changes).run()


def test_weights_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no weights of an in-context network there; make them with jobs\."):
        pretrained_network(str(tmp_path))
    with storage.Commit(str(tmp_path / "bad")) as commit:
        with commit.file("weights.safetensors") as path:
            path.write_bytes(b"12345678 no weights")
        commit.finish({})
    with pytest.raises(InputError, match="not the weights of an in-context network"):
        pretrained_network(str(tmp_path / "bad"))
    assert pretrained_network().sizes == InContextNetwork(InContextSizes()).sizes


@pytest.mark.slow
def test_a_step_waits_twice_for_the_device_and_learns_as_on_a_cpu() -> None:
    config = InContextPretrainConfig.model_validate({**SMALL, "optimizer": {"kind": "adamw", "clip_norm": 1.0}})

    def step(learner: Learner, steps: Iterator[StepResult]) -> None:
        next(steps)
        learner.average_weights()

    def learnt(device: torch.device) -> tuple[Learner, Counts]:
        learner = Learner(config, device)
        steps = learner.trainer.epoch()
        for _ in range(2):
            step(learner, steps)
        with counting() as counted:
            step(learner, steps)
        return learner, counted.counts

    here, _ = learnt(torch.device("cpu"))
    with pretending() as device:
        there, counts = learnt(device)
        weights = there.progress().tensors["average"]
    assert counts.launches > 100
    assert counts.waits.total() <= 2, counts.waits  # for the number of problems, and for the loss
    for name, value in here.average.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-4)
