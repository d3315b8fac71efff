"""Modules that load at their first use, because torch takes seconds that a config or a page that is done can spare.

A module names them at its top. For a type checker they are imports:

    if TYPE_CHECKING:
        import torch
    else:
        torch = Late("torch")
"""

import importlib
from types import ModuleType
from typing import Any


class Late(ModuleType):
    """A module by its name, which is imported when something of it is first used."""

    def __getattr__(self, name: str) -> Any:
        """What the module calls by this name."""
        return getattr(importlib.import_module(self.__name__), name)
