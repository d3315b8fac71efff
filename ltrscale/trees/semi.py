"""Trees that also learn from unlabelled groups: through principal components, pseudo-labels, or both (HOU24, A.2.3).

Shapes: N documents, Q groups, P1 = groups without a label in use + 1; F raw features, C numeric ones, K components.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial, reduce
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ltrscale.arrays import Moments, offsets
from ltrscale.bundle import TreesArchitecture, boosters, facts, save_trees, views
from ltrscale.bundle.views import Projection, View
from ltrscale.config import Config
from ltrscale.data.dataset.relevant import only_relevant
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import Part, parts_of
from ltrscale.data.stream.scored import score_selection
from ltrscale.errors import InputError
from ltrscale.progress import Report, log, progress
from ltrscale.runtime.launch import launch
from ltrscale.runtime.workers import ONE, WorkerContext
from ltrscale.stages.stage import LabelledStage, Origin
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.data import BinCodes, Labelled, read_judged, read_labelled
from ltrscale.trees.gbdt import check_alone, grow, learnt, with_features_of
from ltrscale.trees.library import QuantisedConfig

_DOCS_PER_BATCH = 8192


class SemiConfig(Config):
    """How to learn without labels, and the trees that use it."""

    pca: int | None = Field(None, ge=1, le=1_000_000)
    """Number of principal components, fitted on all training documents; trees see them after the raw features. HOU24:
    5, 10, 15."""
    pca_scaled: bool = True
    """Scale each feature to deviation 1 before. HOU24's text does not say; its public code does not, and takes the
    features standardised within each query group, which `gbdt.per_query` gives."""
    pseudo_labels: QuantisedConfig | None = None
    """Grades for the unlabelled groups, from trees grown on the labelled groups; all groups train the final trees."""
    first: GBDTConfig | None = None
    """The trees that give these grades; empty takes the settings of the final trees."""
    gbdt: GBDTConfig = LightGBMConfig()
    """The final trees."""

    @model_validator(mode="after")
    def _uses_documents_without_labels(self) -> Self:
        if self.pca is None and self.pseudo_labels is None:
            raise ValueError("neither pca nor pseudo_labels is set; set one, or train plain trees with jobs.train_gbdt")
        if self.first is not None and self.pseudo_labels is None:
            raise ValueError("first gives pseudo-labels, which are not asked for; set pseudo_labels or leave first out")
        if self.first is not None and self.first.per_query != self.gbdt.per_query:
            raise ValueError("first and gbdt see the same features; set per_query in both, or in neither")
        if self.pseudo_labels is not None and any(trees.relevant_only for trees in (self.first, self.gbdt) if trees):
            raise ValueError("relevant_only: set it to false, for with pseudo_labels trees learn from all groups")
        grades = self.pseudo_labels.grades if self.pseudo_labels and self.gbdt.targets is None else 0
        highest = self.gbdt.highest_label()
        if highest is not None and grades - 1 > highest:
            raise ValueError(
                f"pseudo_labels.grades: gbdt has gains for grades 0 to {highest}, {grades} are asked for; lower grades "
                "or set gbdt.label_gain"
            )
        return self

    def with_seed(self, seed: int) -> Self:
        """The config with this seed for all trees."""
        first = None if self.first is None else self.first.replace(seed=seed)
        return self.replace(gbdt=self.gbdt.replace(seed=seed), first=first)


class SemiJob(LabelledStage):
    """Train trees on labelled groups, helped by the training split's other groups.

    With `pca` the trees see principal components of the numeric features (Duh and Kirchhoff 2008), fitted on all
    training documents; the bundle holds them, so that it scores raw features. With `pseudo_labels` trees grown on the
    labelled groups score the others, and the scores are cut into grades. The final trees are grown on all groups;
    groups whose labels are in use keep them (self-training). Features are streamed, as for other trees: labels and
    scores of all training documents are in memory, their features are not.
    """

    stage: ClassVar = "train_semi"
    semi: SemiConfig

    def work(self, origin: Origin, report: Report) -> None:
        """Train, and commit the bundle; records of the first trees have `"model": "first"`.

        Raises:
            InputError: as `GBDTJob.work`; there are fewer numeric features than components.
        """
        config, splits = self.semi, self.splits
        for trees in (config.first, config.gbdt):
            if trees is not None:
                check_alone(trees)
        labelled, all_groups = learnt(splits.train, config.gbdt), select(splits.train, labelled=False)
        validation = with_features_of(labelled, select(splits.validation, labelled=True))
        # launched so that a signal can stop it between trees
        launch(partial(self._grow, labelled, all_groups, validation, origin), workers=ONE, report=report)

    def _grow(
        self, labelled: Selection, all_groups: Selection, judged: Selection, origin: Origin, context: WorkerContext
    ) -> None:
        config = self.semi
        view, projection = views.raw(labelled.features, per_query=config.gbdt.per_query), None
        if config.pca is not None:
            projection = _fit_projection(all_groups, config.pca, view, scaled=config.pca_scaled)
            view = views.projected(view, projection)
        train, codes = read_labelled(labelled, "train", view)
        validation = read_judged(only_relevant(judged), view, config.gbdt.highest_judged)
        metrics = {"labelled_groups": len(train.ids_Q), "validation_groups": judged.n_groups}
        if config.pseudo_labels is not None:
            train, codes = _all_groups(config, train, codes, all_groups, validation, context)
            metrics["pseudo_labelled_groups"] = len(train.ids_Q) - metrics["labelled_groups"]
        model, grown = grow(config.gbdt, train, codes, validation, context)
        trees = TreesArchitecture(library=config.gbdt.kind, per_query=config.gbdt.per_query, projection=config.pca or 0)
        about = facts(labelled, config, metrics={**grown, **metrics}, made_by=origin)
        save_trees(self.out, {"model": model}, trees, about, projection=projection)
        log.info("committed %s", self.out)


def _all_groups(
    config: SemiConfig,
    labelled: Labelled,
    codes: BinCodes,
    all_groups: Selection,
    validation: Labelled,
    context: WorkerContext,
) -> tuple[Labelled, BinCodes]:
    """All groups of the training split; groups without a label in use get grades of the first trees' scores."""
    assert config.pseudo_labels is not None
    groups, codes_of_all = read_labelled(all_groups, labelled.split, labelled.view)
    settings = config.first or config.gbdt
    marked = replace(context, report=lambda record: context.report({"model": "first", **record}))
    model, _ = grow(settings, labelled, codes, validation, marked)
    scorer = boosters.scorer(settings.kind, {"the first trees": model}, labelled.view, threads=settings.num_threads)
    scores_N = score_selection(all_groups, scorer, "the first trees").scores_N.numpy()
    is_labelled_Q = np.isin(groups.ids_Q, labelled.ids_Q)
    is_labelled_N = np.repeat(is_labelled_Q, groups.lengths_Q)
    assert is_labelled_N.sum() == len(labelled.labels_N)
    labels_N = np.empty_like(scores_N)
    labels_N[is_labelled_N] = labelled.labels_N
    # the borders of grades come from these scores alone
    others_N, offsets_P1 = scores_N[~is_labelled_N], offsets(groups.lengths_Q[~is_labelled_Q])
    labels_N[~is_labelled_N] = config.pseudo_labels.from_labels(others_N, offsets_P1)
    return replace(groups, labels_N=labels_N), codes_of_all


def _fit_projection(selection: Selection, components: int, view: View, *, scaled: bool) -> Projection:
    """Eigenvectors of the numeric features' correlation matrix (covariance matrix if not `scaled`), from two passes."""
    numeric_C = np.array([i for i, feature in enumerate(selection.features) if feature.kind == "numeric"], np.int64)
    if len(numeric_C) < components:
        raise InputError(f"pca: {components} components of {len(numeric_C)} numeric features; lower pca")
    with progress("principal components", 2 * selection.n_documents) as advance:

        def values_of(part: Part) -> Iterator[NDArray[np.float32]]:
            for groups in iterate(part.selection, docs_per_batch=_DOCS_PER_BATCH):
                yield view.columns(groups)[:, numeric_C]
                advance(groups.n_documents)

        # each part is summed by itself, as sums of another order are rounded differently
        parts, none = [*parts_of(selection)], Moments.none(len(numeric_C))
        moments = none
        for part in parts:
            moments = moments.merge(reduce(Moments.merge, map(Moments.from_values, values_of(part)), none))
        products_CC = np.zeros((len(numeric_C), len(numeric_C)))
        for part in parts:
            of_part_CC = np.zeros_like(products_CC)
            for values_NC in values_of(part):
                deviation_NC = values_NC - moments.mean_F
                deviation_NC[np.isnan(deviation_NC)] = 0.0
                of_part_CC += deviation_NC.T @ deviation_NC
            products_CC += of_part_CC
    imputed = Moments(np.full(len(numeric_C), selection.n_documents), moments.mean_F, products_CC.diagonal())
    scale_C = imputed.scale_F() if scaled else np.ones(len(numeric_C))
    components_KC = principal(products_CC / selection.n_documents / np.outer(scale_C, scale_C), components)
    return Projection(numeric_C, moments.mean_F, scale_C, components_KC)


def principal(correlation_CC: NDArray[np.float64], components: int) -> NDArray[np.float64]:
    """Unit eigenvectors [K, C] of a matrix, largest eigenvalue first; their largest entries are positive.

    A feature with one value has zeros in the matrix.

    Example:
        >>> (principal(np.array([[1.0, -1.0], [-1.0, 1.0]]), 1) * np.sqrt(2)).round(9).tolist()
        [[1.0, -1.0]]
    """
    _, vectors_CC = np.linalg.eigh(correlation_CC)
    components_KC = vectors_CC.T[::-1][:components]
    # an eigenvector's sign is arbitrary; rounding lets the first of nearly equal entries decide it on every machine
    sizes_KC = np.abs(components_KC).round(9)
    largest_K = components_KC[np.arange(components), sizes_KC.argmax(axis=1)]
    return np.asarray(components_KC * np.sign(largest_K)[:, None])
