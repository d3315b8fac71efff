"""Heads for goals: the score is their stated sum, and the multipliers of goals to keep follow the Lagrangian."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from shop_goals import prepared, shop_data, shop_log

from ltrscale import bundle
from ltrscale.bundle.networks import CombinedBundle
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.models.ranker import Ranker
from ltrscale.training import memory
from ltrscale.training.best import MOST, Constraints, GoalsConfig, raised
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob

SMALL: dict[str, Any] = {
    "network": {"encoder": {"width": 8, "blocks": 1}},
    "head": {"layers": 2},
    "epochs": 3,
    "stream": {"docs_per_batch": 100},
    "optimizer": {"learning_rate": 1e-2},
}
BOTH = {"weights": {"click": 0.2, "order": 1.0}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shop_data(tmp_path_factory.mktemp("shop"))


def split(shop: str, period: str, labels: str = "labels") -> Split:
    return Split(data=shop, periods=period, labels=labels)


def trained(shop: str, out: Path, start: str | None = None, **changes: Any) -> bundle.RankerBundle:
    config = FinetuneConfig.model_validate({**SMALL, **changes})
    splits = Splits(train=split(shop, "a"), validation=split(shop, "b"))
    FinetuneJob(out=str(out), splits=splits, pretrained=start, finetune=config).run()
    return bundle.load(str(out), bundle.RankerBundle)


def heads_of(ranker: Ranker, shop: str) -> tuple[torch.Tensor, torch.Tensor]:
    groups = next(iterate(select(split(shop, "b"), labelled=True)))
    with torch.no_grad():
        scores = ranker.score(groups)
    assert scores.heads is not None
    return scores.scores_N, scores.heads


@pytest.mark.slow
def test_the_score_is_the_stated_sum_of_the_heads(shop: str, tmp_path: Path) -> None:
    made = trained(shop, tmp_path / "model", goals=BOTH)
    stated = json.loads((tmp_path / "model" / "config.json").read_text())["part"]["goals"]
    assert stated == BOTH["weights"] == made.held.goals
    assert "weighted sum of a head for each goal: 0.2 click, 1 order" in (tmp_path / "model" / "README.md").read_text()
    scores_N, heads_NG = heads_of(made.ranker(), shop)
    torch.testing.assert_close(scores_N, heads_NG @ torch.tensor([*stated.values()]))
    groups = next(iterate(select(split(shop, "b"), labelled=True)))
    torch.testing.assert_close(made.scorer()(groups), scores_N)
    assert not torch.allclose(heads_NG[:, 0], heads_NG[:, 1])


@pytest.mark.slow
def test_the_order_of_the_goals_changes_nothing(shop: str, tmp_path: Path) -> None:
    other = {"weights": dict(reversed(BOTH["weights"].items()))}
    one, two = (trained(shop, tmp_path / name, goals=goals) for name, goals in (("a", BOTH), ("b", other)))
    assert one.contents["weights.safetensors"] == two.contents["weights.safetensors"]


@pytest.mark.slow
def test_one_goal_is_a_training_on_its_labels(shop: str, tmp_path: Path) -> None:
    """A single head of weight 1 has the weights of a network that learns this label alone, bit for bit."""
    one = trained(shop, tmp_path / "one", goals={"weights": {"order": 1.0}})
    splits = Splits(train=split(shop, "a", "order"), validation=split(shop, "b"))
    FinetuneJob(out=str(tmp_path / "plain"), splits=splits, finetune=FinetuneConfig.model_validate(SMALL)).run()
    plain = bundle.load(str(tmp_path / "plain"), bundle.RankerBundle).weights()
    weights = one.weights()
    assert weights.keys() - plain.keys() == {"goals_G"}
    assert all(torch.equal(weights[name], value) for name, value in plain.items())
    assert "goals" not in json.loads((tmp_path / "plain" / "config.json").read_text())["part"]


@pytest.mark.slow
def test_members_and_several_networks_have_heads_too(shop: str, tmp_path: Path) -> None:
    tabm = {"encoder": {"kind": "tabm", "hidden": [8], "members": 3}}
    made = trained(shop, tmp_path / "tabm", goals=BOTH, network=tabm)
    scores_N, heads_NMG = heads_of(made.ranker(), shop)
    assert heads_NMG.shape[1:] == (3, 2)
    torch.testing.assert_close(scores_N, (heads_NMG @ torch.tensor([0.2, 1.0])).mean(1))
    FinetuneJob(
        out=str(tmp_path / "mean"),
        splits=Splits(train=split(shop, "a"), validation=split(shop, "b")),
        finetune=FinetuneConfig.model_validate({**SMALL, "goals": BOTH, "heads": 2}),
    ).run()
    assert [part.goals for part in bundle.load(str(tmp_path / "mean"), CombinedBundle).parts] == [BOTH["weights"]] * 2


WEIGHTS = st.floats(0, MOST)
METRICS = st.floats(0, 1)


@given(weight=WEIGHTS, value=METRICS, floor=METRICS, rate=st.floats(0.1, 1000))
def test_a_multiplier_follows_the_gradient_of_the_lagrangian(
    weight: float, value: float, floor: float, rate: float
) -> None:
    """By automatic differentiation of `value_of_maximise + w (value - floor)`, which the multiplier descends."""
    multiplier = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    (0.5 + multiplier * (value - floor)).backward()
    assert multiplier.grad is not None
    expected = np.clip(weight - rate * multiplier.grad.item(), 0, MOST)
    new = raised({"click": weight, "order": 1.0}, {"click": value, "order": 0.5}, {"click": floor}, rate)
    assert new == {"click": pytest.approx(expected), "order": 1.0}


@given(kept=st.lists(METRICS, min_size=1, max_size=5), raised_to=METRICS, other=METRICS)
def test_epochs_that_keep_all_goals_are_better_than_others(kept: list[float], raised_to: float, other: float) -> None:
    config = GoalsConfig(maximise="order", keep={"click": 0.0})
    constraints = Constraints(config, {"click": 0.5})
    values = [constraints.judged({"click": click, "order": raised_to}) for click in kept]
    for click, value in zip(kept, values, strict=True):
        assert (value >= 0) == (click >= 0.5) or value == 0
        assert value == (raised_to if click >= 0.5 else click - 0.5)
    assert constraints.judged({"click": 0.9, "order": other}) == other


@pytest.mark.slow
def test_a_kept_goal_gains_weight_until_it_is_kept(shop: str, tmp_path: Path) -> None:
    """The model in service ranks by clicks, so a network for orders must weigh clicks more than it would freely."""
    production = trained(shop, tmp_path / "production", epochs=10)
    found = {}
    for allowed in (-1.0, 0.02):
        goals = {"maximise": "order", "keep": {"click": allowed}, "production": production.url, "rate": 50.0}
        made = trained(shop, tmp_path / str(allowed), goals=goals, epochs=6)
        found[allowed] = made.held.goals
        assert made.metrics.keys() >= {"validation_ndcg@5 of click", "validation_ndcg@5 of order"}
    assert found[-1.0]["click"] < 1 < found[0.02]["click"]
    assert {goals["order"] for goals in found.values()} == {1.0}


@pytest.mark.slow
def test_a_constraint_resumes_where_it_was(shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that is stopped after an epoch and resumed finds the same weights and multipliers."""
    production = trained(shop, tmp_path / "production", epochs=2)
    goals = {"maximise": "order", "keep": {"click": 0.02}, "production": production.url}
    whole = trained(shop, tmp_path / "whole", goals=goals, epochs=5)
    step, calls = Constraints.step, 0

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        step(*args)

    monkeypatch.setattr(Constraints, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        trained(shop, tmp_path / "cut", goals=goals, epochs=5, checkpoint_minutes=1e-9)
    again = trained(shop, tmp_path / "cut", goals=goals, epochs=5, checkpoint_minutes=1e-9)
    assert again.contents["weights.safetensors"] == whole.contents["weights.safetensors"]
    assert again.metrics == whole.metrics


@pytest.mark.slow
def test_what_is_in_service_must_find_its_features(shop: str, tmp_path: Path) -> None:
    """A column that the data set does not have is no column without values."""
    wider = pq.read_table(shop_log(tmp_path / "wider", groups=60)).append_column("f3", pa.array(np.arange(300.0)))
    pq.write_table(wider, tmp_path / "wider" / "log.parquet")
    production = trained(prepared(tmp_path / "wider"), tmp_path / "production")
    goals = {"maximise": "order", "keep": {"click": 0.0}, "production": production.url}
    with pytest.raises(InputError, match=r"1 of its 3 features are not in .*'f3'"):
        trained(shop, tmp_path / "model", goals=goals)


@pytest.mark.nightly
def test_a_kept_head_keeps_the_multipliers_that_were_found(shop: str, tmp_path: Path) -> None:
    start = trained(shop, tmp_path / "start", goals=BOTH)
    again = {"goals": {"maximise": "order", "keep": {"click": 0.0}}, "keep_head": True}
    assert trained(shop, tmp_path / "again", start.url, **again).held.goals == BOTH["weights"]


@pytest.mark.slow
def test_the_longest_list_is_foreseen_with_goals_too(
    shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "_LONG", 4)
    monkeypatch.setattr(memory, "_LARGEST", 256)
    trained(shop, tmp_path / "model", goals=BOTH)
    assert "a step of the longest group, 5 documents, takes about" in caplog.text


@pytest.mark.slow
def test_nothing_is_kept_before_anything_serves(shop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trained(shop, tmp_path / "model", goals={"maximise": "order", "keep": {"click": 0.0}})
    assert made.held.goals == {"click": 1.0, "order": 1.0}
    assert "nothing is in service" in caplog.text


def test_errors(shop: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="give weights, or maximise with keep"):
        GoalsConfig()
    with pytest.raises(ValidationError, match="keep one or more others"):
        GoalsConfig(maximise="order", keep={"order": 0.0})
    with pytest.raises(ValidationError, match="of the labels alone"):
        FinetuneConfig.model_validate({"goals": BOTH, "loss": {"kind": "softmax"}, "debias": {"kind": "weights"}})
    with pytest.raises(InputError, match="no goal 'sale'"):
        trained(shop, tmp_path / "model", goals={"weights": {"sale": 1.0}})
