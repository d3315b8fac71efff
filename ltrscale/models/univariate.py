"""Functions of a single feature's value: its place among examples, and its place within its own list.

Shapes: B problems whose lists have the same lengths, Q lists, N documents, M documents of the examples, F features, K
functions of a feature.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ltrscale.batch import group_index

FUNCTIONS = 7
"""Functions of a feature: four hats on its quantiles, its value, its value and its rank within the list."""


class Scale(NamedTuple):
    """What functions of features need: the examples' sorted values, their moments, and the functions' means."""

    sorted_BFM: Tensor
    mean_B1F: Tensor
    std_B1F: Tensor
    centre_B1FK: Tensor | float

    @staticmethod
    def of(x_BMF: Tensor, offsets_Q1: Tensor) -> "Scale":
        """The scale of examples."""
        x_BMF = x_BMF.double()
        sorted_BFM = x_BMF.transpose(1, 2).contiguous().sort(-1).values
        scale = Scale(sorted_BFM, x_BMF.mean(1, keepdim=True), x_BMF.std(1, correction=0, keepdim=True), 0.0)
        return scale._replace(centre_B1FK=functions_of(x_BMF, offsets_Q1, scale).mean(1, keepdim=True))


def functions_of(x_BNF: Tensor, offsets_Q1: Tensor, scale: Scale) -> Tensor:
    """Functions of each feature's value, [B, N, F, K]: their mean over the examples is 0.

    Four hats of width 1/3 on the share u of the examples' values below it, the standardised value, the value
    standardised within its list, and the rank of u within its list, from -1.7 to 1.7. A feature that is constant among
    the examples has only zeros. They do not change if a feature is multiplied by a positive number or shifted.

    Example:
        >>> x_BNF, offsets = torch.tensor([[[0.0], [2.0], [7.0]]]), torch.tensor([0, 3])
        >>> functions_of(x_BNF, offsets, Scale.of(x_BNF, offsets))[0, :, 0, 6].round(decimals=2).tolist()
        [-1.15, 0.0, 1.15]
    """
    x_BNF, values_BFN = x_BNF.double(), x_BNF.double().transpose(1, 2).contiguous()
    n_values = 2 * scale.sorted_BFM.shape[2]
    below_BFN = _twice_the_rank(scale.sorted_BFM, values_BFN)
    u_BNF = below_BFN.transpose(1, 2) / n_values
    # integer keys sort by list first, exactly for any number of lists
    group_N = group_index(offsets_Q1)
    keys_BFN = below_BFN + group_N * (n_values + 1)
    rank_BFN = _twice_the_rank(keys_BFN.sort(-1).values, keys_BFN) / 2 - offsets_Q1[group_N]
    rank_BNF = 2 * math.sqrt(3) * (rank_BFN / lengths_N(offsets_Q1) - 0.5).transpose(1, 2)
    z_BNF = ((x_BNF - scale.mean_B1F) / scale.std_B1F.clamp(min=1e-300)).clamp(-4, 4)
    centred_BNF = x_BNF - list_means(x_BNF, offsets_Q1)
    std_BNF = list_means(centred_BNF.square(), offsets_Q1).sqrt()
    within_BNF = (centred_BNF / std_BNF.clamp(min=1e-300)).clamp(-3, 3) * (std_BNF > 1e-6 * scale.std_B1F)
    knots_4 = torch.linspace(0, 1, 4, dtype=x_BNF.dtype, device=x_BNF.device)
    hats_BNF4 = (1 - 3 * (u_BNF[..., None] - knots_4).abs()).clamp(min=0)
    functions_BNFK = torch.cat([hats_BNF4, torch.stack([z_BNF, within_BNF, rank_BNF], -1)], -1) - scale.centre_B1FK
    varies_BF = scale.sorted_BFM[..., 0] < scale.sorted_BFM[..., -1]
    return torch.where(varies_BF[:, None, :, None], functions_BNFK, 0.0)


def _twice_the_rank(sorted_BFM: Tensor, values_BFN: Tensor) -> Tensor:
    """How many of the sorted values are below each value, plus how many are not above it."""
    return torch.searchsorted(sorted_BFM, values_BFN) + torch.searchsorted(sorted_BFM, values_BFN, right=True)


def rank_correlations(functions_BMFK: Tensor) -> Tensor:
    """Correlations [B, F, F] of the examples' ranks within their lists."""
    ranks_BMF = functions_BMFK[..., -1]
    ranks_BMF = ranks_BMF / (ranks_BMF.square().mean(1, keepdim=True).sqrt() + 1e-3)
    return ranks_BMF.transpose(1, 2) @ ranks_BMF / ranks_BMF.shape[1]


def list_means(values_BN_: Tensor, offsets_Q1: Tensor) -> Tensor:
    """The mean of each document's list, in the shape of the values, [B, N, ...]."""
    group_N, shape = group_index(offsets_Q1), values_BN_.shape
    sums_BQ_ = values_BN_.new_zeros(shape[0], len(offsets_Q1) - 1, *shape[2:]).index_add(1, group_N, values_BN_)
    return sums_BQ_[:, group_N] / lengths_N(offsets_Q1).to(values_BN_.dtype).view(-1, *[1] * (len(shape) - 2))


def lengths_N(offsets_Q1: Tensor) -> Tensor:
    """The length of each document's list."""
    return offsets_Q1.diff()[group_index(offsets_Q1)]
