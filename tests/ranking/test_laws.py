"""Every loss that a config may name keeps the laws of `ranking.laws`; new members of the union are included."""

import pytest
import torch
from config_variations import keys_without_effect
from ranking.laws import LAWS, Case, Oracle, applying, assert_same, random_lists, value_and_gradient
from reference import losses as reference
from torch import Tensor

from ltrscale.arrays import HIGHEST_LABEL
from ltrscale.config import kind_of, members
from ltrscale.ranking.loss import Loss, SigmoidConfig, SquaredErrorConfig
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.ranking.losses import (
    ApproxNDCGConfig,
    AttentionAllocationConfig,
    GumbelApproxNDCGConfig,
    ListMLEConfig,
    ListNetConfig,
    SoftmaxConfig,
)
from ltrscale.ranking.pairwise import HingeConfig, LambdaRankConfig, RankNetConfig, SoftmaxNegativesConfig
from ltrscale.ranking.sorting import GumbelNeuralSortNDCGConfig, NeuralSortNDCGConfig, PiRankConfig


def lambdarank(**settings: object) -> Case:
    config = LambdaRankConfig.model_validate(settings)
    # its factors depend on the scores smoothly and are constants to its gradient; the plain loop has the same
    left_out = ("gradcheck",) if config.normalise == "lightgbm" else ()
    return Case(config, lambda s, y, _: reference.lambdarank(s, y, **config.model_dump(exclude={"kind"})), left_out)


def ranknet(sigma: float) -> Case:
    return Case(RankNetConfig(sigma=sigma), lambda s, y, _: reference.ranknet(s, y, sigma))


def all_negatives(threshold: float) -> Case:
    config = SoftmaxNegativesConfig(negatives=500, threshold=threshold)
    # with so many negatives it looks at all pairs at once
    return Case(config, lambda s, y, w: reference.softmax_negatives(s, y, w, threshold), left_out=(SQUARE,))


def approximate(temperature: float) -> Oracle:
    return lambda s, y, _: reference.approx_ndcg(s, y, temperature)


ORDER = "the_order_of_documents_does_not_matter_even_with_ties"
SQUARE = "no_temporary_grows_with_the_square_of_lengths"  # of relaxed sorts: in test_sorting, with their own bound
KNOWN = {
    "sigmoid": Case(SigmoidConfig(), reference.sigmoid_cross_entropy),
    "sigmoid of 0 to 4": Case(
        SigmoidConfig(highest_label=4), lambda s, y, w: reference.sigmoid_cross_entropy(s, y, w, 4.0)
    ),
    "squared_error": Case(SquaredErrorConfig(), reference.squared_error, steep=True),
    "squared_error, standardised": Case(
        SquaredErrorConfig(standardise=True),
        lambda s, y, w: reference.squared_error(s, y, w, standardise=True),
        steep=True,
    ),
    "ranknet": ranknet(1.0),
    "ranknet sigma .5": ranknet(0.5),
    "hinge": Case(HingeConfig(), lambda s, y, _: reference.hinge(s, y)),
    "lambdarank": lambdarank(),
    "lambdarank sigma 2 truncation 2": lambdarank(sigma=2.0, truncation=2),
    "lambdarank truncation 5": lambdarank(truncation=5),
    "lambdarank lightgbm": lambdarank(normalise="lightgbm"),
    "lambdarank lightgbm sigma 2 truncation 3": lambdarank(normalise="lightgbm", sigma=2.0, truncation=3),
    "softmax": Case(SoftmaxConfig(), reference.softmax, tolerance=1e-8),
    "softmax_negatives": all_negatives(1.0),
    "softmax_negatives threshold 2": all_negatives(2.0),
    "attention_allocation": Case(AttentionAllocationConfig(), reference.attention_allocation, tolerance=1e-8),
    "list_net": Case(ListNetConfig(), lambda s, y, _: reference.list_net(s, y), tolerance=1e-8),
    "list_net T .5, standardised": Case(
        ListNetConfig(temperature=0.5, standardise=True),
        lambda s, y, _: reference.list_net(s, y, 0.5, standardise=True),
        tolerance=1e-8,
    ),
    "list_mle": Case(ListMLEConfig(), lambda s, y, _: reference.list_mle(s, y), tolerance=1e-8),
    "approx_ndcg T .1": Case(ApproxNDCGConfig(), approximate(0.1)),
    "approx_ndcg T 2": Case(ApproxNDCGConfig(temperature=2.0), approximate(2.0)),
    "gumbel_approx_ndcg without noise": Case(
        GumbelApproxNDCGConfig(temperature=0.5, samples=3, scale=0.0), approximate(0.5)
    ),
    # against the plain loop: in test_sorting
    "neural_sort_ndcg k 3": Case(NeuralSortNDCGConfig(k=3), left_out=(SQUARE,)),
    "gumbel_neural_sort_ndcg without noise": Case(GumbelNeuralSortNDCGConfig(samples=1, scale=0.0), left_out=(SQUARE,)),
    "pirank k 3 depth 2": Case(PiRankConfig(k=3, depth=2), left_out=(SQUARE, ORDER)),
}
UNION = members(LossConfig)
SEEN = {case.config.kind for case in KNOWN.values()}
CASES = KNOWN | {kind_of(cls): Case(cls()) for cls in UNION if kind_of(cls) not in SEEN}


@pytest.mark.slow
@pytest.mark.parametrize(("law", "name"), applying(CASES))
def test_law(law: str, name: str) -> None:
    LAWS[law](CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.config.weighted])
def test_no_weights_are_weights_of_one_and_all_terms_are_linear_in_them(name: str) -> None:
    case = CASES[name]
    *lists, weights_N = random_lists(0, [20, 3])
    plain = value_and_gradient(lambda *given: case.loss(*given[:3], None), *lists, weights_N)  # type: ignore[arg-type]
    assert_same(value_and_gradient(case.loss, *lists, torch.ones_like(weights_N)), plain, 1e-14)
    doubled = value_and_gradient(case.loss, *lists, torch.full_like(weights_N, 2.0))
    assert_same(doubled, (2 * plain[0], 2 * plain[1]), 1e-14)
    weighted_Q, _ = value_and_gradient(case.loss, *lists, weights_N)
    assert not torch.allclose(weighted_Q, plain[0])


@pytest.mark.slow
@pytest.mark.parametrize("cls", UNION, ids=kind_of)
def test_every_key_of_a_config_means_something(cls: type) -> None:
    """Another value of each key changes value or gradient, from at least one setting."""

    def trace(config: Loss) -> Tensor:
        *lists, weights_N = random_lists(3, [20, 5])
        lists[0] = (4 * lists[0]).round() / 4
        return torch.cat(value_and_gradient(Case(config).loss, *lists, weights_N))

    known = [cls(), *(case.config for case in CASES.values() if type(case.config) is cls)]
    assert keys_without_effect(known, trace) == set()


@pytest.mark.slow
@pytest.mark.parametrize("label", [1000.0, 1024.0])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_label_without_a_finite_gain_is_an_error_and_never_a_loss_that_is_no_number(case: Case, label: float) -> None:
    scores_N = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    lists = scores_N, torch.tensor([label, 1.0, 0.0]), torch.tensor([0, 3]), torch.ones(3)
    try:
        loss, refused = case.loss(*lists).sum(), False
    except ValueError:
        loss, refused = scores_N.sum(), True
    loss.backward()
    assert scores_N.grad is not None
    assert scores_N.grad.isfinite().all()
    assert not refused or label > HIGHEST_LABEL
