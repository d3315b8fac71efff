"""Parquet files, of which one batch of rows is in memory at a time; errors name the place of damage in a file.

Shapes: N rows of a batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data import columns as cols
from ltrscale.errors import InputError
from ltrscale.ingest.rows import Raw, RowTexts

_READ_AHEAD = 1 << 18


def parquet_schema(url: str) -> pa.Schema:
    """The columns of a Parquet file, as they are read."""
    with _open(url) as file:
        return cols.plain_schema(file.schema_arrow)


def read_parquet(url: str, columns: Sequence[str], batch_rows: int) -> Iterator[Raw]:
    """Read batches of at most `batch_rows` rows; `columns` are in file order.

    A row group is read page by page: memory does not grow with the file or with its row groups.

    Raises:
        InputError: the file is missing or cannot be decoded; names row group and row.
    """
    with _open(url) as file:
        row = 1
        for group in range(file.num_row_groups):
            # without its offset, which is in column metadata: if that is damaged, pyarrow kills the process
            with damage(url, f"row group {group}, near row {row}"):
                batches = file.iter_batches(batch_rows, row_groups=[group], columns=list(columns))
            while True:
                with damage(url, f"row group {group}, near row {row}"):
                    batch = next(batches, None)
                if batch is None:
                    break
                lines_N = np.arange(row, row + len(batch))
                row += len(batch)
                rows, share = cols.plain(batch), (row - 1) / max(row - 1, file.metadata.num_rows)
                yield Raw(rows, lines_N, RowTexts(rows, lines_N), [], share)
        if row - 1 != file.metadata.num_rows:
            raise InputError(
                f"{url}: {row - 1:,} rows where its footer counts {file.metadata.num_rows:,}; "
                "write the file again or remove it"
            )


@contextmanager
def _open(url: str) -> Iterator[pq.ParquetFile]:
    with storage.open_input(url) as stream:
        if not (end := stream.seek(0, 2)):
            raise InputError(f"{url}: the file is empty (0 bytes); write it again or remove it")
        with damage(url, f"the footer before byte {end}"):
            # checksums, if any, detect a flipped bit that would still decode
            file = pq.ParquetFile(
                stream,
                pre_buffer=False,
                buffer_size=_READ_AHEAD,
                page_checksum_verification=True,
                arrow_extensions_enabled=True,  # UUIDs, which are text here
            )
            assert file.schema_arrow is not None
        yield file


@contextmanager
def damage(url: str, where: str) -> Iterator[None]:
    """Raise InputError, with the place in the file, if pyarrow cannot decode it."""
    with storage.named_errors(url):
        try:
            yield
        # MemoryError and OverflowError too: a damaged length may ask for any amount of memory
        except (pa.ArrowException, OSError, EOFError, ValueError, MemoryError, OverflowError) as error:
            if storage.is_fault(error):
                raise
            raise InputError(f"{url}: cannot decode {where}: {error}; write the file again or remove it") from error
