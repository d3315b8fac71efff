"""Which labelled groups have a relevant document: the one question about labels that a manifest does not answer.

Shapes: Q labelled groups of a row group.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.errors import InputError

_THREADS = 8
_FILES_KNOWN = 4096


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


def none_relevant(groups: int) -> str:
    """What is wrong where these labelled groups have no relevant document."""
    return f"all labels of its {groups:,} labelled groups are 0, so there is nothing to learn or to choose by"


@lru_cache(_FILES_KNOWN)
def _in_file(url: str, sha256: str, column: str) -> list[NDArray[np.bool_]]:  # noqa: ARG001 - other content, another answer
    filesystem, path = storage.arrow_filesystem(url)

    def read() -> list[NDArray[np.bool_]]:
        with filesystem.open_input_file(path) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            return [_in_row_group(file, number, column) for number in range(file.num_row_groups)]

    try:
        with storage.named_errors(url):
            return storage.patiently(read)
    except (pa.ArrowException, UnicodeDecodeError, KeyError) as error:
        raise InputError(
            f"{url}: its column {column!r} cannot be read ({error}); prepare the data set again"
        ) from error


def _in_row_group(file: pq.ParquetFile, number: int, column: str) -> NDArray[np.bool_]:
    table = file.read_row_group(number, columns=sorted({"labels", column}), use_threads=False)
    lists = table.filter(pc.is_valid(table["labels"]))[column].combine_chunks()
    above_N1 = np.concatenate([[0], np.cumsum(lists.values.to_numpy(zero_copy_only=False) > 0)])
    offsets_Q1 = lists.offsets.to_numpy()
    return np.asarray(above_N1[offsets_Q1[1:]] > above_N1[offsets_Q1[:-1]])
