"""Jobs run unchanged on a cluster of processes of their own, with data on S3: submitted, followed, stopped, found."""

import ipaddress
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

import pytest
from changing_folders import a_writer, by_git
from cluster_scripts import ROOT, error_line, exported_environment, run_script
from cluster_sockets import listening_sockets
from nightly import nightly

from jobs.submit import run
from ltrscale import bundle, storage
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.progress import log
from ltrscale.runtime.dashboard import ADDRESS, connected
from ltrscale.runtime.engine import with_environment
from ltrscale.runtime.submission import SubmitConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.s3,
    pytest.mark.timeout(900),  # each job starts several processes
    pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning"),  # Ray's client says it
]

PREPARE, PRETRAIN = "jobs/configs/start/prepare-distributed-dev.yaml", "jobs/configs/start/distributed-dev.yaml"
SMALL_LOG = ("--set=synthetic.weeks=2", "--set=synthetic.groups_per_week=100")
SMALL_RUN = (
    "--set=train.periods=2026-W01..2026-W02",
    "--set=pretrain.epochs=1",
    "--set=pretrain.stream.docs_per_batch=1024",
    "--set=workers={number: 2, read_on: {reader: 1}}",
)


@pytest.fixture(scope="module")
def cluster(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A head and a worker node that read from the S3 server; yields the environment that a client needs."""
    assert s3
    folder = tmp_path_factory.mktemp("cluster")
    options = (f"--folder={folder}",)
    try:
        started = run_script("local.py", "start", *options)
        assert started.returncode == 0, started.stderr
        yield exported_environment(started.stdout)
    finally:
        scratch = (folder / "scratch").read_text()
        assert run_script("local.py", "stop", *options).returncode == 0
        assert not Path(scratch).exists()
        running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert [line for line in running.splitlines() if scratch in line] == []


def shell(client: Mapping[str, str]) -> dict[str, str]:
    """A shell's environment with the cluster's address but without S3 keys."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("AWS_")}, **client}


class Given(NamedTuple):
    """What a command has left."""

    status: int
    out: str
    log: str


Give = Callable[..., Given]


@pytest.fixture
def give(
    cluster: dict[str, str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[Give]:
    """Runs `jobs.submit` with a job's words and with settings of its own, in this process, in a checkout."""

    def given(*words: str, here: Path = ROOT, **settings: object) -> Given:
        caplog.clear()
        config = SubmitConfig.model_validate({"command": words, **settings})
        with pytest.MonkeyPatch.context() as patch:
            for name in set(os.environ) - set(shell(cluster)):
                patch.delenv(name)
            for name, value in cluster.items():
                patch.setenv(name, value)
            patch.chdir(here)
            with pytest.raises(SystemExit) as ended:
                run(config)
        return Given(int(str(ended.value.code)), capsys.readouterr().out, caplog.text)

    with caplog.at_level(logging.INFO, logger=log.name):
        yield given


@pytest.mark.slow
def test_prepare_and_pretrain(give: Give, s3: str) -> None:
    data, out = f"{s3}/submitted/data", f"{s3}/submitted/bundle"
    prepared = give("prepare", "--config", PREPARE, f"--set=out={data}", *SMALL_LOG)
    assert prepared.status == 0, prepared
    documents = open_dataset(data).manifest.counts().documents

    uploaded = f"{s3}/configs/pretrain.yaml"  # a config at a URL, which only the cluster has the keys for
    storage.write_bytes(uploaded, (ROOT / PRETRAIN).read_bytes())
    arguments = ("--config", uploaded, f"--set=out={out}", f"--set=train.data={data}", *SMALL_RUN)
    pretrained = give("pretrain", *arguments, check=False)
    assert pretrained.status == 0, pretrained
    log = pretrained.out
    assert re.search(rf"(?m)^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d pretrain: writing {re.escape(out)}", log)
    assert "training on 2 workers" in log
    assert bundle.read_bundle_manifest(out)["made_by"]["stage"] == "pretrain"
    lines = storage.read_bytes(f"{out}/run/metrics.jsonl").decode().splitlines()
    epochs = [record for record in map(json.loads, lines) if "epoch" in record]
    assert [record["documents"] for record in epochs] == [documents]


@pytest.mark.slow
@pytest.mark.parametrize("git", [nightly(False), True])
def test_what_is_sent_may_change_meanwhile(give: Give, tmp_path: Path, git: bool) -> None:
    for folder in ("jobs", "ltrscale"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    if git:
        by_git(tmp_path)
    (tmp_path / "jobs" / "configs" / "start" / "mine.yaml").write_text("# new\n")
    with a_writer(tmp_path):
        done = give("init", "--example", "mine", here=tmp_path)
    assert done.status == 0, done
    assert "# new\n" in done.out


@pytest.mark.slow
def test_a_failing_job_fails_the_command_with_its_status(give: Give, s3: str) -> None:
    words = ("pretrain", "--config", PRETRAIN, f"--set=train.data={s3}/none")
    done = give(*words, environment={"LTRSCALE_STORAGE_PATIENCE_S": 30})
    assert done.status == 2
    assert f"error: {s3}/none: no data set is committed there" in done.out
    assert "Traceback" not in done.out + done.log
    assert "failed with status 2" in done.log


@pytest.mark.nightly
def test_given_twice_it_is_one_job_that_can_be_left_found_and_stopped(
    cluster: dict[str, str], give: Give, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    job = ("prepare", "--config", PREPARE, f"--set=out={out}", *SMALL_LOG)
    with storage.hold(f"{out}-log"):  # the job waits for its turn
        first = give(*job, follow=False)
        attempt = first.out.strip()
        assert (first.status, bool(re.fullmatch(r"prepare-[0-9a-f]{12}", attempt))) == (0, True)

        # other words for the same settings
        command = [sys.executable, "-m", "jobs.submit", "--", *job, "--set=ray=false"]
        follower = subprocess.Popen(command, cwd=ROOT, env=shell(cluster), stdout=PIPE, stderr=PIPE, text=True)
        assert follower.stdout is not None
        assert any("waiting" in line for line in follower.stdout), "the log of the first"
        follower.send_signal(signal.SIGINT)
        _, said = follower.communicate(timeout=60)
        assert follower.returncode == 130
        assert "not submitted again" in said
        assert f"--id {attempt} --action stop" in said
        assert re.match(rf"{attempt}  running  since ", give(*job, action="status").out)

        assert give(id=attempt, action="stop").status == 0
        assert give(*job, action="stop").status == 0, "it is stopped already"
    stopped = give(id=attempt)
    assert (stopped.status, "waiting" in stopped.out) == (143, True), "its status, after its log"
    assert give(*job).status == 0
    assert re.search(rf"(?m)^{attempt}~2  succeeded ", give(action="status").out)
    assert open_dataset(str(out)).manifest.counts().groups == 200


@pytest.mark.nightly
def test_the_doctor_looks_at_every_node(cluster: dict[str, str], s3: str) -> None:
    def doctor(store: str, *words: str) -> tuple[int, list[dict[str, str]]]:
        command = [sys.executable, "-m", "jobs.doctor", "--store", store, "--set=format=json", *words]
        done = subprocess.run(command, cwd=ROOT, env=shell(cluster), capture_output=True, text=True, timeout=240)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    status, well = doctor(f"{s3}/doctor", "--set=ports=[6379]")
    nodes = {line["where"] for line in well} - {"this machine", "cluster"}
    assert len(nodes) == 2
    found = {node: " ".join(line["what"] for line in well if line["where"] == node) for node in nodes}
    assert all("heeds conditional puts" in text and "Ray's object store has" in text for text in found.values()), well
    assert "asks for a token" in next(line["what"] for line in well if line["where"] == "cluster")
    assert {line["level"] for line in well if "disk" not in line["remedy"]} == {"ok"}, well

    status, ill = doctor("s3://nothing/doctor", "--set=ports=[6379]", "--set=expected={ray: 2.1.0}")
    for node in nodes:
        errors = [line for line in ill if (line["where"], line["level"]) == (node, "error")]
        assert len(errors) >= 2, ill
        assert any("expected are: ray 2.1.0" in line["what"] for line in errors)
        assert any("s3://nothing/doctor" in line["what"] for line in errors)
    assert status == 1


@pytest.mark.slow
def test_nobody_elsewhere_can_reach_it(cluster: dict[str, str]) -> None:
    processes = [int(file.read_text().split()[0]) for file in Path(cluster["RAY_AUTH_TOKEN_PATH"]).parent.glob("*.pid")]
    found = [entry for process in processes for entry in listening_sockets(process)]
    assert len(processes) == 2
    assert {"gcs_server", "raylet"} <= {Path(name.split()[0]).name for _, _, name in found}
    assert [entry for entry in found if not ipaddress.ip_address(entry[0]).is_loopback] == []


def test_nobody_is_served_without_the_token(cluster: dict[str, str]) -> None:
    address = cluster[ADDRESS]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{address}/api/jobs/", timeout=10)
    with refused.value:
        assert refused.value.code == 401
    token = Path(cluster["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o077 == 0
    cluster = {**cluster, "RAY_AUTH_TOKEN": "0" * 64}
    with (
        with_environment(**cluster),
        pytest.raises(InputError, match="the dashboard asks for a token"),
        connected(address),
    ):
        pass


@pytest.mark.slow
def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_line(run_script("local.py", "start", f"--folder={tmp_path}", f"--dashboard-port={port}"))
    assert f"port {port}" in line
    assert "--dashboard-port" in line


@pytest.mark.slow
def test_resources_are_checked(tmp_path: Path) -> None:
    line = error_line(run_script("local.py", "start", f"--folder={tmp_path}", "--resources=reader=4"))
    assert "--resources" in line
