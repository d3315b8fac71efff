"""The comparison with other libraries: each learns what can be learnt, cells are made once, and differences add up."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import WriteDataset

from jobs.bench.baselines import BaselinesJob, Scores, Search, compare, search_lightgbm, search_xgboost
from ltrscale.batch import QueryGroups
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError


def job(tmp_path: Path, write_dataset: WriteDataset, **settings: object) -> BaselinesJob:
    """Lists whose first feature orders them, with two draws of labels."""
    rng = np.random.default_rng(0)

    def lists(n: int) -> list[tuple[np.ndarray, list[float]]]:
        made = [rng.normal(size=(8, 3)) for _ in range(n)]
        return [(x_LF, np.digitize(x_LF[:, 0], [0.5, 1.5]).astype(float).tolist()) for x_LF in made]

    data = write_dataset({"a": lists(60), "b": lists(20), "c": lists(30)}, [Feature(name=f"f{i}") for i in range(3)])
    splits = {name: {"data": data, "periods": period} for name, period in (("validation", "b"), ("test", "c"))}
    splits["train"] = {"data": data, "periods": "a", "labelled_groups": 40}
    sets = {"made-up": {"splits": splits, "draws": 2, "minutes": 0.02}}
    return validate(BaselinesJob, {"out": str(tmp_path / "out"), "sets": sets, **settings}, "baselines")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lightgbm", "xgboost", "catboost"])
def test_a_library_learns_and_a_repeated_command_trains_nothing_again(
    method: str, tmp_path: Path, write_dataset: WriteDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = job(tmp_path, write_dataset, methods=[method])
    compare(asked)
    first = capsys.readouterr().out
    files = sorted(Path(asked.out).rglob("*.json"))
    assert [path.parent.name for path in files] == ["0", "1"]
    for path in files:
        values = np.array(json.loads(path.read_text())["ndcg"], np.float64)
        assert len(values) <= 30  # lists without a relevant document are left out
        assert values.mean() > 0.9
    times = [path.stat().st_mtime_ns for path in files]
    compare(asked)
    assert capsys.readouterr().out == first
    assert [path.stat().st_mtime_ns for path in files] == times
    with pytest.raises(InputError, match="made with other minutes, cutoff, splits"):
        compare(asked.replace(cutoff=asked.cutoff + 1))
    assert f"| {method}" in first
    assert "2, too few to judge" in first


@pytest.mark.parametrize("search", [search_lightgbm, search_xgboost])
def test_a_cut_off_may_lie_below_the_ranks_that_a_loss_usually_counts(search: Callable[[Search], Scores]) -> None:
    x_NF = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    labels_N = torch.from_numpy((x_NF[:, 0] > 0).astype(np.float32))
    lists = QueryGroups(torch.from_numpy(x_NF), torch.arange(0, 81, 8), labels_N)
    assert len(search(Search(lists, lists, 40, time.monotonic(), 0))(x_NF)) == 80


def test_the_table_has_what_auto_is_ahead_by(tmp_path: Path, write_dataset: WriteDataset) -> None:
    asked = job(tmp_path, write_dataset, methods=["auto", "xgboost"])
    more = {"auto": (0.8, 0.6), "xgboost": (0.5, 0.7)}
    for method, values in more.items():
        for draw, value in enumerate(values):
            path = Path(asked.out) / "made-up" / str(draw) / f"{method}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"minutes": 0.02, "ndcg": [value, value + 0.1]}))
    compare(asked)
    text = (Path(asked.out) / "report.md").read_text()
    assert "0.1000 [" in text  # the mean of +.3 and -.1
    assert " 1 of 2 |" in text
    assert "0.7500" in text


def test_a_set_without_a_test_and_a_missing_library_are_named(
    tmp_path: Path, write_dataset: WriteDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(tmp_path, write_dataset, methods=["lightgbm", "flaml"])
    settings = asked.model_dump()
    del settings["sets"]["made-up"]["splits"]["test"]
    with pytest.raises(InputError, match=r"sets\.made-up\.splits\.test"):
        validate(BaselinesJob, settings, "baselines")
    monkeypatch.setitem(sys.modules, "flaml", None)
    with pytest.raises(InputError, match="pip install flaml"):
        compare(asked)
    assert not Path(asked.out).exists(), "before any training"
