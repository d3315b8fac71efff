"""Data sets of query groups in three rooms: `ingest` makes them, `dataset` describes them, `stream` serves them."""
