"""A small data set in which a category names each document, and nothing else distinguishes documents under noise."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from preparing import prepare

from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.training.pretrain import PretrainConfig

COLUMNS = {"query": "q", "item": "d", "features": ["f_*"], "categorical": ["c_*"]}


def make(folder: Path) -> str:
    """120 groups of 4 to 9 documents: `c_id` is unique in each, `f_place` counts its documents."""
    rng = np.random.default_rng(0)
    rows = []
    for query in range(120):
        ids = rng.permutation(40)
        for i in range(int(rng.integers(4, 10))):
            values = {"f_age": float(rng.normal()), "f_pop": float(rng.normal()), "f_place": float(i)}
            rows.append({"q": f"q{query}", "d": f"d{i}", **values, "c_id": int(ids[i]), "c_os": int(rng.integers(3))})
    pq.write_table(pa.Table.from_pylist(rows), folder / "log.parquet")
    source = {"kind": "items", "columns": COLUMNS}
    out = str(folder / "data")
    prepare(PrepareConfig.model_validate({"inputs": str(folder / "log.parquet"), "source": source}), out)
    return out


def config(method: str = "simclr_rank", epochs: int = 25, **mask: Any) -> PretrainConfig:
    """A pretraining under noise that hides all numbers, `f_place` included."""
    return PretrainConfig.model_validate(
        {
            "method": {"kind": method},
            "augment": {"kind": "gaussian", "scale": 3},
            "mask": {"columns": {"f_place": 1}, **mask},
            "network": {"encoder": {"kind": "mlp", "hidden": [32]}, "transform": {"numeric": "standard"}},
            "epochs": epochs,
            "stream": {"docs_per_batch": 200, "streams": 1},
            "optimizer": {"learning_rate": 1e-2},
        }
    )
