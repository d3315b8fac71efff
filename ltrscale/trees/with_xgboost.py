"""Growing trees with XGBoost: features are streamed into its bins, which may stay outside the device's memory.

Shapes: N documents, Q groups, F features.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xgboost as xgb
from numpy.typing import NDArray
from xgboost.collective import CommunicatorContext
from xgboost.tracker import RabitTracker

from ltrscale import storage
from ltrscale.arrays import Doubles
from ltrscale.runtime.workers import rank_and_world
from ltrscale.trees.data import BinCodes, Labelled, all_workers, own_address
from ltrscale.trees.library import StoppingWatch

_PAGE = 1 << 16
"""Documents of a page of external memory, at least; every tree reads all pages many times."""


def has_cuda() -> bool:
    """Whether XGBoost was built for GPUs; one that was not, or that sees none, warns and uses the CPU."""
    return bool(xgb.build_info()["USE_CUDA"])


def boost(
    parameters: Mapping[str, Any],
    train: Labelled,
    validation: Labelled | None,
    codes: BinCodes,
    watch: StoppingWatch,
    *,
    by_group: bool,
    by_position: bool,
    external_memory: bool = False,
) -> bytes:
    """Add trees until the watch stops it; returns the model's JSON with the trees to keep.

    Ranking objectives of XGBoost weight groups, not documents: a group's weight is the mean of its documents'.

    Of `codes` only the vocabularies count: XGBoost makes its own bins, from all documents.
    """
    vocabularies, device = codes.known(), torch.device(parameters["device"])
    options = {"max_bin": parameters["max_bin"], "enable_categorical": True, "nthread": parameters["nthread"]}
    matrix = xgb.ExtMemQuantileDMatrix if external_memory else xgb.QuantileDMatrix
    with _collective(), storage.scratch.directory() as folder:
        cache = str(folder / "bins") if external_memory else None
        rows = _Rows(train, vocabularies, device, cache, by_group=by_group, by_position=by_position)
        train_set = matrix(rows, **options)
        validation_set = None
        if validation is not None:
            validation_rows = _Rows(validation, vocabularies, device, cache, by_group=True)
            validation_set = matrix(validation_rows, ref=train_set, **options)
        booster = _grow(parameters, train_set, validation_set, watch)
        del rows, train_set  # XGBoost deletes its files
    kept = booster[: watch.kept]
    kept.set_attr(codes=json.dumps([codes_of_one.astype(int).tolist() for codes_of_one in vocabularies.values()]))
    return bytes(kept.save_raw("json"))


def _grow(
    parameters: Mapping[str, Any], train_set: xgb.DMatrix, validation_set: xgb.DMatrix | None, watch: StoppingWatch
) -> xgb.Booster:
    cached = [train_set] if validation_set is None else [train_set, validation_set]
    booster = xgb.Booster(dict(parameters), cached)
    enough = False
    while not enough:
        booster.update(train_set, watch.trees)
        if validation_set is None:
            enough = watch()
            continue
        evaluated = booster.eval(validation_set, iteration=watch.trees)
        # evaluates only the new tree, because XGBoost caches the scores of matrices that its booster knows
        scores_N = booster.predict(validation_set, output_margin=True)
        enough = watch(scores_N.astype(np.float64), float(evaluated.rpartition(":")[2]))
    return booster


class _Rows(xgb.DataIter):  # type: ignore[misc]
    """A split in chunks of whole groups, on the device; with a `cache` (a file prefix) bins are in external memory."""

    def __init__(
        self,
        groups: Labelled,
        vocabularies: Mapping[int, NDArray[np.float32]],
        device: torch.device,
        cache: str | None,
        *,
        by_group: bool,
        by_position: bool = False,
    ) -> None:
        self._device, self._page = device, 1 if cache is None else _PAGE
        self._groups, self._vocabularies, self._by_group = groups, vocabularies, by_group
        self._group_N = np.repeat(np.arange(len(groups.ids_Q)), groups.lengths_Q)
        self._order_N = np.arange(len(groups.labels_N))
        if by_position:
            assert groups.positions_N is not None
            # XGBoost takes a document's place in its group as its position. Batches hold whole groups in order, so the
            # rows of a batch stay in it.
            self._order_N = np.lexsort((groups.positions_N, self._group_N))
        self._types = ["c" if i in vocabularies else "q" for i in range(len(groups.view.features))]
        self.reset()
        super().__init__(cache)

    def reset(self) -> None:
        self._rows = _pages(self._groups.rows(self._vocabularies), self._page)
        self._first = 0

    def next(self, input_data: Callable[..., None]) -> bool:
        """Pass the next rows to XGBoost; returns whether there were any."""
        features_NF = next(self._rows, None)
        if features_NF is None:
            return False
        rows = self._order_N[self._first : self._first + len(features_NF)]
        features_NF = features_NF[rows - self._first]
        self._first += len(rows)
        row_data: dict[str, Any] = {"label": self._groups.labels_N[rows]}
        if self._by_group:
            row_data["qid"] = self._group_N[rows]
        if self._groups.weights_N is not None:
            weights_N = self._groups.weights_N[rows]
            row_data["weight"] = _means(weights_N, row_data["qid"]) if self._by_group else weights_N
        if self._device.type == "cpu":
            input_data(data=features_NF, feature_types=self._types, **row_data)
            return True
        # what `input_data` does, which would need CuPy; the tensor lives until XGBoost asks for the next one
        self._on_device_NF = torch.from_numpy(features_NF).to(self._device)
        self.proxy._ref_data_from_cuda_interface(self._on_device_NF)
        self.proxy.set_info(feature_types=self._types, **row_data)
        return True


def _pages(chunks: Iterator[NDArray[np.float32]], documents: int) -> Iterator[NDArray[np.float32]]:
    """Chunks of rows joined until they have at least so many documents; the last page may have fewer."""
    page: list[NDArray[np.float32]] = []
    for chunk in chunks:
        page.append(chunk)
        if sum(map(len, page)) >= documents:
            yield page[0] if len(page) == 1 else np.concatenate(page)
            page = []
    if page:
        yield np.concatenate(page)


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
