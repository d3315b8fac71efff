"""Choosing the device on which a process computes, and timing a computation."""

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field

from ltrscale.errors import InputError

Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
"""`auto` takes the process's GPU where there is one; or `cpu`, `cuda`, `cuda:1`."""


def choose_device(name: str) -> torch.device:
    """The device that a config names.

    Raises:
        InputError: the config asks for a GPU that torch does not see.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(name)
    n_gpus = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= n_gpus:
        raise InputError(f"device: {name} is asked for and torch sees {n_gpus} GPUs; set device to auto or cpu")
    return chosen


def cpu_seconds(*works: Callable[[], object], repeats: int = 7) -> list[float]:
    """Median processor time (user and system) of each work on one torch thread.

    The works take turns, so that a change in the machine's speed affects all of them. The first turn warms up and is
    not counted.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = [[_seconds(work) for work in works] for _ in range(repeats + 1)]
    finally:
        torch.set_num_threads(threads)
    return [statistics.median(times) for times in zip(*turns[1:], strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
