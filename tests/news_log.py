"""The uses of columns in the sample of the news portal's log."""

from typing import Any

NEWS: dict[str, Any] = {
    "query": "impression_id",
    "item": "article_id",
    "label": "clicked",
    "time": "event_time",
    "features": ["f_*"],
    "categorical": ["c_*"],
}
