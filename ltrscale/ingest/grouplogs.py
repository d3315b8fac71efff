"""Reads raw logs with one query group per row, in list columns, and splits them into documents (see `items`).

Shapes: N rows (documents), G groups of a batch, F features, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale.arrays import Bools, Floats, Ints, offsets
from ltrscale.data import columns as cols
from ltrscale.data.dataset.columns import as_lists, with_lists
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.examined import Examined
from ltrscale.ingest.mapping import ListColumns
from ltrscale.ingest.resolve import check_same_features, missing, resolve_groups
from ltrscale.ingest.rows import Raw, RowBlock, RowTexts, damage
from ltrscale.ingest.source import Encoders, File, Needs, Reader, Source
from ltrscale.ingest.tables import parquet_schema, read_parquet
from ltrscale.ingest.texts import Encoding, TextColumn, read_tokens

_GROUPS = 256
"""The most groups of a block."""


class GroupRows(Source):
    """Parquet with one query group per row, in list columns."""

    kind: Literal["groups"] = "groups"
    columns: ListColumns
    """The uses of the columns."""

    def find_features(self, files: Sequence[File]) -> tuple[Feature, ...]:
        """The features of the first file."""
        return tuple(resolve_groups(self._schema(files[0]), self.columns, files[0].url))

    def open(
        self, features: Sequence[Feature], *, first: str, encoders: Encoders, encoding: Encoding | None = None
    ) -> Reader:
        """The reader of files with these columns; `starts_N` marks the groups, and `lines_N` is the row of the group.

        Rejected: `empty_group`, a group without documents (0 rows); `feature_count`, feature lists that do not hold the
        same number of whole documents (1 row, since its documents are not known); `unparsable`, the documents of a
        group with labels or other lists of another length, or with an unreadable query id, time stamp or period;
        `bad_tokens`, the documents of a group with a bad token (see `Items.open`).
        """

        def read(file: File) -> Iterator[RowBlock]:
            build = _GroupBlocks(file.url, self.columns, features, encoders, encoding)
            return map(build, self._groups(file, features, first))

        return read

    def _groups(self, file: File, features: Sequence[Feature], first: str) -> Iterator[Raw]:
        """The columns in use of a file that has the features of the first one."""
        mapping, url, schema = self.columns, file.url, self._schema(file)
        found = resolve_groups(schema, mapping, url)
        if not mapping.matrix:
            check_same_features(schema, found, features, mapping, url, first)
        elif list(features) != found:
            raise InputError(f"{url}: its {len(found)} features are not those of {first}; prepare the two apart")
        needed = {*mapping.beside_features(), *mapping.feature_columns(schema)}
        raws = read_parquet(url, [name for name in schema.names if name in needed], _GROUPS, file.lake)
        return map(partial(_with_lists, url, mapping.features[0]), raws) if mapping.matrix else raws

    def _schema(self, file: File) -> pa.Schema:
        """The columns of a file, with lists where the one column of features holds bytes."""
        url = file.url
        if not url.endswith(".parquet"):
            raise InputError(f"{url}: the name does not end in .parquet; rename it or narrow the path")
        schema = parquet_schema(url, file.lake)
        return with_lists(schema, self.columns.features[0]) if self.columns.matrix else schema

    def for_scoring(self, needs: Needs) -> Self:
        """The same source with only the columns that a model reads; one column with all features stays whole."""
        uses = needs.uses()
        if self.columns.matrix:
            del uses["features"], uses["categorical"]
        return self.replace(columns=self.columns.replace(labels=None, **uses))

    def missing_columns(self, file: File) -> list[str]:
        """The columns that a file lacks."""
        return missing(parquet_schema(file.url, file.lake), self.columns, file.url)

    @property
    def uses(self) -> ListColumns:
        """The uses of the columns."""
        return self.columns


def _with_lists(url: str, features: str, raw: Raw) -> Raw:
    with damage(url, f"the rows from {raw.lines_N[0]} on"):
        rows = as_lists(raw.rows, features)
    return raw._replace(rows=rows, texts=RowTexts(rows, raw.lines_N))


@dataclass(frozen=True)
class _GroupBlocks:
    """Turns a batch of groups into a RowBlock."""

    url: str
    mapping: ListColumns
    features: Sequence[Feature]
    encoders: Encoders
    encoding: Encoding | None = None

    def __call__(self, raw: Raw) -> RowBlock:
        mapping, groups = self.mapping, Examined(raw.rows, self.url)
        lengths_G = self._examine(groups)
        of_queries, of_documents = self._tokens(groups, lengths_G)
        ids_G = groups.texts(mapping.query, required=True)
        periods_G, meta = groups.periods(mapping, ids_G), groups.meta(mapping.meta)
        rejected = groups.rejections(raw.lines_N, raw.texts, ids_G, lengths_G)

        good_G = np.flatnonzero(~groups.bad_N)
        batch, lengths_G = raw.rows.take(pa.array(good_G)), lengths_G[good_G]
        index_N = pa.array(np.repeat(good_G, lengths_G))
        texts_N = {name: column.take(index_N) for name, column in of_queries.items()}
        for name, (column, group) in of_documents.items():
            texts_N[name] = column.filter(pa.array(~groups.bad_N[group]))
        starts_N = np.zeros(len(index_N), dtype=bool)
        starts_N[offsets(lengths_G)[:-1]] = True

        def spread(name: str) -> pa.Array:
            return cols.spread_over_documents(batch.column(name), lengths_G)

        label = mapping.label_column
        labels_N = None if label is None else cols.float_column(spread(label))
        return RowBlock(
            file=self.url,
            lines_N=np.repeat(raw.lines_N[good_G], lengths_G),
            query_ids_N=ids_G.take(index_N),
            features_NF=self._features(batch, int(lengths_G.sum())),
            labels_N=np.full(len(index_N), np.nan, np.float32) if labels_N is None else labels_N,
            period=mapping.path_period(self.url),
            periods_N=None if periods_G is None else periods_G.take(index_N),
            doc_ids_N=None if mapping.docs is None else cols.texts(spread(mapping.docs))[0],
            starts_N=starts_N,
            columns={name: cols.floats(spread(c)) for name, c in mapping.of_documents.items()}
            | {name: column.take(index_N) for name, column in meta.items()}
            | texts_N,
            rejected=rejected,
            texts=raw.texts,
            share=raw.share,
        )

    def _examine(self, groups: Examined) -> Ints:
        """Compare the list lengths of each group; returns its number of documents, 1 if that is not known."""
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
        for name in filter(None, [mapping.label_column, mapping.docs, *mapping.of_documents.values()]):
            column = batch.column(name)
            other_G = column.is_valid().to_numpy(zero_copy_only=False) & (_lengths(column) != lengths_G)
            groups.reject(other_G, f"column {name!r} has not one value for each document")
        for name in {*columns, *filter(None, [mapping.docs])}:
            column = batch.column(name)
            if cols.is_text(cols.value_type(column.type.value_type)):
                broken_G = _any(column, cols.texts(column.flatten())[1])
                groups.reject(broken_G, f"column {name!r} is not text in UTF-8", cause="encoding")
        return lengths_G

    def _tokens(
        self, groups: Examined, lengths_G: Ints
    ) -> tuple[dict[str, pa.Array], dict[str, tuple[pa.Array, Ints]]]:
        """The tokens of queries, and of documents with the group of each; groups with bad tokens are rejected."""
        of_queries: dict[str, pa.Array] = {}
        of_documents: dict[str, tuple[pa.Array, Ints]] = {}
        if self.mapping.tokens is None:
            return of_queries, of_documents
        tokenizer = self.mapping.tokens.tokenizer
        for field, text in self.mapping.tokens.fields().items():
            if field.of == "query":
                values = groups.batch.column(text.column)
                columns, faults = read_tokens(values, field, text, tokenizer, self.encoding)
                groups.reject_each(faults, "bad_tokens")
                of_queries |= columns
                continue
            values, group = self._documents(groups, text, lengths_G)
            columns, faults = read_tokens(values, field, text, tokenizer, self.encoding)
            first = {int(group[i]): fault for i, fault in sorted(faults.items(), reverse=True)}
            groups.reject_each(dict(sorted(first.items())), "bad_tokens")
            of_documents |= {name: (column, group) for name, column in columns.items()}
        return of_queries, of_documents

    def _documents(self, groups: Examined, text: TextColumn, lengths_G: Ints) -> tuple[pa.Array, Ints]:
        """The texts or ids of all documents, and their groups; groups with a wrong number of them are rejected."""
        counted = groups.batch.column(text.lengths or text.column)
        groups.reject(
            _lengths(counted) != lengths_G, f"column {text.column!r} does not have the tokens of each document"
        )
        if text.lengths is not None:
            sums_G = _sums(counted)
            groups.reject(
                sums_G != _lengths(groups.batch.column(text.column)),
                f"the lengths of {text.column!r} do not add up to its tokens",
            )
        good_rows = groups.batch.take(pa.array(np.flatnonzero(~groups.bad_N)))
        counted = good_rows.column(text.lengths or text.column)
        group = np.repeat(np.flatnonzero(~groups.bad_N), _lengths(counted))
        flat = good_rows.column(text.column).flatten()
        if text.lengths is not None:
            sizes = counted.flatten().cast(pa.int64()).to_numpy()
            flat = pa.ListArray.from_arrays(pa.array(offsets(sizes), pa.int32()), flat)
        return flat, group

    def _features(self, batch: pa.RecordBatch, n: int) -> Floats:
        columns = self.mapping.feature_columns(batch.schema)
        if self.mapping.matrix:
            values = batch.column(columns[0]).flatten()
            values = values.flatten() if cols.is_list(values.type) else values
            features_NF = cols.float_column(values).reshape(n, len(self.features))
            if self.mapping.categorical:
                features_NF = features_NF.copy()  # Arrow's memory is read-only
        else:
            features_NF = np.empty((n, len(self.features)), np.float32)
        for i, feature in enumerate(self.features):
            if feature.kind == "categorical":
                encoder = self.encoders.setdefault(feature.name, CategoryEncoder())
                codes = pa.array(features_NF[:, i]) if self.mapping.matrix else batch.column(feature.name).flatten()
                features_NF[:, i] = encoder.encode(codes)
                if self.mapping.matrix:  # codes from an earlier data set; the texts are not here
                    encoder.texts = None
            elif not self.mapping.matrix:
                features_NF[:, i] = cols.float_column(batch.column(feature.name).flatten())
        return features_NF


def _lengths(column: pa.Array) -> Ints:
    """The number of values in each list, 0 for null."""
    return np.asarray(pc.list_value_length(column).cast(pa.int64()).fill_null(0), np.int64)


def _sums(column: pa.Array) -> Ints:
    """The sum of each list, -1 if a value is negative, null or not a whole number."""
    values = cols.without_dictionary(column.flatten()).cast(pa.float64()).fill_null(-1).to_numpy()
    wrong = (values < 0) | (values != np.floor(values))
    group = np.repeat(np.arange(len(column)), _lengths(column))
    sums: Ints = np.bincount(group, weights=np.where(wrong, 0, values), minlength=len(column)).astype(int)
    return np.where(_any(column, wrong), -1, sums)


def _any(column: pa.Array, is_bad: Bools) -> Bools:
    """True for lists with a bad value; `is_bad` marks the bad ones among the values of all lists."""
    group = np.repeat(np.arange(len(column)), _lengths(column))
    return np.asarray(np.bincount(group[is_bad], minlength=len(column)) > 0)
