"""How many labels a split uses: shares, numbers of groups, numbers of groups with a relevant document."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ltrscale import config, storage
from ltrscale.data.dataset.columns import LABELS, LabelWeights
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.row_groups import _in_file
from ltrscale.data.dataset.selection import Selection, at_most, only_relevant, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError


@pytest.fixture(scope="module")
def made(make_dataset: Callable[..., Any]) -> Any:
    """Three files of three row groups of seven groups, a third without labels; about a seventh of the others has none
    but label 0."""
    return make_dataset({p: [[1, 1, 1, 2, 1, 2, 1]] * 3 for p in "abc"}, is_labelled=lambda gid: gid % 3 != 1)


def kept(split: Split) -> set[int]:
    """Numbers of the labelled groups that a split uses."""
    found = select(split, labelled=True).kept_labelled
    assert found is not None
    return set(np.flatnonzero(found).tolist())


def has_relevant(made: Any) -> list[bool]:
    """For each labelled group whether it has a relevant document."""
    return [bool((made.groups[gid].labels > 0).any()) for gid in made.labelled]


@pytest.mark.parametrize("count", [1, 7, 30, 41])
def test_a_number_of_labelled_groups_is_exact_and_equals_its_share(made: Any, count: int) -> None:
    split = Split(data=(made.url,), labelled_groups=count, labelled_seed=3)
    selection = select(split, labelled=True)
    assert selection.n_groups == count
    assert sum(groups.n_groups for groups in iterate(selection, docs_per_batch=50)) == count
    share = Split(data=(made.url,), labelled_fraction=count / len(made.labelled), labelled_seed=3)
    assert kept(split) == kept(share)


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["random", "first"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_groups_join_until_so_many_have_a_relevant_document(made: Any, sample: str, seed: int) -> None:
    relevant, before = has_relevant(made), set[int]()
    assert 0 < relevant.count(False) < len(relevant)
    split = Split(data=(made.url,), labelled_sample=sample, labelled_seed=seed)
    for count in range(1, sum(relevant)):
        now = kept(split.replace(relevant_groups=count))
        (last,) = [number for number in now - before if relevant[number]]  # exactly one more has one
        assert before < now
        assert sum(relevant[number] for number in now) == count
        if sample == "first":
            assert now == set(range(last + 1))
        before = now


@pytest.mark.slow
def test_groups_without_a_relevant_document_come_along_in_their_share(made: Any) -> None:
    relevant = has_relevant(made)
    sizes = [len(kept(Split(data=(made.url,), relevant_groups=9, labelled_seed=seed))) for seed in range(300)]
    expected = 9 * (len(relevant) + 1) / (sum(relevant) + 1)  # the mean of the negative hypergeometric distribution
    assert np.mean(sizes) == pytest.approx(expected, abs=4 * np.std(sizes) / 300**0.5)


def are_relevant(files: Iterable[str | Path], weights: LabelWeights = LABELS, *, differing: bool = False) -> list[bool]:
    read = (_in_file(str(file), "", weights, differing) for file in files)
    return [bool(value) for row_groups in read for relevant_Q in row_groups for value in relevant_Q]


def test_what_has_a_relevant_document_is_read_from_the_labels_alone(made: Any, tmp_path: Path) -> None:
    files = [row_group.file.url for row_group in select(Split(data=(made.url,)), labelled=False).row_groups[::3]]
    assert are_relevant(files) == has_relevant(made)
    columns = {"labels": [[0.0], None, [], [1.0, 0.0]], "relevance": [[2.0], [1.0], [], [0.0, 0.0]]}
    pq.write_table(pa.table(columns), tmp_path / "two.parquet", row_group_size=3)
    assert are_relevant([tmp_path / "two.parquet"]) == [False, False, True]
    assert are_relevant([tmp_path / "two.parquet"], (("relevance", 1.0),)) == [True, False, False]


def test_lists_with_different_labels_are_found_by_the_labels_alone(made: Any, tmp_path: Path) -> None:
    files = [row_group.file.url for row_group in select(Split(data=(made.url,)), labelled=False).row_groups[::3]]
    labels = [made.groups[gid].labels for gid in made.labelled]
    differ = [bool(labels_L.max() > labels_L.min()) for labels_L in labels]
    assert 0 < sum(differ) < sum(has_relevant(made))
    assert are_relevant(files, differing=True) == differ
    lists = [[], [2.0], [1.0, 1.0], [3.0, 0.0], [0.0], [0.0, 0.0, 1.0], [1.0], []]
    pq.write_table(pa.table({"labels": lists}), tmp_path / "lists.parquet", row_group_size=5)
    assert are_relevant([tmp_path / "lists.parquet"], differing=True) == [len({*labels_L}) > 1 for labels_L in lists]


@pytest.mark.parametrize(
    "size",
    [{}, {"labelled_groups": 20}, {"relevant_groups": 20}, {"relevant_groups": 1}, {"fold": {"number": 1, "of": 3}}],
)
def test_only_the_groups_with_a_relevant_document_are_left(made: Any, size: dict[str, Any]) -> None:
    selection = select(config.validate(Split, {"data": made.url, **size}, "split"), labelled=True)
    served = [int(gid) for groups in iterate(selection) for gid in groups.ids_Q]
    relevant = only_relevant(selection)
    left = [int(gid) for groups in iterate(relevant) for gid in groups.ids_Q]
    assert left == [gid for gid in served if (made.groups[gid].labels > 0).any()]
    assert relevant.n_groups == len(left)
    assert len(left) < len(served) or len(left) == 1
    assert relevant.n_labelled == 42  # of the split, however few are left, as masks of two samples are compared
    assert relevant.served_groups_R.all()


@pytest.mark.parametrize("n", [1, 7, 20])
def test_a_sample_of_a_fold_has_no_group_of_another(made: Any, n: int) -> None:
    """A split with this size would sample first, and deal its folds among the groups of the sample."""

    def ids(selection: Selection) -> list[int]:
        return [int(gid) for groups in iterate(selection) for gid in groups.ids_Q]

    split = config.validate(Split, {"data": made.url, "fold": {"number": 0, "of": 3}}, "split")
    selection = select(split, labelled=True)
    sample = at_most(selection, n, 7, "examples")
    assert sample.n_groups == len(ids(sample)) == n
    assert set(ids(sample)) < set(ids(selection))
    assert set(ids(at_most(sample, n - 1, 7, "examples"))) < set(ids(sample))
    assert ids(sample) == ids(at_most(selection, n, 7, "examples")) != ids(at_most(selection, n, 8, "examples"))
    assert sample.served_groups_R.all()
    assert at_most(selection, selection.n_groups, 7) is selection


def test_where_no_group_has_a_relevant_document_all_are_left(write_dataset: Callable[..., str]) -> None:
    nothing = [(np.ones((length, 1), np.float32), np.zeros(length, np.float32)) for length in (1, 3)]
    selection = select(Split(data=(write_dataset({"a": nothing}, [Feature(name="x")]),)), labelled=True)
    assert only_relevant(selection) is selection


def test_labels_are_read_once_a_process(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(data=(made.url,), relevant_groups=2, labelled_seed=5)
    before = kept(split)
    monkeypatch.setattr("ltrscale.data.dataset.row_groups.pq", None)  # any further reading fails
    assert kept(split) == before


def test_the_hash_covers_the_number(made: Any) -> None:
    split = Split(data=(made.url,))
    others = [{"labelled_groups": 9}, {"labelled_groups": 10}, {"relevant_groups": 9}, {"relevant_groups": 10}, {}]
    assert len({select(split.replace(**other), labelled=True).hash for other in others}) == len(others)


def test_too_large_numbers_two_sizes_and_scores_are_errors(made: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it has 42 labelled groups, labelled_groups is 43; lower it"):
        select(Split(data=(made.url,), labelled_groups=43), labelled=True)
    found = f"{sum(has_relevant(made))} of its labelled groups have a relevant document, relevant_groups is 42; lower"
    with pytest.raises(InputError, match=found):
        select(Split(data=(made.url,), relevant_groups=42), labelled=True)
    with pytest.raises(InputError, match="labelled_fraction and labelled_groups all say how many"):
        config.validate(Split, {"data": made.url, "labelled_fraction": 0.5, "labelled_groups": 3}, "split")
    with pytest.raises(InputError, match="relevant_groups needs labels, and scores are none"):
        config.validate(Split, {"data": made.url, "scores": "there", "relevant_groups": 3}, "split")
    storage.write_bytes(str(tmp_path / "bad.parquet"), b"PAR1 and no more")
    with pytest.raises(InputError, match=r"bad\.parquet: its column 'labels' cannot be read .*prepare the data set"):
        are_relevant([tmp_path / "bad.parquet"])
    with pytest.raises(InputError, match=r"none\.parquet"):
        are_relevant([tmp_path / "none.parquet"])


@pytest.mark.parametrize("labelled", [1, 3])
def test_a_manifest_that_counts_other_labels_than_a_file_is_one_line(made: Any, tmp_path: Path, labelled: int) -> None:
    shutil.copytree(made.url, tmp_path / "data")
    path = tmp_path / "data" / storage.MANIFEST
    document = json.loads(path.read_text())
    document["files"][0]["row_groups"][0][2] = labelled
    path.write_text(json.dumps(document))
    split = Split(data=(str(tmp_path / "data"),))
    for read in (
        lambda: only_relevant(select(split, labelled=True)),
        lambda: select(split.replace(relevant_groups=1), labelled=True),
    ):
        message = rf"row group 0 has 5 labelled groups where the manifest lists {labelled}; prepare the data set again"
        with pytest.raises(InputError, match=message):
            read()
