"""Labelled query groups: their types, a data set's splits with the names of its periods, and all groups of a split."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.ranking.metrics import ndcg

Labelled = tuple[NDArray[np.float32], NDArray[np.float32] | None]
"""Features [L, F] and labels [L] of one query group; labels are None if it is unlabelled."""
Groups = list[Labelled]
WriteDataset = Callable[[Mapping[str, Sequence[Labelled]], Sequence[Feature]], str]
NAMES = ("train", "validation", "test")


def splits_of(url: str, **train: object) -> Splits:
    """The periods `train`, `validation` and `test` as the splits of these names; the first with more settings."""
    named = {name: {"data": url, "periods": name} for name in NAMES}
    return Splits.model_validate({**named, "train": {**named["train"], **train}})


def read(split: Split, *, labelled: bool = True) -> QueryGroups:
    """All groups of a split as one batch."""
    return QueryGroups.concat(list(iterate(select(split, labelled=labelled))))


def mean_ndcg(scores_N: Tensor, groups: QueryGroups) -> float:
    """The mean NDCG@5 of the groups for which it is defined."""
    assert groups.labels_N is not None
    return float(ndcg(scores_N, groups.labels_N, groups.offsets_Q1, k=5).nanmean())
