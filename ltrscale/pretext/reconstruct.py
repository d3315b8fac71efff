"""Reconstruction of features: the decoder and its error, and VIME-self, which also detects corrupted features.

Shapes: N documents, F features, C categorical ones, D embedding, O outputs (a value for each numeric feature, then
class logits).
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import at_least_float32
from ltrscale.config import Config
from ltrscale.layout import send
from ltrscale.models.layers import Encoder, Layers, Size
from ltrscale.models.ranker import HeadConfig, mlp_head
from ltrscale.pretext.augment import Draw, permute_columns, random_entries
from ltrscale.pretext.objective import AddedModules, Objective, Pretrainer

MAX_CLASSES = 256
"""Categories of one feature that reconstruction distinguishes; a larger vocabulary is folded."""


def _reconstruction_classes(cardinalities: Sequence[int]) -> list[int]:
    """The number of classes of each categorical feature: an index counts as its remainder by MAX_CLASSES."""
    return [min(n, MAX_CLASSES) for n in cardinalities]


def feature_errors(decoded_NO: Tensor, x_NF: Tensor, numeric_F: Tensor, cardinalities: Sequence[int]) -> Tensor:
    """The reconstruction error of each feature: squared error of a number, cross entropy of a category, shape [N, F].

    The papers have numeric features (categories one-hot) in [0, 1] and a squared error for all. Here a category is a
    class, equivalent to one-hot columns under a softmax. Computed, and returned, in float32 at least.

    Args:
        decoded_NO: a value for each numeric feature, then the logits of each categorical one, in the features' order.
        x_NF: the target: normalised numbers and vocabulary indices.
        numeric_F: True where a feature is numeric.
        cardinalities: rows of each categorical feature's embedding, the unknown category included.

    Example:
        >>> decoded = torch.tensor([[1.0, 3.0, 0.0, 0.0]])  # two numbers, and two equal logits
        >>> feature_errors(decoded, torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([True, False, True]), [2])
        tensor([[0.0000, 0.6931, 4.0000]])
    """
    classes = _reconstruction_classes(cardinalities)
    decoded_NO, x_NF = at_least_float32(decoded_NO), at_least_float32(x_NF)
    if not classes:
        return (decoded_NO - x_NF).square()
    order_F = (~numeric_F).int().argsort(stable=True)  # numbers, then categories; a sort needs no synchronisation
    n_numeric = len(numeric_F) - len(classes)
    numbers_NF, targets_NF = x_NF.index_select(-1, order_F).tensor_split([n_numeric], -1)
    errors_NF = (decoded_NO[..., :n_numeric] - numbers_NF).square()
    entropies_NC = _cross_entropies(decoded_NO[..., n_numeric:], targets_NF.long(), tuple(classes))
    return torch.cat([errors_NF, entropies_NC], -1).index_select(-1, order_F.argsort())


def _cross_entropies(logits_NO: Tensor, targets_NC: Tensor, classes: tuple[int, ...]) -> Tensor:
    """The cross entropy of each category, shape [N, C]; a GPU computes all of them in a few operations."""
    if logits_NO.device.type == "cpu":
        of_each = zip(torch.split(logits_NO, list(classes), -1), targets_NC.unbind(-1), classes, strict=True)
        return torch.stack([_cross_entropy(logits, targets % n) for logits, targets, n in of_each], -1)
    feature_O, first_C, classes_C = _outputs(classes, logits_NO.device)
    lowest_NC = logits_NO.new_full((*logits_NO.shape[:-1], len(classes)), -torch.inf)
    detached_NO = logits_NO.detach()
    peak_NC = lowest_NC.scatter_reduce(-1, feature_O.expand_as(logits_NO), detached_NO, "amax")
    shares_NO = (logits_NO - peak_NC.index_select(-1, feature_O)).exp()
    sums_NC = torch.zeros_like(lowest_NC).index_add(-1, feature_O, shares_NO)
    right_NC = logits_NO.gather(-1, (first_C + targets_NC % classes_C).expand_as(lowest_NC))
    return sums_NC.log() + peak_NC - right_NC


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    targets = targets.expand(logits.shape[:-1])
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)


@cache
def _outputs(classes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The category of each logit [O], and the first logit and the number of classes of each category [C]."""
    classes_C = np.array(classes, np.int64)
    feature_O = np.arange(len(classes)).repeat(classes_C)
    return send(feature_O, device), send(classes_C.cumsum() - classes_C, device), send(classes_C, device)


class DecoderConfig(Config):
    """The MLP that maps an embedding back to features."""

    layers: Layers = 1
    """Linear layers, with ReLU between them: 1 in VIME; SubTab mirrors its encoder, which has 2 or more."""
    width: Size | None = None
    """Size of the hidden layers; the encoder's width by default."""


class FeatureDecoder(nn.Module):
    """Reconstructs all features from an embedding, for `feature_errors`: numbers, then logits of categories."""

    def __init__(self, config: DecoderConfig, width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        outputs = int(numeric_F.sum()) + sum(_reconstruction_classes(cardinalities))
        self.layers = mlp_head(HeadConfig(layers=config.layers, width=config.width), width, outputs=outputs)

    def forward(self, h_ND: Tensor) -> Tensor:
        """Embeddings [N, D] to reconstructions [N, O]."""
        decoded_NO: Tensor = self.layers(h_ND)
        return decoded_NO


def _vime_corrupt(x_NF: Tensor, *, rate: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Documents with entries of permuted columns, and a mask of those that differ (Yoon et al. 2020, section 4.1)."""
    hit_NF = random_entries(x_NF, rate, generator)
    corrupted_NF = torch.where(hit_NF, permute_columns(x_NF, generator=generator), x_NF)
    return corrupted_NF, corrupted_NF != x_NF


def vime(
    decoded_NO: Tensor,
    mask_logits_NF: Tensor,
    x_NF: Tensor,
    changed_NF: Tensor,
    numeric_F: Tensor,
    cardinalities: Sequence[int],
    *,
    alpha: float,
) -> Tensor:
    """VIME-self: detect the corrupted features and restore all features, shape [N].

    `l_m + alpha l_r`: the binary cross entropy of the mask and the error of the features, each a mean over the
    document's features (Yoon et al. 2020, section 4.1; their code has alpha 2). Reconstructed numbers are not
    squashed by a sigmoid, since normalised features do not lie in [0, 1].

    Example:
        >>> x, numeric = torch.tensor([[1.0, 2.0]]), torch.tensor([True, True])
        >>> vime(x + 1, torch.zeros(1, 2), x, torch.tensor([[True, False]]), numeric, [], alpha=2.0)
        tensor([2.6931])
    """
    logits_NF = at_least_float32(mask_logits_NF)
    mask_NF = F.binary_cross_entropy_with_logits(logits_NF, changed_NF.to(logits_NF.dtype), reduction="none")
    return mask_NF.mean(1) + alpha * feature_errors(decoded_NO, x_NF, numeric_F, cardinalities).mean(1)


class _VimeDecoder(nn.Module):
    """VIME's two estimators on one embedding: of the features, and of the mask of corrupted features."""

    def __init__(self, config: DecoderConfig, width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.features = FeatureDecoder(config, width, numeric_F, cardinalities)
        self.mask = mlp_head(HeadConfig(layers=config.layers, width=config.width), width, outputs=len(numeric_F))

    def forward(self, h_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [N, D] to reconstructions [N, O] and logits of the mask [N, F]."""
        return self.features(h_ND), self.mask(h_ND)


class VimeConfig(Objective):
    """VIME-self: detect the corrupted features and restore them.

    Source: Yoon et al. 2020; HOU24.
    Proof: loop; the mask is 1 only where a value changed.
    """

    kind: Literal["vime"] = "vime"
    rate: float = Field(0.3, ge=0, le=1)
    """Share of the features that are corrupted; HOU24 tries .3, .5 and .7."""
    alpha: float = Field(2.0, ge=0)
    """Weight of the reconstruction, relative to the mask."""
    decoder: DecoderConfig = DecoderConfig()

    def added_modules(self, encoder: Encoder, numeric_F: Tensor, cardinalities: Sequence[int]) -> AddedModules:
        """A decoder, which reads all members at once; no projector."""
        return AddedModules(decoder=_VimeDecoder(self.decoder, encoder.width, numeric_F, cardinalities))

    def losses(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> Tensor:
        """The VIME loss of each document."""
        corrupted_NF, changed_NF = _vime_corrupt(x_NF, rate=self.rate, generator=draw.generator)
        decoded_NO, mask_logits_NF = net.decoder(net.embed(corrupted_NF, draw))
        cardinalities = net.transform.cardinalities
        return vime(decoded_NO, mask_logits_NF, x_NF, changed_NF, draw.numeric_F, cardinalities, alpha=self.alpha)
