"""The base class of pretext objectives, and the network that each of them trains.

Every objective trains the same kind of encoder. Its other modules (projector, predictor, decoder) are for pretraining.

Shapes: N documents, F features, D embedding, P projection, S sampled documents.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, real_documents
from ltrscale.config import Config, kind_of
from ltrscale.layout import layout
from ltrscale.models.batch_norm import MicroBatchNorm, Padding, leaving_out, refuse_batch_norm
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoder import Encoder, EncoderSettings
from ltrscale.models.features import FeatureTransform
from ltrscale.models.ranker import Architecture, Projector
from ltrscale.models.tables import keep_on_host
from ltrscale.pretext.augment import Augmentation, Draw
from ltrscale.pretext.watch import CollapseWatch

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
        norms = [module for module in self.modules() if isinstance(module, MicroBatchNorm)]
        with leaving_out(norms, Padding(real_N, frame.least)):
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
