"""Reads LETOR / svmlight text files, plain, gzip or xz, with their query ids or a file of group sizes.

`letor_lines` parses the lines.

Shapes: N rows of a block, F features, G groups.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from ltrscale.arrays import Ints
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError
from ltrscale.ingest.letor_lines import RowFormat, dense_format, parse_lines
from ltrscale.ingest.lines import line_blocks
from ltrscale.ingest.rows import Rejection, RowBlock, concat
from ltrscale.ingest.source import Encoders, File, Reader, Source
from ltrscale.ingest.texts import Encoding

_BLOCK_BYTES = 1 << 22  # larger blocks are no faster and take more memory
_PIECE = 1 << 20
_MOST_VALUES = 1 << 24  # in a block, since sparse rows are short as text but long as arrays
_MOST_REJECTIONS = 10_000  # in a block
_GROUP_SIZE = re.compile(rb"[0-9]{1,18}")


class Letor(Source):
    """LETOR or svmlight text, plain, gzip or xz."""

    kind: Literal["letor"] = "letor"
    missing_labels: ClassVar = False
    dense: bool = True
    """Whether every row states every feature; if not, omitted features are 0."""
    n_features: int | None = Field(default=None, ge=1)
    """Number of features; inferred from the first good row by default, for dense rows only."""
    feature_names: tuple[str, ...] | None = None
    """Names of the features, in order; their indices if not given."""
    first_index: Literal[0, 1] | None = None
    """Index of the first feature, 0 where scikit-learn has written the file; by default that of the first good row, for
    dense rows only, else 1."""

    def find_features(self, files: Sequence[File]) -> tuple[Feature, ...]:
        """The features, from the config or else from the first good row of each file."""
        names = self.feature_names
        n_features = self.n_features or (len(names) if names else self._inferred(files))
        start = self._first_of(files[0]) if files and names is None else 1
        names = names or tuple(str(i + start) for i in range(n_features))
        if len(names) != n_features or len(set(names)) != n_features:
            raise InputError(
                f"source.feature_names: {len(set(names))} names for {n_features} features; name each one once"
            )
        return tuple(Feature(name=name) for name in names)

    def _inferred(self, files: Sequence[File]) -> int:
        if not self.dense:
            raise InputError("source.n_features: sparse rows do not state how many features there are; set it")
        formats = {
            file.url: _infer_format(file.url, qid=not file.group_sizes, first=self.first_index) for file in files
        }
        found = {url: each.n_features for url, each in formats.items() if each is not None}
        first, expected = next(iter(found.items()), ("", 1))  # without a good row all rows are rejected anyway
        for url, n in found.items():
            if n != expected:
                raise InputError(
                    f"{url}: column {min(n, expected) + 1}: the first row has {n} features, that of {first} has "
                    f"{expected}; mend the file, prepare it apart, or set source.n_features"
                )
        return expected

    def _first_of(self, file: File) -> int:
        """The index of a file's first feature."""
        if self.first_index is not None or not self.dense:
            return 1 if self.first_index is None else self.first_index
        found = _infer_format(file.url, qid=file.group_sizes is None)
        return 1 if found is None else found.first

    def open(
        self,
        features: Sequence[Feature],
        *,
        first: str,  # noqa: ARG002
        encoders: Encoders,  # noqa: ARG002
        encoding: Encoding | None = None,  # noqa: ARG002
    ) -> Reader:
        """The reader of text with these features."""
        read = partial(read_letor, n_features=len(features), dense=self.dense, block_bytes=_BLOCK_BYTES)
        return lambda file: read(file.url, group_sizes=file.group_sizes, first=self._first_of(file))


def read_letor(
    url: str,
    *,
    n_features: int,
    dense: bool,
    group_sizes: str | None = None,
    block_bytes: int = _BLOCK_BYTES,
    first: int = 1,
) -> Iterator[RowBlock]:
    r"""Stream the rows of a LETOR or svmlight file in blocks of about `block_bytes` bytes of text.

    `first` is the index of the first feature. `group_sizes` is a file with the size of one group per line, compressed
    or not: then rows have no qid, the n-th group has the query id n, an unparsable row still counts as a row of its
    group, and groups of size 0 are rejected as `empty_group`, in a first block without rows. `doc_ids_N` is null for
    rows without document id, and None in a block without any. A file without rows yields no block.

    Rejections: `unparsable`; `feature_count` for dense rows without exactly F features and for indices above the last.
    """
    row_format = RowFormat(n_features=n_features, dense=dense, qid=group_sizes is None, first=first)
    blocks = _blocks(url, row_format, block_bytes)
    yield from blocks if group_sizes is None else _grouped(blocks, url, group_sizes, n_features)


def _infer_format(url: str, *, qid: bool = True, first: int | None = None) -> RowFormat | None:
    """The format of the file's first row that parses as a dense one, or None; `first` is its first index, if known."""
    for lines in line_blocks(url, size=_PIECE):
        for line in lines.text.split(b"\n"):
            if found := dense_format(line, qid=qid, first=first):
                return found
    return None


def _blocks(url: str, row_format: RowFormat, block_bytes: int) -> Iterator[RowBlock]:
    most_bytes = max(1024, (1 << 27) // row_format.n_features)  # so that a piece of short rows fits in memory too
    parts: list[RowBlock] = []
    size = values = rejected = 0
    for lines in line_blocks(url, size=min(_PIECE, block_bytes, most_bytes)):
        part = parse_lines(lines, url, row_format)
        if len(part) or part.rejected:
            parts.append(part)
        size, values, rejected = size + len(lines.text), values + part.features_NF.size, rejected + len(part.rejected)
        if parts and (size >= block_bytes or values >= _MOST_VALUES or rejected >= _MOST_REJECTIONS):
            yield _joined(parts, lines.share)
            parts, size, values, rejected = [], 0, 0, 0
    if parts:
        yield _joined(parts, 1.0)


def _joined(parts: Sequence[RowBlock], share: float) -> RowBlock:
    return replace(concat(parts), rejected=[rejection for part in parts for rejection in part.rejected], share=share)


def _grouped(blocks: Iterator[RowBlock], url: str, sizes_url: str, n_features: int) -> Iterator[RowBlock]:
    """Set the rows' query ids to the numbers of their groups."""
    sizes_G, empty = _read_group_sizes(sizes_url)
    if empty:
        nothing = np.empty(0, np.float32)
        ids = pa.array([], pa.string())
        yield RowBlock(sizes_url, np.empty(0, np.int64), ids, nothing.reshape(0, n_features), nothing, rejected=empty)
    ends_G, total = np.cumsum(sizes_G), int(sizes_G.sum())
    rows, previous = 0, -1  # the previous row's group
    for block in blocks:
        lines = np.sort(np.concatenate([block.lines_N, [rejection.line for rejection in block.rejected]]))
        first, rows = rows, rows + len(lines)
        if rows > total:
            continue  # too many rows: keep counting for the error
        groups = np.searchsorted(ends_G, np.arange(first, rows), side="right")
        group_N = groups[np.searchsorted(lines, block.lines_N)]
        rejected_groups = groups[np.searchsorted(lines, [rejection.line for rejection in block.rejected])].tolist()
        yield replace(
            block,
            query_ids_N=pc.cast(pa.array(group_N + 1), pa.string()),
            starts_N=np.diff(group_N, prepend=previous) != 0,
            rejected=[
                replace(rejection, query_id=str(group + 1))
                for rejection, group in zip(block.rejected, rejected_groups, strict=True)
            ],
        )
        previous = int(group_N[-1]) if len(group_N) else previous
    if rows != total:
        raise InputError(
            f"{url} has {rows} rows, but the {len(sizes_G)} group sizes of {sizes_url} add up to {total}; "
            "give the file of group sizes that belongs to these rows"
        )


def _read_group_sizes(url: str) -> tuple[Ints, list[Rejection]]:
    """The sizes, and a rejection for each size of 0."""
    sizes: list[int] = []
    empty: list[Rejection] = []
    for lines in line_blocks(url, size=_PIECE):
        for line, text in enumerate(lines.text.split(b"\n")[:-1], lines.first):
            word = text.strip()
            if not word:
                continue
            if not _GROUP_SIZE.fullmatch(word):
                shown = word[:50].decode(errors="replace")
                raise InputError(f"{url}: line {line}: {shown!r} is no group size; give one whole number a line")
            sizes.append(int(word))
            if sizes[-1] == 0:
                empty.append(Rejection(url, line, "empty_group", word.decode(), str(len(sizes)), rows=0))
    return np.array(sizes, np.int64), empty
