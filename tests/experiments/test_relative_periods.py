"""Periods counted from the newest: they are names from the start of a job on, in every split and every record."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dataset_changes import add_period

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.split import Split, Splits, resolve_periods, with_relative_named
from ltrscale.derive.relabel import RelabelConfig
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.progress import Report
from ltrscale.scoring.score import ScoreJob
from ltrscale.stages.stage import Origin
from ltrscale.trees.gbdt import GBDTJob

WEEKS = [f"2026-W{week:02}" for week in range(1, 5)]
RELATIVE = {"train": "all but last 2", "validation": "last 1 but 1", "test": "last 1"}
TREES = {"num_trees": 2, "num_threads": 1}


@pytest.fixture
def data(synthetic_dataset: str, tmp_path: Path) -> str:
    """Four weeks, a copy to which weeks can be added."""
    return shutil.copytree(synthetic_dataset, str(tmp_path / "data"))


def selected(url: str, periods: str | list[str]) -> list[str]:
    split = validate(Split, {"data": url, "periods": periods}, "test")
    return sorted({period for part in resolve_periods(split) for period in part.periods})


def job(data: str, out: str, splits: dict[str, str] = RELATIVE) -> GBDTJob:
    where = {name: {"data": data, "periods": periods} for name, periods in splits.items()}
    return validate(GBDTJob, {"out": out, "splits": where, "gbdt": TREES}, "test")


def recorded(out: str) -> list[Any]:
    manifest = storage.read_manifest(out)
    assert manifest is not None
    return [split["periods"] for split in manifest["made_by"]["config"]["splits"]]


@pytest.mark.parametrize("number", range(1, 5))
@pytest.mark.parametrize("but", range(4))
def test_they_count_from_the_newest_period(synthetic_dataset: str, number: int, but: int) -> None:
    text = f"last {number} but {but}" if but else f"last {number}"
    if number + but > len(WEEKS):
        with pytest.raises(
            InputError, match=rf"{text}' are more periods than there are; it has 2026-W01, .*, 2026-W04$"
        ):
            selected(synthetic_dataset, text)
        return
    assert selected(synthetic_dataset, text) == WEEKS[len(WEEKS) - but - number : len(WEEKS) - but]
    if but:
        rest = selected(synthetic_dataset, f"all but last {but}")
        assert rest + selected(synthetic_dataset, f"last {but}") == WEEKS, "together they are all"
        assert set(selected(synthetic_dataset, text)) <= set(rest)


def test_they_join_names_and_ranges(synthetic_dataset: str) -> None:
    assert selected(synthetic_dataset, ["2026-W01", "last  2 but 1"]) == WEEKS[:3]
    with pytest.raises(InputError, match=r"splits.test.periods: .*'all but last 4' are more periods than there are"):
        check_disjoint(job(synthetic_dataset, "x", RELATIVE | {"test": "all but last 4"}).splits)


@pytest.mark.parametrize("text", ["last 0", "lst 8", "last -1", "all but last 0", "first 2", "last 2 but", "Last 8"])
def test_other_words_are_refused_when_the_config_is_read(text: str) -> None:
    for cls, values in (
        (Split, {"data": "x", "periods": text}),
        (RelabelConfig, {"steps": [{"kind": "relevant_only", "periods": text}]}),
    ):
        with pytest.raises(InputError, match=r"periods: .* names no period; write `last N`"):
            validate(cls, values, "test")  # type: ignore[type-var]


def test_splits_that_overlap_are_refused_by_name(data: str) -> None:
    with pytest.raises(InputError, match="validation and test both take period '2026-W04'"):
        job(data, "x", RELATIVE | {"validation": "last 2"}).run()
    check_disjoint(job(data, "x").splits)
    with pytest.raises(InputError, match="fewer than gap = 1 periods"):
        check_disjoint(Splits.model_validate({**job(data, "x").splits.model_dump(), "gap": 1}))


@pytest.mark.slow
def test_an_output_records_names_and_is_that_of_the_names(data: str, tmp_path: Path) -> None:
    out = str(tmp_path / "trees")
    assert job(data, out).run()
    assert recorded(out) == [WEEKS[:2], WEEKS[2:3]]
    config = yaml.safe_load((tmp_path / "trees" / "run" / "config.yaml").read_text())
    assert config["splits"]["train"]["periods"] == WEEKS[:2], "the config that repeats the run"
    assert not job(data, out, {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}).run()
    assert not job(data, out).run()
    add_period(data, "2026-W05", like="2026-W02")
    assert job(data, out).run(), "a period has come: another model"
    assert recorded(out) == [WEEKS[:3], WEEKS[3:4]]


def test_a_stage_under_way_ends_on_what_it_began_with(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: Callable[[GBDTJob, Origin, Report], None] = GBDTJob.work

    def beside_an_addition(self: GBDTJob, origin: Origin, report: Report) -> None:
        add_period(data, "2026-W05", like="2026-W02")
        work(self, origin, report)

    monkeypatch.setattr(GBDTJob, "work", beside_an_addition)
    job(data, str(tmp_path / "trees")).run()
    monkeypatch.undo()
    assert recorded(str(tmp_path / "trees")) == [WEEKS[:2], WEEKS[2:3]]
    before = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
    assert not job(data, str(tmp_path / "trees"), before).run()


@pytest.mark.slow
def test_an_evaluation_is_of_the_weeks_that_were_the_last_then(data: str, tmp_path: Path) -> None:
    trees, out = job(data, str(tmp_path / "trees")), str(tmp_path / "evaluation")
    trees.run()
    values = {"models": {"trees": trees.out}, "baseline": None, "resamples": 100}
    evaluation = validate(
        EvaluateJob, {"out": out, "evaluate": {**values, "splits": trees.splits.model_dump()}}, "test"
    )
    assert evaluation.run(show=False)
    add_period(data, "2026-W05", like="2026-W02")
    config = EvaluateConfig.recorded(out)
    assert config.splits.test.periods == ("2026-W04",)
    assert evaluation.run(show=False)
    assert EvaluateConfig.recorded(out).splits.test.periods == ("2026-W05",)


@pytest.mark.slow
def test_a_pipeline_finds_them_once(data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "out": str(tmp_path / "models"),
        "data": data,
        "splits": {name: {"periods": periods} for name, periods in RELATIVE.items()},
        "methods": {"trees": {"kind": "gbdt", "gbdt": TREES}},
        "evaluate": {"baseline": None, "resamples": 100},
    }
    with caplog.at_level("INFO", logger="ltrscale"):
        PipelineJob.model_validate(values).run()
    log = (tmp_path / "models" / "run" / "log.txt").read_text()
    assert f"splits.train.periods: all but last 2 of {data}: 2026-W01, 2026-W02" in log
    assert f"splits.test.periods: last 1 of {data}: 2026-W04" in log
    assert recorded(f"{values['out']}/seed-0/trees/model") == [WEEKS[:2], WEEKS[2:3]]


def test_the_newest_week_alone_is_scored(data: str, tmp_path: Path) -> None:
    trees, out = job(data, str(tmp_path / "trees")), tmp_path / "scores"
    trees.run()
    values = {"out": str(out), "data": data, "bundle": trees.out, "periods": "last 1", "layout": "items"}
    validate(ScoreJob, values, "test").run()
    assert [path.name for path in sorted(out.glob("period=*"))] == ["period=2026-W04"]


def test_a_config_without_them_is_itself(data: str) -> None:
    named = job(data, "x", {"train": "2026-W01", "validation": "2026-W03"})
    assert with_relative_named(named) is named
    nowhere = Splits.model_validate({name: {"periods": RELATIVE[name]} for name in ("train", "validation")})
    assert with_relative_named(nowhere) is nowhere, "no data set is named yet"
