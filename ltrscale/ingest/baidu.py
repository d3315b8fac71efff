r"""Reads the text files of Baidu-ULTR: sessions of clicks, and queries with documents that experts have judged.

Fields lie between tabs, the ids of tokens between `\x01`. In sessions a line of three fields begins the list that was
shown for a query, and each line after it is a document:

    query id, query, reformulation
    position, URL's hash, title, abstract, type of media, click, ... (further fields of how it was shown are not read)

Judgements have a document per line: query id, query, title, abstract, label, bucket. The public loader of the data set
(github.com/ChuXiaokai/baidu_ultr_dataset) reads the same, but adds 10 to each id to make room for special tokens. Here
ids stay as written, and special tokens have ids above them.

Shapes: N rows (documents) of a block, F features.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from ltrscale.data.dataset.manifest import Feature
from ltrscale.ingest.items import ItemBlocks
from ltrscale.ingest.lines import Lines, line_blocks
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.rows import TEXT_LENGTH, Raw, Rejection, RowBlock
from ltrscale.ingest.source import Encoders, File, Reader, Source
from ltrscale.ingest.texts import Encoding, ReadyIds, TextColumn, TokenColumns

_FEATURES = (
    Feature(name="query_length"),
    Feature(name="title_length"),
    Feature(name="abstract_length"),
    Feature(name="media_type", kind="categorical"),
)
"""Tokens of the texts, before they are cut, and the type of media, which judgements do not have."""
_SHOWN, _JUDGED = (
    ("position", "doc", "title", "abstract", "media_type", "click"),
    ("title", "abstract", "label", "bucket"),
)
"""The fields of a document that are read."""
_NUMBERS = ("position", "click", "label", "bucket")
_NUMBER = re.compile(r"[0-9]{1,6}(\.0*)?")
_MOST_TOKENS = {"query": 32, "title": 64, "abstract": 128}
"""Tokens of a text that are kept; 128 is also what a `TextColumn` keeps by default."""
_QUERY_FIELDS, _JUDGED_FIELDS, _DOCUMENT_FIELDS = 3, 6, 7


class BaiduUltr(Source):
    """Text files of the Baidu-ULTR data set, plain, gzip or xz."""

    fixed: ClassVar = {"max_query": 32, "max_title": 64, "max_abstract": 128}

    kind: Literal["baidu_ultr"] = "baidu_ultr"
    layout: Literal["sessions", "judgements"] = "sessions"
    """`sessions` are the training files, lists with clicks (the labels too); `judgements` the file of experts."""
    size: int = Field(default=21_990, ge=1)
    """Number of token ids; a row with a larger id is rejected. The public loader has 22,000, ten of them special."""
    missing: Literal["reject", "empty"] = "empty"
    """A document without a title or an abstract is rejected, as the public loader does, or keeps an empty one."""

    def find_features(self, files: Sequence[File]) -> tuple[Feature, ...]:  # noqa: ARG002
        """The same features for all files."""
        return _FEATURES

    def open(
        self,
        features: Sequence[Feature],  # noqa: ARG002
        *,
        first: str,  # noqa: ARG002
        encoders: Encoders,
        encoding: Encoding | None = None,
    ) -> Reader:
        """The reader of this layout."""
        columns = self._columns()
        return lambda file: _read(ItemBlocks(file.url, columns, _FEATURES, encoders, encoding=encoding))

    def _columns(self) -> ColumnMapping:
        """The uses of the columns of `_Rows`."""
        numeric = tuple(feature.name for feature in _FEATURES if feature.kind == "numeric")
        uses: dict[str, Any] = {"label": "label", "meta": ("qid", "bucket")}
        if self.layout == "sessions":
            uses = {"label": "click", "clicks": "click", "positions": "position", "item": "doc", "meta": ("qid",)}
        tokens, media = self.token_columns, ("media_type",)
        return ColumnMapping(query="group", features=numeric, categorical=media, optional=media, tokens=tokens, **uses)

    @property
    def token_columns(self) -> TokenColumns:
        """The token fields."""
        return TokenColumns(
            tokenizer=ReadyIds(size=self.size),
            query={"query": TextColumn(column="query", max_tokens=_MOST_TOKENS["query"])},
            document={
                "title": TextColumn(column="title", max_tokens=_MOST_TOKENS["title"], missing=self.missing),
                "abstract": TextColumn(column="abstract", max_tokens=_MOST_TOKENS["abstract"], missing=self.missing),
            },
        )


@dataclass(frozen=True)
class _Query:
    """The query of the documents that follow; `fault` says why they cannot be used."""

    id: str
    qid: str
    text: str
    fault: str = ""


@dataclass
class _Rows:
    """The documents of a block."""

    url: str
    texts: Lines
    names: Sequence[str]
    """The fields of a document."""
    lines: list[int] = field(default_factory=list)
    documents: list[dict[str, str]] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)

    def add(self, line: int, query: _Query, values: Sequence[str]) -> None:
        """Add a document, unless a field that is a number has none."""
        document = dict(zip(self.names, values, strict=True))
        for name in _NUMBERS:
            if not _NUMBER.fullmatch(document.get(name, "0")):
                self.reject(line, f"{name} {document[name][:40]!r} is no number", query.id)
                return
        self.lines.append(line)
        self.documents.append({"group": query.id, "qid": query.qid, "query": query.text, **document})

    def reject(self, line: int, reason: str, query: str, rows: int = 1) -> None:
        """Reject a line, with the id of its query."""
        text = f"{reason}: {self.texts(line)}"[:TEXT_LENGTH]
        self.rejected.append(Rejection(self.url, line, "unparsable", text, query, rows, reason))

    def raw(self) -> Raw:
        """The documents as items."""
        schema = pa.schema([(name, pa.string()) for name in ("group", "qid", "query", *self.names)])
        batch = pa.RecordBatch.from_pylist(self.documents, schema)
        columns = dict(zip(schema.names, batch, strict=True))
        for name in ("query", "title", "abstract"):
            columns[name] = pc.replace_substring(columns[name], "\x01", " ")
            n = pc.add(pc.count_substring(columns[name], " "), 1)
            columns[f"{name}_length"] = pc.if_else(pc.equal(columns[name], ""), 0, n)
        for name in columns.keys() & {*_NUMBERS}:
            columns[name] = columns[name].cast(pa.float32()).cast(pa.int32())
        if "media_type" in columns:
            columns["media_type"] = pc.if_else(pc.equal(columns["media_type"], ""), None, columns["media_type"])
        lines_N = np.array(self.lines, np.int64)
        return Raw(pa.record_batch(columns), lines_N, self.texts, self.rejected, self.texts.share)


def _read(build: ItemBlocks) -> Iterator[RowBlock]:
    """Read a file in blocks of a few megabytes; groups have unique query ids, and `meta_qid` the one in the file."""
    # session queries recur often in this data set, so a group's id is the query's id plus the file name and the line
    url, is_judged = build.url, build.mapping.clicks is None
    names, sessions = _JUDGED if is_judged else _SHOWN, _Sessions(url)
    for lines in line_blocks(url):
        rows = _Rows(url, lines, names)
        (_read_judged if is_judged else sessions.read)(rows)
        if rows.lines or rows.rejected:
            yield build(rows.raw())
    if empty := sessions.end():
        yield build(_Rows(url, lines, names, rejected=empty).raw())


@dataclass
class _Sessions:
    """Parses session lines; remembers the last query, and its line while it has no document."""

    url: str
    _last: _Query = _Query("", "", "", "a document before any query")
    _alone: tuple[int, str, str] | None = None

    def read(self, rows: _Rows) -> None:
        for number, parts in _fields_of(rows.texts, _DOCUMENT_FIELDS):
            if len(parts) < _JUDGED_FIELDS - 1:
                rows.rejected += self.end()
                self._last = query = self._query(number, parts)
                if query.fault:
                    rows.reject(number, query.fault, "", rows=0)
                else:
                    self._alone = number, rows.texts(number), query.id
                continue
            self._alone, fault = None, self._last.fault
            if len(parts) < _DOCUMENT_FIELDS:
                fault = f"{len(parts)} fields where a query has 3 and a document more than 6"
            if fault:
                rows.reject(number, fault, self._last.id)
            else:
                rows.add(number, self._last, parts[:6])

    def _query(self, number: int, parts: Sequence[str]) -> _Query:
        if len(parts) != _QUERY_FIELDS or not parts[0]:
            fault = "no query id" if len(parts) == _QUERY_FIELDS else f"{len(parts)} fields where a query has 3"
            return _Query("", "", "", f"{fault}, in line {number}; the documents after it have no query")
        name = self.url.rpartition("/")[2].partition(".")[0]
        return _Query(f"{parts[0]}:{name}:{number}", parts[0], parts[1])

    def end(self) -> list[Rejection]:
        """The rejection of the last query if it has no documents."""
        alone, self._alone = self._alone, None
        return [Rejection(self.url, alone[0], "empty_group", alone[1], alone[2], rows=0)] if alone else []


def _read_judged(rows: _Rows) -> None:
    for number, parts in _fields_of(rows.texts):
        if len(parts) == _JUDGED_FIELDS and parts[0]:
            rows.add(number, _Query(parts[0], parts[0], parts[1]), parts[2:])
        else:
            fault = "no query id" if len(parts) == _JUDGED_FIELDS else f"{len(parts)} fields where 6 belong"
            rows.reject(number, fault, parts[0])


def _fields_of(lines: Lines, most: int = -1) -> Iterator[tuple[int, list[str]]]:
    """The number and fields of each line, split at most `most` times."""
    for index in np.flatnonzero(~lines.blank_M()).tolist():
        text = lines.bytes_of(index).decode(errors="replace")
        yield lines.first + index, text.removesuffix("\r").split("\t", most)
