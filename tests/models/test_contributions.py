"""Contributions to the difference of two scores: a network's against slow integrals, swaps against all orders."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.config import validate
from ltrscale.models.contributions import along_path, by_swaps
from ltrscale.models.features import FeatureKind, fit_transform
from ltrscale.models.ranker import AnyRanker, Architecture, ConcatRanker, MeanRanker, Ranker

GROUPS = QueryGroups(torch.randn(12, 4, generator=torch.manual_seed(0)), torch.tensor([0, 5, 5, 12]))
PAIRS = torch.tensor([[0, 3], [11, 5], [5, 11]])
STEPS = 300


def made(seed: int = 0, *, kinds: tuple[FeatureKind, ...] = ("numeric",) * 4, **parts: object) -> Ranker:
    """A network with fresh weights, large enough to be far from linear."""
    encoder = {"kind": "mlp", "hidden": [9, 6], "activation": "elu", "dropout": 0.0}
    architecture = validate(
        Architecture,
        {"transform": {"numeric": "none"}, "encoder": encoder, "head": {"layers": 1}, **parts},
        "test",
    )
    features_NF = GROUPS.features_NF.clone()
    for column, kind in enumerate(kinds):
        if kind == "categorical":
            features_NF[:, column] = torch.arange(len(features_NF)) % 3
    transform = fit_transform([features_NF], list(kinds), architecture.transform, bins=architecture.numbers.fitted_bins)
    torch.manual_seed(seed)
    ranker = Ranker(architecture, transform)
    for parameter in ranker.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return ranker.eval()


def slow(ranker: AnyRanker, groups: QueryGroups, a: int, b: int) -> Tensor:
    """The integral of the docstring by the midpoint rule, for numbers that the transform leaves as they are.

    Each step has the groups once more, of which none sees another.
    """
    x_NF, n = groups.features_NF, groups.n_documents
    middle_F, half_F = (x_NF[a] + x_NF[b]) / 2, (x_NF[a] - x_NF[b]) / 2
    at_S1 = (torch.arange(STEPS)[:, None] + 0.5) / STEPS
    moved_SNF = x_NF.repeat(STEPS, 1, 1)
    moved_SNF[:, a], moved_SNF[:, b] = middle_F + at_S1 * half_F, middle_F - at_S1 * half_F
    moved_SNF.requires_grad_()
    starts_SQ = torch.arange(STEPS)[:, None] * n + groups.offsets_Q1[:-1]
    offsets = torch.cat([starts_SQ.flatten(), torch.tensor([STEPS * n])])
    scores_SN = ranker(QueryGroups(moved_SNF.flatten(0, 1), offsets)).view(STEPS, n)
    (slope_SNF,) = torch.autograd.grad((scores_SN[:, a] - scores_SN[:, b]).sum(), moved_SNF)
    return (half_F * (slope_SNF[:, a] - slope_SNF[:, b])).double().mean(0)


RANKERS: dict[str, AnyRanker] = {
    "pointwise": made(),
    "relu": made(encoder={"kind": "mlp", "hidden": [40, 20], "dropout": 0.0}),
    "context": made(context={"kind": "rankformer", "heads": 2, "feedforward": 8, "layers": 1, "dropout": 0.0}),
    "within lists": made(numbers={"kind": "plain", "within_lists": True}),
    "bins": made(numbers={"kind": "ple", "bins": 4}),
    "mean": MeanRanker([made(1), made(2)]).eval(),
    "concat": ConcatRanker([made(1), made(2)]).eval(),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranker", RANKERS.values(), ids=RANKERS)
def test_a_networks_parts_are_the_integral_along_the_joint_path_and_complete(ranker: AnyRanker) -> None:
    with torch.no_grad():
        scores_N = ranker(GROUPS).double()
    expected_PF = torch.stack([slow(ranker, GROUPS, a, b) for a, b in PAIRS.tolist()])
    found = along_path(ranker, GROUPS, PAIRS)
    sizes_P1 = expected_PF.abs().sum(1, keepdim=True)
    assert ((found.features_PF - expected_PF).abs() < 2e-2 * sizes_P1).all()
    difference_P = scores_N[PAIRS[:, 0]] - scores_N[PAIRS[:, 1]]
    torch.testing.assert_close(found.total_P, difference_P, rtol=1e-5, atol=1e-5)
    assert (found.beside_P.abs() < 1e-5).all()
    torch.testing.assert_close(found.features_PF[1], -found.features_PF[2], rtol=1e-4, atol=1e-5)


def test_categories_and_missing_values_move_behind_the_transform() -> None:
    ranker = made(kinds=("numeric", "categorical", "numeric", "categorical"), transform={"numeric": "standard"})
    x_NF = torch.tensor([[torch.nan, 0.0, 3.0, 1.0], [0.4, 2.0, 3.0, 77.0], [1.0, 1.0, 1.0, 1.0]])
    groups, pair = QueryGroups(x_NF, torch.tensor([0, 3])), torch.tensor([[0, 1]])
    found = along_path(ranker, groups, pair)
    # the inputs of the layers behind the embeddings, moved along the line by hand
    with torch.no_grad():
        inputs_ND = ranker.encoder.features(ranker.transform(x_NF))  # type: ignore[operator]
    parts_D, step_D = torch.zeros(inputs_ND.shape[1]), inputs_ND[0] - inputs_ND[1]
    for step in range(STEPS):
        moved_D = (inputs_ND[1] + (step + 0.5) / STEPS * step_D).requires_grad_()
        score = ranker.head(ranker.encoder.layers(moved_D[None]))  # type: ignore[operator]
        parts_D += torch.autograd.grad(score.sum(), moved_D)[0] * step_D / STEPS
    numbers_2, embedded_CE = parts_D[:2], parts_D[2:].view(2, -1)
    expected_F = torch.stack([numbers_2[0], embedded_CE[0].sum(), numbers_2[1], embedded_CE[1].sum()])
    torch.testing.assert_close(found.features_PF[0].float(), expected_F, rtol=5e-3, atol=1e-3)
    assert found.features_PF[0, 2] == 0  # both have 3
    assert found.features_PF[0, [0, 1, 3]].abs().min() > 1e-3


def test_what_features_do_not_explain_stands_beside_them() -> None:
    context = {"kind": "setrank", "width": 8, "heads": 2, "blocks": 1, "initial_rank": "positions", "ranks": 12}
    ranker = made(context=context)
    positions_N = torch.cat([torch.arange(1.0, 6), torch.arange(1.0, 8)])
    alike = GROUPS.features_NF.clone()
    alike[3] = alike[0]
    groups = QueryGroups(alike, GROUPS.offsets_Q1, positions_N=positions_N)
    with torch.no_grad():
        scores_N = ranker(groups).double()
    found = along_path(ranker, groups, PAIRS)
    assert found.features_PF[0].abs().max() == 0
    assert found.beside_P[0].item() == pytest.approx((scores_N[0] - scores_N[3]).item(), abs=1e-5)
    torch.testing.assert_close(found.total_P, scores_N[PAIRS[:, 0]] - scores_N[PAIRS[:, 1]], rtol=1e-5, atol=1e-5)


def test_parts_do_not_depend_on_the_other_lists_of_a_batch() -> None:
    ranker = RANKERS["context"]
    alone = along_path(ranker, GROUPS.select(torch.tensor([2])), PAIRS[1:2] - 5)
    torch.testing.assert_close(alone.features_PF, along_path(ranker, GROUPS, PAIRS).features_PF[1:2])


def three_act_together(groups: QueryGroups) -> Tensor:
    """Scores with a product and a jump, which also depend on the list."""
    x_NF = groups.features_NF
    jump_N = torch.where(x_NF[:, 2].isnan(), 1.0, x_NF[:, 2] > 0)
    return x_NF[:, 0] * x_NF[:, 1] + 3 * jump_N + (x_NF[:, 0] > x_NF[:, 0].mean()).float()


def test_swaps_are_near_the_mean_over_all_orders_and_complete() -> None:
    x_NF = GROUPS.features_NF[:5].clone()
    x_NF[0, 2] = torch.nan
    x_NF[0, 3] = x_NF[3, 3]
    groups = QueryGroups(x_NF, torch.tensor([0, 5]))

    def difference(kept: set[int]) -> float:
        moved_NF = x_NF.clone()
        for j in {0, 1, 2, 3} - kept:
            moved_NF[0, j], moved_NF[3, j] = x_NF[3, j], x_NF[0, j]
        scores_N = three_act_together(QueryGroups(moved_NF, groups.offsets_Q1))
        return float(scores_N[0] - scores_N[3])

    expected, orders = [0.0] * 4, list(permutations(range(4)))
    for order in orders:
        for place, j in enumerate(order):
            before = set(order[:place])
            expected[j] += (difference(before | {j}) - difference(before)) / 2 / len(orders)
    found = by_swaps(three_act_together, groups, torch.tensor([[0, 3]]))
    assert found.features_PF[0].tolist() == pytest.approx(expected, abs=0.3)
    assert found.features_PF[0, 3] == 0
    assert found.total_P.item() == pytest.approx(difference({0, 1, 2, 3}), abs=1e-6)
