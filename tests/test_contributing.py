"""docs/contributing.md and docs/extending.md are true: every name exists; each recipe is applied to a copy and run."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
from pyarrow import orc
from synthetic_columns import COLUMN_MAPPING

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BOTH = (ROOT / "docs" / "contributing.md").read_text() + PAGE
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = re.findall(r"`((?:ltrscale|jobs|tests|docs)/[\w./]+)(?:::([\w.]+))?`", FENCE.sub("", BOTH))
KINDS = ("margin", "masked", "gated", "fmeasure", "three_trees", "compressed", "orc")


def blocks(language: str) -> list[str]:
    return [text for found, text in FENCE.findall(PAGE) if found == language]


def commands() -> list[list[str]]:
    """The commands of the page, each as a list of words after `python -m`, with continued lines joined."""
    lines = "".join(blocks("console")).replace("\\\n", " ").splitlines()
    return [shlex.split(line.removeprefix("$ python -m ")) for line in lines]


def test_the_page_has_all_recipes() -> None:
    assert [len(blocks(language)) for language in ("py", "diff")] == [8, 9]
    assert [words[0] for words in commands()] == ["jobs.reference", *["pytest"] * 7, "jobs.pipeline"]
    assert len(NAMES) > 30


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name"), NAMES, ids=map("::".join, NAMES))
def test_every_name_on_the_pages_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    if name:
        assert name in set(defined(ast.parse((ROOT / path).read_text()).body))


def test_every_module_on_the_pages_exists() -> None:
    for module in re.findall(r"`(?:python -m )?((?:ltrscale|jobs)\.[\w.]+)`", FENCE.sub("", BOTH)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), module


def defined(body: list[ast.stmt], above: str = "") -> Iterator[str]:
    """Names of functions, classes and variables; members of classes are `Class.name`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield above + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{above}{node.name}.")
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (above + target.id for target in targets if isinstance(target, ast.Name))


class Copy(NamedTuple):
    """A copy of the tree with all recipes of the page applied."""

    root: Path
    written: list[str]
    """The files of code that were written or changed."""

    def run(self, *words: str) -> str:
        """The output of `python -m` in the copy; the command must succeed."""
        environment = os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    root = tmp_path_factory.mktemp("contributing")
    for name in ("ltrscale", "jobs", "tests", "docs"):
        shutil.copytree(ROOT / name, root / name)  # with what is compiled
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root / name)
    written = []
    for block in blocks("py"):
        head, _, text = block.partition("\n")
        path = root / head.removeprefix("# ")
        before = path.read_text() + "\n\n" if path.exists() else ""
        path.write_text(before + text.lstrip("\n"))
        written.append(str(path.relative_to(root)))
    for block in blocks("diff"):
        head, *hunks = block.split("@@\n")
        path = root / head.strip().removeprefix("--- ")
        path.write_text(changed(path, hunks))
        if path.suffix == ".py":
            written.append(str(path.relative_to(root)))
    made = Copy(root, written)
    made.run(commands()[0][0])
    return made


def changed(path: Path, hunks: list[str]) -> str:
    """A file's text with every hunk applied, each in the only place that it fits."""
    text = path.read_text()
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        assert text.count(before) == 1, f"docs/extending.md: {text.count(before)} places in {path} for\n{before}"
        text = text.replace(before, after)
    return text


@pytest.mark.slow
def test_what_is_written_has_the_style_of_the_house(copy: Copy) -> None:
    copy.run("ruff", "format", "--check", *copy.written)
    copy.run("ruff", "check", *copy.written)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_laws_docs_and_bench_pick_every_recipe_up(copy: Copy) -> None:
    """Runs the tests that the page names for each recipe, the tests of the docs, and the recipes' doctests."""
    given = [
        (words[1 : words.index("-k")], words[words.index("-k") + 1].split()[0])
        for words in commands()
        if words[0] == "pytest"
    ]
    assert [kind for _, kind in given] == list(KINDS)
    files = [file for files, _ in given for file in files]
    docs = ["tests/test_methods.py", "tests/jobs/test_help.py"]
    chosen = " or ".join([*KINDS, "table", "up_to_date"])
    printed = copy.run("pytest", "-v", "--doctest-modules", *copy.written, *files, *docs, "-k", chosen)
    passed = re.findall(r"^(\S+?)::(\S+).* PASSED", printed, re.MULTILINE)
    for of_kind, kind in given:
        for file in of_kind:
            assert any(found == file and re.search(rf"(\b|_){kind}", test) for found, test in passed), (file, kind)
    assert {file for file, _ in passed} >= {*docs}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_all_recipes_train_and_are_reported(copy: Copy) -> None:
    copy.run(*commands()[-1])
    found = json.loads((copy.root / "runs" / "tried" / "evaluation" / "metrics.json").read_text())
    assert {"fmeasure@5", "fmeasure(beta=0.5)@5"} <= {*found["methods"][0]["slices"]["all"]["summaries"]}
    assert [method["name"] for method in found["methods"]] == ["tried", "trees"]
    report = (copy.root / "runs" / "tried" / "evaluation" / "report.md").read_text()
    assert "F@k is the harmonic mean of precision and recall" in report
    assert "F(beta=0.5): beta 0.5; ties by expectation" in report


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_export_is_checked_on_the_rows_of_an_added_format(copy: Copy, synthetic_dataset: str) -> None:
    logs = copy.root / "orc"
    logs.mkdir()
    for log in sorted((Path(synthetic_dataset).parent / "log").glob("*/*.parquet")):
        orc.write_table(pq.read_table(log, partitioning=None), str(logs / f"{log.parent.name}.orc"))
    source = json.dumps({"kind": "items", "columns": COLUMN_MAPPING})
    splits = "{train: {data: set, periods: 2026-W01}, validation: {data: set, periods: 2026-W02}}"
    for job, settings in {
        "prepare": ["out=set", "prepare.inputs=orc", f"prepare.source={source}"],
        "train_gbdt": ["out=trees", f"splits={splits}", "gbdt={num_trees: 5, num_threads: 1}"],
        "export": ["out=export", "to=lightgbm", "bundle=trees", "data=set", "rows=200"],
    }.items():
        copy.run(f"jobs.{job}", *(f"--set={setting}" for setting in settings))
    parity = json.loads((copy.root / "export" / "parity.json").read_text())
    assert parity["raw"]["documents"] == 200
    assert parity["raw"]["largest_difference"] < 1e-9
