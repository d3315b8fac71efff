"""The notebook of the docs runs, and the outputs that it shows are those of a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from notebooks import executed, write

PATH = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"
NUMBERS = re.compile(r"[+-]?\d+(?:\.\d+)?")


def shown(notebook: dict[str, Any]) -> list[str]:
    """The texts of all outputs, without HTML."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return ["".join(output["text"] if "text" in output else output["data"]["text/plain"]) for output in outputs]


def words(text: str) -> list[str]:
    """The words of a text, with a mark for each number: other processors may give other digits."""
    return re.findall(r"[^\s-]+", NUMBERS.sub("#", text))


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(PATH.read_text())
    monkeypatch.chdir(tmp_path)
    fresh = executed(stored)
    before, now = shown(stored), shown(fresh)
    # which features come first depends on the last digits of their shares of the gain
    assert [words(re.sub(r"\bf_\d+|\bc_\w+", "feature", text)) for text in now] == [
        words(re.sub(r"\bf_\d+|\bc_\w+", "feature", text)) for text in before
    ]
    figures = [[float(found) for found in re.findall(r"'NDCG@5 ([0-9.]+)'", "".join(texts))] for texts in (before, now)]
    assert figures[1] == pytest.approx(figures[0], abs=0.05)
    assert len(figures[0]) == 3
    assert now[-1] == "True"
    assert "NDCG@5" in (tmp_path / "runs/notebook/comparison/evaluation/report.md").read_text()


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
