"""The relabelling stage: it runs once, replaces nothing by mistake, and takes the papers' settings on real data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from command_lines import run_here

from ltrscale import config as configs
from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.split import Splits
from ltrscale.derive.relabelling import relabel as module
from ltrscale.derive.relabelling.relabel import RelabelJob
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import prepare

ROOT = Path(__file__).resolve().parents[3]
BINARY = {"kind": "binary_feedback", "tau": 2}


def job(data: str, out: Path | str, *steps: dict[str, Any], **settings: Any) -> RelabelJob:
    return validate(RelabelJob, {"data": data, "out": str(out), "relabel": {"steps": steps, **settings}}, "test")


def test_the_same_again_does_nothing_and_another_seed_replaces(synthetic_dataset: str, tmp_path: Path) -> None:
    first = job(synthetic_dataset, tmp_path / "out", BINARY)
    first.run()
    manifest = tmp_path / "out" / "manifest.json"
    stamp, content = manifest.stat().st_mtime_ns, manifest.read_text()
    first.run()
    assert manifest.stat().st_mtime_ns == stamp
    origin = json.loads(content)["made_by"]
    assert (origin["stage"], origin["config"]["seed"]) == ("relabel", 0)
    assert origin["inputs"] == {synthetic_dataset: open_dataset(synthetic_dataset).manifest.hash}
    job(synthetic_dataset, tmp_path / "out", BINARY, seed=1).run()
    assert open_dataset(str(tmp_path / "out")).manifest.hash != json.loads(content)
    listed = {file.path for file in open_dataset(str(tmp_path / "out")).manifest.files}
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.parquet")} == listed


def test_metrics_report_what_each_step_did(synthetic_dataset: str, tmp_path: Path) -> None:
    job(synthetic_dataset, tmp_path / "out", {"kind": "relevant_only"}, BINARY).run()
    records = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    counts = open_dataset(synthetic_dataset).manifest.counts()
    assert [record["step"] for record in records] == ["steps.0 (relevant_only)", "steps.1 (binary_feedback)"]
    assert records[0]["groups_read"] == counts.groups
    assert records[1]["groups_read"] == counts.groups - records[0]["groups_dropped"]
    assert records[0]["groups_dropped"] > 0


def test_stopped_half_way_leaves_the_old_data_set(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(synthetic_dataset, tmp_path / "out", BINARY).run()
    before = open_dataset(str(tmp_path / "out")).manifest

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_check", stop)
    with pytest.raises(KeyboardInterrupt):
        job(synthetic_dataset, tmp_path / "out", BINARY, seed=1).run()
    assert open_dataset(str(tmp_path / "out")).manifest == before
    assert all(storage.exists(storage.join(str(tmp_path / "out"), file.path)) for file in before.files)


def test_a_data_set_is_not_replaced_by_mistake(synthetic_dataset: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="out is the data set itself; choose another directory"):
        job(synthetic_dataset, synthetic_dataset + "/.", BINARY).run()
    columns = {"query": "query_id", "label": "label", "features": ["f_*"]}
    prepare(
        validate(
            PrepareConfig,
            {
                "inputs": f"{synthetic_dataset}/../log/*/*.parquet",
                "source": {"kind": "items", "columns": columns},
            },
            "test",
        ),
        str(tmp_path / "other"),
    )
    with pytest.raises(InputError, match="the output of prepare is there, which relabel would delete"):
        job(synthetic_dataset, tmp_path / "other", BINARY).run()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "jobs" / "configs").rglob("relabel-*.yaml")), ids=lambda path: path.stem
)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert configs.load(RelabelJob, str(path)).relabel.steps


def test_the_command_line_prints_one_line_for_a_mistake(synthetic_dataset: str, tmp_path: Path) -> None:
    given = (f"out={tmp_path}/out", f"data={synthetic_dataset}", "relabel.steps=[{kind: refine, feature: f_1}]")
    done = run_here("relabel", *(f"--set={setting}" for setting in given))
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("error: steps.0 (refine): there is no feature 'f_1'; the nearest")
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_public_settings_on_mq2008(shared_data: Path, tmp_path: Path) -> None:
    """BUYL23's and HOU24's simulations on the whole collection: shares of labels are those of the formulas."""
    fold = shared_data / "letor" / "MQ2008" / "Fold1"
    inputs = [{"path": str(fold / f"{name}.txt.gz"), "period": name} for name in ("train", "vali", "test")]
    source = {"kind": "letor", "n_features": 46}
    data = str(tmp_path / "data")
    prepare(validate(PrepareConfig, {"inputs": inputs, "source": source}, "test"), data)
    grades = np.concatenate(labels_of(data, "labels", "train", "vali", "test"))

    job(data, tmp_path / "implicit", {"kind": "implicit_feedback"}).run()
    manifest = open_dataset(str(tmp_path / "implicit")).manifest
    assert manifest.counts().groups == manifest.counts().labelled == 7840
    assert manifest.longest == 16
    lists = labels_of(str(tmp_path / "implicit"), "labels", "train", "vali", "test")
    best = np.array([max(r) for r in labels_of(str(tmp_path / "implicit"), "relevance", "train", "vali", "test")])
    top = np.array([max(y) for y in lists])
    assert not top[best == 0].any()  # rho(0) = 0: nobody acts
    bought = (top[best == 2] == 2).mean()
    assert 0.08 < bought <= 0.12  # kappa = .1, and the best document is always bought

    binary = {"kind": "binary_feedback", "tau": 1.5, "periods": ["train", "vali"], "unlabel_empty": False}
    job(data, tmp_path / "binary", binary).run()
    y = np.concatenate(labels_of(str(tmp_path / "binary"), "labels", "train", "vali"))
    r = np.concatenate(labels_of(str(tmp_path / "binary"), "relevance", "train", "vali"))
    for grade in (0, 1, 2):
        expected, n = 1 / (1 + np.exp(-4 * (grade - 1.5))), (r == grade).sum()
        assert abs(y[r == grade].mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / n)
    test = np.concatenate(labels_of(str(tmp_path / "binary"), "labels", "test"))
    assert sorted([*r.tolist(), *test.tolist()]) == sorted(grades.tolist())


def labels_of(url: str, column: str, *periods: str) -> list[list[float]]:
    """A column's lists in some periods."""
    files = [file.path for file in open_dataset(url).manifest.files if file.period in periods]
    return [y for path in files for y in pq.ParquetFile(f"{url}/{path}").read().column(column).to_pylist()]


@pytest.mark.parametrize("kept", [True, False], ids=["original there", "original gone"])
def test_a_relabelled_period_is_not_tested_under_its_old_labels(
    synthetic_dataset: str, tmp_path: Path, kept: bool
) -> None:
    middle, last = tmp_path / "middle", tmp_path / "last"
    job(synthetic_dataset, middle, BINARY).run()
    job(str(middle), last, {"kind": "labelled_fraction", "fraction": 0.5}).run()
    original = synthetic_dataset if kept else str(middle)
    parts = {
        "train": {"data": str(last), "periods": "2026-W01"},
        "validation": {"data": str(last), "periods": "2026-W02"},
        "test": {"data": original, "periods": "2026-W01"},
    }
    if not kept:
        manifest = json.loads((middle / "manifest.json").read_text())
        manifest["made_by"]["inputs"] = {str(tmp_path / "gone"): "a hash"}
        (middle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="train and test both take period '2026-W01'"):
        check_disjoint(validate(Splits, parts, "test"))
    parts["test"]["periods"] = "2026-W03"
    check_disjoint(validate(Splits, parts, "test"))
