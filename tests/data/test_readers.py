from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ltrscale.data import readers
from ltrscale.data.readers import Reader, read_direct, read_with_ray
from ltrscale.data.split import Selection, Split, select
from ltrscale.data.stream import GroupStream, StreamConfig, iterate
from ltrscale.errors import InputError

Make = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings(
    r"ignore:.* is deprecated:DeprecationWarning:ray\.data\.context"
)  # its defaults
COLUMNS = ["gid", "features", "labels", "weights"]


@pytest.fixture(scope="module")
def made(make_dataset: Make) -> Any:
    rng = np.random.default_rng(0)
    row_groups = [rng.integers(1, 20, rng.integers(1, 9)).tolist() for _ in range(30)]
    return make_dataset({"a": row_groups[:13], "b": row_groups[13:14], "c": row_groups[14:]})


def choose(made: Any) -> Selection:
    return select(Split(data=(made.url,)), labelled=True)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this process's own; Ray leaves sockets to the garbage collector, which is no fault of ours."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(params=["direct", pytest.param("ray", marks=pytest.mark.ray)])
def read(request: pytest.FixtureRequest) -> Reader:
    if request.param == "direct":
        return read_direct
    request.getfixturevalue("ray_cluster")
    return read_with_ray


def test_tables_come_in_the_order_of_the_plan(made: Any, read: Reader) -> None:
    row_groups = choose(made).row_groups
    plan = [row_groups[i] for i in np.random.default_rng(1).permutation(len(row_groups))] + [row_groups[0]]
    tables = list(read(plan, COLUMNS))
    assert [table.num_rows for table in tables] == [row_group.groups for row_group in plan]
    for row_group, table in zip(plan, tables, strict=True):
        assert set(table.column_names) == {"gid", "features", "labels"}
        for gid, features in zip(table["gid"].to_pylist(), table["features"].to_pylist(), strict=True):
            assert made.groups[gid].period == row_group.period
            assert np.array_equal(np.float32(features), made.groups[gid].features.ravel())


def test_an_empty_plan_gives_nothing(read: Reader) -> None:
    assert list(read([], COLUMNS)) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "garbled", "flipped"])
def test_a_bad_file_is_one_line_that_names_it(make_dataset: Make, read: Reader, damage: str) -> None:
    selection = choose(make_dataset({"a": [[50] * 20]}))
    path = Path(selection.row_groups[0].url)
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
    with pytest.raises(InputError, match=r"part-00000-\w+\.parquet: (damaged|no such file)") as error:
        list(read(selection.row_groups, COLUMNS))
    assert "UDF" not in str(error.value)
    assert str(path) in str(error.value)


def test_files_are_opened_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = readers._open
    monkeypatch.setattr(readers, "_open", lambda url: opened.append(url) or real(url))
    row_groups = choose(made).row_groups
    list(read_direct([*row_groups[::2], *row_groups[1::2]], COLUMNS))
    assert len(opened) == len(set(opened)) == 3


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_stream_is_the_same_with_either_reader(made: Any) -> None:
    settings = StreamConfig(docs_per_batch=90, streams=3, window=2)

    def run(reader: Reader) -> list[dict[int, Any]]:
        steps = GroupStream(choose(made), settings, reader=reader).epoch(1)
        return [
            {c: groups and (groups.ids_Q.tolist(), groups.features_NF.tolist(), groups.labels_N.tolist())}
            for step in steps
            for c, groups in step.items()
        ]

    assert run(read_with_ray) == run(read_direct)


@pytest.mark.s3
def test_a_data_set_is_read_from_s3(make_dataset: Make, s3: str) -> None:
    lengths = {"a": [[2, 5, 3], [4]], "b": [[1, 1]]}
    local, remote = make_dataset(lengths), make_dataset(lengths, url=f"{s3}/readers")
    for one, other in zip(iterate(choose(remote)), iterate(choose(local)), strict=True):
        assert one.features_NF.equal(other.features_NF)
    row_group = choose(remote).row_groups[0]
    gone = replace(row_group, url=row_group.url.replace("part-00000", "part-00009"))
    with pytest.raises(InputError, match=r"s3://.*part-00009.*no such file"):
        list(read_direct([gone], COLUMNS))
