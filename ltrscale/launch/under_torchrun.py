"""Workers that torchrun started: rank 0 runs the job, the others follow it from training to training.

Every process runs the same command. Rank 0 alone reads the config, checks the data and writes the run directory; when
it comes to a training it hands its work to the others, which wait for that and do nothing else. When one
process fails, all end with what it has said, and not each with the loss of its neighbours. During a training they
watch one another: where one hangs, another says so and ends, whereupon torchrun ends all, or starts them again.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ltrscale.errors import InputError, Stopped
from ltrscale.launch.hangs import Counts, Pulse, Watch
from ltrscale.launch.workers import Context, Work, stop_on_sigterm
from ltrscale.progress import Report, log

_LONG = timedelta(days=7)  # followers wait for rank 0, which may prepare data for hours
_PATIENCE_S, _POLL_S = 10.0, 0.05
_FAILURE, _LEFT = "failure", "left"
_trainings = itertools.count()
_KINDS: dict[str, type[Exception]] = {"input": InputError, "stopped": Stopped, "defect": RuntimeError}


class _Group(NamedTuple):
    """The processes of this run."""

    rank: int
    store: Store
    """The agent's, which outlives each of the processes."""
    control: dist.ProcessGroup


_group: _Group | None = None


def is_running() -> bool:
    """Whether torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """The rank that torchrun gave this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if is_running() else 0


def is_restarted() -> bool:
    """Whether torchrun has started this process in place of one that failed."""
    return is_running() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def take_part(job: Callable[[], object]) -> None:
    """Run a job in the processes of torchrun: here if this is rank 0, else take part in its trainings.

    Raises:
        InputError: a process raised one; on all of them, and so with a request to stop.
    """
    group = _join()
    with _ending_together(group):
        if group.rank == 0:
            job()
            dist.broadcast_object_list([None], group=group.control)
        else:
            _follow(group)
    dist.destroy_process_group()


def speaks() -> bool:
    """Whether this process is the one that tells the user why all of them end."""
    return _group is None or json.loads(_group.store.get(_FAILURE))["rank"] == _group.rank


def leave() -> None:
    """Wait for rank 0 to have written its log, for the agent ends all processes once one has ended."""
    if _group is None:
        return
    if _group.rank == 0:
        _group.store.set(_LEFT, "")
        return
    last = time.monotonic() + _PATIENCE_S  # it may be stuck
    with suppress(dist.DistError):  # or gone
        while not _group.store.check([_LEFT]) and time.monotonic() < last:
            time.sleep(_POLL_S)


def lead(work: Work, report: Report, hang_s: float) -> None:
    """What rank 0 does with a training: share it, and take part."""
    assert _group is not None
    dist.broadcast_object_list([(work, hang_s)], group=_group.control)
    _train(_group, work, report, hang_s)


def _join() -> _Group:
    """Meet the other processes."""
    global _group
    own_gpus = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    if own_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shared, number, world = next(rendezvous("env://"))
    start = f"ltrscale/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{world}"
    store = PrefixStore(start, shared)  # the agent's may be the same after it has started all processes anew
    backend = "cpu:gloo,cuda:nccl" if own_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=world)
    _group = _Group(number, store, dist.new_group(backend="gloo", timeout=_LONG))
    return _group


def _follow(group: _Group) -> None:
    """Take part in each training until rank 0 has no more."""
    while True:
        given: list[tuple[Work, float] | None] = [None]
        dist.broadcast_object_list(given, group=group.control)
        if given[0] is None:
            return
        work, hang_s = given[0]
        _train(group, work, lambda _: None, hang_s)


def _train(group: _Group, work: Work, report: Report, hang_s: float) -> None:
    pulse, watchers = Pulse(), _Watchers(group, hang_s)
    with stop_on_sigterm() as stopping, _ending_together(group):
        try:
            with pulse.sent(watchers.beat):
                work(pulse.counting(Context(report=report, stopping=stopping)))
        finally:
            watchers.leave()


class _Watchers:
    """What a process tells the others of one training, and hears of them, by the agent's store."""

    def __init__(self, group: _Group, hang_s: float) -> None:
        self._rank, self._store = group.rank, PrefixStore(f"training-{next(_trainings)}", group.store)
        self._watch, self._beats, self._heard = Watch(hang_s), 0, dict[str, str]()
        self._ranks = {f"beat-{number}": number for number in range(dist.get_world_size())}
        for number in self._ranks.values():
            self._watch.joined(number)

    def beat(self, counts: Counts) -> None:
        """Tell the others how far this process has come; end it if others hang and it is the first to see that."""
        self._beats += 1
        self._store.set(f"beat-{self._rank}", json.dumps([self._beats, *counts]))
        for key, number in self._ranks.items():
            if not self._store.check([key]) or (said := self._store.get(key).decode()) == self._heard.get(key):
                continue
            self._heard[key] = said
            if said:
                self._watch.heard(number, Counts(*json.loads(said)[1:]))
            else:
                self._watch.left(number)
        if hung := self._watch.hung():
            others = set(self._ranks.values()) - set(hung)
            if self._rank == min(others or hung):
                for number, how in hung.items():
                    log.warning("rank %d hangs: it %s; all processes end", number, how)
                os.kill(os.getpid(), signal.SIGKILL)  # its own function waits in a sum over all workers

    def leave(self) -> None:
        """Tell the others that this process is done."""
        with suppress(dist.DistError):
            self._store.set(f"beat-{self._rank}", "")


@contextmanager
def _ending_together(group: _Group) -> Iterator[None]:
    """Let the first failure of any process be the one that all of them raise.

    The others lose their connection to the process that failed, and would tell of nothing but that.
    """
    try:
        yield
    except Exception as error:
        kind = next(name for name, cls in _KINDS.items() if isinstance(error, cls) or name == "defect")
        said = json.dumps({"rank": group.rank, "kind": kind, "message": str(error)})
        first = json.loads(group.store.compare_set(_FAILURE, "", said))
        if first["rank"] == group.rank:
            raise
        where = f"rank {first['rank']} failed: " if first["kind"] == "defect" else ""
        raise _KINDS[first["kind"]](where + first["message"]) from None
