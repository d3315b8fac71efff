"""Reads raw logs, one item or one query group a row, in Parquet or CSV, block by block.

Which column is what is said by a config. Both readers give RowBlocks with one row per document; memory does not grow
with the file. In numeric columns null, NaN, and in CSV an empty field or NULL, are missing values (NaN); infinite
values are passed on. Categorical columns are encoded as in `categories`.

Shapes: N rows (documents), Q groups, F features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.ingest import csvtext, parquet
from ltrscale.data.ingest.categories import CategoryEncoder
from ltrscale.data.ingest.examine import Encoders, Examined, RowTexts
from ltrscale.data.ingest.grouplogs import group_features, read_groups
from ltrscale.data.ingest.mapping import ColumnMapping, GroupColumns, agree, path_value, resolve
from ltrscale.data.ingest.rows import Rejection, RowBlock, Texts, keep
from ltrscale.errors import InputError

__all__ = ["ColumnMapping", "GroupColumns", "group_features", "item_features", "read_groups", "read_items"]

_CSV = (".csv", ".csv.gz", ".csv.xz")


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
    """Read a log with one item (document) a row from Parquet or CSV, in blocks of at most `batch_rows` rows.

    `lines_N` are row numbers (Parquet), or line numbers with the header as line 1 (CSV). Rejected as `unparsable`: a
    CSV line with a wrong number of fields, misplaced quotes or a value that is no number in a numeric column; a row
    without a query id, with a time stamp or period that is missing or cannot be read, or with text that is not UTF-8.
    Partition columns in the path are ignored, but for `period_column`.

    Args:
        url: A file named .parquet, .csv, .csv.gz or .csv.xz.
        mapping: Which column is what.
        features: The features of the first file of several, as `item_features` gives them; others must have the same.
        first: The name of that file, for errors.
        encoders: Encoders by column, shared by the files of one data set so that collisions are counted once.
        batch_rows: The most rows of a block.

    Raises:
        InputError: the file is missing, empty or damaged; a column is missing, has a type that does not fit, or is
            not as in the first file.
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
    """Makes a RowBlock of a batch of items."""

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
