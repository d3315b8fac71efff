"""Gradient boosted trees, which read the same data sets and write the same bundles as networks.

They can also be students of a teacher: BUYL23, section 7, grows a GBDT of 2,000 trees on the scores of a RankFormer.
The training split names the scores, all its groups count as labelled, and validation keeps its true labels.

An ensemble is the mean of models that differ only in their seed: all of them, or those that validation chooses.

Shapes: N documents, Q groups, C candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.arrays import Doubles, offsets
from ltrscale.bundle import (
    Bundle,
    MetricValue,
    TreesArchitecture,
    TreesBundle,
    facts,
    load,
    save_trees,
    views,
    with_tokens_of,
)
from ltrscale.config import Config, Operational
from ltrscale.data.dataset.disjoint import joined_splits
from ltrscale.data.dataset.relevant import check_teaches, only_relevant
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.data.stream.scored import DocumentScores, score_selection
from ltrscale.data.stream.weighing import check_weights
from ltrscale.errors import InputError
from ltrscale.origin import settings_of
from ltrscale.progress import Report, log
from ltrscale.runtime.launch import launch
from ltrscale.runtime.workers import ONE, WorkerContext, Workers, WorkersConfig, rank_and_world
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.stage import LabelledStage, Origin, Settings
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.data import (
    BinCodes,
    Labelled,
    all_workers,
    check_labels,
    check_positions,
    deal,
    merged_codes,
    read_judged,
    read_labelled,
    together,
)
from ltrscale.trees.library import QuantisedConfig, StandardisedConfig, TargetsConfig, watching


class EnsembleConfig(Config):
    """How many models to train, and how many of them to average."""

    candidates: int = Field(10, ge=2, le=1000)
    """Models to choose from: the same settings with seeds s, s + 1, ..."""
    most: int = Field(5, ge=1, le=100)
    """Maximum number of models in the mean; each costs time when documents are scored."""


def check_draws(config: GBDTConfig, *, where: str = "ensemble") -> None:
    """Check that the seed makes a difference, because otherwise all candidates are equal.

    Raises:
        ValueError: it makes no difference.
    """
    if not config.is_random:
        raise ValueError(
            f"{where}: these trees draw nothing at random, all candidates are equal; lower {config.sampling}"
        )


class GBDTJob(LabelledStage):
    """Train gradient boosted trees on labelled groups.

    Missing values are not imputed: a split sends them to one side. Categorical features are split by sets of codes.
    Features are streamed into the library's bins. Validation groups without a relevant document, whose NDCG is
    undefined, are not read. The validation NDCG is this package's own; the library's, which breaks ties differently, is
    reported beside it. If the training groups are too few for `min_data_in_leaf`, there is nothing to split: all scores
    are equal, and a warning is logged.

    With several workers each holds a share of the training groups and all validation groups. The trees then differ
    slightly from those of one process, because LightGBM estimates the number of documents of a leaf and XGBoost merges
    quantiles. If a worker dies, all restart from the first tree.

    Trees are added to the scores of `start`. The new bundle holds both models and scores by their mean, which has the
    same order as their sum.
    """

    stage: ClassVar = "train_gbdt"
    gbdt: GBDTConfig = LightGBMConfig()
    """The library that grows the trees, with its settings."""
    ensemble: EnsembleConfig | None = None
    """Train several models, below `out/candidates`, and average the best; empty for one model."""
    start: BundleUrl | None = None
    """Bundle of one LightGBM model to continue from: trees are added to its scores; empty starts from equal scores."""
    workers: Operational[Workers] = ONE
    """Workers that each hold a share of the training groups, for data that one machine cannot hold."""

    @model_validator(mode="after")
    def _has_different_candidates(self) -> Self:
        if self.ensemble is not None:
            check_draws(self.gbdt)
            if self.start is not None:
                raise ValueError("ensemble and start exclude each other; leave one of them out")
        return self

    def own_settings(self) -> Config | Settings:
        """Settings of the trees, and of the ensemble if there is one."""
        if self.ensemble is None:
            return self.gbdt
        return {"gbdt": settings_of(self.gbdt), "ensemble": settings_of(self.ensemble)}

    def work(self, origin: Origin, report: Report, *, refit: bool = False) -> None:
        """Train trees; for an ensemble train each candidate that is not up to date, then choose.

        A `refit` grows all `num_trees` on the groups of both splits.

        Raises:
            InputError: splits have no labelled group; a label has no gain; a group has more than 10,000 documents; no
                validation group has a relevant document; the library is not installed or takes only one worker; there
                are fewer row groups than workers; `monotone` names no feature; `unbiased` lacks positions; `start` is
                not a bundle of one LightGBM model.
        """
        if self.ensemble is not None:
            self._choose(self.ensemble, origin)
            return
        world = max(self.workers.most, rank_and_world()[1])
        self.gbdt.check_workers(world)
        labelled, judged = self.splits.train, self.splits.validation
        train = learnt(joined_splits(labelled, judged) if refit else labelled, self.gbdt)
        if self.start is not None:
            train = train.serving(_started(self.gbdt, self.start).features, whose=self.start)
        deal(train, rank=0, world=world)  # raises before any worker is started
        validation = None if refit else with_features_of(train, select(judged, labelled=True))
        work = partial(self._grow, train, validation, origin)
        launch(work, workers=self.workers, report=report, elastic=False)

    def _choose(self, ensemble: EnsembleConfig, origin: Origin) -> None:
        """Train the candidates, and commit those whose mean score has the best validation NDCG.

        The choice is greedy (Caruana et al. 2004): it starts with the best model; each round adds the model that raises
        the value of the mean most, or lowers it least; the best mean of all rounds counts, the smallest of equal ones,
        so a harmful model is never forced in. Unlike in the paper, each model is taken at most once: the paper's models
        are of many kinds, but these differ only by chance, and weights would fit the noise of the validation groups.
        """
        bundles = []
        for seed in range(self.gbdt.seed, self.gbdt.seed + ensemble.candidates):
            url = storage.join(self.out, "candidates", f"seed-{seed}")
            self.replace(out=url, gbdt=self.gbdt.replace(seed=seed), ensemble=None).run()
            bundles.append(load(url, TreesBundle))
        judged, cut = _Judged.from_bundles(bundles, self.splits.validation), self.gbdt.stop_on
        members, value, best_alone = _forward_selection(
            judged.scores_CN, lambda scores_N: judged.groups.mean_ndcg(scores_N, cut), most=ensemble.most
        )
        name = f"validation_ndcg@{cut}"
        _save_mean(
            [bundles[c] for c in members],
            self.out,
            config={**self.gbdt.model_dump(mode="json"), "ensemble": ensemble.model_dump(mode="json")},
            metrics={name: value, f"{name}_best_single": best_alone, "validation_groups": judged.n_groups},
            made_by=origin,
        )
        text = f"{name} {value:.4f}, the best alone {best_alone:.4f}"
        log.info("mean of %d of %d models, %s", len(members), len(bundles), text)

    def _grow(self, selection: Selection, judged: Selection | None, origin: Origin, context: WorkerContext) -> None:
        """Train as one of the workers; rank 0 writes the bundle."""
        config: GBDTConfig = self.gbdt
        config.check_device()  # before anything is read
        rank, world = rank_and_world()
        view = views.raw(selection.features, per_query=config.per_query)
        train, codes = read_labelled(deal(selection, rank=rank, world=world), "train", view)
        validation = None if judged is None else read_judged(only_relevant(judged), view, config.highest_judged)
        models: dict[str, bytes] = {}
        if self.start is not None:
            start = _started(config, self.start)
            train, validation = _with_start(train, start), validation and _with_start(validation, start)
            models["start"] = start.content
        if world > 1 and config.num_threads == 0:  # 0 would take all cores of a machine that workers may share
            config = config.replace(num_threads=max(1, int(self.workers.cpus)))
        models["model"], metrics = grow(config, train, codes, validation, together(context))
        if rank > 0:
            return
        trees = TreesArchitecture(library=config.kind, models=tuple(models), per_query=config.per_query)
        counts = {"labelled_groups": selection.n_groups}
        counts |= {} if judged is None else {"validation_groups": judged.n_groups}
        save_trees(self.out, models, trees, facts(selection, self.gbdt, metrics={**metrics, **counts}, made_by=origin))
        log.info("committed %s", self.out)


class AverageJob(LabelledStage):
    """Average the scores of runs of the same trees; nothing is chosen."""

    stage: ClassVar = "average"
    bundles: tuple[BundleUrl, ...] = Field(min_length=1, max_length=1000)
    """Bundles of one model each, which differ in their seed."""

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Judge the mean on the labelled groups of validation, and commit it.

        Raises:
            InputError: a bundle or the data cannot be read.
        """
        bundles = [load(url, TreesBundle) for url in self.bundles]
        if len({opened.content for opened in bundles}) < (n := len(bundles)):
            log.warning("%s: some of the %d runs are equal trees; their settings draw nothing at random", self.out, n)
        judged, stop_on = _Judged.from_bundles(bundles, self.splits.validation), int(bundles[0].config["stop_on"])
        name, value = f"validation_ndcg@{stop_on}", judged.groups.mean_ndcg(judged.scores_CN.mean(axis=0), stop_on)
        metrics: dict[str, MetricValue] = {name: value, "validation_groups": judged.n_groups}
        _save_mean(bundles, self.out, config={**bundles[0].config, "runs": n}, metrics=metrics, made_by=origin)
        log.info("mean of %d models, %s %.4f", n, name, value)


class _Judged(NamedTuple):
    """The scores of some models for the validation groups with a relevant document."""

    groups: Labelled
    n_groups: int
    """Labelled groups, including those without a relevant document."""
    scores_CN: Doubles

    @classmethod
    def from_bundles(cls, bundles: Sequence[TreesBundle], validation: Split) -> Self:
        labelled = select(validation, labelled=True)
        selection = only_relevant(labelled)
        groups, _ = read_labelled(selection, "validation")
        scores = [scores_of(opened, selection, opened.url).scores_N.numpy() for opened in bundles]
        return cls(groups, labelled.n_groups, np.stack(scores))


def _save_mean(
    bundles: Sequence[TreesBundle],
    out: str,
    *,
    config: Mapping[str, Any],
    metrics: Mapping[str, MetricValue],
    made_by: Mapping[str, Any],
) -> None:
    """Commit the mean of bundles with one model each, which saw the same columns of the same data."""
    first, models = bundles[0], {f"model-{i}": opened.content for i, opened in enumerate(bundles)}
    counts = {
        "models": len(models),
        "trees": sum(int(opened.metrics["trees"] or 0) for opened in bundles),
        "labelled_groups": first.metrics["labelled_groups"],
    }
    about = replace(first, config=config, metrics={**metrics, **counts}, made_by=made_by)
    save_trees(out, models, first.forest.replace(models=tuple(models)), about)


def _forward_selection(
    scores_CN: NDArray[np.float64], value_of: Callable[[Doubles], float], *, most: int
) -> tuple[list[int], float, float]:
    """Models whose mean score has the highest value, in order; that value; and the value of the best model alone."""
    chosen: list[int] = []
    values: list[float] = []
    sum_N = np.zeros(scores_CN.shape[1])
    while len(chosen) < min(most, len(scores_CN)):
        candidates = [c for c in range(len(scores_CN)) if c not in chosen]
        values_with = [value_of((sum_N + scores_CN[c]) / (len(chosen) + 1)) for c in candidates]
        best = int(np.argmax(values_with))
        chosen.append(candidates[best])
        values.append(values_with[best])
        sum_N = sum_N + scores_CN[candidates[best]]
    n = int(np.argmax(values)) + 1
    return chosen[:n], values[n - 1], values[0]


def check_alone(config: GBDTConfig) -> None:
    """Check that the library and its device are available and that this is the only process.

    Raises:
        InputError: the library is not installed, the device is not there, or there are other processes.
    """
    config.check_workers(1)
    config.check_device()
    if rank_and_world()[1] > 1:
        raise InputError("semi-supervised and stacked trees train in one process; start the job without torchrun")


def learnt(split: Split, config: GBDTConfig) -> Selection:
    """The labelled groups of a split that trees of these settings learn from."""
    labelled = select(split, labelled=True)
    return only_relevant(labelled) if config.relevant_only else labelled


def with_features_of(train: Selection, validation: Selection) -> Selection:
    """The validation groups, with the features of the training split.

    Raises:
        InputError: the validation split lacks some of these features, or no list of a split has two different labels.
    """
    check_teaches(train, "train")
    check_teaches(validation, "validation")
    check_weights(train)  # all trees multiply by the weights that the data have
    return validation.serving(train.features, whose="the training split", where="the validation split")


def _started(config: GBDTConfig, url: str) -> Bundle:
    """The bundle of one LightGBM model to continue from, which must see features as the new trees do."""
    start, plain = load(url), TreesArchitecture(per_query=config.per_query)
    if not config.goes_on or start.forest != plain:
        raise InputError(
            f"{url}: only LightGBM's trees go on from a bundle, which must hold one LightGBM model with "
            "the same gbdt.per_query; set gbdt.kind to lightgbm and name such a bundle, or leave start out"
        )
    return start


def _with_start(groups: Labelled, start: Bundle) -> Labelled:
    """The same groups, with the scores of a bundle to which trees are added."""
    return replace(groups, start_N=scores_of(start, groups.selection, start.url).scores_N.numpy())


def scores_of(opened: Bundle, selection: Selection, name: str) -> DocumentScores:
    """A bundle's scores of a selection, which may have more features than the bundle."""
    return score_selection(with_tokens_of(selection, [opened]), opened.scorer(features=selection.features), name)


def _shared_targets(config: TargetsConfig | None, share: Labelled) -> Doubles:
    """Targets of a worker's documents, shape [N]; the borders of grades come from the scores of all workers."""
    if config is None:
        return share.labels_N
    labels, lengths = zip(*all_workers((share.labels_N, share.lengths_Q)), strict=True)
    targets_N = config.from_labels(np.concatenate(labels), offsets(np.concatenate(lengths)))
    first = sum(map(len, labels[: rank_and_world()[0]]))
    return targets_N[first : first + len(share.labels_N)]


def _numbered(
    config: GBDTConfig, train: Labelled, validation: Labelled | None
) -> tuple[GBDTConfig, Labelled, Labelled | None]:
    """The numbers of the different labels of a sum of goals, which need not be whole, where each can have its gain."""
    values = np.unique(np.concatenate([np.zeros(1), *all_workers(np.unique(train.labels_N))]))
    if validation is not None:
        values = np.union1d(values, validation.labels_N)
    if (numbering := config.numbering(values)) is None:
        return config, train, validation
    train = replace(train, labels_N=np.searchsorted(values, train.labels_N).astype(float))
    judged = validation and replace(validation, labels_N=np.searchsorted(values, validation.labels_N).astype(float))
    return numbering, train, judged


def grow(
    config: GBDTConfig, train: Labelled, codes: BinCodes, validation: Labelled | None, context: WorkerContext
) -> tuple[bytes, dict[str, float]]:
    """Grow trees on the training groups of all workers; returns the library's own model, and metrics.

    `train` and `codes` are this worker's; without validation groups all trees are kept.

    Raises:
        InputError: a label has no gain; `monotone` or `unbiased` does not fit the data.
        Stopped: this process was asked to stop.
    """
    train, judged = replace(train, labels_N=_shared_targets(config.targets, train)), validation
    if config.targets is None and train.selection.reads_sum:
        config, train, judged = _numbered(config, train, validation)
    check_labels(train, config.highest_label())
    if judged is not None:
        check_labels(judged, config.highest_label())
    if config.learns_biases:
        check_positions(train)
    with watching(config, validation, config.kind, context) as watch:
        model = config.boost(train, judged, merged_codes(codes), watch)
    metrics = watch.metrics()
    reached = f", {watch.name} {metrics[watch.name]:.4f}" if watch.name in metrics else ""
    log.info("boosted %d trees with %s%s", watch.kept, config.kind, reached)
    return model, metrics


_STUDENT_TREES = 2_000


class LearningTrees(Config):
    """Trees of LightGBM that learn a teacher's scores; the kind is their objective."""

    needs: ClassVar = "a method of LightGBM's trees without an ensemble"
    """The method that can be such a student, for error messages."""
    exported: ClassVar = True
    """Whether `jobs.distill` exports it."""
    kind: str
    trees: LightGBMConfig

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        if self.trees.objective != self.kind:
            raise ValueError(
                f"trees.objective is {self.trees.objective}; leave it out, kind says that it is {self.kind}"
            )
        return self

    def streams(self) -> list[StreamConfig]:
        """Empty: trees read everything at once."""
        return []

    def job(self, out: str, splits: Splits, workers: WorkersConfig) -> GBDTJob:
        """The job that trains it on the scores that the splits name."""
        return GBDTJob(out=out, splits=splits, gbdt=self.trees, workers=workers)


class RegressionStudent(LearningTrees):
    """Squared error against the teacher's scores, standardised per group."""

    kind: Literal["regression"] = "regression"
    trees: LightGBMConfig = LightGBMConfig(
        objective="regression", targets=StandardisedConfig(), num_trees=_STUDENT_TREES, early_stopping_rounds=None
    )


class LambdaRankStudent(LearningTrees):
    """LambdaRank on the teacher's scores, standardised per group and cut into grades of linear gain."""

    kind: Literal["lambdarank"] = "lambdarank"
    trees: LightGBMConfig = LightGBMConfig(
        objective="lambdarank",
        targets=QuantisedConfig(standardise=True),
        label_gain="linear",  # with 2^y - 1 only the highest of 31 grades would count
        num_trees=_STUDENT_TREES,
        early_stopping_rounds=None,
    )


class SoftmaxStudent(LearningTrees):
    """Cross entropy against the softmax of the teacher's scores over `trees.temperature`, for each group."""

    kind: Literal["softmax"] = "softmax"
    trees: LightGBMConfig = LightGBMConfig(objective="softmax", num_trees=_STUDENT_TREES, early_stopping_rounds=None)


TreesStudent = RegressionStudent | LambdaRankStudent | SoftmaxStudent
