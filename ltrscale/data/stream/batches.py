"""GroupStream: ragged micro-batches of query groups in a reproducible order that can be resumed at any step.

Each step yields one micro-batch from each canonical stream of the worker (see `plan`). A canonical stream is a sequence
of windows; a micro-batch takes groups from the end of the previous one on, across windows, up to its budget of
documents. So the position in the sequence is the whole state, and it does not depend on the workers.

Query groups may be served several times per epoch, by a column of their data set. The number of times is a function of
seed, epoch and the group's id, so that neither workers nor the layout of the files matter.

Shapes: Q groups, Q1 = Q + 1 offsets.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.data import columns
from ltrscale.data.dataset.split import RowGroup, Selection
from ltrscale.data.stream import plan
from ltrscale.data.stream.readers import Reader, read_direct
from ltrscale.data.stream.windows import Cut, Decoder, Window, assemble, group_ids, mismatch, regroup
from ltrscale.errors import InputError, nearest

MOST = 1000.0
"""The most times that a group may be served per epoch on average; a larger value hints at the wrong column."""


def _text_keys(times: Any) -> Any:
    """The mapping with all keys as texts, in YAML's spelling: `{1: 2}` has a number for a key."""
    if not isinstance(times, dict):
        return times
    return {key if isinstance(key, str) else json.dumps(key): value for key, value in times.items()}


Times = Annotated[float, Field(ge=0, le=MOST)]


class Repeat(Config):
    """Times that a query group is served per epoch, by a column of the data set (SUN23 repeats frequent queries).

    A fraction is the probability of one more time: 2.3 means twice, and a third time with probability .3.
    """

    by: str = Field(pattern="^meta_.")
    """Column with one value per group: its number of times, or its class, a key of `times`."""
    times: Annotated[dict[str, Times], BeforeValidator(_text_keys)] = Field(default_factory=dict)
    """Number of times for each class; groups of other classes are served once. Empty: the column has the numbers."""


def mean_repeats(row_group: RowGroup, table: pa.Table, repeat: Repeat) -> NDArray[np.float64]:
    """The number of times that each row of a table is served per epoch on average, shape [R].

    Raises:
        InputError: the column is missing, or must have the numbers of times and does not.
    """
    if repeat.by not in table.column_names:
        raise InputError(f"{row_group.url}: no column {repeat.by!r}; {_remedy(row_group, repeat.by)}")
    if repeat.times:
        return np.array([repeat.times.get(name, 1.0) for name in _classes(table, repeat).to_pylist()])
    column = table.column(repeat.by).combine_chunks()
    if not columns.is_number(columns.value_type(column.type)):
        remedy = "say under stream.repeat.times how often each of its values is served"
        raise mismatch(row_group, f"column {repeat.by!r} is {column.type} and no number", remedy)
    values = columns.plain(column).cast(pa.float64(), safe=False)
    times_R: NDArray[np.float64] = values.fill_null(np.nan).to_numpy(zero_copy_only=False)
    bad_R = ~((times_R >= 0) & (times_R <= MOST))  # NaN too
    if bad_R.any():
        row = int(bad_R.argmax())
        what = f"column {repeat.by!r} of query group {table.column('gid')[row]} is {values[row].as_py()}"
        raise mismatch(row_group, what, f"it must be from 0 to {MOST:,.0f}, or a class named under stream.repeat.times")
    return times_R


def survey_repeats(selection: Selection, repeat: Repeat, reader: Reader) -> dict[RowGroup, float]:
    """Read the column of a whole selection: the mean number of times of each row group's served groups.

    Raises:
        InputError: the column cannot be used, a class named in `times` occurs nowhere, or no group would be served.
    """
    decoder = Decoder(selection, documents=False)
    tables = reader(selection.row_groups, [*decoder.columns, repeat.by])
    means: dict[RowGroup, float] = {}
    classes: set[str] = set()
    for row_group, table in zip(selection.row_groups, tables, strict=True):
        rows_Q = decoder.served_rows([row_group], [table])
        means[row_group] = float(mean_repeats(row_group, table, repeat)[rows_Q].mean())
        if repeat.times:
            classes.update(_classes(table, repeat).drop_null().unique().to_pylist())
    for name in repeat.times:
        if name not in classes:
            near = nearest(name, sorted(classes))
            hint = f"the nearest is {near!r}" if near is not None else "it is empty"
            raise InputError(f"stream.repeat.times: column {repeat.by!r} has no value {name!r}; {hint}")
    if not any(means.values()):
        raise InputError(f"stream.repeat: by {repeat.by!r} no query group is served; raise some of its times above 0")
    return means


def _classes(table: pa.Table, repeat: Repeat) -> pa.StringArray:
    return columns.texts(table.column(repeat.by).combine_chunks())[0]


def _remedy(row_group: RowGroup, name: str) -> str:
    """The column of a file that is probably meant, for the end of an error."""
    filesystem, path = storage.arrow_filesystem(row_group.url)
    with storage.named_errors(row_group.url):
        names = storage.patiently(lambda: pq.read_schema(path, filesystem=filesystem)).names
    known = [known for known in names if known.startswith("meta_")]
    near = nearest(name, known)
    return f"the nearest is {near!r}" if near else "the data set has no meta_* column; prepare it with `columns.meta`"


class StreamConfig(Config):
    """The way in which query groups are dealt, shuffled and cut into micro-batches."""

    docs_per_batch: int = Field(default=16384, gt=0)
    """Documents of a global batch; a micro-batch has `docs_per_batch / streams`, and a longer group is one alone. HOU24
    pretrains with 200,000, or 2,000 if the method contrasts all documents of a batch, and finetunes with about
    1,000."""
    streams: int = Field(default=1, gt=0)
    """Canonical streams, each with one micro-batch per step; at least as many as workers, best a multiple of them."""
    window: int = Field(default=8, gt=0)
    """Row groups of a stream whose groups are shuffled together; memory holds about one window per stream."""
    shuffle: bool = True
    """Permute row groups and groups; otherwise they keep the order of the files."""
    seed: int = 0
    """Seed of the order; a training stage mixes its own seed into it."""
    regroup: bool = False
    """Deal a window's documents to new groups of the same lengths in each epoch: SimCLR-Sample, without labels."""
    repeat: Repeat | None = None
    """Query groups that are served several times per epoch, or not at all."""
    prefetch: int = Field(default=2, ge=0)
    """Steps that a thread reads ahead while training computes; 0 reads each step when it is needed."""

    @model_validator(mode="after")
    def _is_consistent(self) -> "StreamConfig":
        if self.docs_per_batch < self.streams:
            raise ValueError(f"docs_per_batch must be at least streams = {self.streams}, one document for each")
        if self.regroup and not self.shuffle:
            raise ValueError("regroup deals documents at random; set shuffle: true with it")
        return self


class Position(NamedTuple):
    """A position in a canonical stream: the next group is number `group` of window `window`, in the order served.

    JSON has it as a list of two integers; `Position(*values)` restores it.
    """

    window: int = 0
    group: int = 0


class Step(NamedTuple):
    """One step of a worker: the next micro-batch of each of its streams, None for a stream that has run out.

    `positions` are those after the step, where a resumed epoch continues.
    """

    micro_batches: dict[int, QueryGroups | None]
    positions: dict[int, Position]


class GroupStream:
    """The share of one worker in the query groups of a selection.

    With `repeat` the constructor reads the column that it names once, for the counts of an epoch.

    Args:
        selection: row groups to read, and whether labelled groups only.
        config: order and budget.
        rank: number of this worker; it serves the streams c with c mod world = rank.
        world: number of workers.
        reader: `read_direct`, or `read_with_ray` if this process is connected to a Ray cluster.

    Raises:
        InputError: there are fewer streams than workers, `regroup` is set for labelled groups, or the column of
            `repeat` cannot be used.
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
        if config.regroup and selection.labelled:
            raise InputError(
                "stream.regroup mixes the documents of queries, whose labels then say nothing; leave it out"
            )
        self.selection = selection
        self.config = config
        self.streams = plan.local_streams(config.streams, rank=rank, world=world)
        self.reader = reader
        self._mean_times = survey_repeats(selection, config.repeat, reader) if config.repeat else None

    @cached_property
    def groups_per_epoch(self) -> int:
        """Groups of an epoch over all workers, repeats included; the mean if the number of repeats is random."""
        return round(sum(self._on_average(r, self.selection.served_groups(r)) for r in self.selection.row_groups))

    @cached_property
    def documents_per_epoch(self) -> int:
        """Documents of an epoch over all workers; an estimate if groups of a row group are left out or repeated."""
        return sum(map(self._documents, self.selection.row_groups))

    def _documents(self, row_group: RowGroup) -> int:
        return round(self._on_average(row_group, self.selection.served_documents(row_group)))

    def _on_average(self, row_group: RowGroup, served_once: int) -> float:
        """A count of a row group, multiplied by how often its groups are served on average."""
        return served_once if self._mean_times is None else served_once * self._mean_times[row_group]

    def epoch(self, epoch: int, start: Mapping[int, Position] | None = None) -> Iterator[Step]:
        """The steps of an epoch.

        It ends when all local streams have run out. Each group of the selection is in exactly one micro-batch of
        exactly one stream; with `repeat` it is as often in one stream as `times_served` decides, and with `regroup`
        the promise holds for each document. The micro-batches of a stream do not depend on rank and world.

        Args:
            epoch: number of the epoch.
            start: positions of all local streams after a step, from any number of workers; the epoch continues there.

        Raises:
            InputError: a file is missing, damaged, or does not hold what the manifest lists.
        """
        return self._steps(epoch, {c: Position(*start[c]) if start else Position() for c in self.streams})

    def _steps(self, epoch: int, start: Mapping[int, Position]) -> Iterator[Step]:
        windows = self._windows(epoch)
        reading = self._read(epoch, windows, start)
        waiting: dict[int, deque[Window]] = {c: deque() for c in self.streams}

        def next_window(stream: int) -> Window:
            while not waiting[stream]:
                owner, window = next(reading)
                waiting[owner].append(window)
            return waiting[stream].popleft()

        n_features = len(self.selection.features)
        cursors = {c: _Cursor(partial(next_window, c), len(windows[c]), start[c], n_features) for c in self.streams}
        budget = self.config.docs_per_batch // self.config.streams
        while any(not cursor.ended for cursor in cursors.values()):
            micro_batches = {c: cursor.take(budget) for c, cursor in cursors.items()}
            yield Step(micro_batches, {c: cursor.position for c, cursor in cursors.items()})

    def _windows(self, epoch: int) -> dict[int, list[list[RowGroup]]]:
        """The windows of each local stream."""
        config, row_groups = self.config, self.selection.row_groups
        dealt = plan.canonical_streams(
            # at least 1 each, so that row groups served rarely or never still spread over the streams
            [max(1, self._documents(row_group)) for row_group in row_groups],
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

        All reading and decoding happens in this iterator, so a thread that runs it reads ahead.
        """
        left = {c: stream[start[c].window :] for c, stream in windows.items()}
        order = plan.read_order({c: [sum(map(self._documents, w)) for w in ws] for c, ws in left.items()})
        decoder = Decoder(self.selection)
        columns = [*decoder.columns, *([self.config.repeat.by] if self.config.repeat else [])]
        tables = self.reader([row_group for c, w in order for row_group in left[c][w]], columns)
        for c, w in order:
            row_groups = left[c][w]
            of_window = list(itertools.islice(tables, len(row_groups)))
            yield c, self._window(decoder, row_groups, of_window, epoch=epoch, stream=c, window=start[c].window + w)

    def _window(
        self,
        decoder: Decoder,
        row_groups: Sequence[RowGroup],
        tables: Sequence[pa.Table],
        *,
        epoch: int,
        stream: int,
        window: int,
    ) -> Window:
        """The groups of a window in the order of serving."""
        config, seed = self.config, self.config.seed
        rows_Q = decoder.served_rows(row_groups, tables)
        if config.repeat:
            pairs = zip(row_groups, tables, strict=True)
            mean_times_R = np.concatenate([mean_repeats(r, table, config.repeat) for r, table in pairs])
            ids_R = group_ids(row_groups, tables)
            rows_Q = rows_Q.repeat(plan.times_served(mean_times_R[rows_Q], ids_R[rows_Q], seed=seed, epoch=epoch))
        place = {"seed": seed, "epoch": epoch, "stream": stream, "window": window}
        order_Q = plan.window_order(len(rows_Q), **place, shuffle=config.shuffle)
        decoded = decoder.decode(row_groups, tables, rows_Q[order_Q])
        if config.regroup:
            order_N = plan.document_order(int(decoded.offsets_Q1[-1]), **place)
            decoded = regroup(decoded, order_N, len(self.selection.features))
        return decoded


class _Cursor:
    """A position in one canonical stream, which `take` advances."""

    def __init__(self, next_window: Callable[[], Window], windows: int, start: Position, n_features: int) -> None:
        self.position = start
        self._next_window, self._windows, self._n_features = next_window, windows, n_features
        self._window: Window | None = None

    @property
    def ended(self) -> bool:
        return self.position.window >= self._windows

    def take(self, budget: int) -> QueryGroups | None:
        """The next groups, at least one, with at most `budget` documents together; None at the end of the stream."""
        cuts: list[Cut] = []
        while budget > 0 and not self.ended:
            self._window = self._window or self._next_window()
            number, first = self.position
            offsets_Q1 = self._window.offsets_Q1
            groups = len(offsets_Q1) - 1  # 0 if no group of the window is served
            last = int(np.searchsorted(offsets_Q1, offsets_Q1[first] + budget, side="right")) - 1
            if last == first < groups and not cuts:
                last += 1  # a group above the budget is a micro-batch alone
            if last > first:
                cuts.append(Cut(self._window, first, last))
                budget -= int(offsets_Q1[last] - offsets_Q1[first])
            self.position = Position(number, last)
            if last < groups:
                break
            self.position, self._window = Position(number + 1, 0), None
        return assemble(cuts, self._n_features) if cuts else None


def iterate(
    selection: Selection, *, docs_per_batch: int = 16384, reader: Reader = read_direct
) -> Iterator[QueryGroups]:
    """All groups of a selection once, in file order, in micro-batches of at most `docs_per_batch` documents.

    A group above the budget is a micro-batch alone.

    Raises:
        InputError: a file is missing, damaged, or does not hold what the manifest lists.
    """
    config = StreamConfig(docs_per_batch=docs_per_batch, window=1, shuffle=False)
    for step in GroupStream(selection, config, reader=reader).epoch(0):
        groups = step.micro_batches[0]
        assert groups is not None
        yield groups
