"""Check that splits are disjoint, join two into one, and find periods with the same lists.

A file shipped under two names, as validation and as test, has other periods but the same lists. Content hashes do not
find that within a data set, whose group numbers continue from period to period.
"""

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data.dataset.columns import as_lists
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import Dataset, Feature
from ltrscale.data.dataset.origin import origins
from ltrscale.data.dataset.row_groups import each_row_group, labelled_queries
from ltrscale.data.dataset.selection import check_teaches, select
from ltrscale.data.dataset.split import Split, SplitPart, Splits, check_in_order, resolve_periods, with_periods_named
from ltrscale.errors import InputError
from ltrscale.progress import log

_DATE = re.compile(r"\d{4}-")
"""The date at the beginning of a period's name: 2026-W07, 2026-02-14, 2026-02-14T09."""


def check_splits(splits: Splits) -> None:
    """Check that splits are disjoint, and that each has a list with different labels to learn an order from."""
    check_disjoint(splits)
    for name, split in splits.by_name.items():
        check_teaches(select(split, labelled=True), name)


def check_disjoint(splits: Splits) -> None:
    """Check that no two splits share a period of a data set, and that the gap is kept.

    Two splits may share periods if one is a fold of their labelled groups and the other its complement. A relabelled
    data set counts as its source, because the documents are the same; if each split reads one of the two, the query ids
    show whether the folds are disjoint. The gap is counted in the sorted union of the periods of all data sets named. A
    test period before a training period only logs a warning, and so do periods of two splits with the same lists.

    Raises:
        InputError: names the two splits, the period and the remedy; or there is a gap, and the periods have no order.
    """
    parts = {name: resolve_periods(split, f"splits.{name}") for name, split in splits.by_name.items()}
    takers: dict[tuple[str, str], str] = {}
    datasets = {part.dataset.url: part.dataset for of_split in parts.values() for part in of_split}
    origins_of = {url: origins(dataset) for url, dataset in datasets.items()}
    for name in parts:
        for part in parts[name]:
            hashes_of = origins_of[part.dataset.url]
            for period in part.periods:
                split_names = [takers.setdefault((origin, period), name) for origin in hashes_of(period)]
                this_split = splits.by_name[name]
                if overlapping := [
                    t for t in split_names if t != name and not _are_apart(this_split, splits.by_name[t])
                ]:
                    place = f"period {period!r} of {part.dataset.url}"
                    raise InputError(f"{overlapping[0]} and {name} both take {place}; name it in one of them only")
    periods = {name: sorted({period for part in parts[name] for period in part.periods}) for name in parts}
    if splits.gap:
        _check_gap(parts, periods, splits.gap)
    _warn_of_future(periods)
    _warn_of_copies(parts)


def _are_apart(one: Split, other: Split) -> bool:
    """True if one split is a fold and the other its complement, of the same groups or of groups made from them."""
    if one.completes(other):
        return True
    if one.fold is None or other.fold is None or one.data == other.data or one.scores or other.scores:
        return False
    return not _queries(one) & _queries(other)


def _queries(split: Split) -> set[str]:
    """The ids of the labelled queries that a split serves."""
    selection, queries = select(split, labelled=True), set[str]()
    for url, row_groups in selection.row_groups.by_file().items():
        queries_of = labelled_queries(url)
        for row_group in row_groups:
            queries.update(itertools.compress(queries_of[row_group.index], selection.kept(row_group)))
    return queries


def _warn_of_future(periods_of_split: Mapping[str, Sequence[str]]) -> None:
    """Warn, once per process and splits, if a model is tested on days before some that it learns from."""
    test, train = periods_of_split.get("test", ()), periods_of_split["train"]
    if test and train and all(_DATE.match(period) for period in (*test, *train)) and test[0] < train[-1]:
        message = (
            f"test takes period {test[0]!r}, which lies before period {train[-1]!r} of train: the model knows what "
            "came later, which it will not in use; let the test periods come last"
        )
        _warn_once(message)


def _warn_of_copies(parts: Mapping[str, list[SplitPart]]) -> None:
    """Warn if two splits take periods with the same lists, such as one file shipped under two names."""
    of_splits = {(part.dataset.url, p): name for name, some in parts.items() for part in some for p in part.periods}
    try:
        found = list(equal_periods((part.dataset, part.periods) for some in parts.values() for part in some))
    except InputError:  # the pre-flight reports missing and damaged files
        return
    for one, other in found:
        if of_splits[one] != of_splits[other]:
            takes = " and ".join(
                f"{of_splits[place]} takes period {place[1]!r} of {place[0]}" for place in (one, other)
            )
            _warn_once(
                f"{takes}, whose lists are the same, as those of one file under two names: figures of the one say "
                "nothing that the other has not said; look for the right file, or leave one out"
            )


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


def _check_gap(parts: Mapping[str, list[SplitPart]], periods_of_split: Mapping[str, Sequence[str]], gap: int) -> None:
    """Check that `gap` whole periods lie between training periods and validation or test periods."""
    all_periods = sorted({period for name in parts for part in parts[name] for period in part.dataset.manifest.periods})
    check_in_order(all_periods, f"splits.gap: {gap}")
    index = {period: i for i, period in enumerate(all_periods)}
    for name in periods_of_split.keys() - {"train"}:
        for period, training in itertools.product(periods_of_split[name], periods_of_split["train"]):
            if abs(index[period] - index[training]) <= gap:
                raise InputError(
                    f"train takes period {training!r} and {name} takes {period!r}, with fewer than gap = {gap} periods "
                    f"between them; leave {training!r} out of train or lower gap"
                )


def joined_splits(train: Split, validation: Split) -> Split:
    """Join both splits into one that serves the features of the first.

    Raises:
        InputError: the splits use labels differently, or no list of periods selects exactly what both take.
    """
    if train.completes(validation) and train.fold and train.fold.within is None:
        return train.replace(fold=None)
    keys = ("labelled_fraction", "labels", "scores", "fold", "labelled_groups", "relevant_groups")
    if differing := [name for name in keys if getattr(train, name) != getattr(validation, name)]:
        values = f"{getattr(train, differing[0])!r} and {getattr(validation, differing[0])!r}"
        raise InputError(f"train and validation cannot be joined: their {differing[0]} are {values}; set both alike")
    if counts := sorted(train.size.keys() - {"labelled_fraction"}):
        raise InputError(
            f"train and validation cannot be joined with {counts[0]} in each; set labelled_fraction in both"
        )
    first, second = map(with_periods_named, (train, validation))
    periods = sorted({*(first.periods or ()), *(second.periods or ())})
    joined = train.replace(data=tuple(dict.fromkeys((*train.data, *validation.data))), periods=periods)
    if _file_urls(joined) != _file_urls(first) | _file_urls(second):
        raise InputError(
            f"train and validation cannot be joined: {', '.join(joined.data)} have periods of equal names, of which "
            "only some are in use; name the same data sets in both splits"
        )
    return joined


def _file_urls(split: Split) -> set[str]:
    return {url for part in resolve_periods(split) for url in part.urls}


Place = tuple[str, str]
"""URL of a data set, and a period."""
_FIRST, _FEWEST = 50, 10
"""Lists compared per period, and the fewest that a period must have: fewer may agree by chance."""
_KNOWN = 4096


def equal_periods(periods_of: Iterable[tuple[Dataset, Collection[str]]]) -> Iterator[tuple[Place, Place]]:
    """Pairs of periods that have the same lists: the first of each set of equal periods with each of the others.

    Only the first lists of periods with equal counts are read.

    Raises:
        InputError: a file cannot be read.
    """
    by_counts = defaultdict[object, list[tuple[Place, DataFiles]]](list)
    number_of = dict[tuple[Feature, ...], int]()
    for dataset, periods in periods_of:
        wanted, manifest = frozenset(periods), dataset.manifest
        of_all = number_of.setdefault(manifest.features, len(number_of))
        for period, files in manifest.files.by_period.items():
            if period in wanted and (counts := files.counts()).groups >= _FEWEST:
                stored = manifest.stored.get(period)
                number = of_all if stored is None else number_of.setdefault(stored, len(number_of))
                by_counts[*counts, files.longest, number].append(((dataset.url, period), files))
    for alike in by_counts.values():
        found = dict[str, Place]()
        for place, files in alike if len(alike) > 1 else ():
            first = found.setdefault(_first_lists(place[0], files), place)
            if first != place:
                yield first, place


def _first_lists(url: str, files: DataFiles) -> str:
    """Hash the features and labels of the first lists of some files."""
    digest, left = hashlib.sha256(), _FIRST
    for file in files:
        of_lists = _hashes(storage.join(url, file.path), file.sha256)[:left]
        digest.update(b"".join(of_lists))
        left -= len(of_lists)
        if not left:
            break
    return digest.hexdigest()


@lru_cache(_KNOWN)
def _hashes(url: str, sha256: str) -> tuple[bytes, ...]:  # noqa: ARG001 - other content, another answer
    def read(file: pq.ParquetFile, number: int) -> list[bytes]:
        table = as_lists(file.read_row_group(number, columns=["features", "labels"], use_threads=False))
        return [*map(_hash, *(table[name].slice(0, _FIRST) for name in ("features", "labels")))]

    found = itertools.chain.from_iterable(each_row_group(url, read, "features"))
    return tuple(itertools.islice(found, _FIRST))


def _hash(features: pa.ListScalar, labels: pa.ListScalar) -> bytes:
    """Hash the values of a list, and its labels if it has any."""
    values = [None if part.values is None else np.asarray(part.values, np.float32) for part in (features, labels)]
    return hashlib.sha256(b"|".join(b"none" if each is None else each.tobytes() for each in values)).digest()
