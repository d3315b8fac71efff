"""Pretraining whose workers record the groups that they read and fail at given steps, and readers of these records.

Every worker process can import this module: it lies on the path that they inherit from the tests.
"""

import functools
import itertools
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from small_trainers import pretrain
from torch import Tensor

from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError, UnavailableError
from ltrscale.progress import Report
from ltrscale.runtime import launch as launching
from ltrscale.runtime.workers import ONE, Work, WorkerContext, WorkersConfig, rank_and_world
from ltrscale.training import pretrain as pretraining
from ltrscale.training.checkpoint import list_checkpoints
from ltrscale.training.feed import Fed
from ltrscale.training.loop import Trainer
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.reduce import from_rank_0

_COMMIT_WITHIN_S = 60.0
_RESTARTS = 40
_FOR_EVER_S = 3600.0
_KINDS: dict[str, type[Exception]] = {"input": InputError, "defect": ValueError, "storage": UnavailableError}


@dataclass(frozen=True)
class FaultyPretraining:
    """Pretraining with faults that records every step of every worker below `folder`.

    A rank is killed or hangs once, at its first execution of a step (counted from 0); errors come back each time.
    """

    folder: str
    kills: tuple[tuple[int, int], ...] = ()
    """(step, rank) of workers that are killed, after a checkpoint of their current start is committed."""
    raises: tuple[tuple[int, int, str], ...] = ()
    """(step, rank, kind) of an `input` error, a `defect`, or unreachable `storage`."""
    hangs: tuple[tuple[int, int, str], ...] = ()
    """(step, rank, how) of workers that hang: the process is `stopped`, or `asleep`."""
    slow: tuple[int, float] = (0, 0.0)
    """A rank, and the seconds that it sleeps in every step."""
    every_step_s: float = 0.0
    """Seconds that all ranks sleep in every step, to leave time for faults from outside."""

    def run_worker(self, work: functools.partial[None], context: WorkerContext) -> None:
        """The work of one worker, a method of the job."""
        attempt, out = from_rank_0(time.time_ns()), work.func.__self__.out
        with _steps(lambda trainer, given: self._before(trainer, given, attempt, out)):
            work(context)

    @contextmanager
    def installed(self, launch: Callable[..., None] = launching.launch) -> Iterator[None]:
        """Within the block, the workers of `pretrain` record their steps and fail, however they are launched."""

        def launch_watched(work: functools.partial[None], **others: Any) -> None:
            launch(functools.partial(self.run_worker, work), **others)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pretraining, "launch", launch_watched)
            yield

    def _before(self, trainer: Trainer, fed: Fed, attempt: int, out: str) -> None:
        rank, world = rank_and_world()
        step = trainer.state.step
        ids = {c: [] if g is None or g.ids_Q is None else g.ids_Q.tolist() for c, g in fed.micro_batches.items()}
        path = Path(self.folder) / f"{attempt}-{rank}.jsonl"
        with path.open("a") as file:
            node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
            entry = {"step": step, "epoch": trainer.state.epoch, "world": world, "ids": ids, "node": node}
            print(json.dumps(entry), file=file)
        first = json.loads(path.read_text().splitlines()[0])["step"]
        if (step, rank) in self.kills and self._once(f"kill-{step}-{rank}"):
            committed = _await_commit(out, beyond=first) if step > first else max(committed_steps(out), default=0)
            (Path(self.folder) / f"killed-{attempt}.json").write_text(
                json.dumps({"step": step, "committed": committed})
            )
            os.kill(os.getpid(), signal.SIGKILL)
        for at, who, how in self.hangs:
            if (at, who) == (step, rank) and self._once(f"hang-{step}-{rank}"):
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(_FOR_EVER_S)
        for at, who, kind in self.raises:
            if (at, who) == (step, rank):
                raise _KINDS[kind](f"{kind} of rank {rank} in step {step}")
        time.sleep(self.every_step_s + (self.slow[1] if rank == self.slow[0] else 0.0))

    def _once(self, name: str) -> bool:
        try:
            (Path(self.folder) / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@contextmanager
def _steps(before: Callable[[Trainer, Fed], None]) -> Iterator[None]:
    original = Trainer.add_gradients

    def add_gradients(self: Trainer, step: Fed) -> Tensor:
        before(self, step)
        return original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "add_gradients", add_gradients)
        yield


def committed_steps(out: str) -> list[int]:
    """The steps of the committed checkpoints of a run."""
    return [int(url.rsplit("-", 1)[-1]) for url in list_checkpoints(f"{out}/checkpoints")]


def _await_commit(out: str, *, beyond: int) -> int:
    """Wait until a checkpoint of a later step than `beyond` is committed; returns its step."""
    deadline = time.monotonic() + _COMMIT_WITHIN_S
    while time.monotonic() < deadline:
        if (committed := max(committed_steps(out), default=0)) > beyond:
            return committed
        time.sleep(0.005)
    raise AssertionError(f"no checkpoint beyond step {beyond} was committed")


# --- running the pretraining


def small_config(**changes: Any) -> PretrainConfig:
    """A tiny pretraining of 2 epochs with about 11 steps each, which writes checkpoints without a pause."""
    values = {
        "method": {"kind": "simclr_rank"},
        "augment": {"kind": "zeroing", "probability": 0.3},
        "network": {"encoder": {"width": 8, "blocks": 1, "dropout": 0.1}},
        "epochs": 2,
        "stream": {"docs_per_batch": 600, "streams": 4, "window": 2},
        "deterministic": True,
        "checkpoint_minutes": 1e-9,
    }
    return PretrainConfig.model_validate({**values, **changes})


def run_pretraining(
    watched: FaultyPretraining,
    data: str,
    out: str,
    *,
    launch: Callable[..., None] | None = None,
    workers: WorkersConfig = ONE,
    report: Report = lambda _: None,
    config: PretrainConfig | None = None,
) -> None:
    """Pretrain with these faults, launched by the package or by a launcher of the tests."""
    Path(watched.folder).mkdir(parents=True, exist_ok=True)
    with watched.installed(launch or launching.launch):
        pretrain(config or small_config(), Split(data=(data,)), out, origin={}, report=report, workers=workers)


def process_launcher(world: int, restarts: int = _RESTARTS) -> Callable[..., None]:
    """A launcher of `world` processes that restarts all of them, quickly, when one dies."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ltrscale.training.pretrain", "pytest"])

    def launch(work: Work, *, workers: object, report: object) -> None:  # noqa: ARG001
        for attempt in itertools.count():
            meeting = f"{tempfile.gettempdir()}/meeting-{time.time_ns()}"
            jobs = [context.Process(target=_process, args=(rank, world, meeting, work)) for rank in range(world)]
            for job in jobs:
                job.start()
            while all(job.exitcode in (None, 0) for job in jobs) and any(job.exitcode is None for job in jobs):
                time.sleep(0.01)
            failed = any(job.exitcode not in (None, 0) for job in jobs)
            for job in jobs:
                job.kill()
                job.join()
            if not failed:
                return
            assert attempt < restarts, "the workers die again and again"

    return launch


def _process(rank: int, world: int, meeting: str, work: Work) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as workers of Ray do, for equal sums
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    work(WorkerContext())
    dist.destroy_process_group()


# --- reading the records


@dataclass(frozen=True)
class Attempt:
    """The steps that one start of the workers executed: query groups by step and canonical stream, over all ranks."""

    number: int
    world: int
    steps: dict[int, dict[int, list[int]]]
    epochs: dict[int, int]
    steps_of_ranks: dict[int, list[int]]
    nodes: dict[int, str]


def attempts(folder: str) -> list[Attempt]:
    """All starts of a run, in order."""
    found: dict[int, Attempt] = {}
    for path in sorted(Path(folder).glob("*-*.jsonl")):
        number, rank = map(int, path.stem.split("-"))
        for line in path.read_text().rpartition("\n")[0].splitlines():  # the last line may be incomplete
            entry = json.loads(line)
            attempt = found.setdefault(number, Attempt(number, entry["world"], {}, {}, {}, {}))
            attempt.steps.setdefault(entry["step"], {}).update({int(c): ids for c, ids in entry["ids"].items()})
            attempt.epochs[entry["step"]] = entry["epoch"]
            attempt.steps_of_ranks.setdefault(rank, []).append(entry["step"])
            attempt.nodes[rank] = entry["node"]
    return [found[number] for number in sorted(found)]


def in_background(what: Callable[[], None]) -> threading.Thread:
    """Call a function in a thread, to interfere with a run from outside."""
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    return thread


def await_step(folder: str, step: int) -> Attempt:
    """Wait until a step begins; returns the start of the workers that executes it."""
    while True:
        for attempt in attempts(folder):
            if step in attempt.steps:
                return attempt
        time.sleep(0.05)


def last_executions(folder: str) -> dict[tuple[int, int], dict[int, list[int]]]:
    """The groups that the weights come from: by (epoch, step), those of each stream in the last execution."""
    last: dict[tuple[int, int], dict[int, list[int]]] = {}
    for attempt in attempts(folder):
        for step, of_streams in attempt.steps.items():
            last[attempt.epochs[step], step] = {c: ids for c, ids in sorted(of_streams.items()) if ids}
    return {place: of_streams for place, of_streams in sorted(last.items()) if of_streams}


def check_exactly_once(folder: str, *, epochs: int = 2, groups: int = 480) -> None:
    """Check that each epoch has read each query group once."""
    for epoch in range(epochs):
        read = Counter(
            i for (e, _), ids in last_executions(folder).items() if e == epoch for c in ids.values() for i in c
        )
        assert len(read) == groups
        assert set(read.values()) == {1}


def check_restarts(folder: str, kills: int) -> None:
    """Check the number of kills, and that a start from the newest checkpoint followed each of them."""
    found = attempts(folder)
    killed = sorted(Path(folder).glob("killed-*.json"))
    assert len(killed) == kills
    for path in killed:
        number, killed_at = int(path.stem.split("-")[1]), json.loads(path.read_text())
        after = next(a for a in found if a.number > number)
        assert killed_at["committed"] <= min(after.steps) <= killed_at["step"]


def bundle_weights(out: str) -> bytes:
    """The content of a bundle's weights file."""
    return (Path(out) / "weights.safetensors").read_bytes()
