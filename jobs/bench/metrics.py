"""NDCG against ranx, every other metric against NDCG, on lists with the lengths of web search; whole evaluations.

The scores of an evaluation are committed: its speed against a bare scan of the same files, and its memory, for short
lists of few features, lists of about 120 documents with the features of web search, and very many tiny lists.

Shapes: N documents, Q groups.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pyarrow import dataset as arrow_dataset

from jobs.bench.measure import (
    LABEL_SHARES,
    N_FEATURES,
    Row,
    apart,
    group_table,
    mslr_offsets,
    resident_peak,
    run_stage,
    write_tables,
)
from ltrscale import storage
from ltrscale.bundle import FeatureOrder
from ltrscale.config import members, validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.evaluation.measure.evaluate import evaluate
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.processor import cpu_seconds
from ltrscale.ranking.choices import MetricConfig
from ltrscale.ranking.metric import Metric
from ltrscale.ranking.metrics import NDCGConfig, ndcg
from ltrscale.scoring.score import ScoreJob
from ltrscale.training.untrained import FeatureJob

GROUPS = 2_000


def bench_metrics() -> Iterator[Row]:
    """NDCG@10 against ranx, each other metric against NDCG@10, and the time of evaluations of committed scores."""
    yield _against_ranx()
    yield from (measure(cls) for cls in members(MetricConfig) if cls is not NDCGConfig)
    yield from bench_committed()


def _against_ranx() -> Row:
    """NDCG@10; ranx's objects are built, and its code compiled, before the clock starts."""
    name = f"NDCG@10 of {GROUPS:,} groups: documents per CPU second, ours / ranx"
    try:
        from ranx import Qrels, Run, evaluate
    except ImportError:
        return Row(name, None, note="not measured: ranx is not installed; pip install 'ltrscale[dev]'")

    offsets_Q1 = mslr_offsets(GROUPS)
    rng = np.random.default_rng(0)
    n = int(offsets_Q1[-1])
    scores = rng.permutation(n) / n  # no ties: ranx orders them arbitrarily
    labels = rng.choice(5, n, p=LABEL_SHARES)
    labels[offsets_Q1[:-1].numpy()] = 1  # one relevant document per group: ranx has no undefined groups

    def by_group(values: np.ndarray) -> dict[str, dict[str, float]]:
        lists = np.split(values, offsets_Q1[1:-1].numpy())
        return {f"q{q}": {f"d{d}": value for d, value in enumerate(group.tolist())} for q, group in enumerate(lists)}

    qrels, run = Qrels(by_group(labels)), Run(by_group(scores))
    scores_N, labels_N = torch.from_numpy(scores), torch.from_numpy(labels).float()
    batches = cycle([scores_N, scores_N + 1])  # in turn, for the ranking of the last batch is kept

    def ours() -> float:
        return float(ndcg(next(batches), labels_N, offsets_Q1, k=10).nanmean())

    def peer() -> float:
        return float(evaluate(qrels, run, "ndcg_burges@10", threads=1, save_results_in_run=False))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call compiles ranx's code, which emits warnings
        assert abs(ours() - peer()) < 1e-6
    return Row.speed(name, n, *cpu_seconds(ours, peer), goal=4.0, note="no ties, each batch ranked anew")


def measure(cls: type[Metric], groups: int = GROUPS) -> Row:
    """One metric, cut off at 10 if it can be, against NDCG@10."""
    metric, peer, generator = cls.made(k=10), NDCGConfig(k=10), torch.Generator().manual_seed(0)
    offsets_Q1 = mslr_offsets(groups)
    n = int(offsets_Q1[-1])
    lists = torch.randperm(n, generator=generator).double(), torch.randint(0, 5, (n,), generator=generator), offsets_Q1
    seconds = cpu_seconds(lambda: metric.values(*lists), lambda: peer.values(*lists))
    name = f"{metric.name} of {groups:,} groups: documents per CPU second, ours / our NDCG@10"
    return Row.speed(name, n, *seconds, note="no ties")


TEST_GROUPS = 200_000
_BLOCK = 1 << 11
TRAIN, VALIDATION, TEST = "2026-W00", "2026-W01", "2026-W02"


class Sizes(NamedTuple):
    """Lists of 1 to `longest` documents."""

    features: int
    longest: int


TINY, SHORT, SEARCH = Sizes(2, 7), Sizes(4, 20), Sizes(N_FEATURES, 240)


def bench_committed() -> Iterator[Row]:
    """Documents per CPU second of an evaluation with its report."""
    with storage.scratch.directory() as folder:
        yield from speed(folder, TEST_GROUPS, SHORT)
        yield from speed(folder, TEST_GROUPS // 40, SEARCH)


def bench_evaluation_memory() -> Iterator[Row]:
    """Peak memory of an evaluation at ten times as many groups."""
    with storage.scratch.directory() as folder:
        sizes = 5 * TEST_GROUPS, 50 * TEST_GROUPS
        small, large = (apart(_peak, _scored(folder, groups, TINY)) for groups in sizes)
        name = f"evaluating committed scores: peak memory, {sizes[1]:,} / {sizes[0]:,} groups"
        yield Row.memory(name, large, small, goal=1.1, note="the whole process, imports included")


def speed(folder: Path, groups: int, lists: Sizes) -> Iterator[Row]:
    """Evaluation of the scores of one model, against pyarrow's scan of all columns, and of those that it needs."""
    bench_folder = _scored(folder, groups, lists)
    files = [sorted(map(str, bench_folder.rglob(f"{part}/period={TEST}/*.parquet"))) for part in ("data", "scores")]
    test_files = [file for file in open_dataset(str(bench_folder / "data")).manifest.files if file.period == TEST]
    documents = sum(counts.documents for file in test_files for counts in file.row_groups)
    scans = {"all columns": (None, None), "the columns it reads": (["gid", "labels"], ["gid", "scores"])}
    works = [partial(_scan, files, columns) for columns in scans.values()]
    seconds, *of_scans = cpu_seconds(partial(_evaluate, bench_folder), *works, repeats=3)
    for which_columns, scan_s in zip(scans, of_scans, strict=True):
        name = f"evaluating committed scores / scan of the same files, {which_columns}"
        goal = 0.3 if which_columns == "all columns" else None
        note = f"{groups:,} lists of {documents / groups:.0f}, {lists.features} features, 1 model"
        yield Row.speed(name, documents, seconds, scan_s, goal=goal, note=note)


def _scored(folder: Path, groups: int, lists: Sizes) -> Path:
    """Write a data set with this many test groups, and scores of its documents; returns their directory."""
    place = folder / f"{groups}-{lists.features}"
    data, scores, bundle = (str(place / name) for name in ("data", "scores", "bundle"))
    _write_data(data, groups, lists)
    train, validation = (Split(data=(data,), periods=(period,)) for period in (TRAIN, VALIDATION))
    order = FeatureOrder(feature="f0")
    run_stage(FeatureJob(out=bundle, splits=Splits(train=train, validation=validation), order=order))
    run_stage(ScoreJob(data=data, bundle=bundle, out=scores, layout="scores", device="cpu"))
    return place


def _peak(place: Path) -> int:
    torch.set_num_threads(1)
    _evaluate(place)
    return resident_peak()


def _evaluate(place: Path) -> None:
    data = str(place / "data")
    values = {
        "scores": {"model": str(place / "scores")},
        "baseline": None,
        "splits": {
            "train": {"data": data, "periods": TRAIN},
            "validation": {"data": data, "periods": VALIDATION},
            "test": {"data": data, "periods": TEST},
        },
        "outliers": {"gap": None},
        "slices": {"long": "n_documents > 10", "relevant": "n_relevant > 1"},
    }
    with storage.scratch.directory() as out:
        evaluate(validate(EvaluateConfig, values, "bench"), str(out / "report"), made_by={}, threads=1)


def _scan(files: list[list[str]], columns: tuple[list[str] | None, ...]) -> int:
    checked = arrow_dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
    rows = 0
    for of_part, names in zip(files, columns, strict=True):
        scanned = arrow_dataset.dataset(of_part, format="parquet")
        for batch in scanned.to_batches(columns=names, use_threads=False, fragment_scan_options=checked):
            rows += len(batch)
    return rows


def _write_data(url: str, groups: int, lists: Sizes) -> None:
    """Write two small periods and the one of the test; the content of a block does not depend on its ids."""

    def blocks() -> Iterator[tuple[str, pa.Table]]:
        first = 0
        for period, periods_groups in ((TRAIN, 100), (VALIDATION, 100), (TEST, groups)):
            for start in range(0, periods_groups, _BLOCK):
                n = min(_BLOCK, periods_groups - start)
                rng = np.random.default_rng(n)
                lengths_Q = rng.integers(1, lists.longest + 1, n)
                features_NF = rng.normal(size=(lengths_Q.sum(), lists.features))
                yield period, group_table(first, lengths_Q, features_NF, rng.integers(0, 3, len(features_NF)))
                first += n

    write_tables(url, lists.features, blocks())
