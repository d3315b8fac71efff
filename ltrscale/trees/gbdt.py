"""Gradient boosted trees, which read the same data sets and write the same bundles as networks.

Shapes: N documents, Q groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ltrscale.boosters import import_catboost
from ltrscale.bundle import Bundle, TreesArchitecture, load, save_trees
from ltrscale.data.dataset.split import Selection, Splits, check_disjoint, select
from ltrscale.errors import InputError
from ltrscale.launch.start import launch
from ltrscale.launch.workers import ONE, Context, WorkersConfig, rank_and_world
from ltrscale.progress import Report, log
from ltrscale.trees.configs import CatBoostConfig, GBDTConfig, LightGBMConfig, XGBoostConfig
from ltrscale.trees.data import Codes, Labelled, read
from ltrscale.trees.shares import check_complete, deal, merged, shared_targets, together
from ltrscale.trees.targets import Floats
from ltrscale.trees.watch import Watch, watching

HIGHEST_EXPONENTIAL = 31
"""Highest label; gains 2^y - 1 of higher labels would swamp all others."""
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

    Missing values are not imputed: a split sends them to one side. Categorical features are split by sets of codes.
    Features are streamed into the library's bins. The validation NDCG is this package's own, which leaves out groups
    without a relevant document; the library's NDCG, reported beside it, counts them as 1. If the training groups are
    too few for `min_data_in_leaf`, there is nothing to split: all scores are equal, and a warning is logged.

    Args:
        config: library, objective (LambdaRank: Burges 2010) and the size of trees.
        splits: training and validation; the test split is not read.
        out: directory of the bundle.
        made_by: origin, recorded in the bundle's manifest; see `ltrscale.config.made_by`.
        report: receives a record for each tree.
        workers: with more than one, each holds a share of the training groups and all validation groups. The trees
            differ slightly from those of one process, because LightGBM then estimates the number of documents of a leaf
            and XGBoost merges quantiles. If a worker dies, all restart from the first tree.

    Raises:
        InputError: splits overlap or have no labelled group; a label has no gain; a group has more than 10,000
            documents; no validation group has a relevant document; the library is not installed or takes only one
            worker; there are fewer row groups than workers.
    """
    check_disjoint(splits)
    world = max(workers.most, rank_and_world()[1])
    check_library(config, world)
    train, validation = (select(split, labelled=True) for split in (splits.train, splits.validation))
    deal(train, rank=0, world=world)  # raises before any worker is started
    work = TreeGrowing(config, train, with_features_of(train, validation), out, made_by, workers.cpus)
    launch(work, workers=workers, report=report)
    return load(out)


def with_features_of(train: Selection, validation: Selection) -> Selection:
    """The validation groups, with the features of the training split.

    Raises:
        InputError: the validation split lacks some of these features.
    """
    return validation.serving(train.features, whose="the training split", where="the validation split")


@dataclass(frozen=True)
class TreeGrowing:
    """The work of training trees, the same value on every worker."""

    config: GBDTConfig
    train: Selection
    validation: Selection
    out: str
    made_by: Mapping[str, Any]
    cpus: float
    """Logical CPUs of each worker."""

    def __call__(self, context: Context) -> None:
        """Take part; rank 0 writes the bundle."""
        config: GBDTConfig = self.config
        rank, world = rank_and_world()
        train, codes = read(deal(self.train, rank=rank, world=world), "train")
        check_complete(self.train, train)
        validation, _ = read(self.validation, "validation")
        check_validation(validation)
        if world > 1 and config.num_threads == 0:  # 0 would take all cores of a machine that workers may share
            config = config.replace(num_threads=max(1, int(self.cpus)))
        grown = grow(config, train, codes, validation, together(context))
        if rank > 0:
            return
        save_trees(
            self.out,
            {"model": grown.model},
            TreesArchitecture(library=config.kind),
            config=self.config.model_dump(mode="json"),
            features=self.train.features,
            dataset_hash=self.train.hash,
            metrics={**grown.metrics, "labelled_groups": self.train.n_groups},
            made_by=self.made_by,
        )
        log.info("committed %s", self.out)


class Grown(NamedTuple):
    """A model in its library's own format, and its metrics."""

    model: bytes
    metrics: Mapping[str, float]


def grow(config: GBDTConfig, train: Labelled, codes: Codes, validation: Labelled, context: Context) -> Grown:
    """Grow trees on the training groups of all workers.

    Args:
        config: library, objective and size.
        train: this worker's training groups.
        codes: codes and sample of these groups.
        validation: all validation groups, checked by `check_validation`.
        context: receives a record for each tree.

    Raises:
        InputError: a label has no gain.
        Stopped: this process was asked to stop.
    """
    targets_N = shared_targets(config.targets, train)
    check_labels(config, train, targets_N)
    check_labels(config, validation, validation.labels_N)
    with watching(config, validation, config.kind, context) as watch:
        model = _boost(config, train, targets_N, validation, merged(codes), watch)
    metrics = {**watch.metrics(), "validation_groups": len(validation.ids_Q)}
    log.info("boosted %d trees with %s, %s %.4f", watch.kept, config.kind, watch.name, metrics[watch.name])
    return Grown(model, metrics)


def _boost(
    config: GBDTConfig, train: Labelled, targets_N: Floats, validation: Labelled, codes: Codes, watch: Watch
) -> bytes:
    """Grow trees with the config's library, importing no other; returns the model in the library's format."""
    match config:
        case LightGBMConfig():
            from ltrscale.trees import with_lightgbm

            return with_lightgbm.boost(config, train, targets_N, validation, codes, watch)
        case XGBoostConfig():
            from ltrscale.trees import with_xgboost

            return with_xgboost.boost(config, train, targets_N, validation, codes, watch)
        case CatBoostConfig():
            from ltrscale.trees import with_catboost

            return with_catboost.boost(config, train, targets_N, validation, codes, watch)


def check_library(config: GBDTConfig, world: int) -> None:
    """Check that the library is installed and supports this number of workers.

    Raises:
        InputError: CatBoost is not installed, or there are several workers for it.
    """
    if not isinstance(config, CatBoostConfig):
        return
    if world > 1:
        raise InputError(
            f"CatBoost trains in one process, not on {world} workers; set workers to 1, or choose another kind"
        )
    import_catboost()


def check_alone(config: GBDTConfig) -> None:
    """Check that the library is installed and this process is the only one, for trainers that are not distributed.

    Raises:
        InputError: the library is not installed, or there are other processes.
    """
    check_library(config, 1)
    if rank_and_world()[1] > 1:
        raise InputError("semi-supervised and stacked trees train in one process; start the job without torchrun")


def check_labels(config: GBDTConfig, groups: Labelled, targets_N: Floats) -> None:
    """Check that every target has a gain, if the objective uses gains.

    Raises:
        InputError: a target has none; the message names the group, the label and the remedy.
    """
    highest = highest_label(config)
    if highest is None:
        return
    if misfit := _first_misfit(groups, targets_N, highest):
        raise InputError(
            f"{misfit}, and gains are for integers from 0 to {highest}; map the labels to grades in prepare, lengthen "
            "label_gain, or set targets.kind to quantised"
        )


def _first_misfit(groups: Labelled, labels_N: Floats, highest: int) -> str | None:
    """Describes the first document whose label is not an integer from 0 to the highest; None if there is none."""
    rows = np.flatnonzero((labels_N != labels_N.round()) | (labels_N < 0) | (labels_N > highest))
    if not len(rows):
        return None
    row = int(rows[0])
    return f"{groups.split}: group {groups.group_of(row)} has label {labels_N[row]:g}"


def highest_label(config: GBDTConfig) -> int | None:
    """The highest label that has a gain; None if the objective takes any number."""
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
        InputError: no group has a relevant document, or a label is not a grade.
    """
    if misfit := _first_misfit(validation, validation.labels_N, HIGHEST_EXPONENTIAL):
        raise InputError(
            f"{misfit}, and NDCG is of integers from 0 to {HIGHEST_EXPONENTIAL}; leave scores out of the validation "
            "split, or map its labels to grades in prepare"
        )
    if not validation.labels_N.any():
        raise InputError(
            f"{validation.split}: none of its labelled groups has a relevant document, so NDCG is undefined; "
            "choose other validation periods"
        )
