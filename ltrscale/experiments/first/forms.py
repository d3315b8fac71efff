"""The first prepare.yaml of inputs without one item per row: LETOR text, one list per row, tables of texts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale import storage
from ltrscale.config import CHECK
from ltrscale.data import columns as cols
from ltrscale.data.times import ISO
from ltrscale.errors import InputError
from ltrscale.experiments.first.prepare_yaml import first_lines
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import Guess, guess
from ltrscale.ingest.lines import line_blocks
from ltrscale.ingest.profile import LogColumn, batches_of, columns_of, named_schema
from ltrscale.ingest.structure import table_structure
from ltrscale.ingest.tables import usual_delimiter
from ltrscale.texts import flow, plain_yaml

_ROW = re.compile(rb"\s*[-+.\deE]+\s+(qid:\S+\s+)?\d+:\S+")
_FEATURE_INDEX = re.compile(rb"\s(\d+):")
_TABLE = re.compile(r"\.(parquet|([ct]sv|jsonl|ndjson)(\.gz|\.xz)?)$")
_GROUPS_LOOKED_AT = 20_000


def other_form(file: str, urls: Sequence[str], out: str, given: Mapping[str, str | None]) -> list[str] | None:
    """The lines of prepare.yaml for an input of another form than one item per row; None for one item per row.

    `given` is as for `guess`. Raises an `InputError` if the files of a known form do not fit together.
    """
    if letor := [url for url in urls if not _TABLE.search(url) and _first_row(url)]:
        return [*first_lines(file, out), *_letor(letor, urls)]
    if not all(_TABLE.search(url) for url in urls):
        return None  # the reader of items reports what it cannot read
    if urls[0].endswith(".parquet"):
        laid = _laid_out(urls[0])
        return [*first_lines(file, out), *_query_rows(file, urls[0], laid, given)] if laid else None
    texts = _Texts.recognise(urls) if len(urls) > 1 else None
    return [*first_lines(file, out), *texts.lines()] if texts else None


# LETOR and svmlight text


def _first_row(url: str) -> bytes:
    """The first row of LETOR or svmlight text, empty for any other file."""
    piece = next(line_blocks(url, size=1 << 16), None)
    lines = [] if piece is None else [line for line in piece.text.split(b"\n") if line and not line.startswith(b"#")]
    return lines[0] if lines and _ROW.match(lines[0]) else b""


def _letor(urls: Sequence[str], beside: Sequence[str]) -> Iterator[str]:
    """Lines for LETOR files: each file is a period, and rows that omit features need their number."""
    names = [PurePosixPath(url).name.partition(".")[0] for url in urls]
    if len(urls) > 1 and len({*names}) < len(urls):  # rank.train and rank.test
        names = [re.sub(r"(\.(txt|svm|letor|dat))?(\.gz|\.xz)?$", "", PurePosixPath(url).name) for url in urls]
    if twice := next((name for name in names if names.count(name) > 1), None):
        duplicates = ", ".join(url for url, name in zip(urls, names, strict=True) if name == twice)
        raise InputError(
            f"{duplicates}: files with one name are the same rows in several folds; name the folder of one"
        )
    dense, lowest, highest = _width(urls)
    yield "  inputs: # each file is a period, by which splits divide the data"
    for url, name in zip(urls, names, strict=True):
        entry = [f"path: {flow(url)}", f"period: {flow(name)}"]
        if b"qid:" not in _first_row(url):
            entry.append(f"group_sizes: {flow(_sizes_of(url, beside))}")
        yield f"    - {{{', '.join(entry)}}}"
    yield "  source:"
    yield "    kind: letor"
    if not dense:
        yield "    dense: false # rows omit features that are 0"
        yield f"    n_features: {highest + 1 - lowest} # up to the highest index of all rows"
        if not lowest:
            yield "    first_index: 0 # the lowest index of all rows"


def _width(urls: Sequence[str]) -> tuple[bool, int, int]:
    """Whether all rows read have all features; the first index, 0 or 1; and the highest index."""
    lowest, highest, counts = 1, 0, set()
    for url in urls:
        for number, piece in enumerate(line_blocks(url, size=1 << 20)):
            text = re.sub(rb"#[^\n]*", b"", piece.text)
            indices = {int(index) for index in {*_FEATURE_INDEX.findall(text)}}
            lowest, highest = min(lowest, *indices, 1), max(highest, *indices, 0)
            counts |= {len(_FEATURE_INDEX.findall(line)) for line in text.split(b"\n") if line.strip()}
            if number == 0 and counts == {highest + 1 - lowest}:
                break  # dense: all rows of the first megabyte have all features
    return counts == {highest + 1 - lowest}, lowest, highest


def _sizes_of(url: str, beside: Sequence[str]) -> str:
    """The file with the group sizes, next to the given file."""
    stem = re.sub(r"(\.gz|\.xz)$", "", url)
    endings = (".query", ".group", ".groups")
    candidates = [*beside, *storage.children(url.rpartition("/")[0] or ".")]
    sizes = next((each for each in candidates if any(each.endswith(stem + ending) for ending in endings)), None)
    if sizes is None:
        raise InputError(f"{url}: rows have no qid; put the sizes of the groups into {stem}.query, one a line")
    return sizes


# one list per row


class _Laid(NamedTuple):
    """Rows of lists laid out as items."""

    items: pa.Table
    names: dict[str, str]
    """The name of each list of single values, by the name of its value."""
    wide: dict[str, int]
    """The lists with several values per document, and how many."""


def _laid_out(url: str) -> _Laid | None:
    """The items of a file with one query per row; None if its rows are items, whose lists differ in length."""
    schema = named_schema(url, Dialect())
    lists = [each.name for each in schema if cols.is_list(each.type)]
    first = next(batches_of(url, schema.names, Dialect()), None) if len(lists) > 1 else None
    if first is None:
        return None
    rows = pa.Table.from_batches([first]).slice(0, _GROUPS_LOOKED_AT)
    lengths = {name: pc.fill_null(pc.list_value_length(rows[name]), 0).to_numpy() for name in lists}
    nested = [name for name in lists if cols.is_list(schema.field(name).type.value_type)]
    n_Q = lengths[min((name for name in lists if name not in nested), key=lambda name: lengths[name].sum())]
    names = {_one(name): name for name in lists if name not in nested and (lengths[name] == n_Q).all()}
    wide = {name: int(lengths[name].sum() // max(n_Q.sum(), 1)) for name in lists if name not in names.values()}
    wide = {name: n for name, n in wide.items() if name not in nested and (lengths[name] == n * n_Q).all()}
    inner = {name: len(rows[name].combine_chunks().flatten().flatten()) for name in nested}
    wide |= {name: inner[name] // max(n_Q.sum(), 1) for name in nested if (lengths[name] == n_Q).all()}
    if len(names) + len(wide) < 2 or len({*n_Q[n_Q > 0].tolist()}) < 2:  # a vector may be missing
        return None
    parent_N = pa.array(np.repeat(np.arange(len(rows)), n_Q))
    flat = {
        each: cols.without_dictionary(rows[each].combine_chunks()).take(parent_N)
        for each in schema.names
        if each not in lists
    }
    flat |= {one: rows[name].combine_chunks().flatten() for one, name in names.items()}
    return _Laid(pa.table(flat), names, wide)


def _query_rows(file: str, url: str, laid: _Laid, named: Mapping[str, str | None]) -> Iterator[str]:
    """Lines for one query per row, with roles guessed from the items."""
    ones = {name: one for one, name in laid.names.items()}
    named = {use: ones.get(name, name) for use, name in named.items() if name is not None}
    guessed = guess(columns_of(laid.items, laid.items.schema, Dialect()), table_structure(laid.items), named, url)
    yield f"  inputs: {plain_yaml(file)}"
    yield "  source:"
    yield "    kind: groups # a row for each query, with lists of its documents"
    yield "    columns:"
    yield from _group_columns(guessed, laid.names, laid.wide)


def _one(name: str) -> str:
    """The name of a list's single value, such as product_id of product_ids; its role is guessed by this name."""
    return re.sub(r"(?<!s)s$", "", name)


def _group_columns(guessed: Guess, lists: Mapping[str, str], wide: Mapping[str, int]) -> Iterator[str]:
    """Lines for the uses of columns; `lists` has the name of each list by the name of its single value."""
    yield f"      query: {plain_yaml(guessed.query.name)} # {guessed.query.shown}"
    if guessed.time is not None:
        yield f"      time: {plain_yaml(guessed.time.name)} # {guessed.time.shown}"
        if guessed.time.formats[0] != ISO:
            yield f"      time_format: {flow(guessed.time.formats[0])}"
    by_use = {
        "docs": guessed.item,
        "labels": guessed.label,
        "positions": guessed.positions,
        "clicks": guessed.clicks,
        "gain": guessed.gain,
    }
    for use, column in by_use.items():
        if column is not None and column.name in lists:
            doubt = guessed.choices[role].doubt if (role := use.rstrip("s")) in guessed.choices else ""
            mark = f"{CHECK}: {doubt}; " if doubt else "# "
            yield f"      {use}: {plain_yaml(lists[column.name])} {mark}{column.shown}"
    single = [each.name for each in (*guessed.meta, *guessed.categorical, *guessed.features) if each.name not in lists]
    if single:
        yield f"      meta: {flow(single)} # of the whole list"
    for name in [*wide][:1]:
        yield f"      features: {flow([name])} # all features of all documents"
        yield f"      n_features: {wide[name]}"
    for use, columns in () if wide else (("features", guessed.features), ("categorical", guessed.categorical)):
        if names := [lists[each.name] for each in columns if each.name in lists]:
            yield f"      {use}: {flow(names)}"
    unused = dict(guessed.others) | dict.fromkeys([*wide][1:], "further features")
    for name, reason in unused.items():
        yield f"      # not used: {lists.get(name, name)}, {reason}"


def refuse_without_features(guessed: Guess, read: Sequence[LogColumn], where: str) -> None:
    """Raise an `InputError` that gives the use of each column if none is `read` as a feature."""
    if read:
        return
    by_role = {"query": guessed.query, "item": guessed.item, "label": guessed.label, "time": guessed.time}
    by_role |= {"positions": guessed.positions, "gain": guessed.gain}
    roles = ", ".join(f"{column.name} is the {role}" for role, column in by_role.items() if column is not None)
    kept = "".join(f", {column.name} is kept as meta" for column in guessed.meta)
    unused = "".join(f"; {name}: {reason}" for name, reason in [*guessed.others.items()][:5])
    raise InputError(
        f"{where}: no column is left for a ranker to read: {roles}{kept}{unused}; join columns that are known before a "
        "list is shown, such as a price or an engine's score, or name the roles that are wrong, as --set label=COLUMN"
    )


# queries, documents and judgements in separate tables


@dataclass(frozen=True)
class _Texts:
    """A table of candidates, and the tables that it refers to."""

    pairs: str
    found: Guess
    queries: "_TextTable"
    documents: "_TextTable"
    judged: "_TextTable | None"
    unused: tuple[str, ...]

    @classmethod
    def recognise(cls, urls: Sequence[str]) -> "_Texts | None":
        """The parts of a text collection; None if the files are not one."""
        read = [_TextTable.read(url) for url in urls]
        texts = [table for table in read if len(table.ids) == 1 and table.texts]
        keys = {table.ids[0] for table in texts}
        pairs = [table for table in read if len(keys & {*table.names}) >= 2]
        if len(keys) < 2 or not pairs:
            return None
        judged = next((table for table in pairs if table.label), None)
        scored = [table for table in pairs if table is not judged and len(table.names) > 2]
        if not scored:
            raise InputError(
                f"{pairs[0].url}: judgements alone are no lists to rank: put a table of candidates with a feature "
                "beside it, such as the best by BM25 with their score"
            )
        base = max(scored, key=lambda table: table.rows.num_rows)
        guessed = guess(base.columns, table_structure(base.rows), {}, base.url)
        refuse_without_features(guessed, [*guessed.features, *guessed.categorical], base.url)
        by_key = {table.ids[0]: table for table in texts}
        if guessed.item is None or not {guessed.query.name, guessed.item.name} <= {*by_key}:
            return None
        of_query, of_item = by_key[guessed.query.name], by_key[guessed.item.name]
        unused = tuple(table.url for table in read if table not in (base, of_query, of_item, judged))
        return cls(base.url, guessed, of_query, of_item, judged, unused)

    def lines(self) -> Iterator[str]:
        query, item = plain_yaml(self.found.query.name), plain_yaml(self.found.item.name if self.found.item else "")
        split = next((name for name in self.queries.names if name in ("split", "fold", "set")), None)
        columns = {"query": self.queries.texts[0]} | ({split: split} if split else {})
        yield f"  inputs: {flow(self.pairs)} # the candidates of each query"
        yield "  source:"
        yield "    kind: items"
        yield "    joins: # each takes columns of a table by a key"
        yield f"      - {{path: {flow(self.queries.url)}, key: {query}, columns: {flow(columns)}}}"
        texts = {f"document_{name}": name for name in self.documents.texts}
        yield f"      - {{path: {flow(self.documents.url)}, key: {item}, columns: {flow(texts)}}}"
        if self.judged is not None:
            label = plain_yaml(self.judged.label or "")
            options = f"columns: {label}, rows: all, fill: {{{label}: 0}}"
            yield f"      - {{path: {flow(self.judged.url)}, key: [{query}, {item}], {options}}}"
        yield "    columns:"
        if usual_delimiter(self.pairs) == "\t":
            yield "      quotes: false # a quote is a part of the text"
        yield f"      query: {query}"
        yield f"      item: {item}"
        if self.judged is not None:
            yield f"      label: {label} # 0 of what was not judged"
        if split:
            yield f"      period_column: {plain_yaml(split)}"
        if self.found.positions is not None:
            yield f"      positions: {plain_yaml(self.found.positions.name)} # of the candidates' own order: no feature"
        for use, read in {"features": self.found.features, "categorical": self.found.categorical}.items():
            if read:
                yield f"      {use}: {flow([each.name for each in read])}"
        yield from self._tokens(split)
        for url in self.unused:
            yield f"# not used: {url} {CHECK}: rows to leave out? see joins, rows: unmatched, in docs/text.md"

    def _tokens(self, split: str | None) -> Iterator[str]:
        names = self.queries.rows[split].unique().to_pylist() if split else ["all"]
        first = plain_yaml(str(next((name for name in names if str(name).startswith("train")), names[0])))
        yield "      tokens:"
        yield f"        tokenizer: {{kind: train, size: 8000, periods: [{first}]}} # of the training texts alone"
        yield "        query:"
        yield "          query: {column: query, max_tokens: 32, missing: empty}"
        yield "        document:"
        for name, field in _fields(self.documents.texts).items():
            column = plain_yaml(f"document_{name}")
            yield f"          {plain_yaml(field)}: {{column: {column}, max_tokens: 128, missing: empty}}"


def _fields(names: Sequence[str]) -> dict[str, str]:
    """A field name of letters, digits and underscores for each text column.

    Example:
        >>> _fields(["title", "full text", "full-text", "1"])
        {'title': 'title', 'full text': 'full_text', 'full-text': 'full_text_2', '1': 'text_1'}
    """
    fields: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_]+", "_", name)[:50]
        plain = plain if plain[:1].isalpha() else f"text_{plain}"
        again = (f"{plain}_{n}" for n in count(2))
        fields[name] = next(field for field in chain([plain], again) if field not in fields.values())
    return fields


@dataclass(frozen=True, eq=False)
class _TextTable:
    """The first rows of a table: its ids (each value once), its texts, and its label."""

    url: str
    rows: pa.Table
    columns: Sequence[LogColumn]
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    label: str | None

    @classmethod
    def read(cls, url: str) -> "_TextTable":
        """Read the first rows of a table; tab-separated texts may contain quotes."""
        dialect = Dialect("\t", quotes=False) if usual_delimiter(url) == "\t" else Dialect()
        schema = named_schema(url, dialect)
        rows = pa.Table.from_batches(islice(batches_of(url, schema.names, dialect), 1))
        columns = columns_of(rows, schema, dialect) if len(rows) else []
        words = [each for each in columns if not each.numeric and not each.formats]
        texts = [each.name for each in words if each.length > 15 and sum(" " in value for value in each.values) > 1]
        once = [each for each in columns if each.distinct == each.rows and each.name not in texts]
        ids = [each.name for each in once if each.names_one]
        label = next((each.name for each in columns if each.numeric and each.is_label), None)
        return cls(url, rows, columns, tuple(ids), tuple(texts), label)

    @property
    def names(self) -> list[str]:
        return list(self.rows.column_names)
