"""A bundle as a model of MLflow's flavour `python_function`; MLflow imports this module by its name."""

from typing import Any

from ltrscale.api.estimator import Ranker


class _Model:
    """The model that MLflow calls."""

    def __init__(self, ranker: Ranker) -> None:
        self._ranker = ranker

    def predict(self, model_input: Any, params: Any = None) -> Any:  # noqa: ARG002
        """Scores [N] of the rows of a data frame, in their order; it has the columns of the raw log."""
        return self._ranker.predict(model_input)


def _load_pyfunc(path: str) -> _Model:
    """Load the model from a directory with the bundle's files; MLflow finds this function by its name."""
    return _Model(Ranker.load(path))
