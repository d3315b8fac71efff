"""The notebook of the docs runs, and the outputs that it shows are those of a run."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from notebooks import executed, write

from ltrscale.ranking.metrics import ndcg

PATH = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"
NUMBERS = re.compile(r"[+-]?\d+(?:\.\d+)?")
COMPARED = " ranks best: "
METRIC = "NDCG@5"
AGAINST_BASELINE = f"{METRIC} - lightgbm [95%]"


def shown(notebook: dict[str, Any]) -> list[str]:
    """The texts of all outputs, without HTML."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return ["".join(output["text"] if "text" in output else output["data"]["text/plain"]) for output in outputs]


def words(text: str) -> list[str]:
    """The words of a text that are the same on each processor.

    Another one may round otherwise, and so give other digits, another order of features, and another best method. A
    comparison puts that into words in its first paragraphs, sorts its table by it, and adds a column of differences
    from a best method that is not the baseline.
    """
    if COMPARED in text:
        about = re.sub(r"selection \w+", "selection", text[text.index("Test data") : text.index("\n\n|")])
        rows = [row for _, row in sorted(table(text).items())]
        text = about + " ".join(f"{name} {cell}" for row in rows for name, cell in row.items() if fixed(name))
    return re.findall(r"[^\s-]+", NUMBERS.sub("#", re.sub(r"\bf_\d+|\bc_\w+", "feature", text)))


def table(text: str) -> dict[str, dict[str, str]]:
    """The rows of the table in a text, by their first cells."""
    header, _, *rows = (
        [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"
    )
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def fixed(column: str) -> bool:
    """True if the table has the column whichever method is best."""
    return "[95%]" not in column or column == AGAINST_BASELINE


def by_chance(log: Path, week: str) -> float:
    """The metric of the mean over all orders of a week's labelled lists."""
    rows = pd.concat([pd.read_parquet(file) for file in sorted(log.rglob("*.parquet"))])
    rows = rows[(rows["event_time"].dt.strftime("%G-W%V") == week) & rows["label"].notna()].sort_values("query_id")
    offsets_Q1 = torch.tensor([0, *rows.groupby("query_id").size().cumsum()])
    labels_N = torch.tensor(rows["label"].to_numpy(float))
    return float(ndcg(torch.zeros(len(rows)), labels_N, offsets_Q1, k=5).nanmean())


@pytest.mark.nightly
def test_the_notebook_runs_and_shows_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(PATH.read_text())
    monkeypatch.chdir(tmp_path)
    fresh = executed(stored)
    before, now = shown(stored), shown(fresh)
    assert list(map(words, now)) == list(map(words, before))
    assert now[-1] == "True"
    assert METRIC in (tmp_path / "runs/notebook/comparison/evaluation/report.md").read_text()
    chance = by_chance(tmp_path / "runs/notebook/log", "2026-W06")
    for texts in (before, now):
        check_figures(texts, chance)


def check_figures(texts: list[str], chance: float) -> None:
    """What holds on each processor: a method has one figure everywhere, the best is the highest, and none is chance."""
    (compared,) = (text for text in texts if COMPARED in text)
    rows = table(compared)
    value = {name: float(row[METRIC]) for name, row in rows.items()}
    said = [float(found) for found in re.findall(rf"'{METRIC} ([0-9.]+)'", "".join(texts))]
    assert said == pytest.approx([value["lightgbm"], value["simsiam"], value["no_pretraining"]], abs=0.00051)
    assert min(said) > chance + 0.1
    opening, figures = compared.split(COMPARED)
    best = opening.rpartition("\n\n")[2]
    mean, low, high = map(float, NUMBERS.findall(figures.removeprefix(METRIC))[:3])
    assert best in rows
    assert mean == value[best] == max(value.values())
    assert low < mean < high
    baseline = value.pop("lightgbm")
    for name, row in rows.items():
        if name in value:
            difference, low, high = map(float, NUMBERS.findall(row[AGAINST_BASELINE]))
            assert difference == pytest.approx(value[name] - baseline, abs=0.00011)
            assert low < difference < high


def test_the_notebook_is_a_file_that_jupyter_writes() -> None:
    text = PATH.read_text()
    notebook = json.loads(text)
    assert write(notebook) == text
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    text = "".join(line for cell in notebook["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (PATH.parent / target).exists(), target
