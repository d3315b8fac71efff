"""Unusual groups: those with outlier values, and those with values that training lacks.

Outliers are far from the bulk of the validation set (HOU24, A.2.2). A ranker could not learn from values that training
lacks.

Shapes: N documents, Q groups, F features, B bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ltrscale.arrays import Doubles, Ints
from ltrscale.config import Config, Strict
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError, nearest
from ltrscale.late import Late
from ltrscale.models.fitting import ValueCounts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ltrscale import batch
    from ltrscale.batch import QueryGroups
else:
    torch, batch = Late("torch"), Late("ltrscale.batch")

OUTLIER_BINS = 100
_OUTLIER_TAIL = 0.01
"""Values beyond a gap are outliers if fewer than this share of the documents have them."""
_GAPS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64)
"""The gaps that `gap: auto` chooses from."""

_Pass = Callable[[], "Iterable[QueryGroups]"]
"""Starts one pass over the validation groups."""


class OutlierRule(Config):
    """Conditions for outlier values of a feature; any one of them suffices.

    Features are float32, so a constant is rounded to the nearest float32: a value typed as 0.7 is at least 0.7.
    """

    below: float | None = None
    """Values below this one are outliers."""
    at_least: float | None = None
    """This value and higher ones are outliers; 1 for a 0/1 flag."""
    missing: bool = False
    """Missing values are outliers."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.below is None and self.at_least is None and not self.missing:
            raise ValueError("an outlier rule needs below, at_least or missing: true")
        return self

    def matches(self, values_N: Tensor) -> Tensor:
        """True for each value that is an outlier; values are float32, to which torch rounds the constants."""
        outlier_N = values_N.isnan() if self.missing else torch.zeros_like(values_N, dtype=torch.bool)
        if self.below is not None:
            outlier_N = outlier_N | (values_N < self.below)
        if self.at_least is not None:
            outlier_N = outlier_N | (values_N >= self.at_least)
        return outlier_N


class OutlierConfig(Config):
    """How outlier groups are found."""

    gap: Annotated[int, Field(ge=1, lt=OUTLIER_BINS)] | Literal["auto"] | None = "auto"
    """Number of consecutive empty histogram bins that separates outliers from the rest; auto = the gap with a share of
    outlier groups in the validation set nearest to `target`, the smallest among equals; null = only the features of
    `known`."""
    target: float = Field(default=0.01, gt=0, lt=1)
    """Share of outlier groups that `gap: auto` aims at."""
    known: dict[str, OutlierRule] = Field(default_factory=dict)
    """Rules of features whose outliers are known, by feature name; they replace the histogram."""


class OutlierDetector(Strict):
    """Fitted rules; `outliers.json` of an evaluation."""

    data: str
    """Hash of the validation data that the rules were fitted on."""
    features: tuple[str, ...]
    gap: int | None
    share: float
    """Share of outlier groups among the validation groups."""
    rules: dict[str, OutlierRule]
    """Rules by feature name; a feature without a rule has no outliers."""

    def outlier_groups(self, groups: QueryGroups) -> Tensor:
        """True for each group that has a document with an outlier value, shape [Q]."""
        assert groups.n_features == len(self.features)
        outlier_N = torch.zeros(groups.n_documents, dtype=torch.bool)
        for column, name in enumerate(self.features):
            if name in self.rules:
                outlier_N |= self.rules[name].matches(groups.features_NF[:, column])
        return batch.sum_by_group(outlier_N.double(), groups.offsets_Q1) > 0


def fit_outliers(
    validation: _Pass, features: Sequence[Feature], config: OutlierConfig, *, data: str = ""
) -> OutlierDetector:
    """Find the values of each feature that lie beyond a gap of its histogram.

    The histogram has 100 bins from the smallest to the largest value. A scan from left to right looks for `gap`
    consecutive empty bins: if fewer than 1% of the documents lie above them, the values above are outliers; otherwise
    the scan continues after the gap. A second scan runs from right to left (HOU24, A.2.2). Missing values are in no
    bin; categorical and constant features have no histogram. This takes three passes over the validation set: range,
    histogram, share of outlier groups; each must yield the same groups. Without a histogram and a rule nothing is read.
    `data`, the hash of the validation data, is kept with the rules.

    Raises:
        InputError: `known` names a feature that the data set does not have.

    Example:
        >>> from ltrscale.batch import QueryGroups
        >>> x_NF = torch.cat([torch.linspace(0, 1, 999), torch.tensor([50.0])])[:, None]
        >>> groups = QueryGroups(x_NF, torch.tensor([0, 500, 1000]))
        >>> fit_outliers(lambda: [groups], [Feature(name="x")], OutlierConfig(gap=20)).rules
        {'x': OutlierRule(below=None, at_least=11.5, missing=False)}
    """
    names = tuple(feature.name for feature in features)
    for name in config.known:
        if name not in names:
            similar = nearest(name, names, alike=0.6)
            hint = f"did you mean {similar!r}?" if similar else "name a feature of the data set"
            raise InputError(f"outliers.known.{name}: no such feature; {hint}")
    columns = [i for i, f in enumerate(features) if f.kind == "numeric" and f.name not in config.known]
    candidates: Sequence[int | None]
    if config.gap is None:
        candidates, of_features = (None,), {}
    else:
        candidates = _GAPS if config.gap == "auto" else (config.gap,)
        of_features = {names[i]: histogram for i, histogram in histograms(validation, columns).items()}
    detectors = []
    for gap in candidates:
        rules = dict(config.known)
        for name, histogram in of_features.items():
            assert gap is not None
            if rule := histogram.rule(gap):
                rules[name] = rule
        detectors.append(OutlierDetector(data=data, features=names, gap=gap, share=0, rules=rules))
    shares = _outlier_shares(validation, detectors)
    best = min(range(len(shares)), key=lambda i: abs(shares[i] - config.target))
    return detectors[best].replace(share=shares[best])


@dataclass
class _Histogram:
    """Documents in each bin, edges of the bins, and the number of documents including those with a missing value."""

    counts_B: Ints
    edges_B1: Doubles
    documents: int

    def rule(self, gap: int) -> OutlierRule | None:
        """The rule for values beyond gaps of `gap` empty bins; None if there are no such values."""
        limit = _OUTLIER_TAIL * self.documents
        right, left = _beyond(self.counts_B, gap, limit), _beyond(self.counts_B[::-1], gap, limit)
        if right is None and left is None:
            return None
        # Round each edge up to float32: the same values stay above it, and none below crosses over.
        edges_B1 = self.edges_B1.astype(np.float32)
        edges_B1 = np.where(edges_B1 < self.edges_B1, np.nextafter(edges_B1, np.float32(np.inf)), edges_B1)
        return OutlierRule(
            below=None if left is None else float(edges_B1[OUTLIER_BINS - left]),
            at_least=None if right is None else float(edges_B1[right]),
        )


def _beyond(counts_B: Ints, gap: int, limit: float) -> int | None:
    """The bin after the first `gap` consecutive empty bins with fewer than `limit` documents behind them."""
    after_B = counts_B.sum() - counts_B.cumsum()
    empty = 0
    for b in range(len(counts_B)):
        empty = empty + 1 if counts_B[b] == 0 else 0
        if empty >= gap and after_B[b] < limit:
            return b + 1
    return None


def histograms(validation: _Pass, columns: Sequence[int]) -> Mapping[int, _Histogram]:
    """Histograms by column, without columns that have fewer than two different values."""
    low_C, high_C = np.full(len(columns), np.inf), np.full(len(columns), -np.inf)
    for groups in validation():
        values_NC = groups.features_NF.numpy()[:, columns]
        # unlike min and max, fmin and fmax ignore NaN, which is a missing value
        low_C = np.fmin(low_C, np.fmin.reduce(values_NC, axis=0, initial=np.inf))
        high_C = np.fmax(high_C, np.fmax.reduce(values_NC, axis=0, initial=-np.inf))
    ranges = {column: (low, high) for column, low, high in zip(columns, low_C, high_C, strict=True) if low < high}
    by_column = {
        column: _Histogram(np.zeros(OUTLIER_BINS, np.int64), np.histogram_bin_edges([], OUTLIER_BINS, span), 0)
        for column, span in ranges.items()
    }
    for groups in validation():
        values_NF = groups.features_NF.numpy()
        for column, histogram in by_column.items():
            values_N = values_NF[:, column].astype(np.float64)
            histogram.counts_B += np.histogram(values_N, OUTLIER_BINS, ranges[column])[0]
            histogram.documents += len(values_N)
    return by_column


def _outlier_shares(validation: _Pass, detectors: Sequence[OutlierDetector]) -> list[float]:
    """The share of outlier groups according to each detector; nothing is read where none has a rule."""
    outliers, total = [0] * len(detectors), 0
    if not any(detector.rules for detector in detectors):
        return [0.0] * len(detectors)
    for groups in validation():
        total += groups.n_groups
        for i, detector in enumerate(detectors):
            outliers[i] += int(detector.outlier_groups(groups).sum())
    return [count / max(total, 1) for count in outliers]


@dataclass(frozen=True, eq=False)
class Seen:
    """The range of each number and the codes of each categorical feature in some groups."""

    low_F: NDArray[np.float32]
    """The lowest finite value; of codes -inf."""
    high_F: NDArray[np.float32]
    """The highest finite value; of codes inf."""
    codes: Mapping[int, NDArray[np.float32]]
    """Sorted codes by the number of the feature."""

    @classmethod
    def from_groups(cls, parts: Iterable[QueryGroups], features: Sequence[Feature]) -> Self:
        """Look at groups in one pass; their order does not matter.

        A number without a finite value there has the range from inf to -inf, so every value is outside it.
        """
        vocabularies = {i: ValueCounts() for i, feature in enumerate(features) if feature.kind == "categorical"}
        low_F, high_F = (np.full(len(features), end, np.float32) for end in (np.inf, -np.inf))
        for groups in parts:
            x_NF = groups.features_NF.numpy()
            finite_NF = np.isfinite(x_NF)
            low_F = np.minimum(low_F, x_NF.min(axis=0, initial=np.inf, where=finite_NF))
            high_F = np.maximum(high_F, x_NF.max(axis=0, initial=-np.inf, where=finite_NF))
            for i, vocabulary in vocabularies.items():
                vocabulary.add(x_NF[:, i])
        low_F[list(vocabularies)], high_F[list(vocabularies)] = -np.inf, np.inf
        return cls(low_F, high_F, {i: vocabulary.counts()[0] for i, vocabulary in vocabularies.items()})

    def lacks(self, groups: QueryGroups) -> Tensor:
        """True for each group with a number outside its range or a code that was not seen, shape [Q].

        A missing value is neither.
        """
        x_NF = groups.features_NF.numpy()
        new_N = ((x_NF < self.low_F) | (x_NF > self.high_F)).any(axis=1)
        for i, codes_V in self.codes.items():
            new_N |= ~np.isin(x_NF[:, i], codes_V) & ~np.isnan(x_NF[:, i])
        return batch.sum_by_group(torch.from_numpy(new_N).long(), groups.offsets_Q1) > 0
