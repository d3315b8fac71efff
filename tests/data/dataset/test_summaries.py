import numpy as np
import pytest

from ltrscale.data.dataset.summaries import FeatureStats, LabelCounts


@pytest.mark.parametrize("rows", [1, 7, 1000, 100_000])
def test_parts_of_any_size_give_the_moments_of_the_whole(rows: int) -> None:
    rng = np.random.default_rng(0)
    x_NF = (rng.normal(size=(20_000, 5)) * [1, 1e-3, 1e4, 1, 1] + [0, 1e3, 0, 5, 0]).astype(np.float32)
    x_NF[:, 0] += np.arange(20_000) / 1000  # parts have different means
    x_NF[rng.random(20_000) < 0.9, 3] = np.nan
    x_NF[:, 4] = np.nan
    stats = FeatureStats(5)
    for start in range(0, 20_000, rows):
        stats.add(x_NF[start : start + rows])
    exact_NF = x_NF.astype(np.float64)
    for f, summary in enumerate(stats.summaries()[:4]):
        assert summary.missing == np.isnan(exact_NF[:, f]).sum()
        assert (summary.minimum, summary.maximum) == (np.nanmin(exact_NF[:, f]), np.nanmax(exact_NF[:, f]))
        assert summary.mean == pytest.approx(np.nanmean(exact_NF[:, f]), rel=1e-12)
        assert summary.std == pytest.approx(np.nanstd(exact_NF[:, f]), rel=1e-9)
    assert stats.summaries()[4].model_dump() == dict.fromkeys(("minimum", "maximum", "mean", "std")) | {
        "missing": 20_000
    }


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
    whole.add(x_NF)
    labels.add(labels_N)
    for start in (0, 1_000, 1_100):
        part = slice(start, {0: 1_000, 1_000: 1_100, 1_100: 3_000}[start])
        stats, counts = FeatureStats(4), LabelCounts()
        stats.add(x_NF[part])
        counts.add(labels_N[part])
        merged.merge(stats)
        read_back.merge(FeatureStats.of(stats.summaries(), len(x_NF[part])))
        merged_labels.merge(LabelCounts.of(counts.counts()))
    for theirs in (merged, read_back):
        for one, other in zip(whole.summaries(), theirs.summaries(), strict=True):
            assert other.model_dump() == pytest.approx(one.model_dump(), rel=1e-9)
    assert merged_labels.counts() == labels.counts()


def test_parts_with_more_than_64_labels_together_are_not_counted() -> None:
    labels, more = LabelCounts(), LabelCounts()
    labels.add(np.arange(40, dtype=np.float32))
    more.add(np.arange(30, 70, dtype=np.float32))
    labels.merge(more)
    assert labels.counts() == {}
    labels.merge(more)
    assert labels.counts() == {}
