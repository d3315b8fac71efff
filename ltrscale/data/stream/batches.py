"""GroupStream: ragged micro-batches of query groups in a reproducible order that can be resumed at any step.

Each step yields one micro-batch from each canonical stream of the worker (see `plan`). A canonical stream is a sequence
of windows. A micro-batch continues where the previous one ended, across windows, up to its budget of documents and
groups. An epoch may be several passes, each in its own order. The position in the sequence is the whole state, and does
not depend on the workers.

A column of the data set can make query groups be served several times per epoch. The number of times is a function of
seed, epoch and group id, so it depends neither on workers nor on the layout of the files.

Shapes: Q groups, Q1 = Q + 1 offsets.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from ltrscale.arrays import Doubles, Ints
from ltrscale.batch import QueryGroups
from ltrscale.config import Config, Operational
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream import plan
from ltrscale.data.stream.decoder import Decoder, Memory, Repeat, mean_repeats, survey_repeats
from ltrscale.data.stream.readers import RowGroupReader, cached, read_direct
from ltrscale.data.stream.windows import Budget, Cursor, Position, Window, regroup
from ltrscale.errors import InputError
from ltrscale.progress import log

_UNLIMITED = 1 << 62
_MOST_LABELS = 64
"""With more distinct labels, they are not grades, and it means nothing if all documents of a label have weight 0."""
_WEIGHTS_REMEDY = (
    "such a document has no part in training; if the weight is what a document is worth, such as its revenue, map it "
    "as columns.gain in prepare, not columns.weights, and measure it by evaluate.gains: column"
)


class StreamConfig(Config):
    """The way in which query groups are dealt, shuffled and cut into micro-batches."""

    docs_per_batch: int = Field(default=16384, gt=0)
    """Documents that a global batch has at most: each of the streams has `docs_per_batch / streams` of them, and there
    are fewer streams where groups are longer than that. Only a group above the whole budget exceeds it, alone. HOU24
    pretrains with 200,000, or 2,000 if the method contrasts documents of different groups, and finetunes with about
    1,000. A GPU takes as long for any step below some 60,000, and is busy with 250,000."""
    groups_per_batch: int | None = Field(default=None, gt=0)
    """At most this many groups in a global batch too, `groups_per_batch / streams` in a micro-batch; with few labelled
    groups it says how many steps they make. `docs_per_batch` still bounds memory. Empty counts documents alone, as
    HOU24 does."""
    tokens_per_batch: int | None = Field(default=None, gt=0)
    """At most this many tokens in a global batch too, `tokens_per_batch / streams` in a micro-batch, for encoders of
    text: those of each document and, beside it, of its query, before the encoder cuts what is above its `max_tokens`.
    A group with more is one alone. Empty counts documents alone."""
    steps_per_epoch: int | None = Field(default=None, gt=0)
    """Steps that an epoch has at least, by the manifest's counts (an estimate where documents limit a batch): it passes
    over all groups as often as that takes, each time in another order, with full batches throughout. So `epochs` and
    `patience` mean the same for 30 groups as for 3,000, and validation does not follow every step. Empty: an epoch is
    one pass, as in the papers."""
    streams: int = Field(default=1, gt=0)
    """Canonical streams at most, each with one micro-batch per step; at least as many as workers, best a multiple of
    them. With groups above `docs_per_batch / streams` it is the largest divisor of this number for which the longest
    group fits in a micro-batch, which is logged before training."""
    window: int = Field(default=8, gt=0)
    """Row groups of a stream whose groups are shuffled together, fewer where they are above 16 MiB, as of wide data;
    memory holds about one window per stream."""
    shuffle: bool = True
    """Permute row groups and groups; otherwise they keep the order of the files."""
    seed: int = 0
    """Seed of the order; a training stage mixes its own seed into it."""
    regroup: bool = False
    """Deal a window's documents to new groups of the same lengths in each epoch: SimCLR-Sample, without labels."""
    repeat: Repeat | None = None
    """Query groups that are served several times per epoch, or not at all."""
    memory_gb: Operational[float] = Field(default=1.0, ge=0)
    """Labelled groups whose features take at most this many GB are read once, and kept in the memory of every worker;
    0 reads them anew each epoch. The result is the same. 1 GB holds 40,000 lists of 100 documents with 60 features;
    training and validation groups count separately."""
    cache_gb: Operational[float] = Field(default=0.0, ge=0)
    """GB of the local disk, below TMPDIR, for what memory does not keep: row groups decoded once, which later epochs
    and runs on this machine read several times faster; worth it where many epochs wait for data. The result is the
    same. 0 keeps nothing."""
    prefetch: Operational[int] = Field(default=2, ge=0)
    """Steps that a thread reads ahead while training computes; 0 reads each step when it is needed."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.tokens_per_batch is not None and self.tokens_per_batch < self.streams:
            raise ValueError(f"tokens_per_batch must be at least streams = {self.streams}, one token for each")
        if self.docs_per_batch < self.streams:
            raise ValueError(f"docs_per_batch must be at least streams = {self.streams}, one document for each")
        if self.groups_per_batch is not None and self.groups_per_batch < self.streams:
            raise ValueError(f"groups_per_batch must be at least streams = {self.streams}, one group for each")
        if self.regroup and not self.shuffle:
            raise ValueError("regroup deals documents at random; set shuffle: true with it")
        return self


class _PlannedWindow(NamedTuple):
    """The row groups of window `window` of a stream in pass `number`, counted over all epochs."""

    number: int
    window: int
    row_groups: list[int]
    """Their numbers in the selection."""


class MicroBatches(NamedTuple):
    """One step of a worker: the next micro-batch of each of its streams, None for a stream that has run out.

    `positions` are those after the step; a resumed epoch continues there.
    """

    micro_batches: dict[int, QueryGroups | None]
    positions: dict[int, Position]


class GroupStream:
    """One worker's share of the query groups of a selection.

    With `repeat` the constructor reads its column once, to count the groups of an epoch.

    Args:
        selection: row groups to read, and whether labelled groups only.
        config: order and budget; with groups above `docs_per_batch / streams` the stream's own `config` has fewer
            streams, see `plan.streams_within`.
        rank: this worker serves the streams c with c mod world = rank.
        world: number of workers.
        reader: `read_direct`, or `read_with_ray` if this process is connected to a Ray cluster.
        memory: keeps what was read of the selection, so that later epochs read nothing; None keeps nothing.

    Raises:
        InputError: there are fewer streams than workers, or would be to fit the longest group in the budget;
            `regroup` is set for labelled groups or with tokens of queries, or the column of `repeat` cannot be used.
    """

    def __init__(
        self,
        selection: Selection,
        config: StreamConfig,
        *,
        rank: int = 0,
        world: int = 1,
        reader: RowGroupReader = read_direct,
        memory: Memory | None = None,
    ) -> None:
        if config.streams < world:
            raise InputError(f"streams = {config.streams} leaves some of {world} workers idle; set streams to {world}")
        budget, longest = config.docs_per_batch, selection.longest
        streams = plan.streams_within(config.streams, budget=budget, longest=longest)
        if streams < world:
            enough = longest * min(n for n in range(world, config.streams + 1) if config.streams % n == 0)
            raise InputError(
                f"groups of up to {longest:,} documents leave docs_per_batch = {budget:,} room for {streams} of "
                f"{config.streams} streams, and {world} workers need one each; set stream.docs_per_batch to "
                f"{enough} or more"
            )
        if config.regroup and (selection.labelled or any(field.of == "query" for field in selection.tokens)):
            lost = "labels" if selection.labelled else "texts"
            raise InputError(
                f"stream.regroup mixes the documents of queries, whose {lost} then say nothing; leave it out"
            )
        if config.tokens_per_batch is not None and not selection.tokens:
            raise InputError("stream.tokens_per_batch counts tokens, and the model reads none; leave it out")
        self.selection = selection
        self.config = config.replace(streams=streams)
        self.streams = range(rank, streams, world)
        self.memory = memory
        self.reader = cached(reader, config.cache_gb) if config.cache_gb and memory is None else reader
        self._mean_times_R = survey_repeats(selection, config.repeat, reader) if config.repeat else None

    @cached_property
    def passes(self) -> int:
        """Passes over the selection in an epoch."""
        config = self.config
        steps = self._documents_per_pass / config.docs_per_batch
        if config.groups_per_batch is not None:
            steps = max(steps, self._groups_per_pass / config.groups_per_batch)
        return max(1, math.ceil(config.steps_per_epoch / steps)) if config.steps_per_epoch and steps else 1

    @property
    def groups_per_epoch(self) -> int:
        """Groups of an epoch over all workers, repeats included; the mean if the number of repeats is random."""
        return self.passes * self._groups_per_pass

    @property
    def documents_per_epoch(self) -> int:
        """Documents of an epoch over all workers; an estimate if groups of a row group are left out or repeated."""
        return self.passes * self._documents_per_pass

    @cached_property
    def _groups_per_pass(self) -> int:
        return round(float(self._on_average(self.selection.served_groups_R).sum()))

    @cached_property
    def _documents_per_pass(self) -> int:
        return int(self._documents_R.sum())

    @cached_property
    def _documents_R(self) -> Ints:
        """Documents that a pass serves of each row group."""
        return np.rint(self._on_average(self.selection.served_documents_R)).astype(np.int64)

    def _on_average(self, served_once_R: Ints) -> Doubles:
        """A count of each row group times the mean number of times that its groups are served."""
        return np.asarray(served_once_R * (1.0 if self._mean_times_R is None else self._mean_times_R), np.float64)

    def epoch(self, epoch: int, start: Mapping[int, Position] | None = None) -> Iterator[MicroBatches]:
        """The steps of an epoch, from the positions of all local streams after an earlier step if `start` has them.

        It ends when all local streams have run out. Each group of the selection is in exactly one micro-batch of
        exactly one stream, in each pass if there are several. With `repeat` it is in one stream as often as
        `times_served` says; with `regroup` the guarantee holds for each document. The micro-batches of a stream do not
        depend on rank and world.

        Raises:
            InputError: a file is missing, damaged, or does not hold what the manifest lists.
        """
        return self._steps(epoch, {c: Position(*start[c]) if start else Position() for c in self.streams})

    def _steps(self, epoch: int, start: Mapping[int, Position]) -> Iterator[MicroBatches]:
        windows = self._windows(epoch)
        reading = self._read(windows, start)
        waiting: dict[int, deque[Window]] = {c: deque() for c in self.streams}

        def next_window(stream: int) -> Window:
            while not waiting[stream]:
                owner, window = next(reading)
                waiting[owner].append(window)
            return waiting[stream].popleft()

        n_features = len(self.selection.features)
        cursors = {c: Cursor(partial(next_window, c), len(windows[c]), start[c], n_features) for c in self.streams}
        config = self.config
        most = (config.docs_per_batch, config.groups_per_batch or _UNLIMITED, config.tokens_per_batch or _UNLIMITED)
        budget = Budget(*(count // config.streams for count in most))
        while any(not cursor.ended for cursor in cursors.values()):
            micro_batches = {c: cursor.take(budget) for c, cursor in cursors.items()}
            yield MicroBatches(micro_batches, {c: cursor.position for c, cursor in cursors.items()})

    def _windows(self, epoch: int) -> dict[int, list[_PlannedWindow]]:
        config = self.config
        windows: dict[int, list[_PlannedWindow]] = {c: [] for c in self.streams}
        values_R = self.selection.row_groups.documents_R * len(self.selection.features)
        for number in range(epoch * self.passes, (epoch + 1) * self.passes):
            dealt = plan.canonical_streams(
                # at least 1 each, so that row groups served rarely or never still spread over the streams
                np.maximum(1, self._documents_R),
                seed=config.seed,
                epoch=number,
                key=self.selection.hash,
                streams=config.streams,
                shuffle=config.shuffle,
            )
            for c in self.streams:
                of_pass = plan.windows(dealt[c].tolist(), config.window, values=lambda r: int(values_R[r]))
                windows[c] += [_PlannedWindow(number, w, row_groups) for w, row_groups in enumerate(of_pass)]
        return windows

    def _read(
        self, windows: Mapping[int, Sequence[_PlannedWindow]], start: Mapping[int, Position]
    ) -> Iterator[tuple[int, Window]]:
        """The windows from `start` on with their streams, in the order needed; iterate in a thread to read ahead."""
        remaining = {c: stream[start[c].window :] for c, stream in windows.items()}
        order = plan.read_order(
            {c: [int(self._documents_R[w.row_groups].sum()) for w in ws] for c, ws in remaining.items()}
        )
        memory = self.memory or Memory(self.selection)
        columns = [*memory.decoder.columns, *([self.config.repeat.by] if self.config.repeat else [])]
        all_row_groups = self.selection.row_groups
        to_read = [r for c, w in order for r in remaining[c][w].row_groups]
        if self.memory is not None:  # each once, however many passes follow
            to_read = [r for r in dict.fromkeys(to_read) if all_row_groups[r] not in memory.groups]
        tables = self.reader(all_row_groups.take(to_read), columns)
        for c, w in order:
            planned = remaining[c][w]
            row_groups = [all_row_groups[r] for r in planned.row_groups]
            yield c, self._window(self._groups(memory, row_groups, tables), planned, c)

    def _groups(self, memory: Memory, row_groups: Sequence[RowGroup], tables: Iterator[pa.Table]) -> Window:
        """The groups of a window in file order: from memory, or else from the next tables."""
        if self.memory is None:  # a window at once, without a copy
            return self._decoded(memory.decoder, row_groups, list(itertools.islice(tables, len(row_groups))))
        for row_group in row_groups:
            if row_group not in memory.groups:
                memory.groups[row_group] = self._decoded(memory.decoder, [row_group], [next(tables)]).copied()
        return Window.joined([memory.groups[row_group] for row_group in row_groups])

    def _decoded(self, decoder: Decoder, row_groups: Sequence[RowGroup], tables: Sequence[pa.Table]) -> Window:
        rows_Q = decoder.served_rows(row_groups, tables)
        groups = decoder.decode(row_groups, tables, rows_Q)
        if self.config.repeat is None:
            return groups
        pairs = zip(row_groups, tables, strict=True)
        mean_times_R = np.concatenate([mean_repeats(r, table, self.config.repeat) for r, table in pairs])
        return replace(groups, mean_times_Q=mean_times_R[rows_Q])

    def _window(self, groups: Window, planned: _PlannedWindow, stream: int) -> Window:
        """The groups of a window in the order of serving."""
        config, seed, epoch = self.config, self.config.seed, planned.number
        rows_Q = np.arange(len(groups.offsets_Q1) - 1)
        if groups.mean_times_Q is not None:
            assert groups.ids_Q is not None
            rows_Q = rows_Q.repeat(plan.times_served(groups.mean_times_Q, groups.ids_Q, seed=seed, epoch=epoch))
        place = {"seed": seed, "epoch": epoch, "stream": stream, "window": planned.window}
        served = groups.take(rows_Q[plan.window_order(len(rows_Q), **place, shuffle=config.shuffle)])
        if config.regroup:
            order_N = plan.document_order(int(served.offsets_Q1[-1]), **place)
            served = regroup(served, order_N, len(self.selection.features))
        return served


def check_batches(selection: Selection, config: StreamConfig, *, world: int, title: str) -> None:
    """Raise as `GroupStream` does, before workers start; logs once what long groups change."""
    longest, budget = selection.longest, config.docs_per_batch
    streams = GroupStream(selection, config, world=world).config.streams
    notes = []
    if streams < config.streams:
        each, configured = budget // streams, budget // config.streams
        notes.append(
            f"a step takes {streams} of {config.streams} micro-batches, of {each:,} documents and not {configured:,}"
        )
    if longest > budget:
        notes.append(f"one above stream.docs_per_batch = {budget:,} is a step of its own, and exceeds it")
    if notes:
        log.info("%s: groups have up to %s documents, so %s", title, f"{longest:,}", "; ".join(notes))


def iterate(
    selection: Selection, *, docs_per_batch: int = 16384, memory: Memory | None = None
) -> Iterator[QueryGroups]:
    """All groups of a selection once, in file order, in micro-batches of at most `docs_per_batch` documents.

    A group above the budget is a micro-batch alone. `memory` is as for `GroupStream`.

    Raises:
        InputError: a file is missing, damaged, or does not hold what the manifest lists.
    """
    config = StreamConfig(docs_per_batch=docs_per_batch, window=1, shuffle=False)
    for step in GroupStream(selection, config, memory=memory).epoch(0):
        groups = step.micro_batches[0]
        assert groups is not None
        yield groups


def first_groups(selection: Selection, documents: int) -> QueryGroups:
    """The first groups of a selection, with at least this many documents if it has them; raises as `iterate`."""
    parts: list[QueryGroups] = []
    for part in iterate(selection, docs_per_batch=min(documents, 16384)):
        parts.append(part)
        if sum(each.n_documents for each in parts) >= documents:
            break
    return QueryGroups.concat(parts)


_weight_warnings: dict[tuple[str, int], str] = {}
"""Warnings by hash and number of groups, so that data are read and a warning logged once per process."""


def check_weights(selection: Selection) -> str:
    """Warn where weights are 0 for most documents, or for all documents of one label; returns the warning, or "".

    It reads only the labels and weights of the labelled groups that are served. Call it before a training that
    multiplies by weights. Scores that serve as labels are not grades, and are not checked.

    Raises:
        InputError: all weights are 0, or one is negative or infinite, in a data set that prepare did not check.
    """
    key = selection.hash, selection.n_groups
    if key not in _weight_warnings:
        _weight_warnings[key] = "" if selection.reads_scores else _read_weights(selection)
        if _weight_warnings[key]:
            log.warning("weights: %s; %s", _weight_warnings[key], _WEIGHTS_REMEDY)
    return _weight_warnings[key]


def _read_weights(selection: Selection) -> str:
    documents, zeros = Counter[float](), Counter[float]()
    for groups in iterate(replace(selection, features=(), tokens=()), docs_per_batch=1 << 16):
        if groups.weights_N is None:
            return ""
        assert groups.labels_N is not None
        documents.update(groups.labels_N.tolist())
        zeros.update(groups.labels_N[groups.weights_N == 0].tolist())
        if bool((bad_N := (groups.weights_N < 0) | groups.weights_N.isinf()).any()):
            value = groups.weights_N[bad_N][0].item()
            raise InputError(f"train: a document has weight {value:g}; prepare the data again, which rejects such rows")
    if zeros.total() == documents.total():
        raise InputError(
            f"train: all {zeros.total():,} documents have weight 0, so there is nothing to learn; {_WEIGHTS_REMEDY}"
        )
    return _zero_weights(documents, zeros)


def _zero_weights(documents: Counter[float], zeros: Counter[float]) -> str:
    """What is wrong with weights, from the documents and zero-weight documents of each label; "" if nothing is."""
    grades = sorted(zeros) if len(documents) <= _MOST_LABELS else []
    whole = [label for label in grades if zeros[label] == documents[label]]
    total, without = documents.total(), zeros.total()
    if 2 * without <= total and not whole:
        return ""
    text = f"{without:,} of {total:,} documents ({without / total:.1%}) have weight 0"
    among = " and ".join(f"all {zeros[label]:,} of label {label:g}" for label in whole)
    return f"{text}, among them {among}" if whole else text
