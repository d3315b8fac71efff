"""Cases for `make nightly` alone: repetitions of a law at other moments, delays and sizes."""

from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """The values of one case of a parametrization."""
    return pytest.param(*values, marks=pytest.mark.nightly)
