"""List contexts with random weights and lists with random documents, for the tests of all contexts."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.models.choices import ContextConfig
from ltrscale.models.contexts import Contextual, ListContext
from ltrscale.models.features import TransformConfig, fit_transform

WIDTH = 6
KINDS = ("numeric", "categorical", "numeric", "numeric")


def make(config: ContextConfig, seed: int = 0) -> ListContext:
    torch.manual_seed(seed)
    rows = torch.rand(50, len(KINDS))
    rows[:, 1] = torch.randint(0, 3, (50,)).float()
    transform = fit_transform([rows], KINDS, TransformConfig(numeric="none"))
    module = config.build(WIDTH, transform.numeric_F, transform.cardinalities)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:  # biases and norms, some of which start at 0 or 1, count as well
            nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.3)
    return module.double().eval()


def make_lists(lengths: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[QueryGroups, Tensor]:
    """Groups with distinct order values, and embeddings."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    features_NF = torch.randn(n, len(KINDS), generator=generator, dtype=dtype)
    features_NF[:, 1] = torch.randint(0, 4, (n,), generator=generator).to(dtype)
    positions = [torch.zeros(0), *(torch.randperm(length, generator=generator) + 1.0 for length in lengths)]
    offsets_Q1 = to_offsets(torch.tensor(lengths, dtype=torch.int64))
    groups = QueryGroups(features_NF, offsets_Q1, positions_N=torch.cat(positions).to(dtype))
    return groups, torch.randn(n, WIDTH, generator=generator, dtype=dtype)


def apply(module: ListContext, groups: QueryGroups, h_ND: Tensor) -> Contextual:
    out: Contextual = module(groups.features_NF, h_ND, groups)
    return out


def shuffled(groups: QueryGroups, h_ND: Tensor, seed: int = 1) -> tuple[QueryGroups, Tensor, Tensor]:
    """Documents permuted within their lists, and the permutation."""
    generator = torch.Generator().manual_seed(seed)
    order_N = torch.cat(
        [a + torch.randperm(b - a, generator=generator) for a, b in pairwise(groups.offsets_Q1.tolist())]
    )
    positions_N = None if groups.positions_N is None else groups.positions_N[order_N]
    moved = QueryGroups(groups.features_NF[order_N], groups.offsets_Q1, positions_N=positions_N)
    return moved, h_ND[order_N], order_N
