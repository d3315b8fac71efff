"""Other values for the keys of a config, for tests that every key means something."""

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from ltrscale.config import Config


def kind_of(cls: type[Config]) -> str:
    kind: str = cls.model_fields["kind"].default
    return kind


def variations(config: Config) -> Iterator[tuple[str, Config]]:
    """The config with one key changed, with the dotted name of the key; a key may come several times."""
    for name, field in type(config).model_fields.items():
        if name == "kind":
            continue
        value = getattr(config, name)
        if isinstance(value, Config):
            for key, other in variations(value):
                yield from _valid(config, f"{name}.{key}", name, other)
            continue
        for other in _others(value, field.annotation):
            yield from _valid(config, name, name, other)


def keys(cls: type[Config]) -> set[str]:
    """Dotted names of all keys but `kind`."""
    found = set()
    for name, field in cls.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, Config)
        found |= {f"{name}.{key}" for key in keys(field.annotation)} if nested else {name}  # type: ignore[arg-type]
    return found - {"kind"}


def _valid(config: Config, key: str, name: str, value: object) -> Iterator[tuple[str, Config]]:
    try:
        yield key, config.replace(**{name: value.model_dump() if isinstance(value, Config) else value})
    except ValidationError:
        return


def _others(value: Any, annotation: Any) -> list[Any]:
    choices = [choice for choice in _literals(annotation) if choice != value]
    if choices:
        return choices
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [1, 2]
    if isinstance(value, tuple):
        return [value[:-1], value + value[-1:]]
    return [value * 2, value // 2 if isinstance(value, int) else value / 2, value + 1]


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if typing.get_origin(annotation) in (tuple, list):
        return []
    return [choice for part in typing.get_args(annotation) for choice in _literals(part)]
