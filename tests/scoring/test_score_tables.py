"""Scores as tables: what other programs read from the directory, as it lies, is what the bundle gives."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as arrow_dataset
import pyarrow.parquet as pq
import pytest
import torch
from preparing import prepare

from ltrscale import bundle, storage
from ltrscale.arrays import place_in_group
from ltrscale.data.dataset import writer
from ltrscale.data.dataset.manifest import Dataset, Feature
from ltrscale.data.dataset.scores import ScoredGroups, find_scores
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.scoring.score import FileScorer, ScoreJob

FEATURES = (Feature(name="f_a"), Feature(name="f_b"))
Row = tuple[str, str, str | None, float, int, int]
"""Period, query id, item id, score, rank, and the column `user` of the query's group."""


@pytest.fixture(scope="module")
def log() -> list[dict[str, Any]]:
    """Rows of 30 queries in periods whose names are numbers; every fifth query has no item ids, features repeat."""
    rng = np.random.default_rng(0)
    return [
        {"q": f"q{q}", "d": None if q % 5 == 0 else f"d{i}", "day": str(q // 10), "user": q % 4, "y": i % 2}
        | dict(zip(("f_a", "f_b"), rng.integers(0, 3, 2).astype(float).tolist(), strict=True))
        for q in range(30)
        for i in range(rng.integers(1, 9))
    ]


@pytest.fixture(scope="module")
def data(log: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("tables")
    pq.write_table(pa.Table.from_pylist(log), folder / "log.parquet")
    columns = {"query": "q", "item": "d", "label": "y", "period_column": "day", "features": ["f_*"], "meta": ["user"]}
    source = {"kind": "items", "columns": columns}
    config = PrepareConfig.model_validate({"inputs": str(folder / "log.parquet"), "source": source})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "FILE_BYTES", 1000)
        return prepare(config, str(folder / "data"))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = TransformConfig(numeric="none")
    transform = fit_transform([torch.randn(50, 2)], ["numeric"] * 2, config)
    model = Ranker(
        Architecture(transform=config, encoder=ResNetConfig(width=8, blocks=1), head=HeadConfig()), transform
    )
    url = str(tmp_path_factory.mktemp("tables") / "ranker")
    about = bundle.BundleFacts(config={}, features=FEATURES, dataset_hash="", metrics={}, made_by={"stage": "test"})
    bundle.save_ranker(url, model.eval(), about)
    return url


def score_into(out: Path, data: Dataset, ranker: str, **settings: Any) -> Path:
    ScoreJob.model_validate({"out": str(out), "bundle": ranker, "data": data.url, **settings}).run()
    return out


def expected(log: list[dict[str, Any]], out: Path, data: Dataset, ranker: str) -> list[Row]:
    """Slow: the rows of every item, from the log and from scores in the smallest layout."""
    score_into(out, data, ranker, layout="scores")
    by_gid: dict[int, list[float]] = {}
    for path in sorted(out.glob("period=*/*.parquet")):
        table = pq.ParquetFile(path).read()
        by_gid |= dict(zip(table["gid"].to_pylist(), table["scores"].to_pylist(), strict=True))
    found = []
    for gid, (_, group) in enumerate(itertools.groupby(log, key=lambda row: row["q"])):
        rows = list(group)
        order = sorted(range(len(rows)), key=lambda i: (-by_gid[gid][i], i))
        for rank, i in enumerate(order, 1):
            row = rows[i]
            found.append((row["day"], row["q"], row["d"], by_gid[gid][i], rank, row["user"]))
    return sorted(found, key=lambda row: (row[1], row[4]))


COLUMNS = ("period", "query_id", "item_id", "score", "rank", "meta_user")


def with_pandas(out: str) -> list[Row]:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(out)
    if "ranks" in frame:
        lists = {"item_ids": "item_id", "scores": "score", "ranks": "rank"}
        frame = frame.explode(list(lists)).rename(columns=lists)
    rows = frame[list(COLUMNS)].itertuples(index=False)
    return [(str(r[0]), r[1], None if pandas.isna(r[2]) else r[2], float(r[3]), int(r[4]), int(r[5])) for r in rows]


def with_duckdb(out: str) -> list[Row]:
    source = f"read_parquet('{out}/**/*.parquet', hive_partitioning=true)"
    names = [name for name, *_ in duckdb.sql(f"describe from {source}").fetchall()]
    if "ranks" in names:
        lists = "unnest(item_ids) as item_id, unnest(scores) as score, unnest(ranks) as rank"
        source = f"(select period, query_id, meta_user, {lists} from {source})"
    return [(str(r[0]), *r[1:]) for r in duckdb.sql(f"select {', '.join(COLUMNS)} from {source}").fetchall()]


def with_every_file(out: str) -> list[Row]:
    """All files that `**/*.parquet` names, hidden ones included, as programs see them that skip none."""
    tables = []
    for path in Path(out).rglob("*.parquet"):
        table = pq.ParquetFile(path).read()
        period = path.parent.name.removeprefix("period=")
        tables.append(table.append_column("period", pa.array([period] * len(table))))
    rows = pa.concat_tables(tables).to_pylist()
    lists = [(row, zip(row["item_ids"], row["scores"], row["ranks"], strict=True)) for row in rows if "ranks" in row]
    rows = [{**row, "item_id": i, "score": s, "rank": r} for row, items in lists for i, s, r in items] or rows
    return [tuple(row[name] for name in COLUMNS) for row in rows]  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("read", [with_pandas, with_duckdb, with_every_file])
@pytest.mark.parametrize("layout", ["lists", "items"])
def test_the_directory_is_a_table_as_it_lies(
    log: Any, data: Dataset, ranker: str, tmp_path: Path, layout: str, read: Callable[[str], list[Row]]
) -> None:
    out = score_into(tmp_path / "out", data, ranker, layout=layout, meta=["user"])
    found = read(str(out))
    assert sorted(found, key=lambda row: (row[1], row[4])) == expected(log, tmp_path / "plain", data, ranker)
    if layout == "items":  # the best of each query comes first
        assert [row[4] for row in found] == [
            rank for _, rows in itertools.groupby(found, key=lambda row: row[1]) for rank, _ in enumerate(rows, 1)
        ]


def test_ranks_and_scores_agree_and_ties_keep_their_order() -> None:
    rng = np.random.default_rng(1)
    lengths_Q = rng.integers(0, 6, 200)
    offsets_Q1 = np.concatenate([[0], np.cumsum(lengths_Q)]).astype(np.int32)
    scores_N = rng.integers(-1, 3, offsets_Q1[-1]).astype(np.float64)
    ranks_N = 1 + place_in_group(offsets_Q1, -scores_N)
    for first, last in itertools.pairwise(offsets_Q1.tolist()):
        best = sorted(range(first, last), key=lambda i: -scores_N[i])  # stable
        assert ranks_N[best].tolist() == list(range(1, last - first + 1))


@pytest.mark.slow
def test_other_columns_are_other_output_and_the_same_ones_are_not(data: Dataset, ranker: str, tmp_path: Path) -> None:
    def run(**settings: Any) -> list[Any]:
        records: list[Any] = []
        job = ScoreJob.model_validate({"out": str(tmp_path), "bundle": ranker, "data": data.url, **settings})
        job.work({}, records.append)
        return [record["period"] for record in records if "period" in record]

    everything = ["0", "1", "2"]
    assert run(layout="scores", periods="0") == ["0"]
    assert run() == everything
    assert run() == run(docs_per_batch=3) == []
    assert run(meta=["user"]) == everything
    assert run(layout="items") == everything
    there = arrow_dataset.dataset(tmp_path, partitioning="hive")
    assert there.schema.names == ["query_id", "item_id", "score", "rank", "period"]
    assert len(list(tmp_path.rglob("*.parquet"))) == len(data.manifest.files)
    with pytest.raises(InputError, match=r"no column 'meta_session' \(meta\); list it under columns.meta of prepare"):
        run(meta=["session"])
    with pytest.raises(ValueError, match="meta has no place in the layout scores"):
        run(meta=["user"], layout="scores")


@pytest.mark.slow
def test_items_are_no_labels(data: Dataset, ranker: str, tmp_path: Path) -> None:
    out = str(score_into(tmp_path, data, ranker, layout="items"))
    with pytest.raises(InputError, match="'0' has one row per document, which cannot serve as labels; score it into"):
        find_scores(out, data, ["0"])
    for layout in ("lists", "scores"):
        score_into(tmp_path, data, ranker, layout=layout)
        assert find_scores(out, data, ["0", "1", "2"]).keys() == {file.path for file in data.manifest.files}


def test_ids_that_do_not_fit_the_documents_are_named(data: Dataset, ranker: str, tmp_path: Path) -> None:
    manifest = data.manifest.model_dump(mode="json")
    with storage.Commit(str(tmp_path / "data")) as commit:
        for entry in manifest["files"]:
            table = pq.ParquetFile(storage.join(data.url, entry["path"])).read()
            cut = pa.array([ids and ids[:-1] for ids in table["doc_ids"].to_pylist()], pa.list_(pa.string()))
            table = table.set_column(table.column_names.index("doc_ids"), "doc_ids", cut)
            name, first = f"{Path(entry['path']).parent}/part-{{hash}}.parquet", 0
            with commit.file(name) as path, pq.ParquetWriter(path, table.schema) as writer:
                for groups, *_ in entry["row_groups"]:
                    writer.write_table(table.slice(first, groups), row_group_size=groups)
                    first += groups
            entry |= vars(commit.files[-1])
        commit.finish(manifest)
    with pytest.raises(
        InputError,
        match=r"data/period=0/part-.*\.parquet: doc_ids has not one id for each document of a query group; prepare",
    ):
        score_into(tmp_path / "out", Dataset(str(tmp_path / "data"), data.manifest), ranker)


def test_a_defect_of_a_model_is_not_blamed_on_the_data_set(
    data: Dataset, ranker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: object) -> Iterator[ScoredGroups]:
        raise ValueError("a defect")
        yield

    monkeypatch.setattr(FileScorer, "_scored", defect)
    with pytest.raises(ValueError, match=r"^a defect$"):
        score_into(tmp_path, data, ranker)
