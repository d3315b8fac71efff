"""Files with one row per line or record, whatever their format, as Arrow batches of bounded memory."""

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ltrscale.errors import InputError
from ltrscale.ingest import csvtext, jsontext, parquet
from ltrscale.ingest.csvtext import Dialect
from ltrscale.ingest.rows import RawTexts, Rejection, RowTexts
from ltrscale.ingest.textrows import TextReader

_PACKED = ("", ".gz", ".xz")
_CSV = tuple(kind + packed for kind in (".csv", ".tsv") for packed in _PACKED)
_JSON = tuple(kind + packed for kind in (".jsonl", ".ndjson") for packed in _PACKED)


Form = Literal["csv", "json", "parquet"]


def form(url: str) -> Form:
    """The form of a file whose name `read_schema` accepts."""
    return "parquet" if url.endswith(".parquet") else "json" if url.endswith(_JSON) else "csv"


class Raw(NamedTuple):
    """Some rows with their line or row numbers and texts, the lines that are none, and the share of the file so far."""

    rows: pa.RecordBatch
    lines_N: NDArray[np.int64]
    texts: RawTexts
    rejected: list[Rejection]
    share: float


def read_schema(url: str, dialect: Dialect) -> pa.Schema:
    """The columns of a file; types of text files are those of their first lines.

    Raises:
        InputError: the file is missing, empty or damaged, or its name has another ending.
    """
    if url.endswith(".parquet"):
        return parquet.read_schema(url)
    if url.endswith(_CSV):
        return csvtext.read_schema(url, dialect)
    if url.endswith(_JSON):
        return jsontext.read_schema(url)
    kinds = ".parquet, .csv, .tsv or .jsonl, the last three perhaps with .gz or .xz"
    raise InputError(f"{url}: the name does not end in {kinds}; rename it or narrow the path")


def read_rows(
    url: str,
    schema: pa.Schema,
    columns: Sequence[str],
    *,
    numbers: Collection[str],
    query: str,
    dialect: Dialect,
    batch_rows: int,
) -> Iterator[Raw]:
    """Read some columns of a file, in blocks of at most `batch_rows` rows.

    Args:
        url: the file.
        schema: its columns, from `read_schema`.
        columns: those to read, in their order in the schema.
        numbers: those to read as numbers, where the file has text only.
        query: the column with the query id, which rejected lines state.
        dialect: the form of a CSV file.
        batch_rows: the most rows of a block.

    Raises:
        InputError: the file is damaged.
    """
    if url.endswith(".parquet"):
        for batch, lines_N, share in parquet.read_batches(url, columns, batch_rows):
            yield Raw(batch, lines_N, RowTexts(batch, lines_N), [], share)
        return
    reader: TextReader = (
        jsontext.JsonReader(url, schema, columns, numbers, query, batch_rows)
        if url.endswith(_JSON)
        else csvtext.CsvReader(url, schema, columns, numbers, query, batch_rows, dialect)
    )
    for table in reader:
        yield Raw(table.rows, table.lines_N, table.lines, table.rejected, table.lines.share)
