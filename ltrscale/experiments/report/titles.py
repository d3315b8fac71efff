"""Titles of documents, from the raw rows or the joined tables of a data set."""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.origin import prepare_settings_of, read_as
from ltrscale.errors import InputError
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.inputs import PrepareConfig, raw_files
from ltrscale.ingest.items import Items
from ltrscale.ingest.tables import read_rows, read_schema

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

    Raises:
        InputError: the rows have no column of that name, or a file is damaged.
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
            for file in _there(join.path):
                yield file, columns.dialect(file), join.key[item], [*join.key.values()]
    for file in reversed(raw_files(open_dataset(url))):  # the test periods are the last ones
        yield file, columns.dialect(file), item, [item, columns.query]


def _there(path: str) -> list[str]:
    try:
        return storage.list_files(path)
    except InputError:
        return []


def _titles(schema: pa.Schema, column: str | None, *, but: Sequence[str]) -> list[str]:
    """Possible title columns of a file, the likeliest first; only `column` if given."""
    if column is not None:
        return [column] if column in schema.names else []
    texts = [field.name for field in schema if cols.is_text(cols.value_type(field.type)) and field.name not in but]
    return list(itertools.chain(*([name for name in texts if re.search(p, name.lower())] for p in _NAMES)))
