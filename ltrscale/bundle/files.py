"""Bundles on storage: opened as the class of their kind, with files checked against their hashes, and committed."""

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NotRequired, TypedDict, Unpack

import safetensors.torch
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle.contents import (
    CARD,
    CONFIG,
    EXAMPLES,
    FORMAT,
    PROJECTION,
    REFERENCE,
    VERSION,
    WEIGHTS,
    Blend,
    BundleConfig,
    BundleKind,
    FeatureOrder,
    InContext,
    MetricValue,
    Reference,
    TreesArchitecture,
    check_members,
    hash_of,
    member_folder,
    read_bundle_manifest,
    reference_of,
)
from ltrscale.bundle.networks import CombinedBundle, EncoderBundle, PretrainedBundle, RankerBundle
from ltrscale.bundle.opened import BlendBundle, Bundle, InContextBundle, OrderBundle, StackBundle, TreesBundle, fitting
from ltrscale.bundle.views import Projection
from ltrscale.config import Config, validate
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError
from ltrscale.markdown import as_code, escape
from ltrscale.models.combine import AnyRanker, CombinedArchitecture
from ltrscale.models.cross_encoder import CrossEncoderConfig
from ltrscale.models.in_context import InContextNetwork
from ltrscale.models.layers import EncoderSettings
from ltrscale.models.ranker import Architecture
from ltrscale.pretext.objective import Pretrainer


def load(url: str) -> Bundle:
    """Open a bundle and check its content against its hashes.

    Raises:
        InputError: nothing is committed there, it is not a bundle or has another version, or a file, which the message
            names, is missing or changed.
    """
    manifest = read_bundle_manifest(url)
    check_members(storage.listed_in(manifest), url)
    return _open(url, "", manifest)


def load_encoder(url: str) -> EncoderBundle:
    """Open a bundle of one network, from whose encoder a training can start.

    Raises:
        InputError: as `load`, or it holds trees, the order of a feature, or several rankers.
    """
    opened = load(url)
    if not isinstance(opened, EncoderBundle):
        raise opened.no_encoder()
    return opened


def load_pretrained(url: str) -> PretrainedBundle:
    """Open a bundle of a pretrained encoder.

    Raises:
        InputError: as `load`, or it holds something else.
    """
    opened = load(url)
    if not isinstance(opened, PretrainedBundle):
        raise InputError(f"{url}: no pretrained encoder; name the bundle that jobs.pretrain made")
    return opened


def load_trees(url: str) -> TreesBundle:
    """Open a bundle of trees.

    Raises:
        InputError: as `load`, or it holds something else.
    """
    opened = load(url)
    if not isinstance(opened, TreesBundle):
        raise InputError(f"{url}: holds {opened.holds}; name a bundle that jobs.train_gbdt made")
    return opened


def _open(url: str, folder: str, manifest: Mapping[str, Any]) -> Bundle:
    """The bundle in a folder of a committed directory; the folder is "" or ends with a slash."""

    def read(*names: str) -> dict[str, bytes]:
        return {name: storage.read_verified(url, folder + name, manifest) for name in names}

    path = storage.join(url, folder + CONFIG)
    config = validate(BundleConfig, _json(read(CONFIG)[CONFIG], path), path)
    has_reference = folder + REFERENCE in storage.listed_in(manifest)
    common: dict[str, Any] = {
        "url": url,
        "content_hash": hash_of(manifest, folder),
        "features": config.features,
        "config": config.training,
        "dataset_hash": config.dataset_hash,
        "metrics": config.metrics,
        "made_by": manifest.get("made_by", {}),
        "read_as": config.read_as,
        "reference": _reference(read(REFERENCE)[REFERENCE], url) if has_reference else None,
    }

    def members(names: Sequence[str]) -> dict[str, Bundle]:
        return {name: _open(url, f"{folder}{member_folder(name)}/", manifest) for name in names}

    match config.kind, config.architecture or config.trees or config.order or config.blend or config.in_context:
        case "pretrained", Architecture() as architecture:
            return PretrainedBundle(architecture=architecture, contents=read(WEIGHTS), **common)
        case "neural", Architecture() as architecture:
            return RankerBundle(architecture=architecture, contents=read(WEIGHTS), **common)
        case "neural", CombinedArchitecture() as several:
            return CombinedBundle(architecture=several, contents=read(WEIGHTS), **common)
        case "feature", FeatureOrder() as order:
            return OrderBundle(order=order, contents={}, **common)
        case "trees", TreesArchitecture() as trees:
            common |= {"trees": trees, "contents": read(*trees.files())}
            common["projection"] = read(PROJECTION)[PROJECTION] if trees.projection else None
            return (StackBundle if trees.members else TreesBundle)(members=members(trees.members), **common)
        case "blend", Blend() as blend:
            return BlendBundle(blend=blend, members=members([*blend.weights]), contents={}, **common)
        case "in_context", InContext() as in_context:
            return InContextBundle(in_context=in_context, contents=read(WEIGHTS, EXAMPLES), **common)
    raise InputError(f"{path}: the bundle's files do not fit each other (a {config.kind} lacks its part); train again")


def _json(content: bytes, path: str) -> Any:
    with fitting(path):
        return json.loads(content)


def _reference(content: bytes, url: str) -> Reference:
    path = storage.join(url, REFERENCE)
    return validate(Reference, _json(content, path), path)


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


def facts(
    selection: Selection, config: Config, *, metrics: Mapping[str, MetricValue], made_by: Mapping[str, Any]
) -> BundleFacts:
    """The facts of a model that scores, trained on a selection with the settings of a config."""
    return {
        "config": config.model_dump(mode="json"),
        "features": selection.features,
        "dataset_hash": selection.hash,
        "read_as": selection.read_as,
        "reference": reference_of(selection),
        "metrics": metrics,
        "made_by": made_by,
    }


def save_ranker(url: str, model: AnyRanker, **about: Unpack[BundleFacts]) -> None:
    """Commit a ranker as a bundle."""
    title = "A neural ranker: raw features in, one score a document out."
    contents = {WEIGHTS: _serialise(model.state_dict())}
    _save(url, "neural", contents, about, [title], architecture=model.architecture)


def save_pretrained(url: str, model: Pretrainer, **about: Unpack[BundleFacts]) -> None:
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


def save_blend(url: str, blend: Blend, **about: Unpack[BundleFacts]) -> None:
    """Commit the blend of several bundles, whose files are among `files`, see `member_files`."""
    title = "The mean of several rankers' scores: raw features in, one score a document out."
    inside = [f"- {weight:.3f} of `{member_folder(escape(name))}`" for name, weight in blend.weights.items()]
    _save(url, "blend", {}, about, [title, *inside], blend=blend)


def save_in_context(
    url: str, network: InContextNetwork, samples: Sequence[QueryGroups], **about: Unpack[BundleFacts]
) -> None:
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
    _save(url, "in_context", contents, about, [title, *inside], in_context=in_context)


def member_files(name: str, url: str) -> dict[str, bytes]:
    """The files of a bundle under the names that they have inside another one.

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
    facts_of_bundle: BundleFacts,
    says: Sequence[str],
    *,
    architecture: Architecture | CombinedArchitecture | None = None,
    trees: TreesArchitecture | None = None,
    order: FeatureOrder | None = None,
    blend: Blend | None = None,
    in_context: InContext | None = None,
) -> None:
    # JSON has neither NaN nor infinity
    metrics = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts_of_bundle["metrics"].items()
    }
    config = BundleConfig(
        kind=kind,
        features=tuple(facts_of_bundle["features"]),
        architecture=architecture,
        trees=trees,
        order=order,
        blend=blend,
        in_context=in_context,
        training=dict(facts_of_bundle["config"]),
        dataset_hash=facts_of_bundle["dataset_hash"],
        read_as=dict(facts_of_bundle.get("read_as", {})),
        metrics=metrics,
        versions={"python": platform.python_version()}
        | {name: version(name) for name in ("ltrscale", "torch", trees.library if trees else "lightgbm", "numpy")},
    )
    reference = facts_of_bundle.get("reference")
    files = {
        CONFIG: (config.model_dump_json(indent=1) + "\n").encode(),
        **contents,
        **({} if reference is None else {REFERENCE: reference.model_dump_json().encode()}),
        CARD: bundle_card(config, *says).encode(),
        **facts_of_bundle.get("files", {}),
    }
    check_members(files, url)
    with storage.Commit(url) as commit:
        commit.write(files)
        commit.finish({"format": FORMAT, "version": VERSION, "made_by": dict(facts_of_bundle["made_by"])})


def bundle_card(config: BundleConfig, title: str, *inside: str) -> str:
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
