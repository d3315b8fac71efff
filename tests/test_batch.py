"""Laws of ragged batches: cutting, joining and padding move documents without changing them."""

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ltrscale.batch import (
    QueryGroups,
    Tokens,
    group_index,
    length_chunks,
    standardise_groups,
    sum_by_group,
    to_offsets,
)

FIELDS = ("labels_N", "ids_Q", "weights_N", "positions_N", "gains_N")
QUERY_TOKENS, DOCUMENT_TOKENS = ("words",), ("title", "body")
lengths = st.lists(st.integers(0, 9), max_size=12)
budgets = st.integers(1, 200)


def make(lengths_Q: list[int], *, fields: tuple[str, ...] = FIELDS, first: int = 0) -> QueryGroups:
    """Groups in which all values differ, so that no two can be confused."""
    offsets_Q1 = to_offsets(torch.tensor(lengths_Q, dtype=torch.int64))
    n = int(offsets_Q1[-1])
    values_N = torch.arange(first, first + n).float()
    values = {
        "labels_N": values_N + 0.25,
        "ids_Q": torch.arange(first, first + len(lengths_Q)),
        "weights_N": values_N + 0.5,
        "positions_N": values_N.long(),
        "gains_N": values_N + 0.75,
    }
    features_NF = torch.stack([values_N, -values_N], dim=1)
    return QueryGroups(
        features_NF,
        offsets_Q1,
        **{name: values[name] for name in fields},
        query_tokens={name: make_tokens(len(lengths_Q), first=first) for name in QUERY_TOKENS},
        document_tokens={name: make_tokens(n, first=first + len(name)) for name in DOCUMENT_TOKENS},
    )


def make_tokens(rows: int, *, first: int) -> Tokens:
    """Lists of 0 to 3 tokens, different in every row."""
    lists = [[1000 * (first + row) + i for i in range((first + row) % 4)] for row in range(rows)]
    lengths_R = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
    return Tokens(torch.tensor(list(chain.from_iterable(lists)), dtype=torch.int32), to_offsets(lengths_R))


def token_lists(tokens: Tokens) -> list[list[int]]:
    """The slow oracle's view of token lists."""
    return [tokens.ids_T[a:b].tolist() for a, b in pairwise(tokens.offsets_R1.tolist())]


def split(groups: QueryGroups) -> list[dict[str, list[object]]]:
    """One plain record per group: the slow oracle's view of a batch."""
    records: list[dict[str, list[object]]] = []
    for q in range(groups.n_groups):
        a, b = groups.offsets_Q1[q : q + 2].tolist()
        record: dict[str, list[object]] = {"features_NF": groups.features_NF[a:b].tolist()}
        for name in FIELDS:
            if (values := getattr(groups, name)) is not None:
                record[name] = values[q].tolist() if name.endswith("Q") else values[a:b].tolist()
        record |= {name: token_lists(tokens)[q] for name, tokens in groups.query_tokens.items()}
        record |= {name: token_lists(tokens)[a:b] for name, tokens in groups.document_tokens.items()}
        records.append(record)
    return records


@given(lengths)
def test_offsets_lengths_and_group_numbers_agree(lengths_Q: list[int]) -> None:
    groups = make(lengths_Q)
    assert groups.lengths_Q.tolist() == lengths_Q
    assert (groups.n_groups, groups.n_documents, groups.n_features) == (len(lengths_Q), sum(lengths_Q), 2)
    numbers = [q for q, length in enumerate(lengths_Q) for _ in range(length)]
    assert group_index(groups.offsets_Q1).tolist() == numbers
    ones_N = torch.ones(groups.n_documents)
    assert sum_by_group(ones_N, groups.offsets_Q1).tolist() == lengths_Q


@given(st.lists(st.integers(0, 6), max_size=6), st.integers(0, 99))
def test_standardised_groups_are_those_of_numpy_and_missing_values_do_not_count(
    lengths_Q: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    offsets_Q1 = to_offsets(torch.tensor(lengths_Q, dtype=torch.int64))
    x_NF = rng.normal(size=(sum(lengths_Q), 3), loc=(0.0, 100.0, 0.0))
    x_NF[:, 2] = 0.1  # constant
    complete_NF = standardise_groups(torch.from_numpy(x_NF), offsets_Q1).numpy()
    x_NF[rng.random(x_NF.shape) < 0.3] = np.nan
    with_missing_NF = standardise_groups(torch.from_numpy(x_NF), offsets_Q1).numpy()
    assert not np.isnan(complete_NF).any()
    for a, b in pairwise(offsets_Q1.tolist()):
        for column in range(3):
            known_L = x_NF[a:b, column][~np.isnan(x_NF[a:b, column])]
            spread = np.std(known_L) if len(set(known_L)) > 1 else np.inf
            expected_L = np.full(b - a, np.nan)
            expected_L[~np.isnan(x_NF[a:b, column])] = (known_L - known_L.mean()) / spread if len(known_L) else 0
            np.testing.assert_allclose(with_missing_NF[a:b, column], expected_L, atol=1e-9)


@given(lengths, st.data())
def test_select_takes_these_groups_in_this_order(lengths_Q: list[int], data: st.DataObject) -> None:
    groups = make(lengths_Q)
    chosen = data.draw(st.lists(st.integers(0, len(lengths_Q) - 1)) if lengths_Q else st.just([]))
    records = split(groups)
    selected = groups.select(torch.tensor(chosen, dtype=torch.int64))
    assert split(selected) == [records[q] for q in chosen]


@pytest.mark.slow
@given(st.lists(lengths, min_size=1, max_size=4), st.sets(st.sampled_from(FIELDS)))
def test_concat_is_the_list_of_all_groups(parts: list[list[int]], fields: set[str]) -> None:
    batches = [make(part, fields=tuple(fields), first=100 * i) for i, part in enumerate(parts)]
    assert split(QueryGroups.concat(batches)) == [record for batch in batches for record in split(batch)]


def test_concat_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="ids_Q: some batches have it and some do not"):
        QueryGroups.concat([make([1]), make([1], fields=("labels_N", "weights_N", "positions_N", "gains_N"))])
    with pytest.raises(ValueError, match="document_tokens: the batches have different fields"):
        QueryGroups.concat([make([1]), replace(make([1]), document_tokens={})])
    with pytest.raises(ValueError, match="at least one"):
        QueryGroups.concat([])


@given(lengths, budgets, st.booleans())
def test_chunks_hold_every_document_once_within_budget(lengths_Q: list[int], budget: int, quadratic: bool) -> None:
    offsets_Q1 = to_offsets(torch.tensor(lengths_Q, dtype=torch.int64))
    seen: list[int] = []
    longest_before = 0
    for groups_M, rows_ML, mask_ML in length_chunks(offsets_Q1, budget=budget, quadratic=quadratic):
        m, longest = rows_ML.shape
        assert m == 1 or m * longest ** (2 if quadratic else 1) <= budget
        assert longest >= longest_before
        longest_before = longest
        for q, row, mask in zip(groups_M.tolist(), rows_ML, mask_ML, strict=True):
            documents = list(range(int(offsets_Q1[q]), int(offsets_Q1[q + 1])))
            assert row[mask].tolist() == documents
            assert mask.tolist() == [slot < len(documents) for slot in range(longest)]
            assert set(row[~mask].tolist()) <= {documents[-1]}  # padding is spread over the lists' last documents
            seen += documents
        assert int(mask_ML.sum(1).max()) == longest
    assert sorted(seen) == list(range(sum(lengths_Q)))


@given(lengths, budgets)
def test_chunks_are_as_large_as_the_budget_lets_them(lengths_Q: list[int], budget: int) -> None:
    chunks = list(length_chunks(make(lengths_Q).offsets_Q1, budget=budget, quadratic=False))
    for chunk, after in pairwise(chunks):
        next_length = int(after.mask_ML[0].sum())
        assert (len(chunk.groups_M) + 1) * next_length > budget


def offsets(*values: int) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features_NF": torch.zeros(3)}, "features"),
        ({"features_NF": torch.zeros(3, 2, dtype=torch.int64)}, "floats"),
        ({"offsets_Q1": offsets(0, 2)}, "rise from 0 to the number of documents, 3"),
        ({"offsets_Q1": offsets(1, 3)}, "rise from 0"),
        ({"offsets_Q1": offsets(0, 3, 2, 3)}, "rise from 0"),
        ({"offsets_Q1": torch.tensor([0, 3], dtype=torch.int32)}, "int64"),
        ({"offsets_Q1": torch.zeros(0, dtype=torch.int64)}, "at least one number"),
        ({"labels_N": torch.zeros(2)}, r"labels_N must have shape \[3\], not \[2\]"),
        ({"ids_Q": torch.zeros(3)}, r"ids_Q must have shape \[2\]"),
        ({"weights_N": torch.zeros(3, 1)}, "weights_N must have shape"),
        ({"positions_N": torch.zeros(4)}, "positions_N must have shape"),
        ({"query_tokens": {"words": Tokens(torch.zeros(3), offsets(0, 3))}}, "words must be the lists of 2 rows"),
        ({"document_tokens": {"body": Tokens(torch.zeros(3), offsets(0, 1, 1, 2))}}, "body must be the lists of 3"),
        ({"document_tokens": {"body": Tokens(torch.zeros(3), offsets(0, 2, 1, 3))}}, "body must be the lists of 3"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Tensor], message: str) -> None:
    good = {"features_NF": torch.zeros(3, 2), "offsets_Q1": offsets(0, 1, 3)}
    assert QueryGroups(**good).checked().n_groups == 2
    with pytest.raises(ValueError, match=message):
        QueryGroups(**{**good, **change}).checked()


def test_a_move_keeps_all_fields() -> None:
    groups = make([2, 0, 1])
    assert split(groups.to("cpu")) == split(groups)
    assert make([1], fields=()).to("cpu").labels_N is None


def test_nothing_reads_the_values_of_a_batch_that_is_made_or_moved() -> None:
    moved = make([2, 0, 1]).to("meta")  # whose values nobody can read
    assert moved.tensors()
    assert all(values.is_meta for values in moved.tensors())
