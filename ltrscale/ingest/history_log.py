"""Computes the features of a log's history, before `prepare` reads the log: once for each window, of all events.

    OUT-history/rows-FILE-*.parquet     the time, keys and numbers of each row of an input file, with its line
    OUT-history/events-FILE-*.parquet   the same of the events, if they are another table
    OUT-history/known-FILE-PASS-*.parquet   the features of a pass at each row, in the order of lines

The first two are the tables `rows` and `events` of the exported SQL; their names end in a hash. Memory does not grow
with the log: DuckDB sorts, and spills to disk. On Ray each file and each pass is a task.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.errors import InputError
from ltrscale.ingest.history import LINE, Pass, quoted, select_known
from ltrscale.ingest.inputs import PrepareConfig, fingerprints, list_inputs
from ltrscale.ingest.parallel import Call, each_done
from ltrscale.ingest.sort import database
from ltrscale.ingest.source import File, Source
from ltrscale.progress import Report
from ltrscale.stages.stage import Origin, Settings, Stage

_BATCH_ROWS = 1 << 16
_FILE = pa.field("__file__", pa.int32())
_VERSION = {"format": "ltrscale-history", "version": 1}

_Files = tuple[storage.Placed, ...]


class HistoryLog(Stage):
    """Compute the features of a log's history."""

    stage: ClassVar = "history"
    makes_data: ClassVar = True
    prepare: PrepareConfig
    ray: Operational[bool] = False

    def own_settings(self) -> Settings:
        """The inputs and their source, without the memory and other settings of `prepare`."""
        return self.prepare.model_dump(mode="json", include={"inputs", "source"})

    @cached_property
    def files(self) -> list[File]:
        """The files of the rows, listed once: those that come while the features are computed have none."""
        return list_inputs(self.prepare.inputs)

    def inputs(self) -> dict[str, str]:
        """Fingerprints of the input files, and of the events."""
        return fingerprints(self.files, self.prepare.source)

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Read the columns that matter of all rows and events, then make the passes."""
        source, url = self.prepare.source, storage.absolute(self.out)
        history = source.known_before
        assert history is not None
        memory = self.prepare.sort_memory
        with storage.Commit(self.out) as commit:

            def run(functions: Sequence[Callable[[], _Files]]) -> list[str]:
                made, of = dict[int, _Files](), f"the history of {self.out}"

                def done(i: int, files: _Files) -> None:
                    commit.adopt(files)  # at once, so that they are deleted if another call fails
                    made[i] = files

                each_done([Call(each, of, partial(done, i)) for i, each in enumerate(functions)], ray=self.ray)
                if not any(made.values()):
                    raise InputError(f"{self.out}: there are no rows, or no events; name files that have some")
                return [storage.join(url, placed.path) for i in sorted(made) for placed in made[i]]

            own = [partial(_write_rows, url, source, i, file, own=True) for i, file in enumerate(self.files)]
            rows = events = run([call for call, file in zip(own, self.files, strict=True) if not file.is_rewritten])
            if rewritten := [call for call, file in zip(own, self.files, strict=True) if file.is_rewritten]:
                rows = [*rows, *run(rewritten)]
            if history.events is not None:
                files = [File(url) for url in storage.list_files(history.events)]
                events = run([partial(_write_rows, url, source, i, file, own=False) for i, file in enumerate(files)])
            passes = enumerate(history.passes())
            run([partial(_write_known, url, source, i, each, rows, events, memory) for i, each in passes])
            commit.finish({**_VERSION, "made_by": origin})

    def known(self) -> list[File]:
        """The files of the rows, with their features."""
        names = sorted(storage.listed_in(storage.read_manifest(self.out) or {}))
        starts = [f"known-{i:05}-" for i, _ in enumerate(self.files)]
        found = [tuple(storage.join(self.out, name) for name in names if name.startswith(each)) for each in starts]
        return [replace(file, history=history) for file, history in zip(self.files, found, strict=True)]


def _write_rows(out: str, source: Source, number: int, file: File, *, own: bool) -> _Files:
    """Write the time, keys and numbers of a file's rows or, if it is not our `own`, of its events."""
    history, time = source.known_before, _time(source)
    assert history is not None
    keys = [*(history.row_keys() if own else ()), *(history.event_keys() if not own or not history.events else ())]
    numbers = [] if own and history.events else history.event_values()
    time = time if own else history.time or time
    tables = source.timed(file, time, dict.fromkeys(keys), numbers, own=own)
    with storage.Commit(out, helping=True) as commit:
        if (first := next(tables, None)) is not None:
            name = f"{'rows' if own else 'events'}-{number:05}-{{hash}}.parquet"
            with commit.file(name) as path, pq.ParquetWriter(path, first.schema.append(_FILE)) as writer:
                for table in chain([first], tables):
                    writer.write_table(table.append_column(_FILE, pa.repeat(number, len(table)).cast(_FILE.type)))
        return commit.leave()


def _write_known(
    out: str, source: Source, number: int, each: Pass, rows: Sequence[str], events: Sequence[str], memory: str
) -> _Files:
    """Write the features of a pass, a file for each input file."""
    features = ", ".join(f"CAST({quoted(name)} AS REAL) AS {quoted(name)}" for name in each.features)
    found = select_known([each], _time(source), f"rows.{_FILE.name}, rows.{LINE}")
    query = f"SELECT {_FILE.name}, {LINE}, {features} FROM ({found}) ORDER BY {_FILE.name}, {LINE}"
    with (
        storage.scratch.directory() as scratch,
        storage.Commit(out, helping=True) as commit,
        database(scratch, memory_limit=memory) as connection,
    ):
        connection.register("rows", _dataset(rows))
        connection.register("events", _dataset(events))
        batches = connection.sql(query).to_arrow_reader(_BATCH_ROWS)
        for file, of_file in groupby(chain.from_iterable(map(_by_file, batches)), key=itemgetter(0)):
            with commit.file(f"known-{file:05}-{number:03}-{{hash}}.parquet") as path, ExitStack() as stack:
                writer = None
                for _, batch in of_file:
                    writer = writer or stack.enter_context(pq.ParquetWriter(path, batch.schema))
                    writer.write_batch(batch)
        return commit.leave()


def _time(source: Source) -> str:
    """The column with the time of the rows."""
    assert source.mapping is not None
    assert source.mapping.time is not None
    return source.mapping.time


def _dataset(urls: Sequence[str]) -> Any:
    """The rows of files, as DuckDB reads them."""
    import pyarrow.dataset as ds  # loads pandas

    places = [storage.arrow_filesystem(url) for url in urls]
    return ds.dataset([path for _, path in places], filesystem=places[0][0], format="parquet")


def _by_file(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The number of each file in a batch, and its rows."""
    file_N = batch.column(0).to_numpy()
    for start, stop in pairwise([0, *(np.flatnonzero(np.diff(file_N)) + 1).tolist(), len(batch)]):
        yield int(file_N[start]), batch.slice(start, stop - start).drop_columns([_FILE.name])
