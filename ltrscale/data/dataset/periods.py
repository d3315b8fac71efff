"""The data sets of a split and the periods that it takes of them, by their manifests; no data file is opened."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ltrscale import storage
from ltrscale.config import Config, ConfigT
from ltrscale.data.dataset.manifest import DataFile, Dataset, open_dataset, places
from ltrscale.data.dataset.scores import Found
from ltrscale.data.dataset.split import Relative, Split
from ltrscale.errors import InputError, nearest
from ltrscale.progress import log


@dataclass(frozen=True)
class SplitPart:
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


def resolve_periods(split: Split, key: str = "") -> list[SplitPart]:
    """Open the data sets of a split, whose key is for errors, and choose their periods.

    Raises:
        InputError: a data set or period is missing; a data set lacks features of the first or is named twice.
    """
    if not split.data:
        raise InputError(f"{key or 'a split'} names no data set; add data: DIRECTORY, made by jobs.prepare")
    datasets = [open_dataset(storage.absolute(url)) for url in split.data]
    known = sorted({period for dataset in datasets for period in dataset.manifest.periods})
    chosen = _chosen_periods(split, known, f"{key}.periods".removeprefix("."))
    parts = [SplitPart(d, tuple(period for period in d.manifest.periods if period in chosen)) for d in datasets]
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


def chosen_files(split: Split, key: str = "") -> list[tuple[Dataset, list[DataFile]]]:
    """The data sets of a split, each with the files that the split reads, in the order of the manifest.

    Args:
        split: data sets and periods.
        key: the split's key in the config of the job, for errors.

    Raises:
        InputError: as `select`, before files are opened.
    """
    return [(part.dataset, [file for _, file in part.files()]) for part in resolve_periods(split, key)]


def with_periods_named(split: Split) -> Split:
    """The same split with all periods that it takes now listed by name, so that later periods do not join it.

    Raises:
        InputError: as `select`, before files are opened.
    """
    return split.replace(periods=sorted({period for part in resolve_periods(split) for period in part.periods}))


def with_relative_named(config: ConfigT, key: str = "") -> ConfigT:
    """A job's config, in which relative periods are the names of those that they are now; logs which.

    A job calls it once, when it starts, so that all its parts read the same periods, whatever is added meanwhile, and
    its output records names. Splits that name no data set yet stay as they are. The rest of the config is unchanged.

    Raises:
        InputError: a data set is missing, or has too few periods.
    """
    changes: dict[str, object] = {}
    for name in type(config).model_fields:
        value, where = getattr(config, name), f"{key}.{name}".removeprefix(".")
        if isinstance(value, Config):
            changes[name] = with_relative_named(value, where)
        elif name == "periods" and value and any(map(Relative.of, value)) and (data := getattr(config, "data", ())):
            split = Split(data=data, periods=value)
            chosen = sorted({period for part in resolve_periods(split, key) for period in part.periods})
            log.info("%s: %s of %s: %s", where, ", ".join(value), ", ".join(split.data), in_few_words(chosen))
            changes[name] = tuple(chosen)
    changes = {name: value for name, value in changes.items() if value is not getattr(config, name)}
    return config.model_copy(update=changes) if changes else config


def among(split: Split, known: Sequence[str], key: str = "") -> Split:
    """The same split with its periods listed by name, if its data sets had these periods, the oldest first.

    Raises:
        InputError: it takes a period that is not among them, or more than there are.
    """
    return split.replace(periods=sorted(_chosen_periods(split, known, f"{key}.periods".removeprefix("."))))


def _chosen_periods(split: Split, known: Sequence[str], key: str) -> set[str]:
    """The periods that a split names; all where it names none. `key` is that of the periods, for errors."""
    if split.periods is None:
        return set(known)
    chosen: set[str] = set()
    for item in split.periods:
        if relative := Relative.of(item):
            chosen.update(found := relative.among(known))
            if not found:
                raise InputError(f"{key}: {_whose(split)}{item!r} are more periods than there are; {_has(known)}")
            continue
        first, dots, last = item.partition("..")
        last = last if dots else first
        for period in (first, last):
            if period not in known:
                raise InputError(f"{key}: {_whose(split)}there is no period {period!r}; {_there(period, known)}")
        if first > last:
            raise InputError(f"{key}: the range {item} runs backwards; write {last}..{first}")
        chosen.update(period for period in known if first <= period <= last)
    return chosen


def _whose(split: Split) -> str:
    return f"{', '.join(split.data)}: " if split.data else ""


def _there(period: str, known: Sequence[str]) -> str:
    """What to say of a period that data sets do not have: the range of theirs, and the nearest to a misspelt one."""
    is_misspelt = not {_form(period)} & {_form(other) for other in known}
    near = nearest(period, known, alike=0.7) if is_misspelt else None  # every week is much like any other
    return f"{f'the nearest is {near!r}; ' if near else ''}{_has(known)}"


def _has(known: Sequence[str]) -> str:
    return f"it has {in_few_words(known)}" if known else "it is empty"


def _form(period: str) -> str:
    return re.sub(r"\d", "0", period)


def in_few_words(known: Sequence[str]) -> str:
    """Sorted periods in a few words, for errors and logs."""
    return f"{known[0]}..{known[-1]} ({len(known)} periods)" if len(known) > 4 else ", ".join(known)
