"""Summaries of features and labels for the manifest, computed while rows stream past.

Shapes: N rows, F features.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ltrscale.data.dataset.manifest import FeatureSummary
from ltrscale.moments import Moments

_LABELS = 64
_VALUES = 1 << 16


class FeatureStats:
    """Missing count, range, mean and deviation of each feature, in one pass and float64.

    The deviation is the population's.

    Example:
        >>> stats = FeatureStats(1)
        >>> stats.add(np.array([[1], [np.nan]], np.float32))
        >>> stats.add(np.array([[3]], np.float32))
        >>> stats.summaries()
        (FeatureSummary(missing=1, minimum=1.0, maximum=3.0, mean=2.0, std=1.0),)
    """

    def __init__(self, n_features: int) -> None:
        self._missing_F = np.zeros(n_features, dtype=np.int64)
        self._minimum_F = np.full(n_features, np.inf)
        self._maximum_F = np.full(n_features, -np.inf)
        self._moments = Moments.none(n_features)

    def add(self, features_NF: NDArray[np.float32]) -> None:
        """Add rows, in parts that fit the processor's cache."""
        step = max(_VALUES // features_NF.shape[1], 1)
        for start in range(0, len(features_NF), step):
            part_NF = features_NF[start : start + step]
            moments = Moments.of(part_NF)
            self._moments = self._moments.merge(moments)
            self._missing_F += len(part_NF) - moments.count_F
            self._minimum_F = np.fmin(self._minimum_F, np.fmin.reduce(part_NF, axis=0))  # fmin and fmax ignore NaN
            self._maximum_F = np.fmax(self._maximum_F, np.fmax.reduce(part_NF, axis=0))

    @classmethod
    def of(cls, summaries: Sequence[FeatureSummary], documents: int) -> "FeatureStats":
        """The statistics that have these summaries, for this number of documents."""
        stats = cls(len(summaries))
        for f, summary in enumerate(summaries):
            stats._missing_F[f] = summary.missing
            if summary.std is not None:
                count_F, mean_F, squares_F = stats._moments
                count_F[f], mean_F[f] = documents - summary.missing, summary.mean
                squares_F[f] = summary.std**2 * count_F[f]
                stats._minimum_F[f], stats._maximum_F[f] = summary.minimum, summary.maximum
        return stats

    def merge(self, other: "FeatureStats") -> None:
        """Add the rows of another."""
        self._minimum_F = np.fmin(self._minimum_F, other._minimum_F)
        self._maximum_F = np.fmax(self._maximum_F, other._maximum_F)
        self._missing_F += other._missing_F
        self._moments = self._moments.merge(other._moments)

    def summaries(self) -> tuple[FeatureSummary, ...]:
        """One for each feature, in order."""
        count_F, mean_F, std_F = self._moments.count_F, self._moments.mean_F, self._moments.std_F()
        return tuple(
            FeatureSummary(missing=int(self._missing_F[f]))
            if not count_F[f]
            else FeatureSummary(
                missing=int(self._missing_F[f]),
                minimum=float(self._minimum_F[f]),
                maximum=float(self._maximum_F[f]),
                mean=float(mean_F[f]),
                std=float(std_F[f]),
            )
            for f in range(len(std_F))
        )


class LabelCounts:
    """Documents by label value, as long as there are at most 64 values.

    Example:
        >>> labels = LabelCounts()
        >>> labels.add(np.array([0, 2, 0.5, 2, np.nan], np.float32))
        >>> labels.counts()
        {'0': 1, '0.5': 1, '2': 2}
    """

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, labels_N: NDArray[np.float32]) -> None:
        """Count labels; missing ones do not count."""
        if len(self._counts) > _LABELS:  # too many to report: stop counting, to bound memory
            return
        values, counts = np.unique(labels_N[~np.isnan(labels_N)], return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> "LabelCounts":
        """The label counts that have these counts, of at most 64 labels."""
        labels = cls()
        labels._counts.update({float(np.float32(text)): count for text, count in counts.items()})
        return labels

    def merge(self, other: "LabelCounts") -> None:
        """Add the labels that another has counted."""
        if len(self._counts) <= _LABELS:
            self._counts.update(other._counts)

    def counts(self) -> dict[str, int]:
        """The counts by label, rising; empty where there are more than 64 labels."""
        if len(self._counts) > _LABELS:
            return {}
        return {
            np.format_float_positional(np.float32(value), trim="-"): self._counts[value]
            for value in sorted(self._counts)
        }
