"""Events become the rows that stand for them: as an oracle says, in any order, on any cut, after any stop."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import nightly
from preparing import prepare, rows_of
from pydantic import ValidationError
from reference.events import Event, Row, attributed, merged
from writer_tokens import manifest_without_writer

from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.times import instants, microseconds
from ltrscale.errors import InputError
from ltrscale.experiments.first.init import InitJob
from ltrscale.ingest import event_rows
from ltrscale.ingest.attribution import NAMED, by_query, by_session, database_of, rows_in_view
from ltrscale.ingest.event_rows import EventRows
from ltrscale.ingest.events import ACTS, LEFT, MADE, OWN, made_rows
from ltrscale.ingest.inputs import PrepareConfig, raw_files
from ltrscale.ingest.remarks import RejectedRowsError

TINY = 0.02
"""Megabytes of a unit so that there are several."""
TABLE = {
    "time": "time",
    "item": "item",
    "action": "act",
    "query": "query",
    "session": "session",
    "id": "id",
    "position": "position",
    "revenue": "revenue",
    "columns": ["f"],
    **{act: act for act in ACTS},
}
COLUMNS = {"query": "query", "item": "item", "time": "time", "label": "grade", "features": ["f"]}
WINDOW = 60


def of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


ids, sessions = of("q1", "q2", "q3", "q4", None), of("s1", "s2", None)
EVENTS = st.lists(
    st.builds(
        Event,
        act=of(*ACTS, "shown", "shown", "scroll"),
        query=ids,
        session=sessions,
        item=of("a", "b", "c", None),
        time=st.integers(0, 200).map(lambda second: second * 10**6),
        position=of(1.0, 2.0, None),
        revenue=of(0.5, 3.0, None),
        id=of("e1", None, None, None),
        f=of(0.0, 1.0, None),
    ),
    max_size=40,
)


def log_of(n: int, seed: int) -> list[Event]:
    """A log in which every reason and every act occurs."""
    rng = random.Random(seed)
    events = []
    for _ in range(n):
        act = rng.choices([*ACTS, "scroll"], [8, 3, 1, 1, 1])[0]
        query = (
            f"{'x' if act != 'shown' and rng.random() < 0.1 else 'q'}{rng.randrange(n // 8)}"
            if rng.random() < (0.95 if act == "shown" else 0.5)
            else None
        )
        session = f"s{rng.randrange(n // 30)}" if rng.random() < 0.95 else None
        item, time = f"i{rng.randrange(6)}" if rng.random() < 0.98 else None, rng.randrange(3000) * 10**6
        revenue = rng.randrange(100) / 8 if act == "order" else None
        events.append(
            Event(act, query, session, item, time, rng.choice([1.0, 2.0, 3.0, None]), revenue, f=rng.random())
        )
    return events + events[: n // 10]


def write_json(events: Sequence[Event], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({**each._asdict(), "time": each.time / 10**6}) + "\n" for each in events))


def config(inputs: Any, *, tables: Any = (TABLE,), columns: Any = COLUMNS, **settings: Any) -> PrepareConfig:
    source = {"kind": "events", "tables": tables, "columns": columns, "window_minutes": WINDOW / 60}
    source |= {name: settings.pop(name) for name in ("merge", "joins") if name in settings}
    return PrepareConfig.model_validate({"inputs": inputs, "source": source, **settings})


def table_of(db: duckdb.DuckDBPyConnection, view: str, schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([schema.empty_table(), *rows_in_view(db, view, schema)])


def rows_by_sql(events: Sequence[Event], folder: Path) -> tuple[list[Row], Counter[str]]:
    """The rows by the steps of `attribution`, and the events left over by them."""
    left, schema = Counter[str](), pa.schema([*OWN, ("f", pa.float64())])
    known = [each for each in events if each.act in ACTS and each.item is not None]
    values = []
    for each in known:
        query = each.query
        if each.act == "shown" and query is None and each.session is not None:
            query = f"{each.session}|{each.time}"
        if query is not None or (each.session is not None and each.act != "shown"):
            value = {**each._asdict(), "act": ACTS.index(each.act), "query": query, "file": 0, "line": 0}
            values.append({**value, "f": each.f if each.act == "shown" else None})
    table = pa.Table.from_pylist(values, schema)
    lists = [value for value in values if value["act"] == 0 or value["query"] is None]
    with database_of(pa.Table.from_pylist(lists, OWN).to_batches(), OWN, scratch=folder, memory_limit="200MB") as db:
        by_session(db, window=WINDOW * 10**6)
        found = table_of(db, "result", OWN)
        left.update(table_of(db, "left_over", LEFT)["reason"].to_pylist())
    (folder / "events.duckdb").unlink()
    known_N = pa.array([value["query"] is not None for value in values], pa.bool_())
    both = pa.concat_tables([table.filter(known_N), found], promote_options="default")
    of_rows = pa.schema([*NAMED, *MADE, ("f", pa.float64())])
    with database_of(both.to_batches(), schema, scratch=folder, memory_limit="200MB") as db:
        by_query(db, carried=1)
        made = table_of(db, "result", of_rows)
        left.update(table_of(db, "left_over", LEFT)["reason"].to_pylist())
    made = made.drop_columns(NAMED.names).set_column(3, "time", made["time"].cast(pa.int64()))
    return [Row(**row) for row in made.to_pylist()], left


@pytest.mark.slow
@given(EVENTS)
def test_steps_make_the_rows_of_the_oracle(events: list[Event]) -> None:
    shown = [each if each.act == "shown" else each._replace(f=None) for each in events]
    expected, left, _ = attributed(shown, WINDOW * 10**6)
    with storage.scratch.directory() as folder:
        rows, found = rows_by_sql(shown, folder)
    assert rows == expected
    assert found == Counter({reason: n for reason, n in left.items() if reason not in EARLY})


EARLY = {"other_action", "no_item", "no_query"}
"""Reasons that are found while files are read."""


def event_rows_of(inputs: Any, out: Path, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The rows that files become, in their order, and the counts."""
    made = config(inputs, **settings)
    job = EventRows(out=str(out), read=made.inputs, source=made.source, unit_mb=made.unit_mb, memory="300MB")  # type: ignore[arg-type]
    job.run()
    files, counts = made_rows(str(out))
    return [row for file in files for row in pq.ParquetFile(file.url).read().to_pylist()], counts


@pytest.mark.slow
def test_rows_and_counts_depend_on_neither_order_nor_files(tmp_path: Path) -> None:
    events = log_of(600, seed=0)
    rng = random.Random(1)
    expected, left, kept = attributed(
        [each if each.act == "shown" else each._replace(f=None) for each in events], WINDOW * 10**6
    )
    assert len(left) == 7
    assert set(kept) == set(ACTS)
    write_json(events, tmp_path / "whole" / "0.jsonl")
    whole, counts = event_rows_of(str(tmp_path / "whole"), tmp_path / "rows")
    for row in whole:
        row["time"] = round(row["time"].timestamp()) * 10**6
    assert [Row(**row) for row in whole] == expected
    events_left = {f"left_over_{reason}": n for reason, n in left.items()}
    assert counts == {**kept, **events_left, "in": len(events), "rows": len(expected),
                      "lists": len({row.query for row in expected})}  # fmt: skip
    rng.shuffle(events)
    for k in range(5):
        write_json(events[k::5], tmp_path / "shuffled" / f"{k}.jsonl")
    pq.write_table(
        pa.Table.from_pylist([], pa.schema([*OWN, ("f", pa.float64())])), tmp_path / "shuffled" / "5.parquet"
    )
    for unit_mb, name in ((256, "one"), (TINY, "many")):
        rows, same_counts = event_rows_of(str(tmp_path / "shuffled"), tmp_path / name, unit_mb=unit_mb)
        assert same_counts == counts
        for row in rows:
            row["time"] = round(row["time"].timestamp()) * 10**6
        assert (rows == whole) == (name == "one")
        assert sorted(rows, key=str) == sorted(whole, key=str)


@pytest.mark.slow
def test_one_list_of_those_that_are_equal(tmp_path: Path) -> None:
    """Lists of a name and period that differ in nothing but id, time and session are one, with their number."""
    rng, events, names = random.Random(3), list[Event](), dict[str, str | None]()
    for k in range(60):
        names[f"q{k}"] = rng.choice(["tv", "sofa", None])
        items = rng.sample("abc", 2)
        for place, item in enumerate(items, 1):
            events.append(Event("shown", f"q{k}", f"s{k}", item, k * 10**6, float(place)))
        if rng.random() < 0.4:
            events.append(Event("click", f"q{k}", None, items[0], k * 10**6))
        if rng.random() < 0.3:
            events.append(Event("shown", f"q{k}", f"s{k}", items[0], k * 10**6 + 1, 1.0))
    rows, _, _ = attributed(events, 0)
    path = tmp_path / "log" / "0.jsonl"
    write_json(events, path)
    lines = zip(path.read_text().splitlines(), events, strict=True)
    named = [json.loads(line) | {"text": names[each.query or ""]} for line, each in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in named))
    tables = [{**TABLE, "columns": ["f", "text"]}]
    for unit_mb in (256, 0.003):
        made, counts = event_rows_of(str(path), tmp_path / f"{unit_mb}", tables=tables, merge="text", unit_mb=unit_mb)
        expected = merged(rows, names)
        assert 10 < counts["merged"] == 60 - len({row.query for row in expected})
        weights = {(row["query"], row["item"]): row["weight"] for row in made}
        assert weights == {(row.query, row.item): row.weight for row in expected}


def same_data(one: Dataset, other: Dataset) -> None:
    """Check that two data sets have the same files, byte by byte, and the same statistics."""
    beside = {"made_by": {}, "raw": None}
    ours, theirs = (manifest_without_writer(each.manifest).model_copy(update=beside) for each in (one, other))
    without = [each.model_copy(update={"rules": {}}) for each in (ours.accounting, theirs.accounting)]
    assert without[0] == without[1]
    empty = {"accounting": without[0]}
    assert ours.model_copy(update=empty) == theirs.model_copy(update=empty)


UBI_QUERIES = """
{"application":"shop","query_id":"q1","client_id":"c1","timestamp":"2026-01-05T10:00:00.100Z","user_query":"tv","query_response_id":"r1","query_response_hit_ids":["a","b","c"],"object_id_field":"sku","query_attributes":{}}
{"application":"shop","query_id":"q2","client_id":"c1","timestamp":"2026-01-05T10:01:00Z","user_query":"tvv","query_response_id":"r2","query_response_hit_ids":[],"object_id_field":"sku","query_attributes":{}}
{"application":"shop","query_id":"q3","client_id":"c2","timestamp":"2026-01-12T10:02:00Z","user_query":"sofa","query_response_id":"r3","query_response_hit_ids":["b","a"],"object_id_field":"sku","query_attributes":{}}
"""
UBI_EVENTS = """
{"action_name":"click","query_id":"q1","client_id":"c1","session_id":"x","timestamp":"2026-01-05T10:00:05Z","message_type":"CLICK","message":"b","event_attributes":{"object":{"object_id":"b","object_id_field":"sku"},"position":{"ordinal":2}}}
{"action_name":"on_search","query_id":"q1","client_id":"c1","session_id":"x","timestamp":"2026-01-05T10:00:00Z","message_type":"QUERY","message":"tv","event_attributes":{}}
{"action_name":"purchase","client_id":"c1","session_id":"x","timestamp":"2026-01-05T10:00:55Z","event_attributes":{"object":{"object_id":"b"}}}
{"action_name":"add_to_cart","query_id":"q3","client_id":"c2","session_id":"y","timestamp":"2026-01-12T10:10:05Z","event_attributes":{"object":{"object_id":"a"}}}
{"action_name":"click","query_id":"q3","client_id":"c2","session_id":"y","timestamp":"2026-01-12T10:10:06Z","event_attributes":{"object":{"object_id":"z"}}}
"""
ROWS = """time,query,item,position,grade,user_query
2026-01-05T10:00:00Z,q1,a,1,0,tv
2026-01-05T10:00:00Z,q1,b,2,3,tv
2026-01-05T10:00:00Z,q1,c,3,0,tv
2026-01-12T10:02:00Z,q3,b,1,0,sofa
2026-01-12T10:02:00Z,q3,a,2,2,sofa
"""
CATALOGUE = "item,price\na,1.5\nb,2\nc,7\n"
OF_ROWS = {
    "query": "query",
    "item": "item",
    "time": "time",
    "label": "grade",
    "positions": "position",
    "features": ["price"],
    "meta": ["user_query"],
}


def from_rows(rows: str, joins: Any, folder: Path) -> Dataset:
    (folder / "rows.csv").write_text(rows)
    source = {"kind": "items", "columns": OF_ROWS, "joins": joins}
    return prepare(
        PrepareConfig.model_validate({"inputs": [str(folder / "rows.csv")], "source": source}), str(folder / "of-rows")
    )


def test_the_two_indices_of_ubi_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "ubi").mkdir()
    (tmp_path / "ubi" / "ubi_queries.jsonl").write_text(UBI_QUERIES.lstrip())
    (tmp_path / "ubi" / "ubi_events.jsonl").write_text(UBI_EVENTS.lstrip())
    (tmp_path / "catalogue.csv").write_text(CATALOGUE)
    with pytest.raises(InputError, match=r"events \(ubi\), not rows of items; write a prepare.yaml with source.kind"):
        InitJob(file=str(tmp_path / "ubi"), out=str(tmp_path / "first")).run()
    joins = [{"path": str(tmp_path / "catalogue.csv"), "key": "item", "columns": "price"}]
    made = prepare(config(str(tmp_path / "ubi"), tables="ubi", columns=OF_ROWS, joins=joins), str(tmp_path / "made"))
    same_data(made, from_rows(ROWS, joins, tmp_path))
    assert made.manifest.accounting.rules == {
        "events_in": 11,
        "events_shown": 5,
        "events_click": 1,
        "events_cart": 1,
        "events_order": 1,
        "events_left_over_no_item": 1,
        "events_left_over_other_action": 1,
        "events_left_over_not_shown": 1,
        "events_lists": 2,
        "events_rows": 5,
    }


def test_the_export_of_ga4_is_read_as_it_is(tmp_path: Path) -> None:
    def event(name: str, second: int, *items: dict[str, Any]) -> dict[str, Any]:
        values = {"event_name": name, "event_timestamp": (1767607200 + second) * 10**6, "user_pseudo_id": "u"}
        params = [{"key": "ga_session_id", "value": {"int_value": 7}}]
        return {**values, "platform": "WEB", "event_params": params, "items": list(items)}

    def item(name: str, place: str | None = None, price: float | None = None) -> dict[str, Any]:
        return {"item_id": name, "item_list_index": place, "price": price, "item_revenue": price}

    events = [
        event("page_view", 0),
        event("view_item_list", 1, item("a", "0", 1.5), item("b", "1", 2.0), item("c", "2", 7.0)),
        event("select_item", 5, item("b")),
        event("purchase", 55, item("b", price=2.0), item("x", price=1.0)),
        event("view_item_list", 7 * 86400, item("b", None, 2.0), item("a", "(not set)", 1.5)),
        event("add_to_cart", 7 * 86400 + 9, item("a")),
    ]
    pq.write_table(pa.Table.from_pylist(events), tmp_path / "events_20260105.parquet")
    with pytest.raises(InputError, match=r"events \(ga4\), not rows of items"):
        InitJob(file=str(tmp_path / "events_20260105.parquet"), out=str(tmp_path / "first")).run()
    columns = {**OF_ROWS, "meta": ["platform"]}
    made = prepare(config(str(tmp_path / "*.parquet"), tables="ga4", columns=columns), str(tmp_path / "made"))
    labels = [(row["doc_ids"], row["labels"], row["positions"], row["features"]) for row in rows_of(made)]
    assert labels == [
        (["a", "b", "c"], [0.0, 3.0, 0.0], [0.0, 1.0, 2.0], [1.5, 2.0, 7.0]),
        (["b", "a"], [0.0, 2.0], [1.0, 2.0], [2.0, 1.5]),
    ]
    assert made.manifest.accounting.rules["events_left_over_not_shown"] == 1


def news_events(rows: pa.Table, folder: Path, *, files: int) -> str:
    """The events of which the rows of the news log came: lists with their features, clicks, and orders if engaged."""
    rng = random.Random(0)
    ids = rows["impression_id"].to_pylist()
    places = [float(i) for _, same in groupby(ids) for i, _ in enumerate(same, 1)]
    names = [name for name in rows.column_names if name not in ("clicked", "engaged")]
    shown = rows.select(names).append_column("position", pa.array(places))
    tables = [shown.append_column("act", pa.array(["shown"] * len(shown)))]
    for label, act in (("clicked", "click"), ("engaged", "order")):
        its = shown.select(["impression_id", "session_id", "event_time", "article_id"]).filter(
            rows[label].cast(pa.bool_())
        )
        tables.append(its.append_column("act", pa.array([act] * len(its))))
    events = pa.concat_tables(tables, promote_options="default")
    order = list(range(len(events)))
    rng.shuffle(order)
    folder.mkdir()
    for k in range(files):
        pq.write_table(events.take(pa.array(order[k::files])), folder / f"{k}.parquet")
    return str(folder)


NEWS_TABLE = {
    "time": "event_time",
    "item": "article_id",
    "action": "act",
    "query": "impression_id",
    "session": "session_id",
    "position": "position",
    "columns": ["f_*", "c_*"],
    "shown": "shown",
    "click": "click",
    "order": "order",
}
NEWS_FEATURES = {"time": "time", "features": ["f_*"], "categorical": ["c_*"]}


@pytest.mark.slow
def test_the_news_log_comes_back_from_its_events(tmp_path: Path, shared_data: Path) -> None:
    log = shared_data / "news" / "sample" / "date=2017-10-03" / "hour=12" / "part-0.parquet"
    rows = pq.ParquetFile(log).read()
    columns = {"query": "query", "item": "item", "label": "click", **NEWS_FEATURES}
    inputs = news_events(rows, tmp_path / "events", files=3)
    made = prepare(config(inputs, tables=[NEWS_TABLE], columns=columns), str(tmp_path / "made"))
    of_rows = {
        "query": "impression_id",
        "item": "article_id",
        "label": "clicked",
        **NEWS_FEATURES,
        "time": "event_time",
    }
    source = {"kind": "items", "columns": of_rows}
    again = prepare(PrepareConfig.model_validate({"inputs": [str(log)], "source": source}), str(tmp_path / "of-rows"))
    same_data(made, again)
    assert made.manifest.accounting.rules["events_order"] == 175


class Interrupted(Exception):  # noqa: N818 - a stop is no error
    """What a signal does."""


@pytest.mark.slow
@pytest.mark.parametrize("saves", [nightly(1), nightly(7), 11])
def test_what_was_finished_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    for k in range(3):
        write_json(log_of(200, seed=k), tmp_path / "log" / f"{k}.jsonl")
    whole, counts = event_rows_of(str(tmp_path / "log"), tmp_path / "whole", unit_mb=0.01)
    monkeypatch.setattr(event_rows, "_SAVE_S", 0.0)
    run, save, done, saved = event_rows._run, storage.Commit.save, list[str](), list[None]()

    def save_and_stop(self: storage.Commit, *arguments: Any, **named: Any) -> None:
        save(self, *arguments, **named)
        saved.append(None)
        if len(saved) == saves:
            raise Interrupted

    def count(settings: Any, name: str, work: Any) -> Any:
        done.append(name)
        return run(settings, name, work)

    monkeypatch.setattr(event_rows, "_run", count)
    with monkeypatch.context() as patch:
        patch.setattr(storage.Commit, "save", save_and_stop)
        with pytest.raises(Interrupted):
            event_rows_of(str(tmp_path / "log"), tmp_path / "out", unit_mb=0.01)
    assert storage.read_manifest(str(tmp_path / "out")) is None
    assert event_rows_of(str(tmp_path / "log"), tmp_path / "out", unit_mb=0.01) == (whole, counts)
    assert sorted(done) == sorted({*done})
    assert {name.partition("-")[0] for name in done} == {"read", "session", "query"}
    listed = storage.sizes_in(str(tmp_path / "out"), storage.read_manifest(str(tmp_path / "out")) or {})
    below = {name for name in storage.below(str(tmp_path / "out")) if not name.startswith("run/")}
    assert below == {storage.MANIFEST, *listed}


@pytest.mark.slow
def test_a_file_that_comes_while_events_are_read_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another_file(job: EventRows) -> bool:
        write_json(log_of(60, seed=1), tmp_path / "log" / "0.jsonl")
        return run(job)

    run = EventRows.run
    write_json(log_of(60, seed=0), tmp_path / "log" / "1.jsonl")
    monkeypatch.setattr(EventRows, "run", with_another_file)
    counted = [
        prepare(config(str(tmp_path / "log"), max_rejected=1), str(tmp_path / "out")).manifest.accounting.rules
        for _ in range(2)
    ]
    assert [rules["events_in"] for rules in counted] == [66, 132]


def data_of(dataset: Dataset) -> list[bytes]:
    return [storage.read_bytes(storage.join(dataset.url, file.path)) for file in dataset.manifest.files]


@pytest.mark.slow
def test_late_events_join_their_period_by_a_new_commit(tmp_path: Path) -> None:
    events = [each for each in log_of(400, seed=5) if each.act == "shown" or each.query]
    cut = sorted({each.query or f"{each.session}|{each.time}" for each in events})[20]
    early, late = (
        [each for each in events if (each.query or f"{each.session}|{each.time}") < cut]
        if first
        else [each for each in events if (each.query or f"{each.session}|{each.time}") >= cut]
        for first in (True, False)
    )
    write_json(early, tmp_path / "log" / "0.jsonl")
    first = prepare(config(str(tmp_path / "log" / "0.jsonl")), str(tmp_path / "out"))
    write_json(late, tmp_path / "log" / "1.jsonl")
    both = prepare(config(str(tmp_path / "log")), str(tmp_path / "both"))
    again = prepare(config(str(tmp_path / "log" / "1.jsonl"), add=True), str(tmp_path / "out"))
    assert len(first.manifest.periods) == len(again.manifest.periods) == 1
    assert data_of(again)[: len(first.manifest.files)] == data_of(first)
    without = [[{k: v for k, v in row.items() if k != "gid"} for row in rows_of(each)] for each in (again, both)]
    assert sorted(without[0], key=str) == sorted(without[1], key=str)
    assert again.manifest.accounting.rules == both.manifest.accounting.rules
    # the late events of lists that are there need all files: then nothing says that they came late
    write_json(events[::-1], tmp_path / "once" / "0.jsonl")
    same_data(both, prepare(config(str(tmp_path / "once")), str(tmp_path / "at-once")))
    write_json([each for each in late if each.act != "shown"], tmp_path / "goals" / "0.jsonl")
    with pytest.raises(InputError, match="no item is shown"):
        prepare(config(str(tmp_path / "goals"), add=True), str(tmp_path / "out"))


@pytest.mark.s3
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_ray_on_s3_gives_the_bytes_of_one_process(tmp_path: Path, s3: str) -> None:
    for k in range(3):
        write_json(log_of(200, seed=k), tmp_path / "log" / f"{k}.jsonl")
        storage.write_bytes(f"{s3}/events/{k}.jsonl", (tmp_path / "log" / f"{k}.jsonl").read_bytes())
    one = prepare(config(str(tmp_path / "log"), unit_mb=0.01), str(tmp_path / "one"))
    other = prepare(config(f"{s3}/events", unit_mb=0.01), f"{s3}/data", ray=True)
    same_data(one, other)
    assert one.manifest.accounting == other.manifest.accounting


def test_tables_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for change, message in (
        ({"action": None}, "give every or action"),
        ({"every": "shown"}, "give every or action"),
        ({"click": [], "cart": [], "order": [], "shown": []}, "with its values"),
        ({"position": "items[].place"}, "in the list of item"),
        ({"columns": {"weight": "w"}}, "'weight' is a column that events make"),
        ({"item": "items[].id", "columns": {"price": "prices[].value"}}, "in the list of item"),
        ({"item": "orders[].items[].id"}, "a list within a list cannot be read"),
    ):
        with pytest.raises(ValidationError, match=message):
            config("x", tables=[{**TABLE, **change}])
    with pytest.raises(ValidationError, match="'text' is not under columns"):
        config("x", merge="text")
    with pytest.raises(ValidationError, match="leave period out"):
        config({"path": "x", "period": "train"})
    (tmp_path / "log.jsonl").write_text('{"when": 1}\n')
    with pytest.raises(InputError, match="its columns when; each needs time, item, act, query, session"):
        prepare(config(str(tmp_path / "log.jsonl")), str(tmp_path / "out"))
    write_json(log_of(200, seed=0), tmp_path / "bad" / "0.jsonl")
    with (tmp_path / "bad" / "0.jsonl").open("a") as log:
        log.write("no JSON\n" * 3)
    with pytest.raises(RejectedRowsError, match="3 of 223 events cannot be read"):
        prepare(config(str(tmp_path / "bad")), str(tmp_path / "out"))
    write_json([Event("click", "q1", None, "a", 5, f=0.0)], tmp_path / "goals" / "0.jsonl")
    with pytest.raises(InputError, match="no item is shown in a list"):
        prepare(config(str(tmp_path / "goals")), str(tmp_path / "out"))


def lists_of(queries: Sequence[str], **values: Any) -> list[dict[str, Any]]:
    """Three items that each list shows, of which the second is clicked."""
    event = {"time": 1_000_000_000, "session": "s"}
    shown = [
        {**event, "act": "shown", "query": query, "item": item, "f": place, **values}
        for query in queries
        for place, item in enumerate("abc")
    ]
    return shown + [{**event, "act": "click", "query": query, "item": "b"} for query in queries]


def write_objects(events: Sequence[dict[str, Any]], path: Path) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in events))
    return str(path)


@pytest.mark.slow
def test_late_events_join_only_periods_of_the_same_features(tmp_path: Path) -> None:
    out, both = str(tmp_path / "out"), {**TABLE, "columns": ["f", "g"]}
    columns = {**COLUMNS, "features": ["f", "g"]}
    prepare(config(write_objects(lists_of(["q1"]), tmp_path / "0.jsonl"), add=True), out)
    later = [{**each, "time": 1_001_000_000} for each in lists_of(["q2"], g=0.5)]
    with_g = {"tables": [both], "columns": columns, "add": True}
    new = prepare(config(write_objects(later, tmp_path / "1.jsonl"), **with_g), out)
    assert [len(each.periods) for each in new.manifest.lacking] == [1]
    late = write_objects(lists_of(["q3"], g=0.5), tmp_path / "2.jsonl")
    with pytest.raises(InputError, match="late events with the features that it has"):
        prepare(config(late, **with_g), out)
    added = prepare(config(late, add=True), out)
    assert added.manifest.lacking == new.manifest.lacking
    assert [row["features"] for row in rows_of(added) if row["query_id"] != "q2"] == [[0.0, 1.0, 2.0]] * 2


def test_columns_that_come_with_the_items_may_have_any_other_name(tmp_path: Path) -> None:
    log, names = write_objects(lists_of(["q1"], z="text"), tmp_path / "0.jsonl"), (*OWN.names, *NAMED.names, "part")
    free = [name for name in names if name not in MADE.names]
    table = {**TABLE, "columns": {"f": "f", **dict.fromkeys(free, "z")}}
    made = prepare(config(log, tables=[table], columns={**COLUMNS, "meta": free}), str(tmp_path / "out"))
    assert [rows_of(made)[0][f"meta_{name}"] for name in free] == ["text"] * len(free)


def test_what_came_of_the_items_is_no_feature_by_a_pattern(tmp_path: Path) -> None:
    log = write_objects(lists_of(["q1"]), tmp_path / "0.jsonl")
    made = prepare(config(log, columns={**COLUMNS, "features": ["*"]}), str(tmp_path / "out"))
    assert [feature.name for feature in made.manifest.features] == ["f"]


def test_a_file_may_have_no_value_of_what_comes_with_the_items(tmp_path: Path) -> None:
    goals = [{**each, "f": None} for each in lists_of(["q1"]) if each["act"] == "click"]
    shown = [{**each, "f": each["f"] + 0.5} for each in lists_of(["q1"]) if each["act"] == "shown"]
    write_objects(shown, tmp_path / "log" / "0.jsonl")
    write_objects(goals * 1100 + lists_of(["q2"]), tmp_path / "log" / "1.jsonl")
    made = rows_of(prepare(config(str(tmp_path / "log")), str(tmp_path / "out")))
    assert [row["features"] for row in made] == [[0.5, 1.5, 2.5], [0.0, 1.0, 2.0]]


def test_numbers_may_come_late_in_a_file_and_revenue_is_that_of_orders(tmp_path: Path) -> None:
    order = {"time": 1_000_000_001, "session": "s", "query": "q1", "item": "a"}
    whole = [{**order, "act": "order", "revenue": 1, "id": f"e{i}"} for i in range(1000)]
    last = [{**order, "act": "order", "revenue": 0.5, "id": "last"}, {**order, "act": "cart", "revenue": 9}]
    rows, _ = event_rows_of(write_objects(whole + last + lists_of(["q1"]), tmp_path / "0.jsonl"), tmp_path / "out")
    assert [(row["item"], row["f"], row["revenue"]) for row in rows] == [("a", 0, 1000.5), ("b", 1, 0), ("c", 2, 0)]


def test_a_table_that_joins_is_an_input_and_the_raw_rows_are_those_that_events_became(tmp_path: Path) -> None:
    log, catalogue = write_objects(lists_of(["q1"]), tmp_path / "0.jsonl"), tmp_path / "catalogue.csv"
    joins = [{"path": str(catalogue), "key": "item", "columns": ["price"]}]
    for more in (0, 100):
        catalogue.write_text("item,price\n" + "".join(f"{item},{ord(item) + more}\n" for item in "abc"))
        settings = config(log, joins=joins, columns={**COLUMNS, "features": ["price"]})
        made = prepare(settings, str(tmp_path / "out"))
        assert rows_of(made)[0]["features"] == [97.0 + more, 98.0 + more, 99.0 + more]
    assert raw_files(made) == [file.url for file in made_rows(str(tmp_path / "out-rows"))[0]] != []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_million_events_take_less_than_three_gigabytes(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    command = [sys.executable, str(tests / "event_log.py"), str(tmp_path / "of-events"), "900000"]
    here = {**os.environ, "PYTHONPATH": str(tests.parent)}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=here)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["events"] == 10**7
    assert found["peak_bytes"] < 3 * 2**30
    assert (tmp_path / "of-events" / "out" / "manifest.json").exists()


@given(st.lists(st.integers(0, 4 * 10**15), min_size=1))
def test_microseconds_are_those_of_the_time_in_every_form(times: list[int]) -> None:
    stamps = pa.array(times, pa.timestamp("us", "UTC"))
    forms = [stamps, pa.array([str(stamp) for stamp in stamps.to_pylist()]), pa.array([us / 10**6 for us in times])]
    later = [each for each in times if each >= 10**14]
    forms += [pa.array(later, pa.int64())] if later == times else []
    for form in forms:
        found, bad = microseconds(form)
        assert found.tolist() == times
        assert not bad.any()
        assert (found // 10**6).tolist() == instants(form)[0].tolist()
