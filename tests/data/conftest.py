"""Fixtures for the tests of data."""

import pytest
from known_datasets import make_dataset

from ltrscale.data.stream.readers import RowGroupReader, read_direct
from ltrscale.runtime.on_ray import read_with_ray

__all__ = ["make_dataset"]


@pytest.fixture(params=["direct", pytest.param("ray", marks=pytest.mark.ray)])
def read(request: pytest.FixtureRequest) -> RowGroupReader:
    """Either reader of row groups."""
    if request.param == "direct":
        return read_direct
    request.getfixturevalue("ray_cluster")
    return read_with_ray
