"""LETOR's script: every rule that differs from ours, an oracle of the rules, and figures of a real collection."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import letor as reference
from torch import Tensor

from ltrscale.batch import to_offsets
from ltrscale.ranking import letor, metrics

Metric = Callable[[Tensor, Tensor, Tensor], Tensor]
METRICS: dict[str, tuple[Metric, Callable[[list[float], list[float]], float]]] = {
    "ndcg@1": (lambda s, y, o: letor.letor_ndcg(s, y, o, k=1), lambda s, y: reference.ndcg(s, y, 1)),
    "ndcg@4": (lambda s, y, o: letor.letor_ndcg(s, y, o, k=4), lambda s, y: reference.ndcg(s, y, 4)),
    "mean_ndcg": (letor.letor_mean_ndcg, reference.mean_ndcg),
    "map": (letor.letor_average_precision, reference.average_precision),
    "map2": (
        lambda s, y, o: letor.letor_average_precision(s, y, o, threshold=2),
        lambda s, y: reference.average_precision(s, y, 2),
    ),
    "precision@3": (lambda s, y, o: letor.letor_precision(s, y, o, k=3), lambda s, y: reference.precision(s, y, 3)),
}
every_metric = pytest.mark.parametrize("name", METRICS)
document = st.tuples(st.sampled_from([-math.inf, -1.0, 0.0, 2.0, math.inf]), st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]))
groups = st.lists(st.lists(document, max_size=7), max_size=5)


def ragged(lists: list[list[tuple[float, float]]]) -> tuple[Tensor, Tensor, Tensor]:
    pairs = torch.tensor([pair for group in lists for pair in group], dtype=torch.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1], to_offsets(torch.tensor([len(group) for group in lists], dtype=torch.int64))


@every_metric
@given(lists=groups)
@settings(max_examples=150, deadline=None)
def test_every_group_has_the_value_of_the_script(name: str, lists: list[list[tuple[float, float]]]) -> None:
    metric, oracle = METRICS[name]
    expected = [oracle([s for s, _ in group], [y for _, y in group]) for group in lists]
    assert metric(*ragged(lists)).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_list_shorter_than_k_has_ndcg_0_though_its_order_is_perfect() -> None:
    scores, labels = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([2.0, 1.0, 0.0])
    offsets = torch.tensor([0, 3])
    assert [letor.letor_ndcg(scores, labels, offsets, k=k).item() for k in (1, 3, 4)] == [1.0, 1.0, 0.0]
    assert metrics.ndcg(scores, labels, offsets, k=4).item() == 1.0


def test_ranks_1_and_2_weigh_the_same() -> None:
    offsets = torch.tensor([0, 4])
    labels = torch.tensor([0.0, 1.0, 0.0, 1.0])
    at = [letor.letor_ndcg(torch.tensor([4.0, 3.0, 2.0, 1.0]), labels, offsets, k=k).item() for k in (1, 2, 3, 4)]
    assert at == pytest.approx([0, 1 / 2, 1 / 2, (1 + 1 / 2) / 2])


def test_tied_documents_keep_the_order_of_the_input() -> None:
    offsets, tied = torch.tensor([0, 2]), torch.zeros(2)
    assert letor.letor_average_precision(tied, torch.tensor([1.0, 0.0]), offsets).item() == 1.0
    assert letor.letor_average_precision(tied, torch.tensor([0.0, 1.0]), offsets).item() == 0.5


def test_long_lists_of_ties_keep_it_too() -> None:
    n = 3000  # longer than any block in which an unstable sort happens to be stable
    labels = torch.zeros(n)
    labels[0] = 1
    assert letor.letor_ndcg(torch.zeros(n), labels, torch.tensor([0, n]), k=1).item() == 1.0


@every_metric
def test_without_relevant_documents_or_any_the_value_is_0(name: str) -> None:
    metric, _ = METRICS[name]
    offsets = torch.tensor([0, 5, 5])
    assert metric(torch.arange(5.0), torch.zeros(5), offsets).tolist() == [0.0, 0.0]
    assert metric(torch.zeros(0), torch.zeros(0), torch.tensor([0])).tolist() == []


@every_metric
def test_other_groups_change_nothing(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (200,), generator=generator)
    offsets = to_offsets(lengths)
    scores = torch.randint(0, 9, (int(lengths.sum()),), generator=generator).float()
    labels = torch.randint(0, 3, scores.shape, generator=generator).float()
    together = METRICS[name][0](scores, labels, offsets)
    for q in (0, 7, 199):
        rows = slice(int(offsets[q]), int(offsets[q + 1]))
        alone = METRICS[name][0](scores[rows], labels[rows], torch.tensor([0, int(lengths[q])]))
        assert together[q].item() == pytest.approx(alone.item(), abs=1e-12)


def test_misuse_is_an_error() -> None:
    offsets = torch.tensor([0, 1])
    for metric in (letor.letor_ndcg, letor.letor_precision):
        with pytest.raises(ValueError, match="k must be at least 1, not 0"):
            metric(torch.zeros(1), torch.zeros(1), offsets, k=0)
    with pytest.raises(ValueError, match="scores contain NaN"):
        letor.letor_mean_ndcg(torch.tensor([math.nan]), torch.zeros(1), offsets)


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


def test_one_feature_of_mq2008_shows_the_script_s_drop_at_rank_9(shared_data: Path) -> None:
    """Half of the lists have 8 documents or fewer and count as 0 at later ranks; means over folds, as published."""
    folds = []
    for fold in range(1, 6):
        features, labels, offsets = read_test_file(shared_data / "letor" / "MQ2008" / f"Fold{fold}" / "test.txt.gz")
        scored = (features[:, 38], labels, offsets)
        found = [letor.letor_ndcg(*scored, k=k).mean() for k in (1, 5, 8, 9, 10)]
        found += [letor.letor_mean_ndcg(*scored).mean(), letor.letor_average_precision(*scored).mean()]
        folds.append(torch.stack(found))
    expected = [0.3524, 0.4683, 0.4534, 0.2189, 0.2233, 0.4831, 0.4712]
    assert torch.stack(folds).mean(0).tolist() == pytest.approx(expected, abs=6e-5)
