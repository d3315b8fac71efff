"""Elastic training: Ray Train's workers, plus joiners that join and leave between two steps without a restart.

Ray Train starts as many workers as the cluster can hold and watches them; to change their number it ends them all and
starts again. A worker that comes later is a joiner, a separate actor that waits for capacity. When a joiner comes, or
its node is about to be removed, the world is resized: all workers leave their work after the same step, meet those that
stay or come in their existing processes, and start the work again from the state that rank 0 holds in memory. No step
is lost or repeated, and only data is read from storage.

In order: a joiner asks the mailbox for a slot; rank 0 sees this and asks the others, as for a stop, in the sum that
each step makes anyway; all raise `Resized`; rank 0 opens a store and has the mailbox deal the slots; all meet there.
After any failure the joiners end, and return once Ray Train has started its own workers.
"""

import functools
import gc
import socket
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ltrscale import storage
from ltrscale.errors import ExpectedEnd, InputError, Stopped
from ltrscale.processor import alongside
from ltrscale.progress import log
from ltrscale.runtime import ray_internals
from ltrscale.runtime.mailbox import Beat, Left, ReportedMetrics, Sender, Slot, WorkerJoined, forwarded_logs
from ltrscale.runtime.on_ray import read_with_ray
from ltrscale.runtime.workers import Pulse, Resized, Work, WorkerContext, WorkersConfig

WATCH_S = 0.5
"""Between two looks at the mailbox for requests."""
_LOOK_S = 0.1
"""Between two looks for a slot."""
_MEET_S = 60.0
"""How long the workers of a resized world wait for each other."""
_AGAIN_S = 10.0
"""Until a joiner that failed is replaced."""


@dataclass(frozen=True)
class Assignment:
    """What each worker receives."""

    work: Work
    mailbox: Any
    workers: WorkersConfig
    timeout_s: int
    """Timeout of a collective."""
    leases: tuple[storage.Lease, ...] = field(default_factory=storage.share_leases)
    """Those of the launching process, below which a worker may commit."""

    @property
    def backend(self) -> str:
        """The backends for `init_process_group`: NCCL refuses workers that share a GPU."""
        return "cpu:gloo,cuda:nccl" if self.workers.gpus >= 1 else "gloo"


class Requests:
    """Requests to a worker, checked between two steps; a thread polls the mailbox and sets them."""

    def __init__(self, resizes: int = 0) -> None:
        self.resizes = resizes
        """How often the world had been resized when it got the worker's slot."""
        self.stop = threading.Event()
        self.leave = threading.Event()
        """For a joiner: no later world has a slot for it."""
        self._outgrown = -1

    def resize(self, resizes: int) -> None:
        """Ask for the resize after this many, unless the worker has already been through it."""
        self._outgrown = resizes

    def resizing(self) -> bool:
        """True if a resize is requested, and no stop."""
        return self._outgrown == self.resizes and not self.stop.is_set()

    def stopping(self) -> bool:
        """True if the worker must leave its work after this step."""
        return self.stop.is_set() or self.resizing()


def work_through_resizes(task: Assignment, name: int | str, slot: Slot, requests: Requests) -> None:
    """Do the work in one world after another, until it is done or this worker leaves.

    `name` is the worker's at the mailbox: its rank under Ray Train, or a joiner's name; `slot` its place in the first
    of these worlds, which this process has joined.
    """
    carried, sender, of_ray_train = None, Sender(task.mailbox), slot.world  # only rank 0 uses it: of no joiner yet
    while True:
        try:
            _work(task, slot.rank, sender, requests, carried)
            return
        except Resized as resized:
            carried = resized.state if slot.rank == 0 else None
        gc.collect()  # the previous trainer, which its generators may keep alive in a reference cycle
        if slot.rank == 0:
            ray.get(task.mailbox.resize.remote(of_ray_train, serve()))
        next_slot = await_slot(task, name, requests)
        if next_slot is None:
            return
        meet(task, next_slot)
        requests.resizes, slot = next_slot.resizes, next_slot


def _work(task: Assignment, rank: int, sender: Sender, requests: Requests, carried: object) -> None:
    storage.join_leases(task.leases)
    this = ray.get_runtime_context().current_actor
    sender(WorkerJoined(rank, this))
    pulse, read_on = Pulse(), task.workers.read_on
    context = WorkerContext(
        reader=functools.partial(read_with_ray, read_on=read_on) if read_on else read_with_ray,
        report=(lambda record: sender(ReportedMetrics(dict(record)))) if rank == 0 else lambda _: None,
        stopping=requests.stopping,
        progressed=lambda: sender.mailbox.count_commit.remote(),
        resizing=requests.resizing,
        carried=carried,
    )
    with (
        forwarded_logs(sender, rank),
        # not through the sender, which may wait: a late beat looks like a hang
        pulse.sent(lambda counts: sender.mailbox.post.remote(Beat(rank, counts))),
    ):
        try:
            task.work(pulse.counting(context))
        except (ExpectedEnd, Resized):
            raise
        except Exception as error:
            error.add_note(f"raised by rank {rank}:\n{traceback.format_exc()}")  # pickling drops the traceback
            raise
        finally:
            sender(Left(rank, this))
            sender.flush()


def await_slot(task: Assignment, name: int | str, requests: Requests) -> Slot | None:
    """Wait for this worker's slot in a later world; None for a joiner that has given up its slot."""
    while True:
        leaves = requests.leave.is_set()  # read before asking: a slot dealt before it was given up is still taken
        slot = ray.get(task.mailbox.slot.remote(name, requests.resizes))
        if slot is not None or leaves:
            return slot and Slot(*slot)
        time.sleep(_LOOK_S)


def give_up(task: Assignment, name: str, requests: Requests) -> None:
    """Give up a joiner's slot in later worlds."""
    ray.get(task.mailbox.go.remote(name))
    requests.leave.set()  # only now: the others would wait for a joiner that left with a slot


def meet(task: Assignment, slot: Slot) -> None:
    """Leave this process's world, if it is in one, and meet the other workers of the slot's.

    Raises:
        torch.distributed.DistStoreError: not all of its workers arrived within a minute.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    host, port = slot.store
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_MEET_S))
    # gloo itself would wait half an hour for a worker that died on its way here
    store.set(f"here-{slot.rank}", "")
    store.wait([f"here-{rank}" for rank in range(slot.world)], timedelta(seconds=_MEET_S))
    dist.init_process_group(
        task.backend, store=store, rank=slot.rank, world_size=slot.world, timeout=timedelta(seconds=task.timeout_s)
    )
    del _stores[:-1]


_stores: list[TCPStore] = []
"""Keeps the stores of this process alive: torch holds none before it has a process group."""


def serve() -> tuple[str, int]:
    """Open a store that listens only on this node's address; returns its address and port.

    A later request of this process to torch for a store at that port gets this one.
    """
    host = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = int(server.getsockname()[1])
        _stores.append(
            TCPStore(
                host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=server.detach()
            )
        )
    return host, port


class _Joiner:
    def run(self, task: Assignment, name: str) -> bool:
        """Join the world, work and leave; returns True if all of the work is done."""
        requests = Requests(ray.get(task.mailbox.come.remote(name)))
        node = ray.get_runtime_context().get_node_id()

        def watch(over: threading.Event) -> None:
            while not over.wait(WATCH_S):
                if ray_internals.is_draining(node):
                    give_up(task, name, requests)
                    return

        with alongside(watch, until=(RayError,), waits=False):  # an error of Ray: the cluster or the launcher is gone
            if (slot := await_slot(task, name, requests)) is not None:
                meet(task, slot)
                requests.resizes = slot.resizes
                work_through_resizes(task, name, slot, requests)
        return not requests.leave.is_set()


class Joiners:
    """The joiners of a run, kept by the launching process.

    All are requested as soon as Ray Train's own workers run, and stay pending until the cluster has capacity; an
    autoscaler sees them as demand. With Ray Train's own there are at most `most` workers; `options` are Ray's for the
    joiners' actors.
    """

    def __init__(self, task: Assignment, options: dict[str, Any], most: int) -> None:
        self._task, self._options, self._most = task, options, most
        self._vacant_from: list[float] = []
        """For each joiner that there may be, by number: the earliest time to start it, or to replace it."""
        self._running: dict[Any, tuple[int, str, Any]] = {}
        """By the result of its `run`: the joiner's number, its name at the mailbox, its actor."""

    def invite(self, *, beside: int) -> None:
        """Request joiners to add to this many workers of Ray Train, now that there is a world to join."""
        self._vacant_from = [0.0] * max(0, self._most - beside)

    def dismiss(self) -> None:
        """End all joiners after the workers failed: Ray Train's own workers may need their resources."""
        self._vacant_from = []
        for _, _, actor in self._running.values():
            ray.kill(actor)
        self._running.clear()

    def tend(self) -> None:
        """Replace joiners that have left or died.

        Raises:
            InputError: a joiner raised it.
        """
        if self._running:
            done, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
            for result in done:
                self._ended(result)
        running = {number for number, _, _ in self._running.values()}
        for number, vacant_from in enumerate(self._vacant_from):
            if number not in running and time.monotonic() >= vacant_from:
                self._start(number)

    def _start(self, number: int) -> None:
        name = uuid.uuid4().hex
        actor = ray.remote(_Joiner).options(**self._options).remote()
        self._running[actor.run.remote(self._task, name)] = number, name, actor

    def _ended(self, result: Any) -> None:
        number, name, _ = self._running.pop(result)
        try:
            self._vacant_from[number] = float("inf") if ray.get(result) else 0.0
            return
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, InputError):
                raise cause from None
            ended = cause
        except RayError as error:
            ended = error
        # so that an immediate failure does not repeat in a tight loop
        self._vacant_from[number] = time.monotonic() + _AGAIN_S
        ray.get(self._task.mailbox.go.remote(name))
        if not isinstance(ended, Stopped):
            log.warning(
                "a worker that had joined ended: %s: %s", type(ended).__name__, " ".join(str(ended).split())[:200]
            )
