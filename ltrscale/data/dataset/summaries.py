"""Summaries of features and labels for the manifest, computed while rows stream past.

Shapes: N rows, Q groups, Q1 = Q + 1 offsets, F features, K of them; M groups of L documents.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ltrscale.arrays import Bools, Floats, Ints, Moments
from ltrscale.data.dataset.manifest import Feature, FeatureSummary

_LABELS = 64
_VALUES = 1 << 16
_FIRST = 256
_IDENTIFYING, _SUSPECT = 0.5, 0.95
"""Numbers may be counts, which can be unique in short lists without being ids, so they need a higher share."""


class FeatureStats:
    """Missing count, range, mean, deviation and unique share of each feature, in one pass and float64.

    The deviation is that of the population.

    Example:
        >>> stats = FeatureStats(1)
        >>> stats.add(np.array([[1], [np.nan]], np.float32), np.array([0, 2]))
        >>> stats.add(np.array([[3]], np.float32), np.array([0, 1]))
        >>> stats.summaries()
        (FeatureSummary(missing=1, minimum=1.0, maximum=3.0, mean=2.0, std=1.0, unique_in_group=0.5),)
    """

    def __init__(self, n_features: int) -> None:
        self._missing_F = np.zeros(n_features, dtype=np.int64)
        self._minimum_F = np.full(n_features, np.inf)
        self._maximum_F = np.full(n_features, -np.inf)
        self._moments = Moments.none(n_features)
        self._unique = UniqueInGroup(n_features)

    @property
    def grouped(self) -> int:
        """Documents in groups of at least two."""
        return self._unique.grouped

    def add(self, features_NF: Floats, offsets_Q1: Ints) -> None:
        """Add the rows of whole groups, in parts that fit the processor's cache."""
        step = max(_VALUES // features_NF.shape[1], 1)
        for start in range(0, len(features_NF), step):
            part_NF = features_NF[start : start + step]
            moments = Moments.from_values(part_NF)
            self._moments = self._moments.merge(moments)
            self._missing_F += len(part_NF) - moments.count_F
            self._minimum_F = np.fmin(self._minimum_F, np.fmin.reduce(part_NF, axis=0))  # fmin and fmax ignore NaN
            self._maximum_F = np.fmax(self._maximum_F, np.fmax.reduce(part_NF, axis=0))
        self._unique.add(features_NF, offsets_Q1)

    @classmethod
    def from_summaries(cls, summaries: Sequence[FeatureSummary], documents: int, grouped: int) -> "FeatureStats":
        """Restore statistics from summaries, the number of documents, and the number in groups of at least two."""
        stats = cls(len(summaries))
        for f, summary in enumerate(summaries):
            stats._missing_F[f] = summary.missing
            if summary.std is not None:
                count_F, mean_F, squares_F = stats._moments
                count_F[f], mean_F[f] = documents - summary.missing, summary.mean
                squares_F[f] = summary.std**2 * count_F[f]
                stats._minimum_F[f], stats._maximum_F[f] = summary.minimum, summary.maximum
        stats._unique = UniqueInGroup.from_shares([summary.unique_in_group for summary in summaries], grouped)
        return stats

    def merge(self, other: "FeatureStats") -> None:
        """Add the rows of other statistics."""
        self._minimum_F = np.fmin(self._minimum_F, other._minimum_F)
        self._maximum_F = np.fmax(self._maximum_F, other._maximum_F)
        self._missing_F += other._missing_F
        self._moments = self._moments.merge(other._moments)
        self._unique.merge(other._unique)

    def summaries(self) -> tuple[FeatureSummary, ...]:
        """One for each feature, in order."""
        count_F, mean_F, std_F = self._moments.count_F, self._moments.mean_F, self._moments.std_F()
        shares = self._unique.shares()
        return tuple(
            FeatureSummary(missing=int(self._missing_F[f]), unique_in_group=shares[f])
            if not count_F[f]
            else FeatureSummary(
                missing=int(self._missing_F[f]),
                minimum=float(self._minimum_F[f]),
                maximum=float(self._maximum_F[f]),
                mean=float(mean_F[f]),
                std=float(std_F[f]),
                unique_in_group=shares[f],
            )
            for f in range(len(std_F))
        )


class UniqueInGroup:
    """Counts the documents with a value of a feature that no other document of their group has.

    Only features of whole numbers are counted, which includes all categories, because measurements differ anyway.
    Groups of one document are left out; a missing value is not unique.
    """

    def __init__(self, n_features: int) -> None:
        self.grouped = 0
        """Documents in groups of at least two."""
        self._unique_F = np.zeros(n_features, dtype=np.int64)
        self._whole_F = np.ones(n_features, dtype=np.bool_)

    def add(self, features_NF: Floats, offsets_Q1: Ints) -> None:
        """Add the rows of whole groups; those of a length together, in parts that fit the processor's cache."""
        lengths_Q = np.diff(offsets_Q1)
        self.grouped += int(lengths_Q[lengths_Q > 1].sum())
        self._whole_F &= _whole(features_NF[:_FIRST])  # most features with fractions are left out here
        columns_K = np.flatnonzero(self._whole_F)
        x_KN = np.ascontiguousarray(features_NF[:, columns_K].T)
        self._whole_F[columns_K] = _whole(x_KN.T)
        at_once = max(_VALUES // max(len(columns_K), 1), 1)  # documents
        for length in np.unique(lengths_Q[lengths_Q > 1]):
            starts_M = offsets_Q1[:-1][lengths_Q == length]
            for part_M in np.array_split(starts_M, -(-len(starts_M) * length // at_once)):
                x_KML = x_KN.take(part_M[:, None] + np.arange(length), axis=1)
                self._unique_F[columns_K] += _unique(x_KML)

    @classmethod
    def from_shares(cls, shares: Sequence[float | None], grouped: int) -> "UniqueInGroup":
        """Restore counts from shares."""
        unique = cls(len(shares))
        unique.grouped = grouped
        unique._whole_F[:] = [share is not None for share in shares]
        unique._unique_F[:] = [round((share or 0.0) * grouped) for share in shares]
        return unique

    def merge(self, other: "UniqueInGroup") -> None:
        """Add the groups of other counts."""
        self.grouped += other.grouped
        self._unique_F += other._unique_F
        self._whole_F &= other._whole_F

    def shares(self) -> list[float | None]:
        """The share of unique documents in groups of at least two, for each feature; None if it is not counted."""
        pairs = zip(self._unique_F.tolist(), self._whole_F.tolist(), strict=True)
        return [unique / self.grouped if whole and self.grouped else None for unique, whole in pairs]


def identifying(
    features: Sequence[Feature], shares: Sequence[float | None]
) -> tuple[dict[str, float], dict[str, float]]:
    """The features that identify a document within its group, and numbers that may do so, with their shares.

    Returns:
        Categorical features with a share of at least .5; numeric features of whole numbers with at least .95.
    """
    counted = {feature: share for feature, share in zip(features, shares, strict=True) if share is not None}
    return (
        {f.name: share for f, share in counted.items() if f.kind == "categorical" and share >= _IDENTIFYING},
        {f.name: share for f, share in counted.items() if f.kind == "numeric" and share >= _SUSPECT},
    )


def _whole(x_NF: Floats) -> Bools:
    """Whether all values of each feature are whole numbers or missing, shape [F]."""
    return np.asarray(((np.floor(x_NF) == x_NF) | np.isnan(x_NF)).all(0))


def _unique(x_KML: Floats) -> Ints:
    """The number of values of each feature that occur once in their group, shape [K]; NaN does not count."""
    x_KML.sort(axis=2)  # NaN comes last, and is not equal to itself
    same_KML = x_KML[..., 1:] == x_KML[..., :-1]
    once_KML = ~np.isnan(x_KML)
    once_KML[..., 1:] &= ~same_KML
    once_KML[..., :-1] &= ~same_KML
    return np.asarray(once_KML.sum((1, 2)))


class LabelCounts:
    """Documents by label value, for up to 64 values."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, labels_N: Floats) -> None:
        """Count labels; missing ones do not count."""
        if len(self._counts) > _LABELS:  # too many to report: stop counting, to bound memory
            return
        values, counts = np.unique(labels_N[~np.isnan(labels_N)], return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    @classmethod
    def from_counts(cls, counts: Mapping[str, int]) -> "LabelCounts":
        """Restore counts of at most 64 labels."""
        labels = cls()
        labels._counts.update({float(np.float32(text)): count for text, count in counts.items()})
        return labels

    def merge(self, other: "LabelCounts") -> None:
        """Add the counts of another."""
        if len(self._counts) <= _LABELS:
            self._counts.update(other._counts)

    def counts(self) -> dict[str, int]:
        """The counts by label, sorted; empty for more than 64 labels."""
        if len(self._counts) > _LABELS:
            return {}
        return {
            np.format_float_positional(np.float32(value), trim="-"): self._counts[value]
            for value in sorted(self._counts)
        }
