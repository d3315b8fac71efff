"""A week of `jobs.weekly`: its record, and checks of its rows and of the model in service.

OUT/weeks/PERIOD/week.json      inputs and outcome of the week
"""

from typing import Literal, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.bundle import load as load_bundle
from ltrscale.bundle.contents import Provenance
from ltrscale.config import Strict, validate
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.split import Split, SplitsWithTest, in_few_words
from ltrscale.errors import InputError
from ltrscale.experiments.service import read_record, record_bytes
from ltrscale.origin import digest
from ltrscale.progress import log
from ltrscale.storage import join

_WEEKS, _WEEK = "weeks", "week.json"
_DAMAGED = "delete it, and leave inputs out where its period has joined the data set: the week is judged anew"


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
        """The record of a period, or None.

        Raises:
            InputError: the file is damaged.
        """
        return read_record(cls, join(folder_of(out, period), _WEEK), _DAMAGED)

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

    Args:
        new: the rows of the periods.
        periods: the new periods.
        data: the data set to extend.
        all_periods: the periods of `data`.
        joins: whether the rows differ from those of `data`.
        is_begun: whether a week with these rows has begun.

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
    test, origin = splits.test, validate(Provenance, load_bundle(production).made_by, production)
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
