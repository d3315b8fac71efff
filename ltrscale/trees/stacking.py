"""Stacking: trees over the scores of other models and chosen raw features (SUN23, section 3.4).

Shapes: N documents.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from pydantic import Field

from ltrscale.bundle import Bundle, TreesArchitecture, facts, load, save_trees, views
from ltrscale.config import Config, validate
from ltrscale.data.dataset.labelled import Fold, fold_of
from ltrscale.data.dataset.manifest import Feature, matching
from ltrscale.data.dataset.relevant import only_relevant
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split, Splits, Texts
from ltrscale.data.stream.scored import DocumentScores
from ltrscale.errors import InputError
from ltrscale.origin import settings_of
from ltrscale.progress import Report, log
from ltrscale.runtime.launch import launch
from ltrscale.runtime.workers import ONE, WorkerContext
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.stage import LabelledStage, Origin, Settings
from ltrscale.stages.unseen import check_member
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.data import read_judged, read_labelled
from ltrscale.trees.gbdt import check_alone, grow, learnt, scores_of, with_features_of

_ALL = ("all",)


class StackConfig(Config):
    """The inputs of a stack's trees, and how they are grown."""

    features: Texts = ()
    """Raw features that the trees see before the members' scores: names, prefixes with *, `numeric`, `categorical`, or
    `all`; empty for none."""
    standardise: bool = True
    """Standardise members' scores within each query group: ranking losses do not fix the scale of scores, so it changes
    with the folds that a member was trained on, and trees would take the change for information."""
    folds: int = Field(5, ge=2, le=1000)
    """Number of parts of the labelled training groups; a member scores each part after training on the others."""
    seed: int = 0
    """Seed of the assignment of groups to folds."""
    gbdt: GBDTConfig = LightGBMConfig()
    """The trees."""

    def fold(self, number: int, train: Split, *, held_out: bool) -> Fold:
        """One fold of a split's labelled groups, or all other folds if not `held_out`.

        Raises:
            InputError: the split serves a fold within a fold.
        """
        return fold_of(train.fold, number, self.folds, held_out=held_out, seed=self.seed)


class StackMember(Config):
    """A model whose scores the trees see."""

    bundle: BundleUrl
    """Bundle trained on all folds; it scores validation groups, and new groups inside the stack's bundle."""
    folds: tuple[BundleUrl, ...] = ()
    """For each fold the bundle that was trained on the others; empty if `bundle` has seen no training label."""


class StackedJob(LabelledStage):
    """Train trees over the scores of trained models, which the bundle holds too, so that it scores raw features.

    A member scores the labelled training groups out of fold: each group by the bundle that was trained without it. So
    the trees see scores as good as they will be on new groups. Validation groups are scored by the members trained on
    all folds, which the stack's bundle holds.
    """

    stage: ClassVar = "stack"
    stack: StackConfig
    members: dict[str, StackMember] = Field(max_length=100)

    def check(self) -> None:
        """Refuse splits that overlap, and ready bundles that may have seen labels of the training split."""
        super().check()
        for name, member in self.members.items():
            if not member.folds:
                check_ready(name, member.bundle, self.splits)

    def own_settings(self) -> Settings:
        """Settings of the stack, the names of its members in their order, and their bundles."""
        bundles = [settings_of(member) for member in self.members.values()]
        return {"stack": settings_of(self.stack), "members": list(self.members), "bundles": bundles}

    def work(self, origin: Origin, report: Report) -> None:
        """Train, and commit the bundle.

        Raises:
            InputError: as `GBDTJob.work`; a bundle is missing or for other features; the data lacks a chosen feature.
        """
        config = self.stack
        check_alone(config.gbdt)
        train = learnt(self.splits.train, config.gbdt)
        _chosen_names(train.features, config.features)
        for member in self.members.values():
            for url in (member.bundle, *member.folds):
                train.serving(load(url).features, whose=url)
        folds = _folds_of(config, self.splits.train) if any(member.folds for member in self.members.values()) else []
        validation = with_features_of(train, select(self.splits.validation, labelled=True))
        # launched so that a signal can stop it between trees
        launch(partial(self._grow, train, folds, validation, origin), workers=ONE, report=report)

    def _grow(
        self,
        selection: Selection,
        folds: Sequence[Selection],
        judged: Selection,
        origin: Origin,
        context: WorkerContext,
    ) -> None:
        config, members = self.stack, self.members
        chosen = _chosen_names(selection.features, config.features)
        view = views.raw(selection.features, chosen, per_query=config.gbdt.per_query)
        held_out = {name: _out_of_fold(name, member, selection, folds) for name, member in members.items()}
        train, codes = read_labelled(selection, "train", views.scored(view, held_out, standardise=config.standardise))
        relevant = only_relevant(judged)
        scores = {name: scores_of(load(member.bundle), relevant, name) for name, member in members.items()}
        validation = read_judged(
            relevant, views.scored(view, scores, standardise=config.standardise), config.gbdt.highest_judged
        )
        model, grown = grow(config.gbdt, train, codes, validation, context)
        cut = config.gbdt.stop_on
        member_values = {name: validation.mean_ndcg(s.scores_N.numpy(), cut) for name, s in scores.items()}
        trees = TreesArchitecture(
            library=config.gbdt.kind,
            sees=chosen,
            per_query=config.gbdt.per_query,
            members=tuple(members),
            standardise=config.standardise,
        )
        metrics = {
            **grown,
            "labelled_groups": len(train.ids_Q),
            "validation_groups": judged.n_groups,
            **{f"validation_ndcg@{cut}_{name}": value for name, value in member_values.items()},
        }
        about = facts(selection, config, metrics=metrics, made_by=origin)
        urls = {name: member.bundle for name, member in members.items()}
        save_trees(self.out, {"model": model}, trees, about, members=urls)
        log.info("members alone: %s", ", ".join(f"{name} {value:.4f}" for name, value in member_values.items()))


def check_ready(name: str, url: str, splits: Splits) -> None:
    """Check that a bundle has not seen the labels that the trees will learn from."""
    fault = (
        "was trained or selected on labels of the training split, whose groups it would score too well; list its "
        "method under members, or train the stack on other periods"
    )
    check_member(name, url, splits.train, fault)


def _folds_of(config: StackConfig, train: Split) -> list[Selection]:
    """The folds of the labelled training groups that the trees learn from."""
    folds = (config.fold(number, train, held_out=True) for number in range(config.folds))
    return [learnt(train.replace(fold=fold), config.gbdt) for fold in folds]


def _out_of_fold(name: str, member: StackMember, train: Selection, folds: Sequence[Selection]) -> DocumentScores:
    """Scores of all labelled training groups, each by a bundle that has not seen the group's labels."""
    if not member.folds:
        return scores_of(load(member.bundle), train, name)
    parts = []
    for number, (url, held_out) in enumerate(zip(member.folds, folds, strict=True)):
        opened = load(url)
        _check_has_not_seen(opened, held_out)
        parts.append(scores_of(opened, held_out, f"{name}, fold {number}"))
    return DocumentScores.joined(parts)


def _check_has_not_seen(opened: Bundle, held_out: Selection) -> None:
    """Check by its recorded training split that a bundle saw none of the groups, so that no fold is mixed up."""
    trained_on = select(validate(Split, opened.made_by["config"]["splits"][0], opened.url), labelled=True)
    trained, kept_out = trained_on.kept_labelled, held_out.kept_labelled
    assert kept_out is not None
    assert trained is not None, f"{opened.url} has seen held-out labels: it was trained on all groups"
    assert not (trained & kept_out).any(), f"{opened.url} has seen held-out labels"


def _chosen_names(features: Sequence[Feature], names: Sequence[str]) -> tuple[str, ...] | None:
    """The names of the chosen features, None for all."""
    if tuple(names) == _ALL:
        return None
    chosen = tuple(feature.name for name in names for feature in matching(name, features, key="features"))
    if twice := {name for name in chosen if chosen.count(name) > 1}:
        raise InputError(f"features: {min(twice)!r} is listed twice; leave one out")
    return chosen
