"""Groups with what stands beside features: scores of all documents, or columns that name groups and documents.

Scores take eight bytes a document in memory, and are computed now or were committed by jobs.score.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, M groups of a batch or chosen ones, M1 = M + 1 offsets.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ltrscale.arrays import Ints
from ltrscale.batch import QueryGroups, rows_of, to_offsets
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.scores import SCORES
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.decoder import Decoder
from ltrscale.data.stream.readers import read_direct
from ltrscale.data.stream.windows import Cut, assemble
from ltrscale.errors import InputError
from ltrscale.progress import progress

COLUMNS = ("gid", SCORES)
"""The columns to read for a row group with committed scores."""
_DOCS_PER_BATCH = 1 << 16


@dataclass(frozen=True)
class DocumentScores:
    """Scores [N] of the documents of some groups, float64; call it with some of the groups to get theirs.

    Example:
        >>> known = DocumentScores(torch.tensor([7, 4]), torch.tensor([0, 2, 3]), torch.tensor([0.1, 0.2, 0.3]))
        >>> known(QueryGroups(torch.zeros(1, 5), torch.tensor([0, 1]), ids_Q=torch.tensor([4]))).tolist()
        [0.30000001192092896]
    """

    ids_Q: Tensor
    offsets_Q1: Tensor
    scores_N: Tensor

    @staticmethod
    def joined(parts: Sequence["DocumentScores"]) -> "DocumentScores":
        """The scores of all parts; no two parts may share a group."""
        ids_Q = torch.cat([part.ids_Q for part in parts])
        assert len(torch.unique(ids_Q)) == len(ids_Q), "a group was scored twice"
        lengths_Q = torch.cat([part.offsets_Q1.diff() for part in parts])
        return DocumentScores(ids_Q, to_offsets(lengths_Q), torch.cat([part.scores_N for part in parts]))

    def __call__(self, groups: QueryGroups) -> Tensor:
        """Scores of the documents of groups, which must all be known."""
        scores_N = self.find(groups)
        assert scores_N is not None, "a group was not scored"
        return scores_N

    def find(self, groups: QueryGroups) -> Tensor | None:
        """Scores of the documents of groups; None if a group is not known or has another number of documents."""
        assert groups.ids_Q is not None
        ids_Q, order_Q = self._sorted
        # an id above all known ones has a place past the end; the comparison below finds that it is unknown
        place_M = torch.searchsorted(ids_Q, groups.ids_Q).clamp(max=len(ids_Q) - 1)
        rows_N, offsets_M1 = rows_of(self.offsets_Q1, order_Q[place_M])
        is_known = torch.equal(ids_Q[place_M], groups.ids_Q)
        return self.scores_N[rows_N] if is_known and torch.equal(offsets_M1, groups.offsets_Q1) else None

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        ids_Q, order_Q = self.ids_Q.sort()
        return ids_Q, order_Q


def score_selection(selection: Selection, scorer: Callable[[QueryGroups], Tensor], name: str) -> DocumentScores:
    """Scores of all documents of a selection, in file order.

    Raises:
        InputError: a score is not finite, or the data cannot be read.
    """
    parts: list[DocumentScores] = []
    with progress(f"score with {name}", selection.n_documents) as advance:
        for groups in iterate(selection, docs_per_batch=_DOCS_PER_BATCH):
            assert groups.ids_Q is not None
            parts.append(DocumentScores(groups.ids_Q, groups.offsets_Q1, finite(scorer(groups), name).double()))
            advance(groups.n_documents)
    return DocumentScores.joined(parts)


def finite(scores_N: Tensor, name: str) -> Tensor:
    """Return the scores, which must all be finite.

    Raises:
        InputError: one of them is not finite.
    """
    if not scores_N.isfinite().all():
        raise InputError(f"{name}: gives scores that are not finite; train it again")
    return scores_N


def committed(url: str, split: Split) -> DocumentScores:
    """The scores that jobs.score has committed at a URL of all groups of a split's periods; the split has one data set.

    Raises:
        InputError: a period is not scored there, or was scored from other files than the data set has now.
    """
    scored_split = Split(data=split.data, periods=split.periods, scores=url)
    return scores_from_tables(list(read_direct(select(scored_split, labelled=True).row_groups, COLUMNS)))


def look_up(url: str, scores: DocumentScores) -> Callable[[QueryGroups], Tensor]:
    """A scorer that looks up known scores from the directory `url`."""

    def score(groups: QueryGroups) -> Tensor:
        if (scores_N := scores.find(groups)) is None:
            raise InputError(f"{url}: does not have a score for each document of the test groups; score them again")
        return scores_N

    return score


def scores_from_tables(tables: Sequence[pa.Table]) -> DocumentScores:
    """The scores in tables with the columns `COLUMNS`, as readers return them."""
    lists = [chunk for table in tables for chunk in table.column(SCORES).chunks]
    ids_Q = np.concatenate([table.column("gid").to_numpy() for table in tables])
    lengths_Q = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in lists])
    scores_N = np.concatenate([chunk.flatten().to_numpy() for chunk in lists])
    return DocumentScores(torch.from_numpy(ids_Q), to_offsets(torch.from_numpy(lengths_Q)), torch.from_numpy(scores_N))


_IDS = ("query_id", "doc_ids")


class NamedGroups(NamedTuple):
    """The stored groups of one row group."""

    row_group: RowGroup
    groups: QueryGroups
    ids: pa.Table
    """`query_id`, `doc_ids` if present, and other requested columns: a row for each group."""


def read_named(
    selection: Selection, also: Sequence[str] = (), *, chosen_M: Ints | None = None
) -> Iterator[NamedGroups]:
    """The groups of a selection, a row group at a time in its order, with the columns `also` where a file has them.

    `chosen_M` are the sorted numbers of the groups to read, counted in this order; all if it is left out.
    """
    decoder, first = Decoder(selection), 0
    for row_group, served in zip(selection.row_groups, selection.served_groups_R.tolist(), strict=True):
        wanted_M = np.arange(served)
        if chosen_M is not None:
            wanted_M = chosen_M[slice(*np.searchsorted(chosen_M, [first, first + served]))] - first
        first += served
        if chosen_M is not None and not len(wanted_M):
            continue
        (table,) = read_direct([row_group], list(dict.fromkeys([*decoder.columns, *_IDS, *also])))
        rows_M = decoder.served_rows([row_group], [table])[wanted_M]
        window = decoder.decode([row_group], [table], rows_M)
        groups = assemble([Cut(window, 0, len(rows_M))], len(selection.features))
        names = [name for name in (*_IDS, *also) if name in table.column_names]
        yield NamedGroups(row_group, groups, table.select(names).take(pa.array(rows_M)))
