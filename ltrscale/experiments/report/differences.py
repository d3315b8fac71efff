"""The section of groups where two methods differ most: lists with titles from the raw rows, features, and gains.

Shapes: Q groups, F features, L documents of a list.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature, open_dataset
from ltrscale.data.dataset.origin import prepare_settings_of, read_as
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError
from ltrscale.experiments.report.groups import (
    META,
    GroupsAndScores,
    chosen_groups,
    labels_in,
    primary_values,
    read_groups_scored,
)
from ltrscale.experiments.report.sources import Sources
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.inputs import PrepareConfig, raw_files
from ltrscale.ingest.items import Items
from ltrscale.ingest.tables import read_rows, read_schema
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Table, Text, cell

_DOCUMENTS_SHOWN, _FEATURES_SHOWN, _LONGEST_NAME = 12, 6, 64


def differing(sources: Sources, n: int, titles: str | None = None) -> Iterator[Block]:
    """Lists of the groups where two methods' metrics differ most: n where the first is ahead, n where the second is.

    `titles` is the raw column with document titles; by default it is searched.
    """
    first, second = sources.compared()
    of_methods = primary_values(sources, [first, second])
    lead_Q = of_methods[second] - of_methods[first]
    order = np.argsort(np.nan_to_num(lead_Q), kind="stable")
    picked = [*[q for q in order[::-1] if lead_Q[q] > 0][:n], *[q for q in order if lead_Q[q] < 0][:n]]
    if not picked:
        raise InputError(f"{first} and {second} differ in no group; set compare to two other methods, or lists above 0")
    label = metric_label(sources.evaluation.primary)
    yield Text(
        f"{second} against {first}: groups where {second} is ahead most, then where {first} is, by {label}. Lists are "
        f"in the order of {second}; documents with a label above 0 are marked. Of longer lists the first "
        f"{_DOCUMENTS_SHOWN} of both methods and the relevant documents are shown."
    )
    names = _most_important(sources)
    selection = chosen_groups(sources.test, np.array(sorted(picked)))
    parts = [*read_groups_scored(sources, selection, (first, second))]
    ids = {each for part in parts for of_group in _lists_of(part, "doc_ids") for each in of_group or ()}
    titled = titles_of(sources.evaluation.test.data, ids, titles) if ids else ("", {})
    tables = [
        table for part in parts for table in _list_tables(sources, part, (first, second), names, selection, titled)
    ]
    position = {q: i for i, q in enumerate(sorted(picked))}
    for q in picked:
        figures = f"{label} {cell(of_methods[second][q])} by {second}, {cell(of_methods[first][q])} by {first}"
        table = tables[position[q]]
        yield replace(table, caption=f"{table.caption}: {figures}")


def _most_important(sources: Sources) -> list[str]:
    """The features to show: the most important of the first trees, or else the first of the data."""
    names = [feature.name for feature in sources.test.features]
    for _, url in sources.bundles():
        if important := sources.opened(url).importances():
            return [name for name in important if name in names][:_FEATURES_SHOWN]
    return names[:_FEATURES_SHOWN]


def _list_tables(
    sources: Sources,
    part: GroupsAndScores,
    methods: tuple[str, str],
    names: Sequence[str],
    selection: Selection,
    titled: tuple[str, Mapping[str, str]],
) -> Iterator[Table]:
    (one, other), (title, titles) = methods, titled
    worth = sources.gains_called
    places = [[feature.name for feature in selection.features].index(name) for name in names]
    shown_as = [partial(_shown_as, sources, selection.features[place]) for place in places]
    bounds = itertools.pairwise(part.groups.offsets_Q1.tolist())
    for q, (first, last) in enumerate(bounds):
        labels_L = labels_in(part.groups)[first:last].numpy()
        orders = {name: np.argsort(-part.scores[name][first:last].numpy(), kind="stable") for name in methods}
        ranks = {name: np.argsort(order_L) + 1 for name, order_L in orders.items()}
        close_L = np.minimum(ranks[one], ranks[other]) <= _DOCUMENTS_SHOWN
        shown = [i for i in orders[other] if close_L[i] or labels_L[i] > 0]
        ids, gains = (_lists_of(part, name)[q] for name in ("doc_ids", "gains"))
        columns = [
            ("label", [f"{label:g}" for label in labels_L[shown]]),
            (f"rank by {other}", [f"{rank}" for rank in ranks[other][shown]]),
            (f"rank by {one}", [f"{rank}" for rank in ranks[one][shown]]),
        ]
        if worth and gains:
            columns.append((worth, [_number_or_dash(gains[i]) for i in shown]))
        columns.append(("document", [str(ids[i]) if ids else f"{i + 1}" for i in shown]))
        if title and ids:
            columns.append((title, [_cut(titles.get(ids[i], "-")) for i in shown]))
        values_FL = part.groups.features_NF[first:last][shown][:, places].T.tolist()
        for name, show, values_L in zip(names, shown_as, values_FL, strict=True):
            columns.append((name, [*map(show, values_L)]))
        rows = [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]
        caption = f"query {part.ids.column('query_id')[q].as_py()}{_about(part, q)}, {last - first} documents"
        shades = [charts.shade(float(labels_L[i]), float(labels_L.max())) for i in shown]
        yield Table([name for name, _ in columns], rows, caption=caption, shades=shades)


def _lists_of(part: GroupsAndScores, name: str) -> list[list[Any] | None]:
    """A column of documents by group; None for a group without it."""
    if name not in part.ids.column_names:
        return [None] * len(part.ids)
    values: list[list[Any] | None] = part.ids.column(name).to_pylist()
    return values


def _about(part: GroupsAndScores, q: int) -> str:
    """The `meta_*` values of a group, in brackets."""
    meta = {name: part.ids.column(name)[q].as_py() for name in part.ids.column_names if name.startswith(META)}
    said = [f"{name.removeprefix(META)} {_cut(str(value))}" for name, value in meta.items() if value is not None]
    return f" ({', '.join(said)})" if said else ""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None or np.isnan(value) else f"{value:.4g}"


def _shown_as(sources: Sources, feature: Feature, value: float) -> str:
    """A feature value as text; a category by its recorded name, else by its code."""
    if np.isnan(value) or feature.kind == "numeric":
        return _number_or_dash(value)
    return _cut(sources.categories.get(feature.name, {}).get(int(value), f"{value:.0f}"))


_NAMES = (
    r"titl|titel|titre|t[ií]tulo|titolo|tytu[lł]|tittel",
    r"^(name|bezeichnung|nom|nombre|nome|naam|nazwa|namn)$|(item|product|article|artikel|produkt|produit|producto|"
    r"prodotto|produto|doc|document)s?_?(name|bezeichnung|nom|nombre|nome|naam|nazwa|namn)",
)
"""Names of title columns in ten languages, the most certain first."""
_MOST_ROWS, _AT_ONCE = 2_000_000, 1 << 16
"""Maximum raw rows read for titles, in total and at once."""


def titles_of(urls: Sequence[str], ids: Collection[str], column: str | None = None) -> tuple[str, dict[str, str]]:
    """The name of the title column, and the titles found for these documents.

    Both are empty if the raw rows no longer exist or have no title column. Without `column`, a column is chosen by its
    name if it has one text per id, and hardly ever the same text for two ids.
    """
    name, found = "", dict[str, str]()
    for title, pairs in itertools.chain.from_iterable(_title_pairs(url, column) for url in urls):
        name = title
        wanted = pairs.filter(pc.is_in(pairs["id"], pa.array([*ids - found.keys()], pa.string())))
        found |= dict(zip(wanted["id"].to_pylist(), wanted["title"].to_pylist(), strict=True))
        if found.keys() >= {*ids}:
            break
    if column is not None and not name:
        raise InputError(f"titles: no raw rows of {', '.join(urls)} have a column {column!r} beside an item's id")
    return (name, found) if found else ("", {})


def _title_pairs(url: str, column: str | None) -> Iterator[tuple[str, pa.Table]]:
    """The name of a title column, and distinct pairs of id and title, of one block of rows after the other."""
    read = 0
    for file, dialect, item, but in _files_of_items(url):
        schema = read_schema(file, dialect)
        for title in _titles(schema, column, but=but) if item in schema.names else ():
            names = [name for name in schema.names if name in (item, title)]
            raws = read_rows(file, schema, names, numbers=(), query=names[0], dialect=dialect, batch_rows=_AT_ONCE)
            for number, raw in enumerate(raws):
                texts = [cols.without_dictionary(raw.rows.column(name)).cast(pa.string()) for name in (item, title)]
                pairs = pa.table(texts, ["id", "title"]).drop_null().group_by(["id", "title"]).aggregate([])
                if column is None and number == 0 and not _one_to_one(pairs):
                    break  # such as a brand or seller name
                yield title, pairs
                read += len(raw.rows)
                if read >= _MOST_ROWS:
                    return


def _one_to_one(pairs: pa.Table) -> bool:
    """Whether ids and titles match one to one, with a few exceptions."""
    ids, titles = (len(pairs[name].unique()) for name in ("id", "title"))
    return len(pairs) <= 1.1 * ids and titles >= 0.5 * ids and titles > 1


def _files_of_items(url: str) -> Iterator[tuple[str, Dialect, str, Sequence[str]]]:
    """The files with items of a data set, joined tables first: file, dialect, id column, and columns without titles."""
    settings = prepare_settings_of(read_as(open_dataset(url)))
    source = validate(PrepareConfig, settings, url).source if settings else None
    if not isinstance(source, Items) or (item := source.columns.item) is None:
        return
    columns = source.columns
    for join in source.joins:
        if item in join.key:
            files = list[str]()
            with suppress(InputError):  # the table may no longer exist
                files = storage.list_files(join.path)
            for file in files:
                yield file, columns.dialect(file), join.key[item], [*join.key.values()]
    for file in reversed(raw_files(open_dataset(url))):  # the test periods are the last ones
        yield file, columns.dialect(file), item, [item, columns.query]


def _titles(schema: pa.Schema, column: str | None, *, but: Sequence[str]) -> list[str]:
    """Possible title columns of a file, the likeliest first; only `column` if given."""
    if column is not None:
        return [column] if column in schema.names else []
    texts = [field.name for field in schema if cols.is_text(cols.value_type(field.type)) and field.name not in but]
    return list(itertools.chain(*([name for name in texts if re.search(p, name.lower())] for p in _NAMES)))
