"""What is made at its first use: modules, because torch takes seconds that a config or a page can spare, and values.

A module names those that load late at its top. For a type checker they are imports:

    if TYPE_CHECKING:
        import torch
    else:
        torch = Late("torch")
"""

import importlib
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
_NEWEST = 4


class Late(ModuleType):
    """A module by its name, which is imported when something of it is first used."""

    def __getattr__(self, name: str) -> Any:
        """What the module calls by this name."""
        return getattr(importlib.import_module(self.__name__), name)


def newest(made: dict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """What was made under a key, made now if it is not among the four that were asked for last; drops others."""
    made[key] = made.pop(key) if key in made else make()
    for oldest in [*made][:-_NEWEST]:
        del made[oldest]
    return made[key]
