"""The blend of rankers: weights against a slow search, what luck does to them, and the bundle with its members."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from ltrscale import bundle
from ltrscale.arrays import Doubles, Ints
from ltrscale.batch import standardise_by_group
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.draws import random_bits
from ltrscale.errors import InputError
from ltrscale.experiments.methods.base import Method, SeedRun, check_methods
from ltrscale.experiments.methods.composed import BlendMethod
from ltrscale.experiments.methods.single import FeatureMethod, GBDTMethod, NeuralMethod
from ltrscale.experiments.refit import RefitJob
from ltrscale.ranking.choices import metric_named
from ltrscale.runtime.workers import ONE
from ltrscale.training import combine
from ltrscale.training.combine import BlendConfig, BlendJob, Judge, choose
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob

WEEKS = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
GROUPS, LENGTH = 60, 5


def experiment(noise: list[float], seed: int = 0) -> tuple[Callable[[Tensor], Doubles], Tensor]:
    """The judge of labels, and scores of members that see these through noise of their own."""
    rng, offsets_Q1 = np.random.default_rng(seed), torch.arange(0, GROUPS * LENGTH + 1, LENGTH)
    labels_N = torch.from_numpy(rng.integers(0, 3, size=GROUPS * LENGTH).astype(np.float32))
    labels_N[::LENGTH] = 1  # every group has a relevant document
    scores = [labels_N.double() + scale * torch.from_numpy(rng.normal(size=len(labels_N))) for scale in noise]
    return lambda s_N: metric_named("ndcg@5").values(s_N, labels_N, offsets_Q1).double().numpy(), torch.stack(scores)


def slow_search(scores_MN: Tensor, judge: Callable[[Tensor], Doubles], groups: Ints, rounds: int) -> Doubles:
    """Weights by trying all members in every round, until none helps these groups, which may come twice."""
    taken: list[int] = []
    value = -1.0
    while len(taken) < rounds:
        values = [judge(scores_MN[[*taken, m]].sum(dim=0))[groups].mean() for m in range(len(scores_MN))]
        if max(values) <= value + 1e-12:
            break
        value = max(values)
        taken.append(values.index(value))
    return np.bincount(taken, minlength=len(scores_MN)) / len(taken)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 4, 25])
def test_half_of_a_weight_is_equal_and_half_of_greedy_searches_on_resamples(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combine, "ROUNDS", rounds)
    monkeypatch.setattr(combine, "RESAMPLES", 6)
    judge, scores_MN = experiment([1.0, 1.2, 1.4, 9.0])
    config = BlendConfig(seed=3)
    groups = np.arange(GROUPS)
    drawn = [(random_bits((3, "blend", k), groups) % np.uint64(GROUPS)).astype(np.int64) for k in range(6)]
    searched_M = np.mean([slow_search(scores_MN, judge, resample, rounds) for resample in drawn], axis=0)
    chosen = searched_M > 0
    np.testing.assert_allclose(choose(scores_MN, judge, config), (chosen / chosen.sum() + searched_M) / 2)
    assert chosen.sum() == (1 if rounds == 1 else 3), "the member of noise is never chosen"


def on_other_groups(noise: list[float]) -> float:
    """What a choice of weights gains over equal ones on the half of the groups that chose nothing."""
    gain = 0.0
    for seed in range(8):
        judge, scores_MN = experiment(noise, seed)

        def half_value(scores_N: Tensor, judge: Judge = judge) -> Doubles:
            return judge(scores_N)[::2]

        weights_M = torch.from_numpy(choose(scores_MN, half_value, BlendConfig()))
        gain += (judge(weights_M @ scores_MN) - judge(scores_MN.mean(0)))[1::2].mean() / 8
    return gain


def test_groups_that_do_not_define_the_metric_choose_nothing() -> None:
    judge, scores_MN = experiment([1.0, 1.2, 9.0])
    with pytest.raises(InputError, match="no validation group defines ndcg@5; name another, or equal weights"):
        choose(scores_MN, lambda scores_N: judge(scores_N)[:0], BlendConfig())


@pytest.mark.slow
def test_a_member_of_noise_costs_less_than_with_equal_weights() -> None:
    assert on_other_groups([1.0, 1.0, 1.0, 9.0]) > 0.01


@pytest.mark.slow
def test_members_that_are_alike_lose_little_by_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them gains on the groups that choose is luck, and the mean of all is best on others."""
    gain = on_other_groups([1.5] * 8)
    assert -0.01 < gain < 0
    monkeypatch.setattr(combine, "RESAMPLES", 1)
    assert on_other_groups([1.5] * 8) < 2 * gain, "one greedy choice loses more"


def test_a_member_that_knows_more_than_all_others_has_most_of_the_weight() -> None:
    """One member is right in 80% of the groups, twelve are coins, some of which are right by chance."""

    def judge(scores_Q: Tensor) -> Doubles:
        return (scores_Q > 0).double().numpy()

    shares = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        right_Q, coins_MQ = np.where(rng.random(GROUPS) < 0.8, 1.0, -1.0), rng.normal(size=(12, GROUPS))
        weights_M = choose(torch.from_numpy(np.vstack([right_Q, coins_MQ])), judge, BlendConfig())
        assert weights_M.sum() == pytest.approx(1)
        shares.append((weights_M[0], weights_M[1:].max()))
    own, largest_coin = np.median(shares, axis=0)
    assert own > 2.5 * largest_coin


METHODS: dict[str, Method] = {
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
        values.append(metric_named("ndcg@5").values_on(found_N, groups))
    assert made.metrics["validation_ndcg@5"] == pytest.approx(torch.cat(values).double().nanmean().item())
    other: dict[str, Method] = {**METHODS, "twice": BlendMethod(members=("blend", "trees"))}
    with pytest.raises(ValueError, match=r"methods.twice.members: 'blend' is of kind blend; name another method"):
        check_methods(other, ONE)


@pytest.mark.slow
def test_a_group_that_does_not_define_the_metric_has_no_say(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    """Half a grade is above 0, and below what MRR takes for relevant."""
    x_LF = np.array([[0.0, 1.0], [1.0, 0.0]])  # by the first feature the second document is best
    groups = [*[(x_LF, [0.0, 1.0])] * 5, (x_LF, [0.0, 0.5])]
    data = write_dataset({"t": groups, "v": groups}, [Feature(name="right"), Feature(name="wrong")])
    splits = {name: {"data": data, "periods": name[0]} for name in ("train", "validation")}
    methods: dict[str, Method] = {name: FeatureMethod(feature=name) for name in ("wrong", "right")}
    methods["blend"] = BlendMethod.model_validate({"members": ["wrong", "right"], "blend": {"metric": "mrr"}})
    made = bundle.load(SeedRun(methods, validate(Splits, splits, "test"), 3, ONE, str(tmp_path)).model("blend"))
    assert made.blended == {"right": 1.0}
    assert made.metrics["validation_mrr"] == 1.0


@pytest.mark.slow
def test_groups_that_a_member_has_learnt_choose_no_weights(synthetic_dataset: str, tmp_path: Path) -> None:
    def splits(validation: str, train: str = "2026-W01..2026-W02") -> Splits:
        periods = {"train": train, "validation": validation}
        return validate(Splits, {k: {"data": synthetic_dataset, "periods": p} for k, p in periods.items()}, "test")

    first, again, mean = (str(tmp_path / name) for name in ("first", "again", "mean"))
    GBDTJob(out=first, splits=splits("2026-W03"), gbdt=LightGBMConfig(num_trees=3, num_threads=1)).run()
    RefitJob(out=again, bundle=first).run()

    def blend(members: list[str], on: Splits, weights: Literal["greedy", "equal"] | dict[str, float]) -> None:
        bundles = {Path(url).name: url for url in members}
        BlendJob(out=mean, bundles=bundles, splits=on, blend=BlendConfig(weights=weights)).run()

    blend([first, again], splits("2026-W03"), "equal")
    assert not bundle.load(mean).metrics, "of groups that a member has learnt a metric would be too good"
    blend([first, again], splits("2026-W04"), "equal")
    assert bundle.load(mean).metrics.keys() == {"validation_ndcg@5"}
    blend([first, again], splits("2026-W03"), "equal")
    for members, on, learnt in (
        ([first, again], splits("2026-W03"), "again"),
        ([first, mean], splits("2026-W03"), "mean"),
        ([first], splits("2026-W02", "2026-W04"), "first"),
    ):
        with pytest.raises(InputError, match=rf"^bundles.{learnt}: .* set blend.weights to equal, or name other"):
            blend(members, on, "greedy")
    blend([first], splits("2026-W03"), "greedy")
    assert bundle.load(mean).blended == {"first": 1.0}
    blend([first, again], splits("2026-W04"), "greedy")
    blend([first, again], splits("2026-W03"), {"again": 1.0, "first": 3.0})
    given = bundle.load(mean)
    assert given.blended == {"first": 0.75, "again": 0.25}
    assert not given.metrics, "given weights are not judged"
    fewer = splits("2026-W03")
    fewer = fewer.replace(train={**fewer.train.model_dump(), "leave_out": ["f_*"]})
    with pytest.raises(InputError, match=r"features are not in the data"):
        blend([first], fewer, {"first": 1.0})
