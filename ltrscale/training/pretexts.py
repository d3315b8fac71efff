"""The pretraining methods that a config may name, and the network that each of them trains.

Every method makes the same kind of encoder; what it needs besides (projector, predictor, decoders) is left behind.

Shapes: N documents, F features, P projection, S sampled documents.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.models.decoders import DecoderConfig, FeatureDecoder, VimeDecoder
from ltrscale.models.features import FeatureTransform
from ltrscale.models.heads import Predictor, Projector, ProjectorConfig
from ltrscale.models.layers import refuse_batch_norm
from ltrscale.models.ranker import Architecture
from ltrscale.pretext.augment import (
    AnyAugmentConfig,
    MarginalConfig,
    MixupConfig,
    augment,
    needs_marginals,
)
from ltrscale.pretext.contrast import scarf, simclr, simclr_rank, simsiam
from ltrscale.pretext.reconstruct import Noise, feature_subsets, subtab, subtab_views, vime, vime_corrupt
from ltrscale.training.network import NetworkConfig


class _Contrastive(Config):
    """What the methods with an InfoNCE loss have in common."""

    temperature: float = Field(0.1, gt=0)
    """Divides the cosine similarities."""
    projector: ProjectorConfig = ProjectorConfig()


class SimCLRRankConfig(_Contrastive):
    """SimCLR-Rank: tell a document's two views from the other documents of its own query group (HOU24)."""

    kind: Literal["simclr_rank"] = "simclr_rank"


class SimCLRSampleConfig(_Contrastive):
    """SimCLR-Sample: SimCLR-Rank on documents regrouped at random inside each shuffle window (HOU24)."""

    kind: Literal["simclr_sample"] = "simclr_sample"


class SimCLRConfig(_Contrastive):
    """SimCLR: tell a document's two views from all other documents of the micro-batch."""

    kind: Literal["simclr"] = "simclr"


class ScarfConfig(_Contrastive):
    """SCARF: SimCLR between documents and copies with values drawn from the features' training marginals."""

    kind: Literal["scarf"] = "scarf"
    temperature: float = Field(1.0, gt=0)
    """Divides the cosine similarities."""
    rate: float = Field(0.6, ge=0, le=1)
    """Share of the features that are corrupted; HOU24 tries .3, .6 and .9."""
    fixed_count: bool = True
    """Corrupt the same number of features of every document, instead of each with its own draw (HOU24)."""


class DaclConfig(_Contrastive):
    """DACL+: SimCLR between two mixtures of a document with other documents."""

    kind: Literal["dacl"] = "dacl"
    amount: float = Field(0.3, ge=0, le=1)
    """The largest share of the other document; HOU24 tries .3, .6 and .9."""


class SimSiamConfig(Config):
    """SimSiam: predict one view from the other, without negatives."""

    kind: Literal["simsiam"] = "simsiam"
    projector: ProjectorConfig = ProjectorConfig(batch_norm=True)
    bottleneck: int | None = Field(None, ge=1)
    """Size of the predictor's hidden layer; a quarter of the projection by default."""


class VimeConfig(Config):
    """VIME-self: tell which features were corrupted, and restore them."""

    kind: Literal["vime"] = "vime"
    rate: float = Field(0.3, ge=0, le=1)
    """Share of the features that are corrupted; HOU24 tries .3, .5 and .7."""
    alpha: float = Field(2.0, ge=0)
    """Weight of the reconstruction beside the mask."""
    decoder: DecoderConfig = DecoderConfig()


class SubTabConfig(Config):
    """SubTab: reconstruct all features from each of several overlapping subsets, and agree on a projection."""

    kind: Literal["subtab"] = "subtab"
    subsets: int = Field(4, ge=2)
    """Subsets of the features."""
    overlap: float = Field(0.75, ge=0, lt=1)
    """Share of a subset's own features that it takes from the subset before it as well."""
    rate: float = Field(0.3, ge=0, le=1)
    """Share of a subset's entries that are made noisy; HOU24 tries .3, .6 and .9."""
    noise: Noise = "swap"
    """What noisy entries become: another document's value, the value plus noise, or 0."""
    scale: float = Field(0.1, ge=0)
    """Standard deviation of gaussian noise."""
    temperature: float = Field(0.1, gt=0)
    """Divides the cosine similarities."""
    contrast: float = Field(1.0, ge=0)
    """Weight of the contrast between subsets."""
    within_groups: bool = False
    """Contrast a document with its query group, which is cheaper, instead of the whole micro-batch."""
    distance: float = Field(1.0, ge=0)
    """Weight of the distance between subsets."""
    decoder: DecoderConfig = DecoderConfig(layers=2)
    projector: ProjectorConfig = ProjectorConfig()


AnyMethodConfig = (
    SimCLRRankConfig
    | SimCLRConfig
    | SimCLRSampleConfig
    | SimSiamConfig
    | ScarfConfig
    | DaclConfig
    | VimeConfig
    | SubTabConfig
)
MethodConfig = Annotated[AnyMethodConfig, Field(discriminator="kind")]


def draws_from_marginals(method: AnyMethodConfig, augmentation: AnyAugmentConfig) -> bool:
    """Whether a sample of the training documents is needed."""
    two_views = isinstance(method, SimCLRRankConfig | SimCLRConfig | SimCLRSampleConfig | SimSiamConfig)
    return isinstance(method, ScarfConfig) or (two_views and needs_marginals(augmentation))


class Pretrainer(nn.Module):
    """Transform, encoder and what the method puts on it; called, it gives the loss of a micro-batch.

    Args:
        transform: fitted on the training data.
        network: of the encoder.
        method: which objective.
        augmentation: how the views of SimCLR, SimCLR-Rank, SimCLR-Sample and SimSiam differ from the document; the
            other methods have ways of their own.
        marginals_SF: a uniform sample of transformed training documents; see `draws_from_marginals`.
    """

    marginals_SF: Tensor | None

    def __init__(
        self,
        transform: FeatureTransform,
        network: NetworkConfig,
        method: AnyMethodConfig,
        augmentation: AnyAugmentConfig,
        marginals_SF: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.network, self.method, self.augmentation = network, method, augmentation
        self.transform = transform
        self.register_buffer("marginals_SF", marginals_SF, persistent=False)
        self.encoder = network.encoder.build(transform.numeric_F, transform.cardinalities)
        width, numeric_F, cardinalities = self.encoder.width, transform.numeric_F, transform.cardinalities
        self.projector = None if isinstance(method, VimeConfig) else Projector(width, method.projector)
        self.predictor: nn.Module = nn.Identity()
        self.decoder: nn.Module = nn.Identity()
        match method:
            case SimSiamConfig(bottleneck=bottleneck):
                self.predictor = Predictor(method.projector.output or width, bottleneck)
            case VimeConfig(decoder=decoder):
                self.decoder = VimeDecoder(decoder, width, numeric_F, cardinalities)
            case SubTabConfig(decoder=decoder):
                self.decoder = FeatureDecoder(decoder, width, numeric_F, cardinalities)
                subsets_KF = feature_subsets(len(numeric_F), subsets=method.subsets, overlap=method.overlap)
                self.register_buffer("subsets_KF", subsets_KF, persistent=False)
        refuse_batch_norm(self)

    @property
    def architecture(self) -> Architecture:
        """What the parts that are kept are built from."""
        projector = None if self.projector is None else self.projector.config
        return Architecture(transform=self.network.transform, encoder=self.network.encoder, projector=projector)

    def forward(self, groups: QueryGroups, generator: torch.Generator) -> tuple[Tensor, float]:
        """The summed loss over documents, and their number."""
        x_NF = self.transform(groups.features_NF, groups.offsets_Q1)
        match self.method:
            case VimeConfig():
                loss_N = self._vime(x_NF, generator)
            case SubTabConfig():
                loss_N = self._subtab(x_NF, groups.offsets_Q1, generator)
            case _:
                loss_N = self._contrast(x_NF, groups.offsets_Q1, generator)
        return loss_N.sum(), float(groups.n_documents)

    def _contrast(self, x_NF: Tensor, offsets_Q1: Tensor, generator: torch.Generator) -> Tensor:
        """The methods with two views of each document."""

        def project(augmentation: AnyAugmentConfig | None) -> Tensor:
            if augmentation is None:
                return self._project(x_NF)
            view_NF = augment(
                x_NF,
                self.transform.numeric_F,
                augmentation,
                generator=generator,
                offsets_Q1=offsets_Q1,
                marginals_SF=self.marginals_SF,
            )
            return self._project(view_NF)

        match self.method:
            case ScarfConfig(rate=rate, fixed_count=fixed_count, temperature=temperature):
                corruption = MarginalConfig(probability=rate, fixed_count=fixed_count)
                return scarf(project(None), project(corruption), temperature=temperature)
            case DaclConfig(amount=amount, temperature=temperature):
                mixture = MixupConfig(amount=amount)
                return simclr(project(mixture), project(mixture), temperature=temperature)
        z0_NP, z1_NP = project(self.augmentation), project(self.augmentation)
        match self.method:
            case SimSiamConfig():
                return simsiam(self.predictor(z0_NP), self.predictor(z1_NP), z0_NP, z1_NP)
            case SimCLRConfig(temperature=temperature):
                return simclr(z0_NP, z1_NP, temperature=temperature)
            case SimCLRRankConfig(temperature=temperature) | SimCLRSampleConfig(temperature=temperature):
                return simclr_rank(z0_NP, z1_NP, offsets_Q1, temperature=temperature)
        raise AssertionError(self.method)

    def _project(self, x_NF: Tensor) -> Tensor:
        assert self.projector is not None
        z_NP: Tensor = self.projector(self.encoder(x_NF))
        return z_NP

    def _vime(self, x_NF: Tensor, generator: torch.Generator) -> Tensor:
        assert isinstance(self.method, VimeConfig)
        corrupted_NF, changed_NF = vime_corrupt(x_NF, rate=self.method.rate, generator=generator)
        decoded_NO, mask_logits_NF = self.decoder(self.encoder(corrupted_NF))
        numeric_F, cardinalities = self.transform.numeric_F, self.transform.cardinalities
        return vime(decoded_NO, mask_logits_NF, x_NF, changed_NF, numeric_F, cardinalities, alpha=self.method.alpha)

    def _subtab(self, x_NF: Tensor, offsets_Q1: Tensor, generator: torch.Generator) -> Tensor:
        method = self.method
        assert isinstance(method, SubTabConfig)
        assert self.projector is not None
        numeric_F, cardinalities = self.transform.numeric_F, self.transform.cardinalities
        views_KNF = subtab_views(
            x_NF,
            numeric_F,
            self.get_buffer("subsets_KF"),
            rate=method.rate,
            noise=method.noise,
            scale=method.scale,
            generator=generator,
        )
        h_KND = [self.encoder(view_NF) for view_NF in views_KNF]
        return subtab(
            torch.stack([self.decoder(h_ND) for h_ND in h_KND]),
            torch.stack([self.projector(h_ND) for h_ND in h_KND]),
            x_NF,
            offsets_Q1 if method.within_groups else offsets_Q1[[0, -1]],
            numeric_F,
            cardinalities,
            temperature=method.temperature,
            contrast=method.contrast,
            distance=method.distance,
        )
