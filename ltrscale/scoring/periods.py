"""Periods of scores, each committed with the last of its files."""

import time
from contextlib import ExitStack, closing
from typing import Any

from ltrscale import storage
from ltrscale.data.dataset.manifest import Counts
from ltrscale.data.dataset.scores import PeriodScores, period_url
from ltrscale.errors import InputError
from ltrscale.progress import Report, log, progress
from ltrscale.scoring.files import Done, score_here
from ltrscale.scoring.plan import Plan, ScoreConfig, listed_in, make_plan, total_of
from ltrscale.scoring.under_ray import score_with_ray


def score(config: ScoreConfig, out: str, *, report: Report) -> Counts:
    """Score the periods that are not up to date, and commit each to `out/period=P`; see `ltrscale.data.dataset.scores`.

    Args:
        config: see `ScoreConfig`.
        out: URL of the directory.
        report: receives the counts of each period when it is committed, and of all at the end.

    Returns:
        Groups and documents that were scored now; all groups count as labelled.

    Raises:
        InputError: bundle or data are missing, do not fit each other, or are not what their manifests list; the bundle
            cannot score, or gives a score that is no finite float32.
    """
    start = time.monotonic()
    plan = make_plan(config, out)
    total = total_of([])
    with (
        progress("score", listed_in(plan.all_files).documents) as advance,
        _Periods(plan) as periods,
        closing(score_with_ray(plan, advance) if config.ray else score_here(plan, advance)) as scored,
    ):
        for done in scored:
            if committed := periods.take(done):
                report({"stage": "score", "period": done.period, **_record(committed)})
                total = total_of([total, committed])
    seconds = time.monotonic() - start
    rate = total.documents / seconds
    log.info(
        "score: %s periods scored with %s groups and %s documents, %s documents/s; %s periods were up to date",
        *(f"{n:,}" for n in (len(plan.files), total.groups, total.documents, round(rate), plan.n_current)),
    )
    report({"stage": "score", "periods": len(plan.files), **_record(total), "seconds": round(seconds, 3)})
    return total


def is_scored(config: ScoreConfig, out: str) -> bool:
    """Whether every period is scored already by this bundle, from the data as they are; says so.

    Raises:
        InputError: as `score`, before the bundle is opened.
    """
    plan = make_plan(config, out)
    if not plan.files:
        log.info("score: %s is up to date (%d periods)", out, plan.n_current)
    return not plan.files


class _Periods:
    """Takes over files of scores as they come, and commits a period with its last one.

    A context manager: files of periods that are not committed at its end are taken back.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._open: dict[str, tuple[storage.Commit, dict[str, Done]]] = {}

    def __enter__(self) -> "_Periods":
        return self

    def __exit__(self, *error: Any) -> None:
        stack = ExitStack()
        for commit, _ in self._open.values():
            stack.push(commit)
        stack.__exit__(*error)

    def take(self, done: Done) -> Counts | None:
        """Take a file over; returns the counts of its period where that is committed now."""
        period, files = done.period, self._plan.files[done.period]
        if period not in self._open:
            self._open[period] = storage.Commit(period_url(self._plan.out, period)), {}
        commit, there = self._open[period]
        commit.adopt([storage.Placed(done.file.path, done.file.bytes, done.file.sha256)])
        there[done.file.data] = done
        if len(there) < len(files):
            return None
        counts, listed = total_of(of_file.counts for of_file in there.values()), listed_in(files)
        if counts[:2] != listed[:2]:
            found = f"{counts.groups} groups and {counts.documents} documents were scored"
            raise InputError(
                f"period {period} of {self._plan.dataset.url}: {found}, the manifest lists {listed.groups} and "
                f"{listed.documents}; prepare the data set again"
            )
        manifest = PeriodScores(
            period=period,
            files=tuple(there[file.path].file for file in files),
            groups=counts.groups,
            documents=counts.documents,
            bundle_hash=self._plan.bundle_hash,
            made_by=self._plan.origin_of(period),
        )
        with commit:
            commit.finish(manifest.model_dump(mode="json"))
        del self._open[period]
        return counts


def _record(counts: Counts) -> dict[str, int]:
    return {"groups": counts.groups, "documents": counts.documents}
