"""The laws of ranking losses, each a function of a case: a loss's config and its known special properties."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise as neighbours
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ltrscale.batch import sum_by_group, to_offsets
from ltrscale.ranking import loss as engine
from ltrscale.ranking import losses, sorting
from ltrscale.ranking.loss import Loss as RankingLoss
from ltrscale.ranking.loss import Scored

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Scores, labels, offsets and document weights (which a loss may ignore) -> one value per group."""


Oracle = Callable[[Tensor, list[float], list[float]], Tensor]
"""Scores [L], labels and weights of one list -> its loss, by a plain loop."""
NOTHING_RELEVANT, ALL_EQUAL, ALL_BELOW_TWO = (0.0,) * 4, (3.0,) * 4, (0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Case:
    """A loss's config under every law; a loss without special properties needs only the config."""

    config: RankingLoss
    oracle: Oracle | None = None
    left_out: tuple[str, ...] = ()
    """Laws that do not hold for it, by name."""
    steep: bool = False
    """The gradient grows with the scores."""
    tolerance: float = 1e-10
    """Against the plain loop; a sum of exponentials of scores near 1e6 is known to 1e-10 in float64."""

    def loss(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, weights_N: Tensor) -> Tensor:
        """The loss with the same draws each time, and with weights if the loss takes them."""
        draw = torch.Generator().manual_seed(0)
        return self.config.losses(
            Scored(scores_N, labels_N, offsets_Q1, weights_N if self.config.weighted else None, draw)
        )

    def counts(self, labels: Sequence[float]) -> bool:
        return bool(self.config.counted(torch.tensor(labels), torch.tensor([0, len(labels)])))

    @property
    def is_pointwise(self) -> bool:
        """Whether lists without an order count: then scores matter, not only their differences."""
        return self.counts(NOTHING_RELEVANT)


def random_lists(seed: int, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Float64 scores without ties, labels 0 to 4, offsets and weights."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    scores_N, noise_N = torch.randn(2, n, generator=generator, dtype=torch.float64)
    labels_N = torch.randint(0, 5, (n,), generator=generator).double()
    return scores_N, labels_N, to_offsets(torch.tensor(lengths)), noise_N.exp()


def value_and_gradient(
    loss: Loss, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, weights_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each group, and the gradient of a sum that weighs every group differently."""
    scores_N = scores_N.detach().requires_grad_()
    loss_Q = loss(scores_N, labels_N, offsets_Q1, weights_N)
    total = (torch.arange(1.0, len(loss_Q) + 1, dtype=loss_Q.dtype) * loss_Q).sum()
    return loss_Q.detach(), torch.autograd.grad(total, scores_N)[0]


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-10) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


document = st.tuples(st.sampled_from([-30.0, -0.5, 0.0, 0.3, 2.0, 1e6]), st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]))
batch = st.lists(st.lists(document, max_size=7), min_size=1, max_size=4)


def value_and_gradient_are_those_of_the_plain_loop(case: Case) -> None:
    @settings(database=None)
    @given(batch)
    def check(groups: list[list[tuple[float, float]]]) -> None:
        documents = torch.tensor([d for group in groups for d in group], dtype=torch.float64).reshape(-1, 2)
        scores_N, labels_N = documents.T.contiguous()
        weights_N = 0.5 + torch.arange(len(scores_N), dtype=torch.float64) % 3
        offsets_Q1 = to_offsets(torch.tensor([len(group) for group in groups]))
        ours = value_and_gradient(case.loss, scores_N, labels_N, offsets_Q1, weights_N)

        def oracle(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, weights_N: Tensor) -> Tensor:
            assert case.oracle is not None
            bounds = neighbours(offsets_Q1.tolist())
            return torch.stack(
                [case.oracle(scores_N[a:b], labels_N[a:b].tolist(), weights_N[a:b].tolist()) for a, b in bounds]
            )

        assert_same(ours, value_and_gradient(oracle, scores_N, labels_N, offsets_Q1, weights_N), case.tolerance)

    check()


def neither_the_batch_nor_the_size_of_blocks_matters(case: Case) -> None:
    scores_N, labels_N, offsets_Q1, weights_N = random_lists(0, [5, 0, 1, 60, 13, 60, 2])
    alone = [
        value_and_gradient(case.loss, scores_N[a:b], labels_N[a:b], torch.tensor([0, b - a]), weights_N[a:b])
        for a, b in neighbours(offsets_Q1.tolist())
    ]
    expected = torch.cat([loss for loss, _ in alone]), torch.cat([(q + 1) * grad for q, (_, grad) in enumerate(alone)])
    for size in (1, 100, 5000):
        with blocks_of(size):
            assert_same(value_and_gradient(case.loss, scores_N, labels_N, offsets_Q1, weights_N), expected)


def the_order_of_documents_does_not_matter_even_with_ties(case: Case) -> None:
    scores_N, labels_N, offsets_Q1, weights_N = random_lists(1, [50, 30])
    scores_N = (2 * scores_N).round()
    generator = torch.Generator().manual_seed(2)
    shuffled_N = torch.cat([torch.randperm(50, generator=generator), 50 + torch.randperm(30, generator=generator)])
    loss_Q, grad_N = value_and_gradient(case.loss, scores_N, labels_N, offsets_Q1, weights_N)
    moved = value_and_gradient(case.loss, scores_N[shuffled_N], labels_N[shuffled_N], offsets_Q1, weights_N[shuffled_N])
    assert_same(moved, (loss_Q, grad_N[shuffled_N]))


def a_shift_changes_nothing_and_pushes_cancel(case: Case) -> None:
    scores_N, labels_N, offsets_Q1, weights_N = random_lists(2, [20, 50])
    shift_N = torch.tensor([12.0, -7.0], dtype=torch.float64).repeat_interleave(offsets_Q1.diff())
    still = value_and_gradient(case.loss, scores_N, labels_N, offsets_Q1, weights_N)
    moved = value_and_gradient(case.loss, scores_N + shift_N, labels_N, offsets_Q1, weights_N)
    pushes_Q = sum_by_group(still[1], offsets_Q1)
    if not case.is_pointwise:
        assert_same(moved, still)
        torch.testing.assert_close(pushes_Q, torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-10)
    else:
        assert (moved[0] != still[0]).all()
        assert (pushes_Q.abs() > 1e-6).all()


def gradcheck(case: Case) -> None:
    scores_N, labels_N, offsets_Q1, weights_N = random_lists(3, [6, 1, 0, 9])
    scores_N.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: case.loss(s, labels_N, offsets_Q1, weights_N), scores_N)


def nothing_to_rank_is_loss_and_gradient_zero(case: Case) -> None:
    """An excluded list has loss and gradient 0; a counted one has a loss in one order or the other."""
    for labels in (NOTHING_RELEVANT, ALL_EQUAL, ALL_BELOW_TWO, (0.0, 2.0, 1.0)):
        n = len(labels)
        labels_N = torch.tensor(labels, dtype=torch.float64).repeat(2)
        scores_N = torch.linspace(-3, 5, 2 * n, dtype=torch.float64)
        offsets_Q1 = torch.tensor([0, n, n, 2 * n])
        loss_Q, grad_N = value_and_gradient(case.loss, scores_N, labels_N, offsets_Q1, torch.full_like(scores_N, 2.0))
        assert loss_Q[1] == 0
        if not case.counts(labels):
            assert loss_Q.tolist() == [0.0] * 3
            assert grad_N.tolist() == [0.0] * 2 * n
        elif len(set(labels)) > 1:
            assert (loss_Q + case.loss(-scores_N, labels_N, offsets_Q1, torch.ones_like(scores_N)))[[0, 2]].all()


def extreme_inputs_stay_finite(case: Case) -> None:
    _, labels_N, offsets_Q1, weights_N = random_lists(4, [40, 0, 1, 7])
    scores_N = random_lists(5, [48])[0]
    by_label_N = labels_N - 2
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        largest = 1e6 if dtype != torch.float16 else 100.0 if case.steep else 6e4
        for scale in (largest, 1.0, 1e-6, 0.0):
            for raw_N in (scores_N, by_label_N / 2, -by_label_N / 2):
                for grades_N in (labels_N, 0 * labels_N, 0 * labels_N + 3):
                    given_N = (raw_N.clamp(-1, 1) * scale).to(dtype)
                    loss_Q, grad_N = value_and_gradient(
                        case.loss, given_N, grades_N.float(), offsets_Q1, weights_N.float()
                    )
                    assert loss_Q.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                    assert grad_N.dtype == dtype
                    assert loss_Q.isfinite().all()
                    assert grad_N.isfinite().all()


def an_empty_batch_gives_no_values(case: Case) -> None:
    loss_Q, grad_N = value_and_gradient(case.loss, torch.zeros(0), torch.zeros(0), torch.tensor([0]), torch.zeros(0))
    assert loss_Q.shape == grad_N.shape == (0,)


def the_value_is_the_same_without_a_gradient(case: Case) -> None:
    lists = random_lists(6, [30, 10])
    assert torch.equal(case.loss(*lists), value_and_gradient(case.loss, *lists)[0])


def a_score_that_is_no_number_makes_the_loss_of_its_list_none(case: Case) -> None:
    scores_N, labels_N, offsets_Q1, weights_N = random_lists(6, [30, 10])
    labels_N[:2] = torch.tensor([1.0, 0.0])
    scores_N[:2] = torch.nan
    loss_Q = case.loss(scores_N, labels_N, offsets_Q1, weights_N)
    assert loss_Q[0].isnan()
    assert loss_Q[1].isfinite()


def labels_may_be_integers_and_float32_is_close_to_float64(case: Case) -> None:
    scores_N, labels_N, offsets_Q1, weights_N = random_lists(7, [300, 20])
    scores_N = scores_N.float()  # the same ranks in both
    exact_Q, exact_N = value_and_gradient(case.loss, scores_N.double(), labels_N, offsets_Q1, weights_N)
    loss_Q, grad_N = value_and_gradient(case.loss, scores_N, labels_N.long(), offsets_Q1, weights_N.float())
    torch.testing.assert_close(loss_Q.double(), exact_Q, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_N.double(), exact_N, rtol=1e-3, atol=1e-5 * exact_N.abs().max().item())


def no_temporary_grows_with_the_square_of_lengths(case: Case) -> None:
    lists = random_lists(8, [100] * 20 + [400])  # 360,000 pairs, and 8,400 slots if all were padded to the longest
    with blocks_of(5000), LargestTensor() as largest:
        value_and_gradient(case.loss, *lists)
    assert largest.numel <= 3 * len(lists[0])


LAWS: dict[str, Callable[[Case], None]] = {
    law.__name__: law
    for law in (
        value_and_gradient_are_those_of_the_plain_loop,
        neither_the_batch_nor_the_size_of_blocks_matters,
        the_order_of_documents_does_not_matter_even_with_ties,
        a_shift_changes_nothing_and_pushes_cancel,
        gradcheck,
        nothing_to_rank_is_loss_and_gradient_zero,
        extreme_inputs_stay_finite,
        an_empty_batch_gives_no_values,
        the_value_is_the_same_without_a_gradient,
        a_score_that_is_no_number_makes_the_loss_of_its_list_none,
        labels_may_be_integers_and_float32_is_close_to_float64,
        no_temporary_grows_with_the_square_of_lengths,
    )
}


def applying(cases: Mapping[str, Case]) -> list[tuple[str, str]]:
    """The names of laws, and of the cases that they apply to."""
    return [(law, name) for law in LAWS for name, case in cases.items() if law not in _left_out(case)]


def _left_out(case: Case) -> set[str]:
    no_oracle = {value_and_gradient_are_those_of_the_plain_loop.__name__} if case.oracle is None else set()
    return {*case.left_out, *no_oracle}


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Within the context, losses handle at most this many pairs or slots at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "PAIRS_PER_BLOCK", size)
        patch.setattr(losses, "SORTED_PER_CHUNK", size)
        patch.setattr(sorting, "CHOICES_PER_BLOCK", size)
        yield


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements in a tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, Tensor):
                self.numel = max(self.numel, part.untyped_storage().nbytes() // part.element_size())
        return result
