"""The blend of rankers: weights against a slow search, the guard against luck, and the bundle with its members."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from ltrscale import bundle
from ltrscale.arrays import Bools, Doubles
from ltrscale.batch import standardise_by_group
from ltrscale.config import validate
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.experiments.methods.base import AnyMethod, SeedRun, check_methods
from ltrscale.experiments.methods.composed import BlendMethod
from ltrscale.experiments.methods.neural import NeuralMethod
from ltrscale.experiments.methods.trees import FeatureMethod, GBDTMethod
from ltrscale.experiments.refit import RefitJob
from ltrscale.ranking.choices import metric_named
from ltrscale.runtime.workers import ONE
from ltrscale.training.blend import BlendConfig, BlendJob, _greedy, _without_poor, choose
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob

WEEKS = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
GROUPS, LENGTH = 60, 5
FOLDS_Q = np.arange(GROUPS) % 5
EVERYTHING_Q = np.ones(GROUPS, np.bool_)


def experiment(noise: list[float], seed: int = 0) -> tuple[Callable[[Tensor], Doubles], Tensor]:
    """The judge of labels, and scores of members that see these through noise of their own."""
    rng, offsets_Q1 = np.random.default_rng(seed), torch.arange(0, GROUPS * LENGTH + 1, LENGTH)
    labels_N = torch.from_numpy(rng.integers(0, 3, size=GROUPS * LENGTH).astype(np.float32))
    labels_N[::LENGTH] = 1  # every group has a relevant document
    scores = [labels_N.double() + scale * torch.from_numpy(rng.normal(size=len(labels_N))) for scale in noise]
    return lambda s_N: metric_named("ndcg@5").of(s_N, labels_N, offsets_Q1).double().numpy(), torch.stack(scores)


def slow_search(scores_MN: Tensor, judge: Callable[[Tensor], Doubles], among_Q: Bools, rounds: int) -> Doubles:
    """Weights by trying all members in every round, until none helps."""
    taken: list[int] = []
    value = -1.0
    while len(taken) < rounds:
        values = [judge(scores_MN[[*taken, m]].sum(dim=0))[among_Q].mean() for m in range(len(scores_MN))]
        if max(values) <= value:
            break
        value = max(values)
        taken.append(values.index(value))
    return np.bincount(taken, minlength=len(scores_MN)) / len(taken)


@pytest.mark.parametrize("rounds", [1, 4, 25])
def test_greedy_weights_are_those_of_a_slow_search(rounds: int) -> None:
    judge, scores_MN = experiment([1.0, 1.2, 1.4, 9.0])
    weights_M = _greedy(scores_MN, judge, EVERYTHING_Q, rounds)
    np.testing.assert_allclose(weights_M, slow_search(scores_MN, judge, EVERYTHING_Q, rounds))
    value = judge(torch.from_numpy(weights_M) @ scores_MN).mean()
    assert (value > max(judge(scores_N).mean() for scores_N in scores_MN)) == (rounds > 1)


@pytest.mark.parametrize(("noise", "seed"), [([1.5, 1.5, 1.5, 9.0], 10), ([1.5, 1.5, 9.0], 2)])
def test_the_held_out_value_is_of_groups_that_chose_nothing(noise: list[float], seed: int) -> None:
    """By a greedy choice, and by equal weights without a poor member."""
    judge, scores_MN = experiment(noise, seed)
    chosen = choose(scores_MN, judge, FOLDS_Q, BlendConfig(rounds=6))
    assert 0 < chosen.weights_M[0] < 1, "not one member"
    is_greedy = len(set(chosen.weights_M) - {0.0}) > 1
    assert is_greedy == (seed == 10)
    values_Q = np.zeros(GROUPS)
    for fold in range(5):
        out_Q: Bools = np.asarray(fold == FOLDS_Q)
        weights_M = slow_search(scores_MN, judge, ~out_Q, 6) if is_greedy else _without_poor(scores_MN, judge, ~out_Q)
        values_Q[out_Q] = judge(torch.from_numpy(weights_M) @ scores_MN)[out_Q]
    assert chosen.held_out == pytest.approx(values_Q.mean())
    assert chosen.value == pytest.approx(judge(torch.from_numpy(chosen.weights_M) @ scores_MN).mean())
    assert chosen.held_out < chosen.value


def test_few_groups_call_no_member_poor() -> None:
    """Five groups know the spread of a difference so badly that 2.5 of its standard errors are no proof."""
    kept = 0
    for seed in range(40):
        judge, scores_MN = experiment([0.7] * 4, seed)
        kept += _without_poor(scores_MN, judge, np.arange(GROUPS) < 5).min() > 0
    assert kept >= 36


def test_members_that_are_alike_keep_equal_weights() -> None:
    """What the best of them, or a greedy choice, gains on the groups that choose is luck."""
    equal = 0
    for seed in range(20):
        judge, scores_MN = experiment([1.5] * 8, seed)
        equal += len(set(choose(scores_MN, judge, FOLDS_Q, BlendConfig(rounds=8)).weights_M)) == 1
    assert equal >= 18


def test_a_poor_member_is_left_out_and_the_others_stay_alike() -> None:
    """It is all noise, which spoils the mean; a single group shows nothing."""
    for seed in range(20):
        judge, scores_MN = experiment([1.0, 1.0, 1.0, 9.0], seed)
        assert _without_poor(scores_MN, judge, EVERYTHING_Q).tolist() == [1 / 3, 1 / 3, 1 / 3, 0]
        assert _without_poor(scores_MN, judge, np.arange(GROUPS) == seed).tolist() == [0.25] * 4
        chosen = choose(scores_MN, judge, FOLDS_Q, BlendConfig())
        assert chosen.weights_M[3] == 0
        assert chosen.held_out > judge(scores_MN.mean(0)).mean()


def test_a_member_that_is_clearly_worse_stays_where_the_mean_is_better_with_it() -> None:
    """Its errors are larger than those that the others share, and of the other sign."""
    judge, (labels_N, noisy_N) = experiment([0.0, 1.0])
    error_N = noisy_N - labels_N
    scores_MN = torch.stack([labels_N + error_N, labels_N + error_N, labels_N - 2.2 * error_N])
    values_M = [judge(scores_N).mean() for scores_N in scores_MN]
    assert values_M[2] < values_M[0] - 0.05
    assert choose(scores_MN, judge, FOLDS_Q, BlendConfig()).weights_M.tolist() == pytest.approx([1 / 3] * 3)


def test_a_member_that_knows_more_than_all_others_has_most_of_the_weight() -> None:
    """One member is right in 80% of the groups, twelve are coins, some of which are right by chance."""

    def judge(scores_Q: Tensor) -> Doubles:
        return (scores_Q > 0).double().numpy()

    weights = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        right_Q, coins_MQ = np.where(rng.random(GROUPS) < 0.8, 1.0, -1.0), rng.normal(size=(12, GROUPS))
        scores_MQ = torch.from_numpy(np.vstack([right_Q, coins_MQ]))
        weights.append(choose(scores_MQ, judge, FOLDS_Q, BlendConfig()).weights_M[0])
    assert np.median(weights) > 0.5


def test_given_weights_stay_and_one_member_is_itself() -> None:
    judge, scores_MN = experiment([1.0, 9.0])
    given = choose(scores_MN, judge, FOLDS_Q, BlendConfig(), np.array([0.25, 0.75]))
    assert given.weights_M.tolist() == [0.25, 0.75]
    assert given.value == pytest.approx(judge(0.25 * scores_MN[0] + 0.75 * scores_MN[1]).mean())
    one = choose(scores_MN[:1], judge, FOLDS_Q, BlendConfig())
    assert (one.weights_M.tolist(), one.value, one.held_out) == ([1.0], judge(scores_MN[0]).mean(), one.value)


METHODS: dict[str, AnyMethod] = {
    "trees": GBDTMethod.model_validate({"leave_out": ["c_*"], "gbdt": {"num_trees": 8, "num_leaves": 4}}),
    "network": NeuralMethod.model_validate(
        {"finetune": {"network": {"encoder": {"kind": "mlp", "hidden": [8]}}, "head_epochs": 0, "epochs": 2}}
    ),
    "order": FeatureMethod(feature="f_00"),
    "blend": BlendMethod.model_validate({"members": ["trees", "network", "order"], "blend": {"weights": "equal"}}),
}


@pytest.mark.slow
def test_a_bundle_of_all_kinds_scores_by_the_mean_of_standardised_scores(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    splits = {name: {"data": synthetic_dataset, "periods": periods} for name, periods in WEEKS.items()}
    check_methods(METHODS, ONE)
    run = SeedRun(METHODS, validate(Splits, splits, "test"), 3, ONE, str(tmp_path))
    made = bundle.load(run.model("blend"))
    members = [bundle.load(run.place(name, "model")) for name in ("trees", "network", "order")]
    assert made.kind == "blend"
    assert {feature.name for feature in made.features} == {f.name for member in members for f in member.features}
    judged = select(run.splits.validation, labelled=True)
    values = []
    for groups in iterate(judged):
        scores = [member.scorer(features=judged.features)(groups).double() for member in members]
        expected_N = sum(standardise_by_group(scores_N, groups.offsets_Q1) for scores_N in scores) / 3
        found_N = made.scorer(features=judged.features)(groups)
        torch.testing.assert_close(found_N, expected_N)
        values.append(metric_named("ndcg@5").of_groups(found_N, groups))
    assert made.metrics["validation_ndcg@5"] == pytest.approx(torch.cat(values).double().nanmean().item())
    other: dict[str, AnyMethod] = {**METHODS, "twice": BlendMethod(members=("blend", "trees"))}
    with pytest.raises(ValueError, match=r"methods.twice.members: 'blend' is unknown or a blend"):
        check_methods(other, ONE)


def test_groups_that_a_member_has_learnt_choose_no_weights(synthetic_dataset: str, tmp_path: Path) -> None:
    def splits(validation: str, train: str = "2026-W01..2026-W02") -> Splits:
        periods = {"train": train, "validation": validation}
        return validate(Splits, {k: {"data": synthetic_dataset, "periods": p} for k, p in periods.items()}, "test")

    first, again, mean = (str(tmp_path / name) for name in ("first", "again", "mean"))
    GBDTJob(out=first, splits=splits("2026-W03"), gbdt=LightGBMConfig(num_trees=3, num_threads=1)).run()
    RefitJob(out=again, bundle=first).run()

    def blend(members: list[str], on: Splits, weights: Literal["greedy", "equal"]) -> None:
        bundles = {Path(url).name: url for url in members}
        BlendJob(out=mean, bundles=bundles, splits=on, blend=BlendConfig(weights=weights)).run()

    blend([first, again], splits("2026-W03"), "equal")
    for members, on, learnt in (
        ([first, again], splits("2026-W03"), "again"),
        ([first, mean], splits("2026-W03"), "mean"),
        ([first], splits("2026-W02", "2026-W04"), "first"),
    ):
        with pytest.raises(InputError, match=rf"^bundles.{learnt}: .* set blend.weights to equal, or name other"):
            blend(members, on, "greedy")
    blend([first], splits("2026-W03"), "greedy")
    blend([first, again], splits("2026-W04"), "greedy")
