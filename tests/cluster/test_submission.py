"""Jobs run unchanged on a cluster of processes of their own, with data on S3: submitted, followed, stopped, found."""

import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import PIPE

import pytest
from cluster_scripts import ROOT, error_line, exported_environment, run_script
from cluster_sockets import listening_sockets

from ltrscale import bundle, storage
from ltrscale.data.dataset.manifest import open_dataset

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.s3]

PREPARE = "jobs/configs/prepare-distributed-dev.yaml"
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


def submit(client: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `jobs.submit` from the top of the checkout."""
    command = [sys.executable, "-m", "jobs.submit", *words]
    return subprocess.run(command, cwd=ROOT, env=shell(client), capture_output=True, text=True, timeout=240)


def test_prepare_and_pretrain(cluster: dict[str, str], s3: str) -> None:
    data, out = f"{s3}/submitted/data", f"{s3}/submitted/bundle"
    # the config is read where the keys are not: data are named, not read
    prepared = submit(cluster, "--", "prepare", "--config", PREPARE, f"--set=out={data}", *SMALL_LOG)
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    documents = open_dataset(data).manifest.counts().documents

    uploaded = f"{s3}/configs/pretrain.yaml"  # a config at a URL, as on a cluster that has no checkout
    storage.write_bytes(uploaded, (ROOT / "jobs" / "configs" / "distributed-dev.yaml").read_bytes())
    arguments = ("--config", uploaded, f"--set=out={out}", f"--set=train.data={data}", *SMALL_RUN)
    pretrained = submit(cluster, "--set=check=false", "--", "pretrain", *arguments)
    assert pretrained.returncode == 0, pretrained.stdout + pretrained.stderr
    log = pretrained.stdout
    assert re.search(rf"(?m)^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d pretrain: writing {re.escape(out)}", log)
    assert "training on 2 workers" in log
    assert bundle.read_manifest(out)["made_by"]["stage"] == "pretrain"
    lines = storage.read_bytes(f"{out}/run/metrics.jsonl").decode().splitlines()
    epochs = [record for record in map(json.loads, lines) if "epoch" in record]
    assert [record["documents"] for record in epochs] == [documents]


def test_a_failing_job_fails_the_command_with_its_status(cluster: dict[str, str], s3: str) -> None:
    config = "jobs/configs/distributed-dev.yaml"
    words = ("--config", config, f"--set=train.data={s3}/none")
    done = submit(cluster, "--set=environment.LTRSCALE_STORAGE_PATIENCE_S=30", "--", "pretrain", *words)
    assert done.returncode == 2
    assert f"error: {s3}/none: no data set is committed there" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "failed with status 2" in done.stderr


def test_given_twice_it_is_one_job_that_can_be_left_found_and_stopped(cluster: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "data"
    job = ("--", "prepare", "--config", PREPARE, f"--set=out={out}", *SMALL_LOG)
    with storage.hold(f"{out}-log"):  # the job waits for its turn
        first = submit(cluster, "--set=follow=false", *job)
        assert first.returncode == 0, first.stderr
        attempt = first.stdout.strip()
        assert re.fullmatch(r"prepare-[0-9a-f]{12}", attempt)

        # other words for the same settings
        command = [sys.executable, "-m", "jobs.submit", *job, f"--set=out={out}"]
        follower = subprocess.Popen(command, cwd=ROOT, env=shell(cluster), stdout=PIPE, stderr=PIPE, text=True)
        assert follower.stdout is not None
        assert any("waiting" in line for line in follower.stdout), "the log of the first"
        follower.send_signal(signal.SIGINT)
        _, said = follower.communicate(timeout=60)
        assert follower.returncode == 130
        assert "not submitted again" in said
        assert f"--id {attempt} --action stop" in said
        shown = submit(cluster, "--action=status", *job)
        assert re.match(rf"{attempt}  running  since ", shown.stdout)

        assert submit(cluster, f"--id={attempt}", "--action=stop").returncode == 0
        assert submit(cluster, "--action=stop", *job).returncode == 0, "it is stopped already"
    assert submit(cluster, f"--id={attempt}").returncode == 143, "the status of a stopped job"
    again = submit(cluster, *job)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{attempt}-2: succeeded" in again.stderr
    assert open_dataset(str(out)).manifest.counts().groups == 200


def test_nobody_elsewhere_can_reach_it(cluster: dict[str, str]) -> None:
    processes = [int(file.read_text().split()[0]) for file in Path(cluster["RAY_AUTH_TOKEN_PATH"]).parent.glob("*.pid")]
    found = [entry for process in processes for entry in listening_sockets(process)]
    assert len(processes) == 2
    assert {"gcs_server", "raylet"} <= {Path(name.split()[0]).name for _, _, name in found}
    assert [entry for entry in found if not ipaddress.ip_address(entry[0]).is_loopback] == []


def test_nobody_is_served_without_the_token(cluster: dict[str, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{cluster['RAY_API_SERVER_ADDRESS']}/api/jobs/", timeout=10)
    with refused.value:
        assert refused.value.code == 401
    token = Path(cluster["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o077 == 0
    stranger = submit({**cluster, "RAY_AUTH_TOKEN": "0" * 64}, "--action=status")
    assert "the dashboard asks for a token" in error_line(stranger)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_line(run_script("local.py", "start", f"--folder={tmp_path}", f"--dashboard-port={port}"))
    assert f"port {port}" in line
    assert "--dashboard-port" in line


def test_resources_are_checked(tmp_path: Path) -> None:
    line = error_line(run_script("local.py", "start", f"--folder={tmp_path}", "--resources=reader=4"))
    assert "--resources" in line
