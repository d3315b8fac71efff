"""Sessions of users whose behaviour is known: rankers that move documents, position bias, noise and trust; as logs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ltrscale import storage
from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.clicks.models import Sessions
from ltrscale.data.dataset.manifest import Feature, Manifest
from ltrscale.data.dataset.summaries import LabelCounts
from ltrscale.data.dataset.writer import DatasetWriter


class Truth(NamedTuple):
    """Sessions, and how they came about."""

    sessions: Sessions
    examination_P: Doubles
    relevance_D: Doubles
    """Probability that a document is found relevant, without noise."""
    poor_P: Doubles
    """Probability of a click by position on an irrelevant document, relative to the first position."""


def position_based(
    seed: int,
    *,
    queries: int = 300,
    documents: int = 15,
    impressions: int = 60,
    positions: int = 10,
    eta: float = 1.0,
    noise: float = 0.1,
    trust: float = 0.0,
    jitter: float = 2.0,
    skill: float = 0.1,
) -> Truth:
    """A position-based user of a ranker that knows relevance up to noise of deviation `skill`, and moves documents."""
    rng = np.random.default_rng(seed)
    relevance_QD = rng.beta(1, 3, (queries, documents))
    place_QD = np.argsort(np.argsort(-(relevance_QD + rng.normal(0, skill, relevance_QD.shape)), axis=1), axis=1)
    moved_QID = place_QD[:, None] + jitter * rng.normal(size=(queries, impressions, documents))
    order_QIP = np.argsort(moved_QID, axis=2)[:, :, :positions]
    pairs_SP = (order_QIP + np.arange(queries)[:, None, None] * documents).reshape(-1, positions)
    place_P = np.arange(1, positions + 1)
    attraction_SP = noise + (1 - noise) * relevance_QD.ravel()[pairs_SP]
    examination_P, trust_P = (1 / place_P) ** eta, trust / place_P
    perceived_SP = trust_P + (1 - trust_P) * attraction_SP
    clicks_SP = rng.random(pairs_SP.shape) < examination_P * perceived_SP
    sessions = Sessions(pairs_SP, clicks_SP, np.repeat(np.arange(queries), impressions), queries * documents)
    poor_P = examination_P * (trust_P + (1 - trust_P) * noise)
    return Truth(sessions, examination_P, relevance_QD.ravel(), poor_P / max(poor_P[0], 1e-12))


def random_halves(sessions: Sessions, seed: int = 0) -> Bools:
    """Which sessions are in the first half."""
    return np.asarray(np.random.default_rng(seed).random(len(sessions)) < 0.5)


Row = Mapping[str, Any]


def rows_of(truth: Truth, *, periods: Sequence[str] = ("a", "b", "c"), relevant_from: float = 0.4) -> list[Row]:
    """The sessions as rows of a log with expert labels, spread over periods; the query is `meta_query`."""
    rows = []
    lists = zip(*(part.tolist() for part in vars_of(truth.sessions)), strict=True)
    for i, (pairs, clicks, query) in enumerate(lists):
        labels = (truth.relevance_D[pairs] > relevant_from).astype(float).tolist()
        at = {"query_id": f"s{i}", "period": periods[i % len(periods)], "meta_query": f"q{query}"}
        shown = {"doc_ids": [f"d{pair}" for pair in pairs], "positions": [p + 1.0 for p in range(len(pairs))]}
        rows.append({**at, **shown, "clicks": [float(c) for c in clicks], "labels": labels})
    return rows


def vars_of(sessions: Sessions) -> tuple[Ints, Bools, Ints]:
    """The arrays of sessions."""
    return sessions.pairs_SP, sessions.clicks_SP, sessions.queries_S


_LISTS = ("labels", "relevance", "positions", "clicks")


def write_log(url: str, rows: Sequence[Row], *, row_group_bytes: int = 8 << 20) -> str:
    """Commit rows with the feature `x`, 0 by default, as a data set; a column that a row lacks is null there."""
    types = {name: pa.list_(pa.float32()) for name in _LISTS} | {"doc_ids": pa.list_(pa.string())}
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in ("period", "x")]
    labels = LabelCounts()
    labels.add(np.array([y for row in rows for y in row.get("labels") or ()], np.float32))
    with storage.Commit(url) as commit:
        writer = DatasetWriter(commit, n_features=1, row_group_bytes=row_group_bytes)
        for period in dict.fromkeys(row["period"] for row in rows):
            own = [row for row in rows if row["period"] == period]
            columns = {name: pa.array([row.get(name) for row in own], types.get(name)) for name in names}
            columns["gid"] = pa.array([i for i, row in enumerate(rows) if row["period"] == period], pa.int64())
            values = [row.get("x", [0.0] * len(row["positions"] or row["labels"])) for row in own]
            columns["features"] = pa.array(values, pa.list_(pa.float32()))
            columns.setdefault("labels", pa.nulls(len(own), types["labels"]))
            writer.add(period, pa.table(columns))
        manifest = Manifest(features=(Feature(name="x"),), files=writer.close(), label_counts=labels.counts())
        commit.finish(manifest.model_dump(mode="json"))
    return url
