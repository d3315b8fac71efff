"""Explanations of rows in memory, by the names of their items or their numbers."""

from collections.abc import Sequence

import pyarrow as pa

from ltrscale.bundle import Bundle, with_tokens_of
from ltrscale.bundle.explanations import Explanation, Reasoner
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.scored import NamedGroups, read_named
from ltrscale.devices import choose_device
from ltrscale.errors import InputError


def explained(
    bundle: Bundle, split: Split, items: Sequence[str], rows: tuple[int, int] | None, depth: int
) -> list[Explanation]:
    """Explanations of a data set whose documents are named by row number; `items` are the names of the rows.

    They compare two rows, or by default the first item of each query with those of ranks 2 to `depth`.

    Raises:
        InputError: the two rows are not of one query.
    """
    selection = with_tokens_of(select(split, labelled=False), [bundle])
    names = open_dataset(split.data[0]).manifest.names_of_categories
    reasoner = Reasoner.from_bundles({bundle.url: bundle}, selection.features, names, device=choose_device("auto"))
    found: list[Explanation] = []
    for part in read_named(selection):
        ids = part.ids.drop(["doc_ids"]).append_column(
            "doc_ids", pa.array([[items[int(row)] for row in of_list.as_py()] for of_list in part.ids["doc_ids"]])
        )
        if rows is None:
            found += reasoner.explain_firsts(part.groups, ids, depth)
        elif (places := _places(part, rows)) is not None:
            found += reasoner.explain(part.groups, ids, [(places[0], places[1:])])
    if rows is not None and not found:
        raise InputError(
            f"rows {rows[0]} and {rows[1]} are no two rows of one query; a score is compared within a query"
        )
    return found


def _places(part: NamedGroups, rows: tuple[int, int]) -> list[int] | None:
    """The documents of two rows in a batch; None if no list has both."""
    for start, of_list in zip(part.groups.offsets_Q1.tolist(), part.ids["doc_ids"].to_pylist(), strict=False):
        if rows[0] != rows[1] and {str(row) for row in rows} <= {*of_list}:
            return [start + of_list.index(str(row)) for row in rows]
    return None
