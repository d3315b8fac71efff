"""Heads on top of an encoder, for scores and for pretraining, the ranker that has all parts, and rankers of several.

These have the mean of their parts' scores, or one linear layer over their last embeddings.

Shapes: N documents, Q groups, M members, G goals, D embedding or that of all parts together, P projection, C grades.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.models.batch_norm import MicroBatchNorm, refuse_batch_norm
from ltrscale.models.choices import ContextConfig, EncoderConfig, NetworkConfig, NumbersConfig
from ltrscale.models.contexts import Contextual
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.models.layers import Dropout, Layers, SeparateLinear, Size, keep_on_host
from ltrscale.models.numbers import PlainConfig


class HeadConfig(Config):
    """The MLP that maps an embedding to a score."""

    layers: Layers = 3
    """Linear layers, with ReLU between them: 3 in HOU24, 1 for its binary feedback and for linear probing."""
    width: Size | None = None
    """Size of the hidden layers; the encoder's width by default."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout after each hidden layer; BUYL23 has .25, HOU24 none. A multiple of 1/256 on a CPU."""
    init: Literal["random", "identity"] = "random"
    """`identity` starts every matrix as the identity and every bias at 0, so that runs differ less (HOU23)."""


def mlp_head(
    config: HeadConfig, width: int, *, outputs: int = 1, hidden: int | None = None, members: int = 1
) -> nn.Sequential:
    """A head from embeddings [N, width] to scores [N, outputs]; for several members, from [N, M * width] to [N, M, ..].

    Args:
        config: layers and their size.
        width: size of the embedding, or of a member's part of it.
        outputs: scores of a document.
        hidden: size of the hidden layers if the config sets none; `width` by default.
        members: networks that share an encoder; each has its own head.
    """
    sizes = [width, *[config.width or hidden or width] * (config.layers - 1)]
    layers: list[nn.Module] = [] if members == 1 else [nn.Unflatten(1, (members, width))]
    linear = nn.Linear if members == 1 else partial(SeparateLinear, members)
    for a, b in pairwise(sizes):
        layers += [linear(a, b), nn.ReLU(), *([Dropout(config.dropout)] if config.dropout else [])]
    head = nn.Sequential(*layers, linear(sizes[-1], outputs))
    if config.init == "identity":
        for layer in head:
            if isinstance(layer, nn.Linear | SeparateLinear):
                for matrix in [layer.weight] if isinstance(layer, nn.Linear) else layer.weight.detach():
                    nn.init.eye_(matrix)
                nn.init.zeros_(layer.bias)
    return head


class ProjectorConfig(Config):
    """The MLP between an embedding and the pretext loss; dropped after pretraining."""

    layers: int = Field(2, ge=0, le=1000)
    """Hidden layers."""
    width: Size | None = None
    """Size of the hidden layers; the encoder's width by default."""
    output: Size | None = None
    """Size of the projection; the encoder's width by default."""
    batch_norm: bool = False
    """Normalise hidden layers, and the output without scale and shift: SimSiam uses it, SimCLR-Rank does not."""
    bias: bool = False
    """Whether the linear layers have a bias: HOU24's text has none, its public code has one for SimCLR."""


class Projector(nn.Module):
    """Linear layers, by default without bias, ReLU after the hidden ones, optional BatchNorm (HOU24, A.2.5)."""

    def __init__(self, width: int, config: ProjectorConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.output or width
        layers: list[nn.Module] = []
        sizes = [width, *[config.width or width] * config.layers]
        for a, b in pairwise(sizes):
            norm = [MicroBatchNorm(b)] if config.batch_norm else []
            layers += [nn.Linear(a, b, bias=config.bias), *norm, nn.ReLU()]
        layers.append(nn.Linear(sizes[-1], self.width, bias=config.bias))
        if config.batch_norm:
            layers.append(MicroBatchNorm(self.width, affine=False))
        self.layers = nn.Sequential(*layers)

    def forward(self, h_ND: Tensor) -> Tensor:
        """Embeddings [N, D] to projections [N, P]."""
        return self.layers(h_ND)

    def first(self, layers: int) -> nn.Sequential:
        """The first hidden layers with their norms and activations, for finetuning (HOU23, section 5)."""
        length = layers * (3 if self.config.batch_norm else 2)
        return nn.Sequential(*list(self.layers)[:length])


class Architecture(Config):
    """The configs of a network's parts, without weights; a pretrained network has a projector, a ranker has a head."""

    transform: TransformConfig
    numbers: NumbersConfig = PlainConfig()
    encoder: EncoderConfig
    projector: ProjectorConfig | None = None
    projector_layers: int = Field(0, ge=0, le=1000)
    """Hidden layers of the projector that a ranker keeps between encoder and head."""
    context: ContextConfig | None = None
    head: HeadConfig | None = None
    goals: dict[str, float] = Field(default_factory=dict, max_length=100, exclude_if=operator.not_)
    """The weight of each goal's head in the score, by goal; a ranker without goals has one head."""
    grades: int = Field(0, ge=0, le=10_000)
    """Thresholds of the list head, which predicts the best grade of a list; 0 for none."""
    noise: float = Field(0.0, ge=0)
    """Standard deviation of the normal noise on numeric inputs in training."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        kept = self.projector.layers if self.projector else 0
        if self.projector_layers > kept:
            raise ValueError(f"projector_layers is {self.projector_layers}, the projector has {kept} hidden layers")
        return self

    @property
    def network(self) -> NetworkConfig:
        """The config of the transform and the encoder, without initial weights."""
        return NetworkConfig(transform=self.transform, numbers=self.numbers, encoder=self.encoder)

    @property
    def reads_lists(self) -> bool:
        """Whether a document's score depends on the other documents of its list."""
        return self.context is not None or self.transform.per_query or self.numbers.within_lists


class RankerScores(NamedTuple):
    """Scores of documents and, if the ranker has a list head, logits of "the list's best grade is above c"."""

    scores_N: Tensor
    grades_QC: Tensor | None
    members_NM: Tensor | None = None
    """Scores of each member, whose mean is the score; None with a single member."""
    heads: Tensor | None = None
    """Scores of each goal's head, [N, G] or with members [N, M, G]; their weighted sum is the score. None for one."""
    weights_G: Tensor | None = None
    """The weight of each goal."""

    def by_member(self) -> list["RankerScores"]:
        """The scores to train, each with its own loss."""
        if self.members_NM is None:
            return [self]
        of_members = [None] * self.members_NM.shape[1] if self.heads is None else self.heads.unbind(1)
        return [
            RankerScores(scores_N, self.grades_QC, None, heads_NG, self.weights_G)
            for scores_N, heads_NG in zip(self.members_NM.unbind(1), of_members, strict=True)
        ]

    def by_goal(self) -> list["RankerScores"]:
        """The scores of each goal's head."""
        assert self.heads is not None
        return [RankerScores(scores_N, self.grades_QC) for scores_N in self.heads.unbind(1)]


class Ranker(nn.Module):
    """Scores documents: transform, encoder, inner layers of a projector, list context, head.

    With goals the last layer has a head for each, and the score is their weighted sum.

    Unless the architecture reads lists, a score at inference depends only on its document. Each member of an encoder
    has its own head, and scores are averaged over members; a list context reads all members at once and has one head.

    Raises:
        ValueError: the architecture has no head, a list head without a context that makes list embeddings, or a part
            with torch's own BatchNorm.
    """

    def __init__(self, architecture: Architecture, transform: FeatureTransform) -> None:
        super().__init__()
        if architecture.head is None:
            raise ValueError("a ranker needs a head")
        self._architecture = architecture
        self.transform = transform
        self.encoder = architecture.network.build(transform)
        width, self.neck, members = self.encoder.member_width, nn.Sequential(), self.encoder.members
        if architecture.projector is not None and architecture.projector_layers:
            self.neck = Projector(width, architecture.projector).first(architecture.projector_layers)
            width = architecture.projector.width or width
        self.context = None
        if architecture.context is not None:
            self.context = architecture.context.build(members * width, transform.numeric_F, transform.cardinalities)
            width, members = self.context.width, 1
        # The hidden layers keep the encoder's width: a context may be much narrower (DLCM has 3 units).
        head, hidden = architecture.head, self.encoder.member_width
        self.head = mlp_head(head, width, outputs=len(architecture.goals) or 1, hidden=hidden, members=members)
        self.goals_G = nn.Buffer(torch.tensor([*architecture.goals.values()])) if architecture.goals else None
        self.last_width = members * (width if head.layers == 1 else head.width or hidden)
        self.list_head = None
        if architecture.grades:
            if self.context is None or not self.context.list_width:
                raise ValueError(
                    "a loss of whole lists needs a context that embeds lists: set context.kind to rankformer"
                )
            self.list_head = mlp_head(head, self.context.list_width, outputs=architecture.grades, hidden=hidden)
        refuse_batch_norm(self)
        keep_on_host(self, transform.config.host_rows)

    @property
    def architecture(self) -> Architecture:
        """The configs of its parts, with the weights of its goals as they are now."""
        made = self._architecture
        if self.goals_G is None:
            return made
        # the shortest text of a float32: 0.2, not 0.200000003
        weights = [float(str(weight)) for weight in self.goals_G.cpu().numpy()]
        return made.replace(goals=dict(zip(made.goals, weights, strict=True)))

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Give the goals' heads other weights in the score."""
        assert self.goals_G is not None
        self.goals_G.copy_(torch.tensor([weights[goal] for goal in self._architecture.goals]))

    def embed(self, groups: QueryGroups) -> Contextual:
        """Embeddings of documents, and of lists if the context makes them."""
        x_NF = self.transform(groups.features_NF, groups.offsets_Q1)
        noise = self._architecture.noise
        if self.training and noise:
            x_NF = torch.addcmul(x_NF, torch.randn_like(x_NF), noise * self.transform.numeric_F)
        h_ND = self.encoder.each(self.neck, self.encoder.embed(x_NF, groups))
        if self.context is None:
            return Contextual(h_ND)
        return self.context(x_NF, h_ND, groups)

    def score(self, groups: QueryGroups) -> RankerScores:
        """Scores [N], and logits of the list head [Q, C]."""
        embedded = self.embed(groups)
        grades_QC = None if self.list_head is None else self.list_head(embedded.lists_QD)
        heads, weights_G = self.head(embedded.documents_ND), self.goals_G
        scores = heads.squeeze(-1) if weights_G is None else heads @ weights_G.to(heads.dtype)
        of_goals = None if weights_G is None else heads
        if scores.dim() == 1:
            return RankerScores(scores, grades_QC, None, of_goals, weights_G)
        return RankerScores(scores.mean(1), grades_QC, scores, of_goals, weights_G)

    def penultimate(self, groups: QueryGroups) -> Tensor:
        """The input of the last linear layer, shape [N, D], with members side by side."""
        return self.head[:-1](self.embed(groups).documents_ND).flatten(1)

    def forward(self, groups: QueryGroups) -> Tensor:
        """Scores [N]."""
        return self.score(groups).scores_N


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
    return MeanRanker(parts) if how == "mean" else ConcatRanker(parts, dropout=dropout)


def side_by_side(ranker: AnyRanker) -> Sequence[AnyRanker]:
    """The rankers that train at the same time but independently: the parts of a mean, or the ranker itself."""
    return _rankers(ranker.parts) if isinstance(ranker, MeanRanker) else [ranker]


def rankers_in(ranker: AnyRanker) -> list[Ranker]:
    """The single rankers in a network, itself included."""
    return _rankers(ranker.modules())


def _rankers(parts: Iterable[nn.Module]) -> list[Ranker]:
    return [part for part in parts if isinstance(part, Ranker)]
