"""What is to be scored, found out from manifests alone."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.config import Config, made_by
from ltrscale.data.dataset.manifest import Counts, DataFile, Dataset, one_view
from ltrscale.data.dataset.scores import period_url, read_period
from ltrscale.data.dataset.split import Selection, Split, Texts, chosen_files, select
from ltrscale.devices import Device


class ActorsConfig(Config):
    """The processes that score under Ray, and what each of them takes."""

    number: int = Field(2, ge=1)
    """How many; fewer where the cluster has less room."""
    cpus: float = Field(1, gt=0)
    """Logical CPUs of each, and threads of a tree model."""
    gpus: float = Field(0, ge=0)
    """GPUs of each; a fraction shares one among several actors."""


class ScoreConfig(Config):
    """Which bundle scores which periods, and how."""

    bundle: str
    """Bundle that scores: a finetuned ranker or trees."""
    data: str
    """Data set directory; groups without labels are scored too."""
    periods: Texts = ()
    """Periods `P` or ranges `A..B`, both ends included; empty for all."""
    docs_per_batch: int = Field(65_536, ge=1)
    """Documents scored at once, and held in memory beside a row group."""
    device: Device = "auto"
    """Where a network runs: `auto` takes the GPU where there is one; or `cpu`, `cuda`, `cuda:1`."""
    ray: bool = False
    """Score files in parallel on a Ray cluster; the scores are the same."""
    actors: ActorsConfig = ActorsConfig()
    """The processes that score where `ray` is set."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be scored: the periods of a data set that are not up to date, with their files in order."""

    config: ScoreConfig
    out: str
    """Absolute URL of the directory of the scores."""
    bundle_hash: str
    """See `hash_of_bundle`."""
    dataset: Dataset
    selection: Selection
    files: Mapping[str, Sequence[DataFile]]
    """Of each period that is to be scored."""
    n_current: int
    """Periods that are up to date."""

    @property
    def all_files(self) -> list[DataFile]:
        """The files of all periods."""
        return [file for files in self.files.values() for file in files]

    def origin_of(self, period: str) -> dict[str, Any]:
        """What is recorded of the origin of a period's scores."""
        inputs = {self.config.data: self.dataset.manifest.hash_of([period]), self.config.bundle: self.bundle_hash}
        return made_by("score", self.config, inputs)


@one_view()
def make_plan(config: ScoreConfig, out: str) -> Plan:
    """Find out what is to be scored below a directory.

    Raises:
        InputError: bundle, data set or a period are missing, or something else is committed where scores are to be.
    """
    split = Split(data=(config.data,), periods=config.periods)
    ((dataset, files),) = chosen_files(split)
    bundle_hash = hash_of_bundle(config.bundle)
    by_period: dict[str, list[DataFile]] = defaultdict(list)
    for file in files:
        by_period[file.period].append(file)
    pending = {
        period: of_period
        for period, of_period in sorted(by_period.items())
        if not _is_current(out, period, bundle_hash, of_period)
    }
    selection, n_current = select(split, labelled=False), len(by_period) - len(pending)
    return Plan(config, storage.absolute(out), bundle_hash, dataset, selection, pending, n_current)


def _is_current(out: str, period: str, bundle_hash: str, files: Sequence[DataFile]) -> bool:
    """Whether the scores of these files by this bundle are committed, and there whole."""
    there = read_period(out, period)
    if there is None or there.bundle_hash != bundle_hash or not there.is_of(files):
        return False
    return storage.is_whole(period_url(out, period), there.model_dump())


def hash_of_bundle(url: str) -> str:
    """Content hash of a bundle's files.

    Raises:
        InputError: nothing is committed there, or it is no bundle.
    """
    return bundles.content_hash(bundles.read_manifest(url))


def listed_in(files: Sequence[DataFile]) -> Counts:
    """What some data files hold together, by their manifest."""
    return total_of(counts for file in files for counts in file.row_groups)


def total_of(counts: Iterable[Counts]) -> Counts:
    """The sums; zeros for none."""
    return Counts(*map(sum, zip(Counts(0, 0, 0), *counts, strict=True)))
