"""Relaxed sorts and the losses over them of one list, with loops, in the type of the scores."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from reference.metrics import ideal_dcg


def neural_sort(scores_L: Tensor, temperature: float) -> Tensor:
    """Row i, counted from 1: softmax over documents of ((n + 1 - 2i) s - sum_j |s - s_j|) / tau."""
    n = len(scores_L)
    distances_L = torch.stack([sum((abs(s - other) for other in scores_L), start=s * 0) for s in scores_L])
    return torch.stack(
        [torch.softmax(((n + 1 - 2 * i) * scores_L - distances_L) / temperature, 0) for i in range(1, n + 1)]
    )


def exact_sort(scores_L: Tensor) -> Tensor:
    """Row i holds the share of each document in rank i; tied documents share their ranks equally."""
    falling = sorted(scores_L.tolist(), reverse=True)
    shares = [[float(s == score) / falling.count(score) for s in scores_L.tolist()] for score in falling]
    return torch.tensor(shares, dtype=scores_L.dtype)


def sort_entries(entries_L2: Tensor, temperature: float, mode: str) -> Tensor:
    """Entries (score, gain) in relaxed or exact order; straight-through sorts have the relaxed matrix's gradient."""
    scores_L = entries_L2[:, 0]
    if mode == "soft":
        return neural_sort(scores_L, temperature) @ entries_L2
    choice_LL = exact_sort(scores_L)
    if mode == "straight_through":
        relaxed_LL = neural_sort(scores_L, temperature)
        choice_LL = choice_LL + (relaxed_LL - relaxed_LL.detach())
    sorted_L2 = choice_LL @ entries_L2
    exact_L = scores_L.detach().sort(descending=True).values  # the mean of equal scores, without rounding
    return torch.stack([sorted_L2[:, 0] + (exact_L - sorted_L2[:, 0]).detach(), sorted_L2[:, 1]], 1)


def shared_out(runs: Sequence[Tensor], branching: int) -> list[list[Tensor]]:
    """Runs, in order, in ceil(m / b) parts whose sizes differ by at most one."""
    count = math.ceil(len(runs) / branching)
    return [[run for c, run in enumerate(runs) if c * count // len(runs) == j] for j in range(count)]


def pirank(
    scores_L: Tensor,
    labels: Sequence[float],
    temperature: float,
    k: int | None = None,
    depth: int = 1,
    mode: str = "soft",
) -> Tensor:
    """A run is a matrix [entries, 2] of scores and gains; ideal DCG from the labels themselves."""
    if not any(labels):
        return scores_L.sum() * 0
    n = len(labels)
    branching = next(b for b in range(1, n + 1) if b**depth >= n)
    gains_L = torch.tensor([2**y - 1 for y in labels], dtype=scores_L.dtype)
    runs = [torch.stack([s, g])[None] for s, g in zip(scores_L, gains_L, strict=True)]
    for _ in range(depth):
        joined = []
        for part in shared_out(runs, branching):
            entries_L2 = torch.cat(part)
            if len(part) > 1:
                entries_L2 = sort_entries(entries_L2, temperature, mode)[:k]
            joined.append(entries_L2)
        runs = joined
    (final_K2,) = runs
    dcg = torch.stack([gain / math.log2(1 + rank) for rank, (_, gain) in enumerate(final_K2, start=1)]).sum()
    return 1 - dcg / ideal_dcg(labels, k)
