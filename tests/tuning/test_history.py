"""The history of a search: records stay, and a different search cannot continue it."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ltrscale import storage
from ltrscale.errors import InputError
from ltrscale.stages.runs import RUN_FILES
from ltrscale.tuning.history import LATE, History, Result, Trial, best
from ltrscale.tuning.results import TABLE, SearchOutcome, history_chart, write_results
from ltrscale.tuning.space import Dimension

GOOD = Result(state="complete", value=0.5, curve=((1, 0.4), (2, 0.5)), seconds=1.5)


@pytest.fixture(params=["local", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])])
def history(request: pytest.FixtureRequest, tmp_path: Path) -> History:
    if request.param == "local":
        return History(str(tmp_path / "out"))
    return History(f"{request.getfixturevalue('s3')}/{tmp_path.name}")


@pytest.mark.slow
def test_what_is_recorded_is_read(history: History) -> None:
    assert history.trials() == []
    history.begin(Trial(number=1, params={"a.b": {"kind": "x"}, "c": None}))
    history.begin(Trial(number=0, params={}))
    assert [(trial.number, trial.result.state) for trial in history.trials()] == [(0, "running"), (1, "running")]
    history.end(1, GOOD)
    assert [trial.result for trial in history.trials()] == [Result(state="running"), GOOD]
    assert history.trials()[1].params == {"a.b": {"kind": "x"}, "c": None}
    history.remove()
    assert history.trials() == []


def test_a_result_never_changes(history: History) -> None:
    history.begin(Trial(number=0, params={}))
    assert history.end(0, GOOD) == GOOD
    assert history.end(0, Result(state="stopped")) == GOOD
    assert history.result(0) == GOOD


def test_two_searches_at_a_time_are_an_error(history: History) -> None:
    history.begin(Trial(number=3, params={"x": 0.1 + 0.2}))
    history.begin(Trial(number=3, params={"x": 0.1 + 0.2}))  # begins again
    with pytest.raises(InputError, match=r"00003/trial\.json: another process has begun this trial meanwhile"):
        history.begin(Trial(number=3, params={"x": 0.3}))
    assert history.trials()[0].params == {"x": 0.1 + 0.2}


def test_another_search_is_recognised(history: History) -> None:
    x: dict[str, Any] = {"choices": (1, 2), "when": {"kind": "a"}}
    identity = {"job": {"gbdt": {"num_leaves": 31}}, "space": {"x": x}}
    history.open(identity)
    history.open(identity)
    with pytest.raises(InputError, match=r"differs in job\.gbdt\.num_leaves; .*--fresh"):
        history.open({**identity, "job": {"gbdt": {"num_leaves": 63}}})
    for space, differs in (
        ({"x": x, "y": x}, "y"),
        ({}, "x"),
        ({"x": {**x, "when": {"kind": "b"}}}, "x.when.kind"),
    ):
        with pytest.raises(InputError, match=rf"differs in space\.{differs}; "):
            history.open({**identity, "space": space})
    history.remove()
    history.open({"job": None})


@pytest.mark.slow
def test_a_search_whose_keys_get_other_values_goes_on_with_the_trials_that_lie_there(
    history: History, caplog: pytest.LogCaptureFixture
) -> None:
    for number, x in enumerate((7, 1, 3, 2)):
        history.begin(Trial(number=number, params={"x": x}))
    wide, narrow = ({"x": Dimension(choices=choices)} for choices in ((1, 2, 3), (2, 3, 4)))
    history.open({"space": {"x": wide["x"].model_dump()}})
    changed = History(history.url, narrow)
    with caplog.at_level(logging.INFO, "ltrscale"):
        changed.open({"space": {"x": narrow["x"].model_dump()}})
        changed.open({"space": {"x": narrow["x"].model_dump()}})
    assert [record.getMessage() for record in caplog.records] == [
        "tune: the space has changed: 3 of the 4 trials go on, 1 lie outside"
    ]
    assert [trial.number for trial in changed.trials()] == [0, 2, 3], "the first is the settings as given"
    assert changed.next_number() == 4
    assert changed.identity() == {"space": {"x": json.loads(narrow["x"].model_dump_json())}}
    assert len(history.trials()) == 4


@pytest.mark.slow
def test_its_removal_leaves_the_files_of_others(history: History) -> None:
    own = ["search.json", *(f"trials/00003/{name}" for name in ("trial.json", "result.json", "model/run/log.txt"))]
    others = ["trials/mine/manifest.json", "trials/mine/a", "trials/mine/trial.json.old", "trials/00003/my/result.json"]
    others += ["trials/mine/run/log.txt", "trials/result.json", "trials/00004/result.json", "trials/00003/notes.txt"]
    history.open({"job": None})
    history.begin(Trial(number=3, params={}))
    history.end(3, GOOD)
    with storage.Commit(f"{history.folder(3)}/model") as commit:
        with commit.file("tree") as path:
            path.write_text("of the trial")
        commit.finish({})
    with storage.Commit(f"{history.url}/trials/mine") as commit:
        with commit.file("a") as path:
            path.write_text("of somebody else")
        commit.finish({})
    for name in (*own[3:], *others[2:]):
        storage.write_bytes(f"{history.url}/{name}", b"")
    assert {*own, *others} < {*storage.below(history.url)}
    history.remove(RUN_FILES)
    assert {*storage.below(history.url)} == {*others}


def test_a_trial_that_left_nothing_but_its_directory_never_began(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    Path(history.folder(3)).mkdir(parents=True)
    assert history.trials() == []


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    history.begin(Trial(number=2, params={}))
    (Path(history.folder(2)) / "result.json").write_text('{"state": "comp')
    with pytest.raises(InputError, match=r"00002/result\.json: not JSON"):
        history.trials()
    (Path(history.folder(2)) / "result.json").write_text('{"state": "running"}')
    with pytest.raises(InputError, match=r"00002/result\.json: is no result, as the trial has not ended; remove it"):
        history.trials()
    (tmp_path / "search.json").write_text("{")
    with pytest.raises(InputError, match=r"search\.json: not JSON \([^;]*\); start anew with --fresh$"):
        history.open({"space": {}})
    for text in ("[]", '{"space": []}', '{"space": {"x": 1}}'):
        (tmp_path / "search.json").write_text(text)
        with pytest.raises(InputError, match=r"search\.json: does not say what was searched; .*--fresh"):
            history.open({"space": {}})


def test_the_best_trial_is_complete_and_the_first_of_equals(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    results = [
        Result(state="failed", reason="x"),
        Result(state="complete", value=0.2),
        Result(state="stopped", value=0.9),
        Result(state="complete", value=0.5),
        Result(state="complete", value=0.5),
    ]
    for number, result in enumerate(results):
        history.begin(Trial(number=number, params={}))
        history.end(number, result)
    found = best(history.trials())
    assert found is not None
    assert found.number == 3
    assert best(history.trials()[:1]) is None


@pytest.mark.slow
@pytest.mark.parametrize("given", [Result(state="stopped", value=0.9, reason=LATE), Result(state="failed", reason="x")])
def test_the_report_compares_complete_trials_alone(given: Result, history: History) -> None:
    results = [given, Result(state="complete", value=0.5), Result(state="stopped", value=0.7)]
    trials = [Trial(number=n, params={"x": n}, result=result) for n, result in enumerate(results)]
    outcome = SearchOutcome({"x": Dimension(low=0, high=9)}, trials, "ndcg@5", lambda *_: True)
    write_results(history.url, outcome, commands=[])
    report = storage.read_bytes(storage.join(history.url, "report.md")).decode()
    compared = f"settings as given is not complete ({given.state}: {given.reason})"
    assert f"Trial 1: 0.5000; the trial of the {compared}." in report
    rows = history_chart([trial for trial in trials if trial.result.value is not None], "ndcg@5")["data"]["values"]
    assert [row["y"] for row in rows if row["series"] == "best so far"] == [0.5]


@pytest.mark.slow
def test_no_cell_of_the_table_is_a_formula(history: History) -> None:
    reasons = ["=HYPERLINK(A1): no such column", "+1", "@SUM(A1)", "\tx", "-1+A1", "no value"]
    for number, reason in enumerate(reasons):
        history.begin(Trial(number=number, params={"x": "=1+1"}))
        history.end(number, Result(state="failed", reason=reason))
    outcome = SearchOutcome({"x": Dimension(choices=("=1+1",))}, history.trials(), "ndcg@5", lambda *_: True)
    write_results(history.url, outcome, commands=[])
    rows = [*csv.DictReader(storage.read_bytes(storage.join(history.url, TABLE)).decode().splitlines())]
    assert [row["reason"] for row in rows] == [*(f"'{reason}" for reason in reasons[:-1]), "no value"]
    assert {row["x"] for row in rows} == {"'=1+1"}


def test_choices_with_the_same_label_are_told_apart_in_all_results(tmp_path: Path) -> None:
    history, dimension = History(str(tmp_path)), Dimension(choices=(1, "1", {"b": 1, "a": 2}))
    for number, x in enumerate((1, "1", {"a": 2, "b": 1})):
        history.begin(Trial(number=number, params={"x": x}))
        history.end(number, Result(state="complete", value=number))
    outcome = SearchOutcome({"x": dimension}, history.trials(), "ndcg@5", lambda *_: True)
    write_results(history.url, outcome, commands=[])
    rows = [*csv.DictReader((tmp_path / TABLE).read_text().splitlines())]
    assert [row["x"] for row in rows] == ["1", '"1"', '{"a": 2, "b": 1}']
    assert '"1"' in (tmp_path / "report.md").read_text()
    assert (tmp_path / "parallel.png").exists()
