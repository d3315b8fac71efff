"""Reconstruction: VIME-self and SubTab restore features, one value per document, masked language modelling tokens.

VIME-self also detects corrupted features. SubTab reconstructs all features from overlapping subsets, and aligns the
projections of these. Masked language modelling has one value per hidden token of query and document.

Shapes: N documents, Q1 offsets of groups, F features, C categorical ones, D embedding, O outputs (a value for each
numeric feature, then class logits), K subsets of the features, R pairs of them, P projection; T tokens of all
sequences, M hidden ones, V tokens of the vocabulary.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import at_least_float32, joined, repeated
from ltrscale.config import Config
from ltrscale.layout import send
from ltrscale.models.bert import initialise
from ltrscale.models.cross_encoder import CrossEncoder, Pairs, TokenNumbers
from ltrscale.models.layers import Encoder, Layers, Size
from ltrscale.models.ranker import HeadConfig, Projector, ProjectorConfig, mlp_head
from ltrscale.pretext.augment import Draw, add_noise, permute_columns, random_entries
from ltrscale.pretext.contrast import simclr_rank
from ltrscale.pretext.objective import CONTRAST_DOCUMENTS, AddedModules, ContrastDocuments, Objective, Pretrainer
from ltrscale.pretext.watch import NEGATIVES, collapse_measures, unit_vectors

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
        return self.layers(h_ND)


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
        return AddedModules(decoder=_VimeDecoder(self.decoder, encoder.width, numeric_F, cardinalities))

    def losses(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> Tensor:
        corrupted_NF, changed_NF = _vime_corrupt(x_NF, rate=self.rate, generator=draw.generator)
        decoded_NO, mask_logits_NF = net.decoder(net.embed(corrupted_NF, draw))
        cardinalities = net.transform.cardinalities
        return vime(decoded_NO, mask_logits_NF, x_NF, changed_NF, draw.numeric_F, cardinalities, alpha=self.alpha)


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
        offsets_Q1: the runs to contrast a document in: `[0, N]`, the whole micro-batch, is SubTab; shorter runs, and
            query groups, make it cheaper.
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
    """Contrast a document with its query group, which is cheaper."""
    contrast_documents: ContrastDocuments = CONTRAST_DOCUMENTS
    """Unless within groups, documents are contrasted in runs of neighbouring groups of about this many; null takes the
    whole micro-batch."""
    distance: float = Field(1.0, ge=0)
    """Weight of the distance between subsets."""
    decoder: DecoderConfig = DecoderConfig(layers=2)
    projector: ProjectorConfig = ProjectorConfig()

    @property
    def projector_layers(self) -> int:
        return self.projector.layers

    def added_modules(self, encoder: Encoder, numeric_F: Tensor, cardinalities: Sequence[int]) -> AddedModules:
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
        h_KND = [net.embed(view_NF, draw) for view_NF in draw.masked(self.views(x_NF, draw))]
        z_KNP = torch.stack([net.projected(h_ND) for h_ND in h_KND])
        among_Q1 = draw.offsets_Q1 if self.within_groups else joined(draw.offsets_Q1, self.contrast_documents)
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
        if net.training and self.contrast > 0 and net.watch.is_due():
            for a_NP, b_NP in combinations(z_KNP, 2):
                of_views = collapse_measures(
                    a_NP, b_NP, among_Q1, negatives=NEGATIVES if self.within_groups else len(x_NF)
                )
                net.watch.add(of_views, losses_N, torch.zeros_like(losses_N))  # the loss is not contrast alone
        return losses_N


MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that become [MASK] and a random token; the others stay as they are (Devlin et al.)."""


class MaskedLanguageConfig(Objective):
    """Masked language modelling: restore hidden tokens of query and document from the others.

    Source: Devlin et al. 2019, section 3.1.
    Proof: loop; frequencies of the draws.
    """

    kind: Literal["masked_language"] = "masked_language"
    reads_tokens: ClassVar[bool] = True
    rate: float = Field(0.15, gt=0, le=1)
    """Share of the tokens of queries and documents to restore. Of these 80% become [MASK], 10% a random token, and 10%
    stay."""

    def added_modules(self, encoder: Encoder, numeric_F: Tensor, cardinalities: Sequence[int]) -> AddedModules:  # noqa: ARG002
        assert isinstance(encoder, CrossEncoder)
        return AddedModules(decoder=_TokenDecoder(encoder.config.bert.width, encoder.bert.tokens.num_embeddings))

    def summed(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The summed loss of the hidden tokens, and their number."""
        encoder = net.encoder
        assert isinstance(encoder, CrossEncoder)
        assert isinstance(net.decoder, _TokenDecoder)
        assert draw.groups is not None
        losses_M, there_M = _masked_language(
            encoder, net.decoder, encoder.pairs(draw.groups), draw.generator, rate=self.rate
        )
        return losses_M.sum(), there_M.sum()


class _TokenDecoder(nn.Module):
    """BERT's head: `norm(gelu(linear(h)))` times the transposed token embedding, plus a bias for each token."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.dense.apply(initialise)

    def forward(self, h_MD: Tensor, tokens_VD: Tensor) -> Tensor:
        """Logits [M, V] of tokens; `tokens_VD` is the encoder's embedding (tied weights)."""
        return F.linear(self.norm(F.gelu(self.dense(h_MD))), tokens_VD, self.bias)


def _hide(
    pairs: Pairs, vocabulary: TokenNumbers, generator: torch.Generator, *, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Hide tokens of texts, each at this rate: sequences [T] with them, places [M], and where a place has one [M].

    Only a GPU has spare places, so that it need not report their number.
    """
    chosen_T, how_T = torch.rand(2, len(pairs.ids_T), generator=generator, device=pairs.ids_T.device)
    random_T = torch.randint(vocabulary.size, how_T.shape, generator=generator, device=how_T.device)
    hidden_T = pairs.text_T & (chosen_T < rate)
    kept_T = torch.where(how_T < MASKED + RANDOM, random_T, pairs.ids_T)
    ids_T = torch.where(hidden_T, torch.where(how_T < MASKED, vocabulary.mask, kept_T), pairs.ids_T)
    if hidden_T.device.type == "cpu":
        rows_M = hidden_T.nonzero()[:, 0]
        return ids_T, rows_M, torch.ones_like(rows_M, dtype=torch.bool)
    n = len(hidden_T)
    places = min(n, math.ceil(n * rate + 8 * math.sqrt(n * rate)) + 8)
    number_T = torch.where(hidden_T, hidden_T.cumsum(0) - 1, places).clamp_(max=places)  # without a place: last
    rows_M = torch.zeros(places + 1, dtype=torch.int64, device=hidden_T.device)
    rows_M = rows_M.scatter_(0, number_T, torch.arange(n, device=hidden_T.device))[:-1]
    return ids_T, rows_M, torch.arange(places, device=hidden_T.device) < hidden_T.sum()


def _masked_language(
    encoder: CrossEncoder, decoder: _TokenDecoder, pairs: Pairs, generator: torch.Generator, *, rate: float
) -> tuple[Tensor, Tensor]:
    """Cross entropies of hidden tokens [M] (Devlin et al. 2019, section 3.1), and True where a place has a token."""
    assert encoder.config.vocabulary is not None
    ids_T, rows_M, there_M = _hide(pairs, encoder.config.vocabulary, generator, rate=rate)
    h_TD = encoder.bert(ids_T, pairs.types_T, pairs.offsets_N1)
    logits_MV = decoder(h_TD.index_select(0, rows_M), encoder.bert.tokens.weight)
    return F.cross_entropy(logits_MV.float(), pairs.ids_T[rows_M], reduction="none") * there_M, there_M
