"""Write the keys of all jobs: docs/reference.md to read, and jobs/keys.json for `--help`.

  python -m jobs.reference

On the page, a config that several jobs or keys share appears once, and they link to it.
"""

import inspect
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jobs.help import FILE, Description, KeyFacts, Table, choices, shown, summary, table_of
from jobs.verbs import commands
from ltrscale.config import kind_of, members
from ltrscale.models.choices import ContextConfig, EncoderConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.ranking.choices import LetorMetricConfig, MetricConfig
from ltrscale.ranking.loss import Loss
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.ranking.metric import Metric

_ABOVE = """# Reference

This page lists every job with every key of its config. `python -m jobs.reference` generates it.

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


PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"


def table() -> Table:
    """The keys of all jobs, from their configs."""
    return table_of({command.name: command.config for command in commands()})


def reference(table: Table) -> str:
    """The page: every job, the tables of kinds, then every config below a job."""
    jobs = commands()
    text = [
        _ABOVE,
        *(f"- [jobs.{each.name}](#jobs{each.name}): {_first(each.description)}" for each in jobs),
        "",
    ]
    for each in jobs:
        rows = _rows(table, table.configs[table.jobs[each.name]])
        text += [f"## jobs.{each.name}", "", _first(each.description), "", *rows]
    for title, (how, union) in KINDS.items():
        text += [f"## {title}", "", f"{how} [methods.md](methods.md) explains the columns.", ""]
        text += ["| kind | description | source | proof |", "|---|---|---|---|", *map(_kind, members(union)), ""]
    text += ["## Configs", ""]
    nested = {name for config in table.configs.values() for field in config.fields for name in field.configs}
    for name in sorted(nested):
        text += [f"### {name}", "", table.configs[name].summary, "", *_rows(table, table.configs[name])]
    return "\n".join(text).rstrip() + "\n"


def _kind(cls: type[BaseModel]) -> str:
    """The row of a kind, with source and proof from its docstring."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    notes = {
        name: " ".join(text.split())
        for name, text in re.findall(r"^(Source|Proof): (.+(?:\n +.+)*)", doc, re.MULTILINE)
    }
    weighted = "; takes document weights" if issubclass(cls, Loss) and cls.weighted else ""
    cells = [summary(cls).removesuffix(".") + weighted, notes.get("Source", ""), notes.get("Proof", "the laws.")]
    name = _code(kind_of(cls))
    link = name if issubclass(cls, Metric) else f"[{name}](#{cls.__name__.lower()})"  # no job has a metric's config
    return f"| {link} | {' | '.join(cell.removesuffix('.').replace('|', chr(92) + '|') for cell in cells)} |"


def _first(text: str) -> str:
    return text.partition("\n")[0]


def _rows(table: Table, config: Description) -> list[str]:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for field in config.fields:
        rows.append(f"| `{field.name}` | {_default(field)} | {_meaning(table, field)} |")
    return [*rows, ""]


def _default(field: KeyFacts) -> str:
    if field.required:
        return "required"
    if not field.holds_config:
        return _code(shown(field.default))
    differs = {key: value for key, value in field.default.items() if key != "kind" or len(field.configs) > 1}
    return _code(shown(differs)) if differs else ""


def _meaning(table: Table, field: KeyFacts) -> str:
    """The meaning of a key, with links to the configs that it may have."""
    kinds = len(field.configs) > 1
    links = [f"[{table.configs[name].kind if kinds else name}](#{name.lower()})" for name in field.configs]
    details = f"Kinds: {', '.join(links)}." if kinds else f"See {links[0]}." if links else choices(table, field)
    return f"{field.meaning} {details}".strip().replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    current = table()
    FILE.write_text(current.dump())
    PAGE.write_text(reference(current))
