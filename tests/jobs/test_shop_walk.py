"""A shop's first weeks as a new user lives them: the commands are those that the jobs print, and no file is edited but
where `# CHECK` stands."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import german_shop
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import shop

ROOT = Path(__file__).parents[2]
QUICK = ("--set", "methods.scratch=null", "--set", "methods.pretrained=null")
"""Networks have walks of their own; the settings of the trees stay as they were written."""

# a dozen commands, each a process; the pages on own data and weeks take the same ones
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200)]


def run(folder: Path, *words: str, status: int = 0) -> str:
    """What a command says on both outputs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr[-3000:]
    return done.stderr + done.stdout


def next_commands(text: str) -> dict[str, list[str]]:
    """The words of the commands that a job names as the next ones, by job."""
    found = re.findall(r"next[^:\n]*: python (-m jobs\.(\w+) .*)", text)
    return {job: shlex.split(words) for words, job in found}


def checked(config: Path, known_after: str = "page_seconds") -> None:
    """Settle the marked lines: what is known only after the click goes, every other guess is right."""
    lines = [line for line in config.read_text().splitlines() if f"- {known_after} # CHECK" not in line]
    config.write_text("\n".join(line.partition(" # CHECK")[0] for line in lines) + "\n")


def test_from_the_log_to_ranked_items_and_through_two_weeks(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    shop.weeks(1, 11, 250).to_csv(logs / "shop.csv", index=False)
    for number in (12, 13):
        shop.weeks(number, number, 400).to_csv(logs / f"W{number}.csv", index=False)

    after_init = run(tmp_path, "-m", "jobs.init", "logs/shop.csv")
    config = tmp_path / "shop" / "prepare.yaml"
    for role in ("query: search_id", "item: product_id", "gain: revenue", "time: searched_at", "positions: position"):
        assert f"      {role}" in config.read_text()
    assert "CHECK: page_seconds alone ranks at" in after_init
    checked(config)
    prepared = run(tmp_path, *next_commands(after_init)["prepare"])
    account = re.search(r"([\d,]+) rows in = ([\d,]+) kept \+ ([\d,]+) rejected", prepared)
    assert account is not None
    rows, kept, rejected = (int(count.replace(",", "")) for count in account.groups())
    assert rows == kept + rejected == len(pd.read_csv(logs / "shop.csv", dtype=str))

    run(tmp_path, *next_commands(after_init)["clicks"])
    after_pipeline = run(tmp_path, *next_commands(after_init)["pipeline"], *QUICK)
    assert "as_shown" in after_pipeline
    for job in ("refit", "report", "score", "predict"):
        run(tmp_path, *next_commands(after_pipeline)[job])
    assert (tmp_path / "shop" / "models" / "page" / "report.html").exists()
    ranked = pq.read_table(tmp_path / "shop" / "models" / "ranked")
    assert {*ranked["period"].to_pylist()} == {"2026-W11"}

    def weekly(number: int, status: int = 0) -> str:
        printed = next_commands(after_pipeline)["weekly"]
        words = [f"logs/W{number}.csv" if word == "NEW_ROWS" else word for word in printed]
        return run(tmp_path, *words, status=status)

    pointer = tmp_path / "shop" / "weekly" / "service.json"
    weekly(12)
    serves, period = (json.loads(pointer.read_text())[key] for key in ("bundle", "period"))
    assert period == "2026-W12"
    refused = weekly(13, status=3)
    assert "list_price" in refused
    assert json.loads(pointer.read_text())["bundle"] == serves

    export = ("-m", "jobs.export", "--to", "lightgbm", "--set", f"bundle={serves}", "--set", "data=shop/data")
    run(tmp_path, *export, "--set", "out=export")
    predict = ("-m", "jobs.predict", "--bundle", serves, "--inputs", "logs/W13.csv", "--out", "shop/W13")
    skewed = run(tmp_path, *predict, "--set", "max_rejected=0.03")
    assert "list_price" in skewed
    assert scores_alone(tmp_path, "export", "logs/W13.csv") == predicted(tmp_path / "shop" / "W13")


def test_a_german_shop_from_its_files_to_the_next_week(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for number in range(1, 13):
        folder = tmp_path / "logs" if number < 12 else tmp_path
        german_shop.write(german_shop.week(number, 400), folder / f"W{number:02d}.csv")
    after_init = run(tmp_path, "-m", "jobs.init", "logs")
    config = tmp_path / "logs-ranker" / "prepare.yaml"
    checked(config, "verweildauer")
    written = config.read_text()
    for role in ("query: such_nr", "item: artikel_nr", "label: gekauft", "gain: umsatz_cent", "positions: rang"):
        assert f"      {role}" in written
    assert "bild_vektor: 8" in written
    assert 'optional: ["rabatt"]' in written
    assert "verweildauer" not in written
    assert " 0 rejected (none)" in run(tmp_path, *next_commands(after_init)["prepare"])
    after_pipeline = run(tmp_path, *next_commands(after_init)["pipeline"], *QUICK)
    weekly = ["W12.csv" if word == "NEW_ROWS" else word for word in next_commands(after_pipeline)["weekly"]]
    run(tmp_path, *weekly)
    assert json.loads((tmp_path / "logs-ranker" / "weekly" / "service.json").read_text())["period"] == "2026-W12"


def predicted(folder: Path) -> dict[tuple[str, str], float]:
    """The scores of a prediction by query and item."""
    table = pq.read_table(folder, columns=["query_id", "item_id", "score"]).to_pylist()
    return {(row["query_id"], row["item_id"]): row["score"] for row in table}


def scores_alone(folder: Path, export: str, rows: str) -> dict[tuple[str, str], float]:
    """The scores of raw rows without the package, by query and item; rows of no query have nothing to be ranked in."""
    words = (sys.executable, str(ROOT / "docs" / "score_alone.py"), export, rows)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    raw = pd.read_csv(folder / rows, dtype=str)
    scores_N = [float(line) for line in done.stdout.split()]
    pairs = zip(raw["search_id"], raw["product_id"], scores_N, strict=True)
    return {(query, item): score for query, item, score in pairs if query == query and not np.isnan(score)}
