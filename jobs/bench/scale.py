"""How plans, selections and additions grow with the row groups of a data set: 10^4, 10^5 and 10^6 of them.

The data sets are manifests alone: a hundredth as many periods as row groups, a tenth as many files. Nothing here opens
a data file. Each work runs in a process of its own, after the same work on a small data set.
"""

import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from jobs.bench.measure import Row, apart, plain_features, quiet, resident_peak, select_all
from ltrscale import storage
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import Manifest, one_view, open_dataset
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.scores import PeriodScores, ScoreFile, find_scores, period_url
from ltrscale.data.dataset.selection import scored_row_groups, select
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.data.dataset.writer import commit_dataset
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.parts import PartT
from ltrscale.evaluation.measure.measuring import Measuring, values_of
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.measure.slices import Slicer
from ltrscale.ingest.additions import with_addition

SIZES = (10_000, 100_000, 1_000_000)
_SMALL = 1000
_FEATURES = plain_features(12)
_OF_FILE, _FILES_OF_PERIOD = 10, 10
_GROUPS, _DOCUMENTS, _LABELLED = 1000, 12_000, 10
_STREAMS, _WORKERS = 256, 64
_PERIODS_ADDED = 20
_PARTS = 100
_NO_OUTLIERS = OutlierDetector(data="", features=(), gap=None, share=0, rules={})

T = TypeVar("T")


class _Cost(NamedTuple):
    """CPU seconds of a work, and the growth of its process's peak memory in bytes."""

    seconds: float
    memory: int
    note: str


def bench_scale(*, sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    """A row for each work and size, with its growth from one size to the next."""
    with storage.scratch.directory() as folder:
        urls = {size: f"{folder}/{size}" for size in (_SMALL, *sizes)}
        for size, url in urls.items():
            write_manifests(url, size)
        for name, (work, seconds, megabytes) in WORKS.items():
            costs = [apart(_measured, work, urls[_SMALL], urls[size]) for size in sizes]
            yield from _rows(name, sizes, costs, seconds, megabytes)


def _rows(name: str, sizes: Sequence[int], costs: Sequence[_Cost], seconds: float, megabytes: int) -> Iterator[Row]:
    """The figures of each size; the last has the goals: at most 1.2 times the growth of the data, and in bounds."""
    for number, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        growth = None
        if number:
            growth = cost.seconds / max(costs[number - 1].seconds, 0.05) / (size / sizes[number - 1])
        took, title = f"{cost.seconds:.2f} s, {cost.memory / 2**20:.0f} MB", f"{name}, {size:,} row groups"
        last = size == sizes[-1]
        note = f"time by row groups; {cost.note}"
        yield Row(title, growth, took, note=note, goal=1.2 if last else None, at_least=False)
        if last:
            yield Row(f"{title}: seconds", cost.seconds, took, goal=seconds, at_least=False)
            yield Row(f"{title}: MB", cost.memory / 2**20, took, goal=megabytes, at_least=False)


def write_manifests(url: str, row_groups: int) -> None:
    """A data set directory with a manifest of this many row groups, and no data, and the manifests of its scores."""
    files = _files(row_groups // _OF_FILE, first=0)
    with storage.Commit(url) as commit:
        commit_dataset(commit, Manifest(features=_FEATURES, files=files, made_by={"stage": "prepare", "config": {}}))
    for period, of_period in files.by_period.items():
        scores = [
            ScoreFile(path=path.rpartition("/")[2], bytes=1, sha256=sha256, data=path, data_sha256=sha256)
            for path, sha256 in zip(of_period.paths, of_period.sha256, strict=True)
        ]
        counts = {"groups": 1, "documents": 1, "bundle_hash": "0" * 64, "made_by": {}, "layout": "scores", "meta": ()}
        manifest = PeriodScores(period=period, files=tuple(scores), **counts)
        place = storage.join(period_url(f"{url}-scores", period), storage.HIDDEN_MANIFEST)
        storage.write_bytes(place, manifest.model_dump_json().encode())
    selection = select_all(url)
    storage.write_bytes(f"{url}-selection", pickle.dumps(selection))  # what a worker receives


def _files(n: int, *, first: int) -> DataFiles:
    numbers = range(first, first + n)
    periods = [f"2026-{i // _FILES_OF_PERIOD:06}" for i in numbers]
    paths = [f"period={period}/part-{i:06}-00000-0123abcd.parquet" for i, period in zip(numbers, periods, strict=True)]
    counts_R3 = np.tile(np.array([[_GROUPS, _DOCUMENTS, _LABELLED]], np.int64), (n * _OF_FILE, 1))
    return DataFiles(
        paths,
        periods,
        np.full(n, 64 << 20),
        [f"{i:064x}" for i in numbers],
        np.full(n, 20),
        np.arange(n + 1) * _OF_FILE,
        counts_R3,
    )


def _measured(work: Callable[[str], str], small: str, url: str) -> _Cost:
    with quiet():
        work(small)
        memory, start = resident_peak(), time.process_time()
        note = work(url)
    return _Cost(time.process_time() - start, resident_peak() - memory, note)


def _open(url: str) -> str:
    manifest = open_dataset(url).manifest
    return f"{len(manifest.files):,} files, hash {manifest.hash[:6]}"


def _select(url: str) -> str:
    sent = pickle.dumps(select_all(url))
    return f"{len(sent) / 2**20:.0f} MB for a worker"


def _select_labelled(url: str) -> str:
    split = Split(data=(url,), labelled_fraction=0.5)
    return f"{select(split, labelled=True).n_groups:,} groups"


class _Read(Exception):  # noqa: N818 - the end of a plan, and no error
    """Reading would begin."""


def no_reader(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:  # noqa: ARG001
    """Read nothing, and end the work that would."""
    raise _Read(f"{len(row_groups):,} row groups to read")


def _plan(url: str) -> str:
    """What a worker does before it reads: it receives the selection, and deals the row groups of an epoch."""
    selection = pickle.loads(storage.read_bytes(f"{url}-selection"))
    config = StreamConfig(streams=_STREAMS, docs_per_batch=_STREAMS * 8192)
    stream = GroupStream(selection, config, rank=0, world=_WORKERS, reader=no_reader)
    return until_read(stream.epoch(0))


def until_read(work: Iterator[object]) -> str:
    """Plan until `no_reader` is called; returns what it would have read."""
    try:
        next(work)
    except _Read as planned:
        return str(planned)
    raise AssertionError


def _add(url: str) -> str:
    """Add periods of one file each, one after the other."""
    written = 0
    for _ in range(_PERIODS_ADDED):
        dataset = open_dataset(url)
        files = _files(1, first=10**6 + len(dataset.manifest.files))
        new = Manifest(features=_FEATURES, files=files, made_by={"stage": "prepare", "config": {}})
        with storage.Commit(url) as commit:
            with commit.file(files.paths[0]) as path:
                path.touch()
            commit_dataset(commit, with_addition(dataset.manifest, new))
        written += storage.size(storage.join(url, storage.MANIFEST))
    return f"{written / _PERIODS_ADDED / 1024:.0f} kB of manifest a period"


def _splits(url: str) -> SplitsWithTest:
    """All periods but two are tested on."""
    first, second, third, *_, last = open_dataset(url).manifest.periods
    train, validation, test = (Split(data=(url,), periods=(text,)) for text in (first, second, f"{third}..{last}"))
    return SplitsWithTest(train=train, validation=validation, test=test)


def _check_splits(url: str) -> str:
    with one_view():
        check_disjoint(_splits(url))
    return "three splits"


def _plan_evaluation(url: str) -> str:
    """What an evaluation of scores does before it reads: it finds the test groups and their scores, and cuts parts."""
    with one_view():
        test, scores = _splits(url).test, f"{url}-scores"
        selection = select(test, labelled=True)
        measuring = Measuring(
            models=(scores,),
            scores={scores: scored_row_groups(scores, selection.row_groups)},
            slicer=Slicer({}, (), _NO_OUTLIERS, 1, frozenset(), stored=(), needs_features=False),
            metrics=partial(values_of, metrics={}, settings=EvaluateSettings()),
            features=selection.features,
            docs_per_batch=1,
        )
        return until_read(measuring.on(selection, _send))


def _send(function: Callable[[PartT], T], parts: Iterable[PartT]) -> Iterator[T]:
    """As a run in other processes, until they would read: it makes what it sends to them first."""
    sizes = [len(pickle.dumps((function, part))) for part in itertools.islice(parts, _PARTS)]
    raise _Read(f"{max(sizes) / 1024:.0f} kB to measure a part")


def _look_up(url: str) -> str:
    dataset = open_dataset(url)
    return f"{len(find_scores(f'{url}-scores', dataset, dataset.manifest.periods)):,} files"


WORKS: dict[str, tuple[Callable[[str], str], float, int]] = {
    "open": (_open, 2, 500),
    "select, and send to a worker": (_select, 2, 500),
    "select labelled groups": (_select_labelled, 2, 500),
    "plan an epoch in a worker": (_plan, 1, 200),
    "look up scores": (_look_up, 2, 500),
    "check that splits are apart": (_check_splits, 2, 500),
    "plan an evaluation of scores": (_plan_evaluation, 2, 500),
    f"add {_PERIODS_ADDED} periods": (_add, 2 * _PERIODS_ADDED, 500),
}
"""Each work, with the seconds and megabytes that it should stay below at the largest size."""
