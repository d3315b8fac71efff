"""Each feature alone: laws of the order and of presence, and what is suspicious on logs that are known."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ltrscale.ranking.metrics import ndcg
from ltrscale.ranking.single_feature import CERTAIN, FEWEST, LIFT, SingleFeature, single_features

LISTS, LENGTH = 200, 8


def log_of(seed: int = 0) -> tuple[torch.Generator, Tensor, Tensor]:
    """Lists of 8 documents, one in eight relevant in the mean."""
    generator = torch.Generator().manual_seed(seed)
    labels_N = (torch.rand(LISTS * LENGTH, generator=generator) < 0.125).float()
    return generator, labels_N, torch.arange(0, LISTS * LENGTH + 1, LENGTH)


def single_feature(x_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, codes: bool = False) -> SingleFeature:
    (found,) = single_features(x_N[:, None], labels_N, offsets_Q1, names=["x"], categorical=[codes])
    return found


@pytest.mark.parametrize("change", [torch.exp, lambda x: -x, lambda x: x**3 - 5, lambda x: 2 - x.exp()])
def test_a_monotone_function_of_a_feature_changes_nothing(change: Callable[[Tensor], Tensor]) -> None:
    generator, labels_N, offsets_Q1 = log_of()
    x_N = (labels_N + torch.randn(len(labels_N), generator=generator)).round(decimals=1)
    x_N[::7] = torch.nan
    assert single_feature(x_N, labels_N, offsets_Q1).ndcg == single_feature(change(x_N), labels_N, offsets_Q1).ndcg


def test_the_order_is_that_of_the_metric_in_the_better_direction() -> None:
    generator, labels_N, offsets_Q1 = log_of()
    x_N = labels_N + torch.randn(len(labels_N), generator=generator)
    found = single_feature(-x_N, labels_N, offsets_Q1)
    assert found.ndcg == pytest.approx(float(ndcg(x_N, labels_N, offsets_Q1, k=5).nanmean()))
    assert found.random == pytest.approx(float(ndcg(torch.zeros_like(x_N), labels_N, offsets_Q1, k=5).nanmean()))
    assert found.random < found.ndcg < 1


def test_equal_values_say_nothing() -> None:
    _, labels_N, offsets_Q1 = log_of()
    found = single_feature(torch.full_like(labels_N, 3.0), labels_N, offsets_Q1)
    assert (found.lift, found.varies, found.there, found.suspicious) == (0, 0, None, False)
    of_list_N = torch.arange(LISTS).repeat_interleave(LENGTH).float()
    found = single_feature(of_list_N, labels_N, offsets_Q1)
    assert (found.lift, found.varies, found.names_query) == (0, 0, True)
    assert not single_feature((of_list_N / 100).floor(), labels_N, offsets_Q1).names_query, "a feature of many queries"
    assert not single_feature(of_list_N / 7, labels_N, offsets_Q1).names_query, "a measurement"


def test_a_label_in_disguise_ranks_whatever_its_form() -> None:
    generator, labels_N, offsets_Q1 = log_of()
    grades_N = labels_N * torch.randint(1, 4, labels_N.shape, generator=generator)
    codes_N = torch.tensor([70.0, 11.0, 93.0, 12.0])[grades_N.long()]
    for x_N, codes in ((grades_N, False), (1 / (1 + grades_N), False), (codes_N, True)):
        found = single_feature(x_N, grades_N, offsets_Q1, codes=codes)
        assert found.ndcg == pytest.approx(1)
        assert found.ranks


def test_codes_of_single_documents_do_not_leak_their_own_labels() -> None:
    _, labels_N, offsets_Q1 = log_of()
    found = single_feature(torch.arange(len(labels_N)).float(), labels_N, offsets_Q1, codes=True)
    assert abs(found.lift) < 0.01
    assert not found.suspicious


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_value_that_only_relevant_documents_have_is_suspicious_in_any_form(share: float) -> None:
    generator, labels_N, offsets_Q1 = log_of()
    marked_N = (labels_N > 0) & (torch.rand(labels_N.shape, generator=generator) < share)
    noise_N = torch.randn(len(labels_N), generator=generator)
    some_N = torch.rand(labels_N.shape, generator=generator) < 0.5
    nan_N = torch.full_like(noise_N, torch.nan)
    forms = {
        "known": torch.where(marked_N, noise_N, nan_N),
        "missing": torch.where(marked_N, nan_N, noise_N),
        "unusual": noise_N * marked_N,
    }
    for how, x_N in forms.items():
        found = single_feature(x_N, labels_N, offsets_Q1)
        assert found.marks, how
        assert found.there is not None
        assert (found.there.how, found.there.others) == (how, 0)
        assert found.there.relevant == pytest.approx(float(marked_N.sum() / labels_N.sum()))
        assert not single_feature(torch.where(some_N, noise_N, nan_N), labels_N, offsets_Q1).suspicious


def test_few_lists_and_few_marked_documents_say_nothing() -> None:
    _, labels_N, offsets_Q1 = log_of()
    few = FEWEST * LENGTH // 2
    found = single_feature(labels_N[:few], labels_N[:few], offsets_Q1[: FEWEST // 2 + 1])
    assert found.lift == 1
    assert found.lists < FEWEST
    assert not found.suspicious
    nothing = single_feature(labels_N, torch.zeros_like(labels_N), offsets_Q1)
    assert (nothing.lists, nothing.lift, nothing.suspicious) == (0, 0, False)


def test_the_bounds_are_those_of_a_lift_and_of_certainty() -> None:
    known = SingleFeature(name="x", k=5, ndcg=0.5 + LIFT / 2, random=0.5, lists=FEWEST, varies=1, there=None)
    assert known.suspicious
    assert not known.replace(ndcg=0.5 + LIFT / 2 - 1e-6).suspicious
    marks = single_feature(log_of()[1], *log_of()[1:]).there
    assert marks is not None
    assert known.replace(ndcg=0.6, there=marks.replace(certain=CERTAIN).model_dump()).suspicious
    assert not known.replace(ndcg=0.6, there=marks.replace(certain=CERTAIN - 1e-6).model_dump()).suspicious


def test_a_share_against_wilsons_interval_of_scipy() -> None:
    from scipy.stats import binomtest

    labels_N = torch.tensor([1.0] * 50 + [0.0] * 350)
    x_N = torch.zeros(400)
    x_N[5:60] = 1.0  # 45 relevant documents and 10 others
    there = single_feature(x_N, labels_N, torch.arange(0, 401, 8)).there
    assert there is not None
    low = binomtest(45, 55).proportion_ci(method="wilson").low
    assert there.certain == pytest.approx((low - 0.125) / 0.875, abs=1e-4)
    assert np.allclose((there.relevant, there.others), (45 / 50, 10 / 350))


def test_what_says_nothing_in_any_shape_is_like_chance() -> None:
    """A number of the item is, a quantity that is best in its middle, a category and an equal value are not."""
    generator, n = torch.Generator().manual_seed(0), 10 * LISTS * LENGTH
    labels_N, offsets_Q1 = (torch.rand(n, generator=generator) < 0.125).float(), torch.arange(0, n + 1, LENGTH)
    noise_N = torch.randn(n, generator=generator)
    middle_N = torch.where(labels_N > 0, 0.2 * noise_N, noise_N + noise_N.sign())
    of_list_N = torch.arange(10 * LISTS).repeat_interleave(LENGTH).float()
    number = single_feature(torch.randperm(n, generator=generator).float(), labels_N, offsets_Q1)
    assert number.like_chance
    assert not number.replace(lists=50).like_chance, "few lists say nothing of chance"
    middle = single_feature(middle_N, labels_N, offsets_Q1)
    assert middle.lift < 0.1 < middle.shaped - middle.random
    assert not middle.like_chance
    assert not single_feature(of_list_N, labels_N, offsets_Q1).like_chance
    assert not single_feature(labels_N + noise_N, labels_N, offsets_Q1).like_chance
    assert not single_feature(labels_N + 7.0, labels_N, offsets_Q1, codes=True).like_chance


def test_a_usual_value_is_stated_by_its_name_and_a_code_in_full() -> None:
    _, labels_N, offsets_Q1 = log_of()
    there = single_feature(torch.where(labels_N > 0, 5.0, 12_310_700.0), labels_N, offsets_Q1, codes=True).there
    assert there is not None
    assert there.stated.startswith("other than 12310700 for 100.0% of the relevant")
    assert there.replace(usual_name="Cedar").stated.startswith("other than Cedar for 100.0% of the relevant")
    assert there.replace(usual=0.25).stated.startswith("other than 0.25 for")
