"""Features that the news portal's log counts by a program of its own come out of its clicks, to the last bit."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from news_log import NEWS

from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.ingest.prepare import PrepareJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEGMENTS = ("region", "device_group", "referrer_type", "environment")
ARTICLE = {"article_id": "article"}


def half_life(minutes: float) -> str:
    """That of a decay by 1 / e in so many minutes."""
    return f"{minutes * math.log(2):.15f}"[:17] + "m"


FEATURES: dict[str, tuple[dict[str, Any], float]] = {
    "clicks_total": ({"kind": "count", "of": "click", "by": ARTICLE}, 1),
    "idle_min": ({"kind": "last", "of": "click", "by": ARTICLE}, 60),
    "age_h": ({"kind": "first", "of": "click", "by": ARTICLE}, 3600),
    "position_mean": ({"kind": "rate", "of": "position", "by": ARTICLE}, 1),
    "entry_share": ({"kind": "rate", "of": "entry", "by": ARTICLE}, 1),
    "followed_share": ({"kind": "rate", "of": "followed", "per": "click", "by": ARTICLE}, 1),
    "dwell_mean_s": ({"kind": "rate", "of": "dwell", "by": ARTICLE}, 1),
    "engaged_share": ({"kind": "rate", "of": "engaged", "by": ARTICLE}, 1),
    **{
        f"pop_{name}": ({"kind": "count", "of": "click", "by": ARTICLE, "half_life": half_life(minutes)}, 1)
        for name, minutes in {"15m": 15, "1h": 60, "6h": 360, "24h": 1440}.items()
    },
    **{
        f"pop_{name}_6h": (
            {"kind": "count", "of": "click", "by": {**ARTICLE, f"c_{name}": name}, "half_life": half_life(360)},
            1,
        )
        for name in SEGMENTS
    },
}
"""The features of history, with the seconds of their units in the log."""


def write_events(news: Path, path: Path) -> None:
    """The clicks, and what each tells of the article that was read before."""
    made = importlib.import_module("make_log")
    clicks = made.prepare(made.read_clicks(news / "clicks"), 1)
    now = clicks.t < clicks.t[0] // made.HOUR * made.HOUR + 58 * made.HOUR
    of_article = {"at": clicks.t, "article": clicks.names[clicks.article], "position": clicks.position + 1}
    of_article |= {"click": 1, "entry": clicks.position == 0, **{name: clicks.context[name] for name in SEGMENTS}}
    measured = np.where(clicks.measured, clicks.gap, np.nan)
    dwell, engaged = np.minimum(measured / 1e3, made.DWELL_CAP_S), np.where(clicks.measured, measured >= 60_000, np.nan)
    of_last = {"at": clicks.t, "article": clicks.names[clicks.last], "followed": 1, "dwell": dwell, "engaged": engaged}
    tables = [pd.DataFrame(of_article)[now], pd.DataFrame(of_last)[now & (clicks.last >= 0)]]
    events = pd.concat(tables, ignore_index=True).astype({"entry": float})
    events["at"] = pd.to_datetime(events["at"], unit="ms")
    events.to_parquet(path)


@pytest.mark.nightly
def test_features_of_the_news_log_come_out(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    news = shared_data / "news"
    monkeypatch.syspath_prepend(news)
    write_events(news, tmp_path / "events.parquet")
    history = {"events": str(tmp_path / "events.parquet"), "time": "at", "step": "1m"}
    history["features"] = {f"h_{name}": settings for name, (settings, _) in FEATURES.items()}  # type: ignore[assignment]
    source = {"kind": "items", "columns": NEWS, "history": history}
    prepare = {"inputs": str(news / "sample"), "source": source}
    validate(PrepareJob, {"out": str(tmp_path / "out"), "prepare": prepare}, "test").run()
    names = [feature.name for feature in open_dataset(str(tmp_path / "out")).manifest.features]
    selection = select(Split(data=(str(tmp_path / "out"),)), labelled=False)
    found_NF = np.concatenate([batch.features_NF.numpy() for batch in iterate(selection)])
    assert len(found_NF) > 12_000
    unlike = {}
    for name, (_, unit) in FEATURES.items():
        ours_N, theirs_N = (found_NF[:, names.index(start + name)] for start in ("h_", "f_"))
        ours_N = np.float32(np.float64(ours_N) / unit)
        if name.startswith("pop_"):  # the log has 0 for counts below a thousandth
            ours_N = np.where(ours_N < 1e-3, np.float32(0), ours_N)
        unlike[name] = int((~((ours_N == theirs_N) | (np.isnan(ours_N) & np.isnan(theirs_N)))).sum())
    assert len(unlike) == 16
    assert not any(unlike.values())
