"""A stored data set of version 1, with features in the column order of its log and one row group per query group."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import prepare

HERE = str(Path(__file__).parent / "version-1")
LOG = [
    {"q": f"q{10 * day + q}", "d": f"d{i}", "y": float(i % 3), "day": f"2026-03-0{day}"}
    | {"price": float(day * 100 + q * 10 + i), "age": None if i == 1 else q + 0.5, "country": ["de", "fr"][i % 2]}
    for day in (1, 2)
    for q in range(5)
    for i in range(3)
]
"""What it was made of."""


def test_a_data_set_of_version_1_is_read() -> None:
    manifest = open_dataset(HERE).manifest
    assert [feature.name for feature in manifest.features] == ["price", "age", "country"]
    assert (manifest.periods, manifest.counts()) == (["2026-03-01", "2026-03-02"], (10, 30, 10))
    selection = select(Split(data=(HERE,), periods=("2026-03-02",)), labelled=True)
    (groups,) = iterate(selection)
    assert groups.labels_N is not None
    assert groups.labels_N.tolist() == [row["y"] for row in LOG[15:]]
    assert groups.features_NF[:, 0].tolist() == [row["price"] for row in LOG[15:]]
    assert groups.features_NF[:, 1].isnan().tolist() == [row["age"] is None for row in LOG[15:]]
    assert len(set(groups.features_NF[:, 2].tolist())) == 2


def test_a_data_set_of_version_1_is_added_to(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    shutil.copytree(HERE, out)
    before = open_dataset(out).manifest
    rows = [row | {"q": f"new-{row['q']}", "day": "2026-03-03"} for row in LOG]
    names = sorted(LOG[0])
    text = "\n".join(",".join("" if row[n] is None else str(row[n]) for n in names) for row in rows)
    (tmp_path / "log.csv").write_text(",".join(names) + "\n" + text + "\n")
    columns = {"query": "q", "item": "d", "label": "y", "features": ["*"], "categorical": ["country"]}
    source = {"kind": "items", "columns": columns | {"time": "day", "period": "day"}}
    config = PrepareConfig.model_validate({"inputs": str(tmp_path / "log.csv"), "source": source, "add": True})
    after = prepare(config, out).manifest
    assert (after.features, after.counts()) == (before.features, (20, 60, 20))
    assert set(before.files) < set(after.files)
    (file,) = set(after.files) - set(before.files)
    table = pq.ParquetFile(storage.join(out, file.path)).read()
    assert table["gid"].to_pylist() == list(range(10, 20))
    features = table["features"].combine_chunks().flatten().to_pylist()
    assert features[0::3] == [row["price"] for row in LOG]
