"""Opening a bundle: its parts, and the function that scores.

Shapes: N documents.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ltrscale import boosters, storage, views
from ltrscale.batch import QueryGroups
from ltrscale.bundle.contents import (
    CONFIG,
    PROJECTION,
    REFERENCE,
    BundleConfig,
    FeatureOrder,
    Kind,
    Metric,
    TreesArchitecture,
    member_folder,
    read_manifest,
)
from ltrscale.bundle.reference import Reference
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature, places
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError
from ltrscale.models.combine import AnyRanker, CombinedArchitecture, combine_rankers
from ltrscale.models.cross_encoder import CrossEncoderConfig
from ltrscale.models.features import FeatureTransform
from ltrscale.models.heads import Projector, ProjectorConfig
from ltrscale.models.layers import Encoder, EncoderSettings
from ltrscale.models.ranker import Architecture, Ranker

Scorer = Callable[[QueryGroups], Tensor]
"""Scores [N] of the documents of a batch, higher is better."""


@contextmanager
def fitting(where: str) -> Iterator[None]:
    """Turn the many errors of a bundle whose files do not fit each other into one line."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:  # RecursionError: deep JSON
        raise InputError(f"{where}: the bundle's files do not fit each other ({error}); train it again") from error


@dataclass(frozen=True)
class Bundle:
    """A bundle, opened and checked against its hashes by `load`."""

    url: str
    kind: Kind
    features: tuple[Feature, ...]
    config: Mapping[str, Any]
    """Settings of the run that made the bundle."""
    architecture: Architecture | CombinedArchitecture | None
    dataset_hash: str
    metrics: Mapping[str, Metric]
    made_by: Mapping[str, Any]
    trees: TreesArchitecture | None
    contents: Mapping[str, bytes]
    """Bytes of the files of weights or trees, by name."""
    projection: bytes | None = None
    """Projection from raw features to principal components, for trees that see these."""
    members: Mapping[str, "Bundle"] = field(default_factory=dict)
    """Bundles whose scores stacked trees see, by name."""
    read_as: Mapping[str, Any] = field(default_factory=dict)
    """Settings with which the raw rows of the training data were read; empty if they are not known."""
    order: FeatureOrder | None = None
    """The feature that orders documents, of a bundle that holds no model."""
    reference: Reference | None = None
    """What the rows of its training periods look like; None if it does not record that."""

    @property
    def reads_positions(self) -> bool:
        """Whether it needs the positions at which documents were shown, in scoring too."""
        made = self.architecture
        parts = made.parts if isinstance(made, CombinedArchitecture) else (made,) if made else ()
        contexts = [part.context for part in parts if part.context is not None]
        return any(context.reads_positions for context in contexts) or any(
            member.reads_positions for member in self.members.values()
        )

    @property
    def encoders(self) -> tuple[EncoderSettings, ...]:
        """The encoders of its networks, members' included."""
        made = self.architecture
        parts = made.parts if isinstance(made, CombinedArchitecture) else (made,) if made else ()
        of_members = (encoder for member in self.members.values() for encoder in member.encoders)
        return (*(part.encoder for part in parts), *of_members)

    @property
    def reads_tokens(self) -> bool:
        """Whether it needs the tokens of queries and documents."""
        return any(any(encoder.reads_tokens) for encoder in self.encoders)

    @property
    def content(self) -> bytes:
        """Bytes of the weights or trees of a bundle that has one such file."""
        (content,) = self.contents.values()
        return content

    def count(self, metric: str) -> int | None:
        """A count among the metrics, such as `labelled_groups`, if it is stated."""
        count = self.metrics.get(metric)
        return count if isinstance(count, int) else None

    def network(self) -> Architecture:
        """The architecture of a single network.

        Raises:
            InputError: the bundle holds trees, the order of a feature, or several rankers.
        """
        if not isinstance(self.architecture, Architecture):
            what = "several rankers" if self.architecture else "trees" if self.trees else "the order of a feature"
            raise InputError(
                f"{self.url}: holds {what}, which have no encoder to start from; "
                "name a bundle made by jobs.pretrain or jobs.finetune"
            )
        return self.architecture

    def transform(self) -> FeatureTransform:
        """The feature transform of a network.

        Raises:
            InputError: as `network`.
        """
        with fitting(self.url):
            return FeatureTransform.from_state(_below("transform.", self.weights()), self.network().transform)

    def encoder(self) -> Encoder:
        """The encoder of a network.

        Raises:
            InputError: as `network`.
        """
        with fitting(self.url):
            config, transform = self.network().encoder, self.transform()
            encoder = config.build(transform.numeric_F, transform.cardinalities)
            encoder.load_state_dict(_below("encoder.", self.weights()))
            return encoder

    def projector_layers(self) -> int:
        """Hidden layers of the projector that finetuning can start from; a finetuned ranker has those that it kept."""
        made = self.network()
        return made.projector_layers if self.kind == "neural" else made.projector.layers if made.projector else 0

    def projector(self) -> ProjectorConfig | None:
        """The projector that pretraining has left in this bundle, if any."""
        return self.network().projector if self.kind == "pretrained" else None

    def initialise_projector(self, projector: Projector) -> None:
        """Load this bundle's projector into one of the same settings."""
        with fitting(self.url):
            projector.load_state_dict(_below("projector.", self.weights()))

    def initialise(self, ranker: Ranker, *, head: bool = False) -> None:
        """Load this bundle's encoder into a new ranker, with the layers of the projector that the ranker keeps.

        With `head` also load the head and the list context of a finetuned ranker, whose architecture must be the same.
        """
        weights = self.weights()
        layers = _below("neck." if self.kind == "neural" else "projector.layers.", weights)
        with fitting(self.url):
            ranker.encoder.load_state_dict(_below("encoder.", weights))
            ranker.neck.load_state_dict({name: layers[name] for name in ranker.neck.state_dict()})
            if head:
                ranker.head.load_state_dict(_below("head.", weights))
            if head and ranker.context is not None:
                ranker.context.load_state_dict(_below("context.", weights))

    def ranker(self) -> AnyRanker:
        """The network that scores, in inference mode.

        Raises:
            InputError: the bundle holds trees, or an encoder without a head.
        """
        if not isinstance(self.architecture, CombinedArchitecture) and self.network().head is None:
            raise InputError(f"{self.url}: a pretrained encoder cannot score; finetune it first with jobs.finetune")
        with fitting(self.url):
            weights = self.weights()
            with torch.device("meta"):  # first without memory: a damaged architecture could ask for any amount
                outline = self._ranker(weights).state_dict()
            if {name: value.shape for name, value in outline.items()} != {n: v.shape for n, v in weights.items()}:
                raise ValueError("the architecture has other weights")
            model = self._ranker(weights)
            model.load_state_dict(weights)
            return model.eval()

    def _ranker(self, weights: Mapping[str, Tensor]) -> AnyRanker:
        """The network before its weights are loaded."""
        if not isinstance(self.architecture, CombinedArchitecture):
            return _build(self.network(), weights)
        made = self.architecture
        parts = [_build(part, _below(f"parts.{i}.", weights)) for i, part in enumerate(made.parts)]
        return combine_rankers(parts, how=made.how, dropout=made.dropout)

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
        columns = None if features is None else places(self.features, features, whose=self.url)
        score = self._scorer(device=device, threads=threads)
        if columns is None:
            return score
        return lambda groups: score(replace(groups, features_NF=groups.features_NF[:, columns]))

    def _scorer(self, *, device: torch.device | str, threads: int) -> Scorer:
        """The function that scores a batch whose features are the bundle's, in its order."""
        if self.trees is not None:
            with fitting(self.url):
                view = self._view(self.trees, device=device, threads=threads)
            models = {storage.join(self.url, name): content for name, content in self.contents.items()}
            return boosters.scorer(self.trees.library, models, view, threads=threads)
        if self.order is not None:
            return order_scorer(self.order)
        ranker = self.ranker().to(device)

        def score(groups: QueryGroups) -> Tensor:
            with torch.no_grad():
                scores_N: Tensor = ranker(groups.to(device)).cpu()
            return scores_N

        return score

    def _view(self, trees: TreesArchitecture, *, device: torch.device | str, threads: int) -> views.View:
        """The view of a batch that the trees see."""
        view = views.raw(self.features) if trees.sees is None else views.chosen(self.features, trees.sees)
        if trees.per_query:
            view = views.per_query(view)
        if self.projection is not None:
            view = views.projected(view, views.Projection.from_bytes(self.projection, len(self.features)))
        if self.members:
            scorers = {
                name: member.scorer(features=self.features, device=device, threads=threads)
                for name, member in self.members.items()
            }
            view = views.scored(view, scorers, standardise=trees.standardise)
        return view

    def weights(self) -> dict[str, Tensor]:
        """Weights and buffers of a network, by name."""
        with fitting(self.url):
            return safetensors.torch.load(self.content)


def reading(selection: Selection, opened: Iterable[Bundle]) -> Selection:
    """The same groups with the token fields that some bundles read; unchanged if none reads any.

    Raises:
        InputError: the data lack a field, or their vocabulary is not the bundle's.
    """
    query: dict[str, None] = {}
    document: dict[str, None] = {}
    for bundle in opened:
        for encoder in bundle.encoders:
            query |= dict.fromkeys(encoder.reads_tokens.query)
            document |= dict.fromkeys(encoder.reads_tokens.document)
            if any(encoder.reads_tokens):
                _check_vocabulary(encoder, selection, bundle.url)
    return selection.reading(query=[*query], document=[*document]) if query or document else selection


def _check_vocabulary(encoder: EncoderSettings, selection: Selection, whose: str) -> None:
    assert isinstance(encoder, CrossEncoderConfig)
    own, there = encoder.vocabulary, selection.vocabulary
    if own is not None and there is not None and (own.sha256 != there.sha256 or own.size < there.size):
        raise InputError(
            f"{whose}: reads tokens of another vocabulary than that of the data; prepare the data with the tokenizer "
            "of its training data"
        )


def load(url: str) -> Bundle:
    """Open a bundle and check its content against its hashes.

    Raises:
        InputError: nothing is committed there, it is not a bundle or has another version, or a file, which the message
            names, is missing or changed.
    """
    return _open(url, "", read_manifest(url))


def _open(url: str, folder: str, manifest: Mapping[str, Any]) -> Bundle:
    """The bundle in a folder of a committed directory; the folder is "" or ends with a slash."""

    def read(name: str) -> bytes:
        return storage.read_verified(url, folder + name, manifest)

    where = storage.join(url, folder + CONFIG)
    with fitting(where):
        values = json.loads(read(CONFIG))
    config = validate(BundleConfig, values, where)
    trees = config.trees
    return Bundle(
        url,
        config.kind,
        config.features,
        config.training,
        config.architecture,
        config.dataset_hash,
        config.metrics,
        manifest.get("made_by", {}),
        trees,
        {name: read(name) for name in config.model_files()},
        read(PROJECTION) if trees and trees.projection else None,
        {name: _open(url, f"{folder}{member_folder(name)}/", manifest) for name in (trees.members if trees else ())},
        config.read_as,
        config.order,
        _reference(read(REFERENCE), url) if folder + REFERENCE in storage.listed_in(manifest) else None,
    )


def _reference(content: bytes, url: str) -> Reference:
    where = storage.join(url, REFERENCE)
    with fitting(where):
        values = json.loads(content)
    return validate(Reference, values, where)


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


def _build(architecture: Architecture, weights: Mapping[str, Tensor]) -> Ranker:
    """A ranker for these weights; it has their feature transform, and the caller loads the rest."""
    with torch.device("cpu"):  # the transform needs real values even while the rest is built on `meta`
        transform = FeatureTransform.from_state(_below("transform.", weights), architecture.transform)
    return Ranker(architecture, transform)


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
