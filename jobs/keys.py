"""The keys of all jobs as plain data, in `keys.json`: `--help` reads it, and imports no config and no library.

`python -m jobs.reference` writes the file anew from the configs.
"""

import json
import math
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from ltrscale.config import kind_of, models_in

FILE = Path(__file__).with_name("keys.json")


class Field(BaseModel):
    """One key of a config."""

    name: str
    meaning: str = ""
    """In one line: the field's description, or the summary of its config."""
    required: bool = False
    default: Any = None
    """The value of an omitted key; of a config its kind and what differs from the defaults of its class."""
    values: tuple[str, ...] = ()
    """All values that it may have, as YAML; empty if it may have others."""
    configs: tuple[str, ...] = ()
    """The names of the configs that it may hold."""
    place: Literal["", "NAME", "0"] = ""
    """What stands between the key and the keys of its configs: a name, an index, or nothing."""

    @property
    def holds_config(self) -> bool:
        """Whether the default is a config, not a plain value or a mapping of configs."""
        return bool(self.configs) and not self.place and self.default is not None


class Description(BaseModel):
    """A config."""

    summary: str
    """The first line of its docstring."""
    kind: str = ""
    """What identifies it in its union; empty if it is in none."""
    fields: tuple[Field, ...]


class Table(BaseModel):
    """Jobs, and all configs below theirs."""

    jobs: dict[str, str]
    """The name of each job's config."""
    configs: dict[str, Description]

    def dump(self) -> str:
        """The text of `keys.json`, one config a line."""
        plain = self.model_dump(mode="json", exclude_defaults=True)
        lines = [f"  {json.dumps(name)}: {json.dumps(config)}" for name, config in sorted(plain["configs"].items())]
        return f'{{"jobs": {json.dumps(plain["jobs"])}, "configs": {{\n' + ",\n".join(lines) + "\n}}\n"


@cache
def committed() -> Table:
    """The keys of all jobs, from `keys.json`."""
    return Table.model_validate_json(FILE.read_text())


def table_of(jobs: Mapping[str, type[BaseModel]]) -> Table:
    """The keys of jobs, from their configs."""
    classes = {each for cls in jobs.values() for each in (cls, *_below(cls))}
    configs = {cls.__name__: _describe(cls) for cls in classes}
    assert len(configs) == len(classes), "two configs have the same name"
    return Table(jobs={name: cls.__name__ for name, cls in jobs.items()}, configs=configs)


def _below(cls: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in cls.model_fields.values():
        for model in models_in(field.annotation):
            yield model
            yield from _below(model)


def _describe(cls: type[BaseModel]) -> Description:
    kind = kind_of(cls) if "kind" in cls.model_fields else ""
    return Description(
        summary=summary(cls), kind=kind, fields=tuple(_field(*each) for each in cls.model_fields.items())
    )


def _field(name: str, field: FieldInfo) -> Field:
    models = list(models_in(field.annotation))
    meaning = field.description or (summary(models[0]) if len(models) == 1 else "")
    values = _literals(field.annotation)
    return Field(
        name=name,
        meaning=" ".join(meaning.split()),
        required=field.is_required(),
        default=None if field.is_required() else _plain(field.get_default(call_default_factory=True)),
        values=tuple(map(shown, values)) if len(values) > 1 and not models else (),
        configs=tuple(model.__name__ for model in models),
        place=_PLACES.get(typing.get_origin(field.annotation), ""),
    )


_PLACES: dict[Any, Literal["NAME", "0"]] = {dict: "NAME", tuple: "0"}


def _plain(value: Any) -> Any:
    """A default as plain data; a config as its kind and what differs from the defaults of its class."""
    if not isinstance(value, BaseModel):
        return to_jsonable_python(value)
    fields = type(value).model_fields
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    given = {name: getattr(value, name) for name in fields}
    return {name: _plain(each) for name, each in given.items() if name == "kind" or each != defaults[name]}


def summary(cls: type[BaseModel]) -> str:
    """The first line of a config's docstring."""
    return (cls.__doc__ or "").partition("\n")[0]


def shown(value: Any) -> str:
    """A plain value as YAML in one line."""
    # YAML ends a lone scalar with a line "..."
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return str(text).removesuffix("...\n").strip()


def _literals(annotation: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, of a list of it, or of an optional one; empty if other values are possible."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    parts = [part for part in typing.get_args(annotation) if part not in (type(None), Ellipsis)]
    return _literals(parts[0]) if len(parts) == 1 else ()
