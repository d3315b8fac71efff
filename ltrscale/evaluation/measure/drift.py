"""Drift: how far the features, lists, labels and scores of later periods are from those of training.

Features and list lengths are compared with the training periods. Scores are compared with the validation split, because
no weights were fitted to its groups. A ranking does not change if a number is added to all scores of a list, so scores
are compared by their spread within each list: their standard deviation, which falls as a model finds fewer differences
between documents. This warning needs no labels; it does not say whether the order is right.

Histograms of training's values are counted in one pass. Bins are chosen so that training has about equally many numbers
in each. To find the bins, numbers are counted in cells as fine as the limit on their number allows, so no range is
needed beforehand.

Shapes: N documents (or their values), Q groups, C cells, B bins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ltrscale.arrays import Doubles, Ints
from ltrscale.config import Strict
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split, resolve_periods, with_periods_named
from ltrscale.data.stream.plan import spread
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.late import Late
from ltrscale.models.fitting import merged_counts
from ltrscale.progress import progress

if TYPE_CHECKING:
    from torch import Tensor

    from ltrscale import batch, bundle
    from ltrscale.batch import QueryGroups
    from ltrscale.bundle import Bundle, Scorer
    from ltrscale.data.stream import batches
else:
    batch, bundle = Late("ltrscale.batch"), Late("ltrscale.bundle")
    batches = Late("ltrscale.data.stream.batches")

_BINS = 10
"""Bins of about equal counts, plus two for values below and above all of training's, and one for missing values."""
_CELLS = 1 << 14
"""Cells of a feature, at most: 200 kB. This is enough for the sign, exponent and five bits of the mantissa of every
float32, so a cell is never wider than a 32nd of its values."""


class BinnedValues:
    """Counts of a feature's values by bin; those of later periods are counted in the bins of training.

    Numbers are counted in cells, runs of neighbouring float32. Their width is the lowest power of two at which at most
    `_CELLS` cells hold a number. So cells are small relative to the spread of the numbers, wherever these lie, and do
    not depend on the order of the rows. Bins are runs of cells with about a tenth of training's numbers each, one below
    and one above all of these. Bins of codes are the most frequent codes of training, its other codes, and codes that
    it lacks. Missing values are the last bin.
    """

    def __init__(self, kind: Literal["numeric", "categorical"] = "numeric", train: Self | None = None) -> None:
        self.kind, self._train = kind, self if train is None else train
        self._width, self._missing = np.uint32(1), 0
        self._cells_C, self._counts_C = np.zeros(0, np.uint32), np.zeros(0, np.int64)

    def later(self) -> Self:
        """Empty counts in the bins of these values, which are training's."""
        return type(self)(self.kind, self)

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Count the values of some rows."""
        known_N = values_N[~np.isnan(values_N)]
        self._missing += len(values_N) - len(known_N)
        first_N = _rising_bits(known_N)
        if self.kind == "numeric" and self._train is not self:
            starts_B = self._train._starts()
            first_N = starts_B[np.searchsorted(starts_B, first_N, side="right") - 1]
        cells, counts = np.unique(first_N - first_N % self._width, return_counts=True)
        cells, counts = np.concatenate([self._cells_C, cells]), np.concatenate([self._counts_C, counts])
        cells, counts = merged_counts(cells, counts)
        while self.kind == "numeric" and np.count_nonzero(np.diff(cells // self._width)) >= _CELLS:
            self._width *= np.uint32(2)
        self._cells_C, self._counts_C = merged_counts(cells - cells % self._width, counts)

    def _starts(self) -> NDArray[np.uint32]:
        """The first number of each bin: cells at which a tenth of the numbers is reached, between two open ends."""
        tenths_C = _BINS * (self._counts_C.cumsum() - self._counts_C) // max(1, self._counts_C.sum())
        starts = self._cells_C[np.diff(tenths_C, prepend=-1) > 0]
        above = self._cells_C[-1:] + self._width
        return np.concatenate([np.zeros(1, np.uint32), starts, above])

    def counts_B(self) -> Ints:
        """Counts by bin, shape [B]."""
        train, cells_C = self._train, self._cells_C
        if self.kind == "numeric":
            starts_B = train._starts()
            bin_C, bins = np.searchsorted(starts_B, cells_C, side="right") - 1, len(starts_B)
        else:
            frequent = np.sort(train._cells_C[np.argsort(-train._counts_C, kind="stable")[: _BINS - 1]])
            bin_C = np.where(np.isin(cells_C, train._cells_C), len(frequent), len(frequent) + 1)
            bin_C = np.where(np.isin(cells_C, frequent), np.searchsorted(frequent, cells_C), bin_C)
            bins = len(frequent) + 2
        return np.append(np.bincount(bin_C, self._counts_C, bins).astype(np.int64), self._missing)


def _rising_bits(values_N: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The bits of each number, mapped so that they rise with the number."""
    bits_N = (values_N + np.float32(0)).view(np.uint32)  # -0 + 0 is 0
    # the bits of floats rise with the value once those of negative ones are inverted
    return np.where(bits_N >> 31, ~bits_N, bits_N | np.uint32(1 << 31))


def psi(reference_B: Ints, other_B: Ints) -> float:
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


def chance_psi(reference_B: Ints, other_B: Ints, *, values: tuple[int, int]) -> float:
    """What `psi` is without drift: `(B - 1) (1 / n + 1 / m)` over B filled bins, for n and m independent values."""
    bins = int(((reference_B > 0) | (other_B > 0)).sum())
    return (bins - 1) * sum(1 / n for n in values)


SOME, MUCH = 0.1, 0.25
"""The usual reading of the population stability index: no drift below the first, much drift above the second."""
_DOCUMENTS = 1_000_000
"""Documents to read from training, from validation and from each period, in whole row groups at equal distances.
Without drift the index of a feature is about 24 over this number, if documents are independent."""


class _Index(Strict):
    """A population stability index: how far a histogram is from that of training, or of validation."""

    psi: float
    chance: float = 0.0
    """What the index is on average without drift, if the documents of a list count as one value."""

    @property
    def beyond(self) -> float:
        """The index beyond what chance gives."""
        return self.psi - self.chance


class FeatureDrift(_Index):
    """A feature in a period against training; missing values and unknown codes are bins."""

    missing: float
    """Share of documents without a value."""
    unknown: float | None = None
    """Share of documents with a code that training lacks; None for numbers."""
    present: float = Field(default=1.0, exclude_if=lambda share: share == 1)
    """Share of the periods whose files have the feature."""


class _SpreadDrift(_Index):
    """The standard deviation of a method's scores within each list of at least two documents, against validation."""

    mean: float | None
    """Mean over the lists."""
    lists: int
    """Lists that have a spread."""


class _LabelRates(Strict):
    """The labels of a period."""

    groups: int
    """Groups with labels."""
    documents: float
    """Share of their documents that are relevant."""
    relevant: float
    """Share of these groups with a relevant document."""


class PeriodDrift(Strict):
    """What was found in a period; for training itself every index is 0."""

    groups: int
    documents: int
    length: float
    """Mean number of documents of a group."""
    length_psi: float
    features: dict[str, FeatureDrift]
    spreads: dict[str, _SpreadDrift]
    """By method, for methods with a bundle; for training, those of validation."""
    labels: _LabelRates | None
    """None where no group has labels."""

    @property
    def median_psi(self) -> float:
        """Median index of the features: some features, such as the weekday, differ between any two periods."""
        return float(np.median([feature.psi for feature in self.features.values()] or [0.0]))

    @property
    def drifted(self) -> list[str]:
        """Features with an index above .25 beyond what chance gives, the largest first."""
        far = [name for name, feature in self.features.items() if feature.beyond > MUCH]
        return sorted(far, key=lambda name: -self.features[name].beyond)


class DriftCorrelation(Strict):
    """How well a measure of drift, which needs no labels, ranked the periods by a method's metric."""

    measure: str
    method: str
    periods: int
    correlation: float | None
    """Spearman's rank correlation of drift and the loss of the metric; 1 if more drift always meant more loss. None for
    fewer than five periods, or without differences."""
    p: float | None
    """Two-sided p value over permutations of the periods."""


class ByPeriod(Strict):
    """The test periods: their drift, their distance from the end of training, and whether drift foretold the loss."""

    train: PeriodDrift
    periods: dict[str, PeriodDrift]
    """By period, in their order."""
    trained_until: dict[str, str] = Field(default_factory=dict)
    """By method, the last period that its first bundle was trained on; the training split's if no bundle states it."""
    since: dict[str, dict[str, int]] = Field(default_factory=dict)
    """By method and period, the periods since that one, among those that the data sets have."""
    foretold: tuple[DriftCorrelation, ...] = ()

    def largest(self) -> list[tuple[str, str, float]]:
        """Each feature with the period of its largest index beyond chance, and that index; the largest first."""
        periods, names = self.periods, self.train.features
        when = {name: max(periods, key=lambda period: periods[period].features[name].beyond) for name in names}
        worst = {name: periods[period].features[name] for name, period in when.items()}
        return [(name, when[name], worst[name].psi) for name in sorted(worst, key=lambda name: -worst[name].beyond)]


def measure_drift(config: EvaluateConfig, documents: int = _DOCUMENTS) -> ByPeriod:
    """Measure how far each test period of an evaluation is from its training split.

    All groups count, with and without labels, whatever the splits use. Features are those that some bundle reads, and
    scores are those of each method's first bundle. Counts are added, so the order of rows and files does not matter as
    long as all documents are read. Fields of `ByPeriod` besides drift stay empty.

    Raises:
        InputError: data sets or bundles are missing or do not fit.
    """
    train, validation, test = (
        Split(data=split.data, periods=split.periods, labels=split.labels)
        for split in (config.splits.train, config.splits.validation, config.splits.test)
    )
    bundles = {name: bundle.load(urls[0]) for name, urls in config.models.items()}
    read = {feature.name for opened in bundles.values() for feature in opened.features}
    all_features = select(train, labelled=False).features
    features = tuple(feature for feature in all_features if feature.name in read or not read)
    new = {_LENGTHS: BinnedValues()} | {("feature", f.name): BinnedValues(f.kind) for f in features}
    sampled = partial(_sampled, documents=documents, docs_per_batch=config.docs_per_batch)
    reference = _counted(train, new, features, {}, sampled)
    scored = _counted(validation, {("spread", name): BinnedValues() for name in bundles}, features, bundles, sampled)
    histograms = reference.histograms | scored.histograms
    reference = replace(reference, histograms=histograms, sums=scored.sums, lists=scored.lists)
    drifts = {}
    for period in with_periods_named(test).periods or ():
        split = test.replace(periods=(period,))
        later = {key: histogram.later() for key, histogram in histograms.items()}
        counted = _counted(split, later, features, bundles, sampled)
        drifts[period] = _drift(reference, counted, _label_rates(split, sampled, config.relevant_from))
    rates = _label_rates(train, sampled, config.relevant_from)
    return ByPeriod(train=_drift(reference, reference, rates), periods=drifts)


_LENGTHS = "lists", "length"
_Sampled = Callable[[Selection], "Iterator[QueryGroups]"]
_Histograms = dict[tuple[str, str], BinnedValues]
"""By what is counted and its name: `feature` of a name, `lists` by length, `spread` of a method's scores."""


@dataclass
class _Counts:
    """Counts over some groups."""

    histograms: _Histograms
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums of the spreads, by method."""
    lists: int = 0
    """Groups of at least two documents, which have a spread."""
    groups: int = 0
    documents: int = 0
    present: dict[str, float] = field(default_factory=dict)
    """As `Selection.present`."""

    def add(self, groups: QueryGroups, features: Sequence[Feature], scorers: Mapping[str, Scorer]) -> None:
        columns = zip(features, groups.features_NF.numpy().T, strict=True)
        values = {("feature", feature.name): values_N for feature, values_N in columns}
        values[_LENGTHS] = groups.lengths_Q.numpy().astype(np.float32)
        several_Q = groups.lengths_Q > 1
        for name, score in scorers.items():
            spread_Q = _spread_of(score(groups), groups)[several_Q].numpy()
            values["spread", name] = _rounded(spread_Q)
            self.sums[name] += float(spread_Q.sum())
        for key, histogram in self.histograms.items():
            histogram.add(values[key])
        self.lists += int(several_Q.sum())
        self.groups += groups.n_groups
        self.documents += groups.n_documents


def _rounded(spread_Q: Doubles) -> NDArray[np.float32]:
    """Spreads to one part in a thousand, because equal spreads differ by the rounding of scores, which is no drift."""
    mantissa_Q, exponent_Q = np.frexp(spread_Q)
    return np.ldexp(np.round(mantissa_Q * 1024) / 1024, exponent_Q).astype(np.float32)


def _counted(
    split: Split,
    histograms: _Histograms,
    features: Sequence[Feature],
    bundles: Mapping[str, Bundle],
    sampled: _Sampled,
) -> _Counts:
    """Count the groups of a split in one pass, and the scores of bundles."""
    selection = select(split, labelled=False).serving(features, whose="drift", where=", ".join(split.data))
    selection = bundle.with_tokens_of(selection, [*bundles.values()])
    counts, scorers = _Counts(histograms, present=selection.present()), bundle.scorers_of(bundles, features=features)
    for groups in sampled(selection):
        counts.add(groups, features, scorers)
    return counts


def _sampled(selection: Selection, *, documents: int, docs_per_batch: int) -> Iterator[QueryGroups]:
    """The batches of a sample of a selection."""
    selection = spread(selection, documents=documents)
    with progress("drift", selection.n_documents) as advance:
        for groups in batches.iterate(selection, docs_per_batch=docs_per_batch):
            yield groups
            advance(groups.n_documents)


def _spread_of(scores_N: Tensor, groups: QueryGroups) -> Tensor:
    """The standard deviation of the scores within each group, shape [Q], float64; 0 for one document."""
    lengths_Q = groups.lengths_Q
    mean_Q = batch.sum_by_group(scores_N.double(), groups.offsets_Q1) / lengths_Q.clamp(min=1)
    from_mean_N = scores_N.double() - mean_Q.repeat_interleave(lengths_Q)
    return (batch.sum_by_group(from_mean_N.square(), groups.offsets_Q1) / lengths_Q.clamp(min=1)).sqrt()


def _drift(reference: _Counts, counted: _Counts, labels: _LabelRates | None) -> PeriodDrift:
    """How far some groups are from the features and lists of training, and from the spreads of validation."""
    features, spreads, of_lengths = {}, {}, 0.0
    for (what, name), histogram in counted.histograms.items():
        before_B, now_B = reference.histograms[what, name].counts_B(), histogram.counts_B()
        values = (reference.lists, counted.lists) if what == "spread" else (reference.groups, counted.groups)
        index = _Index(psi=0.0)
        if counted is not reference and min(values):
            index = _Index(psi=psi(before_B, now_B), chance=chance_psi(before_B, now_B, values=values))
        if what == "feature":
            missing, unknown = now_B[-1] / counted.documents, now_B[-2] / counted.documents
            unknown = unknown if histogram.kind == "categorical" else None
            present = counted.present.get(name, 1.0)
            features[name] = FeatureDrift(**index.model_dump(), missing=missing, unknown=unknown, present=present)
        elif what == "spread":
            mean = counted.sums[name] / counted.lists if min(values) else None
            spreads[name] = _SpreadDrift(**index.model_dump(), mean=mean, lists=counted.lists if min(values) else 0)
        else:
            of_lengths = index.psi
    return PeriodDrift(
        groups=counted.groups,
        documents=counted.documents,
        length=counted.documents / counted.groups,
        length_psi=of_lengths,
        features=features,
        spreads=spreads,
        labels=labels,
    )


def _label_rates(split: Split, sampled: _Sampled, relevant_from: float) -> _LabelRates | None:
    """The labels of a split; only they are read."""
    if not any(part.files.counts().labelled for part in resolve_periods(split)):
        return None
    selection = replace(select(split, labelled=True), features=())
    groups_read = documents = relevant = with_relevant = 0
    for groups in sampled(selection):
        assert groups.labels_N is not None
        relevant_Q = batch.sum_by_group((groups.labels_N >= relevant_from).long(), groups.offsets_Q1)
        groups_read, documents = groups_read + groups.n_groups, documents + groups.n_documents
        relevant, with_relevant = relevant + int(relevant_Q.sum()), with_relevant + int((relevant_Q > 0).sum())
    return _LabelRates(groups=groups_read, documents=relevant / documents, relevant=with_relevant / groups_read)
