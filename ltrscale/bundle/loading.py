"""Opening a bundle: the class of its kind, with its files, checked against their hashes."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ltrscale import storage
from ltrscale.bundle.contents import (
    CONFIG,
    PROJECTION,
    REFERENCE,
    WEIGHTS,
    BundleConfig,
    FeatureOrder,
    TreesArchitecture,
    member_folder,
    read_bundle_manifest,
)
from ltrscale.bundle.forests import OrderBundle, StackBundle, TreesBundle
from ltrscale.bundle.networks import CombinedBundle, EncoderBundle, PretrainedBundle, RankerBundle
from ltrscale.bundle.opened import Bundle, fitting
from ltrscale.bundle.reference import Reference
from ltrscale.config import validate
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError
from ltrscale.models.combine import CombinedArchitecture
from ltrscale.models.cross_encoder import CrossEncoderConfig
from ltrscale.models.layers import EncoderSettings
from ltrscale.models.ranker import Architecture


def load(url: str) -> Bundle:
    """Open a bundle and check its content against its hashes.

    Raises:
        InputError: nothing is committed there, it is not a bundle or has another version, or a file, which the message
            names, is missing or changed.
    """
    return _open(url, "", read_bundle_manifest(url))


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

    where = storage.join(url, folder + CONFIG)
    config = validate(BundleConfig, _json(read(CONFIG)[CONFIG], where), where)
    has_reference = folder + REFERENCE in storage.listed_in(manifest)
    about: dict[str, Any] = {
        "url": url,
        "features": config.features,
        "config": config.training,
        "dataset_hash": config.dataset_hash,
        "metrics": config.metrics,
        "made_by": manifest.get("made_by", {}),
        "read_as": config.read_as,
        "reference": _reference(read(REFERENCE)[REFERENCE], url) if has_reference else None,
    }
    match config.kind, config.architecture or config.trees or config.order:
        case "pretrained", Architecture() as architecture:
            return PretrainedBundle(architecture=architecture, contents=read(WEIGHTS), **about)
        case "neural", Architecture() as architecture:
            return RankerBundle(architecture=architecture, contents=read(WEIGHTS), **about)
        case "neural", CombinedArchitecture() as several:
            return CombinedBundle(architecture=several, contents=read(WEIGHTS), **about)
        case "feature", FeatureOrder() as order:
            return OrderBundle(order=order, contents={}, **about)
        case "trees", TreesArchitecture() as trees:
            about |= {"trees": trees, "contents": read(*trees.files())}
            about["projection"] = read(PROJECTION)[PROJECTION] if trees.projection else None
            members = {name: _open(url, f"{folder}{member_folder(name)}/", manifest) for name in trees.members}
            return StackBundle(members=members, **about) if members else TreesBundle(**about)
    raise InputError(f"{where}: the bundle's files do not fit each other (a {config.kind} lacks its part); train again")


def _json(content: bytes, where: str) -> Any:
    with fitting(where):
        return json.loads(content)


def _reference(content: bytes, url: str) -> Reference:
    where = storage.join(url, REFERENCE)
    return validate(Reference, _json(content, where), where)


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
    own, there = encoder.vocabulary, selection.vocabulary
    if own is not None and there is not None and (own.sha256 != there.sha256 or own.size < there.size):
        raise InputError(
            f"{whose}: reads tokens of another vocabulary than that of the data; prepare the data with the tokenizer "
            "of its training data"
        )
