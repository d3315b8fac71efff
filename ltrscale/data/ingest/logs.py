"""Reads raw logs, one item or one query group per row, block by block.

A config maps the columns. Both readers yield RowBlocks with one row per document; memory does not grow with the file.
In numeric columns null, NaN, and in CSV an empty field or NULL, are missing values (NaN); infinite values are passed
on. Categorical columns are encoded as in `categories`.

Shapes: N rows (documents), Q groups, G groups of a batch, F features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.ingest import joins, parquet, tables
from ltrscale.data.ingest.categories import CategoryEncoder
from ltrscale.data.ingest.joins import Join, Joined
from ltrscale.data.ingest.mapping import ColumnMapping, GroupColumns, agree, path_value, resolve, resolve_groups
from ltrscale.data.ingest.rows import TEXT_LENGTH, Rejection, RowBlock, RowTexts, Rule, Texts, keep, plain
from ltrscale.data.ingest.texts import TextColumn, TextReader
from ltrscale.data.ingest.vocabularies import Encoding
from ltrscale.data.times import Clock, instants, part_of, periods
from ltrscale.errors import InputError

Encoders = dict[str, CategoryEncoder]
"""The encoder of each categorical feature, by name."""


class Examined:
    """The rows of a batch and their faults; the first fault of a row counts."""

    def __init__(self, batch: pa.RecordBatch, file: str) -> None:
        self.batch, self.file = batch, file
        self.bad_N = np.zeros(len(batch), dtype=bool)
        self._findings: dict[int, tuple[Rule, str, str]] = {}

    def reject(
        self,
        bad_N: NDArray[np.bool_],
        reason: str,
        rule: Rule = "unparsable",
        *,
        column: str | None = None,
        fault: str = "",
    ) -> None:
        """Record a fault of some rows, the column whose values show it, and perhaps the fault of a value in words."""
        for i in np.flatnonzero(bad_N & ~self.bad_N).tolist():
            found = reason
            if column is not None:
                value = repr(plain(self.batch.column(column)[i]))
                found = f"{value} {fault}" if fault else f"{reason} ({value})"
            self._findings[i] = rule, reason, found
        self.bad_N |= bad_N

    def reject_each(self, faults: Mapping[int, str], rule: Rule) -> None:
        """Record a fault of single rows, each in words of its own."""
        for i, found in faults.items():
            if not self.bad_N[i]:
                self._findings[i] = rule, found, found
                self.bad_N[i] = True

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
        periods_N, bad_N = periods(self.batch.column(mapping.time), mapping.period, mapping.clock)
        self.reject(bad_N, f"column {mapping.time!r} is not a time stamp", column=mapping.time)
        return periods_N

    def seconds(self, name: str, clock: Clock) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """A column of times in seconds since 1970, and the rows without one; rows that cannot be read are rejected."""
        column = self.batch.column(name)
        seconds_N, bad_N = instants(column, clock)
        missing_N = bad_N & column.is_null().to_numpy(zero_copy_only=False)
        self.reject(bad_N & ~missing_N, f"column {name!r} is not a time or date", column=name)
        return seconds_N, bad_N

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
        rejected = []
        for i in np.flatnonzero(self.bad_N).tolist():
            rule, reason, found = self._findings[i]
            line, rows = int(lines_N[i]), 1 if rows_N is None else int(rows_N[i])
            shown = f"{reason}: {texts(line)}"[:TEXT_LENGTH]
            query = query_ids_N[i].as_py() or ""
            rejected.append(Rejection(self.file, line, rule, shown, query, rows, found))
        return rejected


def item_schema(url: str, mapping: ColumnMapping, joined: Sequence[Join] = ()) -> pa.Schema:
    """The columns of a file, with those that join its rows."""
    return joins.with_joined(tables.read_schema(url, mapping.dialect(url)), joined, mapping.dialect, url)


def item_features(url: str, mapping: ColumnMapping, joined: Sequence[Join] = ()) -> list[Feature]:
    """The features that `read_items` finds in a file."""
    return resolve(item_schema(url, mapping, joined), mapping, url)


def read_items(
    url: str,
    mapping: ColumnMapping,
    *,
    features: Sequence[Feature] | None = None,
    first: str = "the first file",
    encoders: Encoders | None = None,
    joined: Sequence[Joined] = (),
    encoding: Encoding | None = None,
    batch_rows: int = 1 << 16,
) -> Iterator[RowBlock]:
    """Read a log with one item (document) per row, in blocks of at most `batch_rows` rows.

    `lines_N` are row numbers (Parquet) or line numbers (of CSV with the header as line 1). Rejected as `unparsable`: a
    line that is no JSON object, or a CSV line with a wrong number of fields, misplaced quotes or a value that is no
    number in a numeric column; a row without a query id, with a time stamp or period that is missing or cannot be read,
    or with text that is not UTF-8. Rejected as `not_joined`: a row with a key that a table must have and has not; as
    `bad_tokens`: a row with a token that is no id of the vocabulary, or without a text that it must have.
    Partition columns in the path are ignored, except `period_column`.

    Args:
        url: A file named .parquet, .csv, .tsv or .jsonl, the last three perhaps with .gz or .xz.
        mapping: The uses of the columns.
        features: The features of the first of several files, from `item_features`; the others must have the same.
        first: The name of that file, for errors.
        encoders: Encoders by column, shared by the files of one data set so that collisions are counted once.
        joined: Tables whose columns join the rows.
        encoding: Makes tokens of texts; without it the tokens are texts, to train a tokenizer on.
        batch_rows: The most rows of a block.

    Raises:
        InputError: the file is missing, empty or damaged; a column is missing, has a type that does not fit, or
            differs from the first file.
    """
    dialect = mapping.dialect(url)
    schema = tables.read_schema(url, dialect)
    whole = joins.with_joined(schema, [table.join for table in joined], mapping.dialect, url)
    found = resolve(whole, mapping, url)
    if features is not None:
        agree(whole, found, features, mapping, url, first)
    used, known = found if features is None else features, {} if encoders is None else encoders
    build = _ItemBlocks(url, mapping, used, known, joined, encoding)
    sources = {mapping.source_of(feature.name) for feature in build.features}
    wanted = {*mapping.named().values(), *mapping.meta, *sources, *(mapping.tokens.columns if mapping.tokens else ())}
    wanted |= {name for table in joined for name in table.join.key}
    names = [name for name in schema.names if name in wanted]
    dates, side = mapping.date_features(), mapping.side().values()
    numbers = {f.name for f in build.features if f.kind == "numeric" and f.name not in dates} | {*side}
    numbers |= {column for use, column in mapping.named().items() if use == "label"}
    yield from map(
        build,
        tables.read_rows(
            url, schema, names, numbers=numbers, query=mapping.query, dialect=dialect, batch_rows=batch_rows
        ),
    )


@dataclass(frozen=True)
class _ItemBlocks:
    """Turns a batch of items into a RowBlock."""

    url: str
    mapping: ColumnMapping
    features: Sequence[Feature]
    encoders: Encoders
    joined: Sequence[Joined] = ()
    encoding: Encoding | None = None

    def __call__(self, raw: tables.Raw) -> RowBlock:
        mapping = self.mapping
        rows = self._joined(raw.rows)
        batch = rows.batch
        block = RowBlock(
            file=self.url,
            lines_N=raw.lines_N,
            query_ids_N=rows.texts(mapping.query, required=True),
            features_NF=self._features(rows),
            labels_N=self._labels(rows),
            period=path_value(self.url, mapping.period_column or "") or "",
            periods_N=rows.periods(mapping),
            doc_ids_N=None if mapping.item is None else rows.texts(mapping.item),
            columns={name: cols.floats(batch.column(column)) for name, column in mapping.side().items()}
            | rows.meta(mapping.meta)
            | self._tokens(rows),
            texts=raw.texts,
            share=raw.share,
        )
        rejected = raw.rejected + rows.rejections(raw.lines_N, raw.texts, block.query_ids_N)
        block = keep(block, ~rows.bad_N) if rows.bad_N.any() else block
        block.rejected = sorted(rejected, key=lambda rejection: rejection.line)
        return block

    def _joined(self, batch: pa.RecordBatch) -> Examined:
        """The rows with the columns of tables; rows without a key that a table must have are rejected."""
        faults: dict[int, str] = {}
        for table in self.joined:
            batch, bad_N, keys_N = table(batch)
            faults = {i: joins.fault(table, keys_N[i]) for i in np.flatnonzero(bad_N).tolist()} | faults
        rows = Examined(batch, self.url)
        rows.reject_each(faults, "not_joined")
        return rows

    def _tokens(self, rows: Examined) -> dict[str, pa.Array]:
        """The tokens of rows; rows with bad ones are rejected."""
        found: dict[str, pa.Array] = {}
        if self.mapping.tokens is not None:
            reader = TextReader(self.mapping.tokens, self.encoding)
            for field, text in self.mapping.tokens.fields().items():
                column = rows.batch.column(text.column)
                if cols.is_text(cols.value_type(column.type)):
                    column = rows.texts(text.column)
                columns, faults = reader.read(field, column, text)
                rows.reject_each(faults, "bad_tokens")
                found |= columns
        return found

    def _labels(self, rows: Examined) -> NDArray[np.float32]:
        """The labels, NaN where there is none; rows whose value has no grade are rejected."""
        name, grades = self.mapping.label, self.mapping.grades
        if name is None:
            return np.full(len(rows.batch), np.nan, np.float32)
        if not isinstance(grades, dict):
            labels_N = cols.numbers(rows.batch.column(name))
            if grades is None:
                return labels_N
            # in float32, as the labels are: else 0.1 would not reach the cut point 0.1
            grades_N = np.searchsorted(np.array(grades, np.float32), labels_N, side="right").astype(np.float32)
            return np.where(np.isnan(labels_N), np.float32(np.nan), grades_N)
        # many tools write a column of integers as floats as soon as it has a null
        found = pc.replace_substring_regex(rows.texts(name), r"^(-?\d+)\.0$", r"\1")
        index_N = pc.index_in(found, pa.array(list(grades), pa.string()))
        unknown_N = pc.and_(pc.is_valid(found), pc.is_null(index_N)).to_numpy(zero_copy_only=False)
        fault = f"has no grade ({', '.join(grades)} have one)"
        rows.reject(unknown_N, f"column {name!r} {fault}", "bad_label", column=name, fault=fault)
        return cols.numbers(pa.array(list(grades.values()), pa.float32()).take(index_N))

    def _dates(self, rows: Examined) -> dict[str, NDArray[np.float32]]:
        """The features of dates, NaN where there is none."""
        mapping, found = self.mapping, {}
        time_N = rows.seconds(mapping.time, mapping.clock)[0] if mapping.dates and mapping.time else None
        for name, (column, part) in mapping.date_features().items():
            seconds_N, missing_N = rows.seconds(column, mapping.clock)
            values_N = part_of(part, seconds_N, time_N, mapping.clock)
            found[name] = np.where(missing_N, np.nan, values_N).astype(np.float32)
        return found

    def _features(self, rows: Examined) -> NDArray[np.float32]:
        features_NF = np.empty((len(rows.batch), len(self.features)), np.float32)
        dates = self._dates(rows)
        for i, feature in enumerate(self.features):
            column = pa.array(dates[feature.name]) if feature.name in dates else rows.batch.column(feature.name)
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
    encoding: Encoding | None = None,
    batch_groups: int = 256,
) -> Iterator[RowBlock]:
    """Read a Parquet file with one query group per row, and split it into documents; `starts_N` marks the groups.

    `lines_N` is the row of the group. Rejected: `empty_group`, a group without documents (0 rows); `feature_count`,
    feature lists that do not hold the same number of whole documents (1 row, since its documents are not known);
    `unparsable`, the documents of a group whose labels or other lists have another length, or whose query id, time
    stamp or period cannot be read; `bad_tokens`, those of a group with a bad token (see `read_items`).

    Args:
        url: A file named .parquet.
        mapping: The uses of the columns.
        features: The features of the first of several files, from `group_features`; the others must have the same.
        first: The name of that file, for errors.
        encoders: Encoders by feature, shared by the files of one data set so that collisions are counted once.
        encoding: As for `read_items`.
        batch_groups: The most groups of a block.

    Raises:
        InputError: the file is missing, empty or damaged; a column is missing, has a type that does not fit, or the
            features are not those of the first file.
    """
    schema = _parquet_schema(url)
    found = resolve_groups(schema, mapping, url)
    if features is not None and not mapping.matrix:
        agree(schema, found, features, mapping, url, first)
    elif features is not None and list(features) != found:
        raise InputError(f"{url}: its {len(found)} features are not those of {first}; prepare the two apart")
    used, known = found if features is None else features, {} if encoders is None else encoders
    build = _GroupBlocks(url, mapping, used, known, encoding)
    wanted = {*mapping.named().values(), *mapping.feature_columns(schema), *mapping.meta}
    wanted |= {*(mapping.tokens.columns if mapping.tokens else ())}
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
    encoding: Encoding | None = None

    def __call__(self, raw: parquet.Batch) -> RowBlock:
        mapping, groups = self.mapping, Examined(raw.rows, self.url)
        texts = RowTexts(raw.rows, raw.lines_N)
        lengths_G = self._examine(groups)
        of_queries, of_documents = self._tokens(groups, lengths_G)
        ids_G = groups.texts(mapping.query, required=True)
        periods_G, meta = groups.periods(mapping), groups.meta(mapping.meta)
        rejected = groups.rejections(raw.lines_N, texts, ids_G, lengths_G)

        good_G = np.flatnonzero(~groups.bad_N)
        batch, lengths_G = raw.rows.take(pa.array(good_G)), lengths_G[good_G]
        index_N = pa.array(np.repeat(good_G, lengths_G))
        texts_N = {name: column.take(index_N) for name, column in of_queries.items()}
        for name, (column, group) in of_documents.items():
            texts_N[name] = column.filter(pa.array(~groups.bad_N[group]))
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
            | {name: column.take(index_N) for name, column in meta.items()}
            | texts_N,
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

    def _tokens(
        self, groups: Examined, lengths_G: NDArray[np.int64]
    ) -> tuple[dict[str, pa.Array], dict[str, tuple[pa.Array, NDArray[np.int64]]]]:
        """The tokens of queries, and those of documents with the group of each; groups with bad ones are rejected."""
        of_queries: dict[str, pa.Array] = {}
        of_documents: dict[str, tuple[pa.Array, NDArray[np.int64]]] = {}
        tokens = self.mapping.tokens
        for field, text in (tokens.fields() if tokens else {}).items():
            assert tokens is not None
            reader, values = TextReader(tokens, self.encoding), groups.batch.column(text.column)
            if field.of == "query":
                columns, faults = reader.read(field, values, text)
                groups.reject_each(faults, "bad_tokens")
                of_queries |= columns
                continue
            values, group = self._documents(groups, values, text, lengths_G)
            columns, faults = reader.read(field, values, text)
            first = {int(group[i]): fault for i, fault in sorted(faults.items(), reverse=True)}
            groups.reject_each(dict(sorted(first.items())), "bad_tokens")
            of_documents |= {name: (column, group) for name, column in columns.items()}
        return of_queries, of_documents

    def _documents(
        self, groups: Examined, values: pa.Array, text: TextColumn, lengths_G: NDArray[np.int64]
    ) -> tuple[pa.Array, NDArray[np.int64]]:
        """The texts or ids of all documents, and their groups; groups without one for each document are rejected."""
        counted = values if text.lengths is None else groups.batch.column(text.lengths)
        groups.reject(
            _lengths(counted) != lengths_G, f"column {text.column!r} does not have the tokens of each document"
        )
        if text.lengths is not None:
            sums_G = _sums(counted)
            groups.reject(sums_G != _lengths(values), f"the lengths of {text.column!r} do not add up to its tokens")
        good = groups.batch.take(pa.array(np.flatnonzero(~groups.bad_N)))
        counted = good.column(text.lengths or text.column)
        group = np.repeat(np.flatnonzero(~groups.bad_N), _lengths(counted))
        flat = good.column(text.column).flatten()
        if text.lengths is not None:
            sizes = counted.flatten().cast(pa.int64()).to_numpy()
            flat = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)), flat)
        return flat, group

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
                if self.mapping.matrix:  # codes of an earlier data set, whose texts are not here
                    encoder.texts = None
            elif not self.mapping.matrix:
                features_NF[:, i] = cols.numbers(batch.column(feature.name).flatten())
        return features_NF


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    """Values in each list, 0 where there is none."""
    lengths: NDArray[np.int64] = pc.list_value_length(column).cast(pa.int64()).fill_null(0).to_numpy()
    return lengths


def _sums(column: pa.Array) -> NDArray[np.int64]:
    """The sum of each list, -1 where a value is negative, null or no whole number."""
    values = cols.plain(column.flatten()).cast(pa.float64()).fill_null(-1).to_numpy()
    wrong = (values < 0) | (values != np.floor(values))
    group = np.repeat(np.arange(len(column)), _lengths(column))
    sums: NDArray[np.int64] = np.bincount(group, weights=np.where(wrong, 0, values), minlength=len(column)).astype(int)
    return np.where(_any(column, wrong), -1, sums)


def _any(column: pa.Array, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which lists have a bad value; `bad` marks the bad ones among the values of all lists."""
    group = np.repeat(np.arange(len(column)), _lengths(column))
    found: NDArray[np.bool_] = np.bincount(group[bad], minlength=len(column)) > 0
    return found
