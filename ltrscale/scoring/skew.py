"""Skew: features whose values differ from those of training.

A bundle records what the rows of its training periods look like (its `Reference`). Other rows are compared with it by
shares: of missing values, of categories that training lacks, of values outside training's range. A share is reported if
it is at least 1%, at least twice training's in odds, and not due to chance. Ranges widen as logs grow, so values
outside them are reported from 10%, or from 5% if they are off by more than the range's width.

The documents of a list often share a value, so a list counts as one observation, whatever its length. A share is not
due to chance if it and training's, each seen in its number of lists, are a million times likelier than any one share
for both (likelihood ratio; Wilks 1938).

So a few lists show only large differences. Against 10,000 lists of training it takes 2 lists to see that a feature is
missing in all rows, 17 to see that half of its values are above 95% of training's, and 168 for a new category in 2% of
the rows.

Shapes: N rows (documents), F features, V codes of a vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from ltrscale.arrays import Floats
from ltrscale.bundle import Bundle
from ltrscale.bundle.reference import QUANTILES, FeatureReference, Reference, has_value, sample_of
from ltrscale.config import Strict
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError
from ltrscale.progress import log

SkewKind = Literal["missing", "category", "range", "scale"]
_FEW = 20
"""Fewer lists show almost nothing."""
_SHARE, _ODDS, _EVIDENCE = 0.01, 2.0, math.log(1e6)
_NEAR, _FAR = 0.1, 0.05
_TAIL = QUANTILES[1]


class Skew(Strict):
    """A feature that differs from training; as text it is one line with the figures."""

    feature: str
    kind: SkewKind
    """`missing`: its values are missing more often; `category`: categories that training lacks; `range`: values below
    or above all of training's; `scale`: at least half of its values are below or above 95% of training's."""
    now: float
    """The share of the rows, or of those with a value for `range`; for `scale` the median."""
    training: float
    """The same of training."""
    said: str

    def __str__(self) -> str:
        """One line with the figures."""
        return f"{self.feature}: {self.said}"


def skew_of(data: str, period: str, opened: Sequence[Bundle]) -> list[Skew]:
    """How the features of a period differ from the bundles' training data, each difference once."""
    selection = select(Split(data=(data,), periods=(period,)), labelled=False)
    names, skews = open_dataset(data).manifest.categories, dict[tuple[str, SkewKind], Skew]()
    for bundle in opened:
        groups = sample_of(selection.serving(bundle.features, whose=bundle.url))
        if groups is None or bundle.reference is None:
            continue
        if groups.n_groups < _FEW:
            log.info("predict: %s: %d lists are too few to compare with training", period, groups.n_groups)
        for each in find_skew(bundle.reference, groups.features_NF, lists=groups.n_groups, names=names):
            skews.setdefault((each.feature, each.kind), each)
    return [*skews.values()]


def find_skew(
    reference: Reference,
    features_NF: Floats | Tensor,
    *,
    lists: int,
    names: Mapping[str, Mapping[str, int]] | None = None,
) -> list[Skew]:
    """The features of some rows that differ from training, those that differ most first.

    Args:
        reference: the reference of a bundle.
        features_NF: raw features in the reference's order, NaN or filled as in training where missing; categories as
            codes.
        lists: number of lists that the rows come from. A few show only large differences, one shows none; see above.
        names: the codes of categories by their texts, by feature, to name a new one.

    Raises:
        InputError: the rows have another number of features.

    Example:
        >>> import torch
        >>> from ltrscale.batch import QueryGroups
        >>> from ltrscale.data.dataset.manifest import Feature
        >>> groups = QueryGroups(torch.arange(400.0)[:, None] % 50, torch.arange(0, 401, 4))
        >>> reference = Reference.from_groups(groups, [Feature(name="price")])
        >>> for finding in find_skew(reference, groups.features_NF * 100, lists=100):
        ...     print(finding)
        price: 98% of its values are outside training's range of 0 to 49; the median is 2450, in training 25
    """
    rows_NF = np.asarray(features_NF, dtype=np.float32)
    if rows_NF.ndim != 2 or rows_NF.shape[1] != len(reference.features):
        raise InputError(
            f"features_NF has the shape {rows_NF.shape}, and the reference has {len(reference.features)} features; "
            "give one column for each, in its order"
        )
    findings: list[tuple[float, Skew]] = []
    for feature, values_N in zip(reference.features, rows_NF.T, strict=True):
        code_names = (names or {}).get(feature.name, {})
        for distance, kind, now, training, message in _compared(
            feature, values_N, (reference.lists, lists), code_names
        ):
            skew = Skew(feature=feature.name, kind=kind, now=now, training=training, said=message)
            findings.append((distance, skew))
    return [skew for _, skew in sorted(findings, key=lambda pair: -pair[0])]


_Findings = Iterator[tuple[float, SkewKind, float, float, str]]
"""Distance of a feature from training, and the fields of its `Skew`."""


def _compared(
    feature: FeatureReference, values_N: Floats, lists: tuple[int, int], names: Mapping[str, int]
) -> _Findings:
    if not len(values_N):
        return
    present_N = values_N[has_value(values_N, feature.fill)]
    missing = 1 - len(present_N) / len(values_N)
    if distance := _far(missing, feature.missing, lists):
        filled = "" if feature.fill is None else f", or {feature.fill:.4g} as where it is missing,"
        message = f"missing{filled} in {_percent(missing)} of the documents, in training in {_percent(feature.missing)}"
        yield distance, "missing", missing, feature.missing, message
    if len(present_N) and feature.kind == "categorical":
        yield from _code_findings(feature, present_N, len(values_N), lists, names)
    elif len(present_N) and feature.quantiles:  # without quantiles training had no value, so there is no range
        yield from _range_findings(feature, present_N, (lists[0], round(lists[1] * (1 - missing))))


def _code_findings(
    feature: FeatureReference,
    present_N: Floats,
    rows: int,
    lists: tuple[int, int],
    names: Mapping[str, int],
) -> _Findings:
    codes_V, counts_V = np.unique(present_N.astype(np.int64), return_counts=True)
    new_V = ~np.isin(codes_V, feature.codes)
    share = float(counts_V[new_V].sum() / rows)
    if distance := _far(share, feature.new, lists):
        code = int(codes_V[new_V][counts_V[new_V].argmax()])
        text = {number: text for text, number in names.items()}.get(code, code)
        message = (
            f"{_percent(share)} of the documents have a category that training lacks, most often {text!r}; "
            f"{_percent(feature.new)} were to be expected"
        )
        yield distance, "category", share, feature.new, message


def _range_findings(feature: FeatureReference, present_N: Floats, lists: tuple[int, int]) -> _Findings:
    least, low, middle, high, most = feature.quantiles
    median = float(np.median(present_N))
    medians = f"the median is {median:.4g}, in training {middle:.4g}"
    by_N = np.maximum(least - present_N, present_N - most)
    outside, far_outside = float((by_N > 0).mean()), float((by_N > most - least).mean())
    distance = _far(outside, 0.0, lists)
    if distance and (outside >= _NEAR or far_outside >= _FAR):
        message = (
            f"{_percent(outside)} of its values are outside training's range of {least:.4g} to {most:.4g}; {medians}"
        )
        yield distance, "range", outside, 0.0, message
        return
    below, above = float((present_N < low).mean()), float((present_N > high).mean())
    if (distance := _far(max(below, above), _TAIL, lists)) and max(below, above) >= 0.5:
        side = f"below {low:.4g}" if below > above else f"above {high:.4g}"
        message = f"{_percent(max(below, above))} of its values are {side}, in training {_percent(_TAIL)}; {medians}"
        yield distance, "scale", median, middle, message


def _far(share: float, training: float, lists: tuple[int, int]) -> float:
    """How far a share is from training's, in nats per list; 0 if not to report. `lists`: training's and the rows'."""
    m, n = lists
    p = (training * m + 1) / (m + 2)  # add-one smoothing: what training has not shown may still happen
    if share < _SHARE or share * (1 - p) < _ODDS * p * (1 - share):
        return 0.0
    common = (training * m + share * n) / (m + n)
    evidence = m * _divergence(training, common) + n * _divergence(share, common)
    return _divergence(share, p) if evidence > _EVIDENCE else 0.0


def _divergence(share: float, other: float) -> float:
    """Kullback-Leibler divergence of two shares; `other` may be 0 or 1 only if both are."""
    return sum(p * math.log(p / q) for p, q in ((share, other), (1 - share, 1 - other)) if p > 0)


def _percent(share: float) -> str:
    """A share as a percentage in two digits."""
    return f"{100 * share:.2g}%" if share < 0.995 else "100%"
