import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from ltrscale import storage
from ltrscale.data.dataset import writer
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream import readers
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.data.stream.readers import RowGroupReader, read_direct
from ltrscale.errors import InputError
from ltrscale.processor import cores
from ltrscale.runtime import on_ray
from ltrscale.runtime.on_ray import read_with_ray

Make = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings(
    r"ignore:.* is deprecated:DeprecationWarning:ray\.data\.context"
)  # its defaults
THREADS = 4
COLUMNS = ["gid", "features", "labels", "weights"]


@pytest.fixture(scope="module")
def made(make_dataset: Make) -> Any:
    rng = np.random.default_rng(0)
    row_groups = [rng.integers(1, 20, rng.integers(1, 9)).tolist() for _ in range(30)]
    return make_dataset({"a": row_groups[:13], "b": row_groups[13:14], "c": row_groups[14:]})


def choose(made: Any) -> Selection:
    return select(Split(data=(made.url,)), labelled=True)


def test_a_file_that_a_part_of_the_manifest_lists_was_not_replaced(
    make_dataset: Make, tmp_path: Path, read: RowGroupReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_dataset({"a": [[3, 4], [5]]}, url=str(tmp_path / "data")).url
    monkeypatch.setattr(writer, "_FEW_FILES", 0)
    with storage.Commit(data) as commit:
        writer.commit_dataset(commit, open_dataset(data).manifest)
    assert (storage.read_manifest(data) or {})["files"] == []
    selection = select(Split(data=(data,)), labelled=True)
    Path(selection.row_groups[0].file.url).unlink()
    with pytest.raises(InputError, match="no such file"):
        list(read(selection.row_groups, ["gid"]))


@pytest.mark.parametrize("how", ["other names", "the same names"])
def test_a_data_set_that_was_replaced_is_an_error(
    make_dataset: Make, tmp_path: Path, read: RowGroupReader, how: str
) -> None:
    lengths = {"a": [[3, 4], [5]], "b": [[2]]}
    data = make_dataset(lengths, url=str(tmp_path / "data")).url
    selection = select(Split(data=(data,)), labelled=True)
    changed = make_dataset(lengths if how == "other names" else {"a": [[3, 4], [5]], "b": [[7]]}, seed=1).url
    if how == "other names":
        shutil.rmtree(data)
        shutil.copytree(changed, data)
    else:
        before, files = open_dataset(data).manifest, []
        for old, new in zip(before.files, open_dataset(changed).manifest.files, strict=True):
            shutil.copy(Path(changed) / new.path, Path(data) / old.path)
            files.append(new._replace(path=old.path))
        storage.write_bytes(f"{data}/manifest.json", before.replace(files=files).model_dump_json().encode())
    with pytest.raises(InputError) as error:
        list(read(selection.row_groups, ["gid"]))
    found = f"{data}: the data set was replaced since the run began, and no longer lists {data}/period="
    assert str(error.value).startswith(found)
    assert "\n" not in str(error.value)


def test_a_file_that_is_gone_from_its_data_set_is_named(
    make_dataset: Make, tmp_path: Path, read: RowGroupReader
) -> None:
    data = make_dataset({"a": [[3, 4], [5]]}, url=str(tmp_path / "data")).url
    selection = select(Split(data=(data,)), labelled=True)
    Path(selection.row_groups[0].file.url).unlink()
    with pytest.raises(InputError, match="no such file"):
        list(read(selection.row_groups, ["gid"]))


def test_tables_come_in_the_order_of_the_plan(made: Any, read: RowGroupReader) -> None:
    row_groups = choose(made).row_groups
    plan = [row_groups[i] for i in np.random.default_rng(1).permutation(len(row_groups))] + [row_groups[0]]
    tables = list(read(plan, COLUMNS))
    assert [table.num_rows for table in tables] == [row_group.groups for row_group in plan]
    for row_group, table in zip(plan, tables, strict=True):
        assert set(table.column_names) == {"gid", "features", "labels"}
        for gid, features in zip(table["gid"].to_pylist(), table["features"].to_pylist(), strict=True):
            assert made.groups[gid].period == row_group.file.period
            assert np.array_equal(np.float32(features), made.groups[gid].features.ravel())


def gids(tables: Any) -> list[list[int]]:
    return [table["gid"].to_pylist() for table in tables]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("row_groups", [[[1, 2]] * 150, [[300] * 40, [2], [300] * 60]], ids=["many small", "few large"])
def test_blocks_are_cut_back_into_row_groups(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch, row_groups: list[list[int]]
) -> None:
    monkeypatch.setattr(on_ray, "_BLOCK_BYTES", 16 << 10)  # a large row group has 200 kB here
    plan = list(choose(make_dataset({"a": row_groups, "b": row_groups})).row_groups)
    plan = [plan[i] for i in np.random.default_rng(0).permutation(len(plan))]
    for table, expected in zip(read_with_ray(plan, COLUMNS), read_direct(plan, COLUMNS), strict=True):
        assert table.equals(expected)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_two_streams_at_once_are_each_in_order(made: Any) -> None:
    row_groups = choose(made).row_groups
    plans = row_groups, row_groups[::-1]
    both = zip(*(read_with_ray(plan, ["gid"]) for plan in plans), strict=True)
    for found, plan in zip(zip(*both, strict=True), plans, strict=True):
        assert gids(found) == gids(read_direct(plan, ["gid"]))


def test_an_empty_plan_gives_nothing(read: RowGroupReader) -> None:
    assert list(read([], COLUMNS)) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "garbled", "flipped", "no letter"])
def test_a_bad_file_is_one_line_that_names_it(make_dataset: Make, read: RowGroupReader, damage: str) -> None:
    selection = choose(make_dataset({"a": [[50] * 20]}))
    path = Path(selection.row_groups[0].file.url)
    whole = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "empty":
            path.write_bytes(b"")
        case "garbled":
            path.write_bytes(bytes(len(whole)))
        case "flipped":
            path.write_bytes(whole[:4] + bytes(b ^ 255 for b in whole[4:300]) + whole[300:])
        case "no letter":
            at = whole.index(b"element")
            path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with pytest.raises(InputError, match=r"part-00000-[\w-]+\.parquet: (damaged|no such file)") as error:
        list(read(selection.row_groups, COLUMNS))
    assert "UDF" not in str(error.value)
    assert str(path) in str(error.value)


def test_files_are_opened_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = readers.open_parquet
    monkeypatch.setattr(readers, "open_parquet", lambda url: opened.append(url) or real(url))
    row_groups = choose(made).row_groups
    list(read_direct([*row_groups[::2], *row_groups[1::2]], COLUMNS))
    assert len(opened) == len(set(opened)) == 3


def test_where_cores_cannot_be_distinguished_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1


def test_reading_ahead_keeps_order_and_distance() -> None:
    begun: list[int] = []
    numbers = readers._ahead(lambda n: begun.append(n) or n, range(40), THREADS)
    for n, found in enumerate(numbers):
        assert found == n
        assert len(begun) <= n + 1 + THREADS
    assert sorted(begun) == list(range(40))


def test_what_fails_ahead_is_raised_in_its_place() -> None:
    numbers = readers._ahead(lambda n: 12 // (3 - n), range(40), THREADS)
    assert list(itertools.islice(numbers, 3)) == [4, 6, 12]
    with pytest.raises(ZeroDivisionError):
        next(numbers)
    assert not reading_threads()


def test_closing_ends_what_reads_ahead() -> None:
    begun: list[int] = []
    numbers = readers._ahead(lambda n: time.sleep(0.01) or begun.append(n), range(1000), THREADS)
    next(numbers)
    assert reading_threads()
    numbers.close()
    assert not reading_threads()
    assert len(begun) <= 1 + 2 * THREADS


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read_")]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_closing_a_stream_of_ray_ends_its_threads_and_tasks(made: Any) -> None:
    import ray

    plan = [*choose(made).row_groups] * 100
    tables: Generator[Any] = read_with_ray(plan, COLUMNS)
    next(tables)
    tables.close()  # what Ray keeps for the next stream is there now
    before = set(threading.enumerate())
    tables = read_with_ray(plan, COLUMNS)
    next(tables)
    assert set(threading.enumerate()) > before
    tables.close()
    wait_until(lambda: set(threading.enumerate()) <= before)
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_stream_is_the_same_with_either_reader(made: Any) -> None:
    settings = StreamConfig(docs_per_batch=90, streams=3, window=2)

    def run(reader: RowGroupReader) -> list[dict[int, Any]]:
        steps = GroupStream(choose(made), settings, reader=reader).epoch(1)
        return [
            {c: groups and (groups.ids_Q.tolist(), groups.features_NF.tolist(), groups.labels_N.tolist())}
            for step in steps
            for c, groups in step.micro_batches.items()
        ]

    assert run(read_with_ray) == run(read_direct)


@pytest.mark.s3
def test_a_data_set_is_read_from_s3(make_dataset: Make, s3: str) -> None:
    lengths = {"a": [[2, 5, 3], *[[4]] * 20], "b": [[1, 1]]}
    local, remote = make_dataset(lengths), make_dataset(lengths, url=f"{s3}/readers")
    for one, other in zip(iterate(choose(remote)), iterate(choose(local)), strict=True):
        assert one.features_NF.equal(other.features_NF)
    row_group = choose(remote).row_groups[0]
    gone = replace(row_group, file=replace(row_group.file, url=row_group.file.url.replace("part-00000", "part-00009")))
    with pytest.raises(InputError, match=r"no longer lists s3://.*part-00009"):
        list(read_direct([row_group, gone], COLUMNS))
    assert not reading_threads()
