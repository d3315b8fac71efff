"""What the files for Prometheus and Grafana ask for is there: Debian's Prometheus collects it from a real training."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_scripts import ROOT, exported_environment, run_script
from waiting import wait_until

from ltrscale.stages import tracking

CONFIG = ROOT / "cluster" / "prometheus.yml"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "cluster" / "grafana" / "ltrscale.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
OF_GPUS = {expression for expression in EXPRESSIONS if "gpu" in expression}
"""Empty on machines without a GPU, such as those that test."""


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `apt-get install prometheus` brings it")
    return found


def test_the_dashboard_can_be_imported_anywhere() -> None:
    """Grafana gives the id; sources of data are asked for, and no place of one installation is named."""
    assert "id" not in DASHBOARD
    assert re.fullmatch(r"[a-z-]{1,40}", DASHBOARD["uid"])
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    asking = [*PANELS, *(target for panel in PANELS for target in panel["targets"]), variables["run"]]
    assert {json.dumps(each["datasource"]) for each in asking} == {'{"type": "prometheus", "uid": "${datasource}"}'}
    used = {name for expression in EXPRESSIONS for name in re.findall(r"\$(\w+)", expression)}
    assert used == set(variables) - {"datasource"}


def test_the_dashboard_has_its_rows_and_no_panel_lies_on_another() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Training", "Reading", "Account", "Nodes"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert all(target["legendFormat"] for target in panel["targets"])


def test_the_dashboard_shows_every_gauge() -> None:
    asked = set(re.findall(r"ray_ltrscale_(\w+)", " ".join(EXPRESSIONS)))
    exported = {f"{name}_total" for name in tracking.COUNTERS} | set(
        tracking.OF_STEP | tracking.OF_RUN | tracking.OF_VALIDATION
    )
    exported |= {f"epoch_{name}" for name in tracking.OF_EPOCH} | {f"worker_{name}" for name in tracking.OF_WORKER}
    assert asked == exported - {"auxiliary_loss"}


def test_promtool_accepts_the_configuration() -> None:
    done = subprocess.run([program("promtool"), "check", "config", CONFIG], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A head and a worker node; yields the environment of a client."""
    options = (f"--folder={tmp_path / 'ray'}",)
    try:
        started = run_script("local.py", "start", *options, environment={"RAY_worker_niceness": "0"})
        assert started.returncode == 0, started.stderr
        yield exported_environment(started.stdout)
    finally:
        assert run_script("local.py", "stop", *options).returncode == 0


@pytest.fixture
def prometheus(cluster: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """Prometheus with our configuration, every second, on loopback; yields its address."""
    assert cluster
    scratch, folder = (tmp_path / "ray" / "scratch").read_text(), tmp_path / "prometheus"
    config = CONFIG.read_text().replace("/tmp/ray/", f"{scratch}/").replace("10s", "1s").replace("30s", "1s")
    assert scratch in config
    folder.mkdir()
    (folder / "prometheus.yml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [program("prometheus"), "--config.file=prometheus.yml", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, "--storage.tsdb.path=data"], cwd=folder, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or answers(f"http://{address}/-/ready"))
        assert process.poll() is None, (folder / "log").read_text()
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def query(prometheus: str, expression: str, run: str) -> list[dict[str, Any]]:
    """The series that an expression of the dashboard gives now."""
    text = expression.replace("$run", run).replace("$window", "1m")
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    series: list[dict[str, Any]] = found["data"]["result"]
    return series


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)  # several processes start
def test_every_panel_has_data_while_a_job_trains(
    cluster: dict[str, str], prometheus: str, synthetic_dataset: str, tmp_path: Path
) -> None:
    out = tmp_path / "ranker"
    job = {
        "out": str(out),
        "splits": {
            name: {"data": synthetic_dataset, "periods": f"2026-W0{week}"}
            for week, name in enumerate(("train", "validation", "test"), 1)
        },
        "finetune": {
            "network": {"encoder": {"width": 8, "blocks": 1}},
            "stream": {"streams": 2},
            "epochs": 2000,
            "patience": 2000,
            "checkpoint_minutes": 0.02,
        },
        "workers": {"number": 2, "read_on": {"reader": 1}},
    }
    (tmp_path / "finetune.yaml").write_text(yaml.safe_dump(job))
    submit = [sys.executable, "-m", "jobs.submit", "--set=working_dir=null", "--set=check=false"]
    words = [*submit, "--", "finetune", f"--config={tmp_path / 'finetune.yaml'}"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **cluster, "PYTHONPATH": path}
    with (tmp_path / "job.log").open("w") as log:
        running = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        run, empty = str(out).strip("/"), [each for each in EXPRESSIONS if each not in OF_GPUS]

        def all_answered() -> bool:
            empty[:] = [expression for expression in empty if not query(prometheus, expression, run)]
            assert running.poll() is None, ((tmp_path / "job.log").read_text(), empty)
            time.sleep(0.5)  # of a machine with two cores
            return not empty

        wait_until(all_answered)
        assert {each["value"][1] for each in query(prometheus, "max_over_time(up[5m])", run)} == {"1"}
        first = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
        groups = next(record["groups"] for record in first if "epoch" in record)
        gauge = "ray_ltrscale_{}{{run='$run'}}"
        for name, expected in {"epoch_groups": groups, "missed": 0, "restarts": 0, "running_workers": 2}.items():
            values = {float(each["value"][1]) for each in query(prometheus, gauge.format(name), run)}
            assert values == {expected}, name
        ranks = {each["metric"]["rank"] for each in query(prometheus, gauge.format("worker_memory_gb"), run)}
        assert ranks == {"0", "1"}
        for expression in OF_GPUS:
            query(prometheus, expression, run)  # which can be read, at least
    finally:
        running.send_signal(signal.SIGINT)
        stopped = subprocess.run([*words[:3], "--action", "stop", *words[3:]], cwd=ROOT, env=environment, timeout=300)
        running.wait()
    assert stopped.returncode == 0
