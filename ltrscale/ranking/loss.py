"""The base class of ranking losses, checks for groups with something to rank, and the pointwise losses.

A loss gives one value per ragged group, which the training loop reduces. All losses take finite scores, labels that are
finite and not negative unless they say so, and offsets of the groups. On a CPU, those with gains 2^y - 1 raise
ValueError for a label above 1,000, whose gain is beyond float64. Half precision is computed, and returned, in
float32. `weights_N` are factors of the documents' terms, such as inverse propensities; None means 1.

Losses of lists share an engine: chunks of similar lists in falling order, forward and backward at once.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group, and the first K ranks.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltrscale.batch import at_least_float32, group_index, length_chunks, standardise_by_group, sum_by_group
from ltrscale.config import Config
from ltrscale.devices import block_entries
from ltrscale.processor import one_thread
from ltrscale.ranking.metrics import rank_discounts
from ltrscale.ranking.ranked import best_first, falling_order

PAIRS_PER_BLOCK = 1 << 16
"""Pairs that a CPU handles at once: few enough to stay in the cache, so memory does not grow with the list length; see
`block_entries` for a GPU."""
ROWS_PER_BLOCK = 10
"""Rows of a block: more meet fewer documents in vain, fewer leave more lists to a chunk."""


class RankedLists(NamedTuple):
    """The lists of a chunk, each in falling order of gains or scores; padding comes last.

    In padding the score is 0 and the gain is -inf.
    """

    mask_ML: Tensor
    scores_ML: Tensor
    gains_ML: Tensor
    discounts_L: Tensor
    """Discounts of ranks 1 to L, float64."""


_Order = Literal["gains", "scores"]
_Solve = Callable[[RankedLists, bool], tuple[Tensor, Tensor]]
"""Computes the loss of each list [M] and its slope by the scores [M, L]; without the flag the slope may be 0.

The slope is 0 in padding.
"""


def over_lists(
    scores_N: Tensor, gains_N: Tensor, offsets_Q1: Tensor, solve: _Solve, *, order: _Order = "gains"
) -> Tensor:
    """The loss of each group, shape [Q], computed chunk by chunk together with its gradient.

    Backward needs only one slope per document, so `solve` can free its matrices of pairs after each block of rows. It
    receives lists of similar length in falling order, and half precision scores in float32.
    """
    loss_Q: Tensor = _ListLoss.apply(at_least_float32(scores_N), gains_N, offsets_Q1, solve, order)  # type: ignore[no-untyped-call]
    return loss_Q


class _ListLoss(torch.autograd.Function):
    @staticmethod
    @one_thread()  # its blocks are sized for the cache of one core
    def forward(
        ctx: Any, scores_N: Tensor, gains_N: Tensor, offsets_Q1: Tensor, solve: _Solve, order: _Order
    ) -> Tensor:
        # groups of similar length, so few that a block of pairs spans some rows of all of them
        chunks = length_chunks(offsets_Q1, budget=PAIRS_PER_BLOCK // ROWS_PER_BLOCK, quadratic=False)
        gains_N, losses, slopes = gains_N.double(), [], []
        discounts_L = rank_discounts(max(length for _, length in chunks.shapes), scores_N.device)
        keys_S = chunks.pad(gains_N if order == "gains" else scores_N, -torch.inf)
        values = keys_S, chunks.pad(scores_N), chunks.pad(gains_N, -torch.inf), chunks.mask_S
        for keys_ML, scores_ML, gains_ML, mask_ML in zip(*map(chunks.split, values), strict=True):
            order_ML = falling_order(keys_ML)
            # The mask stays valid: padding was last before the sort and has the lowest key.
            in_order = scores_ML.gather(1, order_ML), gains_ML.gather(1, order_ML)
            lists = RankedLists(mask_ML, *in_order, discounts_L[: mask_ML.shape[1]])
            loss_M, slope_ML = solve(lists, ctx.needs_input_grad[0])
            losses.append(loss_M)
            slopes.append(torch.empty_like(slope_ML).scatter_(1, order_ML, slope_ML))
        ctx.save_for_backward(chunks.ragged(slopes), offsets_Q1)
        loss_Q = chunks.by_group(losses, len(offsets_Q1) - 1)
        # a NaN score has no rank: the loss of its list is NaN, not that of some other order
        return loss_Q.masked_fill_(sum_by_group(scores_N.isnan().to(loss_Q.dtype), offsets_Q1) > 0, torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Q: Tensor) -> tuple[Tensor, None, None, None, None]:
        slope_N, offsets_Q1 = ctx.saved_tensors
        return slope_N * grad_Q[group_index(offsets_Q1)], None, None, None, None


def most(counts: Tensor, bound: int) -> int:
    """The highest count on a CPU; elsewhere the bound, so that the host need not wait."""
    return int(counts.max()) if counts.is_cpu and counts.numel() else bound


def over_ideal(gains_ML: Tensor, discounts_L: Tensor, truncation: int | None = None) -> Tensor:
    """Gains divided by the DCG of their best order; unchanged if no document is relevant."""
    best_MK = best_first(gains_ML, truncation or gains_ML.shape[1]).clamp(min=0)
    ideal_M = best_MK @ discounts_L[: best_MK.shape[1]]
    return gains_ML / ideal_M.masked_fill_(ideal_M == 0, 1.0)[:, None]


def row_blocks(values_ML: Tensor, rows: int) -> Iterator[slice]:
    """Slices of the first `rows` rows; each spans one block of pairs, or a single row."""
    entries = PAIRS_PER_BLOCK if values_ML.is_cpu else block_entries(values_ML.device)
    step = max(1, entries // max(1, values_ML.numel()))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class Scored(NamedTuple):
    """Scored documents of labelled groups: the input of a loss."""

    scores_N: Tensor
    labels_N: Tensor
    offsets_Q1: Tensor
    weights_N: Tensor | None
    """Factors of the documents' terms, for the losses that are `weighted`; None means 1."""
    generator: torch.Generator
    """Source of randomness for losses that sample, on the device of the scores."""

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, labels and offsets."""
        return self.scores_N, self.labels_N, self.offsets_Q1


class Loss(Config):
    """A ranking loss as a config selects it: a pure function, and its parameters as keys."""

    kind: str
    function: ClassVar[Callable[..., Tensor]]
    """Computes the loss of each group, shape [Q], from scores, labels, offsets and the keys."""
    weighted: ClassVar[bool] = False
    """True if the function takes document weights, `weights_N`."""
    samples_noise: ClassVar[bool] = False
    """True if the function draws from a `generator`."""
    dual: ClassVar[bool] = False
    """True if the dual learning algorithm is defined for it."""
    needs_relevance: ClassVar[bool] = False
    """True if a group needs a relevant document, instead of two different labels."""

    def losses(self, scored: Scored) -> Tensor:
        """The loss of each group, shape [Q]; 0 for a group that `counted` excludes."""
        settings = {name: value for name, value in self if name != "kind"}
        if self.weighted:
            settings["weights_N"] = scored.weights_N
        if self.samples_noise:
            settings["generator"] = scored.generator
        return self.function(*scored.lists, **settings)

    def counted(self, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The groups that the mean loss averages over, shape [Q], bool."""
        return (_has_relevance if self.needs_relevance else has_pairs)(labels_N, offsets_Q1)


def has_pairs(labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """True for groups with two different labels, shape [Q]; other groups have no order to learn.

    Example:
        >>> has_pairs(torch.tensor([1.0, 0.0, 2.0, 2.0, 3.0]), torch.tensor([0, 2, 4, 4, 5]))
        tensor([ True, False, False, False])
    """
    first_N = labels_N[offsets_Q1[group_index(offsets_Q1)]]
    return sum_by_group((labels_N != first_N).long(), offsets_Q1) > 0


def _has_relevance(labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """True for groups with a label above 0, shape [Q]; NDCG and softmax need one."""
    return sum_by_group((labels_N > 0).long(), offsets_Q1) > 0


class _Pointwise(Loss):
    """A loss per document, summed over the group; it learns from any labels, not from their order."""

    weighted: ClassVar[bool] = True

    def counted(self, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:  # noqa: ARG002
        """Groups with a document, whatever its label."""
        return offsets_Q1.diff() > 0


def sigmoid_cross_entropy(
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    highest_label: float = 1.0,
    weights_N: Tensor | None = None,
) -> Tensor:
    """Sigmoid cross entropy of each single document, shape [Q].

    `sum over documents of w_i (log(1 + exp(s_i)) - s_i y_i / highest_label)` (Qin et al. 2021, B.2). The paper leaves
    graded labels unscaled, which is `highest_label` 1; the score of a document whose expected label exceeds 1 then
    grows without bound. If `highest_label` is the highest grade, the best score is the logit of the expected label
    divided by that grade.

    An empty group has loss 0.

    Example:
        >>> import torch
        >>> labels = torch.tensor([1.0, 0.0, 0.0])
        >>> sigmoid_cross_entropy(torch.zeros(3), labels, torch.tensor([0, 2, 3]))  # log(2) a document
        tensor([1.3863, 0.6931])
    """
    scores_N = at_least_float32(scores_N)
    loss_N = -F.logsigmoid(-scores_N) - scores_N * (labels_N / highest_label)
    return sum_by_group(loss_N if weights_N is None else loss_N * weights_N, offsets_Q1)


class SigmoidConfig(_Pointwise):
    """Sigmoid cross entropy of each single document (QIN21).

    Source: QIN21, B.2.
    Proof: laws; rax `pointwise_sigmoid_loss`.
    """

    kind: Literal["sigmoid"] = "sigmoid"
    function = staticmethod(sigmoid_cross_entropy)
    highest_label: float = Field(1.0, gt=0)
    """Labels are divided by this: 4 for grades from 0 to 4."""


def squared_error(
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    standardise: bool = False,
    weights_N: Tensor | None = None,
) -> Tensor:
    """Squared error of each single document, shape [Q]: the pointwise regression of a student on its teacher.

    `sum over documents of w_i (s_i - t_i)^2` with targets `t = y` or, standardised over the group,
    `t = (y - mean of y) / deviation of y`. Standardise the scores of a listwise teacher: they have no common zero or
    scale, because softmax losses do not change when all scores of a list shift together.

    Labels may be negative. Standardised targets of a group of equal labels are 0; an empty group has loss 0.

    Example:
        >>> import torch
        >>> labels, offsets = torch.tensor([-3.0, -1.0, 7.0]), torch.tensor([0, 2, 3])
        >>> squared_error(torch.zeros(3), labels, offsets)
        tensor([10., 49.])
        >>> squared_error(torch.zeros(3), labels, offsets, standardise=True)  # targets -1 and 1; 0
        tensor([2., 0.])
    """
    scores_N = at_least_float32(scores_N)
    targets_N = labels_N.double()
    if standardise:
        targets_N = standardise_by_group(targets_N, offsets_Q1)
    loss_N = (scores_N - targets_N.to(scores_N.dtype)).square()
    return sum_by_group(loss_N if weights_N is None else loss_N * weights_N, offsets_Q1)


class SquaredErrorConfig(_Pointwise):
    """Squared error of each single document, for labels that are a teacher's scores.

    Source: pointwise regression; BUYL23, section 7 distils into one.
    Proof: laws; loop.
    """

    kind: Literal["squared_error"] = "squared_error"
    function = staticmethod(squared_error)
    standardise: bool = False
    """Regress on labels standardised per query group, so that their zero and scale do not matter."""
