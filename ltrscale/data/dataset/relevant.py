"""Of which queries the labelled groups are, and which have a relevant document: what a manifest does not say of them.

Shapes: Q labelled groups of a row group.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.errors import InputError

T = TypeVar("T")

_THREADS = 8
_FILES_KNOWN = 4096
_COPY = re.compile(r"#\d+$")
"""What `jobs.relabel` adds to the query id of a copy."""


def with_relevant(files: Sequence[tuple[str, str]], column: str) -> list[list[NDArray[np.bool_]]]:
    """Which labelled groups of some data files have a label above 0: shape [Q] for each row group of each file.

    It reads the labels alone, once a process for each file.

    Args:
        files: URL and content hash of each file.
        column: the column whose values are the labels; a group is labelled if `labels` has a value.

    Raises:
        InputError: a file cannot be read, or lacks the column.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda file: _in_file(*file, column), files))


def labelled_queries(url: str) -> list[list[str]]:
    """The query ids of the labelled groups of a data file, those of copies without their number, by row group.

    Raises:
        InputError: the file cannot be read.
    """

    def of(file: pq.ParquetFile, number: int) -> list[str]:
        ids = _labelled(file, number, "query_id").to_pylist()
        return [_COPY.sub("", query) for query in ids]

    return _each_row_group(url, of, "query_id")


def none_relevant(groups: int) -> str:
    """What is wrong where these labelled groups have no relevant document."""
    return f"all labels of its {groups:,} labelled groups are 0, so there is nothing to learn or to choose by"


@lru_cache(_FILES_KNOWN)
def _in_file(url: str, sha256: str, column: str) -> list[NDArray[np.bool_]]:  # noqa: ARG001 - other content, another answer
    def of(file: pq.ParquetFile, number: int) -> NDArray[np.bool_]:
        lists = _labelled(file, number, column).combine_chunks()
        above_N1 = np.concatenate([[0], np.cumsum(lists.values.to_numpy(zero_copy_only=False) > 0)])
        offsets_Q1 = lists.offsets.to_numpy()
        return np.asarray(above_N1[offsets_Q1[1:]] > above_N1[offsets_Q1[:-1]])

    return _each_row_group(url, of, column)


def _each_row_group(url: str, of: Callable[[pq.ParquetFile, int], T], column: str) -> list[T]:
    """What a function finds in each row group of a file."""
    filesystem, path = storage.arrow_filesystem(url)

    def read() -> list[T]:
        with filesystem.open_input_file(path) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            return [of(file, number) for number in range(file.num_row_groups)]

    try:
        with storage.named_errors(url):
            return storage.patiently(read)
    except (pa.ArrowException, UnicodeDecodeError, KeyError) as error:
        raise InputError(
            f"{url}: its column {column!r} cannot be read ({error}); prepare the data set again"
        ) from error


def _labelled(file: pq.ParquetFile, number: int, column: str) -> pa.ChunkedArray:
    """A column of the groups of a row group that have labels."""
    table = file.read_row_group(number, columns=sorted({"labels", column}), use_threads=False)
    return table.filter(pc.is_valid(table["labels"]))[column]
