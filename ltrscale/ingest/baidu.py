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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from ltrscale.data.dataset.manifest import Feature
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.lines import Lines, line_blocks
from ltrscale.ingest.rows import TEXT_LENGTH, Rejection, RowBlock, Rule, keep
from ltrscale.ingest.source import Encoders, File, Reader, Source
from ltrscale.ingest.texts import FULL, Encoding, ReadyIds, TextColumn, TokenColumns, TokenReader

BAIDU_FEATURES = (
    Feature(name="query_length"),
    Feature(name="title_length"),
    Feature(name="abstract_length"),
    Feature(name="media_type", kind="categorical"),
)
"""Tokens of the texts, before they are cut, and the type of media, which judgements do not have."""
_NAMES = {"positions": "position", "clicks": "click", "labels": "label", "meta_bucket": "bucket"}
_MOST_TOKENS = {"query": 32, "title": 64, "abstract": 128}
"""Tokens of a text that are kept; 128 is also what a `TextColumn` keeps by default."""
_QUERY_FIELDS, _JUDGED_FIELDS, _DOCUMENT_FIELDS = 3, 6, 7


class BaiduUltr(Source):
    """Text files of the Baidu-ULTR data set, plain, gzip or xz."""

    kind: Literal["baidu_ultr"] = "baidu_ultr"
    layout: Literal["sessions", "judgements"] = "sessions"
    """`sessions` are the training files, lists with clicks (the labels too); `judgements` the file of experts."""
    size: int = Field(default=21_990, ge=1)
    """Number of token ids; a row with a larger id is rejected. The public loader has 22,000, ten of them special."""
    missing: Literal["reject", "empty"] = "empty"
    """A document without a title or an abstract is rejected, as the public loader does, or keeps an empty one."""

    def find_features(self, files: Sequence[File]) -> tuple[Feature, ...]:  # noqa: ARG002
        """The same features for all files."""
        return BAIDU_FEATURES

    def open(
        self,
        features: Sequence[Feature],  # noqa: ARG002
        *,
        first: str,  # noqa: ARG002
        encoders: Encoders,
        encoding: Encoding | None = None,
    ) -> Reader:
        """The reader of this layout."""
        return lambda file: read_baidu(file.url, self, encoding=encoding, encoders=encoders)

    @property
    def label_place(self) -> str:
        """Clicks or labels, depending on the layout."""
        return "the clicks or labels of the lines"

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
    """The documents of a block, field by field."""

    lines: list[int] = field(default_factory=list)
    queries: list[_Query] = field(default_factory=list)
    values: list[tuple[str, ...]] = field(default_factory=list)
    """One per name in `names`, as written in the file."""
    rejected: list[Rejection] = field(default_factory=list)

    def add(self, line: int, query: _Query, values: Sequence[str]) -> None:
        self.lines.append(line)
        self.queries.append(query)
        self.values.append(tuple(values))


def read_baidu(url: str, config: BaiduUltr, *, encoding: Encoding | None, encoders: Encoders) -> Iterator[RowBlock]:
    """Read a file in blocks of a few megabytes; groups have unique query ids, and `meta_qid` the one in the file.

    Session queries recur often in this data set, so a group's id is the query's id plus the file name and the line.
    Rejections: `unparsable`, a line that is neither query nor document, a document with an unreadable query, or a
    position, click or label that is not a number; `bad_tokens`, a token that is not an id of the vocabulary, or a query
    without tokens; `empty_group`, a query without documents.

    Raises:
        InputError: the file is missing or its compressed data is broken.
    """
    name = url.rpartition("/")[2].partition(".")[0]
    sessions = _Sessions(url, name)
    names: Sequence[str] = ("title", "abstract", "labels", "meta_bucket")
    if config.layout == "sessions":
        names = ("positions", "doc", "title", "abstract", "media_type", "clicks")
    for lines in line_blocks(url):
        rows = sessions.read(lines) if config.layout == "sessions" else _judged(url, lines)
        if rows.lines or rows.rejected:
            yield _block(url, config, lines, rows, names, encoding, encoders)
    if empty := sessions.end():
        yield _block(url, config, lines, _Rows(rejected=empty), names, encoding, encoders)


@dataclass
class _Sessions:
    """Parses session lines; remembers the last query, and its line while it has no document."""

    url: str
    name: str
    _last: _Query | None = None
    _alone: tuple[int, str, str] | None = None

    def read(self, lines: Lines) -> _Rows:
        rows = _Rows()
        for number, parts in _fields_of(lines, _DOCUMENT_FIELDS):
            if len(parts) < _JUDGED_FIELDS - 1:
                rows.rejected += self.end()
                self._last = query = self._query(number, parts)
                if query.fault:
                    rows.rejected.append(_rejection(self.url, number, query.fault, lines, "", rows=0))
                else:
                    self._alone = number, lines(number), query.id
                continue
            self._alone = None
            last_query = self._last or _Query("", "", "", "a document before any query")
            fault = last_query.fault
            if len(parts) < _DOCUMENT_FIELDS:
                fault = f"{len(parts)} fields where a query has 3 and a document more than 6"
            if fault:
                rows.rejected.append(_rejection(self.url, number, fault, lines, last_query.id))
            else:
                rows.add(number, last_query, parts[:6])
        return rows

    def _query(self, number: int, parts: Sequence[str]) -> _Query:
        if len(parts) != _QUERY_FIELDS or not parts[0]:
            fault = "no query id" if len(parts) == _QUERY_FIELDS else f"{len(parts)} fields where a query has 3"
            return _Query("", "", "", f"{fault}, in line {number}; the documents after it have no query")
        return _Query(f"{parts[0]}:{self.name}:{number}", parts[0], parts[1])

    def end(self) -> list[Rejection]:
        """The rejection of the last query if it has no documents."""
        empty_query, self._alone = self._alone, None
        return (
            []
            if empty_query is None
            else [Rejection(self.url, empty_query[0], "empty_group", empty_query[1], empty_query[2], rows=0)]
        )


def _judged(url: str, lines: Lines) -> _Rows:
    rows = _Rows()
    for number, parts in _fields_of(lines):
        if len(parts) == _JUDGED_FIELDS and parts[0]:
            rows.add(number, _Query(parts[0], parts[0], parts[1]), parts[2:])
        else:
            fault = "no query id" if len(parts) == _JUDGED_FIELDS else f"{len(parts)} fields where 6 belong"
            rows.rejected.append(_rejection(url, number, fault, lines, parts[0]))
    return rows


def _fields_of(lines: Lines, most: int = -1) -> Iterator[tuple[int, list[str]]]:
    """The number and fields of each line, split at most `most` times."""
    for index in np.flatnonzero(~lines.blank_M()).tolist():
        text = lines.bytes_of(index).decode(errors="replace")
        yield lines.first + index, text.removesuffix("\r").split("\t", most)


def _rejection(
    url: str, line: int, reason: str, texts: Lines, query: str, rows: int = 1, rule: Rule = "unparsable"
) -> Rejection:
    return Rejection(url, line, rule, f"{reason}: {texts(line)}"[:TEXT_LENGTH], query, rows, reason)


def _block(
    url: str,
    config: BaiduUltr,
    lines: Lines,
    rows: _Rows,
    names: Sequence[str],
    encoding: Encoding | None,
    encoders: Encoders,
) -> RowBlock:
    """The usable documents of some lines."""
    texts = dict(zip(names, map(pa.array, zip(*rows.values, strict=True)), strict=True)) if rows.values else {}
    texts = {name: texts.get(name, pa.array([], pa.string())).cast(pa.string()) for name in names}
    texts["query"] = pa.array([query.text for query in rows.queries], pa.string())
    faults: dict[int, tuple[Rule, str]] = {}
    numbers = {}
    for name in ("positions", "clicks", "labels", "meta_bucket"):
        if name in texts:
            good_N = pc.match_substring_regex(texts[name], r"^[0-9]{1,6}(\.0*)?$").to_numpy(zero_copy_only=False)
            numbers[name] = pc.if_else(pa.array(good_N), texts[name], "0").cast(pa.float32())
            for i in np.flatnonzero(~good_N).tolist():
                reason = f"{_NAMES[name]} {texts[name][i].as_py()[:40]!r} is no number"
                faults.setdefault(i, ("unparsable", reason))
    columns = _tokens(config, texts, encoding, faults)
    block = RowBlock(
        file=url,
        lines_N=np.array(rows.lines, np.int64),
        query_ids_N=pa.array([query.id for query in rows.queries], pa.string()),
        features_NF=_features(columns, texts.get("media_type"), len(rows.lines), encoders),
        labels_N=numbers["labels" if "labels" in numbers else "clicks"].to_numpy(),
        doc_ids_N=texts.get("doc"),
        columns={name: numbers[name] for name in ("positions", "clicks") if name in numbers}
        | {"meta_qid": pa.array([query.qid for query in rows.queries], pa.string())}
        | ({"meta_bucket": numbers["meta_bucket"].cast(pa.int32())} if "meta_bucket" in numbers else {})
        | columns,
        texts=lines,
        share=lines.share,
    )
    rejections = [
        _rejection(url, rows.lines[i], reason, lines, rows.queries[i].id, rule=rule)
        for i, (rule, reason) in faults.items()
    ]
    if faults:
        good_N = np.ones(len(rows.lines), bool)
        good_N[list(faults)] = False
        block = keep(block, good_N)
    return replace(block, rejected=sorted([*rows.rejected, *rejections], key=lambda rejection: rejection.line))


def _tokens(
    config: BaiduUltr, texts: dict[str, pa.Array], encoding: Encoding | None, faults: dict[int, tuple[Rule, str]]
) -> dict[str, pa.Array]:
    """The tokens of all rows; rows with bad tokens are added to `faults`."""
    reader, columns = TokenReader(config.token_columns, encoding), dict[str, pa.Array]()
    for token_field, text in config.token_columns.fields().items():
        ids = pc.replace_substring(texts[token_field.name], "\x01", " ")
        tokens_read, row_faults = reader.read(token_field, ids, text)
        columns |= tokens_read
        for i, fault in row_faults.items():
            faults.setdefault(i, ("bad_tokens", fault))
    return columns


def _features(columns: dict[str, pa.Array], media: pa.Array | None, n: int, encoders: Encoders) -> NDArray[np.float32]:
    features_NF = np.full((n, len(BAIDU_FEATURES)), np.nan, np.float32)
    for i, column in enumerate(("query_tokens_query", "document_tokens_title", "document_tokens_abstract")):
        features_NF[:, i] = columns[FULL + column].to_numpy()
    if media is not None:
        types = pc.if_else(pc.equal(media, ""), None, media)
        features_NF[:, 3] = encoders.setdefault("media_type", CategoryEncoder()).encode(types)
    return features_NF
