"""A large log of events, and the time and memory of its `prepare`.

python tests/event_log.py FOLDER LISTS    # 900,000 lists are 10,000,000 events
"""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob

_FILES, _ITEMS = 8, 10
_SECOND = 10**6
_DAY = 86400 * _SECOND
SOURCE = {
    "kind": "events",
    "tables": [
        {"time": "time", "item": "item", "action": "action", "query": "query", "session": "session"}
        | {"shown": "view", "click": "click", "cart": "cart", "order": "order"}
        | {"position": "position", "revenue": "revenue", "columns": "f_*"}
    ],
    "columns": {"query": "query", "item": "item", "time": "time", "label": "grade", "features": ["f_*"]},
}


def write_events(folder: Path, lists: int) -> int:
    """Write shuffled events of two weeks: ten items a list, and for nine of them a goal, half without a query id."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows, goals = lists // _FILES * _ITEMS, lists // _FILES * _ITEMS // 9
    for k in range(_FILES):
        query = np.arange(k * lists // _FILES, (k + 1) * lists // _FILES)[: rows // _ITEMS]
        began = 1767571200 * _SECOND + rng.integers(0, 14 * _DAY, len(query))
        session = rng.integers(0, lists // 4, len(query))
        item = rng.integers(0, 50_000, len(query))[:, None] + np.arange(_ITEMS) * 7
        shown = {
            "action": pa.array(["view"] * rows),
            "query": pa.array(np.repeat(query, _ITEMS)),
            "session": pa.array(np.repeat(session, _ITEMS)),
            "item": pa.array(item.ravel()),
            "time": pa.array(np.repeat(began, _ITEMS), pa.timestamp("us", "UTC")),
            "position": pa.array(np.tile(np.arange(1, _ITEMS + 1), len(query))),
            **{f"f_{i}": pa.array(rng.normal(size=rows).astype(np.float32)) for i in range(5)},
        }
        of, place = rng.integers(0, len(query), goals), rng.integers(0, _ITEMS, goals)
        goal = {
            "action": pa.array(rng.choice(["click", "cart", "order"], goals, p=[0.8, 0.1, 0.1])),
            "query": pa.array(query[of], mask=rng.random(goals) < 0.5),
            "session": pa.array(session[of]),
            "item": pa.array(item[of, place]),
            "time": pa.array(began[of] + rng.integers(_SECOND, 1000 * _SECOND, goals), pa.timestamp("us", "UTC")),
            "revenue": pa.array(rng.random(goals) * 100),
        }
        events = pa.concat_tables([pa.table(shown), pa.table(goal)], promote_options="default")
        pq.write_table(events.take(pa.array(rng.permutation(len(events)))), folder / f"{k}.parquet")
    return (rows + goals) * _FILES


if __name__ == "__main__":
    place = Path(sys.argv[1])
    events = write_events(place / "log", int(sys.argv[2]))
    began = time.process_time()
    config = PrepareConfig.model_validate({"inputs": str(place / "log"), "source": SOURCE})
    PrepareJob(out=str(place / "out"), prepare=config).run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"events": events, "cpu_s": round(time.process_time() - began), "peak_bytes": peak}
    sys.stdout.write(json.dumps(found) + "\n")
