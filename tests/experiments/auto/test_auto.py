"""A run of jobs.auto on a small log: what it leaves behind, and that another process goes on by what was decided."""

import json
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from waiting import wait_until
from written_directories import written_directories

from ltrscale import bundle, storage
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.experiments.auto import auto as auto_module
from ltrscale.experiments.auto import plan
from ltrscale.experiments.auto.auto import AutoJob, _Run, _sizes_of
from ltrscale.experiments.auto.leaderboard import Board, BoardRow, advised, document
from ltrscale.experiments.auto.plan import HALF, AutoRecord, Entry, RecordKeeper
from ltrscale.reports.render import markdown
from ltrscale.runtime.workers import WorkersConfig

SPLITS = {
    "train": {"periods": "2026-W01..2026-W02"},
    "validation": {"periods": "2026-W03"},
    "test": {"periods": "2026-W04"},
}


def auto(data: str, out: Path, budget: float = 0.4) -> AutoJob:
    return validate(AutoJob, {"out": str(out), "data": data, "splits": SPLITS, "budget": budget}, "test")


def record_at(url: str) -> AutoRecord:
    return AutoRecord.model_validate_json(Path(url).read_bytes())


@pytest.fixture(scope="module")
def done(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("auto") / "out"
    auto(synthetic_dataset, out).run()
    return out


@pytest.mark.slow
def test_it_leaves_a_leaderboard_one_ranker_and_its_refit(done: Path, synthetic_dataset: str) -> None:
    board, evaluation = Board.read(str(done / "leaderboard")), Evaluation.read(str(done / "evaluation"))
    assert {row.name for row in board.rows} == {method.name for method in evaluation.methods} >= {"trees", "blend"}
    assert sum(board.weights.values()) == pytest.approx(1)
    assert board.weights.keys() <= {row.name for row in board.rows} - {"blend"}
    ranker = bundle.load(board.final)
    assert ranker.kind == "blend"
    test = auto(synthetic_dataset, done).resolved().test
    assert test is not None
    assert select(test, labelled=True).n_groups == evaluation.test.groups
    if board.refitted:
        seen = ranker.made_by["config"]["splits"]
        assert "2026-W04" in json.dumps(seen), "who refits says what it has seen"
    text = (done / "leaderboard" / "report.md").read_text()
    assert advised(board) in text.replace("\\", "")
    assert f"of {board.budget:g} minutes" in text


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_networks_learn_on_workers_of_ray(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = auto(synthetic_dataset, tmp_path / "out", budget=6).replace(workers=WorkersConfig(number=2), refit=False)
    with caplog.at_level(logging.INFO, "ltrscale"):
        config.run()
    board = Board.read(str(tmp_path / "out" / "leaderboard"))
    assert {"trees", "scratch", "blend"} <= {row.name for row in board.rows}
    assert "training on 2 workers" in caplog.text
    assert board.minutes <= 1.05 * config.minutes


@pytest.mark.slow
def test_the_same_again_trains_nothing_and_has_the_same_leaderboard(done: Path, synthetic_dataset: str) -> None:
    before = Board.read(str(done / "leaderboard"))
    record = record_at(str(done / "auto.json"))
    written = written_directories(auto(synthetic_dataset, done))
    assert Board.read(str(done / "leaderboard")) == before
    again = record_at(str(done / "auto.json"))
    assert again.minutes > record.minutes, "all time counts"
    assert again.replace(minutes=0.0) == record.replace(minutes=0.0)
    assert not [name for name in written if name.endswith("/model")]


@pytest.mark.slow
def test_without_a_refit_no_earlier_one_passes_for_the_ranker(done: Path, synthetic_dataset: str) -> None:
    shutil.copytree(done / "blend", done / "final", dirs_exist_ok=True)  # the first run may have had no time for it
    config, ranker = auto(synthetic_dataset, done), Board.read(str(done / "leaderboard")).final
    listed = storage.listed_in(storage.read_manifest(str(done / "final")))
    assert config.replace(refit=False).train() == str(done / "blend")
    left = storage.below(str(done / "final"))
    assert not {storage.MANIFEST, *listed}.intersection(left), "no bundle, and no files of one"
    assert config.train() == ranker


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_model_that_was_begun(done: Path, synthetic_dataset: str, tmp_path: Path) -> None:
    """As if killed in the second model: the record says that it was begun, and its output is not there."""
    record = record_at(str(done / "auto.json"))
    assert [entry.method for entry in record.entries[:2]] == ["trees", "trees_half"]
    out = tmp_path / "out"
    auto(synthetic_dataset, out, budget=0.3).run()
    kept = json.loads((out / "auto.json").read_text())
    trees, half = kept["entries"][:2]
    begun = {**half, "state": "begun", "url": "", "minutes": 0.0}
    (out / "auto.json").write_text(json.dumps({**kept, "entries": [trees, begun], "minutes": 0.05}))
    shutil.rmtree(out / "models" / "half" / "trees" / "model")
    spent = out / "models" / "half" / "trees" / "spent.json"
    spent.write_text(json.dumps({**json.loads(spent.read_text()), "done": False}))
    written = written_directories(auto(synthetic_dataset, out, budget=0.3))
    again = record_at(str(out / "auto.json"))
    assert again.entries[0].model_dump() == trees
    assert [entry.method for entry in again.entries[:2]] == ["trees", "trees_half"]
    assert again.entries[1].state == "done"
    assert again.entries[1].minutes > half["minutes"], "its earlier time counts"
    assert "models/half/trees/model" in written
    assert "models/trees/model" not in written


def test_time_counts_while_a_model_trains_without_a_word(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed has spent it all the same."""

    def trains(run: _Run, _: Entry) -> str:
        url, before = run.kept.url, record_at(run.kept.url)

        def counted() -> bool:
            return record_at(url).minutes > before.minutes

        wait_until(counted)
        raise Stopped("killed")

    monkeypatch.setattr(plan, "_BEAT_S", 0.02)
    monkeypatch.setattr(_Run, "model", trains)
    with pytest.raises(Stopped, match="killed"):
        auto(synthetic_dataset, tmp_path / "out").run()


@pytest.mark.parametrize("outage", [True, False])
def test_an_outage_is_no_reason_to_leave_a_method_out(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outage: bool
) -> None:
    def meets_it(*_: object) -> str:
        raise UnavailableError("bucket: no answer") if outage else InputError("no relevant document")

    config, url = auto(synthetic_dataset, tmp_path), str(tmp_path / "auto.json")
    kept = RecordKeeper(url, AutoRecord(of="", budget=1.0), time.monotonic())
    run = _Run(config, config.resolved(), kept, _sizes_of(config, config.resolved())[0])
    kept.note(half := Entry(method=HALF))
    monkeypatch.setattr(_Run, "model", meets_it)
    with pytest.raises(UnavailableError) if outage else nullcontext():
        run.train(half)
    (entry,) = record_at(url).entries
    assert entry.state == ("begun" if outage else "left out"), "the same command resumes it"


@pytest.mark.nightly
def test_a_method_that_the_data_refuse_is_left_out_and_the_others_go_on(synthetic_dataset: str, tmp_path: Path) -> None:
    """Half of the labels of a fold are of another fold, so that trees on them would have seen the validation groups."""
    fold = {"periods": "2026-W01..2026-W03", "fold": {"number": 0, "of": 5}}
    splits = {**SPLITS, "train": fold, "validation": {**fold, "fold": {"number": 0, "of": 5, "held_out": True}}}
    auto(synthetic_dataset, tmp_path / "out", budget=0.3).replace(splits=splits).run()
    board = Board.read(str(tmp_path / "out" / "leaderboard"))
    assert "both take period" in board.left_out["trees_half"]
    assert board.half is None
    assert {"trees", "blend"} <= {row.name for row in board.rows}


@pytest.mark.slow
def test_without_test_nothing_judges_and_the_ranker_has_seen_the_other_two(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    splits = {name: SPLITS[name] for name in ("train", "validation")}
    at_10 = EvaluateSettings(primary_cutoff=10)
    config = auto(synthetic_dataset, tmp_path / "out", budget=0.3).replace(splits=splits, evaluate=at_10)
    ranker = bundle.load(config.train())
    assert not (tmp_path / "out" / "evaluation").exists()
    assert "2026-W04" not in json.dumps(ranker.made_by["config"])
    board, page = Board.read(str(tmp_path / "out" / "leaderboard")), tmp_path / "out" / "leaderboard" / "report.md"
    assert board.final == ranker.url
    assert "nothing else has judged" in page.read_text()
    assert "validation NDCG@10" in page.read_text(), "the primary metric chooses"
    for row in board.rows:
        assert row.validation == pytest.approx(bundle.load(row.url).metrics["validation_ndcg@10"], abs=1e-6)
    assert bundle.load(board.rows[0].url).config["stop_on"] == 10


@pytest.mark.slow
def test_other_data_and_a_budget_of_nothing_are_errors(done: Path, synthetic_dataset: str, tmp_path: Path) -> None:
    other = auto(synthetic_dataset, done).replace(splits={**SPLITS, "train": {"periods": "2026-W01"}})
    with pytest.raises(InputError, match=r"auto.json: begun on other data, or with another seed or primary_cutoff"):
        other.run()
    with pytest.raises(InputError, match=r"1e-05 minutes are too few for a model; give more"):
        auto(synthetic_dataset, tmp_path / "none", budget=1e-5).run()


def test_streams_have_room_for_the_longest_group_of_all_splits(
    write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    """A refit reads validation and test, too."""

    def group(documents: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((documents, 1), np.float32), np.eye(documents, dtype=np.float32)[0]

    groups = {"2026-W0" + str(week): [group(documents)] for week, documents in ((1, 3), (2, 4), (3, 5), (4, 9))}
    config = auto(write_dataset(groups, [Feature(name="f")]), tmp_path / "out")
    assert _sizes_of(config, config.resolved())[0].longest == 9
    untested = config.replace(splits={name: SPLITS[name] for name in ("train", "validation")})
    assert _sizes_of(untested, untested.resolved())[0].longest == 5


@pytest.mark.nightly
def test_where_scoring_takes_too_long_a_drawn_part_of_test_judges(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_module, "share_of_test", lambda _: 0.25)
    config = auto(synthetic_dataset, tmp_path / "out", budget=0.2)
    config.run()
    test = config.resolved().test
    assert test is not None
    judged = Evaluation.read(str(tmp_path / "out" / "evaluation")).test.groups
    assert judged == pytest.approx(select(test, labelled=True).n_groups / 4, abs=1)
    assert "Test is a drawn part, 0.25 of its lists" in (tmp_path / "out" / "leaderboard" / "report.md").read_text()
    monkeypatch.setattr(auto_module, "share_of_test", lambda _: 1.0)
    assert "evaluation" not in written_directories(config), "a later process judges on the same part"


def test_the_page_names_the_members_and_says_that_others_used_the_machine() -> None:
    weights = {"linear": 0.5, "scratch": 0.5}
    board = Board(rows=(), weights=weights, half=None, final="here", refitted=False, budget=5, minutes=4.0)
    assert "the mean of 0.50 linear, 0.50 scratch. 4.0" in markdown(document(board, None))
    assert "Other programs used 48% of" in markdown(document(board.replace(others=0.484), None))
    assert "Other programs" not in markdown(document(board.replace(others=0.05), None))


def test_the_next_step_is_what_brought_more() -> None:
    rows = (BoardRow(name="trees", says="400 trees", minutes=1.0, validation=0.52, url=""),)
    board = Board(rows=rows, weights={"trees": 1.0}, half=0.5, final="", refitted=False, budget=5, minutes=4.0)
    assert advised(board) == (
        "What to do next: label more lists. On validation from half of the labels to all, trees gained +0.0200."
    )
    late = board.replace(late=("tabm", "pretrained"))
    assert advised(late) == "What to do next: more minutes; there were too few for tabm, pretrained."
