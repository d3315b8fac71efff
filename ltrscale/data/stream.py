"""GroupStream: ragged micro-batches of query groups in a reproducible order that can be resumed at any step.

A stream hands out, in each step, one micro-batch from each of its worker's canonical streams (see `plan`). A canonical
stream is a sequence of windows; a micro-batch takes groups from the place where the last one ended, across windows, up
to its budget of documents. So a place in the sequence is all the state there is, and it does not depend on the workers.

Shapes: Q groups, Q1 = Q + 1 offsets.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from pydantic import Field, model_validator

from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.data import plan
from ltrscale.data.readers import Reader, read_direct
from ltrscale.data.split import RowGroup, Selection
from ltrscale.data.windows import Cut, Decoder, Window, assemble
from ltrscale.errors import InputError


class StreamConfig(Config):
    """How query groups are dealt, shuffled and cut into micro-batches."""

    docs_per_batch: int = Field(default=16384, gt=0)
    """Documents of a global batch; a micro-batch has `docs_per_batch / streams`, and a longer group is one alone."""
    streams: int = Field(default=1, gt=0)
    """Canonical streams, each giving one micro-batch a step; at least, and best a multiple of, the workers."""
    window: int = Field(default=8, gt=0)
    """Row groups of a stream whose groups are shuffled together; memory holds about one window a stream."""
    shuffle: bool = True
    """Whether to permute row groups and groups; otherwise file order."""
    seed: int = 0
    """Seed of the order; a training stage mixes its own into it."""

    @model_validator(mode="after")
    def _has_budget(self) -> "StreamConfig":
        if self.docs_per_batch < self.streams:
            raise ValueError(f"docs_per_batch must be at least streams = {self.streams}, one document for each")
        return self


class Position(NamedTuple):
    """A place in a canonical stream: the next group is number `group` of window `window`, in the order served.

    In JSON it is a list of two integers; `Position(*values)` restores it.
    """

    window: int = 0
    group: int = 0


class GroupStream:
    """The share of one worker in the query groups of a selection.

    Args:
        selection: row groups to read, and whether labelled groups only.
        config: order and budget.
        rank: number of this worker; it serves the streams c with c mod world = rank.
        world: number of workers.
        reader: `read_direct`, or `read_with_ray` where this process is connected to a Ray cluster.

    Raises:
        InputError: there are fewer streams than workers.
    """

    def __init__(
        self,
        selection: Selection,
        config: StreamConfig,
        *,
        rank: int = 0,
        world: int = 1,
        reader: Reader = read_direct,
    ) -> None:
        if config.streams < world:
            raise InputError(f"streams = {config.streams} leaves some of {world} workers idle; set streams to {world}")
        self.selection = selection
        self.config = config
        self.streams = plan.local_streams(config.streams, rank=rank, world=world)
        self.reader = reader
        self._positions = dict.fromkeys(self.streams, Position())

    @property
    def groups_per_epoch(self) -> int:
        """Groups of an epoch over all workers."""
        return self.selection.n_groups

    @property
    def documents_per_epoch(self) -> int:
        """Documents of an epoch over all workers; an estimate where only some labelled groups are used."""
        return self.selection.n_documents

    def positions(self) -> dict[int, Position]:
        """The position of each local stream after the step that was yielded last."""
        return dict(self._positions)

    def epoch(self, epoch: int, start: Mapping[int, Position] | None = None) -> Iterator[dict[int, QueryGroups | None]]:
        """The steps of an epoch: for each local stream its next micro-batch, or None once it has run out.

        Ends when all local streams have run out. Each group of the selection comes in exactly one micro-batch of
        exactly one stream; the micro-batches of a stream do not depend on rank and world.

        Args:
            epoch: number of the epoch.
            start: what `positions` gave for these streams, on any number of workers; the epoch continues after it.

        Raises:
            InputError: a file is missing, damaged, or does not hold what the manifest lists.
        """
        self._positions = {c: Position(*start[c]) if start else Position() for c in self.streams}
        return self._steps(epoch)

    def _steps(self, epoch: int) -> Iterator[dict[int, QueryGroups | None]]:
        windows = self._windows(epoch)
        reading = self._read(epoch, windows, self._positions)
        waiting: dict[int, deque[Window]] = {c: deque() for c in self.streams}

        def next_window(stream: int) -> Window:
            while not waiting[stream]:
                owner, window = next(reading)
                waiting[owner].append(window)
            return waiting[stream].popleft()

        n_features = len(self.selection.features)
        cursors = {
            c: _Cursor(partial(next_window, c), len(windows[c]), self._positions[c], n_features) for c in self.streams
        }
        budget = self.config.docs_per_batch // self.config.streams
        while any(not cursor.ended for cursor in cursors.values()):
            step = {c: cursor.take(budget) for c, cursor in cursors.items()}
            self._positions = {c: cursor.position for c, cursor in cursors.items()}
            yield step

    def _windows(self, epoch: int) -> dict[int, list[list[RowGroup]]]:
        """The windows of each local stream."""
        config, row_groups = self.config, self.selection.row_groups
        dealt = plan.canonical_streams(
            [max(1, self.selection.served_documents(row_group)) for row_group in row_groups],
            seed=config.seed,
            epoch=epoch,
            key=self.selection.hash,
            streams=config.streams,
            shuffle=config.shuffle,
        )
        return {c: [[row_groups[i] for i in w] for w in plan.windows(dealt[c], config.window)] for c in self.streams}

    def _read(
        self, epoch: int, windows: Mapping[int, Sequence[Sequence[RowGroup]]], start: Mapping[int, Position]
    ) -> Iterator[tuple[int, Window]]:
        """The windows from `start` on, each with its stream, in the order in which they will be needed.

        All reading and decoding happens in this iterator: a thread that runs it would read ahead.
        """
        config, selection = self.config, self.selection
        left = {c: stream[start[c].window :] for c, stream in windows.items()}
        order = plan.read_order({c: [sum(map(selection.served_documents, w)) for w in ws] for c, ws in left.items()})
        decoder = Decoder(selection)
        tables = self.reader([row_group for c, w in order for row_group in left[c][w]], decoder.columns)
        for c, w in order:
            groups = sum(map(selection.served_groups, left[c][w]))
            place = {"seed": config.seed, "epoch": epoch, "stream": c, "window": start[c].window + w}
            order_Q = plan.window_order(groups, **place, shuffle=config.shuffle)
            yield c, decoder.decode(left[c][w], list(itertools.islice(tables, len(left[c][w]))), order_Q)


class _Cursor:
    """A place in one canonical stream, which `take` moves on."""

    def __init__(self, next_window: Callable[[], Window], windows: int, start: Position, n_features: int) -> None:
        self.position = start
        self._next_window, self._windows, self._n_features = next_window, windows, n_features
        self._window: Window | None = None

    @property
    def ended(self) -> bool:
        return self.position.window >= self._windows

    def take(self, budget: int) -> QueryGroups | None:
        """The next groups that together have at most `budget` documents, at least one group; None at the end."""
        cuts: list[Cut] = []
        while budget > 0 and not self.ended:
            self._window = self._window or self._next_window()
            number, first = self.position
            offsets_Q1 = self._window.offsets_Q1
            last = int(np.searchsorted(offsets_Q1, offsets_Q1[first] + budget, side="right")) - 1
            if last == first and not cuts:
                last += 1  # a group above the budget
            if last > first:
                cuts.append(Cut(self._window, first, last))
                budget -= int(offsets_Q1[last] - offsets_Q1[first])
            self.position = Position(number, last)
            if last < len(offsets_Q1) - 1:
                break
            self.position, self._window = Position(number + 1, 0), None
        return assemble(cuts, self._n_features) if cuts else None


def iterate(
    selection: Selection, *, docs_per_batch: int = 16384, reader: Reader = read_direct
) -> Iterator[QueryGroups]:
    """All groups of a selection once, in file order, in micro-batches of at most `docs_per_batch` documents.

    A group above the budget is a micro-batch of its own.

    Raises:
        InputError: a file is missing, damaged, or does not hold what the manifest lists.
    """
    config = StreamConfig(docs_per_batch=docs_per_batch, window=1, shuffle=False)
    for step in GroupStream(selection, config, reader=reader).epoch(0):
        groups = step[0]
        assert groups is not None
        yield groups
