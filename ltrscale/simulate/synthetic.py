"""A synthetic search log, so that everything can be tried without a download.

It imitates the search of a shop. A query has an intent i (buy, compare, find an accessory). A document has a kind k
(the product itself, a newer model, an accessory, a spare part), a seller, and four factors x: quality, popularity,
youth and price. Of these only the seller is written.

    r   = A[i, k] + b_k . x              relevance: what a kind is worth to an intent, and slopes of its own     (1)
    f_j = g_j(w_j . tanh(V [u, x] + v) + s_j e_j),    u = m_k + 0.1 e            numeric features                (2)

A, b, m, V, v and w are drawn once for a seed, e is normal noise. V and w are sparse: a feature shows three of the 24
hidden values, and a hidden value depends on four of the seven entries of place u and factors x. g_j makes a score, a
count, an amount, a ratio or a plain number. Some features show the intent and are constant in a list, and some are pure
noise. The label is the grade of r plus noise. So relevance is far from linear in the features: the sign of a factor
depends on the kind, and no single feature reveals the kind. Yet documents of a kind lie close together in the joint
distribution of all features: groups without labels can teach an encoder what a kind is, and few labels can then teach
what it is worth. Unlabelled groups come from the same distribution, and no feature is computed from the label. The
shares of categories, and with them of intents, drift in time. The seller nearly identifies a document within its list,
as columns of real logs do: views for a contrast should hide it.

Nothing here is fitted to real traffic: use it to check that a pipeline works and how methods react to scarce labels,
not to claim that one method is better.

Shapes: N documents, Q queries, F numeric features, C categories, I intents, K kinds, P entries of the place, X factors,
Z = P + X, H hidden values, S sellers, G grades above 0.
"""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import Generator, default_rng
from pydantic import Field, field_validator

from ltrscale import storage
from ltrscale.arrays import Doubles, Ints
from ltrscale.config import Config
from ltrscale.origin import is_current, made_by
from ltrscale.progress import Report, log
from ltrscale.stages.stage import Origin, Stage

GENERATOR = {"generator": "2"}
"""Part of a log's identity: raise it when the same settings give other rows."""

_INTENTS, _KINDS = 4, 12
_PLACE, _FACTORS = 3, 4  # entries of the place, which reveals the kind, and of the factors
_WITHIN = 0.1  # spread of places within a kind
_HIDDEN = 24
_SELLERS = 400
_CATEGORIES = ("audio", "books", "clothing", "garden", "games", "kitchen", "phones", "sports", "tools", "toys")
_DEVICES = ("desktop", "phone", "tablet")
_GRADE_SHARES = (0.24, 0.11, 0.05, 0.015)  # documents of at least grade 1, 2, 3, 4 if the query has an answer
_BLOCK = 1024  # queries drawn at once, and a Parquet row group
_FLAG = 1e6  # the value that a broken upstream job writes for "unknown"
_DAY_MS = 24 * 3600 * 1000

# Families of numeric features, and the sequence in which the columns get them.
_SCORE, _COUNT, _AMOUNT, _RATIO, _PLAIN, _QUERY, _NOISE = range(7)
_DEAL = (_SCORE, _COUNT, _AMOUNT, _RATIO, _PLAIN, _SCORE, _COUNT, _QUERY, _AMOUNT, _NOISE)


class SyntheticLogConfig(Config):
    """Size and properties of a synthetic log. A week depends on its name and the settings, not on the other weeks."""

    first_week: str = "2026-W01"
    """First ISO week."""
    weeks: int = Field(default=8, ge=1)
    """Number of consecutive weeks, one Parquet file each."""
    groups_per_week: int = Field(default=1500, ge=1)
    """Queries a week."""
    mean_documents: float = Field(default=16.0, ge=1)
    """Mean length of a list; lengths are lognormal, at least 1."""
    max_documents: int = Field(default=200, ge=1)
    """Longest list; longer draws are cut."""
    n_features: int = Field(default=40, ge=1)
    """Number of numeric features; there are three categorical ones besides."""
    missing: float = Field(default=0.06, ge=0, le=0.4)
    """Mean share of missing numeric values; ratios are missing more often for unpopular documents."""
    outliers: float = Field(default=0.02, ge=0, le=1)
    """Share of queries in which a few features are broken: the value 1e6 for unknown, or a wrong scale."""
    labelled: float = Field(default=0.5, ge=0, le=1)
    """Share of queries that have labels, drawn at random."""
    unanswered: float = Field(default=0.08, ge=0, le=0.9)
    """Share of queries without any relevant document; some short lists have none either."""
    noise: float = Field(default=0.5, ge=0)
    """Standard deviation of the labels' noise, in standard deviations of relevance."""
    seed: int = Field(default=0, ge=0)
    """Seed of all random draws."""

    @field_validator("first_week")
    @classmethod
    def _is_a_week(cls, value: str) -> str:
        _monday(value)
        return value


class SyntheticLog(Stage):
    """Make a synthetic log."""

    stage: ClassVar = "synthetic_log"
    makes_data: ClassVar = True
    log: SyntheticLogConfig

    def inputs(self) -> dict[str, str]:
        """The version of the generator."""
        return GENERATOR

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Write the files."""
        write_log(self.log, self.out, report=report)


def write_log(config: SyntheticLogConfig, out: str, *, report: Report) -> list[str]:
    """Write the log as Parquet with one item per row, `week=2026-W01/part-0.parquet` etc.; returns the files' URLs.

    Rows of a query are adjacent, and queries are in order of time. Columns: `query_id`, `item_id`, `event_time` (ms,
    UTC), `label` (0 to 4, null in an unlabelled query), `f_*` numeric, `c_*` categorical. Memory does not grow with
    the number of queries. If the same log is already committed, nothing is written.
    """
    origin = made_by("synthetic_log", config, GENERATOR)
    weeks = week_names(config.first_week, config.weeks)
    names = [f"week={week}/part-0.parquet" for week in weeks]
    files = [storage.join(out, name) for name in names]
    if is_current(out, origin):
        log.info("synthetic log: %s is up to date", out)
        return files
    world = _make_world(config)
    with storage.Commit(out) as commit:
        for week, name in zip(weeks, names, strict=True):
            with commit.file(name) as path:
                report({"stage": "simulate", "week": week, **_write_week(config, world, week, path)})
        commit.finish({"format": "ltrscale-log", "version": 1, "made_by": origin})
    return files


def week_names(first: str, weeks: int) -> list[str]:
    """Consecutive ISO weeks.

    Example:
        >>> week_names("2026-W52", 3)
        ['2026-W52', '2026-W53', '2027-W01']
    """
    monday = _monday(first)
    return [(monday + datetime.timedelta(weeks=i)).strftime("%G-W%V") for i in range(weeks)]


def _monday(week: str) -> datetime.date:
    try:
        return datetime.datetime.strptime(f"{week}-1", "%G-W%V-%u").replace(tzinfo=datetime.UTC).date()
    except ValueError as error:
        raise ValueError("not an ISO week; write it as 2026-W01") from error


def _write_week(config: SyntheticLogConfig, world: "_World", week: str, path: Path) -> dict[str, int]:
    """Write one week's file; returns the counts of its groups and documents."""
    schema = _schema(config)
    counts = {"groups": config.groups_per_week, "documents": 0, "labelled_documents": 0}
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in _draw_week(config, world, week, schema):
            counts["documents"] += len(table)
            counts["labelled_documents"] += len(table) - table["label"].null_count
            writer.write_table(table)
    return counts


def _schema(config: SyntheticLogConfig) -> pa.Schema:
    fields = {
        "query_id": pa.string(),
        "item_id": pa.string(),
        "event_time": pa.timestamp("ms", tz="UTC"),
        "label": pa.int8(),
        **{f"f_{j:02d}": pa.float32() for j in range(config.n_features)},
        "c_category": pa.string(),
        "c_device": pa.string(),
        "c_seller": pa.int32(),
    }
    return pa.schema(list(fields.items()))


@dataclass(frozen=True)
class _World:
    """The constants of all weeks: kinds, intents, sellers, how features show the factors, the threshold of a grade."""

    intent_CI: Doubles
    affinity_IK: Doubles
    slope_KX: Doubles
    centre_KP: Doubles
    quality_S: Doubles
    popularity_S: Doubles
    family_F: Ints
    hidden_ZH: Doubles
    shift_H: Doubles
    shown_HF: Doubles
    intent_IF: Doubles
    noise_F: Doubles
    scale_F: Doubles
    missing_F: Doubles
    location: float
    spread: float
    bars_G: Doubles


@dataclass(frozen=True)
class _Draw:
    """Queries and documents before features are measured: the latent factors and the values derived from them."""

    query_N: Ints
    intent_Q: Ints
    place_NP: Doubles
    factors_NX: Doubles
    category_N: Ints
    device_Q: Ints
    seller_N: Ints
    relevance_N: Doubles


def _make_world(config: SyntheticLogConfig) -> _World:
    rng = default_rng([config.seed])
    n_categories, f, z = len(_CATEGORIES), config.n_features, _PLACE + _FACTORS
    world = _World(
        intent_CI=rng.dirichlet(np.full(_INTENTS, 1.0), n_categories),
        affinity_IK=rng.normal(0, 1, _KINDS) + 0.4 * rng.normal(0, 1, (_INTENTS, _KINDS)),
        slope_KX=0.4 * rng.normal(0, 1, (_KINDS, _FACTORS)),
        centre_KP=rng.normal(0, 1, (_KINDS, _PLACE)),
        quality_S=rng.normal(0, 1, _SELLERS),
        popularity_S=1 / np.arange(1, _SELLERS + 1) ** 0.8,
        family_F=np.resize(_DEAL, f),
        hidden_ZH=_sparse(rng, (z, _HIDDEN), terms=4, scale=2.5),
        shift_H=rng.normal(0, 0.7, _HIDDEN),
        shown_HF=_sparse(rng, (_HIDDEN, f), terms=3, scale=1.5),
        intent_IF=rng.normal(0, 1, (_INTENTS, f)),
        noise_F=rng.uniform(0.1, 0.4, f),
        scale_F=np.exp(rng.normal(0, 2, f)),
        missing_F=np.minimum(rng.gamma(1.0, config.missing, f), 0.6),
        location=0.0,
        spread=1.0,
        bars_G=np.zeros(len(_GRADE_SHARES)),
    )
    return _calibrate(config, world, rng)


def _sparse(rng: Generator, shape: tuple[int, int], *, terms: int, scale: float) -> Doubles:
    """Random weights whose columns have this norm and this many terms that are not 0."""
    rank = rng.random(shape).argsort(axis=0).argsort(axis=0)
    weights = np.where(rank < terms, rng.normal(0, 1, shape), 0.0)
    return np.asarray(scale * weights / np.linalg.norm(weights, axis=0))


def _calibrate(config: SyntheticLogConfig, world: _World, rng: Generator) -> _World:
    """Standardise relevance and set the thresholds so that grades have their shares for any seed and noise."""
    draw = _draw(world, rng, np.full(2048, 16))
    location, spread = float(draw.relevance_N.mean()), float(draw.relevance_N.std())
    world = replace(world, location=location, spread=spread)
    noisy_N = _noisy(config, world, draw, rng, 2048)
    bars_G = np.quantile(noisy_N, 1 - np.array(_GRADE_SHARES))
    return replace(world, bars_G=bars_G)


def _draw(world: _World, rng: Generator, lengths_Q: Ints) -> _Draw:
    """Draw queries with lists of these lengths: intents, kinds and factors, and relevance, formula (1)."""
    n_queries, query_N = len(lengths_Q), np.repeat(np.arange(len(lengths_Q)), lengths_Q)
    n = len(query_N)
    category_Q = rng.choice(len(_CATEGORIES), n_queries, p=rng.dirichlet(np.full(len(_CATEGORIES), 5.0)))
    intent_Q = (world.intent_CI[category_Q].cumsum(1) < rng.random((n_queries, 1))).sum(1).clip(max=_INTENTS - 1)
    device_Q = rng.choice(len(_DEVICES), n_queries, p=(0.4, 0.5, 0.1))

    kind_N = rng.integers(0, _KINDS, n)
    place_NP = world.centre_KP[kind_N] + _WITHIN * rng.normal(0, 1, (n, _PLACE))
    seller_N = rng.choice(_SELLERS, n, p=world.popularity_S / world.popularity_S.sum())
    quality_N = 0.6 * world.quality_S[seller_N] + rng.normal(0, 0.8, n)
    youth_N = rng.normal(0, 1, n)
    popularity_N = 0.5 * quality_N - 0.4 * youth_N + rng.normal(0, 0.8, n)
    price_N = 0.4 * quality_N + rng.normal(0, 0.9, n)
    factors_NX = np.column_stack([quality_N, popularity_N, youth_N, price_N])

    relevance_N = world.affinity_IK[intent_Q[query_N], kind_N] + (world.slope_KX[kind_N] * factors_NX).sum(1)
    strange_N = rng.random(n) < 0.3  # retrieval returns documents of other categories, too
    category_N = np.where(strange_N, rng.integers(0, len(_CATEGORIES), n), category_Q[query_N])
    return _Draw(query_N, intent_Q, place_NP, factors_NX, category_N, device_Q, seller_N, relevance_N)


def _measure(world: _World, draw: _Draw, rng: Generator, lengths_Q: Ints) -> Doubles:
    """Numeric features, shape [N, F], formula (2); noise levels differ by document."""
    n, f = len(draw.query_N), len(world.family_F)
    of_query = world.family_F == _QUERY
    noise_NF = rng.normal(0, 1, (n, f)) * np.exp(rng.normal(0, 0.4, (n, 1)))
    noise_NF[:, of_query] = rng.normal(0, 1, (len(lengths_Q), int(of_query.sum())))[draw.query_N]
    hidden_NH = np.tanh(np.hstack([draw.place_NP, draw.factors_NX]) @ world.hidden_ZH + world.shift_H)
    view_NF = hidden_NH @ world.shown_HF
    view_NF[:, of_query] = world.intent_IF[:, of_query][draw.intent_Q[draw.query_N]]
    view_NF = np.clip(view_NF + world.noise_F * noise_NF, -6, 6)
    query_scale_N1 = np.exp(rng.normal(0, 0.5, len(lengths_Q)))[draw.query_N, None]

    features_NF = view_NF * world.scale_F
    score, count, amount, ratio, noise = (world.family_F == k for k in (_SCORE, _COUNT, _AMOUNT, _RATIO, _NOISE))
    features_NF[:, score] = np.logaddexp(0, 2 * view_NF[:, score]) * query_scale_N1
    features_NF[:, count] = rng.poisson(np.exp(1 + view_NF[:, count]))
    features_NF[:, amount] = np.exp(1.2 * view_NF[:, amount]) * world.scale_F[amount]
    events = 1 + rng.poisson(np.exp(2 + rng.normal(0, 1, (n, int(ratio.sum())))))
    features_NF[:, ratio] = rng.binomial(events, 1 / (1 + np.exp(-view_NF[:, ratio]))) / events
    features_NF[:, noise] = np.exp(noise_NF[:, noise]) * world.scale_F[noise]
    return features_NF


def _blank(features_NF: Doubles, world: _World, draw: _Draw, rng: Generator) -> None:
    """Remove values at random; ratios are missing more often in unpopular documents."""
    popularity_N = draw.factors_NX[:, 1]
    share_NF = np.broadcast_to(world.missing_F, features_NF.shape).copy()
    share_NF[:, world.family_F == _RATIO] *= (2 / (1 + np.exp(2 * popularity_N)))[:, None]
    features_NF[rng.random(features_NF.shape) < share_NF] = np.nan


def _break(features_NF: Doubles, config: SyntheticLogConfig, draw: _Draw, rng: Generator, n_queries: int) -> None:
    """Break a few features of some queries: the flag 1e6 in about half of the rows, or 1000 times the value in all."""
    f = config.n_features
    broken_QF = (rng.random((n_queries, 1)) < config.outliers) & (rng.random((n_queries, f)) < 2 / f)
    flagged_Q = rng.random(n_queries) < 0.5
    hit_NF = broken_QF[draw.query_N]
    flag_N1 = flagged_Q[draw.query_N, None]
    features_NF[hit_NF & ~flag_N1] *= 1000
    features_NF[hit_NF & flag_N1 & (rng.random(features_NF.shape) < 0.5)] = _FLAG


def _noisy(config: SyntheticLogConfig, world: _World, draw: _Draw, rng: Generator, n_queries: int) -> Doubles:
    """Standardised relevance with the labels' noise; some queries are easier than others."""
    standard_N = (draw.relevance_N - world.location) / world.spread
    ease_Q = rng.normal(0, 0.4, n_queries)
    return np.asarray(standard_N + ease_Q[draw.query_N] + rng.normal(0, config.noise, len(standard_N)))


def _grade(config: SyntheticLogConfig, world: _World, draw: _Draw, rng: Generator, n_queries: int) -> pa.Array:
    """Labels: the number of thresholds below the noisy relevance; all 0 in unanswered, null in unlabelled queries."""
    grade_N = (_noisy(config, world, draw, rng, n_queries)[:, None] > world.bars_G).sum(1)
    grade_N[(rng.random(n_queries) < config.unanswered)[draw.query_N]] = 0
    unlabelled_Q = rng.random(n_queries) >= config.labelled
    return pa.array(grade_N.astype(np.int8), mask=unlabelled_Q[draw.query_N])


def _draw_week(config: SyntheticLogConfig, world: _World, week: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """The week's rows, in blocks of queries; each block covers its own slice of the week's time."""
    monday = _monday(week)
    start_ms = (monday - datetime.date(1970, 1, 1)).days * _DAY_MS
    sigma = 0.7
    for first in range(0, config.groups_per_week, _BLOCK):
        n_queries = min(_BLOCK, config.groups_per_week - first)
        rng = default_rng([config.seed, monday.toordinal(), first])  # so a week does not depend on the others
        raw_Q = rng.lognormal(np.log(config.mean_documents) - sigma**2 / 2, sigma, n_queries)
        lengths_Q = np.clip(np.round(raw_Q), 1, config.max_documents).astype(np.int64)
        time_Q = (first + np.sort(rng.random(n_queries)) * n_queries) / config.groups_per_week * 7 * _DAY_MS

        draw = _draw(world, rng, lengths_Q)
        features_NF = _measure(world, draw, rng, lengths_Q)
        _blank(features_NF, world, draw, rng)
        _break(features_NF, config, draw, rng, n_queries)
        item_N = np.arange(len(draw.query_N)) - np.repeat(np.cumsum(lengths_Q) - lengths_Q, lengths_Q)
        query_id_Q = np.array([f"{week}-{first + q:07d}" for q in range(n_queries)])
        columns = [
            query_id_Q[draw.query_N],
            [f"{q}-{i:03d}" for q, i in zip(query_id_Q[draw.query_N], item_N, strict=True)],
            pa.array(start_ms + time_Q.astype(np.int64)[draw.query_N], schema.field("event_time").type),
            _grade(config, world, draw, rng, n_queries),
            *(pa.array(column.astype(np.float32), from_pandas=True) for column in features_NF.T),
            np.array(_CATEGORIES)[draw.category_N],
            np.array(_DEVICES)[draw.device_Q][draw.query_N],
            draw.seller_N,
        ]
        yield pa.table([pa.array(c).cast(t) for c, t in zip(columns, schema.types, strict=True)], schema=schema)
