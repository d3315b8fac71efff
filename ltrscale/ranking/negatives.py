"""Random negatives: documents of other query groups of a batch, which a user of the query has never seen.

Shapes: N documents, Q groups, K negatives of each group, M rows of the new batch.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups, to_offsets


def with_negatives(groups: QueryGroups, number: int, generator: torch.Generator) -> QueryGroups:
    """The groups with random documents of the batch's other groups appended to each (Sun et al. 2023, section 2.2).

    A negative has the features and tokens of its document, beside the query of its new group: label 0, no position
    (NaN), so that the dual learning algorithm gives it propensity 1, and weight 1. Each draw is uniform over the
    documents of the other groups, independently of the others. A group that has the batch for itself stays as it is.

    Args:
        groups: labelled groups.
        number: negatives of each group, K.
        generator: source of randomness, on the device of the batch.

    Example:
        >>> x_NF, labels_N = torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([0.0, 1.0, 1.0])
        >>> groups = QueryGroups(x_NF, torch.tensor([0, 2, 3]), labels_N)
        >>> more = with_negatives(groups, 1, torch.Generator().manual_seed(0))
        >>> more.offsets_Q1.tolist(), more.features_NF[2].item(), more.labels_N.tolist()
        ([0, 3, 5], 9.0, [0.0, 1.0, 0.0, 1.0, 0.0])
    """
    n, offsets_Q1 = groups.n_documents, groups.offsets_Q1
    others_Q = n - groups.lengths_Q
    drawn_QK = torch.rand(groups.n_groups, number, generator=generator, device=offsets_Q1.device, dtype=torch.float64)
    place_QK = (drawn_QK * others_Q[:, None]).long()  # among the others, that is, without the group's own documents
    rows_QK = place_QK + groups.lengths_Q[:, None] * (place_QK >= offsets_Q1[:-1, None])
    added_Q = torch.where(others_Q > 0, number, 0)
    ends_Q1 = to_offsets(groups.lengths_Q + added_Q)
    rows_M = torch.full((int(ends_Q1[-1]),), -1, device=offsets_Q1.device)
    own_N = torch.arange(n, device=offsets_Q1.device)
    rows_M[own_N + (ends_Q1[:-1] - offsets_Q1[:-1]).repeat_interleave(groups.lengths_Q)] = own_N
    negative_M = rows_M < 0
    rows_M[negative_M] = rows_QK[others_Q > 0].flatten()

    def taken(values_N: Tensor | None, of_negatives: float) -> Tensor | None:
        return None if values_N is None else values_N[rows_M].masked_fill(negative_M, of_negatives)

    return replace(
        groups,
        features_NF=groups.features_NF[rows_M],
        offsets_Q1=ends_Q1,
        labels_N=taken(groups.labels_N, 0.0),
        weights_N=taken(groups.weights_N, 1.0),
        positions_N=taken(groups.positions_N, torch.nan),
        gains_N=taken(groups.gains_N, 0.0),
        document_tokens={name: tokens.select(rows_M) for name, tokens in groups.document_tokens.items()},
    )
