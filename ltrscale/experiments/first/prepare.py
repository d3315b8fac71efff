"""The first prepare.yaml of a log: the guessed role of each column, with reasons and alternatives as comments.

Foreign texts are quoted, and none breaks its line, not even in a comment: YAML also breaks lines at a carriage return
and at three Unicode characters, and refuses other control characters. All of them are written as escapes, which YAML
reads back in quoted values.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import yaml
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.config import CHECK
from ltrscale.data import columns as cols
from ltrscale.data.ids import parts
from ltrscale.data.times import ISO, Clock, PeriodUnit, instants, periods
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import Guess, grades_of
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.lines import UTF8
from ltrscale.ingest.mapping import ColumnMapping, PeriodKind
from ltrscale.ingest.profile import LogColumn
from ltrscale.ingest.roles import Choice
from ltrscale.ingest.structure import Structure


def escaped(text: str) -> str:
    r"""The text with invisible characters escaped, so that it is one line.

    Example:
        >>> escaped("# two\nlines, \x85 or\u2028more")
        '# two\\x0alines, \\x85 or\\u2028more'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(ord(c)) for c in text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def yaml_text(lines: Iterable[str]) -> str:
    """Join the lines of a config, escaped so that each stays one line."""
    return "".join(f"{escaped(line)}\n" for line in lines)


def flow(value: Mapping[str, object] | Sequence[object] | str) -> str:
    """A list, mapping or text as YAML in one line; texts and keys are quoted because of words such as yes."""
    return escaped(json.dumps(value, ensure_ascii=False))


_PLAIN = re.compile(r"(\.{0,2}/|[A-Za-z_])[\w./-]*")
_RESOLVER, _TEXT = yaml.resolver.Resolver(), "tag:yaml.org,2002:str"


def plain_yaml(value: str) -> str:
    """A name or path as YAML, quoted where it must be.

    Example:
        >>> [plain_yaml(value) for value in ("price", "./log.csv", "yes", "a: b")]
        ['price', './log.csv', '"yes"', '"a: b"']
    """
    if not value.isprintable() or not _PLAIN.fullmatch(value):
        return flow(value)
    tag = _RESOLVER.resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
    return value if tag == _TEXT else flow(value)


FEWEST_PERIODS = 3
"""Minimum number of periods: one each to train, validate and test."""
_DESCRIBED = 2000
"""Maximum columns of one use that are described; further ones are only named."""
_UNITS: tuple[PeriodUnit, ...] = ("week", "day", "hour")


@dataclass(frozen=True)
class LogCounts:
    """Counts over all rows of a log, with lists by the guessed columns."""

    rows: int
    queries: int
    together: bool
    repeated: int
    """Rows that repeat an item of their query."""
    median: int
    longest: int
    informative_rows: int
    """Rows of lists with different labels, the only ones that trees and networks learn from."""
    informative_queries: int
    """Number of these lists."""
    unjudged: int
    """Rows without a label in lists where other rows have one."""
    unit: PeriodKind
    """What the log is divided by: `part` where it has no times over enough periods."""
    periods: tuple[str, ...]
    """The periods with labels; empty without labels or a time."""


def count_lists(guessed: Guess, structure: Structure) -> LogCounts:
    """Count the lists of all rows; `structure` has the columns with roles."""
    codes_N = structure.joined(guessed.query.name, [column.name for column in guessed.within])
    lengths_Q = np.bincount(codes_N[codes_N >= 0])
    lengths_Q = lengths_Q[lengths_Q > 0]
    repeated = 0
    if guessed.item is not None:
        items_N = structure.codes[guessed.item.name]
        known_N = (items_N >= 0) & (codes_N >= 0)
        pairs = (codes_N * (items_N.max() + 1) + items_N)[known_N]
        repeated = len(pairs) - len(np.unique(pairs))
    labels_N, unjudged = row_labels(guessed, structure, codes_N)
    apart_Q = informative_lists(codes_N, labels_N)
    unit, periods = _divided(guessed, structure, codes_N, labels_N)
    return LogCounts(
        rows=len(codes_N),
        queries=len(lengths_Q),
        together=_together(codes_N, structure.files),
        repeated=repeated,
        median=int(np.median(lengths_Q)),
        longest=int(lengths_Q.max()),
        informative_rows=int(apart_Q[codes_N[codes_N >= 0]].sum()),
        informative_queries=int(apart_Q.sum()),
        unjudged=unjudged,
        unit=unit,
        periods=periods,
    )


def row_labels(guessed: Guess, structure: Structure, lists_N: NDArray[np.int64]) -> tuple[NDArray[np.float64], int]:
    """The label of each row as the config reads it, NaN for none; and the number of unjudged rows, which count 0."""
    if guessed.label is None:
        return np.full(len(lists_N), np.nan), 0
    labels_N, grades = structure.amounts(guessed.label), grades_of(guessed.label)
    if isinstance(grades, tuple):
        labels_N = np.where(np.isnan(labels_N), np.nan, np.searchsorted(grades, labels_N, side="right"))
    judged_Q = np.zeros(int(lists_N.max()) + 1, np.bool_)
    judged_Q[lists_N[(lists_N >= 0) & ~np.isnan(labels_N)]] = True
    unjudged_N = np.isnan(labels_N) & (lists_N >= 0) & judged_Q[lists_N]
    return np.where(unjudged_N, 0.0, labels_N), int(unjudged_N.sum())


def _together(codes_N: NDArray[np.int64], files: Sequence[int]) -> bool:
    """Whether the rows of each list are contiguous in one file."""
    begins_N = np.diff(codes_N, prepend=-2) != 0
    begins_N[[row for row in files if row < len(codes_N)]] = True
    runs = codes_N[begins_N & (codes_N >= 0)]
    return len(runs) == len(np.unique(runs))


def informative_lists(lists_N: NDArray[np.int64], labels_N: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each list has different labels, by list number; -1 means no list, and NaN no label."""
    known_N = (lists_N >= 0) & ~np.isnan(labels_N)
    lists_M, labels_M = lists_N[known_N], labels_N[known_N]
    first_Q, apart_Q = np.zeros(int(lists_N.max()) + 1), np.zeros(int(lists_N.max()) + 1, np.bool_)
    first_Q[lists_M] = labels_M
    apart_Q[lists_M[labels_M != first_Q[lists_M]]] = True
    return apart_Q


def _divided(
    guessed: Guess, structure: Structure, lists_N: NDArray[np.int64], labels_N: NDArray[np.float64]
) -> tuple[PeriodKind, tuple[str, ...]]:
    """The longest unit of time that gives enough periods with labels; or parts of the queries, if there are enough."""
    unit, names = _periods(guessed, structure, lists_N, labels_N)
    if len(names) >= FEWEST_PERIODS or guessed.label is None:
        return unit, names
    of_queries = structure.codes[guessed.query.name][(lists_N >= 0) & ~np.isnan(labels_N)]
    queries_V, _ = cols.texts(structure.values[guessed.query.name].take(pa.array(np.unique(of_queries))))
    dealt = tuple(sorted({*parts(queries_V.fill_null("").to_pylist())}))
    return ("part", dealt) if len(dealt) >= FEWEST_PERIODS else (unit, names)


def _periods(
    guessed: Guess, structure: Structure, lists_N: NDArray[np.int64], labels_N: NDArray[np.float64]
) -> tuple[PeriodUnit, tuple[str, ...]]:
    """The longest unit that gives enough periods, by the first row of each list; none without a time."""
    if guessed.time is None:
        return "week", ()
    formats = guessed.time.formats[:1] or (ISO,)
    clock, times_V = Clock(formats=formats), structure.values[guessed.time.name]
    times_N = structure.codes[guessed.time.name]
    usable_N = (lists_N >= 0) & ~np.append(instants(times_V, clock)[1], True)[times_N]
    if guessed.label is not None:
        usable_N &= ~np.isnan(labels_N)
    rows = np.flatnonzero(usable_N)
    rows_Q = rows[np.unique(lists_N[rows], return_index=True)[1]]
    times_V = times_V.take(pa.array(np.unique(times_N[rows_Q])))
    for unit in _UNITS:
        names_V, _ = periods(times_V, unit, clock)
        names = tuple(sorted({*names_V.to_pylist()} - {None}))
        if len(names) >= FEWEST_PERIODS:
            return unit, names
    return "week", names


def first_lines(file: str, out: str, *notes: str) -> Iterator[str]:
    """The first lines of any prepare.yaml."""
    yield f"# Made by jobs.init from {file}. Correct what was guessed wrong."
    yield from notes
    yield f"out: {plain_yaml(storage.join(out, 'data'))}"
    yield ""
    yield "prepare:"


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
