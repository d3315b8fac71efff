"""What every library that grows trees has: settings that all share, and the methods of each."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ltrscale.arrays import Doubles
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature, matching
from ltrscale.errors import InputError
from ltrscale.trees.data import BinCodes, Labelled
from ltrscale.trees.targets import TargetsConfig
from ltrscale.trees.watch import StoppingWatch

Gain = Annotated[float, Field(ge=0)]
Direction = Literal[-1, 1]
"""1: the score never falls as the feature rises, all else equal; -1: it never rises."""
HIGHEST_EXPONENTIAL = 31
"""Highest label; gains 2^y - 1 of higher labels would swamp all others."""
HIGHEST_LINEAR = 10_000


class TreesConfig(Config, ABC):
    """Settings that all libraries share."""

    sampling: ClassVar[str]
    """The settings that make trees draw at random, for errors."""
    goes_on: ClassVar[bool] = False
    """Whether its trees can be added to those of a bundle."""
    num_trees: int = Field(500, ge=1)
    """Maximum number of trees."""
    learning_rate: float = Field(0.1, gt=0)
    """Weight of each tree."""
    label_gain: Literal["exponential", "linear"] | tuple[Gain, ...] = "exponential"
    """Gain of a document of label 0, 1, 2, ... in a ranking objective: 2^y - 1, y, or a list of gains."""
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
    seed: int = 0
    """Seed of the library's random draws."""
    deterministic: bool = True
    """The same trees each time with the same number of threads."""
    num_threads: int = Field(0, ge=0)
    """0 = one for each core; with several workers, `workers.cpus` each."""

    @property
    @abstractmethod
    def uses_gains(self) -> bool:
        """Whether the objective is of gains, which labels must have; otherwise it takes any number."""

    @property
    @abstractmethod
    def is_random(self) -> bool:
        """Whether the seed makes a difference."""

    @property
    def learns_biases(self) -> bool:
        """Whether it learns how positions attract clicks, and so needs them."""
        return False

    @abstractmethod
    def boost(
        self, train: Labelled, targets_N: Doubles, validation: Labelled | None, codes: BinCodes, watch: StoppingWatch
    ) -> bytes:
        """Add trees until the watch ends it; returns the trees to keep in the library's own format.

        Args:
            train: this worker's training groups.
            targets_N: transformed labels of its documents.
            validation: all validation groups, the same on every worker; None for none.
            codes: codes and sample of all workers' training groups.
            watch: receives the validation scores after each tree.

        Raises:
            InputError: there is nothing to learn, or the library is not installed.
        """

    def check_workers(self, world: int) -> None:
        """Check that the library is installed and supports this number of workers.

        Raises:
            InputError: it is not, or does not.
        """
        if self.learns_biases and world > 1:  # each worker would learn biases from its share alone
            raise InputError(f"unbiased trees train in one process, not on {world} workers; set workers to 1")

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


def directions(monotone: Mapping[str, Direction], features: Sequence[Feature]) -> list[int]:
    """The direction of each feature, 0 for one that is not bound.

    Raises:
        InputError: a pattern matches no feature or a categorical one, or two patterns contradict each other.

    Example:
        >>> directions({"f_*": 1}, [Feature(name="f_clicks"), Feature(name="price")])
        [1, 0]
    """
    found: dict[str, int] = {}
    for pattern, direction in monotone.items():
        for feature in matching(pattern, features, key="monotone"):
            if feature.kind == "categorical":
                raise InputError(
                    f"monotone: {pattern!r} matches {feature.name!r}, whose codes have no order; narrow it"
                )
            if found.setdefault(feature.name, direction) != direction:
                raise InputError(f"monotone: {feature.name!r} has both directions; let {pattern!r} not match it")
    return [found.get(feature.name, 0) for feature in features]
