"""What the rows of the training periods look like, feature by feature, so that later rows that differ are noticed.

Shapes: N rows (documents), V codes of a vocabulary.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import Bools, Ints
from ltrscale.batch import QueryGroups, group_index
from ltrscale.config import Strict
from ltrscale.data.dataset.goals import LABELS
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.origin import fills_of
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import spread
from ltrscale.late import newest

DOCUMENTS = 100_000
"""Documents sampled from training and from the rows to score, in whole row groups at equal distances."""
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
_MOST_CODES = 1 << 16


class FeatureReference(Strict):
    """A feature in the rows of training."""

    name: str
    kind: Literal["numeric", "categorical"]
    missing: float
    """Share of the documents without a value, or with `fill`."""
    fill: float | None = None
    """The number that stands for a missing value where these are filled; rows no longer distinguish the two."""
    quantiles: tuple[float, ...] = ()
    """Of a numeric feature the minimum, the 5% quantile, the median, the 95% quantile and the maximum; none without any
    value."""
    codes: tuple[int, ...] = ()
    """Of a categorical feature the sorted codes; at most the 65,536 most frequent ones."""
    new: float = 0.0
    """Share of the documents with a code that no other list has: the expected share of new codes in further lists."""


class Reference(Strict):
    """What the rows of a bundle's training periods look like, with and without labels."""

    lists: int
    """Number of query groups sampled."""
    features: tuple[FeatureReference, ...]

    @classmethod
    def from_groups(
        cls, groups: QueryGroups, features: Sequence[Feature], fills: Mapping[str, float] | None = None
    ) -> Self:
        """The reference made of these groups; `fills` are the numbers that stand for missing values, by feature.

        Example:
            >>> import torch
            >>> groups = QueryGroups(torch.tensor([[1.0], [5.0], [float("nan")], [2.0]]), torch.tensor([0, 3, 4]))
            >>> (price,) = Reference.from_groups(groups, [Feature(name="price")]).features
            >>> price.missing, price.quantiles
            (0.25, (1.0, 1.0, 2.0, 5.0, 5.0))
        """
        group_N = group_index(groups.offsets_Q1).numpy()
        columns = zip(features, groups.features_NF.numpy().T, strict=True)
        references = tuple(_seen(f, values_N, group_N, (fills or {}).get(f.name)) for f, values_N in columns)
        return cls(lists=groups.n_groups, features=references)


def sample_of(selection: Selection) -> QueryGroups | None:
    """The groups of a selection, labelled or not, of about `DOCUMENTS` documents; None if it serves no features."""
    if not selection.features:
        return None
    all_groups = replace(selection, labelled=False, kept_labelled=None, label_weights=LABELS, tokens=())
    sample = iterate(spread(all_groups, documents=DOCUMENTS))
    return QueryGroups.concat([QueryGroups(groups.features_NF, groups.offsets_Q1) for groups in sample])


_references: dict[Hashable, Reference] = {}
"""References made last in this process, because a search trains on the same groups repeatedly."""


def reference_of(selection: Selection) -> Reference:
    """The reference of the row groups that a selection reads, unlabelled groups included."""
    fills = fills_of(selection.read_as)
    key = (selection.hash, selection.features, tuple(sorted((fills or {}).items())))

    def make() -> Reference:
        groups = sample_of(selection)
        if groups is None:
            return Reference(lists=0, features=())
        return Reference.from_groups(groups, selection.features, fills)

    return newest(_references, key, make)


def _seen(feature: Feature, values_N: NDArray[np.float32], group_N: Ints, fill: float | None) -> FeatureReference:
    has_value_N = has_value(values_N, fill)
    present_N = values_N[has_value_N]
    missing = 1 - len(present_N) / max(1, len(values_N))
    reference = FeatureReference(name=feature.name, kind=feature.kind, missing=missing, fill=fill)
    if not len(present_N):
        return reference
    if feature.kind == "numeric":
        quantiles = np.quantile(present_N, QUANTILES, method="nearest")
        return reference.replace(quantiles=tuple(map(float, quantiles)))
    pairs, counts = np.unique(np.stack([present_N.astype(np.int64), group_N[has_value_N]]), axis=1, return_counts=True)
    codes_V, first_V, lists_V = np.unique(pairs[0], return_index=True, return_counts=True)
    documents_V = np.add.reduceat(counts, first_V)
    kept = np.sort(np.argsort(-documents_V, kind="stable")[:_MOST_CODES])
    new = documents_V[lists_V == 1].sum() / len(values_N)
    return reference.replace(codes=tuple(codes_V[kept].tolist()), new=float(new))


def has_value(values_N: NDArray[np.float32], fill: float | None) -> Bools:
    """True for documents with a value other than the fill of missing ones."""
    has_value_N: Bools = ~np.isnan(values_N)
    return has_value_N if fill is None else has_value_N & (values_N != np.float32(fill))
