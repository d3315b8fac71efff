"""Places below a config: what a dotted key, or a location of one of pydantic's errors, may hold by the annotations."""

import inspect
import re
import typing
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel


class KeyPlace(NamedTuple):
    """A place below a config."""

    key: tuple[str, ...]
    """The parts of its dotted key, as people write it."""
    types: Sequence[Any]
    """The types that the value there may have."""
    others: Sequence[type[BaseModel]] = ()
    """Configs of other kinds than the chosen one."""

    def configs(self) -> list[type[BaseModel]]:
        """The configs that the value may be."""
        return [t for t in self.types if inspect.isclass(t) and issubclass(t, BaseModel)]


def place_at(root: type[BaseModel], location: Sequence[str | int]) -> KeyPlace:
    """The place at a location of pydantic's, which also names the kind of each config on the way, or at a key."""
    place = KeyPlace((), (root,))
    for part in location:
        configs = place.configs()
        chosen = [c for c in configs if "kind" in c.model_fields and c.model_fields["kind"].default == part]
        if chosen and len(configs) > 1:
            place = KeyPlace(place.key, chosen, [config for config in configs if config not in chosen])
            continue
        fields = [config.model_fields[part].annotation for config in configs if part in config.model_fields]
        if not fields and len(place.types) > 1 and (branch := _branch(place.types, part)):
            place = KeyPlace(place.key, branch)
            continue
        items = [typing.get_args(t)[typing.get_origin(t) is dict] for t in place.types if _holds_items(t)]
        below = [t for inner in fields or items for t in alternatives(inner)]
        place = KeyPlace((*place.key, str(part)), below or place.types)
    return place


_BRANCH = re.compile(r"(constrained|function|is-instance|lax-or-strict|nullable)\W.*|(literal|dict|list|tuple|set)\[.*")
"""Names that pydantic gives to the types of a union, which no user has typed."""


def _branch(here: Sequence[Any], part: str | int) -> Sequence[Any]:
    """The types of a union that a part of a place names; empty if the part is a key."""
    names = {getattr(t, "__name__", ""): t for t in here if not _holds_items(t)}
    if part in names:
        return [names[str(part)]]
    if not isinstance(part, str) or not _BRANCH.fullmatch(part):
        return []
    origin = part.partition("[")[0]
    return [t for t in here if getattr(typing.get_origin(t), "__name__", "") == origin] or here


def _holds_items(annotation: Any) -> bool:
    return bool(typing.get_args(annotation)) and inspect.isclass(typing.get_origin(annotation))


def alternatives(annotation: Any) -> list[Any]:
    """The types of a union, without `Annotated`; the type itself if it is not a union."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return alternatives(inner[0])
    return [t for a in inner for t in alternatives(a)] if origin in (typing.Union, UnionType) else [annotation]
