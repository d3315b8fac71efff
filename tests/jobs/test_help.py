"""`--help`: the keys that people set, one key, all keys; and the reference of all jobs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import yaml
from example_configs import Circle, Square, Strict, Tuned
from pydantic import BaseModel, Field

from jobs.cli import Command, main
from jobs.help import FILE, Key, find, keys_of, show, table_of
from jobs.reference import PAGE, reference, table
from jobs.verbs import commands
from ltrscale.config import Config, kind_of, members
from ltrscale.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
every_command = pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)


class Named(Config):
    required: Circle
    by_name: dict[str, Circle | Square] = Field(default_factory=dict)
    colour: Literal["red", "blue"] = "red"
    colours: tuple[Literal["red", "blue"], ...] = ()
    preset: Literal["red", "blue"] | None = None


def every_key(cls: type[BaseModel]) -> list[Key]:
    return list(keys_of(table_of({"job": cls}), "job"))


def lines(cls: type[BaseModel], given: str | None = None) -> list[str]:
    keys = every_key(cls)
    return show(keys if given is None else find(keys, given), 98).splitlines()


def test_every_key_is_shown_with_its_default_its_meaning_and_its_kinds() -> None:
    assert lines(Strict) == [
        "  out (required)",
        "  job",
        "  job.name = job",
        "      What it is called.",
        "  job.shape = {kind: circle}",
        "      Kinds: circle, square.",
        "  job.shape.kind=circle",
        "      A round one.",
        "    job.shape.radius = 1.0",
        "        From the centre.",
        "  job.shape.kind=square",
        "      One with corners.",
        "    job.shape.side = 1.0",
        "  job.steps = []",
        "  job.tags = {}",
        "  job.shapes = []",
        "      A round one.",
        "  job.shapes.0.kind = circle",
        "  job.shapes.0.radius = 1.0",
        "      From the centre.",
    ]


def test_a_default_is_that_of_the_field_before_that_of_its_class() -> None:
    tuned = lines(Tuned)
    assert "    job.shape.radius = 5.0" in tuned
    assert "  shape = {kind: square}" in tuned
    assert "    shape.side = 7.0" in tuned
    assert "    shape.radius = 1.0" in tuned


def test_what_is_required_named_by_the_user_or_a_choice_is_shown_as_such() -> None:
    named = lines(Named)
    assert "  required (required)" in named
    assert "  by_name.NAME.kind=square" in named
    assert "    by_name.NAME.side = 1.0" in named
    for key in ("colour = red", "colours = []", "preset = null"):
        assert named[named.index(f"  {key}") + 1] == "      One of red, blue."


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("job.shape.kind=square", ["  job.shape.kind=square", "      One with corners.", "    job.shape.side = 1.0"]),
        ("job.shape.side", ["  job.shape.kind=square", "      One with corners.", "    job.shape.side = 1.0"]),
        ("job.shapes.3.radius", ["  job.shapes.0.radius = 1.0", "      From the centre."]),
        ("out", ["  out (required)"]),
    ],
)
def test_one_key_is_shown_with_all_below_it_and_the_kind_that_has_it(given: str, shown: list[str]) -> None:
    assert lines(Strict, given) == shown


def test_a_name_of_the_users_leads_to_the_keys_below_it() -> None:
    assert lines(Named, "by_name.mine.side") == lines(Named, "by_name.NAME.side")


@pytest.mark.parametrize(("given", "near"), [("job.shap.side", "job.shape.side"), ("shape", "job.shape"), ("", "out")])
def test_an_unknown_key_names_the_nearest(given: str, near: str) -> None:
    with pytest.raises(InputError, match=rf"--help {given}: unknown key; did you mean '{near}'\?"):
        find(every_key(Strict), given)


@pytest.mark.slow
@every_command
def test_help_shows_10_to_25_keys_and_the_kinds_of_each(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    every = {key.name: key for key in reversed(list(keys_of(command.table(), command.name)))}
    usual = command.keys.split() or list(every)
    assert len(usual) == len(set(usual))
    assert set(usual) <= set(every)
    assert 10 <= len(usual) <= 25 or len(usual) == len(every)
    text = command.help("")
    for name in usual:
        assert re.search(rf"^ +{re.escape(name + every[name].default)}$", text, re.MULTILINE), name
        assert every[name].text, f"{name} has no explanation"
        for kind in kinds(command.config, name):
            assert re.search(rf"\b{kind}\b", text), f"{name}: {kind}"
    assert max(map(len, text.splitlines())) <= 80


def kinds(cls: type[BaseModel], name: str) -> list[str]:
    """The kinds of a key, read from the config itself."""
    level, found = [cls], [[cls]]
    for part in name.split("."):
        found = [members(model.model_fields[part].annotation) for model in level if part in model.model_fields]
        level = [model for models in found for model in models] or level  # places and names are no fields
    return [kind_of(model) for models in found if len(models) > 1 for model in models]


@pytest.mark.slow
@every_command
def test_every_key_is_explained_when_it_is_asked_for(command: Command) -> None:
    every = list(keys_of(command.table(), command.name))
    whole = command.help("all")
    for key in every:
        assert key.text or key.name.endswith(".kind"), f"{key.name} has no explanation"
        assert key.is_below(key.name.split("."))
        assert f"{key.name}{key.default}\n" in whole
    for name in {*command.keys.split(), every[0].name, every[-1].name}:
        assert f"{name}{next(key.default for key in find(every, name))}\n" in command.help(name)


@pytest.mark.slow
def test_a_key_with_very_many_below_it_is_shown_one_level_deep_with_an_entry_a_kind() -> None:
    (command,) = (command for command in commands() if command.name == "pipeline")
    text = command.help("methods")
    kinds_there = re.findall(r"^  methods\.NAME\.kind=(\w+)\n      (\w.*)", text, re.MULTILINE)
    assert [kind for kind, _ in kinds_there] == [
        kind_of(model) for model in members(command.config.model_fields["methods"].annotation)
    ]
    assert len(text.splitlines()) < 60
    said = re.search(r"([\d,]+) more keys are below these\. `--help (\S+)` shows", text)
    assert said is not None
    every = list(keys_of(command.table(), command.name))
    named = sum(f"{key.name}{key.default}\n" in text for key in find(every, "methods"))
    assert int(said[1].replace(",", "")) + len(kinds_there) + 1 == len(find(every, "methods"))
    assert named <= len(kinds_there) + 1
    assert said[2] == "methods.gbdt"
    gbdt = command.help(said[2])  # few enough to be shown whole
    assert "methods.NAME.gbdt.num_trees" in gbdt
    assert "methods.NAME.finetune" not in gbdt
    neural = command.help("methods.neural")
    assert "\n    methods.NAME.finetune\n" in neural
    assert "methods.NAME.finetune.loss" not in neural


@pytest.mark.parametrize("cls", [Strict, Named])
def test_a_kind_is_asked_for_by_its_name(cls: type[BaseModel]) -> None:
    asked, whole = {Strict: ("job.shape.square", "job.shape"), Named: ("by_name.square", "by_name.NAME")}[cls]
    assert lines(cls, asked) == lines(cls, f"{whole}.kind=square")
    assert lines(cls, f"{asked}.side") == lines(cls, asked)  # its only key, with the kind above it
    with pytest.raises(InputError, match="unknown key"):
        lines(cls, f"{asked}.sides")


@pytest.mark.slow
@every_command
def test_the_example_is_a_command_that_can_be_run(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = [part for part in command.description.split("\n\n") if part.startswith("  python")]
    assert examples
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for example in examples:
        program, *words = shlex.split(example.split("  python -m ")[1].replace("\\\n", " "))
        assert program == f"jobs.{command.name}"
        monkeypatch.setattr(sys, "argv", [program, "--print-config", *words])
        main(command)
        assert command.config.model_validate(yaml.safe_load(capsys.readouterr().out))


def test_the_docs_ask_for_keys_that_exist() -> None:
    by_name = {command.name: command for command in commands()}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    asked = [found for page in pages for found in re.findall(r"jobs\.(\w+)\s+--help ([a-z][\w.]*)", page.read_text())]
    assert len(asked) > 3
    for job, key in asked:
        assert by_name[job].help(key)


def test_there_is_a_command_for_each_row_of_the_page_of_jobs() -> None:
    rows = re.findall(r"^\| \[`jobs\.(\w+)`\]", (ROOT / "docs" / "jobs.md").read_text(), re.MULTILINE)
    assert sorted(rows) == [command.name for command in commands()]


def test_the_reference_and_the_table_of_keys_are_up_to_date() -> None:
    current = table()
    same = (FILE.read_text(), PAGE.read_text()) == (current.dump(), reference(current))
    assert same, "run: python -m jobs.reference"


HELPS = """
import io, runpy, sys
from contextlib import redirect_stdout

for name, *asked in (words.split() for words in sys.argv[1:]):
    sys.argv[1:] = ["--help", *asked]
    with redirect_stdout(io.StringIO()) as text:
        runpy.run_module(f"jobs.{name}", run_name="__main__")
    assert text.getvalue()
print(*sorted({name.partition(".")[0] for name in sys.modules}))
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("ltrscale.")}))
"""
HEAVY = {
    "altair", "catboost", "lightgbm", "numpy", "onnx", "pandas", "pyarrow", "ray", "s3fs", "scipy",
    "sklearn", "torch", "xgboost",
}  # fmt: skip


@pytest.mark.slow
def test_help_imports_neither_the_room_of_a_job_nor_its_libraries() -> None:
    asked = [f"{command.name}{key}" for command in commands() for key in ("", " all", f" {usual_key(command)}")]
    done = subprocess.run([sys.executable, "-c", HELPS, *asked], cwd=ROOT, capture_output=True, text=True, check=True)
    libraries, rooms = (line.split() for line in done.stdout.splitlines())
    assert HEAVY & set(libraries) == set()
    assert set(rooms) <= {"config", "errors", "progress", "signals", "storage", "texts"}


@pytest.mark.nightly
def test_no_job_loads_what_few_need_before_they_do() -> None:
    """Torch's compiler, pandas and scipy.stats take up to a second each, and a weekly run starts many jobs."""
    code = """
import sys
from jobs.verbs import commands

for command in commands():
    if command.name != "bench":  # it measures the estimator, which is one of scikit-learn
        command.job()
print(sorted({"pandas", "scipy.stats", "sympy", "torch", "torch._dynamo"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['torch']\n"


def usual_key(command: Command) -> str:
    return (command.keys.split() or [next(keys_of(command.table(), command.name)).name])[-1]


def test_every_link_inside_the_reference_leads_to_a_heading() -> None:
    page = PAGE.read_text()
    headings = {title.lower().replace(".", "") for title in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= headings
