"""Features as bytes are the features as lists: the same bits, batches, models and errors."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_columns import features_cast, store_as_bytes, update_manifest, write_row_groups
from known_datasets import KnownDataset, MakeDataset

from ltrscale import storage
from ltrscale.data.dataset.columns import as_bytes, as_lists
from ltrscale.data.dataset.disjoint import equal_periods
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.preflight import PreflightConfig, preflight
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.data.stream.readers import RowGroupReader, read_direct
from ltrscale.derive.rewrite import GroupWriter, read_groups
from ltrscale.errors import InputError

LENGTHS = {"a": [[3, 1], [4, 2, 2], [1]], "b": [[5], [1, 3], [2, 2]]}
PAYLOADS = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000, 0xFF800000, 1], np.uint32).view(np.float32)
"""NaNs with payloads, -0.0, both infinities and the smallest number."""


@pytest.fixture
def both(make_dataset: MakeDataset, tmp_path: Path) -> tuple[KnownDataset, KnownDataset]:
    """A data set with lists, and the same one with bytes."""
    lists, bytes_ = (make_dataset(LENGTHS, url=str(tmp_path / name)) for name in ("lists", "bytes"))
    store_as_bytes(bytes_.url)
    return lists, bytes_


def choose(made: KnownDataset, like: Selection | None = None, **split: Any) -> Selection:
    """Labelled groups; in the order of another selection, which depends on the bytes of the files."""
    selection = select(Split(data=(made.url,), **split), labelled=True)
    return selection if like is None else replace(selection, hash=like.hash)


@pytest.mark.parametrize("n_features", [1, 3, 6])
@pytest.mark.parametrize("lengths", [[1], [2, 0, 5], [0, 0], [], [1, 300, 1]], ids=str)
def test_bytes_and_back_are_the_same_bits(lengths: list[int], n_features: int) -> None:
    ends = np.cumsum([0, *lengths]).astype(np.int32) * n_features
    values = np.resize(PAYLOADS, int(ends[-1]))
    lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values))
    for table in (pa.table({"features": lists}), pa.table({"features": lists}).slice(1)):
        stored = as_bytes(table)
        assert [len(each) for each in stored["features"].to_pylist()] == [4 * n_features * n for n in lengths][
            len(lengths) - len(table) :
        ]
        for kind in (pa.binary(), pa.large_binary()):
            rows = as_lists(features_cast(stored, kind))
            again, before = (each["features"].combine_chunks() for each in (rows, table))
            assert pc_lengths(again) == pc_lengths(before)
            assert again.flatten().to_numpy().tobytes() == before.flatten().to_numpy().tobytes()
            assert as_lists(rows) is rows
    for batch in as_bytes(pa.table({"features": lists})).to_batches():
        assert pc_lengths(as_lists(batch).column(0)) == [n * n_features for n in lengths]


def pc_lengths(lists: pa.ListArray) -> list[int]:
    return np.diff(lists.offsets.to_numpy()).tolist() if len(lists) else []


@pytest.mark.slow
@pytest.mark.parametrize("of_bytes", [("a", "b"), ("a",), ("b",)], ids=str)
@pytest.mark.parametrize("kind", [None, pa.binary()], ids=str)
def test_batches_are_bit_equal_in_both_forms_and_mixed(
    make_dataset: MakeDataset, tmp_path: Path, of_bytes: tuple[str, ...], kind: pa.DataType | None, read: RowGroupReader
) -> None:
    lists, mixed = (make_dataset(LENGTHS, url=str(tmp_path / name)) for name in ("lists", "mixed"))
    store_as_bytes(mixed.url, of_bytes, kind)
    like = choose(lists)
    config = StreamConfig(docs_per_batch=7, streams=2)
    steps = (GroupStream(like, config).epoch(0), GroupStream(choose(mixed, like), config, reader=read).epoch(0))
    for one, other in zip(*map(list, steps), strict=True):
        for batch, same in zip(one.micro_batches.values(), other.micro_batches.values(), strict=True):
            assert (batch is None) == (same is None)
            if batch is not None and same is not None:
                assert [t.numpy().tobytes() for t in batch.tensors()] == [t.numpy().tobytes() for t in same.tensors()]
    splits = {"train": Split(data=(mixed.url,))}
    assert not preflight(splits, PreflightConfig(check="content", max_bad=0)).bad


def test_fewer_features_in_another_order_are_served_from_bytes(both: tuple[KnownDataset, KnownDataset]) -> None:
    features = open_dataset(both[0].url).manifest.features
    chosen = [choose(made).serving([features[2], features[0]], whose="a test", on_purpose=True) for made in both]
    served = [[groups.features_NF.tolist() for groups in iterate(selection)] for selection in chosen]
    assert served[0] == served[1]


def test_lists_and_bytes_are_of_one_split(both: tuple[KnownDataset, KnownDataset]) -> None:
    split = Split(data=tuple(made.url for made in both))
    preflight({"train": split}, PreflightConfig(check="footers", max_bad=0))
    assert sum(each.n_groups for each in iterate(select(split, labelled=True))) == 2 * len(both[0].groups)


def test_periods_with_the_same_lists_are_found_in_both_forms(make_dataset: MakeDataset, tmp_path: Path) -> None:
    urls = [make_dataset({"a": [[1, 2]] * 20}, url=str(tmp_path / name)).url for name in ("lists", "bytes")]
    store_as_bytes(urls[1])
    assert [*equal_periods((open_dataset(url), ["a"]) for url in urls)] == [((urls[0], "a"), (urls[1], "a"))]


DAMAGE = {
    "cut within a value": (lambda values: values[:-1], "row 0 has features of 35 bytes, which is no whole number of"),
    "a value too few": (lambda values: values[:-4], "it has 11 feature values where the manifest lists 4 documents"),
    "a document too many": (lambda values: values + bytes(12), "it has 15 feature values where the manifest lists 4"),
    "null": (lambda _: None, "it has 3 feature values where the manifest lists 4 documents of 3 features"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_values_are_one_line_with_file_and_row_group(
    name: str, both: tuple[KnownDataset, KnownDataset]
) -> None:
    change, message = DAMAGE[name]
    (path,) = Path(both[1].url).glob("period=a/*.parquet")
    with pq.ParquetFile(path) as file:
        tables = [file.read_row_group(i) for i in range(file.num_row_groups)]
    first, *others = tables[0]["features"].to_pylist()
    place = tables[0].schema.get_field_index("features")
    damaged = pa.array([change(first), *others], pa.large_binary())
    write_row_groups(path, [tables[0].set_column(place, "features", damaged), *tables[1:]])
    update_manifest(both[1].url)
    with pytest.raises(InputError, match=rf"^{path}: .*{message}.*; prepare the data set again$") as error:
        list(iterate(choose(both[1])))
    assert "row group 0" in str(error.value)
    assert "\n" not in str(error.value)


def test_values_that_move_between_groups_are_found(both: tuple[KnownDataset, KnownDataset]) -> None:
    (path,) = Path(both[1].url).glob("period=a/*.parquet")
    with pq.ParquetFile(path) as file:
        tables = [file.read_row_group(i) for i in range(file.num_row_groups)]
    one, other = tables[0]["features"].to_pylist()
    moved = pa.array([one[:-4], one[-4:] + other], pa.large_binary())
    write_row_groups(
        path, [tables[0].set_column(tables[0].schema.get_field_index("features"), "features", moved), *tables[1:]]
    )
    update_manifest(both[1].url)
    with pytest.raises(InputError, match=rf"^{path}: row group 0: a list is no multiple of 3 features; prepare"):
        list(iterate(choose(both[1])))


def test_a_data_set_that_is_derived_has_the_form_of_its_source(
    both: tuple[KnownDataset, KnownDataset], tmp_path: Path
) -> None:
    found = []
    for made, version in zip(both, (1, 2), strict=True):
        source = open_dataset(made.url)
        source = replace(source, manifest=source.manifest.model_copy(update={"version": version}))
        with storage.Commit(str(tmp_path / f"derived-{version}")) as commit:
            writer = GroupWriter(commit, source, renumber=True)
            for block in read_groups(source, periods=source.manifest.periods):
                writer.add(block)
            writer.finish(source.manifest.accounting, {})
        derived = open_dataset(commit.url)
        assert derived.manifest.version == version
        raw = pq.read_schema(storage.join(derived.url, derived.manifest.files[0].path)).field("features").type
        assert pa.types.is_large_binary(raw) == (version == 2)
        selection = select(Split(data=(derived.url,)), labelled=True)
        found.append(pa.concat_tables(read_direct(selection.row_groups, ["gid", "features", "labels"])))
    assert found[0].equals(found[1])


def test_other_tools_read_the_bytes(both: tuple[KnownDataset, KnownDataset]) -> None:
    """As docs/data.md shows."""
    (path,) = Path(both[1].url).glob("period=a/*.parquet")
    expected = [both[1].groups[gid].features.ravel().tolist() for gid in pq.read_table(path)["gid"].to_pylist()]
    value = "(features[4*i+4:4*i+4] || features[4*i+3:4*i+3] || features[4*i+2:4*i+2] || features[4*i+1:4*i+1])"
    lists = f"list_transform(range(octet_length(features) // 4), lambda i: {value}::BIT::FLOAT)"
    rows = duckdb.sql(f"SELECT {lists} FROM read_parquet('{path}')").fetchall()
    assert [row[0] for row in rows] == expected
    frame = polars.read_parquet(path)
    assert [np.frombuffer(group, "<f4").tolist() for group in frame["features"]] == expected
    assert all(math.isfinite(each) for group in expected for each in group)
