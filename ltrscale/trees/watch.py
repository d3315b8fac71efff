"""Watching the validation NDCG as trees are added, by any library.

Shapes: N documents.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ltrscale.errors import Stopped
from ltrscale.progress import Advance, progress
from ltrscale.runtime.workers import Context
from ltrscale.trees.data import Labelled
from ltrscale.trees.shares import all_workers


class Limits(Protocol):
    """The settings of trees that decide how many of them there are."""

    @property
    def num_trees(self) -> int:
        """Maximum number."""

    @property
    def stop_on(self) -> int:
        """Cut-off of the NDCG."""

    @property
    def early_stopping_rounds(self) -> int | None:
        """Trees without a better NDCG to wait for; None keeps all."""


class StoppingWatch:
    """Records the validation NDCG after each tree, remembers the best, and decides when to stop.

    Without validation groups it counts the trees, and keeps all.

    The NDCG is this package's own, which leaves groups without a relevant document out of the mean; libraries would
    count them as 1 or 0.
    """

    def __init__(
        self, config: Limits, validation: Labelled | None, library: str, context: Context, advance: Advance
    ) -> None:
        self.name = f"validation_ndcg@{config.stop_on}"
        self.trees = self.best = 0
        self.best_value = self.last_value = -math.inf
        self._config, self._validation, self._context, self._advance = config, validation, context, advance
        self._theirs = f"{self.name}_{library}"

    def __call__(self, scores_N: NDArray[np.float64] | None = None, theirs: float | None = None) -> bool:
        """Record one more tree; returns whether there are enough.

        Args:
            scores_N: scores of the validation documents by all trees so far; None without such documents.
            theirs: the library's own NDCG, reported beside ours.

        Raises:
            Stopped: this process was asked to stop.
        """
        if self._context.stopping():
            raise Stopped(f"asked to stop after {self.trees} trees, which are not kept; the same command starts anew")
        self.trees += 1
        self._advance(1)
        if self._validation is None or scores_N is None:
            self._context.report({"tree": self.trees})
            return self.trees >= self._config.num_trees
        # rank 0's value: processors may round differently, and the others would wait for a worker that stopped alone
        self.last_value = all_workers(self._validation.mean_ndcg(scores_N, self._config.stop_on))[0]
        beside = {} if theirs is None else {self._theirs: theirs}
        self._context.report({"tree": self.trees, self.name: self.last_value, **beside})
        if self.last_value > self.best_value:
            self.best, self.best_value = self.trees, self.last_value
        patience = self._config.early_stopping_rounds
        return self.trees >= self._config.num_trees or (patience is not None and self.trees - self.best >= patience)

    @property
    def kept(self) -> int:
        """Number of trees to keep."""
        all_of_them = self._validation is None or self._config.early_stopping_rounds is None
        return self.trees if all_of_them else self.best

    def metrics(self) -> dict[str, float]:
        """Metrics for the bundle."""
        if self._validation is None:
            return {"trees": self.kept}
        return {"trees": self.kept, self.name: self.last_value if self.kept == self.trees else self.best_value}


@contextmanager
def watching(config: Limits, validation: Labelled | None, library: str, context: Context) -> Iterator[StoppingWatch]:
    """Watch while trees are added, with a progress bar."""
    with progress("boost", config.num_trees, "trees") as advance:
        yield StoppingWatch(config, validation, library, context, advance)
