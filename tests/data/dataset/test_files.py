"""Data files and row groups as columns, compared with lists of their elements."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.data.dataset.files import Counts, DataFile, DataFiles, total_of
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.row_groups import FilesToRead, FileToRead, PartToRead, RowGroup, RowGroups
from ltrscale.data.dataset.scores import Found
from ltrscale.data.dataset.writer import _part_table
from ltrscale.origin import digest

COUNTS = st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 9)).map(
    lambda c: Counts(c[0], c[1], min(c[0], c[2]))
)
PERIODS = st.sampled_from(["2026-W01", "2026-W02", "ü"])


@st.composite
def data_files(draw: st.DrawFn) -> list[DataFile]:
    entries = draw(st.lists(st.tuples(PERIODS, st.lists(COUNTS, max_size=4)), max_size=6))
    return [
        DataFile(
            path=f"period={period}/part-{i}.parquet",
            period=period,
            bytes=i,
            sha256=f"{i:064x}",
            longest=i,
            row_groups=tuple(row_groups),
        )
        for i, (period, row_groups) in enumerate(entries)
    ]


@given(data_files(), st.randoms())
def test_columns_are_the_files(files: list[DataFile], random: np.random.Generator) -> None:
    columns = DataFiles.from_iterable(files)
    assert list(columns) == files
    assert columns == files
    assert [columns[i] for i in range(-len(files), 0)] == files
    assert list(columns[1:3]) == files[1:3]
    assert list(pickle.loads(pickle.dumps(columns))) == files
    assert columns.periods == sorted({file.period for file in files})
    for period, of_period in columns.by_period.items():
        assert list(of_period) == [file for file in files if file.period == period]
        assert columns.in_periods([period]) == of_period
    assert columns.counts() == total_of(counts for file in files for counts in file.row_groups)
    assert columns.longest == max((file.longest for file in files), default=0)
    chosen = [i for i in range(len(files)) if random.random() < 0.5]
    assert list(columns.take(np.array(chosen, np.int64))) == [files[i] for i in chosen]


@given(data_files(), st.integers(0, 6))
def test_files_of_two_data_sets_are_joined_by_period_and_path(files: list[DataFile], cut: int) -> None:
    joined = DataFiles.joined([DataFiles.from_iterable(files[cut:]), DataFiles.from_iterable(files[:cut])])
    assert list(joined) == sorted(files, key=lambda file: (file.period, file.path))


@given(data_files())
def test_the_identity_of_files_is_that_of_plain_data(files: list[DataFile]) -> None:
    plain = [(file.period, file.sha256, file.row_groups) for file in files]
    content = DataFiles.from_iterable(files).content()
    assert "".join(content) == json.dumps(plain)
    assert digest({"b": content, "a": 1}) == digest({"a": 1, "b": plain})


@given(data_files())
def test_a_table_of_files_holds_them_all(files: list[DataFile]) -> None:
    table = _part_table(DataFiles.from_iterable(files), ["quarantine/a"], ["{}"])
    assert list(DataFiles.from_table(table.slice(0, len(files)))) == files
    assert table["kind"].to_pylist()[len(files) :] == ["quarantine", "addition"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"path": "../precious"}, "a part is '..'"),
        ({"path": "part-a\npart-b"}, "control character"),
        ({"path": "run/part-a"}, "reserved"),
        ({"path": "_manifest.json/part-a"}, "reserved"),
        ({"path": "a/manifest.json/part-a"}, "reserved"),
        ({"path": None}, "lacks a value"),
        ({"sha256": "0" * 63 + '"'}, "no content hash"),
        ({"bytes": -1}, "no size"),
        ({"period": "a/b"}, "it has a '/'"),
        ({"longest": -1}, "so many documents"),
        ({"row_groups": (Counts(1, 2, 3),)}, "no row group has 1 groups"),
    ],
)
def test_a_table_that_lists_what_cannot_be_is_refused(change: dict[str, object], fault: str) -> None:
    good = DataFile(path="part-a", period="p", bytes=0, sha256="0" * 64, longest=1, row_groups=(Counts(1, 2, 1),))
    table = DataFiles.from_iterable([good._replace(**change)]).table()
    with pytest.raises(ValueError, match=fault):
        DataFiles.from_table(table)


FEATURES = (Feature(name="a"),)


@given(data_files(), data_files(), st.randoms())
def test_row_groups_take_along_their_own_files(
    one: list[DataFile], other: list[DataFile], random: np.random.Generator
) -> None:
    parts = [
        PartToRead(
            "/one",
            0,
            FEATURES,
            {},
            {file.path: Found(f"/scores/{file.path}", "") for file in one},
            DataFiles.from_iterable(one),
        ),
        PartToRead("/other", 9, FEATURES, {}, {}, DataFiles.from_iterable(other)),
    ]
    files = FilesToRead(parts)
    rows = [(f, i, *counts) for f, file in enumerate([*one, *other]) for i, counts in enumerate(file.row_groups)]
    columns = np.array([(*row, 0) for row in rows], np.int64).reshape(-1, 6).T
    row_groups = RowGroups(files, np.array([file.longest for file in files], np.int64), *columns)
    some = row_groups.take([i for i in range(len(rows)) if random.random() < 0.5])
    received = pickle.loads(pickle.dumps(some))
    assert list(received) == list(some)
    assert list(received.files) == [file for file in files if file in some.own_files]
    assert received.longest == some.longest


@st.composite
def some_row_groups(draw: st.DrawFn) -> list[RowGroup]:
    drawn = draw(st.lists(st.tuples(st.integers(0, 3), COUNTS), max_size=8))
    labelled = np.cumsum([0, *(counts.labelled for _, counts in drawn)]).tolist()
    return [
        RowGroup(
            FileToRead(
                f"file-{file}",
                f"p{file % 2}",
                gid_base=7 * file,
                scores=f"scores-{file}" if file == 2 else None,
                dataset="data" if file else "",
                stored=FEATURES,
                longest=file,
            ),
            i,
            *counts,
            first_labelled=labelled[i],
        )
        for i, (file, counts) in enumerate(drawn)
    ]


@given(some_row_groups(), st.randoms())
def test_columns_are_the_row_groups(row_groups: list[RowGroup], random: np.random.Generator) -> None:
    columns = RowGroups.from_iterable(row_groups)
    assert list(columns) == row_groups
    assert columns == row_groups
    assert list(columns[1:4]) == row_groups[1:4]
    assert [r.file.stored for r in pickle.loads(pickle.dumps(columns))] == [FEATURES] * len(row_groups)
    assert list(pickle.loads(pickle.dumps(columns[2:]))) == row_groups[2:]
    assert len(pickle.loads(pickle.dumps(columns[:1])).files) == len(row_groups[:1])
    assert [file.url for file in columns.own_files] == list(dict.fromkeys(r.file.url for r in row_groups))
    assert columns.longest == max((r.file.longest for r in row_groups), default=0)
    for url, of_file in columns.by_file().items():
        assert list(of_file) == [r for r in row_groups if r.file.url == url]
    for period, of_period in columns.by_period().items():
        assert list(of_period) == [r for r in row_groups if r.file.period == period]
    chosen = [i for i in range(len(row_groups)) if random.random() < 0.5]
    assert list(columns.take(chosen)) == [row_groups[i] for i in chosen]
    assert columns.documents_R.tolist() == [r.documents for r in row_groups]
    assert columns.first_labelled_R.tolist() == [r.first_labelled for r in row_groups]
