"""Learning from clicks that depend on the position: propensities, the two losses of dual learning, random negatives.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, P positions (entry p is position p + 1), S documents shown, K
negatives of each group, M rows of a batch with negatives. Positions count from 1. A document that was not shown, such
as an added negative, has position NaN.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, at_least_float32, group_index, sum_by_group, to_offsets
from ltrscale.errors import InputError
from ltrscale.layout import layout
from ltrscale.ranking.losses import softmax


class PropensityModel(nn.Module):
    """One learned examination logit for each position, relative to position 1, whose logit is 0.

    The softmax that turns logits into propensities does not change when all logits shift, so fixing the first loses
    nothing. The weight of a click, `propensity_1 / propensity_p = exp(-logit_p)`, then depends on its own position
    only. All logits start at 0: every position is equally likely to be examined, and the first step of the dual
    learning algorithm (Ai et al. 2018) uses unweighted clicks.

    Args:
        positions: number of positions with their own logit; later positions share the last one.

    Raises:
        ValueError: fewer than 2 positions, which leave nothing to learn.
    """

    def __init__(self, positions: int) -> None:
        super().__init__()
        if positions < 2:
            raise ValueError(f"positions must be at least 2, but is {positions}")
        self.later = nn.Parameter(torch.zeros(positions - 1))

    def forward(self, positions_N: Tensor) -> Tensor:
        """Logits [N] of positions, which count from 1; 0 without gradient for NaN, a document that was not shown.

        Raises:
            InputError: a position is below 1.
        """
        logits_P = torch.cat([self.later.new_zeros(1), self.later])
        return logits_P[_position_index(positions_N, len(logits_P))]


def with_negatives(groups: QueryGroups, number: int, generator: torch.Generator) -> QueryGroups:
    """The groups with random documents of the batch's other groups appended to each (Sun et al. 2023, section 2.2).

    A negative keeps the features and tokens of its document and gets the query of its new group, label 0, weight 1 and
    no position (NaN), so the dual learning algorithm gives it propensity 1. Each draw is independent and uniform over
    the documents of the other groups. A group that is alone in its batch stays as it is.

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
    place_QK = (drawn_QK * others_Q[:, None]).long()  # index among documents of other groups
    rows_QK = place_QK + groups.lengths_Q[:, None] * (place_QK >= offsets_Q1[:-1, None])
    own_M, place_M = layout(offsets_Q1).get("sources", number)
    negative_M = own_M < 0
    rows_M = torch.where(negative_M, rows_QK.flatten()[place_M], own_M) if len(own_M) else own_M

    def taken(values_N: Tensor | None, of_negatives: float) -> Tensor | None:
        if values_N is None:
            return None
        return values_N[rows_M].masked_fill(negative_M.view(-1, *[1] * (values_N.ndim - 1)), of_negatives)

    return replace(
        groups,
        features_NF=groups.features_NF[rows_M],
        offsets_Q1=layout(offsets_Q1).get("with_places", number),
        labels_N=taken(groups.labels_N, 0.0),
        weights_N=taken(groups.weights_N, 1.0),
        positions_N=taken(groups.positions_N, torch.nan),
        gains_N=taken(groups.gains_N, 0.0),
        goals_NG=taken(groups.goals_NG, 0.0),
        document_tokens={name: tokens.select(rows_M) for name, tokens in groups.document_tokens.items()},
    )


def _position_index(positions_N: Tensor, positions: int) -> Tensor:
    """The index of each document in a table by position, whose last entry is for all later ones; 0 if not shown."""
    if bool((positions_N < 1).any()):  # NaN compares as False, so documents not shown pass
        raise InputError(f"positions: {float(positions_N.nan_to_num(nan=1).min())} is below 1; count from 1")
    return (positions_N.nan_to_num(nan=1).clamp(max=positions) - 1).long()


def dla_ranking_loss(
    scores_N: Tensor, clicks_N: Tensor, offsets_Q1: Tensor, *, examination_logits_N: Tensor, clip: float
) -> Tensor:
    """The ranker's loss in dual learning: softmax cross entropy of clicks by inverse propensity, shape [Q].

    `-sum_i c_i w_i log softmax(s)_i` with `w_i = min(clip, g_1 / g_i) = min(clip, exp(-e_i))`: g is the softmax of the
    examination logits e, so the weights are relative to position 1, whose logit is 0 (Ai et al. 2018). The weights
    carry no gradient; `dla_propensity_loss` trains the logits.

    Args:
        scores_N: finite scores. Half precision is computed, and returned, in float32.
        clicks_N: clicks or refined labels, not negative. A group without clicks has loss 0 and gradient 0.
        offsets_Q1: offsets of the groups.
        examination_logits_N: logits relative to position 1, as `PropensityModel` returns them; 0, and so weight 1,
            for a document that was not shown (Sun et al. 2023).
        clip: the largest weight, at least 1.

    Raises:
        ValueError: clip is below 1 or infinite.

    Example:
        >>> logits = torch.tensor([0.0, -1.0])  # the second position is examined 1 / e as often as the first
        >>> scores, clicks, offsets = torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([0, 2])
        >>> dla_ranking_loss(scores, clicks, offsets, examination_logits_N=logits, clip=10)  # e log 2
        tensor([1.8842])
    """
    _check_clip(clip)
    # The logit is clipped before exp: the weight of a very negative logit would be infinite.
    weights_N = at_least_float32(-examination_logits_N.detach()).clamp(max=math.log(clip)).exp()
    return softmax(scores_N, clicks_N, offsets_Q1, weights_N=weights_N)


def dla_propensity_loss(
    examination_logits_N: Tensor,
    clicks_N: Tensor,
    offsets_Q1: Tensor,
    *,
    positions_N: Tensor,
    scores_N: Tensor,
    clip: float,
) -> Tensor:
    """The propensity model's loss in dual learning: `dla_ranking_loss` with the roles exchanged, shape [Q].

    `-sum_i c_i v_i log softmax(e)_i` over the documents shown, with `v_i = min(clip, f_1 / f_i)`: f is the softmax of
    the scores and f_1 that of the document at the first position (Ai et al. 2018). The weights carry no gradient.

    Args:
        examination_logits_N: finite logits of the documents' positions. Half precision is computed in float32.
        clicks_N: clicks, not negative. A group without a click on a document shown has loss 0 and gradient 0.
        offsets_Q1: offsets of the groups.
        positions_N: positions, from 1 on; NaN where a document was not shown, which excludes it from this loss. In a
            group without position 1, f_1 is that of its lowest position; documents that share a position share their
            mean score.
        scores_N: the ranker's scores, finite.
        clip: the largest weight, at least 1.

    Raises:
        ValueError: clip is below 1 or infinite.

    Example:
        >>> logits, clicks, offsets = torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([0, 2])
        >>> positions, scores = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> dla_propensity_loss(logits, clicks, offsets, positions_N=positions, scores_N=scores, clip=10)  # e log 2
        tensor([1.8842])
    """
    _check_clip(clip)
    shown_N = ~positions_N.isnan()
    offsets_Q1 = to_offsets(sum_by_group(shown_N.long(), offsets_Q1))
    scores_S = at_least_float32(scores_N.detach())[shown_N]
    behind_S = _first_by_group(scores_S, positions_N[shown_N], offsets_Q1) - scores_S
    weights_S = behind_S.clamp(max=math.log(clip)).exp()
    return softmax(examination_logits_N[shown_N], clicks_N[shown_N], offsets_Q1, weights_N=weights_S)


def _first_by_group(values_N: Tensor, positions_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """The value at the first position of each document's group, the mean if several documents share it, shape [N]."""
    group_N = group_index(offsets_Q1)
    first_Q = positions_N.new_full((len(offsets_Q1) - 1,), torch.inf)
    first_Q = first_Q.scatter_reduce(0, group_N, positions_N, "amin")
    is_first_N = (positions_N == first_Q[group_N]).to(values_N.dtype)
    return (sum_by_group(values_N * is_first_N, offsets_Q1) / sum_by_group(is_first_N, offsets_Q1))[group_N]


def _check_clip(clip: float) -> None:
    if not 1 <= clip < math.inf:
        raise ValueError(f"clip must be from 1 on and finite, but is {clip}")
