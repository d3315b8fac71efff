"""The cache of decoded row groups changes nothing but the time of reading, whatever has happened to its files."""

import logging
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from labelled_groups import WriteDataset

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.scores import SCORES
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream import readers
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.readers import cached, read_direct

FEATURES = [Feature(name="a"), Feature(name="b")]


@pytest.fixture(scope="module")
def selection(write_dataset: WriteDataset) -> Selection:
    draw = np.random.default_rng(0)
    weeks = {
        f"2026-01-{week:02}": [(draw.normal(size=(n, 2)), np.arange(float(n))) for n in (3, 5, 1, 8)]
        for week in range(1, 8)
    }
    return select(Split(data=write_dataset(weeks, FEATURES), periods=[*weeks]), labelled=True)


class Counting:
    """A reader that counts the row groups that it reads."""

    def __init__(self) -> None:
        self.read: list[RowGroup] = []

    def __call__(self, row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
        for row_group, table in zip(row_groups, read_direct(row_groups, columns), strict=True):
            self.read.append(row_group)
            yield table


def tables(selection: Selection, reader: readers.RowGroupReader) -> list[pa.Table]:
    return list(reader(selection.row_groups, ["gid", "features", "labels"]))


def test_batches_are_the_same_and_each_row_group_is_read_once(
    selection: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    config, reader = StreamConfig(docs_per_batch=20, streams=2, window=2), Counting()
    plain = GroupStream(selection, config)
    kept = GroupStream(selection, config.replace(cache_gb=1), reader=reader)
    for epoch in range(3):
        for step, expected in zip(kept.epoch(epoch), plain.epoch(epoch), strict=True):
            assert step.positions == expected.positions
            for stream, groups in expected.micro_batches.items():
                assert_equal(step.micro_batches[stream], groups)
    assert len(reader.read) == len(selection.row_groups) == 7
    again = GroupStream(selection, config.replace(cache_gb=1), reader=reader)  # a later run
    assert sum(1 for _ in again.epoch(0)) == sum(1 for _ in plain.epoch(0))
    assert len(reader.read) == 7


def assert_equal(found: QueryGroups | None, expected: QueryGroups | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        for name in ("features_NF", "offsets_Q1", "labels_N", "ids_Q"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist()


DAMAGES = ("cut", "emptied", "flipped", "zeroed", "removed", "none", "left over")


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(DAMAGES), min_size=7, max_size=7), st.data())
def test_damaged_and_missing_files_are_read_again(
    selection: Selection, tmp_path_factory: pytest.TempPathFactory, damages: list[str], data: st.DataObject
) -> None:
    folder, reader = tmp_path_factory.mktemp("cache"), Counting()
    expected = tables(selection, cached(reader, 1, folder))
    for path, damage in zip(sorted(folder.iterdir()), damages, strict=True):
        content = path.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        match damage:
            case "cut" | "emptied":
                path.write_bytes(content[: at if damage == "cut" else 0])
            case "flipped":
                path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
            case "zeroed":
                path.write_bytes(bytes(len(content)))
            case "removed":
                path.unlink()
            case "left over":  # of a process that was killed while it wrote
                path.with_name(f".{path.name}.1").write_bytes(content[:at])
    reader.read.clear()
    assert tables(selection, cached(reader, 1, folder)) == expected
    assert len(reader.read) == sum(damage not in ("none", "left over") for damage in damages)
    reader.read.clear()
    assert tables(selection, cached(reader, 1, folder)) == expected
    assert reader.read == []


def test_a_damaged_file_makes_room_for_itself(selection: Selection, tmp_path: Path) -> None:
    reader, (size,) = Counting(), {path.stat().st_size for path in kept_files(selection, tmp_path / "whole", 1.0)}
    for path in kept_files(selection, tmp_path / "some", 3.5 * size / 1e9):
        path.write_bytes(bytes(size))
    read = cached(reader, 3.5 * size / 1e9, tmp_path / "some")
    assert tables(selection, read) == tables(selection, read_direct)
    assert len(reader.read) == 7
    assert tables(selection, read) == tables(selection, read_direct)
    assert len(reader.read) == 7 + 4


def test_what_a_name_does_not_say_is_read_anew(selection: Selection, tmp_path: Path) -> None:
    read, reader = cached(read_direct, 1, tmp_path), Counting()
    rows = [*selection.row_groups]
    for columns in (["gid", "features", "labels"], ["gid", "labels", "features"], ["gid", "labels"]):
        assert [*read(rows, columns)] == [*read_direct(rows, columns)]
    assert len([*tmp_path.iterdir()]) == 3 * 7
    unnamed = [replace(row_group, file=replace(row_group.file, sha256="")) for row_group in rows]
    scored = [replace(row_group, file=replace(row_group.file, scores="s3://elsewhere/a.parquet")) for row_group in rows]
    assert {readers._file_name(row_group, ["gid", "features"]) for row_group in unnamed} == {""}
    assert {readers._file_name(row_group, ["gid", SCORES]) for row_group in scored} == {""}
    assert len({readers._file_name(row_group, ["gid", "features"]) for row_group in rows + scored}) == 7
    for _ in range(2):
        assert len([*cached(reader, 1, tmp_path)(unnamed, ["gid"])]) == 7
    assert len(reader.read) == 2 * 7


def test_passes_of_an_epoch_write_a_file_once(selection: Selection, tmp_path: Path) -> None:
    read = cached(read_direct, 1, tmp_path)
    rows = [*selection.row_groups] * 3
    assert [*read(rows, ["gid", "labels"])] == [*read_direct(rows, ["gid", "labels"])]
    assert len([*tmp_path.iterdir()]) == 7


def test_files_that_go_while_they_are_read_are_read_again(selection: Selection, tmp_path: Path) -> None:
    reader = Counting()
    read = cached(reader, 1, tmp_path)
    expected = tables(selection, read)
    found = []
    for table in read(selection.row_groups, ["gid", "features", "labels"]):
        found.append(table)
        for path in tmp_path.iterdir():
            path.unlink()
    assert found == expected
    assert len(reader.read) == 7 + 6


def test_the_cache_is_bounded_and_what_nobody_has_read_for_a_day_makes_room(
    selection: Selection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (size,) = {path.stat().st_size for path in kept_files(selection, tmp_path / "whole", 1.0)}
    files = kept_files(selection, tmp_path / "some", 3.5 * size / 1e9)
    assert len(files) == 3
    assert caplog.text.count("full; the rest is read from Parquet (stream.cache_gb)") == 1
    old, new = time.time() - 90_000, time.time()
    for path, read_at in zip(files, (old, new, old), strict=True):
        os.utime(path, (read_at, read_at))
    reader = Counting()
    list(cached(reader, 3.5 * size / 1e9, tmp_path / "some")(selection.row_groups, ["gid", "features"]))
    assert len(reader.read) == 7
    left = [path for path in (tmp_path / "some").iterdir() if path in files]
    assert left == [files[1]]
    assert sum(path.stat().st_size for path in (tmp_path / "some").iterdir()) <= 3.5 * size


def kept_files(selection: Selection, folder: Path, gigabytes: float) -> list[Path]:
    tables(selection, cached(read_direct, gigabytes, folder))
    return sorted(folder.iterdir())


def test_a_disk_that_others_need_gets_its_space_back(
    selection: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(kept_files(selection, tmp_path, 1)) == 7
    free = iter([0.01, 0.04, 0.06])
    monkeypatch.setattr(readers._Cache, "_free_bytes", lambda self: next(free, 0.06) * self._reserve() / 0.1)
    tables(selection, cached(read_direct, 1, tmp_path))
    assert len([*tmp_path.iterdir()]) == 5


def test_a_folder_that_cannot_be_written_is_said_once_and_costs_nothing_else(
    selection: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    read = cached(read_direct, 1, tmp_path)
    for _ in range(2):
        assert tables(selection, read) == tables(selection, read_direct)
    assert caplog.text.count("cannot be written (No space left on device); the rest is read from Parquet") == 1
    assert [*tmp_path.iterdir()] == []


def test_a_disk_that_cannot_be_used_costs_one_warning(
    selection: Selection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    read = cached(read_direct, 1, tmp_path / "file" / "decoded")
    for _ in range(2):
        assert tables(selection, read) == tables(selection, read_direct)
    assert caplog.text.count("decoded row groups cannot be kept: [Errno 20] Not a directory") == 1


@pytest.mark.slow
def test_processes_share_it(selection: Selection, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        jobs = [pool.apply_async(kept_files, (selection, tmp_path, 1.0)) for _ in range(6)]
        for job in jobs:
            job.get(60)
    reader = Counting()
    assert tables(selection, cached(reader, 1, tmp_path)) == tables(selection, read_direct)
    assert reader.read == []
    assert len([*tmp_path.iterdir()]) == 7
