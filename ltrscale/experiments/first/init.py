"""The first configs of a log: reads a table and writes runnable configs, with its findings as comments."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import pyarrow as pa
import yaml
from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, validate
from ltrscale.data import columns as cols
from ltrscale.errors import InputError
from ltrscale.experiments.first.configs import FirstRuns, engine_score
from ltrscale.experiments.first.counted import FEWEST_PERIODS, LogCounts, count_lists
from ltrscale.experiments.first.forms import other_form, refuse_without_features
from ltrscale.experiments.first.prepare_yaml import clicks_text, prepare_lines, summary
from ltrscale.experiments.sizes import LogSize
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import Guess, guess
from ltrscale.ingest.profile import LogColumn, dialect_of, files_of, first_columns
from ltrscale.ingest.roles import structured
from ltrscale.ingest.structure import read_structure
from ltrscale.ingest.tables import file_form
from ltrscale.progress import called, log
from ltrscale.texts import MOST_BYTES, escaped, yaml_text

_LATER = ("study", "weekly")
"""Configs for other questions or for later."""

_WRITES = ("prepare", "clicks", "pipeline", "weekly", "study")
"""The jobs whose configs are written."""


class InitJob(Config):
    """A log to look at, or an example to print."""

    file: str | None = None
    """The log: a file, a directory or a pattern, in any format of `source.kind: items`."""
    example: str | None = None
    """Instead of a log, the config to print: its name in the list, or its path below jobs/configs."""
    out: str | None = None
    """Directory for the configs, not in that of the log; by default one with the name of the file, here."""
    query: str | None = None
    """Column with the query id, instead of the guess."""
    item: str | None = None
    """Column with the document id, instead of the guess."""
    label: str | None = None
    """Column with the label, instead of the guess."""
    time: str | None = None
    """Column with the time stamp, instead of the guess."""
    positions: str | None = None
    """Column with the place at which an item was shown, instead of the guess."""
    header: tuple[str, ...] = ()
    """Names of the columns of CSV files whose first line is a row."""
    rows: int = Field(default=100_000, ge=1)
    """First rows that decide on types, of each file its share; the first million decides on uses, and all rows are
    counted."""

    def run(self) -> None:
        """Read a log; write prepare.yaml and, if it has labels and several periods, the configs of later commands.

        Raises:
            InputError: no log is named, or it cannot be read; no column looks like the query's; configs already exist,
                or `out` is in the log's directory.
        """
        if not self.file:
            raise InputError("file: name the log to look at")
        out = _place(self.file, self.out)
        for path in (storage.join(out, f"{name}.yaml") for name in _WRITES):  # before anything is read
            if storage.exists(path):  # it may have been edited
                raise InputError(f"{path}: it is there already; go on with it, or remove it, or set another out")
        urls = storage.list_files(self.file)
        roles = self.model_dump(include={"query", "item", "label", "time", "positions"})
        if not self.header and (lines := other_form(self.file, urls, out, roles)):
            _write(out, {"prepare": yaml_text(lines)})
            log.info(
                "init: not a table with one item a row: see source.kind of prepare.yaml, and docs/guide.md for splits"
            )
            _say_next("prepare", out)
            return
        texts, notes = self._configs_of_items(urls, out, roles)
        _write(out, texts)
        for note in notes:
            log.info("init: %s", note)
        for name in (each for each in _WRITES if each in texts and each not in _LATER):
            _say_next(name, out)

    def _configs_of_items(
        self, urls: Sequence[str], out: str, roles: Mapping[str, str | None]
    ) -> tuple[dict[str, str], list[str]]:
        """The configs by name, and notes on them, for a log with one item per row."""
        assert self.file is not None
        dialect = dialect_of(urls[0], self.header) if file_form(urls[0]) == "csv" else Dialect()
        files = files_of(urls, dialect)
        urls, columns = [*files], first_columns(files, dialect, self.rows)
        _refuse_without_values(columns, roles, urls[0])
        names = {*structured(columns), *(name for name in roles.values() if name is not None)} or {columns[0].name}
        sample = read_structure(urls, [each.name for each in columns if each.name in names], dialect)
        guessed = guess(columns, sample, roles, urls[0])
        refuse_without_features(guessed, guessed.readable, urls[0])
        in_roles = (guessed.query, *guessed.within, guessed.item, guessed.label, guessed.time)
        needed = [each.name for each in in_roles if each]
        complete = sample if sample.whole else read_structure(urls, needed, dialect, rows=None)
        counted = count_lists(guessed, complete)
        from ltrscale.experiments.first.asked import asked_of  # imports torch: only a good log waits

        asked = asked_of(guessed, complete, urls, dialect)
        guessed = replace(guessed, asked={**guessed.asked, **asked})
        texts = {"prepare": yaml_text(prepare_lines(self.file, out, dialect, guessed, counted))}
        runs, notes = _runs(out, guessed, counted)
        clicks = clicks_text(out, guessed)
        texts |= runs | ({"clicks": clicks} if clicks else {})
        return texts, [*map(escaped, summary(guessed)), *notes, *_why_less(guessed, counted, columns)]


def _runs(out: str, guessed: Guess, counted: LogCounts) -> tuple[dict[str, str], list[str]]:
    """The configs of commands that train, and notes on them; none without labels or with too few periods."""
    if guessed.label is None or len(counted.periods) < FEWEST_PERIODS:
        return {}, []
    width = len([*guessed.features, *guessed.categorical, *guessed.dates, *guessed.alike])
    width += sum(column.size for column in guessed.vectors)
    runs = FirstRuns(
        out,
        counted.unit,
        counted.periods,
        LogSize(counted.rows, counted.informative_rows, width),
        score=engine_score([each.name for each in guessed.features]),
        lists=counted.informative_queries,
        moving=guessed.moving,
    )
    return runs.written()


def _place(file: str, given: str | None) -> str:
    """The directory of the configs; an `InputError` inside the log's, where configs would be read as rows."""
    stem = PurePosixPath(file.rstrip("/")).name.partition(".")[0]
    out = given or re.sub(r"[^\w.-]", "-", stem).lstrip("-") or "log"  # a leading dash would be an option
    log_at = storage.absolute(file).rstrip("/")
    if given is None and storage.absolute(out) == log_at:
        out += "-ranker"
    if f"{storage.absolute(out)}/".startswith(f"{log_at}/"):
        raise InputError(f"{out}: it lies in {file}, whose files are the log; set --out to a place beside it")
    return out


def _say_next(name: str, out: str) -> None:
    log.info("next: %s --config %s", called(name), shlex.quote(storage.join(out, f"{name}.yaml")))


def _refuse_without_values(columns: Sequence[LogColumn], roles: Mapping[str, str | None], where: str) -> None:
    """Refuse columns that cannot have the role they were named for."""
    for use, name in roles.items():
        for column in (column for column in columns if column.name == name):
            if column.lacking:
                raise InputError(
                    f"{column.lacking}: {use}: column {name!r} is missing, which other files have; only features may "
                    "be, so name files that have it"
                )
            if not cols.is_single(column.type):
                held = "lists" if pa.types.is_nested(column.type) else str(column.type)
                raise InputError(f"{where}: {use}: {name!r} has {held}; name a column with a single value in each row")
            if use == "query" and not column.distinct:
                raise InputError(
                    f"{where}: {use}: {name!r} has no value in the first {column.rows:,} rows; name another"
                )


def _write(out: str, texts: Mapping[str, str]) -> None:
    """Write configs by name; none that its command would refuse."""
    for name, text in texts.items():
        path = storage.join(out, f"{name}.yaml")
        if len(text.encode()) > MOST_BYTES:
            raise InputError(f"{path}: the config of so many columns would be too large to read; leave some out")
        validate(_job_named(name), yaml.safe_load(text), path)  # never write an invalid config
        storage.write_bytes(path, text.encode())


def _job_named(name: str) -> type[Config]:
    """The job that will read a config; imported late, because training and judging load torch."""
    from ltrscale.evaluation.click_log import ClicksJob
    from ltrscale.experiments.pipeline import PipelineJob
    from ltrscale.experiments.study import StudyJob
    from ltrscale.experiments.weekly import WeeklyJob
    from ltrscale.ingest.prepare import PrepareJob

    jobs: dict[str, type[Config]] = {
        "prepare": PrepareJob,
        "clicks": ClicksJob,
        "pipeline": PipelineJob,
        "weekly": WeeklyJob,
        "study": StudyJob,
    }
    return jobs[name]


def _why_less(guessed: Guess, counted: LogCounts, columns: Sequence[LogColumn]) -> Iterator[str]:
    """Why some columns are not used, some configs are missing, or a test is kinder than it should be."""
    for column in guessed.optional:
        yield f"{column.name} is missing from {column.lacking}, and perhaps other files: a missing value there"
    for name in sorted({each.name for each in columns if each.lacking} & {*guessed.others}):
        yield f"{name} is not in all files, and not used: {guessed.others[name]}"
    if guessed.label is None:
        yield "no column looks like a label; name it with --set label=COLUMN for a pipeline.yaml"
    if counted.unit == "part":
        yield (
            f"no column with times over {FEWEST_PERIODS} periods: queries are dealt to six parts at random, and a test "
            "on some of these is kinder than one on later times"
        )
    elif len(counted.periods) < FEWEST_PERIODS:
        yield f"no column with times over {FEWEST_PERIODS} periods, by which a pipeline.yaml would divide the log"
    if guessed.label is not None and (guessed.clicks is not None or not guessed.label.numeric):
        needed = {
            "the position at which an item was shown": guessed.positions,
            "a column of 0 and 1 with clicks": guessed.clicks,
            "the item's id": guessed.item,
        }
        if lacking := [description for description, column in needed.items() if column is None]:
            yield f"jobs.clicks would tell clicks from places, and needs {', and '.join(lacking)}"
