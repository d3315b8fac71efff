"""Other values for the keys of a config, for tests that every key has an effect."""

import contextlib
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from ltrscale.config import Config
from ltrscale.errors import InputError


def variations(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields the name of a key and the config with that key, or one below it, changed; a key may come several times."""
    for name, field in type(config).model_fields.items():
        if name == "kind":
            continue
        value = getattr(config, name)
        if isinstance(value, Config):
            others = [other.model_dump() for _, other in variations(value)]
        else:
            others = _others(value, field.annotation)
        for other in others:
            with contextlib.suppress(ValidationError):
                yield name, config.replace(**{name: other})


def keys_without_effect(configs: Iterable[Any], trace: Callable[[Any], Tensor]) -> set[str]:
    """Keys that never change the result of `trace`, in any of the configs."""
    tried: set[str] = set()
    found: set[str] = set()
    for config in configs:
        before = trace(config)
        for key, other in variations(config):
            if key not in found:
                with contextlib.suppress(InputError):  # the value does not fit the test's data
                    found |= set() if torch.equal(trace(other), before) else {key}
                    tried.add(key)
    return tried - found


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
    return (
        [value * 2, value // 2, value + 1, value - 1] if isinstance(value, int) else [value / 2, value * 2, value + 0.5]
    )


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if typing.get_origin(annotation) in (tuple, list):
        return []
    return [choice for part in typing.get_args(annotation) for choice in _literals(part)]
