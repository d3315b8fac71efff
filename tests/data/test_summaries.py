import numpy as np
import pytest

from ltrscale.data.summaries import FeatureStats, LabelCounts


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
