"""The command `ltrscale`: the verbs that it lists, runs and completes, and the configs that come with it."""

import os
import re
import subprocess
import sys
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import iter_modules

import pytest

import jobs
from jobs.__main__ import ltrscale
from jobs.cli import CONFIGS, shipped
from jobs.verbs import GONE, VERBS, commands
from ltrscale.progress import called

ROOT = Path(__file__).resolve().parents[2]
AS_PROGRAM = "import sys; sys.argv[0] = '/bin/ltrscale'; from jobs.__main__ import ltrscale; ltrscale()"


def given(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The status of `ltrscale` with these words, in this process."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/ltrscale", *words])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    try:
        ltrscale()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_every_job_is_in_one_of_five_groups() -> None:
    names = [*chain(*VERBS.values())]
    assert len(VERBS) == 5
    assert len(names) == len(set(names))
    inside = [module.name for module in iter_modules(jobs.__path__) if module.name not in ("cli", "help", "__main__")]
    modules = {name: import_module(f"jobs.{name}.__main__" if name == "bench" else f"jobs.{name}") for name in inside}
    assert sorted(names) == sorted(name for name, module in modules.items() if hasattr(module, "COMMAND"))


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_it_lists_what_each_verb_does(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert given(monkeypatch, *words) == 0
    text = capsys.readouterr().out
    for command in commands():
        assert re.search(rf"^  {command.name} +{re.escape(command.description.split()[0])}", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_it_starts_without_what_jobs_compute_with() -> None:
    code = f"{AS_PROGRAM}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "jobs" in loaded
    assert {"numpy", "pyarrow", "ray", "s3fs", "torch"}.isdisjoint(loaded)


SOON = ["init", "prepare", "relabel", "runs", "doctor", "submit", "export", "report", "gate", "evaluate"]
"""Verbs that start in about a second of processor time."""
LATE = {"torch", "ray", "scipy", "sklearn", "pandas", "matplotlib", "lightgbm", "optuna", "mlflow", "onnx"}
"""What takes a second or a good part of it to load, and what computes with it."""


@pytest.mark.slow
def test_what_needs_no_network_starts_without_torch() -> None:
    """All of them, one after another, in one process."""
    load = "for name in sys.argv[1:]: command(name).job(); print(name, *sys.modules)"
    command = [sys.executable, "-c", f"import sys; from jobs.verbs import command\n{load}", *SOON]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name: modules for name, *modules in map(str.split, done.stdout.splitlines())}
    assert [*loaded] == SOON
    assert {name: late for name, modules in loaded.items() if (late := LATE.intersection(modules))} == {}


WRONG = {
    "evaluate --set evaluate.metrics=[ndgc@5]": "'ndgc@5' is no metric; take ndcg@K",
    "gate --set bounds.margn=0.01": "did you mean 'bounds.margin'?",
    "export --to onxx --set bundle=there": "to: Input should be 'lightgbm', 'xgboost', 'onnx'",
    "export --to onnx --set bundle=there": "data: name the data set on whose documents the scores are compared",
    "report --set evaluation=nowhere": "nowhere: no evaluation is committed there; make it with jobs.evaluate",
}


@pytest.mark.slow
def test_what_is_wrong_is_said_without_torch(tmp_path: Path) -> None:
    """All of it, one line after another, in one process."""
    code = """
import sys
from jobs.__main__ import ltrscale

for line in sys.argv[1:]:
    sys.argv = ["/bin/ltrscale", *line.split()]
    try:
        ltrscale()
    except SystemExit as ended:
        print(ended.code, *sys.modules)
"""
    command = [sys.executable, "-c", code, *(f"{line} --set out={tmp_path / 'out'}" for line in WRONG)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for said, told, (status, *modules) in zip(
        WRONG.values(), done.stderr.splitlines(), map(str.split, done.stdout.splitlines()), strict=True
    ):
        assert (status, said in told, LATE & {*modules}) == ("2", True, set()), told


def test_a_verb_is_the_job_of_its_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert given(monkeypatch, "prepare", "--set=out=x", "--set=prepare.source.kind=letor", "--print-config") == 0
    assert "out: x\n" in capsys.readouterr().out
    assert sys.argv[0] == "/somewhere/bin/ltrscale prepare"  # as a run's record and messages name the process
    assert called("auto") == "ltrscale auto"
    assert given(monkeypatch, "prepare", "--help") == 0
    text = capsys.readouterr().out
    assert "usage: ltrscale prepare" in text
    assert "  ltrscale prepare --set out=" in text
    assert "python -m" not in text


def test_a_verb_that_is_none_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert given(monkeypatch, "trian_gbdt") == 2
    assert capsys.readouterr().err == "error: trian_gbdt: no such job; did you mean 'train_gbdt'?\n"
    for former, now in (
        ("drift", "evaluate with evaluate.by_period=true"),
        ("match", "relabel has the step {kind: match"),
    ):
        assert given(monkeypatch, former) == 2
        assert capsys.readouterr().err.startswith(f"error: {former}: no such job; {now}")


@pytest.mark.parametrize("name", GONE)
def test_a_former_job_names_the_new_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert given(monkeypatch, name) == 2
    assert capsys.readouterr().err == f"error: {name}: no such job; {GONE[name]}\n"
    assert GONE[name].split()[0] in chain(*VERBS.values())


@pytest.mark.slow
def test_a_former_job_as_a_module_names_the_new_one() -> None:
    command = [sys.executable, "-m", "jobs.stack", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"error: stack: no such job; {GONE['stack']}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ltrscale pre", {"prepare", "pretrain", "predict"}),
        ("ltrscale auto --bud", {"--budget"}),
        ("ltrscale auto --set budg", {"budget="}),
    ],
)
def test_a_shell_can_complete(line: str, offered: set[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    environment = os.environ | asked | {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    subprocess.run([sys.executable, "-c", AS_PROGRAM], cwd=ROOT, env=environment, check=True, timeout=120)
    assert {word.strip() for word in answer.read_text().split("\n")} == offered


def test_configs_are_listed_and_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert given(monkeypatch, "init") == 0
    listed = re.findall(r"^- ([\w.-]+): ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in CONFIGS.rglob("*.yaml"))
    for name in ("gate", "start/gate.yaml", "jobs/configs/start/gate.yaml"):
        assert given(monkeypatch, "init", "--example", name) == 0
        assert capsys.readouterr().out == (CONFIGS / "start" / "gate.yaml").read_text()
    assert given(monkeypatch, "init", "--example", "gaet") == 2
    assert "gaet: no such config; did you mean 'gate'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "shop"], "file: name the log to look at"),
        ([""], "file: name the log to look at"),
        (["log.csv", "--example", "gate"], "example: a log to look at is named too; name one of both"),
    ],
)
def test_a_log_that_was_forgotten_is_not_taken_for_a_wish_to_see_the_configs(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert given(monkeypatch, "init", *words) == 2
    assert said in capsys.readouterr().err


def test_a_config_of_the_checkout_is_found_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "jobs/configs/start/gate.yaml"
    monkeypatch.chdir(tmp_path)
    assert shipped(path) == str(CONFIGS / "start" / "gate.yaml")
    assert shipped("jobs/configs/start/mine.yaml") == "jobs/configs/start/mine.yaml"
    assert shipped("gate.yaml") == "gate.yaml"
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    assert shipped(path) == path, "the one that is here goes first"
