"""The columns of the synthetic log, as a config of `jobs.prepare` names them."""

COLUMN_MAPPING = {
    "query": "query_id",
    "item": "item_id",
    "label": "label",
    "time": "event_time",
    "features": ["f_*"],
    "categorical": ["c_*"],
}
