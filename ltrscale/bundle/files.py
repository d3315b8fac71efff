"""Bundles on storage: opened as the class of their kind, with files checked against their hashes, and committed."""

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar, overload

import safetensors.torch
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle.blend import BlendBundle
from ltrscale.bundle.contents import (
    CARD,
    CONFIG,
    EXAMPLES,
    PROJECTION,
    REFERENCE,
    WEIGHTS,
    Blend,
    BundleConfig,
    BundleFacts,
    BundleKind,
    FeatureOrder,
    Held,
    InContext,
    TreesArchitecture,
    check_members,
    member_folder,
    names_of,
)
from ltrscale.bundle.networks import CombinedBundle, InContextBundle, PretrainedBundle, RankerBundle
from ltrscale.bundle.opened import Bundle, fitting
from ltrscale.bundle.order import OrderBundle
from ltrscale.bundle.reference import Reference
from ltrscale.bundle.trees import TreesBundle
from ltrscale.bundle.views import Projection
from ltrscale.bundle_manifest import FORMAT, VERSION, hash_of, read_bundle_manifest
from ltrscale.config import StrictT, validate
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError
from ltrscale.markdown import as_code, escape
from ltrscale.models.cross_encoder import CrossEncoderConfig
from ltrscale.models.in_context import InContextNetwork
from ltrscale.models.layers import EncoderSettings
from ltrscale.models.ranker import AnyRanker, Architecture, CombinedArchitecture, rankers_in
from ltrscale.pretext.objective import Pretrainer

BundleT = TypeVar("BundleT", bound=Bundle)
_CLASSES: dict[BundleKind, tuple[type[Bundle], type[Held]]] = {
    "neural": (RankerBundle, Architecture),
    "combined": (CombinedBundle, CombinedArchitecture),
    "pretrained": (PretrainedBundle, Architecture),
    "trees": (TreesBundle, TreesArchitecture),
    "feature": (OrderBundle, FeatureOrder),
    "blend": (BlendBundle, Blend),
    "in_context": (InContextBundle, InContext),
}


@overload
def load(url: str) -> Bundle: ...
@overload
def load(url: str, needed: type[BundleT]) -> BundleT: ...
def load(url: str, needed: type[Bundle] = Bundle) -> Bundle:
    """Open a bundle and check its content against its hashes.

    Args:
        url: its directory.
        needed: the class of the bundles that the caller can use, such as `EncoderBundle`.

    Raises:
        InputError: nothing is committed there, it is not a bundle or has another version, it is of another class than
            the caller needs, or a file, which the message names, is missing or changed.
    """
    manifest = read_bundle_manifest(url)
    check_members(storage.listed_in(manifest), url)
    opened = _open(url, "", manifest)
    if not isinstance(opened, needed):
        raise opened.needed(needed.wanted)
    return opened


def _open(url: str, folder: str, manifest: Mapping[str, Any]) -> Bundle:
    """The bundle in a folder of a committed directory; the folder is "" or ends with a slash."""

    def read(name: str) -> bytes:
        return storage.read_verified(url, folder + name, manifest)

    def parsed(cls: type[StrictT], name: str) -> StrictT:
        path, content = storage.join(url, folder + name), read(name)
        with fitting(path):
            values = json.loads(content)
        return validate(cls, values, path)

    config = parsed(BundleConfig, CONFIG)
    bundle_class, held_class = _CLASSES[config.kind]
    held = validate(held_class, config.part, f"{storage.join(url, folder + CONFIG)}: part")
    files, members = names_of(held)
    has_reference = folder + REFERENCE in storage.listed_in(manifest)
    return bundle_class(
        url=url,
        content_hash=hash_of(manifest, folder),
        held=held,
        contents={name: read(name) for name in files},
        members={name: _open(url, f"{folder}{member_folder(name)}/", manifest) for name in members},
        features=config.features,
        config=config.training,
        dataset_hash=config.dataset_hash,
        read_as=config.read_as,
        present=config.present,
        reference=parsed(Reference, REFERENCE) if has_reference else None,
        metrics=config.metrics,
        made_by=manifest.get("made_by", {}),
    )


def with_tokens_of(selection: Selection, opened: Iterable[Bundle]) -> Selection:
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
    of_encoder, of_data = encoder.vocabulary, selection.vocabulary
    if (
        of_encoder is not None
        and of_data is not None
        and (of_encoder.sha256 != of_data.sha256 or of_encoder.size < of_data.size)
    ):
        raise InputError(
            f"{whose}: reads tokens of another vocabulary than that of the data; prepare the data with the tokenizer "
            "of its training data"
        )


def save_ranker(url: str, model: AnyRanker, about: BundleFacts) -> None:
    """Commit a ranker as a bundle."""
    title = "A neural ranker: raw features in, one score a document out."
    contents = {WEIGHTS: _serialise(model.state_dict())}
    kind: BundleKind = "combined" if isinstance(model.architecture, CombinedArchitecture) else "neural"
    weights = [part.architecture.goals for part in rankers_in(model) if part.architecture.goals]
    stated = [", ".join(f"{weight:g} {escape(goal)}" for goal, weight in goals.items()) for goals in weights]
    lines = [f"- the score is a weighted sum of a head for each goal: {each}" for each in dict.fromkeys(stated)]
    _save(url, kind, model.architecture, about, contents, [title, *lines])


def save_pretrained(url: str, model: Pretrainer, about: BundleFacts) -> None:
    """Commit the transform, encoder and projector of a pretrained network as a bundle."""
    modules = {"transform": model.transform, "encoder": model.encoder, "projector": model.projector}
    tensors = {
        f"{name}.{key}": value
        for name, module in modules.items()
        if module is not None
        for key, value in module.state_dict().items()
    }
    title = "A pretrained encoder: to be finetuned with jobs.finetune; it does not score."
    _save(url, "pretrained", model.architecture, about, {WEIGHTS: _serialise(tensors)}, [title])


def save_trees(
    url: str,
    models: Mapping[str, bytes],
    trees: TreesArchitecture,
    about: BundleFacts,
    *,
    projection: Projection | None = None,
    members: Mapping[str, str] | None = None,
) -> None:
    """Commit trees, each model in its library's own format, as a bundle.

    The trees were grown on the output of `boosters.renumber`, whose codes are stored in the models. `members` are the
    bundles whose scores they see, by name.

    Raises:
        InputError: a member cannot be read.
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
    _save(url, "trees", trees, about, contents, [title, *inside], members)


def save_order(url: str, order: FeatureOrder, about: BundleFacts) -> None:
    """Commit the order of documents by one feature as a bundle; `features` is that feature alone."""
    title = "The order of one feature: its value is the score of a document."
    _save(url, "feature", order, about, {}, [title])


def save_blend(url: str, blend: Blend, about: BundleFacts, members: Mapping[str, str]) -> None:
    """Commit the blend of several bundles, by name, as one; raises `InputError` if one cannot be read."""
    title = "The mean of several rankers' scores: raw features in, one score a document out."
    inside = [f"- {weight:.3f} of `{member_folder(escape(name))}`" for name, weight in blend.weights.items()]
    _save(url, "blend", blend, about, {}, [title, *inside], members)


def save_in_context(url: str, network: InContextNetwork, samples: Sequence[QueryGroups], about: BundleFacts) -> None:
    """Commit an in-context network as a bundle, with the examples of each reading, which have labels."""
    examples = {
        f"{number}.{name}": values
        for number, groups in enumerate(samples)
        for name, values in (
            ("features", groups.features_NF),
            ("offsets", groups.offsets_Q1),
            ("labels", groups.labels_N),
        )
        if values is not None
    }
    title = "A ranker that has read examples: raw features in, one score a document out."
    inside = [f"- its network reads the examples in `{EXAMPLES}`: samples {len(samples)}"]
    contents = {WEIGHTS: _serialise(network.state_dict()), EXAMPLES: _serialise(examples)}
    in_context = InContext(sizes=network.sizes, readings=len(samples))
    _save(url, "in_context", in_context, about, contents, [title, *inside])


def _save(
    url: str,
    kind: BundleKind,
    held: Held,
    about: BundleFacts,
    contents: Mapping[str, bytes],
    card_lines: Sequence[str],
    members: Mapping[str, str] | None = None,
) -> None:
    # JSON has neither NaN nor infinity
    metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in about.metrics.items()}
    library = held.library if isinstance(held, TreesArchitecture) else "lightgbm"
    config = BundleConfig.model_validate(
        {
            "kind": kind,
            "features": about.features,
            "part": held.model_dump(mode="json"),
            "training": about.config,
            "dataset_hash": about.dataset_hash,
            "read_as": about.read_as,
            "present": about.present,
            "metrics": metrics,
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("ltrscale", "torch", library, "numpy")},
        }
    )
    files = {
        CONFIG: (config.model_dump_json(indent=1) + "\n").encode(),
        **contents,
        **({} if about.reference is None else {REFERENCE: about.reference.model_dump_json().encode()}),
        CARD: _card(config, *card_lines).encode(),
    }
    for name, member in (members or {}).items():
        files |= _files_inside(name, member)
    check_members(files, url)
    with storage.Commit(url) as commit:
        commit.write(files)
        commit.finish({"format": FORMAT, "version": VERSION, "made_by": dict(about.made_by)})


def _files_inside(name: str, url: str) -> dict[str, bytes]:
    """The files of a bundle under the names that they have inside another one."""
    manifest = read_bundle_manifest(url)
    paths = [file["path"] for file in manifest.get("files", [])]
    return {f"{member_folder(name)}/{path}": storage.read_verified(url, path, manifest) for path in paths}


def _card(config: BundleConfig, title: str, *inside: str) -> str:
    """The README in Markdown: title, facts of every bundle, and lines on what is inside."""
    categorical = sum(feature.kind == "categorical" for feature in config.features)
    metrics = [f"| {escape(name)} | {escape(str(value))} |" for name, value in config.metrics.items()]
    versions = ", ".join(f"{name} {value}" for name, value in config.versions.items())
    lines = [
        f"# {title}",
        "",
        f"- features: {len(config.features)}, {categorical} of them categorical; names and order in `{CONFIG}`",
        *inside,
        f"- trained on the data set with hash {as_code(config.dataset_hash)}",
        *(f"- {escape(name)}: in {share:.0%} of the training periods" for name, share in config.present.items()),
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
