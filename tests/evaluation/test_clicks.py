"""The look at a click log: counts of a loop, sessions whatever the layout, refusal, labels, periods, the job."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click_sessions import Row, position_based, rows_of, write_log
from linear_teacher import linear_teacher

from ltrscale import storage
from ltrscale.clicks.log import read_log
from ltrscale.config import validate
from ltrscale.derive.relabel import RelabelConfig, RelabelJob
from ltrscale.errors import InputError
from ltrscale.evaluation import click_log
from ltrscale.evaluation.click_log import ClicksJob
from ltrscale.evaluation.click_log_page import UnderstoodLog, document
from ltrscale.evaluation.measure.evaluate import evaluate
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.reports.document import Text
from ltrscale.reports.render import markdown

NAN = math.nan


def config(data: str | Sequence[str], **keys: Any) -> ClicksJob:
    return validate(ClicksJob, {"out": "unused", "log": {"data": data}, "query": "meta_query", **keys}, "test")


def page(found: UnderstoodLog) -> str:
    """The report in Markdown."""
    return markdown(document(found))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return rows_of(
        position_based(0, queries=60, impressions=30, positions=6, documents=10), periods=["a", "b", "c", "d"]
    )


@pytest.fixture(scope="module")
def data(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_log(str(tmp_path_factory.mktemp("log") / "data"), rows)


@pytest.fixture(scope="module")
def found(data: str) -> UnderstoodLog:
    return config(data, depth=6).understood()


def odd_rows() -> list[Row]:
    """Groups with holes, without lists, below the depth, with two documents at one position."""
    ids = ["a", "b", "c", "d"]
    lists: list[tuple[Any, Any, Any]] = [
        ([1, 2, 3, 4], [0, 1, 0, 1], ids),
        ([2, NAN, 1, 7], [1, 0, 1, 1], ids),
        ([3, 1, 4, 2], [0, 0, 0, 0], ids),
        ([1, 1, 2, 3], [1, 0, 0, 0], ids),
        ([1, 2, 3, 5], [1, 1, 1, 1], ids),
        (None, [1, 1, 1, 1], ids),
        ([1, 2, 3, 4], None, ids),
        ([1, 2, 3, 4], [1, 0, 0, 0], None),
    ]
    return [
        {"query_id": f"q#{i + 1}", "period": "p", "positions": p, "clicks": c, "doc_ids": d, "labels": [0.0, 1, 0, 2]}
        for i, (p, c, d) in enumerate(lists)
    ]


def test_counts_by_position_are_those_of_a_loop(tmp_path: Path) -> None:
    read = read_log(config(write_log(str(tmp_path / "d"), odd_rows()), query="query_id", depth=3))
    shown, clicked, last, clicks, below = [0] * 3, [0] * 3, [0] * 3, [0] * 5, [0, 0]
    for row in odd_rows():
        if any(row[name] is None for name in ("positions", "clicks", "doc_ids")):
            continue
        at = {int(p): c for p, c in zip(row["positions"], row["clicks"], strict=True) if p == p}
        places = [(int(p), c) for p, c in zip(row["positions"], row["clicks"], strict=True) if p == p]
        for p, c in places:
            if p <= 3:
                shown[p - 1] += 1
                clicked[p - 1] += int(c)
            else:
                below[0] += 1
                below[1] += int(c)
        hits = [p for p, c in places if c]
        clicks[min(4, len(hits))] += 1
        if hits and max(hits) <= 3:
            last[max(hits) - 1] += 1
        assert at
    t = read.tally
    assert (t.shown_P.tolist(), t.clicked_P.tolist(), t.last_P.tolist()) == (shown, clicked, last)
    assert t.clicks.tolist() == clicks
    assert (t.groups, t.unusable, t.doubled, t.below, t.clicked_below) == (8, 3, 1, *below)
    assert len(read.sessions) == 4  # without the doubled one
    assert read.sessions.pairs == 4  # copies of one query have the same documents
    assert np.unique(read.sessions.queries_S).tolist() == [0]


@pytest.mark.slow
def test_the_layout_of_files_changes_nothing(rows: list[Row], found: UnderstoodLog, tmp_path: Path) -> None:
    small = write_log(str(tmp_path / "small"), rows, row_group_bytes=2_000)
    other = config(small, depth=6).understood()
    assert other.replace(data=found.data) == found


def test_all_that_is_reported_is_there(found: UnderstoodLog) -> None:
    assert (found.sessions, found.held_out, found.queries, found.share) == (1800, 450, 60, 1.0)
    assert found.labels == "labels"
    assert found.refusal is None
    assert found.links.connected
    p = found.propensities
    assert p.harvested is not None
    assert p.em is not None
    for figures in (p.ratio, p.harvested, p.em):
        assert figures[0].mean == 1
        assert len(figures) == 6
    truth = 1 / np.arange(1, 7)
    assert np.abs(np.log([f.mean for f in p.harvested if f.mean] / truth)).max() < 0.35
    by_name = {model.name: model for model in found.models}
    assert next(iter(by_name)) == "as shown"
    base, pbm = by_name["ratio of the position"], by_name["PBM"]
    assert base.perplexity is not None
    assert pbm.perplexity is not None
    assert pbm.perplexity < base.perplexity
    assert pbm.ndcg is not None
    assert base.ndcg is None
    assert found.trust is not None
    assert found.trust.judged_by == "labels"


def still(rows: list[Row]) -> list[Row]:
    """Each document at one position, whatever is clicked."""
    return [{**row, "doc_ids": [f"{row['meta_query']}-{p}" for p in row["positions"]]} for row in rows]


@pytest.mark.slow
def test_it_refuses_where_no_document_moves(rows: list[Row], tmp_path: Path) -> None:
    found = config(write_log(str(tmp_path / "still"), still(rows)), depth=6).understood()
    assert found.propensities.harvested is None
    assert found.propensities.em is None
    assert found.propensities.ratio[5].mean is not None
    refusal = found.refusal
    assert refusal is not None
    assert "\n" not in refusal
    assert refusal.startswith("Cannot tell relevance from position: no document of a query was shown at two positions")
    assert "Swap neighbours at random for a share of the traffic" in refusal
    assert refusal in page(found)
    assert Text(refusal) in document(found).opening
    assert found.trust is not None
    assert not found.trust.harvested
    assert "harvested" not in page(found).partition("*Click models*")[0]


@pytest.mark.slow
def test_it_refuses_positions_that_nothing_links_and_names_the_depth_that_would_do(
    rows: list[Row], tmp_path: Path
) -> None:
    lower = [
        {**row, "doc_ids": [*row["doc_ids"][:4], *(f"{row['meta_query']}-{p}" for p in row["positions"][4:])]}
        for row in rows
    ]
    url = write_log(str(tmp_path / "lower"), lower)
    found = config(url, depth=6).understood()
    assert found.links.parts == ((1, 2, 3, 4), (5,), (6,))
    assert found.refusal is not None
    assert "parts: 1-4; 5; 6, so no" in found.refusal
    assert found.refusal.endswith("or set depth to 4.")
    assert found.propensities.harvested is None
    assert config(url, depth=4).understood().propensities.harvested is not None


@pytest.mark.slow
def test_em_needs_documents_that_were_shown_often(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click_log, "_IMPRESSIONS_PER_PAIR", 500)
    found = config(data, depth=6).understood()
    assert found.propensities.em is None
    assert found.propensities.harvested is not None
    assert "propensity: EM" not in page(found)


@pytest.mark.slow
def test_labels_are_those_of_experts(rows: list[Row], tmp_path: Path) -> None:
    some = rows[:400]
    clicked = write_log(str(tmp_path / "clicked"), [{**row, "labels": row["clicks"]} for row in some])
    read = read_log(config(clicked))
    assert read.labels is None
    assert np.isnan(read.labels_D).all()
    before = [{**row, "relevance": [3.0] * len(row["labels"]), "labels": row["clicks"]} for row in some]
    read = read_log(config(write_log(str(tmp_path / "before"), before)))
    assert read.labels == "relevance"
    assert (read.labels_D == 3).all()
    none = [{**row, "labels": None} for row in some]
    assert read_log(config(write_log(str(tmp_path / "none"), none))).labels is None
    found = config(clicked).understood()
    assert all(model.ndcg is None for model in found.models)
    assert found.trust is None or found.trust.judged_by == "clicks"
    assert "NDCG@" not in page(found)


@pytest.mark.slow
def test_clicks_of_a_data_set_without_relevance_are_no_labels(rows: list[Row], tmp_path: Path) -> None:
    clicked = [{**row, "labels": row["clicks"]} for row in rows[:400]]
    judged = [{**row, "meta_query": f"judged {row['meta_query']}", "relevance": [3.0] * 6} for row in clicked]
    without, beside = (write_log(str(tmp_path / str(n)), given) for n, given in enumerate((clicked, judged)))
    held_out = {"data": without, "periods": ["c", "d"]}
    for keys in ({"log": {"data": [without, beside]}}, {"log": {"data": beside}, "held_out": held_out}):
        read = read_log(config(beside, **keys))
        assert read.labels == "relevance"
        assert np.unique(read.labels_D[~np.isnan(read.labels_D)]).tolist() == [3]
        assert np.isnan(read.labels_D).any()


def test_a_pair_has_the_label_of_its_first_session_with_one(tmp_path: Path) -> None:
    shown = {"period": "p", "meta_query": "q", "positions": [1.0, 2.0], "clicks": [1.0, 0.0], "doc_ids": ["a", "b"]}
    labels: list[Any] = [None, [NAN, 4.0], [2.0, 3.0]]
    given = [{**shown, "query_id": f"s{i}", "labels": of_session} for i, of_session in enumerate(labels)]
    read = read_log(config(write_log(str(tmp_path / "d"), given)))
    assert sorted(read.labels_D.tolist()) == [2, 4]


@pytest.mark.slow
def test_a_label_that_is_a_decimal_is_relevant_from_that_decimal_on(rows: list[Row], tmp_path: Path) -> None:
    trusts = []
    for name, grade in (("whole", 1.0), ("decimal", 0.7)):
        judged = [{**row, "relevance": [grade * (d % 2) for d in range(len(row["clicks"]))]} for row in rows]
        log = write_log(str(tmp_path / name), [{**row, "labels": row["clicks"]} for row in judged])
        trusts.append(config(log, depth=6, relevant_from=grade).understood().trust)
    assert trusts[0] is not None
    assert trusts[0].judged_by == "relevance"
    assert trusts[0].good > 0
    assert trusts[1] == trusts[0]


@pytest.mark.slow
def test_the_last_fifth_of_the_periods_is_held_out_unless_a_split_is(
    data: str,
) -> None:
    read = read_log(config(data))
    assert (read.held_out_S.sum(), read.in_log_S.sum()) == (450, 1800)
    only = {"log": {"data": data, "periods": "a"}}
    assert not read_log(config(data, **only)).held_out_S.any()
    assert config(data, **only).understood().held_out == 0
    apart = read_log(config(data, **only, held_out={"data": data, "periods": ["b", "c"]}))
    assert (apart.in_log_S.sum(), apart.held_out_S.sum()) == (450, 900)
    assert not (apart.in_log_S & apart.held_out_S).any()
    assert apart.tally.groups == 450
    with pytest.raises(InputError, match=r"held_out and log both read .*; name other periods or another data set"):
        read_log(config(data, held_out={"data": data, "periods": "d"}))
    with pytest.raises(InputError, match="'e'"):
        read_log(config(data, held_out={"data": data, "periods": "e"}))


def test_a_sample_is_of_whole_queries(data: str) -> None:
    read = read_log(config(data, sessions=600))
    assert read.share == pytest.approx(1 / 3)
    sizes = np.bincount(read.sessions.queries_S)
    assert (sizes == 30).all()
    assert 5 < len(sizes) < 40
    assert read.tally.groups == 1800


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "remedy"),
    [("positions", "columns.positions"), ("clicks", "columns.clicks"), ("doc_ids", "columns.item")],
)
def test_a_column_that_is_missing_is_named_with_its_remedy(
    rows: list[Row], tmp_path: Path, column: str, remedy: str
) -> None:
    less = [{name: value for name, value in row.items() if name != column} for row in rows[:50]]
    filled = [{**row, "positions": row.get("positions")} for row in less] if column == "positions" else less
    url = write_log(str(tmp_path / "less"), filled)
    with pytest.raises(InputError, match=remedy):
        read_log(config(url))


def test_bad_values_are_errors(rows: list[Row], tmp_path: Path) -> None:
    low = [{**rows[0], "positions": [0.0, *rows[0]["positions"][1:]]}]
    with pytest.raises(InputError, match="query s0 of period a has a position below 1; count from 1"):
        read_log(config(write_log(str(tmp_path / "low"), low)))
    with pytest.raises(InputError, match="no column 'meta_user'; name a column that is there"):
        read_log(config(write_log(str(tmp_path / "user"), rows[:3]), query="meta_user"))


@pytest.mark.slow
def test_the_job_reports_and_is_done_once(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "report")
    job = validate(ClicksJob, {"out": out, "log": {"data": data, "periods": ["a", "b"]}, "query": "meta_query"}, "test")
    assert job.run()
    printed = capsys.readouterr().out
    assert "| position | " in printed
    assert printed.endswith("report/report.md\n")
    assert (tmp_path / "report" / "clicks.png").stat().st_size > 1000
    text = (tmp_path / "report" / "report.md").read_text()
    for title in ("Clicks, exposure and propensities", "Do positions overlap?", "Trust", "Click models"):
        assert title in text
    assert json.loads((tmp_path / "report" / "metrics.json").read_text())["exposure"]["groups"] == 900
    manifest = storage.read_manifest(out)
    assert manifest is not None
    assert manifest["made_by"]["stage"] == "clicks"
    assert not job.run()
    assert "| position | " in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(("jitter", "trust"), [(2.0, 0.0), (0.0, 0.0), (2.0, 0.5)])
def test_what_relabelling_simulates_is_found(rows: list[Row], tmp_path: Path, jitter: float, trust: float) -> None:
    graded = [{**row, "clicks": None} for row in rows[::30]]
    url = write_log(str(tmp_path / "graded"), graded)
    step = {"kind": "clicks", "user": {"kind": "pbm", "trust": trust}, "noise": 0.2, "jitter": jitter, "copies": 150}
    steps = RelabelConfig.model_validate({"steps": [step]})
    RelabelJob(relabel=steps, data=url, out=str(tmp_path / "log")).work({}, lambda _: None)
    found = config(str(tmp_path / "log"), query="query_id", depth=6).understood()
    assert found.labels == "relevance"
    assert found.exposure.groups == 60 * 150
    if jitter == 0:
        assert found.refusal is not None
        return
    assert found.refusal is None
    assert found.propensities.harvested is not None
    values = np.array([figure.mean for figure in found.propensities.harvested], float)
    errors = np.log(values * np.arange(1, 7))
    assert found.trust is not None
    assert found.trust.slope.high is not None
    if trust:
        assert errors[1:].max() < 0
        assert found.trust.slope.high < 0
    else:
        assert np.abs(errors).max() < 0.2
        assert found.trust.slope.high > 0


@pytest.fixture(scope="module")
def judged(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A log with a feature, one period of which has no clicks in half of its groups, and a ranker by that feature."""
    rng, folder, some = np.random.default_rng(0), tmp_path_factory.mktemp("judged"), []
    for i, row in enumerate(rows[:240]):
        x = rng.normal(size=len(row["labels"])).tolist()
        some.append({**row, "x": x, "clicks": None if row["period"] == "d" and i % 8 == 3 else row["clicks"]})
    url = write_log(str(folder / "data"), some, row_group_bytes=1_500)
    return url, linear_teacher(str(folder / "model"), url, [1.0])


def evaluation(judged: tuple[str, str], **keys: Any) -> EvaluateConfig:
    url, model = judged
    splits = {name: {"data": url, "periods": p} for name, p in (("train", "a"), ("validation", "b"), ("test", "d"))}
    outliers = {"outliers": {"gap": None}, "resamples": 100}
    return EvaluateConfig(models={"linear": (model,)}, baseline=None, splits=splits, **outliers, **keys)


@pytest.mark.slow
def test_rankers_are_judged_on_labels_and_on_clicks_side_by_side(judged: tuple[str, str], tmp_path: Path) -> None:
    plain = evaluate(evaluation(judged), str(tmp_path / "plain"), made_by={})
    both = evaluate(evaluation(judged, clicks=True), str(tmp_path / "both"), made_by={})
    before, after = (found.methods[0].slices["all"].summaries for found in (plain, both))
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"click_ndcg@1", "click_ndcg@5", "click_ndcg@10"}
    values = []
    (path,) = Path(judged[0]).glob("period=d/*.parquet")
    for row in pq.ParquetFile(path).read().to_pylist():
        if row["clicks"] is not None and any(row["clicks"]):
            order = np.argsort(-np.array(row["features"]))
            discounts = 1 / np.log2(np.arange(2, 2 + len(order)))
            ideal = np.sort(row["clicks"])[::-1][:5] @ discounts[:5]
            values.append(np.array(row["clicks"])[order][:5] @ discounts[:5] / ideal)
    assert after["click_ndcg@5"].mean == pytest.approx(np.mean(values))
    assert after["click_ndcg@5"].groups == len(values)
    text = (tmp_path / "both" / "report.md").read_text()
    assert "| Click-NDCG@5 |" in text.partition("## All metrics")[0]
    assert "Click-NDCG is NDCG of the clicks" in text
    assert both.policies["click_ndcg@5"].startswith("ties by expectation; gain 1 of a click")
    groups = pq.read_table(tmp_path / "both" / "groups.parquet")
    assert {"ndcg@5", "click_ndcg@5"} <= set(groups.column_names)


def test_clicks_that_are_not_there_are_named(judged: tuple[str, str], rows: list[Row], tmp_path: Path) -> None:
    less = [{name: value for name, value in row.items() if name != "clicks"} for row in rows[:80]]
    url = write_log(str(tmp_path / "less"), less)
    config = evaluation((url, judged[1]), clicks=True)
    with pytest.raises(InputError, match=r"no column 'clicks', which evaluate\.clicks names; leave it out"):
        evaluate(config, str(tmp_path / "out"), made_by={})
