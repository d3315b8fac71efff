"""Leaks on a shop's log: prepare and the report ask, the gate refuses without answer; real data raise no question."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from nightly import nightly
from shop import weeks

from ltrscale.bundle import FeatureOrder, load
from ltrscale.config import load as load_config
from ltrscale.config import validate
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError, Refused
from ltrscale.evaluation.bounds import Bounds, GateVerdict, check_leaks
from ltrscale.evaluation.gate import GateJob
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.experiments.first.counted import asked_of
from ltrscale.experiments.first.init import InitJob
from ltrscale.experiments.report.make import _paragraphs
from ltrscale.experiments.report.recorded import feature_blocks
from ltrscale.experiments.report.sources import Sources
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import Guess
from ltrscale.ingest.leaks import examine_features, questions
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.ingest.profile import files_of
from ltrscale.ingest.profile import first_columns as look_at
from ltrscale.ingest.structure import read_structure
from ltrscale.progress import log
from ltrscale.reports.document import Command, Table, Text
from ltrscale.training.untrained import FeatureJob
from ltrscale.trees.gbdt import GBDTJob

ROOT = Path(__file__).resolve().parents[3]
LEAK = "page_seconds"
HONEST = ["list_price", "margin", "rating", "n_reviews", "text_match", "sales_30d"]
PERIODS = {"train": ["2026-W01..2026-W02"], "validation": ["2026-W03"], "test": ["2026-W04"]}
LOOSE = {"margin": 0.9, "slice_margin": 0.9, "groups": 20, "drifted": None, "score_psi": None}
TREES = {"num_trees": 20, "num_threads": 1, "min_data_in_leaf": 5}


def prepared(folder: Path, label: str, *others: str, categorical: list[str]) -> str:
    """The shop's log as a data set, with these columns beside the honest ones."""
    path = folder / "log.csv"
    if not path.exists():
        weeks(1, 4, 300).to_csv(path, index=False)
    columns = {
        "query": "search_id",
        "item": "product_id",
        "label": label,
        "time": "searched_at",
        "features": [*HONEST, *others],
        "categorical": categorical,
    }
    prepare = {"inputs": str(path), "sort": True, "max_rejected": 0.1, "source": {"kind": "items", "columns": columns}}
    out = str(folder / "-".join(["data", label, *others]))
    validate(PrepareJob, {"out": out, "prepare": prepare}, "test").run()
    return out


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """A data set with a leak, what was said of it, trees that read the leak and trees that do not, an evaluation."""
    folder, lines, patch = tmp_path_factory.mktemp("shop"), [], pytest.MonkeyPatch()
    for level in ("info", "warning"):
        patch.setattr(log, level, lambda text, *values: lines.append(text % values))
    data = prepared(folder, "clicked", LEAK, categorical=["brand", "device", "search_id"])
    patch.undo()
    splits = {name: {"data": data, "periods": of} for name, of in PERIODS.items()}
    bundles = {}
    for name, left_out in (("leaky", ["search_id"]), ("honest", ["search_id", LEAK])):
        bundles[name] = str(folder / name)
        train = {**splits["train"], "leave_out": left_out}
        validate(GBDTJob, {"out": bundles[name], "splits": {**splits, "train": train}, "gbdt": TREES}, "test").run()
    evaluate = {"models": bundles, "splits": splits, "baseline": "honest", "resamples": 200}
    validate(EvaluateJob, {"out": str(folder / "evaluation"), "evaluate": evaluate}, "test").run()
    return {**bundles, "data": data, "lines": lines, "splits": splits, "folder": folder}


def asked(lines: list[str]) -> list[str]:
    return [line for line in lines if "is it known when the list is shown?" in line]


def gate(shop: Mapping[str, Any], name: str, **bounds: Any) -> GateJob:
    out = str(shop["folder"] / f"gate-{name}-{len(bounds)}")
    evaluate = {"resamples": 200, "outliers": {"gap": None}}
    models = {"production": shop["honest"], "candidate": shop[name]}
    settings = {"splits": shop["splits"], "evaluate": evaluate, "bounds": {**LOOSE, **bounds}}
    return validate(GateJob, {"out": out, **models, **settings}, "test")


@pytest.mark.slow
def test_prepare_asks_of_the_leak_alone_and_names_what_names_a_query(shop: Mapping[str, Any]) -> None:
    (question,) = asked(shop["lines"])
    assert question.startswith(f"prepare: {LEAK} alone ranks at NDCG@5 1.000 (random order 0.3")
    (equal,) = [line for line in shop["lines"] if "equal within every query" in line]
    assert "query: device, search_id; alone they order no list" in equal
    (names,) = [line for line in shop["lines"] if "nearly unique to a query" in line]
    assert "query: search_id; trees and networks memorise" in names


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_init_marks_the_leak_alone(
    kept: bool, shop: Mapping[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ltrscale")
    log_of = pd.read_csv(shop["folder"] / "log.csv")
    (log_of if kept else log_of.drop(columns=LEAK)).to_csv(tmp_path / "shop.csv", index=False)
    InitJob(file=str(tmp_path / "shop.csv"), label="clicked", out=str(tmp_path / "shop")).run()
    marked = asked((tmp_path / "shop" / "prepare.yaml").read_text().splitlines())
    assert [line.split(" alone ranks at")[0].strip() for line in marked] == [f"- {LEAK} # CHECK: {LEAK}"] * kept
    assert [line.split(" alone ranks at")[0] for line in asked(caplog.messages)] == [f"init: CHECK: {LEAK}"] * kept


@pytest.mark.parametrize(
    ("label", "grades"), [(["view", "cart", "view"], [0.0, 1.0, 0.0]), ([0.0, 90.0, 2000.0], [0.0, 1.0, 2.0])]
)
def test_a_label_is_looked_at_as_prepare_grades_it(label: list[Any], grades: list[float], tmp_path: Path) -> None:
    rows = [(f"q{q}", label[i], grades[i] + 0.01 * q) for q in range(40) for i in range(3)]
    pd.DataFrame(rows, columns=["search_id", "event", "x"]).to_csv(tmp_path / "log.csv", index=False)
    url = str(tmp_path / "log.csv")
    columns = {column.name: column for column in look_at(files_of([url], Dialect()), Dialect(), 1000)}
    found = Guess(query=columns["search_id"], label=columns["event"], features=(columns["x"],))
    log_of = read_structure([url], ["search_id"], Dialect())
    assert [*asked_of(found, log_of, [url], Dialect())] == ["x"]
    assert asked_of(replace(found, label=None), log_of, [url], Dialect()) == {}


@pytest.mark.slow
def test_init_looks_at_whole_lists_of_a_shuffled_log(tmp_path: Path) -> None:
    """The first rows have fragments of lists, in which a random order is near the best one."""
    rng, n_lists, length = np.random.default_rng(0), 25_000, 10
    clicked = np.eye(length, dtype=int)[rng.integers(length, size=n_lists)].ravel()
    columns = {"search_id": np.repeat(np.arange(n_lists), length), "clicked": clicked}
    columns |= {"leak": clicked * (9 + rng.random(len(clicked))), "price": rng.random(len(clicked)).round(2)}
    pd.DataFrame(columns).sample(frac=1, random_state=0).to_csv(tmp_path / "log.csv", index=False)
    InitJob(file=str(tmp_path / "log.csv"), out=str(tmp_path / "out")).run()
    (line,) = asked((tmp_path / "out" / "prepare.yaml").read_text().splitlines())
    figures = re.search(r"NDCG@5 1.000 \(random order (0.\d+), the best other feature (0.\d+)\)", line)
    assert figures is not None
    random = sum(1 / math.log2(1 + rank) for rank in range(1, 6)) / length  # one click, anywhere with equal chance
    assert [float(each) for each in figures.groups()] == pytest.approx([random, random], abs=0.01)


@pytest.mark.nightly
def test_a_clean_log_raises_no_question(shop: Mapping[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ltrscale")
    for label in ("clicked", "purchased"):
        data = prepared(shop["folder"], label, categorical=["category", "brand", "seller_id"])
        assert questions(examine_features(Split(data=(data,)))) == {}
    assert asked(caplog.messages) == []


@pytest.mark.nightly
def test_totals_of_later_labels_are_found(shop: Mapping[str, Any]) -> None:
    later = ("added_to_cart", "purchased", "revenue")
    data = prepared(shop["folder"], "clicked", *later, categorical=[])
    found = questions(examine_features(Split(data=(data,))))
    assert {*found} == {*later}
    assert "of the relevant documents and 0.0% of the others: is it known" in found["revenue"]
    data = prepared(shop["folder"], "purchased", LEAK, "revenue", categorical=[])
    assert {*questions(examine_features(Split(data=(data,))))} == {LEAK, "revenue"}


def opened_with(evaluation: str, gate: str | None = None) -> tuple[list[str], list[str]]:
    """The texts and the commands of a report's opening."""
    blocks = _paragraphs(Sources.open(evaluation), gate=gate)
    texts = [block.text for block in blocks if isinstance(block, Text)]
    return texts, [block.line for block in blocks if isinstance(block, Command)]


@pytest.mark.slow
def test_the_report_opens_with_the_question_and_asks_for_the_answer_next(shop: Mapping[str, Any]) -> None:
    texts, commands = opened_with(evaluation=str(shop["folder"] / "evaluation"))
    (text,) = asked(texts)
    assert text.startswith(f"Before this is believed: {LEAK} alone ranks at NDCG@5 ")
    assert texts.index(text) == 1  # before what to do next
    assert texts[-1].startswith(f"Next: that answer. If yes, name {LEAK} in bounds.expected of jobs.gate")
    assert commands == [f"python -m jobs.pipeline --config pipeline.yaml --set 'splits.train.leave_out=[\"{LEAK}\"]'"]


@pytest.mark.nightly
def test_the_report_does_not_ask_where_no_model_leans_on_the_leak_or_the_gate_has_the_answer(
    shop: Mapping[str, Any],
) -> None:
    job = gate(shop, "honest", feature_psi=None)
    job.run()
    texts, _ = opened_with(evaluation=f"{job.out}/evaluation")
    assert not asked(texts)
    job = gate(shop, "leaky", expected=[LEAK], feature_psi=None)
    job.run()
    assert len(asked(opened_with(evaluation=f"{job.out}/evaluation")[0])) == 1
    assert not asked(opened_with(evaluation=f"{job.out}/evaluation", gate=job.out)[0])


@pytest.mark.slow
def test_the_report_asks_with_the_gain_share(shop: Mapping[str, Any]) -> None:
    blocks = list(feature_blocks(Sources.open(str(shop["folder"] / "evaluation"))))
    (question,) = [block.text for block in blocks if isinstance(block, Text) and "is it known" in block.text]
    share = (load(shop["leaky"]).importances() or {})[LEAK]
    assert share > 0.8
    assert question.endswith(f"is it known when the list is shown? It has {share:.0%} of the importance to leaky.")
    (table,) = [block for block in blocks if isinstance(block, Table) and "alone" in block.header[1]]
    assert table.header == ["feature", "NDCG@5 alone", "importance to leaky", "importance to honest", "there"]
    assert table.rows[0][0] == LEAK
    assert table.rows[0][2:4] == [f"{share:.1%}", "-"]


@pytest.mark.slow
def test_the_gate_refuses_a_candidate_that_leans_on_a_leak_until_it_is_expected(shop: Mapping[str, Any]) -> None:
    job = gate(shop, "leaky")
    with pytest.raises(Refused, match=f"{LEAK} alone ranks at .* of the candidate's gain: is it known") as refused:
        job.run()
    assert "name it in bounds.expected; else train without it" in str(refused.value)
    (check,) = [check for check in GateVerdict.read(job.out).checks if not check.holds]
    assert (check.bound, check.where) == ("expected", LEAK)
    job = gate(shop, "leaky", expected=["page_*"])
    job.run()
    (check,) = [check for check in GateVerdict.read(job.out).checks if check.bound == "expected"]
    assert (check.holds, check.where) == (True, LEAK)
    assert check.reason.endswith("; bounds.expected names it")


@pytest.mark.slow
def test_the_gate_lets_a_candidate_pass_that_does_not_read_the_leak(shop: Mapping[str, Any]) -> None:
    job = gate(shop, "honest")
    job.run()
    (check,) = [check for check in GateVerdict.read(job.out).checks if check.bound == "expected"]
    assert check.holds
    assert "the best, text_match, reaches NDCG@5" in check.reason


def test_an_expected_feature_that_is_not_there_is_named(shop: Mapping[str, Any]) -> None:
    found = examine_features(Split(data=(shop["data"],)))
    with pytest.raises(InputError, match=r"bounds.expected: no feature matches 'page_second'; the nearest is 'page_s"):
        list(check_leaks(found, load(shop["leaky"]), Bounds(expected=("page_second",)).expected))


def test_what_a_ranker_leans_on(shop: Mapping[str, Any]) -> None:
    assert LEAK in load(shop["leaky"]).leans_on()
    assert LEAK not in load(shop["honest"]).leans_on()
    order = str(shop["folder"] / "order")
    job = {"out": order, "splits": shop["splits"], "order": FeatureOrder(feature="text_match").model_dump()}
    validate(FeatureJob, job, "test").run()
    assert dict(load(order).leans_on()) == {"text_match": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mq2008", *map(nightly, ("ohsumed-null", "mslr-sample", "lightgbm-example")), "msft-docs", "news-sample"],
)
def test_real_data_raise_no_question(
    name: str,
    shared_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert shared_data.is_dir()
    monkeypatch.chdir(ROOT)
    caplog.set_level(logging.INFO, "ltrscale")
    load_config(PrepareJob, f"jobs/configs/data/prepare-{name}.yaml", [f"out={tmp_path / 'data'}"]).run()
    assert asked(caplog.messages) == []
    found = examine_features(Split(data=(str(tmp_path / "data"),)))
    assert found[0].lists >= 30
    assert 0.1 < found[0].lift < 0.5
