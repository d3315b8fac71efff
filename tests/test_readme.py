"""The README and the docs are true: code runs, commands and configs parse, links have targets."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pages import PAGES, ROOT, Block, blocks, commands, configs
from shopping_log import shopping_log

from ltrscale.config import validate
from ltrscale.data.dataset.split import Splits
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.verdict import Offline
from ltrscale.experiments.first.init import InitJob
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.models.choices import NetworkConfig
from ltrscale.runtime.workers import WorkersConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.trees.configs import LightGBMConfig

TESTS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")

JOBS = [(page, words) for page in PAGES for words in commands(page) if words[:2] == ["python", "-m"]]
PYTHON = [block for page in PAGES for block in blocks(page, "python")]


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page.name}:{block.line}")
def test_python_blocks_run(block: Block) -> None:
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), {"__name__": "__main__"})


def test_the_readme_has_code_to_run() -> None:
    assert any(block.page.name == "README.md" for block in PYTHON)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configs that `jobs.init` writes for a log."""
    folder = tmp_path_factory.mktemp("shop")
    shopping_log(400).to_csv(folder / "shop.csv", index=False)
    InitJob(file=str(folder / "shop.csv"), out=str(folder / "shop")).run()
    return folder / "shop"


@pytest.fixture(scope="module")
def workplaces(tmp_path_factory: pytest.TempPathFactory, shop: Path) -> Path:
    """For each page, a directory with the shipped configs and those on the page, named by their first lines."""
    there = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        folder = there / page.stem
        folder.mkdir()
        (folder / "jobs").symlink_to(ROOT / "jobs")
        for name, text in configs(page).items():
            (folder / name).write_text(text)
    for page in ("README", "own-data", "guide"):
        (there / page / "shop").symlink_to(shop)
    return there


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "words"), JOBS, ids=lambda value: getattr(value, "stem", None) or " ".join(value[2:5])
)
def test_job_commands_parse(
    page: Path,
    words: list[str],
    workplaces: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(workplaces / page.stem)
    monkeypatch.setattr(sys, "argv", [words[2], "--print-config", *words[3:]])
    monkeypatch.delitem(sys.modules, words[2], raising=False)
    runpy.run_module(words[2], run_name="__main__")
    assert isinstance(yaml.safe_load(capsys.readouterr().out), dict)


def test_every_config_shown_is_used_by_a_command_or_is_one_of_splits() -> None:
    used = {(page, word) for page, words in JOBS for word in words}
    for block in (block for page in PAGES for block in blocks(page, "yaml")):
        if named := re.match(r"# (\w+\.yaml)\b", block.text):
            assert (block.page, named[1]) in used
        elif {*(values := yaml.safe_load(block.text))} == {"out", "prepare"}:
            validate(PrepareJob, values, f"{block.page}:{block.line}")
        else:
            ((key, values),) = values.items()
            kind, beside = {
                "splits": (Splits, {}),
                "evaluate": (EvaluateSettings, {}),
                "finetune": (FinetuneConfig, {}),
                "network": (NetworkConfig, {}),
                "workers": (WorkersConfig, {}),
                "gbdt": (LightGBMConfig, {}),
                "offline": (Offline, {}),
                "columns": (ColumnMapping, {"query": "search_id"}),
                "source": (Items, {"columns": {"query": "qid", "features": ["bm25"]}}),
            }[key]
            validate(kind, {**beside, **values}, f"{block.page}:{block.line}")


def test_make_commands_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for page in PAGES for words in commands(page) if words[0] == "make"}
    assert {"demo", "compare", "test", "check"} <= named <= targets


@pytest.mark.parametrize("failing", [(), ("ruff",), ("-m pytest",), ("ruff", "-m pytest")])
def test_make_test_runs_all_parts_and_names_those_that_failed(tmp_path: Path, failing: tuple[str, ...]) -> None:
    """With tools in place of the real ones that write down their arguments; some of them fail."""
    for tool in ("python", "ruff", "mypy", "lint-imports"):
        fails = "".join(f"case \"$0 $*\" in *'{words}'*) exit 1;; esac\n" for words in failing)
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "$0 $*" >> "{tmp_path}/calls"\n{fails}')
        (tmp_path / tool).chmod(0o700)
    command = ["make", "-C", str(ROOT), "test", f"BIN={tmp_path}", "PROCESSOR=ONE=1"]
    for stamp in ("STAMP", "DEV"):  # newer than what they depend on
        (tmp_path / stamp).touch()
        command.append(f"{stamp}={tmp_path / stamp}")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    parts = {"ruff": "lint", "-m pytest": "test-all"}
    calls = (tmp_path / "calls").read_text()
    assert all(words in calls for words in parts)
    assert (done.returncode != 0) == bool(failing)
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("make test:")] == (
        ["make test: failed: " + " ".join(parts[words] for words in failing)] if failing else []
    )


@pytest.mark.parametrize(("target", "everything"), [("demo", False), ("compare", False), ("check", True)])
def test_only_what_tests_is_installed_with_all_extras(tmp_path: Path, target: str, everything: bool) -> None:
    fresh = [f"{stamp}={tmp_path / stamp}" for stamp in ("STAMP", "DEV")]
    command = ["make", "-C", str(ROOT), "--dry-run", target, *fresh]
    planned = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    installs = re.findall(r"pip install --no-compile -c cluster/constraints.txt -e (\S+)", planned)
    assert installs == ["'.[dev]'" if everything else "."]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Tests\n")[1].split("\n## ")[0]
    test_command = re.findall(r"^```sh\n(.*?)\s*(?:#.*)?$", section, re.MULTILINE)[0]
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert script[-1] == f"exec {test_command} </dev/null"
    assert script[1].startswith("#")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page; a repeated one has a number."""
    titles = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    names = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    return {f"{name}-{names[:i].count(name)}".removesuffix("-0") for i, name in enumerate(names)}


@pytest.mark.slow
def test_links_and_their_anchors_lead_somewhere() -> None:
    known: dict[Path, set[str]] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
        for path, _, anchor in (link.partition("#") for link in links):
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), f"{page.name}: {path}"
            if anchor:
                known.setdefault(there, anchors(there))
                assert anchor in known[there], f"{page.name}: {path}#{anchor}"
    assert len(known) > 5


def test_each_promise_names_a_test_that_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "reliability.md").read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| promise |")]
    assert len(promises) > 30
    for row in promises:
        named = TESTS.findall(row)
        assert named, row
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
