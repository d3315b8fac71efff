"""The command line of a job: help, printed config, one-line errors, exit status."""

import io
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import pytest
from command_lines import run_here
from rich.console import Console

from jobs.bench.baselines import BaselinesJob
from jobs.cli import Command, _shown_log, main, read_command
from jobs.verbs import command
from ltrscale import config as configs
from ltrscale.config import Config
from ltrscale.derive.relabel import RelabelJob
from ltrscale.errors import InputError
from ltrscale.evaluation.click_log import ClicksJob
from ltrscale.evaluation.gate import GateJob
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.experiments.auto.auto import AutoJob
from ltrscale.experiments.distill import DistillJob
from ltrscale.experiments.methods.single import GBDTMethod
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.experiments.study import StudyJob
from ltrscale.experiments.weekly import WeeklyJob
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.progress import console, log
from ltrscale.scoring.predict import PredictJob
from ltrscale.scoring.score import ScoreJob
from ltrscale.simulate.portal import PortalLog
from ltrscale.training.finetune import FinetuneJob
from ltrscale.training.pretrain import PretrainJob
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.tuning.tune import TuneJob

ROOT = Path(__file__).resolve().parents[2]
LAID_OVER = {
    "buyl23-yahoo": "buyl23",
    "qin21-yahoo": "qin21",
    "crossval-ohsumed": "crossval-letor",
    "crossval-few-ohsumed": "crossval-few-letor",
    "crossval-in-context": "crossval-few-letor",
    "crossval-encoders-letor": "crossval-few-letor",
    "study-news-encoders": "study-news",
    "study-news-finetuning": "study-news",
    "study-news-pretraining": "study-news",
    "study-news-share": "study-news",
    "prepare-scale-day": "prepare-scale",
}
"""Configs of a few keys, and what they are laid over."""


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_help_is_a_command_away() -> None:
    done = run_here("finetune", "--help")
    assert done.returncode == 0, done.stderr
    assert "finetune.loss = {kind: lambdarank}" in done.stdout
    assert "did you mean 'finetune.loss'" in one_line(run_here("finetune", "--help", "finetune.los"))


def test_unknown_key_names_the_nearest() -> None:
    assert "did you mean 'seeds'" in one_line(
        run_here("pipeline", "--config", "jobs/configs/start/demo.yaml", "--set", "sedes=[1]")
    )


def test_missing_config_file_is_named() -> None:
    assert "nowhere.yaml: no such file" in one_line(run_here("pretrain", "--config", "nowhere.yaml"))


def test_missing_data_set_is_named(tmp_path: Path) -> None:
    done = run_here("pretrain", "--set", f"out={tmp_path}/out", "--set", f"train.data={tmp_path}/none")
    assert "no data set is committed there" in one_line(done)


def test_printed_config_is_a_config(tmp_path: Path) -> None:
    done = run_here("pipeline", "--config", "jobs/configs/start/demo.yaml", "--set", "seeds=[3]", "--print-config")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "printed.yaml"
    path.write_text(done.stdout)
    assert configs.load(PipelineJob, str(path)).seeds == (3,)


def test_flags_are_short_for_keys(tmp_path: Path) -> None:
    plain = ("--set", "out=x", "--set", "train.data=y")
    done = run_here("pretrain", *plain, "--workers", "2", "--fresh", "--print-config")
    assert done.returncode == 0, done.stderr
    (tmp_path / "printed.yaml").write_text(done.stdout)
    printed = configs.load(PretrainJob, str(tmp_path / "printed.yaml"))
    assert (printed.workers.number, printed.fresh) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "jobs" / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_valid_and_explained(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# "), "a shipped config says in its first line what it is for"
    assert "out:" in text
    below = LAID_OVER.get(path.stem)
    urls = [str(path), *([str(path.with_stem(below))] if below else [])]
    kinds = {
        "auto": AutoJob,
        "baselines": BaselinesJob,
        "prepare": PrepareJob,
        "relabel": RelabelJob,
        "match": RelabelJob,
        "distill": DistillJob,
        "distributed": PretrainJob,
        "pretrain": PretrainJob,
        "finetune": FinetuneJob,
        "teacher": FinetuneJob,
        "tune": TuneJob,
        "gbdt": GBDTJob,
        "score": ScoreJob,
        "predict": PredictJob,
        "study": StudyJob,
        "gate": GateJob,
        "weekly": WeeklyJob,
        "evaluate": EvaluateJob,
        "clicks": ClicksJob,
        "simulate": PortalLog,
    }
    assert configs.load(kinds.get(path.stem.partition("-")[0], PipelineJob), urls[::-1])


@pytest.mark.parametrize("folder", sorted((ROOT / "jobs" / "configs").iterdir()), ids=lambda folder: folder.name)
def test_every_folder_of_configs_has_a_page_with_a_line_a_file(folder: Path) -> None:
    named = re.findall(r"^- \[([\w-]+)\]\(\1\.yaml\): \w.+$", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.stem for path in folder.glob("*.yaml"))


def test_a_config_is_laid_over_the_ones_before(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("out: elsewhere\nmethods: {gbdt: {gbdt: {num_leaves: 5}}}\n")
    one, two = "jobs/configs/start/demo.yaml", str(path)
    done = run_here("pipeline", "--config", one, "--config", two, "--set", "seeds=[3]", "--print-config")
    assert done.returncode == 0, done.stderr
    (tmp_path / "printed.yaml").write_text(done.stdout)
    plain = configs.load(PipelineJob, str(ROOT / one))
    gbdt = plain.methods["gbdt"]
    assert isinstance(gbdt, GBDTMethod)
    methods = {**plain.methods, "gbdt": gbdt.replace(gbdt=gbdt.gbdt.replace(num_leaves=5))}
    expected = plain.model_copy(update={"out": "elsewhere", "methods": methods, "seeds": (3,)})
    assert configs.load(PipelineJob, str(tmp_path / "printed.yaml")) == expected


def ends_well(_: object) -> None:
    log.info("some line")


def is_refused(_: object) -> None:
    raise InputError("some reason")


def has_a_defect(_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("run", "ends"), [(ends_well, None), (is_refused, SystemExit), (has_a_defect, ZeroDivisionError)]
)
def test_a_command_that_has_ended_gives_the_log_back(
    run: Callable[[object], None], ends: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its standard error may be closed by then, as in a notebook or a test."""
    before = ([*log.handlers], log.level, console.quiet)
    monkeypatch.setattr(sys, "argv", ["job"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with io.StringIO() as text, redirect_stderr(text):
        with pytest.raises(ends) if ends else nullcontext():
            main(Command("job", lambda: (Config, run), "A job."))
        assert "some" in text.getvalue() or ends is ZeroDivisionError
    log.warning("no handler of the command is left to write this line to its closed stream")
    assert ([*log.handlers], log.level, console.quiet) == before


FILLS_A_DISK = """
import pyarrow
from jobs.cli import Command, _shown_log, main
from ltrscale.config import Config
def run(_):
    with pyarrow.OSFile("/dev/full", "wb") as file:
        file.write(b"bytes")
main(Command("job", lambda: (Config, run), "A job."))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_library_is_one_line() -> None:
    command = [sys.executable, "-c", FILLS_A_DISK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert one_line(done).startswith("error: disk full ([Errno 28] Error writing bytes to file.")


def test_lines_that_are_marked_are_named_until_the_mark_is_gone(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("q,price\na,1\na,2\n")
    config = tmp_path / "prepare.yaml"
    where = f"out: {tmp_path}/data\nprepare:\n  inputs: {tmp_path}/log.csv\n"
    columns = "      query: q # CHECK: or price\n      features: [price] # CHECKED\n"
    config.write_text(f"{where}  source:\n    kind: items\n    columns:\n{columns}")
    said = run_here("prepare", "--config", str(config)).stderr
    assert f"not checked yet: {config}:7: query: q # CHECK: or price" in said
    assert "features" not in said
    assert "CHECK" not in run_here("prepare", "--config", str(config), "--print-config").stderr
    config.write_text(config.read_text().replace("# CHECK: or price", ""))
    done = run_here("prepare", "--config", str(config))
    assert (done.returncode, "CHECK" in done.stderr) == (0, False)


def test_a_long_line_is_one_line_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that a job prints is copied whole: the terminal folds it, and no line end is in it."""
    shown = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr("jobs.cli.console", shown)
    command = f"next: python -m jobs.prepare --config {'runs/' * 40}prepare.yaml [bold]"
    with _shown_log(rank=0):
        log.info(command)
    [line] = [line for line in shown.file.getvalue().splitlines() if line]  # type: ignore[attr-defined]
    assert line.endswith(f" {command}")


def test_a_key_that_is_false_by_default_has_an_option_and_the_last_word_counts() -> None:
    plain = ("--set", "out=x", "--set", "pipeline=y")
    for words, value in ((("--rollback",), True), (("--rollback", "--set", "rollback=false"), False)):
        config, _ = read_command(command("weekly"), [*plain, *words])
        assert isinstance(config, WeeklyJob)
        assert config.rollback is value
