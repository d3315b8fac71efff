"""The base class of ranking loss configs, and the tests for groups that have something to rank.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ltrscale.batch import sum_by_group
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


class Loss(Config):
    """A ranking loss as a config selects it: its parameters, and a call of the pure loss function."""

    kind: str
    weighted: ClassVar[bool] = False
    """Whether the loss takes document weights."""
    dual: ClassVar[bool] = False
    """Whether the dual learning algorithm is defined for it."""

    def of(self, scored: Scored) -> Tensor:
        """The loss of each group, shape [Q]; 0 for a group that `counted` excludes."""
        raise NotImplementedError

    def counted(self, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The groups that the mean loss averages over, shape [Q], bool; by default those with two different labels."""
        return has_pairs(labels_N, offsets_Q1)


def has_pairs(labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """True for groups that hold two documents with different labels, shape [Q]; other groups ask for no order.

    Example:
        >>> has_pairs(torch.tensor([1.0, 0.0, 2.0, 2.0, 3.0]), torch.tensor([0, 2, 4, 4, 5]))
        tensor([ True, False, False, False])
    """
    first_N = labels_N[offsets_Q1[:-1].repeat_interleave(offsets_Q1.diff())]
    return sum_by_group((labels_N != first_N).long(), offsets_Q1) > 0


def has_relevance(labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """True for groups that hold a document with a label above 0, shape [Q]; NDCG and softmax need one.

    Example:
        >>> has_relevance(torch.tensor([0.0, 2.0, 0.0]), torch.tensor([0, 2, 3, 3]))
        tensor([ True, False, False])
    """
    return sum_by_group((labels_N > 0).long(), offsets_Q1) > 0
