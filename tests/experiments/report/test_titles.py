"""Titles of documents: from the rows that made a data set, or the tables that joined them."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ltrscale.config import validate
from ltrscale.errors import InputError
from ltrscale.experiments.report.differences import titles_of
from ltrscale.ingest.prepare import PrepareJob

IDS = [f"{i}" for i in range(20)]
TITLES = {item: f"chair no. {item}" for item in IDS}


def rows(column: str, *, week: str = "a", title: str = "chair no. {}") -> pd.DataFrame:
    """Lists of five items, whose numbers are their ids, with a title and other texts beside them."""
    made = [
        {
            "query": f"{week}{q}",
            "item": (q + i) % 20,
            "brand_name": ["Alder", "Birch"][(q + i) % 2],
            column: title.format((q + i) % 20),
            "query_title": f"text of {q}-{i}",
            "x": float(i),
            "label": float(i == 0),
            "week": week,
        }
        for q in range(20)
        for i in range(5)
    ]
    return pd.DataFrame(made)


def prepared(folder: Path, log: list[Path], **source: Any) -> str:
    columns = {"query": "query", "item": "item", "label": "label", "period_column": "week", "features": ["x"]}
    settings = {"inputs": [str(path) for path in log], "source": {"kind": "items", "columns": columns, **source}}
    validate(PrepareJob, {"out": str(folder / "data"), "prepare": settings}, "test").run()
    return str(folder / "data")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("column", ["title", "Titel", "product_name", "artikelbezeichnung", "nombre"])
def test_they_are_found_in_the_raw_rows_by_name_and_form(column: str, form: str, tmp_path: Path) -> None:
    """A brand has two texts for all items, and the text of a query several for one: neither is a title."""
    log = tmp_path / f"log.{form}"
    made = rows(column)
    made.to_csv(log, index=False) if form == "csv" else made.to_parquet(log)
    url = prepared(tmp_path, [log])
    assert titles_of([url], {"3", "7", "unknown"}) == (column, {item: TITLES[item] for item in ("3", "7")})
    assert titles_of([url], {"4"}, "brand_name") == ("brand_name", {"4": "Alder"})
    with pytest.raises(InputError, match=r"titles: no raw rows of .* have a column 'colour'"):
        titles_of([url], {"4"}, "colour")
    log.unlink()
    assert titles_of([url], {"3"}) == ("", {})


def test_the_newest_files_come_first_and_all_are_read_for_what_is_missing(tmp_path: Path) -> None:
    logs = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    rows("title", week="a").to_parquet(logs[0])
    rows("title", week="b", title="new no. {}").query("item < 10").to_parquet(logs[1])
    assert titles_of([prepared(tmp_path, logs)], {"3", "12"}) == ("title", {"3": "new no. 3", "12": "chair no. 12"})


@pytest.mark.slow
def test_the_next_data_set_is_read_only_for_what_is_missing(tmp_path: Path) -> None:
    urls = []
    for column in ("title", "name"):
        (tmp_path / column).mkdir()
        rows(column).to_parquet(tmp_path / column / "log.parquet")
        urls.append(prepared(tmp_path / column, [tmp_path / column / "log.parquet"]))
    assert titles_of(urls, {"3"}) == ("title", {"3": TITLES["3"]})
    assert titles_of(urls, {"3", "unknown"}) == ("name", {"3": TITLES["3"]})


def test_a_table_that_joins_has_them_though_it_joins_another_column(tmp_path: Path) -> None:
    rows("z").drop(columns=["z", "query_title"]).to_parquet(tmp_path / "log.parquet")
    catalogue = pd.DataFrame({"sku": range(20), "title": TITLES.values(), "price": range(20)})
    catalogue.to_csv(tmp_path / "items.csv", index=False)
    join = {"path": str(tmp_path / "items.csv"), "key": {"item": "sku"}, "columns": ["price"]}
    url = prepared(tmp_path, [tmp_path / "log.parquet"], joins=[join])
    assert titles_of([url], {"5"}) == ("title", {"5": TITLES["5"]})
