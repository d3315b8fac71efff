"""A week of `jobs.weekly`: the record of what is in service and of each week, what is checked, and what is published.

OUT/service.json                the bundle to serve, replaced in one step
OUT/weeks/PERIOD/week.json      what the week began with, and how it ended
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.bundle import content_hash
from ltrscale.bundle import load as load_bundle
from ltrscale.bundle.contents import Provenance
from ltrscale.config import Config, ConfigT, validate
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.split import Split, SplitsWithTest, in_few_words
from ltrscale.errors import InputError
from ltrscale.progress import log
from ltrscale.serving.export import ExportJob
from ltrscale.serving.register import RegisterJob, Registry
from ltrscale.storage import join

SERVICE = "service.json"
_WEEKS, _WEEK = "weeks", "week.json"


class InService(Config):
    """The bundle in service."""

    bundle: str
    period: str
    """The newest period when it went into service."""
    since: str
    """When it did, UTC."""
    export: str | None = None
    """Directory of its export, if there is one."""
    version: str | None = None
    """Its version in the registry, if it is registered."""
    before: str | None = None
    """The bundle in service before it."""

    @classmethod
    def now(cls, bundle: str, period: str, **others: str | None) -> Self:
        """The bundle, from now on."""
        since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return cls(bundle=bundle, period=period, since=since, **others)

    @classmethod
    def read(cls, out: str) -> Self | None:
        """What is in service; None where nothing is."""
        return _read(cls, storage.join(out, SERVICE))

    def write(self, out: str) -> None:
        """Put it into service: a reader sees the one before or this one."""
        _write(self, storage.join(out, SERVICE))


class Week(Config):
    """A week of `jobs.weekly`: what it began with, so that it ends on that, and how it ended."""

    period: str
    content: str
    """Hash of the new period's groups."""
    settings: str
    """Hash of the settings."""
    production: str
    """The bundle in service when it began."""
    before: SplitsWithTest
    """The periods by name, as if the new ones were not there: from these the new ones may have drifted."""
    splits: SplitsWithTest
    """The periods by name, with the new ones: from these the candidate learns, and on `test` it is judged."""
    outcome: Literal["under way", "in service", "refused"] = "under way"
    reasons: tuple[str, ...] = Field(())
    """Why it was refused."""
    bundle: str | None = None
    """What went into service, now or when it was judged by other settings."""

    @classmethod
    def read(cls, out: str, period: str) -> Self | None:
        """The record of a period; None where there is none."""
        return _read(cls, storage.join(folder_of(out, period), _WEEK))

    def write(self, out: str) -> None:
        """Replace the record."""
        _write(self, storage.join(folder_of(out, self.period), _WEEK))


def folder_of(out: str, period: str) -> str:
    """The directory of a week."""
    return storage.join(out, _WEEKS, period)


def _read(cls: type[ConfigT], url: str) -> ConfigT | None:
    data = storage.read_if_there(url)
    return None if data is None else validate(cls, json.loads(data), url)


def _write(value: Config, url: str) -> None:
    storage.write_bytes(url, (json.dumps(value.model_dump(mode="json"), indent=1) + "\n").encode())


def check_new(
    new: Dataset, periods: list[str], data: str, all_periods: list[str], *, joins: bool, is_begun: bool
) -> None:
    """Check that new periods may join those of the data set, or have joined it in an earlier run, and can be judged.

    Args:
        new: the rows of the periods.
        periods: the new periods.
        data: the data set that grows, with `all_periods`.
        all_periods: the periods of `data`.
        joins: whether the rows are others than those of `data`.
        is_begun: whether a week with these rows has begun.

    Raises:
        InputError: the data set has later periods, or other rows of these; or the newest has no labels.
    """
    others, present = ([p for p in all_periods if (p in periods) == is_taken] for is_taken in (False, True))
    if others and others[-1] > periods[0]:
        raise InputError(
            f"{new.url}: the rows are of {in_few_words(periods)}, and {data} has {others[-1]!r} already; add "
            "earlier periods with jobs.prepare (prepare.add), which judges nothing"
        )
    if joins and present and not is_begun:
        remedy = "leave inputs out to judge the newest period as it is there"
        if present != periods:
            remedy = "leave its rows out of the inputs"
        raise InputError(
            f"{new.url}: {data} has {in_few_words(present)} already, and a period is not replaced; {remedy}"
        )
    if not new.manifest.files.of_periods(periods[-1:]).counts().labelled:
        raise InputError(
            f"{new.url}: {periods[-1]} has no labels, by which models are judged; run this again once it has some"
        )


def unseen_periods(splits: SplitsWithTest, production: str) -> Split:
    """The test periods after the last that a bundle has learnt from or was selected on; an `InputError` if none."""
    test, origin = splits.test, validate(Provenance, load_bundle(production).made_by, production)
    named_periods = {period for split in splits.by_name.values() for period in split.periods or ()}
    learnt = {period for split in origin.config.splits for period in split.periods or ()} & named_periods
    if not learnt:  # as for a model that learnt from tables in memory
        log.warning("weekly: %s names none of these periods as learnt from; it is taken to have seen none", production)
    last = max(learnt, default="")
    newer = [period for period in test.periods or () if period > last]
    if not newer:
        raise InputError(
            f"splits.test: {production} has learnt from {last!r}, so that no test period is left to judge it on; give "
            "the rows of a newer period"
        )
    return test.replace(periods=newer)


def published(
    bundle: str, folder: str, *, export: ExportJob | None, registry: Registry | None
) -> Mapping[str, str | None]:
    """Export and register what goes into service, as far as it is asked for; returns where it is and its version."""
    places = dict[str, str | None]()
    if export is not None:
        export.run()
        places["export"] = storage.absolute(export.out)
    if registry is not None:
        # a run that was stopped after this must not register it again
        marker = join(folder, f"registered-{content_hash(bundle)[:12]}.txt")
        version = storage.read_if_there(marker)
        if version is None:
            version = RegisterJob(bundle=bundle, **registry.model_dump()).run().encode()
            storage.write_bytes(marker, version)
        places["version"] = version.decode()
    return places
