"""Each feature alone: how well it ranks by itself, and what its presence says about the label.

A feature that is known only after users have acted ranks almost as well as the labels, or is present for relevant
documents only. No other measured feature comes close: see docs/own-data.md.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, V values of a feature; in a chunk of M groups, L slots a
group, the first K ranks.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.batch import group_index, length_chunks, sum_by_group
from ltrscale.config import Strict
from ltrscale.ranking.metrics import exponential_gain, ideal_dcg, rank_discounts
from ltrscale.ranking.ranked import SLOTS_PER_CHUNK

FEWEST = 30
"""Minimum number of lists with a relevant document; fewer say nothing about an order."""
LIFT, CERTAIN = 0.75, 0.9
"""A feature is suspicious from here on. In docs/own-data.md, honest features reach .65 and .49, leaks .80 and .92."""
LIKE_CHANCE, MANY = 0.05, 300
"""A lift up to the first number is chance, if at least this many lists have a relevant document."""
_SHAPES = 16
"""Bins of equal count, to find relations to the label that are not monotonic."""
NAMES = 0.5
"""A feature that is constant within every list names the query from this many distinct values per list on."""
_Z = 1.96
_GAIN = (1 << 32) - 1
"""Where a packed document has its gain."""
_PADDING = np.int64(-1 << 63)


class Presence(Strict):
    """The documents that a feature marks by its presence."""

    how: Literal["known", "unusual", "missing"]
    """Whether they are those with a value, with another value than `usual`, or without one."""
    usual: float | None
    """The most common value; None for `known` and `missing`."""
    usual_name: str | None = None
    """The name of that value, where it is the code of a category whose name is known."""
    relevant: float
    """Share of the relevant documents that are marked."""
    others: float
    """Share of all others that are."""
    certain: float
    """From 0, marked documents are relevant no more often than all, to 1, all of them are relevant: the lower end of
    Wilson's 95% interval of their share, less the share of all, divided by what is left to 1."""

    @property
    def stated(self) -> str:
        """The description in words."""
        state = str(self.how)
        if self.usual is not None:
            is_code = self.usual == round(self.usual) and abs(self.usual) < 1 << 24
            state = f"other than {self.usual_name or (f'{self.usual:.0f}' if is_code else f'{self.usual:g}')}"
        return f"{state} for {self.relevant:.1%} of the relevant documents and {self.others:.1%} of the others"


class SingleFeature(Strict):
    """The relation of one feature to the labels, without the other features."""

    name: str
    k: int
    ndcg: float
    """Mean NDCG@k of the lists by this feature alone, in the better direction, missing values last."""
    random: float
    """That of a random order."""
    lists: int
    """Lists with a relevant document."""
    varies: float
    """Share of the lists of several documents in which not all values are equal."""
    distinct: int = 0
    """Different values, of a feature without fractions; 0 for others."""
    shaped: float = 0.0
    """Mean NDCG@k by the mean label of the values nearby in other lists, which follows any shape; 0 where unknown."""
    there: Presence | None
    """The marked documents that are relevant most surely; None where all values are the same."""

    @property
    def lift(self) -> float:
        """NDCG rescaled so that the random order is 0 and the best order 1."""
        return (self.ndcg - self.random) / (1 - self.random) if self.random < 1 else 0.0

    @property
    def names_query(self) -> bool:
        """True if it is equal within every list and nearly unique to it, like a user or a session."""
        return not self.varies and self.lists >= FEWEST and self.distinct >= NAMES * self.lists

    @property
    def like_chance(self) -> bool:
        """True if it orders the lists in which it varies no better than chance, whatever the shape of the relation."""
        best = self.replace(ndcg=max(self.ndcg, self.shaped))
        return self.lists >= MANY and self.varies > 0 and best.lift <= LIKE_CHANCE

    @property
    def ranks(self) -> bool:
        """True if the feature alone ranks too well to be true."""
        return self.lists >= FEWEST and self.lift >= LIFT

    @property
    def marks(self) -> bool:
        """True if the feature is present, or missing, almost only for relevant documents."""
        return self.there is not None and self.there.certain >= CERTAIN

    @property
    def suspicious(self) -> bool:
        """True if the user should check that the feature is known when the list is shown."""
        return self.ranks or self.marks


def single_features(
    features_NF: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    names: Sequence[str],
    categorical: Sequence[bool],
    k: int = 5,
    relevant_from: float = 1.0,
) -> list[SingleFeature]:
    """How each feature ranks without the others, in the given order.

    Numbers rank by their value. Codes of categories have no order: they rank by the mean label of their code in the
    other half of the lists, unseen codes by the overall mean.

    Args:
        features_NF: on the CPU; NaN where missing.
        labels_N: finite, not negative.
        offsets_Q1: offsets of the groups.
        names: of the features.
        categorical: which of them are codes.
        k: cut-off of NDCG.
        relevant_from: the lowest label of a relevant document.
    """
    labels_N = labels_N.float()
    lists = _Lists(labels_N, offsets_Q1, k)
    relevant_N = labels_N >= relevant_from
    random = lists.mean_ndcg(np.zeros(len(labels_N), np.int32))
    results = []
    for name, codes, x_N in zip(names, categorical, features_NF.T.contiguous(), strict=True):
        known_N = np.sort(x_N[~x_N.isnan()].numpy())
        values_V, count_V = torch.unique_consecutive(torch.from_numpy(known_N), return_counts=True)
        near = lists.mean_ndcg(lists.by_code(*(_codes(x_N) if codes else _bins(x_N, known_N))))
        best = near if codes else max(map(lists.mean_ndcg, _both_ways(x_N)))
        usual = float(values_V[int(count_V.numpy().argmax())]) if len(values_V) else None
        mark = max(_marked(x_N, usual, relevant_N), key=lambda marked: marked.certain, default=None)
        values: dict[str, Any] = {"varies": lists.varies(x_N), "distinct": _distinct(values_V), "shaped": near}
        results.append(
            SingleFeature(name=name, k=k, ndcg=best, random=random, lists=lists.defined, there=mark, **values)
        )
    return results


class _Lists:
    """The lists with what all features ask of them.

    A document is a number of 64 bits, what it is ranked by above the number of its gain, so that one sort of numbers
    ranks a list with its gains: a third of the time of `ranked`, which finds each document by its place.
    """

    def __init__(self, labels_N: Tensor, offsets_Q1: Tensor, k: int) -> None:
        gains_N = exponential_gain(labels_N)
        self.labels_N, self.offsets_Q1, self.k = labels_N.double(), offsets_Q1, k
        self.half_N = group_index(offsets_Q1) % 2  # which half of the lists a document is in
        self.first_N = offsets_Q1[:-1].repeat_interleave(offsets_Q1.diff())  # the first document of its list
        self.gains_V = np.unique(np.append(gains_N.numpy(), 0.0))  # 0 first, the gain of padding
        self.gain_N = np.searchsorted(self.gains_V, gains_N.numpy())
        ideal_Q = ideal_dcg(gains_N, offsets_Q1, k=k).numpy()
        self.discounts_K = rank_discounts(k).numpy()
        self.defined = int((ideal_Q > 0).sum())
        chunks = length_chunks(offsets_Q1, budget=SLOTS_PER_CHUNK, quadratic=False)
        self.chunks = [(rows.numpy(), mask.numpy(), ideal_Q[groups.numpy()]) for groups, rows, mask in chunks]

    def mean_ndcg(self, keys_N: NDArray[np.int32]) -> float:
        """The mean NDCG in falling order of the keys, over the groups that define it; 0 if none do."""
        packed_N = (keys_N.astype(np.int64) << 32) | self.gain_N
        total = 0.0
        for rows_ML, mask_ML, ideal_M in self.chunks:
            packed_ML = np.where(mask_ML, packed_N.take(rows_ML), _PADDING)
            packed_ML.sort(axis=1)
            gains_MK = self._expected_gains(packed_ML[:, ::-1])
            dcg_M = gains_MK @ self.discounts_K[: gains_MK.shape[1]]
            total += float((dcg_M / np.where(ideal_M > 0, ideal_M, np.inf)).sum())
        return total / max(self.defined, 1)

    def _expected_gains(self, packed_ML: NDArray[np.int64]) -> NDArray[np.float64]:
        """The gains of the first ranks of falling numbers, [M, K]; the mean of a block where keys are equal."""
        gains_MK: NDArray[np.float64] = self.gains_V[packed_ML[:, : self.k] & _GAIN]
        keys_MK = packed_ML[:, : self.k + 1] >> 32
        tied_M = ((keys_MK[:, 1:] == keys_MK[:, :-1]) & (keys_MK[:, 1:] != _PADDING >> 32)).any(axis=1)
        if tied_M.any():
            packed_RL, k = packed_ML[tied_M], gains_MK.shape[1]
            keys_RL = packed_RL >> 32
            sums_RL = np.pad(self.gains_V[packed_RL & _GAIN].cumsum(axis=1), ((0, 0), (1, 0)))
            new_RK = np.diff(keys_RL[:, :k], axis=1, prepend=1 << 32) != 0
            first_RK = np.maximum.accumulate(np.where(new_RK, np.arange(k), 0), axis=1)
            last_R1 = (keys_RL >= keys_RL[:, k - 1 : k]).sum(axis=1, keepdims=True)  # where the block of rank k ends
            ends_RK = np.append(np.where(new_RK[:, 1:], np.arange(1, k), packed_RL.shape[1]), last_R1, axis=1)
            ends_RK = np.minimum.accumulate(ends_RK[:, ::-1], axis=1)[:, ::-1]
            sums_RK = np.take_along_axis(sums_RL, ends_RK, 1) - np.take_along_axis(sums_RL, first_RK, 1)
            gains_MK[tied_M] = sums_RK / (ends_RK - first_RK)
        return gains_MK

    def by_code(self, code_N: Tensor, n_codes: int) -> NDArray[np.int32]:
        """Keys in the order of the mean label of each document's code in the lists of the other half, shape [N]."""
        place_N = self.half_N * n_codes + code_N
        sums = torch.bincount(place_N, self.labels_N, minlength=2 * n_codes)
        means = (sums + self.labels_N.mean()) / (torch.bincount(place_N, minlength=2 * n_codes) + 1)
        _, ranks = np.unique(means.roll(n_codes).numpy(), return_inverse=True)
        return ranks.astype(np.int32).take(place_N.numpy())

    def varies(self, x_N: Tensor) -> float:
        """The share of the groups of at least two documents whose values are not all equal."""
        first_N = x_N[self.first_N]
        differs_N = (x_N != first_N) & ~(x_N.isnan() & first_N.isnan())
        differs_Q = sum_by_group(differs_N.long(), self.offsets_Q1) > 0
        return float(differs_Q.sum() / (self.offsets_Q1.diff() > 1).sum().clamp(min=1))


def _both_ways(x_N: Tensor) -> Iterator[NDArray[np.int32]]:
    """Keys in the order of the values and in that of their negatives, missing values last."""
    for ordered_N in (x_N, -x_N):
        bits_N = (ordered_N.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf) + 0.0).numpy().view(np.int32)
        # floats have the order of their bits; below zero that is reversed
        yield np.where(bits_N < 0, bits_N ^ 0x7FFFFFFF, bits_N)


def _bins(x_N: Tensor, known_N: NDArray[Any]) -> tuple[Tensor, int]:
    """The bin of each value, 0 where missing, with bins of equal count; and how many numbers there are."""
    finite_N = known_N[np.isfinite(known_N)]
    edges = np.unique(np.quantile(finite_N, np.linspace(0, 1, _SHAPES + 1)[1:-1])) if len(finite_N) else finite_N
    bins_N = (~x_N.isnan()).numpy().astype(np.int8)
    for edge in edges:  # a tenth of the time of a binary search
        bins_N += x_N.numpy() >= edge
    return torch.from_numpy(bins_N).long(), len(edges) + 2


def _codes(x_N: Tensor) -> tuple[Tensor, int]:
    """The number of each value among those of the feature, and how many there are."""
    values_V, codes_N = np.unique(x_N.nan_to_num(nan=-1.0).numpy(), return_inverse=True)
    return torch.from_numpy(codes_N), len(values_V)


def _marked(x_N: Tensor, usual: float | None, relevant_N: Tensor) -> Iterator[Presence]:
    """The documents with a known, missing or unusual value, where these differ from the rest."""
    present_N = ~x_N.isnan()
    base = float(relevant_N.double().mean()) if len(x_N) else 1.0
    for state, marked_N in (("known", present_N), ("missing", ~present_N), ("unusual", present_N & (x_N != usual))):
        n, n_relevant = int(marked_N.sum()), int((marked_N & relevant_N).sum())
        if not 0 < n < len(x_N) or base in (0.0, 1.0):
            continue
        of_relevant, of_others = n_relevant / (base * len(x_N)), (n - n_relevant) / ((1 - base) * len(x_N))
        yield Presence(
            how=state,
            usual=usual if state == "unusual" else None,
            relevant=of_relevant,
            others=of_others,
            certain=(_wilson_low(n_relevant, n) - base) / (1 - base),
        )


def _wilson_low(successes: int, n: int) -> float:
    """The lower end of Wilson's 95% interval of a share (Wilson 1927)."""
    share = successes / n
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return (share + _Z**2 / (2 * n) - half) / (1 + _Z**2 / n)


def _distinct(values_V: Tensor) -> int:
    finite_V = values_V.numpy()[np.isfinite(values_V.numpy())]
    return len(finite_V) if (finite_V == np.floor(finite_V)).all() else 0
