"""Pointwise and listwise losses: other libraries, and special properties of each; their laws are in test_laws."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranking.laws import random_lists
from reference import losses as reference
from torch import Tensor

from ltrscale.ranking.loss import sigmoid_cross_entropy, squared_error
from ltrscale.ranking.losses import (
    approx_ndcg,
    attention_allocation,
    list_mle,
    list_net,
    mean_under_noise,
    ordinal,
    softmax,
)
from ltrscale.ranking.metrics import ndcg
from ltrscale.ranking.sorting import pirank


def test_the_best_score_of_the_sigmoid_loss_is_the_logit_of_the_share_of_the_highest_label() -> None:
    shares_N = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    scores_N = shares_N.logit().requires_grad_()
    loss_Q = sigmoid_cross_entropy(scores_N, 4 * shares_N, torch.tensor([0, 3]), highest_label=4.0)
    assert torch.autograd.grad(loss_Q.sum(), scores_N)[0].abs().max() < 1e-15


def test_standardised_targets_have_no_zero_and_no_scale() -> None:
    """A shift and a scale of a teacher's scores do not change the loss; equal scores become 0."""
    scores_N, labels_N, offsets_Q1, _ = random_lists(1, [30, 7, 1, 4])
    labels_N[-4:] = 0.1  # a mean of these is not 0.1 exactly
    group_N = torch.arange(4).repeat_interleave(offsets_Q1.diff())
    other_N = labels_N * torch.tensor([0.01, 3, 5, 7])[group_N] - torch.tensor([5.0, 0, 1, 2])[group_N]
    both = [squared_error(scores_N, y_N, offsets_Q1, standardise=True) for y_N in (labels_N, other_N)]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(both[0][2:], torch.stack([scores_N[37] ** 2, scores_N[38:].square().sum()]))


def test_attention_allocation_gives_irrelevant_documents_no_attention() -> None:
    labels_N = torch.tensor([1.0] + [0.0] * 99)  # a plain softmax of them would give the relevant one 2.7 %
    scores_N = torch.zeros(100).requires_grad_()
    loss_Q = attention_allocation(scores_N, labels_N, torch.tensor([0, 100]))
    gradient_N = torch.autograd.grad(loss_Q.sum(), scores_N)[0]
    torch.testing.assert_close(gradient_N, 0.01 - labels_N)
    below_Q = attention_allocation(scores_N, labels_N * 2 - 1, torch.tensor([0, 100]))  # labels below 0 are none too
    assert torch.equal(below_Q, loss_Q)
    assert attention_allocation(scores_N, labels_N - 2, torch.tensor([0, 100])).tolist() == [0.0]


def test_approx_ndcg_tends_to_the_metric_as_the_temperature_falls() -> None:
    scores_N, labels_N, offsets_Q1, _ = random_lists(2, [40, 5, 1])
    labels_N[-1] = 1
    exact_Q = 1 - ndcg(scores_N, labels_N, offsets_Q1, k=40)
    gaps = [
        (approx_ndcg(scores_N, labels_N, offsets_Q1, temperature=t) - exact_Q).abs().max().item()
        for t in (1.0, 1e-2, 1e-5)
    ]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-10


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_gumbel_noise_ranks_as_plackett_and_luce_say(scale: float) -> None:
    """The loss of the first of three documents, if each rank is drawn by the softmax of the documents left."""
    gaps = [-2.0, -1.0, 0.0, 1.0, 2.0]
    scores_N = torch.tensor([score for gap in gaps for score in (gap, 0.0, -1.0)], dtype=torch.float64)
    labels_N, offsets_Q1 = torch.tensor([1.0, 0.0, 0.0]).repeat(5), torch.arange(0, 16, 3)
    draw = torch.Generator().manual_seed(0)
    loss = partial(approx_ndcg, temperature=1e-6)
    loss_Q = mean_under_noise(loss, scores_N, labels_N, offsets_Q1, generator=draw, samples=20_000, scale=scale)
    chance_Q3 = (scores_N.view(5, 3) / scale).softmax(1)
    mine_Q, others_Q2 = chance_Q3[:, 0], chance_Q3[:, 1:]
    second_Q = (others_Q2 * mine_Q[:, None] / (1 - others_Q2)).sum(1)
    expected_Q = 1 - mine_Q - second_Q / math.log2(3) - (1 - mine_Q - second_Q) / 2
    torch.testing.assert_close(loss_Q, expected_Q, rtol=0, atol=0.007)  # five standard deviations


def test_gumbel_draws_depend_on_the_generator_alone_and_give_a_true_gradient() -> None:
    scores_N, labels_N, offsets_Q1, _ = random_lists(3, [6, 1, 0, 9])

    def loss(scores_N: Tensor, seed: int = 0) -> Tensor:
        draw, noisy = torch.Generator().manual_seed(seed), partial(approx_ndcg, temperature=0.5)
        return mean_under_noise(noisy, scores_N, labels_N, offsets_Q1, generator=draw, samples=3, scale=1.0)

    assert torch.equal(loss(scores_N), loss(scores_N))
    assert not torch.equal(loss(scores_N), loss(scores_N, 1))
    assert torch.autograd.gradcheck(loss, scores_N.requires_grad_())


@pytest.mark.parametrize("loss", [approx_ndcg, pirank])
def test_gumbel_noise_is_finite_where_a_draw_is_zero(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "exponential_", lambda self, **_: self.zero_())
    labels_N, offsets_Q1 = torch.tensor([1.0, 0.0]), torch.tensor([0, 2])
    noisy = partial(loss, temperature=0.1)
    loss_Q = mean_under_noise(
        noisy, torch.zeros(2), labels_N, offsets_Q1, generator=torch.Generator(), samples=8, scale=1.0
    )
    assert loss_Q.isfinite().all()


def test_ordinal_is_that_of_the_plain_loop() -> None:
    generator = torch.Generator().manual_seed(4)
    logits_QC = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    logits_QC[5] *= 1e6
    logits_QC.requires_grad_()
    grades_Q = torch.tensor([0.0, 1.0, 2.5, 4.0, 9.0, 2.0])
    expected_Q = torch.stack(
        [reference.ordinal(row, grade) for row, grade in zip(logits_QC, grades_Q.tolist(), strict=True)]
    )
    ours_Q = ordinal(logits_QC, grades_Q)
    torch.testing.assert_close(ours_Q, expected_Q, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(loss_Q.sum(), logits_QC)[0] for loss_Q in (ours_Q, expected_Q)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert ordinal(logits_QC.half().clamp(-1, 1), grades_Q).dtype == torch.float32
    assert ordinal(torch.zeros(0, 4), torch.zeros(0)).shape == (0,)


def test_ordinal_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\[3, 4\] and grades \[2\]"):
        ordinal(torch.zeros(3, 4), torch.zeros(2))


@pytest.mark.parametrize("loss", [approx_ndcg, list_net])
def test_a_temperature_must_be_positive(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="temperature"):
        loss(torch.zeros(1), torch.zeros(1), torch.tensor([0, 1]), temperature=0.0)


def test_no_samples_are_refused() -> None:
    one = torch.zeros(1), torch.zeros(1), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="samples must be at least 1, not 0"):
        mean_under_noise(approx_ndcg, *one, generator=torch.Generator(), samples=0, scale=1.0)


# What of rax has the same definition, and the options that make it so. Ours sum over a list and leave labels as they
# are; rax clips those of its sigmoid loss to [0, 1].
RAX: dict[str, tuple[Callable[..., Tensor], Callable[[Any, Any], Any]]] = {
    "sigmoid, labels 0 and 1": (
        lambda s, y, offsets: sigmoid_cross_entropy(s, (y > 1).double(), offsets),
        lambda rax, jax: lambda s, y: rax.pointwise_sigmoid_loss(s, 1.0 * (y > 1), reduce_fn=jax.numpy.sum),
    ),
    "softmax": (softmax, lambda rax, _: rax.softmax_loss),
    "attention allocation": (
        attention_allocation,
        lambda rax, jax: (
            lambda s, y: rax.softmax_loss(s, (e := jax.numpy.where(y > 0, jax.numpy.exp(y), 0.0)) / e.sum())
        ),
    ),
    "list_net": (
        lambda s, y, offsets: list_net(s, y, offsets, temperature=0.7),
        lambda rax, jax: lambda s, y: rax.softmax_loss(s, jax.nn.softmax(y / 0.7)),
    ),
    "list_mle without ties": (
        lambda s, _, offsets: list_mle(s, s.flip(0).detach(), offsets),
        lambda rax, jax: lambda s, _: rax.listmle_loss(s, jax.lax.stop_gradient(s[::-1])),
    ),
    "list_mle, ties not competing": (list_mle, lambda rax, _: partial(rax.unique_softmax_loss, gain_fn=None)),
    "approx_ndcg": (
        lambda s, y, offsets: approx_ndcg(s, y, offsets, temperature=0.3) - 1,  # the negative NDCG
        lambda rax, jax: (
            lambda s, y: (
                -rax.ndcg_metric(
                    s, y, rank_fn=partial(rax.utils.approx_ranks, step_fn=lambda gap: jax.nn.sigmoid(gap / 0.3))
                )
            )
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RAX)
def test_rax_agrees(name: str) -> None:
    rax, jax = pytest.importorskip("rax"), pytest.importorskip("jax")
    ours, theirs = RAX[name]
    scores_N, labels_N, offsets_Q1, _ = random_lists(5, [12])
    scores_N.requires_grad_()
    loss_Q = ours(scores_N, labels_N, offsets_Q1)
    grad_N = torch.autograd.grad(loss_Q.sum(), scores_N)[0]
    with jax.enable_x64(True):
        both = jax.jit(jax.value_and_grad(theirs(rax, jax)))
        loss, gradient = both(jax.numpy.asarray(scores_N.detach().numpy()), jax.numpy.asarray(labels_N.numpy()))
        assert loss_Q.tolist() == [pytest.approx(float(loss), rel=1e-9)]
        expected_N = torch.tensor(gradient.tolist(), dtype=torch.float64)
    torch.testing.assert_close(grad_N, expected_N, rtol=1e-9, atol=1e-12)
