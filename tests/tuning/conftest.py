"""Fixtures of the tests of searches."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def importable() -> Iterator[None]:
    """Lets the processes of a Ray cluster import modules of the tests."""
    with pytest.MonkeyPatch.context() as environment:
        paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield
