"""Stacking: trees over the scores of other models and chosen raw features (SUN23, section 3.4).

Shapes: N documents.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from ltrscale.bundle import Bundle, TreesArchitecture, load, member_files, save_trees, views, with_tokens_of
from ltrscale.bundle.reference import reference_of
from ltrscale.bundle.views import View
from ltrscale.config import Config, validate
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import Feature, matching
from ltrscale.data.dataset.sample import Fold, OuterFold
from ltrscale.data.dataset.selection import Selection, only_relevant, select
from ltrscale.data.dataset.split import Split, Splits, Texts
from ltrscale.data.stream.scored import DocumentScores, score_selection
from ltrscale.errors import InputError, UnavailableError
from ltrscale.progress import Report, log
from ltrscale.runtime.launch import launch
from ltrscale.runtime.workers import ONE, Context
from ltrscale.stages.stage import BundleUrl, LabelledStage, Origin, check_unseen
from ltrscale.trees.checks import check_alone, check_validation
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.data import Labelled, read_labelled
from ltrscale.trees.gbdt import grow, learnt, seen_by, with_features_of

_ALL = ("all",)


class StackConfig(Config):
    """The inputs of a stack's trees, and how they are grown."""

    features: Texts = ()
    """Raw features that the trees see before the members' scores: names, prefixes with *, `numeric`, `categorical`, or
    `all`; empty for none."""
    standardise: bool = True
    """Standardise members' scores within each query group: ranking losses do not fix the scale of scores, so it changes
    with the folds that a member was trained on, and trees would take the change for information."""
    folds: int = Field(5, ge=2)
    """Number of parts of the labelled training groups; a member scores each part after training on the others."""
    seed: int = 0
    """Seed of the assignment of groups to folds."""
    gbdt: GBDTConfig = LightGBMConfig()
    """The trees."""

    def fold(self, number: int, train: Split, *, held_out: bool) -> Fold:
        """One of the folds of a split's labelled groups, or all others if not `held_out`.

        Raises:
            InputError: the split serves a fold within a fold.
        """
        if train.fold is not None and train.fold.within is not None:
            raise InputError("train.fold.within: leave it out; a stack deals the groups of train to folds itself")
        within = None if train.fold is None else OuterFold(**train.fold.model_dump(exclude={"within"}))
        return Fold(number=number, of=self.folds, held_out=held_out, seed=self.seed, within=within)


class StackMember(Config):
    """A model whose scores the trees see."""

    bundle: BundleUrl
    """Bundle trained on all folds; it scores validation groups, and new groups inside the stack's bundle."""
    folds: tuple[BundleUrl, ...] = ()
    """For each fold the bundle that was trained on the others; empty if `bundle` has seen no training label."""


class _Stacked(Config):
    """The settings of a stack, the names of its members in their order, and their bundles."""

    stack: StackConfig
    members: tuple[str, ...]
    bundles: tuple[StackMember, ...]


class StackedJob(LabelledStage):
    """Train trees over the scores of trained models."""

    stage: ClassVar = "stack"
    stack: StackConfig
    members: dict[str, StackMember]

    def check(self) -> None:
        """Refuse splits that overlap, and ready bundles that may have seen labels of the training split."""
        super().check()
        for name, member in self.members.items():
            if not member.folds:
                check_ready(name, member.bundle, self.splits)

    def own_settings(self) -> _Stacked:
        """Settings of the stack, and its members."""
        return _Stacked(stack=self.stack, members=tuple(self.members), bundles=tuple(self.members.values()))

    def work(self, origin: Origin, report: Report) -> None:
        """Train, and commit the bundle, which holds all members."""
        train_stack(self.stack, self.members, self.splits, self.out, made_by=origin, report=report)


def check_ready(name: str, url: str, splits: Splits) -> None:
    """Check that a bundle has not seen the labels that the trees will learn from."""
    try:
        check_unseen(url, splits.train)
    except UnavailableError:  # storage does not answer, which is no verdict on the bundle
        raise
    except InputError as error:
        raise InputError(
            f"bundles.{name}: {url} was trained or selected on labels of the training split, whose groups it would "
            f"score too well; list its method under members, or train the stack on other periods ({error})"
        ) from error


def train_stack(
    config: StackConfig,
    members: Mapping[str, StackMember],
    splits: Splits,
    out: str,
    *,
    made_by: Mapping[str, Any],
    report: Report,
) -> Bundle:
    """Train trees on members' scores and commit them, with the members inside, as a bundle that scores raw features.

    A member scores the labelled training groups out of fold: each group by the bundle that was trained without it. So
    the trees see scores as good as they will be on new groups. Validation groups are scored by the members trained on
    all folds, which the stack's bundle holds.

    Args:
        config: see `StackConfig`.
        members: by name.
        splits: training and validation; the test split is not read.
        out: directory of the bundle.
        made_by: origin, recorded in the bundle's manifest.
        report: receives a record for each tree.

    Raises:
        InputError: as `train_gbdt`; a bundle is missing or for other features; the data lacks a chosen feature.
    """
    check_disjoint(splits)
    check_alone(config.gbdt)
    train = learnt(splits.train, config.gbdt)
    _chosen(train.features, config.features)
    for member in members.values():
        for url in (member.bundle, *member.folds):
            train.serving(load(url).features, whose=url)
    folds = folds_of(config, splits.train) if any(member.folds for member in members.values()) else []
    validation = with_features_of(train, select(splits.validation, labelled=True))
    grow_trees = functools.partial(_grow, config, members, train, folds, validation, out, made_by)
    launch(grow_trees, workers=ONE, report=report)
    return load(out)


def _grow(
    config: StackConfig,
    members: Mapping[str, StackMember],
    selection: Selection,
    folds: Sequence[Selection],
    validation_split: Selection,
    out: str,
    made_by: Mapping[str, Any],
    context: Context,
) -> None:
    """The work of `train_stack`, launched so that a signal can stop it between trees."""
    chosen = _chosen(selection.features, config.features)
    view = seen_by(config.gbdt, selection.features, chosen)
    held_out = {name: out_of_fold(name, member, selection, folds) for name, member in members.items()}
    train, codes = read_labelled(selection, "train", views.scored(view, held_out, standardise=config.standardise))
    validation, on_validation = _validation(config, only_relevant(validation_split), members, view)
    grown = grow(config.gbdt, train, codes, validation, context)
    cut = config.gbdt.stop_on
    alone = {name: validation.mean_ndcg(s.scores_N.numpy(), cut) for name, s in on_validation.items()}
    save_trees(
        out,
        {"model": grown.model},
        TreesArchitecture(
            library=config.gbdt.kind,
            sees=chosen,
            per_query=config.gbdt.per_query,
            members=tuple(members),
            standardise=config.standardise,
        ),
        config=config.model_dump(mode="json"),
        features=selection.features,
        dataset_hash=selection.hash,
        read_as=selection.read_as,
        reference=reference_of(selection),
        metrics={
            **grown.metrics,
            "labelled_groups": len(train.ids_Q),
            "validation_groups": validation_split.n_groups,
            **{f"validation_ndcg@{cut}_{name}": value for name, value in alone.items()},
        },
        made_by=made_by,
        files={path: data for name, m in members.items() for path, data in member_files(name, m.bundle).items()},
    )
    log.info("members alone: %s", ", ".join(f"{name} {value:.4f}" for name, value in alone.items()))


def folds_of(config: StackConfig, train: Split) -> list[Selection]:
    """The folds of the labelled training groups that the trees learn from."""
    folds = (config.fold(number, train, held_out=True) for number in range(config.folds))
    return [learnt(train.replace(fold=fold.model_dump()), config.gbdt) for fold in folds]


def out_of_fold(name: str, member: StackMember, train: Selection, folds: Sequence[Selection]) -> DocumentScores:
    """Scores of all labelled training groups, each by a bundle that has not seen the group's labels.

    Args:
        name: name of the member in errors.
        member: its bundles.
        train: the labelled training groups.
        folds: the folds of these groups; unused if the member has no bundle for each.
    """
    if not member.folds:
        return _score(train, load(member.bundle), name)
    parts = []
    for number, (url, held_out) in enumerate(zip(member.folds, folds, strict=True)):
        opened = load(url)
        _check_has_not_seen(opened, held_out)
        parts.append(_score(held_out, opened, f"{name}, fold {number}"))
    return DocumentScores.joined(parts)


def _score(selection: Selection, member: Bundle, name: str) -> DocumentScores:
    """A member's scores of a selection, which may have more features than the member."""
    return score_selection(with_tokens_of(selection, [member]), member.scorer(features=selection.features), name)


def _check_has_not_seen(opened: Bundle, held_out: Selection) -> None:
    """Check by a bundle's record of its training split that it saw none of the groups, so that no fold is mixed up."""
    trained_on = select(validate(Split, opened.made_by["config"]["splits"][0], opened.url), labelled=True)
    seen, held = trained_on.kept_labelled, held_out.kept_labelled
    assert held is not None
    assert seen is not None, f"{opened.url} has seen held-out labels: it was trained on all groups"
    assert not (seen & held).any(), f"{opened.url} has seen held-out labels"


def _validation(
    config: StackConfig, selection: Selection, members: Mapping[str, StackMember], view: View
) -> tuple[Labelled, Mapping[str, DocumentScores]]:
    """Validation groups as the trees see them, and the members' scores of them."""
    scores = {name: _score(selection, load(member.bundle), name) for name, member in members.items()}
    validation, _ = read_labelled(selection, "validation", views.scored(view, scores, standardise=config.standardise))
    check_validation(validation)
    return validation, scores


def _chosen(features: Sequence[Feature], names: Sequence[str]) -> tuple[str, ...] | None:
    """The names of the chosen features, None for all.

    Raises:
        InputError: a feature does not exist or is chosen twice.
    """
    if tuple(names) == _ALL:
        return None
    found = tuple(feature.name for name in names for feature in matching(name, features, key="features"))
    if twice := {name for name in found if found.count(name) > 1}:
        raise InputError(f"features: {min(twice)!r} is listed twice; leave one out")
    return found
