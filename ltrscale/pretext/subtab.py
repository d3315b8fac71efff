"""SubTab: reconstruct all features from overlapping subsets, and align their projections, one value per document.

Shapes: N documents, Q1 offsets of groups, F features, O outputs of a decoder, K subsets of the features, R pairs of
them, P projection.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ltrscale.batch import one_list, repeated
from ltrscale.models.layers import Encoder
from ltrscale.models.ranker import Projector, ProjectorConfig
from ltrscale.pretext.augment import Draw, add_noise, permute_columns, random_entries
from ltrscale.pretext.contrast import simclr_rank
from ltrscale.pretext.objective import AddedModules, Objective, Pretrainer
from ltrscale.pretext.reconstruct import DecoderConfig, FeatureDecoder, feature_errors
from ltrscale.pretext.watch import NEGATIVES, collapse_measures, unit_vectors

Noise = Literal["swap", "gaussian", "zero"]


def subtab(
    decoded_KNO: Tensor,
    z_KNP: Tensor,
    x_NF: Tensor,
    offsets_Q1: Tensor,
    numeric_F: Tensor,
    cardinalities: Sequence[int],
    *,
    temperature: float,
    contrast: float = 1.0,
    distance: float = 1.0,
) -> Tensor:
    """SubTab: reconstruct all features from each subset, and align the subsets' projections, shape [N].

    `L_r + contrast L_c + distance L_d` (Ucar et al. 2021, section 2): the error of all features, summed over
    them and averaged over subsets; InfoNCE of the projections, averaged over pairs of subsets and the two views of a
    pair; and the squared distance of the normalised projections, averaged over pairs. The paper has both weights 1.

    The contrast costs `K (K - 1) / 2` times the O(sum of L^2) of `simclr_rank`.

    Args:
        decoded_KNO: reconstruction from each subset, see `feature_errors`.
        z_KNP: projections of each subset's embedding, not normalised.
        x_NF: the documents, whole and without noise.
        offsets_Q1: the groups to contrast a document with: `[0, N]`, the whole micro-batch, is SubTab; the offsets of
            the query groups make it cheaper.
        numeric_F: True where a feature is numeric.
        cardinalities: rows of each categorical feature's embedding.
        temperature: tau > 0 of the contrast; the authors have .1.
        contrast: weight of InfoNCE; at 0 it is not computed.
        distance: weight of the distance.

    Example:
        >>> x, numeric, z = torch.zeros(1, 2), torch.tensor([True, True]), torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]]])
        >>> subtab(torch.ones(2, 1, 2), z, x, torch.tensor([0, 1]), numeric, [], temperature=0.1)  # 2 + 0 + 2
        tensor([4.])
    """
    loss_N = feature_errors(decoded_KNO, x_NF, numeric_F, cardinalities).sum(2).mean(0)
    pairs = list(combinations(unit_vectors(z_KNP), 2))
    at_once = 1 if z_KNP.device.type == "cpu" else len(pairs)  # one pair stays in a CPU's cache
    for first in range(0, len(pairs), at_once):
        a_RNP, b_RNP = map(torch.stack, zip(*pairs[first : first + at_once], strict=True))
        loss_RN = distance * (a_RNP - b_RNP).square().sum(2)
        if contrast > 0:  # the documents of each pair form separate groups
            among = repeated(offsets_Q1, at_once)
            info = simclr_rank(a_RNP.flatten(0, 1), b_RNP.flatten(0, 1), among, temperature=temperature)
            loss_RN = loss_RN + contrast * info.view_as(loss_RN) / 2  # simclr_rank sums over both views
        loss_N = loss_N + loss_RN.sum(0) / len(pairs)
    return loss_N


class SubTabConfig(Objective):
    """SubTab: reconstruct all features from each of several overlapping subsets, and align their projections.

    Subsets are neighbouring features and wrap around the last one: all have the same size, and every feature is in one.
    The authors' code extends the first subset forward and leaves out the last F mod K features. The encoder has an
    input for every feature, because finetuning uses whole documents; features outside a subset are 0.

    Source: Ucar et al. 2021; HOU24.
    Proof: loop; subsets cover all features.
    """

    kind: Literal["subtab"] = "subtab"
    if_solved: ClassVar[str] = (
        "so it teaches little more, and only reconstruction is left; hide features that name a document with "
        "pretrain.mask, or make subsets differ more: a lower pretrain.method.overlap, a higher pretrain.method.rate"
    )
    subsets: int = Field(4, ge=2, le=1000)
    """Subsets of the features."""
    overlap: float = Field(0.75, ge=0, lt=1)
    """Features that a subset shares with the one before it, as a fraction of its own block."""
    rate: float = Field(0.3, ge=0, le=1)
    """Share of a subset's entries that are made noisy; HOU24 tries .3, .6 and .9."""
    noise: Noise = "swap"
    """New value of noisy entries: another document's value, the value plus noise, or 0."""
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

    @property
    def projector_layers(self) -> int:
        """Hidden layers of the projector."""
        return self.projector.layers

    def added_modules(self, encoder: Encoder, numeric_F: Tensor, cardinalities: Sequence[int]) -> AddedModules:
        """A projector, and a decoder that reads all members at once, as the contrast does."""
        projector = Projector(encoder.member_width, self.projector)
        return AddedModules(
            projector=projector, decoder=FeatureDecoder(self.decoder, encoder.width, numeric_F, cardinalities)
        )

    def masks(self, n_features: int, device: torch.device | None = None) -> Tensor:
        """The subsets, shape [K, F]: blocks of `ceil(F / K)` features with `round(overlap * block)` before each."""
        block = -(-n_features // self.subsets)
        shared = round(self.overlap * block)
        first_K1 = torch.arange(self.subsets, device=device)[:, None] * n_features // self.subsets - shared
        return (torch.arange(n_features, device=device) - first_K1) % n_features < block + shared

    def views(self, x_NF: Tensor, draw: Draw) -> Tensor:
        """The noisy subsets, shape [K, N, F]: features outside a subset are 0, and each subset has its own noise."""
        views = []
        for subset_F in self.masks(x_NF.shape[1], x_NF.device):
            hit_NF = random_entries(x_NF, self.rate, draw.generator)
            match self.noise:
                case "swap":
                    noisy_NF = permute_columns(x_NF, generator=draw.generator)
                case "gaussian":
                    noisy_NF = add_noise(x_NF, draw.numeric_F, scale=self.scale, generator=draw.generator)
                case "zero":
                    noisy_NF = torch.zeros_like(x_NF)
            views.append(torch.where(hit_NF, noisy_NF, x_NF).masked_fill(~subset_F, 0.0))
        return torch.stack(views)

    def losses(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> Tensor:
        """The SubTab loss of each document."""
        h_KND = [net.embed(view_NF, draw) for view_NF in draw.masked(self.views(x_NF, draw))]
        z_KNP = torch.stack([net.projected(h_ND) for h_ND in h_KND])
        among_Q1 = draw.offsets_Q1 if self.within_groups else one_list(draw.offsets_Q1)
        losses_N = subtab(
            torch.stack([net.decoder(h_ND) for h_ND in h_KND]),
            z_KNP,
            x_NF,
            among_Q1,
            draw.numeric_F,
            net.transform.cardinalities,
            temperature=self.temperature,
            contrast=self.contrast,
            distance=self.distance,
        )
        if net.training and self.contrast > 0:
            for a_NP, b_NP in combinations(z_KNP, 2):
                of_views = collapse_measures(
                    a_NP, b_NP, among_Q1, negatives=NEGATIVES if self.within_groups else len(x_NF)
                )
                net.watch.add(of_views, losses_N, torch.zeros_like(losses_N))  # the loss is not contrast alone
        return losses_N
