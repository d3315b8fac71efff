"""A study over Ray that is asked to stop: each task saves its last step, and time and documents add up over stops."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from faulty_pretraining import committed_steps

from ltrscale.experiments.records import Spent

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200
PRETRAIN = {
    "network": {"encoder": {"width": 8, "blocks": 1}},
    "epochs": 10_000,
    "stream": {"docs_per_batch": 500},
}

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def begin(folder: Path, data: str) -> subprocess.Popen[str]:
    """Start a study of two pretrainings that go on for long, both at once."""
    periods = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
    settings = {
        "out": str(folder / "out"),
        "data": data,
        "splits": {name: {"periods": period} for name, period in periods.items()},
        "methods": {"simclr": {"kind": "neural", "pretrain": PRETRAIN}},
        "grid": [{"labelled": [8], "draws": 1, "pretrainings": 2}],
        "evaluate": {"baseline": None},
        "workers": {"number": 2, "cpus": 0.5},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "jobs.study", "--config", str(folder / "study.yaml")]
    with (folder / "said.txt").open("a") as said:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said, text=True)


def steps_of(pretrained: Path) -> list[dict[str, Any]]:
    """The records of steps, those of all runs."""
    path = pretrained / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if "step" in record]


@pytest.mark.nightly
def test_a_stop_saves_the_last_step_of_each_task_and_spent_time_adds_up(synthetic_dataset: str, tmp_path: Path) -> None:
    folders = [tmp_path / "out" / "pretrained" / f"seed-{seed}" / "simclr" for seed in (0, 1)]
    before = [Spent(of="")] * 2
    for _ in range(2):
        known = [len(steps_of(folder / "pretrained")) for folder in folders]
        process = begin(tmp_path, synthetic_dataset)
        try:
            while any(len(steps_of(f / "pretrained")) < n + 5 for f, n in zip(folders, known, strict=True)):
                assert process.poll() is None, (tmp_path / "said.txt").read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 128 + signal.SIGTERM, (tmp_path / "said.txt").read_text()
        finally:
            process.kill()
        assert (tmp_path / "said.txt").read_text().splitlines()[-1].endswith("the same command resumes")
        for i, folder in enumerate(folders):
            records, spent = steps_of(folder / "pretrained"), Spent.read(str(folder))
            assert committed_steps(str(folder / "pretrained"))[-1] == records[-1]["step"]
            assert spent is not None
            assert spent.documents == sum(record["documents"] for record in records)
            assert spent.seconds > before[i].seconds
            before[i] = spent
    steps = [record["step"] for record in steps_of(folders[0] / "pretrained")]
    assert steps == sorted(set(steps)), "no step was made twice"
