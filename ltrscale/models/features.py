"""FeatureTransform: raw features to network inputs, fitted in one streaming pass over the training data.

Shapes: N documents, F features, K quantiles, V vocabulary codes of all categorical features together.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from ltrscale.config import Config
from ltrscale.errors import InputError

Kind = Literal["numeric", "categorical"]
_END = 1 - 2e-7  # |2p - 1| is cut here: float32 tells it from 1, and it maps to 5.2 standard deviations
_GOLDEN = 0x9E3779B97F4A7C15


class TransformConfig(Config):
    """How raw features become network inputs."""

    numeric: Literal["none", "log1p", "standard", "log1p_standard", "quantile_normal"] = "log1p_standard"
    """`log1p` is sign(x) log(1 + |x|) (QIN21), almost the identity on small values; `standard` takes mean 0 and
    deviation 1; `quantile_normal` maps each feature's distribution to the normal one (BUYL23)."""
    clip: float = Field(10.0, gt=0)
    """Standardised values are cut at this many deviations."""
    quantiles: int = Field(256, ge=2)
    """Points of the quantile map."""
    sample: int = Field(100_000, ge=2)
    """Documents from which quantiles are taken, a uniform sample; all of them when there are no more."""
    max_vocabulary: int = Field(100_000, ge=1)
    """Codes a categorical feature may have; beyond that the most frequent ones are kept, the others are unknown."""


def signed_log1p(x: Tensor) -> Tensor:
    """`sign(x) log(1 + |x|)` (QIN21, section 4.1); NaN stays NaN.

    Example:
        >>> signed_log1p(torch.tensor([-(math.e - 1), 0.0])).tolist()
        [-1.0, 0.0]
    """
    return x.abs().log1p().copysign(x)


class FeatureTransform(nn.Module):
    """Normalises numeric features, imputes missing ones and numbers categories; all its state is in buffers.

    A missing numeric value becomes the training mean of what the feature is mapped to (0 once standardised), or the
    median (0) under `quantile_normal`. A feature that is constant or always missing in training is not scaled. A
    categorical value becomes its place in the sorted vocabulary plus 1; 0 stands for unknown and missing. Outputs are
    finite for every finite or missing float32 input.

    Args:
        config: the transform.
        kinds: kind of each feature.
        cardinalities: rows that an embedding of each categorical feature needs: its vocabulary plus the unknown.

    Example:
        >>> batch = torch.tensor([[1.0, 30.0], [3.0, 10.0], [float("nan"), 30.0]])
        >>> transform = fit_transform([batch], ["numeric", "categorical"], TransformConfig(numeric="standard"))
        >>> transform(torch.tensor([[2.0, 30.0], [float("nan"), 77.0], [3.0, 10.0]])).tolist()
        [[0.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    """

    numeric_F: Tensor
    cardinalities_C: Tensor
    mean_F: Tensor
    scale_F: Tensor
    quantiles_FK: Tensor
    codes_V: Tensor

    def __init__(self, config: TransformConfig, kinds: Sequence[Kind], cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.kinds = tuple(kinds)
        self.cardinalities = tuple(cardinalities)
        self.categorical = tuple(i for i, kind in enumerate(kinds) if kind == "categorical")
        assert len(self.categorical) == len(self.cardinalities)
        n_features, n_codes = len(self.kinds), sum(self.cardinalities) - len(self.cardinalities)
        n_quantiles = config.quantiles if config.numeric == "quantile_normal" else 0
        numeric_F = torch.tensor([kind == "numeric" for kind in kinds], dtype=torch.bool)
        self.register_buffer("numeric_F", numeric_F)
        self.register_buffer("cardinalities_C", torch.tensor(self.cardinalities, dtype=torch.int64))
        self.register_buffer("mean_F", torch.zeros(n_features))
        self.register_buffer("scale_F", torch.ones(n_features))
        self.register_buffer("quantiles_FK", torch.zeros(n_features, n_quantiles))
        self.register_buffer("codes_V", torch.zeros(n_codes))

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], config: TransformConfig) -> Self:
        """Rebuild a transform from what its `state_dict` gave and the config that it was fitted with."""
        kinds: list[Kind] = ["numeric" if numeric else "categorical" for numeric in state["numeric_F"].tolist()]
        transform = cls(config, kinds, state["cardinalities_C"].tolist())
        transform.load_state_dict(state)
        return transform

    def forward(self, features_NF: Tensor) -> Tensor:
        """Raw float32 features [N, F] to inputs [N, F]."""
        x_NF = self._numeric(features_NF)
        vocabularies = torch.split(self.codes_V, [n - 1 for n in self.cardinalities])
        for column, codes_V in zip(self.categorical, vocabularies, strict=True):
            x_NF[:, column] = _index(features_NF[:, column], codes_V)
        return x_NF

    def _numeric(self, x_NF: Tensor) -> Tensor:
        config = self.config
        if config.numeric == "quantile_normal":
            return _to_normal(x_NF, self.quantiles_FK)
        x_NF = _before_standard(x_NF, config)
        x_NF = torch.where(x_NF.isnan(), self.mean_F, x_NF)
        if config.numeric in ("standard", "log1p_standard"):
            x_NF = ((x_NF - self.mean_F) / self.scale_F).clamp(-config.clip, config.clip)
        return x_NF


def fit_transform(batches: Iterable[Tensor], kinds: Sequence[Kind], config: TransformConfig) -> FeatureTransform:
    """Fit a transform in one pass over the training documents.

    The result depends on the documents and their order, not on how they are batched (beyond rounding in float64).

    Args:
        batches: features [N, F] in any number of parts; NaN is missing.
        kinds: kind of each feature.
        config: the transform.

    Raises:
        InputError: there is no document.
    """
    fit = _Fit(tuple(kinds), config)
    for features_NF in batches:
        fit.add(features_NF)
    if fit.documents == 0:
        raise InputError("feature transform: no document to fit it on; check the periods of the training split")
    vocabularies = [_most_frequent(v, config.max_vocabulary) for v in fit.vocabularies]
    transform = FeatureTransform(config, kinds, [len(codes) + 1 for codes in vocabularies])
    if fit.sample is not None:
        transform.quantiles_FK.copy_(_quantiles(fit.sample.rows_MF(), config.quantiles))
    else:
        numeric_F = transform.numeric_F
        transform.mean_F.copy_(torch.where(numeric_F, fit.moments.mean_F, 0.0))
        transform.scale_F.copy_(torch.where(numeric_F, _scale(fit.moments), 1.0))
    transform.codes_V.copy_(torch.cat([torch.zeros(0), *vocabularies]))
    return transform


class _Moments(NamedTuple):
    """Count, mean and sum of squared deviations of what is not missing, in float64; parts merge (Chan et al. 1979)."""

    count_F: Tensor
    mean_F: Tensor
    squares_F: Tensor

    @staticmethod
    def of(x_NF: Tensor) -> "_Moments":
        x_NF = x_NF.double()
        seen_NF = ~x_NF.isnan()
        count_F = seen_NF.sum(0)
        mean_F = x_NF.nansum(0) / count_F.clamp(min=1)
        squares_F = (x_NF - mean_F).square().nansum(0)
        return _Moments(count_F, mean_F, squares_F)

    def merge(self, other: "_Moments") -> "_Moments":
        count_F = self.count_F + other.count_F
        share_F = other.count_F / count_F.clamp(min=1)
        delta_F = other.mean_F - self.mean_F
        squares_F = self.squares_F + other.squares_F + delta_F.square() * self.count_F * share_F
        return _Moments(count_F, self.mean_F + delta_F * share_F, squares_F)


class _Vocabulary(NamedTuple):
    """Codes seen, sorted, and how often; parts merge."""

    codes_V: Tensor
    counts_V: Tensor

    @staticmethod
    def of(codes_N: Tensor) -> "_Vocabulary":
        return _Vocabulary(*torch.unique(codes_N[~codes_N.isnan()], return_counts=True))

    def merge(self, other: "_Vocabulary") -> "_Vocabulary":
        codes_V, place = torch.unique(torch.cat([self.codes_V, other.codes_V]), return_inverse=True)
        counts_V = torch.cat([self.counts_V, other.counts_V])
        return _Vocabulary(codes_V, counts_V.new_zeros(len(codes_V)).index_add(0, place, counts_V))


class _Sample:
    """A uniform sample of documents without replacement: those whose number has the lowest hashes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: list[tuple[NDArray[np.uint64], NDArray[np.float32]]] = []
        self.pending = 0
        self.below = np.uint64(2**64 - 1)

    def add(self, first: int, rows_NF: NDArray[np.float32]) -> None:
        """Offer documents number `first` and after."""
        keys_N = _hash(np.arange(first, first + len(rows_NF), dtype=np.uint64))
        chosen = keys_N <= self.below
        self.kept.append((keys_N[chosen], rows_NF[chosen]))
        self.pending += int(chosen.sum())
        if self.pending > 2 * self.size:
            self.shrink()

    def shrink(self) -> None:
        """Keep the `size` lowest hashes, in their order."""
        keys = np.concatenate([keys for keys, _ in self.kept])
        rows = np.concatenate([rows for _, rows in self.kept])
        order = np.argsort(keys)[: self.size]
        self.kept = [(keys[order], rows[order])]
        self.pending = len(order)
        if self.pending == self.size:
            self.below = keys[order[-1]]

    def rows_MF(self) -> NDArray[np.float32]:
        """The sampled documents."""
        self.shrink()
        return self.kept[0][1]


@dataclass
class _Fit:
    """What one pass gathers."""

    kinds: tuple[Kind, ...]
    config: TransformConfig
    documents: int = 0
    moments: _Moments = field(init=False)
    vocabularies: list[_Vocabulary] = field(init=False)
    sample: _Sample | None = field(init=False)

    def __post_init__(self) -> None:
        self.moments = _Moments.of(torch.zeros(0, len(self.kinds)))
        self.vocabularies = [_Vocabulary.of(torch.zeros(0)) for kind in self.kinds if kind == "categorical"]
        self.sample = _Sample(self.config.sample) if self.config.numeric == "quantile_normal" else None

    def add(self, features_NF: Tensor) -> None:
        assert features_NF.shape[1] == len(self.kinds)
        if self.sample is not None:
            self.sample.add(self.documents, features_NF.float().numpy())
        else:
            self.moments = self.moments.merge(_Moments.of(_before_standard(features_NF, self.config)))
        columns = [i for i, kind in enumerate(self.kinds) if kind == "categorical"]
        for place, column in enumerate(columns):
            seen = _Vocabulary.of(features_NF[:, column].contiguous())
            self.vocabularies[place] = self.vocabularies[place].merge(seen)
        self.documents += len(features_NF)


def _before_standard(x_NF: Tensor, config: TransformConfig) -> Tensor:
    return signed_log1p(x_NF) if config.numeric in ("log1p", "log1p_standard") else x_NF


def _scale(moments: _Moments) -> Tensor:
    """Standard deviations; 1 where float32 cannot tell the values apart, since dividing would amplify its rounding."""
    std_F = (moments.squares_F / moments.count_F.clamp(min=1)).sqrt()
    floor_F = (1e-7 * moments.mean_F.abs()).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(std_F > floor_F, std_F, 1.0)


def _most_frequent(vocabulary: _Vocabulary, limit: int) -> Tensor:
    """Sorted codes; the most frequent ones where there are too many, smaller codes first among equals."""
    order_V = vocabulary.counts_V.argsort(descending=True, stable=True)[:limit]
    return vocabulary.codes_V[order_V].sort().values


def _hash(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijective mix of 64 bits (the finaliser of SplitMix64), so that no two numbers share a hash."""
    x = (numbers + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _quantiles(rows_MF: NDArray[np.float32], n_quantiles: int) -> Tensor:
    """Quantiles of each feature at n evenly spaced probabilities, interpolated; 0 for a feature without values."""
    probabilities_K = np.linspace(0, 1, n_quantiles)
    quantiles_FK = np.zeros((rows_MF.shape[1], n_quantiles))
    for feature, values_M in enumerate(rows_MF.T):
        seen = values_M[~np.isnan(values_M)].astype(np.float64)
        if len(seen):
            quantiles_FK[feature] = np.quantile(seen, probabilities_K)
    return torch.from_numpy(quantiles_FK).float()


def _to_normal(x_NF: Tensor, quantiles_FK: Tensor) -> Tensor:
    """The normal quantile of each value's place among its feature's quantiles; missing becomes 0, the median.

    Places are interpolated linearly; a value that ties with several quantiles takes the middle of their block, so that
    a feature that is mostly 0 does not send its zeros to the end of the scale.
    """
    x_FN = x_NF.T.contiguous()
    last = quantiles_FK.shape[1] - 1
    next_FN = torch.searchsorted(quantiles_FK, x_FN)
    above_FN = quantiles_FK.gather(1, next_FN.clamp(max=last))
    below_FN = quantiles_FK.gather(1, (next_FN - 1).clamp(min=0))
    share_FN = (x_FN / 2 - below_FN / 2) / (above_FN / 2 - below_FN / 2)  # whose halves cannot overflow
    between_FN = next_FN - 1 + share_FN.nan_to_num(0.5, 0.5, 0.5)
    first_FK = torch.searchsorted(quantiles_FK, quantiles_FK)
    middle_FK = (first_FK + torch.searchsorted(quantiles_FK, quantiles_FK, right=True) - 1) / 2
    tied_FN = middle_FK.gather(1, next_FN.clamp(max=last))
    place_FN = torch.where(above_FN == x_FN, tied_FN, between_FN).clamp(0, last)
    z_FN = torch.erfinv((place_FN * (2 / last) - 1).clamp(-_END, _END)) * math.sqrt(2)
    return torch.where(x_FN.isnan(), 0.0, z_FN).T.contiguous()


def _index(codes_N: Tensor, codes_V: Tensor) -> Tensor:
    """Place of each code in a sorted vocabulary plus 1; 0 where it is not there."""
    if len(codes_V) == 0:
        return torch.zeros_like(codes_N)
    place_N = torch.searchsorted(codes_V, codes_N.contiguous()).clamp(max=len(codes_V) - 1)
    return torch.where(codes_V[place_N] == codes_N, place_N + 1.0, 0.0)
