"""Blocks of rows, which every reader of raw input yields, and rejections of unusable rows with their quarantine.

Shapes: N rows (documents) of a block, F features.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ltrscale.arrays import Bools, Floats, Ints
from ltrscale.errors import InputError, without_credentials
from ltrscale.storage import Commit, is_fault, named_errors

Rule = Literal[
    "unparsable",
    "feature_count",
    "infinite",
    "bad_label",
    "bad_gain",
    "bad_weight",
    "bad_tokens",
    "not_joined",
    "empty_group",
    "duplicate_document",
    "returning_query",
    "group_too_long",
]
"""Reasons to reject a row or group; docs/data.md explains each."""

Cause = Literal["", "time", "encoding", "no_label"]
"""Why a row was rejected, where a setting may mend it; empty elsewhere."""

TEXT_LENGTH = 1000
"""The most characters of a rejected row that are shown."""
_SHOWN = TEXT_LENGTH // 5
"""Columns of a row that fill them: each takes five characters or more."""


@dataclass(frozen=True)
class Rejection:
    """One rejected row, or a run of rows of one group rejected together.

    `line` is the 1-based line (text) or row (Parquet) of the first of `rows` input rows; an empty group has 0 rows.
    `text` is the offending text, cut at 1,000 characters. `query_id` is "" if it could not be read. `found` is the
    offending value in words, such as `label -1`; "" if only the text shows it. What an error advises follows from
    `cause`, and for a time from its own text, `value`; the quarantine has neither.
    """

    file: str
    line: int
    rule: Rule
    text: str
    query_id: str = ""
    rows: int = 1
    found: str = ""
    cause: Cause = ""
    value: str = ""


RawTexts = Callable[[int], str]
"""The text of a line (text) or row (Parquet) of the input, at most 1,000 characters, for the quarantine."""


class Raw(NamedTuple):
    """Some rows with their line or row numbers and texts, the lines rejected, and the share of the file so far."""

    rows: pa.RecordBatch
    lines_N: Ints
    texts: RawTexts
    rejected: list[Rejection]
    share: float


@dataclass
class RowBlock:
    """Consecutive rows of one input file, parsed; the rows of a query may continue in the next block.

    Rows that could not be parsed are only in `rejected`. `lines_N` are input positions (1-based, rising). Labels are
    NaN if a row has none. `periods_N` is None if the file has one period, `period`. `starts_N` is True where a reader
    knows that a new group starts (from a file of group sizes, or from one group per row); None means that a group
    starts where the query id changes. `texts` has the input of the lines in `lines_N`, or is None if it is no longer in
    memory. `share` is the share of the file read when the block was complete, from 0 to 1.
    """

    file: str
    lines_N: Ints
    query_ids_N: pa.StringArray
    features_NF: Floats
    labels_N: Floats
    period: str = ""
    periods_N: pa.StringArray | None = None
    doc_ids_N: pa.StringArray | None = None
    starts_N: Bools | None = None
    columns: dict[str, pa.Array] = field(default_factory=dict)
    """Further columns: each document's `positions`, `clicks`, `weights`, `gains` and tokens; `meta_*` and the query's
    tokens, as in a group's first row; the full length of each token text (see `texts.FULL`)."""
    rejected: list[Rejection] = field(default_factory=list)
    texts: RawTexts | None = None
    share: float = 0.0

    def __len__(self) -> int:
        return len(self.lines_N)


def row_periods(rows: RowBlock, fixed: str, default: str) -> pa.StringArray:
    """The period of each row: a fixed one, that of its file or its own, else the default."""
    if fixed or rows.periods_N is None:
        return pa.repeat(fixed or rows.period or default, len(rows))
    named_N = rows.periods_N.fill_null("")
    return pc.if_else(pc.equal(named_N, ""), default, named_N)


def cut(rows: RowBlock, start: int, stop: int) -> RowBlock:
    """The rows from `start` to `stop`, without rejections."""
    return _taken(rows, slice(start, stop), lambda column: column.slice(start, stop - start))


def keep(rows: RowBlock, keep_N: Bools) -> RowBlock:
    """The rows where `keep_N` is True, without rejections."""
    mask = pa.array(keep_N)
    # without starts: a group may have lost its first row
    return replace(_taken(rows, keep_N, lambda column: column.filter(mask)), starts_N=None)


def _taken(rows: RowBlock, index: slice | Bools, take: Callable[[pa.Array], pa.Array]) -> RowBlock:
    return replace(
        rows,
        lines_N=rows.lines_N[index],
        query_ids_N=take(rows.query_ids_N),
        features_NF=rows.features_NF[index],
        labels_N=rows.labels_N[index],
        periods_N=None if rows.periods_N is None else take(rows.periods_N),
        doc_ids_N=None if rows.doc_ids_N is None else take(rows.doc_ids_N),
        starts_N=None if rows.starts_N is None else rows.starts_N[index],
        columns={name: take(column) for name, column in rows.columns.items()},
        rejected=[],
    )


def concat(pieces: Sequence[RowBlock]) -> RowBlock:
    """The rows of all pieces, with null for a column that a piece lacks; texts are kept if all are of one file."""
    pieces = [piece for piece in pieces if len(piece)] or pieces[:1]
    if len(pieces) == 1:
        return pieces[0]

    def strings(arrays: list[pa.StringArray | None]) -> pa.StringArray | None:
        if all(array is None for array in arrays):
            return None
        sized = zip(arrays, pieces, strict=True)
        return pa.concat_arrays([pa.nulls(len(p), pa.string()) if a is None else a for a, p in sized])

    types = {name: column.type for piece in pieces for name, column in piece.columns.items()}
    # line numbers identify rows within a file only
    firsts = [int(piece.lines_N[0]) for piece in pieces]
    texts = [piece.texts for piece in pieces if piece.texts is not None and piece.file == pieces[0].file]
    return RowBlock(
        file=pieces[0].file,
        lines_N=np.concatenate([piece.lines_N for piece in pieces]),
        query_ids_N=pa.concat_arrays([piece.query_ids_N for piece in pieces]),
        features_NF=np.concatenate([piece.features_NF for piece in pieces]),
        labels_N=np.concatenate([piece.labels_N for piece in pieces]),
        period=pieces[0].period,
        periods_N=strings([piece.periods_N for piece in pieces]),
        doc_ids_N=strings([piece.doc_ids_N for piece in pieces]),
        columns={
            name: pa.concat_arrays([p.columns.get(name, pa.nulls(len(p), kind)) for p in pieces])
            for name, kind in types.items()
        },
        texts=(lambda line: texts[bisect_right(firsts, line) - 1](line)) if len(texts) == len(pieces) else None,
        share=pieces[-1].share,
    )


class RowTexts:
    """Parquet rows as text for the quarantine: their columns as JSON, by the number of the row."""

    def __init__(self, batch: pa.RecordBatch, lines_N: Ints) -> None:
        self.batch, self.lines_N = batch, lines_N
        self._last = 0, ""  # a cache: all documents of a bad group show the same row, which may be long

    def __call__(self, line: int) -> str:
        """The text of one row."""
        if self._last[0] != line:
            row = int(np.searchsorted(self.lines_N, line))
            columns = zip(self.batch.schema.names[:_SHOWN], self.batch.columns[:_SHOWN], strict=True)
            values = {name: plain_value(column[row]) for name, column in columns}
            self._last = line, json.dumps(values, default=str, ensure_ascii=False)[:TEXT_LENGTH]
        return self._last[1]

    def only(self, lines_N: Ints) -> "RowTexts":
        """The texts of these rows, without the rest of the batch in memory."""
        lines = np.unique(lines_N)
        return RowTexts(self.batch.take(pa.array(np.searchsorted(self.lines_N, lines))), lines)


def plain_value(value: pa.Scalar) -> object:
    """A value for messages; unreadable text is replaced."""
    try:
        return value.as_py()
    except (UnicodeDecodeError, ValueError, OverflowError):
        return "(not readable)"


QUARANTINE = "quarantine"
_SCHEMA = pa.schema(
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
        self.rows_by_rule: Counter[str] = Counter()
        self.first: list[Rejection] = []
        self._commit = commit
        self._name = f"{QUARANTINE}/part-{number:05}-{{hash}}.parquet"
        self._buffer: list[Rejection] = []
        self._stack = ExitStack()
        self._writer: pq.ParquetWriter | None = None

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
            self._writer = pq.ParquetWriter(path, _SCHEMA, compression="zstd")
        columns = {name: [vars(rejection)[name] for rejection in self._buffer] for name in _SCHEMA.names}
        columns["file"] = [without_credentials(file) for file in columns["file"]]
        for name in ("text", "query_id", "found"):
            # without the lone surrogates that stand for undecodable bytes
            columns[name] = [value[:TEXT_LENGTH].encode(errors="replace").decode() for value in columns[name]]
        arrays = [pa.array(columns[field.name], field.type) for field in _SCHEMA]
        with named_errors(self._commit.url, "write"):
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA))
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


@contextmanager
def damage(url: str, where: str) -> Iterator[None]:
    """Raise InputError, with the place in the file, if pyarrow cannot decode it."""
    with named_errors(url):
        try:
            yield
        # MemoryError and OverflowError too: a damaged length may ask for any amount of memory
        except (pa.ArrowException, OSError, EOFError, ValueError, MemoryError, OverflowError) as error:
            if is_fault(error):
                raise
            raise InputError(f"{url}: cannot decode {where}: {error}; write the file again or remove it") from error
