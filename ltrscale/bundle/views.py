"""The columns that trees see of documents: raw features, principal components of these, scores of other models.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F raw features, G columns of a view, C numeric features of a
projection, K components, M models.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.arrays import Doubles, Ints
from ltrscale.batch import QueryGroups, standardise_by_group, standardise_groups
from ltrscale.data.dataset.manifest import Feature

TreeColumns = Callable[[QueryGroups], NDArray[np.float32]]
"""Columns [N, G] of the documents of a batch with raw features [N, F]."""


@dataclass(frozen=True)
class View:
    """Names and kinds of the columns that trees see, and the function that makes the columns."""

    features: tuple[Feature, ...]
    columns: TreeColumns


def raw(features: Sequence[Feature], names: Sequence[str] | None = None, *, per_query: bool = False) -> View:
    """The raw features, or those with these names in their order.

    With `per_query` numeric ones are standardised within each query group; a missing value stays missing.
    """
    by_name = {feature.name: feature for feature in features}
    seen = tuple(features if names is None else (by_name[name] for name in names))
    places = None if names is None else [list(by_name).index(name) for name in names]
    numeric = [column for column, feature in enumerate(seen) if feature.kind == "numeric"]

    def columns(groups: QueryGroups) -> NDArray[np.float32]:
        features_NF = groups.features_NF.cpu().numpy()
        columns_NG = features_NF if places is None else features_NF[:, places]
        if per_query:
            columns_NG = columns_NG.copy()  # raw features may be the batch's own memory
            numbers = torch.from_numpy(columns_NG[:, numeric])
            columns_NG[:, numeric] = standardise_groups(numbers, groups.offsets_Q1.cpu()).numpy()
        return columns_NG

    return View(seen, columns)


@dataclass(frozen=True)
class Projection:
    """Principal components of standardised numeric features; a missing value counts as the mean.

    `component_k = sum_c components_KC[k, c] (x_c - mean_C[c]) / scale_C[c]` over the columns `features_C`.

    Example:
        >>> one = Projection(np.array([1]), np.array([2.0]), np.array([4.0]), np.array([[1.0]]))
        >>> one(np.float32([[9, 10], [9, np.nan]])).tolist()
        [[2.0], [0.0]]
    """

    features_C: Ints
    mean_C: Doubles
    scale_C: Doubles
    components_KC: Doubles

    def __call__(self, features_NF: NDArray[np.float32]) -> NDArray[np.float32]:
        """Components [N, K] of documents with these features."""
        z_NC = (features_NF[:, self.features_C].astype(np.float64) - self.mean_C) / self.scale_C
        z_NC[np.isnan(z_NC)] = 0.0
        return (z_NC @ self.components_KC.T).astype(np.float32)

    def to_bytes(self) -> bytes:
        """Content of a safetensors file, which `from_bytes` reads."""
        return safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in vars(self).items()})

    @classmethod
    def from_bytes(cls, data: bytes, n_features: int) -> Self:
        """The projection that `to_bytes` wrote, for this number of raw features.

        Raises:
            ValueError: the data hold no projection for them.
        """
        arrays = safetensors.numpy.load(data)
        projection = cls(**{field.name: arrays[field.name] for field in dataclasses.fields(cls)})
        features_C, n_columns = projection.features_C, len(projection.features_C)
        if features_C.dtype != np.int64 or not ((features_C >= 0) & (features_C < n_features)).all():
            raise ValueError(f"the projection reads other features than the {n_features}")
        if (projection.mean_C.shape, projection.scale_C.shape, projection.components_KC.shape[1:]) != (
            (n_columns,),
        ) * 3:
            raise ValueError("the arrays of the projection do not fit each other")
        return projection


def projected(view: View, projection: Projection) -> View:
    """A view of all features, with principal components of its columns after them."""
    names = [f"component {k}" for k in range(len(projection.components_KC))]

    def columns(groups: QueryGroups) -> NDArray[np.float32]:
        columns_NG = view.columns(groups)
        return np.concatenate([columns_NG, projection(columns_NG)], axis=1)

    return View((*view.features, *(Feature(name=name) for name in names)), columns)


def scored(view: View, scorers: Mapping[str, Callable[[QueryGroups], Tensor]], *, standardise: bool) -> View:
    """A view with the scores of some models, in float32, after its columns."""

    def column(scorer: Callable[[QueryGroups], Tensor], groups: QueryGroups) -> NDArray[np.float32]:
        scores_N = scorer(groups).double()
        if standardise:
            scores_N = standardise_by_group(scores_N, groups.offsets_Q1.cpu())
        return scores_N.float().numpy()

    def columns(groups: QueryGroups) -> NDArray[np.float32]:
        scores = [column(scorer, groups)[:, None] for scorer in scorers.values()]
        return np.concatenate([view.columns(groups), *scores], axis=1)

    return View((*view.features, *(Feature(name=f"score of {name}") for name in scorers)), columns)
