"""Turns events into rows of items in steps, in memory that does not grow with them, on one machine or on Ray.

Events are read file by file and dealt to parts by a hash of their query id; those without one, and what their session
was shown, by a hash of the session. Then each part is attributed (`attribution`), and its rows are written by period.
Every step is a number of tasks that write their own files; what an interrupted run has finished is not done again. The
number of parts depends on the size of the input only, and the rows of a list do not depend on it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.arrays import offsets
from ltrscale.config import Operational
from ltrscale.data import columns as cols
from ltrscale.data.ids import hash_ids
from ltrscale.data.times import periods
from ltrscale.errors import InputError, without_credentials
from ltrscale.ingest.attribution import NAMED, by_name, by_query, by_session, database_of, rows_in_view
from ltrscale.ingest.events import ACTS, LEFT, MADE, OWN, ROWS_OF, SHOWN, EventFile, Events
from ltrscale.ingest.inputs import Inputs, Unit, cut_units, fingerprints, list_inputs
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.parallel import Call, each_done
from ltrscale.ingest.source import File
from ltrscale.origin import as_text, digest
from ltrscale.progress import Report, log, progress
from ltrscale.stages.stage import Origin, Stage

_VALUES = 1 << 22
"""The most values of a row group, and of those that wait for one."""
_BATCH_ROWS = 1 << 16
_SAVE_S = 120.0
"""The most seconds of work that an interruption costs, apart from the tasks in progress."""
_MINUTE_US = 60 * 10**6


class EventRows(Stage):
    """Turn events into rows, one for each item of each list that was shown."""

    stage: ClassVar = "event_rows"
    read: Inputs
    """The files of all tables."""
    source: Events
    """The tables, and what of them becomes rows."""
    unit_mb: float
    """Megabytes of input files that one task reads, and of events that one attributes."""
    memory: Operational[str]
    """Memory of a task's database, as of `sort_memory`."""
    ray: Operational[bool] = False
    """Do the tasks on a Ray cluster; the rows are the same."""

    @cached_property
    def files(self) -> list[File]:
        """The files of all tables, listed once."""
        files = list_inputs(self.read)
        if rewritten := [file.url for file in files if file.is_rewritten]:
            raise InputError(
                f"{rewritten[0]}: the table has rewritten events that were read before, of which since cannot tell the "
                "new ones; prepare all of the table into another directory"
            )
        return files

    def inputs(self) -> dict[str, str]:
        """Fingerprints of the files."""
        return fingerprints(self.files, self.source)

    def work(self, origin: Origin, report: Report) -> None:
        """Write the rows, and the events that are left over with their reasons.

        Raises:
            InputError: a file cannot be decoded or is none of the tables; no item was shown; or as `database`.
        """
        sizes = storage.at_once(storage.size, [file.url for file in self.files])
        units = cut_units(self.files, sizes, unit_bytes=self.unit_mb * 2**20, sort=False)
        parts = max(1, round(sum(sizes) / (self.unit_mb * 2**20)))
        urls, carried = [without_credentials(file.url) for file in self.files], self.source.carried(self.files)
        settings = _Settings(storage.absolute(self.out), self.source, urls, carried, parts, self.memory)
        with storage.Commit(self.out) as commit:
            counts = _Work(settings, commit, digest("1" + as_text(origin)), self.ray).done(units)
            if not counts["rows"]:
                raise InputError(
                    f"{self.files[0].url}: no item is shown in a list; see docs/events.md ({dict(counts)})"
                )
            listed = [vars(file) for file in commit.files if file.path.startswith((ROWS_OF, _LEFT_OF))]
            made = {"counts": dict(sorted(counts.items())), "made_by": dict(origin)}
            commit.finish({"format": "ltrscale-event-rows", "files": listed, **made})
        report({"stage": self.stage, **counts})
        shown = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        log.info("%s: %s: %s", self.stage, self.out, shown)


_LEFT_OF, _DEALT = "left-over/", "dealt/"


@dataclass(frozen=True)
class _Settings:
    """What all tasks share."""

    out: str
    source: Events
    urls: Sequence[str]
    carried: pa.Schema
    parts: int
    memory: str

    @property
    def events(self) -> pa.Schema:
        """The columns of events."""
        return pa.schema([*OWN, *self._shown])

    @property
    def rows(self) -> pa.Schema:
        """The columns of rows while they may become one by name."""
        return pa.schema([*NAMED, *MADE, *self._shown])

    @property
    def _shown(self) -> list[pa.Field]:
        return [each.with_name(SHOWN + each.name) for each in self.carried]


@dataclass
class _Work:
    """The steps, and what is finished of them: the files and counts of each task, by its name."""

    settings: _Settings
    commit: storage.Commit
    identity: str
    ray: bool

    def __post_init__(self) -> None:
        saved = self.commit.saved if self.commit.saved.get("identity") == self.identity else {}
        self._done: dict[str, dict[str, Any]] = saved.get("done", {})
        self._saved_at = time.monotonic()
        self.commit.adopt(storage.Placed(**file) for each in self._done.values() for file in each["files"])

    def done(self, units: Sequence[Unit]) -> Counter[str]:
        """The counts of all steps, once they are done."""
        parts = range(self.settings.parts)
        numbers = pairwise(offsets(np.array([len(unit.files) for unit in units])).tolist())
        read = [partial(_read, unit, range(*of_unit)) for unit, of_unit in zip(units, numbers, strict=True)]
        self._step("read", read, [str(unit) for unit in units])
        if self._counts()["waiting"]:
            self._step("session", [partial(_by_session, part, self._dealt("session")) for part in parts])
        self._step("query", [partial(_by_query, part, self._dealt("query")) for part in parts])
        if self.settings.source.merge is not None:
            self._step("name", [partial(_by_name, part, self._dealt("name")) for part in parts])
        counts = self._counts()
        del counts["waiting"]
        left_over = sum(count for name, count in counts.items() if name.startswith("left_over_"))
        assert counts["in"] == sum(counts[act] for act in ACTS) + left_over
        return counts

    def _counts(self) -> Counter[str]:
        return sum((Counter(each["counts"]) for each in self._done.values()), Counter[str]())

    def _dealt(self, to: str) -> tuple[str, ...]:
        """The files of rows that are dealt to the parts of a step."""
        listed = sorted(file["path"] for each in self._done.values() for file in each["files"])
        return tuple(storage.join(self.settings.out, path) for path in listed if path.startswith(f"{_DEALT}{to}-"))

    def _step(self, name: str, works: Sequence[Callable[["_Output"], None]], of: Sequence[str] = ()) -> None:
        tasks = {f"{name}-{number:05}": work for number, work in enumerate(works)}
        left = [task for task in tasks if task not in self._done]
        names = dict(zip(tasks, of or [f"part {task} of the events" for task in tasks], strict=True))
        with progress(f"events by {name}" if name != "read" else "events", len(left), "tasks") as advance:

            def take(task: str, result: tuple[tuple[storage.Placed, ...], dict[str, int]]) -> None:
                placed, counts = result
                self.commit.adopt(placed)
                self._done[task] = {"files": [vars(file) for file in placed], "counts": counts}
                advance(1)
                if time.monotonic() - self._saved_at >= _SAVE_S:
                    self._save()

            run = partial(_run, self.settings)
            calls = [Call(partial(run, task, tasks[task]), names[task], partial(take, task)) for task in left]
            each_done(calls, ray=self.ray)
        self._save()

    def _save(self) -> None:
        self.commit.save({"identity": self.identity, "done": self._done})
        self._saved_at = time.monotonic()


def _run(
    settings: _Settings, name: str, work: Callable[["_Output"], None]
) -> tuple[tuple[storage.Placed, ...], dict[str, int]]:
    """Do a task; returns its files, which are in place, and its counts."""
    with storage.scratch.directory() as folder, storage.Commit(settings.out, helping=True) as commit:
        with ExitStack() as files, ExitStack() as buffers:
            output = _Output(settings, name, commit, folder, files, buffers)
            work(output)
        return commit.leave(), dict(output.counts)


_Take = Callable[[pa.Table], None]
"""Takes rows with the columns of a schema."""


@dataclass
class _Output:
    """What a task writes: rows that are dealt to the parts of another step, rows of items, left-over events, counts."""

    settings: _Settings
    name: str
    commit: storage.Commit
    folder: Path
    files: ExitStack
    buffers: ExitStack
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        write, urls = self._write(f"{_LEFT_OF}{self.name}", self.files), pa.array(self.settings.urls)
        self.leave = self._buffered(
            LEFT, lambda rows: write(rows.set_column(0, "file", urls.take(rows["file"].combine_chunks())))
        )
        """Takes events that are left over, and writes them with the names of their files."""

    def dealt(self, step: str, schema: pa.Schema, key: str) -> _Take:
        """Takes rows, and writes them for a step in runs of one part each, by a hash of their key, else their query."""
        write = self._write(f"{_DEALT}{step}-{self.name}", self.files)

        def deal(table: pa.Table) -> None:
            coded = pc.coalesce(table[key], table["query"]).combine_chunks().dictionary_encode()
            hashes = hash_ids(coded.dictionary.to_pylist()) % self.settings.parts
            part_N = hashes.astype(np.int32)[coded.indices.to_numpy()]
            rows = table.append_column("part", pa.array(part_N)).take(pa.array(np.argsort(part_N, kind="stable")))
            for start, end in pairwise(offsets(np.bincount(part_N)).tolist()):
                write(rows.slice(start, end - start))

        return self._buffered(schema, deal)

    def rows(self) -> _Take:
        """Takes rows in order of their periods, and writes a file for each period."""
        number, last = self.name.rpartition("-")[2], ""
        of_period = self.files.enter_context(ExitStack())
        write = self._write("", of_period)

        def split(table: pa.Table) -> None:
            nonlocal last, write
            coded = table["period"].combine_chunks().dictionary_encode()
            starts = np.flatnonzero(np.diff(coded.indices.to_numpy(), prepend=-1)).tolist()
            rows = table.drop_columns(NAMED.names).rename_columns([*MADE.names, *self.settings.carried.names])
            self.counts["rows"] += len(rows)
            for start, end in pairwise([*starts, len(rows)]):
                if (name := table["period"][start].as_py()) != last:
                    of_period.close()
                    last, write = name, self._write(f"{ROWS_OF}{name}/part-{number}", of_period)
                write(rows.slice(start, end - start))

        return self._buffered(self.settings.rows, split)

    def _buffered(self, schema: pa.Schema, write: _Take) -> _Take:
        """Passes rows on in tables of a fixed number of rows, so that files depend on the rows alone."""
        size, waiting, n = max(1 << 12, _VALUES // len(schema)), [schema.empty_table()], 0

        def take(rows: pa.Table) -> None:
            nonlocal waiting, n
            waiting.append(rows)
            n += len(rows)
            while n >= size:
                whole = pa.concat_tables(waiting)
                write(whole.slice(0, size))
                waiting, n = [whole.slice(size)], n - size

        def end(kind: object, *_: object) -> None:
            if kind is None and n:
                write(pa.concat_tables(waiting))

        self.buffers.push(end)
        return take

    def _write(self, name: str, stack: ExitStack) -> _Take:
        """Writes row groups to a file, which is there from the first on."""
        writer: pq.ParquetWriter | None = None

        def write(rows: pa.Table) -> None:
            nonlocal writer
            if len(rows):
                if writer is None:
                    path = stack.enter_context(self.commit.file(f"{name}-{{hash}}.parquet"))
                    writer = stack.enter_context(pq.ParquetWriter(path, rows.schema, compression="zstd"))
                writer.write_table(rows, row_group_size=len(rows))

        return write


def _read(unit: Unit, numbers: Sequence[int], output: _Output) -> None:
    """Read files: events with a query id go to their query; others, and what is shown, to their session."""
    source, counts, schema = output.settings.source, output.counts, output.settings.events
    carried = {field.name: field.type for field in output.settings.carried}
    to_query, to_session = output.dealt("query", schema, "query"), output.dealt("session", OWN, "session")
    for file, number in zip(unit.files, numbers, strict=True):
        for batch in EventFile.of(file, source.event_tables).read(number, source.columns.clock, carried):
            counts["in"] += len(batch.events) + batch.counts.total()
            counts.update({f"left_over_{reason}": n for reason, n in batch.counts.items() if n})
            output.leave(batch.left)
            columns = {name: batch.events[name] for name in batch.events.column_names}
            arrays = [
                cols.in_type(field.name.removeprefix(SHOWN), columns[field.name], field.type, file.url)
                if field.name in columns
                else pa.nulls(len(batch.events), field.type)
                for field in schema
            ]
            events = pa.Table.from_arrays(arrays, schema=schema)
            waiting_N = pc.is_null(events["query"])
            to_query(events.filter(pc.invert(waiting_N)))
            counts["waiting"] += pc.sum(waiting_N).as_py() or 0
            own = events.select(OWN.names)
            shown_N = pc.and_(pc.equal(own["act"], 0), pc.is_valid(own["session"]))
            to_session(own.filter(pc.or_(waiting_N, shown_N)))


def _by_session(part: int, urls: Sequence[str], output: _Output) -> None:
    window = int(output.settings.source.window_minutes * _MINUTE_US)
    with _loaded(part, urls, OWN, output) as db:
        by_session(db, window=window)
        dealt, schema = output.dealt("query", output.settings.events, "query"), output.settings.events
        for batch in rows_in_view(db, "result", OWN):
            carried = [pa.nulls(len(batch), field.type) for field in output.settings.carried]
            dealt(pa.Table.from_arrays([*batch.columns, *carried], schema=schema))
        _leave_over(db, output)


def _by_query(part: int, urls: Sequence[str], output: _Output) -> None:
    settings, counts = output.settings, output.counts
    merge = settings.source.merge
    to = output.rows() if merge is None else output.dealt("name", settings.rows, "name")
    names = settings.carried.names
    with _loaded(part, urls, settings.events, output) as db:
        by_query(db, carried=len(names), name=f"c{names.index(merge)}" if merge in names else None)
        for batch in rows_in_view(db, "result", settings.rows):
            to(_with_periods(batch, settings.source.columns))
        for act, n in db.sql("SELECT act, count(*) FROM kept GROUP BY act").fetchall():
            counts[ACTS[act]] += n
        counts["lists"] += db.sql("SELECT count(DISTINCT query) FROM firsts").fetchall()[0][0]
        _leave_over(db, output)


def _by_name(part: int, urls: Sequence[str], output: _Output) -> None:
    to = output.rows()
    with _loaded(part, urls, output.settings.rows, output) as db:
        by_name(db, carried=len(output.settings.carried))
        for batch in rows_in_view(db, "result", output.settings.rows):
            to(batch)
        output.counts["merged"] += db.sql("SELECT count(*) FROM firsts WHERE place > 1").fetchall()[0][0]


def _with_periods(rows: pa.Table, columns: ColumnMapping) -> pa.Table:
    """The rows with their periods, `all` where another column than their time determines these."""
    if columns.time != "time" or columns.period == "part":
        names_N = pa.repeat("all", len(rows))
    else:
        names_N, _ = periods(rows["time"].combine_chunks(), columns.period, columns.clock)
        names_N = names_N.fill_null("all")  # of a year without a name, which `prepare` rejects
    return rows.set_column(rows.column_names.index("period"), NAMED.field("period"), names_N)


def _leave_over(db: duckdb.DuckDBPyConnection, output: _Output) -> None:
    for batch in rows_in_view(db, "left_over", LEFT):
        output.counts.update(f"left_over_{reason}" for reason in batch["reason"].to_pylist())
        output.leave(batch)


@contextmanager
def _loaded(part: int, urls: Sequence[str], schema: pa.Schema, output: _Output) -> Iterator[duckdb.DuckDBPyConnection]:
    """The database of the rows that are dealt to a part."""
    batches = (batch for url in urls for batch in _dealt_rows(url, part, schema))
    with database_of(batches, schema, scratch=output.folder, memory_limit=output.settings.memory) as db:
        yield db


def _dealt_rows(url: str, part: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a file that are dealt to a part: row groups have rows of one."""
    with storage.open_input(url) as stream, pq.ParquetFile(stream) as file:
        column = file.schema_arrow.get_field_index("part")
        for i in range(file.num_row_groups):
            if file.metadata.row_group(i).column(column).statistics.min == part:
                yield from file.iter_batches(_BATCH_ROWS, row_groups=[i], columns=schema.names)
