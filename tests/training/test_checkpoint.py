"""Laws of checkpoints: a resumed run continues as if never stopped, and a failed save does not stop training."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nightly import nightly
from small_trainers import make_trainer, run_epochs

from ltrscale import storage
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.runtime.workers import WorkerContext, rank_and_world
from ltrscale.training import resumption
from ltrscale.training.checkpoint import Progress, list_checkpoints, read_checkpoint, restore
from ltrscale.training.loop import StepResult, Trainer
from ltrscale.training.resumption import Checkpoints

METHODS = ("simclr_rank", "simsiam")


def checkpoints_in(folder: Path | str, **changes: Any) -> Checkpoints:
    settings = {"origin": {"run": "a"}, "data": "abc", "every_s": 3600.0}
    return Checkpoints(f"{folder}/checkpoints", **{**settings, **changes})


def save(saver: Checkpoints, trainer: Trainer, result: StepResult, **progress: Any) -> None:
    """Save a checkpoint as if one were due, and wait until it is written."""
    saver.after(replace(result, checkpoint_due=True), trainer, Progress(**progress))
    saver._wait()


def steps(trainer: Trainer) -> Iterator[StepResult]:
    """All steps of all epochs."""
    while trainer.state.epoch < trainer.epochs:
        yield from trainer.epoch()


def train(saver: Checkpoints, trainer: Trainer) -> None:
    for result in steps(trainer):
        saver.after(result, trainer, Progress())
        saver._wait()


def saved_steps(folder: Path) -> list[int]:
    return [int(url.rsplit("-", 1)[-1]) for url in list_checkpoints(str(folder / "checkpoints"))]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [*map(nightly, (1, 6)), 4])
def test_resumed_is_bit_equal_to_never_stopped(synthetic_dataset: str, tmp_path: Path, method: str, stop: int) -> None:
    whole = make_trainer(synthetic_dataset, method)
    expected = run_epochs(whole)
    assert len(expected) > stop
    first, done = make_trainer(synthetic_dataset, method), []
    with checkpoints_in(tmp_path) as saver:
        for result in steps(first):
            done.append(result)
            if len(done) == stop:
                save(saver, first, result)
                break
    second = make_trainer(synthetic_dataset, method)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()  # all must come from the checkpoint
    with checkpoints_in(tmp_path) as saver:
        snapshot = saver.newest()
        assert snapshot is not None
        restore(second, snapshot)
    sums = (first.state.loss, first.state.count, first.state.account)
    assert (second.state.loss, second.state.count, second.state.account) == sums
    done += list(steps(second))
    assert done == expected
    assert second.past == whole.past
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def two_workers(rank: int, world: int, data: str, folder: str) -> None:
    """The work of two workers; each part has its own folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    one_is_asked_to_stop(make_trainer(data, "simclr_rank", rank=rank, world=world), f"{folder}/stopped")
    rank_0_cannot_save(make_trainer(data, "simclr_rank", rank=rank, world=world), f"{folder}/failing")
    dist.destroy_process_group()


def one_is_asked_to_stop(trainer: Trainer, folder: str) -> None:
    """One worker is asked to stop in the second epoch; both write one checkpoint and end once it is committed."""
    run_epochs(trainer, 1)
    trainer.requests = lambda: (False, rank_and_world()[0] == 1 and trainer.state.account.groups > 0, False)
    with checkpoints_in(folder) as saver, pytest.raises(Stopped, match="checkpoint written to"):
        train(saver, trainer)
    assert len(list_checkpoints(f"{folder}/checkpoints")) == 1


def rank_0_cannot_save(trainer: Trainer, folder: str) -> None:
    """Both workers end and say why."""
    with checkpoints_in(folder, every_s=0.0) as saver:
        trainer.requests = saver.requests
        with pytest.raises(InputError, match=r"^\S+: 3 checkpoints in a row could not be written \(\S+step-00000003: "):
            train(saver, trainer)


@pytest.mark.slow
def test_two_workers_stop_together_and_one_goes_on_from_their_checkpoint(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "checkpoints").write_text("in the way")
    mp.spawn(two_workers, args=(2, synthetic_dataset, str(tmp_path)), nprocs=2)
    alone = make_trainer(synthetic_dataset, "simclr_rank")
    expected = run_epochs(alone)
    other = make_trainer(synthetic_dataset, "simclr_rank")
    with checkpoints_in(tmp_path / "stopped") as saver:
        snapshot = saver.newest()
        assert snapshot is not None
        restore(other, snapshot)
    assert len(other.state.positions) == 4
    rest = list(other.epoch())
    assert [r.groups for r in rest] == [r.groups for r in expected[-len(rest) :]]
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_two_are_kept_and_unusable_ones_are_skipped(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    trainer = make_trainer(synthetic_dataset, "simclr_rank")
    torn = folder / "step-00000009"
    with checkpoints_in(tmp_path) as saver:
        for result in steps(trainer):
            save(saver, trainer, result)
            if result is not None and trainer.state.step == 3:
                break
    assert saved_steps(tmp_path) == [2, 3]
    torn.mkdir()
    left = torn / f"weights-{hashlib.sha256(b'of a write').hexdigest()[:8]}-0a1b2c3d.safetensors"
    left.write_text("of a write")
    others = [folder / name / "weights-20261127.safetensors" for name in (".", "step-00000009", "step-00000008")]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("of somebody else")
    for changes in ({"origin": {"run": "b"}}, {"data": "other"}):
        caplog.clear()
        with checkpoints_in(tmp_path, **changes) as saver:
            assert saver.newest() is None
        (warning,) = caplog.messages
        assert "checkpoints there, which belong to another config or other data; they are deleted" in warning
    assert not left.exists()
    assert all(path.exists() for path in others)
    (weights,) = (folder / "step-00000003").glob("weights-*")
    weights.write_bytes(weights.read_bytes()[:-8] + b"damaged!")
    caplog.clear()
    with checkpoints_in(tmp_path) as saver:
        snapshot = saver.newest()
        assert snapshot is not None
        assert snapshot.step == 2
        assert "its content is not what was committed" in caplog.text
        other = make_trainer(synthetic_dataset, "simclr_rank")
        restore(other, snapshot)
        result = next(other.epoch())
        save(saver, other, result)  # takes the place of the damaged one
    assert saved_steps(tmp_path) == [2, 3]
    assert read_checkpoint(str(folder / "step-00000003")).step == 3


@pytest.mark.slow
def test_a_damaged_checkpoint_does_not_outlive_the_next_two(synthetic_dataset: str, tmp_path: Path) -> None:
    trainer = make_trainer(synthetic_dataset, "simclr_rank")
    with checkpoints_in(tmp_path) as saver:
        for result in steps(trainer):
            if trainer.state.step in (1, 5):
                save(saver, trainer, result)
    (tmp_path / "checkpoints" / "step-00000005" / "manifest.json").write_text("{")
    other = make_trainer(synthetic_dataset, "simclr_rank")
    with checkpoints_in(tmp_path) as saver:
        snapshot = saver.newest()
        assert snapshot is not None
        restore(other, snapshot)
        assert other.state.step == 1
        save(saver, other, next(other.epoch()))
    assert saved_steps(tmp_path) == [1, 2]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that blocks writing until it is set."""
    opened, write = threading.Event(), resumption.write_checkpoint

    def gated(*arguments: Any, **named: Any) -> None:
        assert opened.wait(60)
        write(*arguments, **named)

    monkeypatch.setattr(resumption, "write_checkpoint", gated)
    yield opened
    opened.set()


def test_training_goes_on_while_a_checkpoint_is_written(
    synthetic_dataset: str, tmp_path: Path, gate: threading.Event
) -> None:
    trainer = make_trainer(synthetic_dataset, "simclr_rank")
    committed: list[int] = []
    worker = WorkerContext(progressed=lambda: committed.append(trainer.state.step))
    with checkpoints_in(tmp_path, every_s=0.0, worker=worker) as saver:
        trainer.requests = saver.requests
        running = trainer.epoch()
        result = next(running)
        assert result.checkpoint_due
        saver.after(result, trainer, Progress())
        of_step_1 = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        while trainer.state.step < 3:
            result = next(running)
            assert not result.checkpoint_due  # while one is being written
            saver.after(result, trainer, Progress())
        assert saved_steps(tmp_path) == committed == []
        gate.set()
        saver._wait()
        assert saved_steps(tmp_path) == [1]
        assert next(running).checkpoint_due  # at once, for its time had come
    assert committed == [3]
    saved = read_checkpoint(list_checkpoints(f"{tmp_path}/checkpoints")[0])
    for name, value in of_step_1.items():
        assert torch.equal(saved.tensors["weights"][name], value), name


@pytest.mark.slow
def test_a_checkpoint_is_due_by_the_clock_and_then_not_at_once_again(synthetic_dataset: str, tmp_path: Path) -> None:
    trainer = make_trainer(synthetic_dataset, "simclr_rank")
    with checkpoints_in(tmp_path) as saver:
        trainer.requests = saver.requests
        assert not any(r.checkpoint_due for r in run_epochs(trainer, 1))
        saver._due_at = 0.0
        due = []
        for result in trainer.epoch():
            saver.after(result, trainer, Progress())
            due.append(result.checkpoint_due)
        assert due[:2] == [True, False]


@pytest.mark.slow
def test_a_run_asked_to_stop_leaves_a_committed_checkpoint(
    synthetic_dataset: str, tmp_path: Path, gate: threading.Event
) -> None:
    trainer = make_trainer(synthetic_dataset, "simclr_rank")
    threading.Timer(0.2, gate.set).start()
    with checkpoints_in(tmp_path) as saver:
        running = trainer.epoch()
        saver.after(replace(next(running), checkpoint_due=True), trainer, Progress())
        trainer.requests = lambda: (False, True, False)
        with pytest.raises(Stopped, match=r"^after step 2, checkpoint written to \S+; .* resumes from step-00000002$"):
            saver.after(next(running), trainer, Progress())
        assert saved_steps(tmp_path) == [1, 2]


@pytest.mark.slow
def test_a_failure_warns_and_failures_in_a_row_end_the_run(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    trainer = make_trainer(synthetic_dataset, "simclr_rank")
    monkeypatch.setattr(resumption, "FAILURES", 2)
    with checkpoints_in(tmp_path) as saver:
        trainer.requests = lambda: (False, False, saver.requests()[2])
        running = steps(trainer)
        save(saver, trainer, next(running))
        assert f"not written, 1 in a row: {folder}/step-00000001" in caplog.text
        folder.unlink()
        save(saver, trainer, next(running))  # which ends the row
        save(saver, trainer, next(running))
        assert saved_steps(tmp_path) == [2, 3]
        folder.rename(tmp_path / "aside")
        folder.write_text("in the way")
        save(saver, trainer, next(running))
        save(saver, trainer, next(running))
        result = next(running)
        assert result.failed
        with pytest.raises(InputError, match=r"2 checkpoints in a row .* the same command resumes from step-00000003$"):
            saver.after(result, trainer, Progress())
    folder.unlink()
    (tmp_path / "aside").rename(folder)
    with checkpoints_in(tmp_path) as saver:
        assert saver.newest() is not None


def test_a_run_that_an_outage_ends_is_resumed_and_not_recorded_as_failed(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outage(*_: Any, **__: Any) -> None:
        raise UnavailableError("bucket: no answer")

    monkeypatch.setattr(resumption, "write_checkpoint", outage)
    monkeypatch.setattr(resumption, "FAILURES", 1)
    trainer = make_trainer(synthetic_dataset, "simclr_rank")
    with checkpoints_in(tmp_path) as saver:
        trainer.requests = lambda: (False, False, saver.requests()[2])
        running = steps(trainer)
        save(saver, trainer, next(running))
        with pytest.raises(UnavailableError, match=r"1 checkpoints in a row .*bucket: no answer.* the same command"):
            saver.after(next(running), trainer, Progress())


def test_a_defect_in_writing_is_not_taken_for_a_full_disk(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: Any, **__: Any) -> None:
        raise TypeError("a defect of ours")

    monkeypatch.setattr(resumption, "write_checkpoint", defect)
    trainer = make_trainer(synthetic_dataset, "simclr_rank")
    with checkpoints_in(tmp_path) as saver, pytest.raises(TypeError, match="a defect of ours"):
        save(saver, trainer, next(trainer.epoch()))


@pytest.mark.s3
def test_checkpoints_on_s3(synthetic_dataset: str, s3: str) -> None:
    trainer = make_trainer(synthetic_dataset, "simclr_rank")
    url = storage.join(s3, "checkpoints-test")
    with checkpoints_in(url) as saver:
        for result in steps(trainer):
            save(saver, trainer, result, place={"phase": "head"}, tensors={"best": {"w": torch.ones(2)}})
            if trainer.state.step == 3:
                break
    assert [c.rsplit("-", 1)[-1] for c in list_checkpoints(f"{url}/checkpoints")] == ["00000002", "00000003"]
    with checkpoints_in(url) as saver:
        snapshot = saver.newest()
    assert snapshot is not None
    assert (snapshot.step, snapshot.progress) == (3, {"phase": "head"})
    assert torch.equal(snapshot.tensors["best"]["w"], torch.ones(2))
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(snapshot.tensors["weights"][name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("every_s", [20.0, 600.0])
def test_the_first_checkpoint_comes_early(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    now, trainer, due_at = 0.0, make_trainer(synthetic_dataset, "simclr_rank"), []
    monkeypatch.setattr(resumption, "time", SimpleNamespace(monotonic=lambda: now))
    with checkpoints_in(tmp_path, every_s=every_s) as saver:
        trainer.requests = saver.requests
        for result in steps(trainer):
            saver.after(result, trainer, Progress())
            saver._wait()
            due_at += [now] if result.checkpoint_due else []
            now += 10.0
    first = min(60.0, every_s)
    assert due_at[0] == first
    assert due_at[1:] == [time for time in due_at[1:] if (time - first) % every_s == 0]
    assert every_s > 100 or len(due_at) > 1
