"""What each feature adds to the difference of two documents' scores: `f(A) - f(B)`, for two documents of one list.

For a network, it integrates gradients along a path (`along_path`); for any other scorer, it scores lists in which the
two documents have swapped features (`by_swaps`). Either way, the parts add up to the difference, a feature with equal
values adds nothing, and exchanging A and B flips the sign of every part.

Shapes: P pairs, N documents, F features, C categorical features, E dimensions of an embedding, M points of paths.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, group_index, rows_of
from ltrscale.draws import permutation
from ltrscale.models.layers import FeatureEmbedding
from ltrscale.models.ranker import AnyRanker, rankers_in

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_PANELS = (2, 8, 32, 64)
"""Parts that a path is cut into; more and more until the sum is close enough to the difference."""
_ENOUGH = 1e-3
_AT_ONCE, _TEXTS_AT_ONCE = 4096, 256
"""Documents per call of a network, without and with texts."""
_ORDERS = 4
"""Random orders of the features; each is also used in reverse."""


class Contributions(NamedTuple):
    """The parts of each pair's score difference, in float64."""

    features_PF: Tensor
    beside_P: Tensor
    """What remains if both documents have the same features: from texts, shown positions, and the order of the list."""

    @property
    def total_P(self) -> Tensor:
        """The differences themselves."""
        return self.features_PF.sum(1) + self.beside_P


class _Lists(NamedTuple):
    """The list of each pair (only its two documents if others do not matter), and the rows of both."""

    groups: QueryGroups
    pairs_P2: Tensor

    def select(self, chosen_M: Tensor) -> tuple[QueryGroups, Tensor, Tensor]:
        """The lists of some pairs, which may repeat, with the rows [M] of both documents."""
        groups = self.groups.select(chosen_M)
        shift_M = groups.offsets_Q1[:-1] - self.groups.offsets_Q1[:-1][chosen_M]
        a_M, b_M = (self.pairs_P2[chosen_M] + shift_M[:, None]).unbind(1)
        return groups, a_M, b_M


def _lists(groups: QueryGroups, pairs_P2: Tensor, *, whole: bool) -> _Lists:
    group_P = group_index(groups.offsets_Q1)[pairs_P2[:, 0]]
    rows_N, offsets_P1 = rows_of(groups.offsets_Q1, group_P)
    places_P2 = pairs_P2 - groups.offsets_Q1[group_P][:, None] + offsets_P1[:-1, None]
    if not whole:
        rows_N, offsets_P1 = pairs_P2.flatten(), 2 * torch.arange(len(pairs_P2) + 1, device=pairs_P2.device)
        places_P2 = torch.arange(2 * len(pairs_P2), device=pairs_P2.device).view(-1, 2)
    return _Lists(groups.of_rows(rows_N, offsets_P1, group_P), places_P2)


def along_path(ranker: AnyRanker, groups: QueryGroups, pairs_P2: Tensor) -> Contributions:
    """Integrated gradients along the joint path of two documents, from the midpoint between them to themselves.

    Let D(u, v) be the difference of both scores if A has inputs u and B has inputs v in their list. With the midpoint
    m = (x_A + x_B) / 2, h = (x_A - x_B) / 2 and D_a = D(m + a h, m - a h),

        phi_j = h_j integral from 0 to 1 of (dD/du_j - dD/dv_j) da,      sum_j phi_j = D_1 - D_0.

    (Sundararajan et al. 2017, equation 1, for two documents.) D_1 is the difference. D_0, with equal features, is
    `beside`: 0 except for texts, positions and the order in which a context reads its list. If a score depends on its
    own document alone, this is the integrated gradient of f from B to A.

    Inputs are taken after the feature transform, with missing values imputed; those of categories after the embedding,
    summed over its dimensions. The integral is a Gauss-Legendre sum of 32 to 1,024 points, until the error is at most a
    thousandth of the difference. The remaining error is spread over the features in proportion to their sizes.

    Args:
        ranker: in inference mode; gradients of its parameters are switched off.
        groups: with the features that it reads.
        pairs_P2: rows of A and B, which are in the same list.
    """
    ranker.requires_grad_(False)  # only inputs have a gradient here
    lists = _lists(groups, pairs_P2, whole=any(part.architecture.reads_lists for part in rankers_in(ranker)))
    follow, every_P = partial(_followed, ranker, lists), torch.arange(len(pairs_P2), device=pairs_P2.device)
    (beside_P, _), (total_P, _) = (follow(every_P, torch.full((len(every_P),), end)) for end in (0.0, 1.0))
    phi_PF = torch.zeros(len(pairs_P2), groups.n_features, dtype=torch.float64)
    open_P = torch.arange(len(pairs_P2))
    for panels in _PANELS:
        points = torch.from_numpy(((np.arange(panels)[:, None] + (_NODES + 1) / 2) / panels).ravel())
        weights = torch.from_numpy(np.tile(_WEIGHTS / 2 / panels, panels))
        _, slope_MF = follow(open_P.repeat_interleave(len(points)), points.repeat(len(open_P)))
        phi_PF[open_P] = (slope_MF.view(len(open_P), len(points), -1) * weights[:, None]).sum(1)
        lacking_P = total_P - beside_P - phi_PF.sum(1)
        open_P = (lacking_P.abs() > _ENOUGH * total_P.abs()).nonzero()[:, 0]
        if not len(open_P):
            break
    sizes_PF = phi_PF.abs()
    shares_PF = sizes_PF / sizes_PF.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    spread_P = lacking_P.where(sizes_PF.sum(1) > 0, 0.0)
    return Contributions(phi_PF + spread_P[:, None] * shares_PF, beside_P + lacking_P - spread_P)


def _followed(ranker: AnyRanker, lists: _Lists, pair_M: Tensor, point_M: Tensor) -> tuple[Tensor, Tensor]:
    """D at points of the paths of some pairs, [M], and what each feature adds to its slope there, [M, F]."""
    longest = max(1, int(lists.groups.lengths_Q.max()))
    at_once = max(1, (_TEXTS_AT_ONCE if lists.groups.document_tokens else _AT_ONCE) // longest)
    parts = []
    for pairs, points in zip(torch.split(pair_M, at_once), torch.split(point_M, at_once), strict=True):
        groups, a_M, b_M = lists.select(pairs.to(lists.pairs_P2.device))
        with torch.enable_grad(), _moved(ranker, a_M, b_M, points.to(groups.features_NF)) as inputs:
            scores_N = ranker(groups)
            difference_M = scores_N[a_M] - scores_N[b_M]
            leaves = [each.leaf for each in inputs]
            slopes = torch.autograd.grad(difference_M.sum(), leaves, allow_unused=True, materialize_grads=True)
        slope_MF = sum(each.by_feature(g[a_M] - g[b_M]) for each, g in zip(inputs, slopes, strict=True))
        parts.append((difference_M.detach().double().cpu(), torch.as_tensor(slope_MF).cpu()))
    difference, slope = zip(*parts, strict=True)
    return torch.cat(difference), torch.cat(slope)


@dataclass(frozen=True)
class _Input:
    """A layer's input with A and B moved along their path: a leaf of the graph, and half of their distance."""

    leaf: Tensor
    half: Tensor
    columns: Sequence[int]
    n_features: int

    def by_feature(self, slope: Tensor) -> Tensor:
        """The slope times half of the distance, summed over the dimensions of embeddings, [M, F]."""
        products_MC = (slope.double() * self.half.double()).flatten(2 if slope.dim() > 2 else 1)
        products_MC = products_MC.sum(2) if products_MC.dim() > 2 else products_MC
        slope_MF = products_MC.new_zeros(len(slope), self.n_features)
        return slope_MF.index_copy(1, torch.tensor(self.columns, device=slope.device), products_MC)


@contextmanager
def _moved(ranker: AnyRanker, a_M: Tensor, b_M: Tensor, point_M: Tensor) -> Iterator[list[_Input]]:
    """A context in which a network reads A and B at points of their paths; yields the inputs that it reads."""
    inputs: list[_Input] = []

    def move(columns: Sequence[int], n_features: int, moves: Tensor, *call: Any) -> Tensor:
        output: Tensor = call[-1]
        half = (output[a_M] - output[b_M]) / 2 * moves
        back = half * (1 - point_M).view(-1, *[1] * (output.dim() - 1))
        leaf = output.detach().index_add(0, a_M, -back).index_add(0, b_M, back).requires_grad_()
        inputs.append(_Input(leaf, half, columns, n_features))
        return leaf

    with ExitStack() as hooks:
        for part in rankers_in(ranker):
            transform, n = part.transform, len(part.transform.kinds)
            numbers_F = transform.numeric_F.to(point_M)  # 0 for categories: their embeddings move instead
            _hook(hooks, transform, partial(move, range(n), n, numbers_F))
            for module in part.modules():
                if isinstance(module, FeatureEmbedding) and module.table is not None:
                    _hook(hooks, module.table, partial(move, transform.categorical, n, point_M.new_ones(())))
        yield inputs


def _hook(stack: ExitStack, module: nn.Module, function: Callable[..., Tensor]) -> None:
    stack.callback(module.register_forward_hook(function).remove)


def by_swaps(scorer: Callable[[QueryGroups], Tensor], groups: QueryGroups, pairs_P2: Tensor) -> Contributions:
    """Shapley values of swapped features, for any scorer: it scores lists in which A and B have swapped features.

    Let D(S) be the difference of both scores if A and B keep the features S and swap all others. Then

        phi_j = half of the mean, over orders of the features, of D(those before j, and j) - D(those before j),

    so `sum_j phi_j = (D(all) - D(none)) / 2`; `beside` is the rest of the difference D(all), `(D(all) + D(none)) / 2`
    (Shapley 1953; Strumbelj and Kononenko 2014, algorithm 1, for two documents). The mean is over four random orders
    and their reverses: the sum is exact, and single parts are estimates if features interact. Every feature in which
    the two differ costs eight scores of the list.

    Example:
        >>> groups = QueryGroups(torch.tensor([[3.0, 1.0, 7.0], [1.0, 5.0, 7.0]]), torch.tensor([0, 2]))
        >>> product = lambda groups: groups.features_NF[:, 0] * groups.features_NF[:, 1]
        >>> by_swaps(product, groups, torch.tensor([[0, 1]])).features_PF.tolist()
        [[6.0, -8.0, 0.0]]
    """
    lists = _lists(groups, pairs_P2, whole=True)
    phi_PF = torch.zeros(len(pairs_P2), groups.n_features, dtype=torch.float64)
    beside_P = torch.zeros(len(pairs_P2), dtype=torch.float64)
    for p in range(len(pairs_P2)):
        one, *rows = lists.select(torch.tensor([p], device=pairs_P2.device))
        a, b = map(int, rows)
        x_NF = one.features_NF
        apart = ((x_NF[a] != x_NF[b]) & ~(x_NF[a].isnan() & x_NF[b].isnan())).nonzero()[:, 0]
        for number in range(2 * _ORDERS):
            order = apart[torch.from_numpy(permutation(len(apart), "swaps", number // 2))]
            order = order.flip(0) if number % 2 else order
            difference_K1 = _as_swapped_back(scorer, one, a, b, order)
            phi_PF[p, order] += difference_K1.diff() / (4 * _ORDERS)
            beside_P[p] = (difference_K1[0] + difference_K1[-1]) / 2
    return Contributions(phi_PF, beside_P)


def _as_swapped_back(
    scorer: Callable[[QueryGroups], Tensor], one: QueryGroups, a: int, b: int, order_K: Tensor
) -> Tensor:
    """D [K + 1] with all K features swapped, with the first swapped back, with the first two, up to all of them."""
    n, copies = one.n_documents, len(order_K) + 1
    differences = []
    for first in range(0, copies, max(1, _AT_ONCE // n)):
        numbers = torch.arange(first, min(copies, first + max(1, _AT_ONCE // n)))
        groups = one.select(torch.zeros(len(numbers), dtype=torch.int64, device=order_K.device))
        features_KNF = groups.features_NF.view(len(numbers), n, -1)
        for row, k in enumerate(numbers.tolist()):
            swapped = order_K[k:]
            features_KNF[row, a, swapped], features_KNF[row, b, swapped] = (
                one.features_NF[b, swapped], one.features_NF[a, swapped],
            )  # fmt: skip
        scores_KN = scorer(groups).double().cpu().view(len(numbers), n)
        differences.append(scores_KN[:, a] - scores_KN[:, b])
    return torch.cat(differences)
