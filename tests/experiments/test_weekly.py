"""`jobs.weekly` on a small shop: a good week goes into service, a broken one leaves everything as it was."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import shop
import yaml

from jobs import cli, weekly
from jobs.verbs import command
from ltrscale import bundle, storage
from ltrscale.config import load, validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError, Refused
from ltrscale.evaluation.bounds import Bounds, GateVerdict
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.experiments import weekly as steps
from ltrscale.experiments.first.configs import weekly_text
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.experiments.service import InService, Week
from ltrscale.experiments.weekly import WeeklyJob
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.serving.export import ALIAS
from ltrscale.stages.mlflow_runs import client
from ltrscale.trees.gbdt import GBDTJob

SOURCE = {
    "kind": "items",
    "columns": {
        "query": "search_id",
        "item": "product_id",
        "label": "purchased",
        "time": "searched_at",
        "features": ["list_price", "margin", "rating", "n_reviews", "in_stock", "text_match", "sales_30d"],
        "categorical": ["category", "brand", "device"],
    },
}
PREPARE = {"source": SOURCE, "sort": True, "duplicates": "keep_first", "max_rejected": 0.03}
TREES = {"num_trees": 30, "num_leaves": 8, "min_data_in_leaf": 5, "feature_fraction": 0.8, "num_threads": 1}
WEEKS = [f"2026-W{number:02}" for number in range(1, 14)]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop of 400 searches a week: the data set of weeks 6 to 11, the config, and the files of later weeks."""
    (folder := tmp_path_factory.mktemp("weekly") / "start").mkdir()
    shop.weeks(6, 11, 400).to_csv(folder / "log.csv", index=False)
    for number in (12, 13):
        shop.weeks(number, number, 400).to_csv(folder / f"W{number}.csv", index=False)
    prepare = {**PREPARE, "inputs": str(folder / "log.csv")}
    validate(PrepareJob, {"out": str(folder / "data"), "prepare": prepare}, "test").run()
    return folder


@pytest.fixture
def place(start: Path) -> Path:
    """A copy, in which a week can be tried; always at the same place, which files name."""
    return fresh(start.parent / "shop", start)


@pytest.fixture(scope="module")
def begun(start: Path) -> Path:
    """The shop with a first model, and that of week 11 in service."""
    job(fresh(start.parent / "shop", start), None).run()
    return (start.parent / "shop").rename(start.parent / "begun")


@pytest.fixture
def serving(begun: Path) -> Path:
    """A copy of it, in the place of all."""
    return fresh(begun.parent / "shop", begun)


def fresh(place: Path, of: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(of, place)
    write_pipeline(place)
    return place


def next_commands(place: Path, caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """The commands that a job has printed last, as words; a file that is yet to come is that of week 12."""
    lines = [message for message in caplog.messages if message.startswith("next, ")]
    caplog.clear()
    commands = [line.split(": python -m jobs.")[1].replace("NEW_ROWS", f"{place}/W12.csv") for line in lines]
    return [shlex.split(command) for command in commands]


def write_pipeline(folder: Path, **trees: Any) -> None:
    splits = {"train": "all but last 2", "validation": "last 1 but 1", "test": "last 1"}
    pipeline = {
        "out": str(folder / "models"),
        "data": str(folder / "data"),
        "splits": {name: {"periods": of} for name, of in splits.items()},
        "methods": {"trees": {"kind": "gbdt", "gbdt": TREES, **trees}, "three": {"kind": "ensemble", "of": "trees"}},
        "evaluate": {"baseline": None, "resamples": 200},
    }
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))


def job(place: Path, number: int | None = 12, **settings: Any) -> WeeklyJob:
    inputs = {} if number is None else {"inputs": str(place / f"W{number}.csv")}
    values = {"out": str(place / "weekly"), "pipeline": str(place / "pipeline.yaml"), **inputs, **settings}
    return validate(WeeklyJob, values, "test")


def periods(place: Path) -> list[str]:
    return open_dataset(str(place / "data")).manifest.periods


def service(place: Path) -> InService:
    found = InService.read(str(place / "weekly"))
    assert found is not None
    return found


def copy_of(place: Path, url: str) -> str:
    """Where the copy of a bundle serves."""
    return f"{place}/weekly/service/{bundle.content_hash(url)}"


def candidates(place: Path, week: str) -> list[str]:
    return sorted(str(path) for path in Path(place, "weekly", "weeks", week, "candidates").iterdir())


def before(of: InService) -> str:
    return of.earlier[0].bundle


def learnt(url: str) -> list[str]:
    return [period for split in bundle.load(url).made_by["config"]["splits"] for period in split["periods"]]


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def judged_on(place: Path, week: str) -> tuple[str, ...]:
    return Evaluation.read(f"{place}/weekly/weeks/{week}/gate/evaluation").test.periods


@pytest.mark.slow
def test_week_12_goes_into_service_and_week_13_does_not(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "weekly.yaml").write_text(f"{{out: {place}/weekly, pipeline: {place}/pipeline.yaml, export: lightgbm}}")

    def run(number: int) -> int:
        words = ["weekly", "--config", f"{place}/weekly.yaml", "--inputs", f"{place}/W{number}.csv"]
        monkeypatch.setattr(sys, "argv", words)
        try:
            cli.main(weekly.COMMAND)
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    assert run(12) == 0
    first, now = copy_of(place, f"{place}/weekly/first/trees/model"), service(place)
    (candidate,) = candidates(place, "2026-W12")
    assert now.bundle == copy_of(place, f"{candidate}/trees/model")
    assert (now.period, before(now)) == ("2026-W12", first)
    assert (learnt(first), learnt(now.bundle)) == (WEEKS[5:10], WEEKS[5:11]), "each is judged on the week after"
    assert judged_on(place, "2026-W12") == ("2026-W12",)
    assert periods(place) == WEEKS[5:12]
    assert now.export is not None
    assert Path(now.export, "model.txt").exists()

    pointer = place / "weekly" / "service.json"
    written = pointer.stat().st_mtime_ns
    assert run(12) == 0, "a done week is left alone"
    assert pointer.stat().st_mtime_ns == written

    for _ in range(2):
        capsys.readouterr()
        assert run(13) == Refused.status == 3
        lines = capsys.readouterr().err.splitlines()
        reasons = [line for line in lines if line.startswith("refused: ")]
        assert "list_price has a PSI of" in reasons[0]
        assert reasons[-1] == f"refused: 2026-W13: {now.bundle} stays in service"
    assert pointer.stat().st_mtime_ns == written
    assert periods(place) == WEEKS[5:12], "refused rows do not join the data set"

    rows = pd.read_csv(place / "W13.csv", dtype=str)
    price = pd.to_numeric(rows["list_price"], errors="coerce")
    rows["list_price"] = (price / 100).where(price.notna(), rows["list_price"])
    rows.to_csv(place / "W13.csv", index=False)
    assert run(13) == 0, "mended"
    assert (service(place).period, before(service(place))) == ("2026-W13", now.bundle)
    assert run(12) == 0, "an earlier week that is done is left alone, too"
    assert service(place).period == "2026-W13"


@pytest.mark.nightly
def test_the_same_command_goes_on_from_wherever_it_was_stopped(serving: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another week joins the data set meanwhile: it ends on what it began with."""
    assert service(serving).period == "2026-W11"

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    add = PrepareJob.run
    stops: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
        "before it joins": lambda m: m.setattr(PrepareJob, "run", lambda own: stop() if own.prepare.add else add(own)),
        "at the training": lambda m: m.setattr(GBDTJob, "work", stop),
        "at the gate": lambda m: m.setattr(steps.GateJob, "run", stop),
        "at the export": lambda m: m.setattr(steps.ExportJob, "work", stop),
        "at the copy": lambda m: m.setattr(steps, "copied", stop),
        "at the pointer": lambda m: m.setattr(steps, "put_into_service", stop),
        "after the pointer": lambda m: m.setattr(steps, "predict_command", stop),
    }
    for number, (where, stopped) in enumerate(stops.items()):
        with monkeypatch.context() as patch:
            stopped(patch)
            with pytest.raises(KeyboardInterrupt):
                job(serving, export="lightgbm").run()
        served = service(serving).period
        assert served == ("2026-W12" if where == "after the pointer" else "2026-W11"), where
        if number == 1:
            late = shop.weeks(13, 13, 400)
            late["list_price"] = 1.0
            late.to_csv(serving / "late.csv", index=False)
            prepare = {**PREPARE, "inputs": str(serving / "late.csv"), "add": True}
            validate(PrepareJob, {"out": str(serving / "data"), "prepare": prepare}, "test").run()
    job(serving, export="lightgbm").run()
    assert service(serving).period == "2026-W12"
    assert learnt(service(serving).bundle) == WEEKS[5:11]
    assert judged_on(serving, "2026-W12") == ("2026-W12",)


@pytest.mark.nightly
def test_a_week_that_was_stopped_does_not_replace_the_model_of_a_later_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(WeeklyJob, "_judged_week", lambda *_: sys.exit("stopped"))
        with pytest.raises(SystemExit):
            job(place).run()
    later = service(place).replace(period="2026-W13")
    (place / "weekly" / "service.json").write_text(later.model_dump_json())
    with pytest.raises(InputError, match=r"2026-W12: was stopped, and .* of 2026-W13 is in service since"):
        job(place).run()
    assert service(place) == later


@pytest.mark.nightly
def test_the_printed_commands_lead_from_a_pipeline_to_ranked_items_and_to_the_next_week(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ltrscale")
    (place / "weekly.yaml").write_text(weekly_text(str(place), "week"))
    load(PipelineJob, str(place / "pipeline.yaml"), ["methods.three=null"]).run()
    first = next_commands(place, caplog)
    assert [words[0] for words in first] == ["refit", "report", "score", "predict", "weekly"]
    for words in first:
        monkeypatch.setattr(sys, "argv", words)
        cli.main(command(words[0]))
    assert (place / "models" / "page" / "report.html").exists()
    assert [path.name for path in (place / "models" / "ranked").glob("period=*")] == ["period=2026-W11"]
    assert len([*(place / "models" / "predictions").glob("period=*")]) == 6
    assert before(service(place)) == copy_of(place, f"{place}/models/seed-0/trees/model")
    after = next_commands(place, caplog)
    assert [words[0] for words in after[-2:]] == ["predict", "weekly"]
    monkeypatch.setattr(sys, "argv", after[-2])
    cli.main(command("predict"))
    assert [path.name for path in (place / "weekly" / "predictions").glob("period=*")] == ["period=2026-W12"]


def test_the_first_config_is_that_of_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "weekly.yaml").write_text(weekly_text("shop", "week"))
    read = load(WeeklyJob, str(tmp_path / "weekly.yaml"))
    first = WeeklyJob(out="shop/weekly", pipeline="shop/pipeline.yaml", production="shop/models/seed-0/trees/model")
    assert read == first


@pytest.mark.slow
def test_a_dry_run_says_what_would_be_done_and_does_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = storage.below(str(place))
    job(place, dry_run=True, refit=True, export="lightgbm", registry={"name": "shop"}).run()
    assert storage.below(str(place)) == there
    printed = capsys.readouterr().out
    for line in (
        "data has 2026-W06..2026-W11 (6 periods)",
        "- train trees on 2026-W06, 2026-W07, 2026-W08, 2026-W09 as the first model",
        f"- train trees of {place}/pipeline.yaml on 2026-W06..2026-W10 (5 periods), validate on 2026-W11",
        "the candidate against the first model on NEW",
        "- refit",
        "- export for lightgbm",
        "- register as shop",
        f"- put a copy of it into service: {place}/weekly/service.json",
    ):
        assert line in printed


@pytest.mark.slow
def test_a_dry_run_is_refused_where_the_run_is(serving: Path) -> None:
    """The model in service has learnt from the only period to judge it on."""
    counted = {"train": "all but last 4", "validation": "last 1 but 3", "test": "last 1 but 2"}
    splits = {name: {"periods": of} for name, of in counted.items()}
    for dry_run in (True, False):
        with pytest.raises(InputError, match=r"splits.test: .* no test period is left to judge it on"):
            job(serving, None, splits=splits, dry_run=dry_run).run()


@pytest.mark.slow
def test_a_worse_candidate_is_refused_and_the_old_one_stays(serving: Path) -> None:
    old = service(serving)
    write_pipeline(serving, leave_out=["text_match", "list_price", "rating", "in_stock", "brand", "category"])
    with pytest.raises(Refused, match=r"all groups: NDCG@5 -.*upper end of at least 0 \(bounds.refuse: worse\)"):
        job(serving).run()
    assert service(serving) == old
    assert not GateVerdict.read(f"{serving}/weekly/weeks/2026-W12/gate").passed
    assert periods(serving)[-1] == "2026-W12", "the rows were good"
    write_pipeline(serving)
    job(serving).run()
    assert (service(serving).period, before(service(serving))) == ("2026-W12", old.bundle), (
        "other settings, judged anew"
    )


@pytest.mark.nightly
def test_other_bounds_judge_a_week_anew_against_the_same_model(place: Path) -> None:
    job(place).run()
    first = service(place)
    served = contents(first.bundle)
    write_pipeline(place, gbdt={**TREES, "num_trees": 1})
    with pytest.raises(Refused, match=r"needs [0-9,]+ more groups"):
        job(place, bounds={"refuse": "unproven"}).run()
    week = Week.read(str(place / "weekly"), "2026-W12")
    assert week is not None
    assert (week.production, week.outcome) == (before(first), "refused")
    assert service(place) == first, "what has been put into service stays"
    assert contents(first.bundle) == served, "to the last byte, though the refused one was made from the same rows"
    write_pipeline(place)
    job(place).run()
    assert service(place) == first


@pytest.mark.nightly
def test_what_serves_outlives_the_bundle_that_it_was_copied_from(place: Path) -> None:
    """A pipeline that runs again replaces its own bundle, ungated, and the next one has learnt from later periods."""
    pipeline = load(PipelineJob, str(place / "pipeline.yaml"), ["methods.three=null"])
    pipeline.run()
    settings = {"production": f"{place}/models/seed-0/trees/model", "bounds": {"refuse": "unproven"}}
    with pytest.raises(Refused):
        job(place, **settings).run()
    serving = service(place)
    served = contents(serving.bundle)
    pipeline.run()
    assert learnt(f"{place}/models/seed-0/trees/model") != learnt(serving.bundle) == WEEKS[5:10]
    assert (service(place), contents(serving.bundle)) == (serving, served)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of MLflow's libraries
def test_the_model_before_is_put_into_service_again_and_a_done_week_does_not_undo_it(
    place: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"sqlite:///{place}/mlflow.db"
    settings = {"export": "lightgbm", "registry": {"name": "shop", "store": store}}
    job(place, None, **settings).run()
    old = service(place)
    job(place, **settings).run()
    new = service(place)
    assert (old.version, new.version) == ("1", "2")
    versions = [client(store).get_model_version_by_alias("shop", ALIAS).version]
    assert old.export is not None
    model = Path(old.export, "model.txt").read_bytes()
    job(place, rollback=True, dry_run=True, **settings).run()
    assert f"in service again: {old.bundle}" in capsys.readouterr().out
    assert service(place) == new
    job(place, rollback=True, **settings).run()
    again = service(place)
    assert (again.bundle, again.export, again.version) == (old.bundle, old.export, "1")
    assert before(again) == before(old), "the model that was taken back is no earlier one"
    versions.append(client(store).get_model_version_by_alias("shop", ALIAS).version)
    assert [*map(int, versions)] == [2, 1]
    assert Path(old.export, "model.txt").read_bytes() == model
    caplog.set_level("INFO", "ltrscale")
    job(place, **settings).run()
    assert service(place) == again
    assert f"2026-W12 is done: in service; other rows or settings would be judged anew; what serves: {old.bundle}" in (
        caplog.text
    )


@pytest.mark.nightly
def test_a_changed_model_in_service_is_refused_and_the_one_before_it_serves_again(serving: Path) -> None:
    old = service(serving)
    with Path(old.bundle, "model.txt").open("a") as file:
        file.write("\n")
    with pytest.raises(InputError, match=r"model.txt: its content is not what was committed .*jobs.weekly --rollback"):
        job(serving).run()
    assert periods(serving) == WEEKS[5:11], "nothing was begun"
    job(serving, rollback=True).run()
    assert service(serving).bundle == before(old)
    job(serving).run()
    assert service(serving).period == "2026-W12"
    assert not Path(old.bundle).exists(), "nothing names it any more"


@pytest.mark.nightly
def test_only_periods_that_neither_has_seen_are_judged_on(place: Path) -> None:
    splits = {
        "train": {"periods": "all but last 3"},
        "validation": {"periods": "last 1 but 2"},
        "test": {"periods": "last 2"},
    }
    job(place, refit=True, splits=splits).run()
    assert learnt(f"{place}/weekly/first/trees/model") == WEEKS[5:9]
    assert judged_on(place, "2026-W12") == ("2026-W11", "2026-W12")
    final = service(place).bundle
    (candidate,) = candidates(place, "2026-W12")
    assert final == copy_of(place, f"{candidate}/final")
    assert sorted(learnt(final)) == WEEKS[5:12], "once more, on the test periods too"
    with pytest.raises(InputError, match=r"splits.test: .* has learnt from '2026-W12', so that no test"):
        job(place, None, refit=True, splits=splits, production=final, out=str(place / "other")).run()
    assert not (place / "other" / "service.json").exists(), "production may be set to another one"


@pytest.mark.nightly
def test_a_mean_of_trees_can_be_trained_each_week(place: Path) -> None:
    job(place, None, method="three").run()
    (candidate,) = candidates(place, "2026-W11")
    assert service(place).bundle == copy_of(place, f"{candidate}/three/model")
    with pytest.raises(InputError, match="refit: three makes several models"):
        job(place, None, method="three", refit=True).run()


@pytest.mark.slow
def test_what_cannot_be_done_is_said_with_the_remedy(place: Path) -> None:
    with pytest.raises(InputError, match=r"method: .*pipeline.yaml has no method 'tree'; did you mean 'trees'"):
        job(place, method="tree").run()
    log = pd.read_csv(place / "log.csv", dtype=str)
    log[log["searched_at"].str.startswith("2026-02-0")].to_csv(place / "W6.csv", index=False)
    with pytest.raises(InputError, match=r"the rows are of .*, and .*data has '2026-W11' already; add earlier periods"):
        job(place, 6).run()
    late = log[log["searched_at"].str.startswith("2026-03-1")]
    late[late["searched_at"] < "2026-03-15"].to_csv(place / "W11.csv", index=False)
    with pytest.raises(InputError, match=r"data has 2026-W11 already, and a period is not replaced; leave inputs out"):
        job(place, 11).run()
    week, spilt = pd.read_csv(place / "W12.csv", dtype=str), log[log["searched_at"] > "2026-03-15"].head(9)
    pd.concat([week, spilt]).to_csv(place / "W11.csv", index=False)
    with pytest.raises(InputError, match=r"data has 2026-W11 already, and .*; leave its rows out of the inputs"):
        job(place, 11).run()
    week.assign(purchased="").to_csv(place / "W11.csv", index=False)
    with pytest.raises(InputError, match=r"2026-W12 has no labels, by which models are judged; run this again once"):
        job(place, 11).run()
    with pytest.raises(InputError, match=r"splits.train.periods: .*'last 9' are more periods than there are; it has"):
        job(place, splits={"train": {"periods": "last 9"}}).run()
    with pytest.raises(InputError, match="nothing-there"):
        job(place, production=f"{place}/nothing-there").run()
    values = yaml.safe_load((place / "pipeline.yaml").read_text())
    (place / "pipeline.yaml").write_text(yaml.safe_dump({**values, "relabel": {"steps": [{"kind": "relevant_only"}]}}))
    with pytest.raises(InputError, match=r"relabel: new periods join a data set of jobs.prepare; leave it out"):
        job(place).run()
    assert not (place / "weekly" / "service.json").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_mended_rows_of_a_week_that_has_joined_count_once_the_data_set_is_made_again(place: Path) -> None:
    job(place).run()
    manifest, served = (place / "data" / "manifest.json").read_bytes(), service(place)
    mended = pd.read_csv(place / "W12.csv", dtype=str)
    mended.loc[:99, "rating"] = "5"
    mended.to_csv(place / "W12.csv", index=False)
    with pytest.raises(
        InputError, match=r"has 2026-W12 already, .*; to replace its rows, delete the data set, prepare"
    ):
        job(place).run()
    assert (place / "data" / "manifest.json").read_bytes() == manifest
    assert service(place) == served
    groups = open_dataset(str(place / "data")).manifest.counts().groups
    shutil.rmtree(place / "data")
    inputs = [str(place / "log.csv"), str(place / "W12.csv")]
    validate(PrepareJob, {"out": str(place / "data"), "prepare": {**PREPARE, "inputs": inputs}}, "test").run()
    assert open_dataset(str(place / "data")).manifest.counts().groups == groups
    job(place, None).run()
    assert len(candidates(place, "2026-W12")) == 2
    assert before(service(place)) == served.bundle


@pytest.mark.nightly
def test_a_bundle_of_other_periods_is_taken_to_have_seen_none(serving: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As one that learnt from tables in memory, whose periods are `train` and `validation`."""
    unnamed = str(serving / "unnamed")
    shutil.copytree(service(serving).bundle, unnamed)
    manifest = Path(unnamed, "manifest.json")
    written = json.loads(manifest.read_text())
    for split, period in zip(written["made_by"]["config"]["splits"], ("train", "validation"), strict=True):
        split.update(periods=[period], data=["gone"])
    manifest.write_text(json.dumps(written))
    job(serving, production=unnamed, out=str(serving / "other")).run()
    gate = Evaluation.read(f"{serving}/other/weeks/2026-W12/gate/evaluation")
    assert gate.test.periods == ("2026-W12",)
    assert "names none of these periods as learnt from; it is taken to have seen none" in caplog.text


@pytest.mark.slow
def test_routine_is_the_default(place: Path) -> None:
    assert job(place).bounds == Bounds(refuse="worse", feature_psi=5.0)
    assert job(place, bounds={"margin": 0.01}).bounds == Bounds(refuse="worse", feature_psi=5.0, margin=0.01)


@pytest.mark.slow
def test_the_pointer_is_plain_json(serving: Path) -> None:
    pointer = json.loads((serving / "weekly" / "service.json").read_text())
    assert bundle.load(pointer["bundle"]).features
    assert load(WeeklyJob, f"{serving}/weekly/run/config.yaml").method == "trees"
