"""Work that compiled code leaves to Python.

Apart from the other models, because `torch.compiler.disable` loads the compiler: a second, for which only those who
train should wait, and not every process that reads a log or scores it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., T], *args: Any) -> T:
    """Call a function that keeps something: compiled code would come to depend on what is kept."""
    return function(*args)
