"""A bundle that is open: what all kinds have. The classes of the kinds are in other files of this package.

Shapes: N documents, Q groups, P pairs, F features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.bundle.contents import PROJECTION, BundleFacts, BundleKind, Held, TreesArchitecture
from ltrscale.data.dataset.manifest import Feature, places
from ltrscale.errors import InputError
from ltrscale.models.contributions import Contributions, by_swaps
from ltrscale.models.layers import EncoderSettings, ModuleT
from ltrscale.models.ranker import AnyRanker, Architecture

Scorer = Callable[[QueryGroups], Tensor]
"""Scores [N] of the documents of a batch, higher is better."""
Explainer = Callable[[QueryGroups, Tensor], Contributions]
"""What each feature adds to the score difference of pairs [P, 2] of rows of a batch; each pair is within one list."""


ENCODER = "a bundle with an encoder to start from, which jobs.pretrain or jobs.finetune makes"
RANKER = "the bundle of one network that scores, which jobs.finetune makes"


@contextmanager
def fitting(where: str) -> Iterator[None]:
    """Turn the errors of a bundle with inconsistent files into one line."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        # a RuntimeError may be the RecursionError of deep JSON
        raise InputError(f"{where}: the bundle's files do not fit each other ({error}); train it again") from error


def loaded(make: Callable[[], ModuleT], weights: Mapping[str, Tensor]) -> ModuleT:
    """The module that `make` builds, with these weights.

    Raises:
        ValueError: it has other weights.
    """
    with torch.device("meta"):  # first without memory: a damaged architecture could ask for any amount
        outline = make().state_dict()
    if {name: value.shape for name, value in outline.items()} != {n: v.shape for n, v in weights.items()}:
        raise ValueError("the architecture has other weights")
    module = make()
    module.load_state_dict(weights)
    return module


class _SharedScores:
    """A cache of the newest batch's scores, for rankers that are in several bundles."""

    def __init__(self) -> None:
        self._scorers: dict[str, Scorer] = {}
        self._newest: tuple[Tensor | None, dict[str, Tensor]] = None, {}

    def scorer(self, ranker: str, make: Callable[[], Scorer]) -> Scorer:
        """The scorer of a ranker, made once and run once per batch; the offsets identify a batch."""
        if ranker not in self._scorers:
            self._scorers[ranker] = self._once(ranker, make())
        return self._scorers[ranker]

    def _once(self, ranker: str, score: Scorer) -> Scorer:
        def scored(groups: QueryGroups) -> Tensor:
            if self._newest[0] is not groups.offsets_Q1:
                self._newest = groups.offsets_Q1, {}
            scores = self._newest[1]
            if ranker not in scores:
                scores[ranker] = score(groups)
            return scores[ranker]

        return scored


class Computing(NamedTuple):
    """How scorers compute."""

    device: torch.device | str = "cpu"
    """Device of networks."""
    threads: int = 0
    """Threads of a tree model; 0 takes all cores."""
    shared: _SharedScores | None = None
    """Scores that scorers of the same batches share; None if each computes alone."""


@dataclass(frozen=True, kw_only=True)
class Bundle(BundleFacts, ABC):
    """A bundle, opened and checked against its hashes by `load`; each kind has a subclass."""

    kind: ClassVar[BundleKind]
    holds: ClassVar[str]
    """What it holds, for error messages."""
    wanted: ClassVar[str] = "a bundle"
    """What to name where a bundle of this class is needed, for error messages."""
    url: str
    content_hash: str
    """Hash of the names and content hashes of its files; the same inside another bundle."""
    held: Held
    contents: Mapping[str, bytes]
    """Bytes of the files of weights or trees, by name."""
    members: Mapping[str, "Bundle"]
    """The bundles inside it, by name."""

    @property
    def parts(self) -> tuple[Architecture, ...]:
        """The architecture of each of its networks; none without networks."""
        return ()

    @property
    def forest(self) -> TreesArchitecture | None:
        """How its trees are put together; None without trees."""
        return None

    @property
    def blended(self) -> Mapping[str, float]:
        """Weight of each member's score in a blend; empty for other bundles."""
        return {}

    @property
    def goals(self) -> Mapping[str, float]:
        """Weight of each goal's head in the score of a network; empty for other bundles."""
        return {}

    @property
    def reads_positions(self) -> bool:
        """Whether it or a member needs the positions of documents, also for scoring."""
        return any(member.reads_positions for member in self.members.values())

    @property
    def encoders(self) -> tuple[EncoderSettings, ...]:
        """The encoders of its networks, members' included."""
        return tuple(encoder for member in self.members.values() for encoder in member.encoders)

    @property
    def reads_tokens(self) -> bool:
        """Whether it needs the tokens of queries and documents."""
        return any(any(encoder.reads_tokens) for encoder in self.encoders)

    @property
    def content(self) -> bytes:
        """Bytes of the weights or trees of a bundle that has one such file."""
        (content,) = (content for name, content in self.contents.items() if name != PROJECTION)
        return content

    def count(self, metric: str) -> int | None:
        """A count among the metrics, such as `labelled_groups`, if it is stated."""
        count = self.metrics.get(metric)
        return count if isinstance(count, int) else None

    def needed(self, wanted: str) -> InputError:
        """The error of a bundle of this kind where another one is needed."""
        return InputError(f"{self.url}: holds {self.holds}; name {wanted}")

    def ranker(self) -> AnyRanker:
        """The network that scores, in inference mode.

        Raises:
            InputError: the bundle holds no network that scores, or its weights do not fit its architecture.
        """
        raise self.needed(RANKER)

    def embedder(self) -> Scorer:
        """The function from a batch of its features to embeddings [N, D]: of its encoder, or before the last layer.

        Raises:
            InputError: the bundle holds trees or several rankers, or its weights do not fit its architecture.
        """
        raise self.needed(ENCODER)

    def scorer(
        self,
        *,
        features: Sequence[Feature] | None = None,
        device: torch.device | str = "cpu",
        threads: int = 0,
    ) -> Scorer:
        """The function that scores a batch; it returns scores on the CPU.

        Args:
            features: of the batches, matched to the bundle's by name; None if they are the bundle's, in its order.
            device: device of a network.
            threads: of a tree model; 0 takes all cores.

        Raises:
            InputError: as `places`; the bundle holds an encoder without a head, or CatBoost's trees while CatBoost is
                not installed.
        """
        return self.scorer_by(Computing(device, threads), features)

    def scorer_by(self, computing: Computing, features: Sequence[Feature] | None) -> Scorer:
        """The function that scores a batch of these features; None if they are the bundle's, in its order."""
        columns = None if features is None else places(self.features, features, whose=self.url, on_purpose=True)
        shared = computing.shared
        score = shared.scorer(self.content_hash, lambda: self.scoring(computing)) if shared else self.scoring(computing)
        if columns is None:
            return score
        return lambda groups: score(replace(groups, features_NF=groups.features_NF[:, columns]))

    @abstractmethod
    def scoring(self, computing: Computing) -> Scorer:
        """The function that scores a batch whose features are the bundle's, in its order."""

    def explainer(self, computing: Computing, features: Sequence[Feature]) -> Explainer:
        """The function that explains differences of scores in a batch of these features, which are found by name.

        Raises:
            InputError: as `scorer`.
        """
        columns = places(self.features, features, whose=self.url, on_purpose=True)
        explain = self.explaining(computing)
        if columns is None:
            return explain

        def explained(groups: QueryGroups, pairs_P2: Tensor) -> Contributions:
            own_PF, beside_P = explain(replace(groups, features_NF=groups.features_NF[:, columns]), pairs_P2)
            whole_PF = own_PF.new_zeros(len(own_PF), groups.n_features)
            whole_PF[:, columns] = own_PF
            return Contributions(whole_PF, beside_P)

        return explained

    def explaining(self, computing: Computing) -> Explainer:
        """The function that explains differences of scores in a batch whose features are the bundle's, in its order.

        By default from scores alone, which every bundle has; see `by_swaps`.
        """
        return partial(by_swaps, self.scoring(computing))

    def importances(self) -> dict[str, float] | None:
        """The importance of each column that its trees see, the highest first; None without trees.

        Raises:
            InputError: as `boosters.importances`.
        """
        return None

    def leans_on(self) -> Mapping[str, float | None]:
        """The features that it leans on, with their importance to plain trees.

        A network, or trees that see components or other rankers' scores, lean on every feature that they read.
        """
        return dict.fromkeys(feature.name for feature in self.features)

    def member_scorers(self, computing: Computing) -> dict[str, Scorer]:
        """The functions with which its members score a batch of its own features."""
        return {name: member.scorer_by(computing, self.features) for name, member in self.members.items()}


def scorers_of(
    bundles: Mapping[str, Bundle], *, features: Sequence[Feature], device: torch.device | str = "cpu", threads: int = 0
) -> dict[str, Scorer]:
    """The scorers of several bundles for the same batches, by name; a ranker that several hold scores a batch once.

    Raises:
        InputError: as `Bundle.scorer`.
    """
    computing = Computing(device, threads, _SharedScores())
    return {name: bundle.scorer_by(computing, features) for name, bundle in bundles.items()}
