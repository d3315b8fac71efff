"""The front of goals: methods that no other dominates, from a pipeline that evaluates on each goal."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shop_goals import shop_data

from ltrscale.bundle import load
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.statistics.summarise import Summary
from ltrscale.evaluation.studies.summaries import Front, TradeOff, front_page
from ltrscale.experiments.pipeline import PipelineJob

GOALS = ("click", "order")
TREES = {"kind": "gbdt", "gbdt": {"num_trees": 10, "num_leaves": 4, "min_data_in_leaf": 5}}


def pipeline(data: str, out: Path, **changes: Any) -> PipelineJob:
    return PipelineJob.model_validate(
        {
            "out": str(out),
            "data": data,
            "splits": {
                "train": {"periods": "a", "labelled_fraction": 0.8},
                "validation": {"periods": "b"},
                "test": {"periods": "c"},
            },
            "seeds": [0, 1],
            "methods": {
                "click": {**TREES, "labels": "click"},
                "both": {**TREES, "labels": {"click": 0.2, "order": 1.0}},
                "order": {**TREES, "labels": "order"},
            },
            "evaluate": {"baseline": "click", "resamples": 200, "outliers": {"gap": None}},
            "evaluate_on": GOALS,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shop_data(tmp_path_factory.mktemp("shop"))


@pytest.mark.slow
def test_a_pipeline_on_goals_makes_a_front(data: str, tmp_path: Path) -> None:
    pipeline(data, tmp_path).run()
    front = Front.read(str(tmp_path / "front"))
    evaluations = {goal: Evaluation.read(str(tmp_path / f"evaluation-{goal}")) for goal in GOALS}
    for trade_off in front.trade_offs:
        for goal, evaluation in evaluations.items():
            (method,) = (m for m in evaluation.methods if m.name == trade_off.method)
            assert trade_off.of_goals[goal] == method.slices[ALL].summaries["ndcg@5"]
            assert trade_off.of_goals[goal].draws == 2, "a draw is of the same lists for all goals"
    learnt = {t.method: t.of_goals for t in front.trade_offs}
    assert learnt["click"]["click"].mean > learnt["order"]["click"].mean
    assert learnt["click"]["order"].mean < learnt["order"]["order"].mean
    assert [*load(str(tmp_path / "seed-0" / "both" / "model")).made_by["config"]["splits"][0]["labels"]] == [*GOALS]
    assert [*front_page(front).charts] == ["front-click-order.png"]


def test_a_method_with_unknown_goals_is_refused_before_training(data: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"methods.click.*no goal 'clik'; did you mean 'click'"):
        pipeline(data, tmp_path, methods={"click": {**TREES, "labels": {"clik": 1.0}}}).run()
    with pytest.raises(InputError, match="no goal 'sale'"):
        pipeline(data, tmp_path, evaluate_on=["click", "sale"]).run()


def summary(mean: float) -> Summary:
    return Summary(
        mean=mean, low=None, high=None, trials=(mean,), std_error=None, groups=1, undefined=0, as_zero=0.0, as_one=0.0
    )


@given(values=st.lists(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=3, max_size=3), min_size=1, max_size=6))
def test_who_dominates_is_as_defined(values: list[list[float]]) -> None:
    """By the definition, for all pairs; there is always a front, and whoever is not on it is dominated by one on it."""
    from ltrscale.evaluation.studies.summaries import _dominating

    offs = [
        TradeOff(method=str(m), of_goals={str(g): summary(v) for g, v in enumerate(of)}, dominated_by=None)
        for m, of in enumerate(values)
    ]
    found = [_dominating(each, offs) for each in offs]
    for one, by in zip(values, found, strict=True):
        worse = [m for m, other in enumerate(values) if other != one and all(map(float.__ge__, other, one))]
        assert (by is None) == (not worse)
        assert by is None or int(by) in worse
    assert None in found
