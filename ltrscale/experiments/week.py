"""A week of `jobs.weekly`: its record, and what is checked of its rows and of the model that it is compared with.

OUT/weeks/PERIOD/week.json      what the week began with, and how it ended
"""

from typing import Literal, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.bundle import load as load_bundle
from ltrscale.bundle.contents import Provenance
from ltrscale.config import Config, digest, validate
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.split import Split, SplitsWithTest, in_few_words
from ltrscale.errors import InputError
from ltrscale.experiments.service import read_record, record_bytes
from ltrscale.progress import log
from ltrscale.storage import join

_WEEKS, _WEEK = "weeks", "week.json"
_DAMAGED = "delete it, and leave inputs out where its period has joined the data set: the week is judged anew"


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
        """The record of a period; None where there is none.

        Raises:
            InputError: the file is damaged.
        """
        return read_record(cls, join(folder_of(out, period), _WEEK), _DAMAGED)

    def write(self, out: str) -> None:
        """Replace the record."""
        storage.write_bytes(join(folder_of(out, self.period), _WEEK), record_bytes(self))

    @property
    def candidate(self) -> str:
        """The directory of the candidate below that of the week: another one for other rows, settings or production."""
        return join("candidates", digest([self.content, self.settings, self.production])[:12])


def folder_of(out: str, period: str) -> str:
    """The directory of a week."""
    return join(out, _WEEKS, period)


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
        remedy = (
            "leave inputs out to judge the newest period as it is there; to replace its rows, delete the data set, "
            "prepare it from all rows, and leave inputs out"
        )
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
