"""FeatureTransform: raw features to network inputs, fitted in one streaming pass over the training data.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, C categorical ones, K quantiles, B1 edges of B bins, V
vocabulary codes of all categorical features that are not hashed.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from ltrscale.arrays import N_CODES
from ltrscale.batch import standardise_groups
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.models.fitting import FeatureStatistics, Wanted, quantiles, sampled_documents

FeatureKind = Literal["numeric", "categorical"]
_PRIME, _SHIFTS = N_CODES + 43, (11_400_715, 7_046_029)
"""For hashing codes: a prime above all codes such that 3 does not divide `_PRIME - 1`."""
_END = 1 - 2e-7  # |2p - 1| is cut here: float32 distinguishes it from 1, and it maps to 5.2 standard deviations


class TransformConfig(Config):
    """How to turn raw features into network inputs."""

    numeric: Literal["none", "log1p", "standard", "log1p_standard", "quantile_normal"] = "log1p_standard"
    """`log1p` is sign(x) log(1 + |x|) (QIN21), almost the identity on small values; `standard` scales to mean 0 and
    deviation 1; `quantile_normal` maps each feature's distribution to the normal one (BUYL23)."""
    clip: float = Field(10.0, gt=0)
    """Standardised values are clipped at this many deviations."""
    quantiles: int = Field(256, ge=2, le=1_000_000)
    """Points of the quantile map."""
    sample: int = Field(100_000, ge=2, le=1 << 26)
    """Size of the uniform sample of documents that quantiles and edges of bins are taken from; smaller data sets are
    used whole. Of more than 671 features it is smaller: at most 2^26 values, 13,421 documents of 5,000 features."""
    max_vocabulary: int = Field(100_000, ge=1, le=N_CODES)
    """Most codes of a categorical feature; if there are more, the most frequent are kept and the others are unknown,
    or all are hashed, see `hash_rows`."""
    hash_rows: int = Field(0, ge=0, lt=N_CODES)
    """Rows of the embedding of a categorical feature with more codes than `max_vocabulary`, such as a user or an item:
    the row of a code is its hash, which needs no vocabulary. Codes that share a row look the same; of n codes in R
    rows an expected `1 - (1 - 1/R)^(n - 1)` do, logged when the transform is fitted. 0 keeps the most frequent codes
    instead."""
    host_rows: int | None = Field(None, ge=0)
    """Embeddings of all categorical features together that have more rows than this stay in the host's memory: a GPU
    gets the rows of its batch, and workers exchange the gradients of the rows that a step used. Rows that a step did
    not use are not updated at all, see docs/distributed.md. Empty keeps every embedding on the device."""
    discrete_up_to: int = Field(0, ge=0, le=1_000_000)
    """Numeric features with at most this many different values in training become categories: 3 in HOU24 for DeepFM and
    DCNv2, 0 for none."""
    per_query: bool = False
    """Finally, standardise each numeric feature within its query group (public code of HOU24); a score then depends on
    the other documents of its group too."""


def _signed_log1p(x: Tensor) -> Tensor:
    """`sign(x) log(1 + |x|)` (QIN21, section 4.1); NaN stays NaN."""
    return x.abs().log1p().copysign(x)


class FeatureTransform(nn.Module):
    """Normalises numeric features, imputes missing ones and maps categories to indices; buffers hold all its state.

    A missing numeric value becomes the training mean after log1p (0 once standardised), or the median (0) under
    `quantile_normal`. A feature that is constant or always missing in training is not scaled. A categorical value
    becomes its index in the sorted vocabulary plus 1, or its `_hashed_row`; 0 stands for unknown and missing. Outputs
    are finite for every finite or missing float32 input. With `per_query`, the numeric outputs, imputed values
    included, are then standardised within each group.

    Args:
        config: the transform.
        kinds: kind of each feature as the network sees it: categorical for a discrete numeric one.
        cardinalities: rows that an embedding of each categorical feature needs: vocabulary size, or rows of hashes,
            plus 1 for unknown.
        hashed: indices of the categorical features whose codes are hashed.
        bins: bins of each feature to store the edges of, between quantiles of its transformed values.

    Example:
        >>> batch = torch.tensor([[1.0, 30.0], [3.0, 10.0], [float("nan"), 30.0]])
        >>> transform = fit_transform([batch], ["numeric", "categorical"], TransformConfig(numeric="standard"))
        >>> transform(torch.tensor([[2.0, 30.0], [float("nan"), 77.0], [3.0, 10.0]])).tolist()
        [[0.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    """

    numeric_F: Tensor
    cardinalities_C: Tensor
    categorical_C: Tensor
    known_C: Tensor
    hashed_F: Tensor
    mean_F: Tensor
    scale_F: Tensor
    quantiles_FK: Tensor
    edges_FB1: Tensor
    codes_V: Tensor

    def __init__(
        self,
        config: TransformConfig,
        kinds: Sequence[FeatureKind],
        cardinalities: Sequence[int],
        hashed: Collection[int] = (),
        bins: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.kinds = tuple(kinds)
        self.cardinalities = tuple(cardinalities)
        self.categorical = tuple(i for i, kind in enumerate(kinds) if kind == "categorical")
        assert len(self.categorical) == len(self.cardinalities)
        self.hashed = tuple(hashed)
        pairs = zip(self.categorical, self.cardinalities, strict=True)
        self.known = tuple(0 if i in self.hashed else rows - 1 for i, rows in pairs)
        """Size of each categorical feature's vocabulary; 0 if its codes are hashed."""
        n_features, n_codes = len(self.kinds), sum(self.known)
        n_quantiles = config.quantiles if config.numeric == "quantile_normal" else 0
        numeric_F = torch.tensor([kind == "numeric" for kind in kinds], dtype=torch.bool)
        self.register_buffer("numeric_F", numeric_F)
        self.register_buffer("cardinalities_C", torch.tensor(self.cardinalities, dtype=torch.int64))
        # these follow from the others, so they are not saved
        self.register_buffer("categorical_C", torch.tensor(self.categorical, dtype=torch.int64), persistent=False)
        self.register_buffer("known_C", torch.tensor(self.known, dtype=torch.int64), persistent=False)
        hashed_F = torch.tensor([i in self.hashed for i in range(n_features)], dtype=torch.bool)
        self.register_buffer("hashed_F", hashed_F, persistent=config.hash_rows > 0)
        self.register_buffer("mean_F", torch.zeros(n_features))
        self.register_buffer("scale_F", torch.ones(n_features))
        self.register_buffer("quantiles_FK", torch.zeros(n_features, n_quantiles))
        self.register_buffer("edges_FB1", torch.zeros(n_features, bins + 1), persistent=bins > 0)
        self.register_buffer("codes_V", torch.zeros(n_codes))

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], config: TransformConfig) -> Self:
        """Rebuild a transform from its `state_dict` and the config that it was fitted with.

        Raises:
            ValueError: state and config do not match.
        """
        kinds: list[FeatureKind] = ["numeric" if numeric else "categorical" for numeric in state["numeric_F"].tolist()]
        cardinalities = state["cardinalities_C"].tolist()
        hashed = state["hashed_F"].nonzero()[:, 0].tolist() if "hashed_F" in state else []
        bins = max(0, state["edges_FB1"].shape[-1] - 1) if "edges_FB1" in state else 0
        if len(cardinalities) != kinds.count("categorical") or min(cardinalities, default=1) < 1:
            raise ValueError("the cardinalities are not those of its categorical features")
        with torch.device("meta"):  # allocates nothing: a corrupt state may claim sizes that would fill the memory
            outline = cls(config, kinds, cardinalities, hashed, bins).state_dict()
            shapes = {name: value.shape for name, value in outline.items()}
        if shapes != {name: value.shape for name, value in state.items()}:
            raise ValueError("the state is one of another transform")
        transform = cls(config, kinds, cardinalities, hashed, bins)
        transform.load_state_dict(state)
        return transform

    def forward(self, features_NF: Tensor, offsets_Q1: Tensor | None = None) -> Tensor:
        """Map raw float32 features [N, F] to inputs [N, F].

        Args:
            features_NF: raw features.
            offsets_Q1: offsets of the groups; only a transform with `per_query` reads them.

        Raises:
            ValueError: the transform has `per_query`, but offsets are missing.
        """
        x_NF = self.numbers(features_NF)
        if self.config.per_query:
            if offsets_Q1 is None:
                raise ValueError("a transform with per_query needs the offsets of the groups besides the features")
            x_NF = standardise_groups(x_NF, offsets_Q1)
        if not self.categorical:
            return x_NF
        return x_NF.index_copy_(1, self.categorical_C, self.indices(features_NF).to(x_NF.dtype))

    def indices(self, features_NF: Tensor) -> Tensor:
        """The index of each category of raw features [N, F], shape [N, C]: its row in the embedding of its feature."""
        codes_NC = features_NF.index_select(1, self.categorical_C)
        if features_NF.device.type != "cpu":
            indices_NC = _indices(codes_NC, self.codes_V, self.known_C).to(codes_NC.dtype)
            if not self.hashed:
                return indices_NC
            hashed_C = self.hashed_F.index_select(0, self.categorical_C)
            return torch.where(hashed_C, _hashed_row(codes_NC, self.config.hash_rows), indices_NC)
        vocabularies = torch.split(self.codes_V, list(self.known))
        columns = zip(self.categorical, codes_NC.unbind(1), vocabularies, strict=True)
        return torch.stack(
            [
                _hashed_row(codes_N, self.config.hash_rows) if column in self.hashed else _index(codes_N, codes_V)
                for column, codes_N, codes_V in columns
            ],
            1,
        )

    def numbers(self, x_NF: Tensor) -> Tensor:
        """Raw features as numeric inputs, before standardisation within groups; non-decreasing in each feature."""
        config = self.config
        if config.numeric == "quantile_normal":
            return _to_normal(x_NF, self.quantiles_FK)
        if config.numeric in ("log1p", "log1p_standard"):
            x_NF = _signed_log1p(x_NF)
        x_NF = torch.where(x_NF.isnan(), self.mean_F, x_NF)
        if config.numeric in ("standard", "log1p_standard"):
            x_NF = ((x_NF - self.mean_F) / self.scale_F).clamp(-config.clip, config.clip)
        return x_NF


def wanted(
    kinds: Sequence[FeatureKind], config: TransformConfig, *, bins: int = 0, documents: int | None = None
) -> Wanted:
    """The statistics that a transform needs.

    Args:
        kinds: kind of each feature in the data.
        config: the transform.
        bins: bins of each feature to store the edges of.
        documents: number of documents in the training data, if known.
    """
    maps_quantiles = config.numeric == "quantile_normal"
    return Wanted(
        numeric=tuple(kind == "numeric" for kind in kinds),
        log1p=config.numeric in ("log1p", "log1p_standard"),
        moments=not maps_quantiles,
        sample=sampled_documents(config.sample, len(kinds)) if maps_quantiles or bins else 0,
        discrete_up_to=config.discrete_up_to,
        most_codes=config.max_vocabulary if config.hash_rows else None,
        documents=documents,
    )


def make_transform(statistics: FeatureStatistics, config: TransformConfig, *, bins: int = 0) -> FeatureTransform:
    """The transform fitted to these statistics, with the edges of this many bins of each feature.

    Raises:
        InputError: the statistics contain no document.
    """
    if statistics.documents == 0:
        raise InputError("feature transform: no document to fit it on; check the periods of the training split")
    codes = {column: v.codes(config.max_vocabulary) for column, v in statistics.vocabularies.items()}
    vocabularies = {column: torch.from_numpy(codes_V) for column, codes_V in codes.items() if codes_V is not None}
    rows = {column: len(codes_V) for column, codes_V in vocabularies.items()}
    rows |= dict.fromkeys(statistics.hashed, config.hash_rows)
    n_features = len(statistics.wanted.numeric)
    kinds: list[FeatureKind] = ["categorical" if i in rows else "numeric" for i in range(n_features)]
    transform = FeatureTransform(config, kinds, [rows[i] + 1 for i in sorted(rows)], tuple(statistics.hashed), bins)
    if config.numeric == "quantile_normal":
        transform.quantiles_FK.copy_(quantiles(statistics.sample.rows_MF(), config.quantiles))
    else:
        moments, numeric_F = statistics.moments, transform.numeric_F
        transform.mean_F.copy_(torch.where(numeric_F, torch.from_numpy(moments.mean_F), 0.0))
        transform.scale_F.copy_(torch.where(numeric_F, torch.from_numpy(moments.scale_F()), 1.0))
    transform.codes_V.copy_(torch.cat([torch.zeros(0), *vocabularies.values()]))
    if bins:
        transform.edges_FB1.copy_(transform.numbers(quantiles(statistics.sample.rows_MF(), bins + 1).T).T)
    return transform


def fit_transform(
    batches: Iterable[Tensor], kinds: Sequence[FeatureKind], config: TransformConfig, *, bins: int = 0
) -> FeatureTransform:
    """Fit a transform in one pass over the training documents.

    The result depends on the documents and their order, not on how they are batched (beyond rounding in float64).
    """
    statistics = FeatureStatistics(wanted(kinds, config, bins=bins))
    for features_NF in batches:
        statistics.add(statistics.documents, features_NF.float().numpy())
    return make_transform(statistics, config, bins=bins)


def _hashed_row(codes: Tensor, rows: int) -> Tensor:
    """The row of each code, from 1 to `rows`, on every machine the same; 0 if a code is missing or out of range."""
    is_code = (codes >= 0) & (codes < N_CODES)
    mixed = torch.where(is_code, codes, 0.0).long()
    for shift in _SHIFTS:
        shifted = (mixed + shift) % _PRIME
        mixed = shifted * shifted % _PRIME * shifted % _PRIME
    return torch.where(is_code, (mixed % rows + 1).to(codes.dtype), 0.0)


def expected_sharing(codes: int, rows: int) -> float:
    """The expected share of this many hashed codes that share their row with another one.

    About `1 - (1 - 1/R)^(n - 1)`, the limit for R far below 2^24. A row belongs to k or k + 1 of the p mixed codes,
    where k is the quotient of p by R. Each of the other codes occurs with probability `(n - 1) / (p - 1)`.

    Example:
        >>> round(expected_sharing(100_000, 1_000_000), 3), round(expected_sharing(1_000_000, 10_000), 3)
        (0.09, 1.0)
    """
    fewer, larger_rows = divmod(_PRIME, rows)
    absent = 1 - (codes - 1) / (_PRIME - 1)
    in_larger = (fewer + 1) * larger_rows / _PRIME
    return 1 - in_larger * absent**fewer - (1 - in_larger) * absent ** (fewer - 1)


def sharing(codes_V: Tensor, rows: int) -> float:
    """The measured share of these different codes that share their row with another one."""
    row_V = _hashed_row(codes_V, rows).long()
    return float((torch.bincount(row_V)[row_V] > 1).float().mean())


def _to_normal(x_NF: Tensor, quantiles_FK: Tensor) -> Tensor:
    """The normal quantile of each value's place among its feature's quantiles; missing becomes 0, the median."""
    x_FN = x_NF.T.contiguous()  # searchsorted looks up rows, one feature each
    last = quantiles_FK.shape[1] - 1
    next_FN = torch.searchsorted(quantiles_FK, x_FN)
    above_FN = quantiles_FK.gather(1, next_FN.clamp(max=last))
    below_FN = quantiles_FK.gather(1, (next_FN - 1).clamp(min=0))
    share_FN = (x_FN / 2 - below_FN / 2) / (above_FN / 2 - below_FN / 2)  # differences of halves cannot overflow
    between_FN = next_FN - 1 + share_FN.nan_to_num(0.5, 0.5, 0.5)  # division by 0 where both quantiles are equal
    # ties take the middle of their block: otherwise a feature that is mostly 0 would map its zeros to the scale's end
    first_FK = torch.searchsorted(quantiles_FK, quantiles_FK)
    middle_FK = (first_FK + torch.searchsorted(quantiles_FK, quantiles_FK, right=True) - 1) / 2
    tied_FN = middle_FK.gather(1, next_FN.clamp(max=last))
    place_FN = torch.where(above_FN == x_FN, tied_FN, between_FN).clamp(0, last)
    z_FN = torch.erfinv((place_FN * (2 / last) - 1).clamp(-_END, _END)) * math.sqrt(2)
    return torch.where(x_FN.isnan(), 0.0, z_FN).T.contiguous()


def _index(codes_N: Tensor, codes_V: Tensor) -> Tensor:
    """Index of each code in a sorted vocabulary plus 1; 0 for a code that is not in it."""
    if len(codes_V) == 0:
        return torch.zeros_like(codes_N)
    place_N = torch.searchsorted(codes_V, codes_N.contiguous()).clamp(max=len(codes_V) - 1)
    return torch.where(codes_V[place_N] == codes_N, place_N + 1.0, 0.0)


def _indices(codes_NC: Tensor, codes_V: Tensor, known_C: Tensor) -> Tensor:
    """`_index` of all categorical features at once, for a GPU: one sorted vocabulary of pairs (feature, code)."""
    if len(codes_V) == 0:
        return torch.zeros_like(codes_NC)
    ends_C, features_C = known_C.cumsum(0), torch.arange(len(known_C), device=codes_V.device)
    feature_V = torch.searchsorted(ends_C, torch.arange(len(codes_V), device=codes_V.device), right=True)
    keys_V, keys_NC = _keys(feature_V, codes_V), _keys(features_C, codes_NC)
    place_NC = torch.searchsorted(keys_V, keys_NC).clamp_(max=len(codes_V) - 1)
    first_C = ends_C - known_C - 1  # one before the feature's first code
    return (place_NC - first_C).masked_fill_(keys_V[place_NC] != keys_NC, 0)


def _keys(feature: Tensor, codes: Tensor) -> Tensor:
    """Integers that sort like pairs (feature, float32 code)."""
    bits = (codes.float() + 0.0).view(torch.int32)  # -0 + 0 is 0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # bits of negative numbers rise as the numbers fall
    return (feature << 32) + bits
