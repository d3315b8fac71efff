"""Splits: the periods of data sets that a job reads, and the part of their labels that it may use.

The periods that a split names are resolved to those that its data sets have now, from their manifests alone.
"""

import datetime
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ltrscale import storage
from ltrscale.config import Config, ConfigT, validate
from ltrscale.data.dataset.columns import Labels
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import Dataset, open_dataset, places
from ltrscale.data.dataset.row_groups import Fold
from ltrscale.data.dataset.scores import Found
from ltrscale.errors import InputError, nearest
from ltrscale.progress import log


def _texts(value: Any) -> Any:
    """A tuple of texts, also from a single text; YAML's dates and numbers become texts as written."""
    items = value if isinstance(value, list | tuple) else (value,)
    plain = (int, datetime.date)
    return tuple(str(item) if isinstance(item, plain) and not isinstance(item, bool) else item for item in items)


def _some_texts(value: Any) -> Any:
    """Like `_texts`, but an empty list is an error, because it could mean no periods or all."""
    if value in ((), []):
        raise ValueError("an empty list; name periods, or leave the key out for all")
    return _texts(value)


class Relative(NamedTuple):
    """Periods by their position among the known ones: `last N`, `last N but M`, `all but last M`."""

    number: int | None
    """How many; None for all."""
    but: int = 0
    """How many of the newest ones are left out."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a text; None for a period or a range, because their names have no blanks.

        Raises:
            ValueError: the text has blanks, but is not in one of the forms.

        Example:
            >>> Relative.parse("last 3 but 1"), Relative.parse("all but last 2"), Relative.parse("2026-W07")
            (Relative(number=3, but=1), Relative(number=None, but=2), None)
        """
        if not re.search(r"\s", text):
            return None
        match = re.fullmatch(r"last +(\d+)( +but +(\d+))?|all +but +last +(\d+)", text)
        number, but = (int(group or 0) for group in (match[1], match[3] or match[4])) if match else (0, 0)
        if not match or not (but if match[4] else number):
            raise ValueError(
                f"{text!r} names no period; write `last N`, `last N but M` or `all but last N` with numbers above 0, a "
                "period, or a range A..B"
            )
        return cls(None if match[4] else number, but)

    def among(self, known: Sequence[str]) -> Sequence[str]:
        """Select from sorted periods; empty if there are too few.

        Example:
            >>> weeks = ["w1", "w2", "w3", "w4"]
            >>> [*Relative.parse("last 2 but 1").among(weeks), *Relative.parse("all but last 3").among(weeks)]
            ['w2', 'w3', 'w1']
            >>> Relative.parse("last 4 but 1").among(weeks)
            []
        """
        rest = known[: max(0, len(known) - self.but)]
        if self.number is None:
            return rest
        return rest[-self.number :] if self.number <= len(rest) else []


def _known_words(items: tuple[str, ...]) -> tuple[str, ...]:
    for item in items:
        Relative.parse(item)
    return items


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Periods = Annotated[tuple[str, ...], BeforeValidator(_some_texts), AfterValidator(_known_words)] | None
"""Periods of the data sets in the field `data` beside it, as in `Split.periods`; None for all."""
PeriodTexts = Annotated[Texts, AfterValidator(_known_words)]
"""Like `Periods`, but may be empty."""


class Split(Config):
    """Some periods of some data sets, and the part of their labels that is used."""

    data: Texts = ()
    """Data set directories; a single one may be given as plain text. A pipeline reads its own data set by default."""
    periods: Periods = None
    """Periods `P`, ranges `A..B`, both ends included, in text order, or periods counted from the newest: `last 8`,
    `last 3 but 1` (the three before the last one), `all but last 2`. A job finds what these are when it starts, and
    records the names. All periods if it is left out."""
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
    labels: Labels = "labels"
    """What serves as labels: `labels`; `relevance`, the labels from before a data set was relabelled; a goal by its
    name, such as order; or a weighted sum of goals, as {click: 0.2, order: 1}."""
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
        sampling = self.labelled_seed if self.labelled_sample == "random" else self.labelled_sample
        return {**self.size, "sample": sampling} if self.size else {}

    def completes(self, other: "Split") -> bool:
        """True if one split is a fold of some labelled groups and the other its complement.

        A fold within another fold is a part of what the outer fold serves.
        """
        same = {"fold": None, "leave_out": ()}
        return self.replace(**same) == other.replace(**same) and any(
            own_fold.held_out != other_fold.held_out and own_fold.replace(held_out=other_fold.held_out) == other_fold
            for own_fold, other_fold in itertools.product(_nested(self.fold), _nested(other.fold))
        )

    def with_scores(self, url: str) -> Self:
        """The same periods, with the scores of all groups as labels."""
        return self.replace(scores=url, labels="labels", relevant_groups=None)


def _nested(fold: Fold | None) -> Iterator[Fold]:
    """A fold and its outer fold, if any."""
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
        """The splits that are set, by name."""
        tested = {} if self.test is None else {"test": self.test}
        return {"train": self.train, "validation": self.validation, **tested}

    def on(self, url: str) -> Self:
        """The same splits, reading this data set where they name none."""
        return self.replace(**{name: split.replace(data=split.data or url) for name, split in self.by_name.items()})

    def drawn(self, seed: int) -> Self:
        """The same splits with another draw of the labelled groups, in validation too if it is a sample."""
        drawn = {"train": self.train} | ({"validation": self.validation} if self.validation.size else {})
        return self.replace(
            **{name: split.replace(labelled_seed=split.labelled_seed + seed) for name, split in drawn.items()}
        )

    def leaving_out(self, patterns: Sequence[str]) -> Self:
        """The same splits with further features left out."""
        train = self.train.replace(leave_out=(*self.train.leave_out, *patterns))
        return self.replace(train=train)


class SplitsWithTest(Splits):
    """The splits of a job that evaluates."""

    test: Split
    """The split to evaluate on, which shares no period with the others; its keys are those of `train`."""

    @model_validator(mode="before")
    @classmethod
    def _accept_splits(cls, values: Any) -> Any:
        """Accept `Splits` that have a test split."""
        return values.model_dump(exclude_none=True) if isinstance(values, Splits) else values

    @classmethod
    def from_splits(cls, splits: Splits) -> Self:
        """The splits of a job that may evaluate.

        Raises:
            InputError: they have no test split.
        """
        return validate(cls, splits.model_dump(exclude_none=True), "splits")


@dataclass(frozen=True)
class SplitPart:
    """A data set of a split, and the sorted periods that the split takes from it."""

    dataset: Dataset
    periods: tuple[str, ...]
    scores: Mapping[str, Found] = field(default_factory=dict)
    """The scores that serve as labels, by path of the data file."""

    @cached_property
    def files(self) -> DataFiles:
        """The files of these periods, in the order of the manifest."""
        return self.dataset.manifest.files.in_periods(self.periods)

    @cached_property
    def urls(self) -> list[str]:
        """The URL of each file."""
        return [storage.join(self.dataset.url, path) for path in self.files.paths]


def resolve_periods(split: Split, key: str = "") -> list[SplitPart]:
    """Open the data sets of a split and choose their periods; `key` is the split's key, for errors.

    Raises:
        InputError: a data set or period is missing, or periods have no order; a data set lacks features of the first or
            is named twice.
    """
    if not split.data:
        raise InputError(f"{key or 'a split'} names no data set; add data: DIRECTORY, made by jobs.prepare")
    datasets = [open_dataset(storage.absolute(url)) for url in split.data]
    all_periods = sorted({period for dataset in datasets for period in dataset.manifest.periods})
    chosen = _chosen_periods(split, all_periods, key)
    parts = [SplitPart(d, tuple(period for period in d.manifest.periods if period in chosen)) for d in datasets]
    urls: dict[str, str] = {}
    for part in parts:
        first, features = datasets[0].url, datasets[0].manifest.features
        places(features, part.dataset.manifest.features, whose=first, where=part.dataset.url)
        storage.check_links(part.dataset.url, part.files.paths)
        contents = set(part.files.sha256)
        if same := contents & urls.keys():
            pair = f"{urls[min(same)]} and {part.dataset.url}"
            raise InputError(f"{pair} have the same documents; name one of them in a split")
        urls |= dict.fromkeys(contents, part.dataset.url)
    return parts


def with_periods_named(split: Split, key: str = "", *, known: Sequence[str] | None = None) -> Split:
    """The same split with its current periods listed by name, so that later periods do not join it.

    With `known`, its data sets are taken to have these sorted periods. `key` and errors as for `resolve_periods`.
    """
    if known is not None:
        return split.replace(periods=sorted(_chosen_periods(split, known, key)))
    return split.replace(periods=sorted({period for part in resolve_periods(split, key) for period in part.periods}))


def with_relative_named(config: ConfigT, key: str = "") -> ConfigT:
    """Replace relative periods in a job's config by the names of the current ones, and log them.

    A job calls it once at the start, so that all its parts read the same periods and its output records names, whatever
    is added meanwhile. Splits that name no data set yet, and the rest of the config, stay as they are.

    Raises:
        InputError: a data set is missing, or has too few periods or periods without an order.
    """
    changes: dict[str, object] = {}
    for name, info in type(config).model_fields.items():
        value, key_path = getattr(config, name), f"{key}.{name}".removeprefix(".")
        if isinstance(value, Config):
            changes[name] = with_relative_named(value, key_path)
        elif (
            info.annotation == Periods
            and any(map(Relative.parse, value or ()))
            and (data := getattr(config, "data", ()))
        ):
            split = Split(data=data, periods=value)
            chosen = with_periods_named(split, key).periods or ()
            log.info("%s: %s of %s: %s", key_path, ", ".join(value), ", ".join(split.data), in_few_words(chosen))
            changes[name] = chosen
    changes = {name: value for name, value in changes.items() if value is not getattr(config, name)}
    return config.model_copy(update=changes) if changes else config


def _chosen_periods(split: Split, all_periods: Sequence[str], key: str) -> set[str]:
    """The periods that a split names, or all; `key` is the split's key, for errors."""
    if split.periods is None:
        return set(all_periods)
    chosen, there, key = set[str](), set(all_periods), f"{key}.periods".removeprefix(".")
    for item in split.periods:
        if (relative := Relative.parse(item)) or ".." in item:
            check_in_order(all_periods, f"{key}: {_whose(split)}{item!r}")
        if relative:
            chosen.update(selected := relative.among(all_periods))
            if not selected:
                raise InputError(f"{key}: {_whose(split)}{item!r} are more periods than there are; {_has(all_periods)}")
            continue
        first, dots, last = item.partition("..")
        last = last if dots else first
        for period in (first, last):
            if period not in there:
                raise InputError(
                    f"{key}: {_whose(split)}there is no period {period!r}; {_period_hint(period, all_periods)}"
                )
        if first > last:
            raise InputError(f"{key}: the range {item} runs backwards; write {last}..{first}")
        chosen.update(all_periods[bisect_left(all_periods, first) : bisect_right(all_periods, last)])
    return chosen


def check_in_order(periods: Sequence[str], where: str) -> None:
    """Refuse, with an InputError, sorted periods with text order other than time order, such as 10, 11, 9."""
    if not all(period.isdecimal() for period in periods):
        return
    for early, late in itertools.pairwise(periods):
        if int(early) > int(late):
            raise InputError(
                f"{where} takes periods in text order, which puts {early!r} before {late!r}; write such periods with "
                f"equally many digits in the log, as {late.zfill(len(early))!r}, or name each of them"
            )


def _whose(split: Split) -> str:
    return f"{', '.join(split.data)}: " if split.data else ""


def _period_hint(period: str, all_periods: Sequence[str]) -> str:
    """Describe the known periods for a period that is missing: their range, and the nearest to a misspelt one."""
    is_misspelt = not {_spelling(period)} & {_spelling(other) for other in all_periods}
    closest = nearest(period, all_periods, alike=0.7) if is_misspelt else None  # all names of weeks look alike
    return f"{f'the nearest is {closest!r}; ' if closest else ''}{_has(all_periods)}"


def _has(all_periods: Sequence[str]) -> str:
    return f"it has {in_few_words(all_periods)}" if all_periods else "it is empty"


def _spelling(period: str) -> str:
    return re.sub(r"\d", "0", period)


def in_few_words(known: Sequence[str]) -> str:
    """Sorted periods in a few words, for errors and logs."""
    return f"{known[0]}..{known[-1]} ({len(known)} periods)" if len(known) > 4 else ", ".join(known)
