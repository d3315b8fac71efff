"""A made shop goes from events to a verdict by commands alone; killed at random, it ends with the same bytes."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import golden
import pytest
import yaml
from shop_events import WEEKS, write_shop

from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.evaluation.verdict import LiveVerdict
from tests.chaos import compare

ROOT = Path(__file__).resolve().parents[2]
_KILLS = 2
"""How often a command is killed before it may end."""
_VISITS = {"time": "at", "action": "what", "shown": "list", "click": "click", "cart": "add"}
_VISITS |= {"item": "products[].sku", "query": "search", "session": "visitor"}
_COLUMNS = {"f_match": "products[].match", "f_stock": "products[].stock"}
_SPLITS = {
    "train": {"data": "data", "periods": [f"{WEEKS[0]}..{WEEKS[2]}", WEEKS[4]]},
    "validation": {"data": "data", "periods": WEEKS[3]},
    "test": {"data": "data", "periods": WEEKS[5]},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "prepare": {
        "out": "data",
        "prepare": {
            "add": True,
            "source": {
                "kind": "events",
                "tables": [
                    {**_VISITS, "columns": _COLUMNS},
                    {"time": "paid_at", "every": "order", "item": "sku", "session": "visitor", "revenue": "paid"},
                ],
                "columns": {
                    "query": "query",
                    "item": "item",
                    "time": "time",
                    "positions": "position",
                    "labels": {"order": "order", "click": "click", "revenue": "revenue"},
                    "features": ["f_*"],
                    "meta": ["session"],
                },
                "joins": [{"path": "logs/items.csv", "key": {"item": "sku"}, "columns": ["f_price", "f_rating"]}],
                "window_minutes": 4320,
            },
        },
    },
    "trees": {
        "splits": _SPLITS,
        "gbdt": {"num_trees": 15, "num_leaves": 4, "min_data_in_leaf": 5, "num_threads": 1},
    },
    "evaluate": {
        "evaluate": {
            "models": {"production": "models/production", "candidate": "models/candidate"},
            "baseline": "production",
            "splits": _SPLITS,
            "resamples": 200,
        }
    },
    "gate": {
        "out": "gate",
        "production": "models/production",
        "candidate": "models/candidate",
        "splits": _SPLITS,
        "evaluate": {"resamples": 200},
        "bounds": {"groups": 30, "refuse": "worse"},
        "goals": {"click": {"refuse": "worse", "groups": 30}, "revenue": {"refuse": "worse", "groups": 30}},
    },
    "verdict": {
        "out": "verdict",
        "log": {"kind": "ab", "inputs": "logs/ab.csv", "user": "visitor", "arm": "arm", "time": "day"},
        "arms": {"old": 1, "new": 1},
        "control": "old",
        "until": "2026-02-22",
        "goals": {"clicks": "clicks", "orders": "orders", "revenue": "revenue"},
        "offline": {"evaluation": "evaluation/order", "methods": {"old": "production", "new": "candidate"}},
    },
}
COMMANDS = """
prepare --config prepare.yaml --set prepare.inputs=logs/*-2026-W0[1-3].*
prepare --config prepare.yaml --set prepare.inputs=logs/*-2026-W04.*
prepare --config prepare.yaml --set prepare.inputs=logs/*-2026-W05.*
prepare --config prepare.yaml --set prepare.inputs=logs/*-2026-W06.*
train_gbdt --config trees.yaml --set out=models/production --set splits.train.periods=2026-W01..2026-W03 \
    --set splits.train.labels=click --set splits.validation.labels=click
train_gbdt --config trees.yaml --set out=models/candidate --set splits.validation.labels=order \
    --set "splits.train.labels={click: 1, order: 4, revenue: 0.05}"
score --set out=scores --set data=data --set bundle=models/candidate --set periods=2026-W06
evaluate --config evaluate.yaml --set out=evaluation/order
evaluate --config evaluate.yaml --set out=evaluation/click --set evaluate.splits.test.labels=click
gate --config gate.yaml
erase --set data=data --set ids=logs/users.txt --set column=meta_session --set under=.
erase --set data=data --set ids=logs/queries.txt --set column=query_id --set under=.
verdict --config verdict.yaml
"""


class Done(NamedTuple):
    """How a command ended, and after how many seconds."""

    status: int
    seconds: float


def a_shop(home: Path) -> Path:
    """A folder with the shop's files and the configs."""
    write_shop(home / "logs")
    for name, config in CONFIGS.items():
        (home / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return home


def give(home: Path, words: list[str], kill_after_s: float | None = None) -> int | None:
    """Give a command in a folder; its exit status, None if it was killed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (home / "said.txt").open("ab") as said:
        command = [sys.executable, "-m", "jobs", *words]
        process = subprocess.Popen(command, cwd=home, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        return process.wait(kill_after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def undisturbed(home: Path, words: list[str]) -> Done:
    """Give a command once."""
    began = time.monotonic()
    status = give(home, words)
    said = (home / "said.txt").read_text()
    assert status == 0 or (status == 3 and words[0] == "gate"), said[-3000:]
    assert "Traceback" not in said
    return Done(status, time.monotonic() - began)


def killed(home: Path, words: list[str], expected: Done, rng: random.Random) -> int:
    """Kill a command at random moments, and give it until it is done; returns how often it was killed."""
    kills, status = 0, None
    while status is None:
        status = give(home, words, rng.uniform(0.4, 1) * expected.seconds if kills < _KILLS else None)
        kills += status is None
    assert status == expected.status, (home / "said.txt").read_text()[-3000:]
    return kills


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # forty commands
def test_from_events_to_a_verdict(tmp_path: Path) -> None:
    commands = [shlex.split(line) for line in COMMANDS.replace("\\\n", " ").strip().splitlines()]
    home, kept, rng = a_shop(tmp_path / "shop"), tmp_path / "kept", random.Random(0)
    shutil.copytree(home, kept)
    done = [undisturbed(home, words) for words in commands]
    expected, listed = golden.outputs(home), compare.outcome(str(home))

    shutil.rmtree(home)
    shutil.copytree(kept, home)  # the same place and times, which origins name
    kills = [killed(home, words, ended, rng) for words, ended in zip(commands, done, strict=True)]
    assert any(kills)
    assert [*golden.differences(expected, golden.outputs(home))] == []
    found = compare.outcome(str(home))
    assert (found.damage, found.unlisted) == ((), listed.unlisted)

    data, verdict = open_dataset(str(home / "data")), LiveVerdict.read(str(home / "verdict"))
    assert [each.name for each in data.manifest.features] == ["f_match", "f_price", "f_rating", "f_stock"]
    assert data.manifest.periods == WEEKS
    assert data.manifest.accounting.rules["events_left_over_not_shown"] > 0  # late orders of lists that are committed
    assert {goal.goal for goal in verdict.goals if goal.lift.excludes_zero} >= {"clicks"}
    assert verdict.foreseen.keys() == {"new"}
