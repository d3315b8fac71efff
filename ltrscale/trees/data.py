"""Data for growing trees: labels and group sizes in memory, features streamed into a library's bins.

A first pass gathers labels, lengths, the codes of categorical features and a sample of documents for the borders of
bins. A second pass streams the features, some thousand documents at a time. Features that take little memory are read
once and kept; for larger ones no float matrix of all documents is made.

With several workers, each bins its share of the training groups and all validation groups. Libraries exchange
histograms by themselves, and need the addresses of all workers. With one worker, every exchange returns its input.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, M sampled documents, B documents that may be best.
"""

import socket
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.arrays import HIGHEST_LABEL
from ltrscale.batch import QueryGroups, group_index, length_chunks, to_offsets
from ltrscale.bundle.boosters import renumber
from ltrscale.bundle.views import View, raw
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream import plan
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.decoder import Memory, memory_for
from ltrscale.errors import InputError
from ltrscale.late import newest
from ltrscale.layout import Chunk
from ltrscale.models.fitting import Sample, ValueCounts, sampled_documents
from ltrscale.progress import progress
from ltrscale.ranking.metrics import ndcg
from ltrscale.ranking.ranked import SLOTS_PER_CHUNK
from ltrscale.runtime.workers import WorkerContext, rank_and_world

HIGHEST_EXPONENTIAL = 31
"""Highest label; gains 2^y - 1 of higher labels would swamp all others."""
SAMPLE = 200_000
"""Documents from which bins are made; LightGBM's default. Fewer with more than 335 features."""
_DOCS_PER_BATCH = 1 << 13
_NUMBERED = 10_000
"""Document numbers reserved for each group."""
_MEMORY_GB = 0.25
"""Largest size of the features that are kept in memory."""


class BinCodes(NamedTuple):
    """What the first pass found for the bins: codes of categorical columns, and a sample of documents."""

    vocabularies: Mapping[int, ValueCounts]
    sample: Sample

    def merge(self, other: "BinCodes") -> None:
        """Add the findings from other documents."""
        for column, vocabulary in self.vocabularies.items():
            vocabulary.merge(other.vocabularies[column])
        self.sample.merge(other.sample)

    def known(self) -> dict[int, NDArray[np.float32]]:
        """The codes of each categorical column, ascending; trees see a code's index in this list."""
        codes_by_column = {column: vocabulary.codes() for column, vocabulary in self.vocabularies.items()}
        return {column: codes for column, codes in codes_by_column.items() if codes is not None}


@dataclass(frozen=True)
class Labelled:
    """The labelled groups of a split without their features, which `rows` streams as trees see them.

    `weights_N` is 1 for a document without a weight, and None if the whole split has no weights. `positions_N` is NaN
    for a document without a position, and None if the whole split has none. `start_N` are the scores to which trees are
    added, None for 0. `kept` has the features in chunks; None if they are too large, and every pass reads them.
    """

    split: str
    selection: Selection
    labels_N: NDArray[np.float64]
    offsets_Q1: NDArray[np.int64]
    ids_Q: NDArray[np.int64]
    weights_N: NDArray[np.float64] | None
    positions_N: NDArray[np.float32] | None
    view: View
    kept: Sequence[NDArray[np.float32]] | None = None
    start_N: NDArray[np.float64] | None = None

    @property
    def lengths_Q(self) -> NDArray[np.int64]:
        """Documents of each group."""
        return np.diff(self.offsets_Q1)

    def rows(self, vocabularies: Mapping[int, NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
        """All documents in the order of the labels, some thousand at a time, with categorical codes renumbered."""
        batches = iterate(self.selection, docs_per_batch=_DOCS_PER_BATCH, memory=_memory(self.selection))
        for features_NF in map(self.view.columns, batches) if self.kept is None else self.kept:
            yield renumber(features_NF, vocabularies)

    def group_of(self, row: int) -> int:
        """Id of a document's group."""
        return int(self.ids_Q[np.searchsorted(self.offsets_Q1, row, side="right") - 1])

    def mean_ndcg(self, scores_N: NDArray[np.float64], k: int) -> float:
        """Mean NDCG@k over the groups that define it.

        It runs after every tree, so only the k best documents of each group by score (with ties) and by label are
        ranked. No other document reaches the first k ranks of either order.
        """
        scores, labels_N, offsets_Q1 = map(torch.from_numpy, (scores_N, self.labels_N, self.offsets_Q1))
        if k not in self._best_labels:
            earlier_N = torch.linspace(0.5, 0, len(labels_N))  # breaks ties: any k of equal labels will do
            self._best_labels[k] = _among_best(labels_N + earlier_N, offsets_Q1, self._chunks, k)
        best_N = _among_best(scores, offsets_Q1, self._chunks, k) | self._best_labels[k]
        best_B = best_N.nonzero().squeeze(1)
        offsets_of_best_Q1 = torch.searchsorted(best_B, offsets_Q1)
        return float(ndcg(scores[best_B], labels_N[best_B], offsets_of_best_Q1, k=k).nanmean())

    @cached_property
    def _chunks(self) -> list[Chunk]:
        return list(length_chunks(torch.from_numpy(self.offsets_Q1), budget=SLOTS_PER_CHUNK, quadratic=False))

    @cached_property
    def _best_labels(self) -> dict[int, Tensor]:
        """For each k, True for the k best documents of each group by label, shape [N]."""
        return {}


def _among_best(values_N: Tensor, offsets_Q1: Tensor, chunks: Sequence[Chunk], k: int) -> Tensor:
    """True for documents that fewer than k of their group exceed, shape [N]; for all if a value is NaN."""
    kth_Q = values_N.new_full((len(offsets_Q1) - 1,), -torch.inf)
    for groups_M, rows_ML, mask_ML in chunks:
        if rows_ML.shape[1] > k:
            values_ML = values_N[rows_ML].masked_fill_(~mask_ML, -torch.inf)
            kth_Q[groups_M] = values_ML.topk(k, sorted=False).values.amin(1)
    return ~(values_N < kth_Q.repeat_interleave(offsets_Q1.diff()))


def read_labelled(
    selection: Selection, split: str, view: View | None = None, *, keep: bool = True
) -> tuple[Labelled, BinCodes]:
    """The first pass over the labelled groups of a split; with `keep` the only one, if the features take little memory.

    If the selection serves all groups, labels are NaN, which the caller replaces.

    Raises:
        InputError: the data cannot be read.
    """
    view = view or raw(selection.features)
    categorical = [column for column, feature in enumerate(view.features) if feature.kind == "categorical"]
    size = sampled_documents(SAMPLE, len(view.features))
    codes = BinCodes({column: ValueCounts() for column in categorical}, Sample(size, selection.n_documents))
    parts: list[QueryGroups] = []
    fits = 4e-9 * selection.n_documents * len(view.features) <= _MEMORY_GB
    kept: list[NDArray[np.float32]] | None = [] if keep and fits else None
    with progress(f"read {split}", selection.n_documents) as advance:
        for groups in iterate(selection, docs_per_batch=_DOCS_PER_BATCH, memory=_memory(selection)):
            features_NF = view.columns(groups)
            if kept is not None:
                kept.append(features_NF)
            for column, vocabulary in codes.vocabularies.items():
                vocabulary.add(features_NF[:, column])
            codes.sample.add(_document_numbers(groups), features_NF)
            no_features_N0 = groups.features_NF.new_empty(groups.n_documents, 0)  # a slice would keep them alive
            parts.append(replace(groups, features_NF=no_features_N0))
            advance(groups.n_documents)
    return replace(_joined_groups(split, selection, parts, view), kept=kept), codes


_memories: dict[Hashable, Memory | None] = {}
"""What this process read last, because a search grows trees on the same groups repeatedly."""


def _memory(selection: Selection) -> Memory | None:
    """A cache if reading is dominated by groups outside the selection; otherwise None."""
    if 4 * selection.n_documents >= selection.row_groups.documents_R.sum():
        return None
    key = (selection.hash, selection.n_groups, selection.features, selection.tokens)
    return newest(_memories, key, lambda: memory_for(selection, _MEMORY_GB))


def _joined_groups(split: str, selection: Selection, parts: list[QueryGroups], view: View) -> Labelled:
    n_documents = sum(part.n_documents for part in parts)
    labels_N, weights_N, positions_N = (_field_of(parts, name) for name in ("labels_N", "weights_N", "positions_N"))
    return Labelled(
        split,
        selection,
        np.full(n_documents, np.nan) if labels_N is None else labels_N.double().numpy(),
        to_offsets(torch.cat([part.lengths_Q for part in parts])).numpy(),
        torch.cat([part.ids_Q for part in parts if part.ids_Q is not None]).numpy(),
        None if weights_N is None else weights_N.nan_to_num(1.0).double().numpy(),
        None if positions_N is None else positions_N.numpy(),
        view,
    )


def _field_of(parts: list[QueryGroups], name: str) -> Tensor | None:
    """A field of all parts, NaN for the documents of parts without it; None if no part has it."""
    values = [getattr(part, name) for part in parts]
    if all(values_N is None for values_N in values):
        return None
    absent = (torch.full((part.n_documents,), torch.nan) for part in parts)
    return torch.cat([nan_N if values_N is None else values_N for values_N, nan_N in zip(values, absent, strict=True)])


def _document_numbers(groups: QueryGroups) -> NDArray[np.int64]:
    """A unique number for each document, from its group's id and its index there, however data is cut."""
    assert groups.ids_Q is not None
    group_N = group_index(groups.offsets_Q1)
    place_N = torch.arange(groups.n_documents) - groups.offsets_Q1[group_N]
    near_N = groups.ids_Q[group_N] * _NUMBERED + place_N % _NUMBERED
    return (near_N + (place_N // _NUMBERED << 48)).numpy()  # longer groups, which are few, count far above all others


def check_labels(groups: Labelled, highest: int | None) -> None:
    """Check that every label is an integer from 0 to `highest`, and so has a gain; None allows any number.

    Raises:
        InputError: a label has no gain; the message names the group, the label and the remedy.
    """
    if highest is not None and (misfit := _first_misfit(groups, highest)):
        raise InputError(
            f"{misfit}, and gains are for integers from 0 to {highest}; map the labels to grades in prepare, give "
            "gbdt.label_gain a gain for each label, or set gbdt.targets.kind=quantised"
        )


def check_positions(groups: Labelled) -> None:
    """Check that every document has a whole number as its position, which no other of its group has.

    Raises:
        InputError: a position is missing, fractional or repeated; the message names the group and the remedy.
    """
    if groups.positions_N is None:
        raise InputError(f"{groups.split}: unbiased trees need positions; map the column in prepare, or unset unbiased")
    positions_N = groups.positions_N
    for row in np.flatnonzero(~(positions_N == positions_N.round()))[:1]:  # NaN equals nothing
        raise InputError(
            f"{groups.split}: group {groups.group_of(row)} has position {positions_N[row]:g}, and unbiased trees need "
            "a whole number for every document; prepare the documents that were shown only, or unset unbiased"
        )
    group_N = np.repeat(np.arange(len(groups.ids_Q)), groups.lengths_Q)
    order_N = np.lexsort((positions_N, group_N))
    same_N = (np.diff(group_N) == 0) & (np.diff(positions_N[order_N]) == 0)
    for row in order_N[np.flatnonzero(same_N)][:1]:
        raise InputError(
            f"{groups.split}: group {groups.group_of(row)} has position {positions_N[row]:g} twice; give each document "
            "its own position, or unset unbiased"
        )


def read_judged(selection: Selection, view: View, highest: int) -> Labelled:
    """The validation groups with a relevant document; `only_relevant` has already narrowed the selection to them.

    The highest label is that of `TreesConfig.highest_judged`.

    Raises:
        InputError: as `read_labelled`; no group has a relevant document, or a label is not a grade.
    """
    validation, _ = read_labelled(selection, "validation", view, keep=False)  # it lives until the last tree
    if misfit := _first_misfit(validation, highest, whole=not selection.reads_sum):
        raise InputError(
            f"{misfit}, and NDCG is of integers from 0 to {highest} (gbdt.label_gain: linear goes on to "
            f"{HIGHEST_LABEL}); leave scores out of the validation split, or map its labels to grades in prepare"
        )
    if not validation.labels_N.any():
        raise InputError(
            f"{validation.split}: none of its labelled groups has a relevant document, so NDCG is undefined; "
            "choose other validation periods"
        )
    return validation


def _first_misfit(groups: Labelled, highest: int, *, whole: bool = True) -> str | None:
    """Describes the first document whose label is not from 0 to the highest, or not `whole`; None if there is none."""
    labels_N = groups.labels_N
    odd_N = (labels_N != labels_N.round()) & whole
    rows = np.flatnonzero(odd_N | (labels_N < 0) | (labels_N > highest))
    if not len(rows):
        return None
    row = int(rows[0])
    return f"{groups.split}: group {groups.group_of(row)} has label {labels_N[row]:g}"


T = TypeVar("T")
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): no packet is sent, but connecting reveals the outgoing interface."""


def all_workers(value: T) -> list[T]:
    """The values of all workers, by rank."""
    of_workers = [value] * rank_and_world()[1]
    if dist.is_initialized():
        dist.all_gather_object(of_workers, value)
    return of_workers


def deal(selection: Selection, *, rank: int, world: int) -> Selection:
    """The row groups of one worker, in file order: each row group belongs to one worker, and documents are balanced.

    Shares differ by at most the documents of the largest row group.

    Raises:
        InputError: there are fewer row groups than workers.
    """
    if len(selection.row_groups) < world:
        raise InputError(
            f"train has {len(selection.row_groups)} row groups for {world} workers, which share whole ones; lower "
            f"workers to {len(selection.row_groups)}, or take more periods"
        )
    documents = np.maximum(1, selection.served_documents_R)
    dealt = plan.canonical_streams(documents, seed=0, epoch=0, key=selection.hash, streams=world, shuffle=False)
    return selection.only(selection.row_groups.take(dealt[rank]))


def merged_codes(codes: BinCodes) -> BinCodes:
    """The codes and samples of all workers merged, so that bins are those of one process."""
    first, *other_codes = all_workers(codes)
    for codes_of_worker in other_codes:
        first.merge(codes_of_worker)
    return first


def together(context: WorkerContext) -> WorkerContext:
    """A context that stops all workers before the same tree, so that none waits for another."""
    if not dist.is_initialized():
        return context

    def stopping() -> bool:
        flag = torch.tensor([int(context.stopping())])
        dist.all_reduce(flag)
        return bool(flag)

    return replace(context, stopping=stopping)


def own_address() -> str:
    """The address at which the other workers reach this one."""
    if len(set(all_workers(socket.gethostname()))) == 1:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        return str(probe.getsockname()[0])


def meeting_points() -> list[tuple[str, int]]:
    """An address and a free port of each worker, by rank; listen at once, because the ports are not reserved."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
        return all_workers((own_address(), port))  # while the port is bound, so that no neighbour gets the same port
