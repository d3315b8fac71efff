"""Rankers that combine others: the mean of their scores, or one linear layer over their last embeddings.

Shapes: N documents, D width of the embeddings of all parts together.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.models.batch_norm import MicroBatchNorm
from ltrscale.models.layers import Dropout
from ltrscale.models.ranker import Architecture, Ranker, RankerScores

How = Literal["mean", "concat"]


class CombinedArchitecture(Config):
    """Several rankers, and how to combine them."""

    how: How
    """`mean` of the scores; `concat` of the inputs of their last layers."""
    parts: tuple[Architecture, ...] = Field(min_length=1, max_length=100)
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout between the joint embedding and the linear layer of `concat`."""


class MeanRanker(nn.Module):
    """The mean of several rankers' scores, like DASALC-ens, the mean of 3 to 5 runs (QIN21, section 4.4)."""

    learns: ClassVar = False
    """Whether it has its own layer to train."""

    def __init__(self, parts: Sequence[Ranker]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    @property
    def architecture(self) -> CombinedArchitecture:
        """The configs of its parts."""
        return CombinedArchitecture(how="mean", parts=tuple(part.architecture for part in _rankers(self.parts)))

    def score(self, groups: QueryGroups) -> RankerScores:
        """Scores [N], without grades of lists."""
        return RankerScores(self(groups), None)

    def forward(self, groups: QueryGroups) -> Tensor:
        """Scores [N]."""
        return torch.stack([part(groups) for part in self.parts]).mean(0)


class ConcatRanker(nn.Module):
    """One linear layer over the embeddings of several finetuned rankers (HOU24, A.3.7).

    The inputs of the rankers' last layers are concatenated, normalised so that their scales agree, and mapped to a
    score. Only the linear layer is trained: the parts are fixed, and always in inference mode.

    Args:
        parts: finetuned rankers.
        dropout: dropout before the linear layer; .7 on MSLR-WEB30K and Istella-S, 0 on Yahoo in the paper.
    """

    learns: ClassVar = True
    """Whether it has its own layer to train."""

    def __init__(self, parts: Sequence[Ranker], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts).requires_grad_(False)
        width = sum(part.last_width for part in parts)
        self.norm = MicroBatchNorm(width, affine=False)
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(width, 1)

    @property
    def architecture(self) -> CombinedArchitecture:
        """The configs of its parts."""
        parts = tuple(part.architecture for part in _rankers(self.parts))
        return CombinedArchitecture(how="concat", parts=parts, dropout=self.dropout.probability)

    def train(self, mode: bool = True) -> "ConcatRanker":
        """Switch the mode of the norm and the dropout; the parts stay in inference mode."""
        super().train(mode)
        self.parts.eval()
        return self

    def score(self, groups: QueryGroups) -> RankerScores:
        """Scores [N], without grades of lists."""
        return RankerScores(self(groups), None)

    def forward(self, groups: QueryGroups) -> Tensor:
        """Scores [N]."""
        joint_ND = torch.cat([part.penultimate(groups) for part in _rankers(self.parts)], dim=1)
        return self.head(self.dropout(self.norm(joint_ND))).squeeze(-1)


AnyRanker = Ranker | MeanRanker | ConcatRanker
"""Every network that scores documents."""


def combine_rankers(parts: Sequence[Ranker], *, how: How, dropout: float) -> MeanRanker | ConcatRanker:
    """Combine several rankers into one; `concat` adds a linear layer with fresh weights."""
    match how:
        case "mean":
            return MeanRanker(parts)
        case "concat":
            return ConcatRanker(parts, dropout=dropout)


def side_by_side(ranker: AnyRanker) -> Sequence[AnyRanker]:
    """The rankers that train at the same time but independently: the parts of a mean, or the ranker itself."""
    return _rankers(ranker.parts) if isinstance(ranker, MeanRanker) else [ranker]


def rankers_in(ranker: AnyRanker) -> list[Ranker]:
    """The single rankers in a network, itself included."""
    return _rankers(ranker.modules())


def _rankers(parts: Iterable[nn.Module]) -> list[Ranker]:
    return [part for part in parts if isinstance(part, Ranker)]
