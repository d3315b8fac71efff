"""The quarantine: every row and group that `prepare` could not use, in Parquet beside the data."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale.errors import without_credentials
from ltrscale.ingest.rows import TEXT_LENGTH, Rejection
from ltrscale.storage import Commit, named_errors

QUARANTINE = "quarantine"
SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("line", pa.int64()),
        ("rule", pa.string()),
        ("text", pa.string()),
        ("query_id", pa.string()),
        ("rows", pa.int64()),
        ("found", pa.string()),
    ]
)
_BUFFER = 4096


class Quarantine:
    """Writes rejections as they arrive, counts them, and remembers the first five.

    Without rejections there is no file. `close` puts the file in place. `number` is the file's number.
    """

    def __init__(self, commit: Commit, *, number: int = 0) -> None:
        assert SCHEMA.names == [field.name for field in fields(Rejection)]
        self.rows_by_rule: Counter[str] = Counter()
        self.first: list[Rejection] = []
        self._commit = commit
        self._name = f"{QUARANTINE}/part-{number:05}-{{hash}}.parquet"
        self._buffer: list[Rejection] = []
        self._stack = ExitStack()
        self._writer: pq.ParquetWriter | None = None

    @property
    def rows(self) -> int:
        """Input rows rejected so far."""
        return self.rows_by_rule.total()

    def add(self, rejections: Iterable[Rejection]) -> None:
        """Write and count rejections."""
        for rejection in rejections:
            self.rows_by_rule[rejection.rule] += rejection.rows
            if len(self.first) < 5:
                self.first.append(rejection)
            self._buffer.append(rejection)
            if len(self._buffer) == _BUFFER:
                self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            path = self._stack.enter_context(self._commit.file(self._name))
            self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        columns: list[Sequence[object]] = list(
            zip(*(vars(rejection).values() for rejection in self._buffer), strict=True)
        )
        columns[0] = [without_credentials(str(file)) for file in columns[0]]
        for text in (SCHEMA.names.index(name) for name in ("text", "query_id", "found")):
            columns[text] = [_storable(value) for value in columns[text]]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        with named_errors(self._commit.url, "write"):
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))
        self._buffer.clear()

    def close(self) -> tuple[str, ...]:
        """Put the file in place; returns its name below the data set, or nothing without rejections."""
        if self._buffer:
            self._flush()
        if self._writer is None:
            return ()
        with named_errors(self._commit.url, "write"):
            self._writer.close()
            self._stack.close()
        return (self._commit.files[-1].path,)


def _storable(text: object) -> str:
    """At most 1,000 characters, without the lone surrogates that stand for undecodable bytes."""
    return str(text)[:TEXT_LENGTH].encode(errors="replace").decode()
