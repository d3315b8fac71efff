"""Choosing the device on which a process computes, the size of its blocks, and timing a computation."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Self

import torch
from pydantic import Field

from ltrscale.errors import InputError

Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
"""`auto` takes the process's GPU where there is one; or `cpu`, `cuda`, `cuda:1`."""


_SHARE_OF_A_BLOCK = 1 / 64
"""Share of a GPU's memory that one block of float32 entries takes; a few of them live at once."""
_OTHER_DEVICE_BYTES = 80 << 30
"""Memory of a device that does not tell its own."""


@cache
def block_entries(device: torch.device) -> int:
    """Entries of a matrix (similarities, pairs, permutations) that a GPU handles at once: a share of its memory.

    The blocks of a CPU are those that stay in its cache; each computation has its own.

    Example:
        >>> block_entries(torch.device("meta"))
        335544320
    """
    memory = _OTHER_DEVICE_BYTES
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    return int(memory * _SHARE_OF_A_BLOCK) // 4


def round_to_tf32(on: bool) -> None:
    """Whether a GPU may round the operands of float32 products to TF32, as cuDNN's GRU would by default."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none


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


class Turns(float):
    """A quantity measured in turns with others: their median, and the single turns in `turns`.

    A quotient of two is again one, turn by turn, so that a change in the machine's speed cancels out.

    Example:
        >>> from copy import copy
        >>> ratio = Turns([2.0, 6.0, 3.0]) / Turns([1.0, 2.0, 3.0])
        >>> ratio, copy(ratio).turns
        (2.0, (2.0, 3.0, 1.0))
    """

    turns: tuple[float, ...]

    def __new__(cls, turns: Sequence[float]) -> Self:
        """The median of these values."""
        made = super().__new__(cls, statistics.median(turns))
        made.turns = tuple(turns)
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[float, ...]]]:
        """Copies and pickles keep the turns."""
        return type(self), (self.turns,)

    def __truediv__(self, other: float) -> "Turns":
        """The quotient of each turn."""
        others = other.turns if isinstance(other, Turns) else [other] * len(self.turns)
        return Turns([a / b for a, b in zip(self.turns, others, strict=True)])


def cpu_seconds(*works: Callable[[], object], repeats: int = 7) -> list[Turns]:
    """Processor time (user and system) of each work on one torch thread.

    The works take turns, so that a change in the machine's speed affects all of them. The first turn warms up and is
    not counted.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = [[_seconds(work) for work in works] for _ in range(repeats + 1)]
    finally:
        torch.set_num_threads(threads)
    return [Turns(times) for times in zip(*turns[1:], strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
