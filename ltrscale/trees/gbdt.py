"""Gradient boosted trees, from the same data sets and into the same bundles as the networks.

Shapes: N documents, Q groups.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ltrscale.bundle import Bundle, TreesArchitecture, load, save_trees
from ltrscale.data.split import Split, Splits, check_disjoint, select
from ltrscale.errors import InputError
from ltrscale.launch.workers import ONE, Context, WorkersConfig, launch
from ltrscale.progress import Report, log
from ltrscale.trees.configs import CatBoostConfig, GBDTConfig, LightGBMConfig, XGBoostConfig
from ltrscale.trees.data import Codes, Labelled, read
from ltrscale.trees.targets import Floats, make_targets
from ltrscale.trees.watch import Watch, watching

HIGHEST_EXPONENTIAL = 31
"""Above, gains 2^y - 1 swamp all others."""
HIGHEST_LINEAR = 10_000


def train_gbdt(
    config: GBDTConfig,
    splits: Splits,
    out: str,
    *,
    made_by: Mapping[str, Any],
    report: Report,
    workers: WorkersConfig = ONE,
) -> Bundle:
    """Train trees on the labelled groups of the training split and commit them as a bundle.

    Missing values are split on as such; categorical features are split by sets of codes. Features are streamed into
    the library's bins. The validation NDCG is this package's own: groups without a relevant document are left out,
    while the library's, reported beside it, counts them as 1. Where the training groups are too few for
    `min_data_in_leaf` there is nothing to split: the scores are then equal, which is logged.

    Args:
        config: library, objective (LambdaRank: Burges 2010) and the size of trees.
        splits: training and validation; the test split is not read.
        out: directory of the bundle.
        made_by: origin, recorded in the bundle's manifest; see `ltrscale.config.made_by`.
        report: receives a record for each tree.
        workers: with more than one, each holds a share of the training groups.

    Raises:
        InputError: splits overlap or have no labelled group; a label has no gain; a group has more than 10,000
            documents; no validation group has a relevant document.
    """
    check_disjoint(splits)
    select(splits.train, labelled=True)  # refuses before anything is started
    arguments = {
        "config": config.model_dump(mode="json"),
        "train": splits.train.model_dump(mode="json"),
        "validation": splits.validation.model_dump(mode="json"),
        "out": out,
        "made_by": dict(made_by),
    }
    launch(gbdt_worker, arguments, workers=workers, report=report)
    return load(out)


def gbdt_worker(arguments: Mapping[str, Any], context: Context) -> None:
    """One worker's part of `train_gbdt`; rank 0 writes the bundle."""
    config: GBDTConfig = TypeAdapter(GBDTConfig).validate_python(arguments["config"])
    selection = select(Split(**arguments["train"]), labelled=True)
    train, codes = read(selection, "train")
    validation, _ = read(select(Split(**arguments["validation"]), labelled=True), "validation")
    targets_N = make_targets(config.targets, train.labels_N, train.offsets_Q1)
    check_labels(config, train, targets_N)
    check_validation(validation)
    with watching(config, validation, config.kind, context) as watch:
        model = _boost(config, train, targets_N, validation, codes, watch)
    save_trees(
        arguments["out"],
        {"model": model},
        TreesArchitecture(library=config.kind),
        config=config.model_dump(mode="json"),
        features=selection.features,
        dataset_hash=selection.hash,
        metrics={**watch.metrics(), "labelled_groups": len(train.ids_Q)},
        made_by=arguments["made_by"],
    )
    log.info(
        "boosted %d trees on %d labelled groups, %s %.4f: %s",
        watch.kept, len(train.ids_Q), watch.name, watch.metrics()[watch.name], arguments["out"],
    )  # fmt: skip


def _boost(
    config: GBDTConfig, train: Labelled, targets_N: Floats, validation: Labelled, codes: Codes, watch: Watch
) -> bytes:
    """Grow trees with the library of the config; the model in its own format."""
    match config:
        case LightGBMConfig():
            from ltrscale.trees import with_lightgbm

            return with_lightgbm.boost(config, train, targets_N, validation, codes, watch, network={})
        case XGBoostConfig() | CatBoostConfig():
            raise NotImplementedError


def check_labels(config: GBDTConfig, groups: Labelled, targets_N: Floats) -> None:
    """Check that every target has a gain, where the objective has gains.

    Raises:
        InputError: names the group, the label and the remedy.
    """
    highest = _highest_label(config)
    if highest is None:
        return
    fits_N = (targets_N == targets_N.round()) & (targets_N >= 0) & (targets_N <= highest)
    if not fits_N.all():
        row = int(np.flatnonzero(~fits_N)[0])
        raise InputError(
            f"{groups.split}: group {groups.group_of(row)} has label {targets_N[row]:g}, and gains are for integers "
            f"from 0 to {highest}; map the labels to grades in prepare, lengthen label_gain, or set targets.kind to "
            "quantised"
        )


def _highest_label(config: GBDTConfig) -> int | None:
    """The highest label that has a gain; None where the objective takes any number."""
    if config.objective in ("regression", "softmax", "reg:squarederror", "QueryRMSE"):
        return None
    match config.label_gain:
        case "exponential":
            return HIGHEST_EXPONENTIAL
        case "linear":
            return HIGHEST_LINEAR
        case table:
            return len(table) - 1


def check_validation(validation: Labelled) -> None:
    """Check that NDCG is defined on the validation groups.

    Raises:
        InputError: none has a relevant document, or a label is negative.
    """
    if (validation.labels_N < 0).any():
        row = int(np.flatnonzero(validation.labels_N < 0)[0])
        raise InputError(
            f"{validation.split}: group {validation.group_of(row)} has label {validation.labels_N[row]:g}, NDCG is of "
            "labels from 0; leave scores out of the validation split"
        )
    if not validation.labels_N.any():
        raise InputError(
            f"{validation.split}: none of its labelled groups has a relevant document, so NDCG is undefined; "
            "choose other validation periods"
        )
