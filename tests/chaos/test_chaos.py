"""The chaos run: its plan of faults, its verdict on how a command ends, and the defects that it finds in a round."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import wait_until

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset import writer
from ltrscale.data.dataset.files import Counts, DataFile, DataFiles
from ltrscale.data.dataset.manifest import Manifest
from ltrscale.data.dataset.writer import commit_dataset
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.experiments.weekly import WeeklyJob
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.scoring.score import ScoreJob
from ltrscale.training.finetune import FinetuneJob
from ltrscale.training.pretrain import PretrainJob
from ltrscale.tuning.tune import TuneJob
from tests.chaos import processes
from tests.chaos.commands import judge
from tests.chaos.compare import differences, outcome
from tests.chaos.faults import KINDS, plan
from tests.chaos.player import Player
from tests.chaos.processes import MARK, Process, choose, end, marked
from tests.chaos.report import Diary, write_report
from tests.chaos.workload import STAGES, command


def test_a_plan_follows_from_its_seed_and_has_all_kinds() -> None:
    faults = plan(3, minutes=10, every_s=20)
    assert faults == plan(3, minutes=10, every_s=20) != plan(4, minutes=10, every_s=20)
    assert [fault.number for fault in faults] == list(range(30))
    assert all(20 * fault.number < fault.at_s < 20 * (fault.number + 1) for fault in faults)
    counts = [sum(fault.kind == kind for fault in faults) for kind in KINDS]
    assert max(counts) - min(counts) <= 1
    assert {fault.kind for fault in plan(3, 10, 20, ["kill", "busy"])} == {"kill", "busy"}
    stops = [fault.seconds for seed in range(20) for fault in plan(seed, 10, 20, ["stop"])]
    assert max(stops) > 60
    assert all(5 <= seconds <= 70 for seconds in stops)


_CUT_OFF = "core_worker_process.cc:1029: Failed to get the system config from raylet because it is dead. Worker"
_NETWORK = "error: s3://a/b: cannot read: reset by peer; check the network and AWS_ENDPOINT_URL"


@pytest.mark.parametrize(
    ("code", "output", "sent", "disturbed", "what"),
    [
        (0, "wrote it", (), False, "done"),
        (0, "Traceback (most recent call last):\n  File\nwrote it", (), True, "failure"),
        (2, _NETWORK, (), True, "again"),
        (2, f"a warning\n{_NETWORK}\n", (), True, "again"),
        (2, _NETWORK, (), False, "failure"),
        (2, "error: s3://a: no data set is committed there; make it with jobs.prepare", (), True, "failure"),
        (2, "usage: python -m jobs.prepare", (), True, "failure"),
        (2, f"Traceback (most recent call last):\n{_NETWORK}", (), True, "failure"),
        (1, "", (), True, "failure"),
        (1, _CUT_OFF, (), True, "again"),
        (1, _CUT_OFF, (), False, "failure"),
        (1, "core_worker.cc:609: :info_message: Attempting to recover 1 lost objects by", (), True, "again"),
        (-signal.SIGKILL, "", (signal.SIGKILL,), True, "again"),
        (-signal.SIGKILL, "", (), True, "failure"),
        (-signal.SIGSEGV, "", (signal.SIGKILL,), True, "failure"),
        (143, "stopped: asked to stop", (signal.SIGTERM,), True, "again"),
        (143, "stopped: asked to stop", (), True, "failure"),
    ],
)
def test_the_end_of_a_command_is_judged(
    code: int, output: str, sent: tuple[signal.Signals, ...], disturbed: bool, what: str
) -> None:
    assert judge(code, output, sent=sent, disturbed=disturbed).what == what


# --- comparison


def _round(url: str, *, suffix: str = "", byte: bytes = b"x") -> str:
    """A round with a minimal data set, bundle, scores, evaluation and trial."""
    with storage.Commit(f"{url}/data") as commit:
        with commit.file(f"period=a/part-{{hash}}{suffix}.parquet") as path:
            path.write_bytes(b"rows")
        with commit.file("query-ids/part-{hash}.npy") as path:
            path.write_bytes(b"hashes")
        placed, ids = map(vars, commit.files)
        file = DataFile(**placed, period="a", longest=2, row_groups=(Counts(1, 2, 1),))
        kept = {
            "files": DataFiles.from_iterable([file]),
            "query_ids": (storage.Placed(**ids),),
            "made_by": {"time": suffix},
        }
        commit_dataset(commit, Manifest(features=(), **kept))
    with storage.Commit(f"{url}/bundle") as commit:
        with commit.file("weights.safetensors") as path:
            path.write_bytes(byte)
        with commit.file("config.json") as path:
            path.write_text(json.dumps({"kind": "neural", "metrics": {"loss": 0.5}, "training": url}))
        commit.finish({"format": "ltrscale-bundle"})
    with storage.Commit(f"{url}/scores/period=a") as commit:
        with commit.file("part-{hash}.parquet") as path:
            path.write_bytes(b"scores")
        commit.finish({"format": "ltrscale-scores", "groups": 1, "documents": 2})
    with storage.Commit(f"{url}/evaluation") as commit:
        with commit.file("metrics.json") as path:
            path.write_text(json.dumps({"bundles": [f"{url}/bundle"], "mean": 0.5}))
        commit.finish({"made_by": {}})
    storage.write_bytes(f"{url}/bundle/run/log.txt", suffix.encode())
    storage.write_bytes(f"{url}/tune/trials/00000/result.json", json.dumps({"value": 0.5, "seconds": url}).encode())
    return url


@pytest.mark.parametrize("in_parts", [False, True])
def test_names_places_and_logs_do_not_count(tmp_path: Path, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_parts:
        monkeypatch.setattr(writer, "_FEW_FILES", 0)
    one, other = outcome(_round(f"{tmp_path}/one")), outcome(_round(f"{tmp_path}/other", suffix="-another"))
    assert differences(other, one) == []
    assert len(one.facts) >= 12
    assert "data: file 0" in one.facts
    assert not [name for name in other.unlisted if name.startswith("data/")]


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    undisturbed = outcome(_round(f"{tmp_path}/one"))
    (line,) = differences(outcome(_round(f"{tmp_path}/other", byte=b"y")), undisturbed)
    assert "bundle: weights.safetensors" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "data", "found"),
    [
        ("data/period=a/*.parquet", None, "damaged: data/period=a"),
        ("scores/period=a/*.parquet", b"scorez", "damaged: scores/period=a"),
        ("evaluation/metrics.json", b'{"mean": 0.6}', "different: evaluation: metrics.json"),
        ("bundle/manifest.json", None, "different: bundle: kind"),
        ("tune/trials/00000/result.json", b'{"value": 0.6}', "different: tune/trials/00000/result.json"),
    ],
)
def test_what_is_damaged_or_missing_is_found(tmp_path: Path, pattern: str, data: bytes | None, found: str) -> None:
    undisturbed = outcome(_round(f"{tmp_path}/one"))
    url = _round(f"{tmp_path}/other")
    (path,) = Path(url).glob(pattern)
    path.unlink() if data is None else path.write_bytes(data)
    assert any(found in line for line in differences(outcome(url), undisturbed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data/period=a/part-1.parquet", "data/.staging-12/a", "bundle/checkpoints/step-1/a"])
def test_what_no_manifest_lists_is_found(tmp_path: Path, name: str) -> None:
    undisturbed = outcome(_round(f"{tmp_path}/one"))
    url = _round(f"{tmp_path}/other")
    storage.write_bytes(f"{url}/{name}", b"")
    assert differences(outcome(url), undisturbed) == [f"left over: {name}"]


# --- processes: for a moment after a program's start, its environment cannot be read yet


def test_all_that_a_command_started_is_found_and_ended(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True); print('on', flush=True)"
    environment = {**os.environ, MARK: f"test-{tmp_path.name}.1"}
    subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL, check=True)
    wait_until(lambda: marked(f"test-{tmp_path.name}"))
    (orphan,) = marked(f"test-{tmp_path.name}")
    assert orphan.title == "sleep 60"
    assert marked("test-of-another") == []
    assert orphan.signal(signal.SIGSTOP)
    end(f"test-{tmp_path.name}")
    assert marked(f"test-{tmp_path.name}") == []
    assert not orphan.signal(signal.SIGCONT)


def test_a_process_of_a_later_start_is_another() -> None:
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: "test-later"}) as sleeper:
        wait_until(lambda: marked("test-later"))
        (process,) = marked("test-later")
        assert not Process(process.pid, "1", process.mark, process.title).signal(signal.SIGKILL)
        assert sleeper.poll() is None
        sleeper.kill()


def test_each_role_is_equally_likely() -> None:
    titles = ["ray::A", "ray::B", "/a/raylet", "/b/python -m jobs.tune --config /c/d.yaml", "ray::DashboardAgent"]
    here = [Process(i, "", "", title) for i, title in enumerate(titles)]
    assert [process.role for process in here] == ["worker", "worker", "helper", "job", "helper"]
    assert here[3].name == "python -m jobs.tune --config d.yaml"
    assert [choose(here, draw / 6).pid for draw in range(6)] == [2, 4, 3, 3, 0, 1]  # type: ignore[union-attr]
    assert choose([], 0.5) is None


def test_stacks_name_the_process() -> None:
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: "test-stacks"}) as sleeper:
        wait_until(lambda: marked("test-stacks"))
        assert "sleep 60" in processes.stacks("test-stacks")
        sleeper.kill()


# --- what a run keeps


def test_a_run_goes_on_from_its_diary(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "events.jsonl")
    diary.write("fault", 12.3, "something", kind="kill")
    diary.write("round", 15.0, "0", differences=[])
    with diary.path.open("a") as file:
        file.write('{"what": "fau')  # killed while it wrote
    again = Diary(tmp_path / "events.jsonl")
    assert again.events == diary.events
    assert again.clock_s == 15.0
    again.write("end", 16.0, "")
    assert len(Diary(tmp_path / "events.jsonl").events) == 3


def test_a_report_holds_only_where_a_run_has_ended_without_failures(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "events.jsonl")
    assert not write_report(tmp_path, diary, seed=1, left_out="")["held"]
    diary.write("end", 1.0, "")
    assert write_report(tmp_path, diary, seed=1, left_out="")["held"]
    diary.write("failure", 1.0, "a | <b>")
    assert not write_report(tmp_path, diary, seed=1, left_out="")["held"]
    assert "- a \\| &lt;b&gt;" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_the_configs_of_the_commands_are_valid(tmp_path: Path, stage: object) -> None:
    jobs = (PrepareJob, PretrainJob, FinetuneJob, TuneJob, ScoreJob, EvaluateJob, WeeklyJob, WeeklyJob)
    kind, chosen = dict(zip(STAGES, jobs, strict=True))[stage], stage  # type: ignore[index]
    words = command(chosen, tmp_path, "s3://b/round", ray=True)  # type: ignore[arg-type]
    job = validate(kind, yaml.safe_load(Path(words[4]).read_text()), words[4])
    assert str(job.out).startswith("s3://b/round/")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rounds", "clock_s", "over"),
    [(0, 59, False), (0, 61, False), (1, 61, False), (2, 59, False), (2, 61, True), (0, 181, True)],
)
def test_faults_come_until_each_kind_of_round_is_over(tmp_path: Path, rounds: int, clock_s: float, over: bool) -> None:
    diary = Diary(tmp_path / "events.jsonl")
    for number in range(rounds):
        diary.write("round", 1.0, str(number), differences=[])
    diary.write("resumed", clock_s, "")
    nothing: Any = None
    player = Player(nothing, diary, [], 60.0, 180.0, stages=(), rounds=(False, True), undisturbed={})
    assert player.over == over


def test_only_the_lease_of_a_command_that_was_killed_may_be_left(tmp_path: Path) -> None:
    undisturbed = outcome(_round(f"{tmp_path}/one"))
    url = _round(f"{tmp_path}/other")
    storage.write_bytes(f"{url}/data/.lease", b'{"pid": 7}')
    assert differences(outcome(url, killed={7}), undisturbed) == []
    assert differences(outcome(url, killed={8}), undisturbed) == ["left over: data/.lease"]
