"""A machine taken away as Kubernetes does it, by SIGTERM to `ray start`, costs a training neither steps nor tries."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_scripts import ROOT, exported_environment, run_script
from waiting import wait_until

pytestmark = [
    *(pytest.mark.nightly, pytest.mark.slow, pytest.mark.ray),
    pytest.mark.timeout(900),  # several processes start
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A head and two nodes, each with room for the job, which drain as long as the pods of KubeRay."""
    options = (f"--folder={tmp_path / 'ray'}",)
    environment = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "90", "RAY_worker_niceness": "0"}
    try:
        started = run_script("local.py", "start", "--workers=2", "--cpus=4", *options, environment=environment)
        assert started.returncode == 0, started.stderr
        yield exported_environment(started.stdout)
    finally:
        assert run_script("local.py", "stop", *options).returncode == 0


def processes() -> dict[int, tuple[int, str]]:
    """The parent and the command of each process that has not ended."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    lines = (line.split(None, 3) for line in listed.splitlines())
    return {int(pid): (int(parent), command) for pid, parent, state, command in lines if state[0] != "Z"}


def with_a_worker(folder: Path) -> int:
    """The `ray start` of a node on which a worker trains."""
    nodes, alive = {int(path.read_text().split()[0]) for path in folder.glob("worker-*.pid")}, processes()
    process = next(
        pid
        for pid, (raylet, command) in alive.items()
        if "RayTrainWorker" in command and alive.get(raylet, (0, ""))[0] in nodes
    )
    return alive[alive[process][0]][0]


def test_a_node_that_gets_sigterm_is_left_with_no_step_lost(
    cluster: dict[str, str], synthetic_dataset: str, tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    job = {
        "out": str(out),
        "train": {"data": synthetic_dataset},
        "pretrain": {
            "network": {"encoder": {"width": 8, "blocks": 1}},
            "stream": {"docs_per_batch": 200, "streams": 2},
            "epochs": 12,
        },
        "workers": {"number": 2, "max_failures": 0},
    }
    (tmp_path / "pretrain.yaml").write_text(yaml.safe_dump(job))
    submit = [sys.executable, "-m", "jobs.submit", "--set=working_dir=null", "--set=check=false"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(
            [*submit, "--", "pretrain", f"--config={tmp_path / 'pretrain.yaml'}"],
            cwd=ROOT, env={**os.environ, **cluster, "PYTHONPATH": path}, stdout=log, stderr=log,
        )  # fmt: skip

    def records(name: str) -> list[int]:
        file = out / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [record[name] for record in map(json.loads, lines) if name in record]

    try:
        wait_until(lambda: len(records("step")) > 4 or running.poll() is not None)
        node = with_a_worker(tmp_path / "ray")
        os.kill(node, signal.SIGTERM)
        assert running.wait() == 0, (tmp_path / "log").read_text()
    finally:
        running.kill()
        running.wait()
    steps = records("step")
    assert steps == list(range(1, len(steps) + 1)), "each once"
    assert records("running_workers") == [2, 0, 2]
    assert "a node is about to be removed: all workers start again without it" in (tmp_path / "log").read_text()
    assert not re.search("failure 1 of", (tmp_path / "log").read_text())
    wait_until(lambda: node not in processes())
