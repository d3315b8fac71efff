"""Which device a process computes on."""

from typing import Annotated

import torch
from pydantic import Field

from ltrscale.errors import InputError

Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
"""`auto` takes the process's GPU where there is one; or `cpu`, `cuda`, `cuda:1`."""


def choose_device(name: str) -> torch.device:
    """The device that a config names.

    Raises:
        InputError: a GPU is asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(name)
    seen = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= seen:
        raise InputError(f"device: {name} is asked for and torch sees {seen} GPUs; set device to auto or cpu")
    return chosen
