"""Cut a canonical stream into micro-batches, from any position.

Shapes: Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ltrscale.arrays import Ints, offsets
from ltrscale.batch import QueryGroups
from ltrscale.data.stream.windows import Cut, Window, assemble


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
