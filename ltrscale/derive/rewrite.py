"""Derives one data set from another: whole query groups stream from one directory to another, with changes.

Groups come period by period in file order, in blocks of about 16 thousand documents. The limits of a block and the
changes to it depend only on the sequence of the groups, not on files and row groups.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, M taken groups, K taken documents.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.arrays import Bools, Floats, Ints, offsets
from ltrscale.data.columns import float_column, is_per_document, spread_over_documents
from ltrscale.data.dataset.columns import (
    TokenSummary,
    from_columns,
    is_of_documents,
    laid_out,
    lengths_of,
    put_vocabulary,
    summarise,
    summed,
    to_columns,
)
from ltrscale.data.dataset.manifest import Accounting, Dataset, Manifest, stored_places
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.dataset.summaries import FeatureStats, LabelCounts
from ltrscale.data.dataset.writer import Compression, DatasetWriter, commit_dataset, per_document, to_lists
from ltrscale.data.stream.readers import PREPARE_AGAIN, column_names, read_direct
from ltrscale.errors import InputError

_BLOCK_DOCUMENTS = 1 << 14


@dataclass(frozen=True, eq=False)  # comparing arrays by == would raise
class GroupBlock:
    """Consecutive query groups of one period; none is empty.

    `keys_Q` are unique numbers of the groups in the data set, initially their gids. `columns_N` holds the columns with
    one number per document, with NaN for documents without a value and for groups without the list. `rows_Q` has the
    columns with one value per group: `query_id`, `meta_*` and the tokens of queries. `tokens_N` has the token fields of
    documents by their column, a list of tokens for each.
    """

    period: str
    keys_Q: Ints
    offsets_Q1: Ints
    features_NF: Floats
    columns_N: Mapping[str, Floats]
    rows_Q: pa.Table
    doc_ids_N: pa.Array | None
    tokens_N: Mapping[str, pa.ListArray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys_Q)

    @property
    def n_documents(self) -> int:
        """Documents of all groups."""
        return int(self.offsets_Q1[-1])

    @property
    def lengths_Q(self) -> Ints:
        """Documents of each group."""
        return np.diff(self.offsets_Q1)

    @property
    def group_N(self) -> Ints:
        """The group of each document."""
        return np.repeat(np.arange(len(self)), self.lengths_Q)

    @property
    def index_N(self) -> Ints:
        """The place of each document in its group, from 0."""
        return np.arange(self.n_documents) - np.repeat(self.offsets_Q1[:-1], self.lengths_Q)

    def present_Q(self, name: str) -> Bools:
        """True for groups with a value of a column in any of their documents."""
        if name not in self.columns_N:
            return np.zeros(len(self), dtype=bool)
        return np.logical_or.reduceat(~np.isnan(self.columns_N[name]), self.offsets_Q1[:-1])

    def on_documents(self, values_Q: NDArray[Any]) -> NDArray[Any]:
        """Each group's value at each of its documents."""
        return np.repeat(values_Q, self.lengths_Q)

    def with_columns(self, **columns_N: Floats) -> "GroupBlock":
        """The same groups with these columns added or replaced."""
        return replace(self, columns_N={**self.columns_N, **columns_N})

    def take(self, groups_M: Ints, documents_K: Ints, lengths_M: Ints) -> "GroupBlock":
        """Select groups by number and their documents by number; documents may come from other groups."""
        return replace(
            self,
            keys_Q=self.keys_Q[groups_M],
            offsets_Q1=offsets(lengths_M),
            features_NF=self.features_NF[documents_K],
            columns_N={name: column_N[documents_K] for name, column_N in self.columns_N.items()},
            rows_Q=self.rows_Q.take(pa.array(groups_M)),
            doc_ids_N=None if self.doc_ids_N is None else self.doc_ids_N.take(pa.array(documents_K)),
            tokens_N={name: lists.take(pa.array(documents_K)) for name, lists in self.tokens_N.items()},
        )

    def keep(self, keep_Q: Bools) -> "GroupBlock":
        """Keep some of the groups, with all their documents."""
        documents_K = np.flatnonzero(self.on_documents(keep_Q))
        return self.take(np.flatnonzero(keep_Q), documents_K, self.lengths_Q[keep_Q])


def periods_of(dataset: Dataset, periods: Sequence[str]) -> frozenset[str]:
    """The periods of a data set that names and ranges select, as in a split; all periods if no name is given."""
    split = Split(data=(dataset.url,), periods=tuple(periods) or None)
    return frozenset(file.period for file in select(split, labelled=False).row_groups.own_files)


def read_groups(dataset: Dataset, *, periods: Collection[str]) -> Iterator[GroupBlock]:
    """The groups of some periods in blocks, period by period in sorted order.

    A block has 16,384 documents plus the rest of its last group. The last block of a period may have up to twice as
    many, and only a shorter period has a block with fewer.

    Raises:
        InputError: a file is missing or damaged, or differs from its manifest.
    """
    features, columns = dataset.manifest.features, ["gid", *columns_in(dataset)]
    by_period = select(Split(data=(dataset.url,)), labelled=False).row_groups.by_period()
    for period in sorted(by_period.keys() & periods):
        plan = by_period[period]
        stored = dataset.manifest.stored.get(period, features)
        places_F = stored_places(features, stored)
        for table, lengths_Q in _recut(counted_tables(plan, columns, len(stored))):
            block = group_block(table, lengths_Q, len(stored), plan[0])
            yield replace(block, features_NF=laid_out(block.features_NF, places_F))


def columns_in(dataset: Dataset) -> list[str]:
    """The columns of a data set's first file, except gid."""
    names = column_names(storage.listed_file(dataset.url, dataset.manifest.files[0].path))
    return [name for name in names if name != "gid"]


_Counted = tuple[pa.Table, Ints]
"""A table and the number of documents in each row."""


def counted_tables(row_groups: Sequence[RowGroup], columns: Sequence[str], n_features: int) -> Iterator[_Counted]:
    """The tables of row groups; checks their number of documents."""
    for row_group, table in zip(row_groups, read_direct(row_groups, columns), strict=True):
        lengths_Q = np.asarray(pc.list_value_length(table.column("features")), dtype=np.int64) // n_features
        if lengths_Q.sum() != row_group.documents:
            documents = f"{lengths_Q.sum()} documents where the manifest lists {row_group.documents}"
            raise InputError(f"{row_group.file.url}: row group {row_group.index} has {documents}; {PREPARE_AGAIN}")
        yield table, lengths_Q


def _recut(tables: Iterable[_Counted]) -> Iterator[_Counted]:
    """Cut the same rows into new tables, each ending with the row that fills it; the last table is never short."""
    waiting: list[_Counted] = []
    for table, lengths_Q in tables:
        waiting.append((table, lengths_Q))
        # Cut only when there are two blocks of documents, so that the last block is not short.
        while sum(int(lengths_Q.sum()) for _, lengths_Q in waiting) >= 2 * _BLOCK_DOCUMENTS:
            whole, all_Q = _joined(waiting)
            stop = int(np.searchsorted(np.cumsum(all_Q), _BLOCK_DOCUMENTS)) + 1
            yield whole.slice(0, stop), all_Q[:stop]
            waiting = [(whole.slice(stop), all_Q[stop:])]
    remaining, remaining_Q = _joined(waiting)
    if len(remaining):
        yield remaining, remaining_Q


def _joined(parts: Sequence[_Counted]) -> _Counted:
    return pa.concat_tables([table for table, _ in parts]), np.concatenate([lengths_Q for _, lengths_Q in parts])


def group_block(table: pa.Table, lengths_Q: Ints, n_features: int, first: RowGroup) -> GroupBlock:
    """The rows of a table as a block; `first` is the first row group of their period, for messages."""
    documents = per_document(table.schema.names)
    kept = [*documents, *({"doc_ids"} & {*table.schema.names})]
    lists = {name: table.column(name).combine_chunks() for name in kept}
    for name, column in lists.items():
        if not is_per_document(column, lengths_Q):
            where = f"in the files of period {first.file.period}"
            raise InputError(
                f"{first.file.url}: column {name!r} {where} does not have one value a document; {PREPARE_AGAIN}"
            )
    doc_ids = lists.pop("doc_ids", None)
    texts = [name for name in table.schema.names if is_of_documents(name)]
    mapped = {"gid", "features", "doc_ids", *documents, *texts, *map(lengths_of, texts)}
    unmapped = [name for name in table.schema.names if name not in mapped]
    return GroupBlock(
        period=first.file.period,
        keys_Q=table.column("gid").to_numpy(),
        offsets_Q1=offsets(lengths_Q),
        features_NF=table.column("features").combine_chunks().flatten().to_numpy().reshape(-1, n_features),
        columns_N={name: float_column(spread_over_documents(column, lengths_Q)) for name, column in lists.items()},
        rows_Q=table.select(unmapped),
        doc_ids_N=None if doc_ids is None else spread_over_documents(doc_ids, lengths_Q),
        tokens_N={name: _tokens(table, name, int(lengths_Q.sum()), first) for name in texts},
    )


def _tokens(table: pa.Table, name: str, documents: int, first: RowGroup) -> pa.ListArray:
    """The tokens of each document of a table's rows."""
    try:
        lists = from_columns(table.column(name).combine_chunks(), table.column(lengths_of(name)).combine_chunks())
        if len(lists) != documents:
            raise ValueError("it does not have one list of tokens for each document")
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{first.file.url}: column {name!r} of period {first.file.period}: {error}; {PREPARE_AGAIN}"
        ) from error
    return lists


class GroupSummaries:
    """What a manifest says of all groups, counted as they pass; what was cut off their texts is that of the source."""

    def __init__(self, source: Manifest) -> None:
        self._stats, self._labels = FeatureStats(len(source.features)), LabelCounts()
        self._tokens = {
            column: TokenSummary(cut_lists=summary.cut_lists, cut_tokens=summary.cut_tokens)
            for column, summary in source.token_summaries.items()
        }

    def add(self, block: GroupBlock, features_NF: Floats, table: pa.Table) -> None:
        """Count a block, of which `table` has the rows, with all features of the data set."""
        self._stats.add(features_NF, block.offsets_Q1)
        self._labels.add(block.columns_N["labels"])
        self._tokens = summed([self._tokens, summarise(table)])

    def fields(self) -> dict[str, Any]:
        """The fields of a manifest."""
        return {
            "summaries": self._stats.summaries(),
            "label_counts": self._labels.counts(),
            "grouped": self._stats.grouped,
            "token_summaries": self._tokens,
        }


class GroupWriter:
    """Writes blocks of groups as a data set directory with the vocabulary, features and statistics of another.

    All blocks must have the same columns. The gids are the keys of the groups or, with `renumber`, count the groups in
    order of arrival. A list is null if a group has no value of the column. `statistics` replace those of the other data
    set.
    """

    def __init__(
        self, commit: storage.Commit, source: Dataset, *, statistics: storage.Placed | None = None, renumber: bool
    ) -> None:
        self._commit = commit
        self._source = source
        self._renumber = renumber
        self._statistics = statistics
        self._summaries, self._groups = GroupSummaries(source.manifest), 0
        compression: Compression = "lz4_bytes" if source.manifest.version == 2 else "zstd"
        self._writer = DatasetWriter(commit, n_features=len(source.manifest.features), compression=compression)

    def add(self, block: GroupBlock) -> None:
        """Add a block of groups."""
        gids_Q = np.arange(self._groups, self._groups + len(block)) if self._renumber else block.keys_Q
        self._groups += len(block)
        table = group_table(block, gids_Q)
        self._summaries.add(block, block.features_NF, table)
        self._writer.add(block.period, table)

    def finish(self, accounting: Accounting, origin: Mapping[str, Any]) -> Manifest:
        """Write the remaining groups and commit."""
        source, vocabulary, statistics = self._source.manifest, self._source.manifest.vocabulary, self._statistics
        if vocabulary is not None and vocabulary.path is not None:
            vocabulary = put_vocabulary(vocabulary, self._content(vocabulary.path), self._commit)
        if statistics is None and source.statistics is not None:
            self._commit.write({"statistics-{hash}.safetensors": self._content(source.statistics.path)})
            statistics = self._commit.files[-1]
        manifest = Manifest(
            version=source.version,
            features=source.features,
            files=self._writer.close(),
            goals=source.goals,
            tokens=source.tokens,
            vocabulary=vocabulary,
            statistics=statistics,
            accounting=accounting,
            categories=source.categories,
            made_by=dict(origin),
            **self._summaries.fields(),
        )
        return commit_dataset(self._commit, manifest)

    def _content(self, path: str) -> bytes:
        """The content of a file of the other data set."""
        return storage.read_bytes(storage.listed_file(self._source.url, path))


def group_table(block: GroupBlock, gids_Q: Ints) -> pa.Table:
    """A block as rows of a data set directory."""
    n_features = block.features_NF.shape[1]
    every_Q = np.ones(len(block), dtype=bool)
    columns = {"gid": pa.array(gids_Q), "query_id": block.rows_Q.column("query_id")}
    if block.doc_ids_N is not None:
        valid_N = block.doc_ids_N.is_valid().to_numpy(zero_copy_only=False)
        named_Q = np.logical_or.reduceat(valid_N, block.offsets_Q1[:-1])
        columns["doc_ids"] = to_lists(block.doc_ids_N, block.lengths_Q, named_Q)
    columns["features"] = to_lists(pa.array(block.features_NF.ravel()), block.lengths_Q * n_features, every_Q)
    for name in per_document(block.columns_N.keys()):
        columns[name] = to_lists(pa.array(block.columns_N[name]), block.lengths_Q, block.present_Q(name))
    for name, tokens_N in block.tokens_N.items():
        columns |= to_columns(name, tokens_N, block.offsets_Q1)
    other_names = [name for name in block.rows_Q.schema.names if name != "query_id"]
    return pa.table(columns | {name: block.rows_Q.column(name) for name in other_names})
