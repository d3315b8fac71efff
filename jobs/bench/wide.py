"""Wide data: thousands of features and lists of 10,000 documents, each stage against the same values in narrow rows.

Each stage runs in a process of its own. Its memory is what the peak adds to the imports, as a multiple of the features
of the longest list; its time is that of a value, as a multiple of the same stage's on narrow data.

Shapes: N documents, F features.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jobs.bench.device import Repeated
from jobs.bench.measure import Row, apart, resident_peak, run_stage
from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, SplitsWithTest
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
_PERIODS = ("train", "validation", "test")


class Cost(NamedTuple):
    """What a stage took: bytes beyond the imports, and processor time."""

    peak: int
    seconds: float


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
    with storage.scratch.directory() as folder:
        wide, narrow = (costs(folder / str(shape.features), shape) for shape in (WIDE, NARROW))
    for stage in GOALS:
        yield from _rows(stage, wide[stage], narrow[stage])
    yield from table_rows(TABLE_ROWS)


def costs(folder: Path, shape: Shape) -> dict[str, Cost]:
    """What each stage takes for lists of a shape."""
    folder.mkdir()
    for period, its_shape in zip(_PERIODS, (shape, shape._replace(long=0), shape._replace(long=0)), strict=True):
        write_log(folder / f"{period}.parquet", its_shape, seed=len(period))
    prepare = partial(_prepare, features=shape.features)
    works: tuple[Callable[[str], object], ...] = (prepare, _fit, _pretrain, _grow, _score)
    return {stage: apart(_measured, work, str(folder)) for stage, work in zip(GOALS, works, strict=True)}


def _measured(work: Callable[[str], object], folder: str) -> Cost:
    torch.set_num_threads(1)
    before, start = resident_peak(), time.process_time()
    work(folder)
    return Cost(resident_peak() - before, time.process_time() - start)


def _rows(stage: str, wide: Cost, narrow: Cost) -> Iterator[Row]:
    memory_goal, time_goal = GOALS[stage]
    note = f"{WIDE.features:,} features, the longest list {WIDE.length:,} documents; {narrow.peak / 2**20:.0f} MB with "
    note += f"{NARROW.features} features"
    yield Row.memory(
        f"wide {stage}: peak memory / longest list", wide.peak, WIDE.longest_bytes, goal=memory_goal, note=note
    )
    each, of_narrow = wide.seconds / WIDE.values, narrow.seconds / NARROW.values
    yield Row(
        name=f"wide {stage}: time a value / narrow",
        figure=each / of_narrow,
        goal=time_goal,
        at_least=False,
        ours=f"{1e9 * each:.0f} CPU-ns",
        peer=f"{1e9 * of_narrow:.0f} CPU-ns",
        note=f"{WIDE.values / 1e6:.0f} M values, against {NARROW.features} features",
    )


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


def _prepare(folder: str, features: int) -> None:
    inputs = [{"path": f"{folder}/{period}.parquet", "period": period} for period in _PERIODS]
    columns = {"query": "query", "item": None, "label": "label", "features": [f"f{i}" for i in range(features)]}
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
    took, dense_took = (f"{1000 * seconds:.0f} CPU-ms" for seconds in (host_s, dense_s))
    name = "a step with a table on the host / with a dense one"
    yield Row(name, host_s / dense_s, took, dense_took, note, goal=0.5, at_least=False)
    sent_mb, dense_mb = (f"{size / 1e6:.2f} MB" for size in (sent, all_rows))
    name = "bytes that a worker sends of a table in a step: used rows / dense gradient"
    yield Row(name, sent / all_rows, sent_mb, dense_mb, note, goal=0.01, at_least=False)


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
