"""Scored and labelled lists: from a table of documents, a bundle on a split, or committed scores.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from pydantic import Field
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import group_index, to_offsets
from ltrscale.bundle import Scorer, load, with_tokens_of
from ltrscale.config import Config
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.scored import committed, finite
from ltrscale.errors import InputError, nearest
from ltrscale.evaluation.measure.parts import look_up
from ltrscale.stages.stage import BundleUrl, hashes_of


@dataclass(frozen=True)
class ScoredLists:
    """Scored and labelled groups, with the names of queries and the order of the items' names."""

    queries: Sequence[str]
    offsets_Q1: Tensor
    scores_N: Tensor
    labels_N: Tensor
    names_N: Tensor
    """Integers in the order of the items' names."""

    @property
    def group_N(self) -> Tensor:
        """The group of each document."""
        return group_index(self.offsets_Q1)


class TableSource(Config):
    """A table with a row for each document, in Parquet or CSV; the rows of a query may lie apart."""

    kind: Literal["table"] = "table"
    path: str
    """File or URL; a name that ends in .parquet is Parquet, any other CSV with a header, which may be packed (.gz)."""
    query: str = "query"
    """Column of the query: the rows with the same value are one group."""
    item: str = "item"
    """Column of the item's name, by which trec_eval orders ties; different within a query."""
    label: str = "label"
    """Column of the label, 0 or more."""
    score: str = "score"
    """Column of the score."""

    def inputs(self) -> dict[str, str]:
        """The fingerprint of the table."""
        return {self.path: storage.fingerprint(self.path)}

    def lists(self) -> ScoredLists:
        """The lists of the table, see `read_lists`."""
        return read_lists(self)


class BundleSource(Config):
    """The labelled groups of a split, scored by a bundle."""

    kind: Literal["bundle"] = "bundle"
    bundle: BundleUrl
    """The bundle."""
    split: Split
    """Its labelled groups are scored. Items are named by their place, as a data set is read without item names."""

    def inputs(self) -> dict[str, str]:
        """Content of the data set and the bundle."""
        return hashes_of(self)

    def lists(self) -> ScoredLists:
        """The groups with the scores of the bundle.

        Raises:
            InputError: the bundle or the data set is missing, they do not fit, or a score is not finite.
        """
        bundle = load(self.bundle)
        test = with_tokens_of(select(self.split, labelled=True), [bundle])
        return _scored(test, bundle.scorer(features=test.features), self.bundle)


class ScoresSource(Config):
    """The labelled groups of a split, with committed scores."""

    kind: Literal["scores"] = "scores"
    scores: str
    """Directory of scores that jobs.score made on the split's data set."""
    split: Split
    """Its labelled groups are read. Items are named by their place, as a data set is read without item names."""

    def inputs(self) -> dict[str, str]:
        """Content of the data set and the scores."""
        return hashes_of(self, self.split.with_scores(self.scores))

    def lists(self) -> ScoredLists:
        """The groups with their scores.

        Raises:
            InputError: the scores or the data set are missing, or a group has no scores.
        """
        score = look_up(self.scores, committed(self.scores, self.split))
        return _scored(select(self.split, labelled=True), score, self.scores)


ListSource = Annotated[TableSource | BundleSource | ScoresSource, Field(discriminator="kind")]
"""Where scored and labelled lists are."""


def _scored(test: Selection, score: Scorer, url: str) -> ScoredLists:
    """The groups of a selection with the scores of the bundle or directory `url`."""
    parts = list(iterate(test, docs_per_batch=65_536))
    scores_N = torch.cat([finite(score(part), url).double() for part in parts])
    lengths_Q = torch.cat([part.lengths_Q for part in parts])
    labels_N = torch.cat([part.labels_N for part in parts if part.labels_N is not None])
    gids = [str(gid) for part in parts if part.ids_Q is not None for gid in part.ids_Q.tolist()]
    return ScoredLists(gids, to_offsets(lengths_Q), scores_N, labels_N.double(), torch.arange(len(scores_N)))


def read_lists(source: TableSource) -> ScoredLists:
    """Read a table; groups are in the order of their first rows, and documents in the order of the rows.

    Raises:
        InputError: a column is missing, a value is missing or no number, a label is negative, or a query has an item
            twice; the message names the row, from 1 after the header.
    """
    table = _read(source)
    queries = table[source.query].cast(pa.string()).combine_chunks()
    items = table[source.item].cast(pa.string()).combine_chunks()
    labels, scores = _numbers(table, source.label, source), _numbers(table, source.score, source)
    if (negative := np.flatnonzero(labels < 0)).size:
        raise InputError(f"{source.path}: row {negative[0] + 1}: {source.label} is below 0; labels are 0 or more")
    coded = queries.dictionary_encode()  # codes are in the order of the first rows
    codes = coded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    # UTF-8 orders bytes as strcmp does
    names = np.empty(len(items), np.int64)
    by_name = np.asarray(pc.sort_indices(items.cast(pa.binary())))
    names[by_name] = np.arange(len(items))
    _check_items(source, codes, items)
    return ScoredLists(
        coded.dictionary.to_pylist(),
        to_offsets(torch.from_numpy(np.bincount(codes, minlength=len(coded.dictionary)))),
        *(torch.from_numpy(values[order]) for values in (scores, labels, names)),
    )


def _read(source: TableSource) -> pa.Table:
    columns = [source.query, source.item, source.label, source.score]
    data = storage.read_bytes(source.path)
    try:
        if source.path.endswith(".parquet"):
            names = pq.read_schema(pa.BufferReader(data)).names
        else:
            stream: Any = pa.input_stream(
                pa.BufferReader(data), compression="gzip" if source.path.endswith(".gz") else None
            )
            # names as text: a query 007 is not 7
            texts = pyarrow.csv.ConvertOptions(column_types={source.query: pa.string(), source.item: pa.string()})
            table = pyarrow.csv.read_csv(stream, convert_options=texts)
            names = table.column_names
        if missing := [name for name in columns if name not in names]:
            near = nearest(missing[0], names)
            raise InputError(f"{source.path}: no column {missing[0]!r}; did you mean {near!r}? Set it in source")
        if source.path.endswith(".parquet"):
            table = pq.read_table(pa.BufferReader(data), columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{source.path}: neither Parquet nor CSV as its name says ({error})") from error
    if not len(table):
        raise InputError(f"{source.path}: has no rows; name another file")
    for name in columns[:2]:
        _check_present(source, table[name].is_null().to_numpy(), name)
    return table


def _numbers(table: pa.Table, name: str, source: TableSource) -> np.ndarray[Any, np.dtype[np.float64]]:
    column = table[name]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
        raise InputError(f"{source.path}: column {name!r} has values that are no numbers ({column.type}); correct them")
    values = column.cast(pa.float64(), safe=False).to_numpy()
    _check_present(source, ~np.isfinite(values), name)
    return np.ascontiguousarray(values)


def _check_present(source: TableSource, bad: np.ndarray[Any, Any], name: str) -> None:
    if bad.any():
        raise InputError(
            f"{source.path}: row {int(bad.argmax()) + 1}: {name} is missing or not finite; leave the row out"
        )


def _check_items(source: TableSource, codes: np.ndarray[Any, Any], items: pa.Array) -> None:
    """Refuse a query with an item twice."""
    pairs = np.stack([codes, items.dictionary_encode().indices.to_numpy()], axis=1)
    _, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        row = int(first[counts > 1].min())
        raise InputError(
            f"{source.path}: row {row + 1}: its query has item {items[row].as_py()!r} in another row too; keep one"
        )
