"""Growing trees with LightGBM: features are streamed into its bins, and missing objectives are added.

Shapes: N documents, M sampled documents, Q1 = groups + 1 offsets, F features.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightgbm as lgb
import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import Doubles, softmax_by_group
from ltrscale.bundle.boosters import renumber
from ltrscale.progress import log
from ltrscale.runtime.workers import rank_and_world
from ltrscale.trees.data import BinCodes, Labelled, meeting_points
from ltrscale.trees.library import StoppingWatch

GradientFunction = Callable[[Doubles, lgb.Dataset], tuple[Doubles, Doubles]]
"""Maps scores to the loss's first and second derivatives."""
_AT_ONCE = 16
"""Columns copied from rows at once, because a memory read also brings their neighbours."""


def boost(
    parameters: dict[str, Any],
    train: Labelled,
    validation: Labelled | None,
    codes: BinCodes,
    watch: StoppingWatch,
    *,
    unbiased: bool = False,
    temperature: float | None = None,
) -> bytes:
    """Add trees until the watch stops it; returns the model's text with the trees to keep.

    `temperature` is that of the softmax objective, which LightGBM lacks; None for our own objective.
    """
    if (train.labels_N < 0).any() or (train.labels_N != train.labels_N.round()).any():
        # LightGBM's NDCG checks that labels are grades, on the training groups too
        parameters = {**parameters, "metric": "none"}
    vocabularies = codes.known()
    # one sample fixes the borders for both splits, the same on all workers
    borders = _borders(renumber(codes.sample.take_MF(), vocabularies), list(vocabularies), parameters)
    train_set = _dataset(train, vocabularies, borders)
    validation_set = validation and _dataset(validation, vocabularies, borders)
    del borders  # it holds memory for the bins of the sample
    if unbiased:
        assert train.positions_N is not None
        train_set.set_position(train.positions_N.astype(np.int32))
    objective = None if temperature is None else _softmax_objective(train.labels_N, train.offsets_Q1, temperature)
    booster = lgb.Booster({**parameters, **_network()}, train_set)
    if validation_set is not None:
        booster.add_valid(validation_set, "validation")
    try:
        _grow(booster, objective, watch, f"ndcg@{parameters['eval_at'][0]}", parameters["min_data_in_leaf"])
    finally:
        booster.free_network()
    # LightGBM's text has a place for the categories of data frames; the scorer reads the codes from there.
    booster.pandas_categorical = [codes_of_one.astype(int).tolist() for codes_of_one in vocabularies.values()]
    return str(booster.model_to_string(num_iteration=watch.kept)).encode()


def _grow(
    booster: lgb.Booster, objective: GradientFunction | None, watch: StoppingWatch, metric: str, min_data_in_leaf: int
) -> None:
    """Add trees until the watch stops it, or there is nothing to split."""
    last: dict[str, Doubles] = {}

    # a custom metric, because LightGBM passes it the scores
    def look(scores_N: Doubles, _: lgb.Dataset) -> tuple[str, float, bool]:
        last["scores_N"] = scores_N
        return "ours", 0.0, True

    stuck = enough = False
    while not (stuck or enough):
        stuck = booster.update(fobj=objective)
        values = {name: value for _, name, value, _ in booster.eval_valid(look)}
        enough = watch(last.get("scores_N"), values.get(metric))
    if stuck and watch.trees == 1:
        log.warning(
            "no split leaves min_data_in_leaf = %d training documents on both sides or lowers the loss: "
            "all scores are equal", min_data_in_leaf,
        )  # fmt: skip


def _network() -> dict[str, Any]:
    """The parameters that connect LightGBM to the other workers; empty for one worker."""
    rank, world = rank_and_world()
    if world == 1:
        return {}
    points = meeting_points()
    return {
        "machines": ",".join(f"{host}:{port}" for host, port in points),
        "num_machines": world,
        "local_listen_port": points[rank][1],
        "tree_learner": "data",
        "pre_partition": True,  # each worker holds only its share
    }


class _Dataset(lgb.Dataset):  # type: ignore[misc]
    """A data set that passes on all its parameters; LightGBM's own drops the threads and the verbosity of a stream."""

    def get_params(self) -> dict[str, Any]:
        return dict(self.params)


def _borders(rows_MF: NDArray[np.float32], categorical: Sequence[int], parameters: Mapping[str, Any]) -> lgb.Dataset:
    """The borders of bins that LightGBM finds in a sample, without the slower binning of the sample itself."""
    values, places = [], []
    for first in range(0, rows_MF.shape[1], _AT_ONCE):
        for column_M in rows_MF[:, first : first + _AT_ONCE].T.astype(np.float64, order="C"):
            # without zeros, as LightGBM samples a matrix; NaN stays
            place_M = np.flatnonzero(~(np.abs(column_M) <= lgb.basic.ZERO_THRESHOLD))
            values.append(column_M[place_M])
            places.append(place_M.astype(np.int32))
    borders = _Dataset(None, params={**parameters, "categorical_feature": list(categorical)})
    return borders._init_from_sample(values, places, len(rows_MF), len(rows_MF))


def _dataset(groups: Labelled, vocabularies: Mapping[int, NDArray[np.float32]], borders: lgb.Dataset) -> lgb.Dataset:
    """A split in bins with these borders; columns have no names, because LightGBM refuses some."""
    dataset = _Dataset(None, params=borders.params)._init_from_ref_dataset(len(groups.labels_N), borders._handle)
    for rows_NF in groups.rows(vocabularies):
        dataset._push_rows(rows_NF)
    dataset.set_label(groups.labels_N)
    dataset.set_weight(groups.weights_N)
    dataset.set_group(groups.lengths_Q)
    dataset.set_init_score(groups.start_N)
    return dataset


def _softmax_objective(targets_N: Doubles, offsets_Q1: NDArray[np.int64], temperature: float) -> GradientFunction:
    """Softmax cross entropy of each group against softmax(target / temperature), as a custom objective."""
    # -sum t log p with p the softmax of scores, t of targets: the derivatives are p - t and, on the diagonal, p (1 - p)
    target_N = softmax_by_group(targets_N / temperature, offsets_Q1)

    def objective(scores_N: Doubles, _: lgb.Dataset) -> tuple[Doubles, Doubles]:
        p_N = softmax_by_group(scores_N, offsets_Q1)
        return p_N - target_N, np.maximum(p_N * (1 - p_N), 1e-16)  # above 0: leaf values divide by its sum

    return objective
