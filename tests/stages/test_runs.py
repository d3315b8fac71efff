"""The files that a run leaves, and when a stage is skipped."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from changing_folders import by_git
from pydantic import Field
from small_disks import fill_disk, small_disk_at
from waiting import wait_until

from ltrscale import storage
from ltrscale.config import Config, validate
from ltrscale.errors import InputError
from ltrscale.experiments.distill import DistillJob
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.experiments.study import StudyJob
from ltrscale.progress import Report, log
from ltrscale.stages import runs
from ltrscale.stages.runs import _git_state
from ltrscale.stages.stage import Origin, Stage
from ltrscale.storage.faults import PATIENCE
from ltrscale.storage.s3 import PatientS3
from tests.chaos.faulty_proxy import FaultyProxy

Body = Callable[[Origin, Report], None]


class Settings(Config):
    width: int = 3


class Example(Stage):
    """A stage that calls a function of the test."""

    stage: ClassVar[str] = "example"
    settings: Settings = Settings()
    data: dict[str, str] = Field(default_factory=dict)
    _body: Body

    def identity(self) -> Settings:
        return self.settings

    def inputs(self) -> dict[str, str]:
        return self.data

    def work(self, origin: Origin, report: Report) -> None:
        self._body(origin, report)


def run_example(out: str, body: Body, **values: Any) -> bool:
    example = Example(out=out, **values)
    example._body = body
    return example.run()


def commit(out: str, text: str = "made") -> Body:
    def body(origin: Origin, report: Report) -> None:
        log.warning("working")
        report({"loss": 0.5})
        with storage.Commit(out) as made:
            with made.file("data.txt") as path:
                path.write_text(text)
            made.finish({"made_by": origin})

    return body


def test_a_run_leaves_config_environment_metrics_and_log(tmp_path: Path) -> None:
    out = str(tmp_path / "stage")
    assert run_example(out, commit(out), data={"data": "abc"})
    run = tmp_path / "stage" / "run"
    assert yaml.safe_load((run / "config.yaml").read_text()) == {
        "out": out,
        "settings": {"width": 3},
        "data": {"data": "abc"},
    }
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert json.loads((run / "metrics.jsonl").read_text())["loss"] == 0.5
    assert "working" in (run / "log.txt").read_text()


def test_the_same_stage_is_skipped_and_a_changed_one_runs(tmp_path: Path) -> None:
    out = str(tmp_path / "stage")
    assert run_example(out, commit(out, "first"), data={"data": "abc"})
    assert not run_example(out, commit(out, "second"), data={"data": "abc"})
    assert (tmp_path / "stage" / "data.txt").read_text() == "first"
    assert run_example(out, commit(out, "third"), data={"data": "changed"})
    assert run_example(out, commit(out, "fourth"), data={"data": "changed"}, settings=Settings(width=4))
    assert (tmp_path / "stage" / "data.txt").read_text() == "fourth"


@pytest.mark.parametrize(("error", "traced"), [(ValueError("the reason"), True), (InputError("the reason"), False)])
def test_a_failed_stage_commits_nothing_and_keeps_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, traced: bool
) -> None:
    out = str(tmp_path / "stage")

    def body(_: Origin, __: Report) -> None:
        raise error

    with pytest.raises(type(error), match="the reason"):
        run_example(out, body)
    assert storage.read_manifest(out) is None
    text = (tmp_path / "stage" / "run" / "log.txt").read_text()
    assert "failed: the reason" in text
    assert ("Traceback" in text) == traced
    assert "the reason" not in caplog.text  # the job prints it, once
    assert run_example(out, commit(out))


def test_the_output_of_another_stage_is_never_replaced(tmp_path: Path) -> None:
    out = str(tmp_path / "stage")

    class Train(Example):
        stage: ClassVar[str] = "train"

    run_example(out, commit(out, "months of work"))
    with pytest.raises(InputError, match=r"the output of example is there, which train would delete; choose another"):
        Train(out=out).run()
    assert (tmp_path / "stage" / "data.txt").read_text() == "months of work"
    assert storage.read_manifest(out) is not None


WEEKS = {"train": "2026-W01", "validation": "2026-W02", "test": "2026-W03"}
COMPARED: dict[str, Any] = {
    "data": "data",
    "splits": {name: {"periods": week} for name, week in WEEKS.items()},
    "methods": {"trees": {"kind": "gbdt"}},
    "evaluate": {"baseline": None},
}


@pytest.mark.parametrize(
    ("job", "cls", "settings"),
    [
        ("pipeline", PipelineJob, COMPARED),
        ("pipeline", PipelineJob, {**COMPARED, "folds": ["a", "b"], "data": "{fold}"}),
        ("study", StudyJob, {**COMPARED, "grid": [{"labelled": [8]}]}),
        (
            "distill",
            DistillJob,
            {name: COMPARED[name] for name in ("data", "splits")}
            | {"teacher": "teacher", "students": {"softmax": {"kind": "softmax"}}},
        ),
    ],
)
def test_a_job_of_several_stages_writes_nothing_into_the_output_of_another(
    synthetic_dataset: str, tmp_path: Path, job: str, cls: Any, settings: Any
) -> None:
    out = tmp_path / "data"
    shutil.copytree(synthetic_dataset, out)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(InputError, match=rf"data: the output of prepare is there, which {job} would delete; choose"):
        validate(cls, {"out": str(out), **settings}, "test").run()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.s3
def test_on_s3_the_record_is_there_while_the_stage_runs_and_goes_on_in_the_next_run(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_COPY_S", 0.05)
    out = f"{s3}/recorded"

    def records() -> list[float]:
        url = storage.join(out, "run", "metrics.jsonl")
        text = storage.read_bytes(url).decode() if storage.exists(url) else ""
        return [json.loads(line)["loss"] for line in text.splitlines()]

    def interrupted(_: Origin, report: Report) -> None:
        report({"loss": 1.0})
        wait_until(lambda: records() == [1.0])
        raise InputError("interrupted")

    with pytest.raises(InputError, match="interrupted"):
        run_example(out, interrupted)
    run_example(out, commit(out))
    assert records() == [1.0, 0.5]
    text = storage.read_bytes(storage.join(out, "run", "log.txt")).decode()
    assert text.index("failed: interrupted") < text.index("working")


@pytest.mark.s3
@pytest.mark.parametrize("error", [ValueError("the reason"), None], ids=["failed", "done"])
def test_a_log_that_cannot_be_copied_stays_here_and_hides_no_error(
    s3: str,
    error: Exception | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = f"{s3}/{tmp_path.name}"
    monkeypatch.setattr(runs.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(PATIENCE, "1")
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"], 0.0) as proxy, caplog.at_level(logging.WARNING, "ltrscale"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        PatientS3.clear_instance_cache()
        proxy.fault = "reset"

        def body(_: Origin, report: Report) -> None:
            report({"loss": 0.5})
            proxy.share = 1.0
            if error is not None:
                raise error

        if error is None:
            assert run_example(out, body)
        else:
            with pytest.raises(ValueError, match="the reason"):
                run_example(out, body)
    PatientS3.clear_instance_cache()
    said = [record.getMessage() for record in caplog.records if "are in" in record.getMessage()]
    (folder,) = tmp_path.glob("ltrscale-run-*")
    assert len(said) == 1
    assert said[0].startswith(f"{out}/run/")
    assert said[0].endswith(f"; the log and the metrics of this run are in {folder}")
    assert ("failed: the reason" in (folder / "log.txt").read_text()) == (error is not None)
    assert json.loads((folder / "metrics.jsonl").read_text())["loss"] == 0.5


TWICE = """
import logging, sys
from pathlib import Path
from typing import ClassVar
from ltrscale import storage
from ltrscale.config import Config
from ltrscale.stages.stage import Stage

class Example(Stage):
    stage: ClassVar = "example"

    def identity(self):
        return Config()

    def inputs(self):
        return {}

    def work(self, origin, report):
        with Path(self.out, "worked").open("a") as file:
            print("once more", file=file)
        with storage.Commit(self.out) as made:
            with made.file("part-{hash}.txt") as path:
                path.write_text("the same")
            print("working", flush=True)
            sys.stdin.readline()
            made.finish({"made_by": origin})

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
Example(out=sys.argv[1]).run()
"""


def stage_process(out: str) -> subprocess.Popen[str]:
    """A process that runs the stage, and commits when it reads a line."""
    return subprocess.Popen(
        [sys.executable, "-c", TWICE, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def await_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), f"it never said {text!r}"


@pytest.mark.slow
def test_the_same_stage_twice_at_once_works_once(tmp_path: Path) -> None:
    out = str(tmp_path / "stage")
    with stage_process(out) as first:
        await_line(first, "working")
        with stage_process(out) as second:
            await_line(second, f"process {first.pid} on ")
            first.communicate("\n")
            await_line(second, f"example: {out} is up to date")
    assert (first.returncode, second.returncode) == (0, 0)
    assert (tmp_path / "stage" / "worked").read_text() == "once more\n"


@pytest.mark.slow
def test_a_stage_that_was_killed_runs_again_at_once_and_leaves_no_trace_of_it(tmp_path: Path) -> None:
    out = str(tmp_path / "stage")
    with stage_process(out) as first:
        await_line(first, "working")
        first.kill()
    assert len(list((tmp_path / "stage").glob("part-*"))) == 1
    with stage_process(out) as second:
        said, _ = second.communicate("\n")
    assert second.returncode == 0
    assert "is running there" not in said
    manifest = storage.read_manifest(out)
    assert manifest is not None
    there = {name for name in storage.files.below(out) if not name.startswith("run/")}
    assert there == {"worked", storage.MANIFEST, manifest["files"][0]["path"]}


def test_a_committed_stage_whose_file_is_gone_runs_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = str(tmp_path / "stage")
    for damage in (Path.unlink, lambda path: path.write_text("m")):
        assert run_example(out, commit(out))
        assert not run_example(out, commit(out))
        damage(tmp_path / "stage" / "data.txt")
        assert run_example(out, commit(out))
        assert "1 of 1 files are missing or cut short, the first is data.txt" in caplog.text
        caplog.clear()
        (tmp_path / "stage" / "manifest.json").unlink()


def test_a_disk_that_is_full_for_a_while_leaves_a_gap_in_the_log_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk_at(tmp_path / "disk", 1) as small_disk:
        check_gaps(small_disk, caplog)


def check_gaps(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = str(small_disk / "stage")

    def body(origin: Origin, report: Report) -> None:
        report({"step": 1})
        ballast = fill_disk(small_disk)
        for step in range(2, 2000):
            report({"step": step})
            log.warning("step %d", step)
        ballast.unlink()
        report({"step": 2000})
        commit(out)(origin, report)

    assert run_example(out, body)
    steps = [json.loads(line).get("step") for line in (small_disk / "stage/run/metrics.jsonl").read_text().splitlines()]
    assert (steps[0], steps[-2]) == (1, 2000)
    assert len(steps) < 2000
    assert len([message for message in caplog.messages if "have gaps" in message]) == 1


def test_a_record_has_the_commit_of_its_own_checkout_only(tmp_path: Path) -> None:
    installed = tmp_path / "shop" / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    (tmp_path / "shop" / "shop.py").touch()
    by_git(tmp_path / "shop")
    (tmp_path / "shop" / "shop.py").write_text("changed")
    assert re.fullmatch("[0-9a-f]{40}", str(_git_state(tmp_path / "shop")["git_commit"]))
    assert _git_state(tmp_path / "shop")["git_changed_files"] == 1
    assert _git_state(installed) == _git_state(tmp_path) == {"git_commit": None, "git_changed_files": 0}
