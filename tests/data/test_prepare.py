import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ltrscale import storage
from ltrscale.data.letor import read_letor
from ltrscale.data.manifest import Dataset, open_dataset
from ltrscale.data.prepare import PrepareConfig, prepare
from ltrscale.errors import InputError

LETOR = {"kind": "letor"}


def config(*inputs: Any, source: Mapping[str, Any] = LETOR, **settings: Any) -> PrepareConfig:
    return PrepareConfig.model_validate({"inputs": inputs, "source": source, **settings})


def rows_of(dataset: Dataset) -> list[dict[str, Any]]:
    """All groups with their period, file by file."""
    return [
        {**row, "period": file.period}
        for file in dataset.manifest.files
        for row in pq.ParquetFile(storage.join(dataset.url, file.path)).read().to_pylist()
    ]


def write_log(path: Path, groups: Mapping[str, int], n_features: int = 3, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    with path.open("w") as stream:
        for query_id, length in groups.items():
            for i in range(length):
                values = " ".join(f"{f + 1}:{v:.4f}" for f, v in enumerate(rng.lognormal(size=n_features)))
                stream.write(f"{rng.integers(3)} qid:{query_id} {values} #docid = {query_id}-{i}\n")


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    write_log(path, {f"q{i}": 1 + i % 7 for i in range(300)})
    return path


def test_rows_come_back_in_order_with_dense_gids(log_file: Path, tmp_path: Path) -> None:
    dataset = prepare(config(str(log_file)), str(tmp_path / "out"))
    rows = rows_of(dataset)
    block = next(read_letor(str(log_file), n_features=3, dense=True))
    assert [row["gid"] for row in rows] == list(range(300))
    assert [row["query_id"] for row in rows] == [f"q{i}" for i in range(300)]
    assert [d for row in rows for d in row["doc_ids"]] == block.doc_ids_N.to_pylist()
    np.testing.assert_array_equal([v for row in rows for v in row["features"]], block.features_NF.ravel())
    np.testing.assert_array_equal([v for row in rows for v in row["labels"]], block.labels_N)
    assert len([cell for file in dataset.manifest.files for cell in file.row_groups]) == 64
    assert dataset.manifest == open_dataset(dataset.url).manifest
    assert dataset.manifest.longest == 7


def test_summaries_and_label_counts_are_those_of_the_rows_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    features = (rng.lognormal(size=(5000, 4)) * [1, 1e6, 1, 1] + [0, 1e8, 0, 0]).astype(np.float32)
    features[rng.random(5000) < 0.3, 2] = np.nan
    features[:, 3] = np.nan
    labels = rng.integers(0, 5, 5000)
    with (tmp_path / "log.txt").open("w") as stream:
        for i, row in enumerate(features):
            values = " ".join(f"{f + 1}:{'NULL' if math.isnan(v) else repr(float(v))}" for f, v in enumerate(row))
            stream.write(f"{labels[i]} qid:{i // 10} {values}\n")
        stream.write("1 qid:last 1:inf 2:0 3:0 4:0\n")
    manifest = prepare(config(str(tmp_path / "log.txt")), str(tmp_path / "out")).manifest
    exact = features.astype(np.float64)
    for f in range(3):
        summary = manifest.summaries[f]
        assert summary.missing == np.isnan(exact[:, f]).sum()
        assert (summary.minimum, summary.maximum) == (np.nanmin(exact[:, f]), np.nanmax(exact[:, f]))
        assert summary.mean == pytest.approx(np.nanmean(exact[:, f]), rel=1e-12)
        assert summary.std == pytest.approx(np.nanstd(exact[:, f]), rel=1e-9)
    assert manifest.summaries[3].missing == 5000
    assert manifest.summaries[3].mean is None
    assert manifest.label_counts == {str(k): int((labels == k).sum()) for k in range(5)}
    assert manifest.accounting.rules == {"infinite": 1}


@pytest.mark.parametrize("block_bytes", [50, 1000, 10_000, 1 << 24])
def test_the_size_of_blocks_does_not_matter(
    log_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    whole = prepare(config(str(log_file)), str(tmp_path / "whole"))

    def read(url: str, **options: Any) -> Any:
        return read_letor(url, **{**options, "block_bytes": block_bytes})

    monkeypatch.setattr("ltrscale.data.sources.read_letor", read)
    pieces = prepare(config(str(log_file)), str(tmp_path / "pieces"))
    assert pieces.manifest.hash == whole.manifest.hash
    assert pieces.manifest.accounting == whole.manifest.accounting
    assert pieces.manifest.label_counts == whole.manifest.label_counts


def test_a_second_run_does_nothing_until_something_changes(
    log_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    reports: list[dict[str, object]] = []

    def run(**settings: Any) -> Dataset:
        return prepare(config(str(log_file), **settings), str(out), report=lambda r: reports.append(dict(r)))

    first = run()
    before = (out / "manifest.json").stat().st_mtime_ns
    with caplog.at_level("INFO", "ltrscale"):
        assert run() == first
    assert "nothing to do" in caplog.text
    assert (out / "manifest.json").stat().st_mtime_ns == before
    assert len(reports) == 1
    other = run(period="week")
    assert {file.path.split("/")[0] for file in other.manifest.files} == {"period=week"}
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["period=week"]
    write_log(log_file, {"only": 5})
    assert run(period="week").manifest.accounting.rows_in == 5
    assert len(reports) == 3


def test_fixed_periods_partition_and_scope_the_query_ids(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_log(tmp_path / f"{name}.txt", {"q1": 3, "q2": 2})
    inputs = [{"path": str(tmp_path / f"{name}.txt"), "period": name} for name in ("a", "b")]
    dataset = prepare(config(*inputs), str(tmp_path / "out"))
    assert dataset.manifest.periods == ["a", "b"]
    assert dataset.manifest.accounting.groups_kept == 4
    assert [(row["gid"], row["period"], row["query_id"]) for row in rows_of(dataset)] == [
        (0, "a", "q1"),
        (1, "a", "q2"),
        (2, "b", "q1"),
        (3, "b", "q2"),
    ]
    same = prepare(config(str(tmp_path / "*.txt"), max_rejected=0.5), str(tmp_path / "same"))
    assert same.manifest.accounting.rules == {"returning_query": 5}
    quarantine = pq.read_table(storage.join(same.url, *same.manifest.quarantine)).to_pylist()
    assert [(row["file"], row["line"], row["rows"]) for row in quarantine] == [
        (str(tmp_path / "b.txt"), 1, 3),
        (str(tmp_path / "b.txt"), 4, 2),
    ]


def test_a_data_set_read_back_as_group_rows_is_the_same_data_set(log_file: Path, tmp_path: Path) -> None:
    first = prepare(config(str(log_file)), str(tmp_path / "first"))
    columns = {"n_features": 3, "labels": "labels", "docs": "doc_ids", "period_column": "period"}
    files = f"{first.url}/period=*/*.parquet"
    second = prepare(config(files, source={"kind": "groups", "columns": columns}), str(tmp_path / "second"))
    assert second.manifest.hash == first.manifest.hash
    assert rows_of(second) == rows_of(first)


def test_unlabelled_groups_have_null_labels_and_partly_labelled_ones_lose_rows(tmp_path: Path) -> None:
    table = pa.table(
        {
            "q": ["a", "a", "b", "b", "c"],
            "y": pa.array([None, None, 1.0, None, 0.0]),
            "x": [1.0, 2, 3, 4, 5],
            "day": ["2026-02-14", "2026-02-14", "2026-02-16", "2026-02-16", None],
        }
    )
    pq.write_table(table.slice(0, 4), tmp_path / "log.parquet")
    columns = {"query": "q", "label": "y", "features": ["x"], "time": "day"}
    source = {"kind": "items", "columns": columns}
    dataset = prepare(config(str(tmp_path / "log.parquet"), source=source, max_rejected=0.5), str(tmp_path / "out"))
    assert [(row["query_id"], row["labels"], row["period"]) for row in rows_of(dataset)] == [
        ("a", None, "2026-W07"),
        ("b", [1.0], "2026-W08"),
    ]
    assert dataset.manifest.counts() == (2, 3, 1)
    assert dataset.manifest.accounting.rules == {"bad_label": 1}


def test_sort_brings_the_rows_of_a_query_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_log(tmp_path / "log.txt", {f"q{i}": 5 for i in range(50)})
    lines = (tmp_path / "log.txt").read_text().splitlines(keepends=True)
    order = rng.permutation(len(lines))
    (tmp_path / "log.txt").write_text("".join(lines[i] for i in order[:150]))
    (tmp_path / "more.txt").write_text("".join(lines[i] for i in order[150:]))
    with pytest.raises(InputError, match="returning_query"):
        prepare(config(str(tmp_path / "*.txt")), str(tmp_path / "out"))
    dataset = prepare(config(str(tmp_path / "*.txt"), sort=True), str(tmp_path / "out"))
    rows = rows_of(dataset)
    assert dataset.manifest.accounting.groups_kept == 50
    assert sorted(row["query_id"] for row in rows) == sorted(f"q{i}" for i in range(50))
    for row in rows:
        assert sorted(row["doc_ids"]) == [f"{row['query_id']}-{i}" for i in range(5)]


def test_too_many_rejections_commit_nothing_and_leave_the_quarantine(log_file: Path, tmp_path: Path) -> None:
    lines = log_file.read_text().splitlines(keepends=True)
    for i in (3, 40, 41, 42, 43, 44, 45):
        lines[i] = f"{i} what is this\n"
    log_file.write_text("".join(lines))
    out = tmp_path / "out"
    with pytest.raises(InputError) as error:
        prepare(config(str(log_file)), str(out))
    message = str(error.value)
    assert f"7 of {len(lines):,} rows rejected (0.58%), max_rejected is 0.10%" in message
    assert all(f"{log_file}:{i + 1} unparsable ('{i} what is this')" in message for i in (3, 40, 41, 42, 43))
    assert f"{log_file}:45" not in message
    assert storage.read_manifest(str(out)) is None
    (left,) = [path for path in out.rglob("*") if path.is_file()]
    assert left.parent == out / "quarantine"
    table = pq.read_table(left)
    assert table.column("line").to_pylist() == [4, 41, 42, 43, 44, 45, 46]
    assert table.column("rule").to_pylist() == ["unparsable"] * 7
    assert not [path for path in out.iterdir() if path.name != "quarantine"]
    accepted = prepare(config(str(log_file), max_rejected=0.01), str(out))
    assert accepted.manifest.accounting.rows_rejected == 7
    assert [path.name for path in (out / "quarantine").iterdir()] == [Path(*accepted.manifest.quarantine).name]


def test_a_failed_run_keeps_what_was_committed_before(log_file: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    first = prepare(config(str(log_file)), out)
    log_file.write_text("nothing\n")
    with pytest.raises(InputError, match="1 of 1 rows rejected"):
        prepare(config(str(log_file)), out)
    assert open_dataset(out).manifest == first.manifest
    assert len(rows_of(first)) == 300


def make_empty(folder: Path) -> PrepareConfig:
    (folder / "log.txt").touch()
    return config(str(folder / "log.txt"))


def make_missing(folder: Path) -> PrepareConfig:
    return config(str(folder / "no.txt"))


def make_different_widths(folder: Path) -> PrepareConfig:
    write_log(folder / "a.txt", {"a": 2}, n_features=3)
    write_log(folder / "b.txt", {"b": 2}, n_features=5)
    return config(str(folder / "*.txt"))


def make_sparse_without_width(folder: Path) -> PrepareConfig:
    write_log(folder / "a.txt", {"a": 2})
    return config(str(folder / "a.txt"), source={"kind": "letor", "dense": False})


def make_wrong_names(folder: Path) -> PrepareConfig:
    write_log(folder / "a.txt", {"a": 2})
    return config(str(folder / "a.txt"), source={"kind": "letor", "n_features": 3, "feature_names": ["x", "y"]})


def make_bad_period(folder: Path) -> PrepareConfig:
    write_log(folder / "a.txt", {"a": 2})
    return config({"path": str(folder / "a.txt"), "period": "a/../b"})


def make_sizes_for_two(folder: Path) -> PrepareConfig:
    for name in ("a.txt", "b.txt"):
        write_log(folder / name, {name: 2})
    return config({"path": str(folder / "*.txt"), "group_sizes": "sizes"})


def make_unlike_columns(folder: Path) -> PrepareConfig:
    pq.write_table(pa.table({"q": ["a"], "y": [1.0], "price": [1.0]}), folder / "a.parquet")
    pq.write_table(pa.table({"q": ["b"], "y": [1.0], "prize": [1.0]}), folder / "b.parquet")
    columns = {"query": "q", "label": "y", "features": ["p*"]}
    return config(str(folder / "*.parquet"), source={"kind": "items", "columns": columns})


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (make_empty, ["log.txt", "no rows"]),
        (make_missing, ["no.txt", "no file there"]),
        (make_different_widths, ["b.txt", "5 features", "a.txt", "3"]),
        (make_sparse_without_width, ["n_features"]),
        (make_wrong_names, ["feature_names", "2 names", "3"]),
        (make_bad_period, ["a.txt", "'a/../b'", "letters"]),
        (make_sizes_for_two, ["group_sizes", "*.txt", "2"]),
        (make_unlike_columns, ["b.parquet", "price", "a.parquet"]),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, make: Callable[[Path], PrepareConfig], parts: list[str]
) -> None:
    bad = make(tmp_path)
    out = tmp_path / "out"
    with pytest.raises(InputError) as error:
        prepare(bad, str(out))
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
    assert not [path for path in out.rglob("*") if path.is_file()] if out.exists() else True


def test_the_config_is_in_the_manifest(log_file: Path, tmp_path: Path) -> None:
    dataset = prepare(config(str(log_file)), str(tmp_path / "out"))
    origin = json.loads((tmp_path / "out" / "manifest.json").read_text())["made_by"]
    assert origin["config"] == config(str(log_file)).model_dump(mode="json")
    assert list(origin["inputs"]) == [str(log_file)]
    assert dataset.manifest.features[0].name == "1"


def letor_source(**options: Any) -> dict[str, Any]:
    return {"kind": "letor", **options}


ITEMS_MSFT = {"kind": "items", "columns": {"query": "query_id", "label": "grade", "features": ["*"]}}
ITEMS_NEWS = {
    "kind": "items",
    "columns": {
        "query": "impression_id",
        "item": "article_id",
        "label": "clicked",
        "time": "event_time",
        "features": ["f_*"],
        "categorical": ["c_*"],
    },
}


@pytest.mark.parametrize(
    ("inputs", "source", "groups", "documents", "features", "labels", "longest"),
    [
        (["letor/MQ2008/Fold1"], LETOR, 784, 15_211, 46, {"0": 12_279, "1": 2_001, "2": 931}, 121),
        (["letor/OHSUMED/Fold1"], LETOR, 106, 16_140, 45, {"0": 11_303, "1": 2_585, "2": 2_252}, 320),
        (["letor/OHSUMED-null/*.gz"], LETOR, 106, 16_140, 45, {"0": 11_303, "1": 2_585, "2": 2_252}, 320),
        (
            ["letor/MSLR-sample/train.txt.gz"],
            LETOR,
            43,
            5_000,
            136,
            {"0": 2_792, "1": 1_458, "2": 665, "3": 55, "4": 30},
            308,
        ),
        (
            [
                {
                    "path": "letor/lightgbm-example/rank.train.gz",
                    "group_sizes": "letor/lightgbm-example/rank.train.query",
                }
            ],
            letor_source(dense=False, n_features=300),
            201,
            3_005,
            300,
            {"0": 645, "1": 1_211, "2": 858, "3": 222, "4": 69},
            27,
        ),
        (
            [{"path": "letor/lightgbm-example/rank.test.gz", "group_sizes": "letor/lightgbm-example/rank.test.query"}],
            letor_source(dense=False, n_features=300),
            50,
            768,
            300,
            {"0": 206, "1": 256, "2": 252, "3": 44, "4": 10},
            24,
        ),
        (["csv/msft-docs/normalized_features.csv.gz"], ITEMS_MSFT, 972, 8_679, 24, None, 10),
        (["news/sample"], ITEMS_NEWS, 1_070, 12_703, 59, {"0": 11_983, "1": 720}, 20),
    ],
    ids=["MQ2008", "OHSUMED", "OHSUMED-null", "MSLR", "lightgbm-train", "lightgbm-test", "msft-docs", "news"],
)
def test_real_data_has_the_published_counts(
    shared_data: Path,
    tmp_path: Path,
    inputs: list[Any],
    source: Mapping[str, Any],
    groups: int,
    documents: int,
    features: int,
    labels: dict[str, int] | None,
    longest: int,
) -> None:
    def absolute(entry: Any) -> Any:
        if isinstance(entry, str):
            return str(shared_data / entry)
        return {key: str(shared_data / value) for key, value in entry.items()}

    dataset = prepare(config(*map(absolute, inputs), source=source), str(tmp_path / "out"))
    manifest = dataset.manifest
    assert manifest.counts() == (groups, documents, groups)
    assert len(manifest.features) == features
    assert manifest.longest == longest
    assert manifest.accounting.rows_rejected == 0
    assert manifest.accounting.rows_in == documents
    if labels is not None:
        assert manifest.label_counts == labels
    else:
        assert list(manifest.label_counts) == [str(grade) for grade in range(1, 11)]
        assert all(848 <= count <= 883 for count in manifest.label_counts.values())
    missing = sum(summary.missing for summary in manifest.summaries)
    if "null" in str(inputs):
        assert missing == 51_490
    cells = [cell for file in manifest.files for cell in file.row_groups]
    assert len(cells) >= min(64, groups)


@pytest.mark.parametrize(("name", "documents"), [("MQ2008", (9_630, 2_707, 2_874)), ("OHSUMED", (None, 3_538, 3_383))])
def test_a_fold_becomes_three_periods(
    shared_data: Path, tmp_path: Path, name: str, documents: tuple[int | None, ...]
) -> None:
    splits = ("train", "vali", "test")
    inputs = [{"path": str(shared_data / f"letor/{name}/Fold1/{s}.txt.gz"), "period": s} for s in splits]
    manifest = prepare(config(*inputs), str(tmp_path / "out")).manifest
    for split, expected in zip(splits, documents, strict=True):
        cells = [cell for file in manifest.files if file.period == split for cell in file.row_groups]
        assert expected in (None, sum(cell.documents for cell in cells))
        assert len(cells) == min(64, sum(cell.groups for cell in cells))
