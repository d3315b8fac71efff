"""`jobs.init` on logs of different shape: who plays which role, and that each config runs. The rows are those of
docs/own-data.md."""

import logging
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from first_logs import LOGS
from nightly import nightly

from ltrscale.config import load, to_check
from ltrscale.data.dataset.manifest import Accounting, open_dataset
from ltrscale.errors import InputError
from ltrscale.evaluation.click_log import ClicksJob
from ltrscale.experiments.first.init import InitJob
from ltrscale.ingest.baidu import BaiduUltr
from ltrscale.ingest.items import Items
from ltrscale.ingest.letor import Letor
from ltrscale.ingest.prepare import PrepareJob

AT_NIGHT = {"MQ2008", "LightGBM's example", "news", "Cranfield"}  # large logs of kinds that a smaller one has
PAGE = Path(__file__).resolve().parents[3] / "docs" / "own-data.md"


def start(folder: Path, name: str) -> Path:
    """The configs that `jobs.init` writes for a log."""
    InitJob(file=str(LOGS[name][1](folder)), out=str(folder / "out")).run()
    return folder / "out" / "prepare.yaml"


def row(name: str, config: Path) -> str:
    """A log's row of the table: the roles in its config, with a question mark where they are marked."""
    source = load(PrepareJob, str(config)).prepare.source
    assert not isinstance(source, BaiduUltr)
    marked = [found[1] for line in to_check([str(config)]) if (found := re.search(r":\d+: (\w+): ", line))]
    if isinstance(source, Letor):
        cells = {"query": "by the text", "item": "by the text", "label": "first number", "time": "a period a file"}
    else:
        found = source.columns.model_dump()
        query = " within ".join([found["query"], *found.get("within", ())])
        cells = {"query": query, "item": found.get("item") or found.get("docs")}
        cells |= {"label": found.get("label") or found.get("labels"), "time": found["time"] or found["period_column"]}
    shown = [(cell or "-") + (" (?)" if role in marked else "") for role, cell in cells.items()]
    return f"| {' | '.join([name, LOGS[name][0], source.kind, *shown])} |"


def adds_up(a: Accounting) -> bool:
    """Whether every row and group is accounted for."""
    rows = a.rows_in == a.rows_kept + a.rows_rejected + a.rows_merged
    return rows and a.groups_in == a.groups_kept + a.groups_rejected and a.rows_kept > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [nightly(name) if name in AT_NIGHT else name for name in LOGS])
def test_roles_are_those_of_the_table_and_the_config_runs(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not LOGS[name][0].startswith("made:"):
        request.getfixturevalue("shared_data")  # skips where it is not there
    config = start(tmp_path, name)
    assert row(name, config) in PAGE.read_text(encoding="utf-8").splitlines()
    job = load(PrepareJob, str(config))
    job.run()
    manifest = open_dataset(job.out).manifest
    assert adds_up(manifest.accounting)
    assert manifest.accounting.groups_kept == manifest.accounting.groups_in


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shop", "hotels", "baskets", "visits", "faults"])
def test_neither_the_order_of_columns_nor_that_of_rows_decides(name: str, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    expected = row(name, start(tmp_path, name))
    log = pd.read_csv(LOGS[name][1](tmp_path), dtype=str)
    log = log[log.columns[::-1]]
    if name == "shop":  # the rows of the others stand together, which is how their lists are known
        log = log.sample(frac=1, random_state=0)
    log.to_csv(tmp_path / "again" / "log.csv", index=False)
    InitJob(file=str(tmp_path / "again" / "log.csv"), out=str(tmp_path / "again")).run()
    assert row(name, tmp_path / "again" / "prepare.yaml") == expected


@pytest.mark.slow
def test_the_shop_s_alternatives_stand_beside_the_choice(tmp_path: Path) -> None:
    lines = start(tmp_path, "shop").read_text().splitlines()
    below = {line.split()[0].rstrip(":"): lines[i + 1 : i + 4] for i, line in enumerate(lines) if line.split()}
    assert "or session_id: " in below["query"][0]
    assert "position comes again in" in below["query"][0]
    assert "or listed_on: " in below["time"][0]
    assert "product_id decides it" in below["time"][0]
    source = load(PrepareJob, str(tmp_path / "out" / "prepare.yaml")).prepare.source
    assert isinstance(source, Items)
    columns = source.columns
    assert (columns.gain, columns.positions, columns.clicks) == ("revenue", "position", "clicked")
    assert columns.dates == {"listed_on": ("days_before",)}
    used = {*columns.features, *columns.categorical, *columns.meta}
    assert not used & {"clicked", "added_to_cart", "revenue", "item_name"}
    assert {"session_id", "user_id"} == {*columns.meta}


@pytest.mark.slow
def test_an_event_s_grades_rise_and_what_clicks_lack_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = start(tmp_path, "events")
    job = load(PrepareJob, str(config))
    assert isinstance(job.prepare.source, Items)
    assert job.prepare.source.columns.grades == {"view": 0, "cart": 1, "purchase": 2}
    assert job.prepare.duplicates == "max_label"
    [said] = [line for line in caplog.messages if "jobs.clicks would" in line]
    assert "needs the position at which an item was shown, and a column of 0 and 1 with clicks" in said
    job.run()
    log = pd.read_csv(tmp_path / "events.csv")
    best = (
        log["event_type"].map({"view": 0, "cart": 1, "purchase": 2}).groupby([log["user_session"], log["product_id"]])
    )
    counts = best.max().value_counts()
    assert open_dataset(job.out).manifest.label_counts == {f"{grade}": n for grade, n in sorted(counts.items())}


@pytest.mark.slow
def test_positions_and_clicks_give_a_config_of_jobs_clicks(tmp_path: Path) -> None:
    load(PrepareJob, str(start(tmp_path, "hotels"))).run()
    job = load(ClicksJob, str(tmp_path / "out" / "clicks.yaml"))
    assert job.run()
    assert (tmp_path / "out" / "clicks" / "report.md").exists()


@pytest.mark.slow
def test_a_customer_s_days_are_lists_of_their_own(tmp_path: Path) -> None:
    job = load(PrepareJob, str(start(tmp_path, "baskets")))
    job.run()
    log = pd.read_csv(tmp_path / "baskets.csv")
    visits = log.groupby(["CUSTOMER_ID", "TRANSACTION_DT"])["PRODUCT_ID"].nunique()
    manifest = open_dataset(job.out).manifest
    assert (manifest.counts().groups, manifest.counts().documents) == (len(visits), visits.sum())


def test_folds_of_one_collection_are_not_one_data_set(tmp_path: Path) -> None:
    for fold in ("Fold1", "Fold2"):
        (tmp_path / "letor" / fold).mkdir(parents=True)
        (tmp_path / "letor" / fold / "train.txt").write_text("1 qid:1 1:0.5 2:1\n0 qid:1 1:0.25 2:0\n")
    with pytest.raises(InputError, match=r"Fold1/train\.txt, .*Fold2/train\.txt: .* name the folder of one"):
        InitJob(file=str(tmp_path / "letor"), out=str(tmp_path / "out")).run()


def test_judgements_without_candidates_are_no_lists(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "queries.tsv").write_text("qid\ttext\nq1\ta question of some words\nq2\tanother one of some words\n")
    (folder / "documents.tsv").write_text("docid\ttext\nd1\tan answer of some words\nd2\tanother one of some words\n")
    (folder / "qrels.tsv").write_text("qid\tdocid\tgrade\nq1\td1\t1\nq2\td1\t0\nq2\td2\t1\n")
    with pytest.raises(
        InputError, match=r"qrels\.tsv: judgements alone are no lists to rank: put a table of candidates"
    ):
        InitJob(file=str(folder), out=str(tmp_path / "out")).run()


def test_an_item_s_own_lists_do_not_make_it_a_query(tmp_path: Path) -> None:
    log = pq.read_table(LOGS["candidates"][1](tmp_path))
    log = log.append_column("embedding", pa.array([[0.5, 0.25]] * len(log)))
    log = log.append_column("tags", pa.array([["new"] * (i % 3) for i in range(len(log))]))
    pq.write_table(log, tmp_path / "lists.parquet")
    InitJob(file=str(tmp_path / "lists.parquet"), out=str(tmp_path / "out")).run()
    source = load(PrepareJob, str(tmp_path / "out" / "prepare.yaml")).prepare.source
    assert isinstance(source, Items)
    assert (source.columns.query, source.columns.item) == ("qid", "doc")
    assert not {"embedding", "tags"} & {*source.columns.features, *source.columns.categorical}


@pytest.mark.slow
def test_a_folder_of_small_files_is_one_log(tmp_path: Path) -> None:
    """A file alone has too few rows to show what a column is, and types differ where one has none of its values."""
    log = pq.read_table(LOGS["candidates"][1](tmp_path)).to_pandas()
    log["seller_id"] = log["doc"].str.extract(r"(\d+)").astype(int) % 7 + 1000
    log["fresh"] = pd.Series(np.where(log.index < 20, None, log.index % 5 == 0), dtype=object)
    log["warmth"] = np.where(log.index < 20, 3.0, log.index % 5 + 0.5)
    (tmp_path / "log").mkdir()
    for start in range(0, len(log), 10):
        log[start : start + 10].to_parquet(tmp_path / "log" / f"{start:06}.parquet", index=False)
    InitJob(file=str(tmp_path / "log"), out=str(tmp_path / "out")).run()
    config = load(PrepareJob, str(tmp_path / "out" / "prepare.yaml"))
    assert isinstance(config.prepare.source, Items)
    assert {"fresh", "warmth"} <= {*config.prepare.source.columns.features}
    assert config.prepare.source.columns.categorical == ("brand", "seller_id")
    config.run()
    assert open_dataset(config.out).manifest.accounting.rows_kept == len(log)


@pytest.mark.slow
def test_words_and_commas_are_numbers_wherever_init_looks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A label of True and False, and numbers with commas, of a log without a point."""
    caplog.set_level(logging.INFO)
    rng, lists = np.random.default_rng(0), np.repeat(np.arange(200), 6)
    log = pd.DataFrame({"search_id": lists, "clicked": rng.random(len(lists)) < 0.2, "price": rng.random(len(lists))})
    log["read"] = log["clicked"] * 0.5 + 0.01 * rng.random(len(log))
    log.round(3).to_csv(tmp_path / "log.csv", index=False, sep=";", decimal=",")
    InitJob(file=str(tmp_path / "log.csv"), out=str(tmp_path / "out")).run()
    text = (tmp_path / "out" / "prepare.yaml").read_text()
    assert "above 0 in" not in text
    assert "read alone ranks at NDCG@5 1.000" in text
    assert load(PrepareJob, str(tmp_path / "out" / "prepare.yaml")).run()


@pytest.mark.parametrize(
    ("use", "said"), [("label", "'both' has lists"), ("query", "'empty' has no value in the first")]
)
def test_a_column_that_cannot_have_its_role_is_refused(use: str, said: str, tmp_path: Path) -> None:
    log = pq.read_table(LOGS["candidates"][1](tmp_path))
    log = log.append_column("both", pa.array([[0.5, 0.25]] * len(log)))
    log = log.append_column("empty", pa.nulls(len(log), pa.string()))
    pq.write_table(log, tmp_path / "odd.parquet")
    with pytest.raises(InputError, match=rf"odd\.parquet: {use}: {said}"):
        InitJob.model_validate({"file": str(tmp_path / "odd.parquet"), use: said.split("'")[1]}).run()


@pytest.mark.slow
@pytest.mark.parametrize("matrix", [True, False])
def test_all_features_of_a_query_may_be_in_one_list(tmp_path: Path, matrix: bool) -> None:
    rng, lengths = np.random.default_rng(0), [3, 5, 4, 6] * 10
    values = [rng.normal(size=(n, 7)) for n in lengths]
    table = {
        "query_id": [f"q{i}" for i in range(40)],
        "features": [each.tolist() if matrix else each.ravel().tolist() for each in values],
        "labels": [(each[:, 0] > 0).astype(int).tolist() for each in values],
    }
    pq.write_table(pa.table(table), tmp_path / "groups.parquet")
    InitJob(file=str(tmp_path / "groups.parquet"), out=str(tmp_path / "out")).run()
    job = load(PrepareJob, str(tmp_path / "out" / "prepare.yaml"))
    job.run()
    manifest = open_dataset(job.out).manifest
    assert (len(manifest.features), manifest.counts().documents, manifest.counts().labelled) == (7, sum(lengths), 40)
