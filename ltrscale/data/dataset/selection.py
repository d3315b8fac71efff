"""Resolve a split to the data to read: row groups, and the labelled groups of them that are kept.

This needs only the manifests. No data file is opened, except for labels where a split counts groups with a relevant
document, or where only groups that can teach or test an order are wanted.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from ltrscale import storage
from ltrscale.arrays import Bools, Ints
from ltrscale.data.dataset.columns import (
    LABELS,
    LabelWeights,
    Owner,
    TokenField,
    Vocabulary,
    goal_column,
    label_weights,
)
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import Feature, matching, open_dataset, places
from ltrscale.data.dataset.origin import read_as
from ltrscale.data.dataset.row_groups import FilesToRead, PartToRead, RowGroup, RowGroups, keep_fold, relevant_in
from ltrscale.data.dataset.scores import SCORES, find_scores
from ltrscale.data.dataset.split import Split, SplitPart, resolve_periods
from ltrscale.draws import among_first, permutation
from ltrscale.errors import InputError, suggestion
from ltrscale.origin import Json, digest

GID_SPAN = 10**11
"""Number of group ids reserved for each data set of a split; no data set has that many query groups."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The data that a job reads: row groups in file order, and the labelled groups that are kept of them.

    With `labelled`, only groups with labels are served: those that `kept_labelled` marks (bool, by number of the
    labelled group in the split), or all if it is None. Otherwise all groups are served, without their labels. A group
    has labels if its column `labels` has a value; `scores` count as labels of all groups. `label_weights` names the
    columns whose weighted sum is served. `features` are the served features in order: all or some of those in the
    files, in any order. `hash` depends only on the data read: names and kinds of the features, periods, content and
    counts of the files in order, the sample, the fold, the labels and the scores. It does not depend on the places and
    names of files, nor on other content of the data sets.
    """

    features: tuple[Feature, ...]
    row_groups: RowGroups
    hash: str
    labelled: bool
    kept_labelled: Bools | None = None
    label_weights: LabelWeights = LABELS
    goals: tuple[str, ...] = ()
    """The goals to read beside the labels, which `with_goals` sets; none by default."""
    known_goals: tuple[str, ...] = ()
    """The goals of the data sets."""
    read_as: Mapping[str, Any] = field(default_factory=dict)
    """Result of `origin.read_as` for the first data set; not part of the hash."""
    tokens: tuple[TokenField, ...] = ()
    """The token fields to read, which `reading` sets; none by default, so that other models do not pay for them."""
    token_fields: tuple[TokenField, ...] = ()
    """The token fields that all data sets have, with one vocabulary."""
    vocabulary: Vocabulary | None = None
    """The vocabulary of the token fields."""

    def serving(
        self, features: Sequence[Feature], *, whose: str, where: str = "the data", on_purpose: bool = False
    ) -> Self:
        """The same groups with these features in this order; arguments and errors as for `places`."""
        places(features, self.features, whose=whose, where=where, on_purpose=on_purpose)
        return replace(self, features=tuple(features))

    def reading(self, *, query: Sequence[str] = (), document: Sequence[str] = ()) -> Self:
        """The same groups with these token fields, by name, of queries and documents.

        Raises:
            InputError: a data set has no such field, or the data sets have different vocabularies.
        """
        requested: dict[Owner, Sequence[str]] = {"query": query, "document": document}
        fields = {(field.of, field.name): field for field in self.token_fields}
        keys = [(owner, name) for owner, names in requested.items() for name in names]
        for owner, name in keys:
            if (owner, name) not in fields:
                available = [field.name for field in self.token_fields if field.of == owner]
                hint = suggestion(name, available, "there are") if available else "there are none of one vocabulary"
                raise InputError(f"the data have no tokens {name!r} of each {owner}; {hint}; prepare them with tokens")
        return replace(self, tokens=tuple(fields[key] for key in keys))

    def with_goals(self, goals: Sequence[str]) -> Self:
        """The same groups with the labels of these goals too, as `QueryGroups.goals_NG`; raises as `goal_column`."""
        for goal in goals:
            goal_column(goal, self.known_goals)
        return replace(self, goals=tuple(goals))

    def only(self, row_groups: Iterable[RowGroup]) -> Self:
        """The same with some of the row groups."""
        return replace(self, row_groups=RowGroups.from_iterable(row_groups))

    def taking(self, chosen: Bools) -> Self:
        """The same with only the chosen ones of the served labelled groups, shape [n_groups], and their row groups."""
        served = np.zeros(self.n_labelled, np.bool_)
        for row_group in self.row_groups:
            served[row_group.first_labelled :][: row_group.labelled] = self.kept(row_group)
        kept = np.zeros_like(served)
        kept[served] = chosen
        some = replace(self, kept_labelled=kept)
        return some.only(self.row_groups.take(some.served_groups_R > 0))

    @property
    def reads_scores(self) -> bool:
        """Whether scores serve as labels."""
        return self.label_weights[0][0] == SCORES

    @property
    def reads_sum(self) -> bool:
        """Whether labels are a weighted sum, so that they need not be whole numbers."""
        return len(self.label_weights) > 1 or self.label_weights[0][1] != 1

    @property
    def n_labelled(self) -> int:
        """Labelled groups of the split, served or not: the length of `kept_labelled`."""
        if self.kept_labelled is not None:
            return len(self.kept_labelled)
        return int((self.row_groups.first_labelled_R + self.row_groups.labelled_R).max())

    def kept(self, row_group: RowGroup) -> Bools:
        """Which of a row group's labelled groups are kept, shape [labelled]."""
        if self.kept_labelled is None:
            return np.ones(row_group.labelled, dtype=np.bool_)
        return self.kept_labelled[row_group.first_labelled :][: row_group.labelled]

    @cached_property
    def served_groups_R(self) -> Ints:
        """Groups of each row group that are served."""
        if not self.labelled:
            return self.row_groups.groups_R
        if self.kept_labelled is None:
            return self.row_groups.labelled_R
        n, first_R = len(self.kept_labelled), self.row_groups.first_labelled_R
        kept_before = np.zeros(n + 1, np.min_scalar_type(n))  # narrow, because there may be hundreds of millions
        np.cumsum(self.kept_labelled, dtype=kept_before.dtype, out=kept_before[1:])
        kept_R = kept_before[first_R + self.row_groups.labelled_R] - kept_before[first_R]
        return np.asarray(kept_R, np.int64)

    @cached_property
    def served_documents_R(self) -> Ints:
        """Served documents of each row group; an estimate in proportion to the groups if only some are served."""
        share_R = self.served_groups_R / np.maximum(1, self.row_groups.groups_R)
        return np.rint(self.row_groups.documents_R * share_R).astype(np.int64)

    @property
    def n_groups(self) -> int:
        """Number of served groups."""
        return int(self.served_groups_R.sum())

    @property
    def longest(self) -> int:
        """Upper bound of the documents of a group: the longest group of the files, served or not."""
        return self.row_groups.longest

    def present(self) -> dict[str, float]:
        """The share of the periods whose files have a served feature, by feature, where it is not 1."""
        files = self.row_groups.files
        if isinstance(files, FilesToRead) and not any(part.stored_in for part in files.parts):
            return {}
        stored = {(file.dataset, file.period): file.stored or self.features for file in self.row_groups.own_files}
        names = [{feature.name for feature in features} for features in stored.values()]
        shares = {f.name: sum(f.name in has for has in names) / max(1, len(names)) for f in self.features}
        return {name: share for name, share in shares.items() if share < 1}

    @property
    def serves_longest(self) -> bool:
        """True if a group of this length is certainly served: all groups of the row groups that may contain it are."""
        longest_R = self.row_groups.longest_F[self.row_groups.file_R]
        may_R = (longest_R == self.longest) & (self.row_groups.documents_R >= longest_R)
        return bool(may_R.any() and (self.served_groups_R >= self.row_groups.groups_R)[may_R].all())

    @property
    def n_documents(self) -> int:
        """Number of served documents; an estimate if only some groups of a row group are served."""
        return int(self.served_documents_R.sum())


def select(split: Split, *, labelled: bool, without: Collection[str] = ()) -> Selection:
    """Resolve a split to the row groups to read; row groups without a served group are left out.

    A labelled sample is drawn after bad files are left out, so its size is exact.

    Args:
        split: data sets, periods and labelled fraction.
        labelled: serve only groups with labels: of n labelled ones exactly `max(1, round(fraction * n))` or the number
            that the split names, and of these a fold or its complement if the split names one. Otherwise serve all
            groups, without labels.
        without: URLs of files to leave out, such as `Preflight.without`; URLs outside the split have no effect.

    Raises:
        InputError: a data set or period is missing, a data set lacks features of the first or is named twice, a feature
            to leave out does not exist, there is no group to serve (no labelled one, if `labelled`) or too few for the
            folds or the number that the split names, or the scores do not match the current data of the split's
            periods.
    """
    parts, without = resolve_periods(split), frozenset(without)
    features = _kept_features(parts[0].dataset.manifest.features, split)
    if labelled and split.scores is not None:
        parts = [_with_scores(parts, split)]
    parts = [part for part in parts if part.periods]  # an unused data set must change neither ids nor hash
    files = [part.files.where(lambda url: url not in without, part.urls) if without else part.files for part in parts]
    row_groups = _row_groups(parts, files)
    identity: dict[str, Any] = {
        "features": [(feature.name, feature.kind) for feature in features],
        "files": Json.array(of_part.content() for of_part in files),
    }
    if any(stored := [part.dataset.manifest.stored_names(part.periods) for part in parts]):
        identity["stored"] = stored
    weights = _label_weights(split, parts) if labelled else LABELS
    left_out = sum(len(part.files) - len(of_part) for part, of_part in zip(parts, files, strict=True))
    name = f"{_name(split)} without {left_out} bad files" if left_out else _name(split)
    kept = _kept_groups(split, row_groups, name, weights) if labelled else None
    identity |= _labels_identity(split, parts, weights) if labelled else {}
    token_fields, vocabulary = _tokens(parts)
    whole = Selection(
        features=features,
        row_groups=row_groups,
        hash=digest(identity),
        labelled=labelled,
        kept_labelled=kept,
        label_weights=weights,
        known_goals=parts[0].dataset.manifest.goals if parts else (),
        read_as=read_as(parts[0].dataset) if parts else {},
        token_fields=token_fields,
        vocabulary=vocabulary,
    )
    is_served_R = whole.served_groups_R > 0
    if not is_served_R.any():
        raise InputError(f"{name}: no query group there; the manifest counts the rows that prepare kept and rejected")
    return whole if is_served_R.all() else whole.only(row_groups.take(is_served_R))


def scored_row_groups(url: str, row_groups: RowGroups) -> RowGroups:
    """The row groups of a selection with their scores in a directory.

    Raises:
        InputError: they are of several data sets, or the scores do not match the current data of their periods.
    """
    assert isinstance(row_groups.files, FilesToRead)
    parts = row_groups.files.parts
    _check_one(url, parts, [part.url for part in parts])
    (part,) = parts
    found = find_scores(storage.absolute(url), open_dataset(part.url), part.files.periods)
    return replace(row_groups, files=FilesToRead([part._replace(scores=found)]))


def _with_scores(parts: list[SplitPart], split: Split) -> SplitPart:
    """Attach the scores that serve as labels to the one data set of a split."""
    assert split.scores is not None
    _check_one(split.scores, parts, split.data)
    (part,) = parts
    return replace(part, scores=find_scores(storage.absolute(split.scores), part.dataset, part.periods))


def _check_one(scores: str, parts: Sequence[object], data: Sequence[str]) -> None:
    if len(parts) > 1:
        raise InputError(f"{scores}: scores are of one data set, the split has {', '.join(data)}; name one of them")


def _label_weights(split: Split, parts: Sequence[SplitPart]) -> LabelWeights:
    """The columns of the labels, which are the same in all data sets."""
    if split.scores is not None:
        return ((SCORES, 1.0),)
    found = {label_weights(split.labels, part.dataset.manifest.goals): part.dataset.url for part in parts}
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise InputError(f"{one} and {other}: their goals are in other columns; prepare both with the same labels")
    return next(iter(found), LABELS)


def _labels_identity(split: Split, parts: list[SplitPart], weights: LabelWeights) -> dict[str, Any]:
    """The settings besides the data that determine the served labelled groups and their labels."""
    sample = split.labelled_seed if split.labelled_sample == "random" else split.labelled_sample
    identity: dict[str, Any] = {"labelled": (split.labelled_fraction, sample)}
    # only settings that are set, so that the hash of a split without them does not depend on them
    if split.labelled_fraction == 1:
        identity |= split.size
    if weights != LABELS and split.scores is None:
        identity["labels"] = weights if len(weights) > 1 or weights[0][1] != 1 else weights[0][0]
    if split.scores is not None:
        identity["scores"] = [scores.sha256 for part in parts for scores in part.scores.values()]
    if split.fold is not None:
        identity["fold"] = split.fold.model_dump(exclude_none=True)
    return identity


def _row_groups(parts: Sequence[SplitPart], files: Sequence[DataFiles]) -> RowGroups:
    """The row groups of the chosen periods, in the order of the manifests."""
    of_parts: list[tuple[Ints, ...]] = []
    to_read: list[PartToRead] = []
    for number, (part, of_part) in enumerate(zip(parts, files, strict=True)):
        groups_R, documents_R, labelled_R = of_part.counts_R3.T
        if part.scores:
            is_scored_F = np.fromiter(map(part.scores.__contains__, of_part.paths), np.bool_, len(of_part))
            labelled_R = np.where(is_scored_F[of_part.file_R], groups_R, labelled_R)
        index_R = np.arange(len(groups_R)) - of_part.bounds_F1[of_part.file_R]
        first_file = sum(len(earlier.files) for earlier in to_read)
        of_parts.append((first_file + of_part.file_R, index_R, groups_R, documents_R, labelled_R))
        manifest = part.dataset.manifest
        stored = manifest.features, {period: manifest.stored[period] for period in manifest.stored_names(part.periods)}
        to_read.append(PartToRead(part.dataset.url, number * GID_SPAN, *stored, part.scores, of_part))
    of_parts = of_parts or [(np.zeros(0, np.int64),) * 5]
    columns = [column[0] if len(column) == 1 else np.concatenate(column) for column in zip(*of_parts, strict=True)]
    columns.append(np.cumsum(columns[-1]) - columns[-1])
    longest_F = np.concatenate([np.zeros(0, np.int64), *(of_part.longest_F for of_part in files)])
    return RowGroups(FilesToRead(to_read), longest_F, *columns)


def _kept_features(features: tuple[Feature, ...], split: Split) -> tuple[Feature, ...]:
    left_out = {f for pattern in split.leave_out for f in matching(pattern, features, key="leave_out")}
    if len(left_out) == len(features):
        raise InputError(f"leave_out: {', '.join(split.leave_out)} leave out all {len(features)} features; keep some")
    return tuple(feature for feature in features if feature not in left_out)


def _tokens(parts: Sequence[SplitPart]) -> tuple[tuple[TokenField, ...], Vocabulary | None]:
    """The token fields that all data sets have, with their one vocabulary; none if they have several."""
    manifests = [part.dataset.manifest for part in parts]
    vocabulary = manifests[0].vocabulary if manifests else None
    if vocabulary is None or not all(vocabulary.same_as(manifest.vocabulary) for manifest in manifests):
        return (), None
    columns = [{field.column for field in manifest.tokens} for manifest in manifests]
    fields = tuple(f for f in manifests[0].tokens if all(f.column in of_one for of_one in columns))
    return fields, vocabulary if fields else None


def _kept_groups(split: Split, row_groups: RowGroups, where: str, weights: LabelWeights) -> Bools | None:
    """Mask of the n labelled groups that are served, shape [n], or None for all."""
    n = int(row_groups.labelled_R.sum())
    if n == 0 and split.scores is None:
        raise InputError(f"{where}: no group has labels; name periods that have some, or pretrain on these")
    if not split.size and split.fold is None:  # with scores as labels there may be a billion
        return None
    kept = np.ones(n, dtype=np.bool_)
    if split.size:
        size, is_random = _size(split, n, row_groups, where, weights), split.labelled_sample == "random"
        kept = among_first(n, size, "labelled", split.labelled_seed) if is_random else np.arange(n) < size
    if split.fold is not None:
        kept = keep_fold(kept, split.fold, _name(split))
    return None if kept.all() else kept


def _size(split: Split, n: int, row_groups: Sequence[RowGroup], where: str, weights: LabelWeights) -> int:
    """How many of n labelled groups join the sample."""
    if split.relevant_groups is not None:
        relevant_Q = np.concatenate([np.zeros(0, np.bool_), *relevant_in(row_groups, weights)])
        if split.labelled_sample == "random":  # in the order in which groups join the sample
            relevant_Q = relevant_Q[permutation(n, "labelled", split.labelled_seed)]
        places = np.flatnonzero(relevant_Q)
        if split.relevant_groups > len(places):
            count = f"{len(places)} of its labelled groups have a relevant document"
            raise InputError(f"{where}: {count}, relevant_groups is {split.relevant_groups}; lower it")
        return int(places[split.relevant_groups - 1]) + 1
    if split.labelled_groups is None:
        return max(1, round(split.labelled_fraction * n))
    if split.labelled_groups > n:
        count = f"it has {n} labelled groups"
        raise InputError(f"{where}: {count}, labelled_groups is {split.labelled_groups}; lower it")
    return split.labelled_groups


def _name(split: Split) -> str:
    return f"{', '.join(split.data)} (periods: {', '.join(split.periods or ('all',))})"


def only_relevant(selection: Selection) -> Selection:
    """The labelled groups of a selection that have a relevant document; metrics are defined on no others.

    In a log of purchases most groups have none, and need not be read again and again. A selection without any such
    group, or with scores as labels, is returned unchanged.

    Raises:
        InputError: a file cannot be read, or has other groups than its manifest lists.
    """
    if selection.reads_scores:
        return selection
    relevant_queries = relevant_in(selection.row_groups, selection.label_weights)
    of_served = [
        relevant_Q[selection.kept(row_group)]
        for row_group, relevant_Q in zip(selection.row_groups, relevant_queries, strict=True)
    ]
    relevant = np.concatenate(of_served)
    return selection.taking(relevant) if relevant.any() else selection


def at_most(selection: Selection, n: int, *parts: int | str) -> Selection:
    """All labelled groups of a selection if there are at most n, else a random sample of n, seeded by `parts`.

    A smaller split would not do: it deals its folds within the sample, which contains groups of other folds.
    """
    if selection.n_groups <= n:
        return selection
    return selection.taking(among_first(selection.n_groups, n, *parts))


def check_teaches(selection: Selection, name: str) -> None:
    """Raise an `InputError` if `nothing_to_learn` finds that no served labelled group teaches an order."""
    if wrong := nothing_to_learn(selection):
        remedy = "check which columns prepare takes as the query and the label, or name more periods or labels"
        raise InputError(f"{name}: {wrong}; {remedy}")


def nothing_to_learn(selection: Selection) -> str:
    """Explain why no order can be learnt: no served labelled group has two labels, one above 0; "" if one has.

    It reads labels until it finds one. Scores that serve as labels are assumed to differ.
    """
    if selection.reads_scores:
        return ""

    def some(*, differing: bool) -> bool:
        return any(
            (
                relevant_in([row_group], selection.label_weights, differing=differing)[0] & selection.kept(row_group)
            ).any()
            for row_group in selection.row_groups
        )

    if some(differing=True):
        return ""
    groups, row_groups = f"its {selection.n_groups:,} labelled groups", selection.row_groups
    if not some(differing=False):
        wrong = f"all labels of {groups} are 0"
    elif (row_groups.documents_R == row_groups.groups_R).all():
        wrong = f"each of {groups} has one document, as where the query is the id of a row"
    else:
        wrong = f"the documents of each of {groups} have one label"
    return f"{wrong}, so there is nothing to learn or to choose by"
