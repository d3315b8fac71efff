"""Scores: a bundle, or the mean of several, scores periods of a data set; a period is committed when it is complete.

One process scores file after file. Under Ray, actors that hold the bundle share the files, each one file at a time. The
process that scores a file also puts it in place; the caller takes over the files and commits their period. A committed
period stays, whatever happens to the rest, and is not scored again unless the bundle or the data have changed.

Shapes: N documents, Q groups.
"""

import logging
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, model_validator

from ltrscale import bundle as bundles
from ltrscale import ray_internals, storage
from ltrscale.config import Config, Operational, digest, made_by
from ltrscale.data.dataset.manifest import Counts, DataFile, Dataset, Period, one_view
from ltrscale.data.dataset.periods import chosen_files
from ltrscale.data.dataset.scores import (
    Layout,
    PeriodScores,
    Scored,
    ScoreFile,
    file_name,
    period_url,
    read_period,
    write_file,
)
from ltrscale.data.dataset.selection import RowGroup, Selection, select
from ltrscale.data.dataset.split import Periods, Split, Texts
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.readers import read_direct
from ltrscale.devices import Device, choose_device
from ltrscale.engine import plain_errors, ray_cluster
from ltrscale.errors import InputError
from ltrscale.progress import Advance, Report, log, progress

_LARGEST = float(np.finfo(np.float32).max)
_RETRIES = 3
_EARLIER = storage.MANIFEST
"""The manifest of a period that an earlier version has scored; its files are not those of the present manifest."""


class ScoreWorkersConfig(Config):
    """The processes that score under Ray, and the resources of each."""

    number: int = Field(2, ge=1)
    """Number of workers; fewer run where the cluster has less room."""
    cpus: float = Field(1, gt=0)
    """Logical CPUs of each, and threads of a tree model."""
    gpus: float = Field(0, ge=0)
    """GPUs of each; a fraction shares one among several workers."""


class ScorerConfig(Config):
    """The bundle that scores, and the way to do it."""

    renamed: ClassVar[Mapping[str, str]] = {"actors": "workers"}
    bundle: str | tuple[str, ...] = Field(min_length=1)
    """Bundle that scores: a finetuned ranker or trees; of several bundles the mean of their scores."""
    docs_per_batch: Operational[int] = Field(65_536, ge=1)
    """Documents that are scored at once, and held in memory together with a row group."""
    device: Operational[Device] = "auto"
    """Where a network runs: `auto` takes the GPU where there is one; or `cpu`, `cuda`, `cuda:1`."""
    ray: Operational[bool] = False
    """Score files in parallel on a Ray cluster; the scores are the same."""
    workers: Operational[ScoreWorkersConfig] = ScoreWorkersConfig()
    """The processes that score where `ray` is set."""

    @property
    def bundles(self) -> tuple[str, ...]:
        """The bundles that score."""
        return (self.bundle,) if isinstance(self.bundle, str) else self.bundle

    @property
    def name(self) -> str:
        """The bundles, for errors."""
        return " and ".join(self.bundles)


class ScoreConfig(ScorerConfig):
    """The bundle that scores, the periods to score, and the way to do it."""

    data: str
    """Data set directory; groups without labels are scored too."""
    periods: Periods = None
    """Periods, ranges or periods counted from the newest, as in a split; all if it is left out."""
    layout: Layout = "lists"
    """`lists`: a row per query group with query id, item ids, scores and ranks; `items`: a row per item, the best of
    each query first; `scores`: group number and scores alone, the smallest, which suffices for labels of students."""
    meta: Texts = ()
    """Group columns `meta_NAME` of the data set to copy to the output, by their NAME; not with layout `scores`."""

    @model_validator(mode="after")
    def _has_room_for_meta(self) -> Self:
        if self.meta and self.layout == "scores":
            raise ValueError("meta has no place in the layout scores; set layout to lists or items")
        return self


@dataclass(frozen=True, eq=False)
class Plan:
    """The work to do: the periods of a data set whose scores are not up to date, with their files in order."""

    config: ScoreConfig
    out: str
    """Absolute URL of the directory of the scores."""
    bundle_hashes: Mapping[str, str]
    """Of each bundle; see `ltrscale.bundle.content_hash`."""
    dataset: Dataset
    selection: Selection
    files: Mapping[str, Sequence[DataFile]]
    """The files of each period that must be scored."""
    n_current: int
    """Number of periods that are up to date."""

    @property
    def all_files(self) -> list[DataFile]:
        """The files of all periods."""
        return [file for files in self.files.values() for file in files]

    def origin_of(self, period: str) -> dict[str, Any]:
        """The origin to record with a period's scores."""
        inputs = {self.config.data: self.dataset.manifest.hash_of([period]), **self.bundle_hashes}
        return made_by("score", self.config, inputs)

    @property
    def bundle_hash(self) -> str:
        """The hash of the one bundle, or of all together."""
        return _hash_of_all([self.bundle_hashes[url] for url in self.config.bundles])


@one_view()
def make_plan(config: ScoreConfig, out: str) -> Plan:
    """Find the periods whose scores below a directory are missing or out of date.

    Raises:
        InputError: the bundle, the data set or a period is missing, or the place of a period's scores holds
            something else that is committed.
    """
    split = Split(data=(config.data,), periods=config.periods)
    ((dataset, files),) = chosen_files(split)
    bundle_hashes = {url: bundles.content_hash(url) for url in config.bundles}
    bundle_hash = _hash_of_all([bundle_hashes[url] for url in config.bundles])
    by_period: dict[str, list[DataFile]] = defaultdict(list)
    for file in files:
        by_period[file.period].append(file)
    pending = {
        period: of_period
        for period, of_period in sorted(by_period.items())
        if not _is_current(config, out, period, bundle_hash, of_period)
    }
    selection, n_current = select(split, labelled=False), len(by_period) - len(pending)
    return Plan(config, storage.absolute(out), bundle_hashes, dataset, selection, pending, n_current)


def _hash_of_all(bundle_hashes: Sequence[str]) -> str:
    one, *others = bundle_hashes
    return digest([one, *others]) if others else one


def _is_current(config: ScoreConfig, out: str, period: str, bundle_hash: str, files: Sequence[DataFile]) -> bool:
    """Whether the scores of these files by this bundle are committed and complete, with the columns of this config."""
    there, url = read_period(out, period), period_url(out, period)
    if there is None or there.bundle_hash != bundle_hash or not there.is_of(files):
        return False
    if (there.layout, there.meta) != (config.layout, config.meta) or storage.exists(storage.join(url, _EARLIER)):
        return False
    return storage.is_whole(url, there.model_dump())


def counts_in(files: Sequence[DataFile]) -> Counts:
    """The counts of some data files together, from their manifest."""
    return total_of(counts for file in files for counts in file.row_groups)


def total_of(counts: Iterable[Counts]) -> Counts:
    """The sums; zeros for none."""
    return Counts(*map(sum, zip(Counts(0, 0, 0), *counts, strict=True)))


class Done(Config):
    """A file of scores, in place."""

    period: Period
    file: ScoreFile
    counts: Counts


class FileScorer:
    """Scores a data file at a time and puts the scores in place."""

    def __init__(self, plan: Plan, *, device: str, threads: int) -> None:
        self._plan = plan
        self._row_groups: dict[str, list[RowGroup]] = defaultdict(list)
        self._bundles = [self._loaded(url) for url in plan.config.bundles]
        self._selection = bundles.reading(plan.selection, self._bundles)
        for row_group in plan.selection.row_groups:
            self._row_groups[row_group.url].append(row_group)
        on = choose_device(device)
        features = plan.selection.features
        self._scorers = [bundle.scorer(features=features, device=on, threads=threads) for bundle in self._bundles]

    def _loaded(self, url: str) -> bundles.Bundle:
        bundle = bundles.load(url)
        # hashed after loading, so that a bundle replaced before or while it was loaded is noticed
        if bundles.content_hash(url) != self._plan.bundle_hashes[url]:
            raise InputError(f"{url}: the bundle was replaced meanwhile; run the same command again")
        return bundle

    def score(self, file: DataFile, advance: Advance) -> Done:
        """Score one file and put its scores in place, for the period's commit to take over."""
        url = storage.listed_file(self._plan.dataset.url, file.path)
        with storage.Commit(period_url(self._plan.out, file.period), part=True) as commit:
            with commit.file(file_name(file)) as path, closing(self._names(url)) as names:
                scored, layout = self._scored(url, advance), self._plan.config.layout
                try:
                    counts = write_file(path, file.row_groups, scored, names, layout=layout)
                except ValueError as error:
                    raise InputError(f"{url}: {error}; prepare the data set again") from error
            (placed,) = commit.leave()
        of_file = ScoreFile(**vars(placed), data=file.path, data_sha256=file.sha256)
        return Done(period=file.period, file=of_file, counts=counts)

    def _names(self, url: str) -> Generator[pa.Table]:
        """The columns of a file that its scores are written with, by row group."""
        meta = [f"meta_{name.removeprefix('meta_')}" for name in self._plan.config.meta]
        for table in read_direct(self._row_groups[url], ["gid", "query_id", "doc_ids", *meta]):
            if lacking := next((name for name in meta if name not in table.column_names), None):
                raise InputError(f"{url}: no column {lacking!r} (meta); list it under columns.meta of prepare")
            yield table

    def _scored(self, url: str, advance: Advance) -> Iterator[Scored]:
        """The scores of the groups of a file, in its order."""
        selection = replace(self._selection, row_groups=tuple(self._row_groups[url]))
        for groups in iterate(selection, docs_per_batch=self._plan.config.docs_per_batch):
            assert groups.ids_Q is not None
            scores_N = torch.stack([scorer(groups).double() for scorer in self._scorers]).mean(0).numpy()
            scored = Scored(groups.ids_Q.numpy(), groups.offsets_Q1.numpy(), scores_N)
            bad_N = ~(np.abs(scores_N) <= _LARGEST)  # NaN too
            if bad_N.any():
                raise self._not_finite(url, scored, int(bad_N.argmax()))
            yield scored
            advance(groups.n_documents)

    def _not_finite(self, url: str, scored: Scored, document: int) -> InputError:
        gid = scored.gids_Q[np.searchsorted(scored.offsets_Q1, document, side="right") - 1]
        return InputError(
            f"{self._plan.config.name}: the score of a document of query group {gid} of {url} is "
            f"{scored.scores_N[document]}, no finite float32; look at that group's features, or train the bundle again"
        )


def score_here(plan: Plan, advance: Advance) -> Generator[Done]:
    """Score the files of a plan one after the other in this process."""
    scorer = FileScorer(plan, device=plan.config.device, threads=0)
    for file in plan.all_files:
        yield scorer.score(file, advance)


class _Actor:
    """A Ray actor that scores files. It loads the bundle with the first file, so that every error belongs to a file.

    It returns errors for the user as text: for an exception in an actor Ray Data raises another, without the original.
    """

    def __init__(self, plan: Plan, leases: tuple[storage.Lease, ...]) -> None:
        storage.join_leases(leases)
        self._plan = plan

    @cached_property
    def _scorer(self) -> FileScorer:
        config = self._plan.config
        return FileScorer(self._plan, device=config.device, threads=math.ceil(config.workers.cpus))

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Score the file with this number; returns the result as JSON, or the error."""
        (number,) = batch["item"].tolist()
        done = error = ""
        try:
            done = self._scorer.score(self._plan.all_files[number], lambda *_: None).model_dump_json()
        except InputError as raised:
            error = str(raised)
        return {"done": np.array([done]), "error": np.array([error])}


def score_with_ray(plan: Plan, advance: Advance) -> Generator[Done]:
    """Score the files of a plan in actors of Ray Data; results come in the order of completion."""
    FileScorer(plan, device="cpu", threads=1)  # reports a fault of the bundle before Ray starts
    workers = plan.config.workers
    if plan.files:
        with ray_cluster(math.ceil(workers.number * workers.cpus) + 1):  # one more for Ray Data's own tasks
            yield from _results(plan, advance)


def _results(plan: Plan, advance: Advance) -> Generator[Done]:
    import ray  # imported late: many processes never use Ray

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the errors that it logs are raised too
    whose = f"{plan.config.name}: the process that scored a file with it"
    with plain_errors(whose, "lower docs_per_batch, or give each of the workers more cpus"):
        for block in ray_internals.blocks(_dataset(plan)):
            for row in ray.get(block).to_pylist():
                if row["error"]:
                    raise InputError(row["error"])
                done = Done.model_validate_json(row["done"])
                advance(done.counts.documents)
                yield done


def _dataset(plan: Plan) -> Any:
    """A Ray data set of the actors' results for the numbers of the files."""
    import ray.data
    from ray.util.annotations import RayDeprecationWarning

    workers, n = plan.config.workers, len(plan.all_files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)  # for the only way to set max_task_retries
        dataset = ray.data.from_items(list(range(n)), override_num_blocks=n).map_batches(
            _Actor,
            fn_constructor_args=(plan, storage.held()),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers.number, n)),
            num_cpus=workers.cpus,
            num_gpus=workers.gpus or None,
            max_task_retries=_RETRIES,  # by default a file that always kills its process is tried forever
        )
    dataset.context.enable_progress_bars = False
    return dataset


def score(config: ScoreConfig, out: str, *, report: Report) -> Counts:
    """Score the periods that are not up to date, and commit each to `out/period=P`; see `ltrscale.data.dataset.scores`.

    Args:
        config: see `ScoreConfig`.
        out: URL of the directory.
        report: receives the counts of each period when it is committed, and their totals at the end.

    Returns:
        Groups and documents that this call scored; all groups count as labelled.

    Raises:
        InputError: the bundle or the data are missing, do not fit each other, or differ from their manifests; the
            bundle cannot score, or gives a score that is no finite float32.
    """
    start = time.monotonic()
    plan = make_plan(config, out)
    total = total_of([])
    with (
        progress("score", counts_in(plan.all_files).documents) as advance,
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
    """Whether the scores of every period are up to date with the bundle and the data; logs it if so.

    Raises:
        InputError: as `score`, before the bundle is opened.
    """
    plan = make_plan(config, out)
    if not plan.files:
        log.info("score: %s is up to date (%d periods)", out, plan.n_current)
    return not plan.files


class _Periods:
    """Takes over files of scores as they arrive, and commits a period with its last file.

    A context manager: files of periods that are not committed at its end are deleted.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._open: dict[str, tuple[storage.Commit, dict[str, Done]]] = {}

    def __enter__(self) -> "_Periods":
        return self

    def __exit__(self, *error: Any) -> None:
        stack = ExitStack()  # which exits all commits even if one of them fails
        for commit, _ in self._open.values():
            stack.push(commit)
        stack.__exit__(*error)

    def take(self, done: Done) -> Counts | None:
        """Take over a file; returns the counts of its period if this file completed it, else None."""
        period, files = done.period, self._plan.files[done.period]
        if period not in self._open:
            url = period_url(self._plan.out, period)
            self._open[period] = storage.Commit(url, manifest=storage.HIDDEN_MANIFEST), {}
        commit, there = self._open[period]
        commit.adopt([storage.Placed(done.file.path, done.file.bytes, done.file.sha256)])
        there[done.file.data] = done
        if len(there) < len(files):
            return None
        counts, listed = total_of(of_file.counts for of_file in there.values()), counts_in(files)
        if counts[:2] != listed[:2]:  # not the third, for labelled groups: all scored groups count as labelled
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
            layout=self._plan.config.layout,
            meta=self._plan.config.meta,
        )
        with commit:
            commit.finish(manifest.model_dump(mode="json"))
        storage.withdraw(commit.url, name=_EARLIER)
        del self._open[period]
        return counts


def _record(counts: Counts) -> dict[str, int]:
    return {"groups": counts.groups, "documents": counts.documents}
