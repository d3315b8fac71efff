"""What is seen of features and labels while rows stream past, for the manifest.

Shapes: N rows, F features.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ltrscale.data.dataset.manifest import FeatureSummary

_LABELS = 64
_VALUES = 1 << 16


class FeatureStats:
    """Missing count, range, mean and deviation of each feature, in one pass and float64.

    Parts are merged by Chan, Golub and LeVeque's formula: `M2 = M2_a + M2_b + d^2 n_a n_b / n`, where d is the
    difference of the means. The deviation is the population's.

    Example:
        >>> stats = FeatureStats(1)
        >>> stats.add(np.array([[1], [np.nan]], np.float32))
        >>> stats.add(np.array([[3]], np.float32))
        >>> stats.summaries()
        (FeatureSummary(missing=1, minimum=1.0, maximum=3.0, mean=2.0, std=1.0),)
    """

    def __init__(self, n_features: int) -> None:
        self._count_F = np.zeros(n_features, dtype=np.int64)
        self._missing_F = np.zeros(n_features, dtype=np.int64)
        self._minimum_F = np.full(n_features, np.inf)
        self._maximum_F = np.full(n_features, -np.inf)
        self._mean_F = np.zeros(n_features)
        self._m2_F = np.zeros(n_features)

    def add(self, features_NF: NDArray[np.float32]) -> None:
        """Take rows in, in parts that fit the processor's cache."""
        step = max(_VALUES // features_NF.shape[1], 1)
        for start in range(0, len(features_NF), step):
            self._add_part(features_NF[start : start + step])

    def _add_part(self, features_NF: NDArray[np.float32]) -> None:
        x_NF = features_NF.astype(np.float64)
        sum_F = x_NF.sum(axis=0)
        count_F = np.full(len(sum_F), len(x_NF))
        if missing := bool(np.isnan(sum_F).any()):
            absent_NF = np.isnan(x_NF)
            count_F -= absent_NF.sum(axis=0)
            sum_F = np.nansum(x_NF, axis=0)
        mean_F = sum_F / np.maximum(count_F, 1)
        self._minimum_F = np.fmin(self._minimum_F, np.fmin.reduce(features_NF, axis=0))
        self._maximum_F = np.fmax(self._maximum_F, np.fmax.reduce(features_NF, axis=0))
        x_NF -= mean_F
        if missing:
            x_NF[absent_NF] = 0
        self._merge(count_F, mean_F, np.einsum("nf,nf->f", x_NF, x_NF))
        self._missing_F += len(x_NF) - count_F

    @classmethod
    def of(cls, summaries: Sequence[FeatureSummary], documents: int) -> "FeatureStats":
        """What gives these summaries of so many documents."""
        stats = cls(len(summaries))
        for f, summary in enumerate(summaries):
            stats._missing_F[f] = summary.missing
            if summary.std is not None:
                stats._count_F[f] = documents - summary.missing
                stats._minimum_F[f], stats._maximum_F[f] = summary.minimum, summary.maximum
                stats._mean_F[f], stats._m2_F[f] = summary.mean, summary.std**2 * stats._count_F[f]
        return stats

    def merge(self, other: "FeatureStats") -> None:
        """Take in what another has seen."""
        self._minimum_F = np.fmin(self._minimum_F, other._minimum_F)
        self._maximum_F = np.fmax(self._maximum_F, other._maximum_F)
        self._missing_F += other._missing_F
        self._merge(other._count_F, other._mean_F, other._m2_F)

    def _merge(self, count_F: NDArray[np.int64], mean_F: NDArray[np.float64], m2_F: NDArray[np.float64]) -> None:
        total_F = self._count_F + count_F
        share_F = count_F / np.maximum(total_F, 1)
        delta_F = mean_F - self._mean_F
        self._mean_F += delta_F * share_F
        self._m2_F += m2_F + delta_F**2 * self._count_F * share_F
        self._count_F = total_F

    def summaries(self) -> tuple[FeatureSummary, ...]:
        """One for each feature, in order."""
        std_F = np.sqrt(self._m2_F / np.maximum(self._count_F, 1))
        return tuple(
            FeatureSummary(missing=int(self._missing_F[f]))
            if not self._count_F[f]
            else FeatureSummary(
                missing=int(self._missing_F[f]),
                minimum=float(self._minimum_F[f]),
                maximum=float(self._maximum_F[f]),
                mean=float(self._mean_F[f]),
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
        """Take labels in; missing ones do not count."""
        if len(self._counts) > _LABELS:
            return
        values, counts = np.unique(labels_N[~np.isnan(labels_N)], return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> "LabelCounts":
        """What gives these counts, of at most 64 labels."""
        labels = cls()
        labels._counts.update({float(np.float32(text)): count for text, count in counts.items()})
        return labels

    def merge(self, other: "LabelCounts") -> None:
        """Take in what another has counted."""
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
