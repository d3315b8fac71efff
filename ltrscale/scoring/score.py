"""Scores: a bundle, or the mean of several, scores periods of a data set, each committed when complete.

One process scores file after file, or several actors of Ray share them. The process that scores a file also puts it in
place; the caller takes over the files and commits their period. A committed period stays, whatever happens to the
others, and is scored again only if the bundle or the data have changed.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

import logging
import math
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, model_validator

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.config import Config, Operational, Strict
from ltrscale.data.dataset.files import Counts, DataFile, DataFiles, PeriodName, total_of
from ltrscale.data.dataset.manifest import Dataset, one_view
from ltrscale.data.dataset.periods import resolve_periods
from ltrscale.data.dataset.scores import (
    Layout,
    PeriodScores,
    ScoredGroups,
    ScoreFile,
    WrongIdsError,
    file_name,
    period_url,
    read_period,
    write_file,
)
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Periods, Split, Texts
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.readers import read_direct
from ltrscale.devices import Device, choose_device, round_to_tf32
from ltrscale.errors import InputError, UnavailableError
from ltrscale.origin import digest, made_by
from ltrscale.progress import Advance, Report, log, progress
from ltrscale.runtime import ray_internals
from ltrscale.runtime.engine import plain_errors, ray_cluster
from ltrscale.stages.stage import Origin, Stage

_LARGEST = float(np.finfo(np.float32).max)
_ACTOR_RETRIES = 3


class ScoreWorkersConfig(Config):
    """The processes that score under Ray, and the resources of each."""

    number: int = Field(2, ge=1)
    """Number of workers; fewer run if the cluster has less room."""
    cpus: float = Field(1, gt=0)
    """Logical CPUs of each, and threads of a tree model."""
    gpus: float = Field(0, ge=0)
    """GPUs of each; a fraction shares one among several workers."""


class ScorerConfig(Config):
    """The bundle that scores, and how."""

    bundle: str | tuple[str, ...] = Field(min_length=1)
    """Bundle that scores: a finetuned ranker or trees; several bundles give the mean of their scores."""
    docs_per_batch: Operational[int] = Field(8192, ge=1)
    """Documents that are scored at once, and held in memory together with a row group."""
    device: Operational[Device] = "auto"
    """Where a network runs: `auto` takes the GPU if there is one; or `cpu`, `cuda`, `cuda:1`."""
    ray: Operational[bool] = False
    """Score files in parallel on a Ray cluster; the scores are the same."""
    workers: Operational[ScoreWorkersConfig] = ScoreWorkersConfig()
    """The processes that score if `ray` is set."""

    @property
    def bundles(self) -> tuple[str, ...]:
        """The bundles that score."""
        return (self.bundle,) if isinstance(self.bundle, str) else self.bundle

    @property
    def name(self) -> str:
        """The bundles in words, for errors."""
        return " and ".join(self.bundles)


@dataclass(frozen=True, eq=False)
class Plan:
    """The work to do: the periods of a data set with scores out of date, and their files in order."""

    job: "ScoreJob"
    out: str
    """Absolute URL of the directory of the scores."""
    bundle_hashes: Mapping[str, str]
    """Content hash of each bundle; see `bundle_manifest.content_hash`."""
    bundle_hash: str
    """The hash of the only bundle, or of all together."""
    dataset: Dataset
    selection: Selection
    files: Mapping[str, DataFiles]
    """The files of each period that must be scored."""
    n_current: int
    """Number of periods that are up to date."""

    @cached_property
    def all_files(self) -> DataFiles:
        """The files of all periods."""
        return DataFiles.joined([*self.files.values()])


class Done(Strict):
    """A file of scores, in place."""

    period: PeriodName
    file: ScoreFile
    counts: Counts


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
        by_period, hashes = part.files.by_period, {url: bundles.content_hash(url) for url in self.bundles}
        one, *other_hashes = [hashes[url] for url in self.bundles]
        bundle_hash = digest([one, *other_hashes]) if other_hashes else one
        sizes = storage.sizes_below(self.out)  # a listing takes one request for a thousand files
        are_current = storage.at_once(lambda p: self._is_current(by_period[p], bundle_hash, sizes), part.files.periods)
        pending = [period for period, current in zip(part.files.periods, are_current, strict=True) if not current]
        return Plan(
            job=self,
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
        expected = plan.all_files.counts().documents
        with progress("score", expected) as advance, closing(_committed(plan, advance)) as committed:
            for period, counts in committed:
                report({"stage": "score", "period": period, **_reported(counts)})
                total = total_of([total, counts])
        seconds = time.monotonic() - start
        log.info(
            "score: %s periods scored with %s groups and %s documents, %s documents/s; %s periods were up to date",
            f"{len(plan.files):,}", f"{total.groups:,}", f"{total.documents:,}",
            f"{total.documents / seconds:,.0f}", f"{plan.n_current:,}",
        )  # fmt: skip
        report({"stage": "score", "periods": len(plan.files), **_reported(total), "seconds": round(seconds, 3)})


def _committed(plan: Plan, advance: Advance) -> Generator[tuple[str, Counts]]:
    """Commit each period with its last file of scores; files of a period without its last one are deleted."""
    started: dict[str, tuple[storage.Commit, dict[str, Done]]] = {}
    scored = score_with_ray(plan, advance) if plan.job.ray else score_here(plan, advance)
    with ExitStack() as commits, closing(scored):  # exits all commits even if one of them fails
        for result in scored:
            period = result.period
            if period not in started:
                commit = storage.Commit(period_url(plan.out, period), manifest=storage.HIDDEN_MANIFEST)
                started[period] = commits.enter_context(commit), {}
            commit, of_period = started[period]
            commit.adopt([result.file])
            of_period[result.file.data] = result
            if len(of_period) == len(plan.files[period]):
                yield period, _commit(plan, period, *started.pop(period))


def _commit(plan: Plan, period: str, commit: storage.Commit, results: Mapping[str, Done]) -> Counts:
    files = plan.files[period]
    counts, expected = total_of(of_file.counts for of_file in results.values()), files.counts()
    if counts[:2] != expected[:2]:  # not the third, for labelled groups: all scored groups count as labelled
        of_groups = f"{counts.groups} groups and {counts.documents} documents were scored"
        raise InputError(
            f"period {period} of {plan.dataset.url}: {of_groups}, the manifest lists {expected.groups} and "
            f"{expected.documents}; prepare the data set again"
        )
    inputs = {plan.job.data: plan.dataset.manifest.hashes[period], **plan.bundle_hashes}
    manifest = PeriodScores(
        period=period,
        files=tuple(results[path].file for path in files.paths),
        groups=counts.groups,
        documents=counts.documents,
        bundle_hash=plan.bundle_hash,
        made_by=made_by("score", plan.job, inputs),
        layout=plan.job.layout,
        meta=plan.job.meta,
    )
    with commit:
        commit.finish(manifest.model_dump(mode="json"))
    return counts


def _reported(counts: Counts) -> dict[str, int]:
    return {"groups": counts.groups, "documents": counts.documents}


class FileScorer:
    """Scores a data file at a time and puts the scores in place."""

    def __init__(self, plan: Plan, *, device: str, threads: int) -> None:
        self._plan = plan
        self._row_groups = plan.selection.row_groups.by_file()
        self._bundles = {url: self._loaded(url) for url in plan.job.bundles}
        self._selection = bundles.with_tokens_of(plan.selection, self._bundles.values())
        on = choose_device(device)
        round_to_tf32(False)  # scores equal those of the CPU to float32 precision
        features = plan.selection.features
        self._scorers = bundles.scorers_of(self._bundles, features=features, device=on, threads=threads)

    def _loaded(self, url: str) -> bundles.Bundle:
        bundle = bundles.load(url)
        if bundle.content_hash != self._plan.bundle_hashes[url]:
            raise InputError(f"{url}: the bundle was replaced meanwhile; run the same command again")
        return bundle

    def score(self, file: DataFile, advance: Advance) -> Done:
        """Score one file and put its scores in place, for the period's commit to take over."""
        url = storage.listed_file(self._plan.dataset.url, file.path)
        with storage.Commit(period_url(self._plan.out, file.period), helping=True) as commit:
            with commit.file(file_name(file)) as path, closing(self._names(url)) as names:
                scored, layout = self._scored(url, advance), self._plan.job.layout
                try:
                    counts = write_file(path, file.row_groups, scored, names, layout=layout)
                except WrongIdsError as error:
                    raise InputError(f"{url}: {error}; prepare the data set again") from error
            (placed,) = commit.leave()
        of_file = ScoreFile(**vars(placed), data=file.path, data_sha256=file.sha256)
        return Done(period=file.period, file=of_file, counts=counts)

    def _names(self, url: str) -> Generator[pa.Table]:
        """The columns of a file to copy to its scores, by row group."""
        meta = [f"meta_{name.removeprefix('meta_')}" for name in self._plan.job.meta]
        for table in read_direct(self._row_groups[url], ["gid", "query_id", "doc_ids", *meta]):
            if missing := next((name for name in meta if name not in table.column_names), None):
                raise InputError(f"{url}: no column {missing!r} (meta); list it under columns.meta of prepare")
            yield table

    def _scored(self, url: str, advance: Advance) -> Iterator[ScoredGroups]:
        """The scores of a file's groups, in its order."""
        selection = self._selection.only(self._row_groups[url])
        for groups in iterate(selection, docs_per_batch=self._plan.job.docs_per_batch):
            assert groups.ids_Q is not None
            scores = [self._scorers[url](groups).double() for url in self._plan.job.bundles]
            scores_N = torch.stack(scores).mean(0).numpy()
            scored = ScoredGroups(groups.ids_Q.numpy(), groups.offsets_Q1.numpy(), scores_N)
            bad_N = ~(np.abs(scores_N) <= _LARGEST)  # NaN too
            if bad_N.any():
                document = int(bad_N.argmax())
                gid = scored.gids_Q[np.searchsorted(scored.offsets_Q1, document, side="right") - 1]
                raise InputError(
                    f"{self._plan.job.name}: the score of a document of query group {gid} of {url} is "
                    f"{scores_N[document]}, no finite float32; look at that group's features, or train the bundle again"
                )
            yield scored
            advance(groups.n_documents)


def score_here(plan: Plan, advance: Advance) -> Generator[Done]:
    """Score the files of a plan one by one in this process."""
    scorer = FileScorer(plan, device=plan.job.device, threads=0)
    for file in plan.all_files:
        yield scorer.score(file, advance)


def score_with_ray(plan: Plan, advance: Advance) -> Generator[Done]:
    """Score the files of a plan in actors of Ray Data; results come in the order of completion."""
    FileScorer(plan, device="cpu", threads=1)  # reports a fault of the bundle before Ray starts
    if not plan.files:
        return
    import ray  # imported late: many processes never use Ray

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the errors that it logs are raised too
    workers, whose = plan.job.workers, f"{plan.job.name}: the process that scored a file with it"
    with (
        ray_cluster(math.ceil(workers.number * workers.cpus) + 1),  # one more for Ray Data's own tasks
        plain_errors(whose, "lower docs_per_batch, or give each of the workers more cpus"),
    ):
        for block in ray_internals.ready_blocks(_ray_dataset(plan)):
            for row in ray.get(block).to_pylist():
                if row["error"]:
                    raise (UnavailableError if row["outage"] else InputError)(row["error"])
                result = Done.model_validate_json(row["done"])
                advance(result.counts.documents)
                yield result


def _ray_dataset(plan: Plan) -> Any:
    """A Ray data set of the actors' results, from the numbers of the files."""
    import ray
    import ray.data
    from ray.util.annotations import RayDeprecationWarning

    workers, n = plan.job.workers, len(plan.all_files)
    shared = ray.put(plan)  # once for all actors of a node
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)  # for the only way to set max_task_retries
        dataset = ray.data.from_items(list(range(n)), override_num_blocks=n).map_batches(
            _Actor,
            fn_constructor_args=([shared], storage.share_leases()),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers.number, n)),
            num_cpus=workers.cpus,
            num_gpus=workers.gpus or None,
            max_task_retries=_ACTOR_RETRIES,  # by default a file that always kills its process is retried forever
        )
    dataset.context.enable_progress_bars = False
    return dataset


class _Actor:
    """A Ray actor that scores files."""

    # It loads the bundle with the first file, so that every error belongs to a file, and returns errors for the user as
    # text, because Ray Data replaces an actor's exception with another that lacks the original.

    def __init__(self, shared: Sequence[Any], leases: tuple[storage.Lease, ...]) -> None:
        import ray

        storage.join_leases(leases)
        self._plan: Plan = ray.get(shared[0])

    @cached_property
    def _scorer(self) -> FileScorer:
        scorer = self._plan.job
        return FileScorer(self._plan, device=scorer.device, threads=math.ceil(scorer.workers.cpus))

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Score the file with this number; returns the result as JSON, or the error."""
        (number,) = batch["item"].tolist()
        result, error, outage = "", "", False
        try:
            result = self._scorer.score(self._plan.all_files[number], lambda *_: None).model_dump_json()
        except (InputError, UnavailableError) as raised:
            error, outage = str(raised), isinstance(raised, UnavailableError)
        return {"done": np.array([result]), "error": np.array([error]), "outage": np.array([outage])}
