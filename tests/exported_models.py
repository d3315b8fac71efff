"""Helpers for tests of exports."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from numpy.typing import NDArray

from ltrscale.bundle import BundleFacts, save_ranker
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.origin import read_as
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.models.features import fit_transform
from ltrscale.models.ranker import Architecture, Ranker
from ltrscale.trees.gbdt import GBDTJob

PERIODS = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "score_alone.py"


def score_alone(folder: Path, rows: Path) -> NDArray[np.float64]:
    """The scores that the script in docs/ prints, run where this package cannot be imported."""
    watch = (
        f"import runpy, sys; sys.argv = ['', {str(folder)!r}, {str(rows)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "assert not {'ltrscale', 'jobs', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", watch], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return np.array([float(line) for line in done.stdout.split()])


def last_rows(data: str, path: Path) -> None:
    """Write 200 raw rows of the last week of a prepared synthetic log as CSV."""
    log = sorted((Path(data).parent / "log").glob("*2026-W04*/*.parquet"))
    pandas.concat(map(pandas.read_parquet, log)).head(200).to_csv(path, index=False)


def other_weight(content: bytes) -> bytes:
    onnx: Any = pytest.importorskip("onnx")
    graph = onnx.load_from_string(content)
    weights = next(w for w in graph.graph.initializer if w.data_type == 1 and len(w.dims) == 2 and w.dims[0] > 1)
    weights.raw_data = (np.frombuffer(weights.raw_data, np.float32) + np.float32(0.01)).tobytes()
    return bytes(graph.SerializeToString())


def trees(folder: Path, data: str, kind: str, *, leave_out: tuple[str, ...] = (), **settings: Any) -> str:
    splits = {name: {"data": data, "periods": periods} for name, periods in PERIODS.items()}
    splits["train"] |= {"leave_out": leave_out}  # type: ignore[dict-item]
    gbdt = {"kind": kind, "num_trees": 12, "num_threads": 1, **settings}
    validate(GBDTJob, {"out": str(folder), "splits": splits, "gbdt": gbdt}, "test").run()
    return str(folder)


def full(rows: int, seed: int) -> list[tuple[Any, Any]]:
    """Groups without a missing value."""
    generator = np.random.default_rng(seed)
    x_NF = np.round(generator.normal(size=(rows, 10, 3)), 1).astype(np.float32)
    return [(x_LF, (x_LF[:, 0] > 0.5).astype(np.float32)) for x_LF in x_NF]


def network(data: str, seed: int = 0, **parts: Any) -> Ranker:
    """A ranker with fresh weights, for the features of a data set."""
    features = open_dataset(data).manifest.features
    whole = {"transform": {}, "head": {"layers": 1}, **parts}
    architecture = validate(Architecture, whole, "test")
    batches = iterate(select(Split(data=(data,), periods=("2026-W01",)), labelled=False), docs_per_batch=1000)
    kinds = [feature.kind for feature in features]
    torch.manual_seed(seed)
    of_batches, bins = (batch.features_NF for batch in batches), architecture.numbers.fitted_bins
    ranker = Ranker(architecture, fit_transform(of_batches, kinds, architecture.transform, bins=bins))
    for parameter in ranker.parameters():  # embeddings of unknown categories start at 0, where errors would hide
        torch.nn.init.normal_(parameter, std=0.3)
    return ranker.eval()


def saved(folder: Path, data: str, model: Any) -> str:
    dataset = open_dataset(data)
    manifest = dataset.manifest
    about = BundleFacts(
        config={},
        features=manifest.features,
        dataset_hash=manifest.hash,
        metrics={},
        made_by={},
        read_as=read_as(dataset),
    )
    save_ranker(str(folder), model, about)
    return str(folder)
