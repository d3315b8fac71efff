"""Drift: how far the features, lists, labels and scores of later periods are from those of training.

Features and list lengths are compared with the training periods. Scores are compared with the validation split, whose
groups no weights were fitted to. A ranking does not change if a number is added to all scores of a list, so scores are
compared by their spread within each list: their standard deviation, which falls as a model finds less to tell documents
apart by. That is a warning that needs no labels; it does not say whether the order is right.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, K methods.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

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
from ltrscale.evaluation.weeks.histograms import BinCounts, Codes, Numbers, chance_psi, psi
from ltrscale.progress import progress

SOME, MUCH = 0.1, 0.25
"""The usual reading of the population stability index: below the first no drift, above the second much."""


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
            beyond = {p: of.features[name].psi - of.features[name].chance for p, of in self.periods.items()}
            period = max(beyond, key=lambda p: beyond[p])
            rows.append((beyond[period], name, period, self.periods[period].features[name].psi))
        return [each[1:] for each in sorted(rows, key=lambda each: -each[0])]


def measure_drift(config: EvaluateConfig, settings: DriftSettings) -> Drift:
    """Measure how far each test period of an evaluation is from its training split.

    It looks at all groups, with and without labels, and at the features that some bundle reads; scores are those of
    each method's first bundle. Counts are added, so the order of rows and files does not matter as long as all
    documents are read.

    Args:
        config: of the evaluation; how many labels its splits use does not matter.
        settings: see `DriftSettings`.

    Raises:
        InputError: data sets or bundles are missing or do not fit.
    """
    splits = config.splits
    bundles = {name: load(urls[0]) for name, urls in config.models.items()}
    features = _read(select(_all_of(splits.train), labelled=False).features, bundles.values())
    train = _count(_all_of(splits.train), features, [], settings)
    opened = [*bundles.values()]
    bins = _Bins.of(train, _count(_all_of(splits.validation), features, opened, settings))
    drifts = {}
    for period in sorted({file.period for _, files in chosen_files(splits.test) for file in files}):
        split = _all_of(splits.test).replace(periods=(period,))
        counted = _count(split, features, opened, settings)
        drifts[period] = bins.drift(counted, list(bundles), _labels(split, config, settings))
    of_train = bins.drift(train, [], _labels(_all_of(splits.train), config, settings))
    at_validation = bins.spreads(bins.validation, list(bundles))
    return Drift(train=of_train.replace(spreads=at_validation), periods=drifts)


def _all_of(split: Split) -> Split:
    """The periods of a split, without a choice of labels or features."""
    return Split(data=split.data, periods=split.periods, labels=split.labels)


def _read(features: Sequence[Feature], bundles: Iterable[Bundle]) -> tuple[Feature, ...]:
    """The features that some bundle reads; all, if there is no bundle."""
    names = {feature.name for bundle in bundles for feature in bundle.features}
    return tuple(feature for feature in features if feature.name in names or not names)


@dataclass(frozen=True, eq=False)
class _Counted:
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


def _count(split: Split, features: Sequence[Feature], bundles: Sequence[Bundle], settings: DriftSettings) -> _Counted:
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
    return _Counted(names, numbers, codes, lengths, spreads, sums_K, lists, groups_read, documents)


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


@dataclass(frozen=True, eq=False)
class _Bins:
    """The bins of training's features and lists, and of validation's spreads, with what was counted there."""

    train: _Counted
    validation: _Counted
    numbers: list[BinCounts]
    lengths: list[BinCounts]
    spreads_K: list[BinCounts]

    @classmethod
    def of(cls, train: _Counted, validation: _Counted) -> Self:
        return cls(train, validation, train.numbers.bins(), train.lengths.bins(), validation.spreads.bins())

    def drift(self, counted: _Counted, methods: Sequence[str], labels: LabelRates | None) -> PeriodDrift:
        """The drift of some groups."""
        (before_B,), (now_B,) = (of.lengths.binned(self.lengths) for of in (self.train, counted))
        return PeriodDrift(
            groups=counted.groups,
            documents=counted.documents,
            length=counted.documents / counted.groups,
            length_psi=psi(before_B, now_B),
            features=self._features(counted),
            spreads=self.spreads(counted, methods),
            labels=labels,
        )

    def spreads(self, counted: _Counted, methods: Sequence[str]) -> dict[str, SpreadDrift]:
        """The spread of each method's scores."""
        if not methods:
            return {}
        before_K, now_K = (of.spreads.binned(self.spreads_K) for of in (self.validation, counted))
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

    def _features(self, counted: _Counted) -> dict[str, FeatureDrift]:
        before_F, now_F = (of.numbers.binned(self.numbers) for of in (self.train, counted))
        drifts = {
            name: self._feature(before_B, now_B, counted)
            for name, before_B, now_B in zip(counted.names, before_F, now_F, strict=True)
        }
        for name, codes in counted.codes.items():
            before_B, now_B = (of.binned(self.train.codes[name]) for of in (self.train.codes[name], codes))
            drifts[name] = self._feature(before_B, now_B, counted).replace(unknown=now_B[-2] / counted.documents)
        return drifts

    def _feature(self, before_B: BinCounts, now_B: BinCounts, counted: _Counted) -> FeatureDrift:
        """The drift of a feature; the last bin has the missing values."""
        groups = self.train.groups, counted.groups
        return FeatureDrift(
            psi=psi(before_B, now_B),
            missing=now_B[-1] / counted.documents,
            chance=0.0 if counted is self.train else chance_psi(before_B, now_B, values=groups),
        )


def _labels(split: Split, config: EvaluateConfig, settings: DriftSettings) -> LabelRates | None:
    """The labels of a split; only they are read."""
    if not any(cell.labelled for _, files in chosen_files(split) for file in files for cell in file.row_groups):
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
