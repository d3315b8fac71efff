"""Metrics: the policy for ties, undefined groups and short lists, against enumeration and known libraries."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import ir_measures
import numpy as np
import pytest
import torch
from config_variations import keys_without_effect, variations
from hypothesis import given
from hypothesis import strategies as st
from ir_measures import AP, RR, P, R, Success, nDCG
from pydantic import TypeAdapter
from reference import metrics as reference
from sklearn.metrics import dcg_score, ndcg_score
from torch import Tensor

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.config import kind_of, members
from ltrscale.ranking import graded, metrics, ranked
from ltrscale.ranking.choices import MetricConfig, MetricName, metric_class, metric_label, metric_named
from ltrscale.ranking.graded import rbp

Metric = Callable[[Tensor, Tensor, Tensor], Tensor]
Group = list[tuple[float, float]]  # score, label
TABLE = graded.GainNDCGConfig(k=3, gains=(0, 1, 1.5, 5, 8))
METRICS: dict[str, Metric] = {
    each.name: each.values for each in [*(cls.made(k=3) for cls in members(MetricConfig)), metric_named("rbp"), TABLE]
}
every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())
NORMALISED = [cls for cls in members(MetricConfig) if cls.normalised]

document = st.tuples(st.sampled_from([-math.inf, -1.0, 0.0, 2.0, math.inf]), st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]))
groups = st.lists(st.lists(document, max_size=6), min_size=1, max_size=4)


def ragged(groups: Iterable[Group]) -> tuple[Tensor, Tensor, Tensor]:
    pairs = torch.tensor([d for group in groups for d in group], dtype=torch.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1], to_offsets(torch.tensor([len(group) for group in groups]))


def random_lists(seed: int, lengths: list[int], levels: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (distinct, or tied on a few levels) and labels 0 to 4 of lists of these lengths."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    scores = rng.permutation(n) if levels is None else rng.integers(0, levels, n)
    labels = rng.choice(5, n, p=[0.5, 0.3, 0.15, 0.04, 0.01])
    return torch.tensor(scores).double(), torch.tensor(labels).double(), to_offsets(torch.tensor(lengths))


def close(actual: Tensor, expected: Iterable[float] | Tensor, tolerance: float = 1e-12) -> None:
    expected = torch.as_tensor(list(expected) if not isinstance(expected, Tensor) else expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.slow
@given(groups, st.integers(1, 8), st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 4), st.floats(0.01, 0.99))
def test_values_are_the_mean_over_all_orders_that_ties_allow(
    groups: list[Group], k: int, threshold: float, grades: int, persistence: float
) -> None:
    scores_N, labels_N, offsets_Q1 = ragged(groups)
    lists = [([s for s, _ in group], [y for _, y in group]) for group in groups]
    close(metrics.ndcg(scores_N, labels_N, offsets_Q1, k=k), (reference.ndcg(s, y, k) for s, y in lists))
    close(
        metrics.mrr(scores_N, labels_N, offsets_Q1, threshold=threshold),
        (reference.mrr(s, y, threshold) for s, y in lists),
    )
    close(
        metrics.average_precision(scores_N, labels_N, offsets_Q1, threshold=threshold),
        (reference.average_precision(s, y, threshold) for s, y in lists),
    )
    close(
        metrics.precision(scores_N, labels_N, offsets_Q1, k=k, threshold=threshold),
        (reference.precision(s, y, k, threshold) for s, y in lists),
    )
    close(
        metrics.recall(scores_N, labels_N, offsets_Q1, k=k, threshold=threshold),
        (reference.recall(s, y, k, threshold) for s, y in lists),
    )
    close(
        metrics.success(scores_N, labels_N, offsets_Q1, k=k, threshold=threshold),
        (reference.success(s, y, k, threshold) for s, y in lists),
    )
    close(graded.dcg(scores_N, labels_N, offsets_Q1, k=k), (reference.expected_dcg(s, y, k) for s, y in lists))
    close(
        graded.err(scores_N, labels_N, offsets_Q1, k=k, grades=grades),
        (reference.err(s, y, k, grades) for s, y in lists),
    )
    for cut in (k, None):
        close(
            rbp(scores_N, labels_N, offsets_Q1, k=cut, persistence=persistence, threshold=threshold),
            (reference.rbp(s, y, cut, persistence, threshold) for s, y in lists),
        )


@every_metric
@pytest.mark.parametrize("label", [1000.0, 1001.0, 1024.0, 3e38])
def test_a_label_without_a_finite_gain_is_an_error_and_never_undefined(metric: Metric, label: float) -> None:
    """NaN would mean that the list has no relevant document."""
    lists = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([label, label, 0.0]), torch.tensor([0, 3])
    try:
        value, refused = metric(*lists).item(), ""
    except ValueError as error:
        value, refused = 0.5, str(error)
    assert math.isfinite(value)
    assert value > 0
    assert refused == "" or label > metrics.HIGHEST_LABEL or "gains has no gain" in refused


@pytest.mark.slow
@every_metric
@pytest.mark.parametrize("slots", [1, 100, 1 << 16])
def test_a_group_does_not_depend_on_its_batch(metric: Metric, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked, "SLOTS_PER_CHUNK", slots)
    monkeypatch.setattr(ranked, "_kept", [])
    scores_N, labels_N, offsets_Q1 = random_lists(0, [3, 0, 1, 40, 7, 40, 200, 2], levels=6)
    together_Q = metric(scores_N, labels_N, offsets_Q1)
    alone = [metric(scores_N[a:b], labels_N[a:b], torch.tensor([0, b - a])) for a, b in pairwise(offsets_Q1.tolist())]
    close(together_Q, torch.cat(alone))


def test_all_metrics_of_a_batch_share_one_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    chunks = ranked.length_chunks
    monkeypatch.setattr(ranked, "length_chunks", lambda *args, **keys: ranks.append(args) or chunks(*args, **keys))
    monkeypatch.setattr(ranked, "_kept", [])
    batch = random_lists(0, [3, 0, 1, 40], levels=6)
    shared = [cls.made(k=k).values(*batch) for cls in members(MetricConfig) for k in (1, 5, 100)]
    assert len(ranks) == 1
    monkeypatch.setattr(ranked, "_KEPT", 0)
    alone = [cls.made(k=k).values(*batch) for cls in members(MetricConfig) for k in (1, 5, 100)]
    assert len(ranks) == 1 + len(alone)
    torch.testing.assert_close(torch.stack(shared), torch.stack(alone), rtol=0, atol=0, equal_nan=True)


@every_metric
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_batch_changed_in_place_is_ranked_anew(metric: Metric, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_lists(0, [30, 20, 10], levels=6)
    before_Q = metric(*batch)
    changed = [torch.randn(60), 1 - batch[1].clamp(max=1), torch.tensor([0, 10, 30, 60])][part]
    batch[part].numpy()[:] = changed.numpy()  # which PyTorch does not see
    after_Q = metric(*batch)
    assert not torch.equal(before_Q, after_Q)
    monkeypatch.setattr(ranked, "_kept", [])
    torch.testing.assert_close(after_Q, metric(*batch), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@every_metric
@pytest.mark.parametrize("levels", [1, 5, 50])
def test_the_order_of_the_input_does_not_matter(metric: Metric, levels: int) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(levels, [300], levels)
    shuffled_N = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    close(metric(scores_N[shuffled_N], labels_N[shuffled_N], offsets_Q1), metric(scores_N, labels_N, offsets_Q1))


@every_metric
def test_only_the_order_of_the_scores_matters(metric: Metric) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(3, [30, 60, 5], levels=20)
    expected_Q = metric(scores_N, labels_N, offsets_Q1)
    for moved_N in (scores_N * 1e6 - 7e6, (scores_N / 7).exp(), scores_N.float(), scores_N.bfloat16()):
        moved_Q = metric(moved_N, labels_N, offsets_Q1)
        assert moved_Q.dtype == torch.float64
        close(moved_Q, expected_Q)


@every_metric
def test_a_group_without_a_relevant_document_is_undefined(metric: Metric) -> None:
    labels_N = torch.tensor([0.0, 0.0, 0.0, 1.0])
    values_Q = metric(torch.arange(4.0), labels_N, torch.tensor([0, 2, 2, 3, 4]))
    assert values_Q.isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("cls", NORMALISED, ids=kind_of)
def test_a_single_relevant_document_is_perfect(cls: type[metrics.Metric]) -> None:
    close(cls.made(k=3).values(torch.tensor([-1e6]), torch.tensor([3.0]), torch.tensor([0, 1])), [1.0])


@pytest.mark.parametrize("cls", NORMALISED, ids=kind_of)
def test_equal_labels_make_every_order_perfect(cls: type[metrics.Metric]) -> None:
    scores_N, _, offsets_Q1 = random_lists(4, [20, 3, 1], levels=4)
    close(cls.made(k=3).values(scores_N, torch.full((24,), 2.0), offsets_Q1), [1.0, 1.0, 1.0])


@every_metric
def test_no_order_is_better_than_that_of_the_labels(metric: Metric) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(4, [20, 3, 30])
    labels_N[20] = 1
    assert (metric(labels_N, labels_N, offsets_Q1) >= metric(scores_N, labels_N, offsets_Q1) - 1e-12).all()


@pytest.mark.parametrize("cls", members(MetricConfig), ids=kind_of)
def test_every_key_means_something_and_a_metric_is_found_by_its_name(cls: type[metrics.Metric]) -> None:
    lists = random_lists(6, [20, 30, *[5] * 9])
    metric = cls.made(k=3)
    assert keys_without_effect([metric], lambda metric: metric.values(*lists)) == set()
    assert metric_named(metric.name) == metric
    for key, other in variations(metric):
        assert isinstance(other, metrics.Metric)
        if key in cls.own_keys():
            assert other.name != metric.name
            assert metric_named(other.name) == other
            assert f"{key} " in other.policy
        elif key != "k":
            assert other.name == metric.name  # an evaluation sets it for all
        assert metric_class(other.name) is cls
        assert metric_label(other.name).endswith(other.name.removeprefix(kind_of(cls)))


def test_gains_come_from_a_table_or_from_a_column_of_their_own() -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(8, [20, 30, 7], levels=9)
    bounds = list(pairwise(offsets_Q1.tolist()))
    gains = np.array(TABLE.gains)[labels_N.long()]
    expected = [ndcg_score([gains[a:b]], [scores_N[a:b].numpy()], k=3) for a, b in bounds]
    close(TABLE.values(scores_N, labels_N, offsets_Q1), expected, tolerance=1e-9)
    same = graded.GainNDCGConfig(k=3, gains=(0, 1, 3, 7, 15))
    assert torch.equal(same.values(scores_N, labels_N, offsets_Q1), metrics.ndcg(scores_N, labels_N, offsets_Q1, k=3))
    revenue_N = torch.rand(57, generator=torch.Generator().manual_seed(0)) * labels_N
    groups = QueryGroups(torch.zeros(57, 1), offsets_Q1, labels_N, weights_N=torch.ones(57), gains_N=revenue_N)
    by_column = graded.GainNDCGConfig(k=3, gains="column")
    expected = [ndcg_score([revenue_N[a:b].numpy()], [scores_N[a:b].numpy()], k=3) for a, b in bounds]
    close(by_column.values_on(scores_N, groups), expected, tolerance=1e-6)
    assert torch.equal(TABLE.values_on(scores_N, groups), TABLE.values(scores_N, labels_N, offsets_Q1))
    unsold = replace(groups, gains_N=torch.where(revenue_N == 0, torch.nan, revenue_N))
    assert torch.equal(by_column.values_on(scores_N, unsold), by_column.values_on(scores_N, groups))
    with pytest.raises(ValueError, match="gains: column needs the column `gains` of the data set"):
        by_column.values_on(scores_N, replace(groups, gains_N=None))
    with pytest.raises(ValueError, match="gains: column has a gain below 0"):
        by_column.values_on(scores_N, replace(groups, gains_N=-revenue_N))
    with pytest.raises(ValueError, match="no gain for label 4; it has those of labels 0 to 3"):
        graded.GainNDCGConfig(gains=(0, 1, 2, 3)).values(torch.zeros(1), torch.tensor([4.0]), torch.tensor([0, 1]))


@pytest.mark.parametrize("cls", members(MetricConfig), ids=kind_of)
def test_the_policy_names_every_rule_that_matters_and_no_other(cls: type[metrics.Metric]) -> None:
    policy = cls.made(k=3, threshold=2).policy
    own, _, shared = policy.partition("ties by expectation; ")
    assert shared
    assert own == "".join(f"{key} {getattr(cls.made(), key)}; " for key in cls.own_keys())
    assert policy.endswith("; groups without relevance left out")
    assert ("relevant from label 2 on" in policy) == ("threshold" in cls.model_fields)
    assert ("gain 2^y - 1" in policy) == (kind_of(cls) in ("ndcg", "dcg"))


@pytest.mark.parametrize("name", ["ndcg", "ndcg@0", "mrr@3", "x@3", "@5", "ndcg@5 ", "rbp()", "rbp@3(persistence=.5)"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is no metric; take ndcg@K, .*, map,? .*or \w+(\(persistence=0.8\)\[@K\])?$"):
        metric_named(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rbp(persistence=1)", "persistence: Input should be less than 1"),
        ("rbp(persistence=much)", "persistence: Input should be a valid number"),
        ("rbp(patience=0.9)", r"rbp has no key 'patience' in its name; write rbp\(persistence=0.8\)\[@K\]"),
        ("rbp(persistence=0.9,persistence=0.8)", "is no metric"),
        ("mrr(threshold=2)", "mrr has no key 'threshold' in its name; write mrr"),
    ],
)
def test_keys_of_a_name_are_checked(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        metric_named(name)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rbp(persistence=0.80)", "rbp"),
        ("rbp(persistence=.9)@10", "rbp(persistence=0.9)@10"),
        ("rbp(persistence=0.8)@3", "rbp@3"),
        ("ndcg@10", "ndcg@10"),
    ],
)
def test_a_metric_has_one_name_however_it_is_written(written: str, name: str) -> None:
    assert TypeAdapter(MetricName).validate_python(written) == metric_named(written).name == name


@every_metric
def test_nan_scores_are_refused(metric: Metric) -> None:
    with pytest.raises(ValueError, match="scores contain NaN"):
        metric(torch.tensor([1.0, math.nan]), torch.ones(2), torch.tensor([0, 2]))


@pytest.mark.parametrize("metric", [metrics.ndcg, graded.dcg, metrics.precision, metrics.recall, graded.err, rbp])
def test_k_below_one_is_refused(metric: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="k must be at least 1"):
        metric(torch.ones(2), torch.ones(2), torch.tensor([0, 2]), k=0)


@pytest.mark.parametrize("k", [1, 5, 10, 1000])
@pytest.mark.parametrize("levels", [None, 4, 40])
def test_ndcg_agrees_with_scikit_learn(k: int, levels: int | None) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(k, [2, 9, 30, 120, 400], levels)
    labels_N[0] = 1.0
    expected = [
        ndcg_score([2 ** labels_N[a:b].numpy() - 1], [scores_N[a:b].numpy()], k=k, ignore_ties=False)
        for a, b in pairwise(offsets_Q1.tolist())
    ]
    close(metrics.ndcg(scores_N, labels_N, offsets_Q1, k=k), expected, tolerance=1e-9)
    expected = [
        dcg_score([2 ** labels_N[a:b].numpy() - 1], [scores_N[a:b].numpy()], k=k, ignore_ties=False)
        for a, b in pairwise(offsets_Q1.tolist())
    ]
    close(graded.dcg(scores_N, labels_N, offsets_Q1, k=k), expected, tolerance=1e-9)


def test_metrics_agree_with_trec_eval() -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(5, [12, 30, 120, 250])
    lists = list(enumerate(pairwise(offsets_Q1.tolist())))
    qrels = [ir_measures.Qrel(str(q), str(n), int(2 ** labels_N[n] - 1)) for q, (a, b) in lists for n in range(a, b)]
    run = [ir_measures.ScoredDoc(str(q), str(n), float(scores_N[n])) for q, (a, b) in lists for n in range(a, b)]
    ours = {
        nDCG @ 5: metrics.ndcg(scores_N, labels_N, offsets_Q1, k=5),
        nDCG @ 10: metrics.ndcg(scores_N, labels_N, offsets_Q1, k=10),
        RR(rel=3): metrics.mrr(scores_N, labels_N, offsets_Q1, threshold=2),
        AP(rel=1): metrics.average_precision(scores_N, labels_N, offsets_Q1),
        P(rel=3) @ 5: metrics.precision(scores_N, labels_N, offsets_Q1, k=5, threshold=2),
        R(rel=3) @ 5: metrics.recall(scores_N, labels_N, offsets_Q1, k=5, threshold=2),
        Success(rel=7) @ 5: metrics.success(scores_N, labels_N, offsets_Q1, k=5, threshold=3),
    }
    provider = ir_measures.pytrec_eval
    theirs = {(value.measure, int(value.query_id)): value.value for value in provider.iter_calc(list(ours), qrels, run)}
    assert len(theirs) == len(ours) * len(lists)
    for measure, values_Q in ours.items():
        close(values_Q, [theirs[measure, q] for q, _ in lists], tolerance=1e-6)
