"""Rules against slow loops; policies of other programs against the programs; LETOR's script against an oracle."""

import gzip
import itertools
import math
import sys
import typing
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import letor as script
from reference import rules as reference
from torch import Tensor

from ltrscale.batch import to_offsets
from ltrscale.ranking import metrics
from ltrscale.ranking.choices import metric_named
from ltrscale.ranking.libraries import (
    KINDS,
    POLICIES,
    PROGRAMS,
    LetorMAPConfig,
    LetorMeanNDCGConfig,
    LetorNDCGConfig,
    LetorPrecisionConfig,
    Policy,
    under,
)
from ltrscale.ranking.metric import Metric, Rules

METRICS: dict[str, tuple[Metric, Callable[[list[float], list[float]], float]]] = {
    "ndcg@1": (LetorNDCGConfig(k=1), lambda s, y: script.ndcg(s, y, 1)),
    "ndcg@4": (LetorNDCGConfig(k=4), lambda s, y: script.ndcg(s, y, 4)),
    "mean_ndcg": (LetorMeanNDCGConfig(), script.mean_ndcg),
    "map": (LetorMAPConfig(), script.average_precision),
    "map2": (LetorMAPConfig(threshold=2), lambda s, y: script.average_precision(s, y, 2)),
    "precision@3": (LetorPrecisionConfig(k=3), lambda s, y: script.precision(s, y, 3)),
}
every_metric = pytest.mark.parametrize("name", METRICS)
document = st.tuples(st.sampled_from([-math.inf, -1.0, 0.0, 2.0, math.inf]), st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]))
groups = st.lists(st.lists(document, max_size=7), max_size=5)


def ragged_letor(lists: list[list[tuple[float, float]]]) -> tuple[Tensor, Tensor, Tensor]:
    pairs = torch.tensor([pair for group in lists for pair in group], dtype=torch.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1], to_offsets(torch.tensor([len(group) for group in lists], dtype=torch.int64))


@pytest.mark.slow
@every_metric
@given(lists=groups)
def test_every_group_has_the_value_of_the_script(name: str, lists: list[list[tuple[float, float]]]) -> None:
    metric, oracle = METRICS[name]
    expected = [oracle([s for s, _ in group], [y for _, y in group]) for group in lists]
    assert metric.values(*ragged_letor(lists)).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_list_shorter_than_k_has_ndcg_0_though_its_order_is_perfect() -> None:
    lists = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 3])
    assert [LetorNDCGConfig(k=k).values(*lists).item() for k in (1, 3, 4)] == [1.0, 1.0, 0.0]
    assert metrics.ndcg(*lists, k=4).item() == 1.0


def test_ranks_1_and_2_weigh_the_same() -> None:
    lists = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0, 4])
    at = [LetorNDCGConfig(k=k).values(*lists).item() for k in (1, 2, 3, 4)]
    assert at == pytest.approx([0, 1 / 2, 1 / 2, (1 + 1 / 2) / 2])


def test_long_lists_of_ties_keep_the_order_of_the_input() -> None:
    n = 3000  # longer than any block in which an unstable sort happens to be stable
    labels = torch.zeros(n)
    labels[0] = 1
    assert LetorNDCGConfig(k=1).values(torch.zeros(n), labels, torch.tensor([0, n])).item() == 1.0


@every_metric
def test_without_relevant_documents_or_any_the_value_is_0(name: str) -> None:
    metric, _ = METRICS[name]
    offsets = torch.tensor([0, 5, 5])
    assert metric.values(torch.arange(5.0), torch.zeros(5), offsets).tolist() == [0.0, 0.0]
    assert metric.values(torch.zeros(0), torch.zeros(0), torch.tensor([0])).tolist() == []


@every_metric
def test_other_groups_change_nothing(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (200,), generator=generator)
    offsets = to_offsets(lengths)
    scores = torch.randint(0, 9, (int(lengths.sum()),), generator=generator).float()
    labels = torch.randint(0, 3, scores.shape, generator=generator).float()
    together = METRICS[name][0].values(scores, labels, offsets)
    for q in (0, 7, 199):
        rows = slice(int(offsets[q]), int(offsets[q + 1]))
        alone = METRICS[name][0].values(scores[rows], labels[rows], torch.tensor([0, int(lengths[q])]))
        assert together[q].item() == pytest.approx(alone.item(), abs=1e-12)


def test_a_score_that_is_no_number_has_no_mean_ndcg() -> None:
    with pytest.raises(ValueError, match="scores contain NaN"):
        LetorMeanNDCGConfig().values(torch.tensor([math.nan]), torch.zeros(1), torch.tensor([0, 1]))


def read_test_file(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels and offsets of LETOR text in which every row states every feature."""
    labels, queries, features = [], [], []
    with gzip.open(path, "rt") as stream:
        for line in stream:
            label, query, *values = line.partition("#")[0].split()
            labels.append(float(label))
            queries.append(query)
            features.append([float(value.partition(":")[2]) for value in values])
    starts = [i for i in range(len(queries)) if i == 0 or queries[i] != queries[i - 1]]
    return torch.tensor(features), torch.tensor(labels), torch.tensor([*starts, len(queries)])


@pytest.mark.slow
def test_one_feature_of_mq2008_shows_the_script_s_drop_at_rank_9(shared_data: Path) -> None:
    """Half of the lists have 8 documents or fewer and count as 0 at later ranks; means over folds, as published."""
    folds = []
    for fold in range(1, 6):
        features, labels, offsets = read_test_file(shared_data / "letor" / "MQ2008" / f"Fold{fold}" / "test.txt.gz")
        scored = (features[:, 38], labels, offsets)
        shown = [*(LetorNDCGConfig(k=k) for k in (1, 5, 8, 9, 10)), LetorMeanNDCGConfig(), LetorMAPConfig()]
        folds.append(torch.stack([metric.values(*scored).mean() for metric in shown]))
    expected = [0.3524, 0.4683, 0.4534, 0.2189, 0.2233, 0.4831, 0.4712]
    assert torch.stack(folds).mean(0).tolist() == pytest.approx(expected, abs=6e-5)


Lists = list[list[tuple[float, float]]]  # score and label of each document
LEVELS = (-1.0, 0.0, 1.0, 1.0 + 1e-12, 3.0)  # two of them are one in float32
K = 3


def all_rules() -> list[Rules]:
    fields = {name: typing.get_args(field.annotation) for name, field in Rules.model_fields.items()}
    every = [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]
    return [Rules(**values) for values in every if (values["ideal"], values["ties"]) != ("ranked", "expected")]


EVERY = all_rules()
documents = st.tuples(st.sampled_from(LEVELS), st.sampled_from([0.0, 0.0, 1.0, 2.0, 4.0]))


@given(
    st.lists(st.lists(documents, min_size=1, max_size=5), min_size=1, max_size=3),
    st.sampled_from(EVERY),
    st.sampled_from(KINDS),
    st.integers(1, 6),
    st.sampled_from([1.0, 2.0]),
    st.none() | st.lists(st.booleans(), min_size=15, max_size=15),
)
def test_a_metric_under_any_rules_is_that_of_the_slow_loop(
    lists: Lists, rules: Rules, kind: str, k: int, threshold: float, retrieved: list[bool] | None
) -> None:
    if rules.ties == "block" and kind != "map":
        rules = rules.replace(ties="worst")
    metric = metric_named(f"{kind}@{k}" if kind not in ("map", "mrr") else kind, threshold=threshold)
    scores, labels, offsets = ragged(lists)
    names = [f"d{(7 * n) % 11:02}" for n in range(len(scores))]
    order = torch.tensor(np.argsort(np.argsort(names)))
    there = None if retrieved is None else torch.tensor(retrieved[: len(scores)])
    lost = scores if there is None else scores.where(there, math.nan)  # a score of what was not retrieved is not read
    found = under(rules, metric, lost, labels, offsets, order, there)
    expected = [
        reference.value(
            *(rules, kind, scores[a:b].tolist(), labels[a:b].tolist(), names[a:b]),
            k=k,
            threshold=threshold,
            retrieved=retrieved and retrieved[a:b],
        )
        for a, b in pairwise(offsets.tolist())
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)


def ragged(lists: Lists) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs = torch.tensor([d for one in lists for d in one], dtype=torch.float64).reshape(-1, 2)
    scores_N, labels_N = pairs.T.contiguous()
    return scores_N, labels_N, to_offsets(torch.tensor([len(one) for one in lists], dtype=torch.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_our_rules_give_the_metric_itself(kind: str) -> None:
    metric = metric_named(f"{kind}@{K}" if kind not in ("map", "mrr") else kind)
    lists = ragged(LISTS)
    assert under(Rules(), metric, *lists).tolist() == pytest.approx(metric.values(*lists).tolist(), nan_ok=True)


@pytest.mark.parametrize("kind", ["map", "mrr", "precision", "recall", "success"])
def test_labels_of_a_data_set_and_of_a_table_are_relevant_alike(kind: str) -> None:
    scores_N, typed_N = torch.arange(4.0).double(), torch.tensor([0.7, 0.0, 0.7, 0.1], dtype=torch.float64)
    metric = metric_named(kind if kind in ("map", "mrr") else f"{kind}@2", threshold=0.7)
    stored_N, offsets_Q1 = typed_N.float().double(), torch.tensor([0, 4])
    assert under(Rules(), metric, scores_N, stored_N, offsets_Q1).item() > 0
    assert under(Rules(), metric, scores_N, stored_N, offsets_Q1) == under(
        Rules(), metric, scores_N, typed_N, offsets_Q1
    )


def test_misuse_is_an_error() -> None:
    one = torch.zeros(1), torch.ones(1), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"err@5: no program's rules are known; take one of ndcg, map"):
        under(Rules(), metric_named("err@5"), *one)
    with pytest.raises(ValueError, match="needs the names of the items"):
        under(Rules(ties="item"), metric_named("mrr"), *one)
    with pytest.raises(ValueError, match="scores contain NaN"):
        under(Rules(ties="worst"), metric_named("mrr"), one[0] * math.nan, *one[1:])
    with pytest.raises(ValueError, match="ideal ranked needs an order"):
        Rules(ideal="ranked")


# The programs as oracles. Groups with ties of all kinds, none relevant, all relevant, one document.
Oracle = Callable[[str, NDArray[np.float64], NDArray[np.float64], Sequence[int], list[str]], float]


def made_lists(n: int, longest: int) -> Lists:
    rng = np.random.default_rng(0)
    lists = [
        [(float(rng.choice(LEVELS)), float(rng.choice(5, p=[0.6, 0.2, 0.1, 0.05, 0.05]))) for _ in range(length)]
        for length in rng.integers(1, longest + 1, n)
    ]
    return [*lists, [(1.0, 0.0)] * 4, [(2.0, 0.0), (1.0, 0.0)], [(1.0, 2.0)], [(1.0, 1.0)] * 6]


LISTS = made_lists(40, longest=15)
LONG_LISTS = made_lists(20, longest=60)


def lightgbm(
    spelled: str, scores: NDArray[np.float64], labels: NDArray[np.float64], sizes: Sequence[int], _: object
) -> float:
    import lightgbm as lgb

    settings = {"objective": "lambdarank", "metric": spelled.partition("@")[0], "verbosity": -1, "num_threads": 1}
    settings |= {"eval_at": [K if "ndcg" in spelled else max(sizes)], "min_data_in_bin": 1}
    rows = np.arange(len(labels), dtype=float)[:, None]
    data = lgb.Dataset(rows, label=labels, group=sizes, init_score=scores, params=settings)
    ((_, _, value, *_),) = lgb.Booster(settings, data).eval_train()
    return float(value)


def xgboost(
    spelled: str, scores: NDArray[np.float64], labels: NDArray[np.float64], sizes: Sequence[int], _: object
) -> float:
    import xgboost as xgb

    labels = labels if "ndcg" in spelled else (labels >= 1).astype(float)  # it refuses other labels
    data = xgb.DMatrix(np.zeros((len(labels), 1)), label=labels, base_margin=scores)
    data.set_group(sizes)
    spelled = spelled.replace("(longest list)", str(max(sizes)))
    booster = xgb.Booster({"objective": "rank:pairwise", "eval_metric": spelled, "nthread": 1}, [data])
    return float(booster.eval(data).rpartition(":")[2])


def catboost(
    spelled: str, scores: NDArray[np.float64], labels: NDArray[np.float64], sizes: Sequence[int], _: object
) -> float:
    utils = pytest.importorskip("catboost.utils")
    groups = np.repeat(np.arange(len(sizes)), sizes)
    (value,) = utils.eval_metric(labels, scores, spelled, group_id=groups, thread_count=1)
    return float(value)


def by_name(values: NDArray[np.float64], sizes: Sequence[int], names: list[str]) -> dict[str, dict[str, float]]:
    """The values of each list by name; NaN has no line."""
    bounds = pairwise([0, *np.cumsum(sizes)])
    return {
        f"q{q:03}": {name: v for name, v in zip(names[a:b], values[a:b].tolist(), strict=True) if not math.isnan(v)}
        for q, (a, b) in enumerate(bounds)
    }


def trec_eval(
    spelled: str, scores: NDArray[np.float64], labels: NDArray[np.float64], sizes: Sequence[int], names: list[str]
) -> float:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    judged = {q: {d: int(y) for d, y in of.items()} for q, of in by_name(labels, sizes, names).items()}
    found = pytrec_eval.RelevanceEvaluator(judged, {spelled}).evaluate(by_name(scores, sizes, names))
    return float(np.mean([value for of in found.values() for value in of.values()]))


def scikit_learn(
    spelled: str, scores: NDArray[np.float64], labels: NDArray[np.float64], sizes: Sequence[int], _: object
) -> float:
    from sklearn.metrics import average_precision_score, ndcg_score

    values = []
    for a, b in pairwise([0, *np.cumsum(sizes)]):
        if spelled.startswith("ndcg"):
            # it refuses a single document, whose order is perfect
            alone = float(labels[a] > 0)
            values.append(ndcg_score([labels[a:b]], [scores[a:b]], k=K) if b - a > 1 else alone)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a list without a relevant document
                values.append(average_precision_score(labels[a:b] >= 1, scores[a:b]))
    return float(np.mean(values))


def ranx(
    spelled: str, scores: NDArray[np.float64], labels: NDArray[np.float64], sizes: Sequence[int], names: list[str]
) -> float:
    library = pytest.importorskip("ranx")
    judged = {q: {d: int(y) for d, y in of.items()} for q, of in by_name(labels, sizes, names).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its compiler
        qrels, run = library.Qrels(judged), library.Run(by_name(scores, sizes, names))
        return float(library.evaluate(qrels, run, spelled, threads=1, save_results_in_run=False))


ALLRANK = "allRank demands versions of torch that are long gone: pip install --no-deps allRank==1.4.3"
UNUSED = ("torchvision", "torchvision.transforms", "gcsfs", "pkg_resources")
"""What allRank imports and its metrics do not need."""


def allrank(
    spelled: str, scores: NDArray[np.float64], labels: NDArray[np.float64], sizes: Sequence[int], _: object
) -> float:
    pytest.importorskip("allrank", reason=ALLRANK)
    stubs = {name: mock.MagicMock() for name in UNUSED if name not in sys.modules}
    sys.modules.update(stubs)
    try:
        from allrank.models import metrics as library
    finally:
        for name in stubs:
            del sys.modules[name]
    padded = torch.full((2, len(sizes), max(sizes)), -1.0)
    for q, (a, b) in enumerate(pairwise([0, *np.cumsum(sizes)])):
        padded[:, q, : b - a] = torch.tensor(np.stack([scores[a:b], labels[a:b]])).float()
    at = [K] if spelled.startswith("ndcg") else None
    return float((library.ndcg if at else library.mrr)(*padded, ats=at).mean())


def letor(
    spelled: str, scores: NDArray[np.float64], labels: NDArray[np.float64], sizes: Sequence[int], _: object
) -> float:
    from reference import letor as script

    lists = [(scores[a:b].tolist(), labels[a:b].tolist()) for a, b in pairwise([0, *np.cumsum(sizes)])]
    match spelled.partition("@")[0]:
        case "NDCG":
            return float(np.mean([script.ndcg(*one, K) for one in lists]))
        case "P":
            return float(np.mean([script.precision(*one, K) for one in lists]))
    return float(np.mean([script.average_precision(*one) for one in lists]))


ORACLES: dict[str, Oracle] = {
    "LightGBM": lightgbm,
    "XGBoost": xgboost,
    "CatBoost": catboost,
    "trec_eval": trec_eval,
    "scikit-learn": scikit_learn,
    "ranx": ranx,
    "LETOR 4.0": letor,
    "allRank": allrank,
}


def test_every_program_has_an_oracle() -> None:
    assert set(ORACLES) == set(PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        # ranx compiles for a minute
        pytest.param(p, id=f"{p.program}-{p.spelled}", marks=[pytest.mark.nightly] if p.program == "ranx" else [])
        for p in POLICIES
    ],
)
def test_a_policy_gives_the_figure_of_its_program(policy: Policy) -> None:
    rng = np.random.default_rng(1)
    # they sort longer lists in an order of ties that nobody can name
    scores, labels, offsets = ragged(LISTS + (LONG_LISTS if policy.program not in ("ranx", "allRank") else []))
    names = [f"d{n:04}" for n in rng.permutation(len(scores))]
    order = torch.tensor(np.argsort(np.argsort(names)))
    metric = metric_named(f"{policy.kind}@{K}" if policy.kind not in ("map", "mrr") else policy.kind)
    ours = under(policy.rules, metric, scores, labels, offsets, order)
    spelled = policy.spelled.format(k=K)
    theirs = ORACLES[policy.program](spelled, scores.numpy(), labels.numpy(), offsets.diff().tolist(), names)
    assert ours.mean().item() == pytest.approx(theirs, abs=1e-6)
    assert abs(metric.values(scores, labels, offsets).nanmean().item() - theirs) > 1e-4  # so the rules matter


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(p, id=f"{p.program}-{p.spelled}", marks=[pytest.mark.nightly] if p.program == "ranx" else [])
        for p in POLICIES
        if p.program in ("trec_eval", "ranx")
    ],
)
def test_what_was_not_retrieved_counts_as_in_a_run_without_it(policy: Policy) -> None:
    """A run of these programs has no line for it, and the judgements have."""
    rng = np.random.default_rng(2)
    scores, labels, offsets = ragged(LISTS)
    retrieved = rng.random(len(scores)) < 0.6
    retrieved[offsets[:-1]] = True  # trec_eval leaves out a query of which nothing was retrieved
    names = [f"d{n:04}" for n in rng.permutation(len(scores))]
    order, there = torch.tensor(np.argsort(np.argsort(names))), torch.tensor(retrieved)
    metric = metric_named(f"{policy.kind}@{K}" if policy.kind not in ("map", "mrr") else policy.kind)
    ours, ranked_last = (
        under(policy.rules, metric, *lists, labels, offsets, order, mask).mean().item()
        for lists, mask in (((scores,), there), ((scores.where(there, -9.0),), None))
    )
    run = np.where(retrieved, scores.numpy(), np.nan)
    theirs = ORACLES[policy.program](policy.spelled.format(k=K), run, labels.numpy(), offsets.diff().tolist(), names)
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert abs(ranked_last - theirs) > 1e-3 or policy.kind == "success"


def test_xgboost_stops_at_rank_32_without_a_cutoff() -> None:
    scores, labels, offsets = ragged(LONG_LISTS)
    plain, cut, whole = (
        xgboost(spelled, scores.numpy(), labels.numpy(), offsets.diff().tolist(), None)
        for spelled in ("map", "map@32", "map@60")
    )
    assert plain == cut != whole


# One list for each value of each rule, which shows that the value differs from ours.
CASES: dict[tuple[str, str], tuple[str, Lists, dict[str, str]]] = {
    ("scores", "float32"): ("mrr", [[(1.0, 2.0), (1.0 + 1e-12, 0.0)]], {"ties": "input"}),
    ("ties", "input"): ("mrr", [[(1.0, 2.0), (1.0, 0.0)]], {}),
    ("ties", "item"): ("mrr", [[(1.0, 2.0), (1.0, 0.0)]], {}),
    ("ties", "worst"): ("mrr", [[(1.0, 2.0), (1.0, 0.0)]], {}),
    ("ties", "block"): ("map", [[(1.0, 2.0), (1.0, 0.0)]], {}),
    ("relevant", "from_1"): ("mrr", [[(2.0, 1.0), (1.0, 2.0)]], {}),
    ("relevant", "best"): ("mrr", [[(2.0, 2.0), (1.0, 4.0)]], {}),
    ("gain", "linear"): ("ndcg@3", [[(2.0, 1.0), (1.0, 2.0)]], {}),
    ("discount", "letor"): ("ndcg@3", [[(2.0, 0.0), (1.0, 2.0)]], {}),
    ("ideal", "ranked"): ("ndcg@1", [[(2.0, 1.0), (1.0, 2.0)]], {"ties": "input"}),
    ("ideal", "uncut"): ("ndcg@1", [[(2.0, 1.0), (1.0, 1.0)]], {}),
    ("short", "padded"): ("precision@3", [[(1.0, 2.0)]], {}),
    ("short", "zero"): ("ndcg@3", [[(1.0, 2.0)]], {}),
    ("undefined", "zero"): ("ndcg@3", [[(1.0, 2.0)], [(1.0, 0.0)]], {}),
    ("undefined", "one"): ("ndcg@3", [[(1.0, 0.0), (0.5, 2.0)], [(1.0, 0.0)]], {}),
}


def test_every_rule_has_a_case() -> None:
    values = {(name, v) for name, field in Rules.model_fields.items() for v in typing.get_args(field.annotation)[1:]}
    assert set(CASES) == values


@pytest.mark.parametrize("rule", CASES, ids="-".join)
def test_a_case_fails_when_its_rule_is_switched_off(rule: tuple[str, str]) -> None:
    name, lists, also = CASES[rule]
    scores, labels, offsets = ragged(lists)
    metric = metric_named(name, threshold=2)
    order = torch.arange(len(scores))
    on, off = (
        under(rules, metric, scores, labels, offsets, order).nanmean().item()
        for rules in (Rules(**{**also, rule[0]: rule[1]}), Rules(**also))  # type: ignore[arg-type]
    )
    assert abs(on - off) > 0.05
