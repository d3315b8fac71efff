"""Commands of users while processes are killed or asked to stop: files left, log lines, and exit status."""

import contextlib
import functools
import itertools
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from faulty_pretraining import bundle_weights, committed_steps, small_config
from nightly import nightly
from text_log import ENCODER, STREAM
from waiting import wait_until

from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.stages.mlflow_runs import MLFLOW

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200

pytestmark = pytest.mark.slow


class Job:
    """A training that the same command starts again and again.

    Args:
        folder: for config, output and the processes' log.
        settings: of the job, without `out`.
        launcher: start of the command, before the module; the Python interpreter by default.
        options: end of the command, after the module.
        module: the job.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        launcher: tuple[str, ...] = (sys.executable,),
        options: str = "",
        module: str = "jobs.pretrain",
    ) -> None:
        self.out, self.said = folder / "out", folder / "said.txt"
        (folder / "job.yaml").write_text(yaml.safe_dump({**settings, "out": str(self.out)}))
        self.mark = f"TEST_RUN={secrets.token_hex(8)}"
        self.command = [*launcher, "-m", module, "--config", str(folder / "job.yaml"), *options.split()]

    def start(self) -> subprocess.Popen[str]:
        """Start the command and wait until it has committed two more checkpoints."""
        before = len(self.commits())
        process = self.begin()
        while len(self.commits()) < before + 2:
            assert process.poll() is None, self.said.read_text()
            time.sleep(0.02)
        return process

    def begin(self) -> subprocess.Popen[str]:
        """Start the command in its own session, as from another terminal."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict([self.mark.split("=")])}
        with self.said.open("a") as said:
            return subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=environment,
                stdout=said,
                stderr=said,
                text=True,
                start_new_session=True,
            )

    def finish(self) -> str:
        """Run the command to its end; returns the log since the first start."""
        process = self.begin()
        assert process.wait(LIMIT_S) == 0, self.said.read_text()
        return self.said.read_text()

    def commits(self) -> list[int]:
        """The steps of the checkpoints in the log."""
        text = self.said.read_text() if self.said.exists() else ""
        return [int(step) for step in re.findall(r"checkpoint of step (\d+)", text)]

    def processes(self) -> list[int]:
        """The live processes of the command, including orphans, found by their inherited environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def check_stopped(self) -> None:
        """Check that the last step is saved, and that one line says so."""
        (line,) = re.findall(r"stopped: .*", self.said.read_text())
        step = int(re.findall(r"after step (\d+)", line)[0])
        assert committed_steps(str(self.out))[-1] == step == self.commits()[-1]
        assert "the same command resumes" in line
        assert "Traceback" not in self.said.read_text().partition("torch/distributed/elastic")[0]

    def check_finished(self, expected: bytes, *, groups: int = 480) -> None:
        """Check that the last epoch is complete, and that the weights equal those of an undisturbed run."""
        text = self.finish()
        assert "resumed from" in text
        assert len(re.findall(rf"epoch 4 of 4: {groups} groups \(0 missed, 0 repeated\)", text)) == 1
        assert bundle_weights(str(self.out)) == expected


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The child processes, in order of their start."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def torchrun(*options: str) -> tuple[str, ...]:
    return (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", *options)


MakeJob = Callable[..., Job]


def feature_settings(data: str) -> dict[str, Any]:
    """The settings of a pretraining on features."""
    config = small_config(epochs=4, stream={"docs_per_batch": 800, "streams": 4})
    return {"train": {"data": data}, "pretrain": config.model_dump(mode="json")}


@pytest.fixture
def make_job(synthetic_dataset: str, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes jobs, by default on the synthetic data set; kills their remaining processes at the end."""
    jobs: list[Job] = []

    def make(
        launcher: tuple[str, ...] = (sys.executable,), settings: Mapping[str, Any] | None = None, **options: str
    ) -> Job:
        jobs.append(Job(tmp_path, settings or feature_settings(synthetic_dataset), launcher, **options))
        return jobs[-1]

    yield make
    for pid in itertools.chain.from_iterable(job.processes() for job in jobs):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], bytes]:
    """The weights of an undisturbed run with this number of processes, one or two."""

    @functools.cache
    def weights(world: int) -> bytes:
        launcher = torchrun() if world == 2 else (sys.executable,)
        job = Job(tmp_path_factory.mktemp("expected"), feature_settings(synthetic_dataset), launcher)
        job.finish()
        return bundle_weights(str(job.out))

    return weights


TERMINATED, INTERRUPTED = (signal.SIGTERM, 143), (signal.SIGINT, 130)
"""Signals, and the statuses that they end a process with."""


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "status"), [TERMINATED, INTERRUPTED])
def test_a_signal_to_a_single_process(
    make_job: MakeJob, expected: Callable[[int], bytes], number: int, status: int
) -> None:
    job = make_job()
    process = job.start()
    process.send_signal(number)
    assert process.wait(LIMIT_S) == status
    job.check_stopped()
    job.check_finished(expected(1))


@pytest.mark.nightly
@pytest.mark.parametrize("options", ["", pytest.param("--workers 2", marks=pytest.mark.ray)], ids=["alone", "ray"])
def test_a_tracking_server_that_never_answers_delays_no_checkpoint_and_no_stop(
    make_job: MakeJob, expected: Callable[[int], bytes], options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(options=options)
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        patch.setenv(MLFLOW, f"http://127.0.0.1:{silent.getsockname()[1]}")
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3600")
        process = job.start()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
        job.check_stopped()
    job.check_finished(expected(2 if options else 1))


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_at_once(make_job: MakeJob, expected: Callable[[int], bytes]) -> None:
    job = make_job()
    process = job.start()
    process.send_signal(signal.SIGSTOP)  # so that both come within one step
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    assert process.wait(LIMIT_S) == 130
    check_one_end(job)
    job.check_finished(expected(1))


def check_one_end(job: Job) -> None:
    """Check that the last line of the log, and no other, is about the stop, and that there is no traceback."""
    text = job.said.read_text()
    assert re.fullmatch(r"stopped(: .*)?", text.splitlines()[-1]), text
    assert len(re.findall(r"(?m)^stopped", text)) == 1
    assert "Traceback" not in text


@pytest.mark.parametrize("after_s", [*map(nightly, (0.0, 0.2, 0.5)), 1.0, *map(nightly, (1.5, 2.0, 3.0))])
def test_ctrl_c_while_a_command_starts(make_job: MakeJob, after_s: float) -> None:
    job = make_job()
    process = job.begin()
    time.sleep(0.3 + after_s)  # Python itself needs the first tenths
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    check_one_end(job)


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "status"), [TERMINATED, INTERRUPTED])
@pytest.mark.parametrize("to", ["agent", "worker"])
def test_a_signal_under_torchrun(
    make_job: MakeJob, expected: Callable[[int], bytes], to: str, number: int, status: int
) -> None:
    job = make_job(torchrun())
    process = job.start()
    os.kill(process.pid if to == "agent" else workers_of(process)[-1], number)
    assert process.wait(LIMIT_S) != 0
    job.check_stopped()
    if to == "worker":
        assert re.search(rf"exitcode  : ({status}|143)", job.said.read_text())  # of a worker that was not itself asked
    job.check_finished(expected(2))


@pytest.mark.nightly
@pytest.mark.ray
def test_ctrl_c_in_the_terminal_of_a_run_with_ray(make_job: MakeJob, expected: Callable[[int], bytes]) -> None:
    job = make_job(options="--workers 2")
    process = job.start()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the processes of the cluster too
    assert process.wait(LIMIT_S) == 130
    job.check_stopped()
    job.check_finished(expected(2))


@pytest.mark.nightly
def test_a_worker_of_torchrun_is_killed_and_started_again(make_job: MakeJob, expected: Callable[[int], bytes]) -> None:
    job = make_job(torchrun("--max-restarts", "3"))
    process = job.start()
    os.kill(workers_of(process)[-1], signal.SIGKILL)
    assert process.wait(LIMIT_S) == 0, job.said.read_text()
    assert "resumed from" in job.said.read_text()
    assert bundle_weights(str(job.out)) == expected(2)


@pytest.mark.nightly
def test_a_worker_of_torchrun_that_hangs_is_named_and_started_again(
    make_job: MakeJob, expected: Callable[[int], bytes]
) -> None:
    job = make_job(torchrun("--max-restarts", "1"), options="--set workers.hang_minutes=0.15")
    process = job.start()
    os.kill(workers_of(process)[-1], signal.SIGSTOP)
    assert process.wait(LIMIT_S) == 0, job.said.read_text()
    assert re.search(r"rank [01] hangs: it has been silent for \d+ s: its process is stopped", job.said.read_text())
    assert bundle_weights(str(job.out)) == expected(2)


@pytest.mark.nightly
def test_an_error_of_all_workers_of_torchrun_is_one_line(make_job: MakeJob) -> None:
    job = make_job(torchrun(), options="--set pretrain.optimizer.learning_rate=1e30")
    check_one_line(job, r"error: step \d+: .* training has diverged")


@pytest.mark.nightly
def test_an_error_of_one_worker_of_torchrun_is_one_line(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_JOB", str(tmp_path))
    check_one_line(make_job(torchrun(), module="faulty_job"), r"error: input of rank 1 in step 2\n")


def check_one_line(job: Job, line: str) -> None:
    assert job.begin().wait(LIMIT_S) == 1  # the agent's own
    text = job.said.read_text()
    ours, _, agents = text.partition("torch/distributed/elastic")
    assert len(re.findall(line, text)) == 1
    assert "Traceback" not in ours
    assert "[rank" not in text
    assert "exitcode  : 2" in agents


ON_TEXT: dict[str, dict[str, Any]] = {
    "masked_language": {"method": {"kind": "masked_language"}},
    "clicks": {"loss": {"kind": "softmax"}, "debias": {"kind": "dla"}, "negatives": 2, "head_epochs": 0},
}


def text_settings(data: str, objective: str) -> tuple[dict[str, Any], str]:
    """The settings of a training on text, and its module."""
    stream = {**STREAM, "tokens_per_batch": 1500}
    shared = {"network": {"encoder": ENCODER}, "epochs": 4, "deterministic": True, "checkpoint_minutes": 1e-9}
    settings = {**shared, "stream": stream, **ON_TEXT[objective]}
    train = {"data": data, "periods": "2026-W01..2026-W02"}
    if objective == "masked_language":
        return {"train": train, "pretrain": settings}, "jobs.pretrain"
    return {"splits": {"train": train, "validation": {"data": data, "periods": "2026-W03"}}, "finetune": settings}, (
        "jobs.finetune"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("objective", ["masked_language", "clicks"])
def test_training_on_text_is_killed_and_goes_on(
    make_job: MakeJob, clicked_texts: str, tmp_path: Path, objective: str
) -> None:
    (tmp_path / "whole").mkdir()
    settings, module = text_settings(clicked_texts, objective)
    whole = Job(tmp_path / "whole", settings, module=module)
    whole.finish()
    job = make_job(settings=settings, module=module)
    for _ in range(2):
        process = job.start()
        process.kill()
        assert process.wait(LIMIT_S) == -signal.SIGKILL
    train = Split(data=(clicked_texts,), periods=("2026-W01..2026-W02",))
    groups = select(train, labelled=objective == "clicks").n_groups
    job.check_finished(bundle_weights(str(whole.out)), groups=groups)


@pytest.mark.ray
@pytest.mark.nightly
def test_the_launching_process_is_killed(make_job: MakeJob, expected: Callable[[int], bytes]) -> None:
    job = make_job(options="--workers 2")
    process = job.start()
    process.kill()
    process.wait()
    job.check_finished(expected(2))
    wait_until(lambda: not job.processes())
