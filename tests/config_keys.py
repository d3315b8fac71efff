"""Every key of a config, also below it and in the other kinds of its unions, each with other values to try."""

import contextlib
import datetime
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ltrscale.config import Config, is_operational, kind_of, members


@dataclass(frozen=True)
class Values:
    """Values that fit where a plain example of the type would not."""

    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For texts, by the name of their key."""
    complete: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For a config, by the name of its class: keys that it needs beside those without a default."""


@dataclass(frozen=True)
class Key:
    """A key at its place in a config."""

    path: tuple[str | int, ...]
    owner: type[BaseModel]
    operational: bool
    """The key, or one above it, is marked."""
    base: Config
    """A config that has the key."""
    values: Sequence[Any]
    """Other values of the key alone, some of which may not fit."""
    leaf: bool
    """Whether no config is below it, whose keys come by themselves."""

    @property
    def name(self) -> str:
        """The dotted key."""
        return ".".join(map(str, self.path))

    @property
    def others(self) -> Iterator[Config]:
        """The same config with each other value that fits, made when it is asked for."""
        changed = (_changed(self.base, self.path, value) for value in self.values)
        return (other for other in changed if other is not None and other != self.base)


def keys_of(base: Config, among: Values) -> Iterator[Key]:
    """All keys of a config and of what its unions may hold instead."""
    yield from _keys(base, base, (), among, operational=False)


def _keys(
    base: Config, here: BaseModel, path: tuple[str | int, ...], among: Values, *, operational: bool
) -> Iterator[Key]:
    for name, info in type(here).model_fields.items():
        at, value = (*path, name), getattr(here, name)
        marked = operational or is_operational(info)
        if name != "kind":
            others = _values(value, info, name, among)
            yield Key(at, type(here), marked, base, others, leaf=not members(info.annotation))
        yield from _below(base, value, info.annotation, at, among, operational=marked)


def _below(
    base: Config, value: Any, annotation: Any, at: tuple[str | int, ...], among: Values, *, operational: bool
) -> Iterator[Key]:
    """The keys below a value, and below the other configs that may stand there."""
    if isinstance(value, BaseModel):
        yield from _keys(base, value, at, among, operational=operational)
    elif isinstance(value, tuple | dict) and value:
        slot = next(iter(value)) if isinstance(value, dict) else 0
        yield from _below(base, value[slot], Any, (*at, slot), among, operational=operational)
    for model in _models(annotation):
        if type(value) is not model and (other := _changed(base, at, example(model, among))) is not None:
            yield from _below(other, _at(other, at), Any, at, among, operational=operational)


def example(model: type[BaseModel], among: Values) -> dict[str, Any]:
    """Values of the keys that a config must have."""
    found = {} if "kind" not in model.model_fields else {"kind": kind_of(model)}
    for name, info in model.model_fields.items():
        if info.is_required():
            found[name] = _examples(info.annotation, name, among)[0]
    return found | dict(among.complete.get(model.__name__, {}))


def _changed(base: Config, at: Sequence[str | int], value: Any) -> Config | None:
    """The config with another value at a place; None if it does not fit there."""
    values = base.model_dump()
    here: Any = values
    for part in at[:-1]:
        here[part] = list(here[part]) if isinstance(here[part], tuple) else here[part]
        here = here[part]
    if isinstance(here, tuple):
        return None
    here[at[-1]] = value
    with contextlib.suppress(ValidationError):
        return type(base).model_validate(values)
    return None


def _at(config: Any, at: Sequence[str | int]) -> Any:
    for part in at:
        config = getattr(config, str(part)) if isinstance(config, BaseModel) else config[part]
    return config


def _values(value: Any, info: FieldInfo, name: str, among: Values) -> list[Any]:
    """Other values than this one, most of which fit."""
    others = [other for other in _examples(info.annotation, name, among) if other != value]
    match value:
        case bool() | None:
            return others
        case int():
            return [*others, value + 1, value * 2, value - 1, value // 2]
        case float():
            return [*others, value / 2, value * 2, value + 0.5, value - 0.25]
        case str():
            return [*others, f"{value}x"]
        case datetime.date():
            return [*others, value + datetime.timedelta(days=1)]
        case tuple() if value:
            return [*others, value[:-1], (*value, value[-1]), value[1:]]
        case dict() if value:
            return [*others, {f"{key}x": item for key, item in _plain(value).items()}]
        case _:
            return others


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item.model_dump() if isinstance(item, BaseModel) else item for key, item in value.items()}


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The configs that may stand at a place itself, or that its list or mapping may hold."""
    return [part for part in _alternatives(annotation) if inspect.isclass(part) and issubclass(part, BaseModel)]


def _alternatives(annotation: Any) -> list[Any]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _alternatives(inner[0])
    return [t for a in inner for t in _alternatives(a)] if origin in (typing.Union, UnionType) else [annotation]


def _examples(annotation: Any, name: str, among: Values) -> list[Any]:
    """Some values of a type."""
    found: list[Any] = []
    for part in _alternatives(annotation):
        origin, inner = typing.get_origin(part), typing.get_args(part)
        if origin is typing.Literal:
            found += inner
        elif origin in (tuple, list):
            item = _examples(inner[0], name, among)
            found += [(value,) for value in item] + [tuple(item[:2])] * (len(item) > 1)
            if inner and inner[-1] is not ...:
                found.append(tuple(_examples(each, name, among)[0] for each in inner))
        elif origin is dict:
            found += [
                {key: value} for key in _examples(inner[0], "", among) for value in _examples(inner[1], name, among)
            ]
        elif inspect.isclass(part) and issubclass(part, BaseModel):
            found.append(example(part, among))
        else:
            found += _plain_examples(part, name, among)
    return found


def _plain_examples(part: Any, name: str, among: Values) -> list[Any]:
    match part:
        case _ if part is type(None):
            return [None]
        case _ if part is bool:
            return [False, True]
        case _ if part is int:
            return [1, 2, 5]
        case _ if part is float:
            return [0.5, 0.25, 1.0]
        case _ if part is str:
            return [*among.texts.get(name, ("a", "b"))]
        case _:
            return [1, 2] if part is Any else []
