"""The records of jobs.weekly: the model in service, with its immutable copies, and each week.

OUT/weeks/PERIOD/week.json      inputs and outcome of a week
OUT/service.json      the bundle to serve and its hash, and earlier ones; replaced atomically
OUT/service/HASH/     a copy of each bundle and each export, named by the hash of its content
          /HASH.version  the version of such a bundle in the registry

A bundle is copied before the file names it, and the copy stays while the file names it. So readers of the file always
find the complete bundle that was judged. `ltrscale.bundle.load` checks such a directory against its name.
"""

from datetime import UTC, datetime
from typing import Any, Literal, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.bundle import load
from ltrscale.bundle_manifest import hash_of
from ltrscale.config import Strict, validate
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.periods import in_few_words
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.errors import InputError, UnavailableError
from ltrscale.experiments.records import read_record, record_bytes
from ltrscale.origin import digest
from ltrscale.progress import log
from ltrscale.serving.export import Registry, put_alias, register_bundle
from ltrscale.stages.provenance import Provenance
from ltrscale.storage import join

SERVICE = "service.json"
_COPIES = "service"
_VERSION = ".version"
_EARLIER = 5
"""Number of earlier models to keep."""
_DAMAGED = "delete it, and name a bundle of {copies} as production, which goes into service to begin with"


class Served(Strict):
    """A model that is in service, or was."""

    bundle: str
    """Copy of the bundle."""
    hash: str
    """The content hash of the bundle, and the name of its directory."""
    period: str
    """Newest period when it went into service."""
    since: str
    """Time when it went into service, UTC."""
    export: str | None = None
    """Copy of the export, if any."""
    version: str | None = None
    """Version in the registry, if registered."""

    @property
    def copies(self) -> tuple[str, ...]:
        """The directories that serve."""
        return (self.bundle,) if self.export is None else (self.bundle, self.export)

    def check(self) -> None:
        """Raise an `InputError` if a file of the copies was changed or is missing."""
        for place in self.copies:
            _check_copy(place)

    @classmethod
    def now(cls, bundle: str, period: str, **others: Any) -> Self:
        """A bundle copy that goes into service now."""
        since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return cls(bundle=bundle, hash=_name(bundle), period=period, since=since, **others)


class InService(Served):
    """The model in service."""

    earlier: tuple[Served, ...] = ()
    """Earlier models in service, newest first."""

    @classmethod
    def read(cls, out: str) -> Self | None:
        """The model in service, or None; an `InputError` if the file is damaged."""
        return read_record(cls, join(out, SERVICE), _DAMAGED.format(copies=join(out, _COPIES)))

    def check(self) -> None:
        """Also say in the error how to return to the model before it."""
        try:
            super().check()
        except InputError as error:
            raise InputError(f"{error}; jobs.weekly --rollback puts the model before it into service again") from error


def copied(url: str, out: str) -> str:
    """Make the immutable copy of a committed directory, unless it exists; returns its URL.

    Raises:
        InputError: nothing is committed at `url`, or a file there or in the copy was changed.
    """
    manifest = storage.read_manifest(url)
    if manifest is None:
        raise InputError(f"{url}: nothing is committed there; run the same command again, which makes it")
    place = storage.absolute(join(out, _COPIES, hash_of(manifest)))
    if storage.read_manifest(place) is None:
        with storage.Commit(place) as commit:
            for name in storage.listed_in(manifest):
                commit.write({name: storage.read_verified(url, name, manifest)})
            commit.finish(manifest)
    _check_copy(place)
    return place


def _check_copy(place: str) -> None:
    """Check that the hash of a directory's files is its name."""
    manifest = storage.read_manifest(place)
    if manifest is None or hash_of(manifest) != place.rpartition("/")[2]:
        raise InputError(f"{place}: does not hold the files whose hash is its name")
    for name in storage.listed_in(manifest):
        storage.read_verified(place, name, manifest)


def _is_whole(served: Served) -> bool:
    """Whether the copies of a model are unchanged; logs any fault."""
    try:
        served.check()
    except InputError as error:
        log.warning("weekly: passed over: %s", error)
        return False
    return True


def put_into_service(
    out: str, bundle: str, period: str, *, export: str | None = None, version: str | None = None
) -> None:
    """Put the copies of a bundle and its export into service; the current model becomes the newest earlier one."""
    before, current = storage.read_if_there(join(out, SERVICE)), InService.read(out)
    earlier: tuple[Served, ...] = ()
    if current is not None:
        if (current.bundle, current.export, current.version) == (bundle, export, version):
            return
        replaced = () if current.bundle == bundle else (Served(**current.model_dump(exclude={"earlier"})),)
        earlier = (*replaced, *current.earlier)[:_EARLIER]
    _replace(out, before, InService.now(bundle, period, export=export, version=version, earlier=earlier))


def take_back(out: str, registry: Registry | None) -> InService:
    """Roll back to the previous model in service; returns it.

    Skips changed copies, with a warning. The copies of the current model stay until the next weekly run, for readers of
    the old file.

    Raises:
        InputError: there is no earlier model, or the registry fails, after the file was replaced.
    """
    before, current = storage.read_if_there(join(out, SERVICE)), InService.read(out)
    earlier = () if current is None else current.earlier
    whole = [number for number, served in enumerate(earlier) if _is_whole(served)]
    if not whole:
        raise InputError(f"{join(out, SERVICE)}: names nothing whole that was in service before; nothing is changed")
    served, further = earlier[whole[0]], earlier[whole[0] + 1 :]
    trouble: InputError | UnavailableError | None = None
    version = served.version
    try:
        version = version or registered(served.bundle, registry)
        if registry is not None and version is not None:
            put_alias(registry, version)
    except (InputError, UnavailableError) as error:  # the file decides, the registry follows
        trouble = error
    now = InService.now(served.bundle, served.period, export=served.export, version=version, earlier=further)
    _replace(out, before, now)
    if trouble is not None:
        raise InputError(f"{now.bundle} is in service again, but the registry does not know it: {trouble}")
    return now


def registered(bundle: str, registry: Registry | None) -> str | None:
    """Register the copy of a bundle once, even if the run is repeated; returns the version, None without a registry."""
    if registry is None:
        return None
    version = storage.read_if_there(f"{bundle}{_VERSION}")
    if version is None:
        version = register_bundle(bundle, registry).encode()
        storage.write_bytes(f"{bundle}{_VERSION}", version)
    return version.decode()


def _replace(out: str, before: bytes | None, now: InService) -> None:
    storage.check_lease(out)
    if not storage.swap(join(out, SERVICE), before, record_bytes(now)):
        raise InputError(f"{join(out, SERVICE)}: another run has replaced it meanwhile; run the same command again")


def forget(out: str) -> None:
    """Delete the copies that the file does not name: older ones, and those of interrupted runs."""
    current = InService.read(out)
    models = () if current is None else (current, *current.earlier)
    named = {_name(place) for served in models for place in served.copies}
    for place in storage.children(join(out, _COPIES)):
        if storage.are_hashes([_name(place)]) and _name(place) not in named:
            try:
                storage.withdraw(place)
                storage.remove(f"{place}{_VERSION}")
            except (InputError, UnavailableError) as error:
                log.warning("weekly: not deleted: %s", error)


def _name(place: str) -> str:
    return place.rstrip("/").rpartition("/")[2]


_WEEKS, _WEEK = "weeks", "week.json"
_WEEK_DAMAGED = "delete it, and leave inputs out where its period has joined the data set: the week is judged anew"


class Week(Strict):
    """A week of `jobs.weekly`: its inputs, which a resumed week keeps, and its outcome."""

    period: str
    content: str
    """Hash of the new period's groups."""
    settings: str
    """Hash of the settings."""
    production: str
    """The bundle in service at its start."""
    before: SplitsWithTest
    """The periods by name without the new ones, as reference for drift."""
    splits: SplitsWithTest
    """The periods by name with the new ones; the candidate learns from these, and `test` judges it."""
    outcome: Literal["under way", "in service", "refused"] = "under way"
    reasons: tuple[str, ...] = Field(())
    """Reasons for a refusal."""
    bundle: str | None = None
    """The bundle that went into service, now or when judged with other settings."""

    @classmethod
    def read(cls, out: str, period: str) -> Self | None:
        """The record of a period, or None; an `InputError` if the file is damaged."""
        return read_record(cls, join(folder_of(out, period), _WEEK), _WEEK_DAMAGED)

    def write(self, out: str) -> None:
        """Replace the record."""
        storage.write_bytes(join(folder_of(out, self.period), _WEEK), record_bytes(self))

    @property
    def candidate(self) -> str:
        """The candidate's directory below the week's; it depends on rows, settings and production."""
        return join("candidates", digest([self.content, self.settings, self.production])[:12])


def folder_of(out: str, period: str) -> str:
    """The directory of a week."""
    return join(out, _WEEKS, period)


def check_new(
    new: Dataset, periods: list[str], data: str, all_periods: list[str], *, joins: bool, is_begun: bool
) -> None:
    """Check that new periods can join the data set, or did in an earlier run, and can be judged.

    `joins` says whether the rows differ from those of `data`, and `is_begun` whether a week with these rows has begun.

    Raises:
        InputError: the data set has later periods, or other rows of the new ones; or the newest has no labels.
    """
    others, present = ([p for p in all_periods if (p in periods) == is_taken] for is_taken in (False, True))
    if others and others[-1] > periods[0]:
        raise InputError(
            f"{new.url}: the rows are of {in_few_words(periods)}, and {data} has {others[-1]!r} already; add "
            "earlier periods with jobs.prepare (prepare.add), which judges nothing"
        )
    if joins and present and not is_begun:
        remedy = (
            "leave inputs out to judge the newest period as it is there; to replace its rows, delete the data set, "
            "prepare it from all rows, and leave inputs out"
        )
        if present != periods:
            remedy = "leave its rows out of the inputs"
        raise InputError(
            f"{new.url}: {data} has {in_few_words(present)} already, and a period is not replaced; {remedy}"
        )
    if not new.manifest.files.in_periods(periods[-1:]).counts().labelled:
        raise InputError(
            f"{new.url}: {periods[-1]} has no labels, by which models are judged; run this again once it has some"
        )


def unseen_periods(splits: SplitsWithTest, production: str) -> Split:
    """The test periods after the last one that a bundle was trained or selected on; an `InputError` if none."""
    test, origin = splits.test, validate(Provenance, load(production).made_by, production)
    named_periods = {period for split in splits.by_name.values() for period in split.periods or ()}
    learnt = {period for split in origin.config.splits for period in split.periods or ()} & named_periods
    if not learnt:  # for example, a model trained on tables in memory
        log.warning("weekly: %s names none of these periods as learnt from; it is taken to have seen none", production)
    last = max(learnt, default="")
    newer = [period for period in test.periods or () if period > last]
    if not newer:
        raise InputError(
            f"splits.test: {production} has learnt from {last!r}, so that no test period is left to judge it on; give "
            "the rows of a newer period"
        )
    return test.replace(periods=newer)
