"""Choosing the device on which a process computes, and the size of its blocks."""

from functools import cache
from typing import Annotated

import torch
from pydantic import Field

from ltrscale import processor
from ltrscale.errors import InputError

Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
"""`auto` takes the process's GPU where there is one; or `cpu`, `cuda`, `cuda:1`."""

_SHARE_OF_A_BLOCK = 1 / 64
"""Share of a GPU's memory that one block of float32 entries takes; a few of them live at once."""
_OTHER_DEVICE_BYTES = 80 << 30
"""Memory assumed for a device that does not report it."""


def memory_of(device: torch.device) -> int:
    """Total bytes of a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return processor.memory() if device.type == "cpu" else _OTHER_DEVICE_BYTES


@cache
def block_entries(device: torch.device) -> int:
    """Entries of a matrix (similarities, pairs, permutations) that a GPU handles at once: a share of its memory.

    On a CPU each computation chooses blocks that stay in the cache.

    Example:
        >>> block_entries(torch.device("meta"))
        335544320
    """
    return int(memory_of(device) * _SHARE_OF_A_BLOCK) // 4


def round_to_tf32(on: bool) -> None:
    """Set whether a GPU may round the operands of float32 products to TF32, as cuDNN's GRU would by default."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def multiplies_bfloat16() -> bool:
    """Whether this machine's networks compute products of bfloat16 faster than those of float32."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))  # AVX-512 alone is hardly faster


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
