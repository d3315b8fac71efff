"""Each feature alone: how well it ranks by itself, and what its presence says about the label.

A feature that is known only after users have acted ranks almost as well as the labels, or is present for relevant
documents only. No other measured feature comes close: see docs/own-data.md.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, V values of a feature.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ltrscale.batch import group_index, sum_by_group
from ltrscale.config import Strict
from ltrscale.ranking.metrics import ndcg

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
    group_N = group_index(offsets_Q1, len(labels_N))
    random, lists = _mean_ndcg(torch.zeros_like(labels_N), labels_N, offsets_Q1, k)
    results = []
    for name, codes, x_N in zip(names, categorical, features_NF.T.contiguous(), strict=True):
        orders = [_by_code(x_N, labels_N, group_N)] if codes else _both_ways(x_N)
        best = max((_mean_ndcg(scores_N, labels_N, offsets_Q1, k)[0] for scores_N in orders), default=random)
        mark = max(_marked(x_N, labels_N >= relevant_from), key=lambda marked: marked.certain, default=None)
        values: dict[str, Any] = {"varies": _varies(x_N, offsets_Q1), "distinct": _distinct(x_N)}
        near_N = x_N if codes else _binned(x_N)
        values["shaped"] = _mean_ndcg(_by_code(near_N, labels_N, group_N), labels_N, offsets_Q1, k)[0]
        results.append(SingleFeature(name=name, k=k, ndcg=best, random=random, lists=lists, there=mark, **values))
    return results


def _mean_ndcg(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, k: int) -> tuple[float, int]:
    """The mean over the groups that define NDCG (0 if none do), and their number."""
    values_Q = ndcg(scores_N, labels_N, offsets_Q1, k=k)
    defined_Q = ~values_Q.isnan()
    return float(values_Q[defined_Q].sum() / defined_Q.sum().clamp(min=1)), int(defined_Q.sum())


def _both_ways(x_N: Tensor) -> list[Tensor]:
    missing_N = x_N.isnan()
    return [x_N.masked_fill(missing_N, -torch.inf), (-x_N).masked_fill(missing_N, -torch.inf)]


def _binned(x_N: Tensor) -> Tensor:
    """The bin number of each value, with bins of equal count; NaN where missing."""
    known = x_N[x_N.isfinite()].numpy()
    edges = np.unique(np.quantile(known, np.linspace(0, 1, _SHAPES + 1)[1:-1])) if len(known) else known
    bins_N = torch.from_numpy(np.searchsorted(edges, x_N.numpy(), side="right")).to(x_N.dtype)
    return bins_N.masked_fill(x_N.isnan(), torch.nan)


def _by_code(x_N: Tensor, labels_N: Tensor, group_N: Tensor) -> Tensor:
    """The mean label of each document's code in the lists of the other half, shape [N]."""
    values_V, codes_N = np.unique(x_N.nan_to_num(nan=-1.0).numpy(), return_inverse=True)
    code_N = torch.from_numpy(codes_N)
    mean, scores_N = labels_N.double().mean(), torch.empty(len(x_N), dtype=torch.float64)
    for half in (0, 1):
        mine_N = group_N % 2 == half
        sum_V = torch.zeros(len(values_V), dtype=torch.float64)
        sum_V.index_add_(0, code_N[~mine_N], labels_N[~mine_N].double())
        count_V = torch.bincount(code_N[~mine_N], minlength=len(values_V))
        scores_N[mine_N] = ((sum_V + mean) / (count_V + 1))[code_N[mine_N]]
    return scores_N


def _marked(x_N: Tensor, relevant_N: Tensor) -> Iterator[Presence]:
    """The documents with a known, missing or unusual value, where these differ from the rest."""
    present_N = ~x_N.isnan()
    values_V, count_V = np.unique(x_N[present_N].numpy(), return_counts=True)
    usual = float(values_V[count_V.argmax()]) if len(values_V) else None
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


def _distinct(x_N: Tensor) -> int:
    finite_N = x_N[x_N.isfinite()]
    return len(np.unique(finite_N.numpy())) if bool((finite_N == finite_N.floor()).all()) else 0


def _varies(x_N: Tensor, offsets_Q1: Tensor) -> float:
    """The share of the groups of at least two documents whose values are not all equal."""
    lengths_Q = offsets_Q1.diff()
    several_Q = lengths_Q > 1
    first_N = offsets_Q1[:-1].repeat_interleave(lengths_Q)
    differs_N = (x_N != x_N[first_N]) & ~(x_N.isnan() & x_N[first_N].isnan())
    differs_Q = sum_by_group(differs_N.long(), offsets_Q1) > 0
    return float(differs_Q.sum() / several_Q.sum().clamp(min=1))
