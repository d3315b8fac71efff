"""The data sets of these tests."""

from known_datasets import make_dataset

__all__ = ["make_dataset"]
