"""Reading ahead: a thread reads, decodes, counts and copies the next steps to the device during the current step."""

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import NamedTuple

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.data.stream.batches import MicroBatches, Position
from ltrscale.training.account import Account, account_of

_POLL_S = 0.1  # how soon the thread notices that the consumer has stopped


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _End:
    """Marks the end of the steps."""


class Fed(NamedTuple):
    """A step whose micro-batches are on the device; see `MicroBatches`."""

    micro_batches: dict[int, QueryGroups | None]
    positions: dict[int, Position]
    account: Account
    """Counts and checksum of all micro-batches, taken on the CPU: a GPU would have to send the ids back."""

    def in_order(self) -> Iterator[tuple[int, QueryGroups]]:
        """The streams that have a micro-batch, with it; in order, so that sums have the same bits each time."""
        for stream, groups in sorted(self.micro_batches.items()):
            if groups is not None:
                yield stream, groups


def read_ahead(steps: Iterator[MicroBatches], *, depth: int, device: torch.device) -> Generator[Fed]:
    """Yield the steps with their micro-batches on the device; a thread stays up to `depth` steps ahead.

    On a GPU the thread copies from pinned memory on a separate CUDA stream, so that neither reading nor copying waits
    for the computation. An exception of the thread is raised here, after the steps that precede it. Closing the
    generator ends the thread.

    Args:
        steps: of a `GroupStream`; a generator is closed at the end.
        depth: steps to read ahead; 0 reads each step on request, without a thread.
        device: destination of the micro-batches.
    """
    move = _Mover(device)
    if depth == 0:
        yield from map(move, steps)
        return
    ready: Queue[Fed | _Failed | _End] = Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Fed | _Failed | _End) -> None:
        while not stopped.is_set():  # a plain put on a full queue would block for ever once the consumer has left
            try:
                ready.put(item, timeout=_POLL_S)
                break
            except Full:
                continue

    def run() -> None:
        try:
            for step in steps:
                put(move(step))
                if stopped.is_set():
                    break
            put(_End())
        except BaseException as error:  # handed to the consumer
            put(_Failed(error))
        finally:
            if isinstance(steps, Generator):
                steps.close()

    thread = threading.Thread(target=run, name="read-ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            if isinstance(item, _Failed):
                raise item.error
            move.take(item)
            yield item
    finally:
        stopped.set()
        _drain(ready)  # frees the batches, and makes room for a put that is waiting
        thread.join()


def _drain(ready: Queue[Fed | _Failed | _End]) -> None:
    while True:
        try:
            ready.get_nowait()
        except Empty:
            return


class _Mover:
    """Moves the micro-batches of a step to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, step: MicroBatches) -> Fed:
        """The step with its micro-batches on the device; all copies are complete."""
        account = account_of(filter(None, step.micro_batches.values()))
        if self.side is None:
            moved = {c: g and g.to(self.device) for c, g in step.micro_batches.items()}
            return Fed(moved, step.positions, account)
        with torch.cuda.stream(self.side):
            moved = {c: g and self._to_gpu(g) for c, g in step.micro_batches.items()}
        self.side.synchronize()  # blocks this thread only; the consumer goes on computing
        return Fed(moved, step.positions, account)

    def _to_gpu(self, groups: QueryGroups) -> QueryGroups:
        return groups.map(Tensor.pin_memory).to(self.device, non_blocking=True)

    def take(self, step: Fed) -> None:
        """Register the batch's memory with the consumer's CUDA stream.

        It was allocated on the copying stream: without this, the allocator may reuse it while the consumer computes.
        """
        if self.side is None:
            return
        current = torch.cuda.current_stream(self.device)
        for groups in filter(None, step.micro_batches.values()):
            for values in groups.tensors():
                values.record_stream(current)
