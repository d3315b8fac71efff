"""Random negatives of a batch: what they take with them, how they are drawn, and what stays as it is."""

import torch
from token_batches import lists_of, text_groups

from ltrscale.batch import QueryGroups
from ltrscale.ranking.negatives import with_negatives


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(lengths: list[int]) -> QueryGroups:
    """Groups whose documents have their number as their feature."""
    groups = text_groups(lengths)
    features_NF = torch.arange(float(groups.n_documents))[:, None]
    return QueryGroups(features_NF, *[getattr(groups, name) for name in groups.__slots__[1:]])


def test_negatives_follow_the_documents_of_their_group_and_come_from_others() -> None:
    groups = numbered([5, 1, 6, 4])
    more = with_negatives(groups, 3, generator()).checked()
    assert more.lengths_Q.tolist() == [8, 4, 9, 7]
    assert more.labels_N is not None
    assert more.weights_N is not None
    assert more.positions_N is not None
    titles, all_titles = lists_of(more.document_tokens["title"]), lists_of(groups.document_tokens["title"])
    for q in range(4):
        first, last = groups.offsets_Q1[[q, q + 1]].tolist()
        begin, end = more.offsets_Q1[[q, q + 1]].tolist()
        rows = more.features_NF[begin:end, 0].long().tolist()
        assert rows[:-3] == list(range(first, last))
        assert not set(rows[-3:]) & set(range(first, last))
        assert titles[begin:end] == [all_titles[row] for row in rows]
        for values_N, mine in ((groups.labels_N, more.labels_N), (groups.weights_N, more.weights_N)):
            assert values_N is not None
            assert torch.equal(mine[begin : end - 3], values_N[first:last])
        assert more.labels_N[end - 3 : end].tolist() == [0, 0, 0]
        assert more.weights_N[end - 3 : end].tolist() == [1, 1, 1]
        assert more.positions_N[end - 3 : end].isnan().all()
    assert more.query_tokens == groups.query_tokens
    assert torch.equal(more.ids_Q, groups.ids_Q)  # type: ignore[arg-type]


def test_draws_are_uniform_over_the_documents_of_other_groups() -> None:
    groups = numbered([2, 3, 1])
    drawn = torch.zeros(3, 6)
    for seed in range(40):
        more = with_negatives(groups, 100, generator(seed))
        for q in range(3):
            rows = more.features_NF[more.offsets_Q1[q + 1] - 100 : more.offsets_Q1[q + 1], 0].long()
            drawn[q] += torch.bincount(rows, minlength=6)
    for q, (first, last) in enumerate([(0, 2), (2, 5), (5, 6)]):
        others = [n for n in range(6) if not first <= n < last]
        assert drawn[q, first:last].sum() == 0
        expected = 4000 / len(others)
        assert (drawn[q, others] - expected).abs().max() < 5 * expected**0.5


def test_a_group_alone_in_its_batch_stays_as_it_is() -> None:
    groups = numbered([4])
    assert with_negatives(groups, 5, generator()).features_NF.tolist() == groups.features_NF.tolist()


def test_a_batch_without_optional_columns_and_an_empty_group_go_through() -> None:
    groups = QueryGroups(torch.arange(3.0)[:, None], torch.tensor([0, 0, 3]), torch.ones(3))
    more = with_negatives(groups, 2, generator()).checked()
    assert more.lengths_Q.tolist() == [2, 3]
    assert more.weights_N is None
    assert more.positions_N is None
