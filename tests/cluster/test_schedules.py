"""The weekly job under schedulers: each file is read by a parser of its own, and its command is one that we read.

Airflow needs versions that ours exclude, so its file runs here against stand-ins that take its documented arguments.
"""

import datetime
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from cronsim import CronSim
from hera.workflows.models import CronWorkflow

from jobs.cli import read_command
from jobs.weekly import COMMAND
from ltrscale.experiments.first.configs import weekly_text

CLUSTER = Path(__file__).resolve().parents[2] / "cluster"
MONDAY = datetime.datetime(2026, 11, 30, 6, 10, tzinfo=datetime.UTC)
WEEK = "2026-W48"


def check_command(text: str, folder: Path, config: str) -> None:
    """Check that a shell's line is the weekly job on the files of the week before."""
    (folder / "shop").mkdir(exist_ok=True)
    (folder / config).write_text(weekly_text("shop", "week"))
    words = shlex.split(text)
    module = words.index("-m")
    assert Path(words[module - 1]).name == "python"
    assert words[module + 1] == "jobs.weekly"
    job, files = read_command(COMMAND, words[module + 2 :])
    assert files == [config]
    assert re.fullmatch(rf"(logs|s3://my-bucket/log)/{WEEK}(\.csv|/\*\.parquet)", job.inputs[0].path)


def expanded(text: str, now: str) -> str:
    """A line with the date that its $(date ...) prints at a time, by the shell and GNU date themselves."""
    found = re.search(r"\$\((date [^)]*)\)", text)
    assert found
    at = found[1].replace("-d yesterday", f"-d '{now} -1 day'")
    printed = subprocess.run(["bash", "-c", f"TZ=UTC {at}"], capture_output=True, text=True, check=True, timeout=20)
    return text.replace(found[0], printed.stdout.strip())


def check_mondays(schedule: str) -> None:
    first = next(CronSim(schedule, MONDAY - datetime.timedelta(days=3)))
    assert first.date() == MONDAY.date()
    assert next(CronSim(schedule, first)) - first == datetime.timedelta(days=7)


def test_cron_takes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for line in (CLUSTER / "weekly.cron").read_text().splitlines() if not line.startswith("#")]
    settings = [line for line in lines if re.fullmatch(r"[A-Z]+=\S+", line)]
    entries = [line.split(maxsplit=5) for line in lines if line not in settings]
    assert len(entries) == 2
    for *schedule, command in entries:
        check_mondays(" ".join(schedule))
        assert not re.search(r"(?<!\\)%", command), "cron takes a bare % for the end of the line"
        line = command.replace(r"\%", "%").partition(" >>")[0]
        check_command(expanded(line, f"{MONDAY}"), tmp_path, "shop/weekly.yaml")
    assert entries[0][5] == entries[1][5], "the same command once more"


@pytest.mark.parametrize(("status", "mailed"), [(0, ""), (3, "refused: late\n")])
def test_cron_mails_refusals_and_errors_alone(status: int, mailed: str, tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho refused: late >&2\nexit {status}\n")
    python.chmod(0o755)
    command = (CLUSTER / "weekly.cron").read_text().splitlines()[-1].split(maxsplit=5)[5]
    line = command.replace(r"\%", "%").replace("cd /srv/shop", f"cd {shlex.quote(str(tmp_path))}")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=20)
    assert done.stdout + done.stderr == mailed
    assert (tmp_path / "weekly.log").read_text() == "refused: late\n"


def test_argo_takes_its_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = yaml.safe_load((CLUSTER / "weekly-argo.yaml").read_text())
    read_back = CronWorkflow.model_validate(written).model_dump(by_alias=True, exclude_none=True, mode="json")
    assert read_back == written, "a key that Argo does not know is not read back"
    spec = written["spec"]
    for schedule in spec["schedules"]:
        check_mondays(schedule)
    (template,) = (t for t in spec["workflowSpec"]["templates"] if t["name"] == spec["workflowSpec"]["entrypoint"])
    container = template["container"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["workflowSpec"]["volumes"]}
    (line,) = container["args"]
    scheduled = MONDAY.isoformat().replace("+00:00", "Z")
    check_command(expanded(line.replace("{{workflow.scheduledTime}}", scheduled), ""), tmp_path, "weekly.yaml")


@pytest.mark.parametrize(
    ("path", "wrong"),
    [(("spec",), {"schedule": "10 6 * * MON"}), (("spec", "workflowSpec", "templates", 0), {"retry": {}})],
)
def test_a_key_that_argo_does_not_know_is_found(path: tuple[Any, ...], wrong: dict[str, Any]) -> None:
    written = yaml.safe_load((CLUSTER / "weekly-argo.yaml").read_text())
    place = written
    for part in path:
        place = place[part]
    place.update(wrong)
    assert CronWorkflow.model_validate(written).model_dump(by_alias=True, exclude_none=True, mode="json") != written


class DAG:
    """Airflow's, by its documented arguments."""

    made: dict[str, Any]

    def __init__(
        self, *, dag_id: str, schedule: Any, start_date: datetime.datetime, catchup: bool, max_active_runs: int
    ) -> None:
        DAG.made = {"id": dag_id, "schedule": schedule, "start": start_date, "order": (catchup, max_active_runs)}

    def __enter__(self) -> "DAG":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""


class BashOperator:
    """Airflow's, by its documented arguments."""

    made: dict[str, Any]

    def __init__(
        self,
        *,
        task_id: str,
        cwd: str,
        bash_command: str,
        skip_on_exit_code: int,
        retries: int,
        retry_delay: datetime.timedelta,
        execution_timeout: datetime.timedelta,
    ) -> None:
        BashOperator.made = {"command": bash_command, "skip": skip_on_exit_code, "retries": retries}
        assert task_id
        assert cwd.startswith("/")
        assert retry_delay < execution_timeout


def test_the_dag_is_built_of_what_airflow_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    modules = {
        "airflow.sdk": {"DAG": DAG},
        "airflow.providers.standard.operators.bash": {"BashOperator": BashOperator},
        "airflow.timetables.interval": {"CronDataIntervalTimetable": lambda cron, *, timezone: (cron, timezone)},
    }
    for name, contents in modules.items():
        for part in range(1, len(name.split(".")) + 1):
            above = ".".join(name.split(".")[:part])
            if above not in sys.modules:
                monkeypatch.setitem(sys.modules, above, ModuleType(above))
        vars(sys.modules[name]).update(contents)
    exec(compile((CLUSTER / "weekly_airflow.py").read_text(), "weekly_airflow.py", "exec"), {})
    cron, zone = DAG.made["schedule"]
    check_mondays(cron)
    assert zone == "UTC"
    assert DAG.made["start"].weekday() == 0
    assert DAG.made["order"] == (True, 1), "weeks come in their order"
    assert BashOperator.made["skip"] == 3
    begin = MONDAY - datetime.timedelta(days=7)
    macro = re.search(r"\{\{ data_interval_start\.strftime\(\"(.*?)\"\) \}\}", BashOperator.made["command"])
    assert macro
    check_command(
        BashOperator.made["command"].replace(macro[0], begin.strftime(macro[1])), tmp_path, "shop/weekly.yaml"
    )
