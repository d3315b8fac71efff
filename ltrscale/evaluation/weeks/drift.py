"""Drift: how far the features, lists, labels and scores of later periods are from those of training.

Features and list lengths are compared with the training periods. Scores are compared with the validation split, because
no weights were fitted to its groups. A ranking does not change if a number is added to all scores of a list, so scores
are compared by their spread within each list: their standard deviation, which falls as a model finds fewer differences
between documents. This warning needs no labels; it does not say whether the order is right.

Values are counted in one pass. Bins are chosen so that training has about equally many numbers in each. To find the
bins, numbers are counted in cells, as fine as the limit on their number allows, so no range is needed beforehand.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, C cells, B bins, V different values.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ltrscale.batch import QueryGroups, sum_by_group
from ltrscale.bundle import Bundle, Scorer, load, scorers_of, with_tokens_of
from ltrscale.config import Config, Operational
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, chosen_files
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import spread
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.models.fitting import ValueCounts, merged_counts
from ltrscale.progress import progress

SOME, MUCH = 0.1, 0.25
"""The usual reading of the population stability index: no drift below the first, much drift above the second."""
BINS = 10
"""Bins of about equal counts, plus two for values below and above all of training's, and one for missing values."""
CELLS = 1 << 14
"""Cells of a feature, at most: 200 kB. This is enough for the sign, exponent and five bits of the mantissa of every
float32, so a cell is never wider than a 32nd of its values."""

BinCounts = NDArray[np.int64]
FloatBits = NDArray[np.uint32]


class DriftSettings(Config):
    """How drift is measured."""

    documents: int | None = Field(default=1_000_000, ge=1)
    """Documents to read from training, from validation and from each period: whole row groups at equal distances; null
    for all. Without drift the index of a feature is about 24 over this number, if documents are independent."""
    docs_per_batch: Operational[int] = Field(default=65_536, ge=1)
    """Documents scored in one batch; the result does not depend on it."""


class FeatureDrift(Config):
    """A feature in a period."""

    psi: float
    """Population stability index against training; missing values and unknown codes are bins."""
    missing: float
    """Share of documents without a value."""
    unknown: float | None = None
    """Share of documents with a code that training lacks; None for numbers."""
    chance: float = 0.0
    """What the index is on average without drift, if the documents of a list count as one value."""


class SpreadDrift(Config):
    """The standard deviation of a method's scores within each list of at least two documents."""

    psi: float
    """Population stability index against validation."""
    mean: float | None
    """Mean over the lists."""
    chance: float = 0.0
    """What the index is on average without drift."""
    lists: int
    """Lists that have a spread."""


class LabelRates(Config):
    """The labels of a period."""

    groups: int
    """Groups with labels."""
    documents: float
    """Share of their documents that are relevant."""
    relevant: float
    """Share of these groups with a relevant document."""


class PeriodDrift(Config):
    """What was found in a period; for training itself every index is 0."""

    groups: int
    documents: int
    length: float
    """Mean number of documents of a group."""
    length_psi: float
    features: dict[str, FeatureDrift]
    spreads: dict[str, SpreadDrift]
    """By method, for methods with a bundle; for training, those of validation."""
    labels: LabelRates | None
    """None where no group has labels."""

    @property
    def median_psi(self) -> float:
        """Median index of the features: some features, such as the weekday, differ between any two periods."""
        return float(np.median([feature.psi for feature in self.features.values()]))

    @property
    def drifted(self) -> list[str]:
        """Features with an index above .25 beyond what chance gives, the largest first."""
        beyond = {name: feature.psi - feature.chance for name, feature in self.features.items()}
        return [name for name in sorted(beyond, key=lambda name: -beyond[name]) if beyond[name] > MUCH]


class Drift(Config):
    """Drift of every test period."""

    train: PeriodDrift
    periods: dict[str, PeriodDrift]
    """By period, in their order."""

    def largest(self) -> list[tuple[str, str, float]]:
        """Each feature with the period of its largest index beyond chance, and that index; the largest first."""
        rows = []
        for name in self.train.features:
            beyond = {p: drift.features[name].psi - drift.features[name].chance for p, drift in self.periods.items()}
            period = max(beyond, key=lambda p: beyond[p])
            rows.append((beyond[period], name, period, self.periods[period].features[name].psi))
        return [each[1:] for each in sorted(rows, key=lambda each: -each[0])]


class Numbers:
    """Counts of a feature's numbers by cell, and of its missing values.

    A cell is a run of neighbouring float32. Its width is the lowest power of two at which at most `CELLS` cells hold a
    number. So cells are small relative to the spread of the numbers, wherever these lie, and do not depend on the order
    of the rows. The numbers of later periods are counted in the bins of training.

    Example:
        >>> train = Numbers()
        >>> train.add(np.array([1.0, 1.0, 5.0, np.nan], np.float32))
        >>> later = train.later()
        >>> later.add(np.array([0.0, 1.0, 6.0], np.float32))
        >>> train.binned().tolist(), later.binned().tolist()
        ([0, 2, 1, 0, 1], [1, 1, 0, 1, 0])
    """

    def __init__(self) -> None:
        self._bins_B: FloatBits | None = None
        self._width = np.uint32(1)
        self._cells_C, self._counts_C = np.zeros(0, np.uint32), np.zeros(0, np.int64)
        self._missing = 0

    def later(self) -> Self:
        """Empty counts by the bins of these numbers."""
        later = type(self)()
        later._bins_B = later._cells_C = self._bins()
        later._counts_C = np.zeros(len(later._cells_C), np.int64)
        return later

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Count the values of some rows."""
        known_N = values_N[~np.isnan(values_N)]
        self._missing += len(values_N) - len(known_N)
        bits_N = _rising_bits(known_N)
        if self._bins_B is None:
            self._add_to_cells(bits_N)
        else:
            self._counts_C += np.diff(np.searchsorted(np.sort(bits_N), self._bins_B), append=len(bits_N))

    def _add_to_cells(self, bits_N: FloatBits) -> None:
        """Count numbers in cells, keyed by their first number, and widen the cells if there are too many."""
        bits, more = np.unique(bits_N - bits_N % self._width, return_counts=True)
        cells = np.concatenate([self._cells_C, bits])
        cells, counts = merged_counts(cells, np.concatenate([self._counts_C, more]))
        while np.count_nonzero(np.diff(cells // self._width)) >= CELLS:
            self._width *= np.uint32(2)
        self._cells_C, self._counts_C = merged_counts(cells - cells % self._width, counts)

    def _bins(self) -> FloatBits:
        """The first number of each bin: cells at which a tenth of the numbers is reached, between two open ends."""
        if self._bins_B is not None:
            return self._bins_B
        tenths_C = BINS * (self._counts_C.cumsum() - self._counts_C) // max(1, self._counts_C.sum())
        starts = self._cells_C[np.diff(tenths_C, prepend=-1) > 0]
        above = self._cells_C[-1:] + self._width
        return np.concatenate([np.zeros(1, np.uint32), starts, above])

    def binned(self) -> BinCounts:
        """Counts [B] by bin; missing values are the last."""
        bins_B = self._bins()
        bin_C = np.searchsorted(bins_B, self._cells_C, side="right") - 1
        return np.append(np.bincount(bin_C, self._counts_C, len(bins_B)).astype(np.int64), self._missing)


def _rising_bits(values_N: NDArray[np.float32]) -> FloatBits:
    """The bits of each number, mapped so that they rise with the number."""
    bits_N = (values_N + np.float32(0)).view(np.uint32)  # -0 + 0 is 0
    # the bits of floats rise with the value once those of negative ones are inverted
    return np.where(bits_N >> 31, ~bits_N, bits_N | np.uint32(1 << 31))


class Codes:
    """Counts of a categorical feature's codes, and of its missing values.

    Bins are the most frequent codes of training, its other codes, codes that it lacks, and missing ones.

    Example:
        >>> train = Codes()
        >>> train.add(np.array([7, 7, 8], np.float32))
        >>> later = train.later()
        >>> later.add(np.array([7, 9, np.nan], np.float32))
        >>> train.binned().tolist(), later.binned().tolist()
        ([2, 1, 0, 0, 0], [1, 0, 0, 1, 1])
    """

    def __init__(self) -> None:
        self._of = self._seen = ValueCounts()
        self._missing = 0

    def later(self) -> Self:
        """Empty counts by the bins of these codes."""
        later = type(self)()
        later._of = self._of
        later._seen = ValueCounts()
        return later

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Count the codes of some rows."""
        self._seen.add(values_N)
        self._missing += int(np.isnan(values_N).sum())

    def binned(self) -> BinCounts:
        """Counts [B] by bin; missing values are the last."""
        codes_V, counts_V = self._seen.counts()
        bins_V = np.full(len(codes_V), -1)
        known, frequent = self._of.codes(), self._of.codes(BINS - 1)
        assert known is not None
        assert frequent is not None
        bins_V[np.isin(codes_V, known)] = len(frequent)
        places_V = np.searchsorted(frequent, codes_V)
        is_frequent_V = np.isin(codes_V, frequent)
        bins_V[is_frequent_V] = places_V[is_frequent_V]
        bins_V[bins_V < 0] = len(frequent) + 1
        return np.append(np.bincount(bins_V, counts_V, len(frequent) + 2).astype(np.int64), self._missing)


def psi(reference_B: BinCounts, other_B: BinCounts) -> float:
    """The population stability index of two histograms (Siddiqi 2006).

    `sum over bins of (p - q) ln(p / q)`, which is the symmetric divergence of Jeffreys (1946): 0 for equal shares, and
    usually read as no drift below .1 and as much drift above .25. Half a count is added to each bin, so that a bin
    which is empty on one side stays finite; a bin empty on both sides does not count. Without drift it is about
    `(B - 1) (1 / n + 1 / m)` for histograms of n and m independent values (Yurdakul 2018).

    Example:
        >>> round(psi(np.array([50, 50]), np.array([80, 20])), 2), psi(np.array([3, 4]), np.array([3, 4]))
        (0.41, 0.0)
    """
    filled_B = (reference_B > 0) | (other_B > 0)
    p_B, q_B = (counts_B[filled_B] + 0.5 for counts_B in (reference_B, other_B))
    p_B, q_B = p_B / p_B.sum(), q_B / q_B.sum()
    return float(((p_B - q_B) * np.log(p_B / q_B)).sum())


def chance_psi(reference_B: BinCounts, other_B: BinCounts, *, values: tuple[int, int]) -> float:
    """What `psi` is on average without drift: `(B - 1) (1 / n + 1 / m)` over the B bins that a side fills.

    `values`: how many values of each histogram are independent, m and n, each at least 1.

    Example:
        >>> round(chance_psi(np.array([50, 50, 0]), np.array([80, 20, 0]), values=(100, 100)), 3)
        0.02
    """
    bins = int(((reference_B > 0) | (other_B > 0)).sum())
    return (bins - 1) * sum(1 / n for n in values)


def measure_drift(config: EvaluateConfig, settings: DriftSettings) -> Drift:
    """Measure how far each test period of an evaluation is from its training split.

    All groups count, with and without labels, whatever the splits use. Features are those that some bundle reads, and
    scores are those of each method's first bundle. Counts are added, so the order of rows and files does not matter as
    long as all documents are read.

    Raises:
        InputError: data sets or bundles are missing or do not fit.
    """
    splits = config.splits
    bundles = {name: load(urls[0]) for name, urls in config.models.items()}
    read = {feature.name for bundle in bundles.values() for feature in bundle.features}
    all_features = select(_all_of(splits.train), labelled=False).features
    features = tuple(feature for feature in all_features if feature.name in read or not read)
    train = _counted(_all_of(splits.train), _Counts.of(features), features, {}, settings)
    only_spreads = _Counts({}, Numbers(), {name: Numbers() for name in bundles})
    validation = _counted(_all_of(splits.validation), only_spreads, features, bundles, settings)
    reference = replace(train, spreads=validation.spreads, sums=validation.sums, lists=validation.lists)
    drifts = {}
    for period in sorted({file.period for _, files in chosen_files(splits.test) for file in files}):
        split = _all_of(splits.test).replace(periods=(period,))
        counted = _counted(split, reference.later(), features, bundles, settings)
        drifts[period] = _drift(reference, counted, _label_rates(split, config, settings))
    of_train = _drift(reference, reference, _label_rates(_all_of(splits.train), config, settings))
    return Drift(train=of_train, periods=drifts)


def _all_of(split: Split) -> Split:
    """The periods of a split, without a choice of labels or features."""
    return Split(data=split.data, periods=split.periods, labels=split.labels)


@dataclass
class _Counts:
    """Counts over some groups."""

    features: Mapping[str, Numbers | Codes]
    lengths: Numbers
    spreads: Mapping[str, Numbers]
    """By method."""
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Counts of the spreads, by method."""
    lists: int = 0
    """Groups of at least two documents, which have a spread."""
    groups: int = 0
    documents: int = 0

    @classmethod
    def of(cls, features: Sequence[Feature]) -> Self:
        """Empty counts, by new bins."""
        counts = {feature.name: Codes() if feature.kind == "categorical" else Numbers() for feature in features}
        return cls(counts, Numbers(), {})

    def later(self) -> Self:
        """Empty counts, by the bins of these."""
        features = {name: counts.later() for name, counts in self.features.items()}
        spreads = {name: counts.later() for name, counts in self.spreads.items()}
        return type(self)(features, self.lengths.later(), spreads)

    def add(self, groups: QueryGroups, scorers: Mapping[str, Scorer]) -> None:
        columns = groups.features_NF.numpy().T
        for counts, values_N in zip(self.features.values(), columns, strict=bool(self.features)):
            counts.add(values_N)
        self.lengths.add(groups.lengths_Q.numpy().astype(np.float32))
        several_Q = groups.lengths_Q > 1
        for name, score in scorers.items():
            spread_Q = spread_of(score(groups), groups)[several_Q].numpy()
            self.spreads[name].add(_rounded(spread_Q))
            self.sums[name] += float(spread_Q.sum())
        self.lists += int(several_Q.sum())
        self.groups += groups.n_groups
        self.documents += groups.n_documents


def _rounded(spread_Q: NDArray[np.float64]) -> NDArray[np.float32]:
    """Spreads to one part in a thousand, because equal spreads differ by the rounding of scores, which is no drift."""
    mantissa_Q, exponent_Q = np.frexp(spread_Q)
    return np.ldexp(np.round(mantissa_Q * 1024) / 1024, exponent_Q).astype(np.float32)


def _counted(
    split: Split, counts: _Counts, features: Sequence[Feature], bundles: Mapping[str, Bundle], settings: DriftSettings
) -> _Counts:
    """Count the groups of a split in one pass, and the scores of bundles."""
    selection = select(split, labelled=False).serving(features, whose="drift", where=", ".join(split.data))
    selection = with_tokens_of(selection, [*bundles.values()])
    scorers = scorers_of(bundles, features=features)
    if settings.documents is not None:
        selection = spread(selection, documents=settings.documents)
    with progress("drift", selection.n_documents) as advance:
        for groups in iterate(selection, docs_per_batch=settings.docs_per_batch):
            counts.add(groups, scorers)
            advance(groups.n_documents)
    return counts


def spread_of(scores_N: Tensor, groups: QueryGroups) -> Tensor:
    """The standard deviation of the scores within each group, shape [Q], float64; 0 for one document.

    Example:
        >>> import torch
        >>> groups = QueryGroups(torch.zeros(3, 1), torch.tensor([0, 2, 3]))
        >>> spread_of(torch.tensor([1.0, 3.0, 5.0]), groups)
        tensor([1., 0.], dtype=torch.float64)
    """
    lengths_Q = groups.lengths_Q
    mean_Q = sum_by_group(scores_N.double(), groups.offsets_Q1) / lengths_Q.clamp(min=1)
    from_mean_N = scores_N.double() - mean_Q.repeat_interleave(lengths_Q)
    return (sum_by_group(from_mean_N.square(), groups.offsets_Q1) / lengths_Q.clamp(min=1)).sqrt()


def _drift(reference: _Counts, counted: _Counts, labels: LabelRates | None) -> PeriodDrift:
    """How far some groups are from the features and lists of training, and from the spreads of validation."""
    return PeriodDrift(
        groups=counted.groups,
        documents=counted.documents,
        length=counted.documents / counted.groups,
        length_psi=psi(reference.lengths.binned(), counted.lengths.binned()),
        features={name: _of_feature(name, reference, counted) for name in counted.features},
        spreads={name: _of_spread(name, reference, counted) for name in counted.spreads},
        labels=labels,
    )


def _of_feature(name: str, reference: _Counts, counted: _Counts) -> FeatureDrift:
    """The last bin has the missing values, the one before it the unknown codes."""
    before_B, now_B = (counts.features[name].binned() for counts in (reference, counted))
    groups = reference.groups, counted.groups
    is_categorical = isinstance(counted.features[name], Codes)
    return FeatureDrift(
        psi=psi(before_B, now_B),
        missing=now_B[-1] / counted.documents,
        unknown=now_B[-2] / counted.documents if is_categorical else None,
        chance=0.0 if counted is reference else chance_psi(before_B, now_B, values=groups),
    )


def _of_spread(name: str, reference: _Counts, counted: _Counts) -> SpreadDrift:
    if not counted.lists or not reference.lists:
        return SpreadDrift(psi=0.0, mean=None, lists=0)
    before_B, now_B = (counts.spreads[name].binned() for counts in (reference, counted))
    lists = reference.lists, counted.lists
    return SpreadDrift(
        psi=psi(before_B, now_B),
        mean=counted.sums[name] / counted.lists,
        chance=0.0 if counted is reference else chance_psi(before_B, now_B, values=lists),
        lists=counted.lists,
    )


def _label_rates(split: Split, config: EvaluateConfig, settings: DriftSettings) -> LabelRates | None:
    """The labels of a split; only they are read."""
    if not any(files.counts().labelled for _, files in chosen_files(split)):
        return None
    selection = replace(select(split, labelled=True), features=())
    if settings.documents is not None:
        selection = spread(selection, documents=settings.documents)
    groups_read = documents = relevant = with_relevant = 0
    for groups in iterate(selection, docs_per_batch=settings.docs_per_batch):
        assert groups.labels_N is not None
        relevant_Q = sum_by_group((groups.labels_N >= config.relevant_from).long(), groups.offsets_Q1)
        groups_read, documents = groups_read + groups.n_groups, documents + groups.n_documents
        relevant, with_relevant = relevant + int(relevant_Q.sum()), with_relevant + int((relevant_Q > 0).sum())
    return LabelRates(groups=groups_read, documents=relevant / documents, relevant=with_relevant / groups_read)
