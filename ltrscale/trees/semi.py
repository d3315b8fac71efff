"""Trees that learn from groups without labels too: principal components, pseudo-labels, or both (HOU24, A.2.3).

Shapes: N documents, Q groups, P1 = groups without a label in use + 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from ltrscale import boosters, views
from ltrscale.bundle import Bundle, TreesArchitecture, load, save_trees
from ltrscale.config import Config, validate
from ltrscale.data.dataset.split import Selection, Splits, check_disjoint, select
from ltrscale.launch.start import launch
from ltrscale.launch.workers import ONE, Context
from ltrscale.progress import Report, log
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.data import Codes, Labelled, read
from ltrscale.trees.gbdt import check_alone, check_validation, grow, highest_label, validation_of
from ltrscale.trees.pca import fit_projection
from ltrscale.trees.scored import score
from ltrscale.trees.targets import Floats, QuantisedConfig, make_targets


class SemiConfig(Config):
    """What is learnt without labels, and the trees that are grown with it."""

    pca: int | None = Field(None, ge=1)
    """Principal components of all training documents, which trees see after the raw features; HOU24: 5, 10, 15."""
    pseudo_labels: QuantisedConfig | None = None
    """Grades that trees grown on the labelled groups give the others; all groups then train the final trees."""
    first: GBDTConfig | None = None
    """The trees that give these grades; empty takes the settings of the final ones."""
    gbdt: GBDTConfig = LightGBMConfig()
    """The final trees."""

    @model_validator(mode="after")
    def _uses_documents_without_labels(self) -> Self:
        if self.pca is None and self.pseudo_labels is None:
            raise ValueError("neither pca nor pseudo_labels is set; set one, or train plain trees with jobs.train_gbdt")
        if self.first is not None and self.pseudo_labels is None:
            raise ValueError("first gives pseudo-labels, which are not asked for; set pseudo_labels or leave first out")
        grades = self.pseudo_labels.grades if self.pseudo_labels and self.gbdt.targets is None else 0
        highest = highest_label(self.gbdt)
        if highest is not None and grades - 1 > highest:
            raise ValueError(
                f"pseudo_labels.grades: gbdt has gains for grades 0 to {highest}, {grades} are asked for; lower grades "
                "or set gbdt.label_gain"
            )
        return self

    def with_seed(self, seed: int) -> Self:
        """The same with another seed everywhere."""
        first = None if self.first is None else self.first.replace(seed=seed)
        return self.replace(gbdt=self.gbdt.replace(seed=seed), first=first)


def train_semi(config: SemiConfig, splits: Splits, out: str, *, made_by: Mapping[str, Any], report: Report) -> Bundle:
    """Train trees on labelled groups with the help of the training split's other groups; commit them as a bundle.

    With `pca` the trees see principal components of the numeric features (Duh and Kirchhoff 2008), fitted on all
    training documents; the bundle holds them, so that it scores raw features. With `pseudo_labels` trees grown on the
    labelled groups score the others, the scores are cut into grades, and the final trees are grown on all groups,
    where those whose labels are in use keep them (self-training). Features are streamed, as for other trees: labels
    and scores of all training documents are in memory, their features are not.

    Args:
        config: see `SemiConfig`.
        splits: training and validation; the test split is not read.
        out: directory of the bundle.
        made_by: origin, recorded in the bundle's manifest.
        report: receives a record for each tree; those of the first trees have `"model": "first"`.

    Raises:
        InputError: as `train_gbdt` and `fit_projection`.
    """
    check_disjoint(splits)
    for trees in (config.first, config.gbdt):
        if trees is not None:
            check_alone(trees)
    arguments = {
        "config": config.model_dump(mode="json"),
        "train": select(splits.train, labelled=True),
        "documents": select(splits.train, labelled=False),
        "validation": select(splits.validation, labelled=True),
        "out": out,
        "made_by": dict(made_by),
    }
    launch(semi_worker, arguments, workers=ONE, report=report)
    return load(out)


def semi_worker(arguments: Mapping[str, Any], context: Context) -> None:
    """What `train_semi` does, where it can be asked to stop."""
    config = validate(SemiConfig, arguments["config"], "semi")
    labelled: Selection = arguments["train"]
    everything: Selection = arguments["documents"]
    projection = None if config.pca is None else fit_projection(everything, config.pca)
    view = views.raw(labelled.features)
    view = view if projection is None else views.projected(view, projection)
    train, codes = read(labelled, "train", view)
    validation, _ = read(validation_of(labelled, arguments), "validation", view)
    check_validation(validation)
    metrics: dict[str, int] = {"labelled_groups": len(train.ids_Q)}
    if config.pseudo_labels is not None:
        train, codes = _all_groups(config, train, codes, everything, validation, context)
        metrics["pseudo_labelled_groups"] = len(train.ids_Q) - metrics["labelled_groups"]
    grown = grow(config.gbdt, train, codes, validation, context)
    save_trees(
        arguments["out"],
        {"model": grown.model},
        TreesArchitecture(library=config.gbdt.kind, projection=config.pca or 0),
        projection=projection,
        config=config.model_dump(mode="json"),
        features=labelled.features,
        dataset_hash=labelled.hash,
        metrics={**grown.metrics, **metrics},
        made_by=arguments["made_by"],
    )
    log.info("committed %s", arguments["out"])


def _all_groups(
    config: SemiConfig,
    labelled: Labelled,
    codes: Codes,
    everything: Selection,
    validation: Labelled,
    context: Context,
) -> tuple[Labelled, Codes]:
    """All groups of the training split, where those without a label in use have grades of the first trees' scores."""
    assert config.pseudo_labels is not None
    groups, codes_of_all = read(everything, labelled.split, labelled.view)
    settings = config.first or config.gbdt
    marked = replace(context, report=lambda record: context.report({"model": "first", **record}))
    first = grow(settings, labelled, codes, validation, marked)
    scorer = boosters.scorer(
        settings.kind, {"the first trees": first.model}, labelled.view, threads=settings.num_threads
    )
    scores_N = score(everything, scorer, "the first trees").scores_N.numpy()
    return replace(groups, labels_N=with_pseudo_labels(config.pseudo_labels, labelled, groups, scores_N)), codes_of_all


def with_pseudo_labels(config: QuantisedConfig, labelled: Labelled, groups: Labelled, scores_N: Floats) -> Floats:
    """Labels [N] of all groups: their own where they are in use, grades of their scores elsewhere.

    The range of the grades is that of the scores of the groups without a label in use.

    Args:
        config: how scores become grades.
        labelled: the groups whose labels are in use, in the order of `groups`.
        groups: all groups.
        scores_N: of all their documents.
    """
    is_labelled_Q = np.isin(groups.ids_Q, labelled.ids_Q)
    is_labelled_N = np.repeat(is_labelled_Q, groups.lengths_Q)
    assert is_labelled_N.sum() == len(labelled.labels_N)
    labels_N = np.empty_like(scores_N)
    labels_N[is_labelled_N] = labelled.labels_N
    offsets_P1 = np.append(0, np.cumsum(groups.lengths_Q[~is_labelled_Q]))
    labels_N[~is_labelled_N] = make_targets(config, scores_N[~is_labelled_N], offsets_P1)
    return labels_N
