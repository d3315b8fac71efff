"""The base classes of pretext objectives, the network that each of them trains, and SimSiam, which needs no negatives.

Every objective trains the same kind of encoder. Its other modules (projector, predictor, decoder) are for pretraining.

Shapes: N documents, F features, D embedding, P projection, S sampled documents, Q1 = Q + 1 offsets; R = M * N documents
of M members.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, real_documents, repeated
from ltrscale.config import Config, kind_of
from ltrscale.layout import layout
from ltrscale.models.batch_norm import MicroBatchNorm, Padding, leaving_out, norms_of, refuse_batch_norm
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform
from ltrscale.models.layers import Encoder, EncoderSettings, Size, keep_on_host
from ltrscale.models.ranker import Architecture, Projector, ProjectorConfig
from ltrscale.pretext.augment import Augmentation, Draw
from ltrscale.pretext.watch import NEGATIVES, CollapseWatch, collapse_measures, unit_vectors

ContrastDocuments = Annotated[int | None, Field(ge=2, le=10_000_000)]
CONTRAST_DOCUMENTS = 2048
"""Documents that a contrast across query groups compares at once; HOU24's public settings have batches of 2,000."""


class AddedModules(NamedTuple):
    """The modules that an objective adds to an encoder."""

    projector: Projector | None = None
    """Saved with the encoder: finetuning may start from its first layers."""
    predictor: nn.Module | None = None
    decoder: nn.Module | None = None


class Objective(Config):
    """A pretext objective as a config selects it: parameters, modules, and a call of the pure loss function."""

    regroups: ClassVar[bool] = False
    """Whether documents are regrouped at random inside each shuffle window."""
    contrasts_batch: ClassVar[bool] = False
    """Whether it contrasts a document across query groups; published settings use small batches for that."""
    reads_tokens: ClassVar[bool] = False
    """Whether it learns from token fields instead of views of features."""
    if_solved: ClassVar[str] = ""
    """Text for the warning about a solved contrast: meaning and remedy; empty if it has no contrast."""

    pads: ClassVar[bool] = False
    """Whether micro-batches may have documents of padding."""

    @property
    def projector_layers(self) -> int:
        """Hidden layers of its projector; 0 if it has no projector."""
        return 0

    def needs_marginals(self, augmentation: Augmentation) -> bool:  # noqa: ARG002
        """Whether it needs a sample of the training documents under this augmentation."""
        return False

    def added_modules(self, encoder: Encoder, numeric_F: Tensor, cardinalities: Sequence[int]) -> AddedModules:
        """The modules that it adds to an encoder, freshly initialised; members of an encoder share a projector."""
        raise NotImplementedError

    def check_encoder(self, encoder: EncoderSettings) -> None:
        """Check that the encoder reads what this objective learns from.

        Raises:
            ValueError: the encoder reads text and the objective features, or the reverse.
        """
        if self.reads_tokens != any(encoder.reads_tokens):
            kind, input_name = kind_of(type(self)), "text" if self.reads_tokens else "features"
            remedy = "a cross_encoder" if self.reads_tokens else "masked_language as the method for it"
            raise ValueError(
                f"method {kind} learns from {input_name}, and encoder {encoder.kind} does not; take {remedy}"
            )

    def losses(self, net: "Pretrainer", x_NF: Tensor, draw: Draw) -> Tensor:
        """The loss of each document of a micro-batch, shape [N]; 0 for padding."""
        raise NotImplementedError

    def summed(self, net: "Pretrainer", x_NF: Tensor, draw: Draw) -> tuple[Tensor, Tensor | float]:
        """The summed loss of a micro-batch and its divisor, by default the number of documents."""
        losses_N = self.losses(net, x_NF, draw)
        real_N = real_documents(draw.offsets_Q1)
        return losses_N.sum(), float(len(losses_N)) if real_N is None else real_N.sum()


class Pretrainer(nn.Module):
    """Transform, encoder and the modules that the objective adds; a call returns the loss of a micro-batch.

    Args:
        transform: fitted on the training data.
        network: config of the encoder.
        method: the objective.
        augmentation: makes the views of SimCLR, SimCLR-Rank, SimCLR-Sample and SimSiam; other methods make their own.
        marginals_SF: a uniform sample of transformed training documents; see `Objective.needs_marginals`.
        rates_F: rate at which each feature is masked in the views; None masks nothing.

    Raises:
        ValueError: a part contains torch's own BatchNorm, or the encoder does not read what the objective learns from.
    """

    marginals_SF: Tensor | None
    rates_F: Tensor | None

    def __init__(
        self,
        transform: FeatureTransform,
        network: NetworkConfig,
        method: Objective,
        augmentation: Augmentation,
        marginals_SF: Tensor | None = None,
        rates_F: Tensor | None = None,
    ) -> None:
        super().__init__()
        method.check_encoder(network.encoder)
        self.network, self.method, self.augmentation = network, method, augmentation
        self.transform = transform
        self.compiled = False
        """Whether losses are computed by compiled code, as the parts of the network are."""
        self.watch = CollapseWatch()
        # Not saved with the weights: a resumed run reads them from its data again.
        self.register_buffer("marginals_SF", marginals_SF, persistent=False)
        # None if no feature is masked: views then draw no random numbers for masks.
        self.register_buffer("rates_F", rates_F if rates_F is not None and rates_F.any() else None, persistent=False)
        self.encoder = network.build(transform)
        added = method.added_modules(self.encoder, transform.numeric_F, transform.cardinalities)
        self.projector = added.projector
        self.predictor: nn.Module = added.predictor or nn.Identity()
        self.decoder: nn.Module = added.decoder or nn.Identity()
        refuse_batch_norm(self)
        keep_on_host(self, transform.config.host_rows)

    @property
    def architecture(self) -> Architecture:
        """The configs of the modules that are saved."""
        projector = None if self.projector is None else self.projector.config
        return Architecture(
            transform=self.network.transform,
            numbers=self.network.numbers,
            encoder=self.network.encoder,
            projector=projector,
        )

    def forward(self, groups: QueryGroups, generator: torch.Generator) -> tuple[Tensor, Tensor | float]:
        """The loss summed over documents or hidden tokens, and their number."""
        x_NF = self.transform(groups.features_NF, groups.offsets_Q1)
        draw = Draw(self.transform.numeric_F, groups.offsets_Q1, generator, self.marginals_SF, self.rates_F, groups)
        real_N, frame = real_documents(groups.offsets_Q1), layout(groups.offsets_Q1).frame
        if real_N is None or frame is None:
            return self.method.summed(self, x_NF, draw)
        with leaving_out(norms_of(self), Padding(real_N, frame.least)):
            return self.method.summed(self, x_NF, draw)

    def embed(self, x_NF: Tensor, draw: Draw) -> Tensor:
        """Embeddings [N, D] of the documents of a micro-batch, or of a view of them."""
        assert draw.groups is not None
        return self.encoder.embed(x_NF, draw.groups)

    def project(self, x_NF: Tensor, draw: Draw) -> Tensor:
        """Projections [N, P] of the same documents, with several members side by side."""
        return self.projected(self.embed(x_NF, draw))

    def projected(self, h_ND: Tensor) -> Tensor:
        """Projections [N, P] of embeddings."""
        assert self.projector is not None
        return self.encoder.each(self.projector, h_ND)


class Siamese(Objective):
    """The base of the objectives that compare the projections of two views of each document."""

    draws_views: ClassVar[bool] = True
    """Whether the configured augmentation makes the views."""
    if_solved: ClassVar[str] = (
        "so further epochs teach little; let a short run go on, and jobs.explain then reports which features solve "
        "it; stop a long one, and hide such features with pretrain.mask, or make views differ more: pretrain.augment, "
        "for scarf and dacl the rate of pretrain.method"
    )
    projector: ProjectorConfig = ProjectorConfig()

    @property
    def projector_layers(self) -> int:
        return self.projector.layers

    def needs_marginals(self, augmentation: Augmentation) -> bool:
        """Whether the configured augmentation makes the views and needs marginals."""
        return self.draws_views and augmentation.needs_marginals

    def views(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Two random views of documents, both of shape [N, F]: by default, two of the configured augmentation."""
        first_NF = draw.masked(net.augmentation.view(x_NF, draw))
        return first_NF, draw.masked(net.augmentation.view(x_NF, draw))

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, among_Q1: Tensor) -> Tensor:
        """The loss of each document, shape [N], from the projections of its views, contrasted within these groups."""
        raise NotImplementedError

    def among(self, offsets_Q1: Tensor) -> Tensor:
        """Offsets of what documents are contrasted within: by default, the query groups."""
        return offsets_Q1

    def uninformed(self, negatives_N: Tensor) -> Tensor:
        """The loss of a document, shape [N], if all similarities are equal; 0 if the objective has no contrast.

        Args:
            negatives_N: number of other documents that each document is contrasted with.
        """
        return torch.zeros_like(negatives_N, dtype=torch.float32)

    def losses(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> Tensor:
        """Draw the views and compare their projections within each member; `net.watch` measures the first member.

        As the projector, the predictor of SimSiam is shared: its norms take all members of a micro-batch together.
        """
        n, among_Q1 = len(x_NF), self.among(draw.offsets_Q1)
        first_NF, second_NF = self.views(net, x_NF, draw)
        z0_RP, z1_RP = (_by_member(net, net.project(view_NF, draw)) for view_NF in (first_NF, second_NF))
        losses_R = self.compare(net, z0_RP, z1_RP, repeated(among_Q1, net.encoder.members))
        losses_MN = losses_R.view(net.encoder.members, n)
        real_N = real_documents(draw.offsets_Q1)
        if real_N is not None:
            losses_MN = losses_MN.masked_fill(~real_N, 0.0)
        if net.training and net.watch.is_due():
            others = n if self.contrasts_batch else NEGATIVES
            of_views = collapse_measures(z0_RP[:n], z1_RP[:n], among_Q1, negatives=others, real_N=real_N)
            uninformed_N = self.uninformed(negatives(among_Q1, n))
            net.watch.add(of_views, losses_MN[0], uninformed_N if real_N is None else uninformed_N * real_N)
        return losses_MN.mean(0)


def _by_member(net: Pretrainer, z_NP: Tensor) -> Tensor:
    """Projections of one member after the other, [R, P']: each member of the encoder has its own contrast."""
    return z_NP if net.encoder.members == 1 else torch.cat(z_NP.chunk(net.encoder.members, 1))


def negatives(offsets_Q1: Tensor, n: int) -> Tensor:
    """The number of other documents in the group of each of n documents, shape [N].

    Example:
        >>> negatives(torch.tensor([0, 2, 2, 5]), 5)
        tensor([1, 1, 2, 2, 2])
    """
    group_N = torch.searchsorted(offsets_Q1[1:].contiguous(), torch.arange(n, device=offsets_Q1.device), right=True)
    return offsets_Q1.diff()[group_N] - 1


def simsiam(p0_ND: Tensor, p1_ND: Tensor, z0_ND: Tensor, z1_ND: Tensor) -> Tensor:
    """SimSiam: align each view's prediction with the other view's projection, shape [N].

    `-(cos(p_0, sg z_1) + cos(p_1, sg z_0))`, where sg stops the gradient (Chen and He 2021). Half precision is
    computed, and returned, in float32; a zero vector has cosine 0 to everything.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> simsiam(z, z.flip(0), z, z)  # p_0 agrees with z_1, p_1 is at right angles to z_0
        tensor([-1., -1.])
    """

    def cosine(p_ND: Tensor, z_ND: Tensor) -> Tensor:
        return (unit_vectors(p_ND) * unit_vectors(z_ND.detach())).sum(-1)

    return -(cosine(p0_ND, z1_ND) + cosine(p1_ND, z0_ND))


class _Predictor(nn.Sequential):
    """SimSiam's predictor: one hidden layer with BatchNorm and ReLU and without bias, output of the input's size."""

    def __init__(self, width: int, bottleneck: int | None = None, *, bias: bool = False) -> None:
        hidden = bottleneck or max(1, width // 4)
        first, second = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=bias)
        super().__init__(first, MicroBatchNorm(hidden, members_first=True), nn.ReLU(), second)


class SimSiamConfig(Siamese):
    """SimSiam: predict one view from the other, without negatives.

    Source: Chen and He 2021; HOU24, A.2.5.
    Proof: formula, stopped gradients.
    """

    kind: Literal["simsiam"] = "simsiam"
    pads: ClassVar[bool] = True
    projector: ProjectorConfig = ProjectorConfig(batch_norm=True)
    bottleneck: Size | None = None
    """Size of the predictor's hidden layer; a quarter of the projection by default."""
    predictor_bias: bool = False
    """Whether the predictor's output layer has a bias: HOU24's text has none, its public code has one."""

    def added_modules(self, encoder: Encoder, numeric_F: Tensor, cardinalities: Sequence[int]) -> AddedModules:  # noqa: ARG002
        projector = Projector(encoder.member_width, self.projector)
        return AddedModules(
            projector=projector, predictor=_Predictor(projector.width, self.bottleneck, bias=self.predictor_bias)
        )

    def compare(self, net: Pretrainer, z0_NP: Tensor, z1_NP: Tensor, among_Q1: Tensor) -> Tensor:  # noqa: ARG002
        return simsiam(net.predictor(z0_NP), net.predictor(z1_NP), z0_NP, z1_NP)
