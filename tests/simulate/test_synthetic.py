"""The synthetic log: laws of its rows, and that labels can be learnt from its features."""

import datetime
import itertools
import json
from pathlib import Path

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from sklearn.cluster import MiniBatchKMeans
from synthetic_columns import COLUMN_MAPPING, write_synthetic

from ltrscale import storage
from ltrscale.config import load
from ltrscale.errors import InputError
from ltrscale.simulate.synthetic import SyntheticLog, SyntheticLogConfig

SMALL = SyntheticLogConfig(weeks=2, groups_per_week=300, n_features=20)


def written(config: SyntheticLogConfig, out: Path) -> list[pa.Table]:
    return [pq.read_table(path) for path in write_synthetic(config, out / "log")]


def features(table: pa.Table) -> np.ndarray:
    names = [name for name in table.column_names if name.startswith("f_")]
    return np.column_stack([table[name].to_numpy() for name in names])


def offsets(table: pa.Table) -> np.ndarray:
    ids = table["query_id"].to_numpy()
    return np.r_[0, np.flatnonzero(ids[1:] != ids[:-1]) + 1, len(ids)]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[pa.Table]:
    return written(SMALL, tmp_path_factory.mktemp("log"))


def test_rows_of_a_query_are_together_and_items_are_unique(tables: list[pa.Table]) -> None:
    for table in tables:
        bounds = offsets(table)
        assert len(bounds) - 1 == len(pc.unique(table["query_id"])) == SMALL.groups_per_week
        assert len(pc.unique(table["item_id"])) == len(table)
        assert np.diff(bounds).min() >= 1
        assert 14 < np.diff(bounds).mean() < 18


def test_columns_fit_the_mapping(tables: list[pa.Table]) -> None:
    mapping = COLUMN_MAPPING
    schema = tables[0].schema
    assert {mapping["query"], mapping["item"], mapping["label"], mapping["time"]} <= set(schema.names)
    assert sum(name.startswith("f_") and schema.field(name).type == pa.float32() for name in schema.names) == 20
    kinds = {str(schema.field(name).type) for name in schema.names if name.startswith("c_")}
    assert kinds == {"string", "int32"}
    assert schema.field("event_time").type == pa.timestamp("ms", tz="UTC")


def test_events_lie_in_their_week_in_order_over_blocks(tmp_path: Path) -> None:
    config = SyntheticLogConfig(
        first_week="2020-W53", weeks=2, groups_per_week=1100, mean_documents=2, max_documents=3, n_features=2
    )
    names = []
    for path in write_synthetic(config, tmp_path / "log"):
        assert pq.ParquetFile(path).num_row_groups == 2
        times = pq.read_table(path)["event_time"].to_pylist()
        assert times == sorted(times)
        names.append({"{}-W{:02}".format(*time.isocalendar()) for time in times})
        assert times[-1] - times[0] > datetime.timedelta(days=6)
    assert names == [{"2020-W53"}, {"2021-W01"}]


def test_lists_are_capped(tmp_path: Path) -> None:
    config = SMALL.replace(weeks=1, max_documents=7)
    assert np.diff(offsets(written(config, tmp_path)[0])).max() == 7


def test_a_week_depends_on_its_name_and_the_seed_alone(tables: list[pa.Table], tmp_path: Path) -> None:
    second = SMALL.replace(first_week="2026-W02", weeks=1)
    assert written(second, tmp_path / "alone")[0].equals(tables[1])
    assert not written(second.replace(seed=1), tmp_path / "seed")[0].equals(tables[1])
    assert not tables[0]["label"].equals(tables[1]["label"])


def test_writing_again_is_a_no_op_and_another_config_replaces(tmp_path: Path) -> None:
    out, config = str(tmp_path / "log"), SMALL.replace(groups_per_week=5)
    files = write_synthetic(config, out)
    before = [storage.fingerprint(file) for file in files]
    assert not SyntheticLog(out=out, log=config).run()
    assert before == [storage.fingerprint(file) for file in files]
    assert len(write_synthetic(config.replace(weeks=1), out)) == 1
    assert not storage.exists(files[1])


def test_a_log_of_an_earlier_generator_is_written_again(tmp_path: Path) -> None:
    config, out = SMALL.replace(weeks=1, groups_per_week=5), tmp_path / "log"
    (file,) = write_synthetic(config, out)
    rows, written_by = pq.read_table(file), storage.read_manifest(str(out))
    assert written_by is not None
    earlier = {**written_by, "made_by": {**written_by["made_by"], "inputs": {"generator": "1"}}}
    (out / "manifest.json").write_text(json.dumps(earlier))
    assert SyntheticLog(out=str(out), log=config).run()
    assert pq.read_table(file).equals(rows)
    assert storage.read_manifest(str(out)) == written_by


@pytest.mark.parametrize("labels", [{"noise": 2.0}, {"unanswered": 0.5}])
def test_labels_leave_no_trace_in_the_features(
    tables: list[pa.Table], tmp_path: Path, labels: dict[str, float]
) -> None:
    (other,) = written(SMALL.replace(weeks=1, **labels), tmp_path)
    assert not other["label"].equals(tables[0]["label"])
    assert other.drop_columns("label").equals(tables[0].drop_columns("label"))


def test_hiding_labels_changes_nothing_else(tables: list[pa.Table], tmp_path: Path) -> None:
    full = written(SMALL.replace(labelled=1.0), tmp_path)
    for part, whole in zip(tables, full, strict=True):
        assert part.drop_columns("label").equals(whole.drop_columns("label"))
        assert whole["label"].null_count == 0
        hidden = part["label"].is_null().to_numpy()
        assert np.array_equal(part["label"].to_numpy()[~hidden], whole["label"].to_numpy()[~hidden])
        by_group = np.add.reduceat(hidden, offsets(part)[:-1])
        lengths = np.diff(offsets(part))
        assert set(np.unique(by_group / lengths)) == {0, 1}
        assert 0.4 < (by_group > 0).mean() < 0.6


@pytest.mark.slow
def test_grades_are_long_tailed_and_some_groups_have_no_relevant_document(tmp_path: Path) -> None:
    for seed in range(3):
        table = written(SMALL.replace(labelled=1.0, seed=seed), tmp_path / str(seed))[0]
        labels = table["label"].to_numpy()
        shares = np.bincount(labels, minlength=5) / len(labels)
        assert list(shares) == sorted(shares, reverse=True)
        assert shares[0] > 0.6
        assert shares[4] > 0.005
        undefined = np.maximum.reduceat(labels, offsets(table)[:-1]) == 0
        assert 0.1 <= undefined.mean() <= 0.25


def test_missing_values_have_the_share_asked_for(tables: list[pa.Table], tmp_path: Path) -> None:
    values = features(tables[0])
    whole = features(written(SMALL.replace(missing=0), tmp_path)[0])
    assert not np.isnan(whole).any()
    missing = np.isnan(values)
    assert 0.02 < missing.mean() < 0.12
    assert np.array_equal(values[~missing], whole[~missing])


@pytest.mark.slow
def test_ratios_are_missing_together_for_unpopular_documents(tmp_path: Path) -> None:
    whole, values = (features(written(SMALL.replace(missing=m), tmp_path / str(m))[0]) for m in (0.0, 0.3))
    first, second = (f for f in range(20) if whole[:, f].max() == 1)
    assert np.corrcoef(np.isnan(values[:, [first, second]]).T)[0, 1] > 0.05


@pytest.mark.slow
def test_outliers_are_few_cells_of_the_share_of_groups_asked_for(tmp_path: Path) -> None:
    config = SMALL.replace(missing=0, groups_per_week=1000, weeks=1)
    clean = features(written(config.replace(outliers=0), tmp_path / "clean")[0])
    table = written(config.replace(outliers=0.2), tmp_path / "broken")[0]
    broken = features(table)
    cells = broken != clean
    groups = np.logical_or.reduceat(cells.any(1), offsets(table)[:-1])
    assert 0.12 < groups.mean() < 0.22  # a group asked to be broken may draw no feature to break
    assert cells.mean() < 0.05
    flagged = broken[cells] == 1e6
    assert 0.1 < flagged.mean() < 0.9
    np.testing.assert_allclose(broken[cells][~flagged], 1000 * clean[cells][~flagged], rtol=1e-6)


def test_a_bad_week_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"first_week: not an ISO week; write it as 2026-W01 \(given '2026-W60'\)"):
        load(SyntheticLogConfig, overrides=["first_week=2026-W60"])


def mean_ndcg(scores: np.ndarray, labels: np.ndarray, bounds: np.ndarray, k: int = 5) -> float:
    values = []
    for a, b in itertools.pairwise(bounds):
        gains, discounts = 2.0 ** labels[a:b] - 1, 1 / np.log2(np.arange(2, b - a + 2)[:k])
        if gains.any():
            ranked = gains[np.argsort(-scores[a:b], kind="stable")][:k]
            values.append((ranked * discounts).sum() / (np.sort(gains)[::-1][:k] * discounts).sum())
    return float(np.mean(values))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[pa.Table]:
    """A training week and a test week in which every query has labels."""
    return written(SyntheticLogConfig(weeks=2, groups_per_week=1000, labelled=1.0), tmp_path_factory.mktemp("whole"))


def trees(train: pa.Table, test: pa.Table, groups: int) -> float:
    """Test NDCG@5 of LightGBM trained on the first groups."""
    bounds = offsets(train)[: groups + 1]
    values, labels = features(train)[: bounds[-1]], train["label"].to_numpy()[: bounds[-1]]
    data = lightgbm.Dataset(values, labels, group=np.diff(bounds))
    settings = {"objective": "lambdarank", "num_leaves": 15, "verbose": -1, "num_threads": 1, "deterministic": True}
    scores = lightgbm.train(settings, data, 60).predict(features(test))
    return mean_ndcg(scores, test["label"].to_numpy(), offsets(test))


def standardised(tables: list[pa.Table]) -> list[np.ndarray]:
    """Features as a linear model likes them: logarithms, filled, scaled by the first table."""
    logs = [np.sign(values) * np.log1p(np.abs(values)) for values in map(features, tables)]
    centre, scale = np.nanmean(logs[0], 0), np.nanstd(logs[0], 0)
    return [np.clip(np.nan_to_num((values - centre) / scale), -4, 4) for values in logs]


def closeness_to_clusters(train: np.ndarray, test: np.ndarray) -> list[np.ndarray]:
    """Soft membership in clusters that are found without labels."""
    clusters = MiniBatchKMeans(60, n_init=2, random_state=0).fit(train)
    weights = [np.exp(-1.5 * clusters.transform(values)) for values in (train, test)]
    return [w / w.sum(1, keepdims=True) for w in weights]


def ridge(inputs: list[np.ndarray], tables: list[pa.Table], *, groups: int, draws: int, penalty: float) -> float:
    """Mean test NDCG@5 of linear regressions of the labels, each on the next so many groups."""
    bounds, labels, values = offsets(tables[0]), tables[0]["label"].to_numpy(), []
    for draw in range(draws):
        rows = slice(bounds[draw * groups], bounds[(draw + 1) * groups])
        centre = inputs[0][rows].mean(0)
        x, y = inputs[0][rows] - centre, labels[rows] - labels[rows].mean()
        weights = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)
        values.append(mean_ndcg((inputs[1] - centre) @ weights, tables[1]["label"].to_numpy(), offsets(tables[1])))
    return float(np.mean(values))


@pytest.mark.nightly
def test_more_labels_help_and_relevance_is_far_from_linear(whole: list[pa.Table]) -> None:
    """The purpose of the log: random < best single feature < trees on few labels, and linear on all < trees on all."""
    train, test = whole
    labels, bounds, values = test["label"].to_numpy(), offsets(test), features(test)
    chance = mean_ndcg(np.random.default_rng(0).random(len(test)), labels, bounds)
    filled = np.nan_to_num(np.concatenate([values, -values], axis=1), nan=-np.inf)
    single = max(mean_ndcg(column, labels, bounds) for column in filled.T)
    few, plenty = trees(train, test, 50), trees(train, test, 1000)
    assert chance < 0.33 < single - 0.05 < few - 0.05 < plenty - 0.1
    assert ridge(standardised(whole), whole, groups=1000, draws=1, penalty=100.0) < plenty - 0.1
    assert plenty > 0.55


@pytest.mark.slow
def test_groups_without_labels_reveal_what_few_labels_need(whole: list[pa.Table]) -> None:
    """Clusters of the features' joint distribution, found without labels, serve few labels better than the features."""
    raw = standardised(whole)
    found = closeness_to_clusters(*raw)
    few = {"groups": 75, "draws": 8}
    assert ridge(found, whole, **few, penalty=1.0) > ridge(raw, whole, **few, penalty=100.0) + 0.06
    assert ridge(found, whole, groups=1000, draws=1, penalty=1.0) < trees(*whole, 1000) - 0.03
