"""Messages between the workers of Ray Train and the process that launched them, through one small actor.

The workers post metrics and log lines for the launching process, count committed checkpoints, and ask whether to stop.
The launching process owns the mailbox, which disappears with it. A worker that finds the mailbox gone ends too.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ltrscale.progress import log
from ltrscale.runtime.workers import WorkerProgress

_SETTLE_S = 1.0  # workers that arrive at about the same time join together
_UNANSWERED = 64  # bounds the memory of posts under way when the launching process is slow


class ReportedMetrics(NamedTuple):
    """Metrics that rank 0 or the mailbox reports."""

    values: dict[str, object]


class LogLine(NamedTuple):
    """A line of the log."""

    level: int
    text: str


class Running(NamedTuple):
    """All workers run the training function; 0 once they have failed or stopped, and will restart."""

    workers: int


class WorkerJoined(NamedTuple):
    """A worker runs the training function."""

    rank: int
    actor: Any
    """The worker's Ray actor, to kill it if it hangs."""


class Left(NamedTuple):
    """A worker has left the training function."""

    rank: int
    actor: Any
    """The actor that joined: another may have its rank by now."""


class Beat(NamedTuple):
    """Progress of a worker."""

    rank: int
    counts: WorkerProgress


Post = ReportedMetrics | LogLine | Running | WorkerJoined | Left | Beat


class Standing(NamedTuple):
    """Counts of a run, and whether it must stop."""

    starts: int
    """Number of starts of the workers."""
    commits: int
    """Checkpoints committed since the first start."""
    stop_asked: bool
    resizes: int
    """How often the world has been resized."""
    changed: bool
    """True if joiners have come or gone since the last resize."""


class Slot(NamedTuple):
    """A worker's place in the world after some number of resizes."""

    resizes: int
    rank: int
    world: int
    store: tuple[str, int]
    """Address and port of the store where its workers meet."""


class Mailbox:
    """The actor's state."""

    def __init__(self) -> None:
        self._posts: list[Post] = []
        self._beats: dict[int, Beat] = {}
        """The newest of each rank only, so memory does not grow while nobody takes them."""
        self._starts = self._commits = 0
        self._stop_asked = False
        self._joiners: list[str] = []
        """Names of the joiners that have come and not gone, in the order of coming."""
        self._placed: list[str] = []
        """Those of them that the last resize gave slots."""
        self._changed_at = 0.0
        """When a joiner last came or went, by the monotonic clock."""
        self._resizes = 0
        self._slots: dict[int | str, Slot] = {}
        """Dealt by the last resize, by rank of Ray Train or name of a joiner."""

    def post(self, post: Post) -> None:
        """Leave a message for the launching process; a beat replaces the previous beat of its rank."""
        match post:
            case Beat(rank):
                self._beats[rank] = post
                return
            case WorkerJoined(rank):
                self._beats.pop(rank, None)  # from the previous worker of this rank
            case Running(workers):
                self._starts += workers > 0
                self._joiners, self._placed = [], []  # joiners end with the others
        self._posts.append(post)

    def take(self) -> list[Post]:
        """All messages since the last call, in order, then the newest beats."""
        posts = [*self._posts, *self._beats.values()]
        self._posts, self._beats = [], {}
        return posts

    def count_commit(self) -> None:
        """Count a committed checkpoint."""
        self._commits += 1
        self._posts.append(ReportedMetrics({"checkpoints": self._commits}))

    def ask_to_stop(self) -> None:
        """Ask the workers to commit a checkpoint and end."""
        self._stop_asked = True

    def standing(self) -> Standing:
        """The counts of the run, and whether it must stop."""
        changed = self._joiners != self._placed and time.monotonic() - self._changed_at > _SETTLE_S
        return Standing(self._starts, self._commits, self._stop_asked, self._resizes, changed)

    def come(self, joiner: str) -> int:
        """Ask for a slot at the next resize; returns how many there have been."""
        self._joiners.append(joiner)
        self._changed_at = time.monotonic()
        return self._resizes

    def go(self, joiner: str) -> None:
        """Ask to be left out at the next resize."""
        if joiner in self._joiners:
            self._joiners.remove(joiner)
            self._changed_at = time.monotonic()

    def resize(self, of_ray_train: int, store: tuple[str, int]) -> None:
        """Deal slots at rank 0's store: to Ray Train's workers, whose ranks stay, then to the joiners."""
        self._resizes += 1
        self._placed = list(self._joiners)
        names = [*range(of_ray_train), *self._placed]
        self._slots = {name: Slot(self._resizes, rank, len(names), store) for rank, name in enumerate(names)}
        self._posts.append(ReportedMetrics({"running_workers": len(names)}))

    def slot(self, name: int | str, after: int) -> Slot | None:
        """The slot of a Ray Train rank or a joiner after more than `after` resizes; None if it has none yet."""
        slot = self._slots.get(name)
        return slot if slot is not None and slot.resizes > after else None


def open_mailbox() -> Any:
    """Open a mailbox on this process's node of the cluster, so that it survives the loss of other nodes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=strategy).remote()


class Sender:
    """Posts without waiting for the mailbox while only a few posts are unanswered.

    Raises:
        ray.exceptions.RayActorError: the mailbox is gone, and with it the launching process.
    """

    def __init__(self, mailbox: Any) -> None:
        self.mailbox = mailbox
        self._sent: deque[Any] = deque()

    def __call__(self, post: Post) -> None:
        """Post a message."""
        self._await_all_but(_UNANSWERED)
        self._sent.append(self.mailbox.post.remote(post))

    def flush(self) -> None:
        """Wait until all posts have arrived."""
        self._await_all_but(0)

    def _await_all_but(self, count: int) -> None:
        import ray

        while len(self._sent) > count:
            ray.get(self._sent.popleft())


@contextmanager
def forwarded_logs(sender: Sender, rank: int) -> Iterator[None]:
    """Send this process's log to the mailbox while the block runs: all of it from rank 0, warnings from the others."""
    handler = logging.Handler()
    handler.emit = lambda record: sender(LogLine(record.levelno, handler.format(record)))  # type: ignore[method-assign]
    handler.setFormatter(logging.Formatter(f"rank {rank}: %(message)s" if rank else "%(message)s"))
    previous = log.level, log.propagate
    log.setLevel(logging.WARNING if rank else logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(previous[0])
        log.propagate = previous[1]
