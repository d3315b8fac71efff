"""Skew: what rows to score have that training's rows had not, feature by feature.

A bundle records a `Reference`: what the rows of its training periods look like. `find_skew` compares other rows with it
by shares: of missing values, of categories that training lacks, of values outside training's range. A share is said if
it is at least 1%, at least twice training's in odds, and no chance. Ranges widen as logs grow: values outside of them
are said from 10% on, and from 5% on if they are outside by more than the range's own width.

The documents of a list often share a value, so a list counts as one observation, whatever its length. A share is no
chance if it and training's, each seen in so many lists, are a million times likelier than any one share for both
(likelihood ratio; Wilks 1938).

So few lists can only show what is plain. Against 10,000 lists of training it takes 2 lists to see that a feature is
missing in all rows, 17 to see that half of its values are above 95% of training's, and 168 for a new category in 2% of
the rows.

Shapes: N rows (documents), Q groups, Q1 = Q + 1 offsets, F features, V codes of a vocabulary.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.batch import QueryGroups, group_index
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.origin import fills_of
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import spread
from ltrscale.errors import InputError

Kind = Literal["missing", "category", "range", "scale"]
DOCUMENTS = 100_000
"""Documents that are looked at, of training and of the rows to score: whole row groups at equal distances."""
FEW = 20
"""Fewer lists than these show next to nothing."""
_SHARE, _ODDS, _EVIDENCE = 0.01, 2.0, math.log(1e6)
_NEAR, _FAR = 0.1, 0.05
_QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
_TAIL = _QUANTILES[1]
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


class Finding(Config):
    """A feature that differs from training; as text it is one line with the figures."""

    feature: str
    kind: Kind
    """`missing`: its values are missing more often; `category`: categories that training lacks; `range`: values below
    or above all of training's; `scale`: at least half of its values are below or above 95% of training's."""
    now: float
    """The share of the rows, or of those with a value for `range`; for `scale` the median."""
    training: float
    """The same of training."""
    said: str

    def __str__(self) -> str:
        """The line."""
        return f"{self.feature}: {self.said}"


def look(selection: Selection) -> QueryGroups | None:
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
        groups = look(selection)
        found = Reference(lists=0, features=()) if groups is None else Reference.of(groups, selection.features, fills)
    _references[key] = found
    for oldest in list(_references)[:-_REFERENCES]:
        del _references[oldest]
    return found


def find_skew(
    reference: Reference,
    features_NF: NDArray[np.float32] | Tensor,
    *,
    lists: int,
    names: Mapping[str, Mapping[str, int]] | None = None,
) -> list[Finding]:
    """The features of some rows that differ from training, those that differ most first.

    Args:
        reference: of a bundle.
        features_NF: raw features in the reference's order, NaN or filled as in training where missing; categories as
            codes.
        lists: the number of lists that the rows come from. Few show much alone, and a single one nothing; see above.
        names: the codes of categories by their texts, by feature, to name a new one.

    Raises:
        InputError: the rows have another number of features.

    Example:
        >>> groups = QueryGroups(torch.arange(400.0)[:, None] % 50, torch.arange(0, 401, 4))
        >>> reference = Reference.of(groups, [Feature(name="price")])
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
    found: list[tuple[float, Finding]] = []
    if len(rows_NF):
        for feature, values_N in zip(reference.features, rows_NF.T, strict=True):
            known = (names or {}).get(feature.name, {})
            found += _compared(feature, values_N, (reference.lists, lists), known)
    return [finding for _, finding in sorted(found, key=lambda pair: -pair[0])]


def _seen(
    feature: Feature, values_N: NDArray[np.float32], group_N: NDArray[np.int64], fill: float | None
) -> FeatureReference:
    there_N = _there(values_N, fill)
    known_N = values_N[there_N]
    missing = 1 - len(known_N) / max(1, len(values_N))
    seen = FeatureReference(name=feature.name, kind=feature.kind, missing=missing, fill=fill)
    if not len(known_N):
        return seen
    if feature.kind == "numeric":
        quantiles = np.quantile(known_N, _QUANTILES, method="nearest")
        return seen.replace(quantiles=tuple(map(float, quantiles)))
    pairs, counts = np.unique(np.stack([known_N.astype(np.int64), group_N[there_N]]), axis=1, return_counts=True)
    codes_V, first_V, lists_V = np.unique(pairs[0], return_index=True, return_counts=True)
    documents_V = np.add.reduceat(counts, first_V)
    kept = np.sort(np.argsort(-documents_V, kind="stable")[:_CODES])
    new = documents_V[lists_V == 1].sum() / len(values_N)
    return seen.replace(codes=tuple(codes_V[kept].tolist()), new=float(new))


def _there(values_N: NDArray[np.float32], fill: float | None) -> NDArray[np.bool_]:
    """The documents with a value that does not stand for a missing one."""
    there_N: NDArray[np.bool_] = ~np.isnan(values_N)
    return there_N if fill is None else there_N & (values_N != np.float32(fill))


def _compared(
    feature: FeatureReference, values_N: NDArray[np.float32], lists: tuple[int, int], names: Mapping[str, int]
) -> list[tuple[float, Finding]]:
    """The findings of one feature, each with how far it is from training."""
    known_N = values_N[_there(values_N, feature.fill)]
    missing = 1 - len(known_N) / len(values_N)
    found = []
    if far := _far(missing, feature.missing, lists):
        filled = "" if feature.fill is None else f", or {feature.fill:.4g} as where it is missing,"
        said = f"missing{filled} in {_percent(missing)} of the documents, in training in {_percent(feature.missing)}"
        found.append((far, _finding(feature, "missing", missing, feature.missing, said)))
    if not len(known_N):
        return found
    if feature.kind == "categorical":
        return found + _of_codes(feature, known_N, len(values_N), lists, names)
    if not feature.quantiles:  # training had no value, which says nothing of their range
        return found
    return found + _of_numbers(feature, known_N, (lists[0], round(lists[1] * (1 - missing))))


def _of_codes(
    feature: FeatureReference,
    known_N: NDArray[np.float32],
    rows: int,
    lists: tuple[int, int],
    names: Mapping[str, int],
) -> list[tuple[float, Finding]]:
    codes_V, counts_V = np.unique(known_N.astype(np.int64), return_counts=True)
    new_V = ~np.isin(codes_V, feature.codes)
    share = float(counts_V[new_V].sum() / rows)
    if not (far := _far(share, feature.new, lists)):
        return []
    code = int(codes_V[new_V][counts_V[new_V].argmax()])
    texts = {number: text for text, number in names.items()}
    said = (
        f"{_percent(share)} of the documents have a category that training lacks, most often "
        f"{texts.get(code, code)!r}; {_percent(feature.new)} were to be expected"
    )
    return [(far, _finding(feature, "category", share, feature.new, said))]


def _of_numbers(
    feature: FeatureReference, known_N: NDArray[np.float32], lists: tuple[int, int]
) -> list[tuple[float, Finding]]:
    least, low, middle, high, most = feature.quantiles
    median = float(np.median(known_N))
    medians = f"the median is {median:.4g}, in training {middle:.4g}"
    by_N = np.maximum(least - known_N, known_N - most)
    outside, far_outside = float((by_N > 0).mean()), float((by_N > most - least).mean())
    far = _far(outside, 0.0, lists)
    if far and (outside >= _NEAR or far_outside >= _FAR):
        said = f"{_percent(outside)} of its values are outside training's range of {least:.4g} to {most:.4g}; {medians}"
        return [(far, _finding(feature, "range", outside, 0.0, said))]
    below, above = float((known_N < low).mean()), float((known_N > high).mean())
    far = _far(max(below, above), _TAIL, lists)
    if not far or max(below, above) < 0.5:
        return []
    beyond = f"below {low:.4g}" if below > above else f"above {high:.4g}"
    said = f"{_percent(max(below, above))} of its values are {beyond}, in training {_percent(_TAIL)}; {medians}"
    return [(far, _finding(feature, "scale", median, middle, said))]


def _finding(feature: FeatureReference, kind: Kind, now: float, training: float, said: str) -> Finding:
    return Finding(feature=feature.name, kind=kind, now=now, training=training, said=said)


def _far(now: float, training: float, lists: tuple[int, int]) -> float:
    """How far a share is from training's, in nats a list; 0 if it need not be said.

    Args:
        now: the share of some rows.
        training: that of training.
        lists: of training, and of the rows.
    """
    m, n = lists
    p = (training * m + 1) / (m + 2)  # what training has not shown may still happen
    if now < _SHARE or now * (1 - p) < _ODDS * p * (1 - now):
        return 0.0
    common = (training * m + now * n) / (m + n)
    evidence = m * _divergence(training, common) + n * _divergence(now, common)
    return _divergence(now, p) if evidence > _EVIDENCE else 0.0


def _divergence(share: float, other: float) -> float:
    """The divergence of Kullback and Leibler of two shares; the other one is 0 or 1 only where both are.

    Example:
        >>> _divergence(0.5, 0.5), round(_divergence(1.0, 0.5), 3)
        (0.0, 0.693)
    """
    return sum(p * math.log(p / q) for p, q in ((share, other), (1 - share, 1 - other)) if p > 0)


def _percent(share: float) -> str:
    """A share in two digits.

    Example:
        >>> _percent(1.0), _percent(0.0213), _percent(0.0004)
        ('100%', '2.1%', '0.04%')
    """
    return f"{100 * share:.2g}%" if share < 0.995 else "100%"
