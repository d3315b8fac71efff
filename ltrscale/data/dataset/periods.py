"""Resolve the periods that a split names to those that its data sets have now.

This needs only the manifests; no data file is opened.
"""

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ltrscale import storage
from ltrscale.config import Config, ConfigT
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import Dataset, open_dataset, places
from ltrscale.data.dataset.scores import Found
from ltrscale.data.dataset.split import Periods, Relative, Split
from ltrscale.errors import InputError, nearest
from ltrscale.progress import log


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
