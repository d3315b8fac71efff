import errno
import threading
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ltrscale.errors import InputError
from ltrscale.ingest.rows import Rejection, RowBlock
from ltrscale.ingest.sort import sort_rows

Row = tuple[str, str, int, tuple[float, ...], float, str, str | None]


def make_blocks(ids: list[str], cuts: list[int], files: int, *, seed: int = 0, docs: bool = True) -> list[RowBlock]:
    """Rows with these query ids, cut into blocks; files get consecutive runs of blocks."""
    rng = np.random.default_rng(seed)
    bounds = [0, *sorted(cuts), len(ids)]
    blocks = []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        n = stop - start
        block = RowBlock(
            file=f"file-{i * files // len(bounds)}",
            lines_N=np.arange(start, stop) + 2,
            query_ids_N=pa.array(ids[start:stop], pa.string()),
            features_NF=rng.standard_normal((n, 3), dtype=np.float32),
            labels_N=rng.integers(0, 5, n).astype(np.float32),
            periods_N=pa.array([f"2026-W{k:02d}" for k in rng.integers(1, 9, n)], pa.string()),
            doc_ids_N=pa.array([f"d{k}" for k in range(start, stop)], pa.string()) if docs else None,
        )
        block.features_NF[::3, 1] = np.nan
        blocks.append(block)
    return blocks


def rows_of(blocks: list[RowBlock]) -> list[Row]:
    rows: list[Row] = []
    for block in blocks:
        periods = [block.period] * len(block) if block.periods_N is None else block.periods_N.to_pylist()
        docs = [None] * len(block) if block.doc_ids_N is None else block.doc_ids_N.to_pylist()
        features = [tuple(np.nan_to_num(row, nan=-99).tolist()) for row in block.features_NF]
        rows += zip(
            block.query_ids_N.to_pylist(),
            [block.file] * len(block),
            block.lines_N.tolist(),
            features,
            block.labels_N.tolist(),
            periods,
            docs,
            strict=True,
        )
    return rows


def oracle(rows: list[Row]) -> list[Row]:
    first: dict[str, int] = {}
    for i, row in enumerate(rows):
        first.setdefault(row[0], i)
    return sorted(rows, key=lambda row: first[row[0]])  # stable: rows of a query stay in order


@pytest.mark.slow
@given(
    ids=st.lists(st.sampled_from(["a", "b", "ß", "", "long " * 9]), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    files=st.integers(1, 4),
    docs=st.booleans(),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_a_stable_sort_in_memory(
    ids: list[str], cuts: list[int], files: int, docs: bool, tmp_path: Path
) -> None:
    blocks = make_blocks(ids, [min(cut, len(ids)) for cut in cuts], files, docs=docs)
    assert rows_of(list(sort_rows(blocks, scratch=tmp_path))) == oracle(rows_of(blocks))


@pytest.mark.slow
def test_shuffled_rows_come_back_as_whole_queries(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    ids = [f"q{i}" for i in rng.permutation(np.repeat(np.arange(4_000), 10))]
    blocks = make_blocks(ids, list(range(0, 40_000, 3_000)), 5)
    out = list(sort_rows(blocks, scratch=tmp_path))
    assert len([query for query, _ in groupby(row[0] for row in rows_of(out))]) == 4_000
    assert rows_of(out) == oracle(rows_of(blocks))
    assert not list(tmp_path.glob("*.parquet"))


def test_rejections_pass_through_once(tmp_path: Path) -> None:
    blocks = make_blocks(["b", "a", "b", "c"], [1, 2], 1)
    bad = [Rejection("file-0", 7, "unparsable", "x", "q"), Rejection("file-0", 9, "empty_group", "y", rows=0)]
    blocks[0].rejected, blocks[2].rejected = bad[:1], bad[1:]
    out = list(sort_rows(blocks, scratch=tmp_path))
    assert [one for block in out for one in block.rejected] == bad
    assert sum(len(block) for block in out) == 4


def test_columns_keep_their_types(tmp_path: Path) -> None:
    columns = {
        "positions": pa.array([1.0, None, 3.0], pa.float32()),
        "meta_at": pa.array([datetime(2026, 2, 14, 9, tzinfo=UTC), None, None], pa.timestamp("ms", "UTC")),
        "meta_local": pa.array([datetime(2026, 2, 14, 9), None, None], pa.timestamp("ns")),
        "meta_day": pa.array([date(2026, 2, 14), None, None]),
        "meta_name": pa.array(["ü", None, ""], pa.large_string()),
        "meta_small": pa.array([1, None, -1], pa.int8()),
        "meta_flag": pa.array([True, None, False]),
        "meta_price": pa.array([Decimal("1.50"), None, None], pa.decimal128(9, 2)),
        "meta_tags": pa.array([["a", "b"], None, []], pa.list_(pa.string())),
        "meta_none": pa.nulls(3),
    }
    [block] = make_blocks(["b", "a", "b"], [], 1)
    block.columns, block.periods_N, block.period = columns, None, "train"
    [out] = sort_rows([block], scratch=tmp_path)
    assert {name: column.type for name, column in out.columns.items()} == {n: c.type for n, c in columns.items()}
    for name, column in columns.items():
        assert out.columns[name].to_pylist() == column.take(pa.array([0, 2, 1])).to_pylist(), name
    assert out.periods_N is not None
    assert out.periods_N.to_pylist() == ["train"] * 3


WIDER: list[tuple[pa.Array, pa.Array]] = [
    (pa.nulls(2), pa.array(["u", None])),
    (pa.nulls(2), pa.array([["a"], None])),
    (pa.array([1, 2]), pa.array([0.5, None])),
    (pa.array([1, None], pa.int8()), pa.array([1 << 40, 3])),
    (pa.array([0.1, None], pa.float32()), pa.array([2**53, 3])),
]


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("columns", WIDER)
def test_a_column_becomes_as_wide_as_a_block_needs(
    columns: tuple[pa.Array, pa.Array], turned: bool, tmp_path: Path
) -> None:
    blocks = make_blocks(["b", "a", "c", "b", "a", "c"], [2, 4], 3)
    values = [*columns[::-1], pa.nulls(2)] if turned else [*columns, pa.nulls(2)]
    for block, column in zip(blocks, values, strict=True):
        block.columns = {"meta_s": column}
    out = list(sort_rows(blocks, scratch=tmp_path))
    assert rows_of(out) == oracle(rows_of(blocks))
    assert len({block.columns["meta_s"].type for block in out}) == 1
    found = {
        line: value
        for block in out
        for line, value in zip(block.lines_N.tolist(), block.columns["meta_s"].to_pylist(), strict=True)
    }
    assert found == dict(enumerate([value for column in values for value in column.to_pylist()], 2))
    assert not [*tmp_path.iterdir()]


UNLIKE: list[tuple[pa.Array, pa.Array, str]] = [
    (pa.array([1, 2]), pa.array(["u", "v"]), "file-1: column 'meta_s' is string where it is int64 in file-0; write"),
    (pa.array(["u", "v"]), pa.array([1, 2]), "file-1: column 'meta_s' is int64 where it is string in file-0; write"),
    (pa.array([0.5, 2]), pa.array([2**53 + 1, 2]), "file-1: column 'meta_s' is int64 here and double elsewhere, which"),
    (pa.array([2**53 + 1, 2]), pa.array([0.5, 2]), "file-0: column 'meta_s' is int64 here and double elsewhere, which"),
]


@pytest.mark.parametrize(("first", "second", "message"), UNLIKE)
def test_types_that_fit_no_wider_one_are_one_line(
    first: pa.Array, second: pa.Array, message: str, tmp_path: Path
) -> None:
    blocks = make_blocks(["b", "a", "b", "a"], [2], 2)
    blocks[0].file, blocks[1].file = "file-0", "file-1"
    blocks[0].columns, blocks[1].columns = {"meta_s": first}, {"meta_s": second}
    with pytest.raises(InputError, match=message):
        list(sort_rows(blocks, scratch=tmp_path))
    assert not [*tmp_path.iterdir()]


def test_share_is_that_of_the_rows_and_texts_are_gone(tmp_path: Path) -> None:
    blocks = make_blocks([f"q{i % 977}" for i in range(50_000)], list(range(0, 50_000, 5_000)), 3)
    for block in blocks:
        block.share, block.texts = 1.0, str
    done = 0
    shares = []
    for block in sort_rows(blocks, scratch=tmp_path):
        done += len(block)
        shares.append(block.share)
        assert done / 50_000 <= block.share <= 1
        assert block.texts is None
    assert shares == sorted(shares)
    assert len(set(shares)) > 2
    assert shares[-1] == 1


def test_no_rows_and_no_blocks(tmp_path: Path) -> None:
    assert list(sort_rows([], scratch=tmp_path)) == []
    assert list(sort_rows(make_blocks([], [], 1), scratch=tmp_path)) == []


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    def blocks(n: int) -> Iterator[RowBlock]:
        rng = np.random.default_rng(0)
        for start in range(0, n, 20_000):
            ids = pa.array([f"q{i}" for i in rng.integers(0, n // 10, 20_000)])
            lines, labels = np.arange(start, start + 20_000), np.zeros(20_000, np.float32)
            yield RowBlock("f", lines, ids, rng.random((20_000, 100), dtype=np.float32), labels)

    def peak(n: int) -> int:
        """The peak of resident memory in bytes, sampled while n rows are sorted."""
        most, done = 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.is_set():
                most = max(most, int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
                time.sleep(0.005)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            assert sum(map(len, sort_rows(blocks(n), memory_limit="256MB", scratch=tmp_path))) == n
        finally:
            done.set()
            thread.join()
        return most

    small, large = peak(400_000), peak(2_000_000)  # 160 MB and 800 MB of features
    assert large < 1.2 * small


def test_a_disk_that_is_full_of_rows_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fill)
    with pytest.raises(InputError, match=f"{tmp_path}: cannot sort there: .*No space left.*; make room .* set TMPDIR"):
        list(sort_rows(make_blocks(["a", "b"], [1], 1), scratch=tmp_path))
