"""A bundle that is open: what all kinds have, the function that scores, and the bundles of trees and of an order.

Shapes: N documents, Q groups, P pairs, F features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups, group_index, standardise_by_group, sum_by_group
from ltrscale.bundle import boosters, views
from ltrscale.bundle.contents import (
    EXAMPLES,
    PROJECTION,
    WEIGHTS,
    Blend,
    BundleFacts,
    BundleKind,
    FeatureOrder,
    Held,
    InContext,
    TreesArchitecture,
)
from ltrscale.data.dataset.manifest import Feature, places
from ltrscale.errors import InputError
from ltrscale.models.combine import AnyRanker
from ltrscale.models.contributions import Contributions, by_swaps
from ltrscale.models.examples import InContextRanker
from ltrscale.models.in_context import InContextNetwork
from ltrscale.models.layers import EncoderSettings, ModuleT
from ltrscale.models.ranker import Architecture

Scorer = Callable[[QueryGroups], Tensor]
"""Scores [N] of the documents of a batch, higher is better."""
Explainer = Callable[[QueryGroups, Tensor], Contributions]
"""What each feature adds to the score difference of pairs [P, 2] of rows of a batch; each pair is within one list."""


ENCODER = "a bundle with an encoder to start from, which jobs.pretrain or jobs.finetune makes"


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
        raise self.needed(ENCODER)

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


@dataclass(frozen=True, kw_only=True)
class TreesBundle(Bundle):
    """One model of trees, or several whose scores are averaged; trees may see the scores of the bundles inside."""

    kind: ClassVar[BundleKind] = "trees"
    holds: ClassVar = "trees"
    wanted: ClassVar = "a bundle that jobs.train_gbdt made"
    held: TreesArchitecture

    @property
    def forest(self) -> TreesArchitecture:
        """How the trees are put together."""
        return self.held

    def scoring(self, computing: Computing) -> Scorer:
        """The function that scores a batch of this bundle's features."""
        return boosters.scorer(self.held.library, self.models(), self._view(computing), threads=computing.threads)

    def explaining(self, computing: Computing) -> Explainer:
        """The library's exact contributions if trees see only features, otherwise those of `by_swaps`."""
        view = self._view(computing)
        columns = {feature: place for place, feature in enumerate(self.features)}
        if not columns.keys() >= {*view.features}:
            return super().explaining(computing)
        explain = boosters.explainer(self.held.library, self.models(), view, threads=computing.threads)
        seen = [columns[feature] for feature in view.features]

        def explained(groups: QueryGroups, pairs_P2: Tensor) -> Contributions:
            parts_PF = torch.zeros(len(pairs_P2), len(columns), dtype=torch.float64)
            parts_PF[:, seen] = explain(groups, pairs_P2)
            return Contributions(parts_PF, torch.zeros(len(pairs_P2), dtype=torch.float64))

        return explained

    def importances(self) -> dict[str, float]:
        """The importance of each column that its trees see, the highest first; see `boosters.importances`."""
        trees = self.held
        features_seen = [feature.name for feature in self.features] if trees.sees is None else trees.sees
        names = [*features_seen, *(f"component {i}" for i in range(trees.projection)), *trees.members]
        shares = boosters.importances(trees.library, self.models(), len(names))
        return dict(sorted(zip(names, shares.tolist(), strict=True), key=lambda pair: -pair[1]))

    def leans_on(self) -> Mapping[str, float | None]:
        """The features that it splits by, or all that it reads if it sees more than features."""
        if self.held.projection or self.held.members:
            return super().leans_on()
        return {name: share for name, share in self.importances().items() if share > 0}

    def models(self) -> dict[str, bytes]:
        """The files of the trees, by the names that errors use."""
        return {storage.join(self.url, name): self.contents[name] for name in self.held.files()}

    def _view(self, computing: Computing) -> views.View:
        """The view of a batch that the trees see."""
        trees = self.held
        with fitting(self.url):
            view = views.raw(self.features) if trees.sees is None else views.chosen(self.features, trees.sees)
            if trees.per_query:
                view = views.per_query(view)
            if trees.projection:
                projection = views.Projection.from_bytes(self.contents[PROJECTION], len(self.features))
                view = views.projected(view, projection)
            if not trees.members:
                return view
            return views.scored(view, self.member_scorers(computing), standardise=trees.standardise)


@dataclass(frozen=True, kw_only=True)
class BlendBundle(Bundle):
    """The weighted mean of the scores of the bundles inside; it learns nothing itself."""

    kind: ClassVar[BundleKind] = "blend"
    holds: ClassVar = "several rankers"
    held: Blend

    @property
    def blended(self) -> Mapping[str, float]:
        """Weight of each member's score."""
        return self.held.weights

    def scoring(self, computing: Computing) -> Scorer:
        """The function that scores a batch of this bundle's features."""
        members = self.member_scorers(computing)

        def score(groups: QueryGroups) -> Tensor:
            offsets_Q1 = groups.offsets_Q1.cpu()
            parts = (
                weight * standardise_by_group(members[name](groups).double(), offsets_Q1)
                for name, weight in self.blended.items()
            )
            return sum(parts, torch.zeros(groups.n_documents, dtype=torch.float64))

        return score

    def explaining(self, computing: Computing) -> Explainer:
        """The weighted sum of the members' contributions, each divided by the deviation of its scores in the list."""
        members = {
            name: (scorer, self.members[name].explainer(computing, self.features))
            for name, scorer in self.member_scorers(computing).items()
        }

        def explained(groups: QueryGroups, pairs_P2: Tensor) -> Contributions:
            offsets_Q1 = groups.offsets_Q1.cpu()
            group_N = group_index(offsets_Q1)
            features_PF = torch.zeros(len(pairs_P2), groups.n_features, dtype=torch.float64)
            beside_P = torch.zeros(len(pairs_P2), dtype=torch.float64)
            for name, weight in self.blended.items():
                scorer, explain = members[name]
                scores_N = scorer(groups).double()
                scaled_N = standardise_by_group(scores_N, offsets_Q1)
                # scaled scores are linear in the scores of a list, with this slope
                slope_Q = sum_by_group(scores_N * scaled_N, offsets_Q1)
                slope_Q = sum_by_group(scaled_N.square(), offsets_Q1) / slope_Q.where(slope_Q > 0, torch.inf)
                factor_P = weight * slope_Q[group_N[pairs_P2[:, 0].cpu()]]
                parts = explain(groups, pairs_P2)
                features_PF += factor_P[:, None] * parts.features_PF
                beside_P += factor_P * parts.beside_P
            return Contributions(features_PF, beside_P)

        return explained


@dataclass(frozen=True, kw_only=True)
class OrderBundle(Bundle):
    """The order of documents by one feature; it holds no model."""

    kind: ClassVar[BundleKind] = "feature"
    holds: ClassVar = "the order of a feature"
    held: FeatureOrder

    def scoring(self, computing: Computing) -> Scorer:  # noqa: ARG002
        """The function that scores a batch of this bundle's features."""
        if [feature.name for feature in self.features] != [self.held.feature]:
            raise InputError(f"{self.url}: its features are not the one that orders, {self.held.feature!r}")
        return order_scorer(self.held)


@dataclass(frozen=True, kw_only=True)
class InContextBundle(Bundle):
    """A network that ranks after reading examples, with its examples."""

    kind: ClassVar[BundleKind] = "in_context"
    holds: ClassVar = "examples and the network that reads them"
    held: InContext

    def scoring(self, computing: Computing) -> Scorer:  # noqa: ARG002
        """The function that scores a batch of this bundle's features, on the CPU."""
        with fitting(self.url):
            weights = safetensors.torch.load(self.contents[WEIGHTS])
            network = loaded(lambda: InContextNetwork(self.held.sizes), weights)
            tensors = safetensors.torch.load(self.contents[EXAMPLES])
            samples = [
                QueryGroups(tensors[f"{k}.features"], tensors[f"{k}.offsets"], tensors[f"{k}.labels"]).checked()
                for k in range(self.held.readings)
            ]
            if {sample.features_NF.shape[1] for sample in samples} != {len(self.features)}:
                raise ValueError(f"its examples have other features than the {len(self.features)} that it names")
            ranker = InContextRanker(network, samples)
        return lambda groups: ranker(groups.to("cpu"))


def order_scorer(order: FeatureOrder) -> Scorer:
    """The function that scores a batch of one feature [N, 1]: by its value, or the negative of it.

    A document without a value has the lowest float32 number, whatever else is in its list.

    Example:
        >>> price = QueryGroups(torch.tensor([[3.0], [torch.nan], [2.0]]), torch.tensor([0, 3]))
        >>> order_scorer(FeatureOrder(feature="price", ascending=True))(price).tolist()
        [-3.0, -3.4028234663852886e+38, -2.0]
    """

    def score(groups: QueryGroups) -> Tensor:
        (values_N,) = groups.features_NF.cpu().double().T
        scores_N = -values_N if order.ascending else values_N
        ordered_N: Tensor = scores_N.where(~values_N.isnan(), torch.finfo(torch.float32).min)
        return ordered_N

    return score
