"""Scores: a bundle, or the mean of several, scores periods of a data set, each committed when complete.

One process scores file after file, or under Ray several share them. The process that scores a file also puts it in
place; the caller takes over the files and commits their period. A committed period stays, whatever happens to the
others, and is scored again only if the bundle or the data have changed.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, ClassVar, Self

from pydantic import model_validator

from ltrscale import storage
from ltrscale.bundle_manifest import content_hash
from ltrscale.config import Operational
from ltrscale.data.dataset.files import Counts, DataFiles, total_of
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.periods import resolve_periods
from ltrscale.data.dataset.scores import Layout, PeriodScores, period_url, read_period
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Periods, Split, Texts
from ltrscale.errors import InputError
from ltrscale.origin import digest, made_by
from ltrscale.progress import Report, log, progress
from ltrscale.scoring.score_files import Done, Plan, ScorerConfig, score_here, score_with_ray
from ltrscale.stages.stage import Origin, Stage


class ScoreJob(ScorerConfig, Stage):
    """Score periods of a data set with a bundle; each period records its own settings and inputs."""

    stage: ClassVar = "score"
    record: ClassVar = storage.HIDDEN_RUN
    data: str
    """Data set directory; groups without labels are scored too."""
    periods: Periods = None
    """Periods, ranges or periods counted from the newest, as in a split; all if it is left out."""
    layout: Layout = "lists"
    """`lists`: a row per query group with query id, item ids, scores and ranks; `items`: a row per item, the best of
    each query first; `scores`: group number and scores alone, the smallest, which suffices as labels for students."""
    meta: Texts = ()
    """Group columns `meta_NAME` of the data set to copy to the output, by their NAME; not with layout `scores`."""
    out: Operational[str]
    """Directory of the scores."""

    @model_validator(mode="after")
    def _has_room_for_meta(self) -> Self:
        if self.meta and self.layout == "scores":
            raise ValueError("meta has no place in the layout scores; set layout to lists or items")
        return self

    @one_view()
    def plan(self) -> Plan:
        """Find the periods whose scores are missing or out of date.

        Raises:
            InputError: the bundle, the data set or a period is missing, or a period's scores would replace something
                else that is committed.
        """
        split = Split(data=(self.data,), periods=self.periods)
        (part,) = resolve_periods(split)
        by_period, hashes = part.files.by_period, {url: content_hash(url) for url in self.bundles}
        one, *other_hashes = [hashes[url] for url in self.bundles]
        bundle_hash = digest([one, *other_hashes]) if other_hashes else one
        sizes = storage.sizes_below(self.out)  # a listing takes one request for a thousand files
        are_current = storage.at_once(lambda p: self._is_current(by_period[p], bundle_hash, sizes), part.files.periods)
        pending = [period for period, current in zip(part.files.periods, are_current, strict=True) if not current]
        return Plan(
            scorer=self,
            layout=self.layout,
            meta=self.meta,
            out=storage.absolute(self.out),
            bundle_hashes=hashes,
            bundle_hash=bundle_hash,
            dataset=part.dataset,
            selection=select(split, labelled=False),
            files={period: by_period[period] for period in pending},
            n_current=len(by_period) - len(pending),
        )

    def _is_current(self, files: DataFiles, bundle_hash: str, sizes: Mapping[str, int]) -> bool:
        """True if this bundle's scores of a period's files are committed and complete, with these columns."""
        (period,) = files.periods
        folder = period_url("", period).lstrip("/")
        committed = read_period(self.out, period) if f"{folder}/{storage.HIDDEN_MANIFEST}" in sizes else None
        if committed is None or committed.bundle_hash != bundle_hash or not committed.is_of(files.sha256):
            return False
        lost = [file.path for file in committed.files if sizes.get(f"{folder}/{file.path}") != file.bytes]
        if lost:
            log.warning("%s: %s is missing or cut short", period_url(self.out, period), lost[0])
        return not lost and (committed.layout, committed.meta) == (self.layout, self.meta)

    def is_done(self, origin: Origin) -> bool:  # noqa: ARG002
        """True, with a log line, if the scores of every period are up to date with the bundle and the data."""
        plan = self.plan()
        if not plan.files:
            log.info("score: %s is up to date (%d periods)", self.out, plan.n_current)
        return not plan.files

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Score the periods that are not up to date, and commit each; see `ltrscale.data.dataset.scores`.

        The report receives the counts of each period at its commit, and the totals at the end; they count all groups as
        labelled.

        Raises:
            InputError: the bundle or the data are missing, do not fit each other, or differ from their manifests; the
                bundle cannot score, or gives a score that is not a finite float32.
        """
        start, plan, total = time.monotonic(), self.plan(), total_of([])
        with (
            progress("score", plan.all_files.counts().documents) as advance,
            _Committing(self, plan) as periods,
            closing(score_with_ray(plan, advance) if self.ray else score_here(plan, advance)) as scored,
        ):
            for result in scored:
                if committed := periods.take(result):
                    report({"stage": "score", "period": result.period, **_reported(committed)})
                    total = total_of([total, committed])
        seconds = time.monotonic() - start
        log.info(
            "score: %s periods scored with %s groups and %s documents, %s documents/s; %s periods were up to date",
            f"{len(plan.files):,}", f"{total.groups:,}", f"{total.documents:,}",
            f"{total.documents / seconds:,.0f}", f"{plan.n_current:,}",
        )  # fmt: skip
        report({"stage": "score", "periods": len(plan.files), **_reported(total), "seconds": round(seconds, 3)})


class _Committing:
    """A context manager that commits a period with its last file of scores; at exit it deletes uncommitted files."""

    def __init__(self, job: ScoreJob, plan: Plan) -> None:
        self._job = job
        self._plan = plan
        self._open: dict[str, tuple[storage.Commit, dict[str, Done]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        stack = ExitStack()  # exits all commits even if one of them fails
        for commit, _ in self._open.values():
            stack.push(commit)
        stack.__exit__(*error)

    def take(self, result: Done) -> Counts | None:
        """Take over a file; returns its period's counts if this file completed the period, else None."""
        period = result.period
        if period not in self._open:
            url = period_url(self._plan.out, period)
            self._open[period] = storage.Commit(url, manifest=storage.HIDDEN_MANIFEST), {}
        commit, of_period = self._open[period]
        commit.adopt([result.file])
        of_period[result.file.data] = result
        if len(of_period) < len(self._plan.files[period]):
            return None
        counts = self._commit(commit, period, of_period)
        del self._open[period]
        return counts

    def _commit(self, commit: storage.Commit, period: str, results: Mapping[str, Done]) -> Counts:
        plan, files = self._plan, self._plan.files[period]
        counts, expected = total_of(of_file.counts for of_file in results.values()), files.counts()
        if counts[:2] != expected[:2]:  # not the third, for labelled groups: all scored groups count as labelled
            of_groups = f"{counts.groups} groups and {counts.documents} documents were scored"
            raise InputError(
                f"period {period} of {plan.dataset.url}: {of_groups}, the manifest lists {expected.groups} and "
                f"{expected.documents}; prepare the data set again"
            )
        inputs = {self._job.data: plan.dataset.manifest.hashes[period], **plan.bundle_hashes}
        manifest = PeriodScores(
            period=period,
            files=tuple(results[path].file for path in files.paths),
            groups=counts.groups,
            documents=counts.documents,
            bundle_hash=plan.bundle_hash,
            made_by=made_by("score", self._job, inputs),
            layout=plan.layout,
            meta=plan.meta,
        )
        with commit:
            commit.finish(manifest.model_dump(mode="json"))
        return counts


def _reported(counts: Counts) -> dict[str, int]:
    return {"groups": counts.groups, "documents": counts.documents}
