"""The base class of ranking losses, checks for groups with something to rank, and the pointwise losses.

A loss gives one value per ragged group, which the training loop reduces. All losses take finite scores, labels that are
finite and not negative unless they say so, and offsets of the groups. On a CPU, those with gains 2^y - 1 raise
ValueError for a label above 1,000, whose gain is beyond float64. Half precision is computed, and returned, in
float32. `weights_N` are factors of the documents' terms, such as inverse propensities; None means 1.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ltrscale.batch import at_least_float32, group_index, standardise_by_group, sum_by_group
from ltrscale.config import Config


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
