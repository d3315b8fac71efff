"""Trees that learn a weighted sum of goals, whose labels need not be whole numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shop_goals import shop_data

from ltrscale.bundle import load
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.trees.configs import LightGBMConfig, XGBoostConfig
from ltrscale.trees.gbdt import GBDTJob

TREES = LightGBMConfig(num_trees=20, num_leaves=4, min_data_in_leaf=5)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shop_data(tmp_path_factory.mktemp("shop"))


def scores(shop: str, out: Path, labels: Any, config: Any = TREES) -> torch.Tensor:
    splits = Splits(
        train=Split(data=shop, periods="a", labels=labels), validation=Split(data=shop, periods="b", labels=labels)
    )
    GBDTJob(out=str(out), splits=splits, gbdt=config).run()
    groups = next(iterate(select(splits.validation, labelled=True)))
    return load(str(out)).scorer()(groups)


@pytest.mark.slow
def test_numbered_labels_have_the_gains_of_the_sum(shop: str, tmp_path: Path) -> None:
    """Whole labels give the trees that they give as they are; so do gains that differ by a factor."""
    goals = {"click": 1.0, "order": 2.0}  # labels 0, 1 and 3
    as_sum = scores(shop, tmp_path / "sum", goals)
    table = TREES.replace(label_gain=(0.0, 1.0, 3.0, 7.0))
    torch.testing.assert_close(as_sum, scores(shop, tmp_path / "table", goals, table))
    click, half = (scores(shop, tmp_path / str(weight), {"click": weight}) for weight in (1.0, 0.5))
    torch.testing.assert_close(click, half)
    assert not torch.allclose(as_sum, click)


@pytest.mark.slow
def test_fractions_need_gains_of_their_own(shop: str, tmp_path: Path) -> None:
    assert scores(shop, tmp_path / "trees", {"click": 0.2, "order": 1.0}).unique().numel() > 2
    with pytest.raises(InputError, match="and gains are for integers"):
        scores(shop, tmp_path / "xgboost", {"click": 0.2, "order": 1.0}, XGBoostConfig(num_trees=2))
