"""The first prepare.yaml of a log: the guessed role of each column, with reasons and alternatives as comments."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from ltrscale import storage
from ltrscale.config import CHECK
from ltrscale.data.times import ISO
from ltrscale.experiments.first.counted import LogCounts
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import Guess, grades_of
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.lines import UTF8
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.profile import LogColumn
from ltrscale.ingest.roles import Choice
from ltrscale.texts import flow, plain_yaml

_DESCRIBED = 2000
"""Maximum columns of one use that are described; further ones are only named."""


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
