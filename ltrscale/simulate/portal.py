"""A synthetic log of a news portal at any size, hour by hour, to try what depends on the number of lists.

A list has 4 to 20 articles, 11.5 on average. An article has four factors z and a section s; only s is written.

    h = tanh(z V + C_s),   f_j = g_j(w_j . h + 0.3 e_j)     features, where g_j makes a score, a count or a share   (1)
    r = A_s . z + 0.7 z_1 z_2 + 0.6 e                       an article is clicked if r is above 1.5                 (2)

A, C, V and w are drawn once for a seed, e is normal noise. So relevance is not linear in the features, and what a
factor is worth depends on the section. Values have two decimals or fewer, as logs do. Most lists lack their clicks.

Some rows are broken, as `prepare` rejects them: an id or a time is missing, a time is impossible, a value infinite, a
label negative, an article twice in its list; some lists lose all rows, and some return under the id of another. The
manifest counts all rows, and the broken ones by kind and by the rule that rejects them.

Each hour depends on the settings and its date alone. It is a committed directory, so an interrupted log resumes with
the missing hours. Shapes: N rows, Q lists, S sections, Z factors, H hidden values, F features.
"""

import datetime
import math
from collections import Counter
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from pydantic import Field

from ltrscale import storage
from ltrscale.arrays import Bools, Floats, Ints
from ltrscale.config import Config, Operational
from ltrscale.errors import InputError
from ltrscale.origin import is_current, made_by
from ltrscale.progress import Report, log
from ltrscale.stages.stage import Origin, Stage
from ltrscale.stages.tasks import Task, TaskWorkersConfig, run_all

_VERSION = {"generator": "1"}
"""Part of a log's identity: raise it when the same settings give other rows."""

RULES = {
    "no_id": "unparsable",
    "no_time": "unparsable",
    "impossible_time": "unparsable",
    "infinite": "infinite",
    "bad_label": "bad_label",
    "repeated": "duplicate_document",
    "returning": "returning_query",
}
"""The kinds of broken rows, and the rule by which `prepare` rejects each."""

_FORMAT = {"format": "ltrscale-log", "version": 1}
_ROWS = "rows.parquet"
N_FEATURES = 10
_WHOLE, _NO_ID, _NO_TIME, _IMPOSSIBLE, _INFINITE, _BAD_LABEL, _REPEATED, _RETURNING = range(len(RULES) + 1)
_SECTIONS, _FACTORS, _HIDDEN, _SOURCES = 12, 4, 8, 40
_SHORTEST, _LONGEST, _MIDDLE = 4, 20, 0.47
_ARTICLES = 9973  # of a day; a prime, so that steps through them do not repeat
_BAR = np.float32(1.5)  # about one article in nine is above it
_HOUR_MS = 3_600_000
_NEVER_MS = 2**62  # no calendar has such a year
_SCORES, _COUNTS = slice(0, 4), slice(4, 7)  # the other features are shares
_MISSING = 0.05  # of the last feature
_SCHEMA = pa.schema(
    [
        ("impression_id", pa.string()),
        ("article_id", pa.int64()),
        ("event_time", pa.timestamp("ms", tz="UTC")),
        ("clicked", pa.int8()),
        *((f"f_{j}", pa.float32()) for j in range(N_FEATURES)),
        ("c_section", pa.int8()),
        ("c_source", pa.int8()),
    ]
)


class PortalLogConfig(Config):
    """Size and properties of the log. An hour depends on its date and the settings, not on the other hours."""

    first_day: datetime.date = datetime.date(2026, 1, 5)
    """The first day, in UTC."""
    days: int = Field(default=70, ge=1)
    """Number of consecutive days, a file for each hour."""
    lists: int = Field(default=1_500_000, ge=1)
    """Lists of all hours; evenings have more than nights."""
    labelled: float = Field(default=0.01, ge=0, le=1)
    """Share of lists whose clicks are known, drawn at random."""
    broken: float = Field(default=0.02, ge=0, le=0.5)
    """Share of rows that are broken, about."""
    seed: int = Field(default=0, ge=0)
    """Seed of all random draws."""


class PortalLog(Stage):
    """Make the log of a news portal, of any size."""

    stage: ClassVar = "portal_log"
    log: PortalLogConfig = PortalLogConfig()
    ray: Operational[bool] = False
    """Make the days in parallel on a Ray cluster; the output is the same."""

    def inputs(self) -> dict[str, str]:
        """The version of the generator."""
        return _VERSION

    def work(self, origin: Origin, report: Report) -> None:
        """Write the hours that are missing, then commit the log."""
        failures: list[str] = []

        def ended(task: Task, failure: str | None, seconds: float) -> None:
            log.info("%s: %s in %.1f s", self.stage, task.name, seconds)
            failures.extend([failure] if failure else [])

        days = [self.log.first_day + datetime.timedelta(days=i) for i in range(self.log.days)]
        tasks = [Task(f"{day}", partial(_write_day, self.log, self.out, i)) for i, day in enumerate(days)]
        run_all(tasks, TaskWorkersConfig(number=None if self.ray else 0), ended)
        if failures:
            raise InputError(failures[0])
        names = [_name(self.log, hour) for hour in range(24 * self.log.days)]
        hours = storage.at_once(_manifest_of, [storage.join(self.out, name) for name in names])
        account = _total([hour["account"] for hour in hours])
        files = [
            {**file, "path": f"{name}/{file['path']}"}
            for name, hour in zip(names, hours, strict=True)
            for file in hour["files"]
        ]
        with storage.Commit(self.out) as commit:
            commit.finish({**_FORMAT, "files": files, "account": account, "made_by": origin})
        report({"stage": self.stage, **account})


def _total(accounts: list[dict[str, Any]]) -> dict[str, Any]:
    plain: Counter[str] = Counter()
    nested: dict[str, Counter[str]] = {"broken": Counter(), "rejected": Counter()}
    for account in accounts:
        plain.update({key: value for key, value in account.items() if key not in nested})
        for key, counter in nested.items():
            counter.update(account[key])
    return {**plain, **{key: dict(sorted(counter.items())) for key, counter in nested.items()}}


def _name(config: PortalLogConfig, hour: int) -> str:
    """The directory of an hour, counted from the first one."""
    day = config.first_day + datetime.timedelta(days=hour // 24)
    return f"day={day}/hour={hour % 24:02}"


def _manifest_of(url: str) -> dict[str, Any]:
    manifest = storage.read_manifest(url)
    if manifest is None:
        raise InputError(f"{url}: no log is committed there; run the same command again")
    return manifest


def _write_day(config: PortalLogConfig, out: str, day: int) -> None:
    """Commit the missing hours of a day."""
    origin = made_by("portal_hour", config, _VERSION)
    for hour in range(24 * day, 24 * day + 24):
        place = storage.join(out, _name(config, hour))
        if is_current(place, origin):
            continue
        table, account = _hour_of(config, hour)
        with storage.Commit(place) as commit:
            with commit.file(_ROWS) as path:
                pq.write_table(table, path, compression="zstd")
            commit.finish({**_FORMAT, "account": account, "made_by": origin})


class _World(NamedTuple):
    """The constants of all hours."""

    shown_ZH: Floats
    section_SH: Floats
    feature_HF: Floats
    worth_SZ: Floats


def _world(seed: int) -> _World:
    rng = default_rng([seed])
    worth_SZ = rng.normal(0, 1, (_SECTIONS, _FACTORS))
    feature_HF = rng.normal(0, 1, (_HIDDEN, N_FEATURES))
    arrays = (
        rng.normal(0, 0.7, (_FACTORS, _HIDDEN)),
        rng.normal(0, 0.7, (_SECTIONS, _HIDDEN)),
        feature_HF / np.linalg.norm(feature_HF, axis=0),
        worth_SZ / np.linalg.norm(worth_SZ, axis=1, keepdims=True),
    )
    return _World(*(array.astype(np.float32) for array in arrays))


def _lists_before(config: PortalLogConfig, hour: int) -> int:
    """Lists before an hour: in proportion to the hours' weights, which rise by half in the evening."""
    weights = [1 + 0.5 * math.sin(2 * math.pi * (h - 12) / 24) for h in range(24)]  # they sum to 24
    days, of_day = divmod(hour, 24)
    return round(config.lists * (days * 24 + sum(weights[:of_day])) / (24 * config.days))


def _hour_of(config: PortalLogConfig, hour: int) -> tuple[pa.Table, dict[str, Any]]:
    """The rows of an hour, counted from the first one, in order of time, and their account."""
    start = datetime.datetime.combine(config.first_day, datetime.time(), datetime.UTC) + datetime.timedelta(hours=hour)
    absolute = int(start.timestamp()) // 3600
    rng = default_rng([config.seed, absolute])
    n_lists = _lists_before(config, hour + 1) - _lists_before(config, hour)
    lengths_Q = rng.binomial(_LONGEST - _SHORTEST, _MIDDLE, n_lists) + _SHORTEST
    list_N = np.repeat(np.arange(n_lists), lengths_Q)
    place_N = np.arange(len(list_N)) - np.repeat(np.cumsum(lengths_Q) - lengths_Q, lengths_Q)
    features_NF, section_N, clicked_N = _draw(_world(config.seed), rng, len(list_N))
    kind_N = _kinds(config.broken, rng, list_N, place_N, n_lists)

    first_Q, step_Q = rng.integers(0, _ARTICLES, n_lists), rng.integers(1, _ARTICLES, n_lists)
    steps_N = np.where(kind_N == _REPEATED, 0, place_N)  # the article of the list's first row, which is never broken
    article_N = absolute // 24 * 10_000 + (first_Q[list_N] + step_Q[list_N] * steps_N) % _ARTICLES
    id_N = np.where(kind_N == _RETURNING, list_N - 2, list_N)
    ids_Q = pa.array([f"{start:%Y%m%d%H}-{q:06}" for q in range(n_lists)], pa.string())
    time_N = absolute * _HOUR_MS + np.sort(rng.integers(0, _HOUR_MS, n_lists))[list_N]
    time_N[kind_N == _IMPOSSIBLE] = _NEVER_MS
    infinite = np.flatnonzero(kind_N == _INFINITE)
    features_NF[infinite, infinite % N_FEATURES] = np.inf
    known_Q = rng.random(n_lists) < config.labelled
    clicked_N[kind_N == _BAD_LABEL] = -1

    columns = [
        ids_Q.take(pa.array(id_N, mask=kind_N == _NO_ID)),
        pa.array(article_N),
        pa.array(time_N, mask=kind_N == _NO_TIME).cast(_SCHEMA.field("event_time").type),
        pa.array(clicked_N, mask=~known_Q[list_N] & (kind_N != _BAD_LABEL)),
        *(pa.array(column, from_pandas=True) for column in features_NF.T),
        pa.array(section_N.astype(np.int8)),
        pa.array((rng.random(len(list_N), np.float32) ** 2 * _SOURCES).astype(np.int8)),
    ]
    return pa.table(columns, schema=_SCHEMA), _account(kind_N, place_N, lengths_Q, known_Q)


def _draw(world: _World, rng: Generator, n: int) -> tuple[Floats, Ints, NDArray[np.int8]]:
    """Features by formula (1), sections, and clicks by formula (2)."""
    factors_NZ = rng.standard_normal((n, _FACTORS), np.float32)
    section_N = rng.integers(0, _SECTIONS, n)
    hidden_NH = np.tanh(factors_NZ @ world.shown_ZH + world.section_SH[section_N])
    view_NF = hidden_NH @ world.feature_HF
    view_NF += np.float32(0.3) * rng.standard_normal((n, N_FEATURES), np.float32)
    features_NF = np.asfortranarray(view_NF)  # each column is handled alone
    features_NF[:, _SCORES] = np.round(features_NF[:, _SCORES] * 50) / 50
    features_NF[:, _COUNTS] = np.floor(np.exp(1 + features_NF[:, _COUNTS]))
    shares_NF = features_NF[:, _COUNTS.stop :]
    shares_NF[:] = np.round(100 / (1 + np.exp(-shares_NF))) / 100
    shares_NF[rng.random(n, np.float32) < _MISSING, -1] = np.nan

    worth_N = (world.worth_SZ[section_N] * factors_NZ).sum(1) + np.float32(0.7) * factors_NZ[:, 0] * factors_NZ[:, 1]
    worth_N += np.float32(0.6) * rng.standard_normal(n, np.float32)
    return features_NF, section_N, (worth_N > _BAR).astype(np.int8)


def _kinds(broken: float, rng: Generator, list_N: Ints, place_N: Ints, n_lists: int) -> NDArray[np.int8]:
    """What is wrong with each row, if anything; the first row of a list is broken only if the whole list is."""
    kind_N = np.zeros(len(list_N), np.int8)
    rows = np.flatnonzero((rng.random(len(list_N), np.float32) < 0.93 * broken) & (place_N > 0))
    kind_N[rows] = rng.integers(_NO_ID, _RETURNING, len(rows))
    lists = np.arange(3, n_lists, 4)  # so that the list whose id returns is whole, as is one between
    lists = lists[rng.random(len(lists)) < 0.6 * broken]
    kind_Q = np.zeros(n_lists, np.int8)
    kind_Q[lists] = rng.choice([_IMPOSSIBLE, _INFINITE, _RETURNING], len(lists))
    return np.where(kind_Q[list_N] > 0, kind_Q[list_N], kind_N)


def _account(kind_N: NDArray[np.int8], place_N: Ints, lengths_Q: Ints, known_Q: Bools) -> dict[str, Any]:
    """The counts of an hour: rows and lists, and the broken rows by kind and by the rule that rejects them."""
    counts = np.bincount(kind_N, minlength=len(RULES) + 1)
    broken = {kind: int(n) for kind, n in zip(RULES, counts[1:], strict=True) if n}
    lost_Q = kind_N[place_N == 0] > 0
    rejected: Counter[str] = Counter()
    for kind, rows in broken.items():
        rejected[RULES[kind]] += rows
    return {
        "rows": len(kind_N),
        "rows_kept": int(counts[_WHOLE]),
        "lists": len(lengths_Q),
        "lists_kept": int((~lost_Q).sum()),
        "lists_labelled": int((known_Q & ~lost_Q).sum()),
        "broken": broken,
        "rejected": dict(rejected),
    }
