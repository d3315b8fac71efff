from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from nightly import nightly
from numpy.typing import NDArray

from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.summaries import FeatureStats, LabelCounts, UniqueInGroup, identifying


def one_group(rows: int) -> NDArray[np.int64]:
    return np.array([0, rows])


def grouped_values(seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Documents in groups of 0 to 40, in columns with few, many, missing, fractional and only missing values."""
    rng = np.random.default_rng(seed)
    lengths_Q = rng.integers(0, 41, 300)
    n = int(lengths_Q.sum())
    x_NF = np.stack([rng.integers(0, top, n) for top in (3, 50, 100_000, 50, 50, 9)], 1).astype(np.float32)
    x_NF[rng.random(n) < 0.3, 3] = np.nan
    x_NF[n // 2, 4] += 0.5
    x_NF[:, 5] = np.nan
    return x_NF, np.concatenate([[0], np.cumsum(lengths_Q)])


def share_by_counting(values_N: NDArray[np.float32], offsets_Q1: NDArray[np.int64]) -> float:
    unique = documents = 0
    for start, stop in pairwise(offsets_Q1.tolist()):
        if stop - start > 1:
            documents += stop - start
            counts = Counter(value for value in values_N[start:stop].tolist() if not np.isnan(value))
            unique += sum(count == 1 for count in counts.values())
    return unique / documents


@pytest.mark.parametrize("rows", [nightly(1), 7, 1000, 100_000])
@pytest.mark.slow
def test_parts_of_any_size_give_the_moments_of_the_whole(rows: int) -> None:
    rng = np.random.default_rng(0)
    x_NF = (rng.normal(size=(20_000, 5)) * [1, 1e-3, 1e4, 1, 1] + [0, 1e3, 0, 5, 0]).astype(np.float32)
    x_NF[:, 0] += np.arange(20_000) / 1000  # parts have different means
    x_NF[rng.random(20_000) < 0.9, 3] = np.nan
    x_NF[:, 4] = np.nan
    stats = FeatureStats(5)
    for start in range(0, 20_000, rows):
        part_NF = x_NF[start : start + rows]
        stats.add(part_NF, one_group(len(part_NF)))
    exact_NF = x_NF.astype(np.float64)
    for f, summary in enumerate(stats.summaries()[:4]):
        assert summary.missing == np.isnan(exact_NF[:, f]).sum()
        assert (summary.minimum, summary.maximum) == (np.nanmin(exact_NF[:, f]), np.nanmax(exact_NF[:, f]))
        assert summary.mean == pytest.approx(np.nanmean(exact_NF[:, f]), rel=1e-12)
        assert summary.std == pytest.approx(np.nanstd(exact_NF[:, f]), rel=1e-9)
    nothing = dict.fromkeys(("minimum", "maximum", "mean", "std"))
    unique = None if rows == 1 else 0
    assert stats.summaries()[4].model_dump() == nothing | {"missing": 20_000, "unique_in_group": unique}


def test_more_than_64_labels_are_not_counted() -> None:
    labels = LabelCounts()
    labels.add(np.arange(64, dtype=np.float32))
    assert len(labels.counts()) == 64
    labels.add(np.array([0.1], np.float32))
    assert labels.counts() == {}


def test_merged_parts_give_the_moments_and_labels_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    x_NF = (rng.normal(size=(3_000, 4)) * [1, 1e-3, 1e4, 1] + [0, 1e3, 0, 5]).astype(np.float32)
    x_NF[rng.random(3_000) < 0.9, 3] = np.nan
    x_NF[:1_000, 2] = np.nan
    labels_N = rng.integers(0, 4, 3_000).astype(np.float32) / 10
    whole, merged, read_back = FeatureStats(4), FeatureStats(4), FeatureStats(4)
    labels, merged_labels = LabelCounts(), LabelCounts()
    x_NF[:, 0] = (1e3 * x_NF[:, 0]).round()
    whole.add(x_NF, np.array([0, 1_000, 1_100, 3_000]))
    labels.add(labels_N)
    for start in (0, 1_000, 1_100):
        part = slice(start, {0: 1_000, 1_000: 1_100, 1_100: 3_000}[start])
        stats, counts = FeatureStats(4), LabelCounts()
        stats.add(x_NF[part], one_group(len(x_NF[part])))
        counts.add(labels_N[part])
        merged.merge(stats)
        read_back.merge(FeatureStats.from_summaries(stats.summaries(), len(x_NF[part]), stats.grouped))
        merged_labels.merge(LabelCounts.from_counts(counts.counts()))
    assert 0 < (whole.summaries()[0].unique_in_group or 0) < 1
    for theirs in (merged, read_back):
        assert theirs.grouped == whole.grouped == 3_000
        for one, other in zip(whole.summaries(), theirs.summaries(), strict=True):
            assert other.unique_in_group == one.unique_in_group
            exclude = {"unique_in_group"}
            assert other.model_dump(exclude=exclude) == pytest.approx(one.model_dump(exclude=exclude), rel=1e-9)
    assert merged_labels.counts() == labels.counts()


def test_parts_with_more_than_64_labels_together_are_not_counted() -> None:
    labels, more = LabelCounts(), LabelCounts()
    labels.add(np.arange(40, dtype=np.float32))
    more.add(np.arange(30, 70, dtype=np.float32))
    labels.merge(more)
    assert labels.counts() == {}
    labels.merge(more)
    assert labels.counts() == {}


@pytest.mark.parametrize("groups", [1, 7, 300])
def test_values_that_are_unique_in_their_group_are_counted_exactly(groups: int) -> None:
    x_NF, offsets_Q1 = grouped_values()
    unique = UniqueInGroup(6)
    for first in range(0, 300, groups):
        part = offsets_Q1[first : first + groups + 1]
        unique.add(x_NF[part[0] : part[-1]], part - part[0])
    expected = [share_by_counting(x_N, offsets_Q1) for x_N in x_NF.T]
    assert unique.shares() == [*expected[:4], None, 0.0]
    assert 0 < expected[0] < expected[1] < expected[2]


def test_parts_and_shares_give_the_counts_of_the_whole() -> None:
    merged, whole = UniqueInGroup(6), UniqueInGroup(6)
    for seed in range(3):
        part = UniqueInGroup(6)
        part.add(*grouped_values(seed))
        whole.add(*grouped_values(seed))
        merged.merge(UniqueInGroup.from_shares(part.shares(), part.grouped))
    assert merged.shares() == whole.shares()
    assert merged.grouped == whole.grouped
    merged.merge(UniqueInGroup.from_shares([None] * 6, 0))  # a manifest from before the count
    assert merged.shares() == [None] * 6


def test_groups_of_one_document_and_no_document_say_nothing() -> None:
    unique = UniqueInGroup(1)
    unique.add(np.zeros((0, 1), np.float32), np.array([0]))
    unique.add(np.array([[1], [2]], np.float32), np.array([0, 1, 2]))
    assert unique.shares() == [None]
    unique.add(np.array([[1], [1]], np.float32), np.array([0, 2]))
    assert unique.shares() == [0.0]


def test_categories_identify_from_a_half_and_whole_numbers_are_suspect_from_95_percent() -> None:
    names = [("c1", "categorical"), ("c2", "categorical"), ("n1", "numeric"), ("n2", "numeric"), ("n3", "numeric")]
    features = [Feature.model_validate({"name": name, "kind": kind}) for name, kind in names]
    found, suspects = identifying(features, [0.499, 0.5, 0.949, 0.95, None])
    assert (found, suspects) == ({"c2": 0.5}, {"n2": 0.95})
