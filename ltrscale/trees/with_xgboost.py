"""Growing trees with XGBoost: features are streamed into its bins.

Shapes: N documents, Q groups, F features.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray
from xgboost.collective import CommunicatorContext
from xgboost.tracker import RabitTracker

from ltrscale.arrays import Doubles
from ltrscale.runtime.workers import rank_and_world
from ltrscale.trees.data import BinCodes, Labelled, all_workers, own_address
from ltrscale.trees.library import StoppingWatch


def boost(
    parameters: Mapping[str, Any],
    train: Labelled,
    targets_N: Doubles,
    validation: Labelled | None,
    codes: BinCodes,
    watch: StoppingWatch,
    *,
    by_group: bool,
    by_position: bool,
) -> bytes:
    """Add trees until the watch ends it; returns the model's JSON with the trees to keep.

    Ranking objectives of XGBoost weight groups, not documents: a group's weight is the mean of its documents'.

    Of `codes` only the vocabularies count: XGBoost makes its own bins, from all documents.
    """
    vocabularies = codes.known()
    options = {"max_bin": parameters["max_bin"], "enable_categorical": True, "nthread": parameters["nthread"]}
    with _collective():
        rows = _Rows(train, targets_N, vocabularies, by_group=by_group, by_position=by_position)
        train_set = xgb.QuantileDMatrix(rows, **options)
        validation_set = None
        if validation is not None:
            validation_rows = _Rows(validation, validation.labels_N, vocabularies, by_group=True)
            validation_set = xgb.QuantileDMatrix(validation_rows, ref=train_set, **options)
        cached = [train_set] if validation_set is None else [train_set, validation_set]
        booster = xgb.Booster(dict(parameters), cached)
        enough = False
        while not enough:
            booster.update(train_set, watch.trees)
            if validation_set is None:
                enough = watch()
                continue
            evaluated = booster.eval(validation_set, iteration=watch.trees)
            # evaluates only the new tree, for XGBoost caches the scores of matrices that its booster knows
            scores_N = booster.predict(validation_set, output_margin=True)
            enough = watch(scores_N.astype(np.float64), float(evaluated.rpartition(":")[2]))
    kept = booster[: watch.kept]
    kept.set_attr(codes=json.dumps([codes_of_one.astype(int).tolist() for codes_of_one in vocabularies.values()]))
    return bytes(kept.save_raw("json"))


class _Rows(xgb.DataIter):  # type: ignore[misc]
    """The rows of a split in chunks of whole groups, some thousand rows each; XGBoost reads them four times.

    With `by_group`, groups are weighted, otherwise documents. With `by_position`, each group is sorted by position, for
    XGBoost takes the place in its group for a document's position.
    """

    def __init__(
        self,
        groups: Labelled,
        labels_N: Doubles,
        vocabularies: Mapping[int, NDArray[np.float32]],
        *,
        by_group: bool,
        by_position: bool = False,
    ) -> None:
        self._groups, self._labels_N, self._vocabularies, self._by_group = groups, labels_N, vocabularies, by_group
        self._group_N = np.repeat(np.arange(len(groups.ids_Q)), groups.lengths_Q)
        self._order_N = np.arange(len(labels_N))
        if by_position:
            assert groups.positions_N is not None
            # groups stay one after the other and batches hold whole ones, so the rows of a batch stay in it
            self._order_N = np.lexsort((groups.positions_N, self._group_N))
        self._types = ["c" if i in vocabularies else "q" for i in range(len(groups.view.features))]
        self.reset()
        super().__init__()

    def reset(self) -> None:
        """Start again at the first row."""
        self._rows: Iterator[NDArray[np.float32]] = self._groups.rows(self._vocabularies)
        self._first = 0

    def next(self, input_data: Callable[..., None]) -> bool:
        """Pass the next rows to XGBoost; returns whether there were any."""
        features_NF = next(self._rows, None)
        if features_NF is None:
            return False
        rows = self._order_N[self._first : self._first + len(features_NF)]
        features_NF = features_NF[rows - self._first]
        self._first += len(rows)
        row_data: dict[str, Any] = {"label": self._labels_N[rows]}
        if self._by_group:
            row_data["qid"] = self._group_N[rows]
        if self._groups.weights_N is not None:
            weights_N = self._groups.weights_N[rows]
            row_data["weight"] = _means(weights_N, row_data["qid"]) if self._by_group else weights_N
        input_data(data=features_NF, feature_types=self._types, **row_data)
        return True


def _means(values_N: Doubles, group_N: NDArray[np.int64]) -> Doubles:
    """Mean of each group's values, shape [Q]; the documents of a group follow one another."""
    starts_Q = np.flatnonzero(np.diff(group_N, prepend=-1))
    return np.asarray(np.add.reduceat(values_N, starts_Q) / np.diff(starts_Q, append=len(group_N)))


@contextmanager
def _collective() -> Iterator[None]:
    """Connect the XGBoosts of all workers while the block runs."""
    rank, world = rank_and_world()
    if world == 1:
        yield
        return
    host = own_address()
    # sorted by task id, so that XGBoost's ranks are ours
    tracker = RabitTracker(world, host, sortby="task") if rank == 0 else None
    if tracker is not None:
        tracker.start()
    arguments = all_workers(tracker.worker_args() if tracker is not None else {})[0]
    with CommunicatorContext(**arguments, dmlc_task_id=f"{rank:06}"):
        yield
    if tracker is not None:
        tracker.wait_for()
