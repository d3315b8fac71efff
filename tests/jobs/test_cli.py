"""The command line of a job: help, printed config, one-line errors, exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ltrscale import config as configs
from ltrscale.workflows.pipeline import PipelineConfig
from ltrscale.workflows.stages import PrepareJob

ROOT = Path(__file__).resolve().parents[2]
JOBS = ("prepare", "pretrain", "finetune", "train_gbdt", "evaluate", "pipeline", "bench")


def job(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"jobs.{name}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_help_teaches_every_key(name: str) -> None:
    done = job(name, "--help")
    assert done.returncode == 0
    assert "config keys:" in done.stdout
    assert "out: " in done.stdout
    assert "PydanticUndefined" not in done.stdout


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_unknown_key_names_the_nearest() -> None:
    assert "did you mean 'seeds'" in one_line(
        job("pipeline", "--config", "jobs/configs/demo.yaml", "--set", "sedes=[1]")
    )


def test_missing_config_file_is_named() -> None:
    assert "nowhere.yaml: no such file" in one_line(job("pretrain", "--config", "nowhere.yaml"))


def test_missing_data_set_is_named(tmp_path: Path) -> None:
    done = job("pretrain", "--set", f"out={tmp_path}/out", "--set", f"train.data={tmp_path}/none")
    assert "no data set is committed there" in one_line(done)


def test_printed_config_is_a_config(tmp_path: Path) -> None:
    done = job("pipeline", "--config", "jobs/configs/demo.yaml", "--set", "seeds=[3]", "--print-config")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "printed.yaml"
    path.write_text(done.stdout)
    assert configs.load(PipelineConfig, str(path)).seeds == (3,)


@pytest.mark.parametrize("path", sorted((ROOT / "jobs" / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_valid_and_explained(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# "), "a shipped config says in its first line what it is for"
    assert "out:" in text
    configs.load(PrepareJob if path.stem.startswith("prepare-") else PipelineConfig, str(path))
