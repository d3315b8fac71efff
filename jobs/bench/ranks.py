"""Many logical workers in one process: each rank is a thread, with a process group of threads from torch's own tests.

The code of a worker runs as it is: `torch.distributed` knows the rank of each thread, and collectives meet in memory.
The random numbers of torch's default generator are those of the process, so what runs here must draw from generators
of its own.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

_threaded: Any = multi_threaded_pg  # without types, like torch's own module of C++
_c10d: Any = torch._C._distributed_c10d
T = TypeVar("T")

_STACK_BYTES = 1 << 20  # of thousands of threads, which by default would reserve 8 MB each


def on_ranks(world: int, work: Callable[[int], T]) -> list[T]:
    """Call a function with each rank, all at the same time; returns the results by rank.

    Raises:
        BaseException: the first that a rank raised; the other ranks end.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    store = _c10d.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = work(rank)
            dist.destroy_process_group()
        except BaseException as error:  # raised in the calling thread below
            failures.append(error)
            _threaded.ProcessLocalGroup.exception_handle(error)  # the others wait for this rank in their collectives

    with _threads_as_workers():
        threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world)]


@contextmanager
def _threads_as_workers() -> Iterator[None]:
    """Within the block each thread has a process group of its own."""
    stack_bytes = threading.stack_size(_STACK_BYTES)
    _threaded.ProcessLocalGroup.reset()
    _threaded._install_threaded_pg()
    _c10d._set_thread_isolation_mode(True)  # all threads give their groups the same name
    try:
        yield
    finally:
        _c10d._set_thread_isolation_mode(False)
        _threaded._uninstall_threaded_pg()
        threading.stack_size(stack_bytes)
