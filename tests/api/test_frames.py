"""Tables in memory: their features are those that a config would find, and rows of a query need not be together."""

import io
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from shopping_frames import COLUMNS, searches
from shopping_log import shopping_log

from ltrscale.api.frames import held_out, prepare_tables, rows_as_table, to_raw_table, with_features
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.resolve import resolve_features

TABLE = to_raw_table(searches(12, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"exclude": ["sh*"]}, {"clicks": "clicks"}, {"meta": ["sale"]}, {"time": "shown"}]
)
def test_numeric_features_are_those_of_a_star_and_categorical_ones_are_text(more: dict[str, object]) -> None:
    found = with_features({**COLUMNS, **more}, TABLE)
    star = ColumnMapping.model_validate({**COLUMNS, **more, "features": ["*"]})
    assert found["features"] == [feature.name for feature in resolve_features(TABLE.schema, star, "log")]
    text = {"kind", "shop"} - ({"shop"} if "exclude" in more else set())
    assert found["categorical"] == sorted(text)
    named = {**COLUMNS, **more, "features": ["price"]}
    assert with_features(named, TABLE) == named


def test_a_column_with_the_name_of_a_part_of_a_date_or_a_fill_is_a_feature() -> None:
    table = TABLE.append_column("hour", TABLE["price"])
    uses = {"dates": {"shown": ["hour"]}, "fill": {"price": "median"}, "optional": ["price"], "exclude": ["cl*"]}
    found = with_features({**COLUMNS, **uses, "grades": {"shop": None, "1": 1}}, table)
    assert (found["features"], found["categorical"]) == (["hour", "price", "sale"], ["kind", "shop"])


def test_a_column_of_a_type_that_no_use_reads_may_be_excluded() -> None:
    table = TABLE.append_column("took", pa.array([(0, 1, 0)] * len(TABLE), pa.month_day_nano_interval()))
    kept, found = rows_as_table(table, None, None, {**COLUMNS, "exclude": ["took"]})
    assert found == {**with_features(COLUMNS, TABLE), "exclude": ["took"]}
    assert kept.equals(TABLE)


@pytest.mark.slow
def test_features_that_give_the_answer_away_are_named_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    log = shopping_log(30)
    log["event_time"] = log["searched_at"]
    table, uses = to_raw_table(log), {"query": "search_id", "label": "clicked"}
    features = with_features(uses, table)
    (warning,) = caplog.messages
    names = {"event", "revenue", "position", "product_id", "user_id", "searched_at", "event_time", "listed_on", "title"}
    assert names < {*features["features"], *features["categorical"]}
    assert "revenue (an outcome: it would give the answer away)" in warning
    excluded = json.loads(warning.partition("exclude=")[2].replace("'", '"'))
    assert {*excluded} == names
    caplog.clear()
    kept = with_features({**uses, "exclude": excluded}, table)
    assert (kept["features"], kept["categorical"]) == (["price"], ["brand", "in_stock", "shop"])
    with_features({**uses, "features": ["revenue"]}, table)  # as the caller wants it
    assert not caplog.messages


def test_a_number_is_a_time_only_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """Ids may lie where seconds since 1970 do."""
    numbers = np.random.default_rng(0).integers(1_000_000_000, 2_000_000_000, len(TABLE))
    for name, named in (("seller_id", False), ("amount", False), ("viewed_time", True)):
        caplog.clear()
        with_features(COLUMNS, TABLE.drop_columns(["shown"]).append_column(name, pa.array(numbers)))
        said = (f"{name} (looks like a time", f"{name} (a date")
        assert any(text in message for text in said for message in caplog.messages) == named


@pytest.mark.slow
def test_rows_of_a_query_are_brought_together_and_nothing_else_changes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    columns = with_features(COLUMNS, TABLE)
    mixed = TABLE.take(pa.array(np.random.default_rng(0).permutation(len(TABLE))))
    sets = []
    for name, table in {"together": TABLE, "apart": mixed}.items():
        out = str(tmp_path_factory.mktemp(name) / "data")
        prepare_tables({"train": table, "all": TABLE}, columns, {}, out)
        sets.append(open_dataset(out).manifest)
    for of in (lambda m: m.counts(), lambda m: m.periods, lambda m: m.features, lambda m: m.label_counts):
        assert of(sets[0]) == of(sets[1])
    assert sets[0].accounting.rows_rejected == sets[1].accounting.rows_rejected == 0
    configs = [manifest.made_by["config"]["sort"] for manifest in sets]
    assert configs == [False, True]


def test_rows_without_a_query_are_not_the_group_that_is_held_out() -> None:
    table = pa.table({"q": [None, None, "a", "b", "b"], "y": [1, 0, 1, 0, 1]})
    for seed in range(9):
        _, validation = held_out(table, {"query": "q", "label": "y"}, 0.1, seed)
        assert validation["q"].to_pylist() in (["a"], ["b", "b"])


def test_a_wrong_row_is_named_by_table_and_number(tmp_path: object) -> None:
    columns = with_features(COLUMNS, TABLE)
    negative = TABLE.set_column(TABLE.column_names.index("bought"), "bought", pa.array(np.full(len(TABLE), -1.0)))
    with pytest.raises(InputError, match=r"rows rejected .*: validation:1 bad_label"):
        prepare_tables({"train": TABLE, "validation": negative}, columns, {}, f"{tmp_path}/data")
    with pytest.raises(InputError, match=r"prepare: max_rejectd: unknown key; did you mean 'max_rejected'"):
        prepare_tables({"train": TABLE}, columns, {"max_rejectd": 1}, f"{tmp_path}/data")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [int, str])
@pytest.mark.parametrize("first", [1001, 1_500_000_000, 20_240_101])
def test_numbers_that_name_sellers_are_no_dates(caplog: pytest.LogCaptureFixture, kind: type, first: int) -> None:
    log = shopping_log(30).drop(
        columns=["listed_on", "searched_at", "title", "user_id", "product_id", "event", "revenue"]
    )
    log["seller_id"] = (first + np.arange(len(log)) % 20).astype(kind)
    with_features({"query": "search_id", "label": "clicked"}, to_raw_table(log))
    assert "position" in caplog.messages[0]
    assert "seller_id" not in caplog.messages[0]


def test_columns_that_are_named_by_numbers_are_named_by_them() -> None:
    frame = searches(4, 0)[["search", "bought", "price", "kind"]]
    uses = {"query": 0, "label": np.int64(1), "features": [2], "categorical": (3,), "fill": {2: 2}, "grades": None}
    table, found = rows_as_table(frame.set_axis(range(4), axis=1), None, None, uses)
    assert table.rename_columns(list(frame.columns)).equals(to_raw_table(frame))
    expected = {"query": "0", "label": "1", "features": ["2"], "categorical": ["3"], "fill": {"2": 2}, "grades": None}
    assert found == expected


def test_the_index_of_a_data_frame_is_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    log = pd.read_csv(io.StringIO(searches(12, 0).to_csv()))  # as many come to have it
    assert log.columns[0] == "Unnamed: 0"
    found = with_features(COLUMNS, to_raw_table(log.drop(columns="shown")))
    assert found == with_features(COLUMNS, TABLE.drop_columns("shown"))
    assert any(m.startswith("column 'Unnamed: 0' is left out: a column without a name") for m in caplog.messages)
    caplog.clear()
    found = with_features(COLUMNS, to_raw_table(searches(12, 0).reset_index()))
    assert "index" not in found["features"]
    assert any(m.startswith("column 'index' is left out: the number of the row") for m in caplog.messages)
    array = np.stack([np.arange(2000.0), np.arange(2000.0)], axis=1)  # whose columns have no names but numbers
    found = with_features({"query": "__query__"}, to_raw_table(array, group=[10] * 200))
    assert found["features"] == ["1", "2"]
