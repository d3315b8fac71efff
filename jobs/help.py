"""What `--help` says of a config: the keys that people set, one key with all below it, or every key."""

import math
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from ltrscale.config import models_in
from ltrscale.errors import InputError, nearest


@dataclass(frozen=True)
class Key:
    """One key of a config, or one kind that it may have."""

    name: str
    """Dotted; `NAME` stands for a name that the user chooses, `0` for a place in a list, `kind=...` ends a kind."""
    text: str
    """What it means."""
    default: str = ""
    """` = value` or ` (required)`; empty where the keys below have defaults of their own."""
    choices: str = ""
    """The values, or the kinds, that it may have, in words; empty where it may have any."""
    within: tuple["Key", ...] = ()
    """The kinds of which it is a key."""

    def is_below(self, given: Sequence[str]) -> bool:
        """Whether it is the key whose parts are given, or stands below it."""
        parts = self.name.split(".")
        own = len(given) <= len(parts) and all(map(_fits, parts, given))
        return own or any(kind.is_below(given) for kind in self.within)

    def show(self, width: int) -> str:
        """The key with its default in one line, and the meaning below it."""
        margin = "  " * (1 + len(self.within))
        lines = [f"{margin}{self.name}{self.default}"]
        for text in filter(None, (self.text, self.choices)):
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=margin + "    ",
                subsequent_indent=margin + "    ",
                break_on_hyphens=False,
                break_long_words=False,
            )
        return "\n".join(lines)


def _fits(part: str, given: str) -> bool:
    return part in (given, "NAME") or (part == "0" and given.isdecimal()) or part.partition("=")[0] == given


def keys_of(
    cls: type[BaseModel],
    prefix: str = "",
    default: BaseModel | None = None,
    within: tuple[Key, ...] = (),
) -> Iterator[Key]:
    """Every key of a config, those of nested configs in place.

    Args:
        cls: the config.
        prefix: what stands before its own keys.
        default: what stands where the config is left out, if that is not what its class says.
        within: the kinds that it is, or is part of.
    """
    for name, field in cls.model_fields.items():
        if within and name == "kind" and within[-1].name == f"{prefix}kind={field.default}":
            continue
        models, value = list(models_in(field.annotation)), default_of(field, name, default)
        yield Key(f"{prefix}{name}", meaning(field), _default(field, value), choices(field), within)
        below = f"{prefix}{name}{_PLACES.get(typing.get_origin(field.annotation), '')}."
        for model in models:
            inside = within
            if len(models) > 1:
                kind = Key(f"{below}kind={kind_of(model)}", summary(model), within=within)
                yield kind
                inside = (*within, kind)
            yield from keys_of(model, below, value if isinstance(value, model) else None, inside)


_PLACES: dict[Any, str] = {dict: ".NAME", tuple: ".0"}
MISSING = object()


def default_of(field: FieldInfo, name: str, default: BaseModel | None) -> Any:
    """The value of a field that is left out; `MISSING` where it must be given."""
    if default is not None:
        return getattr(default, name)
    return MISSING if field.is_required() else field.get_default(call_default_factory=True)


def _default(field: FieldInfo, value: Any) -> str:
    if value is MISSING:
        return " (required)"
    if isinstance(value, BaseModel):
        return f" = {{kind: {kind_of(type(value))}}}" if len(list(models_in(field.annotation))) > 1 else ""
    return f" = {shown(value)}"


def shown(value: Any) -> str:
    """A value as YAML in one line."""
    text = yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, width=math.inf)
    return str(text).removesuffix("...\n").strip()


def meaning(field: FieldInfo) -> str:
    """What a field means, in one line: its own words, or those of its config."""
    models = list(models_in(field.annotation))
    return " ".join((field.description or (summary(models[0]) if len(models) == 1 else "")).split())


def summary(cls: type[BaseModel]) -> str:
    """The first line of a config's docstring."""
    return (cls.__doc__ or "").partition("\n")[0]


def kind_of(cls: type[BaseModel]) -> str:
    """The name of a config among those of its union."""
    return str(typing.get_args(cls.model_fields["kind"].annotation)[0])


def choices(field: FieldInfo) -> str:
    """What a field may be, in words."""
    models = list(models_in(field.annotation))
    if len(models) > 1:
        return f"Kinds: {', '.join(map(kind_of, models))}."
    literals = _literals(field.annotation)
    return f"One of {', '.join(map(shown, literals))}." if len(literals) > 1 else ""


def _literals(annotation: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, of its list, or of one that may be left empty; none where others are possible."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    parts = [part for part in typing.get_args(annotation) if part not in (type(None), Ellipsis)]
    return _literals(parts[0]) if len(parts) == 1 else ()


def show(keys: Sequence[Key], width: int) -> str:
    """Keys below each other, each kind before the first of its keys."""
    seen: dict[Key, str] = {}
    for key in keys:
        for each in (*key.within, key):
            if each not in seen:
                seen[each] = each.show(width)
    return "\n".join(seen.values())


def find(keys: Sequence[Key], given: str) -> list[Key]:
    """The key that is asked for, with all below it.

    Raises:
        InputError: there is no such key; names the nearest.
    """
    if found := [key for key in keys if key.is_below(given.split("."))]:
        return found
    names = [key.name for key in keys]
    within = [name for name in names if f".{given.strip('.')}." in f".{name}."]
    near = within[0] if within else nearest(given, names)
    raise InputError(f"--help {given}: unknown key; did you mean {near!r}?")
