"""The synthetic log: laws of its rows, and that labels can be learnt from its features."""

import datetime
import itertools
from collections.abc import Mapping
from pathlib import Path

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from synthetic_columns import COLUMN_MAPPING

from ltrscale import storage
from ltrscale.config import load
from ltrscale.errors import InputError
from ltrscale.simulate.synthetic import SyntheticLogConfig, week_names, write_log

SMALL = SyntheticLogConfig(weeks=2, groups_per_week=300, n_features=20)


def written(config: SyntheticLogConfig, out: Path) -> list[pa.Table]:
    return [pq.read_table(path) for path in write_log(config, str(out), report=lambda _: None)]


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
    for path in write_log(config, str(tmp_path), report=lambda _: None):
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
    out = str(tmp_path)
    records: list[Mapping[str, object]] = []
    config = SMALL.replace(groups_per_week=5)
    files = write_log(config, out, report=records.append)
    assert [record["week"] for record in records] == ["2026-W01", "2026-W02"]
    before = [storage.fingerprint(file) for file in files]
    assert write_log(config, out, report=records.append) == files
    assert len(records) == 2
    assert before == [storage.fingerprint(file) for file in files]
    assert len(write_log(config.replace(weeks=1), out, report=records.append)) == 1
    assert not storage.exists(files[1])


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


def test_ratios_are_missing_together_for_unpopular_documents(tmp_path: Path) -> None:
    whole, values = (features(written(SMALL.replace(missing=m), tmp_path / str(m))[0]) for m in (0.0, 0.3))
    first, second = (f for f in range(20) if whole[:, f].max() == 1)
    assert np.corrcoef(np.isnan(values[:, [first, second]]).T)[0, 1] > 0.05


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
    assert week_names("2026-W01", 2) == ["2026-W01", "2026-W02"]


def mean_ndcg(scores: np.ndarray, labels: np.ndarray, bounds: np.ndarray, k: int = 5) -> float:
    values = []
    for a, b in itertools.pairwise(bounds):
        gains, discounts = 2.0 ** labels[a:b] - 1, 1 / np.log2(np.arange(2, b - a + 2)[:k])
        if gains.any():
            ranked = gains[np.argsort(-scores[a:b], kind="stable")][:k]
            values.append((ranked * discounts).sum() / (np.sort(gains)[::-1][:k] * discounts).sum())
    return float(np.mean(values))


def test_trees_learn_from_labels_and_more_labels_help(tmp_path: Path) -> None:
    """The purpose of the log: random < best single feature < trees on few labels < trees on all labels."""
    train, test = written(SMALL.replace(groups_per_week=800, labelled=1.0), tmp_path)
    train_labels, test_labels = train["label"].to_numpy(), test["label"].to_numpy()
    values, bounds = features(test), offsets(test)

    def trees(groups: int) -> float:
        rows = offsets(train)[groups]
        data = lightgbm.Dataset(
            features(train)[:rows], train_labels[:rows], group=np.diff(offsets(train)[: groups + 1])
        )
        settings = {"objective": "lambdarank", "num_leaves": 15, "verbose": -1, "num_threads": 1, "deterministic": True}
        return mean_ndcg(lightgbm.train(settings, data, 40).predict(values), test_labels, bounds)

    chance = mean_ndcg(np.random.default_rng(0).random(len(test)), test_labels, bounds)
    filled = np.nan_to_num(np.concatenate([values, -values], axis=1), nan=-np.inf)
    single = max(mean_ndcg(column, test_labels, bounds) for column in filled.T)
    scarce, plenty = trees(30), trees(800)
    assert chance < 0.35 < single < plenty - 0.05
    assert scarce + 0.03 < plenty
    assert plenty > 0.55
