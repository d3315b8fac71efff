"""Fixtures for the tests of data."""

import os

import pytest
from known_datasets import make_dataset

from ltrscale.data.stream.readers import RowGroupReader, read_direct, read_on_spare_cores
from ltrscale.runtime.on_ray import read_with_ray

__all__ = ["make_dataset"]


@pytest.fixture(params=["direct", "threads", pytest.param("ray", marks=pytest.mark.ray)])
def read(request: pytest.FixtureRequest) -> RowGroupReader:
    """Each reader of row groups."""
    if request.param == "direct":
        return read_direct
    if request.param == "threads":
        request.getfixturevalue("monkeypatch").setattr(os, "sched_getaffinity", lambda _: range(6))
        return read_on_spare_cores
    request.getfixturevalue("ray_cluster")
    return read_with_ray
