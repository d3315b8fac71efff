"""Principal components of all documents of a split, labelled or not, by streaming.

Shapes: N documents, F raw features, C numeric ones, K components.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ltrscale.data.dataset.split import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import Part, Run, cut, run_here
from ltrscale.errors import InputError
from ltrscale.models.fitting import Moments
from ltrscale.progress import progress
from ltrscale.views import Projection

_DOCS_PER_BATCH = 8192

T = TypeVar("T")


def fit_projection(selection: Selection, components: int, *, run: Run = run_here) -> Projection:
    """Principal components of the numeric features, each standardised, with the mean for a missing value.

    They are the eigenvectors of the features' correlation matrix with the largest eigenvalues, which two passes over
    the data gather in float64: means, then products of deviations. The largest entry of each is positive.

    Args:
        selection: all groups of the training split.
        components: how many.
        run: reads the data, here or in tasks of a Ray cluster; the result does not depend on it.

    Raises:
        InputError: there are fewer numeric features than components, or the data cannot be read.
    """
    numeric_C = np.array([i for i, feature in enumerate(selection.features) if feature.kind == "numeric"], np.int64)
    if len(numeric_C) < components:
        raise InputError(f"pca: {components} components of {len(numeric_C)} numeric features; lower pca")
    moments = Moments.none(len(numeric_C))
    for of_part in _over(selection, partial(_moments, numeric_C), "feature means", run):
        moments = moments.merge(of_part)
    products_CC = np.zeros((len(numeric_C), len(numeric_C)))
    for products_of_part_CC in _over(selection, partial(_products, numeric_C, moments.mean_F), "feature products", run):
        products_CC += products_of_part_CC
    imputed = Moments(np.full(len(numeric_C), selection.n_documents), moments.mean_F, products_CC.diagonal())
    scale_C = imputed.scale_F()
    components_KC = principal(products_CC / selection.n_documents / np.outer(scale_C, scale_C), components)
    return Projection(numeric_C, moments.mean_F, scale_C, components_KC)


def principal(correlation_CC: NDArray[np.float64], components: int) -> NDArray[np.float64]:
    """Unit eigenvectors [K, C] of a correlation matrix, largest eigenvalue first; their largest entries are positive.

    Args:
        correlation_CC: symmetric; a feature with one value has zeros.
        components: K.

    Example:
        >>> (principal(np.array([[1.0, -1.0], [-1.0, 1.0]]), 1) * np.sqrt(2)).round(9).tolist()
        [[1.0, -1.0]]
    """
    _, vectors_CC = np.linalg.eigh(correlation_CC)
    components_KC = vectors_CC.T[::-1][:components]
    # among entries equal up to rounding the first one decides
    sizes_KC = np.abs(components_KC).round(9)
    largest_K = components_KC[np.arange(components), sizes_KC.argmax(axis=1)]
    return np.asarray(components_KC * np.sign(largest_K)[:, None])


def _over(selection: Selection, function: Callable[[Part], T], what: str, run: Run) -> Iterator[T]:
    """What a function gives for each part of a selection, with a progress bar."""
    parts = cut(selection)
    with progress(what, selection.n_documents) as advance:
        for part, of_part in zip(parts, run(function, parts), strict=True):
            yield of_part
            advance(part.documents)


def _moments(numeric_C: NDArray[np.int64], part: Part) -> Moments:
    moments = Moments.none(len(numeric_C))
    for groups in iterate(part.selection, docs_per_batch=_DOCS_PER_BATCH):
        moments = moments.merge(Moments.of(groups.features_NF.numpy()[:, numeric_C]))
    return moments


def _products(numeric_C: NDArray[np.int64], mean_C: NDArray[np.float64], part: Part) -> NDArray[np.float64]:
    """Sums of products of deviations, shape [C, C]; a missing value deviates by 0."""
    products_CC = np.zeros((len(numeric_C), len(numeric_C)))
    for groups in iterate(part.selection, docs_per_batch=_DOCS_PER_BATCH):
        deviation_NC = groups.features_NF.numpy()[:, numeric_C] - mean_C
        deviation_NC[np.isnan(deviation_NC)] = 0.0
        products_CC += deviation_NC.T @ deviation_NC
    return products_CC
