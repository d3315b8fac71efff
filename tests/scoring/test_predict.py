"""Prediction: the scores that a bundle gives to features made by hand, whatever the rows' form and whatever happens."""

import csv
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from command_lines import run_here
from nightly import nightly

from ltrscale import Ranker, bundle, storage
from ltrscale.batch import QueryGroups
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.derive.relabel import RelabelJob
from ltrscale.errors import InputError
from ltrscale.experiments.runs import read_run
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.scoring.predict import PredictJob
from ltrscale.scoring.score import ScoreJob
from ltrscale.training.combine import CombineJob
from ltrscale.training.finetune import FinetuneJob
from ltrscale.training.pretrain import PretrainJob
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.semi import SemiJob

Rows = list[dict[str, Any]]
NUMERIC, CATEGORICAL = ("f_age", "f_price"), ("colour",)


def make_rows(first: int, queries: int, days: Sequence[str], seed: int) -> Rows:
    """Rows of a shop, a query on each day in turn, in a random order: the rows of a query lie apart."""
    rng = np.random.default_rng(seed)
    rows = []
    for q in range(first, first + queries):
        for i in range(rng.integers(2, 8)):
            price = round(float(rng.lognormal(2)), 3)
            row = {"search": f"q{q}", "product": f"p{i}", "bought": int(rng.random() < 0.4 / price**0.2)}
            row |= {"day": days[q % len(days)], "user": f"u{q % 7}", "shown_at": i + 1}
            rows.append(row | {"f_price": price, "f_age": float(i), "colour": ["red", "green", "blue"][q * i % 3]})
    return [rows[i] for i in rng.permutation(len(rows))]


def write_parquet(path: Path, rows: Rows, names: Sequence[str] | None = None) -> str:
    pq.write_table(pa.Table.from_pylist(rows).select(list(names or rows[0])), path)
    return str(path)


def write_csv(path: Path, rows: Rows, names: Sequence[str]) -> str:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


COLUMNS = {
    "query": "search",
    "item": "product",
    "label": "bought",
    "time": "day",
    "positions": "shown_at",
    "features": ["f_*"],
    "categorical": ["colour"],
    "meta": ["user"],
}
NEXT_WEEK = ("2026-03-02", "2026-03-04")
WITHOUT_LABELS = ("colour", "f_price", "product", "day", "search", "f_age")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of three weeks, `data`."""
    home = tmp_path_factory.mktemp("shop")
    log = write_parquet(home / "log.parquet", make_rows(0, 120, ["2026-02-03", "2026-02-10", "2026-02-17"], 0))
    source = {"kind": "items", "columns": COLUMNS}
    prepare = {"inputs": log, "sort": True, "source": source}
    validate(PrepareJob, {"out": str(home / "data"), "prepare": prepare}, "test").run()
    return home


def splits(data: str) -> dict[str, Any]:
    weeks = {"train": "2026-W06", "validation": "2026-W07", "test": "2026-W08"}
    return {name: {"data": data, "periods": week} for name, week in weeks.items()}


TREES = {"num_trees": 5, "num_threads": 1, "min_data_in_leaf": 5}
NETWORK = {"encoder": {"width": 8, "blocks": 1}}
FINETUNE: dict[str, Any] = {"network": NETWORK, "head_epochs": 0, "epochs": 1, "stream": {"streams": 1}}


def train_trees(home: Path, data: Path, name: str) -> str:
    job = {"out": str(home / name), "splits": splits(str(data)), "gbdt": TREES}
    validate(GBDTJob, job, "test").run()
    return str(home / name)


def train_network(home: Path, name: str, **settings: Any) -> str:
    job = {"out": str(home / name), "splits": splits(str(home / "data")), "finetune": {**FINETUNE, **settings}}
    validate(FinetuneJob, job, "test").run()
    return str(home / name)


@pytest.fixture(scope="module")
def trees(home: Path) -> str:
    return train_trees(home, home / "data", "trees")


@pytest.fixture(scope="module")
def network(home: Path) -> str:
    return train_network(home, "network")


@pytest.fixture(scope="module")
def week() -> Rows:
    return make_rows(1000, 25, NEXT_WEEK, 1)


def predict(out: Path | str, bundle: str | list[str], inputs: str, **settings: Any) -> None:
    validate(PredictJob, {"out": str(out), "bundle": bundle, "inputs": inputs, **settings}, "test").run()


Ranked = dict[str, list[tuple[str, float]]]
"""Of each query its items and their scores, the best first."""


def expected(rows: Rows, urls: Sequence[str]) -> Ranked:
    """Slow: the features are made by hand and each query is scored alone."""
    scorers = [bundle.load(url).scorer(threads=1) for url in urls]
    by_query: dict[str, Rows] = {}
    for row in rows:
        by_query.setdefault(row["search"], []).append(row)
    found = {}
    for query, items in by_query.items():
        codes = CategoryEncoder().encode(pa.array([row["colour"] for row in items]))
        numbers = np.array([[row[name] for name in NUMERIC] for row in items])
        x_NF = torch.from_numpy(np.column_stack([numbers, codes]).astype(np.float32))
        groups = QueryGroups(x_NF, torch.tensor([0, len(items)]))
        scores = np.mean([scorer(groups).double().numpy() for scorer in scorers], axis=0).tolist()
        order = sorted(range(len(items)), key=lambda i: -scores[i])
        found[query] = [(items[i]["product"], scores[i]) for i in order]
    return found


def read(out: Path | str) -> dict[str, Rows]:
    """The rows of each query as they lie in the files, with their periods."""
    found: dict[str, Rows] = {}
    for url in storage.files.below(str(out)):
        if url.endswith(".parquet"):
            with storage.open_input(storage.join(str(out), url)) as stream:
                for row in pq.ParquetFile(stream).read().to_pylist():
                    row["period"] = url.split("/")[0].removeprefix("period=")
                    found.setdefault(row["query_id"], []).append(row)
    return found


def check(out: Path | str, rows: Rows, urls: Sequence[str]) -> None:
    """Compare the ranked items with those made by hand."""
    found, wanted = read(out), expected(rows, urls)
    assert found.keys() == wanted.keys()
    for query, items in wanted.items():
        ours = found[query]
        assert [row["rank"] for row in ours] == list(range(1, len(items) + 1))
        assert [row["score"] for row in ours] == pytest.approx([score for _, score in items], rel=1e-5, abs=1e-6)
        assert dict(items) == pytest.approx({row["item_id"]: row["score"] for row in ours}, rel=1e-5, abs=1e-6)
        assert ours == sorted(ours, key=lambda row: -row["score"])


@pytest.mark.slow
def test_reordered_rows_without_labels_get_the_scores_of_the_bundle(
    trees: str, network: str, week: Rows, tmp_path: Path
) -> None:
    files = {
        "parquet": write_parquet(tmp_path / "week.parquet", week, WITHOUT_LABELS),
        "csv": write_csv(tmp_path / "week.csv", week, (*WITHOUT_LABELS[::-1], "bought", "user")),
    }
    for kind, path in files.items():
        for name, urls in (("trees", [trees]), ("network", [network]), ("both", [trees, network])):
            predict(tmp_path / kind / name, urls, path)
            check(tmp_path / kind / name, week, urls)
            assert {row["period"] for rows in read(tmp_path / kind / name).values() for row in rows} == {"2026-W10"}


@pytest.mark.slow
def test_columns_that_training_had_and_scoring_does_not_need_may_change(trees: str, week: Rows, tmp_path: Path) -> None:
    """Labels may be text, new columns may match the patterns of the mapping, and a file may have more than another."""
    rows = [{**row, "bought": "yes", "f_new": "x", "f_more": 1.0} for row in week]
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "a.parquet", rows)
    write_parquet(tmp_path / "in" / "b.parquet", make_rows(2000, 5, NEXT_WEEK, 2), WITHOUT_LABELS)
    predict(tmp_path / "out", trees, str(tmp_path / "in"))
    check(tmp_path / "out", [*week, *make_rows(2000, 5, NEXT_WEEK, 2)], [trees])


def test_rows_without_a_time_stamp_get_a_fixed_period(trees: str, week: Rows, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "week.parquet", week, [name for name in WITHOUT_LABELS if name != "day"])
    with pytest.raises(InputError, match=r"week\.parquet: no column 'day' \(time\)"):
        predict(tmp_path / "out", trees, path)
    inputs = {"path": path, "period": "next"}
    validate(PredictJob, {"out": str(tmp_path / "out"), "bundle": trees, "inputs": inputs}, "test").run()
    check(tmp_path / "out", week, [trees])
    assert {row["period"] for rows in read(tmp_path / "out").values() for row in rows} == {"next"}


def test_what_pretraining_needs_to_know_is_said_by_prepare_alone(
    trees: str, week: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ltrscale")
    path = write_parquet(tmp_path / "week.parquet", week)
    prepare = {"inputs": path, "sort": True, "source": {"kind": "items", "columns": COLUMNS}}
    validate(PrepareJob, {"out": str(tmp_path / "data"), "prepare": prepare}, "test").run()
    (said,) = [message for message in caplog.messages if "unique within its query" in message]
    assert "f_age for 100% of the documents" in said
    assert any(message.endswith(", 1 period") for message in caplog.messages)
    caplog.clear()
    predict(tmp_path / "out", trees, path)
    Ranker.load(trees).score(pa.Table.from_pylist(week))
    assert len([message for message in caplog.messages if " rows in = " in message]) == 2
    assert not [message for message in caplog.messages if "unique" in message]


def test_columns_of_the_query_come_along(trees: str, week: Rows, tmp_path: Path) -> None:
    predict(tmp_path / "out", trees, write_parquet(tmp_path / "week.parquet", week), meta=["user", "day"])
    users = {row["search"]: (row["user"], row["day"]) for row in week}
    for query, rows in read(tmp_path / "out").items():
        assert {(row["meta_user"], row["meta_day"]) for row in rows} == {users[query]}
        names = ["query_id", "item_id", "score", "rank", "meta_user", "meta_day", "period"]
        assert [sorted(row) for row in rows] == [sorted(names)] * len(rows)


def test_the_first_items_are_explained_beside_them(trees: str, week: Rows, tmp_path: Path) -> None:
    rows = write_parquet(tmp_path / "rows.parquet", week, WITHOUT_LABELS)
    predict(tmp_path / "out", trees, rows, explain=True)
    ranked, reasons = read(tmp_path / "out"), read(f"{tmp_path / 'out'}-explained")
    assert {query for query, items in ranked.items() if items[0]["score"] > items[-1]["score"]} <= reasons.keys()
    for query, of_query in reasons.items():
        first, *others = ranked[query]
        assert {row["item_id"] for row in of_query} == {first["item_id"]}
        assert {row["period"] for row in of_query} == {first["period"]}
        lead = first["score"] - float(np.mean([row["score"] for row in others]))
        assert of_query[0]["difference"] == pytest.approx(lead, rel=1e-4, abs=1e-6)
        assert sum(row["adds"] for row in of_query) == pytest.approx(lead, rel=1e-2, abs=1e-6)
    shown = {row["value"] for of_query in reasons.values() for row in of_query if row["feature"] == "colour"}
    assert shown <= {"red", "green", "blue"}
    before = Path(f"{tmp_path / 'out'}-explained/manifest.json").stat().st_mtime_ns
    predict(tmp_path / "out", trees, rows, explain=True)
    assert Path(f"{tmp_path / 'out'}-explained/manifest.json").stat().st_mtime_ns == before


def test_rows_that_cannot_be_used_are_in_the_quarantine_and_counted(
    trees: str, week: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [{**week[0]}, {**week[1], "product": "other", "f_price": np.inf}, {**week[2], "search": None}]
    path = write_parquet(tmp_path / "week.parquet", [*week, *bad])
    out, data = tmp_path / "out", tmp_path / "out-data"
    remedy = r"out-data/quarantine; mend the input or raise max_rejected$"
    with pytest.raises(InputError, match=rf"3 of {len(week) + 3} rows rejected .*{remedy}"):
        predict(out, trees, path)
    with pytest.raises(InputError, match=r"; set sort=true if the rows of a query do not lie together, mend the input"):
        predict(out, trees, path, sort=False)
    assert not out.exists()
    for _ in range(2):  # also if everything is up to date
        caplog.clear()
        predict(out, trees, path, max_rejected=0.1)
        assert caplog.messages[-1] == f"3 of {len(week) + 3} rows are not ranked: see {data}/quarantine"
    check(out, week, [trees])
    accounting = open_dataset(str(data)).manifest.accounting
    assert (accounting.rows_in, accounting.rows_kept, accounting.rows_rejected) == (len(week) + 3, len(week), 3)
    assert accounting.rules == {"duplicate_document": 1, "infinite": 1, "unparsable": 1}
    (kept,) = (data / "quarantine").glob("*.parquet")
    rejected = pq.ParquetFile(kept).read().to_pylist()
    assert sorted(row["rule"] for row in rejected) == sorted(accounting.rules)
    assert not list(out.rglob("*quarantine*"))


_HASHES = re.compile(r"(-[0-9a-f]{8})+(?=\.parquet$)")


def files_of(out: Path) -> dict[str, bytes]:
    """The ranked items by path below the directory, without hashes and the tokens of writers in it."""
    files = {_HASHES.sub("", str(path.relative_to(out))): path.read_bytes() for path in out.rglob("*.parquet")}
    assert len(files) == len(list(out.rglob("*.parquet")))
    return files


@pytest.mark.slow
def test_the_same_command_does_nothing_and_another_bundle_reads_no_row(
    trees: str, network: str, week: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_parquet(tmp_path / "week.parquet", week)
    predict(tmp_path / "out", trees, path)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    with caplog.at_level(logging.INFO, "ltrscale"):
        predict(tmp_path / "out", trees, path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    assert "out-data is up to date" in caplog.text
    assert "out is up to date (1 periods)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "ltrscale"):
        predict(tmp_path / "out", network, path)
    assert "out-data is up to date" in caplog.text
    check(tmp_path / "out", week, [network])


def test_the_list_of_runs_says_that_predictions_are_done_and_only_then(
    trees: str, week: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, out = write_parquet(tmp_path / "rows.parquet", week), tmp_path / "ranked"
    with monkeypatch.context() as patch:
        patch.setattr(ScoreJob, "work", _stops)
        with pytest.raises(KeyboardInterrupt):
            predict(out, trees, rows)
    assert read_run(str(out)).state != "done"
    predict(out, trees, rows)
    assert read_run(str(out)).state == "done"
    with monkeypatch.context() as patch:  # another week is begun, and the earlier one is there
        patch.setattr(ScoreJob, "work", _stops)
        with pytest.raises(KeyboardInterrupt):
            predict(out, trees, write_parquet(tmp_path / "next.parquet", make_rows(2000, 25, ["2026-03-09"], 2)))
    assert read_run(str(out)).state != "done"


def _stops(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_other_inputs_replace_the_items_or_are_added(trees: str, week: Rows, tmp_path: Path) -> None:
    later = make_rows(2000, 10, ["2026-03-09"], 2)
    one, two = (write_parquet(tmp_path / f"{i}.parquet", rows) for i, rows in enumerate((week, later)))
    predict(tmp_path / "out", trees, one)
    predict(tmp_path / "out", trees, two)
    check(tmp_path / "out", later, [trees])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"_run", "period=2026-W11"}
    predict(tmp_path / "weeks", trees, one, add=True)
    items = files_of(tmp_path / "weeks")
    predict(tmp_path / "weeks", trees, two, add=True)
    check(tmp_path / "weeks", [*week, *later], [trees])
    assert items.items() < files_of(tmp_path / "weeks").items()
    with pytest.raises(InputError, match="additions are there, which making the data set again would delete"):
        predict(tmp_path / "weeks", trees, one)


def test_output_of_another_job_is_not_replaced(home: Path, trees: str, week: Rows, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "week.parquet", week)
    with pytest.raises(InputError, match="the output of train_gbdt is there, which score would delete"):
        predict(trees, trees, path)
    scores = {"out": str(tmp_path / "scores"), "bundle": trees, "data": str(home / "data")}
    validate(ScoreJob, scores, "test").run()
    before = files_of(tmp_path / "scores")
    with pytest.raises(InputError, match="scores with a row per query are there; choose another directory"):
        predict(tmp_path / "scores", trees, path)
    prepare = {"inputs": path, "source": {"kind": "items", "columns": COLUMNS}, "sort": True}
    with pytest.raises(InputError, match="the output of score is there, which prepare would delete"):
        validate(PrepareJob, {"out": str(tmp_path / "scores"), "prepare": prepare}, "test").run()
    assert files_of(tmp_path / "scores") == before
    assert not (tmp_path / "scores" / "run").exists()
    assert not (tmp_path / "scores-data").exists()


class Killed(BaseException):
    """Stands for a kill: a BaseException, which the code does not catch."""


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, nightly(1), 2, nightly(3), 4])
@pytest.mark.parametrize("point", ["finish", "file"])
def test_stopped_anywhere_the_same_command_gives_the_same_items(
    trees: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, n: int
) -> None:
    rows = make_rows(3000, 12, ["2026-03-02", "2026-03-09", "2026-03-16"], 3)
    path = write_parquet(tmp_path / "weeks.parquet", rows)
    calls, method = iter(range(n)), getattr(storage.Commit, point)

    def stopping(*arguments: Any, **settings: Any) -> Any:
        if next(calls, None) is None:
            raise Killed
        return method(*arguments, **settings)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(storage.Commit, point, stopping)
        if point == "file" or n < 4:  # there are four commits: of the rows, and of three periods
            with pytest.raises(Killed):
                predict(out, trees, path)
        else:
            predict(out, trees, path)
    committed = {file.parent.name for file in out.glob("period=*/_manifest.json")}
    assert {Path(name).parent.name for name in files_of(out)} == committed
    predict(out, trees, path)
    check(out, rows, [trees])
    predict(tmp_path / "undisturbed", trees, path)
    assert files_of(out) == files_of(tmp_path / "undisturbed")


def edited(url: str, to: Path, edit: Callable[[dict[str, Any]], None]) -> str:
    """A copy of a bundle with another config.json."""
    origin = storage.read_manifest(url)
    assert origin is not None
    with storage.Commit(str(to)) as commit:
        for name in storage.listed_in(origin):
            data = storage.read_bytes(storage.join(url, name))
            if name == "config.json":
                values = json.loads(data)
                edit(values)
                data = json.dumps(values).encode()
            with commit.file(name) as path:
                path.write_bytes(data)
        commit.finish({k: v for k, v in origin.items() if k != "files"})
    return str(to)


def test_a_bundle_that_does_not_record_the_columns_needs_them(trees: str, week: Rows, tmp_path: Path) -> None:
    old = edited(trees, tmp_path / "old", lambda values: values.pop("read_as"))
    path = write_parquet(tmp_path / "week.parquet", week, WITHOUT_LABELS)
    with pytest.raises(InputError, match="old: does not record how its training data were read; set source, as in the"):
        predict(tmp_path / "out", old, path)
    source = {"kind": "items", "columns": {"query": "search", "item": "product", "time": "day", "features": ["*"]}}
    predict(tmp_path / "out", old, path, source=source, sort=True)
    check(tmp_path / "out", week, [trees])
    odd = edited(trees, tmp_path / "odd", lambda values: values["read_as"].update(sauce={}))
    with pytest.raises(
        InputError, match=r"odd: read_as of its config\.json: sauce: unknown key; did you mean 'source'"
    ):
        predict(tmp_path / "out2", odd, path)


def test_bundles_that_read_rows_differently_are_not_averaged(trees: str, week: Rows, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "week.parquet", week, WITHOUT_LABELS)
    filled = edited(
        trees, tmp_path / "filled", lambda values: values["read_as"]["source"]["columns"].update(fill={"f_age": 1.0})
    )
    with pytest.raises(InputError, match=r"/filled: .* otherwise than those of \S+/trees \(fill of f_age\), and all"):
        predict(tmp_path / "out", [trees, filled], path)
    lenient = edited(trees, tmp_path / "lenient", lambda values: values["read_as"].update(infinite="missing"))
    with pytest.raises(InputError, match=r"/lenient: .* otherwise than those of \S+/trees \(infinite\), and all"):
        predict(tmp_path / "out", [trees, lenient], path)
    assert not (tmp_path / "out-data").exists()


def test_other_columns_may_be_named(trees: str, week: Rows, tmp_path: Path) -> None:
    names = {"search": "request", "product": "sku"}
    rows = [{names.get(key, key): value for key, value in row.items()} for row in week]
    path = write_parquet(tmp_path / "week.parquet", rows)
    lacking = r"no column 'search' \(query.*\), 'product' \(item.*\), which \S+/trees needs; .* under source\.columns;"
    with pytest.raises(InputError, match=rf"week\.parquet: {lacking}"):
        predict(tmp_path / "out", trees, path)
    columns = {"query": "request", "item": "sku", "features": ["f_*"], "period": "day", "time": "day"}
    predict(tmp_path / "out", trees, path, source={"kind": "items", "columns": columns})
    check(tmp_path / "out", week, [trees])
    assert {row["period"] for items in read(tmp_path / "out").values() for row in items} == set(NEXT_WEEK)


def test_what_is_missing_is_named_before_anything_is_written(
    home: Path, trees: str, week: Rows, tmp_path: Path
) -> None:
    renamed = [{("price" if name == "f_price" else name): value for name, value in row.items()} for row in week]
    lacking = write_parquet(
        tmp_path / "lacking.parquet", renamed, [n for n in renamed[0] if n not in ("day", "colour")]
    )
    said = (
        r"no column 'day' \(time\), 'f_price' \(feature, perhaps 'price'\), 'colour' \(feature\), which \S+/trees needs"
    )
    pretrained = str(home / "pretrained")
    train = {"data": str(home / "data"), "periods": "2026-W06"}
    pretrain = {"epochs": 1, "network": NETWORK, "stream": {"streams": 1}}
    validate(PretrainJob, {"out": pretrained, "train": train, "pretrain": pretrain}, "test").run()
    assert bundle.load(pretrained).read_as == bundle.load(trees).read_as
    for url, path, message in (
        (trees, lacking, rf"lacking\.parquet: {said}; "),
        (trees, str(tmp_path / "none.parquet"), "none.parquet"),
        (pretrained, lacking, "a pretrained encoder cannot score; finetune it first"),
        (str(tmp_path / "nothing"), lacking, "no bundle is committed there"),
    ):
        with pytest.raises(InputError, match=message) as error:
            predict(tmp_path / "out", url, path)
        assert "\n" not in str(error.value)
    assert not read(tmp_path / "out")
    assert storage.read_manifest(str(tmp_path / "out-data")) is None


@pytest.mark.slow
def test_every_training_records_how_its_rows_were_read(home: Path, trees: str, network: str, tmp_path: Path) -> None:
    """A relabelled data set was read as its source, as long as that is there."""
    relabelled = {"out": str(tmp_path / "few"), "data": str(home / "data")}
    relabel = {"steps": [{"kind": "labelled_fraction", "fraction": 0.9}]}
    validate(RelabelJob, {**relabelled, "relabel": relabel}, "test").run()
    defaults = {"time_format": ["iso"], "time_zone": "UTC", "quotes": True, "decimal": ".", "encoding": "utf-8"}
    defaults |= {"period": "week", "unjudged": "reject"}
    wanted = {"kind": "items", "columns": {**COLUMNS, **defaults}, "joins": []}
    several = {"gbdt": {**TREES, "feature_fraction": 0.7}, "ensemble": {"candidates": 2}}
    for name, job, settings in (
        ("several", GBDTJob, several),
        ("semi", SemiJob, {"semi": {"gbdt": TREES, "pca": 1}}),
        ("combined", CombineJob, {"bundles": [network]}),
    ):
        job.model_validate({"out": str(tmp_path / name), "splits": splits(str(home / "data")), **settings}).run()
    found = [trees, network, train_trees(tmp_path, tmp_path / "few", "of_few")]
    for url in [*found, *(str(tmp_path / name) for name in ("several", "semi", "combined"))]:
        read_as = bundle.load(url).read_as
        source = read_as["source"]
        columns = {key: value for key, value in source["columns"].items() if value not in (None, [], {})}
        assert {**source, "columns": columns} == wanted, url
        assert read_as["sort"] is True
        assert str(home) not in json.dumps(read_as)
    copy = tmp_path / "lost"
    validate(RelabelJob, {"out": str(copy), "data": relabelled["out"], "relabel": relabel}, "test").run()
    (tmp_path / "few" / "manifest.json").unlink()
    assert bundle.load(train_trees(tmp_path, copy, "of_lost")).read_as == {}


@pytest.mark.slow
def test_positions_are_needed_by_models_that_read_them_alone(
    home: Path, network: str, week: Rows, tmp_path: Path
) -> None:
    by_position = train_network(home, "by_position", context={"kind": "dlcm", "state": 4, "units": 2})
    combined = {"out": str(tmp_path / "mean"), "bundles": [by_position], "splits": splits(str(home / "data"))}
    validate(CombineJob, combined, "test").run()
    assert not bundle.load(network).reads_positions
    path = write_parquet(tmp_path / "week.parquet", week, WITHOUT_LABELS)
    for url in (by_position, combined["out"]):
        with pytest.raises(InputError, match=r"week\.parquet: no column 'shown_at' \(positions\)"):
            predict(tmp_path / "out", url, path)
    predict(tmp_path / "out", [network, by_position], write_parquet(tmp_path / "shown.parquet", week))
    assert read(tmp_path / "out").keys() == {row["search"] for row in week}


@pytest.mark.slow
def test_letor_text_and_rows_of_whole_queries_are_read_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    groups = [rng.normal(size=(rng.integers(2, 6), 2)).astype(np.float32) for _ in range(60)]

    def text(path: Path, first: int, last: int) -> str:
        lines = [
            f"{int(x[0] > 0)} qid:{q} 1:{x[0]} 2:{x[1]} #docid = d{i}"
            for q in range(first, last)
            for i, x in enumerate(groups[q])
        ]
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    def lists(path: Path, first: int, last: int, *, labels: bool) -> str:
        table = {
            "query_id": [str(q) for q in range(first, last)],
            "docs": [[f"d{i}" for i in range(len(x))] for x in groups[first:last]],
            "b": [x[:, 1].tolist() for x in groups[first:last]],
            "a": [x[:, 0].tolist() for x in groups[first:last]],
        } | ({"y": [(x[:, 0] > 0).astype(float).tolist() for x in groups[first:last]]} if labels else {})
        pq.write_table(pa.table(table), path)
        return str(path)

    ends = {"2026-W06": (0, 30), "2026-W07": (30, 40), "2026-W08": (40, 50)}
    of_lists = {"kind": "groups", "columns": {"features": ["a", "b"], "labels": "y", "docs": "docs"}}
    for name, source, write, ending in (
        ("text", {"kind": "letor"}, text, "txt"),
        ("lists", of_lists, lambda *at: lists(*at, labels=True), "parquet"),
    ):
        inputs = [
            {"path": write(tmp_path / f"{name}-{period}.{ending}", *at), "period": period}
            for period, at in ends.items()
        ]
        prepare = {"inputs": inputs, "source": source}
        validate(PrepareJob, {"out": str(tmp_path / name), "prepare": prepare}, "test").run()
        model = train_trees(tmp_path, tmp_path / name, f"{name}-trees")
        new = (
            text(tmp_path / "new.txt", 50, 60)
            if name == "text"
            else lists(tmp_path / "new.parquet", 50, 60, labels=False)
        )
        predict(tmp_path / f"{name}-items", model, new)
        scorer, found = bundle.load(model).scorer(threads=1), read(tmp_path / f"{name}-items")
        assert found.keys() == {str(q) for q in range(50, 60)}
        for q in range(50, 60):
            scores = scorer(QueryGroups(torch.from_numpy(groups[q]), torch.tensor([0, len(groups[q])]))).tolist()
            assert {row["item_id"]: row["score"] for row in found[str(q)]} == {f"d{i}": s for i, s in enumerate(scores)}


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_ray_gives_the_items_of_one_process(network: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(3):
        rows = make_rows(100 * i, 20, ["2026-03-02", "2026-03-09"], i)
        write_parquet(tmp_path / "in" / f"{i}.parquet", sorted(rows, key=lambda row: str(row["search"])))
    for ray in (False, True):
        predict(tmp_path / f"ray-{ray}", network, str(tmp_path / "in"), ray=ray, sort=False)
    assert files_of(tmp_path / "ray-True") == files_of(tmp_path / "ray-False")
    assert len(files_of(tmp_path / "ray-True")) > 1


@pytest.mark.s3
def test_bundle_rows_and_items_may_lie_on_s3(s3: str, trees: str, week: Rows, tmp_path: Path) -> None:
    model, path = f"{s3}/predict/trees", f"{s3}/predict/week.parquet"
    with storage.Commit(model) as commit:
        origin: Mapping[str, Any] = storage.read_manifest(trees) or {}
        for name in storage.listed_in(origin):
            with commit.file(name) as local:
                local.write_bytes(storage.read_bytes(storage.join(trees, name)))
        commit.finish({k: v for k, v in origin.items() if k != "files"})
    storage.write_bytes(path, Path(write_parquet(tmp_path / "week.parquet", week)).read_bytes())
    later = make_rows(2000, 10, ["2026-03-09"], 2)
    for rows in (week, later):  # the second run removes the period of the first
        storage.write_bytes(path, Path(write_parquet(tmp_path / "week.parquet", rows)).read_bytes())
        predict(f"{s3}/predict/out", model, path)
        check(f"{s3}/predict/out", rows, [trees])


def test_the_command_line_names_bundle_inputs_and_out() -> None:
    flags = ["--bundle", "models/ranker", "--input", "next_week.parquet", "--out", "predictions/next_week"]
    done = run_here("predict", *flags, "--print-config")
    assert done.returncode == 0, done.stderr
    wanted = PredictJob.model_validate(
        {"bundle": "models/ranker", "inputs": "next_week.parquet", "out": "predictions/next_week"}
    )
    assert validate(PredictJob, yaml.safe_load(done.stdout), "test") == wanted
    assert wanted.data == "predictions/next_week-data"
