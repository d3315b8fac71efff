"""The keys of all jobs as plain data, and the text of `--help`: the usual keys, one key and all below it, or every key.

`--help` reads the keys from `keys.json`, and imports no config and no library. `python -m jobs.reference` writes that
file anew from the configs.
"""

import ast
import inspect
import json
import math
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from ltrscale.config import kind_of, members
from ltrscale.errors import InputError, nearest

FILE = Path(__file__).with_name("keys.json")


class KeyFacts(BaseModel):
    """One key of a config."""

    name: str
    meaning: str = ""
    """In one line: the string under the field, or the summary of its config."""
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
    def is_list(self) -> bool:
        """Whether it holds several values, by index."""
        return self.place == "0"

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
    fields: tuple[KeyFacts, ...]


class Table(BaseModel):
    """Jobs, and all configs below those of the jobs."""

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
        for model in members(field.annotation):
            yield model
            yield from _below(model)


def _describe(cls: type[BaseModel]) -> Description:
    kind = kind_of(cls) if "kind" in cls.model_fields else ""
    under = meanings(cls)
    fields = tuple(_field(name, field, under.get(name)) for name, field in cls.model_fields.items())
    return Description(summary=summary(cls), kind=kind, fields=fields)


@cache
def meanings(cls: type[BaseModel]) -> dict[str, str]:
    """The strings under the fields of a config and of its bases. Pydantic's own search would slow each import."""
    found = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(BaseModel)]):
        source = _classes(base.__module__).get(base.__name__)
        for pair in pairwise(source.body if source else ()):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(meaning))):
                    found[name] = meaning
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by name; none of a script within another program, whose `__main__` it is not."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _field(name: str, field: FieldInfo, under: str | None) -> KeyFacts:
    models = members(field.annotation)
    meaning = field.description or under or (summary(models[0]) if len(models) == 1 else "")
    values = _literals(field.annotation)
    return KeyFacts(
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
    values = {name: getattr(value, name) for name in fields}
    return {name: _plain(each) for name, each in values.items() if name == "kind" or each != defaults[name]}


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


_ANY = ("NAME", "0")
"""Parts of keys that stand for names and places of the user's choice."""
_MOST_LINES, _WIDE = 300, 98
"""Of the text of one key and all below it, and their columns."""


@dataclass(frozen=True)
class Key:
    """One key of a config, or one kind that it may have."""

    name: str
    """Dotted; `NAME` stands for a name of the user's choice, `0` for an index, a last part `kind=...` names a kind."""
    text: str
    """The meaning."""
    default: str = ""
    """` = value` or ` (required)`; empty if the keys below have the defaults."""
    choices: str = ""
    """The possible values or kinds, in words; empty if any value is allowed."""
    within: tuple["Key", ...] = ()
    """The kinds that contain the key, outermost first."""

    @property
    def asked(self) -> str:
        """How `--help` is asked for it: `methods.gbdt` for the kind `methods.NAME.kind=gbdt`."""
        place, _, last = self.name.rpartition(".")
        kind = last.partition("=")[2]
        return ".".join([*(part for part in place.split(".") if part not in _ANY), kind]) if kind else self.name

    @property
    def depth(self) -> int:
        """Keys and kinds that it lies in, itself included."""
        return len(self.within) + sum(part not in _ANY for part in self.name.split("."))

    def is_below(self, given: Sequence[str]) -> bool:
        """Whether it is the key with the given parts, or a key below that one."""
        parts = self.name.split(".")
        fits = len(given) <= len(parts) and all(map(_fits, parts, given))
        return fits or any(kind.is_below(given) for kind in self.within)

    def show(self, width: int) -> str:
        """One line with the key and its default, then the wrapped meaning."""
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


def keys_of(table: Table, job: str) -> Iterator[Key]:
    """Every key of a job, each followed by those of its nested config."""
    return _keys(table, table.jobs[job], "", {}, ())


def _keys(
    table: Table, config: str, prefix: str, defaults: Mapping[str, Any], within: tuple[Key, ...]
) -> Iterator[Key]:
    """Every key of a config."""
    description = table.configs[config]
    for field in description.fields:
        # the line of the kind itself already shows this key
        if within and field.name == "kind" and within[-1].name == f"{prefix}kind={description.kind}":
            continue
        if field.name in defaults:
            field = field.model_copy(update={"required": False, "default": defaults[field.name]})
        yield Key(f"{prefix}{field.name}", field.meaning, _default(field), choices(table, field), within)
        below = f"{prefix}{field.name}.{field.place}{'.' if field.place else ''}"
        for name in field.configs:
            each, inside = table.configs[name], within
            if len(field.configs) > 1:
                kind = Key(f"{below}kind={each.kind}", each.summary, within=within)
                yield kind
                inside = (*within, kind)
            given = field.default if field.holds_config and field.default.get("kind", "") == each.kind else {}
            yield from _keys(table, name, below, given, inside)


def _default(field: KeyFacts) -> str:
    if field.required:
        return " (required)"
    if field.holds_config:
        return f" = {{kind: {field.default['kind']}}}" if len(field.configs) > 1 else ""
    return f" = {shown(field.default)}"


def choices(table: Table, field: KeyFacts) -> str:
    """The kinds or values that a key may have, in words."""
    if len(field.configs) > 1:
        return f"Kinds: {', '.join(table.configs[name].kind for name in field.configs)}."
    return f"One of {', '.join(field.values)}." if field.values else ""


def show(keys: Sequence[Key], width: int) -> str:
    """The texts of the keys, one per line, with each kind before the first of its keys."""
    seen: dict[Key, str] = {}
    for key in keys:
        for each in (*key.within, key):
            if each not in seen:
                seen[each] = each.show(width)
    return "\n".join(seen.values())


def find(keys: Sequence[Key], given: str) -> list[Key]:
    """The requested key and all below it; a kind is asked for by its name, as `methods.gbdt` or `finetune.loss.lambda`.

    Raises:
        InputError: there is no such key; names the nearest.
    """
    names = [key.name for key in keys]
    of_kind = [] if given in names else _keys_of_kind(keys, given)
    if chosen := of_kind or [key for key in keys if key.is_below(given.split("."))]:
        return chosen
    # a key given without its prefix, such as `epochs` for `finetune.epochs`, beats a similar spelling
    within = [name for name in names if f".{given.strip('.')}." in f".{name}."]
    suggestion = within[0] if within else nearest(given, names)
    raise InputError(f"--help {given}: unknown key; did you mean {suggestion!r}?")


def _keys_of_kind(keys: Sequence[Key], given: str) -> list[Key]:
    """The keys of the kind with this name, or one of its keys and all below it; empty if no kind has that name."""
    for kind in keys:
        prefix = kind.asked
        if prefix != kind.name and (given == prefix or given.startswith(f"{prefix}.")):
            inside = [key for key in keys if key == kind or kind in key.within]
            tail = given[len(prefix) + 1 :].split(".")
            parents = kind.name.split(".")[:-1]
            if chosen := [key for key in inside if tail == [""] or key.is_below([*parents, *tail])]:
                return chosen
    return []


def _first_level(keys: Sequence[Key]) -> list[Key]:
    """A key and those directly below it, where all below it would be too much to read; else all of them."""
    if len(show(keys, _WIDE).splitlines()) <= _MOST_LINES:
        return list(keys)
    return [key for key in keys if key.depth <= keys[0].depth + 1]


def explained(keys: list[Key]) -> str:
    """A key and all below it; of very many those directly below it, and how to ask for the others."""
    first = _first_level(keys)
    text = f"{show(first, width())}\n"
    if len(first) == len(keys):
        return text
    hidden = [key for key in keys if key not in first]
    deeper = next(key for key in first[1:] if any(key in h.within or h.name.startswith(f"{key.name}.") for h in hidden))
    hint = f"{len(hidden):,} more keys are below these. `--help {deeper.asked}` shows those of one of them."
    return f"{text}\n{fill(hint)}\n"


def notes(usual: list[Key], keys: list[Key]) -> str:
    """Notes below the keys: how to see more of them, and where else they are explained."""
    example = next((key.name for key in usual if key.choices), "out")
    some = (
        f"These are the keys that people set, {len(usual)} of {len(keys)}. `--help KEY` explains a key and all below "
        f"it, such as `--help {example}`; `--help all` shows every key.\n\n"
    )
    text = some if len(usual) < len(keys) else ""
    if any(part in _ANY for key in usual for part in key.name.split(".")):
        text += "In a key, NAME is a name of your choice, and 0 is the first index of a list. "
    return (
        f"{text}docs/reference.md has the keys of all jobs, docs/guide.md goes through the jobs one by one, and "
        "jobs/configs has complete configs."
    )


def width() -> int:
    """Columns of the help text: at most those of the terminal, and few enough to be readable."""
    return min(shutil.get_terminal_size().columns - 2, _WIDE)


def fill(text: str) -> str:
    """Wrap the paragraphs of a text; indented ones, such as examples, stay unchanged."""
    parts = text.strip().split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else textwrap.fill(part, width()) for part in parts)
