"""Splits: the periods of data sets that a job reads, and the part of their labels that it may use.

The manifests alone resolve a split to row groups; no data file is opened, except for the labels where a split counts
groups with a relevant document.
"""

import datetime
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from ltrscale import storage
from ltrscale.config import Config, digest, validate
from ltrscale.data.dataset.manifest import DataFile, Dataset, Feature, matching, open_dataset, places
from ltrscale.data.dataset.origin import origins, read_as
from ltrscale.data.dataset.relevant import labelled_queries, none_relevant, with_relevant
from ltrscale.data.dataset.sample import Fold, keep_fold, order_of, to_reach
from ltrscale.data.dataset.scores import Found, find_scores
from ltrscale.data.dataset.tokens import Owner, TokenField, Vocabulary, shared
from ltrscale.errors import InputError, nearest, suggestion
from ltrscale.progress import log


def _texts(value: Any) -> Any:
    """A tuple of texts, also from one text; YAML's dates and numbers become the texts that they were written as."""
    items = value if isinstance(value, list | tuple) else (value,)
    plain = (int, datetime.date)
    return tuple(str(item) if isinstance(item, plain) and not isinstance(item, bool) else item for item in items)


def _some_texts(value: Any) -> Any:
    """As `_texts`, but an empty list is an error: a split without periods would read nothing, or all."""
    if value in ((), []):
        raise ValueError("an empty list; name periods, or leave the key out for all")
    return _texts(value)


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Periods = Annotated[tuple[str, ...], BeforeValidator(_some_texts)] | None
"""Periods `P` or ranges `A..B`, both ends included, in text order; None for all."""
LabelColumn = Literal["labels", "relevance"]
GID_SPAN = 10**11
"""Number of group ids reserved for each data set of a split; no data set has so many query groups."""
_DATE = re.compile(r"\d{4}-")
"""The beginning of a period's name that says when it was: 2026-W07, 2026-02-14, 2026-02-14T09."""


class Split(Config):
    """Some periods of some data sets, and the part of their labels that is used."""

    data: Texts = ()
    """Data set directories; a single one may be given as plain text. A pipeline reads its own data set by default."""
    periods: Periods = None
    """Periods `P` or ranges `A..B`, both ends included, in text order; all if it is left out."""
    labelled_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the labelled groups whose labels are used; at least one group."""
    labelled_groups: int | None = Field(default=None, ge=1)
    """Number of the labelled groups whose labels are used, instead of a share."""
    relevant_groups: int | None = Field(default=None, ge=1)
    """Number of groups with a relevant document (a label above 0) whose labels are used, instead of a share: groups
    join the sample in its order until so many have one, so groups without one come along in their natural share. This
    reads the labels once."""
    labelled_sample: Literal["random", "first"] = "random"
    """How to choose them: a uniform sample, or the first groups of the split, as HOU24's public code does."""
    labelled_seed: int = 0
    """Seed of the sample; with the same seed a smaller sample is part of a larger one."""
    labels: LabelColumn = "labels"
    """Column whose values serve as labels; `relevance` has the labels from before a data set was relabelled."""
    scores: str | None = None
    """Directory made by jobs.score from the one data set: every group counts as labelled, with its scores as labels."""
    fold: Fold | None = None
    """Serve one fold of the labelled groups that are used, or all others; stages that read all groups ignore it."""
    leave_out: Texts = ()
    """Features that a model does not read: names, prefixes with * such as c_*, or `categorical` for all of that kind.
    Of the splits of a job, `train` alone takes it: a model reads the features that it was trained on."""

    @model_validator(mode="after")
    def _has_one_kind_of_labels(self) -> Self:
        if self.scores is not None and self.labels != "labels":
            raise ValueError(f"scores and labels: {self.labels} both choose the labels; leave one out")
        if self.scores is not None and self.relevant_groups is not None:
            raise ValueError("relevant_groups needs labels, and scores are none; set labelled_groups")
        return self

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if len(self.size) > 1:
            raise ValueError(f"{' and '.join(self.size)} all say how many labels are used; leave all but one out")
        return self

    @property
    def size(self) -> dict[str, float]:
        """The settings that say how many labels are used; empty for all labels."""
        sizes = {
            "labelled_fraction": self.labelled_fraction if self.labelled_fraction < 1 else None,
            "labelled_groups": self.labelled_groups,
            "relevant_groups": self.relevant_groups,
        }
        return {name: value for name, value in sizes.items() if value is not None}

    @property
    def sample(self) -> dict[str, float | str]:
        """The settings that say which labels are used; empty for all labels."""
        how = self.labelled_seed if self.labelled_sample == "random" else self.labelled_sample
        return {**self.size, "sample": how} if self.size else {}

    def completes(self, other: "Split") -> bool:
        """Whether the one serves a fold of some labelled groups, and the other all others of the same groups.

        A fold within another one is a part of what that one serves.
        """
        same = {"fold": None, "leave_out": ()}
        return self.replace(**same) == other.replace(**same) and any(
            mine.held_out != others.held_out and mine.replace(held_out=others.held_out) == others
            for mine, others in itertools.product(_nested(self.fold), _nested(other.fold))
        )

    def with_scores(self, url: str) -> Self:
        """The same periods, in which the scores of all groups serve as labels."""
        return self.replace(scores=url, labels="labels", relevant_groups=None)


def _nested(fold: Fold | None) -> Iterator[Fold]:
    """A fold, and the one within which it lies."""
    if fold is not None:
        yield fold
    if fold is not None and fold.within is not None:
        yield Fold(**fold.within.model_dump())


class Splits(Config):
    """The splits of a job; they share no period of a data set, unless the one is a fold and the other the rest."""

    train: Split
    """The split to learn from."""
    validation: Split
    """The split that chooses between epochs, trees or settings; its keys are those of `train`."""
    test: Split | None = None
    """The split to evaluate on, which shares no period with the others; its keys are those of `train`. Training does
    not read it and needs none."""
    gap: int = Field(default=0, ge=0)
    """Whole periods that must lie between a training period and any validation or test period."""

    @model_validator(mode="after")
    def _only_train_leaves_out(self) -> Self:
        for name in self.by_name.keys() - {"train"}:
            if self.by_name[name].leave_out:
                raise ValueError(f"{name}.leave_out has no effect: models read the features of train; set it there")
        return self

    @property
    def by_name(self) -> dict[str, Split]:
        """The splits that there are, by their names."""
        tested = {} if self.test is None else {"test": self.test}
        return {"train": self.train, "validation": self.validation, **tested}

    def on(self, url: str) -> Self:
        """The same splits; those that name no data set read this one."""
        return self.replace(**{name: split.replace(data=split.data or url) for name, split in self.by_name.items()})

    def drawn(self, seed: int) -> Self:
        """The same splits with another draw of the labelled groups, also of validation where it is a sample."""
        drawn = {"train": self.train} | ({"validation": self.validation} if self.validation.size else {})
        return self.replace(
            **{name: split.replace(labelled_seed=split.labelled_seed + seed) for name, split in drawn.items()}
        )

    def leaving_out(self, patterns: Sequence[str]) -> Self:
        """The same splits with further features left out."""
        train = self.train.replace(leave_out=(*self.train.leave_out, *patterns))
        return self.replace(train=train.model_dump())


class SplitsWithTest(Splits):
    """The splits of a job that evaluates."""

    test: Split
    """The split to evaluate on, which shares no period with the others; its keys are those of `train`."""

    @model_validator(mode="before")
    @classmethod
    def _from_splits(cls, values: Any) -> Any:
        """Splits that happen to have a test split are as good."""
        return values.model_dump(exclude_none=True) if isinstance(values, Splits) else values

    @classmethod
    def of(cls, splits: Splits) -> Self:
        """The splits of a job that may evaluate.

        Raises:
            InputError: they have no test split.
        """
        return validate(cls, splits.model_dump(exclude_none=True), "splits")


class Source(NamedTuple):
    """The data set that lists a file, and the hash and bytes of the file by its manifest."""

    url: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class RowGroup:
    """One Parquet row group, with its counts from the manifest.

    `gid_base` is added to `gid`, so that ids are unique over several data sets: `GID_SPAN` for each earlier data set
    from which the split takes a period, whether or not files are left out. `first_labelled` is the number of labelled
    groups before it in the split, without the files left out. `scores` is the file whose row group of the same index
    has the scores that serve as labels: then all groups count as labelled. `stored` are the features in its file, which
    may differ from the ones that are served.
    """

    url: str
    index: int
    period: str
    groups: int
    documents: int
    labelled: int
    gid_base: int
    first_labelled: int
    scores: str | None = None
    source: Source | None = None
    """Lets a reader check that the file is still the one that was chosen."""
    stored: tuple[Feature, ...] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class Selection:
    """The data that a job reads: row groups in file order, and the labelled groups that are kept of them.

    With `labelled` only groups with labels are served: those that `kept_labelled` (bool, by number of the labelled
    group in the split) marks, or all where it is None. Without `labelled` all groups are served, without their labels.
    A group has labels if its column `labels` has a value; `scores` count as labels of all groups. `label_column` names
    the column whose values are served. `features` are the features served, in order: all or some of those in the files,
    perhaps in another order. `hash` depends on the data read alone: names and kinds of the features, periods, content
    and counts of the files in order, the sample, the fold, the label column and the scores. It does not depend on the
    files' places and names, nor on other content of the data sets.
    """

    features: tuple[Feature, ...]
    row_groups: tuple[RowGroup, ...]
    hash: str
    labelled: bool
    kept_labelled: NDArray[np.bool_] | None = None
    label_column: Literal[LabelColumn, "scores"] = "labels"
    read_as: Mapping[str, Any] = field(default_factory=dict)
    """See `origin.read_as`, of the first data set; not part of the hash."""
    tokens: tuple[TokenField, ...] = ()
    """The token fields that are read; none unless `reading` names them, so that other models do not pay for them."""
    token_fields: tuple[TokenField, ...] = ()
    """The token fields that all data sets have, with one vocabulary."""
    vocabulary: Vocabulary | None = None
    """The vocabulary of the token fields."""

    def serving(self, features: Sequence[Feature], *, whose: str, where: str = "the data") -> Self:
        """The same groups with these features in this order, matched by name.

        Raises:
            InputError: as `places`.
        """
        places(features, self.features, whose=whose, where=where)
        return replace(self, features=tuple(features))

    def reading(self, *, query: Sequence[str] = (), document: Sequence[str] = ()) -> Self:
        """The same groups with these token fields, by name, of the queries and of the documents.

        Raises:
            InputError: a data set has no such field, or the data sets have different vocabularies.
        """
        wanted: dict[Owner, Sequence[str]] = {"query": query, "document": document}
        found = {(field.of, field.name): field for field in self.token_fields}
        keys = [(of, name) for of, names in wanted.items() for name in names]
        for of, name in keys:
            if (of, name) not in found:
                there = [field.name for field in self.token_fields if field.of == of]
                near = suggestion(name, there, "there are") if there else "there are none of one vocabulary"
                raise InputError(f"the data have no tokens {name!r} of each {of}; {near}; prepare them with tokens")
        return replace(self, tokens=tuple(found[key] for key in keys))

    def kept(self, row_group: RowGroup) -> NDArray[np.bool_]:
        """Which of a row group's labelled groups are kept, shape [labelled]."""
        if self.kept_labelled is None:
            return np.ones(row_group.labelled, dtype=np.bool_)
        return self.kept_labelled[row_group.first_labelled :][: row_group.labelled]

    def served_groups(self, row_group: RowGroup) -> int:
        """Groups of a row group that are served."""
        return int(self.kept(row_group).sum()) if self.labelled else row_group.groups

    def served_documents(self, row_group: RowGroup) -> int:
        """Documents of a row group that are served; if only some groups are, an estimate in proportion to them."""
        share = self.served_groups(row_group) / max(1, row_group.groups)
        return round(row_group.documents * share)

    @property
    def n_groups(self) -> int:
        """Groups that are served."""
        return sum(map(self.served_groups, self.row_groups))

    @property
    def n_documents(self) -> int:
        """Documents that are served; an estimate if only some groups of a row group are."""
        return sum(map(self.served_documents, self.row_groups))


@dataclass(frozen=True)
class _SplitPart:
    """A data set of a split, and the periods that the split takes from it, sorted."""

    dataset: Dataset
    periods: tuple[str, ...]
    scores: Mapping[str, Found] = field(default_factory=dict)
    """The scores that serve as labels, by path of the data file."""

    def files(self, without: Collection[str] = ()) -> Iterator[tuple[str, DataFile]]:
        """The URLs and files of these periods, in the order of the manifest, without the URLs in `without`."""
        for file in self.dataset.manifest.files:
            if file.period in self.periods and (url := storage.listed_file(self.dataset.url, file.path)) not in without:
                yield url, file


def select(split: Split, *, labelled: bool, without: Collection[str] = ()) -> Selection:
    """Resolve a split to the row groups to read; row groups without a served group are left out.

    A labelled sample is drawn after bad files were left out, so its size is exact.

    Args:
        split: data sets, periods and labelled fraction.
        labelled: serve only groups with labels, of the n labelled ones exactly `max(1, round(fraction * n))` or as
            many as the split names, and of these one fold or all others where a fold is named; otherwise serve all
            groups, without labels.
        without: URLs of files to leave out, such as `Preflight.without`; URLs outside the split have no effect.

    Raises:
        InputError: a data set or period is missing, a data set lacks features of the first or is named twice, a
            feature to leave out does not exist, there is no group (no labelled one, if `labelled`) to serve or too few
            for the folds or the number that the split names, or the scores are not those of the split's periods as
            they are now.
    """
    parts, without = _resolve(split), frozenset(without)
    features = _kept_features(parts[0].dataset.manifest.features, split)
    if scored := labelled and split.scores is not None:
        parts = [_with_scores(parts, split)]
    parts = [part for part in parts if part.periods]  # an unused data set must change neither ids nor hash
    row_groups = tuple(_row_groups(parts, without))
    kept = None
    identity: dict[str, Any] = {
        "features": [(feature.name, feature.kind) for feature in features],
        "files": [[file.content() for _, file in part.files(without)] for part in parts],
    }
    left_out = sum(url in without for part in parts for url, _ in part.files())
    there = f"{_name(split)} without {left_out} bad files" if left_out else _name(split)
    if labelled:
        n = sum(row_group.labelled for row_group in row_groups)
        if n == 0 and not scored:
            raise InputError(f"{there}: no group has labels; name periods that have some, or pretrain on these")
        kept = _kept(n, split, row_groups, there)
        identity |= _labels_identity(split, parts)
    column: Literal[LabelColumn, "scores"] = "scores" if scored else split.labels
    raw = read_as(parts[0].dataset) if parts else {}
    texts = shared([(part.dataset.manifest.tokens, part.dataset.manifest.vocabulary) for part in parts])
    vocabulary = parts[0].dataset.manifest.vocabulary if texts else None
    whole = Selection(features, row_groups, digest(identity), labelled, kept, column, raw, (), texts, vocabulary)
    served = tuple(row_group for row_group in row_groups if whole.served_groups(row_group))
    if not served:
        raise InputError(f"{there}: no query group there; the manifest counts the rows that prepare kept and rejected")
    return replace(whole, row_groups=served)


def only_relevant(selection: Selection) -> Selection:
    """The labelled groups of a selection that have a relevant document, the only ones that a metric is defined on.

    In a log of purchases most groups have none, and need not be read again and again. A selection without any such
    group, or whose labels are scores, stays as it is.

    Raises:
        InputError: a file cannot be read, or has other groups than its manifest lists.
    """
    if selection.label_column == "scores":
        return selection
    n = max(row_group.first_labelled + row_group.labelled for row_group in selection.row_groups)
    kept = np.zeros(n, np.bool_)
    found = _relevant(selection.row_groups, selection.label_column)
    for row_group, relevant_Q in zip(selection.row_groups, found, strict=True):
        kept[row_group.first_labelled :][: row_group.labelled] = selection.kept(row_group) & relevant_Q
    if not kept.any():
        return selection
    relevant = replace(selection, kept_labelled=kept)
    served = tuple(row_group for row_group in selection.row_groups if relevant.served_groups(row_group))
    return replace(relevant, row_groups=served)


def check_relevant(selection: Selection, name: str) -> None:
    """Check that a labelled group that is served has a relevant document: from labels of 0 alone nothing is learnt.

    It reads labels until it finds one.

    Args:
        selection: labelled groups; scores that serve as labels are not checked.
        name: of the split, for errors.

    Raises:
        InputError: all labels are 0.
    """
    if selection.label_column == "scores":
        return
    for row_group in selection.row_groups:
        (relevant_Q,) = _relevant([row_group], selection.label_column)
        if (relevant_Q & selection.kept(row_group)).any():
            return
    raise InputError(
        f"{name}: {none_relevant(selection.n_groups)}; check which column prepare takes as the label, or name more "
        "periods or labels"
    )


def chosen_files(split: Split, key: str = "") -> list[tuple[Dataset, list[DataFile]]]:
    """The data sets of a split, each with the files that the split reads, in the order of the manifest.

    Args:
        split: data sets and periods.
        key: the split's key in the config of the job, for errors.

    Raises:
        InputError: as `select`, before files are opened.
    """
    return [(part.dataset, [file for _, file in part.files()]) for part in _resolve(split, key)]


def with_periods_named(split: Split) -> Split:
    """The same split with all periods that it takes now listed by name, so that later periods do not join it.

    Raises:
        InputError: as `select`, before files are opened.
    """
    return split.replace(periods=sorted({period for part in _resolve(split) for period in part.periods}))


def joined(train: Split, validation: Split) -> Split:
    """The groups of both splits as one split, which serves the features of the first.

    Raises:
        InputError: the splits use their labels in different ways, or no list of periods takes what both take.
    """
    if train.completes(validation) and train.fold and train.fold.within is None:
        return train.replace(fold=None)
    how = ("labelled_fraction", "labels", "scores", "fold", "labelled_groups", "relevant_groups")
    if other := [name for name in how if getattr(train, name) != getattr(validation, name)]:
        values = f"{getattr(train, other[0])!r} and {getattr(validation, other[0])!r}"
        raise InputError(f"train and validation cannot be joined: their {other[0]} are {values}; set both alike")
    if counts := sorted(train.size.keys() - {"labelled_fraction"}):
        raise InputError(
            f"train and validation cannot be joined with {counts[0]} in each; set labelled_fraction in both"
        )
    first, second = map(with_periods_named, (train, validation))
    periods = sorted({*(first.periods or ()), *(second.periods or ())})
    both = train.replace(data=tuple(dict.fromkeys((*train.data, *validation.data))), periods=periods)
    if _file_urls(both) != _file_urls(first) | _file_urls(second):
        raise InputError(
            f"train and validation cannot be joined: {', '.join(both.data)} have periods of equal names, of which only "
            "some are in use; name the same data sets in both splits"
        )
    return both


def _file_urls(split: Split) -> set[str]:
    return {url for part in _resolve(split) for url, _ in part.files()}


def check_disjoint(splits: Splits) -> None:
    """Check that no two splits share a period of a data set, and that the gap is kept.

    Two splits may take the same periods if the one serves a fold of their labelled groups, and the other all others. A
    relabelled data set counts as the one that it was made from, since its documents are the same; where the one split
    reads this and the other that, the query ids tell whether their folds are apart. The gap is counted in the sorted
    union of the periods of all data sets named. A test period before a training period is a warning.

    Raises:
        InputError: names the two splits, the period and the remedy.
    """
    parts = {name: _resolve(split, f"splits.{name}") for name, split in splits.by_name.items()}
    takers: dict[tuple[str, str], str] = {}
    for name in parts:
        for part in parts[name]:
            hashes_of = origins(part.dataset)
            for period in part.periods:
                taken = [takers.setdefault((origin, period), name) for origin in hashes_of(period)]
                own = splits.by_name[name]
                if others := [t for t in taken if t != name and not _are_apart(own, splits.by_name[t])]:
                    where = f"period {period!r} of {part.dataset.url}"
                    raise InputError(f"{others[0]} and {name} both take {where}; name it in one of them only")
    periods = {name: sorted({period for part in parts[name] for period in part.periods}) for name in parts}
    if splits.gap:
        _check_gap(parts, periods, splits.gap)
    _warn_of_future(periods)


def _are_apart(one: Split, other: Split) -> bool:
    """Whether the one serves a fold and the other all others, of the same groups or of those made from them."""
    if one.completes(other):
        return True
    if one.fold is None or other.fold is None or one.data == other.data or one.scores or other.scores:
        return False
    return not _queries(one) & _queries(other)


def _queries(split: Split) -> set[str]:
    """The ids of the labelled queries that a split serves."""
    selection, queries = select(split, labelled=True), set[str]()
    for url in dict.fromkeys(row_group.url for row_group in selection.row_groups):
        found = labelled_queries(url)
        for row_group in selection.row_groups:
            if row_group.url == url:
                queries.update(itertools.compress(found[row_group.index], selection.kept(row_group)))
    return queries


_warned: set[str] = set()


def _warn_of_future(taken: Mapping[str, Sequence[str]]) -> None:
    """Warn, once a process for the same splits, if a model is tested on days before some that it learns from."""
    test, train = taken.get("test", ()), taken["train"]
    if test and train and all(_DATE.match(period) for period in (*test, *train)) and test[0] < train[-1]:
        message = (
            f"test takes period {test[0]!r}, which lies before period {train[-1]!r} of train: the model knows what "
            "came later, which it will not in use; let the test periods come last"
        )
        if message not in _warned:
            _warned.add(message)
            log.warning(message)


def _check_gap(parts: Mapping[str, list[_SplitPart]], taken: Mapping[str, Sequence[str]], gap: int) -> None:
    """Check that `gap` whole periods lie between any period of train and any of validation or test."""
    known = sorted({period for name in parts for part in parts[name] for period in part.dataset.manifest.periods})
    place = {period: i for i, period in enumerate(known)}
    for name in taken.keys() - {"train"}:
        for period, training in itertools.product(taken[name], taken["train"]):
            if abs(place[period] - place[training]) <= gap:
                raise InputError(
                    f"train takes period {training!r} and {name} takes {period!r}, with fewer than gap = {gap} periods "
                    f"between them; leave {training!r} out of train or lower gap"
                )


def _resolve(split: Split, key: str = "") -> list[_SplitPart]:
    """Open the data sets of a split, whose key is for errors, and choose their periods."""
    if not split.data:
        raise InputError(f"{key or 'a split'} names no data set; add data: DIRECTORY, made by jobs.prepare")
    datasets = [open_dataset(storage.absolute(url)) for url in split.data]
    known = sorted({period for dataset in datasets for period in dataset.manifest.periods})
    chosen = _chosen_periods(split, known, f"{key}.periods".removeprefix("."))
    parts = [_SplitPart(d, tuple(period for period in d.manifest.periods if period in chosen)) for d in datasets]
    urls: dict[str, str] = {}
    for part in parts:
        first, features = datasets[0].url, datasets[0].manifest.features
        places(features, part.dataset.manifest.features, whose=first, where=part.dataset.url)
        contents = {file.sha256 for _, file in part.files()}
        if same := contents & urls.keys():
            both = f"{urls[min(same)]} and {part.dataset.url}"
            raise InputError(f"{both} have the same documents; name one of them in a split")
        urls |= dict.fromkeys(contents, part.dataset.url)
    return parts


def _with_scores(parts: list[_SplitPart], split: Split) -> _SplitPart:
    """The one data set of a split with the scores that serve as its labels."""
    assert split.scores is not None
    if len(parts) > 1:
        names = ", ".join(split.data)
        raise InputError(f"{split.scores}: scores are of one data set, the split has {names}; name one of them")
    (part,) = parts
    return replace(part, scores=find_scores(storage.absolute(split.scores), part.dataset, part.periods))


def _labels_identity(split: Split, parts: list[_SplitPart]) -> dict[str, Any]:
    """The settings, besides the data, that determine the labelled groups served and their labels."""
    sample = split.labelled_seed if split.labelled_sample == "random" else split.labelled_sample
    identity: dict[str, Any] = {"labelled": (split.labelled_fraction, sample)}
    # the rest only if it is set, so that the hash of a split without it does not depend on it
    if split.labelled_fraction == 1:
        identity |= split.size
    if split.labels != "labels":
        identity["labels"] = split.labels
    if split.scores is not None:
        identity["scores"] = [scores.sha256 for part in parts for scores in part.scores.values()]
    if split.fold is not None:
        identity["fold"] = split.fold.model_dump(exclude_none=True)
    return identity


def _chosen_periods(split: Split, known: list[str], key: str) -> set[str]:
    """The periods that a split names; all where it names none. `key` is that of the periods, for errors."""
    if split.periods is None:
        return set(known)
    chosen: set[str] = set()
    for item in split.periods:
        first, dots, last = item.partition("..")
        last = last if dots else first
        for period in (first, last):
            if period not in known:
                raise InputError(
                    f"{key}: {', '.join(split.data)}: there is no period {period!r}; {_there(period, known)}"
                )
        if first > last:
            raise InputError(f"{key}: the range {item} runs backwards; write {last}..{first}")
        chosen.update(period for period in known if first <= period <= last)
    return chosen


def _there(period: str, known: Sequence[str]) -> str:
    """What to say of a period that data sets do not have: the range of theirs, and the nearest to a misspelt one."""
    if not known:
        return "it is empty"
    is_misspelt = not {_form(period)} & {_form(other) for other in known}
    near = nearest(period, known, alike=0.7) if is_misspelt else None  # every week is much like any other
    return f"{f'the nearest is {near!r}; ' if near else ''}it has {_range(known)}"


def _form(period: str) -> str:
    return re.sub(r"\d", "0", period)


def _range(known: Sequence[str]) -> str:
    """The periods of data sets in a few words, for errors."""
    return f"{known[0]}..{known[-1]} ({len(known)} periods)" if len(known) > 4 else ", ".join(known)


def _row_groups(parts: list[_SplitPart], without: Collection[str]) -> Iterator[RowGroup]:
    """The row groups of the chosen periods, in the order of the manifests, without those of the files left out."""
    first_labelled = 0
    for number, part in enumerate(parts):
        for url, file in part.files(without):
            scores = part.scores.get(file.path)
            source = Source(part.dataset.url, file.sha256, file.bytes)
            for index, counts in enumerate(file.row_groups):
                labelled = counts.groups if scores else counts.labelled
                place = (number * GID_SPAN, first_labelled, scores.url if scores else None)
                stored = part.dataset.manifest.features
                yield RowGroup(
                    url, index, file.period, counts.groups, counts.documents, labelled, *place, source, stored
                )
                first_labelled += labelled


def _kept_features(features: tuple[Feature, ...], split: Split) -> tuple[Feature, ...]:
    """The features of a data set that a split does not leave out, in their order."""
    left_out = {f for pattern in split.leave_out for f in matching(pattern, features, key="leave_out")}
    if len(left_out) == len(features):
        raise InputError(f"leave_out: {', '.join(split.leave_out)} leave out all {len(features)} features; keep some")
    return tuple(feature for feature in features if feature not in left_out)


def _kept(n: int, split: Split, row_groups: Sequence[RowGroup], where: str) -> NDArray[np.bool_] | None:
    """Which of n labelled groups are served, shape [n], or None for all."""
    kept = np.ones(n, dtype=np.bool_)
    if split.size:
        order_Q = order_of(n, sample=split.labelled_sample, seed=split.labelled_seed)
        kept[order_Q[_size(split, order_Q, row_groups, where) :]] = False
    if split.fold is not None:
        kept = keep_fold(kept, split.fold, _name(split))
    return None if kept.all() else kept


def _size(split: Split, order_Q: NDArray[np.int64], row_groups: Sequence[RowGroup], where: str) -> int:
    """How many labelled groups join the sample, in this order."""
    if split.relevant_groups is not None:
        relevant_Q = np.concatenate([np.zeros(0, np.bool_), *_relevant(row_groups, split.labels)])
        size = to_reach(split.relevant_groups, relevant_Q[order_Q])
        if size is None:
            found = f"{relevant_Q.sum()} of its labelled groups have a relevant document"
            raise InputError(f"{where}: {found}, relevant_groups is {split.relevant_groups}; lower it")
        return size
    if split.labelled_groups is None:
        return max(1, round(split.labelled_fraction * len(order_Q)))
    if split.labelled_groups > len(order_Q):
        found = f"it has {len(order_Q)} labelled groups"
        raise InputError(f"{where}: {found}, labelled_groups is {split.labelled_groups}; lower it")
    return split.labelled_groups


def _relevant(row_groups: Sequence[RowGroup], column: LabelColumn) -> list[NDArray[np.bool_]]:
    """Which labelled groups of each row group have a relevant document.

    Raises:
        InputError: a file cannot be read, or has other groups than its manifest lists.
    """
    files = list(dict.fromkeys((rg.url, rg.source.sha256 if rg.source else "") for rg in row_groups))
    found = dict(zip((url for url, _ in files), with_relevant(files, column), strict=True))
    for rg in row_groups:
        there = len(found[rg.url][rg.index]) if rg.index < len(found[rg.url]) else 0
        if there != rg.labelled:
            raise InputError(
                f"{rg.url}: row group {rg.index} has {there} labelled groups where the manifest lists {rg.labelled}; "
                "prepare the data set again"
            )
    return [found[rg.url][rg.index] for rg in row_groups]


def _name(split: Split) -> str:
    return f"{', '.join(split.data)} (periods: {', '.join(split.periods or ('all',))})"
