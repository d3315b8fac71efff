"""A ranker that learns from examples by reading them: no gradient, no setting to tune (in-context learning).

The network is pretrained on synthetic problems (`ltrscale/simulate/problems.py`), like prior-data fitted networks
(Müller et al. 2022; Hollmann et al. 2025). Its tokens are features, any number of them in any order. In each layer

    a feature reads the examples       t_f += W [1 / M, 1 / sqrt(M)] sum_m p_k(x_mf) v(h_m)                       (1)
    features read each other           attention, with the features' rank correlations                            (2)
    a feature writes its functions     h_n += sum_f sum_k p_k(x_nf) w_fk(t_f),  and so the score s_n              (3)
    a document reads the examples      attention, to those of other lists                                         (4)
    a document looks at its list       the mean of h and the softmax of s there; for an example, how far this is
                                       from its labels                                                            (5)

where p_k are functions of a feature's value (`_functions_of`). Examples never read the lists to rank, so `read` takes
the examples once, and a score depends only on them and on the document's own list.

Shapes: B problems whose lists have the same lengths, Q lists, N documents, M documents of the examples, F features, K
functions of a feature, X = F * K, T a feature's token, D state of a document, V what an example shows features, H
heads, A attention.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from ltrscale.batch import group_index, repeated
from ltrscale.config import Config
from ltrscale.models.layers import Layers, Size
from ltrscale.ranking.losses import softmax
from ltrscale.ranking.metrics import exponential_gain

_FUNCTIONS = 7
"""Functions of a feature: four hats on its quantiles, its value, its value and its rank within the list."""


class _Scale(NamedTuple):
    """What functions of features need: the examples' sorted values, their moments, and the functions' means."""

    sorted_BFM: Tensor
    mean_B1F: Tensor
    std_B1F: Tensor
    centre_B1FK: Tensor | float

    @staticmethod
    def from_examples(x_BMF: Tensor, offsets_Q1: Tensor) -> "_Scale":
        x_BMF = x_BMF.double()
        sorted_BFM = x_BMF.transpose(1, 2).contiguous().sort(-1).values
        scale = _Scale(sorted_BFM, x_BMF.mean(1, keepdim=True), x_BMF.std(1, correction=0, keepdim=True), 0.0)
        return scale._replace(centre_B1FK=_functions_of(x_BMF, offsets_Q1, scale).mean(1, keepdim=True))


def _functions_of(x_BNF: Tensor, offsets_Q1: Tensor, scale: _Scale) -> Tensor:
    """The functions of each feature, [B, N, F, K], which no shift or scale changes; over the examples they sum to 0."""
    x_BNF, values_BFN = x_BNF.double(), x_BNF.double().transpose(1, 2).contiguous()
    n_values = 2 * scale.sorted_BFM.shape[2]
    below_BFN = _twice_the_rank(scale.sorted_BFM, values_BFN)
    u_BNF = below_BFN.transpose(1, 2) / n_values
    # integer keys sort by list first, exactly for any number of lists
    group_N = group_index(offsets_Q1)
    keys_BFN = below_BFN + group_N * (n_values + 1)
    rank_BFN = _twice_the_rank(keys_BFN.sort(-1).values, keys_BFN) / 2 - offsets_Q1[group_N]
    rank_BNF = 2 * math.sqrt(3) * (rank_BFN / _lengths_N(offsets_Q1) - 0.5).transpose(1, 2)
    z_BNF = ((x_BNF - scale.mean_B1F) / scale.std_B1F.clamp(min=1e-300)).clamp(-4, 4)
    centred_BNF = x_BNF - _list_means(x_BNF, offsets_Q1)
    std_BNF = _list_means(centred_BNF.square(), offsets_Q1).sqrt()
    within_BNF = (centred_BNF / std_BNF.clamp(min=1e-300)).clamp(-3, 3) * (std_BNF > 1e-6 * scale.std_B1F)
    knots_4 = torch.linspace(0, 1, 4, dtype=x_BNF.dtype, device=x_BNF.device)
    hats_BNF4 = (1 - 3 * (u_BNF[..., None] - knots_4).abs()).clamp(min=0)
    functions_BNFK = torch.cat([hats_BNF4, torch.stack([z_BNF, within_BNF, rank_BNF], -1)], -1) - scale.centre_B1FK
    varies_BF = scale.sorted_BFM[..., 0] < scale.sorted_BFM[..., -1]
    return torch.where(varies_BF[:, None, :, None], functions_BNFK, 0.0)


def _twice_the_rank(sorted_BFM: Tensor, values_BFN: Tensor) -> Tensor:
    """How many of the sorted values are below each value, plus how many are not above it."""
    return torch.searchsorted(sorted_BFM, values_BFN) + torch.searchsorted(sorted_BFM, values_BFN, right=True)


def _rank_correlations(functions_BMFK: Tensor) -> Tensor:
    """Correlations [B, F, F] of the examples' ranks within their lists."""
    ranks_BMF = functions_BMFK[..., -1]
    ranks_BMF = ranks_BMF / (ranks_BMF.square().mean(1, keepdim=True).sqrt() + 1e-3)
    return ranks_BMF.transpose(1, 2) @ ranks_BMF / ranks_BMF.shape[1]


def _list_means(values_BN_: Tensor, offsets_Q1: Tensor) -> Tensor:
    """The mean of each document's list, in the shape of the values, [B, N, ...]."""
    group_N, shape = group_index(offsets_Q1), values_BN_.shape
    sums_BQ_ = values_BN_.new_zeros(shape[0], len(offsets_Q1) - 1, *shape[2:]).index_add(1, group_N, values_BN_)
    return sums_BQ_[:, group_N] / _lengths_N(offsets_Q1).to(values_BN_.dtype).view(-1, *[1] * (len(shape) - 2))


def _lengths_N(offsets_Q1: Tensor) -> Tensor:
    """The length of each document's list."""
    return offsets_Q1.diff()[group_index(offsets_Q1)]


_KEYS = 32  # A
_HIGHEST = 4.0  # grades above this have its gain


class InContextSizes(Config):
    """Sizes of the network."""

    token: Size = 64
    """Size of a feature's token; a multiple of the heads."""
    state: Size = 32
    """Size of a document's state."""
    shown: Size = 10
    """Values that an example shows to features."""
    heads: Size = 4
    """Heads of the attention between features."""
    layers: Layers = 4
    """Number of layers; documents read examples in every second one."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.token % self.heads:
            raise ValueError(f"token {self.token} is no multiple of heads {self.heads}; set it to one")
        return self


def _list_softmax(scores_BN: Tensor, offsets_Q1: Tensor) -> Tensor:
    """The softmax of scores over each list, [B, N]."""
    group_BN, n_lists = group_index(offsets_Q1).expand_as(scores_BN), len(offsets_Q1) - 1
    lowest_BQ = scores_BN.new_full((len(scores_BN), n_lists), -torch.inf)
    top_BQ = lowest_BQ.scatter_reduce(1, group_BN, scores_BN.detach(), "amax")
    exp_BN = (scores_BN - top_BQ.gather(1, group_BN)).exp()
    return exp_BN / torch.zeros_like(lowest_BQ).scatter_add(1, group_BN, exp_BN).gather(1, group_BN)


class _Documents(NamedTuple):
    """Functions of documents and their lists; for examples also grades, shares of gain, and 1 in judged lists."""

    functions_BNX: Tensor
    offsets_Q1: Tensor
    grades_BN: Tensor
    targets_BN: Tensor
    judged_BN: Tensor

    @staticmethod
    def from_functions(functions_BNFK: Tensor, offsets_Q1: Tensor, labels_BN: Tensor | None = None) -> "_Documents":
        functions_BNX = functions_BNFK.flatten(2).float()
        if labels_BN is None:
            nothing_BN = functions_BNX.new_zeros(functions_BNX.shape[:2])
            return _Documents(functions_BNX, offsets_Q1, nothing_BN, nothing_BN, nothing_BN)
        gains_BN = exponential_gain(labels_BN.clamp(max=_HIGHEST), waits=False).float()
        totals_BN = _list_means(gains_BN, offsets_Q1) * _lengths_N(offsets_Q1)
        grades_BN = labels_BN.float() / labels_BN.float().amax(1, keepdim=True).clamp(min=1)
        targets_BN = gains_BN / totals_BN.clamp(min=1e-6)
        return _Documents(functions_BNX, offsets_Q1, grades_BN, targets_BN, (totals_BN > 0).float())

    @property
    def root_lengths_N(self) -> Tensor:
        return _lengths_N(self.offsets_Q1).float().sqrt()


class _DocumentState(NamedTuple):
    """Documents in the network: embeddings and scores."""

    h_BND: Tensor
    scores_BN: Tensor


class _LayerMemory(NamedTuple):
    """What a layer keeps of examples: weights of the functions, and keys and values of documents if it reads them."""

    writes_BXd: Tensor
    keys_BMA: Tensor | None
    values_BMD: Tensor | None


class Reading(NamedTuple):
    """All that a network keeps of the examples of B problems; `rate_B1` is their mean grade."""

    scale: _Scale
    rate_B1: Tensor
    memories: tuple[_LayerMemory, ...]


class _Layer(nn.Module):
    """Formulas (1) to (5)."""

    def __init__(self, sizes: InContextSizes, *, reads_documents: bool) -> None:
        super().__init__()
        token, state, shown = sizes.token, sizes.state, sizes.shown
        self.heads = sizes.heads
        self.norm_state = nn.LayerNorm(state)
        self.shown = nn.Linear(state, shown)
        self.read_examples = nn.Linear(2 * _FUNCTIONS * shown, token)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(token), nn.LayerNorm(token)
        self.queries_keys_values = nn.Linear(token, 3 * token)
        self.of_correlation_2H = nn.Parameter(0.5 * torch.randn(2, sizes.heads))
        self.correlated = nn.Linear(token, token)
        self.read_features = nn.Linear(2 * token, token)
        self.token_mlp = _mlp(token, 2 * token, token)
        self.write = nn.Linear(token, _FUNCTIONS * (state + 1))
        with torch.no_grad():
            self.write.weight.mul_(0.3)
            self.write.bias.zero_()
        self.written = nn.Linear(state, state)
        self.attention = _ExampleAttention(state) if reads_documents else None
        self.state_mlp = _mlp(2 * state + 5, 2 * state, state)
        self.score = nn.Linear(state, 1)

    def tokens(self, token_BFT: Tensor, state: _DocumentState, examples: _Documents, correlation_BFF: Tensor) -> Tensor:
        """Features read the examples and each other: formulas (1) and (2)."""
        n_features, n_examples = token_BFT.shape[1], state.h_BND.shape[1]
        shown_BMV = self.shown(self.norm_state(state.h_BND))
        shown_BMV = shown_BMV - shown_BMV.mean(1, keepdim=True)
        sums_BXV = examples.functions_BNX.transpose(1, 2) @ shown_BMV
        sums_BFx = sums_BXV.unflatten(1, (n_features, -1)).flatten(2)
        # noise grows with the root of the number of examples, the signal with the number
        both_BFx = torch.cat([sums_BFx * (0.5 / math.sqrt(n_examples)), sums_BFx * (4 / n_examples)], -1)
        token_BFT = token_BFT + self.read_examples(both_BFx)
        normal_BFT = self.norm_attention(token_BFT)
        q_BHFa, k_BHFa, v_BHFa = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(normal_BFT).chunk(3, -1)
        )
        signed_H11, absolute_H11 = self.of_correlation_2H[..., None, None]
        bias_BHFF = signed_H11 * correlation_BFF[:, None] + absolute_H11 * correlation_BFF[:, None].abs()
        read_BHFa = nn.functional.scaled_dot_product_attention(q_BHFa, k_BHFa, v_BHFa, attn_mask=bias_BHFF)
        correlated_BFT = correlation_BFF @ self.correlated(normal_BFT) / math.sqrt(n_features)
        token_BFT = token_BFT + self.read_features(
            torch.cat([read_BHFa.transpose(1, 2).flatten(2), correlated_BFT], -1)
        )
        changed_BFT: Tensor = self.token_mlp(self.norm_mlp(token_BFT))
        return token_BFT + changed_BFT

    def writes(self, token_BFT: Tensor) -> Tensor:
        """Weights [B, X, D + 1] of the features' functions, for a document's state and for its score."""
        n_problems, n_features, _ = token_BFT.shape
        writes_BFx: Tensor = self.write(token_BFT)
        return writes_BFx.reshape(n_problems, n_features * _FUNCTIONS, -1) / math.sqrt(n_features)

    def memory(self, state: _DocumentState, writes_BXd: Tensor) -> _LayerMemory:
        """What documents will read from the features and the examples."""
        if self.attention is None:
            return _LayerMemory(writes_BXd, None, None)
        normal_BMD = self.norm_state(state.h_BND)
        return _LayerMemory(writes_BXd, self.attention.key(normal_BMD), self.attention.value(normal_BMD))

    def documents(self, state: _DocumentState, documents: _Documents, writes_BXd: Tensor) -> _DocumentState:
        """Documents take what features write: formula (3)."""
        written_BNd = documents.functions_BNX @ writes_BXd
        return _DocumentState(state.h_BND + self.written(written_BNd[..., 1:]), state.scores_BN + written_BNd[..., 0])

    def examples(self, state: _DocumentState, memory: _LayerMemory, own_NM: Tensor | None) -> _DocumentState:
        """Documents read examples, if this layer does that: formula (4)."""
        if self.attention is None:
            return state
        assert memory.keys_BMA is not None
        assert memory.values_BMD is not None
        added_BND = self.attention(self.norm_state(state.h_BND), memory.keys_BMA, memory.values_BMD, own_NM)
        return state._replace(h_BND=state.h_BND + added_BND)

    def lists(self, state: _DocumentState, documents: _Documents) -> _DocumentState:
        """Documents look at their list: formula (5)."""
        (h_BND, scores_BN), offsets_Q1, root_N = state, documents.offsets_Q1, documents.root_lengths_N
        scores_BN = scores_BN - _list_means(scores_BN, offsets_Q1)
        share_BN = _list_softmax(scores_BN, offsets_Q1)
        missed_BN = (documents.targets_BN - share_BN) * documents.judged_BN
        values_BN5 = torch.stack(
            [scores_BN, share_BN * root_N, missed_BN * root_N, documents.grades_BN, documents.judged_BN], -1
        )
        normal_BND = self.norm_state(h_BND)
        h_BND = h_BND + self.state_mlp(torch.cat([normal_BND, _list_means(normal_BND, offsets_Q1), values_BN5], -1))
        return _DocumentState(h_BND, scores_BN + self.score(h_BND)[..., 0])


class _ExampleAttention(nn.Module):
    """Formula (4): documents read the states of examples."""

    def __init__(self, state: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(state, _KEYS), nn.Linear(state, _KEYS)
        self.value, self.out = nn.Linear(state, state), nn.Linear(state, state)

    def forward(self, normal_BND: Tensor, keys_BMA: Tensor, values_BMD: Tensor, own_NM: Tensor | None) -> Tensor:
        """The change of states; `own_NM` is True where an example is in the document's own list, None if none is."""
        logits_BNM = self.query(normal_BND) @ keys_BMA.transpose(1, 2) / math.sqrt(_KEYS)
        if own_NM is not None:
            logits_BNM = logits_BNM.masked_fill(own_NM, -1e9)  # finite, because a single list has no others to read
        shares_BNM = logits_BNM.softmax(-1)
        shares_BNM = shares_BNM if own_NM is None else shares_BNM.masked_fill(own_NM, 0)
        return self.out(shares_BNM @ values_BMD)


def _mlp(width: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out))


class InContextNetwork(nn.Module):
    """The network of this module's formulas; B problems at once, whose lists have the same lengths."""

    def __init__(self, sizes: InContextSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.first_token = nn.Linear(_FUNCTIONS + 3, sizes.token)
        self.first_state = nn.Linear(6, sizes.state)
        self.layers = nn.ModuleList(_Layer(sizes, reads_documents=i % 2 == 1) for i in range(sizes.layers))

    def read(self, x_BMF: Tensor, labels_BM: Tensor, offsets_Q1: Tensor) -> Reading:
        """Read labelled lists.

        Args:
            x_BMF: features, all finite.
            labels_BM: grades, at least one of them above 0; those above 4 count as 4 in gains.
            offsets_Q1: offsets of the lists in each problem.
        """
        scale = _Scale.from_examples(x_BMF, offsets_Q1)
        functions_BMFK = _functions_of(x_BMF, offsets_Q1, scale)
        examples = _Documents.from_functions(functions_BMFK, offsets_Q1, labels_BM)
        correlation_BFF = _rank_correlations(functions_BMFK).float()
        rate_B1, group_M = examples.grades_BN.mean(1, keepdim=True), group_index(offsets_Q1)
        own_MM = group_M[:, None] == group_M
        state, token_BFT = self._state(examples, rate_B1, is_example=True), self._token(functions_BMFK, rate_B1)
        memories = []
        for layer in self._layers():
            token_BFT = layer.tokens(token_BFT, state, examples, correlation_BFF)
            state = layer.documents(state, examples, writes_BXd := layer.writes(token_BFT))
            memories.append(layer.memory(state, writes_BXd))
            state = layer.lists(layer.examples(state, memories[-1], own_MM), examples)
        return Reading(scale, rate_B1, tuple(memories))

    def forward(self, reading: Reading, x_BNF: Tensor, offsets_Q1: Tensor) -> list[Tensor]:
        """Scores [B, N] of lists after each layer; the last ones rank, the others are for the loss."""
        documents = _Documents.from_functions(_functions_of(x_BNF, offsets_Q1, reading.scale), offsets_Q1)
        state, scores = self._state(documents, reading.rate_B1, is_example=False), []
        for layer, memory in zip(self._layers(), reading.memories, strict=True):
            state = layer.documents(state, documents, memory.writes_BXd)
            state = layer.lists(layer.examples(state, memory, None), documents)
            scores.append(state.scores_BN)
        return scores

    def _layers(self) -> Iterator[_Layer]:
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            yield layer

    def _token(self, functions_BMFK: Tensor, rate_B1: Tensor) -> Tensor:
        """The first tokens [B, F, T], from the distributions of features and the sizes of the problem."""
        _, n_examples, n_features, _ = functions_BMFK.shape
        std_BFK = functions_BMFK.square().mean(1).sqrt().float()
        n_examples_B1 = torch.full_like(rate_B1, math.log(n_examples) - 5)
        n_features_B1 = torch.full_like(rate_B1, math.log(n_features) - 3)
        known_BF3 = torch.cat([n_examples_B1, rate_B1, n_features_B1], 1)[:, None]
        return self.first_token(torch.cat([std_BFK, known_BF3.expand(-1, n_features, -1)], -1))

    def _state(self, documents: _Documents, rate_B1: Tensor, *, is_example: bool) -> _DocumentState:
        """The first states, from the labels of examples and the lengths of lists; scores are 0."""
        root_N, zeros_BN = documents.root_lengths_N, torch.zeros_like(documents.grades_BN)
        known = float(is_example)
        values_BN6 = torch.stack(
            [
                documents.grades_BN - rate_B1 * known,
                zeros_BN + known,
                documents.judged_BN,
                (documents.targets_BN - 1 / root_N.square()) * documents.judged_BN * root_N,
                zeros_BN + 2 * root_N.log() - 2.5,
                zeros_BN + rate_B1,
            ],
            -1,
        )
        return _DocumentState(self.first_state(values_BN6), zeros_BN)


def loss_of_layers(scores: Sequence[Tensor], labels_BN: Tensor, offsets_Q1: Tensor) -> Tensor:
    """The weighted sum of the layers' softmax cross entropies with shares of gain; later layers weigh more.

    The mean is over lists with a relevant document. Equal scores give the value 0.
    """
    offsets_R1 = repeated(offsets_Q1, len(labels_BN))
    documents = _Documents.from_functions(labels_BN.new_zeros(*labels_BN.shape, 0, 0), offsets_Q1, labels_BN)
    n_judged = (documents.judged_BN / _lengths_N(offsets_Q1)).sum().clamp(min=1)

    def loss(scores_BN: Tensor) -> Tensor:
        return softmax(scores_BN.flatten(), documents.targets_BN.flatten(), offsets_R1).sum() / n_judged

    even, weights = loss(torch.zeros_like(labels_BN)), [0.8 / 2 ** (len(scores) - i) for i in range(1, len(scores))]
    return torch.stack([w * (loss(s_BN) - even) for w, s_BN in zip([*weights, 1.0], scores, strict=True)]).sum()
