"""Unusual groups: outliers as a slow search finds them, and values that training lacks."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.outliers import _GAPS, OutlierConfig, OutlierDetector, OutlierRule, Seen, fit_outliers


def groups_of(values_NF: object, lengths: Iterable[int]) -> QueryGroups:
    return QueryGroups(torch.tensor(values_NF, dtype=torch.float32), to_offsets(torch.tensor(list(lengths))))


def numeric(n: int) -> list[Feature]:
    return [Feature(name=f"f{i}") for i in range(n)]


def slow_outliers(probes: list[float], seen: list[float], gap: int, documents: int) -> list[bool]:
    """The paper's rule, bin by bin: is a probe above (below) the bin where `gap` empty bins follow each other?"""
    edges = np.linspace(min(seen), max(seen), 101)

    def bin_of(x: float) -> int:
        return max([b for b in range(100) if x >= edges[b]], default=-1)

    where = [bin_of(x) for x in seen]
    above, below = set(), set()
    for b in range(gap - 1, 100):
        if not any(b - gap < w <= b for w in where) and sum(w > b for w in where) < 0.01 * documents:
            above.add(b)
    for b in range(100 - gap, -1, -1):
        if not any(b <= w < b + gap for w in where) and sum(w < b for w in where) < 0.01 * documents:
            below.add(b)
    return [any(bin_of(x) > b for b in above) or any(bin_of(x) < b for b in below) for x in probes]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 8, 30]))
def test_detector_equals_the_slow_one(seed: int, gap: int) -> None:
    rng = np.random.default_rng(seed)
    bulk = rng.normal(size=250)
    far = rng.normal(scale=20, size=rng.integers(0, 9))
    missing = np.full(rng.integers(0, 50), np.nan)
    values_N = rng.permutation(np.concatenate([bulk, far, missing])).astype(np.float32)
    halves = [groups_of(part[:, None], [len(part)]) for part in np.array_split(values_N, 3)]
    detector = fit_outliers(lambda: halves, numeric(1), OutlierConfig(gap=gap))
    seen = [float(v) for v in values_N if not np.isnan(v)]
    probes = [*seen, *rng.normal(scale=30, size=40).astype(np.float32).tolist()]
    got = detector.outlier_groups(groups_of([[p] for p in probes], [1] * len(probes)))
    assert got.tolist() == slow_outliers(probes, seen, gap, len(values_N))


def test_a_group_is_an_outlier_when_one_document_is() -> None:
    detector = OutlierDetector(
        data="", features=("a", "b"), gap=5, share=0, rules={"b": OutlierRule(below=-1, at_least=5)}
    )
    values_NF = [[99, 0], [0, 5], [0, -1], [0, -1.5], [0, float("nan")]]
    assert detector.outlier_groups(groups_of(values_NF, [2, 1, 0, 1, 1])).tolist() == [True, False, False, True, False]


def test_a_gap_with_one_percent_above_is_skipped() -> None:
    values = [i / 1000 for i in range(970)] + [50.0] * 21 + [100.0] * 8 + [101.0]
    detector = fit_outliers(lambda: [groups_of([[v] for v in values], [1000])], numeric(1), OutlierConfig(gap=10))
    rule = detector.rules["f0"]
    assert rule.below is None
    assert rule.at_least is not None
    assert 50 < rule.at_least < 100  # the gap below 50 has 3% above it


def test_constant_missing_and_categorical_features_have_no_rule() -> None:
    values = [[1.0, float("nan"), 0.0 if i else 1e6] for i in range(500)]
    features = [Feature(name="constant"), Feature(name="missing"), Feature(name="code", kind="categorical")]
    detector = fit_outliers(lambda: [groups_of(values, [500])], features, OutlierConfig(gap=5))
    assert detector.rules == {}
    assert detector.share == 0.0


def test_auto_chooses_the_gap_whose_share_is_nearest() -> None:
    rng = np.random.default_rng(0)
    values_NF = rng.standard_t(2, size=(20_000, 4)).astype(np.float32)
    validation = [groups_of(values_NF[:9000], [10] * 900), groups_of(values_NF[9000:], [10] * 1100)]
    config = OutlierConfig(target=0.01)
    shares = {gap: fit_outliers(lambda: validation, numeric(4), config.replace(gap=gap)).share for gap in _GAPS}
    auto = fit_outliers(lambda: validation, numeric(4), config)
    assert auto.share == shares[auto.gap or 0]
    assert abs(auto.share - 0.01) == min(abs(share - 0.01) for share in shares.values())
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert shares[_GAPS[0]] > 0.01 > shares[_GAPS[-1]], "the grid must matter for this test to say anything"
    flagged = sum(int(auto.outlier_groups(groups).sum()) for groups in validation)
    assert flagged / 2000 == auto.share


def test_without_rules_nothing_is_read() -> None:
    passes = []

    def validation() -> list[QueryGroups]:
        passes.append(1)
        return [groups_of([[1.0], [2.0]], [2])]

    detector = fit_outliers(validation, numeric(1), OutlierConfig(gap=None))
    assert (detector.rules, detector.share, passes) == ({}, 0.0, [])
    fit_outliers(validation, numeric(1), OutlierConfig(gap=None, known={"f0": OutlierRule(at_least=2)}))
    assert len(passes) == 1


def test_known_features_are_judged_by_their_rule_only() -> None:
    values = [[i / 1000, 0.0] for i in range(999)] + [[1000.0, 1.0]]
    validation = [groups_of(values, [10] * 100)]
    config = OutlierConfig(gap=None, known={"f1": OutlierRule(at_least=1)})
    detector = fit_outliers(lambda: validation, numeric(2), config)
    assert set(detector.rules) == {"f1"}
    assert detector.share == 0.01
    both = fit_outliers(lambda: validation, numeric(2), OutlierConfig(gap=5, known={"f0": OutlierRule(missing=True)}))
    assert both.rules["f0"] == OutlierRule(missing=True)
    assert both.rules["f1"].at_least is not None
    assert both.outlier_groups(groups_of([[float("nan"), 0], [1e9, 0]], [1, 1])).tolist() == [True, False]


def test_bad_settings_are_named() -> None:
    with pytest.raises(InputError, match=r"outliers\.known\.prise: no such feature; did you mean 'price'\?"):
        fit_outliers(list, [Feature(name="price")], OutlierConfig(gap=None, known={"prise": OutlierRule(missing=True)}))
    with pytest.raises(ValueError, match="needs below, at_least or missing"):
        OutlierRule()


COLUMNS = [Feature(name="x"), Feature(name="code", kind="categorical"), Feature(name="unknown")]


def random_groups(seed: int, n: int, codes: int, *, unknown: float = math.nan) -> QueryGroups:
    """Lists of up to five documents with a number, a code and a value that training lacks; some are missing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, n)
    x_NF = np.stack([rng.normal(size=lengths.sum()), rng.integers(0, codes, lengths.sum()), lengths.repeat(lengths)], 1)
    x_NF[:, 2] = np.where(x_NF[:, 2] == 5, unknown, math.nan)
    x_NF[rng.random(x_NF.shape) < 0.1] = math.nan
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return QueryGroups(torch.tensor(x_NF, dtype=torch.float32), torch.tensor(offsets))


def lacking_slowly(train: QueryGroups, tested: QueryGroups) -> list[bool]:
    known = [[v for v in column if math.isfinite(v)] for column in train.features_NF.T.tolist()]

    def is_new(f: int, value: float) -> bool:
        if math.isnan(value):
            return False
        if COLUMNS[f].kind == "categorical":
            return value not in known[f]
        return not known[f] or value < min(known[f]) or value > max(known[f])

    lists = [tested.select(torch.tensor([q])).features_NF.tolist() for q in range(tested.n_groups)]
    return [any(is_new(f, value) for document in one for f, value in enumerate(document)) for one in lists]


@pytest.mark.parametrize("unknown", [math.nan, 0.0, math.inf])
def test_groups_with_values_that_training_lacks(unknown: float) -> None:
    train, tested = random_groups(0, 60, 40), random_groups(1, 300, 44, unknown=unknown)
    lacking_Q = Seen.from_groups([train], COLUMNS).lacks(tested)
    assert lacking_Q.tolist() == lacking_slowly(train, tested)
    assert 20 < lacking_Q.sum() < 280


def test_training_lacks_none_of_its_own_in_any_parts() -> None:
    train = random_groups(2, 50, 30)
    parts = [train.select(torch.arange(a, a + 10)) for a in (40, 0, 20, 10, 30)]
    seen = Seen.from_groups(parts, COLUMNS)
    assert not seen.lacks(train).any()
    tested = random_groups(3, 200, 40)
    assert torch.equal(seen.lacks(tested), Seen.from_groups([train], COLUMNS).lacks(tested))


def test_infinite_values_of_training_widen_no_range() -> None:
    train = QueryGroups(torch.tensor([[1.0], [math.inf], [3.0]]), torch.tensor([0, 3]))
    tested = QueryGroups(torch.tensor([[3.0], [4.0], [math.inf], [-math.inf]]), torch.arange(5))
    assert Seen.from_groups([train], COLUMNS[:1]).lacks(tested).tolist() == [False, True, True, True]
