"""The files of a bundle, and the content of `config.json`."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from ltrscale import storage
from ltrscale.bundle import boosters
from ltrscale.config import Config, digest
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError, nearest
from ltrscale.models.combine import CombinedArchitecture
from ltrscale.models.ranker import Architecture

MetricValue = float | int | str | None
BundleKind = Literal["neural", "pretrained", "trees", "feature"]
FORMAT, VERSION = "ltrscale-bundle", 1
TRUSTED = "LTRSCALE_TRUSTED_BUNDLES"
"""The environment variable that names a file with the content hashes of trusted bundles."""
CONFIG, WEIGHTS, PROJECTION, CARD = "config.json", "weights.safetensors", "projection.safetensors", "README.md"
REFERENCE = "reference.json"


class TreesArchitecture(Config):
    """The parts of a bundle of trees; trees see features, then components of these, then members' scores."""

    library: boosters.Library = "lightgbm"
    """The library whose format the model files have."""
    models: tuple[str, ...] = ("model",)
    """Names of the models; their scores are averaged."""
    sees: tuple[str, ...] | None = None
    """Raw features that the trees see; None for all."""
    per_query: bool = False
    """Whether the numeric ones are standardised within each query group."""
    projection: int = Field(0, ge=0)
    """Number of principal components that the trees see."""
    members: tuple[str, ...] = ()
    """Names of the bundles inside this one whose scores the trees see."""
    standardise: bool = False
    """Whether these scores are first standardised within each query group."""

    def files(self) -> tuple[str, ...]:
        """Names of the model files."""
        return tuple(f"{name}.{boosters.ending_of(self.library)}" for name in self.models)


class FeatureOrder(Config):
    """The order of documents by one feature, such as a search engine's own score."""

    feature: str
    """Name of the feature, which must be numeric; the highest value is the best. A document without a value comes
    last."""
    ascending: bool = False
    """The lowest value is the best, as of a price; a document without one comes last all the same."""

    def among(self, features: Sequence[Feature]) -> Feature:
        """The feature itself, one of these.

        Raises:
            InputError: none has its name, or it is categorical; the message names the nearest.

        Example:
            >>> price, os = Feature(name="price"), Feature(name="os", kind="categorical")
            >>> FeatureOrder(feature="prize").among([price, os])
            Traceback (most recent call last):
            ltrscale.errors.InputError: feature: there is no numeric feature 'prize'; the nearest is 'price'
        """
        numeric = {feature.name: feature for feature in features if feature.kind == "numeric"}
        if self.feature in numeric:
            return numeric[self.feature]
        near = nearest(self.feature, numeric)
        raise InputError(
            f"feature: there is no numeric feature {self.feature!r}; "
            + (f"the nearest is {near!r}" if near else "the data have none")
        )


class BundleConfig(Config):
    """`config.json` of a bundle."""

    kind: BundleKind
    features: tuple[Feature, ...]
    """Features that the model reads, in order."""
    architecture: Architecture | CombinedArchitecture | None = None
    """Architecture of a network; None for trees."""
    trees: TreesArchitecture | None = None
    """Parts of a tree bundle; None for a network."""
    order: FeatureOrder | None = None
    """The feature that orders documents, of a bundle that holds no model."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Settings of the run that made the bundle."""
    dataset_hash: str
    """Hash of the training data."""
    read_as: dict[str, Any] = Field(default_factory=dict)
    """Settings of jobs.prepare with which the raw rows of the training data were read, for jobs.predict; empty if they
    are not known."""
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    """Metrics as training reported them; None where undefined."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of Python and the libraries."""


def member_folder(name: str) -> str:
    """The folder of a member's files inside a bundle."""
    return f"members/{name}"


def _instead_of(url: str) -> str:
    """The remedy where no bundle is: the bundles directly below, if there are some."""
    if not storage.exists(url):
        return (
            "the path does not exist, so check it, or make a bundle with jobs.finetune, jobs.train_gbdt or a pipeline"
        )
    below = {child: storage.read_manifest(child) or {} for child in storage.children(url)}
    if found := [child for child, manifest in below.items() if manifest.get("format") == FORMAT]:
        return f"name one below it: {', '.join(found[:10])}"
    return f"it has no {storage.MANIFEST}; make a bundle with jobs.finetune, jobs.train_gbdt or a pipeline"


def read_bundle_manifest(url: str) -> dict[str, Any]:
    """The manifest of a bundle: its files with their hashes, and its origin.

    Raises:
        InputError: nothing is committed there, it is not a bundle or has another version, or the environment names
            trusted bundles and this one is not among them.
    """
    manifest = storage.read_manifest(url)
    if manifest is None:
        raise InputError(f"{url}: no bundle is committed there; {_instead_of(url)}")
    where = storage.join(url, storage.MANIFEST)
    if manifest.get("format") != FORMAT:
        raise InputError(f"{where}: not a bundle but {manifest.get('format', 'something else')!r}; check the path")
    if manifest.get("version") != VERSION:
        raise InputError(
            f"{where}: a bundle of version {manifest.get('version')}, this ltrscale reads version {VERSION}; "
            "install the ltrscale that made it, or train it again"
        )
    _check_trusted(manifest, url)
    return manifest


def content_hash(url: str) -> str:
    """Hash of the names and content hashes of a bundle's files.

    Raises:
        InputError: as `read_bundle_manifest`.
    """
    return _hash_of(read_bundle_manifest(url))


def _hash_of(manifest: Mapping[str, Any]) -> str:
    return digest(sorted(storage.listed_in(manifest).items()))


def _check_trusted(manifest: Mapping[str, Any], url: str) -> None:
    """Check that a bundle is trusted, if the environment names a file of trusted bundles."""
    if not (trusted := os.environ.get(TRUSTED)):
        return
    lines = storage.read_bytes(trusted).decode(errors="replace").splitlines()
    if (found := _hash_of(manifest)) not in {line.partition("#")[0].strip() for line in lines}:
        raise InputError(
            f"{url}: its content hash {found} is not in {trusted}, which {TRUSTED} names; "
            "add a line with the hash if you trust the bundle"
        )
