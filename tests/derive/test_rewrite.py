"""Rewriting a data set: blocks do not depend on the layout, and groups without changes stay the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_columns import update_manifest
from token_columns import FIELDS, WORDS, add_tokens, check, words

from ltrscale import storage
from ltrscale.data.dataset.manifest import Accounting, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.derive import rewrite
from ltrscale.derive.rewrite import GroupWriter, periods_of, read_groups
from ltrscale.errors import InputError

Make = Callable[..., Any]

LENGTHS = {"b": [[3, 1, 5, 2], [7], [1, 1, 4]], "a": [[2], [6, 30, 2, 9]]}
ONE_ROW_GROUP = {period: [[n for row_group in row_groups for n in row_group]] for period, row_groups in LENGTHS.items()}


def test_blocks_hold_every_group_once_with_all_that_it_has(make_dataset: Make) -> None:
    made = make_dataset(LENGTHS, is_labelled=lambda gid: gid % 3 != 0, has_weights=lambda gid: gid % 2 == 0)
    seen = []
    for block in read_groups(open_dataset(made.url), periods={"a", "b"}):
        for q, gid in enumerate(block.keys_Q.tolist()):
            group, rows = made.groups[gid], slice(block.offsets_Q1[q], block.offsets_Q1[q + 1])
            seen.append(gid)
            assert (block.period, block.rows_Q.column("query_id")[q].as_py()) == (group.period, f"q{gid}")
            np.testing.assert_array_equal(block.features_NF[rows], group.features)
            for name, values in (("labels", group.labels), ("weights", group.weights)):
                missing = np.full(len(group.features), np.nan)
                np.testing.assert_array_equal(block.columns_N[name][rows], missing if values is None else values)
                assert block.present_Q(name)[q] == (values is not None)
    assert sorted(seen) == list(made.groups)


def test_blocks_end_where_the_groups_say_and_none_is_short(make_dataset: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_BLOCK_DOCUMENTS", 8)
    cuts = []
    for lengths in (LENGTHS, ONE_ROW_GROUP):
        dataset = open_dataset(make_dataset(lengths).url)
        cuts.append([block.lengths_Q.tolist() for block in read_groups(dataset, periods={"a", "b"})])
    assert cuts[0] == cuts[1] == [[2, 6], [30], [2, 9], [3, 1, 5], [2, 7, 1, 1, 4]]


def test_only_the_periods_asked_for_are_read(make_dataset: Make) -> None:
    dataset = open_dataset(make_dataset(LENGTHS).url)
    assert periods_of(dataset, ()) == {"a", "b"}
    assert periods_of(dataset, ("a..b",)) == {"a", "b"}
    assert {block.period for block in read_groups(dataset, periods=periods_of(dataset, ("b",)))} == {"b"}
    with pytest.raises(InputError, match="there is no period 'c'; it has a, b"):
        periods_of(dataset, ("c",))


def test_taking_documents_takes_all_their_columns(make_dataset: Make) -> None:
    made = make_dataset(LENGTHS, has_weights=lambda _: True)
    block = next(iter(read_groups(open_dataset(made.url), periods={"b"})))
    documents = np.array([5, 0, 0])
    taken = block.take(np.array([2, 0]), documents, np.array([1, 2]))
    assert taken.keys_Q.tolist() == block.keys_Q[[2, 0]].tolist()
    assert taken.offsets_Q1.tolist() == [0, 1, 3]
    np.testing.assert_array_equal(taken.features_NF, block.features_NF[documents])
    for name in ("labels", "weights"):
        np.testing.assert_array_equal(taken.columns_N[name], block.columns_N[name][documents])
    assert len(block.keep(np.zeros(len(block), dtype=bool))) == 0


@pytest.mark.parametrize("renumber", [False, True])
def test_groups_without_changes_stay_the_same(make_dataset: Make, tmp_path: Path, renumber: bool) -> None:
    made = make_dataset(LENGTHS, is_labelled=lambda gid: gid % 3 != 0)
    dataset = open_dataset(made.url)
    with storage.Commit(str(tmp_path / "out")) as commit:
        writer = GroupWriter(commit, dataset, renumber=renumber)
        for block in read_groups(dataset, periods={"a", "b"}):
            writer.add(block)
        manifest = writer.finish(Accounting(), {"stage": "copy"})
    assert open_dataset(str(tmp_path / "out")).manifest == manifest
    assert manifest.counts() == dataset.manifest.counts()
    assert manifest.files.longest == 30
    gids = []
    for old, new in zip(sorted(dataset.manifest.files, key=lambda file: file.period), manifest.files, strict=True):
        tables = [pq.ParquetFile(f"{url}/{f.path}").read() for url, f in ((made.url, old), (tmp_path / "out", new))]
        assert tables[1].drop_columns("gid").equals(tables[0].drop_columns("gid"))
        gids += tables[1].column("gid").to_pylist()
        expected = tables[0].column("gid").to_pylist()
        assert renumber or gids[-len(expected) :] == expected
    assert sorted(gids) == list(range(len(made.groups)))
    assert not renumber or gids == sorted(gids)


@pytest.mark.parametrize(
    ("column", "problem"),
    [("features", "46 documents where the manifest lists 47"), ("labels", "column 'labels' .* one value a document")],
)
def test_files_that_are_not_as_the_manifest_says_are_named(make_dataset: Make, column: str, problem: str) -> None:
    made = make_dataset(LENGTHS)
    (file,) = (file for file in open_dataset(made.url).manifest.files if file.period == "a")
    path = Path(made.url) / file.path
    table = pq.ParquetFile(path).read()
    lists = table.column(column).to_pylist()
    lists[-1] = lists[-1][3 if column == "features" else 1 :]
    field = table.schema.field(column)
    broken = table.set_column(table.schema.get_field_index(column), field, pa.array(lists, field.type))
    with pq.ParquetWriter(path, broken.schema) as writer:
        writer.write_table(broken.slice(0, 1))
        writer.write_table(broken.slice(1))
    update_manifest(made.url)
    with pytest.raises(InputError, match=problem) as error:
        list(read_groups(open_dataset(made.url), periods={"a"}))
    assert str(path) in str(error.value)


def test_tokens_stay_with_their_queries_and_documents(make_dataset: Make, tmp_path: Path) -> None:
    made = make_dataset(LENGTHS)
    add_tokens(made.url, [len(group.features) for group in made.groups.values()])
    dataset, out = open_dataset(made.url), str(tmp_path / "out")
    with storage.Commit(out) as commit:
        writer = GroupWriter(commit, dataset, renumber=False)
        for block in read_groups(dataset, periods={"a", "b"}):
            keep_Q = block.keys_Q % 3 > 0
            writer.add(block.keep(keep_Q))
        manifest = writer.finish(Accounting(), {"stage": "copy"})
    assert (manifest.tokens, manifest.vocabulary) == (FIELDS, dataset.manifest.vocabulary)
    kept = [gid for gid in made.groups if gid % 3]
    assert manifest.token_summaries[WORDS.column].tokens == sum(len(words(gid)) for gid in kept)
    selection = select(Split(data=(out,)), labelled=False).reading(query=["words"], document=["title", "body"])
    found = []
    for groups in iterate(selection):
        check(groups)
        found += groups.ids_Q.tolist()
    assert sorted(found) == kept
