"""Explanations of a shop's queries: what they say of two items, of a query, of many, and what they refuse."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exported_models import trees
from preparing import prepare

from ltrscale import bundle
from ltrscale.config import validate
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.scored import read_named
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.explain import TABLE, Explained, ExplainJob
from ltrscale.ingest.inputs import PrepareConfig

BRANDS = ["Acme", "Zeta", "Nord"]
WEEKS = ["2026-01-01", "2026-01-06", "2026-01-13", "2026-01-20"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Four weeks of a shop in which cheap items of one brand are bought, and trees that have learnt from it."""
    folder, rng, rows = tmp_path_factory.mktemp("shop"), np.random.default_rng(0), []
    for q in range(240):
        for i in range(int(rng.integers(3, 9))):
            price, brand = round(float(rng.uniform(5, 50)), 2), BRANDS[rng.integers(3)]
            rating = None if rng.random() < 0.1 else round(float(rng.uniform(1, 5)), 1)
            bought = 2.0 * (brand == "Acme") - price / 12 + rng.normal(scale=0.2) > -1
            rows.append(
                {"q": f"q{q}", "sku": f"s{q}-{i}", "day": WEEKS[q % 4], "bought": int(bought)}
                | {"price": price, "rating": rating, "brand": brand}
            )
    pq.write_table(pa.Table.from_pylist(rows), folder / "log.parquet")
    columns = {"query": "q", "item": "sku", "label": "bought", "time": "day"}
    columns |= {"features": ["price", "rating"], "categorical": ["brand"]}  # type: ignore[dict-item]
    source = {"kind": "items", "columns": columns}
    config = {"inputs": str(folder / "log.parquet"), "source": source, "sort": True}
    prepare(PrepareConfig.model_validate(config), str(folder / "data"))
    model = trees(folder / "model", str(folder / "data"), "lightgbm", num_trees=30, min_data_in_leaf=5)
    return {"data": str(folder / "data"), "bundle": model}


def job(shop: dict[str, str], out: Path, **settings: Any) -> ExplainJob:
    return validate(ExplainJob, {"out": str(out), **shop, **settings}, "test")


def explained(shop: dict[str, str], out: Path, **settings: Any) -> Explained:
    assert job(shop, out, **settings).run()
    return Explained.read(str(out))


@pytest.mark.slow
def test_two_items_are_compared_in_raw_values_and_names(shop: dict[str, str], tmp_path: Path) -> None:
    part = next(iter(read_named(select(Split(data=(shop["data"],)), labelled=False))))
    query, items = part.ids["query_id"][0].as_py(), part.ids["doc_ids"][0].as_py()
    scores_N = bundle.load(shop["bundle"]).scorer(threads=1)(part.groups).tolist()
    one, other = np.argmax(scores_N[: len(items)]), np.argmin(scores_N[: len(items)])
    found = explained(shop, tmp_path / "out", query=query, items=[items[one], items[other]])
    (explanation,) = found.explanations
    assert (explanation.query, explanation.item, explanation.against) == (query, items[one], items[other])
    assert explanation.difference == pytest.approx(scores_N[one] - scores_N[other], rel=1e-5)
    assert sum(reason.adds for reason in explanation.reasons) == pytest.approx(explanation.difference, rel=1e-2)
    by_name = {reason.feature: reason for reason in explanation.reasons}
    prices = (f"{part.groups.features_NF[place, 0]:.6g}" for place in (one, other))
    assert (by_name["price"].value, by_name["price"].against) == tuple(prices)
    if "brand" in by_name:
        assert {by_name["brand"].value, by_name["brand"].against} <= {*BRANDS}
    sentence = explanation.sentence()
    assert sentence.startswith(f"{items[one]} stands above {items[other]} because ")
    assert sentence in (tmp_path / "out" / "report.md").read_text().replace("\\", "")
    (back,) = explained(shop, tmp_path / "back", query=query, items=[items[other], items[one]]).explanations
    assert back.difference == pytest.approx(-explanation.difference)
    assert back.sentence().startswith(f"{items[other]} stands below {items[one]} because ")


@pytest.mark.slow
def test_a_query_has_its_first_item_explained_and_a_slice_its_means(shop: dict[str, str], tmp_path: Path) -> None:
    one = explained(shop, tmp_path / "one", query="q7")
    (first,) = one.explanations
    assert first.against is None
    assert first.others >= 2
    assert first.sentence().startswith(f"{first.item} stands above the next {first.others} because ")
    some = explained(shop, tmp_path / "some", where="n_documents > 5", queries=40, depth=3)
    assert some.queries == 40
    assert {each.others for each in some.explanations} == {2}
    assert {driver.feature for driver in some.drivers[:2]} == {"price", "brand"}
    assert sum(driver.share for driver in some.drivers) == pytest.approx(1, abs=1e-2)
    assert sum(driver.first for driver in some.drivers) == pytest.approx(1)
    table = pq.read_table(tmp_path / "some" / TABLE)
    assert len(set(table["query_id"].to_pylist())) == 40
    brands = [row for row in table.to_pylist() if row["feature"] == "brand"]
    assert {row["value"] for row in brands} == {*BRANDS}
    assert {row["against"] for row in brands} <= {f"{name} in {n} of 2" for name in BRANDS for n in (1, 2)}
    assert all(row["against"] != f"{row['value']} in 1 of 2" for row in brands)  # the other one says more
    page = (tmp_path / "some" / "report.md").read_text()
    assert "of the lead" in page
    assert "drivers.png" in page
    assert not job(shop, tmp_path / "some", where="n_documents > 5", queries=40, depth=3).run()  # up to date


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query": "q999"}, "there is no query 'q999'"),
        ({"query": "q7", "items": ["s7-0", "nothing"]}, "query 'q7' has no item 'nothing'; it has s7-0"),
        ({"where": "n_documents > 99"}, "there is no group where n_documents > 99"),
        ({"where": "documents > 5"}, "no column 'documents'"),
        ({"where": "drifted"}, "no column 'drifted'"),  # an explanation knows no training groups
        ({"items": ["a", "b"]}, "set query to its id"),
        ({"query": "q7", "where": "n_documents > 5"}, "leave out query, or where"),
    ],
)
def test_what_is_not_there_is_named(
    settings: dict[str, Any], message: str, shop: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        job(shop, tmp_path / "out", **settings).run()
