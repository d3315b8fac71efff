"""ModelBundle: a directory with everything that scoring needs, for networks, trees and orders; no pickle anywhere.

    config.json           kind, features, architecture, training settings, data set hash, metrics, versions
    weights.safetensors   of a network, including its feature transform
    examples.safetensors  of a ranker that reads examples: those of each reading
    model.txt             of trees: LightGBM's own text format (XGBoost's model.json, CatBoost's model.cbm); an ensemble
                          has model-0.txt, model-1.txt, ...
    projection.safetensors  of trees that see principal components too
    members/NAME/...      of stacked trees and of blends: the files of each bundle whose scores they see
    reference.json        of what scores: what training's rows look like, feature by feature (`Reference`)
    README.md             a card for people
    manifest.json         written last: format, content hashes, origin

`load` checks all files that it reads against these hashes. If the environment variable `LTRSCALE_TRUSTED_BUNDLES` names
a file, `load` opens a bundle only if its content hash is a line of that file.
"""

from ltrscale.bundle.contents import (
    Blend,
    BundleConfig,
    BundleFacts,
    FeatureOrder,
    MetricValue,
    TreesArchitecture,
    facts,
)
from ltrscale.bundle.files import (
    load,
    save_blend,
    save_in_context,
    save_order,
    save_pretrained,
    save_ranker,
    save_trees,
    with_tokens_of,
)
from ltrscale.bundle.networks import EncoderBundle, PretrainedBundle, RankerBundle
from ltrscale.bundle.opened import Bundle, Scorer, scorers_of
from ltrscale.bundle.without_networks import TreesBundle, order_scorer
from ltrscale.bundle_manifest import bundle_files, content_hash, read_bundle_manifest

__all__ = [
    "Blend",
    "Bundle",
    "BundleConfig",
    "BundleFacts",
    "EncoderBundle",
    "FeatureOrder",
    "MetricValue",
    "PretrainedBundle",
    "RankerBundle",
    "Scorer",
    "TreesArchitecture",
    "TreesBundle",
    "bundle_files",
    "content_hash",
    "facts",
    "load",
    "order_scorer",
    "read_bundle_manifest",
    "save_blend",
    "save_in_context",
    "save_order",
    "save_pretrained",
    "save_ranker",
    "save_trees",
    "scorers_of",
    "with_tokens_of",
]
