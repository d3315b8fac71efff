import gzip
import json
import lzma
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from nightly import nightly
from preparing import prepare, rejections_of, rows_of
from pydantic import ValidationError

from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset, Feature, open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest.assembly import LikePlaces
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.letor import read_letor
from ltrscale.ingest.mapping import ColumnMapping, ListColumns

ROOT = Path(__file__).resolve().parents[2]
LETOR = {"kind": "letor"}


def config(*inputs: Any, source: Mapping[str, Any] = LETOR, **settings: Any) -> PrepareConfig:
    return PrepareConfig.model_validate({"inputs": inputs, "source": source, **settings})


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
    assert dataset.manifest.files.longest == 7


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


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [50, 1000, 10_000, 1 << 24])
def test_the_size_of_blocks_does_not_matter(
    log_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    whole = prepare(config(str(log_file)), str(tmp_path / "whole"))

    def read(url: str, **options: Any) -> Any:
        return read_letor(url, **{**options, "block_bytes": block_bytes})

    monkeypatch.setattr("ltrscale.ingest.letor.read_letor", read)
    pieces = prepare(config(str(log_file)), str(tmp_path / "pieces"))
    assert pieces.manifest.hash == whole.manifest.hash
    assert pieces.manifest.accounting == whole.manifest.accounting
    assert pieces.manifest.label_counts == whole.manifest.label_counts


@pytest.mark.slow
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
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["period=week", "query-ids"]
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
    quarantine = rejections_of(same)
    assert [(row["file"], row["line"], row["rows"]) for row in quarantine] == [
        (str(tmp_path / "b.txt"), 1, 3),
        (str(tmp_path / "b.txt"), 4, 2),
    ]


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["1MB", "2 MB"])
def test_too_little_memory_to_sort_names_the_key(tmp_path: Path, memory: str) -> None:
    write_log(tmp_path / "log.txt", {f"q{i}": 100 for i in range(300)})
    with pytest.raises(InputError, match=rf"not possible in {memory} of memory; raise sort_memory"):
        prepare(config(str(tmp_path / "log.txt"), sort=True, sort_memory=memory), str(tmp_path / "out"))
    prepare(config(str(tmp_path / "log.txt"), sort=True, sort_memory="100MB"), str(tmp_path / "out"))
    with pytest.raises(ValidationError, match="sort_memory"):
        config(str(tmp_path / "log.txt"), sort_memory="much")


def copies(folder: Path) -> dict[str, dict[str, Any]]:
    """One log of 3,000 rows in two files for each form that prepare reads, with the config keys of the form."""
    names = [f"f{i}" for i in range(20)]
    letor, csv = [], [",".join(["q", "y", *names])]
    rows_NF = np.random.default_rng(0).random((3000, 20)).round(6)
    for i, row in enumerate(rows_NF.tolist()):
        letor.append(f"{i % 3} qid:{i // 10} " + " ".join(f"{f + 1}:{value}" for f, value in enumerate(row)))
        csv.append(",".join(map(str, [i // 10, i % 3, *row])))
    for k, half in enumerate((slice(0, 1000), slice(1000, 3000))):
        text = "\n".join(letor[half]).encode()
        (folder / f"log-{k}.txt").write_bytes(text)
        (folder / f"log-{k}.txt.gz").write_bytes(gzip.compress(text))
        (folder / f"log-{k}.csv.xz").write_bytes(lzma.compress("\n".join(csv[:1] + csv[1:][half]).encode()))
        columns = {name: rows_NF[half, f] for f, name in enumerate(names)}
        table = pa.table({"q": np.arange(3000)[half] // 10, "y": np.arange(3000)[half] % 3, **columns})
        pq.write_table(table, folder / f"log-{k}.parquet")
    items = {"kind": "items", "columns": {"query": "q", "label": "y", "features": ["f*"]}}
    return {"txt": LETOR, "txt.gz": LETOR, "csv.xz": items, "parquet": items}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "sort"),
    [
        *(("txt", False), ("txt.gz", True), ("csv.xz", False), ("parquet", True)),
        *(nightly("txt", True), nightly("txt.gz", False), nightly("csv.xz", True), nightly("parquet", False)),
    ],
)
def test_progress_is_the_share_of_all_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, sort: bool
) -> None:
    source = copies(tmp_path)[form]
    monkeypatch.setattr("ltrscale.ingest.letor._BLOCK_BYTES", 10_000)
    monkeypatch.setattr("ltrscale.ingest.lines._BLOCK", 10_000)
    monkeypatch.setattr("ltrscale.ingest.items._ROWS", 200)
    steps: list[tuple[float, float]] = []
    totals: list[float] = []

    @contextmanager
    def watch(_: str, total: float, unit: str) -> Iterator[Callable[[float, float], None]]:
        assert unit == "rows"
        totals.append(total)
        yield lambda rows, of_total: steps.append((rows, of_total))

    monkeypatch.setattr("ltrscale.ingest.prepare.progress", watch)
    prepare(config(f"{tmp_path}/log-*.{form}", source=source, sort=sort), str(tmp_path / "out"))
    assert totals == [sum(path.stat().st_size for path in tmp_path.glob(f"log-*.{form}"))]
    rows_and_bytes = np.cumsum(steps, axis=0)
    assert rows_and_bytes[-1].tolist() == pytest.approx([3000 * (1 + sort), totals[0]])
    assert all(of_total >= 0 for _, of_total in steps)
    assert len(steps) > 10
    shares = rows_and_bytes / rows_and_bytes[-1]
    read = shares[: len(shares) // 2] if sort else shares  # sorted rows come in one block, there are so few
    assert np.abs(read[:, 0] - read[:, 1]).max() < 0.15


@pytest.mark.slow
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
    fault = "unparsable (there is not one qid:ID after the label"
    assert all(f"{log_file}:{i + 1} {fault}: '{i} what is this')" in message for i in (3, 40, 41, 42, 43))
    assert f"{log_file}:45" not in message
    assert storage.read_manifest(str(out)) is None
    (left,) = [path for path in out.rglob("[!.]*") if path.is_file()]
    assert left.parent == out / "quarantine"
    table = pq.read_table(left)
    assert table.column("line").to_pylist() == [4, 41, 42, 43, 44, 45, 46]
    assert table.column("rule").to_pylist() == ["unparsable"] * 7
    assert not [path for path in out.iterdir() if path.name not in ("quarantine", ".unfinished.json")]
    accepted = prepare(config(str(log_file), max_rejected=0.01), str(out))
    assert accepted.manifest.accounting.rows_rejected == 7
    assert not (out / ".unfinished.json").exists()
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


def make_unlike_types(folder: Path) -> PrepareConfig:
    pq.write_table(pa.table({"q": ["a"], "y": [1.0], "price": [1.0], "s": [1]}), folder / "a.parquet")
    pq.write_table(pa.table({"q": ["b"], "y": [1.0], "price": [1.0], "s": ["u"]}), folder / "b.parquet")
    columns = {"query": "q", "label": "y", "features": ["price"], "meta": ["s"]}
    return config(str(folder / "*.parquet"), source={"kind": "items", "columns": columns}, sort=True)


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
        (make_unlike_types, ["b.parquet", "'meta_s'", "string", "int64", "a.parquet"]),
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


OHSUMED_LABELS = {"0": 11_303, "1": 2_585, "2": 2_252}
PARTS = {"fold1": 3_383, "fold2": 2_570, "fold3": 3_076, "fold4": 3_573, "fold5": 3_538}


@dataclass(frozen=True)
class Published:
    """Published counts of a real data set: documents by period, and labels where they are known exactly."""

    groups: int
    documents: Mapping[str, int]
    features: int
    longest: int
    labels: Mapping[str, int] | None = None
    missing: int | None = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("letor/MQ2008/Fold1", Published(784, {"all": 15_211}, 46, 121, {"0": 12_279, "1": 2_001, "2": 931})),
        ("letor/OHSUMED/Fold1", Published(106, {"all": 16_140}, 45, 320, OHSUMED_LABELS)),
        ("prepare-ohsumed-null", Published(106, PARTS, 45, 320, OHSUMED_LABELS, missing=51_490)),
        (
            "prepare-mslr-sample",
            Published(43, {"train": 5_000}, 136, 308, {"0": 2_792, "1": 1_458, "2": 665, "3": 55, "4": 30}),
        ),
        (
            "prepare-lightgbm-example",
            Published(
                201 + 50,
                {"train": 3_005, "test": 768},
                300,
                27,
                {"0": 645 + 206, "1": 1_211 + 256, "2": 858 + 252, "3": 222 + 44, "4": 69 + 10},
            ),
        ),
        ("prepare-msft-docs", Published(972, {"all": 8_679}, 24, 10)),
        (
            "prepare-news-sample",
            Published(1_070, {"2017-W40": 12_703}, 59, 20, {"0": 11_983, "1": 720}, missing=None),
        ),
    ],
)
def test_real_data_has_the_published_counts(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: Published
) -> None:
    settings = config(str(shared_data / name))
    if name.startswith("prepare-"):  # a shipped config, whose paths are those seen from the root of the repository
        monkeypatch.chdir(ROOT)
        settings = PrepareConfig.model_validate(
            yaml.safe_load(Path(f"jobs/configs/data/{name}.yaml").read_text())["prepare"]
        )
    manifest = prepare(settings, str(tmp_path / "out")).manifest
    documents = sum(expected.documents.values())
    assert manifest.counts() == (expected.groups, documents, expected.groups)
    assert len(manifest.features) == expected.features
    assert manifest.files.longest == expected.longest
    assert (manifest.accounting.rows_in, manifest.accounting.rows_rejected) == (documents, 0)
    if expected.labels is not None:
        assert manifest.label_counts == expected.labels
    else:
        assert list(manifest.label_counts) == [str(grade) for grade in range(1, 11)]
        assert all(848 <= count <= 883 for count in manifest.label_counts.values())
    if expected.missing is not None:
        assert sum(summary.missing for summary in manifest.summaries) == expected.missing
    cells = {
        period: [c for f in manifest.files if f.period == period for c in f.row_groups] for period in manifest.periods
    }
    assert {period: sum(c.documents for c in found) for period, found in cells.items()} == expected.documents
    assert sum(map(len, cells.values())) >= min(64, expected.groups)


@pytest.mark.slow
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
    assert sum(len(file.row_groups) for file in manifest.files) >= 64


@pytest.mark.slow
def test_expected_counts_are_checked_before_anything_is_committed(tmp_path: Path) -> None:
    inputs = []
    for period, groups in (("train", {"a": 3, "b": 2}), ("test", {"a": 4})):
        write_log(tmp_path / f"{period}.txt", groups)
        inputs.append({"path": str(tmp_path / f"{period}.txt"), "period": period})
    out = str(tmp_path / "out")
    right = {"train": {"groups": 2, "documents": 5}, "test": {"documents": 4}}
    for expect, message in (
        (
            {**right, "train": {"groups": 3, "documents": 5}},
            r"^period 'train': expected 3 groups and 5 documents, found 2 and 5 \(0 rows were rejected; "
            r"periods found: test, train\); check that each file is complete and .*, or mend expect$",
        ),
        ({**right, "test": {"documents": 5}}, r"period 'test': expected 5 documents, found 4 \("),
        ({"vali": {"groups": 1}}, r"period 'vali': expected 1 groups, found 0 \("),
        ({"train": {"groups": 1}, "test": {"groups": 2}}, r"'train': .*, found 2; period 'test': .*, found 1 \("),
    ):
        with pytest.raises(InputError, match=message):
            prepare(config(*inputs, expect=expect), out)
        assert storage.read_manifest(out) is None
        assert not list(Path(out).rglob("*.parquet"))
    assert prepare(config(*inputs, expect=right), out).manifest.counts() == (3, 9, 3)
    with pytest.raises(ValidationError, match="expect needs groups or documents"):
        config(expect={"train": {}})


def test_rejected_rows_are_reported_where_counts_differ(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("1 qid:a 1:1 2:2\n0 qid:a 1:x 2:2\n")
    settings = {"max_rejected": 1, "expect": {"all": {"documents": 2}}}
    with pytest.raises(InputError, match=r"expected 2 documents, found 1 \(1 rows were rejected"):
        prepare(config(str(path), source={**LETOR, "n_features": 2}, **settings), str(tmp_path / "out"))


def test_features_that_float32_cannot_hold_can_be_read_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("1 qid:a 1:1.79769313486231570815e+308 2:2\n0 qid:a 1:-1e137 2:4\n0 qid:a 1:1 2:3e38\n")
    given = config(str(path), source={**LETOR, "n_features": 2}, infinite="missing", max_rejected=0)
    dataset = prepare(given, str(tmp_path / "out"))
    np.testing.assert_array_equal(rows_of(dataset)[0]["features"], np.float32([np.nan, 2, np.nan, 4, 1, 3e38]))
    assert [summary.missing for summary in dataset.manifest.summaries] == [2, 0]
    with pytest.raises(InputError, match=r"2 of 3 rows rejected .* infinite"):
        prepare(given.replace(infinite="reject"), str(tmp_path / "rejected"))


FEATURES = [Feature(name=name) for name in ("row", "score", "price", "all_but_one")]


def log(lists: int = 30) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    parts = []
    for q in range(lists):
        place = rng.permutation(6) + 1
        parts.append(
            pd.DataFrame(
                {
                    "q": f"q{q}",
                    "place": place,
                    "row": place - 1,
                    "score": 3 / place + 0.01 * rng.random(),
                    "price": rng.random(6),
                    "all_but_one": np.where((q == 7) & (place == 3), 0, place),
                    "y": rng.integers(0, 2, 6),
                }
            )
        )
    return pd.concat(parts)


def prepared(frame: pd.DataFrame, folder: Path, **settings: Any) -> None:
    folder.mkdir()
    frame.to_parquet(folder / "log.parquet")
    columns = {"query": "q", "label": "y", "positions": "place", "features": [f.name for f in FEATURES]}
    source = {"kind": "items", "columns": columns}
    values = {"inputs": str(folder / "log.parquet"), "source": source, **settings}
    prepare(PrepareConfig.model_validate(values), str(folder / "data"))


@pytest.mark.slow
def test_prepare_warns_of_places_under_other_names_and_of_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="ltrscale"):
        prepared(log(), tmp_path / "whole")
        prepared(log(), tmp_path / "pieces", unit_mb=1e-4)
        prepared(log().assign(place=None), tmp_path / "none")
        prepared(log(1), tmp_path / "few")  # 5 pairs may agree by chance
    lines = [record.message for record in caplog.records if "positions" in record.message]
    assert len(lines) == 2
    for line in lines:
        assert "features row, score order every list as its positions do" in line
        assert "leave it out" in line


rows = st.tuples(st.integers(1, 9), st.integers(0, 30), st.booleans())
places = st.lists(st.lists(rows, min_size=3, max_size=9, unique_by=lambda row: row[0]), min_size=8, max_size=12)


@pytest.mark.slow
@given(places, st.booleans(), st.booleans())
def test_a_feature_is_found_where_every_pair_of_every_list_agrees(
    drawn: list[list[tuple[int, int, bool]]], ordered: bool, falls: bool
) -> None:
    """Against all pairs; parts that are merged find the same."""
    step = -7 if falls else 7
    lists = [[(p, step * p if ordered else x, there) for p, x, there in own] for own in drawn]
    shown = [[row for row in own if row[2]] for own in lists]
    pairs = [pair for own in shown for pair in combinations(own, 2)]
    signs = {np.sign((other[0] - one[0]) * (other[1] - one[1])) for one, other in pairs}
    parts = LikePlaces(1)
    for own in lists:
        parts.merge(look([own]))
    found = look(lists).among(FEATURES[:1])
    assert parts.among(FEATURES[:1]) == found
    enough = sum(max(len(own) - 1, 0) for own in shown) >= 20
    assert bool(found) == (enough and signs in ({1}, {-1}))


def look(lists: list[list[tuple[int, int, bool]]]) -> LikePlaces:
    flat = [row for own in lists for row in own]
    found = LikePlaces(1)
    found.add(
        np.array([row[1] for row in flat], np.float32).reshape(-1, 1),
        pa.array([row[0] if row[2] else None for row in flat], pa.float32()),
        np.concatenate([[0], np.cumsum([len(own) for own in lists])]).astype(np.int64),
    )
    return found


@pytest.mark.parametrize("use", ["positions", "clicks", "gain"])
def test_what_is_known_only_later_is_refused_as_a_feature(use: str) -> None:
    for features in ({"features": ["f", "later"]}, {"features": ["f"], "categorical": ["later"]}):
        with pytest.raises(ValueError, match=rf"'later' is the .* of a document \({use}\) and cannot be a feature too"):
            ColumnMapping.model_validate({"query": "q", use: "later", **features})
        with pytest.raises(ValueError, match=rf"'later' is the .* of a document \({use}\) and cannot be a feature too"):
            ListColumns.model_validate({use: "later", **features})
    ColumnMapping.model_validate({"query": "q", use: "later", "features": ["*"]})
