"""What grows with the data: with the width of rows and the length of lists, and with the number of row groups.

Wide data: thousands of features and lists of 10,000 documents, each stage against the same values in narrow rows, in a
process of its own. Its memory is what the peak adds to the imports, as a multiple of the features of the longest list;
its time is that of a value, as a multiple of the same stage's on narrow data.

Many row groups: plans, selections and additions at 10^4, 10^5 and 10^6 of them. The data sets are manifests alone: a
hundredth as many periods as row groups, a tenth as many files. Nothing there opens a data file.

Shapes: N documents, F features.
"""

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jobs.bench.device import Repeated
from jobs.bench.measure import Cost, Row, costs, plain_features, run_stage, select_all
from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import Manifest, one_view, open_dataset
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.scores import PeriodScores, ScoreFile, find_scores, period_url
from ltrscale.data.dataset.selection import scored_row_groups, select
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.data.dataset.writer import commit_dataset
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.plan import PartT
from ltrscale.evaluation.measure.measuring import Measuring, values_of
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.measure.slices import Slicer
from ltrscale.ingest.additions import with_addition
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureKind, FeatureTransform, TransformConfig
from ltrscale.pretext.augment import SwapInGroupConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer
from ltrscale.processor import cpu_seconds
from ltrscale.scoring.score import ScoreJob
from ltrscale.training.fitting import fit
from ltrscale.training.loop import Trainer
from ltrscale.training.pretrain import PretrainConfig, PretrainJob
from ltrscale.training.settings import OptimizerConfig
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob

_SHORT, _ROW_GROUP = 20, 1 << 21
_ENCODER = {"kind": "mlp", "hidden": [64, 32]}


class Shape(NamedTuple):
    """The lists of a log: `long` ones of `length` documents among `short` ones of 20."""

    features: int
    length: int
    long: int
    short: int

    @property
    def values(self) -> int:
        """Feature values of all documents."""
        return self.features * (self.long * self.length + self.short * _SHORT)

    @property
    def longest_bytes(self) -> int:
        """Bytes of the features of the longest list."""
        return 4 * self.features * self.length


WIDE, NARROW = Shape(5000, 10_000, 1, 50), Shape(50, 10_000, 100, 5000)
_SMALL_SHAPE = Shape(10, 100, 1, 50)
FEW = NARROW._replace(long=10, short=500)
"""For pretraining, whose contrast takes seconds for each long list, however narrow."""
_PERIODS = ("train", "validation", "test")


GOALS = {
    "prepare": (12, 3),
    "statistics": (7, 1.5),
    "pretraining": (16, 1.5),
    "trees": (10, 3),
    "scoring": (8, 3),
}
"""Of each stage: memory over the longest list, and time a value over that of narrow data."""


def bench_wide() -> Iterator[Row]:
    """Prepare, statistics, pretraining, trees and scoring of wide data, and a table of rows on the host."""
    others = [stage for stage in GOALS if stage != "pretraining"]
    with storage.scratch.directory() as folder:
        wide = costs_of_stages(folder / "wide", WIDE)
        narrow = costs_of_stages(folder / "narrow", NARROW, others)
        few = costs_of_stages(folder / "few", FEW, ["prepare", "pretraining"])
    for stage in others:
        yield from _rows(stage, wide[stage], narrow[stage], NARROW)
    yield from _rows("pretraining", wide["pretraining"], few["pretraining"], FEW)
    yield from table_rows(TABLE_ROWS)


def costs_of_stages(folder: Path, shape: Shape, stages: Iterable[str] = GOALS) -> dict[str, Cost]:
    """What stages take for lists of a shape."""
    works = {"prepare": _prepare, "statistics": _fit, "pretraining": _pretrain, "trees": _grow, "scoring": _score}
    folders = folder / "small", folder / "whole"
    for place, written in zip(folders, (_SMALL_SHAPE, shape), strict=True):
        place.mkdir(parents=True)
        for period in _PERIODS:
            its_shape = written if period == "train" else written._replace(long=0)
            write_log(place / f"{period}.parquet", its_shape, seed=len(period))
    return {stage: costs(works[stage], *map(str, folders))[-1] for stage in stages}


def _rows(stage: str, wide: Cost, narrow: Cost, shape: Shape) -> Iterator[Row]:
    memory_goal, time_goal = GOALS[stage]
    of_narrow = f"{narrow.memory / 2**20:.0f} MB with {shape.features} features"
    note = f"{WIDE.features:,} features, the longest list {WIDE.length:,} documents; {of_narrow}"
    yield Row.memory(
        f"wide {stage}: peak memory / longest list", wide.memory, WIDE.longest_bytes, goal=memory_goal, note=note
    )
    name = f"wide {stage}: time a value / narrow"
    note = f"{WIDE.values / 1e6:.0f} M values, against {shape.values / 1e6:.0f} M of {shape.features} features"
    each, narrow_each = 1e9 * wide.seconds / WIDE.values, 1e9 * narrow.seconds / shape.values
    yield Row.ratio(name, each, narrow_each, "{:.0f} CPU-ns", goal=time_goal, note=note)


def write_log(path: Path, shape: Shape, seed: int) -> None:
    """Write a Parquet file with a row an item, in row groups of 8 MB."""
    rng, rows = np.random.default_rng(seed), max(1, _ROW_GROUP // shape.features)
    lengths_Q = rng.permutation([_SHORT] * shape.short + [shape.length] * shape.long)
    queries_N = np.repeat(np.arange(len(lengths_Q)), lengths_Q)
    x_NF = rng.lognormal(size=(rows, shape.features)).astype(np.float32)
    x_NF[rng.random(x_NF.shape) < 0.3] = 0
    fields = [("query", pa.string()), ("label", pa.int64()), *((f"f{i}", pa.float32()) for i in range(shape.features))]
    with pq.ParquetWriter(path, pa.schema(fields), compression="none", use_dictionary=False) as writer:
        for first in range(0, len(queries_N), rows):
            query_N = queries_N[first : first + rows]
            columns = x_NF[rng.permutation(rows)[: len(query_N)]].T
            plain = [pa.array(query_N).cast(pa.string()), pa.array(rng.integers(0, 5, len(query_N)))]
            writer.write_table(pa.table([*plain, *map(pa.array, np.ascontiguousarray(columns))], pa.schema(fields)))


def _prepare(folder: str) -> None:
    _, _, *features = pq.read_schema(f"{folder}/train.parquet").names  # after the query and the label
    inputs = [{"path": f"{folder}/{period}.parquet", "period": period} for period in _PERIODS]
    columns = {"query": "query", "item": None, "label": "label", "features": features}
    source = {"kind": "items", "columns": columns}
    config = PrepareConfig.model_validate({"inputs": inputs, "source": source})
    run_stage(PrepareJob(out=f"{folder}/data", prepare=config))


def _split(folder: str, period: str) -> Split:
    return Split(data=(f"{folder}/data",), periods=(period,))


def _fit(folder: str) -> None:
    fit(select(_split(folder, "train"), labelled=False), NetworkConfig())


def _pretrain(folder: str) -> None:
    config = PretrainConfig.model_validate({"epochs": 1, "device": "cpu", "network": {"encoder": _ENCODER}})
    run_stage(PretrainJob(out=f"{folder}/pretrained", train=_split(folder, "train"), pretrain=config))


def _grow(folder: str) -> None:
    splits = SplitsWithTest(**{period: _split(folder, period) for period in _PERIODS})
    config = LightGBMConfig(num_trees=3, num_threads=1, early_stopping_rounds=None)
    run_stage(GBDTJob(out=f"{folder}/gbdt", splits=splits, gbdt=config))


def _score(folder: str) -> None:
    run_stage(ScoreJob(data=f"{folder}/data", bundle=f"{folder}/gbdt", out=f"{folder}/scores", device="cpu"))


TABLE_ROWS = 2_000_000
_DIMENSIONS, _LISTS, _NUMBERS = 16, 400, 10


def table_rows(rows: int, repeats: int = 5) -> Iterator[Row]:
    """A training step with an embedding table on the host, by the rows that it uses, against the dense table."""
    on_host, dense = (_trainer(rows, host_rows) for host_rows in (0, None))
    steps = on_host.epoch(), dense.epoch()
    host_s, dense_s = cpu_seconds(*(partial(next, each) for each in steps), repeats=repeats)
    used = on_host.rows.ids(_lists())
    assert used is not None
    sent, all_rows = len(used) * (8 + 4 * _DIMENSIONS), 4 * rows * _DIMENSIONS
    note = f"{rows:,} rows of {_DIMENSIONS}, Adam; {_LISTS * _SHORT:,} documents use {len(used):,} rows"
    name = "a step with a table on the host / with a dense one"
    yield Row.ratio(name, host_s / 1e-3, dense_s / 1e-3, "{:.0f} CPU-ms", goal=0.5, note=note)
    name = "bytes that a worker sends of a table in a step: used rows / dense gradient"
    yield Row.ratio(name, sent / 1e6, all_rows / 1e6, "{:.2f} MB", goal=0.01, note=note)


def _lists() -> QueryGroups:
    """Lists of 20 documents with ten numbers and a category of 2^24 codes."""
    generator, documents = torch.Generator().manual_seed(0), _LISTS * _SHORT
    x_NF = torch.randn(documents, _NUMBERS + 1, generator=generator)
    x_NF[:, -1] = torch.randint(1 << 24, (documents,), generator=generator).float()
    return QueryGroups(x_NF, torch.arange(_LISTS + 1) * _SHORT, ids_Q=torch.arange(_LISTS))


def _trainer(rows: int, host_rows: int | None) -> Trainer:
    """Pretrains on the same lists in each step, with a table of so many rows."""
    torch.manual_seed(0)
    config = TransformConfig(hash_rows=rows, host_rows=host_rows)
    kinds: list[FeatureKind] = ["categorical" if i == _NUMBERS else "numeric" for i in range(_NUMBERS + 1)]
    transform = FeatureTransform(config, kinds, [rows + 1], hashed=[_NUMBERS])
    encoder = {**_ENCODER, "embedding": _DIMENSIONS}
    network = NetworkConfig.model_validate({"transform": config.model_dump(), "encoder": encoder})
    model = Pretrainer(transform, network, SimCLRRankConfig(), SwapInGroupConfig())
    return Trainer(model, model, Repeated(_lists()), OptimizerConfig(), epochs=1, seed=0)  # type: ignore[arg-type]


SIZES = (10_000, 100_000, 1_000_000)
_SMALL = 1000
_STORED = plain_features(12)
_OF_FILE, _FILES_OF_PERIOD = 10, 10
_GROUPS, _DOCUMENTS, _LABELLED = 1000, 12_000, 10
_STREAMS, _WORKERS = 256, 64
_PERIODS_ADDED = 20
_PARTS = 100
_NO_OUTLIERS = OutlierDetector(data="", features=(), gap=None, share=0, rules={})

T = TypeVar("T")


def bench_scale() -> Iterator[Row]:
    """A row for each work and size, with its growth from one size to the next."""
    with storage.scratch.directory() as folder:
        urls = {size: f"{folder}/{size}" for size in (_SMALL, *SIZES)}
        for size, url in urls.items():
            write_manifests(url, size)
        for name, (work, seconds, megabytes) in WORKS.items():
            small, *others, large = urls.values()
            _, *taken = costs(work, small, *others)
            yield from _rows_by_size(name, [*taken, costs(work, small, large)[-1]], seconds, megabytes)


def _rows_by_size(name: str, taken: Sequence[Cost], seconds: float, megabytes: int) -> Iterator[Row]:
    """The figures of each size; the last has the goals: at most 1.2 times the growth of the data, and in bounds."""
    for number, (size, cost) in enumerate(zip(SIZES, taken, strict=True)):
        growth = None
        if number:
            growth = cost.seconds / max(taken[number - 1].seconds, 0.05) / (size / SIZES[number - 1])
        took, title = f"{cost.seconds:.2f} s, {cost.memory / 2**20:.0f} MB", f"{name}, {size:,} row groups"
        last = size == SIZES[-1]
        note = f"time by row groups; {cost.result}"
        yield Row(title, growth, took, note=note, goal=1.2 if last else None, at_least=False)
        if last:
            yield Row(f"{title}: seconds", cost.seconds, took, goal=seconds, at_least=False)
            yield Row(f"{title}: MB", cost.memory / 2**20, took, goal=megabytes, at_least=False)


def write_manifests(url: str, row_groups: int) -> None:
    """A data set directory with a manifest of this many row groups, and no data, and the manifests of its scores."""
    files = _files(row_groups // _OF_FILE, first=0)
    with storage.Commit(url) as commit:
        commit_dataset(commit, Manifest(features=_STORED, files=files, made_by={"stage": "prepare", "config": {}}))
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
        new = Manifest(features=_STORED, files=files, made_by={"stage": "prepare", "config": {}})
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
