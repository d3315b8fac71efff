"""The origin of a stage's output: the record of its settings and inputs, and the checks that rest on it."""

from collections.abc import Iterable, Mapping
from typing import Any

from ltrscale import storage
from ltrscale.bundle import read_bundle_manifest
from ltrscale.bundle.contents import Provenance
from ltrscale.config import Config, settings_of, validate
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.data.dataset.scores import read_period
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, SplitsWithTest, chosen_files, with_periods_named
from ltrscale.errors import InputError, UnavailableError

Settings = dict[str, Any]
"""What an output depends on besides the content of its inputs, as plain data."""


def with_splits(config: Config | Settings, *splits: Split) -> Settings:
    """The settings, and splits that name all their periods: periods added later do not belong to them."""
    named = [with_periods_named(split).model_dump(mode="json") for split in splits]
    return {"config": settings_of(config), "splits": named}


def dataset_hashes(splits: Iterable[Split]) -> dict[str, str]:
    """Content hashes of each data set's periods that the splits read, and of the scores that serve as labels."""
    splits = list(splits)
    datasets: dict[str, Dataset] = {}
    periods: dict[str, set[str]] = {}
    for split in splits:
        for url, (dataset, files) in zip(split.data, chosen_files(split), strict=True):
            datasets[url] = dataset
            periods.setdefault(url, set()).update(file.period for file in files)
    hashes = {url: datasets[url].manifest.hash_of(periods[url]) for url in datasets}
    for split in splits:
        if split.scores:
            parts = [hashes[split.scores]] if split.scores in hashes else []
            hashes[split.scores] = ",".join([*parts, select(split, labelled=True).hash])
    return hashes


def check_unseen(url: str, test: Split) -> None:
    """Check that a bundle, the bundles it was made from and its teacher have seen no period of the test split.

    A bundle has seen the periods that it was trained or selected on. The check covers bundles that a job made, as long
    as their inputs are still at their recorded URLs.

    Raises:
        InputError: one of them has; the message names the period.
    """
    waiting, looked_at = [url], set()
    while waiting:
        if (one := waiting.pop()) not in looked_at:
            looked_at.add(one)
            waiting += _check_unseen_by(one, test)


def _check_unseen_by(url: str, test: Split) -> list[str]:
    """Check the splits of one bundle; returns the URLs of its inputs and teachers."""
    origin = validate(Provenance, (storage.read_manifest(url) or {}).get("made_by", {}), url)
    seen = origin.config.splits
    made_from = list(origin.inputs) if seen else []
    if len(seen) != 2 or not all(map(_is_there, seen)):  # pretraining records one split: it reads no labels
        return made_from
    seen = tuple(split.replace(periods=_still_there(split) or None) for split in seen)
    try:
        check_disjoint(SplitsWithTest(train=seen[0], validation=seen[1], test=test))
    except UnavailableError:  # storage does not answer, which is no verdict on the bundle
        raise
    except InputError as error:
        raise InputError(f"{url} was made from other splits than it is evaluated on: {error}") from error
    return made_from + [teacher for split in seen if split.scores for teacher in scored_by(split)]


def _is_there(split: Split) -> bool:
    """Whether the data sets still exist, with at least one of the periods that were read."""
    there = all(storage.exists(storage.join(data, storage.MANIFEST)) for data in split.data)
    return there and bool(_still_there(split) or split.periods is None)


def _still_there(split: Split) -> list[str]:
    """The periods and ranges that a split names, without periods that its data sets no longer have."""
    known = {period for url in split.data for period in open_dataset(url).manifest.periods}
    return [item for item in split.periods or () if item in known or ".." in item]


def scored_by(split: Split) -> list[str]:
    """The bundles that made the scores which serve as labels of a split."""
    assert split.scores is not None
    periods = sorted({file.period for _, files in chosen_files(split) for file in files})
    found = [read_period(split.scores, period) for period in periods]
    try:
        named = [scores.made_by["config"]["bundle"] for scores in found if scores]
        return sorted({str(url) for bundle in named for url in ([bundle] if isinstance(bundle, str) else bundle)})
    except (LookupError, TypeError) as error:
        raise InputError(f"{split.scores}: does not record which bundle made the scores; score again") from error


def bundle_hashes(urls: Iterable[str]) -> dict[str, str]:
    """Content hashes of the files of each bundle, in the form of `content_of`."""
    return {url: _content(read_bundle_manifest(url)) for url in urls}


def content_of(url: str) -> str:
    """Content hashes of the files of an evaluation, an agreement or another committed directory.

    Raises:
        InputError: nothing is committed there.
    """
    manifest = storage.read_manifest(url)
    if manifest is None:
        raise InputError(f"{url}: nothing is committed there; run the same command again, which makes it")
    return _content(manifest)


def _content(manifest: Mapping[str, Any]) -> str:
    # not a single hash, as `ltrscale.bundle.content_hash` is: this form shows which file changed
    return ",".join(sorted(f"{path}:{sha256}" for path, sha256 in storage.listed_in(manifest).items()))
