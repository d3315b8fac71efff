"""Reading row groups, and running a function on each part of a selection, in tasks of a Ray cluster.

They yield the same as `read_direct` and `run_here` in one process, in the same order.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from ltrscale import storage
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.stream.plan import PartT
from ltrscale.data.stream.readers import OPEN_FILES, REQUESTS, PlannedRead, open_parquet, plan_reads, read_planned
from ltrscale.runtime import ray_internals
from ltrscale.runtime.engine import plain_errors

_ROW_GROUPS_A_TASK = 32
_ROW_GROUPS_A_PLAN = 1 << 14
_TASKS_AT_ONCE = 4
_BLOCK_BYTES = 16 << 20
_WAITING_BYTES = 256 << 20
_DEEP = 2

T = TypeVar("T")


def read_with_ray(
    row_groups: Sequence[RowGroup], columns: Sequence[str], *, read_on: Mapping[str, float] | None = None
) -> Generator[pa.Table]:
    """Read row groups in tasks of the connected Ray cluster, streaming, with back-pressure.

    A task reads several row groups, to share the cost of its start, and yields blocks of about 16 MB; it takes the
    custom Ray resources `read_on`, such as `{"reader": 1}`. Few tasks run at once: enough to feed one reader, few
    enough for several readers to share a cluster. Closing the iterator ends them.

    Raises:
        InputError: as `read_direct`.
    """
    import ray.data  # imported late: many processes never use Ray

    if not row_groups:
        return
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the errors that it logs are raised too
    if len(row_groups) > _ROW_GROUPS_A_PLAN:  # to keep the plan of a large selection small in memory
        for start in range(0, len(row_groups), _ROW_GROUPS_A_PLAN):
            yield from read_with_ray(row_groups[start : start + _ROW_GROUPS_A_PLAN], columns, read_on=read_on)
        return
    plan = [item._asdict() for item in plan_reads(row_groups)]
    tasks = max(-(-len(plan) // _ROW_GROUPS_A_TASK), min(len(plan), _TASKS_AT_ONCE))
    dataset = ray.data.from_items(plan, override_num_blocks=tasks).map_batches(
        _read_batch,
        fn_args=(list(columns),),
        batch_size=None,
        batch_format="numpy",
        concurrency=min(tasks, _TASKS_AT_ONCE),
        resources=dict(read_on or {}),
    )
    options = dataset.context.execution_options
    options.preserve_order = True
    options.resource_limits = ray.data.ExecutionResources.for_limits(object_store_memory=_WAITING_BYTES)
    dataset.context.enable_progress_bars = False
    dataset.context.target_max_block_size = _BLOCK_BYTES
    dataset.context.memory_usage_poll_interval_s = None  # off: each poll walks all pages of a worker
    with plain_errors():
        yield from _recut(_fetch(dataset), [row_group.groups for row_group in row_groups])


_open_in_worker = functools.lru_cache(OPEN_FILES)(open_parquet)
"""Cached across the tasks of a Ray worker, because each footer costs two requests."""


def _read_batch(batch: Mapping[str, Any], columns: Sequence[str]) -> Iterator[pa.Table]:
    values = (batch[name].tolist() for name in PlannedRead._fields)
    plan = [PlannedRead(*item) for item in zip(*values, strict=True)]
    is_local = all(storage.is_local(url) for item in plan for url in (item.url, item.scores))
    yield from read_planned(plan, columns, _open_in_worker, threads=0 if is_local else REQUESTS)


def _fetch(dataset: Any) -> Iterator[pa.Table]:
    """Yield the blocks of a Ray data set; each is transferred while the caller uses the previous one."""
    # `Dataset.iter_batches` does this in three threads, and one outlives an iterator that is closed early
    import ray

    blocks = ray_internals.ready_blocks(dataset)
    block = next(blocks, None)
    while block is not None:
        following = next(blocks, None)
        if following is not None:
            ray.wait([following], timeout=0)  # starts the transfer without waiting for it
        yield ray.get(block)
        block = following


def _recut(blocks: Iterator[pa.Table], rows: Sequence[int]) -> Iterator[pa.Table]:
    """Cut blocks, which Ray merges and splits freely, back into the tables that were read."""
    table = next(blocks)
    for n in rows:
        while table.num_rows < n:
            table = pa.concat_tables([table, next(blocks)])
        yield table.slice(0, n)
        table = table.slice(n)


def run_with_ray(
    function: Callable[[PartT], T], parts: Iterable[PartT], *, read_on: Mapping[str, float] | None = None
) -> Iterator[T]:
    """Run a function on each part in tasks of the connected Ray cluster, one CPU each.

    At most twice as many tasks as the cluster has CPUs run ahead of the results taken, so memory does not grow with the
    number of parts; a cluster that grows gets more. A task lost with its node runs again.

    Raises:
        InputError: the function raised it.
    """
    import ray  # imported late: many processes never use Ray

    task = ray.remote(_call).options(
        num_cpus=1,
        resources=dict(read_on or {}),
        scheduling_strategy="DEFAULT",  # any node, even if this process is in a placement group, such as a trial's
    )
    shared = ray.put(function)  # once for all tasks: it may hold a large model
    waiting: deque[Any] = deque()
    try:
        with plain_errors("a process that handled a part of the data", "give Ray fewer CPUs, or its nodes more memory"):
            for part in parts:
                waiting.append(task.remote(shared, part))
                if len(waiting) >= _DEEP * max(1, int(ray.cluster_resources().get("CPU", 1))):
                    yield ray.get(waiting.popleft())
            while waiting:
                yield ray.get(waiting.popleft())
    finally:
        for result in waiting:
            ray.cancel(result)


def _call(function: Callable[[PartT], T], part: PartT) -> T:
    return function(part)
