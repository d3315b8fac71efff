"""A log of a shop: clicks, carts and orders."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob


def shop_log(folder: Path, *, groups: int = 40, seed: int = 0) -> Path:
    """A funnel: some of the clicked documents are put into the cart, and some of these ordered, for a price."""
    rng = np.random.default_rng(seed)
    n = 5 * groups
    click = rng.random(n) < 0.4
    cart = click & (rng.random(n) < 0.5)
    order = cart & (rng.random(n) < 0.5)
    columns = {
        "q": np.repeat(np.arange(groups), 5),
        "d": np.tile(np.arange(5), groups),
        "period": np.repeat(np.array(["a", "b", "c"])[3 * np.arange(groups) // groups], 5),
        "f1": rng.normal(size=n) + click,
        "f2": rng.normal(size=n) + order,
        "click": click.astype(np.int8),
        "cart": cart.astype(np.int8),
        "order": pa.array(np.where(order, 1.0, np.nan), from_pandas=True),
    }
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return folder / "log.parquet"


def shop_data(folder: Path) -> str:
    """A data set of this log, of 100 lists in each of three periods."""
    shop_log(folder, groups=300)
    return prepared(folder)


def prepared(folder: Path) -> str:
    """The data set of the log in a folder."""
    columns = {
        "query": "q",
        "item": "d",
        "period_column": "period",
        "features": ["f*"],
        "labels": {"click": "click", "cart": "cart", "order": "order"},
    }
    source = {"kind": "items", "columns": columns}
    config = PrepareConfig(inputs=[{"path": str(folder / "log.parquet")}], source=source)
    PrepareJob(out=str(folder / "data"), prepare=config).run()
    return str(folder / "data")
