"""Feature interactions of one document, with loops."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def factorization(fields: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Guo et al. 2017, equation 2, second term: the sum over pairs of fields of `<v_i, v_j> x_i x_j`."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (x_i, v_i) in enumerate(fields):
        for x_j, v_j in fields[i + 1 :]:
            total = total + sum(a * b for a, b in zip(v_i.tolist(), v_j.tolist(), strict=True)) * x_i * x_j
    return total


def cross(x0_D: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Wang et al. 2021, equation 1, layer after layer, entry by entry, for (W, b) of each layer."""
    first = x0_D.tolist()
    x = first
    for weight_DD, bias_D in layers:
        inner = [sum(w * b for w, b in zip(row, x, strict=True)) for row in weight_DD.tolist()]
        x = [x0 * (a + b) + now for x0, a, b, now in zip(first, inner, bias_D.tolist(), x, strict=True)]
    return torch.tensor(x, dtype=torch.float64)


def standardise(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Each value minus its group's mean over its group's deviation; 0 where the group is constant."""
    result = []
    for values in groups:
        mean = sum(values) / max(len(values), 1)
        deviation = (sum((value - mean) ** 2 for value in values) / max(len(values), 1)) ** 0.5
        constant = len(set(values)) < 2
        result.append([0.0 if constant else (value - mean) / deviation for value in values])
    return result


def piecewise_linear(x: float, edges: Sequence[float]) -> list[float]:
    """Gorishniy et al. 2022, equation 1, bin by bin; 0 for a bin between equal edges."""
    bins = [(low, high) for low, high in pairwise(edges) if low < high]
    values = []
    for low, high in pairwise(edges):
        if low == high or (x < low and (low, high) != bins[0]):
            values.append(0.0)
        elif x >= high and (low, high) != bins[-1]:
            values.append(1.0)
        else:
            values.append((x - low) / (high - low))
    return values


def periodic(x: float, frequencies: Sequence[float]) -> list[float]:
    """Gorishniy et al. 2022, equation 2: cosines, then sines."""
    angles = [2 * math.pi * frequency * x for frequency in frequencies]
    return [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
