"""Reads the features of earlier events beside the rows of a file.

Shapes: N rows of a block, M rows that were read and are still to come.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa

from ltrscale.arrays import Ints
from ltrscale.errors import InputError
from ltrscale.ingest.history import LINE
from ltrscale.ingest.tables import parquet_schema, read_parquet

_ROWS = 1 << 16


class RowHistory:
    """The features of a file's rows, from files that have them in the order of its lines, some columns each."""

    def __init__(self, file: str, urls: Sequence[str], names: Collection[str]) -> None:
        self._file, self._names = file, names
        self._tables = zip(*map(_batches, urls), strict=True)
        self._waiting: pa.Table | None = None

    def at(self, lines_N: Ints) -> dict[str, pa.Array]:
        """The features of the rows at these lines, which lie behind those of the call before."""
        if not len(lines_N):
            return dict.fromkeys(self._names, pa.array([], pa.float32()))
        while (lines_M := self._lines()).max(initial=-1) < lines_N[-1]:
            self._waiting = self._next()
        assert self._waiting is not None
        place_N = np.searchsorted(lines_M, lines_N)
        if (lines_M[place_N] != lines_N).any():
            raise self._changed()
        rows = self._waiting.drop_columns(LINE).take(pa.array(place_N)).combine_chunks()
        self._waiting = self._waiting.slice(int(place_N[-1]) + 1)
        return {name: column.combine_chunks() for name, column in zip(rows.column_names, rows.columns, strict=True)}

    def _lines(self) -> Ints:
        return np.empty(0, np.int64) if self._waiting is None else self._waiting.column(LINE).to_numpy()

    def _next(self) -> pa.Table:
        """The rows that wait, and the next ones of all files."""
        parts = next(self._tables, None)
        if parts is None:
            raise self._changed()
        table = pa.Table.from_batches([parts[0]])
        for part in parts[1:]:
            for name in part.schema.names[1:]:
                table = table.append_column(name, part.column(name))
        return table if self._waiting is None else pa.concat_tables([self._waiting, table])

    def _changed(self) -> InputError:
        return InputError(f"{self._file}: has other rows than when its history was made; run the same command again")


def _batches(url: str) -> Iterator[pa.RecordBatch]:
    return (raw.rows for raw in read_parquet(url, parquet_schema(url).names, _ROWS))
