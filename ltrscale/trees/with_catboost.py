"""Growing trees with CatBoost, which takes no stream: it gets the float matrix of all documents.

Shapes: N documents, F features.
"""

import itertools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.arrays import Doubles
from ltrscale.bundle.boosters import catboost_table, import_catboost
from ltrscale.errors import InputError
from ltrscale.trees.data import BinCodes, Labelled
from ltrscale.trees.library import StoppingWatch

_REFUSALS = ("All features are either constant or ignored", "All train targets are equal")


def boost(
    parameters: Mapping[str, Any],
    train: Labelled,
    validation: Labelled | None,
    codes: BinCodes,
    watch: StoppingWatch,
    *,
    stop_on: int,
    calls_back: bool = True,
) -> bytes:
    """Add trees until the watch stops it; returns the trees to keep in CatBoost's own format.

    CatBoost's ranking objectives weight groups, not documents: a group's weight is the mean of its documents'.

    `stop_on` is the cut-off of CatBoost's own NDCG, reported beside ours. On a GPU CatBoost has no callbacks: without
    `calls_back` all trees are grown before the watch sees the first. It keeps the same trees, but CatBoost's NDCG is
    not reported.

    Raises:
        InputError: all features, or all targets, are the same for all documents; or CatBoost is not installed.
    """
    catboost = import_catboost()
    vocabularies = codes.known()
    train_pool = _pool(catboost, train, vocabularies)
    validation_pool = validation and _pool(catboost, validation, vocabularies)
    look_at_scores = _Look(len(validation.labels_N)) if validation and calls_back else None
    notify = _Notify(look_at_scores, watch, f"NDCG:top={stop_on};type=Exp")
    metrics = (
        {"eval_metric": look_at_scores, "custom_metric": [f"{notify.metric};hints=skip_train~true"]}
        if look_at_scores
        else {}
    )
    own_settings = {
        "use_best_model": False,  # the watch decides which trees to keep
        "allow_writing_files": False,
        "logging_level": "Silent",
    }
    model = catboost.CatBoost({**parameters, **metrics, **own_settings})
    with warnings.catch_warnings(), _refusals(catboost, train.split):
        warnings.filterwarnings("ignore", message="Can't optim")  # CatBoost would compile `_Look` if it could
        if calls_back:
            model.fit(train_pool, eval_set=validation_pool, callbacks=[notify])
        else:
            model.fit(train_pool)
            _watch_afterwards(model, validation_pool, watch)
    if notify.error is not None:
        raise notify.error
    model.shrink(watch.kept)
    return _content(model, [codes_of_one.astype(int).tolist() for codes_of_one in vocabularies.values()])


def _pool(catboost: Any, groups: Labelled, vocabularies: Mapping[int, NDArray[np.float32]]) -> Any:
    features_NF = np.empty((len(groups.labels_N), len(groups.view.features)), np.float32)
    first = 0
    for rows_NF in groups.rows(vocabularies):
        features_NF[first : first + len(rows_NF)] = rows_NF
        first += len(rows_NF)
    group_N = np.repeat(np.arange(len(groups.ids_Q)), groups.lengths_Q)
    weights = {}
    if groups.weights_N is not None:
        means_Q = np.bincount(group_N, weights=groups.weights_N) / groups.lengths_Q
        weights["group_weight"] = means_Q[group_N]
    return catboost.Pool(
        catboost_table(features_NF, vocabularies),
        label=groups.labels_N,
        group_id=group_N,
        cat_features=list(vocabularies),
        **weights,
    )


def _watch_afterwards(model: Any, validation_pool: Any, watch: StoppingWatch) -> None:
    """Replay the trees of a finished model to a watch, until it has enough."""
    no_scores = itertools.repeat(None, model.tree_count_)
    for scores_N in no_scores if validation_pool is None else model.staged_predict(validation_pool):
        if watch(scores_N):
            return


@contextmanager
def _refusals(catboost: Any, split: str) -> Iterator[None]:
    """Turn CatBoost's refusals of the user's data into one line; other errors stay unchanged."""
    try:
        yield
    except catboost.CatBoostError as error:
        reason = next((refusal for refusal in _REFUSALS if refusal in str(error)), None)
        if reason is None:
            raise
        raise InputError(
            f"{split}: CatBoost finds nothing to learn ({reason}); take other periods or features"
        ) from error


class _Look:
    """Captures scores as a metric: CatBoost passes it those of the training, then of the validation documents."""

    def __init__(self, n_documents: int) -> None:
        self._n_documents = n_documents
        self.scores_N: Doubles = np.zeros(0)

    def __deepcopy__(self, _: object) -> "_Look":
        return self  # CatBoost copies its parameters, and would pass the scores to the copy

    def is_max_optimal(self) -> bool:
        """CatBoost requires this method; the answer has no effect here."""
        return True

    def evaluate(self, approxes: Sequence[Doubles], target: Doubles, weight: Doubles | None) -> tuple[float, float]:  # noqa: ARG002
        """Keep the scores; the last call of a round has those of the validation split."""
        if len(approxes[0]) == self._n_documents:
            self.scores_N = np.array(approxes[0])
        return 0.0, 1.0

    def get_final_error(self, error: float, weight: float) -> float:  # noqa: ARG002
        """CatBoost requires this method; the value is not used."""
        return error


class _Notify:
    """Notifies the watch of each tree; keeps what it raises, because CatBoost would replace the error."""

    def __init__(self, look: _Look | None, watch: StoppingWatch, metric: str) -> None:
        self._look, self._watch, self.metric = look, watch, metric
        self.error: Exception | None = None

    def after_iteration(self, info: Any) -> bool:
        """Whether to continue."""
        try:
            if self._look is None:
                return not self._watch()
            return not self._watch(self._look.scores_N, info.metrics["validation"][self.metric][-1])
        except Exception as error:
            self.error = error
            return False


def _content(model: Any, codes: list[list[int]]) -> bytes:
    """The model file, without CatBoost's random id and time, so that equal trees give equal bytes."""
    metadata = model.get_metadata()
    metadata["model_guid"] = metadata["train_finish_time"] = ""
    metadata["codes"] = json.dumps(codes)
    with storage.scratch.directory() as folder:
        path = folder / "model.cbm"
        model.save_model(str(path))
        return path.read_bytes()
