"""Committing a bundle."""

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NotRequired, Protocol, TypedDict, Unpack

import safetensors.torch
from torch import Tensor, nn

from ltrscale import storage
from ltrscale.bundle.contents import (
    CARD,
    CONFIG,
    FORMAT,
    PROJECTION,
    REFERENCE,
    VERSION,
    WEIGHTS,
    BundleConfig,
    BundleKind,
    FeatureOrder,
    MetricValue,
    TreesArchitecture,
    member_folder,
    read_bundle_manifest,
)
from ltrscale.bundle.reference import Reference
from ltrscale.bundle.views import Projection
from ltrscale.data.dataset.manifest import Feature
from ltrscale.markdown import as_code, escape
from ltrscale.models.combine import AnyRanker, CombinedArchitecture
from ltrscale.models.ranker import Architecture


class Pretrained(Protocol):
    """The parts of a pretrained network that a bundle keeps."""

    @property
    def transform(self) -> nn.Module:
        """Transform of raw features."""

    @property
    def encoder(self) -> nn.Module:
        """Encoder of transformed features."""

    @property
    def projector(self) -> nn.Module | None:
        """Layers between the encoder and the pretext loss, if there are any."""

    @property
    def architecture(self) -> Architecture:
        """Architecture of these parts."""


class BundleFacts(TypedDict):
    """Facts that every bundle records.

    `config`: settings of the run; `read_as`: how the raw rows of the training data were read; `reference`: what these
    look like, None for a bundle that does not score; `files`: further files to store beside the model, by name.
    """

    config: Mapping[str, Any]
    features: Sequence[Feature]
    dataset_hash: str
    read_as: NotRequired[Mapping[str, Any]]
    reference: NotRequired[Reference | None]
    metrics: Mapping[str, MetricValue]
    made_by: Mapping[str, Any]
    files: NotRequired[Mapping[str, bytes]]


def save_ranker(url: str, model: AnyRanker, **about: Unpack[BundleFacts]) -> None:
    """Commit a ranker as a bundle."""
    title = "A neural ranker: raw features in, one score a document out."
    contents = {WEIGHTS: _serialise(model.state_dict())}
    _save(url, "neural", contents, about, [title], architecture=model.architecture)


def save_pretrained(url: str, model: Pretrained, **about: Unpack[BundleFacts]) -> None:
    """Commit the transform, encoder and projector of a pretrained network as a bundle."""
    modules = {"transform": model.transform, "encoder": model.encoder, "projector": model.projector}
    tensors = {
        f"{name}.{key}": value
        for name, module in modules.items()
        if module is not None
        for key, value in module.state_dict().items()
    }
    title = "A pretrained encoder: to be finetuned with jobs.finetune; it does not score."
    _save(url, "pretrained", {WEIGHTS: _serialise(tensors)}, about, [title], architecture=model.architecture)


def save_trees(
    url: str,
    models: Mapping[str, bytes],
    trees: TreesArchitecture,
    *,
    projection: Projection | None = None,
    **about: Unpack[BundleFacts],
) -> None:
    """Commit trees, each model in its library's own format, as a bundle.

    The trees were grown on the output of `boosters.renumber`, whose codes are stored in the models. `files` must
    contain the files of members, see `member_files`.
    """
    contents = dict(zip(trees.files(), models.values(), strict=True))
    if projection is not None:
        contents[PROJECTION] = projection.to_bytes()
    title = f"Gradient boosted trees ({trees.library}): raw features in, one score a document out."
    inside = ["- its trees see numeric features standardised within each query group"] if trees.per_query else []
    if trees.projection:
        inside.append(f"- its trees see {trees.projection} principal components")
    if trees.members:
        names = ", ".join(map(escape, trees.members))
        inside.append(f"- its trees see the scores of the bundles in `members/`: {names}")
    _save(url, "trees", contents, about, [title, *inside], trees=trees)


def save_order(url: str, order: FeatureOrder, **about: Unpack[BundleFacts]) -> None:
    """Commit the order of documents by one feature as a bundle; `features` is that feature alone."""
    title = "The order of one feature: its value is the score of a document."
    _save(url, "feature", {}, about, [title], order=order)


def member_files(name: str, url: str) -> dict[str, bytes]:
    """The files of a bundle under the names that they have inside a stack's bundle.

    Raises:
        InputError: as `load`.
    """
    manifest = read_bundle_manifest(url)
    paths = [file["path"] for file in manifest.get("files", [])]
    return {f"{member_folder(name)}/{path}": storage.read_verified(url, path, manifest) for path in paths}


def _save(
    url: str,
    kind: BundleKind,
    contents: Mapping[str, bytes],
    about: BundleFacts,
    says: Sequence[str],
    *,
    architecture: Architecture | CombinedArchitecture | None = None,
    trees: TreesArchitecture | None = None,
    order: FeatureOrder | None = None,
) -> None:
    # JSON has neither NaN nor infinity
    metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in about["metrics"].items()}
    config = BundleConfig(
        kind=kind,
        features=tuple(about["features"]),
        architecture=architecture,
        trees=trees,
        order=order,
        training=dict(about["config"]),
        dataset_hash=about["dataset_hash"],
        read_as=dict(about.get("read_as", {})),
        metrics=metrics,
        versions={"python": platform.python_version()}
        | {name: version(name) for name in ("ltrscale", "torch", trees.library if trees else "lightgbm", "numpy")},
    )
    reference = about.get("reference")
    files = {
        CONFIG: (config.model_dump_json(indent=1) + "\n").encode(),
        **contents,
        **({} if reference is None else {REFERENCE: reference.model_dump_json().encode()}),
        CARD: bundle_card(config, *says).encode(),
        **about.get("files", {}),
    }
    with storage.Commit(url) as commit:
        for name, data in files.items():
            with commit.file(name) as path:
                path.write_bytes(data)
        commit.finish({"format": FORMAT, "version": VERSION, "made_by": dict(about["made_by"])})


def bundle_card(config: BundleConfig, title: str, *inside: str) -> str:
    """The card for people, in Markdown: its title, facts of every bundle, and lines on what is inside."""
    categorical = sum(feature.kind == "categorical" for feature in config.features)
    metrics = [f"| {escape(name)} | {escape(str(value))} |" for name, value in config.metrics.items()]
    versions = ", ".join(f"{name} {value}" for name, value in config.versions.items())
    lines = [
        f"# {title}",
        "",
        f"- features: {len(config.features)}, {categorical} of them categorical; names and order in `{CONFIG}`",
        *inside,
        f"- trained on the data set with hash {as_code(config.dataset_hash)}",
        f"- made with {versions}",
        "",
        *(["| metric | value |", "|---|---|", *metrics, ""] if metrics else []),
        'Load it with `ltrscale.bundle.load("this directory")`. Its training settings are in '
        f"`{CONFIG}`, content hashes and origin in `{storage.MANIFEST}`.",
    ]
    return "\n".join(lines) + "\n"


def _serialise(tensors: Mapping[str, Tensor]) -> bytes:
    copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    return bytes(safetensors.torch.save(copies))
