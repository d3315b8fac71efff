"""Readers: from a plan of row groups to their tables, in the plan's order, one table a row group.

`read_direct` reads with pyarrow in this process; `read_with_ray` reads on the CPUs of a Ray cluster. Both give the same
tables; a column that a file does not have is left out.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data.split import RowGroup
from ltrscale.errors import InputError

Reader = Callable[[Sequence[RowGroup], Sequence[str]], Iterator[pa.Table]]
"""Takes row groups and column names; yields one table a row group, in order."""

_OPEN_FILES = 64
_ROW_GROUPS_A_TASK = 8


def read_direct(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read row groups with pyarrow in the calling thread.

    Raises:
        InputError: a file is missing, damaged or not the one that its manifest lists.
    """
    return _read(((row_group.url, row_group.index, row_group.groups) for row_group in row_groups), columns)


def read_with_ray(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read row groups in tasks of the Ray cluster that this process is connected to, streaming, with back-pressure.

    A task reads several row groups, which share the cost of starting it.

    Raises:
        InputError: as `read_direct`.
    """
    import ray.data  # here, for the many processes that never use Ray
    from ray.exceptions import RayTaskError

    if not row_groups:
        return
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are raised too
    plan = [{"url": r.url, "index": r.index, "groups": r.groups} for r in row_groups]
    tasks = -(-len(plan) // _ROW_GROUPS_A_TASK)
    dataset = ray.data.from_items(plan, override_num_blocks=tasks).map_batches(
        _read_batch, fn_args=(list(columns),), batch_size=None, batch_format="numpy"
    )
    dataset.context.execution_options.preserve_order = True
    dataset.context.enable_progress_bars = False
    try:
        blocks = iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
        yield from _recut(blocks, [row_group.groups for row_group in row_groups])
    except RayTaskError as error:
        if not isinstance(error.cause, InputError):
            raise
        message, _, _ = str(error.cause).partition(" Failed to apply UDF")  # Ray appends advice on its own retries
        raise InputError(message) from None


def _read_batch(batch: Mapping[str, Any], columns: Sequence[str]) -> Iterator[pa.Table]:
    """What a Ray task does with its part of the plan."""
    plan = (batch[key].tolist() for key in ("url", "index", "groups"))
    yield from _read(zip(*plan, strict=True), columns)


def _recut(blocks: Iterator[pa.Table], rows: Sequence[int]) -> Iterator[pa.Table]:
    """Cut blocks, which Ray merges and splits as it likes, back into the tables that were read."""
    table = next(blocks)
    for n in rows:
        while table.num_rows < n:
            table = pa.concat_tables([table, next(blocks)])
        yield table.slice(0, n)
        table = table.slice(n)


def _read(plan: Iterable[tuple[str, int, int]], columns: Sequence[str]) -> Iterator[pa.Table]:
    """The row groups (file, number, rows expected) of a plan."""
    opened = functools.lru_cache(maxsize=_OPEN_FILES)(_open)  # a shuffled plan comes back to a file again and again
    for url, index, groups in plan:
        file = opened(url)
        found = file.metadata.row_group(index).num_rows if index < file.num_row_groups else 0
        if found != groups:
            raise InputError(
                f"{url}: row group {index} has {found} query groups where the manifest lists {groups}; {REMEDY}"
            )
        with _damage(url):
            table = file.read_row_group(index, columns=list(columns), use_threads=False)
        yield table


def _open(url: str) -> pq.ParquetFile:
    filesystem, path = storage.arrow_filesystem(url)
    with storage.named_errors(url), _damage(url):
        return pq.ParquetFile(path, filesystem=filesystem, pre_buffer=not storage.is_local(url))


REMEDY = "prepare the data set again"


@contextmanager
def _damage(url: str) -> Iterator[None]:
    """Turn what pyarrow says of a file that it cannot decode into one line that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{url}: damaged ({str(error).rstrip('.')}); {REMEDY}") from error
