"""The data sets of these tests."""

from known_groups import make_dataset

__all__ = ["make_dataset"]
