"""Windows: the column that labels are read from, and regrouped documents."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from dataset_columns import add_column

from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.data.stream.windows import Window, regroup
from ltrscale.errors import InputError

Make = Callable[..., Any]
FLOATS = pa.list_(pa.float32())
LENGTHS = {"a": [[3, 1], [4, 2, 2]], "b": [[5], [1, 3]]}


def is_labelled(gid: int) -> bool:
    return gid not in (1, 4)


def relevance(made: Any, gid: int) -> list[float] | None:
    """The original labels: ten more than the current ones."""
    labels = made.groups[gid].labels
    return None if labels is None else (labels + 10).tolist()


@pytest.fixture(scope="module")
def relabelled(make_dataset: Make) -> Any:
    """A data set with simulated labels and `relevance`; some groups without labels have relevance too."""
    made = make_dataset(LENGTHS, is_labelled=is_labelled)
    add_column(made.url, "relevance", FLOATS, lambda gid: [7.0] if gid == 1 else relevance(made, gid))
    return made


def choose(url: str, column: str, *, labelled: bool = True) -> Selection:
    return select(Split.model_validate({"data": (url,), "labels": column}), labelled=labelled)


@pytest.mark.parametrize(("column", "more"), [("labels", 0), ("relevance", 10)])
def test_labels_are_read_from_the_column_that_the_split_names(relabelled: Any, column: str, more: int) -> None:
    served = []
    for groups in iterate(choose(relabelled.url, column), docs_per_batch=6):
        assert groups.ids_Q is not None
        assert groups.labels_N is not None
        served += groups.ids_Q.tolist()
        expected = np.concatenate([relabelled.groups[gid].labels + more for gid in groups.ids_Q.tolist()])
        assert np.array_equal(groups.labels_N.numpy(), expected)
    assert served == relabelled.labelled


@pytest.mark.parametrize("column", ["labels", "relevance"])
def test_without_labels_neither_column_is_served(relabelled: Any, column: str) -> None:
    batches = list(iterate(choose(relabelled.url, column, labelled=False)))
    assert sum(groups.n_groups for groups in batches) == len(relabelled.groups)
    assert all(groups.labels_N is None for groups in batches)


def test_a_data_set_without_relevance_is_named(make_dataset: Make, relabelled: Any) -> None:
    plain = make_dataset(LENGTHS, seed=1)
    message = r"part-00000.*there is no column 'relevance'; set the split's labels to `labels`, or name a data set"
    with pytest.raises(InputError, match=message):
        list(iterate(choose(plain.url, "relevance")))
    both = Split(data=(relabelled.url, plain.url), labels="relevance")
    with pytest.raises(InputError, match=rf"{plain.url}.*there is no column 'relevance'"):
        list(iterate(select(both, labelled=True)))


def test_a_labelled_group_without_relevance_is_named(make_dataset: Make) -> None:
    made = make_dataset(LENGTHS)
    add_column(made.url, "relevance", FLOATS, lambda gid: None if gid == 3 else relevance(made, gid))
    message = r"part-00000.*row group 1: query group 3 has labels and no 'relevance'; set the split's labels"
    with pytest.raises(InputError, match=message):
        list(iterate(choose(made.url, "relevance")))
    assert sum(groups.n_groups for groups in iterate(choose(made.url, "labels"))) == len(made.groups)


def test_relevance_must_have_one_value_for_each_document(make_dataset: Make) -> None:
    made = make_dataset(LENGTHS)
    add_column(made.url, "relevance", FLOATS, lambda gid: [0.0] * (2 if gid == 5 else len(made.groups[gid].features)))
    with pytest.raises(InputError, match=r"period=b.*column 'relevance' does not have one value for each document"):
        list(iterate(choose(made.url, "relevance")))


def test_a_group_whose_labels_were_taken_away_is_not_served_for_its_relevance(relabelled: Any) -> None:
    served = [groups.ids_Q for groups in iterate(choose(relabelled.url, "relevance"))]
    assert 1 not in np.concatenate(served)


def test_regrouped_documents_keep_their_values_and_lose_their_group() -> None:
    features = [np.arange(4, dtype=np.float32), np.arange(4, 6, dtype=np.float32)]
    weights_N = np.array([0.1, 0.2, 0.3], np.float32)
    window = Window(np.array([8, 9]), np.array([0, 2, 3]), features, {"weights": weights_N})
    dealt = regroup(window, np.array([2, 0, 1]), 2)
    assert dealt.ids_Q is None
    assert dealt.offsets_Q1.tolist() == [0, 2, 3]
    assert [view.tolist() for view in dealt.features] == [[2, 3, 4, 5], [0, 1]]
    assert dealt.columns_N["weights"].tolist() == weights_N[[1, 2, 0]].tolist()
    assert window.features[0].tolist() == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def made(make_dataset: Make) -> Any:
    """A data set in which all documents differ."""
    rng = np.random.default_rng(0)
    return make_dataset({"a": [rng.integers(1, 9, 6).tolist() for _ in range(12)], "b": [[4, 4], [1]]})


def documents(made: Any) -> dict[bytes, int]:
    """The group of each document."""
    return {row.tobytes(): gid for gid, group in made.groups.items() for row in group.features}


def regrouped(made: Any, config: StreamConfig, epoch: int = 0) -> list[list[bytes]]:
    """The documents of each group that an epoch serves."""
    served = []
    for step in GroupStream(choose(made.url, "labels", labelled=False), config).epoch(epoch):
        for groups in filter(None, step.micro_batches.values()):
            assert groups.ids_Q is None
            rows = [row.tobytes() for row in groups.features_NF.numpy()]
            bounds = zip(groups.offsets_Q1[:-1].tolist(), groups.offsets_Q1[1:].tolist(), strict=True)
            served += [rows[a:b] for a, b in bounds]
    return served


@pytest.mark.parametrize(("streams", "window"), [(1, 100), (1, 1), (3, 2)])
def test_each_document_is_served_once_in_groups_of_the_same_lengths(made: Any, streams: int, window: int) -> None:
    config = StreamConfig(docs_per_batch=30, streams=streams, window=window, regroup=True)
    groups = regrouped(made, config, epoch=3)
    assert sorted(row for rows in groups for row in rows) == sorted(documents(made))
    assert sorted(map(len, groups)) == sorted(len(group.features) for group in made.groups.values())


def test_documents_are_dealt_over_the_whole_window_and_anew_each_epoch(made: Any) -> None:
    owner = documents(made)
    config = StreamConfig(docs_per_batch=30, window=100, regroup=True)
    groups = regrouped(made, config)
    alone = [len({owner[row] for row in rows}) for rows in groups if len(rows) > 2]
    assert np.mean(np.array(alone) == 1) < 0.05  # hardly a group of one query's documents is left
    assert regrouped(made, config) == groups
    assert regrouped(made, config, epoch=1) != groups
    assert regrouped(made, config.replace(seed=1)) != groups
    partners = {frozenset(rows) for rows in groups if len(rows) > 1}
    again = {frozenset(rows) for rows in regrouped(made, config, epoch=1) if len(rows) > 1}
    assert len(partners & again) <= 1


def test_windows_do_not_mix(made: Any) -> None:
    owner = documents(made)
    config = StreamConfig(docs_per_batch=1000, window=1, regroup=True)
    selection = choose(made.url, "labels", labelled=False)
    firsts = np.cumsum([0, *(row_group.groups for row_group in selection.row_groups)])
    for rows in regrouped(made, config):
        assert len({int(np.searchsorted(firsts, owner[row], side="right")) for row in rows}) == 1


def test_labelled_groups_and_file_order_are_not_regrouped(made: Any) -> None:
    with pytest.raises(InputError, match=r"stream\.regroup mixes the documents of queries.*leave it out"):
        GroupStream(choose(made.url, "labels"), StreamConfig(regroup=True))
    with pytest.raises(ValueError, match="set shuffle: true"):
        StreamConfig(regroup=True, shuffle=False)
