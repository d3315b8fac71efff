"""Data sets of query groups: making them from raw input, splitting them, and streaming them as ragged batches."""
