"""The first config of a log: looks at a table and writes configs that run, with what was seen as comments."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import pyarrow as pa
import yaml
from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, validate
from ltrscale.errors import InputError
from ltrscale.evaluation.click_log import ClicksJob
from ltrscale.experiments.first.forms import other_form
from ltrscale.experiments.first.look import asked_of
from ltrscale.experiments.first.pipeline import FirstPlan, engine_score
from ltrscale.experiments.first.prepare import FEWEST_LISTS, clicks_text, count_lists, prepare_text, summary
from ltrscale.experiments.first.sizes import LogSize
from ltrscale.experiments.first.study import first_runs
from ltrscale.experiments.first.weekly import weekly_text
from ltrscale.experiments.pipeline import PipelineConfig
from ltrscale.experiments.study import StudyConfig
from ltrscale.experiments.weekly import WeeklyJob
from ltrscale.ingest.csvtext import Dialect
from ltrscale.ingest.guess import Guess, guess
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.ingest.profile import LogColumn, dialect_of, first_columns
from ltrscale.ingest.roles import structured
from ltrscale.ingest.structure import read_structure
from ltrscale.progress import log


class InitConfig(Config):
    """A log to look at."""

    file: str
    """A file, a directory or a pattern, in any format of `source.kind: items`."""
    out: str | None = None
    """Directory for the configs; by default one with the name of the file, here."""
    query: str | None = None
    """Column with the query id, instead of the guess."""
    item: str | None = None
    """Column with the document id, instead of the guess."""
    label: str | None = None
    """Column with the label, instead of the guess."""
    time: str | None = None
    """Column with the time stamp, instead of the guess."""
    rows: int = Field(default=100_000, ge=1)
    """First rows that decide on types; the first million decides on uses, and all rows are counted."""


def init(config: InitConfig) -> None:
    """Look at a log, and write prepare.yaml and, if it has labels and several periods, those of later commands.

    Raises:
        InputError: the log cannot be read, no column looks like the query's, or configs are there already.
    """
    out = config.out or re.sub(r"[^\w.-]", "-", PurePosixPath(config.file.rstrip("/")).name.partition(".")[0]) or "log"
    _refuse_to_overwrite(out)
    urls = storage.list_files(config.file)
    given = {"query": config.query, "item": config.item, "label": config.label, "time": config.time}
    if lines := other_form(config.file, urls, out, given):
        _write(out, {"prepare": "\n".join(lines) + "\n"})
        log.info("init: not a table with one item a row: see source.kind of prepare.yaml, and docs/guide.md for splits")
        log.info("next: python -m jobs.prepare --config %s", storage.join(out, "prepare.yaml"))
        return
    dialect = Dialect() if urls[0].endswith(".parquet") or ".json" in urls[0] else dialect_of(urls[0])
    columns = first_columns(urls, dialect, config.rows)
    _refuse_without_values(columns, given, urls[0])
    names = {*structured(columns), *(name for name in given.values() if name is not None)} or {columns[0].name}
    seen = read_structure(urls, [each.name for each in columns if each.name in names], dialect)
    found = guess(columns, seen, given, urls[0])
    every = seen if seen.whole else read_structure(urls, _in_roles(found), dialect, rows=None)
    counted = count_lists(found, every)
    found = replace(found, asked=asked_of(found, every, urls, dialect))
    said: tuple[str, ...] = ()
    texts = {"prepare": prepare_text(config.file, out, dialect, found, counted)}
    if found.label is not None and counted.plan is not None and len(counted.plan.names) >= FEWEST_LISTS:
        size = LogSize(counted.rows, counted.told_apart, len([*found.features, *found.categorical, *found.dates]))
        score = engine_score([each.name for each in found.features])
        runs, said = first_runs(out, counted.plan, score, size, counted.queries_told_apart)
        texts |= runs
        texts["weekly"] = weekly_text(out, counted.plan.unit)
    if clicks := clicks_text(out, found):
        texts["clicks"] = clicks
    _write(out, texts)
    for line in summary(found):
        log.info("init: %s", line)
    for reason in (*said, *_missing(found, counted.plan)):
        log.info("init: %s", reason)
    for name in (each for each in _WRITES if each in texts and each not in _LATER):
        log.info("next: python -m jobs.%s --config %s", name, storage.join(out, f"{name}.yaml"))


_LATER = ("study", "weekly")
"""Configs that answer another question, or whose time comes after a pipeline, which says so."""
_WRITES: dict[str, type[Config]] = {
    "prepare": PrepareJob,
    "clicks": ClicksJob,
    "pipeline": PipelineConfig,
    "weekly": WeeklyJob,
    "study": StudyConfig,
}


def _refuse_to_overwrite(out: str) -> None:
    """Refuse before anything is read: a config that is there may have been edited."""
    for name in _WRITES:
        if storage.exists(path := storage.join(out, f"{name}.yaml")):
            raise InputError(f"{path}: it is there already; go on with it, or remove it, or set another out")


def _refuse_without_values(columns: Sequence[LogColumn], given: Mapping[str, str | None], where: str) -> None:
    """Refuse columns that are named for a role and cannot have it."""
    for use, name in given.items():
        for column in (column for column in columns if column.name == name):
            if pa.types.is_nested(column.type):
                raise InputError(f"{where}: {use}: {name!r} has lists; name a column with a single value in each row")
            if use == "query" and not column.distinct:
                raise InputError(
                    f"{where}: {use}: {name!r} has no value in the first {column.rows:,} rows; name another"
                )


def _write(out: str, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        path = storage.join(out, f"{name}.yaml")
        validate(_WRITES[name], yaml.safe_load(text), path)  # a config that is written can be read
        storage.write_bytes(path, text.encode())


def _in_roles(found: Guess) -> list[str]:
    """The columns that all rows are counted by."""
    used = (found.query, *found.within, found.item, found.label, found.time)
    return [column.name for column in used if column is not None]


def _missing(found: Guess, plan: FirstPlan | None) -> Iterator[str]:
    if found.label is None:
        yield "no column looks like a label; name it with --set label=COLUMN for a pipeline.yaml"
    if plan is None or len(plan.names) < FEWEST_LISTS:
        yield f"no column with times over {FEWEST_LISTS} periods, by which a pipeline.yaml would divide the log"
    if found.label is not None and (found.clicks is not None or not found.label.numeric):
        needed = {
            "the position at which an item was shown": found.positions,
            "a column of 0 and 1 with clicks": found.clicks,
            "the item's id": found.item,
        }
        if lacking := [what for what, column in needed.items() if column is None]:
            yield f"jobs.clicks would tell clicks from places, and needs {', and '.join(lacking)}"
