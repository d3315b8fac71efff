"""What a stage's output was made from: what is recorded of it, and what may be told from that later."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, SerializeAsAny

from ltrscale import storage
from ltrscale.bundle import read_manifest
from ltrscale.config import Config, validate
from ltrscale.data.manifest import open_dataset
from ltrscale.data.scores import read_period
from ltrscale.data.split import Split, Splits, check_disjoint, chosen_files, select
from ltrscale.errors import InputError


class Identity(Config):
    """What a stage's output depends on besides the content of its inputs."""

    config: SerializeAsAny[Config]
    splits: tuple[Split, ...]


def dataset_hashes(splits: Iterable[Split]) -> dict[str, str]:
    """Content hash of every data set that the splits read, and of the scores that serve as labels."""
    splits = list(splits)
    hashes = {url: open_dataset(url).manifest.hash for split in splits for url in split.data}
    for split in splits:
        if split.scores:
            parts = [hashes[split.scores]] if split.scores in hashes else []
            hashes[split.scores] = ",".join([*parts, select(split, labelled=True).hash])
    return hashes


class _Seen(Config, extra="ignore"):
    """Of the config of a stage: the splits that it trained and selected on."""

    splits: tuple[Split, ...] = ()


class _Origin(Config, extra="ignore"):
    """Of a manifest's `made_by`: what tells what was seen."""

    config: _Seen = _Seen()
    inputs: dict[str, str] = Field(default_factory=dict)


def check_unseen(url: str, test: Split) -> None:
    """Check that no period of the test split was seen by a bundle, by one that it was made from, or by its teacher.

    Seen is what a bundle was trained or selected on. It can be told where a job made the bundle, and what it was made
    from is still where it was.

    Raises:
        InputError: it was; names the period.
    """
    waiting, looked_at = [url], set()
    while waiting:
        if (one := waiting.pop()) not in looked_at:
            looked_at.add(one)
            waiting += _check_unseen_by(one, test)


def _check_unseen_by(url: str, test: Split) -> list[str]:
    """Check the splits of one bundle; returns what it was made from."""
    origin = validate(_Origin, (storage.read_manifest(url) or {}).get("made_by", {}), url)
    seen = origin.config.splits
    made_from = list(origin.inputs) if seen else []
    if len(seen) != 2 or not all(storage.exists(storage.join(data, storage.MANIFEST)) for s in seen for data in s.data):
        return made_from
    try:
        check_disjoint(Splits(train=seen[0], validation=seen[1], test=test))
    except InputError as error:
        raise InputError(f"{url} was made from other splits than it is evaluated on: {error}") from error
    return made_from + [teacher for split in seen if split.scores for teacher in scored_by(split)]


def scored_by(split: Split) -> list[str]:
    """The bundles that gave the scores which serve as labels of a split."""
    assert split.scores is not None
    periods = sorted({file.period for _, files in chosen_files(split) for file in files})
    found = [read_period(split.scores, period) for period in periods]
    try:
        return sorted({str(scores.made_by["config"]["bundle"]) for scores in found if scores})
    except (LookupError, TypeError) as error:
        raise InputError(f"{split.scores}: does not say which bundle gave the scores; score again") from error


def bundle_hashes(urls: Iterable[str]) -> dict[str, str]:
    """Content hash of every bundle's files."""
    return {url: content_of(read_manifest(url)) for url in urls}


def content_of(manifest: Mapping[str, Any]) -> str:
    """Content hashes of the files that a committed directory's manifest lists."""
    return ",".join(sorted(f"{file['path']}:{file['sha256']}" for file in manifest.get("files", [])))
