"""The portal's log: the same bytes whatever interrupts it, labels that can be learnt, rows as `prepare` counts them."""

import datetime
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pytest
from preparing import prepare
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from ltrscale import storage
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.simulate.portal import RULES, PortalLog, PortalLogConfig, _hour_of, _lists_before

SMALL = PortalLogConfig(days=2, lists=4000, labelled=0.1)
COLUMNS = {
    "query": "impression_id",
    "item": "article_id",
    "label": "clicked",
    "time": "event_time",
    "period": "day",
    "features": ["f_*"],
    "categorical": ["c_*"],
}


def written(config: PortalLogConfig, out: Path) -> dict[str, bytes]:
    PortalLog(out=str(out), log=config).run()
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("*/*/*.parquet"))}


def account_of(log: Path) -> dict[str, Any]:
    manifest = storage.read_manifest(str(log))
    assert manifest is not None
    account: dict[str, Any] = manifest["account"]
    return account


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("portal") / "log"
    written(SMALL, out)
    return out


@pytest.mark.parametrize("lists", [5, 47, 4000, 1_500_000, 35_000_000])
def test_hours_share_all_lists_and_evenings_have_most(lists: int) -> None:
    config = PortalLogConfig(lists=lists)
    bounds = [_lists_before(config, hour) for hour in range(24 * 70 + 1)]
    assert (bounds[0], bounds[-1]) == (0, lists)
    per_hour = np.diff(bounds).reshape(70, 24)
    assert per_hour.min() >= 0
    if lists > 100_000:
        assert (per_hour.argmax(1) == per_hour.sum(0).argmax()).all()
        assert per_hour.sum(0).argmax() in (17, 18)


@pytest.mark.slow
def test_prepare_keeps_and_rejects_what_the_log_says(log: Path, tmp_path: Path) -> None:
    config = PrepareConfig(inputs=f"{log}/*/*/*.parquet", source={"kind": "items", "columns": COLUMNS}, max_rejected=1)
    manifest = prepare(config, str(tmp_path / "data")).manifest
    said, counted = account_of(log), manifest.accounting
    assert said["broken"].keys() == RULES.keys()
    assert 0.015 < 1 - said["rows_kept"] / said["rows"] < 0.025
    assert (counted.rows_in, counted.rows_kept, counted.rules) == (said["rows"], said["rows_kept"], said["rejected"])
    assert (counted.groups_in, counted.groups_kept) == (said["lists"], said["lists_kept"])
    assert said["lists_kept"] < said["lists"] == 4000
    assert manifest.counts().labelled == said["lists_labelled"]
    assert manifest.periods == ["2026-01-05", "2026-01-06"]


@pytest.mark.slow
def test_a_log_that_was_interrupted_goes_on_with_the_missing_hours(log: Path, tmp_path: Path) -> None:
    whole = written(SMALL, tmp_path / "log")
    assert whole == {name: (log / name).read_bytes() for name in whole}
    assert len(whole) == 48
    kept, lost = (tmp_path / "log" / name for name in ("day=2026-01-05/hour=03", "day=2026-01-06/hour=10"))
    before = (kept / "rows.parquet").stat().st_mtime_ns
    (lost / "manifest.json").unlink()
    (lost / "rows.parquet").write_bytes(b"cut off")
    (tmp_path / "log" / "manifest.json").unlink()
    assert written(SMALL, tmp_path / "log") == whole
    assert (kept / "rows.parquet").stat().st_mtime_ns == before
    assert account_of(tmp_path / "log") == account_of(log)
    assert not PortalLog(out=str(tmp_path / "log"), log=SMALL).run()


def test_days_do_not_depend_on_the_days_before_and_seeds_differ() -> None:
    config = PortalLogConfig(days=4, lists=4000)
    late = config.replace(first_day=datetime.date(2026, 1, 7), days=2, lists=2000)
    assert _hour_of(config, 48 + 5)[0].equals(_hour_of(late, 5)[0])
    assert not _hour_of(config, 5)[0].equals(_hour_of(config.replace(seed=1), 5)[0])


def test_lists_have_4_to_20_articles_of_two_decimals() -> None:
    table, account = _hour_of(PortalLogConfig(days=1, lists=24_000, broken=0), 12)
    ids = table["impression_id"].to_numpy()
    lengths = np.diff(np.r_[0, np.flatnonzero(ids[1:] != ids[:-1]) + 1, len(ids)])
    assert len(lengths) == account["lists"] == account["lists_kept"]
    assert lengths.min() >= 4
    assert lengths.max() <= 20
    assert 11 < lengths.mean() < 12
    assert account["rows"] == account["rows_kept"] == len(table)
    assert not account["broken"]
    values = np.stack([table[f"f_{j}"].to_numpy() for j in range(10)])
    assert np.nanmax(np.abs(np.round(values * 100) - values * 100) / (1 + np.abs(values))) < 1e-3


@pytest.mark.slow
def test_clicks_can_be_learnt_and_not_by_a_line() -> None:
    config = PortalLogConfig(days=2, lists=8000, broken=0, labelled=1)
    train, test = ([_hour_of(config, 24 * day + h)[0] for h in range(24)] for day in (0, 1))

    def arrays(tables: list[pa.Table]) -> tuple[np.ndarray, np.ndarray]:
        names = [*(f"f_{j}" for j in range(10)), "c_section"]
        return (
            np.concatenate([np.column_stack([t[name].to_numpy() for name in names]) for t in tables]),
            np.concatenate([t["clicked"].to_numpy() for t in tables]),
        )

    (x, y), (test_x, test_y) = arrays(train), arrays(test)
    assert 0.08 < y.mean() < 0.16
    trees = lightgbm.LGBMClassifier(n_estimators=100, num_leaves=31, verbose=-1, n_jobs=1).fit(x, y)
    line = LogisticRegression(max_iter=200).fit(np.nan_to_num(x), y)
    by_trees = roc_auc_score(test_y, trees.predict_proba(test_x)[:, 1])
    by_line = roc_auc_score(test_y, line.predict_proba(np.nan_to_num(test_x))[:, 1])
    assert by_trees > 0.75
    assert by_trees > by_line + 0.1
