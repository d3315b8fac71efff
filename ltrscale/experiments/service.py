"""What is in service, and what became of each week: two small files below the directory of `jobs.weekly`.

OUT/service.json                the bundle to serve, replaced in one step
OUT/weeks/PERIOD/week.json      what the week began with, and how it ended
"""

import json
from datetime import UTC, datetime
from typing import Literal, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, ConfigT, validate
from ltrscale.data.dataset.split import SplitsWithTest

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
