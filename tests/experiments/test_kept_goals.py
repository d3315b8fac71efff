"""Goals to keep, in a refit and from week to week."""

from pathlib import Path
from typing import Any

import pytest
from shop_goals import shop_data

from ltrscale import bundle
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.experiments.methods.single import NeuralMethod
from ltrscale.experiments.refit import RefitJob
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob

SMALL: dict[str, Any] = {"network": {"encoder": {"width": 8, "blocks": 1}}, "epochs": 2}
KEEP = {"maximise": "order", "keep": {"click": 0.5}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shop_data(tmp_path_factory.mktemp("shop"))


def trained(data: str, out: Path, **changes: Any) -> bundle.RankerBundle:
    splits = Splits(train=Split(data=data, periods="a"), validation=Split(data=data, periods="b"))
    config = FinetuneConfig.model_validate({**SMALL, **changes})
    FinetuneJob(out=str(out), splits=splits, finetune=config).run()
    return bundle.load(str(out), bundle.RankerBundle)


@pytest.mark.slow
def test_a_refit_keeps_the_weights_that_validation_found(data: str, tmp_path: Path) -> None:
    """It starts from random weights like the first training, not from the bundle in service."""
    production = trained(data, tmp_path / "production")
    found = trained(data, tmp_path / "found", goals={**KEEP, "production": production.url})
    RefitJob(out=str(tmp_path / "final"), bundle=found.url).run()
    final = bundle.load(str(tmp_path / "final"), bundle.RankerBundle)
    assert final.held.goals == found.held.goals
    assert final.count("epochs_full") == found.count("epochs_full")
    assert final.count("epochs_head") is None


def test_a_method_keeps_what_is_in_service_at_that_time() -> None:
    method = NeuralMethod.model_validate({"finetune": {"goals": KEEP}})
    assert method.keeping("runs/now").finetune.goals == method.finetune.goals.replace(production="runs/now")
    for goals in (None, {"weights": {"click": 1.0, "order": 1.0}}):
        without = NeuralMethod.model_validate({"finetune": {"goals": goals}})
        assert without.keeping("runs/now") == without
