"""Bundles of networks: a pretrained encoder, a ranker, several rankers combined, or one that reads examples."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import safetensors.torch
import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.bundle.contents import CONFIG, EXAMPLES, WEIGHTS, BundleKind, InContext
from ltrscale.bundle.opened import ENCODER, RANKER, Bundle, Computing, Explainer, Scorer, fitting, loaded
from ltrscale.errors import InputError
from ltrscale.models.contributions import along_path
from ltrscale.models.examples import InContextRanker
from ltrscale.models.features import FeatureTransform
from ltrscale.models.in_context import InContextNetwork
from ltrscale.models.layers import Encoder, EncoderSettings
from ltrscale.models.ranker import (
    AnyRanker,
    Architecture,
    CombinedArchitecture,
    Projector,
    ProjectorConfig,
    Ranker,
    combine_rankers,
)


@dataclass(frozen=True, kw_only=True)
class NetworkBundle(Bundle):
    """The weights of one or several networks."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Architecture, ...]:
        """The architecture of each network."""

    @property
    def encoders(self) -> tuple[EncoderSettings, ...]:
        """The encoder of each network."""
        return tuple(part.encoder for part in self.parts)

    @property
    def goals(self) -> Mapping[str, float]:
        """Weight of each goal's head in the score; empty for one head."""
        return self.parts[0].goals

    @property
    def reads_positions(self) -> bool:
        """Whether the list context of a network reads positions."""
        return any(part.context.reads_positions for part in self.parts if part.context is not None)

    def weights(self) -> dict[str, Tensor]:
        """Weights and buffers, by name.

        Raises:
            InputError: they are damaged, or for another number of features.
        """
        with fitting(self.url):
            weights = safetensors.torch.load(self.content)
            read = {len(value) for name, value in weights.items() if name.endswith("transform.numeric_F")}
            if read != {len(self.features)}:
                raise ValueError(f"its network reads {[*read]} features, and {CONFIG} names {len(self.features)}")
            return weights

    def ranker(self) -> AnyRanker:
        """The network that scores, in inference mode."""
        with fitting(self.url):
            weights = self.weights()
            return loaded(lambda: self.outline(weights), weights).eval()

    @abstractmethod
    def outline(self, weights: Mapping[str, Tensor]) -> AnyRanker:
        """The network that scores, before its weights are loaded."""

    def scoring(self, computing: Computing) -> Scorer:
        """The function that scores a batch whose features are the bundle's, in its order."""
        device = computing.device
        ranker = self.ranker().to(device)

        def score(groups: QueryGroups) -> Tensor:
            with torch.no_grad():
                scores_N: Tensor = ranker(groups.to(device, non_blocking=True)).cpu()
            return scores_N

        return _in_cache(score) if torch.device(device).type == "cpu" else score

    def explaining(self, computing: Computing) -> Explainer:
        """Integrated gradients between two documents; see `along_path`."""
        device = computing.device
        ranker = self.ranker().to(device)
        return lambda groups, pairs_P2: along_path(ranker, groups.to(device), pairs_P2.to(device))


@dataclass(frozen=True, kw_only=True)
class CombinedBundle(NetworkBundle):
    """Several rankers combined into one."""

    kind: ClassVar[BundleKind] = "combined"
    holds: ClassVar = "several rankers"
    held: CombinedArchitecture

    @property
    def parts(self) -> tuple[Architecture, ...]:
        """The architectures of the rankers."""
        return self.held.parts

    def outline(self, weights: Mapping[str, Tensor]) -> AnyRanker:
        """The network that scores, before its weights are loaded."""
        parts = [_build(part, _below(f"parts.{i}.", weights)) for i, part in enumerate(self.parts)]
        return combine_rankers(parts, how=self.held.how, dropout=self.held.dropout)


@dataclass(frozen=True, kw_only=True)
class EncoderBundle(NetworkBundle):
    """One network, from whose encoder a training can start."""

    holds: ClassVar = "a network"
    wanted: ClassVar = ENCODER
    layers_of_projector: ClassVar[str]
    """Prefix of the names of their weights."""
    held: Architecture

    @property
    def architecture(self) -> Architecture:
        """The configs of its parts."""
        return self.held

    @property
    def parts(self) -> tuple[Architecture, ...]:
        """The one architecture."""
        return (self.held,)

    def transform(self) -> FeatureTransform:
        """The feature transform.

        Raises:
            InputError: the weights do not fit the architecture.
        """
        with fitting(self.url):
            return FeatureTransform.from_state(_below("transform.", self.weights()), self.architecture.transform)

    def encoder(self) -> Encoder:
        """The encoder.

        Raises:
            InputError: as `transform`.
        """
        with fitting(self.url):
            transform, network = self.transform(), self.architecture.network
            return loaded(lambda: network.build(transform), _below("encoder.", self.weights()))

    def projector_layers(self) -> int:
        """Hidden layers of the projector that finetuning can start from."""
        return self.architecture.projector_layers

    def projector(self) -> ProjectorConfig | None:
        """The projector that pretraining has left in this bundle, if any."""
        return None

    def initialise_projector(self, projector: Projector) -> None:
        """Load this bundle's projector into one of the same settings."""
        with fitting(self.url):
            projector.load_state_dict(_below("projector.", self.weights()))

    def initialise(self, ranker: Ranker, *, head: bool = False) -> None:
        """Load this bundle's encoder into a new ranker, with the layers of the projector that the ranker keeps.

        With `head` also load the head and the list context of a finetuned ranker, whose architecture must be the same.
        """
        weights = self.weights()
        layers = _below(self.layers_of_projector, weights)
        with fitting(self.url):
            ranker.encoder.load_state_dict(_below("encoder.", weights))
            ranker.neck.load_state_dict({name: layers[name] for name in ranker.neck.state_dict()})
            if head:
                ranker.head.load_state_dict(_below("head.", weights))
            if head and ranker.context is not None:
                ranker.context.load_state_dict(_below("context.", weights))

    def outline(self, weights: Mapping[str, Tensor]) -> AnyRanker:
        """The network that scores, before its weights are loaded."""
        return _build(self.architecture, weights)


@dataclass(frozen=True, kw_only=True)
class RankerBundle(EncoderBundle):
    """One finetuned ranker."""

    kind: ClassVar[BundleKind] = "neural"
    wanted: ClassVar = RANKER
    layers_of_projector: ClassVar = "neck."

    def ranker(self) -> Ranker:
        """The network, in inference mode."""
        ranker = super().ranker()
        assert isinstance(ranker, Ranker)  # several rankers have another bundle class
        return ranker

    def embedder(self) -> Scorer:
        """Embeddings before the last layer."""
        ranker = self.ranker()

        def embed(groups: QueryGroups) -> Tensor:
            with torch.no_grad():
                return ranker.penultimate(groups)

        return embed


@dataclass(frozen=True, kw_only=True)
class PretrainedBundle(EncoderBundle):
    """A pretrained encoder, which does not score."""

    kind: ClassVar[BundleKind] = "pretrained"
    holds: ClassVar = "a pretrained encoder"
    wanted: ClassVar = "the bundle of a pretrained encoder, which jobs.pretrain makes"
    layers_of_projector: ClassVar = "projector.layers."

    def projector_layers(self) -> int:
        """Hidden layers of the pretrained projector."""
        projector = self.projector()
        return projector.layers if projector else 0

    def projector(self) -> ProjectorConfig | None:
        """The projector that pretraining has left in this bundle, if any."""
        return self.architecture.projector

    def embedder(self) -> Scorer:
        """Embeddings of the encoder."""
        transform, encoder = self.transform(), self.encoder().eval()

        def embed(groups: QueryGroups) -> Tensor:
            with torch.no_grad():
                return encoder.embed(transform(groups.features_NF, groups.offsets_Q1), groups)

        return embed

    def ranker(self) -> AnyRanker:
        """Refuse: a pretrained encoder does not score."""
        raise InputError(f"{self.url}: a pretrained encoder cannot score; finetune it first with jobs.finetune")


def _build(architecture: Architecture, weights: Mapping[str, Tensor]) -> Ranker:
    """A ranker for these weights; it has their feature transform, and the caller loads the rest."""
    with torch.device("cpu"):  # the transform needs real values even while the rest is built on `meta`
        transform = FeatureTransform.from_state(_below("transform.", weights), architecture.transform)
    return Ranker(architecture, transform)


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


_IN_CACHE = 1024
"""Documents whose hidden layers fit a CPU's cache; many more at once take a quarter more time."""


def _in_cache(scorer: Scorer) -> Scorer:
    """The scorer of a network on a CPU, called for a few groups at a time; all at once if they have tokens."""

    def score(groups: QueryGroups) -> Tensor:
        if groups.query_tokens or groups.document_tokens or groups.n_documents <= _IN_CACHE:
            return scorer(groups)
        places = torch.arange(0, groups.n_documents, _IN_CACHE)
        cuts = sorted({*torch.searchsorted(groups.offsets_Q1, places).tolist(), groups.n_groups})
        return torch.cat([scorer(_run(groups, *cut)) for cut in pairwise(cuts)])

    return score


def _run(groups: QueryGroups, first: int, last: int) -> QueryGroups:
    """The groups from `first` to `last`, exclusive, without labels and tokens, and without a copy of their features."""
    offsets_Q1 = groups.offsets_Q1[first : last + 1]
    start, stop = int(offsets_Q1[0]), int(offsets_Q1[-1])
    of_documents = groups.weights_N, groups.positions_N, groups.gains_N
    weights_N, positions_N, gains_N = (None if values is None else values[start:stop] for values in of_documents)
    return QueryGroups(
        groups.features_NF[start:stop],
        offsets_Q1 - start,
        ids_Q=None if groups.ids_Q is None else groups.ids_Q[first:last],
        weights_N=weights_N,
        positions_N=positions_N,
        gains_N=gains_N,
    )


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
