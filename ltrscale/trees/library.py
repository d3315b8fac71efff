"""What all tree libraries share: common settings, training targets, and a watch on the validation NDCG.

Targets transform labels, above all a teacher's scores, before training.

Shapes: N documents, Q1 = groups + 1 offsets.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from ltrscale.arrays import HIGHEST_LABEL, Doubles
from ltrscale.batch import standardise_by_group
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature, matching
from ltrscale.devices import choose_device
from ltrscale.errors import InputError, Stopped
from ltrscale.progress import Advance, log, progress
from ltrscale.runtime.workers import WorkerContext
from ltrscale.trees.data import HIGHEST_EXPONENTIAL, BinCodes, Labelled, all_workers


class StandardisedConfig(Config):
    """Deviations from the group's mean in units of its standard deviation: a teacher may shift all scores of a list."""

    kind: Literal["standardised"] = "standardised"

    def from_labels(self, labels_N: Doubles, offsets_Q1: NDArray[np.int64]) -> Doubles:
        """Labels standardised within each group, shape [N]; 0 in a group of equal labels.

        Example:
            >>> StandardisedConfig().from_labels(np.array([1.0, 3.0, 5.0, 5.0]), np.array([0, 2, 4])).tolist()
            [-1.0, 1.0, 0.0, 0.0]
        """
        labels_N = np.ascontiguousarray(labels_N, np.float64)
        return standardise_by_group(torch.from_numpy(labels_N), torch.from_numpy(offsets_Q1)).numpy()


class QuantisedConfig(Config):
    """Grades 0, 1, ..., for objectives that need grades."""

    kind: Literal["quantised"] = "quantised"
    grades: int = Field(31, ge=2, le=10_000)
    """Number of grades; HOU24 cuts pseudo-labels into 31, its public code into 5."""
    bins: Literal["even", "equal_frequency"] = "even"
    """Bins of equal width between the lowest and the highest score (HOU24, A.2.3), or of equally many documents; many
    equal scores lead to fewer grades."""
    standardise: bool = False
    """Standardise scores per group first: a listwise teacher may shift all scores of a list."""

    def from_labels(self, labels_N: Doubles, offsets_Q1: NDArray[np.int64]) -> Doubles:
        """Grades that rise with the labels of all groups, shape [N]; equal labels have equal grades.

        Example:
            >>> labels_N, offsets_Q1 = np.array([0.0, 1.0, 2.0, 10.0]), np.array([0, 4])
            >>> QuantisedConfig(grades=2).from_labels(labels_N, offsets_Q1).tolist()
            [0.0, 0.0, 0.0, 1.0]
            >>> QuantisedConfig(grades=2, bins="equal_frequency").from_labels(labels_N, offsets_Q1).tolist()
            [0.0, 0.0, 1.0, 1.0]
        """
        scores_N = StandardisedConfig().from_labels(labels_N, offsets_Q1) if self.standardise else labels_N
        if not len(scores_N) or scores_N.min() == scores_N.max():  # equal edges would give the highest grade
            return np.zeros_like(scores_N)
        match self.bins:
            case "even":
                edges = np.linspace(scores_N.min(), scores_N.max(), self.grades + 1)[1:-1]
            case "equal_frequency":
                edges = np.quantile(scores_N, np.arange(1, self.grades) / self.grades, method="higher")
        return np.searchsorted(edges, scores_N, side="right").astype(np.float64)


TargetsConfig = Annotated[StandardisedConfig | QuantisedConfig, Field(discriminator="kind")]
Gain = Annotated[float, Field(ge=0)]
Direction = Literal[-1, 1]
"""1: the score never falls as the feature rises, all else equal; -1: it never rises."""
FeatureCost = Annotated[float, Field(ge=0)]
"""The loss that a feature must save to be asked for."""
HIGHEST_LINEAR = 10_000


class TreesConfig(Config, ABC):
    """Settings that all libraries share."""

    sampling: ClassVar[str]
    """The settings that make trees draw at random, for error messages."""
    goes_on: ClassVar[bool] = False
    """Whether its trees can be added to those of a bundle."""
    num_trees: int = Field(500, ge=1, le=1_000_000)
    """Maximum number of trees."""
    learning_rate: float = Field(0.1, gt=0)
    """Weight of each tree."""
    label_gain: Literal["exponential", "linear"] | tuple[Gain, ...] = "exponential"
    """Gain of a document of label 0, 1, 2, ... in a ranking objective: 2^y - 1, y, or a list of gains. Early stopping
    always uses NDCG with gains 2^y - 1, as for all methods."""
    per_query: bool = False
    """Standardise each numeric feature within its query group before trees see it, as `transform.per_query` does for
    networks; missing values stay missing. HOU24's public code does it, so that trees and networks have equal inputs."""
    relevant_only: bool = False
    """Learn only from the labelled groups with a relevant document. Where most have none, as in a log of purchases,
    trees grow much faster. The others have no pairs for LambdaRank, and only fill leaves; `rank_xendcg` draws random
    targets for them, which drown the labels."""
    targets: TargetsConfig | None = None
    """How to transform training labels before trees see them; empty uses them unchanged."""
    early_stopping_rounds: int | None = Field(50, ge=1)
    """Stop after this many trees without a better validation NDCG, and keep those up to the best; empty keeps all."""
    stop_on: int = Field(5, ge=1)
    """Cut-off of that NDCG."""
    minutes: float | None = Field(None, gt=0)
    """Also stop after the tree that ends later than this, and keep trees as above; empty for no limit."""
    seed: int = 0
    """Seed of the library's random draws."""
    deterministic: bool = True
    """The same trees each time with the same number of threads."""
    num_threads: int = Field(0, ge=0, le=4096)
    """0 = one for each core; with several workers, `workers.cpus` each."""

    @property
    @abstractmethod
    def uses_gains(self) -> bool:
        """Whether the objective uses gains, so that every label needs one; otherwise it takes any number."""

    @property
    @abstractmethod
    def is_random(self) -> bool:
        """Whether the seed makes a difference."""

    @property
    def learns_biases(self) -> bool:
        """Whether it learns a bias of positions, and so needs them."""
        return False

    @abstractmethod
    def boost(self, train: Labelled, validation: Labelled | None, codes: BinCodes, watch: "StoppingWatch") -> bytes:
        """Add trees until the watch stops it; returns the trees to keep in the library's own format.

        `train` is this worker's share, with targets as its labels; `validation` and `codes` are of all workers.

        Raises:
            InputError: there is nothing to learn, or the library is not installed.
        """

    def check_workers(self, world: int) -> None:
        """Check that the library is installed and supports this number of workers.

        Raises:
            InputError: it is not installed, or does not support it.
        """
        if self.learns_biases and world > 1:  # each worker would learn biases from its share alone
            raise InputError(f"unbiased trees train in one process, not on {world} workers; set workers to 1")

    def check_device(self) -> torch.device:
        """The device of this process on which trees are grown; the CPU for a library without a choice.

        Raises:
            InputError: the config asks for a GPU, and there is none or the library or a setting cannot use it.
        """
        return CPU

    def numbering(self, values: Doubles) -> Self | None:  # noqa: ARG002
        """The settings for labels that are the numbers of these values; None if a label's gain is its own."""
        return None

    def highest_label(self) -> int | None:
        """The highest label that has a gain; None if the objective takes any number."""
        if not self.uses_gains:
            return None
        match self.label_gain:
            case "exponential":
                return HIGHEST_EXPONENTIAL
            case "linear":
                return HIGHEST_LINEAR
            case table:
                return len(table) - 1

    @property
    def highest_judged(self) -> int:
        """The highest validation label with a gain in the objective or in NDCG, whose gains are 2^y - 1."""
        return max(HIGHEST_EXPONENTIAL, min(self.highest_label() or 0, HIGHEST_LABEL))


CPU = torch.device("cpu")


def own_device(name: str) -> torch.device:
    """The device that a config names, a GPU with its number: without one, libraries take the first GPU.

    Raises:
        InputError: as `choose_device`.
    """
    device = choose_device(name)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def directions(monotone: Mapping[str, Direction], features: Sequence[Feature]) -> list[int]:
    """The direction of each feature, 0 for one that is not bound.

    Raises:
        InputError: a pattern matches no feature or a categorical one, or two patterns contradict each other.

    Example:
        >>> directions({"f_*": 1}, [Feature(name="f_clicks"), Feature(name="price")])
        [1, 0]
    """
    by_feature: dict[str, int] = {}
    for pattern, direction in monotone.items():
        for feature in matching(pattern, features, key="monotone"):
            if feature.kind == "categorical":
                raise InputError(
                    f"monotone: {pattern!r} matches {feature.name!r}, whose codes have no order; narrow it"
                )
            if by_feature.setdefault(feature.name, direction) != direction:
                raise InputError(f"monotone: {feature.name!r} has both directions; let {pattern!r} not match it")
    return [by_feature.get(feature.name, 0) for feature in features]


def penalties(key: str, costs: Mapping[str, FeatureCost], features: Sequence[Feature]) -> list[float]:
    """The cost of each feature, 0 for one that is free; of several patterns that match it, the last one's.

    Raises:
        InputError: a pattern matches no feature.

    Example:
        >>> penalties("cost", {"f_*": 1, "f_late": 5}, [Feature(name="f_late"), Feature(name="f_x"), Feature(name="y")])
        [5.0, 1.0, 0.0]
    """
    by_feature = {
        feature.name: cost for pattern, cost in costs.items() for feature in matching(pattern, features, key=key)
    }
    return [float(by_feature.get(feature.name, 0)) for feature in features]


class StoppingWatch:
    """Records the validation NDCG after each tree, remembers the best, and decides when to stop.

    Without validation groups it counts the trees, and keeps all.

    The NDCG is this package's own, which leaves groups without a relevant document out of the mean; libraries count
    them as 1 or 0.
    """

    def __init__(
        self, config: TreesConfig, validation: Labelled | None, library: str, context: WorkerContext, advance: Advance
    ) -> None:
        self.name = f"validation_ndcg@{config.stop_on}"
        self.trees = self.best = 0
        self.best_value = self.last_value = -math.inf
        self._config, self._validation, self._context, self._advance = config, validation, context, advance
        self._library_metric = f"{self.name}_{library}"
        self._end_s = math.inf if config.minutes is None else time.monotonic() + 60 * config.minutes

    def __call__(self, scores_N: NDArray[np.float64] | None = None, library_value: float | None = None) -> bool:
        """Record one more tree; returns whether there are enough.

        `scores_N` are of the validation documents by all trees so far, `library_value` is the NDCG that the library
        itself computed.

        Raises:
            Stopped: this process was asked to stop.
        """
        if self._context.stopping():
            if self.trees and self._validation is not None and self._context.late():
                return True
            raise Stopped(f"asked to stop after {self.trees} trees, which are not kept; the same command starts anew")
        self.trees += 1
        self._advance(1)
        if self._validation is None or scores_N is None:
            self._context.report({"tree": self.trees})
            return self.trees >= self._config.num_trees or self._is_late()
        # rank 0's value: rounding may differ, and the others would wait for a worker that stopped alone
        self.last_value = all_workers(self._validation.mean_ndcg(scores_N, self._config.stop_on))[0]
        library_values = {} if library_value is None else {self._library_metric: library_value}
        self._context.report({"tree": self.trees, self.name: self.last_value, **library_values})
        if self.last_value > self.best_value:
            self.best, self.best_value = self.trees, self.last_value
        patience = self._config.early_stopping_rounds
        stale = patience is not None and self.trees - self.best >= patience
        return self.trees >= self._config.num_trees or stale or self._is_late()

    def _is_late(self) -> bool:
        # rank 0's clock, as the others would wait for a worker that stopped alone
        late = self._end_s < math.inf and bool(all_workers(float(time.monotonic() >= self._end_s))[0])
        if late:
            log.info("boost: its %g minutes are up after %d trees", self._config.minutes, self.trees)
        return late

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
def watching(
    config: TreesConfig, validation: Labelled | None, library: str, context: WorkerContext
) -> Iterator[StoppingWatch]:
    """Watch while trees are added, with a progress bar."""
    with progress("boost", config.num_trees, "trees") as advance:
        yield StoppingWatch(config, validation, library, context, advance)
