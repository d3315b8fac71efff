"""What a column mapping makes of a log: grades, one row for each document, times in any form and zone, dates."""

import logging
import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import prepare
from source_blocks import blocks_of, features_of, rows_of

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.times import ISO, Clock, _is_day_number, format_of, instants, periods
from ltrscale.errors import InputError
from ltrscale.ingest.grouplogs import GroupRows
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.rows import Rejection, RowBlock
from ltrscale.ingest.source import File, Needs


def read(path: Path, mapping: ColumnMapping) -> tuple[RowBlock, list[Rejection]]:
    return rows_of(Items(columns=mapping), path)


def write(folder: Path, name: str, columns: Mapping[str, Any]) -> Path:
    path, table = folder / name, pa.table(columns)
    if path.suffix == ".csv":
        table.to_pandas().to_csv(path, index=False)
    else:
        pq.write_table(table, path)
    return path


def mapping(**fields: Any) -> ColumnMapping:
    return validate(ColumnMapping, {"query": "q", "features": ["f"], **fields}, "columns")


# grades


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
@pytest.mark.parametrize(
    ("values", "grades"),
    [
        (["view", "purchase", None, "cart", "view"], {"view": 0, "cart": 1, "purchase": 2.5}),
        ([3, 1, None, 2, 1], {1: 0, 2: 4, 3: 2}),
        (["True", "False", None, "True", "False"], {"True": 3, "False": 1}),
    ],
)
def test_each_value_has_its_grade(tmp_path: Path, name: str, values: list[Any], grades: dict[Any, float]) -> None:
    column = pd.array(values, dtype="Int64" if isinstance(values[0], int) else "string")
    path = write(tmp_path, name, {"q": ["a"] * 5, "f": range(5), "y": pa.array(column)})
    rows, rejected = read(path, mapping(label="y", grades=grades))
    assert rejected == []
    expected = [math.nan if value is None else grades[value] for value in values]
    np.testing.assert_array_equal(rows.labels_N, np.array(expected, np.float32))


def test_booleans_of_a_parquet_file_have_grades(tmp_path: Path) -> None:
    path = write(tmp_path, "log.parquet", {"q": ["a"] * 3, "f": range(3), "y": [True, False, None]})
    rows, _ = read(path, mapping(label="y", grades={True: 3, False: 1}))
    np.testing.assert_array_equal(rows.labels_N, [3, 1, math.nan])


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_a_value_without_a_grade_is_a_bad_label_that_is_shown(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, {"q": ["a"] * 3, "f": range(3), "y": ["view", "refund", "cart"]})
    rows, [rejection] = read(path, mapping(label="y", grades={"view": 0, "cart": 1}))
    assert rows.labels_N.tolist() == [0, 1]
    assert (rejection.rule, rejection.query_id, rejection.rows) == ("bad_label", "a", 1)
    assert rejection.text.startswith("column 'y' has no grade (view, cart have one): ")
    assert "refund" in rejection.text
    assert rejection.found == "'refund' has no grade (view, cart have one)"


@pytest.mark.slow
@given(
    cuts=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5, unique=True).map(sorted),
    values=st.lists(st.none() | st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
)
def test_the_grade_is_the_number_of_cut_points_reached(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[float], values: list[float | None]
) -> None:
    values = [*values, *cuts]
    columns = {"q": ["a"] * len(values), "f": range(len(values)), "y": pa.array(values, pa.float64())}
    path = write(tmp_path_factory.mktemp("cuts"), "log.parquet", columns)
    rows, _ = read(path, mapping(label="y", grades=cuts))
    expected = [math.nan if value is None else sum(value >= cut for cut in cuts) for value in values]
    np.testing.assert_array_equal(rows.labels_N, expected)


def test_a_decimal_cut_point_is_reached_by_the_same_decimal(tmp_path: Path) -> None:
    path = write(tmp_path, "log.csv", {"q": ["a"] * 3, "f": range(3), "y": [0.1, 0.0999, 19.99]})
    rows, _ = read(path, mapping(label="y", grades=[0.1, 19.99]))
    assert rows.labels_N.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grades": {"view": 0}}, "grades needs label"),
        ({"label": "y", "grades": {"view": -1}}, "grades: view: -1 is no grade; give each value one from 0 to 1000"),
        ({"label": "y", "grades": [5, 1]}, "cut points must rise"),
        ({"label": "y", "grades": {}}, "give a grade to each value"),
        ({"time_format": "day"}, "'day' has no code of strptime"),
        ({"time_zone": "Mars/Olympus"}, "no time zone of this machine; write it as UTC or Europe/Berlin"),
        ({"dates": {"d": ["days_before"]}}, "days_before is the time up to the row's own; name its column under time"),
    ],
)
def test_a_mapping_that_cannot_be_meant_is_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match="columns") as error:
        mapping(**fields)
    assert message in str(error.value)


# one row for each document


def prepared(path: Path, out: Path, **settings: Any) -> Dataset:
    columns = {"query": "q", "item": "d", "label": "y", "features": ["f"], "grades": {"view": 0, "cart": 1, "buy": 2}}
    source = {"kind": "items", "columns": columns}
    values = {"inputs": str(path), "source": source, "max_rejected": 0, **settings}
    return prepare(validate(PrepareConfig, values, "prepare"), str(out))


EVENTS = {
    "q": ["s1", "s1", "s2", "s1", "s1", "s2", "s1"],
    "d": ["a", "b", "a", "a", "a", "c", "b"],
    "y": ["view", "view", "view", "buy", "cart", "view", "view"],
    "f": [1, 2, 3, 4, 5, 6, 7],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("duplicates", "features", "labels"),
    [
        ("keep_first", [[1, 2], [3, 6]], [[0, 0], [0, 0]]),
        ("keep_last", [[5, 7], [3, 6]], [[1, 0], [0, 0]]),
        ("max_label", [[2, 4], [3, 6]], [[0, 2], [0, 0]]),
    ],
)
def test_a_log_of_events_becomes_one_row_for_each_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, duplicates: str, features: list[Any], labels: list[Any]
) -> None:
    path = write(tmp_path, "log.csv", EVENTS)
    with caplog.at_level(logging.INFO):
        dataset = prepared(path, tmp_path / "out", sort=True, duplicates=duplicates)
    [file] = dataset.manifest.files
    table = pq.read_table(storage.join(dataset.url, file.path), partitioning=None)
    assert table["features"].to_pylist() == features
    assert table["labels"].to_pylist() == labels
    counted = dataset.manifest.accounting
    assert (counted.rows_in, counted.rows_kept, counted.rows_rejected, counted.rows_merged) == (7, 4, 0, 3)
    assert (counted.rules, dataset.manifest.quarantine) == ({}, ())
    assert "7 rows in = 4 kept + 0 rejected (none) + 3 merged into another row of their document" in caplog.text


def test_duplicates_are_rejected_by_default(tmp_path: Path) -> None:
    path = write(tmp_path, "log.csv", EVENTS)
    with pytest.raises(InputError, match="3 of 7 rows rejected") as error:
        prepared(path, tmp_path / "out", sort=True)
    assert "duplicate_document" in str(error.value)


def test_one_row_for_each_document_needs_their_ids() -> None:
    source = {"kind": "items", "columns": {"query": "q", "features": ["f"]}}
    with pytest.raises(
        InputError, match=r"duplicates: name the column with the ids of documents, source\.columns\.item"
    ):
        validate(PrepareConfig, {"source": source, "duplicates": "keep_last"}, "prepare")


# times


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Asia/Kathmandu"]


@given(
    seconds=st.lists(st.integers(0, 2_000_000_000).filter(lambda n: not _is_day_number(n)), min_size=1, max_size=20),
    zone=st.sampled_from(ZONES),
    period=st.sampled_from(["week", "day", "hour"]),
)
def test_periods_begin_at_midnight_of_the_zone(seconds: list[int], zone: str, period: Any) -> None:
    found, bad_N = periods(pa.array(seconds), period, Clock(zone))
    form = {"week": "%G-W%V", "day": "%Y-%m-%d", "hour": "%Y-%m-%dT%H"}[period]
    local = pd.to_datetime(pd.Series(seconds), unit="s", utc=True).dt.tz_convert(zone)
    assert found.to_pylist() == local.dt.strftime(form).tolist()
    assert not bad_N.any()


@given(
    local=st.lists(st.datetimes(datetime(1980, 1, 1), datetime(2037, 1, 1)), min_size=1, max_size=20),
    zone=st.sampled_from(ZONES),
)
def test_times_without_a_zone_are_those_of_the_log_in_every_form(local: list[datetime], zone: str) -> None:
    local = [each.replace(microsecond=0) for each in local]
    # Python's own rule for hours that come twice or never is the definition
    expected = [int(each.replace(tzinfo=ZoneInfo(zone)).timestamp()) for each in local]
    forms = [
        (pa.array(local, pa.timestamp("us")), ("iso",)),
        (pa.array([each.isoformat() for each in local]), ("iso",)),
        (pa.array([f"{each:%d.%m.%Y %H:%M:%S}" for each in local]).dictionary_encode(), ("%d.%m.%Y %H:%M:%S",)),
        (pa.array([f"{each:%y%m%d|%I%p %M.%S}" for each in local]), ("iso", "%y%m%d|%I%p %M.%S")),
        (pa.array([int(f"{each:%Y%m%d%H%M%S}") for each in local]), ("%Y%m%d%H%M%S",)),
    ]
    for column, formats in forms:
        seconds_N, bad_N = instants(column, Clock(zone, formats))
        assert (seconds_N.tolist(), bad_N.any()) == (expected, False), column.type


def test_a_stated_zone_beats_that_of_the_log() -> None:
    texts = ["2026-03-29T01:30:00Z", "2026-03-29T03:30:00+02:00"]
    for column in (pa.array(texts), pa.array([datetime(2026, 3, 29, 1, 30)] * 2, pa.timestamp("s", "UTC"))):
        seconds_N, _ = instants(column, Clock("Europe/Berlin"))
        assert seconds_N.tolist() == [datetime(2026, 3, 29, 1, 30, tzinfo=UTC).timestamp()] * 2
    offset, _ = instants(pa.array(["29/Mar/2026:03:30:00 +0200"]), Clock("Asia/Tokyo", ("%d/%b/%Y:%H:%M:%S %z",)))
    assert offset.tolist() == seconds_N.tolist()[:1]


def test_text_in_none_of_the_formats_is_rejected(tmp_path: Path) -> None:
    times = ["14.02.2026 09:30", "2026-02-14", "1771057800", "31.02.2026 09:30", "14.02.2026"]
    path = write(tmp_path, "log.csv", {"q": ["a"] * 5, "f": range(5), "at": times})
    rows, rejected = read(path, mapping(time="at", period="day", time_format=["%d.%m.%Y %H:%M", "%d.%m.%Y"]))
    assert rows.periods_N is not None
    assert rows.periods_N.to_pylist() == ["2026-02-14", "2026-02-14"]
    assert [one.line for one in rejected] == [3, 4, 5]
    assert rejected[0].text == "column 'at' is not a time stamp: a,1,2026-02-14"


def by_day(columns: Mapping[str, Any], path: Path) -> Dataset:
    """The data set of a log with a list for each row, by the day of `at`."""
    uses = {"query": "q", "features": ["f"], "time": "at", "period": "day", "time_format": columns["format"]}
    source = {"kind": "items", "columns": {**uses, "dates": {"listed": ["days_before"]}}}
    log = write(path.parent, path.name, {name: values for name, values in columns.items() if name != "format"})
    return prepare(validate(PrepareConfig, {"inputs": str(log), "source": source}, "prepare"), str(path.parent / "out"))


DAYS = {"q": ["a", "b", "c"], "f": [1, 2, 3], "at": [20260214, 20260301, 19991231]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "int", "float", "text"])
def test_days_that_are_written_as_numbers(tmp_path: Path, kind: str) -> None:
    cast = {"csv": pa.int64(), "int": pa.int32(), "float": pa.float64(), "text": pa.string()}[kind]
    log = tmp_path / ("log.csv" if kind == "csv" else "log.parquet")
    columns = {**DAYS, "at": pa.array(DAYS["at"]).cast(cast), "listed": pa.array([20260101] * 3).cast(cast)}
    dataset = by_day({**columns, "format": "%Y%m%d"}, log)
    assert dataset.manifest.periods == ["1999-12-31", "2026-02-14", "2026-03-01"]
    tables = [pq.read_table(storage.join(dataset.url, file.path), partitioning=None) for file in dataset.manifest.files]
    found = {row["query_id"]: row["features"] for table in tables for row in table.to_pylist()}
    assert found == {"a": [1, 44], "b": [2, 59], "c": [3, -9498]}


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["iso", ["iso", "%d.%m.%Y"]])
@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
@pytest.mark.parametrize("column", ["at", "listed"])
def test_days_that_are_written_as_numbers_are_no_seconds_since_1970(
    tmp_path: Path, name: str, format_: Any, column: str
) -> None:
    columns = {**DAYS, "at": [1771057800] * 3, "listed": [1771057800] * 3, column: DAYS["at"]}
    message = (
        rf"3 of 3 rows rejected .*column '{column}' is not a time or date \('?20260214'?\).*; "
        r'add "%Y%m%d" to prepare\.source\.columns\.time_format for days as numbers, mend the input'
    )
    with pytest.raises(InputError, match=message):
        by_day({**columns, "format": format_}, tmp_path / name)


@pytest.mark.parametrize("number", [19000101, 20240229, 21001231])
def test_a_number_that_is_a_day_is_no_second_and_its_neighbours_are(number: int) -> None:
    for column in (pa.array([number]), pa.array([float(number)]), pa.array([str(number)])):
        assert instants(column)[1].tolist() == [True]
        assert not instants(column, Clock(formats=("iso", "%Y%m%d")))[1].any()
    near = [19000100, 20240230, 20230229, 20241301, 21001301, 20260014]
    for column in (pa.array(near), pa.array([str(each) for each in near])):
        assert instants(column)[0].tolist() == near


TEN = 1767607200  # 10 o'clock of 5 January 2026, UTC


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
@pytest.mark.parametrize(
    ("text", "format_"),
    [
        ("2026-01-05 10:00:00 UTC", "iso"),  # BigQuery
        ("2026-01-05 10:00:00.250000 UTC", "iso"),
        ("2026-01-05T10:00:00 GMT", "iso"),
        ("2026-01-05 11:00:00 +0100", "iso"),
        ("Mon, 05 Jan 2026 10:00:00 GMT", "%a, %d %b %Y %H:%M:%S %Z"),  # RFC 1123
        ("05/Jan/2026:10:00:00 +0000", "%d/%b/%Y:%H:%M:%S %z"),  # Apache
        ("[05/Jan/2026:11:00:00 +0100]", "[%d/%b/%Y:%H:%M:%S %z]"),
    ],
)
def test_a_time_that_states_its_zone_is_that_time_in_every_zone(text: str, format_: str, zone: str) -> None:
    seconds_N, bad_N = instants(pa.array([text]), Clock(zone, (format_,)))
    assert (seconds_N.tolist(), bad_N.tolist()) == ([TEN], [False])
    assert format_of(text) == format_


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "format_"),
    [
        ("Mon, 05 Jan 2026 10:00:00 GMT", "%a, %d %b %Y %H:%M:%S %Z"),
        ("05/Jan/2026:10:00:00 +0000", "%d/%b/%Y:%H:%M:%S %z"),
        ("01/25/2026 10:00 PM", "%m/%d/%Y %I:%M %p"),
        ("2026-01-05 10:00:00 PM", "%Y-%m-%d %I:%M:%S %p"),
    ],
)
def test_a_time_in_a_usual_format_is_refused_with_that_format(tmp_path: Path, text: str, format_: str) -> None:
    columns = {"q": ["a", "b"], "f": [1, 2], "at": [text] * 2, "listed": ["2026-01-05"] * 2}
    message = rf'is not a time or date .*; add "{re.escape(format_)}" to prepare\.source\.columns\.time_format, mend'
    with pytest.raises(InputError, match=message):
        by_day({**columns, "format": "iso"}, tmp_path / "log.csv")
    assert by_day({**columns, "format": ["iso", format_]}, tmp_path / "log.csv").manifest.counts().groups == 2


@pytest.mark.parametrize(
    ("text", "format_"),
    [("1_767607200", ISO), ("\uff11767607200", ISO), ("2026-01-0\u0665", ISO), ("0\uff15.01.2026", "%d.%m.%Y")],
)
def test_digits_of_other_scripts_and_underscores_are_no_times(text: str, format_: str) -> None:
    assert instants(pa.array([text, None]), Clock(formats=(format_,)))[1].tolist() == [True, True]


def test_a_zone_that_only_some_machines_know_is_none() -> None:
    here = time.tzname[0]
    stamps = pa.array([f"05.01.2026 10:00 {zone}" for zone in ("UTC", "GMT", "CET", here)])
    _, bad_N = instants(stamps, Clock(formats=("%d.%m.%Y %H:%M %Z",)))
    assert bad_N.tolist() == [False, False, True, here not in ("UTC", "GMT")]


# dates as features


def test_dates_become_days_weekday_and_hour(tmp_path: Path) -> None:
    zone = ZoneInfo("America/New_York")
    rng = np.random.default_rng(0)
    sent = [datetime(2026, 3, 1, tzinfo=zone) + timedelta(minutes=int(m)) for m in rng.integers(0, 60_000, 200)]
    listed = [None if i % 7 == 0 else date(2025, 1, 1) + timedelta(days=int(rng.integers(0, 500))) for i in range(200)]
    columns = {
        "q": ["a"] * 200,
        "f": range(200),
        "at": pa.array([each.astimezone(UTC) for each in sent], pa.timestamp("us", "UTC")),
        "listed": pa.array(listed, pa.date32()),
    }
    made = mapping(
        time="at",
        time_zone="America/New_York",
        dates={"listed": ["days_before", "weekday"], "at": ["hour", "weekday"]},
        features=["*"],
    )
    path = write(tmp_path, "log.parquet", columns)
    found = [(each.name, each.kind) for each in features_of(Items(columns=made), path)]
    kinds = ["numeric", "numeric", "categorical", "categorical", "categorical"]
    names = ["f", "listed.days_before", "listed.weekday", "at.hour", "at.weekday"]
    assert found == list(zip(names, kinds, strict=True))
    rows, rejected = read(path, made)
    assert rejected == []

    def midnight(day: date) -> datetime:
        return datetime(day.year, day.month, day.day, tzinfo=zone)

    expected = [
        [
            math.nan if d is None else (s.timestamp() - midnight(d).timestamp()) / 86400
            for s, d in zip(sent, listed, strict=True)
        ],
        [math.nan if d is None else d.weekday() for d in listed],
        [s.hour for s in sent],
        [s.weekday() for s in sent],
    ]
    np.testing.assert_allclose(rows.features_NF[:, 1:].T, np.array(expected, np.float32), rtol=1e-6)


def test_a_date_that_cannot_be_read_is_rejected_and_a_missing_one_is_not(tmp_path: Path) -> None:
    columns = {"q": ["a"] * 3, "f": range(3), "at": [0, 0, 0], "listed": ["1969-12-31", None, "yesterday"]}
    rows, [rejection] = read(
        write(tmp_path, "log.csv", columns), mapping(time="at", dates={"listed": ["days_before"]}, features=[])
    )
    np.testing.assert_array_equal(rows.features_NF, [[1], [math.nan]])
    assert rejection.text == "column 'listed' is not a time or date: a,2,0,yesterday"


def test_a_column_with_the_name_of_a_feature_of_dates_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "log.parquet", {"q": ["a"], "f": [1], "at": [0], "at.hour": [3]})
    with pytest.raises(InputError, match=r"column 'at\.hour' has the name of a feature of dates; rename it"):
        features_of(Items(columns=mapping(dates={"at": ["hour"]})), path)


def test_a_file_without_a_date_of_the_first_one_is_named(tmp_path: Path) -> None:
    one = write(tmp_path, "1.parquet", {"q": ["a"], "f": [1], "at": [0]})
    two = write(tmp_path, "2.parquet", {"q": ["a"], "f": [1]})
    made = mapping(dates={"at": ["hour"]})
    with pytest.raises(InputError, match=r"2\.parquet: no column 'at' \(dates\)"):
        blocks_of(Items(columns=made), two, features=features_of(Items(columns=made), one), first=str(one))


def test_rows_to_score_have_the_features_of_dates_that_the_model_reads_and_need_no_label(tmp_path: Path) -> None:
    columns = {
        "q": ["a", "a", "b"],
        "f": [1.0, 2.0, 3.0],
        "event": ["view", "buy", "view"],
        "at": ["2026-03-02T10:00", "2026-03-02T10:00", "2026-03-05T23:00"],
        "listed": ["2026-01-01", "2025-05-05", "2026-03-01"],
    }
    dates = {"listed": ["days_before", "weekday"], "at": ["hour"]}
    trained = mapping(label="event", grades={"view": 0, "buy": 1}, time="at", dates=dates, features=["f"])
    path = write(tmp_path, "log.csv", columns)
    source = Items(columns=trained)
    features = [feature for feature in features_of(source, path) if feature.name != "listed.weekday"]
    columns.pop("event")
    new = write(tmp_path, "next.csv", dict(reversed(columns.items())))
    scored = source.for_scoring(Needs(features))
    expected, found = (
        dict(zip([f.name for f in features_of(s, p)], read(p, s.columns)[0].features_NF.T.tolist(), strict=True))
        for p, s in ((path, source), (new, scored))
    )
    assert {*found} == {feature.name for feature in features} == {*expected} - {"listed.weekday"}
    assert found == {name: expected[name] for name in found}


# missing columns


def test_all_columns_that_a_file_lacks_are_named_with_their_use(tmp_path: Path) -> None:
    wanted = mapping(
        features=["f", "clicks", "x_*"],
        categorical=["colour"],
        meta=["user"],
        period_column="week",
        dates={"at": ["hour"]},
    )
    (tmp_path / "week=7").mkdir()
    for path in (
        write(tmp_path, "week=7/log.csv", {"q": ["a"], "clicks_": [1]}),
        write(tmp_path, "week=7/log.parquet", {"q": ["a"], "clicks_": [1]}),
    ):
        assert Items(columns=wanted).missing_columns(File(url=str(path))) == [
            *(
                "'user' (meta)",
                "'f' (feature)",
                "'clicks' (feature, perhaps 'clicks_')",
                "'at' (dates)",
                "'colour' (feature)",
            )
        ]
    lists = str(write(tmp_path, "lists.parquet", {"query_id": ["a"], "features": [[1.0, 2.0]]}))
    for columns, lacking in (
        ({"names": ["a", "b"], "categorical": ["b"]}, []),
        ({"features": ["a"], "categorical": ["features"], "docs": "ids"}, ["'ids' (docs)", "'a' (feature)"]),
    ):
        source = validate(GroupRows, {"columns": columns}, "test")
        assert source.missing_columns(File(url=lists)) == lacking


# queries of several columns


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_several_columns_make_a_query_id(tmp_path: Path, name: str) -> None:
    columns = {
        "q": ["7", "7", "7", None, "8"],
        "day": ["mon", "mon", "tue", "tue", None],
        "f": [1.0, 2.0, 3.0, 4.0, 5.0],
    }
    block, rejected = read(write(tmp_path, name, columns), mapping(within=["day"]))
    assert block.query_ids_N.to_pylist() == ["7|mon", "7|mon", "7|tue"]
    assert ["'q' has no value" in rejected[0].text, "'day' has no value" in rejected[1].text] == [True, True]
    with pytest.raises(InputError, match="within names a column twice, or that of query"):
        mapping(within=["q"])
    with pytest.raises(InputError, match=r"no column 'dya' .query.; its columns are q, day, f"):
        features_of(Items(columns=mapping(within=["dya"])), tmp_path / name)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"fill": {"f": 1e300}}, "fill.f.*less than or equal to 3402823"),
        ({"fill": {"f": "median"}, "fill_periods": ["last 2"]}, "'last 2' counts periods that are not made yet; name"),
    ],
)
def test_a_fill_that_no_data_set_can_hold_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        mapping(**wrong)
    assert mapping(fill={"f": "median"}, fill_periods="w1..w2").fill_periods == ("w1..w2",)
