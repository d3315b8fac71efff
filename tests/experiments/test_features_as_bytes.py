"""Networks, trees, scores and metrics do not depend on the form in which files hold features."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from dataset_columns import store_as_bytes

from ltrscale import config, storage
from ltrscale.data.dataset import selection
from ltrscale.experiments.pipeline import PipelineJob

WEEKS = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
FINETUNE = {"head_epochs": 1, "epochs": 2, "stream": {"docs_per_batch": 500, "streams": 2}}
PRETRAIN = {"network": {"encoder": {"width": 8, "blocks": 1}}, "epochs": 1}
METHODS = {
    "trees": {"kind": "gbdt", "gbdt": {"num_trees": 5, "num_threads": 1}},
    "network": {"kind": "neural", "pretrain": PRETRAIN, "finetune": FINETUNE},
}


@pytest.mark.nightly
def test_weights_trees_and_metrics_are_bit_equal(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "digest", lambda _: "the same order")  # which depends on the bytes of the files
    made = []
    for name in ("lists", "bytes"):
        data, out = tmp_path / name, tmp_path / f"of-{name}"
        shutil.copytree(synthetic_dataset, data)
        if name == "bytes":
            store_as_bytes(str(data))
        splits = {split: {"periods": periods} for split, periods in WEEKS.items()}
        values = {"out": str(out), "data": str(data), "splits": splits, "methods": METHODS}
        config.validate(PipelineJob, {**values, "evaluate": {"baseline": None, "resamples": 100}}, "test").run()
        files = {
            path.relative_to(out): path for path in out.rglob("model/*") if path.suffix in (".safetensors", ".txt")
        }
        contents = {place: storage.sha256(path) for place, path in files.items()}
        made.append((contents, pq.read_table(out / "evaluation" / "groups.parquet").to_pylist()))
    assert len(made[0][0]) >= 2
    assert made[0][0] == made[1][0]
    assert repr(made[0][1]) == repr(made[1][1])  # NaN is not NaN
