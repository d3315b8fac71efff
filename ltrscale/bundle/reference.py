"""What the rows of a bundle's training periods look like, feature by feature, for `ltrscale.scoring.skew`.

Shapes: N rows (documents), Q groups, Q1 = Q + 1 offsets, F features, V codes of a vocabulary.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ltrscale.batch import QueryGroups, group_index
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.origin import fills_of
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import spread

DOCUMENTS = 100_000
"""Documents that are looked at, of training and of the rows to score: whole row groups at equal distances."""
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
_CODES = 1 << 16
_REFERENCES = 4


class FeatureReference(Config):
    """A feature in the rows of training."""

    name: str
    kind: Literal["numeric", "categorical"]
    missing: float
    """Share of the documents without a value, or with `fill`."""
    fill: float | None = None
    """The number that stands for a missing value where these are filled; rows no longer tell the two apart."""
    quantiles: tuple[float, ...] = ()
    """Of a numeric feature the minimum, the 5% quantile, the median, the 95% quantile and the maximum; none without any
    value."""
    codes: tuple[int, ...] = ()
    """Of a categorical feature the codes, rising: the 65,536 most frequent ones, if there are more."""
    new: float = 0.0
    """Share of the documents with a code that no other list has: so often a further list has a new one."""


class Reference(Config):
    """What the rows of a bundle's training periods look like, with and without labels."""

    lists: int
    """Query groups that were looked at."""
    features: tuple[FeatureReference, ...]

    @classmethod
    def of(cls, groups: QueryGroups, features: Sequence[Feature], fills: Mapping[str, float] | None = None) -> Self:
        """The reference that these groups are; `fills` are the numbers that stand for missing values, by feature.

        Example:
            >>> groups = QueryGroups(torch.tensor([[1.0], [5.0], [float("nan")], [2.0]]), torch.tensor([0, 3, 4]))
            >>> (price,) = Reference.of(groups, [Feature(name="price")]).features
            >>> price.missing, price.quantiles
            (0.25, (1.0, 1.0, 2.0, 5.0, 5.0))
        """
        group_N = group_index(groups.offsets_Q1).numpy()
        columns = zip(features, groups.features_NF.numpy().T, strict=True)
        seen = tuple(_seen(f, values_N, group_N, (fills or {}).get(f.name)) for f, values_N in columns)
        return cls(lists=groups.n_groups, features=seen)


def sample_of(selection: Selection) -> QueryGroups | None:
    """The groups of a selection, labelled or not, of about `DOCUMENTS` documents; None if it serves no features."""
    if not selection.features:
        return None
    everything = replace(selection, labelled=False, kept_labelled=None, label_column="labels", tokens=())
    sample = spread(everything, documents=DOCUMENTS)
    parts = [(groups.features_NF, groups.lengths_Q) for groups in iterate(sample)]
    features, lengths = zip(*parts, strict=True)
    offsets_Q1 = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    return QueryGroups(torch.cat(features), offsets_Q1)


_references: dict[Hashable, Reference] = {}
"""Those made last in this process: a search trains on the same groups again and again."""


def reference_of(selection: Selection) -> Reference:
    """The reference of the row groups that a selection reads, with their groups without labels."""
    fills = fills_of(selection.read_as)
    key = (selection.hash, selection.features, tuple(sorted((fills or {}).items())))
    found = _references.pop(key, None)
    if found is None:
        groups = sample_of(selection)
        found = Reference(lists=0, features=()) if groups is None else Reference.of(groups, selection.features, fills)
    _references[key] = found
    for oldest in list(_references)[:-_REFERENCES]:
        del _references[oldest]
    return found


def _seen(
    feature: Feature, values_N: NDArray[np.float32], group_N: NDArray[np.int64], fill: float | None
) -> FeatureReference:
    there_N = has_value(values_N, fill)
    known_N = values_N[there_N]
    missing = 1 - len(known_N) / max(1, len(values_N))
    seen = FeatureReference(name=feature.name, kind=feature.kind, missing=missing, fill=fill)
    if not len(known_N):
        return seen
    if feature.kind == "numeric":
        quantiles = np.quantile(known_N, QUANTILES, method="nearest")
        return seen.replace(quantiles=tuple(map(float, quantiles)))
    pairs, counts = np.unique(np.stack([known_N.astype(np.int64), group_N[there_N]]), axis=1, return_counts=True)
    codes_V, first_V, lists_V = np.unique(pairs[0], return_index=True, return_counts=True)
    documents_V = np.add.reduceat(counts, first_V)
    kept = np.sort(np.argsort(-documents_V, kind="stable")[:_CODES])
    new = documents_V[lists_V == 1].sum() / len(values_N)
    return seen.replace(codes=tuple(codes_V[kept].tolist()), new=float(new))


def has_value(values_N: NDArray[np.float32], fill: float | None) -> NDArray[np.bool_]:
    """The documents with a value that does not stand for a missing one."""
    there_N: NDArray[np.bool_] = ~np.isnan(values_N)
    return there_N if fill is None else there_N & (values_N != np.float32(fill))
