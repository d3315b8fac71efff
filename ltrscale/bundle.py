"""ModelBundle: a directory with all that scoring needs, for networks and trees alike; no pickle anywhere.

    config.json           kind, features, architecture, training settings, data set hash, metrics, versions
    weights.safetensors   of a network, its feature transform included
    model.txt             of trees: LightGBM's own text format (XGBoost's model.json, CatBoost's model.cbm)
    README.md             a card for people
    manifest.json         written last: format, content hashes, origin

Shapes: N documents.
"""

import itertools
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, NotRequired, Protocol, TypedDict, Unpack

import safetensors.torch
import torch
from pydantic import Field
from torch import Tensor, nn

from ltrscale import boosters, storage
from ltrscale.batch import QueryGroups
from ltrscale.config import Config, validate
from ltrscale.data.manifest import Feature
from ltrscale.errors import InputError
from ltrscale.models.build import build_encoder
from ltrscale.models.combine import AnyRanker, CombinedArchitecture, combine_rankers
from ltrscale.models.features import FeatureTransform
from ltrscale.models.layers import Encoder
from ltrscale.models.ranker import Architecture, Ranker

Scorer = Callable[[QueryGroups], Tensor]
"""Scores [N] of the documents of a batch, higher is better."""

Metric = float | int | str | None
Kind = Literal["neural", "pretrained", "trees"]
_FORMAT, _VERSION = "ltrscale-bundle", 1
_CONFIG, _WEIGHTS, _CARD = "config.json", "weights.safetensors", "README.md"


class TreesArchitecture(Config):
    """What a bundle of trees is made of."""

    library: boosters.Library = "lightgbm"
    """Whose format the model files have."""
    models: tuple[str, ...] = ("model",)
    """Names of the models, whose scores are averaged."""

    def files(self) -> tuple[str, ...]:
        """Names of the model files."""
        return tuple(f"{name}.{boosters.ENDINGS[self.library]}" for name in self.models)


class BundleConfig(Config):
    """`config.json` of a bundle."""

    kind: Kind
    features: tuple[Feature, ...]
    """What the model reads, in order."""
    architecture: Architecture | CombinedArchitecture | None = None
    """Of a network; None for trees."""
    trees: TreesArchitecture | None = None
    """Of trees; None for a network."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Settings of the run that made it."""
    dataset_hash: str
    """Of the training data."""
    metrics: dict[str, Metric] = Field(default_factory=dict)
    """As training reported them; None where undefined."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Of Python and the libraries."""

    def model_files(self) -> tuple[str, ...]:
        """Names of the files that hold weights or trees."""
        return (self.trees or TreesArchitecture()).files() if self.kind == "trees" else (_WEIGHTS,)


class Pretrained(Protocol):
    """A pretrained network: the parts of it that are worth keeping."""

    @property
    def transform(self) -> nn.Module:
        """Of raw features."""

    @property
    def encoder(self) -> nn.Module:
        """Of transformed features."""

    @property
    def projector(self) -> nn.Module | None:
        """Between the encoder and the pretext loss, where there is one."""

    @property
    def architecture(self) -> Architecture:
        """What they are built from."""


@dataclass(frozen=True)
class Bundle:
    """A bundle, opened and checked against its hashes; `load` makes it."""

    url: str
    kind: Kind
    features: tuple[Feature, ...]
    config: Mapping[str, Any]
    """Settings of the run that made it."""
    architecture: Architecture | CombinedArchitecture | None
    dataset_hash: str
    metrics: Mapping[str, Metric]
    made_by: Mapping[str, Any]
    trees: TreesArchitecture | None
    contents: Mapping[str, bytes]
    """Weights or trees, as they lie in the files, by name."""

    @property
    def content(self) -> bytes:
        """Weights or trees of a bundle with one such file."""
        (content,) = self.contents.values()
        return content

    def check_features(self, features: Sequence[Feature]) -> None:
        """Check that data has the features of the bundle, in its order.

        Raises:
            InputError: it has not; names the first difference.
        """
        for i, pair in enumerate(itertools.zip_longest(self.features, features)):
            if pair[0] != pair[1]:
                ours, theirs = (f"{feature.name!r} ({feature.kind})" if feature else "not there" for feature in pair)
                raise InputError(
                    f"{self.url}: feature {i} of the data is {theirs}, the bundle's is {ours}; prepare the data with "
                    "the features that the bundle was trained on"
                )

    def network(self) -> Architecture:
        """What a single network is built from.

        Raises:
            InputError: the bundle holds trees, or several rankers.
        """
        if not isinstance(self.architecture, Architecture):
            what = "trees" if self.architecture is None else "several rankers"
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
        return FeatureTransform.from_state(_below("transform.", self.weights()), self.network().transform)

    def encoder(self) -> Encoder:
        """The encoder of a network.

        Raises:
            InputError: as `network`.
        """
        encoder = build_encoder(self.network().encoder, self.transform())
        encoder.load_state_dict(_below("encoder.", self.weights()))
        return encoder

    def projector_layers(self) -> int:
        """Hidden layers of a projector that are there to go on from: a finetuned ranker has those that it kept."""
        made = self.network()
        return made.projector_layers if self.kind == "neural" else made.projector.layers if made.projector else 0

    def initialise(self, ranker: Ranker) -> None:
        """Give a fresh ranker this bundle's encoder, and the layers of the projector that it keeps."""
        weights = self.weights()
        ranker.encoder.load_state_dict(_below("encoder.", weights))
        layers = _below("neck." if self.kind == "neural" else "projector.layers.", weights)
        ranker.neck.load_state_dict({name: layers[name] for name in ranker.neck.state_dict()})

    def ranker(self) -> AnyRanker:
        """The network that scores, in inference mode.

        Raises:
            InputError: the bundle holds trees, or an encoder without a head.
        """
        weights = self.weights()
        if isinstance(self.architecture, CombinedArchitecture):
            made = self.architecture
            parts = [_build(part, _below(f"parts.{i}.", weights)) for i, part in enumerate(made.parts)]
            model: AnyRanker = combine_rankers(parts, how=made.how, dropout=made.dropout)
        elif self.network().head is None:
            raise InputError(f"{self.url}: a pretrained encoder cannot score; finetune it first with jobs.finetune")
        else:
            model = _build(self.network(), weights)
        model.load_state_dict(weights)
        return model.eval()

    def scorer(self, *, device: torch.device | str = "cpu", threads: int = 0) -> Scorer:
        """The function that scores a batch; scores come back on the CPU.

        Args:
            device: where a network runs.
            threads: of a tree model; 0 takes all cores.

        Raises:
            InputError: the bundle holds an encoder without a head.
        """
        if self.kind == "trees":
            library = (self.trees or TreesArchitecture()).library
            return boosters.scorer(library, list(self.contents.values()), self.features, threads=threads)
        ranker = self.ranker().to(device)

        def score(groups: QueryGroups) -> Tensor:
            with torch.no_grad():
                scores_N: Tensor = ranker(groups.to(device)).cpu()
            return scores_N

        return score

    def weights(self) -> dict[str, Tensor]:
        """Weights and buffers of a network, by name."""
        return safetensors.torch.load(self.content)


class About(TypedDict):
    """What every bundle says of itself.

    `config`: settings of the run; `files`: more files to lie beside the model, by name.
    """

    config: Mapping[str, Any]
    features: Sequence[Feature]
    dataset_hash: str
    metrics: Mapping[str, Metric]
    made_by: Mapping[str, Any]
    files: NotRequired[Mapping[str, bytes]]


def save_ranker(url: str, model: AnyRanker, **about: Unpack[About]) -> None:
    """Commit a ranker as a bundle."""
    _save(url, "neural", {_WEIGHTS: _serialise(model.state_dict())}, about, architecture=model.architecture)


def save_pretrained(url: str, model: Pretrained, **about: Unpack[About]) -> None:
    """Commit the transform, encoder and projector of a pretrained network as a bundle."""
    modules = {"transform": model.transform, "encoder": model.encoder, "projector": model.projector}
    tensors = {
        f"{name}.{key}": value
        for name, module in modules.items()
        if module is not None
        for key, value in module.state_dict().items()
    }
    _save(url, "pretrained", {_WEIGHTS: _serialise(tensors)}, about, architecture=model.architecture)


def save_trees(url: str, models: Mapping[str, bytes], trees: TreesArchitecture, **about: Unpack[About]) -> None:
    """Commit trees, each model in its library's own format, as a bundle.

    The trees were grown on the output of `boosters.renumber`, whose codes travel in the models.
    """
    _save(url, "trees", dict(zip(trees.files(), models.values(), strict=True)), about, trees=trees)


def read_manifest(url: str) -> dict[str, Any]:
    """The manifest of a bundle: its files with their hashes, and its origin.

    Raises:
        InputError: nothing is committed there, or it is no bundle or one of another version.
    """
    manifest = storage.read_manifest(url)
    if manifest is None:
        raise InputError(
            f"{url}: no bundle is committed there (no {storage.MANIFEST}); "
            "make it with jobs.pretrain, jobs.finetune or jobs.train_gbdt"
        )
    where = storage.join(url, storage.MANIFEST)
    if manifest.get("format") != _FORMAT:
        raise InputError(f"{where}: not a bundle but {manifest.get('format', 'something else')!r}; check the path")
    if manifest.get("version") != _VERSION:
        raise InputError(
            f"{where}: a bundle of version {manifest.get('version')}, this ltrscale reads version {_VERSION}; "
            "install the ltrscale that made it, or train it again"
        )
    return manifest


def load(url: str) -> Bundle:
    """Open a bundle and check its content against its hashes.

    Raises:
        InputError: nothing is committed there, it is no bundle or one of another version, or a file is missing or
            was changed; the file is named.
    """
    manifest = read_manifest(url)
    values = json.loads(storage.read_verified(url, _CONFIG, manifest))
    config = validate(BundleConfig, values, storage.join(url, _CONFIG))
    return Bundle(
        url,
        config.kind,
        config.features,
        config.training,
        config.architecture,
        config.dataset_hash,
        config.metrics,
        manifest.get("made_by", {}),
        config.trees,
        {name: storage.read_verified(url, name, manifest) for name in config.model_files()},
    )


def _save(
    url: str,
    kind: Kind,
    contents: Mapping[str, bytes],
    about: About,
    *,
    architecture: Architecture | CombinedArchitecture | None = None,
    trees: TreesArchitecture | None = None,
) -> None:
    metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in about["metrics"].items()}
    config = BundleConfig(
        kind=kind,
        features=tuple(about["features"]),
        architecture=architecture,
        trees=trees,
        training=dict(about["config"]),
        dataset_hash=about["dataset_hash"],
        metrics=metrics,
        versions={"python": platform.python_version()}
        | {name: version(name) for name in ("ltrscale", "torch", trees.library if trees else "lightgbm", "numpy")},
    )
    files = {
        _CONFIG: (config.model_dump_json(indent=1) + "\n").encode(),
        **contents,
        _CARD: _card(config).encode(),
        **about.get("files", {}),
    }
    with storage.Commit(url) as commit:
        for name, data in files.items():
            with commit.file(name) as path:
                path.write_bytes(data)
        commit.finish({"format": _FORMAT, "version": _VERSION, "made_by": dict(about["made_by"])})


def _card(config: BundleConfig) -> str:
    """What a person wants to know first, in Markdown."""
    library = (config.trees or TreesArchitecture()).library
    what = {
        "neural": "A neural ranker: raw features in, one score a document out.",
        "pretrained": "A pretrained encoder: to be finetuned with jobs.finetune; it does not score.",
        "trees": f"Gradient boosted trees ({library}): raw features in, one score a document out.",
    }
    categorical = sum(feature.kind == "categorical" for feature in config.features)
    metrics = [f"| {name} | {value} |" for name, value in config.metrics.items()]
    versions = ", ".join(f"{name} {value}" for name, value in config.versions.items())
    lines = [
        f"# {what[config.kind]}",
        "",
        f"- features: {len(config.features)}, {categorical} of them categorical; names and order in `{_CONFIG}`",
        f"- trained on the data set with hash `{config.dataset_hash}`",
        f"- made with {versions}",
        "",
        *(["| metric | value |", "|---|---|", *metrics, ""] if metrics else []),
        'Load it with `ltrscale.bundle.load("this directory")`. Its training settings are in '
        f"`{_CONFIG}`, content hashes and origin in `{storage.MANIFEST}`.",
    ]
    return "\n".join(lines) + "\n"


def _serialise(tensors: Mapping[str, Tensor]) -> bytes:
    copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    return bytes(safetensors.torch.save(copies))


def _build(architecture: Architecture, weights: Mapping[str, Tensor]) -> Ranker:
    """A ranker for these weights, of which it has the feature transform only: the rest is to be loaded."""
    return Ranker(architecture, FeatureTransform.from_state(_below("transform.", weights), architecture.transform))


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
