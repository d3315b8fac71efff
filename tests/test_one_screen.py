"""`docs/one_screen.py` trains on the demo's log, and reaches the figures that the jobs have there."""

import re
import runpy
from pathlib import Path

import pytest

from ltrscale import config as configs
from ltrscale.ingest.prepare import PrepareJob

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "one_screen.py"
CLOSE = 0.04
"""One training on one draw of labels differs so much from the mean of five."""


def test_it_fits_on_a_screen() -> None:
    assert len(PAGE.read_text().splitlines()) <= 120


def figures(folder: Path, *changes: str) -> dict[str, float]:
    """What the page finds on the demo's log, or on a changed one."""
    demo = ROOT / "jobs" / "configs" / "start" / "prepare-demo.yaml"
    configs.load(PrepareJob, str(demo), changes).replace(out=str(folder / "data")).run()
    found: dict[str, float] = runpy.run_path(str(PAGE))["main"](str(folder / "data"))
    return found


@pytest.mark.slow
def test_it_trains_on_a_small_log(tmp_path: Path) -> None:
    found = figures(tmp_path, "synthetic.groups_per_week=60")
    assert found["SimCLR-Rank"] != found["no pretraining"]
    assert all(0.2 < value < 1 for value in found.values())


@pytest.mark.nightly
def test_it_reaches_the_figures_of_the_jobs(tmp_path: Path) -> None:
    found = figures(tmp_path)
    table = (ROOT / "docs" / "results" / "demo.md").read_text()
    for name, method in (("no pretraining", "no_pretraining"), ("SimCLR-Rank", "simclr_rank")):
        row = re.search(rf"^\| {method} +\| [\d.]+ ± [\d.]+ \| ([\d.]+) ±", table, re.MULTILINE)
        assert row is not None
        assert abs(found[name] - float(row[1])) < CLOSE, (name, found[name], row[1])
