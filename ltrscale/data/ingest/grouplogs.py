"""Reads raw logs with one query group a row from Parquet, and takes the groups apart into documents.

Shapes: N documents, G groups of a batch, F features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.ingest import parquet
from ltrscale.data.ingest.categories import CategoryEncoder
from ltrscale.data.ingest.examine import Encoders, Examined, RowTexts
from ltrscale.data.ingest.mapping import GroupColumns, agree, path_value, resolve_groups
from ltrscale.data.ingest.rows import RowBlock
from ltrscale.errors import InputError


def group_features(url: str, mapping: GroupColumns) -> list[Feature]:
    """The features that `read_groups` finds in a file."""
    return resolve_groups(_schema(url), mapping, url)


def _schema(url: str) -> pa.Schema:
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
    """Read a Parquet file with one query group a row, and take it apart into documents; `starts_N` tells the groups.

    `lines_N` is the row of the group. Rejected: `empty_group`, a group without documents (0 rows); `feature_count`,
    feature lists that do not hold the same number of whole documents (1 row, for its documents cannot be told apart);
    `unparsable`, the documents of a group whose labels or other lists have another length, or whose query id, time
    stamp or period cannot be read.

    Args:
        url: A file named .parquet.
        mapping: Which column is what.
        features: The features of the first file of several, as `group_features` gives them; others must have the same.
        first: The name of that file, for errors.
        encoders: Encoders by feature, shared by the files of one data set so that collisions are counted once.
        batch_groups: The most groups of a block.

    Raises:
        InputError: the file is missing, empty or damaged; a column is missing, has a type that does not fit, or the
            features are not those of the first file.
    """
    schema = _schema(url)
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
    """Makes a RowBlock of a batch of groups."""

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
        labels_N = None if mapping.labels is None else cols.numbers(_spread(batch.column(mapping.labels), lengths_G))
        return RowBlock(
            file=self.url,
            lines_N=np.repeat(raw.lines_N[good_G], lengths_G),
            query_ids_N=ids_G.take(index_N),
            features_NF=self._features(batch, int(lengths_G.sum())),
            labels_N=np.full(len(index_N), np.nan, np.float32) if labels_N is None else labels_N,
            period=path_value(self.url, mapping.period_column or "") or "",
            periods_N=None if periods_G is None else periods_G.take(index_N),
            doc_ids_N=None if mapping.docs is None else cols.texts(_spread(batch.column(mapping.docs), lengths_G))[0],
            starts_N=starts_N,
            columns={name: cols.floats(_spread(batch.column(c), lengths_G)) for name, c in mapping.side().items()}
            | {name: column.take(index_N) for name, column in meta.items()},
            rejected=rejected,
            texts=texts,
            share=raw.share,
        )

    def _examine(self, groups: Examined) -> NDArray[np.int64]:
        """Check the lists of each group against each other; returns its documents, 1 where they cannot be told."""
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
    """Lists of which a value is bad; `bad` tells it of the values of all lists."""
    group = np.repeat(np.arange(len(column)), _lengths(column))
    found: NDArray[np.bool_] = np.bincount(group[bad], minlength=len(column)) > 0
    return found


def _spread(column: pa.Array, lengths_G: NDArray[np.int64]) -> pa.Array:
    """The values of all lists, null for each document of a group that has no list."""
    if not column.null_count:
        return column.flatten()
    valid_N = np.repeat(column.is_valid().to_numpy(zero_copy_only=False), lengths_G)
    index_N = np.where(valid_N, np.cumsum(valid_N) - 1, 0)
    return column.flatten().take(pa.array(index_N, mask=~valid_N))
