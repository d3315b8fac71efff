"""The order by clicks and a feature: a loop over pairs, and documents that were not shown."""

from collections.abc import Callable

import numpy as np
import pytest

from ltrscale.derive.relabelling.order import ClickOrder, click_order, order_labels, shown_only
from ltrscale.derive.relabelling.relabel import RelabelConfig
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.simulate.ragged import offsets

Make = Callable[..., GroupBlock]


@pytest.mark.parametrize("seed", range(5))
def test_labels_order_every_pair_as_the_paper_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 30)
    offsets_Q1, n = offsets(lengths), int(lengths.sum())
    clicks, shown = rng.random(n) < 0.3, rng.random(n) < 0.8
    feature = np.where(rng.random(n) < 0.2, np.nan, rng.integers(0, 4, n).astype(float))  # with ties
    labels = order_labels(clicks, feature, offsets_Q1, shown_N=shown)

    def better(i: int, j: int) -> bool:
        if not shown[i] or not shown[j]:
            return bool(shown[i] and not shown[j])
        if clicks[i] != clicks[j]:
            return bool(clicks[i])
        return bool(feature[i] > feature[j] or (np.isnan(feature[j]) and not np.isnan(feature[i])))

    for first, last in zip(offsets_Q1[:-1].tolist(), offsets_Q1[1:].tolist(), strict=True):
        for i in range(first, last):
            assert labels[i] == (1 + sum(shown[j] and better(i, j) for j in range(first, last)) if shown[i] else 0)
            for j in range(first, last):
                assert (labels[i] > labels[j]) == better(i, j)


def test_the_step_keeps_clicks_and_unlabelled_groups(make_block: Make) -> None:
    block = make_block([[0, 1, 0], None], lengths=[3, 2], positions=[[1, 2, np.nan], [1, 2]])
    block = block.with_columns(clicks=np.full(5, np.nan, np.float32))
    ((after, changes),) = click_order(feature=0)(block)
    labels = after.columns_N["labels"]
    assert sorted(labels[:3].tolist()) == [0, 1, 2]
    assert labels[1] == 2
    assert labels[2] == 0
    assert np.isnan(labels[3:]).all()
    assert after.columns_N["clicks"][:3].tolist() == [0, 1, 0]
    assert changes.groups_changed == 1


def test_documents_that_were_not_shown_are_dropped(make_block: Make) -> None:
    block = make_block(
        [[0, 1, 0], None, [1, 0], [0]],
        lengths=[3, 2, 2, 1],
        positions=[[2, 1, np.nan], [1, np.nan], None, [4]],
    )
    ((after, changes),) = shown_only()(block)
    assert after.features_NF[:, 0].tolist() == [0, 1, 3, 4, 5, 6, 7]  # all of a group without positions or labels
    assert after.lengths_Q.tolist() == [2, 2, 2, 1]
    assert (changes.groups_changed, changes.documents_dropped) == (1, 1)


def test_a_config_may_name_it() -> None:
    config = RelabelConfig.model_validate({"steps": [{"kind": "click_order", "feature": "bm25"}]})
    assert config.steps == (ClickOrder(feature="bm25"),)
