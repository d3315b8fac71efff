"""The files of a bundle, and what `config.json` and the manifest say."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.bundle import boosters
from ltrscale.bundle.reference import Reference, reference_of
from ltrscale.config import Config, Strict
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError, nearest
from ltrscale.models.combine import CombinedArchitecture
from ltrscale.models.in_context import InContextSizes
from ltrscale.models.ranker import Architecture
from ltrscale.origin import digest

MetricValue = float | int | str | None
BundleKind = Literal["neural", "combined", "pretrained", "trees", "feature", "blend", "in_context"]
FORMAT, VERSION = "ltrscale-bundle", 2
_READ = (1, VERSION)
"""The versions that can be read."""
_PARTS_1 = ("architecture", "trees", "order", "blend", "in_context")
"""The keys for the part in version 1, all but one of them null or absent."""
TRUSTED = "LTRSCALE_TRUSTED_BUNDLES"
"""The environment variable that names a file with the content hashes of trusted bundles."""
CONFIG, WEIGHTS, PROJECTION, CARD = "config.json", "weights.safetensors", "projection.safetensors", "README.md"
REFERENCE = "reference.json"
EXAMPLES = "examples.safetensors"
_MOST_MEMBERS = 500
"""Maximum number of bundles inside one, at any depth."""


class TreesArchitecture(Config):
    """The parts of a bundle of trees; trees see features, then components of these, then members' scores."""

    library: boosters.Library = "lightgbm"
    """The library whose format the model files have."""
    models: tuple[str, ...] = Field(("model",), max_length=100)
    """Names of the models; their scores are averaged."""
    sees: tuple[str, ...] | None = None
    """Raw features that the trees see; None for all."""
    per_query: bool = False
    """Whether the numeric ones are standardised within each query group."""
    projection: int = Field(0, ge=0, le=1_000_000)
    """Number of principal components that the trees see."""
    members: tuple[str, ...] = Field((), max_length=100)
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
        """The named one of these features.

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
        closest = nearest(self.feature, numeric)
        raise InputError(
            f"feature: there is no numeric feature {self.feature!r}; "
            + (f"the nearest is {closest!r}" if closest else "the data have none")
        )


class Blend(Config):
    """The weighted mean of the scores of the bundles inside, each standardised within its query group.

    Ranking losses do not fix the scale of scores, so scores of different models must not be added directly.
    """

    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(min_length=1, max_length=100)
    """By the name of the bundle inside; they add up to 1."""


class InContext(Config):
    """A network that ranks after reading examples, which are in the bundle."""

    sizes: InContextSizes
    """Sizes of the network."""
    readings: int = Field(ge=1, le=100)
    """Samples of the examples that it reads; their scores are averaged."""


Held = Architecture | CombinedArchitecture | TreesArchitecture | FeatureOrder | Blend | InContext
"""What a bundle holds."""


def names_of(held: Held) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the files of weights or trees, and of the bundles inside."""
    match held:
        case TreesArchitecture():
            return (*held.files(), *([PROJECTION] if held.projection else [])), held.members
        case Blend():
            return (), tuple(held.weights)
        case FeatureOrder():
            return (), ()
        case InContext():
            return (WEIGHTS, EXAMPLES), ()
    return (WEIGHTS,), ()


class BundleConfig(Strict):
    """`config.json` of a bundle."""

    kind: BundleKind
    features: tuple[Feature, ...]
    """Features that the model reads, in order."""
    part: dict[str, Any]
    """What the bundle holds, a `Held` whose class follows from the kind."""
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

    @model_validator(mode="before")
    @classmethod
    def _of_version_1(cls, values: Any) -> Any:
        """Read what version 1 had under several keys."""
        if not isinstance(values, dict) or "part" in values:
            return values
        parts = [part for key in _PARTS_1 if (part := values.get(key)) is not None]
        rest = {key: value for key, value in values.items() if key not in _PARTS_1}
        if len(parts) != 1:
            return rest
        combined = {"kind": "combined"} if "how" in parts[0] else {}
        return {**rest, "part": parts[0], **combined}


def member_folder(name: str) -> str:
    """The folder of a member's files inside a bundle."""
    return f"members/{name}"


def check_members(paths: Iterable[str], url: str) -> None:
    """Check that a bundle with these files holds no more bundles, at any depth, than can be opened in seconds.

    Raises:
        InputError: it holds more.
    """
    inside = sum(path.endswith(f"/{CONFIG}") for path in paths)
    if inside > _MOST_MEMBERS:
        raise InputError(
            f"{url}: holds {inside:,} bundles, and {_MOST_MEMBERS} are the most; blend or stack fewer, or distil them"
        )


def _instead_of(url: str) -> str:
    """The remedy for a missing bundle: names the bundles directly below, if any."""
    if not storage.exists(url):
        return (
            "the path does not exist, so check it, or make a bundle with jobs.finetune, jobs.train_gbdt or a pipeline"
        )
    below = {child: storage.read_manifest(child) or {} for child in storage.children(url)}
    if nested := [child for child, manifest in below.items() if manifest.get("format") == FORMAT]:
        return f"name one below it: {', '.join(nested[:10])}"
    return f"it has no {storage.MANIFEST}; make a bundle with jobs.finetune, jobs.train_gbdt or a pipeline"


def read_bundle_manifest(url: str) -> dict[str, Any]:
    """The manifest of a bundle: its files with their hashes, and its origin.

    Raises:
        InputError: nothing is committed there, it is not a bundle or has another version, the environment names
            trusted bundles and this one is not among them, or its directory is named with the hash of another bundle.
    """
    manifest = storage.read_manifest(url)
    if manifest is None:
        raise InputError(f"{url}: no bundle is committed there; {_instead_of(url)}")
    path = storage.join(url, storage.MANIFEST)
    if manifest.get("format") != FORMAT:
        raise InputError(f"{path}: not a bundle but {manifest.get('format', 'something else')!r}; check the path")
    if manifest.get("version") not in _READ:
        raise InputError(
            f"{path}: a bundle of version {manifest.get('version')}, this ltrscale reads version {VERSION}; "
            "install the ltrscale that made it, or train it again"
        )
    _check_trusted(manifest, url)
    _check_named(manifest, url)
    return manifest


def content_hash(url: str) -> str:
    """Hash of the names and content hashes of a bundle's files.

    Raises:
        InputError: as `read_bundle_manifest`.
    """
    return hash_of(read_bundle_manifest(url))


def hash_of(manifest: Mapping[str, Any], folder: str = "") -> str:
    """The content hash of a bundle, or of a member in a folder such as `members/trees/`, equal to the member's own."""
    files = storage.listed_in(manifest).items()
    return digest(sorted((path.removeprefix(folder), sha256) for path, sha256 in files if path.startswith(folder)))


def _check_named(manifest: Mapping[str, Any], url: str) -> None:
    """Check the content of a bundle in a directory named by content hash, as in serving."""
    name = url.rstrip("/").rpartition("/")[2]
    if storage.are_hashes([name]) and name != (bundle_hash := hash_of(manifest)):
        raise InputError(
            f"{url}: holds the bundle with the hash {bundle_hash[:12]}..., not the one that its name says: it was "
            "changed after it was judged; take another one, as jobs.weekly --rollback does"
        )


def _check_trusted(manifest: Mapping[str, Any], url: str) -> None:
    """Check that a bundle is trusted, if the environment names a file of trusted bundles."""
    if not (trusted := os.environ.get(TRUSTED)):
        return
    lines = storage.read_bytes(trusted).decode(errors="replace").splitlines()
    if (bundle_hash := hash_of(manifest)) not in {line.partition("#")[0].strip() for line in lines}:
        raise InputError(
            f"{url}: its content hash {bundle_hash} is not in {trusted}, which {TRUSTED} names; "
            "add a line with the hash if you trust the bundle"
        )


@dataclass(frozen=True, kw_only=True)
class BundleFacts:
    """What every bundle records."""

    config: Mapping[str, Any]
    """Settings of the run that made the bundle."""
    features: tuple[Feature, ...]
    dataset_hash: str
    read_as: Mapping[str, Any] = field(default_factory=dict)
    """Settings with which the raw rows of the training data were read; empty if they are not known."""
    reference: Reference | None = None
    """What the rows of its training periods look like; None for a bundle that does not score."""
    metrics: Mapping[str, MetricValue]
    made_by: Mapping[str, Any]


def facts(
    selection: Selection, config: Config, *, metrics: Mapping[str, MetricValue], made_by: Mapping[str, Any]
) -> BundleFacts:
    """The facts of a model that scores, trained on a selection with the settings of a config."""
    return BundleFacts(
        config=config.model_dump(mode="json"),
        features=selection.features,
        dataset_hash=selection.hash,
        read_as=selection.read_as,
        reference=reference_of(selection),
        metrics=metrics,
        made_by=made_by,
    )
