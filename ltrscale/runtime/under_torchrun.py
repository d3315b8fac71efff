"""Workers that torchrun started: rank 0 runs the job, the others follow it from training to training.

Every process runs the same command. Only rank 0 reads the config, checks the data and writes the run directory. For
each training it sends the work to the others, which otherwise only wait. When one process fails, all end with its error
instead of their own lost connections. During a training they watch one another: if one hangs, another reports it and
ends itself, and torchrun then ends or restarts all processes.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ltrscale import storage
from ltrscale.errors import ExpectedEnd, InputError, Refused, Stopped, UnavailableError
from ltrscale.progress import Report, log
from ltrscale.runtime.workers import HangWatch, Pulse, Work, WorkerContext, WorkerProgress
from ltrscale.signals import stop_on_signal

_LONG = timedelta(days=7)  # rank 0 may prepare data for hours while the others wait
_PATIENCE_S, _POLL_S = 10.0, 0.05
_FAILURE, _LEFT, _SILENT = "failure", "left", "silent"
_ENDS: dict[str, type[ExpectedEnd]] = {
    "input": InputError,
    "outage": UnavailableError,
    "refused": Refused,
    "stopped": Stopped,
}


class World(NamedTuple):
    """The processes of this run, as one of them sees them."""

    rank: int
    store: Store
    """The store of torchrun's agent, which outlives the processes."""
    control: dist.ProcessGroup
    trainings: Iterator[int]
    """Numbers of the coming trainings."""


_world: World | None = None


def is_running() -> bool:
    """True if torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """The rank that torchrun gave this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if is_running() else 0


def is_restarted() -> bool:
    """True if torchrun has restarted this process after a failure."""
    return is_running() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextmanager
def taking_part() -> Iterator[bool]:
    """Yield True on rank 0 of torchrun's processes, which runs the job; the others take part in its trainings first.

    Raises:
        InputError: a process raised one; every process raises it.
        UnavailableError: likewise.
        Refused: likewise.
        Stopped: a process was asked to stop; every process raises it.
    """
    world = _meet()
    with _ending_together(world):
        if world.rank == 0:
            yield True
            dist.broadcast_object_list([None], group=world.control)
        else:
            # between trainings it waits in a collective, where no Python handler runs: Ctrl-C ends it like SIGTERM
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _follow(world)
            yield False
    dist.destroy_process_group()


def speaks() -> bool:
    """True if this process, the first to fail, reports to the user why all of them end."""
    return _world is None or json.loads(_world.store.get(_FAILURE))["rank"] == _world.rank


def leave() -> None:
    """Wait until rank 0 has written its log, because the agent kills all processes once one has ended."""
    if _world is None:
        return
    if _world.rank == 0:
        _world.store.set(_LEFT, "")
        return
    last = time.monotonic() + _PATIENCE_S  # rank 0 may be stuck
    with suppress(dist.DistError):  # or gone
        while not _world.store.check([_LEFT]) and time.monotonic() < last:
            time.sleep(_POLL_S)


def lead(work: Work, report: Report, hang_s: float) -> None:
    """Share a training with the other processes and take part in it; only rank 0 calls this."""
    assert _world is not None
    watchers = Watchers(_world, hang_s)  # before the others get the work and look at the counts
    dist.broadcast_object_list([(work, hang_s, storage.share_leases())], group=_world.control)
    _train(_world, work, report, watchers)


def _meet() -> World:
    global _world
    own_gpus = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    if own_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shared, number, size = next(rendezvous("env://"))
    start = f"ltrscale/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{size}"
    store = PrefixStore(start, shared)  # the agent may keep its store, with old keys, when it restarts the processes
    backend = "cpu:gloo,cuda:nccl" if own_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=size)
    _world = World(number, store, dist.new_group(backend="gloo", timeout=_LONG), itertools.count())
    return _world


def _follow(world: World) -> None:
    """Take part in each training until rank 0 has no more."""
    while True:
        message: list[tuple[Work, float, tuple[storage.Lease, ...]] | None] = [None]
        dist.broadcast_object_list(message, group=world.control)
        if message[0] is None:
            return
        work, hang_s, leases = message[0]
        storage.join_leases(leases)
        _train(world, work, lambda _: None, Watchers(world, hang_s))


def _train(world: World, work: Work, report: Report, watchers: "Watchers") -> None:
    pulse = Pulse()
    with _ending_together(world), stop_on_signal() as stopping:
        try:
            with pulse.sent(watchers.beat):
                work(pulse.counting(WorkerContext(report=report, stopping=stopping)))
        finally:
            watchers.leave()


class Watchers:
    """Exchanges progress counts through the agent's store during one training, and finds processes that hang.

    A beat makes two requests: one reads the counts of all W processes, because single reads would be W^2 in all.
    """

    def __init__(self, world: World, hang_s: float) -> None:
        self._rank, self._store = world.rank, PrefixStore(f"training-{next(world.trainings)}", world.store)
        ranks = range(dist.get_world_size())
        self._watch, self._beats, self._keys = HangWatch(hang_s), 0, [f"beat-{number}" for number in ranks]
        self._heard = [_SILENT for _ in ranks]
        for number in ranks:
            self._watch.joined(number)
        if world.rank == 0:  # a request for many keys waits until all of them exist
            for key in self._keys:
                self._store.set(key, _SILENT)

    def beat(self, counts: WorkerProgress) -> None:
        """Publish this process's counts and read the others'; kill this process if it must report a hang."""
        self._beats += 1  # makes each entry differ from the previous one: equal entries would look like silence
        self._store.set(f"beat-{self._rank}", json.dumps([self._beats, *counts]))
        entries = [entry.decode() for entry in self._store.multi_get(self._keys)]
        for number, (entry, before) in enumerate(zip(entries, self._heard, strict=True)):
            if entry == before:
                continue
            if entry:
                self._watch.heard(number, WorkerProgress(*json.loads(entry)[1:]))
            else:
                self._watch.left(number)
        self._heard = entries
        if hung := self._watch.hung():
            healthy = set(range(len(self._keys))) - set(hung)
            if self._rank == min(healthy or hung):  # one process reports, and torchrun ends the rest
                for number, symptom in hung.items():
                    log.warning("rank %d hangs: it %s; all processes end", number, symptom)
                os.kill(os.getpid(), signal.SIGKILL)  # an exception would not do: the main thread waits in a collective

    def leave(self) -> None:
        """Inform the other processes that this one is done."""
        with suppress(dist.DistError):
            self._store.set(f"beat-{self._rank}", "")


@contextmanager
def _ending_together(world: World) -> Iterator[None]:
    """Make all processes raise the first failure: the others would report only a lost connection."""
    try:
        yield
    except Exception as error:
        kind = next((name for name, cls in _ENDS.items() if isinstance(error, cls)), "defect")
        status = error.status if isinstance(error, Stopped) else None
        failure = json.dumps({"rank": world.rank, "kind": kind, "message": str(error), "status": status})
        first = json.loads(world.store.compare_set(_FAILURE, "", failure))  # atomic: the first failure stays
        if first["rank"] == world.rank:
            raise
        if first["kind"] == "stopped":
            raise Stopped(first["message"], status=first["status"]) from None
        if first["kind"] == "defect":
            raise RuntimeError(f"rank {first['rank']} failed: {first['message']}") from None
        raise _ENDS[first["kind"]](*first["message"].splitlines()) from None
