"""The text of `--help` for a config: the keys that people set, one key and all below it, or every key."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.keys import Field, Table, shown
from ltrscale.errors import InputError, nearest

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
        own = len(given) <= len(parts) and all(map(_fits, parts, given))
        return own or any(kind.is_below(given) for kind in self.within)

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
    """Every key of a config.

    Args:
        table: all configs.
        config: the name of the config.
        prefix: the dotted prefix of its keys.
        defaults: the values of omitted keys, where they differ from the defaults of its class.
        within: the kinds that contain the config, and the kind that it is itself.
    """
    own = table.configs[config]
    for field in own.fields:
        # the line of the kind itself already shows this key
        if within and field.name == "kind" and within[-1].name == f"{prefix}kind={own.kind}":
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


def _default(field: Field) -> str:
    if field.required:
        return " (required)"
    if field.holds_config:
        return f" = {{kind: {field.default['kind']}}}" if len(field.configs) > 1 else ""
    return f" = {shown(field.default)}"


def choices(table: Table, field: Field) -> str:
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
    of_kind = [] if given in names else _of_kind(keys, given)
    if chosen := of_kind or [key for key in keys if key.is_below(given.split("."))]:
        return chosen
    # a key given without its prefix, such as `epochs` for `finetune.epochs`, beats a similar spelling
    within = [name for name in names if f".{given.strip('.')}." in f".{name}."]
    near = within[0] if within else nearest(given, names)
    raise InputError(f"--help {given}: unknown key; did you mean {near!r}?")


def _of_kind(keys: Sequence[Key], given: str) -> list[Key]:
    """A kind that is asked for by its name, or one of its keys, with all below it; empty where none has that name."""
    for kind in keys:
        asked = kind.asked
        if asked != kind.name and (given == asked or given.startswith(f"{asked}.")):
            inside = [key for key in keys if key == kind or kind in key.within]
            rest = given[len(asked) + 1 :].split(".")
            place = kind.name.split(".")[:-1]
            if chosen := [key for key in inside if rest == [""] or key.is_below([*place, *rest])]:
                return chosen
    return []


def first_level(keys: Sequence[Key]) -> list[Key]:
    """A key and those directly below it, where all below it would be too much to read; else all of them."""
    if len(show(keys, _WIDE).splitlines()) <= _MOST_LINES:
        return list(keys)
    return [key for key in keys if key.depth <= keys[0].depth + 1]
