"""Faults of files in a real data set on disk and on S3: each is named and left out, and training uses the rest."""

import hashlib
import io
import itertools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jobs.s3 import environment
from ltrscale import storage
from ltrscale.data.dataset import preflight as preflights
from ltrscale.data.dataset.files import Counts
from ltrscale.data.dataset.manifest import Feature, Manifest, open_dataset
from ltrscale.data.dataset.preflight import Preflight, PreflightConfig, checked, preflight
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.dataset.writer import Compression, DatasetWriter
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.data.stream.readers import read_direct
from ltrscale.errors import InputError
from ltrscale.pretext.objective import Pretrainer
from ltrscale.training.feed import listed
from ltrscale.training.fitting import fit
from ltrscale.training.loop import Trainer
from ltrscale.training.pretrain import PretrainConfig
from tests.chaos.faulty_proxy import FaultyProxy

FEATURES = ("a", "b", "c")
PERIODS = ("p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9")
LEVELS = ("sizes", "footers", "content")


def table(period: str, n_groups: int, *, weights: bool = False, first_gid: int = 0) -> pa.Table:
    """Groups of 1 to 5 documents, one in three unlabelled."""
    rng = np.random.default_rng([ord(letter) for letter in period])
    lengths = rng.integers(1, 6, n_groups)
    lists = pa.list_(pa.float32())
    columns = {
        "gid": pa.array(range(first_gid, first_gid + n_groups), pa.int64()),
        "query_id": [f"{period}-{i}" for i in range(n_groups)],
        "features": pa.array([rng.normal(size=3 * n).astype(np.float32) for n in lengths], lists),
        "labels": pa.array([None if i % 3 == 0 else rng.random(n, np.float32) for i, n in enumerate(lengths)], lists),
    }
    if weights:
        columns["weights"] = pa.array([rng.random(n, np.float32) for n in lengths], lists)
    return pa.table(columns)


def write(url: str, *, compression: Compression = "none", periods: tuple[str, ...] = PERIODS, **options: Any) -> str:
    """A data set with one file per period, of 20, 21, 22, ... query groups."""
    with storage.Commit(url) as commit:
        writer = DatasetWriter(commit, n_features=len(FEATURES), compression=compression)
        for i, period in enumerate(periods):
            first = sum(20 + j for j in range(i))
            writer.add(period, table(period, 20 + i, first_gid=first, **options))
        files = writer.close()
        manifest = Manifest(features=tuple(Feature(name=name) for name in FEATURES), files=files)
        commit.finish(manifest.model_dump(mode="json"))
    return url


def file_of(url: str, period: str) -> str:
    (path,) = [file.path for file in open_dataset(url).manifest.files if file.period == period]
    return storage.join(url, path)


def damage(url: str, period: str, change: Callable[[bytes], bytes | None]) -> str:
    """Change the bytes of a period's file, or delete it; returns its URL."""
    file = file_of(url, period)
    content = change(storage.read_bytes(file))
    if content is None:
        storage.remove(file)
    else:
        storage.write_bytes(file, content)
    return file


def pages(content: bytes) -> range:
    """The offsets of the pages of a Parquet file."""
    return range(4, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))


def flip(content: bytes, at: int, bit: int = 0) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def flip_a_value(content: bytes) -> bytes:
    """Flip one bit of the features of a group in the middle."""
    column = pq.read_metadata(io.BytesIO(content)).row_group(5).column(2)
    assert column.path_in_schema.startswith("features")
    return flip(content, column.data_page_offset + column.total_compressed_size - 9, bit=5)


def foreign(change: Callable[[pa.Table], pa.Table]) -> Callable[[str, str], str]:
    """Replaces a period's file by another Parquet file and updates the manifest's size and hash, like a bad merge."""

    def put(url: str, period: str) -> str:
        file = file_of(url, period)
        target, old = io.BytesIO(), pq.ParquetFile(io.BytesIO(storage.read_bytes(file)))
        changed = change(old.read())
        rows = [old.metadata.row_group(i).num_rows for i in range(old.num_row_groups)]
        with pq.ParquetWriter(target, changed.schema) as writer:
            for first, n in zip(np.cumsum([0, *rows]).tolist(), rows, strict=False):
                writer.write_table(changed.slice(first, n))
        relist(url, file, target.getvalue())
        return file

    return put


def relist(url: str, file: str, content: bytes) -> None:
    storage.write_bytes(file, content)
    manifest = storage.read_manifest(url)
    assert manifest is not None
    (entry,) = [entry for entry in manifest["files"] if file.endswith(entry["path"])]
    entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    storage.write_bytes(storage.join(url, storage.MANIFEST), json.dumps(manifest).encode())


def doubled_features(groups: pa.Table) -> pa.Table:
    return groups.set_column(2, "features", groups["features"].cast(pa.list_(pa.float64())))


def bytewise(change: Callable[[bytes], bytes | None]) -> Callable[[str, str], str]:
    return lambda url, period: damage(url, period, change)


FAULTS: dict[str, tuple[Callable[[str, str], str], str, str]] = {
    "p1": (bytewise(lambda _: None), "missing", "sizes"),
    "p2": (bytewise(lambda content: content + b"\n"), "size differs", "sizes"),
    "p3": (bytewise(lambda content: content[: len(content) // 2]), "size differs", "sizes"),
    "p4": (bytewise(lambda content: b"PAR2" + content[4:]), "bad magic", "footers"),
    "p5": (bytewise(lambda content: content[:-100] + bytes(100)), "bad footer", "footers"),
    "p6": (foreign(doubled_features), "schema differs", "footers"),
    "p7": (foreign(lambda groups: groups.slice(0, len(groups) - 1)), "rows differ", "footers"),
    "p8": (bytewise(flip_a_value), "content differs", "content"),
}
"""By period: how its file is damaged, what that is called, and the level that sees it."""


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL to write a data set to."""
    if request.param == "local":
        return str(tmp_path / "set")
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def whole(url: str) -> dict[str, Split]:
    return {"train": Split(data=(url,))}


def served(selection: Selection) -> dict[int, tuple[list[float], list[float]]]:
    """The groups that a stream serves."""
    found = {}
    for groups in iterate(selection):
        assert groups.ids_Q is not None
        for gid, (start, stop) in zip(
            groups.ids_Q.tolist(), itertools.pairwise(groups.offsets_Q1.tolist()), strict=True
        ):
            labels = [] if groups.labels_N is None else groups.labels_N[start:stop].tolist()
            found[gid] = (groups.features_NF[start:stop].tolist(), labels)
    return found


@pytest.mark.slow
def test_every_fault_is_named_and_its_file_left_out(place: str, tmp_path: Path) -> None:
    write(place)
    intact = served(select(Split(data=(write(str(tmp_path / "intact")),)), labelled=False))
    manifest = open_dataset(place).manifest
    urls = {period: make(place, period) for period, (make, _, _) in FAULTS.items()}
    for level, reached in zip(LEVELS, itertools.accumulate([level] for level in LEVELS), strict=True):
        result = preflight(whole(place), PreflightConfig(check=level, max_bad=0.9))
        expected = {urls[period]: reason for period, (_, reason, seen) in FAULTS.items() if seen in reached}
        assert {url: bad.reason for url, bad in result.bad.items()} == expected
        assert result.without == expected.keys()
        selection = select(Split(data=(place,)), labelled=False, without=result.without)
        check_counts(result, manifest, selection)
    assert served(selection) == {gid: intact[gid] for gid in served(selection)}
    assert {row_group.file.period for row_group in selection.row_groups} == {"p0", "p9"}


def check_counts(result: Preflight, manifest: Manifest, selection: Selection) -> None:
    """Check that listed = good + quarantined; the manifest gives the listed counts, the selection the good ones."""
    record = result.record()
    good = Counts(selection.n_groups, selection.n_documents, sum(r.labelled for r in selection.row_groups))
    for name, of_all in manifest.counts()._asdict().items():
        assert record[name] == of_all
        assert record[f"{name}_left_out"] == of_all - getattr(good, name)
    assert record["files"] == len(manifest.files)
    assert record["files_good"] == len({row_group.file.url for row_group in selection.row_groups})
    assert record["files_quarantined"] == len(result.bad)


@pytest.mark.slow
def test_the_rest_is_trained(place: str) -> None:
    write(place)
    for period, (make, _, _) in FAULTS.items():
        make(place, period)
    result = preflight(whole(place), PreflightConfig(check="content", max_bad=0.9))
    selection = select(Split(data=(place,)), labelled=False, without=result.without)
    config = PretrainConfig.model_validate({"network": {"encoder": {"width": 8, "blocks": 1}}})
    torch.manual_seed(0)
    model = Pretrainer(fit(selection, config.network), config.network, config.method, config.augment, None)
    stream = GroupStream(selection, StreamConfig(docs_per_batch=40, streams=2))
    account = listed(selection, read_direct)  # which the trainer compares with what it has read
    trainer = Trainer(model, model, stream, config.optimizer, epochs=1, seed=0, expected=account)
    steps = list(trainer.epoch())
    assert sum(step.groups for step in steps) == selection.n_groups == 20 + 29
    assert all(np.isfinite(step.loss) for step in steps)


def test_beyond_the_limit_the_job_stops_before_it_begins(tmp_path: Path) -> None:
    url = write(str(tmp_path / "set"))
    files = [damage(url, period, lambda _: None) for period in ("p1", "p4")]
    splits = {"train": Split(data=(url,), periods=("p0..p4",)), "validation": Split(data=(url,), periods=("p5..p6",))}
    share = (21 + 24) / sum(range(20, 25))
    assert len(preflight(splits, PreflightConfig(max_bad=share)).bad) == 2
    with pytest.raises(
        InputError, match=r"train: 2 of 5 files, with 45 of 110 query groups, .*preflight\.max_bad"
    ) as stop:
        preflight(splits, PreflightConfig(max_bad=share - 1e-6))
    assert "\n" not in str(stop.value)
    assert all(f"{file} (missing" in str(stop.value) for file in files)
    damage(url, "p5", lambda content: content[:-1])
    with pytest.raises(InputError, match=r"validation: 1 of 2 files, .*\(size differs: \d+ bytes"):
        preflight(splits, PreflightConfig(max_bad=share))


def test_the_stop_names_the_first_files_only(tmp_path: Path) -> None:
    url = write(str(tmp_path / "set"))
    files = [damage(url, period, lambda _: None) for period in PERIODS[:5]]
    with pytest.raises(InputError, match="and 2 more") as stop:
        preflight(whole(url), PreflightConfig())
    assert [file in str(stop.value) for file in files] == [True] * 3 + [False] * 2


def test_only_the_files_that_are_read_are_checked_and_each_once(tmp_path: Path) -> None:
    url = write(str(tmp_path / "set"))
    damage(url, "p9", lambda _: None)
    one, other = (Split(data=(url,), periods=(periods,)) for periods in ("p0..p4", "p3..p8"))
    result = preflight({"train": one, "validation": other}, PreflightConfig(check="content"))
    assert [(found.files, found.bad) for found in result.datasets] == [(9, ())]
    assert str(result) == "9 files, all good"


def test_a_result_is_the_same_each_time_and_survives_json(tmp_path: Path) -> None:
    url = write(str(tmp_path / "set"))
    for period, (make, _, _) in FAULTS.items():
        make(url, period)
    config = PreflightConfig(check="content", max_bad=1)
    result = preflight(whole(url), config)
    assert result == preflight(whole(url), config)
    assert result == Preflight.model_validate_json(result.model_dump_json())
    assert [bad.path for bad in result.datasets[0].bad] == sorted(bad.path for bad in result.datasets[0].bad)


@pytest.mark.parametrize("period", ["p0", "p5"])
def test_the_schema_of_most_files_is_the_right_one(tmp_path: Path, period: str) -> None:
    url = write(str(tmp_path / "set"))
    file = foreign(lambda groups: groups.drop_columns("query_id"))(url, period)
    result = preflight(whole(url), PreflightConfig(max_bad=1))
    assert {name: bad.detail for name, bad in result.bad.items()} == {
        file: "column 'query_id' is not there, in the other files string"
    }


def test_data_sets_of_a_split_must_have_the_same_columns(tmp_path: Path) -> None:
    one = write(str(tmp_path / "one"), periods=("p0",))
    other = write(str(tmp_path / "other"), periods=("p1",), weights=True)
    both = {"train": Split(data=(one, other))}
    assert len(preflight(both, PreflightConfig(check="sizes")).datasets) == 2
    with pytest.raises(InputError, match=r"train: column 'weights' is list<float> in .*other and not there in .*one"):
        preflight(both, PreflightConfig())
    apart = {"train": Split(data=(one,)), "validation": Split(data=(other,))}
    assert len(preflight(apart, PreflightConfig()).datasets) == 2


@pytest.mark.slow
def test_damage_to_a_footer_never_crashes_the_check(tmp_path: Path) -> None:
    url = write(str(tmp_path / "set"), periods=("p0",))
    file = storage.local_path(file_of(url, "p0"))
    content = file.read_bytes()
    data = open_dataset(url)
    reasons = set()
    no_letter = flip(content, content.index(b"element", pages(content).stop), bit=7)
    flipped = (flip(content, at, bit=at % 8) for at in range(pages(content).stop, len(content), 41))
    for damaged in (no_letter, *flipped):
        file.write_bytes(damaged)
        bad_files, _ = preflights.examine(data, data.manifest.files, "footers", lambda *_: None)
        reasons |= {bad.reason for bad in bad_files}
    assert "bad footer" in reasons
    assert reasons <= {"bad footer", "rows differ", "schema differs"}


def test_a_file_that_goes_while_files_are_checked_is_missing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place, periods=("p0", "p1"))
    list_sizes = preflights._list_sizes

    def then_one_goes(*arguments: Any) -> dict[str, int]:
        sizes = list_sizes(*arguments)
        damage(place, "p1", lambda _: None)
        return sizes

    monkeypatch.setattr(preflights, "_list_sizes", then_one_goes)
    assert [bad.reason for bad in preflight(whole(place), PreflightConfig(max_bad=1)).bad.values()] == ["missing"]


def test_storage_that_fails_is_no_fault_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = write(str(tmp_path / "set"), periods=("p0",))

    def broken(*_: Any) -> None:
        raise OSError("the cable is out")

    monkeypatch.setattr(preflights, "_examine_footer", broken)
    with pytest.raises(InputError, match=r"part-00000.*the cable is out; check"):
        preflight(whole(url), PreflightConfig(max_bad=1))


@pytest.mark.s3
def test_a_store_that_refuses_half_of_the_requests_makes_no_file_bad(s3: str) -> None:
    url = write(f"{s3}/refusing", periods=("p0", "p1", "p2"))
    gone = damage(url, "p1", lambda _: None)
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"], 0.5) as proxy, environment(AWS_ENDPOINT_URL=proxy.url):
        result = preflight(whole(url), PreflightConfig(check="content", max_bad=1))
    assert proxy.failed > 0
    assert result.without == {gone}


@pytest.mark.slow
def test_a_run_that_is_resumed_takes_the_same_files(place: str, caplog: pytest.LogCaptureFixture) -> None:
    write(place, periods=PERIODS[:4])
    content = storage.read_bytes(file_of(place, "p1"))
    gone = damage(place, "p1", lambda _: None)
    config, out, records = PreflightConfig(max_bad=0.9), f"{place}-run/preflight", list[Any]()

    def check_run(config: PreflightConfig, run: str) -> Preflight:
        return checked(whole(place), config, out, {"run": run}, report=records.append)

    with caplog.at_level(logging.INFO, "ltrscale"):
        first = check_run(config, "a")
        assert first.without == {gone}
        storage.write_bytes(gone, content)  # one is repaired, another turns bad
        gone_too = damage(place, "p2", lambda _: None)
        assert check_run(config, "a") == first
    lines = [record.getMessage() for record in caplog.records]
    found = f"4 files, 3 good, 1 quarantined: {gone} (missing: not in its directory); 21 of 86 groups left out"
    assert lines == [f"pre-flight: {found}", f"pre-flight, as this run began: {found}"]
    assert records[0] == records[1]
    assert records[0]["reasons"] == {"missing": 1}
    storage.withdraw(out)
    assert check_run(config, "a").without == {gone_too}
    storage.write_bytes(gone_too, content)
    assert next(iter(check_run(config.replace(max_bad=0.8), "a").bad.values())).reason == "size differs"
    damage(place, "p3", lambda _: None)
    assert len(check_run(config.replace(max_bad=0.8), "b").without) == 2


def test_a_stop_freezes_nothing(tmp_path: Path) -> None:
    url = write(str(tmp_path / "set"), periods=("p0",))
    damage(url, "p0", lambda _: None)
    with pytest.raises(InputError, match="1 of 1 files"):
        checked(whole(url), PreflightConfig(), str(tmp_path / "preflight"), {}, report=lambda _: None)
    assert not (tmp_path / "preflight").exists()


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_page_that_flips_later_stops_the_stream_and_names_the_file(place: str, compression: Compression) -> None:
    write(place, periods=("p0", "p1"), compression=compression)
    result = preflight(whole(place), PreflightConfig(check="content"))
    selection = select(Split(data=(place,)), labelled=True, without=result.without)
    file = damage(place, "p1", flip_a_value)
    with pytest.raises(InputError, match="damaged") as stop:
        served(selection)
    assert str(stop.value).startswith(file)
    assert "\n" not in str(stop.value)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_no_bit_of_a_page_changes_a_value_silently(tmp_path: Path, compression: Compression) -> None:
    url = write(str(tmp_path / "set"), periods=("p0",), compression=compression)
    selection = select(Split(data=(url,)), labelled=True)
    intact = served(selection)
    file = Path(file_of(url, "p0"))
    content = file.read_bytes()
    places, errors = range(pages(content).start, pages(content).stop, 71), []
    for at in places:
        file.write_bytes(flip(content, at, bit=at % 8))
        try:
            assert served(selection) == intact
        except InputError as error:
            errors.append(str(error))
    assert all(error.startswith(str(file)) for error in errors)
    assert len(errors) > len(places) / 4  # the ids of queries are not read, nor are some fields of a page's header
