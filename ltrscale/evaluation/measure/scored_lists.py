"""Scored and labelled lists to reconcile: a table of any program, or a split with a bundle or with committed scores.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ltrscale import storage
from ltrscale.arrays import Bools, Doubles
from ltrscale.batch import group_index, to_offsets
from ltrscale.bundle import Scorer, load, with_tokens_of
from ltrscale.config import Config
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.scored import committed, finite, look_up
from ltrscale.errors import InputError, nearest
from ltrscale.ranking.libraries import under
from ltrscale.ranking.metric import Metric, Rules
from ltrscale.stages.inputs import BundleUrl, hashes_of


@dataclass(frozen=True)
class ScoredLists:
    """Scored and labelled groups, with the names of queries and the order of the items' names."""

    queries: Sequence[str]
    offsets_Q1: Tensor
    scores_N: Tensor
    labels_N: Tensor
    names_N: Tensor
    """Integers in the order of the items' names."""
    retrieved_N: Tensor | None = None
    """Which documents have a score; None for all."""

    @classmethod
    def from_selection(cls, test: Selection, score: Scorer, url: str) -> Self:
        """The groups of a selection with the scores of the bundle or directory `url`."""
        parts = list(iterate(test, docs_per_batch=65_536))
        scores_N = torch.cat([finite(score(part), url).double() for part in parts])
        lengths_Q = torch.cat([part.lengths_Q for part in parts])
        labels_N = torch.cat([part.labels_N for part in parts if part.labels_N is not None])
        gids = [str(gid) for part in parts if part.ids_Q is not None for gid in part.ids_Q.tolist()]
        return cls(gids, to_offsets(lengths_Q), scores_N, labels_N.double(), torch.arange(len(scores_N)))

    def under(self, rules: Rules, metric: Metric) -> Tensor:
        """A metric of each group under these rules."""
        lists = self.scores_N, self.labels_N, self.offsets_Q1, self.names_N
        return under(rules, metric, *lists, retrieved_N=self.retrieved_N)

    def tied(self) -> int:
        """Groups with documents of equal scores and different labels."""
        order_N, groups_N = torch.arange(len(self.scores_N)), group_index(self.offsets_Q1)
        for key_N in (self.labels_N, self.scores_N, groups_N):
            order_N = order_N[key_N[order_N].argsort(stable=True)]
        scores_N, labels_N, group_N = (v[order_N] for v in (self.scores_N, self.labels_N, groups_N))
        pairs = (scores_N[1:] == scores_N[:-1]) & (group_N[1:] == group_N[:-1]) & (labels_N[1:] != labels_N[:-1])
        return len(set(group_N[1:][pairs].tolist()))


class TableSource(Config):
    """A table with a row for each document, in Parquet or CSV; the rows of a query need not be adjacent."""

    kind: Literal["table"] = "table"
    path: str
    """File or URL: Parquet if the name ends in .parquet, otherwise CSV with a header, which may be packed (.gz)."""
    query: str = "query"
    """Column of the query: the rows with the same value are one group."""
    item: str = "item"
    """Column of the item's name, by which trec_eval breaks ties; unique within a query."""
    label: str = "label"
    """Column of the label, 0 or more."""
    score: str = "score"
    """Column of the score; empty for a document that was not retrieved. It still counts in the ideal and in the number
    of relevant documents, as in trec_eval."""

    def inputs(self) -> dict[str, str]:
        """The fingerprint of the table."""
        return {self.path: storage.fingerprint(self.path)}

    def lists(self) -> ScoredLists:
        """The lists of the table: groups in the order of their first rows, documents in the order of the rows.

        Raises:
            InputError: a column is missing, a value other than a score is missing or not a number, no row has a score,
            a label is negative, or a query has an item twice; the message names the row, from 1 after the header.
        """
        table = self._table()
        queries, items = (table[name].cast(pa.string()).combine_chunks() for name in (self.query, self.item))
        labels, scores = self._numbers(table, self.label), self._numbers(table, self.score)
        self._check_known(~np.isfinite(labels), self.label)
        self._check_known(np.isinf(scores), self.score)
        if (retrieved := ~np.isnan(scores)).sum() == 0:
            raise InputError(f"{self.path}: no row has a {self.score}, so that nothing is ranked; name another column")
        if (negative := np.flatnonzero(labels < 0)).size:
            raise InputError(f"{self.path}: row {negative[0] + 1}: {self.label} is below 0; labels are 0 or more")
        coded = queries.dictionary_encode()  # codes are in the order of the first rows
        codes = coded.indices.to_numpy()
        pairs = np.stack([codes, items.dictionary_encode().indices.to_numpy()], axis=1)
        _, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
        if (counts > 1).any():
            row = int(first[counts > 1].min())
            raise InputError(
                f"{self.path}: row {row + 1}: its query has item {items[row].as_py()!r} in another row too; keep one"
            )
        names = np.empty(len(items), np.int64)
        names[np.asarray(pc.sort_indices(items.cast(pa.binary())))] = np.arange(len(items))  # as strcmp orders UTF-8
        order = np.argsort(codes, kind="stable")
        return ScoredLists(
            coded.dictionary.to_pylist(),
            to_offsets(torch.from_numpy(np.bincount(codes, minlength=len(coded.dictionary)))),
            *(torch.from_numpy(values[order]) for values in (scores, labels, names, retrieved)),
        )

    def _table(self) -> pa.Table:
        columns, data = [self.query, self.item, self.label, self.score], pa.BufferReader(storage.read_bytes(self.path))
        try:
            if self.path.endswith(".parquet"):
                file = pq.ParquetFile(data)
                names = file.schema_arrow.names
                table = file.read([name for name in columns if name in names])
            else:
                stream: Any = pa.input_stream(data, compression="gzip" if self.path.endswith(".gz") else None)
                # names as text: a query 007 is not 7
                texts = pyarrow.csv.ConvertOptions(column_types={self.query: pa.string(), self.item: pa.string()})
                table = pyarrow.csv.read_csv(stream, convert_options=texts)
                names = table.column_names
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self.path}: neither Parquet nor CSV as its name says ({error})") from error
        if missing := [name for name in columns if name not in names]:
            suggestion = nearest(missing[0], names)
            raise InputError(f"{self.path}: no column {missing[0]!r}; did you mean {suggestion!r}? Set it in source")
        if repeated := [name for name in columns if names.count(name) > 1]:
            raise InputError(f"{self.path}: several columns are called {repeated[0]!r}; keep one")
        if not len(table):
            raise InputError(f"{self.path}: has no rows; name another file")
        for name in columns[:2]:
            self._check_known(table[name].is_null().to_numpy(), name)
        return table

    def _numbers(self, table: pa.Table, name: str) -> Doubles:
        column = table[name]
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
            raise InputError(
                f"{self.path}: column {name!r} has values that are no numbers ({column.type}); correct them"
            )
        return np.ascontiguousarray(column.cast(pa.float64(), safe=False).to_numpy())

    def _check_known(self, bad: Bools, name: str) -> None:
        if bad.any():
            row = int(bad.argmax()) + 1
            raise InputError(f"{self.path}: row {row}: {name} is missing or not finite; leave the row out")


class BundleSource(Config):
    """The labelled groups of a split, scored by a bundle."""

    kind: Literal["bundle"] = "bundle"
    bundle: BundleUrl
    """The bundle."""
    split: Split
    """Its labelled groups are scored. Items are named by their place, because data sets are read without item names."""

    def inputs(self) -> dict[str, str]:
        """Content of the data set and the bundle."""
        return hashes_of(self)

    def lists(self) -> ScoredLists:
        """The groups with the scores of the bundle; InputError if it does not fit, or a score is not finite."""
        bundle = load(self.bundle)
        test = with_tokens_of(select(self.split, labelled=True), [bundle])
        return ScoredLists.from_selection(test, bundle.scorer(features=test.features), self.bundle)


class ScoresSource(Config):
    """The labelled groups of a split, with committed scores."""

    kind: Literal["scores"] = "scores"
    scores: str
    """Directory of scores that jobs.score made on the split's data set."""
    split: Split
    """Its labelled groups are read. Items are named by their place, because data sets are read without item names."""

    def inputs(self) -> dict[str, str]:
        """Content of the data set and the scores."""
        return hashes_of(self, self.split.with_scores(self.scores))

    def lists(self) -> ScoredLists:
        """The groups with their scores; InputError if a group has none."""
        score = look_up(self.scores, committed(self.scores, self.split))
        return ScoredLists.from_selection(select(self.split, labelled=True), score, self.scores)
