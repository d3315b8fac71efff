"""The first config of a log: looks at a table and writes configs that run, with what was seen as comments."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, load
from ltrscale.data.ingest.csvtext import Dialect
from ltrscale.data.ingest.guess import Guess, grades_of, guess
from ltrscale.data.ingest.lines import UTF8
from ltrscale.data.ingest.mapping import ColumnMapping
from ltrscale.data.ingest.profile import Column, Lists, dialect_of, look, look_at_lists
from ltrscale.data.times import ISO, Clock, Period, periods
from ltrscale.errors import InputError
from ltrscale.progress import log
from ltrscale.workflows.first_pipeline import Plan, engine_score, pipeline_text, plain
from ltrscale.workflows.first_weekly import weekly_text
from ltrscale.workflows.pipeline import PipelineConfig
from ltrscale.workflows.stages import PrepareJob

_PERIODS: tuple[Period, ...] = ("week", "day", "hour")
_FEWEST = 3


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
    """First rows that decide on types and uses; queries, labels and times are counted in all rows."""


def init(config: InitConfig) -> None:
    """Look at a log, and write prepare.yaml and, if it has labels and several periods, pipeline.yaml and weekly.yaml.

    Raises:
        InputError: the log cannot be read, no column looks like the query's, or other configs are there already.
    """
    urls = storage.list_files(config.file)
    dialect = Dialect() if urls[0].endswith(".parquet") or ".json" in urls[0] else dialect_of(urls[0])
    columns = look(urls[0], dialect, config.rows)
    given = {"query": config.query, "item": config.item, "label": config.label, "time": config.time}
    found = guess(columns, given, urls[0])
    uses = {"query": found.query, "item": found.item, "label": found.label, "time": found.time}
    lists = look_at_lists(urls, {use: each.name for use, each in uses.items() if each is not None}, dialect)
    out = config.out or re.sub(r"[^\w.-]", "-", PurePosixPath(config.file.rstrip("/")).name.partition(".")[0]) or "log"
    plan = _plan(found, lists)
    texts = {"prepare": "\n".join(_prepare(config.file, out, dialect, found, lists, plan)) + "\n"}
    if found.label is not None and plan is not None and len(plan.names) >= _FEWEST:
        texts["pipeline"] = pipeline_text(out, plan, engine_score([column.name for column in found.features]))
        texts["weekly"] = weekly_text(out, plan.unit)
    paths = {name: storage.join(out, f"{name}.yaml") for name in texts}
    for name, path in paths.items():
        if storage.exists(path) and storage.read_bytes(path) != texts[name].encode():
            raise InputError(f"{path}: it is there already, and differs; remove it, or set another out")
    for name, path in paths.items():
        storage.write_bytes(path, texts[name].encode())
    for cls, name in ((PrepareJob, "prepare"), (PipelineConfig, "pipeline")):
        if name in paths:
            load(cls, paths[name])  # a config that is written can be read
            log.info("next: python -m jobs.%s --config %s", name, paths[name])
    for reason in _missing(found, plan):
        log.info("init: %s", reason)


def _plan(found: Guess, lists: Lists) -> Plan | None:
    """The longest unit that gives enough periods; None without a time."""
    if found.time is None or lists.times_N is None:
        return None
    formats = found.time.formats[:1] or (ISO,)
    for unit in _PERIODS:
        names_N, _ = periods(lists.times_N, unit, Clock(formats=formats))
        names = tuple(sorted({*names_N.to_numpy(zero_copy_only=False)[lists.labelled_N]} - {None}))
        if len(names) >= _FEWEST:
            return Plan(unit, names, formats)
    return Plan("week", names, formats)


def _missing(found: Guess, plan: Plan | None) -> Iterator[str]:
    if found.label is None:
        yield "no column looks like a label; name it with --set label=COLUMN for a pipeline.yaml"
    if plan is None or len(plan.names) < _FEWEST:
        yield f"no column with times over {_FEWEST} periods, by which a pipeline.yaml would divide the log"


def _prepare(file: str, out: str, dialect: Dialect, found: Guess, lists: Lists, plan: Plan | None) -> Iterator[str]:
    yield f"# Made by jobs.init from {file}. Correct what was guessed wrong."
    lengths = f"{lists.median:,} rows in the median, {lists.longest:,} at most"
    yield f"# {lists.rows:,} rows, {lists.queries:,} queries: {lengths}."
    yield f"out: {plain(storage.join(out, 'data'))}"
    yield ""
    yield "prepare:"
    yield f"  inputs: {plain(file)}"
    if not lists.together:
        yield "  sort: true # the rows of a query do not stand together"
    if lists.repeated:
        policy = "max_label" if found.label is not None else "keep_first"
        yield f"  duplicates: {policy} # {lists.repeated:,} rows repeat an item of their query; this says which stays"
    yield "  source:"
    yield "    kind: items"
    yield "    columns:"
    yield from _columns(file, found, dialect, plan)
    if lists.longest > 10_000:
        yield f"  max_group: {lists.longest} # of the longest query"


def _columns(path: str, found: Guess, dialect: Dialect, plan: Plan | None) -> Iterator[str]:
    yield f"      query: {plain(found.query.name)}"
    if found.item is not None:
        yield f"      item: {plain(found.item.name)}"
    if found.label is not None:
        yield f"      label: {plain(found.label.name)} # {found.label.shown}"
        if grades := grades_of(found.label):
            yield f"      grades: {_flow(grades)} # a guess: check them, higher is better"
    if found.time is not None and plan is not None:
        span = " to ".join(dict.fromkeys([plan.names[0], plan.names[-1]])) if plan.names else "no period with labels"
        yield f"      time: {plain(found.time.name)} # {span}"
        formats = dict.fromkeys(form for each in (found.time, *found.dates) for form in each.formats[:1] or (ISO,))
        if list(formats) != [ISO]:
            yield f"      time_format: {_flow(tuple(formats))}{_other_formats(found)}"
        yield "      time_zone: UTC # of times that do not state one, and of the midnight at which days begin"
        yield f"      period: {plan.unit}"
    if found.positions is not None:
        yield f"      positions: {plain(found.positions.name)} # where the item was shown: no feature, it biases labels"
    usual = ColumnMapping(query="q", features=("*",), decimal=dialect.decimal).dialect(path)
    for name, value in (("delimiter", dialect.delimiter), ("decimal", dialect.decimal), ("encoding", dialect.encoding)):
        if value != {"delimiter": usual.delimiter, "decimal": ".", "encoding": UTF8}[name]:
            yield f"      {name}: {json.dumps(value)}"
    yield from _listed("meta", found.meta, "of the user or session, kept beside the features")
    yield from _listed("features", found.features, "numbers")
    yield from _listed("categorical", found.categorical, "categories")
    if found.dates:
        yield "      dates: # days up to the row's time"
        for column in found.dates:
            yield f"        {plain(column.name)}: [days_before] # {column.shown}"
    for name, reason in found.others.items():
        yield f"      # not used: {name}, {reason}"


def _other_formats(found: Guess) -> str:
    """A comment on the other formats that fit the times as well, as day and month may change places."""
    others = found.time.formats[1:2] if found.time is not None else ()
    return f" # or {others[0]}: both fit" if others else ""


def _listed(key: str, columns: Sequence[Column], what: str) -> Iterator[str]:
    if columns:
        yield f"      {key}: # {what}"
        for column in columns:
            yield f"        - {plain(column.name)} # {column.shown}"


def _flow(value: Mapping[str, float] | tuple[object, ...]) -> str:
    """A list or mapping as YAML in one line; keys are quoted, as words such as yes must be."""
    return json.dumps(value, ensure_ascii=False)
