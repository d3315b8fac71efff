"""Trackers and MLflow's registry hold what a run reports, read back from local stores."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from exported_models import last_rows

from ltrscale import storage
from ltrscale.bundle import load
from ltrscale.config import Config, validate
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.progress import Report
from ltrscale.serving.export import ExportJob, Registry, register_bundle
from ltrscale.stages import mlflow_runs, trackers, tracking
from ltrscale.stages.stage import Origin, Stage
from ltrscale.trees.gbdt import GBDTJob

RECORDS: list[dict[str, Any]] = [
    {"groups": 7, "workers": [{"memory_gb": 0.5}]},
    {"phase": "full", "step": 10, "loss": 0.75},
    {"phase": "full", "step": 20, "loss": 0.5},
    {"phase": "full", "epoch": 1, "loss": 0.625, "validation_ndcg@5": 0.25},
]


class Settings(Config):
    width: int = 3


class Example(Stage):
    """A stage that reports some records."""

    stage: ClassVar[str] = "example"
    settings: Settings = Settings()

    def identity(self) -> Settings:
        return self.settings

    def inputs(self) -> dict[str, str]:
        return {}

    def work(self, origin: Origin, report: Report) -> None:
        for record in RECORDS:
            report(record)
        with storage.Commit(self.out) as commit:
            with commit.file("report.md") as path:
                path.write_text("# A report\n")
            commit.finish({"made_by": origin})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.chdir(tmp_path)  # where MLflow keeps the artefacts of such a store
    monkeypatch.setenv(mlflow_runs.MLFLOW, uri)
    for limit in ("_SILENT_S", "_END_S"):  # on a busy machine all takes longer
        monkeypatch.setattr(tracking, limit, 250.0)
    return uri


def run_of(store: str, name: str) -> Any:
    client = mlflow_runs.client(store)
    (experiment,) = [e for e in client.search_experiments() if e.name == "ltrscale"]
    (run,) = [r for r in client.search_runs([experiment.experiment_id]) if r.info.run_name == name]
    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_settings_metrics_by_step_and_files(store: str, tmp_path: Path) -> None:
    out = str(tmp_path / "stage")
    Example(out=out, settings=Settings(width=5)).run()
    client, run = mlflow_runs.client(store), run_of(store, out.strip("/"))
    assert (run.info.status, run.data.tags["stage"]) == ("FINISHED", "example")
    assert run.data.params == {"out": out, "settings.width": "5"}
    history = client.get_metric_history(run.info.run_id, "full/step/loss")
    assert [(point.step, point.value) for point in history] == [(10, 0.75), (20, 0.5)]
    assert run.data.metrics["full/epoch/validation_ndcg_5"] == 0.25
    assert run.data.metrics["example/groups"] == 7
    folder = Path(client.download_artifacts(run.info.run_id, "."))
    assert (folder / "report.md").read_text() == "# A report\n"
    assert "width: 5" in (folder / "run" / "config.yaml").read_text()
    assert {path.name for path in (folder / "run").iterdir()} >= {"log.txt", "metrics.jsonl", "environment.json"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_artifact_store_that_fails_is_an_outage_in_one_line(store: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    client = mlflow_runs.client(store)
    run = client.create_run(client.create_experiment("shop", artifact_location=str(tmp_path / "file" / "below")))
    outage = r"^shop cannot be .*: its artifact store fails \(\w+: .*\); check"
    with pytest.raises(UnavailableError, match=outage) as error, mlflow_runs.mlflow_errors("shop cannot be registered"):
        client.log_dict(run.info.run_id, {"a": 1}, "training.json")
    assert "\n" not in str(error.value)
    for raised, kind in ((ModuleNotFoundError("no boto3"), InputError), (Stopped("asked"), Stopped)):
        with pytest.raises(kind), mlflow_runs.mlflow_errors("shop cannot be registered"):
            raise raised


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_registered_bundle_is_loaded_by_mlflow_and_scores_raw_rows(
    store: str, synthetic_dataset: str, tmp_path: Path
) -> None:
    import mlflow
    import pandas

    splits = {
        name: {"data": synthetic_dataset, "periods": f"2026-W0{week}"}
        for week, name in enumerate(("train", "validation", "test"), 1)
    }
    gbdt = {"num_trees": 5, "num_threads": 1}
    validate(GBDTJob, {"out": str(tmp_path / "gbdt"), "splits": splits, "gbdt": gbdt}, "test").run()
    settings = {"bundle": str(tmp_path / "gbdt"), "to": "mlflow", "registry": {"name": "shop"}}
    job = validate(ExportJob, {"out": str(tmp_path / "registered"), **settings}, "test")
    assert (job.run(), job.run()) == (True, False)
    manifest = storage.read_manifest(job.out)
    assert manifest is not None
    assert (manifest["version"], register_bundle(job.bundle, Registry(name="shop"))) == ("1", "2")
    model = mlflow.pyfunc.load_model("models:/shop/2")
    last_rows(synthetic_dataset, tmp_path / "rows.csv")
    rows = pandas.read_csv(tmp_path / "rows.csv")
    from ltrscale.api.estimator import Ranker

    expected_N = Ranker.load(str(tmp_path / "gbdt")).predict(rows)
    np.testing.assert_array_equal(model.predict(rows), expected_N)
    signature, bundle = model.metadata.signature, load(job.bundle)
    query = bundle.read_as["source"]["columns"]["query"]
    assert set(signature.inputs.input_names()) == {query, *(feature.name for feature in bundle.features)}
    assert [str(kind) for kind in signature.outputs.input_types()] == ["DataType.double"]
    with pytest.raises(mlflow.MlflowException, match=f"missing inputs \\['{bundle.features[0].name}'\\]"):
        model.predict(rows.drop(columns=bundle.features[0].name))
    assert len(set(expected_N.tolist())) > 10
    (experiment,) = [e for e in mlflow_runs.client(store).search_experiments() if e.name == "ltrscale"]
    tracked = {run.info.run_name for run in mlflow_runs.client(store).search_runs([experiment.experiment_id])}
    assert tracked == {
        *(str(tmp_path / name).strip("/") for name in ("gbdt", "registered")),
        "shop",
    }  # scoring rows is no run
    run = mlflow_runs.client(store).get_run(model.metadata.run_id)
    assert run.data.metrics["trees"] == load(job.bundle).metrics["trees"]
    files = [path for path in tmp_path.rglob("mlruns/**/*") if path.is_file()]
    assert any(path.name == "model.txt" for path in files)
    assert not [path for path in files if path.suffix in (".pkl", ".pickle")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_settings_and_metrics_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv(trackers.TENSORBOARD, str(tmp_path / "events"))
    out = str(tmp_path / "stage")
    Example(out=out).run()
    events = EventAccumulator(str(tmp_path / "events" / out.strip("/")))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("full/step/loss")] == [(10, 0.75), (20, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("full/epoch/validation_ndcg@5")] == [(1, 0.25)]
    (text,) = events.Tensors("config/text_summary")
    assert b"| settings.width | 3 |" in text.tensor_proto.string_val[0]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_writes_below_its_directory_wherever_the_output_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv(trackers.TENSORBOARD, "events")
    for out in ("../x", "x", "./y/../z"):
        Example(out=out).run()
    found = {path.parent.resolve() for path in tmp_path.rglob("events.out.*")}
    events = tmp_path / "here" / "events"
    assert found == {events / str(tmp_path / "x").strip("/"), events / "x", events / "z"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_store_that_cannot_be_opened_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.setenv(mlflow_runs.MLFLOW, "nowhere://store")
    with pytest.raises(InputError, match="LTRSCALE_MLFLOW: MLflow cannot open nowhere://store") as error:
        Example(out=str(tmp_path / "stage")).run()
    assert "\n" not in str(error.value)
    monkeypatch.delenv(mlflow_runs.MLFLOW)
    with pytest.raises(InputError, match="store: name MLflow's store"):
        register_bundle("any", Registry(name="shop"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"to": "mlflow"}, "registry: name the model"),
        ({"registry": {"name": "shop"}}, "registry: lightgbm is no model of a registry"),
        ({}, "data: name the data set"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        validate(ExportJob, {"out": str(tmp_path / "out"), "bundle": "any", **settings}, "test").run()
