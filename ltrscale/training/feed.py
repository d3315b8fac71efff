"""Reading ahead: a thread reads, decodes, counts and copies the next steps to the device during the current step.

The account of an epoch counts groups and documents, and has a checksum of the groups. Different collections of groups
with equal counts share a checksum with probability of about 2^-32. The order does not matter, and checksums of parts
add up. So one number shows that no group was missed or read twice, over any number of workers and restarts.

Shapes: Q groups.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from queue import Empty, Full, Queue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import MicroBatches
from ltrscale.data.stream.cursor import Position
from ltrscale.data.stream.decoder import Decoder, group_ids
from ltrscale.data.stream.readers import RowGroupReader
from ltrscale.draws import splitmix64
from ltrscale.layout import Frame, Request, layout
from ltrscale.runtime.workers import rank_and_world
from ltrscale.training.reduce import sum_over_workers


class Account(NamedTuple):
    """Counts and checksum of the groups that were read."""

    groups: int = 0
    documents: int = 0
    checksum: int = 0

    def plus(self, groups: float, documents: float, checksum: float) -> "Account":
        """The account plus these counts and this checksum."""
        return Account(self.groups + int(groups), self.documents + int(documents), self.checksum + int(checksum))

    def times(self, passes: int) -> "Account":
        """The account of several passes over the same groups."""
        return Account(*(passes * count for count in self))

    def agrees_with(self, expected: "Account") -> bool:
        """True if it equals the expected account; documents are compared only if their expected count is known."""
        documents = self.documents if expected.documents else 0
        return self._replace(documents=documents) == expected

    def gaps(self, expected: "Account") -> dict[str, int]:
        """Minimum numbers of missed and repeated groups; a wrong checksum alone counts as one of each."""
        least = int(self.groups == expected.groups and not self.agrees_with(expected))
        return {
            "missed": max(least, expected.groups - self.groups),
            "repeated": max(least, self.groups - expected.groups),
        }


def checksum(ids_Q: NDArray[np.int64]) -> int:
    """Sum of a 32-bit hash of every id; exact in float64 (below 2^53) for 2 million groups."""
    hashes_Q = splitmix64(np.zeros(len(ids_Q), np.uint64), ids_Q.astype(np.uint64))
    return int((hashes_Q >> np.uint64(32)).sum())


def listed(selection: Selection, reader: RowGroupReader) -> Account:
    """The expected account of an epoch, from the ids in the files; the workers share the reading.

    Documents are 0 (unknown) if only some groups of a row group are served.

    Raises:
        InputError: a file is missing, damaged, or does not hold what the manifest lists.
    """
    rank, world = rank_and_world()
    sums = torch.zeros(2, dtype=torch.int64)
    first, end = (len(selection.row_groups) * r // world for r in (rank, rank + 1))
    # consecutive row groups, so that few workers open the same file
    own_row_groups, decoder = selection.row_groups[first:end], Decoder(selection, documents=False)
    for row_group, table in zip(own_row_groups, reader(own_row_groups, decoder.columns), strict=True):
        ids_Q = group_ids([row_group], [table])[decoder.served_rows([row_group], [table])]
        sums += torch.tensor([len(ids_Q), checksum(ids_Q)])
    groups, total = sum_over_workers(sums).tolist()
    # the manifest only has document counts of whole row groups
    whole = (selection.served_groups_R == selection.row_groups.groups_R).all()
    return Account(groups, selection.n_documents if whole else 0, total)


_POLL_S = 0.1  # how soon the thread notices that the consumer has stopped


class Fed(NamedTuple):
    """A step whose micro-batches are on the device; see `MicroBatches`."""

    micro_batches: dict[int, QueryGroups | None]
    positions: dict[int, Position]
    account: Account
    """Counts and checksum of all micro-batches, computed on the CPU because a GPU would have to send the ids back."""
    rows: Mapping[int, Tensor] = {}
    """The rows of host tables that each stream's micro-batch can use, on the CPU for the same reason."""

    def in_order(self) -> Iterator[tuple[int, QueryGroups]]:
        """Streams and their micro-batches, in a fixed order so that sums are reproducible to the bit."""
        for stream, groups in sorted(self.micro_batches.items()):
            if groups is not None:
                yield stream, groups


RowsOf = Callable[[QueryGroups], Tensor | None]
"""Finds the rows of host tables that groups on the CPU can use."""


def read_ahead(
    steps: Iterator[MicroBatches],
    *,
    depth: int,
    device: torch.device,
    rows_of: RowsOf | None = None,
    frame: Frame | None = None,
) -> Generator[Fed]:
    """Yield the steps with their micro-batches on the device; a thread stays up to `depth` steps ahead.

    On a GPU the thread copies from pinned memory on a separate CUDA stream, so that neither reading nor copying waits
    for the computation. An exception of the thread is raised here, after the steps before it. Closing the generator
    ends the thread.

    A depth of 0 reads each step on request, without a thread. Micro-batches that fit a frame are padded to it.
    """
    move = _Mover(device, rows_of, frame)
    if depth == 0:
        for step in map(move, steps):
            move.take(step)
            yield step
            move.learn(step)
        return
    ready: Queue[Fed | BaseException | None] = Queue(maxsize=depth)  # None: the end of the steps
    stopped = threading.Event()

    def put(item: Fed | BaseException | None) -> None:
        while not stopped.is_set():  # a plain put would block forever on a full queue once the consumer is gone
            with suppress(Full):
                ready.put(item, timeout=_POLL_S)
                break

    def run() -> None:
        try:
            for step in steps:
                put(move(step))
                if stopped.is_set():
                    break
            put(None)
        except BaseException as error:  # handed to the consumer
            put(error)
        finally:
            if isinstance(steps, Generator):
                steps.close()

    thread = threading.Thread(target=run, name="read-ahead", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            move.take(item)
            yield item
            move.learn(item)
    finally:
        stopped.set()
        with suppress(Empty):  # frees the batches, and unblocks a waiting put
            while True:
                ready.get_nowait()
        thread.join()


class _Mover:
    """Moves micro-batches to a device and precomputes the layout requests of earlier steps."""

    def __init__(self, device: torch.device, rows_of: RowsOf | None, frame: Frame | None) -> None:
        self.device, self.rows_of, self.frame = device, rows_of, frame
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.asked: list[dict[Request, Any]] = []
        """Layout requests so far, for each offsets tensor of a micro-batch."""

    def __call__(self, step: MicroBatches) -> Fed:
        """The step on the device, with all copies complete."""
        account = Account()
        for groups in filter(None, step.micro_batches.values()):
            of_ids = 0 if groups.ids_Q is None else checksum(groups.ids_Q.numpy())
            account = account.plus(groups.n_groups, groups.n_documents, of_ids)
        rows, on_cpu = self._rows(step), step.micro_batches
        if self.frame is not None:
            on_cpu = {c: g and (g.padded(self.frame) or g) for c, g in on_cpu.items()}
        if self.side is None:
            return Fed({c: g and self._moved(g) for c, g in on_cpu.items()}, step.positions, account, rows)
        with torch.cuda.stream(self.side):
            pinned = {c: g and g.pinned() for c, g in on_cpu.items()}
            moved = {c: g and self._moved(g) for c, g in pinned.items()}
        self.side.synchronize()  # blocks only this thread; the consumer keeps computing
        return Fed(moved, step.positions, account, rows)

    def _rows(self, step: MicroBatches) -> dict[int, Tensor]:
        rows = {c: self.rows_of(g) for c, g in step.micro_batches.items() if g is not None} if self.rows_of else {}
        return {c: ids_U for c, ids_U in rows.items() if ids_U is not None}

    def _moved(self, groups: QueryGroups) -> QueryGroups:
        moved = groups.to(self.device, non_blocking=True)
        for offsets_Q1, asked in zip(moved.offsets(), self.asked, strict=False):  # empty in the first step
            layout(offsets_Q1).make(asked)
        return moved

    def learn(self, step: Fed) -> None:
        """Remember which layouts a finished step requested; the next steps will request the same."""
        for groups in filter(None, step.micro_batches.values()):
            asked = [layout(offsets_Q1).asked() for offsets_Q1 in groups.offsets()]
            before = self.asked or [{} for _ in asked]
            self.asked = [_merged(old, new) for old, new in zip(before, asked, strict=True)]

    def take(self, step: Fed) -> None:
        """Register the batch's memory with the consumer's CUDA stream, or the allocator may reuse it too early."""
        if self.side is None:
            return
        current = torch.cuda.current_stream(self.device)
        for groups in filter(None, step.micro_batches.values()):
            of_layouts = (layout(offsets_Q1).tensors() for offsets_Q1 in groups.offsets())
            for values in chain(groups.tensors(), *of_layouts):
                values.record_stream(current)


def _merged(old: dict[Request, Any], new: dict[Request, Any]) -> dict[Request, Any]:
    """The union of both, recursively."""
    both = {request: _merged(old[request], new[request]) for request in old.keys() & new.keys() if new[request]}
    return old | new | both
