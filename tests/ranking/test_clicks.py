"""Click weights, propensities and dual learning losses: plain loops, laws, simulated clicks; and random negatives."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import propensity as reference
from token_batches import lists_of, text_groups
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.errors import InputError
from ltrscale.ranking.clicks import (
    PropensityModel,
    _position_index,
    dla_propensity_loss,
    dla_ranking_loss,
    with_negatives,
)
from ltrscale.ranking.metrics import ndcg

POSITIONS = 8
EXAMINATION = 1 / torch.arange(1.0, POSITIONS + 1)
"""True chances of examination, by position."""
RELEVANCE = torch.tensor([0.0, 1.5, -1.0, 0.5])
"""Weights of the features in the logarithm of the chance that an examined document is clicked."""


def test_logits_are_looked_up_by_position() -> None:
    model = PropensityModel(4)
    with torch.no_grad():
        model.later.copy_(torch.tensor([-0.5, -1.0, -2.0]))
    positions_N = torch.tensor([3.0, 1.0, torch.nan, 4.0, 5.0, 100.0, 2.0])
    assert model(positions_N).tolist() == [-1.0, 0.0, 0.0, -2.0, -2.0, -2.0, -0.5]
    assert model(torch.zeros(0)).shape == (0,)


def test_the_first_position_and_documents_not_shown_are_fixed() -> None:
    model = PropensityModel(3)
    model(torch.tensor([1.0, torch.nan, 3.0, 7.0])).sum().backward()
    assert model.later.grad is not None
    assert model.later.grad.tolist() == [0.0, 2.0]


def test_positions_that_do_not_count_from_one_are_refused() -> None:
    with pytest.raises(InputError, match="count from 1"):
        PropensityModel(3)(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="at least 2"):
        PropensityModel(1)


@dataclass(frozen=True)
class Clicks:
    """Lists of POSITIONS documents in the order shown, and their clicks."""

    features_NF: Tensor
    relevance_N: Tensor
    positions_N: Tensor
    clicks_N: Tensor
    offsets_Q1: Tensor


def simulate(lists: int, seed: int) -> Clicks:
    """Position-based clicks on lists that a poor ranker ordered by an informative and an uninformative feature."""
    generator = torch.Generator().manual_seed(seed)
    features_QLF = torch.rand(lists, POSITIONS, 4, generator=generator)
    noise_QL = torch.rand(lists, POSITIONS, generator=generator)
    order_QL = (features_QLF[..., :2].sum(-1) + noise_QL).argsort(1, descending=True)
    features_NF = features_QLF.gather(1, order_QL[..., None].expand(-1, -1, 4)).flatten(0, 1)
    relevance_N = (features_NF @ RELEVANCE - RELEVANCE.clamp(min=0).sum()).exp()
    chance_N = relevance_N * EXAMINATION.repeat(lists)
    clicks_N = (torch.rand(len(chance_N), generator=generator) < chance_N).float()
    positions_N = torch.arange(1.0, POSITIONS + 1).repeat(lists)
    return Clicks(features_NF, relevance_N, positions_N, clicks_N, to_offsets(torch.full((lists,), POSITIONS)))


def train(data: Clicks, *, debias: bool) -> tuple[nn.Linear, PropensityModel]:
    """Train a linear ranker on all lists at once; without debiasing, the propensity model keeps its initial values."""
    ranker, model = nn.Linear(4, 1, bias=False), PropensityModel(POSITIONS)
    nn.init.zeros_(ranker.weight)
    optimizer = torch.optim.Adam([*ranker.parameters(), *(model.parameters() if debias else [])], lr=0.1)
    for _ in range(100):
        scores_N, logits_N = ranker(data.features_NF).squeeze(-1), model(data.positions_N)
        losses = partial(dla_ranking_loss, scores_N, data.clicks_N, data.offsets_Q1, clip=50)
        loss_Q = losses(examination_logits_N=logits_N)
        if debias:
            loss_Q = loss_Q + dla_propensity_loss(
                logits_N,
                data.clicks_N,
                data.offsets_Q1,
                positions_N=data.positions_N,
                scores_N=scores_N,
                clip=50,
            )
        optimizer.zero_grad()
        loss_Q.mean().backward()
        optimizer.step()
    return ranker, model


@pytest.mark.nightly
def test_dual_learning_recovers_the_propensities_and_ranks_better_than_raw_clicks() -> None:
    data, test = simulate(20_000, seed=0), simulate(2000, seed=1)

    def quality(ranker: nn.Linear) -> float:
        scores_N = ranker(test.features_NF).detach().squeeze(-1)
        return float(ndcg(scores_N, test.relevance_N, test.offsets_Q1, k=5).mean())

    debiased, model = train(data, debias=True)
    naive, _ = train(data, debias=False)
    ratios_P = data.clicks_N.view(-1, POSITIONS).mean(0)
    assert float((ratios_P[-1] / ratios_P[0] / EXAMINATION[-1]).log()) < -0.6  # clicks fall with the relevance too
    # some 400 clicks at the last position are a deviation of 5%; over six seeds no error was above 19%
    assert float((model(torch.arange(1.0, POSITIONS + 1)).detach().exp() / EXAMINATION).log().abs().max()) < 0.2
    assert quality(debiased) > 0.995
    assert quality(naive) < 0.97
    torch.testing.assert_close(debiased.weight.detach()[0], RELEVANCE, rtol=0, atol=0.1)
    assert (naive.weight.detach()[0, :2] > RELEVANCE[:2] + 1).all()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(lengths: list[int]) -> QueryGroups:
    """Groups whose documents have their number as their feature."""
    groups = text_groups(lengths)
    features_NF = torch.arange(float(groups.n_documents))[:, None]
    return QueryGroups(features_NF, *[getattr(groups, name) for name in groups.__slots__[1:]])


def test_negatives_follow_the_documents_of_their_group_and_come_from_others() -> None:
    groups = numbered([5, 1, 6, 4])
    more = with_negatives(groups, 3, generator()).checked()
    assert more.lengths_Q.tolist() == [8, 4, 9, 7]
    assert more.labels_N is not None
    assert more.weights_N is not None
    assert more.positions_N is not None
    titles, all_titles = lists_of(more.document_tokens["title"]), lists_of(groups.document_tokens["title"])
    for q in range(4):
        first, last = groups.offsets_Q1[[q, q + 1]].tolist()
        begin, end = more.offsets_Q1[[q, q + 1]].tolist()
        rows = more.features_NF[begin:end, 0].long().tolist()
        assert rows[:-3] == list(range(first, last))
        assert not set(rows[-3:]) & set(range(first, last))
        assert titles[begin:end] == [all_titles[row] for row in rows]
        for values_N, mine in ((groups.labels_N, more.labels_N), (groups.weights_N, more.weights_N)):
            assert values_N is not None
            assert torch.equal(mine[begin : end - 3], values_N[first:last])
        assert more.labels_N[end - 3 : end].tolist() == [0, 0, 0]
        assert more.weights_N[end - 3 : end].tolist() == [1, 1, 1]
        assert more.positions_N[end - 3 : end].isnan().all()
    assert more.query_tokens == groups.query_tokens
    assert torch.equal(more.ids_Q, groups.ids_Q)  # type: ignore[arg-type]


def test_draws_are_uniform_over_the_documents_of_other_groups() -> None:
    groups = numbered([2, 3, 1])
    drawn = torch.zeros(3, 6)
    for seed in range(40):
        more = with_negatives(groups, 100, generator(seed))
        for q in range(3):
            rows = more.features_NF[more.offsets_Q1[q + 1] - 100 : more.offsets_Q1[q + 1], 0].long()
            drawn[q] += torch.bincount(rows, minlength=6)
    for q, (first, last) in enumerate([(0, 2), (2, 5), (5, 6)]):
        others = [n for n in range(6) if not first <= n < last]
        assert drawn[q, first:last].sum() == 0
        expected = 4000 / len(others)
        assert (drawn[q, others] - expected).abs().max() < 5 * expected**0.5


def test_a_group_alone_in_its_batch_stays_as_it_is() -> None:
    groups = numbered([4])
    assert with_negatives(groups, 5, generator()).features_NF.tolist() == groups.features_NF.tolist()


def test_a_batch_without_optional_columns_and_an_empty_group_go_through() -> None:
    groups = QueryGroups(torch.arange(3.0)[:, None], torch.tensor([0, 0, 3]), torch.ones(3))
    more = with_negatives(groups, 2, generator()).checked()
    assert more.lengths_Q.tolist() == [2, 3]
    assert more.weights_N is None
    assert more.positions_N is None


CLIP = 5.0
Loss = Callable[..., Tensor]


def random_lists(seed: int, lengths: list[int]) -> dict[str, Tensor]:
    """Scores, examination logits, clicks, and positions out of order; some documents were not shown."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    positions_N = torch.cat([1 + torch.randperm(k, generator=generator) for k in lengths]).double()
    positions_N[torch.rand(n, generator=generator) < 0.15] = torch.nan
    return {
        "scores_N": torch.randn(n, generator=generator, dtype=torch.float64),
        "examination_logits_N": -2 * torch.rand(n, generator=generator, dtype=torch.float64),
        "clicks_N": (torch.rand(n, generator=generator) < 0.4).double(),
        "positions_N": positions_N,
        "offsets_Q1": to_offsets(torch.tensor(lengths)),
    }


def ranking(batch: dict[str, Tensor], clip: float = CLIP) -> Tensor:
    return dla_ranking_loss(
        batch["scores_N"],
        batch["clicks_N"],
        batch["offsets_Q1"],
        examination_logits_N=batch["examination_logits_N"],
        clip=clip,
    )


def propensity(batch: dict[str, Tensor], clip: float = CLIP) -> Tensor:
    return dla_propensity_loss(
        batch["examination_logits_N"],
        batch["clicks_N"],
        batch["offsets_Q1"],
        positions_N=batch["positions_N"],
        scores_N=batch["scores_N"],
        clip=clip,
    )


LEARNS = {"ranking": (ranking, "scores_N"), "propensity": (propensity, "examination_logits_N")}
both = pytest.mark.parametrize(("loss", "learned"), LEARNS.values(), ids=LEARNS)


def value_and_gradient(loss: Loss, learned: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of each group, and the gradient of a sum that weighs every group differently."""
    logits_N = batch[learned].detach().requires_grad_()
    loss_Q = loss(batch | {learned: logits_N})
    weights_Q = torch.arange(1.0, len(loss_Q) + 1, dtype=loss_Q.dtype)
    return loss_Q.detach(), torch.autograd.grad((weights_Q * loss_Q).sum(), logits_N)[0]


def rows(batch: dict[str, Tensor], rows_N: Tensor, offsets_Q1: Tensor) -> dict[str, Tensor]:
    picked = {name: values[rows_N] for name, values in batch.items() if name != "offsets_Q1"}
    return picked | {"offsets_Q1": offsets_Q1}


@pytest.mark.slow
@given(st.integers(0, 10**6), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.sampled_from([1.0, 1.5, 1e4]))
def test_values_and_gradients_are_those_of_the_plain_loop(seed: int, lengths: list[int], clip: float) -> None:
    batch = random_lists(seed, lengths)
    for loss, learned in ((ranking, "scores_N"), (propensity, "examination_logits_N")):
        value_Q, grad_N = value_and_gradient(lambda b, loss=loss: loss(b, clip), learned, batch)
        logits_N = batch[learned].detach().requires_grad_()
        expected = []
        for a, b in pairwise(batch["offsets_Q1"].tolist()):
            clicks = batch["clicks_N"][a:b].tolist()
            examination, scores = (batch[name][a:b].tolist() for name in ("examination_logits_N", "scores_N"))
            if learned == "scores_N":
                expected.append(reference.dla_ranking_loss(logits_N[a:b], clicks, examination, clip))
            else:
                positions = batch["positions_N"][a:b].tolist()
                expected.append(reference.dla_propensity_loss(logits_N[a:b], clicks, positions, scores, clip))
        expected_Q = torch.stack(expected)
        torch.testing.assert_close(value_Q, expected_Q.detach(), rtol=1e-10, atol=1e-10)
        weights_Q = torch.arange(1.0, len(lengths) + 1, dtype=torch.float64)
        expected_N = torch.autograd.grad((weights_Q * expected_Q).sum(), logits_N)[0]
        torch.testing.assert_close(grad_N, expected_N, rtol=1e-10, atol=1e-10)


@both
def test_neither_the_order_of_the_documents_nor_other_groups_matter(loss: Loss, learned: str) -> None:
    batch = random_lists(0, [7, 0, 1, 12])
    loss_Q, grad_N = value_and_gradient(loss, learned, batch)
    generator = torch.Generator().manual_seed(1)
    bounds = list(pairwise(batch["offsets_Q1"].tolist()))
    order_N = torch.cat([a + torch.randperm(b - a, generator=generator) for a, b in bounds])
    moved_Q, moved_N = value_and_gradient(loss, learned, rows(batch, order_N, batch["offsets_Q1"]))
    torch.testing.assert_close(moved_Q, loss_Q)
    torch.testing.assert_close(moved_N, grad_N[order_N])
    for q, (a, b) in enumerate(bounds):
        own_Q, own_N = value_and_gradient(loss, learned, rows(batch, torch.arange(a, b), torch.tensor([0, b - a])))
        torch.testing.assert_close(own_Q, loss_Q[q : q + 1])
        torch.testing.assert_close((q + 1) * own_N, grad_N[a:b])


@both
def test_a_shift_of_the_scores_changes_nothing_and_pushes_cancel(loss: Loss, learned: str) -> None:
    batch = random_lists(2, [9, 5])
    value_Q, grad_N = value_and_gradient(loss, learned, batch)
    shift_N = torch.tensor([3.0, -70.0], dtype=torch.float64).repeat_interleave(batch["offsets_Q1"].diff())
    moved_Q, moved_N = value_and_gradient(loss, learned, batch | {"scores_N": batch["scores_N"] + shift_N})
    torch.testing.assert_close(moved_Q, value_Q)
    torch.testing.assert_close(moved_N, grad_N)
    for a, b in pairwise(batch["offsets_Q1"].tolist()):
        assert abs(float(grad_N[a:b].sum())) < 1e-12


def test_a_shift_of_the_examination_logits_changes_no_propensity_loss() -> None:
    batch = random_lists(3, [9, 5])
    moved = batch | {"examination_logits_N": batch["examination_logits_N"] - 4}
    torch.testing.assert_close(propensity(moved), propensity(batch))


@both
def test_gradcheck(loss: Loss, learned: str) -> None:
    batch = random_lists(4, [6, 1, 0, 9])
    logits_N = batch[learned].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(batch | {learned: x}), logits_N)


@both
def test_each_loss_gives_no_gradient_to_the_other_model(loss: Loss, learned: str) -> None:
    batch = random_lists(5, [6, 4])
    other = "examination_logits_N" if learned == "scores_N" else "scores_N"
    batch[learned].requires_grad_()
    batch[other].requires_grad_()
    loss(batch).sum().backward()
    assert batch[learned].grad is not None
    assert batch[other].grad is None


@both
@pytest.mark.parametrize("clicks", ["none", "all"])
@pytest.mark.parametrize("spread", [0.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_stay_finite(
    loss: Loss, learned: str, clicks: str, spread: float, dtype: torch.dtype
) -> None:
    batch = random_lists(6, [5, 0, 1, 8])
    spread = min(spread, torch.finfo(dtype).max / 10)
    for name in ("scores_N", "examination_logits_N"):
        batch[name] = (spread * batch[name].sign()).to(dtype)
    batch["clicks_N"] = torch.full_like(batch["clicks_N"], float(clicks == "all"))
    loss_Q, grad_N = value_and_gradient(loss, learned, batch)
    assert loss_Q.dtype == torch.float32
    assert grad_N.dtype == dtype
    assert loss_Q.isfinite().all()
    assert grad_N.isfinite().all()
    if clicks == "none":
        assert not loss_Q.any()
        assert not grad_N.any()
    assert loss_Q[1] == loss_Q[2] == 0  # no document, one document


@both
def test_an_empty_batch_gives_no_values(loss: Loss, learned: str) -> None:
    batch = random_lists(0, [0])
    assert loss(batch).tolist() == [0.0]
    assert loss(batch | {"offsets_Q1": torch.tensor([0])}).shape == (0,)
    assert batch[learned].shape == (0,)


def test_without_a_bias_both_losses_are_the_softmax_loss_of_the_clicks() -> None:
    batch = random_lists(7, [6, 6])
    batch["positions_N"] = torch.arange(1.0, 7).repeat(2).double()
    batch["examination_logits_N"].zero_()
    clicks_QL = batch["clicks_N"].view(2, 6)
    plain_Q = -(clicks_QL * batch["scores_N"].view(2, 6).log_softmax(1)).sum(1)
    torch.testing.assert_close(ranking(batch), plain_Q)
    batch["scores_N"].fill_(3.0)
    torch.testing.assert_close(propensity(batch), clicks_QL.sum(1) * math.log(6))


def test_documents_not_shown_take_no_part_in_the_propensities() -> None:
    batch = random_lists(8, [6])
    batch["positions_N"] = torch.tensor([2.0, 1, torch.nan, 3, torch.nan, 4]).double()
    shown_N = torch.tensor([0, 1, 3, 5])
    torch.testing.assert_close(propensity(batch), propensity(rows(batch, shown_N, torch.tensor([0, 4]))))
    batch["positions_N"].fill_(torch.nan)
    loss_Q, grad_N = value_and_gradient(propensity, "examination_logits_N", batch)
    assert not loss_Q.any()
    assert not grad_N.any()


def test_documents_that_share_the_first_position_count_by_their_mean_score() -> None:
    logits_N, scores_N = torch.zeros(3, dtype=torch.float64), torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64)
    positions_N, clicks_N = torch.tensor([4.0, 4.0, 5.0]), torch.tensor([0.0, 0.0, 1.0])
    loss_Q = dla_propensity_loss(
        logits_N, clicks_N, torch.tensor([0, 3]), positions_N=positions_N, scores_N=scores_N, clip=100
    )
    assert float(loss_Q) == pytest.approx(math.exp(2) * math.log(3))


def test_positions_beyond_the_table_take_the_last_and_none_below_one_is_taken() -> None:
    assert _position_index(torch.tensor([1.0, 4.0, 5.0, 1e9, torch.nan]), 4).tolist() == [0, 3, 3, 3, 0]
    assert _position_index(torch.zeros(0), 4).tolist() == []
    for position in (0.0, -3.0):
        with pytest.raises(InputError, match=f"positions: {position} is below 1; count from 1"):
            _position_index(torch.tensor([2.0, position, torch.nan]), 4)


@pytest.mark.parametrize("clip", [0.5, math.inf, math.nan])
def test_a_clip_below_one_or_without_bound_is_refused(clip: float) -> None:
    batch = random_lists(0, [3])
    with pytest.raises(ValueError, match="clip must be from 1 on and finite"):
        ranking(batch, clip)
    with pytest.raises(ValueError, match="clip must be from 1 on and finite"):
        propensity(batch, clip)
