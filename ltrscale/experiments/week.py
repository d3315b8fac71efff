"""What a week of `jobs.weekly` checks, and how it publishes what goes into service."""

from collections.abc import Mapping

from ltrscale import storage
from ltrscale.bundle import content_hash
from ltrscale.bundle import load as load_bundle
from ltrscale.bundle.contents import Provenance
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.split import Split, SplitsWithTest, in_few_words
from ltrscale.errors import InputError
from ltrscale.experiments.service import InService, Week
from ltrscale.progress import log
from ltrscale.serving.export import ExportJob
from ltrscale.serving.register import RegisterJob, Registry
from ltrscale.storage import join


def check_newest(out: str, week: Week) -> None:
    """Check that a week that was stopped does not replace the model of a later one.

    Raises:
        InputError: it would.
    """
    now = InService.read(out)
    if now is not None and now.period > week.period:
        raise InputError(
            f"{week.period}: was stopped, and {now.bundle} of {now.period} is in service since, which an older model "
            "must not replace; nothing is left to do"
        )


def check_new(
    new: Dataset, periods: list[str], data: str, all_periods: list[str], *, joins: bool, is_begun: bool
) -> None:
    """Check that new periods may join those of the data set, or have joined it in an earlier run, and can be judged.

    Args:
        new: the rows of the periods.
        periods: the new periods.
        data: the data set that grows.
        all_periods: the periods of `data`.
        joins: whether the rows are others than those of `data`.
        is_begun: whether a week with these rows has begun.

    Raises:
        InputError: the data set has later periods, or other rows of these; or the newest has no labels.
    """
    before, taken = ([p for p in all_periods if (p in periods) == is_taken] for is_taken in (False, True))
    if before and before[-1] > periods[0]:
        raise InputError(
            f"{new.url}: the rows are of {in_few_words(periods)}, and {data} has {before[-1]!r} already; add "
            "earlier periods with jobs.prepare (prepare.add), which judges nothing"
        )
    if joins and taken and not is_begun:
        remedy = "leave inputs out to judge the newest period as it is there"
        if taken != periods:
            remedy = "leave its rows out of the inputs"
        raise InputError(f"{new.url}: {data} has {in_few_words(taken)} already, and a period is not replaced; {remedy}")
    if not any(cell.labelled for f in new.manifest.files if f.period == periods[-1] for cell in f.row_groups):
        raise InputError(
            f"{new.url}: {periods[-1]} has no labels, by which models are judged; run this again once it has some"
        )


def unseen_periods(splits: SplitsWithTest, production: str) -> Split:
    """The test periods after the last one that a bundle has learnt from, or was selected on.

    Raises:
        InputError: there is none.
    """
    test, origin = splits.test, validate(Provenance, load_bundle(production).made_by, production)
    named_periods = {period for split in splits.by_name.values() for period in split.periods or ()}
    learnt = {period for split in origin.config.splits for period in split.periods or ()} & named_periods
    if not learnt:  # as of one that learnt from tables in memory
        log.warning("weekly: %s names none of these periods as learnt from; it is taken to have seen none", production)
    until = max(learnt, default="")
    newer = [period for period in test.periods or () if period > until]
    if not newer:
        raise InputError(
            f"splits.test: {production} has learnt from {until!r}, so that no test period is left to judge it on; give "
            "the rows of a newer period"
        )
    return test.replace(periods=newer)


def published(
    bundle: str, folder: str, *, export: ExportJob | None, registry: Registry | None
) -> Mapping[str, str | None]:
    """Export and register what goes into service, as far as it is asked for; returns where it is and its version."""
    found = dict[str, str | None]()
    if export is not None:
        export.run()
        found["export"] = storage.absolute(export.out)
    if registry is not None:
        # a run that was stopped after this must not register it again
        done = join(folder, f"registered-{content_hash(bundle)[:12]}.txt")
        version = storage.read_if_there(done)
        if version is None:
            version = RegisterJob(bundle=bundle, **registry.model_dump()).run().encode()
            storage.write_bytes(done, version)
        found["version"] = version.decode()
    return found
