import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import nightly
from writer_tokens import files_without_writer

from ltrscale.data.dataset import writer as writer_module
from ltrscale.data.dataset.files import DataFile
from ltrscale.data.dataset.writer import DatasetWriter, _split_evenly
from ltrscale.data.ids import hash_ids
from ltrscale.ingest.rows import RowBlock
from ltrscale.ingest.validate import Groups, to_table
from ltrscale.storage import Commit

F = 8
DOCUMENT_BYTES = 4 * (F + 1)


def groups_of(lengths: list[int], *, first: int = 0, labelled: list[bool] | None = None) -> Groups:
    n = sum(lengths)
    lines_N = np.arange(first + 1, first + n + 1)
    labelled_Q = np.array([True] * len(lengths) if labelled is None else labelled)
    ids = np.repeat([f"{first}-{q}" for q in range(len(lengths))], lengths)
    rows = RowBlock(
        file="f",
        lines_N=lines_N,
        query_ids_N=pa.array(ids.tolist(), pa.string()),
        features_NF=np.random.default_rng(first).normal(size=(n, F)).astype(np.float32),
        labels_N=np.where(np.repeat(labelled_Q, lengths), lines_N % 3, np.nan).astype(np.float32),
    )
    hashes_Q = hash_ids(f"{first}-{q}" for q in range(len(lengths)))
    return Groups(rows, np.concatenate([[0], np.cumsum(lengths)]), labelled_Q, hashes_Q)


def write(out: Path, *units: list[tuple[str | pa.Array, pa.Table]], **options: Any) -> tuple[DataFile, ...]:
    """The files of a data set from several units, each a sequence of tables with the period of each group."""
    files: list[DataFile] = []
    before = options.pop("before", (0, 0))
    with Commit(str(out)) as commit:
        for k, tables in enumerate(units):
            writer = DatasetWriter(commit, n_features=F, before=before, prefix=f"part-{k:05}", **options)
            for periods, table in tables:
                writer.add(periods, table)
            files += writer.close()
            groups, documents, _ = zip(*(cell for file in files for cell in file.row_groups), strict=True)
            before = (sum(groups), sum(documents))
        commit.finish({"files": [file._asdict() for file in files]})
    return tuple(files)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(1, 80))
def test_even_split_has_no_empty_run_and_balanced_sums(sizes: list[int], parts: int) -> None:
    cuts = _split_evenly(np.array(sizes), parts)
    assert cuts[0] == 0
    assert cuts[-1] == len(sizes)
    assert len(cuts) == min(parts, len(sizes)) + 1
    assert all(a < b for a, b in pairwise(cuts))
    if len(sizes) > parts:
        heaviest = max(sum(sizes[a:b]) for a, b in pairwise(cuts))
        assert heaviest <= sum(sizes) / parts + 2 * max(sizes)


def test_lists_are_what_went_in(tmp_path: Path) -> None:
    groups = groups_of([2, 1, 3], labelled=[True, False, True])
    groups.rows.doc_ids_N = pa.array(["a", None, None, "d", "e", "f"])
    groups.rows.columns = {
        "positions": pa.array([1, 2, None, None, 5, None], pa.int32()),
        "meta_user": pa.array(["u", "?", "v", "w", "?", "?"]),
    }
    (file,) = write(tmp_path / "out", [("p", to_table(groups, 7))])
    table = pq.ParquetFile(tmp_path / "out" / file.path).read()
    assert table.column("gid").to_pylist() == [7, 8, 9]
    assert table.column("query_id").to_pylist() == ["0-0", "0-1", "0-2"]
    assert table.column("doc_ids").to_pylist() == [["a", None], None, ["d", "e", "f"]]
    assert table.column("labels").to_pylist() == [[1, 2], None, [1, 2, 0]]
    positions = table.column("positions").to_pylist()
    assert positions[:2] == [[1, 2], None]
    np.testing.assert_array_equal(positions[2], [np.nan, 5, np.nan])
    assert table.column("meta_user").to_pylist() == ["u", "v", "w"]
    flat = table.column("features").combine_chunks().values.to_numpy()
    np.testing.assert_array_equal(flat, groups.rows.features_NF.ravel())
    assert file.row_groups == ((1, 2, 1), (1, 1, 0), (1, 3, 1))
    assert file.longest == 3


def test_numbers_have_no_dictionary_and_the_codec_is_as_asked(tmp_path: Path) -> None:
    for codec, stored in (("zstd", "ZSTD"), ("lz4", "LZ4"), ("none", "UNCOMPRESSED")):
        (file,) = write(tmp_path / codec, [("p", to_table(groups_of([3] * 100), 0))], compression=codec)
        group = pq.ParquetFile(tmp_path / codec / file.path).metadata.row_group(0)
        chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
        assert not any("DICTIONARY" in e for e in chunks["features.list.element"].encodings)
        assert not any("DICTIONARY" in e for e in chunks["gid"].encodings)
        assert chunks["features.list.element"].compression == stored


@dataclass(frozen=True)
class Log:
    """Groups in order of arrival, with lengths and periods, and the starts of units."""

    lengths: list[int]
    periods: list[str]
    units: list[int]

    @property
    def table(self) -> pa.Table:
        return to_table(groups_of(self.lengths), 0)

    def cut(self, cuts: Iterable[int] = ()) -> list[list[tuple[pa.Array, pa.Table]]]:
        """The units, each cut into tables."""
        table, bounds, units = self.table, sorted({0, *cuts, *self.units, len(self.lengths)}), []
        for a, b in pairwise(bounds):
            if a in {0, *self.units}:
                units.append([])
            units[-1].append((pa.array(self.periods[a:b]), table.slice(a, b - a)))
        return units

    def bound(self, smallest: int, largest: int) -> float:
        """The largest number of row groups that the writer's docstring allows, for sizes other than 64 KB and 8 MB."""
        t, head, full = sum(self.lengths) * DOCUMENT_BYTES, 64 * smallest, 64 * largest
        integral = min(t, head) / smallest + 64 * max(0, math.log(min(t, full) / head)) + max(0, t - full) / largest
        units = [set(self.periods[a:b]) for a, b in pairwise([0, *self.units, len(self.periods)])]
        return 64 + integral + 2 * sum(map(len, units))


def make_log(rng: np.random.Generator) -> Log:
    """Logs from one group to many times the head, with 1 to 25 periods, in sequence or at random."""
    n = int(rng.choice([1, 5, 63, 64, 65, 300, 600]))
    lengths = rng.integers(1, rng.choice([2, 10, 100]), n, endpoint=True)
    lengths[rng.random(n) < rng.choice([0, 0.02, 0.5])] = 400
    if rng.random() < 0.2:
        lengths[: n // 3] = 400
    numbers = rng.integers(0, rng.choice([1, 3, 25]), n)
    periods = sorted(numbers.tolist()) if rng.random() < 0.5 else numbers.tolist()
    kind, units = rng.integers(3), list[int]()
    if kind == 1:
        units = sorted(set(rng.integers(1, n, 3, endpoint=True).tolist()) - {n})
    elif kind == 2:
        units = [i for i in range(1, n) if periods[i] != periods[i - 1]][:25]
    return Log(lengths.tolist(), [f"p{i}" for i in periods], units)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(8), *map(nightly, range(8, 24))])
def test_row_groups_are_few_but_at_least_64_and_depend_only_on_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    smallest, largest = 1 << 11, 1 << 14  # a data set of 1 MB takes them through all sizes
    monkeypatch.setattr(writer_module, "_SMALLEST", smallest)
    monkeypatch.setattr(writer_module, "_OPEN_FILES", 12)
    rng = np.random.default_rng(seed)
    log = make_log(rng)
    files = write(tmp_path / "one", *log.cut(), row_group_bytes=largest, file_bytes=1 << 17)
    cells = [cell for file in files for cell in file.row_groups]
    assert min(64, len(log.lengths)) <= len(cells) <= log.bound(smallest, largest)
    assert sum(cell.groups for cell in cells) == len(log.lengths)
    for file in files:
        lists = pq.ParquetFile(tmp_path / "one" / file.path).read(["labels"])["labels"]
        assert file.longest == max(map(len, lists.to_pylist()))
    group = max(log.lengths) * DOCUMENT_BYTES
    assert max(cell.documents * DOCUMENT_BYTES for cell in cells) <= largest + 2 * group
    for period in dict.fromkeys(log.periods):
        read = [pq.ParquetFile(tmp_path / "one" / f.path).read(["gid"]) for f in files if f.period == period]
        gids = np.concatenate([table.column("gid").to_numpy() for table in read])
        np.testing.assert_array_equal(gids, [i for i, p in enumerate(log.periods) if p == period])
    cuts = rng.integers(0, len(log.lengths), rng.choice([3, 100])).tolist()
    two = write(tmp_path / "two", *log.cut(cuts), row_group_bytes=largest, file_bytes=1 << 17)
    assert files_without_writer(two) == files_without_writer(files)


@pytest.mark.slow
def test_many_small_periods_do_not_make_many_small_row_groups(tmp_path: Path) -> None:
    lengths, periods = [20] * (100 * 50), [f"p{i // 50:02}" for i in range(100 * 50)]
    for units in ([], list(range(50, 100 * 50, 50))):  # 3.6 MB in one unit, and a unit for each period
        files = write(tmp_path / f"{len(units)}", *Log(lengths, periods, units).cut())
        cells = [cell for file in files for cell in file.row_groups]
        assert 100 <= len(cells) <= 100 + 64
        assert len({file.period for file in files}) == 100


@pytest.mark.slow
def test_row_groups_of_full_size_are_the_same_bytes_however_rows_arrive(tmp_path: Path) -> None:
    n = 12 << 20
    lengths = [50] * (n // (50 * DOCUMENT_BYTES))  # pages of a megabyte end within a row group
    log = Log(lengths, ["p"] * len(lengths), [])
    late = {"before": (64, 1 << 28), "row_group_bytes": 8 << 20}
    whole = write(tmp_path / "one", *log.cut(), **late)
    assert [cell.documents * DOCUMENT_BYTES >> 20 for cell in whole[0].row_groups] == [8, 3]
    assert files_without_writer(
        write(tmp_path / "two", *log.cut(range(0, len(lengths), 997)), **late)
    ) == files_without_writer(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("n_groups", "length"), [(1, 5), (63, 2), (64, 2), (1000, 3), (30, 5000), (5000, 30)])
def test_a_period_has_64_row_groups_or_one_for_each_query_group(tmp_path: Path, n_groups: int, length: int) -> None:
    files = write(tmp_path / "out", [("p", to_table(groups_of([length] * n_groups), 0))])
    counts = [cell for file in files for cell in file.row_groups]
    assert len(counts) >= min(64, n_groups)
    assert sum(cell.groups for cell in counts) == n_groups
    assert sum(cell.documents for cell in counts) == n_groups * length
    metadata = pq.ParquetFile(tmp_path / "out" / files[0].path).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [c.groups for c in counts]


@pytest.mark.slow
def test_row_groups_grow_to_the_size_asked_for_and_files_end_there(tmp_path: Path) -> None:
    n = 40 << 20
    lengths = [100] * (n // (100 * DOCUMENT_BYTES))
    files = write(
        tmp_path / "out", [("p", to_table(groups_of(lengths), 0))], row_group_bytes=1 << 18, file_bytes=8 << 20
    )
    sizes = [cell.documents * DOCUMENT_BYTES for file in files for cell in file.row_groups]
    group = 100 * DOCUMENT_BYTES
    assert 4 << 20 <= sum(sizes[:64]) <= (4 << 20) + group
    assert all(size >= sum(sizes[: 65 + i]) // 64 for i, size in enumerate(sizes[64:-1]) if size < 1 << 18)
    assert max(sizes) <= (1 << 18) + group
    assert min(sizes[64:-1]) >= 64 << 10
    assert sum(sizes) == len(lengths) * group
    assert len(files) > 3
    assert all((8 << 20) <= file.bytes < 9 << 20 for file in files[:-1])
    assert [file.path.split("/")[1][:16] for file in files] == [f"part-00000-{i:05}" for i in range(len(files))]


@pytest.mark.slow
def test_the_cut_into_tables_does_not_matter(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 400, 2000).tolist()  # about 14 MB
    groups = groups_of(lengths)
    table = to_table(groups, 0)
    whole = write(tmp_path / "whole", [("p", table)])
    cuts = [0, *sorted(rng.choice(2000, 50, replace=False).tolist()), 2000]
    pieces = [("p", table.slice(a, b - a)) for a, b in pairwise(cuts)]
    assert files_without_writer(write(tmp_path / "pieces", pieces)) == files_without_writer(whole)


def test_many_periods_stay_within_buffers_and_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_BUFFERS_BYTES", 100_000)
    monkeypatch.setattr(writer_module, "_OPEN_FILES", 3)
    tables = [(f"p{i % 10}", to_table(groups_of([5] * 40, first=200 * i), 40 * i)) for i in range(100)]
    files = write(tmp_path / "out", tables, before=(64, 0))
    assert len({file.period for file in files}) == 10
    assert len(files) > 10
    for period in (f"p{i}" for i in range(10)):
        read = [pq.ParquetFile(tmp_path / "out" / f.path).read() for f in files if f.period == period]
        gids = np.concatenate([table.column("gid").to_numpy() for table in read])
        expected = np.concatenate([t.column("gid").to_numpy() for p, t in tables if p == period])
        np.testing.assert_array_equal(gids, expected)


def test_nothing_is_left_when_the_commit_is_abandoned(tmp_path: Path) -> None:
    with Commit(str(tmp_path / "out")) as commit:
        writer = DatasetWriter(commit, n_features=F, file_bytes=1)
        writer.add("p", to_table(groups_of([50] * 3000), 0))
        assert writer.files
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
