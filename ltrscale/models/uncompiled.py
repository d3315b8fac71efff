"""Work that compiled code leaves to Python.

A separate module, because `torch.compiler.disable` loads the compiler, which takes a second: only training should wait
for that, not every process that reads or scores a log.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., T], *args: Any) -> T:
    """Call a function with state outside compiled code, which would otherwise depend on the state."""
    return function(*args)
