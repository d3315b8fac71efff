"""QueryGroups: the one batch type, ragged and without padding, and functions that cut and pad ragged rows.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, L the longest list, M selected groups or rows, R rows
that have a list of tokens each, T tokens. The documents of group q are rows `offsets_Q1[q]` to `offsets_Q1[q + 1]`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ltrscale.layout import UNKNOWN, Chunks, layout, register, registered_offsets
from ltrscale.lengths import Frame


def group_index(offsets_Q1: Tensor, documents: int | None = None) -> Tensor:
    """The group of each document, shape [N].

    Args:
        offsets_Q1: offsets of the groups.
        documents: N, if known; a single group then needs no values of the offsets, which an exported graph lacks.

    Example:
        >>> group_index(torch.tensor([0, 2, 2, 5])).tolist()
        [0, 0, 2, 2, 2]
    """
    if documents is not None and len(offsets_Q1) == 2:
        return offsets_Q1.new_zeros(documents)
    group_N: Tensor = layout(offsets_Q1).get("group_index")
    return group_N


def real_documents(offsets_Q1: Tensor) -> Tensor | None:
    """Where a document is no padding of a `QueryGroups.padded` batch, shape [N]; None if there is no padding."""
    real_N: Tensor | None = layout(offsets_Q1).get("real") if layout(offsets_Q1).frame else None
    return real_N


def joined(offsets_Q1: Tensor, documents: int | None = None) -> Tensor:
    """Offsets of runs of neighbouring groups.

    Args:
        offsets_Q1: offsets of the groups.
        documents: about the size of a run: the documents are cut into equal shares of at most so many, each of which
            ends with the group at its border. None joins all groups.

    Example:
        >>> joined(torch.tensor([0, 2, 5, 7, 9])).tolist(), joined(torch.tensor([0, 2, 5, 7, 9]), 5).tolist()
        ([0, 9], [0, 5, 9])
    """
    offsets: Tensor = layout(offsets_Q1).get("joined", documents)
    return offsets


def repeated(offsets_Q1: Tensor, times: int) -> Tensor:
    """Offsets of this many copies of the groups, one copy after the other; of one, the same tensor.

    Example:
        >>> repeated(torch.tensor([0, 2, 5]), 2).tolist()
        [0, 2, 5, 7, 10]
    """
    offsets: Tensor = offsets_Q1 if times == 1 else layout(offsets_Q1).get("repeated", times)
    return offsets


def longer(offsets_Q1: Tensor) -> Tensor:
    """Offsets of the same groups with one row more each.

    Example:
        >>> longer(torch.tensor([0, 2, 2, 5])).tolist()
        [0, 3, 4, 8]
    """
    if len(offsets_Q1) == 2:  # an exported graph does not know the length of a single group
        return offsets_Q1 + torch.arange(2, device=offsets_Q1.device)
    offsets: Tensor = layout(offsets_Q1).get("longer")
    return offsets


def to_offsets(lengths_Q: Tensor) -> Tensor:
    """Offsets of groups that have these lengths, shape [Q + 1].

    Example:
        >>> to_offsets(torch.tensor([2, 0, 3])).tolist()
        [0, 2, 2, 5]
    """
    return torch.cat([lengths_Q.new_zeros(1), lengths_Q.cumsum(0)])


def rows_of(offsets_Q1: Tensor, groups_M: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of these groups' documents, one group after the other, and the groups' offsets in that order.

    Example:
        >>> [part.tolist() for part in rows_of(torch.tensor([0, 2, 3, 6]), torch.tensor([2, 0]))]
        [[3, 4, 5, 0, 1], [0, 3, 5]]
    """
    offsets_M1 = to_offsets(offsets_Q1.diff()[groups_M])
    shift_M = offsets_Q1[groups_M] - offsets_M1[:-1]
    rows = torch.arange(int(offsets_M1[-1]), device=offsets_Q1.device)
    return rows + shift_M.repeat_interleave(offsets_M1.diff()), offsets_M1


def sum_by_group(values_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Sum of each group's values, shape [Q]; an empty group gives 0."""
    sums_Q = values_N.new_zeros(len(offsets_Q1) - 1)
    return sums_Q.index_add(0, group_index(offsets_Q1), values_N)


def standardise_by_group(values_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Values minus their group's mean, divided by their group's deviation, shape [N]; 0 in a group of equal values.

    Args:
        values_N: float64, so that a real difference stands out from rounding errors.
        offsets_Q1: offsets of the groups.

    Example:
        >>> values_N = torch.tensor([1.0, 3.0, 5.0, 5.0], dtype=torch.float64)
        >>> standardise_by_group(values_N, torch.tensor([0, 2, 4])).tolist()
        [-1.0, 1.0, 0.0, 0.0]
    """
    groups_N, lengths_Q = group_index(offsets_Q1), offsets_Q1.diff().clamp(min=1)
    centred_N = values_N - (sum_by_group(values_N, offsets_Q1) / lengths_Q)[groups_N]
    deviation_N = (sum_by_group(centred_N.square(), offsets_Q1) / lengths_Q).sqrt()[groups_N]
    spread_N = deviation_N > 1e-12 * values_N.abs().clamp(min=1)  # a smaller deviation is a rounding error
    return torch.where(spread_N, centred_N / deviation_N, 0.0)


def standardise_groups(x_NF: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Scale each feature to mean 0 and deviation 1 over the documents of a group: `(x - mean_group) / deviation_group`.

    The deviation is that of the group as a population (divided by its length). A feature that is constant in a group,
    as all are in a group of one document, becomes 0. Constant means that float32 can barely distinguish the values (a
    deviation of at most a millionth of the mean). A missing value (NaN) stays missing and does not count. The result
    of a group does not depend on other groups.

    Args:
        x_NF: values [N, F], not infinite.
        offsets_Q1: offsets of the groups.

    Example:
        >>> x_NF = torch.tensor([[1.0, 7.0], [3.0, 7.0], [50.0, 7.0]])
        >>> standardise_groups(x_NF, torch.tensor([0, 2, 3])).tolist()
        [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    """
    group_N, counts_QF = group_index(offsets_Q1, x_NF.shape[0]), offsets_Q1.diff().clamp(min=1)[:, None]
    # float64 holds the squares of the largest float32 values, and its rounding errors stay far below the threshold for
    # constants. Operations are in place, because allocating memory would cost as much as the arithmetic.
    y_NF = x_NF.to(torch.float64, copy=True)
    zeros_QF = y_NF.new_zeros(len(counts_QF), y_NF.shape[1])
    missing_NF = y_NF.isnan()
    # an exported graph cannot skip steps, and a GPU would make the host wait for the answer
    skips = x_NF.device.type == "cpu" and not torch.compiler.is_exporting()
    if some_missing := not skips or bool(missing_NF.any()):
        y_NF.masked_fill_(missing_NF, 0.0)
        counts_QF = (counts_QF - zeros_QF.index_add(0, group_N, missing_NF.double())).clamp(min=1)
    mean_QF = zeros_QF.index_add(0, group_N, y_NF) / counts_QF
    # the gradient needs these values, so they must not be overwritten
    mean_NF, differentiable = mean_QF.index_select(0, group_N), y_NF.requires_grad
    y_NF = y_NF - mean_NF if differentiable else y_NF.sub_(mean_NF)
    if some_missing:
        y_NF.masked_fill_(missing_NF, 0.0)
    variance_QF = zeros_QF.index_add(0, group_N, y_NF.square()) / counts_QF
    if differentiable:  # the square root has no gradient at 0
        variance_QF = variance_QF.clamp(min=torch.finfo(torch.float64).tiny)
    std_QF = variance_QF.sqrt()
    std_QF = torch.where(std_QF > 1e-6 * mean_QF.abs(), std_QF, torch.inf)
    std_NF = std_QF.index_select(0, group_N)
    y_NF = y_NF / std_NF if differentiable else y_NF.div_(std_NF)
    return (y_NF.masked_fill_(missing_NF, torch.nan) if some_missing else y_NF).to(x_NF.dtype)


def at_least_float32(values: Tensor) -> Tensor:
    """The values, in float32 if they have half precision, else unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def length_chunks(offsets_Q1: Tensor, *, budget: int, quadratic: bool = True) -> Chunks:
    """Cut groups, sorted by length, into chunks whose padded size stays within a budget.

    Padding every group to the longest list of the batch costs ten slots per document at the list lengths of web search;
    here a group is padded to the longest list of its chunk, which is hardly longer. On a GPU, where each chunk launches
    kernels, there are few chunks, chosen for the least padding.

    Args:
        offsets_Q1: offsets of the groups; empty groups appear in no chunk.
        budget: entries that a chunk may have on a CPU: M * L * L (`quadratic`, for pairwise work) or M * L; on other
            devices `block_entries` bounds them. A group beyond the budget becomes its own chunk.
        quadratic: how entries are counted.

    Example:
        >>> offsets = torch.tensor([0, 1, 4, 4, 6])
        >>> [chunk.groups_M.tolist() for chunk in length_chunks(offsets, budget=8)]
        [[0, 3], [1]]
    """
    chunks: Chunks = layout(offsets_Q1).get("chunks", budget, quadratic)
    return chunks


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token lists of R rows (queries or documents), end to end and without padding.

    Args:
        ids_T: int32 numbers of the tokens in their vocabulary.
        offsets_R1: int64; row r has the tokens `ids_T[offsets_R1[r]:offsets_R1[r + 1]]`, which may be empty.

    Example:
        >>> titles = Tokens(torch.tensor([7, 8, 9], dtype=torch.int32), torch.tensor([0, 2, 2, 3]))
        >>> titles.n_rows, titles.select(torch.tensor([2, 0])).ids_T.tolist()
        (3, [9, 7, 8])
    """

    ids_T: Tensor
    offsets_R1: Tensor

    @property
    def n_rows(self) -> int:
        """Number of rows, R."""
        return len(self.offsets_R1) - 1

    @property
    def lengths_R(self) -> Tensor:
        """Tokens of each row."""
        return self.offsets_R1.diff()

    def select(self, rows_M: Tensor) -> "Tokens":
        """The lists of these rows, in this order; a row may repeat."""
        tokens, offsets_M1 = rows_of(self.offsets_R1, rows_M)
        return Tokens(self.ids_T[tokens], offsets_M1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Tokens":
        """The same lists with both tensors replaced by the function's result for them."""
        return Tokens(function(self.ids_T), function(self.offsets_R1))

    @staticmethod
    def concat(parts: Sequence["Tokens"]) -> "Tokens":
        """The rows of all parts; there is at least one part."""
        return Tokens(
            torch.cat([part.ids_T for part in parts]), to_offsets(torch.cat([part.lengths_R for part in parts]))
        )


@dataclass(frozen=True, slots=True)
class QueryGroups:
    """Query groups in ragged form: documents one after the other, separated into groups by offsets.

    The constructor checks nothing: call `checked` on arrays from files or users.

    Args:
        features_NF: float features; NaN is a missing value.
        offsets_Q1: int64, from 0 to N, never falling.
        labels_N: relevance, or None for groups without labels; a batch never mixes the two.
        ids_Q: int64 group ids.
        weights_N: document weights.
        positions_N: positions at which documents were shown.
        gains_N: what documents are worth, for metrics; no objective reads it.
        query_tokens: token lists of the groups' queries by the name of their field, Q rows each.
        document_tokens: token lists of the documents by the name of their field, N rows each.
        goals_NG: labels of several goals, where each has a head.

    Example:
        >>> groups = QueryGroups(torch.zeros(3, 4), torch.tensor([0, 1, 3]), torch.tensor([1.0, 0.0, 2.0]))
        >>> groups.n_groups, groups.n_documents, groups.select(torch.tensor([1])).labels_N.tolist()
        (2, 3, [0.0, 2.0])
    """

    features_NF: Tensor
    offsets_Q1: Tensor
    labels_N: Tensor | None = None
    ids_Q: Tensor | None = None
    weights_N: Tensor | None = None
    positions_N: Tensor | None = None
    gains_N: Tensor | None = None
    query_tokens: Mapping[str, Tokens] = field(default_factory=dict)
    document_tokens: Mapping[str, Tokens] = field(default_factory=dict)
    goals_NG: Tensor | None = None

    @property
    def n_documents(self) -> int:
        """Number of documents, N."""
        return len(self.features_NF)

    @property
    def n_groups(self) -> int:
        """Number of groups, Q."""
        return len(self.offsets_Q1) - 1

    @property
    def n_features(self) -> int:
        """Number of features, F."""
        return self.features_NF.shape[1]

    @property
    def lengths_Q(self) -> Tensor:
        """Documents of each group."""
        return self.offsets_Q1.diff()

    @property
    def shown_N(self) -> Tensor:
        """The position of each document, NaN without one; all NaN if the data have no positions."""
        none_N = self.features_NF.new_full((self.n_documents,), torch.nan)
        return none_N if self.positions_N is None else self.positions_N

    def checked(self) -> "QueryGroups":
        """These groups, after a check that shapes, types and offsets fit together.

        Call it on arrays from files or users; the constructor would make a GPU wait at every copy of a batch.

        Raises:
            ValueError: they do not fit together.

        Example:
            >>> QueryGroups(torch.zeros(3, 4), torch.tensor([0, 2])).checked()
            Traceback (most recent call last):
            ValueError: offsets must rise from 0 to the number of documents, 3
        """
        n, q = self.n_documents, self.n_groups
        if self.features_NF.ndim != 2 or not self.features_NF.is_floating_point():
            raise ValueError(f"features must be floats of shape [N, F], not {tuple(self.features_NF.shape)}")
        if self.offsets_Q1.ndim != 1 or q < 0 or self.offsets_Q1.dtype != torch.int64:
            raise ValueError("offsets must be int64 of shape [Q + 1], so at least one number")
        if self.offsets_Q1[0] != 0 or self.offsets_Q1[-1] != n or bool((self.offsets_Q1.diff() < 0).any()):
            raise ValueError(f"offsets must rise from 0 to the number of documents, {n}")
        for name in ("labels_N", "ids_Q", "weights_N", "positions_N", "gains_N"):
            value, size = getattr(self, name), q if name == "ids_Q" else n
            if value is not None and value.shape != (size,):
                raise ValueError(f"{name} must have shape [{size}], not {list(value.shape)}")
        if self.goals_NG is not None and (self.goals_NG.ndim != 2 or len(self.goals_NG) != n):
            raise ValueError(f"goals_NG must have shape [{n}, G], not {list(self.goals_NG.shape)}")
        for tokens, rows in ((self.query_tokens, q), (self.document_tokens, n)):
            for name, value in tokens.items():
                ends = value.offsets_R1[[0, -1]].tolist()
                if value.n_rows != rows or ends != [0, len(value.ids_T)] or bool((value.lengths_R < 0).any()):
                    raise ValueError(f"the tokens {name} must be the lists of {rows} rows, end to end")
        return self

    def map(self, function: Callable[[Tensor], Tensor]) -> "QueryGroups":
        """The same groups with every tensor replaced by the function's result for it."""

        def mapped(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: tokens.map(function) for name, tokens in value.items()}
            return None if value is None else function(value)

        return QueryGroups(*(mapped(getattr(self, each.name)) for each in fields(self)))

    def tensors(self) -> list[Tensor]:
        """All tensors of the fields that are not None."""
        values = [getattr(self, each.name) for each in fields(self)]
        tokens = [part for value in values if isinstance(value, Mapping) for part in value.values()]
        of_tokens = [tensor for part in tokens for tensor in (part.ids_T, part.offsets_R1)]
        return [value for value in values if isinstance(value, Tensor)] + of_tokens

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "QueryGroups":
        """The groups moved to a device, with their list layout registered."""
        moved = self.map(lambda values: values.to(device, non_blocking=non_blocking))
        self._register(moved)
        if moved.positions_N is not None and moved.offsets_Q1 is not self.offsets_Q1:
            layout(moved.offsets_Q1).unplaced = self.first_unplaced()
        return moved

    def pinned(self) -> "QueryGroups":
        """The groups in memory from which a copy to a GPU does not wait."""
        pinned = self.map(Tensor.pin_memory)
        self._register(pinned)
        return pinned

    def _register(self, moved: "QueryGroups") -> None:
        for here, there in zip(self.offsets(), moved.offsets(), strict=True):
            if there is not here:
                register(there, layout(here).offsets_Q1, layout(here).frame)

    def padded(self, frame: Frame) -> "QueryGroups | None":
        """The features and groups in the shapes of a frame; None if they do not fit, or are too few documents.

        Groups on the CPU are followed by empty ones and by a group of documents of zeros, which is padding.

        Example:
            >>> groups = QueryGroups(torch.ones(3, 1), torch.tensor([0, 1, 3])).padded(Frame(5, ((3, 2),)))
            >>> groups.offsets_Q1.tolist(), real_documents(groups.offsets_Q1).tolist()
            ([0, 1, 3, 3, 5], [True, True, True, False, False])
        """
        n, known = self.n_documents, layout(self.offsets_Q1)
        fits = frame.least <= n <= frame.documents and self.n_groups < frame.groups
        if not fits or frame.dealt(known.lengths_Q) is None:
            return None
        features_NF = self.features_NF.new_zeros(frame.documents, self.n_features)
        features_NF[:n] = self.features_NF
        values_Q1 = np.append(np.full(frame.groups, n), frame.documents)
        values_Q1[: len(known.offsets_Q1)] = known.offsets_Q1
        return QueryGroups(features_NF, registered_offsets(values_Q1, torch.device("cpu"), frame))

    def first_unplaced(self) -> int | None:
        """The number of the first group without any position; None if every group has one.

        Groups that `to` moved to a GPU know it, so nothing waits.
        """
        assert self.positions_N is not None
        known = layout(self.offsets_Q1).unplaced
        if not self.offsets_Q1.is_cpu and known != UNKNOWN:
            return known
        placed_Q = sum_by_group((~self.positions_N.isnan()).long(), self.offsets_Q1)
        unplaced = ((placed_Q == 0) & (self.lengths_Q > 0)).nonzero()[:, 0]
        return int(unplaced[0]) if len(unplaced) else None

    def offsets(self) -> list[Tensor]:
        """The offsets of the groups, and of each field's token lists."""
        return [
            self.offsets_Q1,
            *(tokens.offsets_R1 for tokens in [*self.query_tokens.values(), *self.document_tokens.values()]),
        ]

    def select(self, groups_M: Tensor) -> "QueryGroups":
        """The groups with these numbers, in this order; a number may repeat."""
        return self.of_rows(*rows_of(self.offsets_Q1, groups_M), groups_M)

    def of_rows(self, rows_N: Tensor, offsets_M1: Tensor, groups_M: Tensor) -> "QueryGroups":
        """New groups of these documents, with the queries of these groups."""

        def taken(name: str) -> Any:
            value, index = getattr(self, name), groups_M if name in _OF_GROUPS else rows_N
            if isinstance(value, Mapping):
                return {key: tokens.select(index) for key, tokens in value.items()}
            return None if value is None else value[index]

        return QueryGroups(offsets_Q1=offsets_M1, **{name: taken(name) for name in _BESIDE_OFFSETS})

    @staticmethod
    def concat(parts: Sequence["QueryGroups"]) -> "QueryGroups":
        """One batch of all the groups of the parts.

        Raises:
            ValueError: there is no part, or some parts have a field (labels, ids, ...) that others lack.
        """
        if not parts:
            raise ValueError("concat needs at least one batch")

        def joined(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            if isinstance(values[0], Mapping):
                if any(value.keys() != values[0].keys() for value in values):
                    raise ValueError(f"{name}: the batches have different fields")
                return {key: Tokens.concat([value[key] for value in values]) for key in values[0]}
            if len({value is None for value in values}) > 1:
                raise ValueError(f"{name}: some batches have it and some do not")
            return None if values[0] is None else torch.cat(values)

        offsets_Q1 = to_offsets(torch.cat([part.lengths_Q for part in parts]))
        return QueryGroups(offsets_Q1=offsets_Q1, **{name: joined(name) for name in _BESIDE_OFFSETS})


_OF_GROUPS = ("ids_Q", "query_tokens")
"""The fields with a value or list a group."""
_BESIDE_OFFSETS = tuple(each.name for each in fields(QueryGroups) if each.name != "offsets_Q1")
"""These, and the fields with a value or list a document."""
