"""Windows: query groups of some row groups, as views of Arrow's buffers until a micro-batch copies them.

A cursor cuts a canonical stream of windows into micro-batches, from any position.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, R rows (queries or documents), R1 = R + 1 offsets, M taken groups or
rows, T tokens.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from ltrscale.arrays import Doubles, Floats, Ints, offsets, runs
from ltrscale.batch import QueryGroups, Tokens
from ltrscale.data.dataset.columns import GOAL, Owner, TokenField

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Window:
    """Query groups, in file order or in the order in which they are served.

    `features` has for each group a flat view of an Arrow buffer, or a copy of the served features. `columns_N` has the
    labels, those of goals as `label_NAME`, weights, positions and gains if present, NaN where a group has none. `ids_Q`
    is None if groups mix documents of different queries (`regroup`).
    """

    ids_Q: Ints | None
    offsets_Q1: Ints
    features: list[Floats]
    columns_N: dict[str, Floats]
    mean_times_Q: Doubles | None = None
    """The mean number of times that each group is served per epoch, if a column sets it."""
    tokens: Mapping[TokenField, pa.ListArray] = field(default_factory=dict)
    """The lists of tokens of each query or document, copies of the served ones."""

    @property
    def tokens_Q(self) -> Ints:
        """Token counts of each group as pairs: its documents' tokens, and its query's tokens once per document."""
        lengths_Q = np.diff(self.offsets_Q1)
        total_Q = np.zeros(len(lengths_Q), np.int64)
        for key, lists in self.tokens.items():
            lengths_R = pc.list_value_length(lists).to_numpy()
            total_Q += lengths_R * lengths_Q if key.of == "query" else np.diff(offsets(lengths_R)[self.offsets_Q1])
        return total_Q

    def take(self, groups_M: Ints) -> "Window":
        """The groups with these numbers, in this order; a number may repeat."""
        lengths_M = np.diff(self.offsets_Q1)[groups_M]
        rows_N = runs(self.offsets_Q1[groups_M], lengths_M)
        rows_of = {"query": pa.array(groups_M), "document": pa.array(rows_N)}
        return Window(
            None if self.ids_Q is None else self.ids_Q[groups_M],
            offsets(lengths_M),
            [self.features[group] for group in groups_M.tolist()],
            {name: column_N[rows_N] for name, column_N in self.columns_N.items()},
            None if self.mean_times_Q is None else self.mean_times_Q[groups_M],
            {key: lists.take(rows_of[key.of]) for key, lists in self.tokens.items()},
        )

    def copied(self) -> "Window":
        """A copy of the groups that frees Arrow's buffers, which may hold many more."""
        return replace(self, features=[view.copy() for view in self.features])

    @staticmethod
    def joined(windows: Sequence["Window"]) -> "Window":
        """Concatenate the groups of several windows with the same columns."""
        columns_N = {
            name: np.concatenate([window.columns_N[name] for window in windows]) for name in windows[0].columns_N
        }
        return Window(
            _concatenated([window.ids_Q for window in windows]),
            offsets(np.concatenate([np.diff(window.offsets_Q1) for window in windows])),
            list(itertools.chain.from_iterable(window.features for window in windows)),
            columns_N,
            _concatenated([window.mean_times_Q for window in windows]),
            {key: pa.concat_arrays([window.tokens[key] for window in windows]) for key in windows[0].tokens},
        )


def _concatenated(parts: Sequence[NDArray[Scalar] | None]) -> NDArray[Scalar] | None:
    """Concatenate the parts; None if any part is None."""
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if len(present) == len(parts) else None


class Cut(NamedTuple):
    """The groups `first` to `last`, exclusive, of a window."""

    window: Window
    first: int
    last: int


def assemble(cuts: Sequence[Cut], n_features: int) -> QueryGroups:
    """Copy groups out of the Arrow buffers into a micro-batch: the only copy of documents in a stream."""
    lengths_Q = np.concatenate([np.diff(window.offsets_Q1[first : last + 1]) for window, first, last in cuts])
    columns_N = {
        name: torch.from_numpy(
            np.concatenate([w.columns_N[name][w.offsets_Q1[first] : w.offsets_Q1[last]] for w, first, last in cuts])
        )
        for name in cuts[0].window.columns_N
    }
    goals = [column_N for name, column_N in columns_N.items() if name.startswith(GOAL)]
    values = np.concatenate([view for window, first, last in cuts for view in window.features[first:last]])
    ids = [window.ids_Q[first:last] for window, first, last in cuts if window.ids_Q is not None]
    return QueryGroups(
        torch.from_numpy(values).view(int(lengths_Q.sum()), n_features),
        torch.from_numpy(offsets(lengths_Q)),
        columns_N.get("labels"),
        torch.from_numpy(np.concatenate(ids)) if ids else None,
        columns_N.get("weights"),
        columns_N.get("positions"),
        columns_N.get("gains"),
        _tokens(cuts, "query"),
        _tokens(cuts, "document"),
        torch.stack(goals, 1) if goals else None,
    ).checked()


def _tokens(cuts: Sequence[Cut], owner: Owner) -> dict[str, Tokens]:
    """The tokens of the queries or documents of some groups, by field name."""
    bounds = [(a, b) if owner == "query" else window.offsets_Q1[[a, b]] for window, a, b in cuts]
    found = {}
    for key in (key for key in cuts[0].window.tokens if key.of == owner):
        parts = [cut.window.tokens[key].slice(a, b - a) for cut, (a, b) in zip(cuts, bounds, strict=True)]
        lengths_R = np.concatenate([pc.list_value_length(part).to_numpy() for part in parts])
        ids_T = np.concatenate([part.flatten().to_numpy() for part in parts])
        found[key.name] = Tokens(torch.from_numpy(ids_T), torch.from_numpy(offsets(lengths_R)))
    return found


def regroup(window: Window, order_N: Ints, n_features: int) -> Window:
    """Deal the documents of a window to new groups of the same lengths, in the same places.

    Document n of the window goes to place `order_N[n]`. The new groups are not queries, so they have no ids and no
    query tokens. This copies each document, in addition to the copy in `assemble`.
    """
    bounds = list(itertools.pairwise(window.offsets_Q1.tolist()))
    values_NF = np.empty((len(order_N), n_features), np.float32)
    for view, (first, last) in zip(window.features, bounds, strict=True):
        values_NF[order_N[first:last]] = view.reshape(-1, n_features)
    columns_N = {name: np.empty_like(column_N) for name, column_N in window.columns_N.items()}
    for name, column_N in window.columns_N.items():
        columns_N[name][order_N] = column_N
    features = [values_NF[first:last].reshape(-1) for first, last in bounds]
    back_N = pa.array(np.argsort(order_N))
    of_documents = {key: lists.take(back_N) for key, lists in window.tokens.items() if key.of == "document"}
    return replace(window, ids_Q=None, features=features, columns_N=columns_N, tokens=of_documents)


class Position(NamedTuple):
    """A position in a canonical stream: the next group is number `group` of window `window`, in the order served.

    Windows count over all passes of an epoch. In JSON it is a list of two integers; `Position(*values)` restores it.
    """

    window: int = 0
    group: int = 0


class Budget(NamedTuple):
    """The most that a micro-batch may hold."""

    documents: int
    groups: int
    tokens: int


class Cursor:
    """A position in one canonical stream, which `take` advances."""

    def __init__(self, next_window: Callable[[], Window], windows: int, start: Position, n_features: int) -> None:
        self.position = start
        self._next_window, self._windows, self._n_features = next_window, windows, n_features
        self._window: Window | None = None
        self._sizes: list[Ints] = []

    @property
    def ended(self) -> bool:
        """Whether all windows are used up."""
        return self.position.window >= self._windows

    def take(self, budget: Budget) -> QueryGroups | None:
        """The next groups within the budget, at least one; None at the stream's end."""
        cuts: list[Cut] = []
        while min(budget) > 0 and not self.ended:
            if self._window is None:
                self._window = window = self._next_window()
                # cumulative documents, groups and tokens, as in a budget
                self._sizes = [window.offsets_Q1, np.arange(len(window.offsets_Q1)), offsets(window.tokens_Q)]
            number, first = self.position
            groups = len(self._window.offsets_Q1) - 1  # 0 if no group of the window is served
            ends = [
                int(np.searchsorted(size_Q1, size_Q1[first] + limit, side="right")) - 1
                for size_Q1, limit in zip(self._sizes, budget, strict=True)
            ]
            last = min(ends)
            if last == first < groups and not cuts:
                last += 1  # a group above the budget is a micro-batch alone
            if last > first:
                cuts.append(Cut(self._window, first, last))
                used = (int(size_Q1[last] - size_Q1[first]) for size_Q1 in self._sizes)
                budget = Budget(*(limit - count for limit, count in zip(budget, used, strict=True)))
            self.position = Position(number, last)
            if last < groups:
                break
            self.position, self._window = Position(number + 1, 0), None
        return assemble(cuts, self._n_features) if cuts else None
