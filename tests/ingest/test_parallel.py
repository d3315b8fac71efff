"""`prepare` in tasks of a Ray cluster: the same bytes as in one process, on any cluster; named failures."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparing import prepare, rejections_of, rows_of
from writer_tokens import manifest_without_writer

from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset, Manifest, open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest import parallel
from ltrscale.ingest.categories import encode
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.parallel import Call, each_done

LETOR = {"kind": "letor"}
BERLIN = int(encode(pa.array(["berlin"]))[0])
TINY = 1e-6
"""Megabytes of a unit so that each file is one."""


def by_ray(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that uses the cluster."""
    return pytest.mark.s3(pytest.mark.ray(pytest.mark.usefixtures("s3", "ray_cluster")(test)))


def config(inputs: Any, source: Mapping[str, Any] = LETOR, **settings: Any) -> PrepareConfig:
    return PrepareConfig.model_validate({"inputs": inputs, "source": source, "max_rejected": 0.9, **settings})


def by_gid(dataset: Dataset) -> list[dict[str, Any]]:
    return sorted(rows_of(dataset), key=lambda row: int(row["gid"]))


def dirty_lines(rng: np.random.Generator, n_queries: int) -> Iterator[str]:
    """Rows that break every rule; query ids return within a file and between files."""
    for _ in range(50):
        query = f"q{rng.integers(n_queries)}"
        broken = rng.random() < 0.1  # all rows of the group
        for i in range(rng.choice([1, 2, 3, 5, 12], p=[0.3, 0.3, 0.2, 0.15, 0.05])):
            label = "-1" if rng.random() < 0.05 else str(rng.integers(3))
            value = "inf" if rng.random() < 0.03 else f"{rng.lognormal():.3f}"
            document = f"d{i - 1}" if i and rng.random() < 0.05 else f"d{i}"
            text = "x" if broken or rng.random() < 0.03 else value
            yield f"{label} qid:{query} 1:{text} 2:{rng.random():.4f} #docid = {document}\n"


def write_dirty(folder: Path) -> list[dict[str, Any]]:
    """Inputs of several files: two with fixed periods (one of them in two places), two without."""
    rng = np.random.default_rng(0)
    inputs: list[dict[str, Any]] = []
    for k, period in enumerate((None, "train", None, "test", "train")):
        (folder / f"in{k}").mkdir()
        for j in range(2):
            (folder / f"in{k}" / f"{j}.txt").write_text("".join(dirty_lines(rng, 150)))
        inputs.append({"path": str(folder / f"in{k}"), "period": period})
    (folder / "in0" / "empty.txt").touch()
    return inputs


@contextmanager
def only_cpus(n: int) -> Iterator[None]:
    """The cluster with only this number of its four CPUs free."""
    import ray

    class Idle:
        def here(self) -> None:
            """Return once the CPUs are taken."""

    actor = ray.remote(num_cpus=4 - n)(Idle).remote()
    ray.get(actor.here.remote())
    try:
        yield
    finally:
        ray.kill(actor)


def same(one: Dataset, other: Dataset) -> None:
    """Check that two data sets are equal: the manifest has the hashes of data files; quarantines are compared."""
    assert manifest_without_writer(other.manifest) == manifest_without_writer(one.manifest)
    quarantined = [[storage.read_bytes(storage.join(d.url, n)) for n in d.manifest.quarantine] for d in (one, other)]
    assert quarantined[0] == quarantined[1]


@pytest.mark.slow
@pytest.mark.parametrize("unit_mb", [TINY, 0.006])
def test_where_the_input_is_cut_changes_the_files_and_nothing_else(tmp_path: Path, unit_mb: float) -> None:
    inputs = write_dirty(tmp_path)
    whole = prepare(config(inputs, max_group=10), str(tmp_path / "whole"))
    pieces = prepare(config(inputs, max_group=10, unit_mb=unit_mb), str(tmp_path / "pieces"))
    assert by_gid(pieces) == by_gid(whole)
    assert [row["gid"] for row in by_gid(pieces)] == list(range(whole.manifest.accounting.groups_kept))
    assert rejections_of(pieces) == rejections_of(whole)
    assert pieces.manifest.accounting == whole.manifest.accounting
    assert set(whole.manifest.accounting.rules) == {
        *("returning_query", "group_too_long", "infinite", "bad_label", "duplicate_document", "unparsable")
    }
    assert pieces.manifest.label_counts == whole.manifest.label_counts
    assert pieces.manifest.files.longest == whole.manifest.files.longest
    assert len(pieces.manifest.files) > len(whole.manifest.files)
    for ours, theirs in zip(pieces.manifest.summaries, whole.manifest.summaries, strict=True):
        close = pytest.approx(theirs.model_dump(exclude={"unique_in_group"}), rel=1e-12)
        assert ours.model_dump(exclude={"unique_in_group"}) == close
        assert ours.unique_in_group == theirs.unique_in_group


@pytest.mark.nightly
@by_ray
def test_a_period_that_several_units_write_goes_on_in_larger_row_groups(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for k in range(4):
        rows = rng.random((20_000, 40), np.float32)
        ids = [f"{k if i % 3000 < 2000 else 0}-{i // 10}" for i in range(len(rows))]
        columns = {f"f{i}": rows[:, i] for i in range(40)}
        pq.write_table(pa.table({"q": ids, **columns}), tmp_path / f"{k}.parquet")
    source = {"kind": "items", "columns": {"query": "q", "features": ["f*"]}}
    cells = {}  # a third of the groups of later files have the ids of the first
    for name, unit_mb in (("whole", 256.0), ("pieces", TINY)):
        dataset = prepare(config(f"{tmp_path}/*.parquet", source, unit_mb=unit_mb), str(tmp_path / name))
        cells[name] = [len(file.row_groups) for file in dataset.manifest.files]
    assert len(cells["pieces"]) == 4
    assert sum(cells["whole"]) <= sum(cells["pieces"]) <= 1.2 * sum(cells["whole"])
    assert cells["pieces"][0] > cells["pieces"][3]
    same(dataset, prepare(config(f"{tmp_path}/*.parquet", source, unit_mb=TINY), str(tmp_path / "ray"), ray=True))


@by_ray
@pytest.mark.parametrize("unit_mb", [TINY, 0.01, 256])
def test_ray_gives_the_bytes_of_one_process(tmp_path: Path, unit_mb: float) -> None:
    settings = config(write_dirty(tmp_path), max_group=10, unit_mb=unit_mb)
    same(prepare(settings, str(tmp_path / "one")), prepare(settings, str(tmp_path / "ray"), ray=True))
    assert sorted(path.name for path in (tmp_path / "ray").iterdir()) == [
        *("manifest.json", "period=all", "period=test", "period=train", "quarantine", "query-ids")
    ]


@by_ray
@pytest.mark.parametrize("cpus", [1, 2])
def test_the_number_of_cpus_does_not_matter(tmp_path: Path, cpus: int) -> None:
    settings = config(write_dirty(tmp_path), max_group=10, unit_mb=TINY)
    with only_cpus(cpus):
        same(prepare(settings, str(tmp_path / "one")), prepare(settings, str(tmp_path / "ray"), ray=True))


@by_ray
def test_collisions_of_categories_are_those_of_the_whole_input(tmp_path: Path) -> None:
    cities = (["berlin", "rome"], [str(BERLIN), "oslo"], ["berlin", "oslo"], ["rome", str(BERLIN)])
    for k, values in enumerate(cities):
        pq.write_table(pa.table({"q": [f"q{k}"] * 2, "y": [0.0, 1.0], "c": values}), tmp_path / f"{k}.parquet")
    source = {"kind": "items", "columns": {"query": "q", "label": "y", "categorical": ["c"]}}
    settings = config(f"{tmp_path}/*.parquet", source, unit_mb=TINY)
    one = prepare(settings, str(tmp_path / "one"))
    same(one, prepare(settings, str(tmp_path / "ray"), ray=True))
    assert one.manifest.accounting.hash_collisions == 1


@by_ray
def test_units_of_a_sort_are_all_files_of_a_fixed_period(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = []
    for k, period in enumerate(("a", None, "a", "b", None)):
        lines = [f"{i % 2} qid:q{i // 4} 1:{i} #docid = {k}-{i}\n" for i in range(40 * k, 40 * k + 200)]
        (tmp_path / f"{k}.txt").write_text("".join(lines[i] for i in rng.permutation(200)))
        inputs.append({"path": str(tmp_path / f"{k}.txt"), "period": period})
    settings = config(inputs, sort=True, unit_mb=TINY, max_rejected=0)
    one = prepare(settings, str(tmp_path / "one"))
    assert one.manifest.accounting.rows_kept == 1000
    same(one, prepare(settings, str(tmp_path / "ray"), ray=True))


@by_ray
def test_paths_mean_what_they_mean_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the workers stay where the cluster was started
    for name in ("a", "b"):
        Path(f"{name}.txt").write_text("".join(f"1 1:{i} 2:0\n" for i in range(6)))
        Path(f"{name}.sizes").write_text("2\n4\n")
    inputs = [{"path": f"{name}.txt", "group_sizes": f"{name}.sizes", "period": name} for name in ("a", "b")]
    made = prepare(config(inputs, {**LETOR, "dense": False, "n_features": 2}), "out", ray=True)
    assert made.manifest.counts() == (4, 12, 4)
    assert len(by_gid(made)) == 4
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]


@by_ray
@pytest.mark.parametrize("files", [slice(3, 4), slice(3, None)], ids=["one unit", "several units"])
def test_an_addition_is_the_same_by_ray(tmp_path: Path, files: slice) -> None:
    for k in range(6):
        text = "".join(f"{i % 3} qid:{(20 * k + i // 2) % 90} 1:{i} 2:{k}\n" for i in range(60))
        (tmp_path / f"{k}.txt").write_text(text)
    urls = [str(tmp_path / f"{k}.txt") for k in range(6)]
    for out, ray in (("one", False), ("ray", True)):
        prepare(config(urls[:3], unit_mb=TINY, period="old"), str(tmp_path / out), ray=ray)
        added = prepare(config(urls[files], add=True, unit_mb=TINY, period="new"), str(tmp_path / out), ray=ray)
        assert added.manifest.accounting.rules["returning_query"] >= 60
    same(open_dataset(str(tmp_path / "one")), open_dataset(str(tmp_path / "ray")))


@by_ray
def test_a_real_log_is_the_same_by_ray(shared_data: Path, tmp_path: Path) -> None:
    log = next((shared_data / "news" / "sample").rglob("*.parquet"))
    table = pq.read_table(log)
    bounds = [0, 3000, 3005, 9000, len(table)]  # groups are cut in two: the second parts come back
    for k, (start, stop) in enumerate(pairwise(bounds)):
        pq.write_table(table.slice(start, stop - start), tmp_path / f"{k}.parquet")
    columns = {"query": "impression_id", "item": "article_id", "label": "clicked", "meta": ["session_id", "user_id"]}
    columns |= {"time": "event_time", "period": "hour", "features": ["f_*"], "categorical": ["c_*"]}
    settings = config(f"{tmp_path}/*.parquet", {"kind": "items", "columns": columns}, unit_mb=TINY)
    one = prepare(settings, str(tmp_path / "one"))
    same(one, prepare(settings, str(tmp_path / "ray"), ray=True))
    whole = prepare(settings.replace(inputs=[{"path": str(log)}]), str(tmp_path / "whole")).manifest.accounting
    assert whole.rows_in == one.manifest.accounting.rows_in
    assert whole.groups_kept - 3 <= one.manifest.accounting.groups_kept <= whole.groups_kept
    assert set(one.manifest.accounting.rules) == {"returning_query"}


@by_ray
def test_failures_are_those_of_one_process_and_leave_nothing(tmp_path: Path) -> None:
    for k in range(6):
        (tmp_path / f"{k}.txt").write_text("".join(f"1 qid:{k}-{i} 1:{i} 2:1\n" for i in range(50)))
    out = tmp_path / "out"
    settings = config(f"{tmp_path}/*.txt", unit_mb=TINY)
    (tmp_path / "3.txt").write_text("1 qid:a 1:x 2:1\n" * 50)
    with pytest.raises(InputError) as there:
        prepare(settings.replace(max_rejected=0.1), str(out), ray=True)
    assert f"{tmp_path}/3.txt:1 unparsable" in str(there.value)
    assert [path.name for path in out.glob("[!.]*")] == ["quarantine"]
    with pytest.raises(InputError) as here:
        prepare(settings.replace(max_rejected=0.1), str(out))
    assert str(here.value) == str(there.value)
    with pytest.raises(InputError, match="expected 7 groups, found 250"):
        prepare(settings.replace(expect={"all": {"groups": 7}}), str(out), ray=True)
    (tmp_path / "4.txt.gz").write_bytes(b"\x1f\x8b no gzip")
    with pytest.raises(InputError, match=r"^\S*4\.txt\.gz: corrupt gzip data") as damaged:
        prepare(settings.replace(inputs=f"{tmp_path}/*.txt*", source={**LETOR, "n_features": 2}), str(out), ray=True)
    assert "\n" not in str(damaged.value)
    assert not list(out.rglob("*.parquet")) or {p.parent.name for p in out.rglob("*.parquet")} == {"quarantine"}
    assert not list(out.rglob(".staging*"))


@by_ray
def test_columns_that_differ_between_files_are_named(tmp_path: Path) -> None:
    for k, kind in enumerate((pa.int64(), pa.int64(), pa.string())):
        table = pa.table({"q": [f"q{k}"], "f": [1.0], "user": pa.array([1]).cast(kind)})
        pq.write_table(table, tmp_path / f"{k}.parquet")
    source = {"kind": "items", "columns": {"query": "q", "features": ["f"], "meta": ["user"]}}
    for unit_mb, ray in ((TINY, True), (TINY, False), (256, False)):
        with pytest.raises(
            InputError, match=r"2\.parquet: column 'meta_user' .* is string where it is int64 in \S*0\."
        ):
            prepare(config(f"{tmp_path}/*.parquet", source, unit_mb=unit_mb), str(tmp_path / "out"), ray=ray)
        assert not list((tmp_path / "out").rglob("*.parquet"))


@pytest.mark.nightly
@by_ray
def test_on_s3_tasks_put_their_files_in_place_themselves(s3: str, tmp_path: Path) -> None:
    inputs = write_dirty(tmp_path)
    here = prepare(config(inputs, max_group=10, unit_mb=TINY), str(tmp_path / "here"))
    for path in sorted(tmp_path.glob("in*/*.txt")):
        storage.write_bytes(f"{s3}/ray-log/{path.parent.name}/{path.name}", path.read_bytes())
    moved = [{**entry, "path": f"{s3}/ray-log/{Path(entry['path']).name}"} for entry in inputs]
    there = prepare(config(moved, max_group=10, unit_mb=TINY), f"{s3}/ray-data", ray=True)
    assert there.manifest.hash == here.manifest.hash
    assert there.manifest.accounting == here.manifest.accounting
    assert by_gid(open_dataset(there.url)) == by_gid(here)
    with pytest.raises(InputError, match="max_rejected is 0"):
        prepare(config(moved, unit_mb=TINY, max_rejected=0), f"{s3}/ray-none", ray=True)
    assert {url.split("/")[-2] for url in storage.list_files(f"{s3}/ray-none")} == {"quarantine"}


@pytest.mark.nightly
@by_ray
def test_few_units_are_under_way_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(60):
        (tmp_path / f"{i:02}.txt").write_text("".join(dirty_lines(np.random.default_rng(i), 5000)))
    settings = config(f"{tmp_path}/*.txt", max_group=10, unit_mb=TINY)
    one = prepare(settings, str(tmp_path / "one"))
    waiting: list[int] = []
    following = parallel.UnitsOnRay.following

    def watched(order: parallel.UnitsOnRay) -> parallel.Call | None:
        call = following(order)
        waiting.append(order._to_survey - order._to_take)
        return call

    monkeypatch.setattr(parallel.UnitsOnRay, "following", watched)
    with only_cpus(1):
        same(one, prepare(settings, str(tmp_path / "ray"), ray=True))
    assert len(waiting) >= 120
    assert max(waiting) <= parallel._AHEAD * parallel._most_tasks() < 60


def _square_or_die(marker: Path, n: int, deaths: int) -> int:
    """Kills its process the given number of times, then works."""
    died = len(list(marker.glob(f"{n}-*")))
    if died < deaths:
        (marker / f"{n}-{died}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return n * n


def _sleep_or_fail(folder: Path, n: int) -> int:
    if n == 3:
        raise InputError("log-3: no good")
    (folder / f"started-{n}").touch()
    for _ in range(600):
        time.sleep(0.1)
    (folder / f"ended-{n}").touch()
    return n


def run_all(function: Callable[..., int], calls: Sequence[tuple[Any, ...]], name: str) -> dict[int, int]:
    """The results of calls by their number."""
    results: dict[int, int] = {}
    made = [
        Call(partial(function, *c), name.format(c[1]), partial(results.__setitem__, i)) for i, c in enumerate(calls)
    ]
    each_done(made, ray=True)
    return results


@by_ray
def test_a_task_that_dies_is_run_again_and_one_that_goes_on_dying_is_named(tmp_path: Path) -> None:
    calls = [(tmp_path, n, int(n == 2)) for n in range(4)]
    assert run_all(_square_or_die, calls, "log-{}") == {0: 0, 1: 1, 2: 4, 3: 9}
    with pytest.raises(InputError, match=r"^log-7: the process that handled it ended several times"):
        run_all(_square_or_die, [(tmp_path, 7, 99)], "log-{}")


@by_ray
def test_a_failing_task_stops_the_others(tmp_path: Path) -> None:
    calls: Sequence[Any] = [(tmp_path, n) for n in range(20)]
    with pytest.raises(InputError, match=r"^log-3: no good$"):
        run_all(_sleep_or_fail, calls, "?")
    assert len(list(tmp_path.glob("started-*"))) < 9
    assert not list(tmp_path.glob("ended-*"))


def test_a_manifest_counts_its_files(tmp_path: Path) -> None:
    made = prepare(config(write_dirty(tmp_path), max_group=10, unit_mb=TINY), str(tmp_path / "out"))
    rows = by_gid(made)
    documents = sum(len(row["labels"]) for row in rows)
    assert made.manifest.counts() == (len(rows), documents, len(rows))
    assert made.manifest.accounting.rows_kept == documents
    assert Manifest.model_validate(storage.read_manifest(made.url)) == made.manifest
