"""Print the reference of all jobs and all keys: `python -m jobs.reference > docs/reference.md`.

A config that several jobs or keys share appears once, and they link to it.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jobs.commands import commands
from jobs.help import MISSING, choices, default_of, meaning, shown, summary
from ltrscale.config import kind_of, members, models_in
from ltrscale.models.choices import ContextConfig, EncoderConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.ranking.choices import LetorMetricConfig, LossConfig, MetricConfig
from ltrscale.ranking.loss import Loss
from ltrscale.ranking.metrics import Metric

_ABOVE = """# Reference

This page lists every job with every key of its config. `python -m jobs.reference > docs/reference.md` generates it.

If the value of a key is a nested config, the key links to that config, which appears once on this page. Dots separate
nested keys: the config of `jobs.finetune` has the key `finetune`, a `FinetuneConfig`, which has the key `epochs`, so
`--set finetune.epochs=20` sets it. An element of a list is given by its index and an entry of a mapping by its name, as
in `prepare.inputs.0.path` and `methods.trees.gbdt`. If there are several kinds, the config's `kind` selects one. In the
terminal, `python -m jobs.finetune --help finetune.loss` explains one key and all below it.
"""

KINDS: dict[str, tuple[str, Any]] = {
    "Ranking losses": ("Chosen by `finetune.loss.kind`.", LossConfig),
    "Pretext objectives": ("Chosen by `pretrain.method.kind`.", MethodConfig),
    "Encoders": ("Chosen by `network.encoder.kind`.", EncoderConfig),
    "List contexts": ("Chosen by `finetune.context.kind`.", ContextConfig),
    "Metrics": ("Chosen by `finetune.validation_metric`; `jobs.evaluate` reports all.", MetricConfig),
    "Metrics of LETOR's script": ("`jobs.evaluate` also reports them with `policy: letor4`.", LetorMetricConfig),
}
"""Unions with a table of their kinds: the title, how a kind is chosen, and the union."""


def reference() -> str:
    """The page: every job, the tables of kinds, then every config below a job."""
    every = commands()
    text = [_ABOVE, *(f"- [jobs.{each.name}](#jobs{each.name}): {_first(each.description)}" for each in every), ""]
    for command in every:
        text += [f"## jobs.{command.name}", "", _first(command.description), "", *_table(command.config)]
    for title, (how, union) in KINDS.items():
        text += [f"## {title}", "", f"{how} [methods.md](methods.md) explains the columns.", ""]
        text += ["| kind | description | source | proof |", "|---|---|---|---|", *map(_kind, members(union)), ""]
    text += ["## Configs", ""]
    for cls in sorted({part for each in every for part in _parts(each.config)}, key=lambda cls: cls.__name__):
        text += [f"### {cls.__name__}", "", summary(cls), "", *_table(cls)]
    return "\n".join(text).rstrip() + "\n"


def _kind(cls: type[BaseModel]) -> str:
    """The row of a kind, with source and proof from its docstring."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    said = {
        name: " ".join(text.split())
        for name, text in re.findall(r"^(Source|Proof): (.+(?:\n +.+)*)", doc, re.MULTILINE)
    }
    weighted = "; takes document weights" if issubclass(cls, Loss) and cls.weighted else ""
    cells = [summary(cls).removesuffix(".") + weighted, said.get("Source", ""), said.get("Proof", "the laws.")]
    name = _code(kind_of(cls))
    link = name if issubclass(cls, Metric) else f"[{name}](#{cls.__name__.lower()})"  # no job has a metric's config
    return f"| {link} | {' | '.join(cell.removesuffix('.').replace('|', chr(92) + '|') for cell in cells)} |"


def _first(text: str) -> str:
    return text.partition("\n")[0]


def _parts(cls: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The configs below a config."""
    for field in cls.model_fields.values():
        for model in models_in(field.annotation):
            yield model
            yield from _parts(model)


def _table(cls: type[BaseModel]) -> list[str]:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in cls.model_fields.items():
        rows.append(f"| `{name}` | {_default(field, name)} | {_meaning(field)} |")
    return [*rows, ""]


def _default(field: FieldInfo, name: str) -> str:
    value = default_of(field, name, None)
    if value is MISSING:
        return "required"
    if not isinstance(value, BaseModel):
        return _code(shown(value))
    kind = {"kind": kind_of(type(value))} if len(list(models_in(field.annotation))) > 1 else {}
    differs = kind | value.model_dump(mode="json", exclude_defaults=True)
    return _code(shown(differs)) if differs else ""


def _meaning(field: FieldInfo) -> str:
    """The meaning of a key, with links to the configs that it may have."""
    models = list(models_in(field.annotation))
    links = [f"[{kind_of(each) if len(models) > 1 else each.__name__}](#{each.__name__.lower()})" for each in models]
    more = choices(field) if not models else f"Kinds: {', '.join(links)}." if len(models) > 1 else f"See {links[0]}."
    return f"{meaning(field)} {more}".strip().replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
