"""Fixtures for the tests of data."""

from known_datasets import make_dataset

__all__ = ["make_dataset"]
