"""The first configs of a log: reads a table and writes runnable configs, with its findings as comments.

A prepare.yaml has the guessed role of each column, with reasons and alternatives.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import PurePosixPath
from types import MappingProxyType

import pyarrow as pa
import yaml
from pydantic import Field

from ltrscale import storage
from ltrscale.config import CHECK, Config, validate
from ltrscale.data import columns as cols
from ltrscale.data.times import ISO
from ltrscale.errors import InputError
from ltrscale.experiments.first.configs import FirstRuns, LogSize, engine_score
from ltrscale.experiments.first.counted import FEWEST_PERIODS, LogCounts, asked_of, count_lists
from ltrscale.experiments.first.forms import first_lines, other_form, refuse_without_features
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import Guess, grades_of, guess
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.lines import UTF8
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.profile import LogColumn, dialect_of, files_of, first_columns
from ltrscale.ingest.roles import Choice, structured
from ltrscale.ingest.structure import read_structure
from ltrscale.ingest.tables import file_form
from ltrscale.progress import called, log
from ltrscale.texts import MOST_BYTES, escaped, flow, plain_yaml, yaml_text

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
        guessed = replace(guessed, asked={**guessed.asked, **asked_of(guessed, complete, urls, dialect)})
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


_DESCRIBED = 2000
"""Maximum columns of one use that are described; further ones are only named."""


def prepare_lines(file: str, out: str, dialect: Dialect, guessed: Guess, counted: LogCounts) -> Iterator[str]:
    """The lines of prepare.yaml for a log with one item per row."""
    lengths = f"{counted.median:,} rows in the median, {counted.longest:,} at most"
    yield from first_lines(
        file,
        out,
        "# Lines with CHECK are close calls: jobs.prepare names them until the word is gone.",
        f"# {counted.rows:,} rows, {counted.queries:,} queries: {lengths}.",
    )
    yield f"  inputs: {plain_yaml(file)}"
    if not counted.together:
        yield "  sort: true # the rows of a query do not stand together in one file"
    if counted.repeated and guessed.item is not None:
        yield _duplicates(guessed, guessed.item, counted)
    yield from _rejected(guessed)
    yield "  source:"
    yield "    kind: items"
    yield "    columns:"
    yield from _column_lines(file, guessed, dialect, counted)
    if counted.longest > 10_000:
        yield f"  max_group: {counted.longest} # of the longest query"


def _duplicates(guessed: Guess, item: LogColumn, counted: LogCounts) -> str:
    """How to treat rows that repeat an item; they are not merged if the guessed item column may be wrong."""
    repeat = f"{counted.repeated:,} rows repeat an item of their query"
    if "item" in guessed.choices and (doubt := guessed.choices["item"].doubt):
        return (
            f"  duplicates: reject {CHECK}: {repeat}: if {item.name} is the item ({doubt}), max_label keeps the best "
            "row of each"
        )
    policy = "max_label" if guessed.label is not None else "keep_first"
    return f"  duplicates: {policy} # {repeat}: which of them stays"


def _rejected(guessed: Guess) -> Iterator[str]:
    """The share of rows that prepare will reject, if it is above the limit."""
    one_each = [guessed.time, guessed.label, guessed.positions, guessed.gain, guessed.clicks]
    one_each += [*guessed.features, *guessed.dates, *guessed.vectors, *guessed.categorical, *guessed.meta]
    shares = {f"{column.name} cannot be read": column.bad for column in one_each if column is not None}
    needed = [guessed.query, *guessed.within, *([guessed.time] if guessed.time else [])]
    shares |= {f"{column.name} is missing": column.missing for column in needed}
    total = sum(shares.values())
    limit = PrepareConfig.model_fields["max_rejected"].default
    if total > limit / 2:
        share = min(math.ceil(max(1.25 * total, limit) * 1000) / 1000, 1)
        worst = ", ".join(
            f"{why} in {part:.2%}" for why, part in sorted(shares.items(), key=lambda s: -s[1])[:4] if part
        )
        yield f"  max_rejected: {share:g} {CHECK}: about {min(total, 1):.2%} of the rows cannot be used: {worst}"


def _column_lines(path: str, guessed: Guess, dialect: Dialect, counted: LogCounts) -> Iterator[str]:
    for role, column in (("query", guessed.query), ("item", guessed.item)):
        if column is not None:
            yield from _role(role, column, guessed.choices.get(role))
        if role == "query" and guessed.within:
            days = ", ".join(column.name for column in guessed.within)
            yield f"      within: {flow([column.name for column in guessed.within])} # a list for each {days}"
    if guessed.label is not None:
        yield from _label(guessed, guessed.label, counted)
    if guessed.gain is not None:
        gain = plain_yaml(guessed.gain.name)
        yield f"      gain: {gain} # what a document brings: evaluate.gains: column, no feature"
    yield from _times(guessed, counted)
    if guessed.positions is not None:
        yield from _role("positions", guessed.positions, guessed.choices.get("positions"))
    if guessed.clicks is not None and guessed.positions is not None:
        yield f"      clicks: {plain_yaml(guessed.clicks.name)} # jobs.clicks looks at them beside the positions"
    default = ColumnMapping(query="q", features=("*",), decimal=dialect.decimal).dialect(path)
    for name, value in (("delimiter", dialect.delimiter), ("decimal", dialect.decimal), ("encoding", dialect.encoding)):
        if value != {"delimiter": default.delimiter, "decimal": ".", "encoding": UTF8}[name]:
            yield f"      {name}: {flow(value)}"
    if dialect.header:
        yield f"      header: {flow(list(dialect.header))} # the first line is a row"
    yield from _column_list("meta", guessed.meta, "of the user or session, kept beside the features")
    yield from _column_list("features", guessed.features, "numbers", guessed.asked)
    note = "categories, and ids that come often enough to learn from"
    yield from _column_list("categorical", guessed.categorical, note, guessed.asked)
    if guessed.dates:
        yield "      dates: # days up to the row's time"
        for column in guessed.dates:
            yield f"        {plain_yaml(column.name)}: [days_before] # {column.shown}"
    if guessed.vectors:
        yield "      vectors: # lists of numbers, such as embeddings, with their length"
        for column in guessed.vectors:
            yield f"        {plain_yaml(column.name)}: {column.size} # {column.shown}"
    if guessed.alike:
        words = f"{CHECK}: do both come from one model? Leave it out if not"
        yield f"      similarities: {flow({'cosine': guessed.alike})} {words}"
    if guessed.optional:
        lacking = f"a missing value in files that lack it, such as {guessed.optional[0].lacking}"
        yield f"      optional: {flow([column.name for column in guessed.optional])} # {lacking}"
    for name, reason in islice(guessed.others.items(), _DESCRIBED):
        yield f"      # not used: {name or '(no name)'}, {reason}"
    if len(guessed.others) > _DESCRIBED:
        yield f"      # not used: {len(guessed.others) - _DESCRIBED:,} more"


def _label(guessed: Guess, label: LogColumn, counted: LogCounts) -> Iterator[str]:
    """The lines of the label: its column, what its values count, and what rows without a label count."""
    yield from _role("label", label, guessed.choices.get("label"))
    if grades := grades_of(label):
        unknown = [word for word, grade in grades.items() if grade is None] if isinstance(grades, Mapping) else []
        lacking = f"; {', '.join(unknown[:3])} {'has' if len(unknown) == 1 else 'have'} none" if unknown else ""
        yield f"      grades: {flow(grades)} {CHECK}: higher is better{lacking}"
    if counted.unjudged:
        share = f"{counted.unjudged:,} rows ({counted.unjudged / counted.rows:.0%}) have no label"
        yield f"      unjudged: 0 {CHECK}: {share} where others of their query have one; or unlabelled, or reject"


def _role(role: str, column: LogColumn, choice: Choice | None) -> Iterator[str]:
    """A role's line with the reasons for its column, and a line for each alternative."""
    if choice is None:  # the user has named it
        yield f"      {role}: {plain_yaml(column.name)} # {column.shown}"
        return
    why = "; ".join(choice.best.reasons)
    doubt = f"{CHECK}: {choice.doubt}; " if choice.doubt else "# "
    yield f"      {role}: {plain_yaml(column.name)} {doubt}{why}"
    for alternative in choice.alternatives:
        yield f"      #   or {alternative.name}: {'; '.join(alternative.reasons)}"


def _times(guessed: Guess, counted: LogCounts) -> Iterator[str]:
    dealt = "part # part-1 to part-6, by the hash of the query: there are no times over several periods"
    if guessed.time is None:
        yield from [f"      period: {dealt}"] if counted.unit == "part" else []
        return
    yield from _role("time", guessed.time, guessed.choices.get("time"))
    span = " to ".join(dict.fromkeys([*counted.periods[:1], *counted.periods[-1:]])) or "no period with labels"
    formats = dict.fromkeys(form for each in (guessed.time, *guessed.dates) for form in each.formats[:1] or (ISO,))
    if list(formats) != [ISO]:
        others = guessed.time.formats[1:2]
        doubt = f" {CHECK}: {others[0]} fits all of them, too" if others else ""
        yield f"      time_format: {flow(sorted(formats, key=ISO.__eq__))}{doubt}"  # last, because it reads the most
    yield "      time_zone: UTC # of times that do not state one, and of the midnight at which days begin"
    yield f"      period: {dealt if counted.unit == 'part' else f'{counted.unit} # {span}'}"


def _column_list(
    key: str, columns: Sequence[LogColumn], note: str, questions: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    if columns:
        yield f"      {key}: # {note}"
        for column in columns:
            doubt = f"{CHECK}: {questions[column.name]} Leave it out if not; " if column.name in questions else "# "
            facts = f" {doubt}{column.shown}" if len(columns) <= _DESCRIBED or column.name in questions else ""
            yield f"        - {plain_yaml(column.name)}{facts}"


def summary(guessed: Guess) -> list[str]:
    """The column of each role with the reasons, in aligned lines."""
    roles = {
        "query": guessed.query,
        "item": guessed.item,
        "label": guessed.label,
        "gain": guessed.gain,
        "time": guessed.time,
        "positions": guessed.positions,
    }
    width = max(len(column.name) for column in roles.values() if column is not None)
    lines = []
    for role, column in roles.items():
        choice = guessed.choices.get(role)
        words = [*(choice.best.reasons[:2] if choice else ())]
        if choice and choice.alternatives:
            words.append(f"not {', '.join(alternative.name for alternative in choice.alternatives)}")
        mark = f"CHECK: {choice.doubt}; " if choice and choice.doubt else ""
        if column is not None:
            lines.append(f"{role:<9}  {column.name:<{width}}  {mark}{'; '.join(words)}".rstrip())
    columns = {
        "features": guessed.features,
        "categorical": guessed.categorical,
        "dates": guessed.dates,
        "vectors": guessed.vectors,
        "meta": guessed.meta,
        "not used": guessed.others,
    }
    lines.append(", ".join(f"{use}: {len(of_use)}" for use, of_use in columns.items() if of_use))
    return [*lines, *(f"CHECK: {question} Leave it out if not" for question in guessed.asked.values())]


def clicks_text(out: str, guessed: Guess) -> str | None:
    """The clicks.yaml of a data set that has all that `jobs.clicks` needs, else None."""
    if guessed.positions is None or guessed.clicks is None or guessed.item is None:
        return None
    query_column = next((column.name for column in guessed.meta if column.is_asked), None)
    if query_column is None:
        query = (
            "# query: meta_NAME # each list is a query of its own: name the text that was searched for, kept under meta"
        )
    else:
        name = plain_yaml(f"meta_{query_column}")
        query = f"query: {name} # what several lists were shown for, so that documents are seen to move"
    return f"""\
# Made by jobs.init: what clicks tell apart from places, before anything is trained on them.
out: {plain_yaml(storage.join(out, "clicks"))}
log: {{data: {plain_yaml(storage.join(out, "data"))}}}
{query}
"""
