"""Gradient boosted trees, which read the same data sets and write the same bundles as networks.

Shapes: N documents, Q groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ltrscale import views
from ltrscale.boosters import import_catboost
from ltrscale.bundle import Bundle, TreesArchitecture, load, reading, save_trees
from ltrscale.bundle.reference import reference_of
from ltrscale.data.dataset.disjoint import check_disjoint, joined
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import Selection, check_relevant, only_relevant, select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.scored import score
from ltrscale.data.stream.weighing import warn_of_weights
from ltrscale.errors import InputError
from ltrscale.launch.start import launch
from ltrscale.launch.workers import ONE, Context, WorkersConfig, rank_and_world
from ltrscale.progress import Report, log
from ltrscale.trees.configs import CatBoostConfig, GBDTConfig, LightGBMConfig, XGBoostConfig
from ltrscale.trees.data import Codes, Labelled, read
from ltrscale.trees.shares import check_complete, deal, merged, shared_targets, together
from ltrscale.trees.targets import Floats
from ltrscale.trees.watch import Watch, watching
from ltrscale.views import View

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
    start: str | None = None,
    trees: int | None = None,
) -> Bundle:
    """Train trees on the labelled groups of the training split and commit them as a bundle.

    Missing values are not imputed: a split sends them to one side. Categorical features are split by sets of codes.
    Features are streamed into the library's bins. Validation groups without a relevant document, whose NDCG is
    undefined, are not read. The validation NDCG is this package's own; the library's, which orders documents of equal
    score in another way, is reported beside it. If the training groups are too few for `min_data_in_leaf`, there is
    nothing to split: all scores are equal, and a warning is logged.

    Args:
        config: library, objective (LambdaRank: Burges 2010) and the size of trees.
        splits: training and validation; the test split is not read.
        out: directory of the bundle.
        made_by: origin, recorded in the bundle's manifest; see `ltrscale.config.made_by`.
        report: receives a record for each tree.
        workers: with more than one, each holds a share of the training groups and all validation groups. The trees
            differ slightly from those of one process, because LightGBM then estimates the number of documents of a leaf
            and XGBoost merges quantiles. If a worker dies, all restart from the first tree.
        start: bundle of one LightGBM model to go on from: trees are added to its scores. The bundle made holds both
            models, and scores by their mean, whose order is that of their sum.
        trees: grow so many on the groups of both splits together, and keep all of them.

    Raises:
        InputError: splits overlap or have no labelled group; a label has no gain; a group has more than 10,000
            documents; no validation group has a relevant document; the library is not installed or takes only one
            worker; there are fewer row groups than workers; `monotone` names no feature; `unbiased` lacks positions;
            `start` is no such bundle.
    """
    check_disjoint(splits)
    world = max(workers.most, rank_and_world()[1])
    check_library(config, world)
    learnt_from = splits.train if trees is None else joined(splits.train, splits.validation)
    train = learnt(learnt_from, config)
    if start is not None:
        train = train.serving(_started(config, start).features, whose=start)
    deal(train, rank=0, world=world)  # raises before any worker is started
    validation = None
    if trees is None:
        validation = with_features_of(train, select(splits.validation, labelled=True))
    else:
        config = config.replace(num_trees=trees, early_stopping_rounds=None)
    work = TreeGrowing(config, train, validation, out, made_by, workers.cpus, start)
    launch(work, workers=workers, report=report)
    return load(out)


def learnt(split: Split, config: GBDTConfig) -> Selection:
    """The labelled groups of a split that trees of these settings learn from.

    Raises:
        InputError: as `select`.
    """
    labelled = select(split, labelled=True)
    return only_relevant(labelled) if config.relevant_only else labelled


def with_features_of(train: Selection, validation: Selection) -> Selection:
    """The validation groups, with the features of the training split.

    Raises:
        InputError: the validation split lacks some of these features, or all labels of a split are 0.
    """
    check_relevant(train, "train")
    check_relevant(validation, "validation")
    warn_of_weights(train)  # all trees multiply by the weights that the data have
    return validation.serving(train.features, whose="the training split", where="the validation split")


def _started(config: GBDTConfig, url: str) -> Bundle:
    """The bundle to whose scores trees are added.

    Raises:
        InputError: it is not one LightGBM model of features that both see alike, or the trees to add are another
            library's.
    """
    start = load(url)
    if config.kind != "lightgbm" or start.trees != TreesArchitecture(per_query=config.per_query):
        raise InputError(
            f"{url}: only LightGBM's trees go on from a bundle, which must hold one LightGBM model with "
            "the same gbdt.per_query; set gbdt.kind to lightgbm and name such a bundle, or leave start out"
        )
    return start


@dataclass(frozen=True)
class TreeGrowing:
    """The work of training trees, the same value on every worker."""

    config: GBDTConfig
    train: Selection
    validation: Selection | None
    out: str
    made_by: Mapping[str, Any]
    cpus: float
    """Logical CPUs of each worker."""
    start: str | None = None

    def __call__(self, context: Context) -> None:
        """Take part; rank 0 writes the bundle."""
        config: GBDTConfig = self.config
        rank, world = rank_and_world()
        view = seen_by(config, self.train.features)
        train, codes = read(deal(self.train, rank=rank, world=world), "train", view)
        check_complete(self.train, train)
        validation = None
        if self.validation is not None:
            validation, _ = read(only_relevant(self.validation), "validation", view)
            check_validation(validation)
        models: dict[str, bytes] = {}
        if self.start is not None:
            start = _started(config, self.start)
            train, validation = _with_start(train, start), validation and _with_start(validation, start)
            models["start"] = start.content
        if world > 1 and config.num_threads == 0:  # 0 would take all cores of a machine that workers may share
            config = config.replace(num_threads=max(1, int(self.cpus)))
        grown = grow(config, train, codes, validation, together(context))
        if rank > 0:
            return
        models["model"] = grown.model
        save_trees(
            self.out,
            models,
            TreesArchitecture(library=config.kind, models=tuple(models), per_query=config.per_query),
            config=self.config.model_dump(mode="json"),
            features=self.train.features,
            dataset_hash=self.train.hash,
            read_as=self.train.read_as,
            reference=reference_of(self.train),
            metrics={
                **grown.metrics,
                "labelled_groups": self.train.n_groups,
                **({"validation_groups": self.validation.n_groups} if self.validation else {}),
            },
            made_by=self.made_by,
        )
        log.info("committed %s", self.out)


def seen_by(config: GBDTConfig, features: Sequence[Feature], names: Sequence[str] | None = None) -> View:
    """The features as trees see them.

    Args:
        config: settings of the trees.
        features: all raw features.
        names: those that the trees see; None for all.
    """
    view = views.raw(features) if names is None else views.chosen(features, names)
    return views.per_query(view) if config.per_query else view


def _with_start(groups: Labelled, start: Bundle) -> Labelled:
    """The same groups, with the scores of a bundle to which trees are added."""
    scorer = start.scorer(features=groups.selection.features)
    selection = reading(groups.selection, [start])
    return replace(groups, start_N=score(selection, scorer, start.url).scores_N.numpy())


class Grown(NamedTuple):
    """A model in its library's own format, and its metrics."""

    model: bytes
    metrics: Mapping[str, float]


def grow(config: GBDTConfig, train: Labelled, codes: Codes, validation: Labelled | None, context: Context) -> Grown:
    """Grow trees on the training groups of all workers.

    Args:
        config: library, objective and size.
        train: this worker's training groups.
        codes: codes and sample of these groups.
        validation: the validation groups with a relevant document, checked by `check_validation`; None grows all trees.
        context: receives a record for each tree.

    Raises:
        InputError: a label has no gain; `monotone` or `unbiased` does not fit the data.
        Stopped: this process was asked to stop.
    """
    targets_N = shared_targets(config.targets, train)
    check_labels(config, train, targets_N)
    if validation is not None:
        check_labels(config, validation, validation.labels_N)
    if not isinstance(config, CatBoostConfig) and config.unbiased:
        check_positions(train)
    with watching(config, validation, config.kind, context) as watch:
        model = _boost(config, train, targets_N, validation, merged(codes), watch)
    metrics = watch.metrics()
    judged = f", {watch.name} {metrics[watch.name]:.4f}" if watch.name in metrics else ""
    log.info("boosted %d trees with %s%s", watch.kept, config.kind, judged)
    return Grown(model, metrics)


def _boost(
    config: GBDTConfig, train: Labelled, targets_N: Floats, validation: Labelled | None, codes: Codes, watch: Watch
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
        InputError: CatBoost is not installed, or there are several workers for it or for unbiased trees.
    """
    if not isinstance(config, CatBoostConfig):
        if config.unbiased and world > 1:  # each worker would learn biases from its share alone
            raise InputError(f"unbiased trees train in one process, not on {world} workers; set workers to 1")
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
            f"{misfit}, and gains are for integers from 0 to {highest}; map the labels to grades in prepare, give "
            "gbdt.label_gain a gain for each label, or set gbdt.targets.kind=quantised"
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


def check_positions(groups: Labelled) -> None:
    """Check that every document has a position, a whole number, and no two of a group have the same.

    Raises:
        InputError: one has none, or two have the same; the message names the group and the remedy.
    """
    if groups.positions_N is None:
        raise InputError(f"{groups.split}: unbiased trees need positions; map the column in prepare, or unset unbiased")
    positions_N = groups.positions_N
    for row in np.flatnonzero(~(positions_N == positions_N.round()))[:1]:  # NaN equals nothing
        raise InputError(
            f"{groups.split}: group {groups.group_of(row)} has position {positions_N[row]:g}, and unbiased trees need "
            "a whole number for every document; prepare the documents that were shown only, or unset unbiased"
        )
    group_N = np.repeat(np.arange(len(groups.ids_Q)), groups.lengths_Q)
    order_N = np.lexsort((positions_N, group_N))
    same_N = (np.diff(group_N) == 0) & (np.diff(positions_N[order_N]) == 0)
    for row in order_N[np.flatnonzero(same_N)][:1]:
        raise InputError(
            f"{groups.split}: group {groups.group_of(row)} has position {positions_N[row]:g} twice; give each document "
            "its own position, or unset unbiased"
        )


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
