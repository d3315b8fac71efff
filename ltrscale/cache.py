"""A cache of what a process made last."""

from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")
_NEWEST = 4


def newest(made: dict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """What was made under a key, made now if it is not among the four that were asked for last; drops others."""
    made[key] = made.pop(key) if key in made else make()
    for oldest in [*made][:-_NEWEST]:
        del made[oldest]
    return made[key]
