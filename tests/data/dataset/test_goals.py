from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import prepare, rejected, rows_of
from pydantic import ValidationError
from shop_goals import shop_log

from ltrscale.data.dataset.columns import label_weights, weighed
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.data.dataset.selection import Selection, only_relevant, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.derive.relabel import RelabelJob
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.mapping import ColumnMapping, ListColumns

GOALS = ["click", "cart", "order"]
NAMES = st.lists(st.sampled_from(GOALS), min_size=1, unique=True)


def prepared(folder: Path, *, name: str = "data", **columns: Any) -> Dataset:
    mapping = {"query": "q", "item": "d", "period_column": "period", "features": ["f*"], **columns}
    source = {"kind": "items", "columns": mapping}
    log = folder / "log.parquet"
    config = PrepareConfig(inputs=[{"path": str(log)}], source=source)
    return prepare(config, str(folder / name))


@pytest.fixture
def shop(tmp_path: Path) -> Dataset:
    shop_log(tmp_path)
    return prepared(tmp_path, labels={goal: goal for goal in GOALS})


def labels_of(selection: Selection) -> list[float]:
    return [label for groups in iterate(selection) for label in groups.labels_N.tolist()]


def chosen(dataset: Dataset, labels: str | Mapping[str, float], **split: Any) -> Selection:
    return select(Split(data=dataset.url, labels=labels, **split), labelled=True)


@pytest.mark.slow
def test_the_first_goal_is_the_label_and_the_others_are_columns_beside_it(tmp_path: Path, shop: Dataset) -> None:
    """With one label a data set has the same files and the same manifest, but for the command that made it."""
    one = prepared(tmp_path, name="one", label="click", exclude=["cart", "order"])
    assert shop.manifest.goals == (*GOALS,)
    rows, rows_of_one = rows_of(shop), rows_of(one)
    assert [{**row, "label_cart": None, "label_order": None} for row in rows_of_one] == [
        {**row, "label_cart": None, "label_order": None} for row in rows
    ]
    named = prepared(tmp_path, name="named", labels={"click": "click"}, exclude=["cart", "order"])
    assert named.manifest.hash == one.manifest.hash
    assert "goals" not in one.manifest.model_dump()
    assert {label for row in rows for label in row["label_order"]} == {0.0, 1.0}, "an empty value counts 0"


@pytest.mark.slow
def test_a_goal_of_another_reader_is_the_same(tmp_path: Path, shop: Dataset) -> None:
    """Lists of labels by name, as the files of a data set have them, make the same data set."""
    columns = {"labels": {"click": "labels", "cart": "label_cart", "order": "label_order"}, "docs": "doc_ids"}
    mapping = ListColumns(**columns, n_features=2, period_column="period")
    source = {"kind": "groups", "columns": mapping.model_dump()}
    again = prepare(PrepareConfig(inputs=[{"path": f"{shop.url}/*/*.parquet"}], source=source), str(tmp_path / "again"))
    assert again.manifest.goals == shop.manifest.goals
    without = [{key: value for key, value in row.items() if key != "features"} for row in rows_of(again)]
    assert without == [{key: value for key, value in row.items() if key != "features"} for row in rows_of(shop)]


def test_a_negative_value_of_any_goal_is_rejected(tmp_path: Path) -> None:
    columns = {"q": [1, 1, 2], "d": [1, 2, 1], "period": ["a"] * 3, "f1": [0.0] * 3, "click": [1, 0, 1]}
    pq.write_table(pa.table(columns | {"order": [-1.0, 0.0, 1001.0]}), tmp_path / "log.parquet")
    source = {
        "query": "q",
        "period_column": "period",
        "features": ["f1"],
        "labels": {"click": "click", "order": "order"},
    }
    config = PrepareConfig(
        inputs=[{"path": str(tmp_path / "log.parquet")}],
        source={"kind": "items", "columns": source},
        max_rejected=1.0,
    )
    found = rejected(prepare(config, str(tmp_path / "data")))
    assert found == [(1, "bad_label", "label_order -1"), (3, "bad_label", "label_order 1001")]


@given(names=NAMES, data=st.data())
def test_a_sum_does_not_depend_on_the_order_of_the_goals(names: list[str], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0, 10), min_size=len(names), max_size=len(names)))
    blend = dict(zip(names, weights, strict=True))
    assert label_weights(blend, GOALS) == label_weights(dict(reversed(blend.items())), GOALS)
    assert all(weight > 0 for _, weight in label_weights(blend, GOALS)), "a weight of 0 leaves a goal out"


def test_labels_are_the_weighted_sum(shop: Dataset) -> None:
    click, order = (np.array(labels_of(chosen(shop, goal)), np.float32) for goal in ("click", "order"))
    assert labels_of(chosen(shop, {"order": 1.0, "click": 0.2})) == (order + np.float32(0.2) * click).tolist()
    assert 0 < order.sum() < click.sum()


@pytest.mark.slow
@pytest.mark.parametrize("goal", GOALS)
def test_a_sum_of_one_goal_is_that_goal(shop: Dataset, goal: str) -> None:
    """Also in the hash, so that a training is up to date; and the first goal is what no name stands for."""
    alone, one, zero = (chosen(shop, labels) for labels in (goal, {goal: 1.0}, {"cart": 0.0} | {goal: 1.0}))
    assert alone.hash == one.hash == zero.hash
    assert labels_of(alone) == labels_of(one)
    assert (alone.hash == chosen(shop, "labels").hash) == (goal == "click")


def test_hashes_tell_sums_apart(shop: Dataset) -> None:
    blends: list[str | dict[str, float]] = ["click", "order", {"click": 2.0}, {"click": 1.0, "order": 1.0}]
    blends.append({"click": 1.0, "order": 2.0})
    assert len({chosen(shop, labels).hash for labels in blends}) == len(blends)


@pytest.mark.slow
def test_relevant_groups_are_those_of_the_sum(shop: Dataset) -> None:
    """Groups of a goal alone, of a sum, and those that a split counts, are found in the labels that are served."""
    for labels in ("order", {"order": 1.0, "cart": 1.0}):
        whole = chosen(shop, labels)
        relevant = sum(bool((groups.labels_N > 0).any()) for groups in iterate(whole, docs_per_batch=1))
        assert only_relevant(whole).n_groups == relevant < whole.n_groups
        with pytest.raises(InputError, match=f"{relevant} of its labelled groups have a relevant document"):
            chosen(shop, labels, relevant_groups=relevant + 1)


def test_draws_are_the_same_groups_for_all_goals(shop: Dataset) -> None:
    kept = {goal: chosen(shop, goal, labelled_groups=7, labelled_seed=3).kept_labelled.tolist() for goal in GOALS}
    assert len({*map(tuple, kept.values())}) == 1


@pytest.mark.slow
def test_goals_outlive_a_relabelling(tmp_path: Path, shop: Dataset) -> None:
    """Documents that are left out take their labels of every goal along."""
    RelabelJob(data=shop.url, out=str(tmp_path / "lists"), relabel={"steps": [{"kind": "relevant_only"}]}).run()
    kept = open_dataset(str(tmp_path / "lists"))
    assert kept.manifest.goals == shop.manifest.goals
    assert sum(labels_of(chosen(kept, "order"))) == sum(labels_of(chosen(shop, "order")))
    assert labels_of(chosen(kept, "cart")) == labels_of(
        replace(only_relevant(chosen(shop, "click")), label_weights=label_weights("cart", GOALS))
    )


@pytest.mark.slow
def test_errors_name_the_goals(shop: Dataset, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no goal 'ordr'; did you mean 'order'"):
        chosen(shop, {"ordr": 1.0})
    with pytest.raises(ValidationError, match="each weight is 0"):
        Split(data="x", labels={"click": 0.0})
    with pytest.raises(ValidationError, match="leave label out"):
        ColumnMapping(query="q", label="click", labels={"click": "click"}, features=("f*",))
    one = prepared(tmp_path, name="one", label="click")
    with pytest.raises(InputError, match="it has none; prepare it with"):
        chosen(one, "order")
    other = prepared(tmp_path, name="other", labels={"order": "order", "click": "click"}, unjudged=0)
    with pytest.raises(InputError, match="their goals are in other columns"):
        select(Split(data=(shop.url, other.url), labels="order"), labelled=True)


def test_a_sum_is_rounded_once() -> None:
    columns = {"labels": np.array([1], np.float32), "label_order": np.array([1], np.float32)}
    both = weighed((("label_order", 0.2), ("labels", 0.1)), columns.__getitem__)
    assert both.tolist() == [np.float32(0.3)]


def test_unlabelled_selections_read_no_goal(shop: Dataset) -> None:
    selection = replace(chosen(shop, "order"), labelled=False)
    assert all(groups.labels_N is None for groups in iterate(selection))


def test_labels_are_added_under_their_own_names(tmp_path: Path) -> None:
    log = tmp_path / "log.parquet"

    def added(week: str, columns: dict[str, Any]) -> Dataset:
        pq.write_table(pa.Table.from_pylist([{"q": week, "week": week, "f": 1.0, "y": y} for y in (0, 1)]), log)
        mapping = {"query": "q", "period_column": "week", "features": ["f"], **columns}
        settings = {"inputs": str(log), "source": {"kind": "items", "columns": mapping}, "add": True}
        return prepare(PrepareConfig.model_validate(settings), str(tmp_path / "data"))

    added("2026-W01", {"labels": {"click": "y"}})
    for columns, shown in (({"labels": {"order": "y"}}, "order"), ({"label": "y"}, "one without a name")):
        with pytest.raises(InputError, match=f"its labels are click, those of the inputs {shown}"):
            added("2026-W02", columns)
    assert added("2026-W02", {"labels": {"click": "y"}}).manifest.goals == ("click",)
