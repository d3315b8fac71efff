"""Click weights and dual learning losses: against plain loops, and the laws they keep."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import propensity as reference
from torch import Tensor

from ltrscale.batch import to_offsets
from ltrscale.errors import InputError
from ltrscale.ranking.clicks import (
    dla_propensity_loss,
    dla_ranking_loss,
    position_index,
)

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


@settings(deadline=None, max_examples=60)
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
    assert position_index(torch.tensor([1.0, 4.0, 5.0, 1e9, torch.nan]), 4).tolist() == [0, 3, 3, 3, 0]
    assert position_index(torch.zeros(0), 4).tolist() == []
    for position in (0.0, -3.0):
        with pytest.raises(InputError, match=f"positions: {position} is below 1; count from 1"):
            position_index(torch.tensor([2.0, position, torch.nan]), 4)


@pytest.mark.parametrize("clip", [0.5, math.inf, math.nan])
def test_a_clip_below_one_or_without_bound_is_refused(clip: float) -> None:
    batch = random_lists(0, [3])
    with pytest.raises(ValueError, match="clip must be from 1 on and finite"):
        ranking(batch, clip)
    with pytest.raises(ValueError, match="clip must be from 1 on and finite"):
        propensity(batch, clip)
