"""Drift: how far the features, lists, labels and scores of later periods are from those of training.

Features and list lengths are compared with the training periods. Scores are compared with the validation split, whose
groups no weights were fitted to. A ranking does not change if a number is added to all scores of a list, so scores are
compared by their spread within each list: their standard deviation, which falls as a model finds less to tell documents
apart by. That is a warning that needs no labels; it does not say whether the order is right.

Values are counted in one pass: numbers in fine cells that are the same for all data, so counts need no range beforehand
and may be added in any order. Bins are runs of cells, chosen so that training has about equally many values in each.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, K methods, C cells, B bins, V codes of a vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ltrscale.batch import QueryGroups, sum_by_group
from ltrscale.bundle import Bundle, load, with_tokens_of
from ltrscale.config import Config, Operational
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, chosen_files
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import spread
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.models.fitting import ValueCounts
from ltrscale.progress import progress

SOME, MUCH = 0.1, 0.25
"""The usual reading of the population stability index: below the first no drift, above the second much."""
BINS = 10
"""Bins of about equal counts, with two more for values below and above all of training's and one for missing values."""
_DROPPED = 19
"""Bits of a float32 that a cell ignores: it keeps the sign, the exponent and four bits of the mantissa."""
_CELLS = 1 << (32 - _DROPPED)

BinCounts = NDArray[np.int64]


class DriftSettings(Config):
    """How drift is measured."""

    documents: int | None = Field(default=1_000_000, ge=1)
    """Documents that are read of training, of validation and of each period: whole row groups at equal distances; null
    for all. Without drift the index of a feature is about 24 over this number, if documents are independent."""
    docs_per_batch: Operational[int] = Field(default=65_536, ge=1)
    """Documents scored in one batch; the result does not depend on it."""


class FeatureDrift(Config):
    """A feature in a period."""

    psi: float
    """Population stability index against training; missing values and unknown codes are bins."""
    missing: float
    """Share of the documents that miss it."""
    unknown: float | None = None
    """Share of the documents with a code that training lacks; None for numbers."""
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
    """What was seen of a period; of training itself every index is 0."""

    groups: int
    documents: int
    length: float
    """Mean number of documents of a group."""
    length_psi: float
    features: dict[str, FeatureDrift]
    spreads: dict[str, SpreadDrift]
    """By method, for methods with a bundle; of training those of validation."""
    labels: LabelRates | None
    """None where no group has labels."""

    @property
    def median_psi(self) -> float:
        """Median index of the features: some, such as the weekday, differ between any two periods."""
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
    """Counts of each column's numbers by cell, and of its missing values.

    A cell spans at most a sixteenth of its values, whatever their scale.

    Example:
        >>> numbers = Numbers(1)
        >>> numbers.add(np.array([[1.0], [1.0], [5.0], [np.nan]], np.float32))
        >>> [bins.tolist() for bins in numbers.binned(numbers.bins())]
        [[0, 2, 1, 0, 1]]
    """

    def __init__(self, columns: int) -> None:
        self._counts_FC = np.zeros((columns, _CELLS), np.int64)
        self._missing_F = np.zeros(columns, np.int64)

    def add(self, values_NF: NDArray[np.float32]) -> None:
        """Count the values of some rows."""
        for f, values_N in enumerate(values_NF.T):
            known_N = values_N[~np.isnan(values_N)]
            self._counts_FC[f] += np.bincount(_cells(known_N), minlength=_CELLS)
            self._missing_F[f] += len(values_N) - len(known_N)

    def bins(self) -> list[BinCounts]:
        """The first cell of each bin, by column; a frequent value has its own bin."""
        return [_bins(counts_C) for counts_C in self._counts_FC]

    def binned(self, bins_F: list[BinCounts]) -> list[BinCounts]:
        """Counts [B] of each column by bin; missing values are the last."""
        columns = zip(self._counts_FC, bins_F, self._missing_F, strict=True)
        return [np.append(np.add.reduceat(counts_C, bins), missing) for counts_C, bins, missing in columns]


class Codes:
    """Counts of a categorical feature's codes, and of its missing values."""

    def __init__(self) -> None:
        self._seen = ValueCounts()
        self._missing = 0

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Count the codes of some rows."""
        self._seen.add(values_N)
        self._missing += int(np.isnan(values_N).sum())

    def binned(self, reference: Self) -> BinCounts:
        """Counts of the reference's most frequent codes, of its other codes, of codes that it lacks, and missing ones.

        Example:
            >>> train, later = Codes(), Codes()
            >>> train.add(np.array([7, 7, 8], np.float32))
            >>> later.add(np.array([7, 9, np.nan], np.float32))
            >>> train.binned(train).tolist(), later.binned(train).tolist()
            ([2, 1, 0, 0, 0], [1, 0, 0, 1, 1])
        """
        codes_V, counts_V = self._seen.counts()
        bins_V = np.full(len(codes_V), -1)
        reference_codes, frequent = reference._seen.codes(), reference._seen.codes(BINS - 1)
        assert reference_codes is not None
        assert frequent is not None
        bins_V[np.isin(codes_V, reference_codes)] = len(frequent)
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

    `values`: how many values of both histograms are independent, m and n, each at least 1.

    Example:
        >>> round(chance_psi(np.array([50, 50, 0]), np.array([80, 20, 0]), values=(100, 100)), 3)
        0.02
    """
    bins = int(((reference_B > 0) | (other_B > 0)).sum())
    return (bins - 1) * sum(1 / n for n in values)


def _cells(values_N: NDArray[np.float32]) -> NDArray[np.int64]:
    """The cell of each number; a larger number has no lower cell."""
    bits_N = (values_N + np.float32(0)).view(np.uint32)  # -0 + 0 is 0
    # the bits of floats rise with the value once those of negative ones are inverted
    rising_N = np.where(bits_N >> 31, ~bits_N, bits_N | np.uint32(1 << 31))
    return (rising_N >> _DROPPED).astype(np.int64)


def _bins(counts_C: BinCounts) -> BinCounts:
    cells = np.flatnonzero(counts_C)
    if not len(cells):
        return np.zeros(1, np.int64)
    before_C = counts_C.cumsum() - counts_C
    tenths = BINS * before_C[cells] // counts_C.sum()
    starts = cells[np.diff(tenths, prepend=-1) > 0]
    return np.unique([0, *starts, cells[-1] + 1])


def measure_drift(config: EvaluateConfig, settings: DriftSettings) -> Drift:
    """Measure how far each test period of an evaluation is from its training split.

    It looks at all groups, with and without labels, whatever the splits use, and at the features that some bundle
    reads; scores are those of each method's first bundle. Counts are added, so the order of rows and files does not
    matter as long as all documents are read.

    Raises:
        InputError: data sets or bundles are missing or do not fit.
    """
    splits = config.splits
    bundles = {name: load(urls[0]) for name, urls in config.models.items()}
    opened = [*bundles.values()]
    read = {feature.name for bundle in opened for feature in bundle.features}
    all_features = select(_all_of(splits.train), labelled=False).features
    features = tuple(feature for feature in all_features if feature.name in read or not read)
    train = _counted(_all_of(splits.train), features, [], settings)
    bins = _Bins(train, _counted(_all_of(splits.validation), features, opened, settings))
    drifts = {}
    for period in sorted({file.period for _, files in chosen_files(splits.test) for file in files}):
        split = _all_of(splits.test).replace(periods=(period,))
        counted = _counted(split, features, opened, settings)
        drifts[period] = bins.drift(counted, list(bundles), _label_rates(split, config, settings))
    of_train = bins.drift(train, [], _label_rates(_all_of(splits.train), config, settings))
    at_validation = bins.spreads(bins.validation, list(bundles))
    return Drift(train=of_train.replace(spreads=at_validation), periods=drifts)


def _all_of(split: Split) -> Split:
    """The periods of a split, without a choice of labels or features."""
    return Split(data=split.data, periods=split.periods, labels=split.labels)


class _Counts(NamedTuple):
    """What is counted of some groups."""

    names: tuple[str, ...]
    """Of the numbers."""
    numbers: Numbers
    codes: Mapping[str, Codes]
    lengths: Numbers
    spreads: Numbers
    """A column for each method."""
    sums_K: NDArray[np.float64]
    lists: int
    """Groups of at least two documents, which have a spread."""
    groups: int
    documents: int


def _counted(split: Split, features: Sequence[Feature], bundles: Sequence[Bundle], settings: DriftSettings) -> _Counts:
    """Count the groups of a split in one pass, and the scores of bundles."""
    selection = select(split, labelled=False).serving(features, whose="drift", where=", ".join(split.data))
    selection = with_tokens_of(selection, bundles)
    scorers = [bundle.scorer(features=features) for bundle in bundles]
    if settings.documents is not None:
        selection = spread(selection, documents=settings.documents)
    places = [i for i, feature in enumerate(features) if feature.kind == "numeric"]
    numbers, lengths, spreads = Numbers(len(places)), Numbers(1), Numbers(len(scorers))
    codes = {feature.name: Codes() for feature in features if feature.kind == "categorical"}
    sums_K, lists, groups_read, documents = np.zeros(len(scorers)), 0, 0, 0
    with progress("drift", selection.n_documents) as advance:
        for groups in iterate(selection, docs_per_batch=settings.docs_per_batch):
            x_NF = groups.features_NF.numpy()
            numbers.add(x_NF[:, places])
            for i, feature in enumerate(features):
                if feature.name in codes:
                    codes[feature.name].add(x_NF[:, i])
            lengths.add(groups.lengths_Q.numpy().astype(np.float32)[:, None])
            several_Q = (groups.lengths_Q > 1).numpy()
            of_methods = [spread_of(score(groups), groups).numpy()[several_Q] for score in scorers]
            spreads_QK = np.array(of_methods).reshape(len(scorers), several_Q.sum()).T
            spreads.add(spreads_QK.astype(np.float32))
            sums_K += spreads_QK.sum(axis=0)
            lists, groups_read = lists + int(several_Q.sum()), groups_read + groups.n_groups
            documents += groups.n_documents
            advance(groups.n_documents)
    names = tuple(features[i].name for i in places)
    return _Counts(names, numbers, codes, lengths, spreads, sums_K, lists, groups_read, documents)


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


class _Bins:
    """The bins of training's features and lists, and of validation's spreads, with what was counted there."""

    def __init__(self, train: _Counts, validation: _Counts) -> None:
        self.train, self.validation = train, validation
        self.numbers, self.lengths, self.spreads_K = (
            counts.bins() for counts in (train.numbers, train.lengths, validation.spreads)
        )

    def drift(self, counted: _Counts, methods: Sequence[str], labels: LabelRates | None) -> PeriodDrift:
        """The drift of some groups."""
        (before_B,), (now_B,) = (counts.lengths.binned(self.lengths) for counts in (self.train, counted))
        return PeriodDrift(
            groups=counted.groups,
            documents=counted.documents,
            length=counted.documents / counted.groups,
            length_psi=psi(before_B, now_B),
            features=self._features(counted),
            spreads=self.spreads(counted, methods),
            labels=labels,
        )

    def spreads(self, counted: _Counts, methods: Sequence[str]) -> dict[str, SpreadDrift]:
        """The spread of each method's scores."""
        if not methods:
            return {}
        before_K, now_K = (counts.spreads.binned(self.spreads_K) for counts in (self.validation, counted))
        if not counted.lists or not self.validation.lists:
            return {name: SpreadDrift(psi=0.0, mean=None, lists=0) for name in methods}
        lists = self.validation.lists, counted.lists
        return {
            name: SpreadDrift(
                psi=psi(before_K[k], now_K[k]),
                mean=counted.sums_K[k] / counted.lists,
                chance=0.0 if counted is self.validation else chance_psi(before_K[k], now_K[k], values=lists),
                lists=counted.lists,
            )
            for k, name in enumerate(methods)
        }

    def _features(self, counted: _Counts) -> dict[str, FeatureDrift]:
        before_F, now_F = (counts.numbers.binned(self.numbers) for counts in (self.train, counted))
        drifts = {
            name: self._feature(before_B, now_B, counted)
            for name, before_B, now_B in zip(counted.names, before_F, now_F, strict=True)
        }
        for name, codes in counted.codes.items():
            before_B, now_B = (counts.binned(self.train.codes[name]) for counts in (self.train.codes[name], codes))
            drifts[name] = self._feature(before_B, now_B, counted).replace(unknown=now_B[-2] / counted.documents)
        return drifts

    def _feature(self, before_B: BinCounts, now_B: BinCounts, counted: _Counts) -> FeatureDrift:
        """The drift of a feature; the last bin has the missing values."""
        groups = self.train.groups, counted.groups
        return FeatureDrift(
            psi=psi(before_B, now_B),
            missing=now_B[-1] / counted.documents,
            chance=0.0 if counted is self.train else chance_psi(before_B, now_B, values=groups),
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
