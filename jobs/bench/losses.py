"""Ranking losses with gradients against padding to the longest list, and LambdaRank against LightGBM's.

Every loss that a config may name is measured; a loss without a padded form is measured alone.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, L the longest list, K the first ranks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.measure import LABEL_SHARES, Row, costs, mslr_offsets, same_draws
from ltrscale.config import by_kind
from ltrscale.processor import Timings, cpu_seconds
from ltrscale.ranking import pairwise
from ltrscale.ranking.loss import Loss as RankingLoss
from ltrscale.ranking.loss import Scored
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.ranking.metrics import rank_discounts

GROUPS = 64
TEMPERATURE = 1.0

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Scores, labels and offsets to one value per group; the padded form takes the mask instead of the offsets."""


class _Peer(NamedTuple):
    """The padded torch form of a loss, and the settings for its config.

    The cost of a `linear` loss grows with the number of documents in both forms.
    """

    padded: Loss
    linear: bool = False
    k: int | None = None


SETTINGS = {"temperature": TEMPERATURE, "samples": 2}
"""For the losses that have these keys."""


def bench_losses() -> Iterator[Row]:
    """Time of every loss and memory of those with a padded form, then the speed of LambdaRank."""
    for kind in by_kind(LossConfig):
        yield from measure(kind)
    yield from _against_lightgbm()


def measure(kind: str, groups: int = GROUPS) -> Iterator[Row]:
    """Time and, against a padded form if there is one, peak memory of one loss."""
    peer = PEERS.get(kind)
    yield _time(kind, peer, groups)
    if peer is not None:
        many = 16 * groups if peer.linear else groups  # of what takes a few bytes a document
        works = [(padded, size) for size in (4, many) for padded in (False, True)]
        *_, ours, padded = (each.memory for each in costs(partial(_work_by_kind, kind), *works))
        name = f"{kind}, forward and backward: peak memory, ragged / padded to the longest list"
        note = "growth of peak resident memory; of the padded form beyond ours, in the same process"
        yield Row.memory(name, ours, padded, goal=1.0 if peer.linear else 0.5, note=note)


def _config(kind: str) -> RankingLoss:
    cls = by_kind(LossConfig)[kind]
    settings = {key: value for key, value in SETTINGS.items() if key in cls.model_fields}
    cut = {"k": PEERS[kind].k} if kind in PEERS and PEERS[kind].k else {}
    config: RankingLoss = cls.model_validate(settings | cut)
    return config


def _ragged(kind: str) -> Loss:
    config = _config(kind)
    return lambda scores_N, labels_N, offsets_Q1: config.losses(
        Scored(scores_N, labels_N, offsets_Q1, None, same_draws())
    )


def _time(kind: str, peer: _Peer | None, groups: int) -> Row:
    lists = _lists(groups)
    n, name = len(lists[0]), f"{kind}, forward and backward:"
    note = f"{groups} groups of web search lengths, the longest {int(lists[2].diff().max())}"
    ragged = _work(_ragged(kind), *lists)
    if peer is None:
        (seconds,) = cpu_seconds(ragged)
        rate = f"{n / seconds / 1e6:.2f} M docs/CPU-s"
        return Row(f"{name} time, ragged", None, rate, note=f"{note}; no padded form to compare with")
    if "samples" not in type(_config(kind)).model_fields:  # the two forms draw different noise
        _assert_same(kind, peer)
    # one run of a padded form with all pairs takes seconds
    seconds, padded_s = cpu_seconds(ragged, _work(_padded(kind, peer), *lists), repeats=7 if peer.linear else 1)
    name += " speed, ragged / padded to the longest list"
    return Row.speed(name, n, seconds, padded_s, goal=None if peer.linear else 2.0, note=note)


def _against_lightgbm() -> Iterator[Row]:
    """LightGBM's objective: a boosting round of LambdaRank minus one of squared error, which grow the same stump."""
    scores_N, labels_N, offsets_Q1 = _lists(GROUPS)
    n = len(scores_N)
    for pairs, truncation in (("pairs with the first 30 ranks, its default", 30), ("all pairs", n)):
        loss = partial(pairwise.lambdarank, truncation=truncation, normalise="lightgbm")
        lambdarank = _booster("lambdarank", scores_N, labels_N, offsets_Q1, lambdarank_truncation_level=truncation)
        squared = _booster("regression", scores_N, labels_N, offsets_Q1)
        work = _work(loss, scores_N, labels_N, offsets_Q1)
        seconds, round_seconds, other_seconds = cpu_seconds(work, lambdarank.update, squared.update, repeats=15)
        peer_seconds = Timings([a - b for a, b in zip(round_seconds.rounds, other_seconds.rounds, strict=True)])
        yield Row.speed(
            f"LambdaRank, {pairs}: documents per CPU second, ours / LightGBM's objective",
            n,
            seconds,
            peer_seconds,
            note="the same gradient, ours with the loss, LightGBM's with second derivatives",
        )


def _booster(objective: str, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, **parameters: int) -> Any:
    """A booster whose scores hardly change from these, so every round does the same work."""
    import lightgbm  # takes seconds, which the processes that measure memory spare

    stump = {"num_leaves": 2, "max_bin": 3, "min_data_in_leaf": 1, "learning_rate": 1e-9}
    settings = {"objective": objective, "num_threads": 1, "verbosity": -1, **stump, **parameters}
    feature_N1 = np.random.default_rng(0).normal(size=(len(scores_N), 1))
    lengths_Q, init_N = offsets_Q1.diff().numpy(), scores_N.detach().numpy()
    data = lightgbm.Dataset(feature_N1, labels_N.numpy(), group=lengths_Q, init_score=init_N, params=settings)
    return lightgbm.Booster(settings, data)


def _lists(groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random scores, labels with the frequencies of web search, and offsets."""
    generator = same_draws()
    offsets_Q1 = mslr_offsets(groups)
    n = int(offsets_Q1[-1])
    labels_N = torch.tensor(LABEL_SHARES).multinomial(n, replacement=True, generator=generator).float()
    return torch.randn(n, generator=generator).requires_grad_(), labels_N, offsets_Q1


def _work(loss: Loss, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Callable[[], None]:
    def work() -> None:
        torch.autograd.grad(loss(scores_N, labels_N, offsets_Q1).sum(), scores_N)

    return work


def _work_by_kind(kind: str, form: tuple[bool, int]) -> None:
    padded, groups = form
    _work(_padded(kind, PEERS[kind]) if padded else _ragged(kind), *_lists(groups))()


def _assert_same(kind: str, peer: _Peer) -> None:
    lists = _lists(4)
    loss_Q, expected_Q = _ragged(kind)(*lists), _padded(kind, peer)(*lists)
    assert torch.allclose(loss_Q, expected_Q, rtol=1e-4, atol=1e-4)
    grad_N, expected_N = (torch.autograd.grad(value_Q.sum(), lists[0])[0] for value_Q in (loss_Q, expected_Q))
    assert torch.allclose(grad_N, expected_N, rtol=1e-3, atol=1e-4)


def _padded(kind: str, peer: _Peer) -> Loss:
    """The padded loss of a ragged batch; if the loss has `samples`, the mean over noisy copies of the scores."""
    noisy_copies = _config(kind).model_dump().get("samples")

    def loss(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        lengths_Q, generator = offsets_Q1.diff(), same_draws()
        mask_QL = torch.arange(int(lengths_Q.max())) < lengths_Q[:, None]

        def pad(values_N: Tensor) -> Tensor:
            return values_N.new_zeros(mask_QL.shape).masked_scatter(mask_QL, values_N)

        def noisy() -> Tensor:
            return scores_N - torch.empty_like(scores_N).exponential_(generator=generator).log()

        if noisy_copies is None:
            return peer.padded(pad(scores_N), pad(labels_N), mask_QL)
        samples = [peer.padded(pad(noisy()), pad(labels_N), mask_QL) for _ in range(noisy_copies)]
        return torch.stack(samples).mean(0)

    return loss


def _beats(labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    """Whether document i has a higher label than document j, shape [Q, L, L]."""
    return (labels_QL[:, :, None] > labels_QL[:, None]) & mask_QL[:, :, None] & mask_QL[:, None]


def _margins(scores_QL: Tensor) -> Tensor:
    return scores_QL[:, :, None] - scores_QL[:, None]


def _gains(labels_QL: Tensor, k: int | None = None) -> Tensor:
    """Gains divided by the ideal DCG@k; padding has label 0 and therefore gain 0."""
    gains_QL = torch.exp2(labels_QL) - 1
    best_QK = gains_QL.sort(descending=True).values[:, :k]
    return gains_QL / (best_QK @ rank_discounts(best_QK.shape[1]).float()).clamp(min=1e-9)[:, None]


def _lambdarank(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    order_QL = scores_QL.masked_fill(~mask_QL, -torch.inf).argsort(descending=True)
    discounts_QL = rank_discounts(scores_QL.shape[1]).float()[order_QL.argsort()]
    weights_QLL = _margins(_gains(labels_QL)).abs() * _margins(discounts_QL).abs()
    terms_QLL = weights_QLL * -F.logsigmoid(_margins(scores_QL))
    return torch.where(_beats(labels_QL, mask_QL), terms_QLL, 0.0).sum((1, 2))


def _ranknet(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    return torch.where(_beats(labels_QL, mask_QL), -F.logsigmoid(_margins(scores_QL)), 0.0).sum((1, 2))


def _hinge(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    beats_QLL = _beats(labels_QL, mask_QL)
    penalties_QLL = torch.where(beats_QLL, F.relu(1 - _margins(scores_QL)), 0.0)
    return penalties_QLL.sum((1, 2)) / beats_QLL.sum((1, 2)).clamp(min=1)


def _approx_ndcg(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    above_QLL = torch.sigmoid(-_margins(scores_QL) / TEMPERATURE) * mask_QL[:, None]
    ranks_QL = 0.5 + above_QLL.sum(2)
    return 1 - (_gains(labels_QL) / torch.log2(1 + ranks_QL)).sum(1)


def _neural_sort_ndcg(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor, k: int | None = None) -> Tensor:
    distances_QL = (_margins(scores_QL).abs() * mask_QL[:, None]).sum(2)
    lengths_Q1, ranks_K = mask_QL.sum(1, keepdim=True), torch.arange(1, mask_QL.shape[1] + 1)[:k]
    logits_QKL = (lengths_Q1 + 1 - 2 * ranks_K)[..., None] * scores_QL[:, None] - distances_QL[:, None]
    chosen_QKL = (logits_QKL / TEMPERATURE).masked_fill(~mask_QL[:, None], -torch.inf).softmax(-1)
    gains_QK = (chosen_QKL @ _gains(labels_QL, k)[..., None])[..., 0] * (ranks_K <= lengths_Q1)
    return 1 - gains_QK @ rank_discounts(len(ranks_K)).float()


def _squared_error(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    return ((scores_QL - labels_QL).square() * mask_QL).sum(1)


def _sigmoid(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    return ((-F.logsigmoid(-scores_QL) - scores_QL * labels_QL) * mask_QL).sum(1)


def _softmax(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    log_chance_QL = scores_QL.masked_fill(~mask_QL, -1e9).log_softmax(1)
    return -(labels_QL * log_chance_QL).sum(1)


def _attention_allocation(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    graded_QL = labels_QL.masked_fill(~mask_QL | (labels_QL <= 0), -torch.inf)
    return _softmax(scores_QL, graded_QL.softmax(1).nan_to_num(0.0), mask_QL)


def _list_mle(scores_QL: Tensor, labels_QL: Tensor, mask_QL: Tensor) -> Tensor:
    labels_QL, order_QL = labels_QL.masked_fill(~mask_QL, torch.inf).sort()
    scores_QL = scores_QL.gather(1, order_QL)
    lower_QL = torch.searchsorted(labels_QL, labels_QL)
    lower_scores_QL = scores_QL.logcumsumexp(1).gather(1, (lower_QL - 1).clamp(min=0))
    return torch.where(mask_QL & (lower_QL > 0), -F.logsigmoid(scores_QL - lower_scores_QL), 0.0).sum(1)


PEERS = {
    "lambdarank": _Peer(_lambdarank),
    "ranknet": _Peer(_ranknet),
    "hinge": _Peer(_hinge),
    "approx_ndcg": _Peer(_approx_ndcg),
    "gumbel_approx_ndcg": _Peer(_approx_ndcg),
    "neural_sort_ndcg": _Peer(_neural_sort_ndcg),
    "gumbel_neural_sort_ndcg": _Peer(_neural_sort_ndcg),
    "pirank": _Peer(partial(_neural_sort_ndcg, k=10), k=10),
    "sigmoid": _Peer(_sigmoid, linear=True),
    "squared_error": _Peer(_squared_error, linear=True),
    "softmax": _Peer(_softmax, linear=True),
    "attention_allocation": _Peer(_attention_allocation, linear=True),
    "list_mle": _Peer(_list_mle, linear=True),
}
"""Padded forms, by kind."""
