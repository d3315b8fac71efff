"""What training has of each feature, against a slow look at one value at a time."""

import math

import numpy as np
import pytest
import torch

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.evaluation.measure.seen import Seen

FEATURES = [Feature(name="x"), Feature(name="code", kind="categorical"), Feature(name="unknown")]


def groups(seed: int, n: int, codes: int, *, unknown: float = math.nan) -> QueryGroups:
    """Lists of up to five documents with a number, a code and a value that training lacks; some are missing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, n)
    x_NF = np.stack([rng.normal(size=lengths.sum()), rng.integers(0, codes, lengths.sum()), lengths.repeat(lengths)], 1)
    x_NF[:, 2] = np.where(x_NF[:, 2] == 5, unknown, math.nan)
    x_NF[rng.random(x_NF.shape) < 0.1] = math.nan
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return QueryGroups(torch.tensor(x_NF, dtype=torch.float32), torch.tensor(offsets))


def slow(train: QueryGroups, tested: QueryGroups) -> list[bool]:
    known = [[v for v in column if math.isfinite(v)] for column in train.features_NF.T.tolist()]

    def is_new(f: int, value: float) -> bool:
        if math.isnan(value):
            return False
        if FEATURES[f].kind == "categorical":
            return value not in known[f]
        return not known[f] or value < min(known[f]) or value > max(known[f])

    lists = [tested.select(torch.tensor([q])).features_NF.tolist() for q in range(tested.n_groups)]
    return [any(is_new(f, value) for document in one for f, value in enumerate(document)) for one in lists]


@pytest.mark.parametrize("unknown", [math.nan, 0.0, math.inf])
def test_groups_with_values_that_training_lacks(unknown: float) -> None:
    train, tested = groups(0, 60, 40), groups(1, 300, 44, unknown=unknown)
    lacking_Q = Seen.of([train], FEATURES).lacks(tested)
    assert lacking_Q.tolist() == slow(train, tested)
    assert 20 < lacking_Q.sum() < 280


def test_training_lacks_none_of_its_own_in_any_parts() -> None:
    train = groups(2, 50, 30)
    parts = [train.select(torch.arange(a, a + 10)) for a in (40, 0, 20, 10, 30)]
    seen = Seen.of(parts, FEATURES)
    assert not seen.lacks(train).any()
    tested = groups(3, 200, 40)
    assert torch.equal(seen.lacks(tested), Seen.of([train], FEATURES).lacks(tested))


def test_infinite_values_of_training_widen_no_range() -> None:
    train = QueryGroups(torch.tensor([[1.0], [math.inf], [3.0]]), torch.tensor([0, 3]))
    tested = QueryGroups(torch.tensor([[3.0], [4.0], [math.inf], [-math.inf]]), torch.arange(5))
    assert Seen.of([train], FEATURES[:1]).lacks(tested).tolist() == [False, True, True, True]
