"""Data sets of query groups in three rooms: `ingest` makes them, `dataset` is what they are, `stream` serves them."""
