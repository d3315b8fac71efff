"""The files of a bundle, and what `config.json` and the manifest say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ltrscale.bundle import boosters
from ltrscale.bundle.reference import Reference, reference_of
from ltrscale.config import Config, Strict
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError, nearest
from ltrscale.models.in_context import InContextSizes
from ltrscale.models.ranker import Architecture, CombinedArchitecture

MetricValue = float | int | str | None
BundleKind = Literal["neural", "combined", "pretrained", "trees", "feature", "blend", "in_context"]
_PARTS_1 = ("architecture", "trees", "order", "blend", "in_context")
"""The keys for the part in version 1, all but one of them null or absent."""
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
        case Architecture() | CombinedArchitecture():
            return (WEIGHTS,), ()
        case TreesArchitecture():
            return (*held.files(), *([PROJECTION] if held.projection else [])), held.members
        case Blend():
            return (), tuple(held.weights)
        case FeatureOrder():
            return (), ()
        case InContext():
            return (WEIGHTS, EXAMPLES), ()


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
    present: dict[str, float] = Field(default_factory=dict, exclude_if=lambda present: not present)
    """Share of the training periods whose files have a feature, where it is not 1."""
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


@dataclass(frozen=True, kw_only=True)
class BundleFacts:
    """What every bundle records."""

    config: Mapping[str, Any]
    """Settings of the run that made the bundle."""
    features: tuple[Feature, ...]
    dataset_hash: str
    read_as: Mapping[str, Any] = field(default_factory=dict)
    """Settings with which the raw rows of the training data were read; empty if they are not known."""
    present: Mapping[str, float] = field(default_factory=dict)
    """Share of the training periods whose files have a feature, where it is not 1."""
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
        present=selection.present(),
        reference=reference_of(selection),
        metrics=metrics,
        made_by=made_by,
    )
