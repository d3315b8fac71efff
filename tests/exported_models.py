"""Helpers for tests of exports."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from numpy.typing import NDArray

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
