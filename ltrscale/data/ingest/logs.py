"""Reads raw logs, one item or one query group per row, in Parquet or CSV, block by block.

A config maps the columns. Both readers yield RowBlocks with one row per document; memory does not grow with the file.
In numeric columns null, NaN, and in CSV an empty field or NULL, are missing values (NaN); infinite values are passed
on. Categorical columns are encoded as in `categories`.

Shapes: N rows (documents), Q groups, G groups of a batch, F features.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.ingest import csvtext, parquet
from ltrscale.data.ingest.categories import CategoryEncoder
from ltrscale.data.ingest.mapping import ColumnMapping, GroupColumns, agree, path_value, resolve, resolve_groups
from ltrscale.data.ingest.rows import TEXT_LENGTH, Rejection, RowBlock, Rule, Texts, keep
from ltrscale.errors import InputError

_CSV = (".csv", ".csv.gz", ".csv.xz")
Encoders = dict[str, CategoryEncoder]
"""The encoder of each categorical feature, by name."""


class RowTexts:
    """Parquet rows as text for the quarantine: their columns as JSON, by the number of the row."""

    def __init__(self, batch: pa.RecordBatch, lines_N: NDArray[np.int64]) -> None:
        self.batch, self.lines_N = batch, lines_N
        self._last = 0, ""  # a cache: all documents of a bad group show the same row, which may be long

    def __call__(self, line: int) -> str:
        """The text of one row."""
        if self._last[0] != line:
            row = int(np.searchsorted(self.lines_N, line))
            columns = zip(self.batch.schema.names, self.batch, strict=True)
            values = {name: _plain(column[row]) for name, column in columns}
            self._last = line, json.dumps(values, default=str, ensure_ascii=False)[:TEXT_LENGTH]
        return self._last[1]

    def only(self, lines_N: NDArray[np.int64]) -> "RowTexts":
        """The texts of these rows, without the rest of the batch in memory."""
        lines = np.unique(lines_N)
        return RowTexts(self.batch.take(pa.array(np.searchsorted(self.lines_N, lines))), lines)


def _plain(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except (UnicodeDecodeError, ValueError, OverflowError):
        return "(not readable)"


class Examined:
    """The rows of a batch and their faults; the first fault of a row counts."""

    def __init__(self, batch: pa.RecordBatch, file: str) -> None:
        self.batch, self.file = batch, file
        self.bad_N = np.zeros(len(batch), dtype=bool)
        self._findings: dict[int, tuple[Rule, str, str | None]] = {}

    def reject(
        self, bad_N: NDArray[np.bool_], reason: str, rule: Rule = "unparsable", *, column: str | None = None
    ) -> None:
        """Record a fault of some rows, and the column whose values show it."""
        for i in np.flatnonzero(bad_N & ~self.bad_N).tolist():
            self._findings[i] = rule, reason, column
        self.bad_N |= bad_N

    def texts(self, name: str, *, required: bool = False) -> pa.StringArray:
        """A column as text; rows where it is not UTF-8, or lacks a required value, are rejected."""
        text_N, broken_N = cols.texts(self.batch.column(name))
        self.reject(broken_N, f"column {name!r} is not text in UTF-8")
        if required:
            lacking_N = pc.or_kleene(pc.is_null(text_N), pc.equal(text_N, "")).to_numpy(zero_copy_only=False)
            self.reject(lacking_N, f"column {name!r} has no value")
        return text_N

    def periods(self, mapping: ColumnMapping | GroupColumns) -> pa.StringArray | None:
        """The period of each row, if a column determines it."""
        if mapping.period_column is not None and mapping.period_column in self.batch.schema.names:
            return self.texts(mapping.period_column, required=True)
        if mapping.time is None:
            return None
        periods_N, bad_N = cols.periods(self.batch.column(mapping.time), mapping.period)
        self.reject(bad_N, f"column {mapping.time!r} is not a time stamp", column=mapping.time)
        return periods_N

    def meta(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """Columns of groups, unchanged, by their names in the data set."""
        found = {}
        for name in names:
            column = cols.plain(self.batch.column(name))
            key = f"meta_{name.removeprefix('meta_')}"  # a data set that is read again keeps its columns' names
            found[key] = self.texts(name) if cols.is_text(column.type) else column
        return found

    def rejections(
        self,
        lines_N: NDArray[np.int64],
        texts: Texts,
        query_ids_N: pa.StringArray,
        rows_N: NDArray[np.int64] | None = None,
    ) -> list[Rejection]:
        """One rejection for each bad row, in order; it counts as `rows_N` input rows, 1 by default."""
        found = []
        for i in np.flatnonzero(self.bad_N).tolist():
            rule, reason, column = self._findings[i]
            line, rows = int(lines_N[i]), 1 if rows_N is None else int(rows_N[i])
            shown = f"{reason}: {texts(line)}"[:TEXT_LENGTH]
            value = "" if column is None else f" ({_plain(self.batch.column(column)[i])!r})"
            query = query_ids_N[i].as_py() or ""
            found.append(Rejection(self.file, line, rule, shown, query, rows, f"{reason}{value}"))
        return found


def item_features(url: str, mapping: ColumnMapping) -> list[Feature]:
    """The features that `read_items` finds in a file."""
    return resolve(_schema(url, mapping.delimiter), mapping, url)


def _schema(url: str, delimiter: str) -> pa.Schema:
    if url.endswith(".parquet"):
        return parquet.read_schema(url)
    if url.endswith(_CSV):
        return csvtext.read_schema(url, delimiter)
    raise InputError(f"{url}: the name does not end in .parquet, {', '.join(_CSV)}; rename it or narrow the path")


def read_items(
    url: str,
    mapping: ColumnMapping,
    *,
    features: Sequence[Feature] | None = None,
    first: str = "the first file",
    encoders: Encoders | None = None,
    batch_rows: int = 1 << 16,
) -> Iterator[RowBlock]:
    """Read a log with one item (document) per row from Parquet or CSV, in blocks of at most `batch_rows` rows.

    `lines_N` are row numbers (Parquet), or line numbers with the header as line 1 (CSV). Rejected as `unparsable`: a
    CSV line with a wrong number of fields, misplaced quotes or a value that is no number in a numeric column; a row
    without a query id, with a time stamp or period that is missing or cannot be read, or with text that is not UTF-8.
    Partition columns in the path are ignored, except `period_column`.

    Args:
        url: A file named .parquet, .csv, .csv.gz or .csv.xz.
        mapping: The uses of the columns.
        features: The features of the first of several files, from `item_features`; the others must have the same.
        first: The name of that file, for errors.
        encoders: Encoders by column, shared by the files of one data set so that collisions are counted once.
        batch_rows: The most rows of a block.

    Raises:
        InputError: the file is missing, empty or damaged; a column is missing, has a type that does not fit, or
            differs from the first file.
    """
    schema = _schema(url, mapping.delimiter)
    found = resolve(schema, mapping, url)
    if features is not None:
        agree(schema, found, features, url, first, lists=False)
    build = _ItemBlocks(url, mapping, found if features is None else features, {} if encoders is None else encoders)
    wanted = {*mapping.named().values(), *mapping.meta, *(feature.name for feature in build.features)}
    names = [name for name in schema.names if name in wanted]
    if url.endswith(".parquet"):
        for batch, lines_N, share in parquet.read_batches(url, names, batch_rows):
            yield build(batch, lines_N, RowTexts(batch, lines_N), [], share)
        return
    numbers = {feature.name for feature in build.features if feature.kind == "numeric"} | {*mapping.side().values()}
    numbers |= {mapping.label} if mapping.label is not None else set()
    reader = csvtext.CsvReader(url, schema.names, names, numbers, mapping.query, mapping.delimiter, batch_rows)
    for table in reader:
        yield build(table.rows, table.lines_N, table.lines, table.rejected, table.lines.share)


@dataclass(frozen=True)
class _ItemBlocks:
    """Turns a batch of items into a RowBlock."""

    url: str
    mapping: ColumnMapping
    features: Sequence[Feature]
    encoders: Encoders

    def __call__(
        self,
        batch: pa.RecordBatch,
        lines_N: NDArray[np.int64],
        texts: Texts,
        rejected: list[Rejection],
        share: float,
    ) -> RowBlock:
        mapping, rows = self.mapping, Examined(batch, self.url)
        block = RowBlock(
            file=self.url,
            lines_N=lines_N,
            query_ids_N=rows.texts(mapping.query, required=True),
            features_NF=self._features(rows),
            labels_N=np.full(len(batch), np.nan, np.float32)
            if mapping.label is None
            else cols.numbers(batch.column(mapping.label)),
            period=path_value(self.url, mapping.period_column or "") or "",
            periods_N=rows.periods(mapping),
            doc_ids_N=None if mapping.item is None else rows.texts(mapping.item),
            columns={name: cols.floats(batch.column(column)) for name, column in mapping.side().items()}
            | rows.meta(mapping.meta),
            texts=texts,
            share=share,
        )
        rejected = rejected + rows.rejections(lines_N, texts, block.query_ids_N)
        block = keep(block, ~rows.bad_N) if rows.bad_N.any() else block
        block.rejected = sorted(rejected, key=lambda rejection: rejection.line)
        return block

    def _features(self, rows: Examined) -> NDArray[np.float32]:
        features_NF = np.empty((len(rows.batch), len(self.features)), np.float32)
        for i, feature in enumerate(self.features):
            column = rows.batch.column(feature.name)
            if feature.kind == "numeric":
                features_NF[:, i] = cols.numbers(column)
                continue
            if cols.is_text(cols.value_type(column.type)):
                column = rows.texts(feature.name)
            features_NF[:, i] = self.encoders.setdefault(feature.name, CategoryEncoder()).encode(column)
        return features_NF


def group_features(url: str, mapping: GroupColumns) -> list[Feature]:
    """The features that `read_groups` finds in a file."""
    return resolve_groups(_parquet_schema(url), mapping, url)


def _parquet_schema(url: str) -> pa.Schema:
    if not url.endswith(".parquet"):
        raise InputError(f"{url}: the name does not end in .parquet; rename it or narrow the path")
    return parquet.read_schema(url)


def read_groups(
    url: str,
    mapping: GroupColumns,
    *,
    features: Sequence[Feature] | None = None,
    first: str = "the first file",
    encoders: Encoders | None = None,
    batch_groups: int = 256,
) -> Iterator[RowBlock]:
    """Read a Parquet file with one query group per row, and split it into documents; `starts_N` marks the groups.

    `lines_N` is the row of the group. Rejected: `empty_group`, a group without documents (0 rows); `feature_count`,
    feature lists that do not hold the same number of whole documents (1 row, since its documents are not known);
    `unparsable`, the documents of a group whose labels or other lists have another length, or whose query id, time
    stamp or period cannot be read.

    Args:
        url: A file named .parquet.
        mapping: The uses of the columns.
        features: The features of the first of several files, from `group_features`; the others must have the same.
        first: The name of that file, for errors.
        encoders: Encoders by feature, shared by the files of one data set so that collisions are counted once.
        batch_groups: The most groups of a block.

    Raises:
        InputError: the file is missing, empty or damaged; a column is missing, has a type that does not fit, or the
            features are not those of the first file.
    """
    schema = _parquet_schema(url)
    found = resolve_groups(schema, mapping, url)
    if features is not None and not mapping.matrix:
        agree(schema, found, features, url, first, lists=True)
    elif features is not None and list(features) != found:
        raise InputError(f"{url}: its {len(found)} features are not those of {first}; prepare the two apart")
    build = _GroupBlocks(url, mapping, found if features is None else features, {} if encoders is None else encoders)
    wanted = {*mapping.named().values(), *mapping.feature_columns(schema), *mapping.meta}
    names = [name for name in schema.names if name in wanted]
    for batch in parquet.read_batches(url, names, batch_groups):
        yield build(batch)


@dataclass(frozen=True)
class _GroupBlocks:
    """Turns a batch of groups into a RowBlock."""

    url: str
    mapping: GroupColumns
    features: Sequence[Feature]
    encoders: Encoders

    def __call__(self, raw: parquet.Batch) -> RowBlock:
        mapping, groups = self.mapping, Examined(raw.rows, self.url)
        texts = RowTexts(raw.rows, raw.lines_N)
        lengths_G = self._examine(groups)
        ids_G = groups.texts(mapping.query, required=True)
        periods_G, meta = groups.periods(mapping), groups.meta(mapping.meta)
        rejected = groups.rejections(raw.lines_N, texts, ids_G, lengths_G)

        good_G = np.flatnonzero(~groups.bad_N)
        batch, lengths_G = raw.rows.take(pa.array(good_G)), lengths_G[good_G]
        index_N = pa.array(np.repeat(good_G, lengths_G))
        starts_N = np.zeros(len(index_N), dtype=bool)
        starts_N[np.cumsum(lengths_G) - lengths_G] = True

        def spread(name: str) -> pa.Array:
            return cols.spread(batch.column(name), lengths_G)

        labels_N = None if mapping.labels is None else cols.numbers(spread(mapping.labels))
        return RowBlock(
            file=self.url,
            lines_N=np.repeat(raw.lines_N[good_G], lengths_G),
            query_ids_N=ids_G.take(index_N),
            features_NF=self._features(batch, int(lengths_G.sum())),
            labels_N=np.full(len(index_N), np.nan, np.float32) if labels_N is None else labels_N,
            period=path_value(self.url, mapping.period_column or "") or "",
            periods_N=None if periods_G is None else periods_G.take(index_N),
            doc_ids_N=None if mapping.docs is None else cols.texts(spread(mapping.docs))[0],
            starts_N=starts_N,
            columns={name: cols.floats(spread(c)) for name, c in mapping.side().items()}
            | {name: column.take(index_N) for name, column in meta.items()},
            rejected=rejected,
            texts=texts,
            share=raw.share,
        )

    def _examine(self, groups: Examined) -> NDArray[np.int64]:
        """Check the lists of each group against each other; returns its documents, 1 if their number is not known."""
        mapping, batch = self.mapping, groups.batch
        columns = mapping.feature_columns(batch.schema)
        lengths_G = _lengths(batch.column(columns[0]))
        if mapping.matrix:
            values = batch.column(columns[0])
            if cols.is_list(values.type.value_type):
                broken_G = _any(values, _lengths(values.flatten()) != len(self.features))
            else:
                lengths_G, rest_G = np.divmod(lengths_G, len(self.features))
                broken_G = rest_G > 0
            groups.reject(broken_G, f"not {len(self.features)} features for each document", "feature_count")
        for name in columns[1:]:
            other_G = _lengths(batch.column(name)) != lengths_G
            groups.reject(other_G, f"columns {columns[0]!r} and {name!r} differ in length", "feature_count")
        lengths_G = np.where(groups.bad_N, 1, lengths_G)
        groups.reject(lengths_G == 0, "no document", "empty_group")
        for name in filter(None, [mapping.labels, mapping.docs, *mapping.side().values()]):
            column = batch.column(name)
            other_G = column.is_valid().to_numpy(zero_copy_only=False) & (_lengths(column) != lengths_G)
            groups.reject(other_G, f"column {name!r} has not one value for each document")
        for name in {*columns, *filter(None, [mapping.docs])}:
            column = batch.column(name)
            if cols.is_text(cols.value_type(column.type.value_type)):
                broken_G = _any(column, cols.texts(column.flatten())[1])
                groups.reject(broken_G, f"column {name!r} is not text in UTF-8")
        return lengths_G

    def _features(self, batch: pa.RecordBatch, n: int) -> NDArray[np.float32]:
        columns = self.mapping.feature_columns(batch.schema)
        if self.mapping.matrix:
            values = batch.column(columns[0]).flatten()
            values = values.flatten() if cols.is_list(values.type) else values
            features_NF = cols.numbers(values).reshape(n, len(self.features))
            if self.mapping.categorical:
                features_NF = features_NF.copy()  # Arrow's own memory cannot be written
        else:
            features_NF = np.empty((n, len(self.features)), np.float32)
        for i, feature in enumerate(self.features):
            if feature.kind == "categorical":
                encoder = self.encoders.setdefault(feature.name, CategoryEncoder())
                codes = pa.array(features_NF[:, i]) if self.mapping.matrix else batch.column(feature.name).flatten()
                features_NF[:, i] = encoder.encode(codes)
            elif not self.mapping.matrix:
                features_NF[:, i] = cols.numbers(batch.column(feature.name).flatten())
        return features_NF


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    """Values in each list, 0 where there is none."""
    lengths: NDArray[np.int64] = pc.list_value_length(column).cast(pa.int64()).fill_null(0).to_numpy()
    return lengths


def _any(column: pa.Array, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which lists have a bad value; `bad` marks the bad ones among the values of all lists."""
    group = np.repeat(np.arange(len(column)), _lengths(column))
    found: NDArray[np.bool_] = np.bincount(group[bad], minlength=len(column)) > 0
    return found
