"""A gate may refuse a candidate for one goal, though it is better by the labels of the test split."""

from pathlib import Path
from typing import Any

import pytest
from linear_teacher import linear_teacher
from shop_goals import shop_data

from ltrscale import storage
from ltrscale.errors import Refused
from ltrscale.evaluation.bounds import GateVerdict
from ltrscale.evaluation.gate import GateJob
from ltrscale.evaluation.measure.report import Evaluation


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What serves ranks by the feature of clicks; the candidate by that of orders."""
    folder = tmp_path_factory.mktemp("shop")
    data = shop_data(folder)
    weights = {"production": [1.0, 0.0], "candidate": [0.0, 1.0]}
    return {"data": data} | {name: linear_teacher(str(folder / name), data, of) for name, of in weights.items()}


def gate(shop: dict[str, str], out: Path, goals: dict[str, Any]) -> GateJob:
    periods = {"train": "a", "validation": "b", "test": "c"}
    splits: dict[str, Any] = {name: {"data": shop["data"], "periods": period} for name, period in periods.items()}
    splits["test"]["labels"] = "order"
    loose = {"drifted": None, "score_psi": None, "groups": 10, "margin": 0.2}
    return GateJob.model_validate(
        {
            "out": str(out),
            "production": shop["production"],
            "candidate": shop["candidate"],
            "splits": splits,
            "evaluate": {"resamples": 200, "outliers": {"gap": None}},
            "bounds": loose,
            "goals": goals,
        }
    )


@pytest.mark.slow
def test_a_goal_of_its_own_can_refuse(shop: dict[str, str], tmp_path: Path) -> None:
    gate(shop, tmp_path / "order", {}).run()
    alone = GateVerdict.read(str(tmp_path / "order"))
    assert alone.passed
    with pytest.raises(Refused, match=r"^goal click: all groups: NDCG@5 -.*bounds.margin asks"):
        gate(shop, tmp_path / "both", {"click": {"margin": 0.05, "groups": 10}}).run()
    both = GateVerdict.read(str(tmp_path / "both"))
    assert {check.where for check in both.checks if not check.holds} == {"click: all"}
    assert [check for check in both.checks if not check.where.startswith("click: ")] == [*alone.checks]
    evaluation = Evaluation.read(str(tmp_path / "both" / "evaluation-click"))
    assert "labels click; " in evaluation.test.described
    assert "labels order; " in Evaluation.read(str(tmp_path / "both" / "evaluation")).test.described


@pytest.mark.slow
def test_bounds_of_a_goal_are_its_own(shop: dict[str, str], tmp_path: Path) -> None:
    gate(shop, tmp_path / "gate", {"click": {"margin": 1.0, "slice_margin": 1.0, "groups": 10}}).run()
    assert GateVerdict.read(str(tmp_path / "gate")).passed
    places = {storage.join(str(tmp_path / "gate"), name) for name in ("evaluation", "evaluation-click")}
    manifest = storage.read_manifest(str(tmp_path / "gate")) or {}
    assert manifest["made_by"]["inputs"].keys() == places  # by which jobs.erase names what learnt from erased rows
