"""Faults of the storage: it is overloaded, refuses, is gone, or is full."""

import contextlib
import functools
import itertools
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from command_lines import run_here
from nightly import nightly
from preparing import prepare
from small_disks import small_disk_at
from synthetic_columns import COLUMN_MAPPING, write_synthetic
from writer_tokens import without_writer

from ltrscale import storage
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.row_groups import FileToRead, RowGroup
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.ids import SeenHashes
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.readers import read_direct
from ltrscale.errors import InputError, UnavailableError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.tables import read_parquet
from ltrscale.simulate.synthetic import SyntheticLogConfig
from ltrscale.storage.faults import PATIENCE, Tries, patience_s
from ltrscale.storage.s3 import PatientS3
from tests.chaos.faulty_proxy import EXPIRED, SLOW_DOWN, Fault, FaultyProxy, Refusal

MIB = 1 << 20


@pytest.fixture
def environment(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Changes endpoint and keys, and clears the cache of file systems before and after."""
    assert s3
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    PatientS3.clear_instance_cache()
    yield monkeypatch
    PatientS3.clear_instance_cache()


@pytest.fixture
def proxy(environment: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy to the S3 server, set as the endpoint; it passes all requests until a share of faults is set."""
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"], 0.0) as running:
        environment.setenv("AWS_ENDPOINT_URL", running.url)
        yield running


@pytest.fixture
def url(s3: str, tmp_path: Path) -> str:
    return storage.join(s3, tmp_path.name)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    with small_disk_at(tmp_path / "disk", 2) as folder:
        yield folder


def commit(url: str, files: dict[str, bytes], **manifest: object) -> None:
    with storage.Commit(url) as writer:
        for name, data in files.items():
            with writer.file(name) as path:
                path.write_bytes(data)
        writer.finish(manifest)


def contents(url: str) -> dict[str, bytes]:
    return {without_writer(found.removeprefix(url)): storage.read_bytes(found) for found in storage.list_files(url)}


def read_in_pieces(url: str) -> bytes:
    with storage.open_input(url) as stream:
        return b"".join(iter(lambda: stream.read(3 * MIB), b""))


def read_by_arrow(url: str) -> pa.Table:
    filesystem, path = storage.arrow_filesystem(url)
    file = storage.patiently(lambda: pq.ParquetFile(path, filesystem=filesystem, pre_buffer=True))
    groups = range(file.num_row_groups)
    return pa.concat_tables([storage.patiently(lambda i=i: file.read_row_group(i)) for i in groups])


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize(("fault", "share"), [(SLOW_DOWN, 0.1), nightly(SLOW_DOWN, 0.5), ("reset", 0.4), ("cut", 0.4)])
def test_what_is_written_and_read_through_faults_is_the_same(
    proxy: FaultyProxy, url: str, fault: Fault, share: float, tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)
    large = generator.bytes(20 * MIB)  # three parts
    table = pa.table({"x": generator.random(20_000)})
    pq.write_table(table, tmp_path / "table", row_group_size=2_000)
    proxy.share, proxy.fault = share, fault
    commit(url, {"large": large, "table": (tmp_path / "table").read_bytes()}, version=1)
    assert not storage.swap(storage.join(url, storage.MANIFEST), None, b"other")
    manifest = storage.read_manifest(url)
    assert manifest is not None
    assert storage.read_verified(url, "large", manifest) == large
    assert read_in_pieces(storage.join(url, "large")) == large
    assert read_by_arrow(storage.join(url, "table")).equals(table)
    commit(url, {"large": b"small"}, version=2)
    assert storage.children(url) == [storage.join(url, name) for name in ("large", storage.MANIFEST)]
    assert storage.read_bytes(storage.join(url, "large")) == b"small"
    assert proxy.failed


@pytest.mark.nightly
@pytest.mark.s3
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_data_set_prepared_and_streamed_through_an_overloaded_store_is_the_same(
    proxy: FaultyProxy, url: str, share: float, tmp_path: Path
) -> None:
    log = SyntheticLogConfig(weeks=2, groups_per_week=60, mean_documents=8, n_features=5, labelled=1.0)
    config = {"source": {"kind": "items", "columns": COLUMN_MAPPING}}
    read = []
    for name, faults in (("calm", 0.0), ("overloaded", share)):
        inputs = write_synthetic(log, tmp_path / name)
        for file in inputs:
            storage.write_bytes(storage.join(url, name, "log", Path(file).name), Path(file).read_bytes())
        proxy.share, proxy.failed = faults, 0
        data = storage.join(url, name, "data")
        prepare(PrepareConfig.model_validate({"inputs": [storage.join(url, name, "log")], **config}), data)
        stream = GroupStream(select(Split(data=(data,)), labelled=True), StreamConfig(docs_per_batch=256, streams=2))
        steps = [groups for step in stream.epoch(0) for groups in step.micro_batches.values() if groups is not None]
        proxy.share = 0.0
        read.append((open_dataset(data).manifest, contents(data), steps))
    (manifest, bytes_, steps), (_, bytes_again, steps_again) = read
    assert manifest.files
    assert {n: b for n, b in bytes_.items() if n.endswith(".parquet")} == {
        n: b for n, b in bytes_again.items() if n.endswith(".parquet")
    }
    for groups, again in zip(steps, steps_again, strict=True):
        assert groups.labels_N is not None
        assert again.labels_N is not None
        assert groups.features_NF.numpy().tobytes() == again.features_NF.numpy().tobytes()
        assert torch.equal(groups.offsets_Q1, again.offsets_Q1)
        assert torch.equal(groups.labels_N, again.labels_N)
    assert proxy.failed


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize(
    ("method", "fault"),
    [("HEAD", SLOW_DOWN), nightly("GET", SLOW_DOWN), nightly("HEAD", "reset"), ("GET", "reset"), nightly("GET", "cut")],
    ids=lambda value: value.code if isinstance(value, Refusal) else value,
)
def test_a_row_group_is_read_after_more_failures_than_pyarrow_takes(
    proxy: FaultyProxy, url: str, method: str, fault: Fault, tmp_path: Path
) -> None:
    table = pa.table({"x": [1.0, 2.0]})
    pq.write_table(table, tmp_path / "table")
    storage.write_bytes(url, (tmp_path / "table").read_bytes())
    proxy.share, proxy.fault, failed = 1.0, fault, itertools.count()
    proxy.match = lambda used, _: used == method and next(failed) < 12
    row_group = RowGroup(FileToRead(url, "2026-W01"), 0, groups=2, documents=2, labelled=2)
    (read,) = read_direct([row_group], ["x"])
    assert read.equals(table)
    assert proxy.failed == 12


@pytest.mark.s3
@pytest.mark.parametrize("kept", [0.5, 0.0], ids=["half", "empty"])
def test_what_comes_short_is_never_taken_for_the_whole(
    proxy: FaultyProxy, environment: pytest.MonkeyPatch, url: str, kept: float, tmp_path: Path
) -> None:
    environment.setattr(PatientS3, "default_block_size", MIB)  # larger files are read in parts
    generator = np.random.default_rng(0)
    large = generator.bytes(5 * MIB // 2)
    table = pa.table({"x": generator.random(20_000)})
    pq.write_table(table, tmp_path / "table", row_group_size=10_000, write_page_checksum=True, compression="none")
    commit(url, {"large": large, "table": (tmp_path / "table").read_bytes()})
    files = [storage.join(url, name) for name in ("large", "manifest.json", "table")]
    row_groups = [RowGroup(FileToRead(files[2], "2026-W01"), i, 10_000, 10_000, 0) for i in (0, 1)]
    reads: dict[str, tuple[Callable[[], Any], Any]] = {
        "large": (lambda: storage.read_bytes(files[0]), large),
        "stream": (lambda: read_in_pieces(files[0]), large),
        "small": (lambda: storage.read_manifest(url), storage.read_manifest(url)),
        "row groups": (lambda: pa.concat_tables(list(read_direct(row_groups, ["x"]))), table),
        "list": (lambda: storage.list_files(url), files),
        "sizes": (lambda: storage.sizes_below(url), storage.sizes_below(url)),
        "write": (lambda: commit(url + "-more", {"large": large * 4}), None),  # in parts
    }
    proxy.fault, proxy.kept, proxy.share = "short", kept, 1.0
    for name, (read, expected) in reads.items():
        for number in range(5):  # each of the first requests alone
            asked = itertools.count()
            proxy.match = lambda method, _, n=number, asked=asked: method in ("GET", "POST") and next(asked) == n
            assert read() == expected, (name, number)
    assert proxy.failed > len(reads)
    environment.setenv(PATIENCE, "0.5")
    proxy.match = lambda method, _: method in ("GET", "POST")
    for name, (read, expected) in reads.items():  # all of them
        with contextlib.suppress(InputError, UnavailableError), storage.named_errors(url):
            whole = (
                read()
            )  # memory may still hold the end of a page from before: then its checksum says that it is whole
            assert name == "row groups", name
            assert whole == expected


@pytest.mark.s3
def test_a_store_that_refuses_is_not_taken_for_a_damaged_file(
    environment: pytest.MonkeyPatch, proxy: FaultyProxy, url: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "table")
    storage.write_bytes(url, (tmp_path / "table").read_bytes())
    row_group = RowGroup(FileToRead(url, "2026-W01"), 0, groups=2, documents=2, labelled=2)
    reads = (lambda: next(read_direct([row_group], ["x"])), lambda: next(read_parquet(url, ["x"], 10)))
    proxy.share, proxy.fault, proxy.match = 1.0, EXPIRED, lambda method, _: method == "GET"
    expired = "ExpiredToken.*the keys have expired|and that they have not expired"
    for read in reads:
        with pytest.raises(InputError, match=f"^{url}: .*({expired})"):
            read()
    proxy.share = 0.0
    environment.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    PatientS3.clear_instance_cache()
    for read in reads:
        with pytest.raises(InputError, match=f"^{url}: no permission to read .*check AWS_ACCESS_KEY_ID"):
            read()


ACTIONS: dict[str, Callable[[str], Any]] = {
    "exists": storage.exists,
    "read": storage.read_bytes,
    "stream": read_in_pieces,
    "arrow": read_by_arrow,
    "list": lambda url: storage.list_files(storage.join(url, "*")),
    "children": storage.children,
    "write": lambda url: storage.write_bytes(url, b"x"),
    "create": lambda url: storage.swap(url, None, b"x"),
    "commit": lambda url: commit(url, {"a": b"x"}),
}


def messages(
    actions: Mapping[str, Callable[[], Any]], path: str
) -> dict[str, tuple[InputError | UnavailableError, float]]:
    """Run all actions at once; returns the error of each and its seconds."""
    outcomes: dict[str, tuple[InputError | UnavailableError, float]] = {}

    def act(name: str) -> None:
        began = time.monotonic()
        with pytest.raises((InputError, UnavailableError)) as error, storage.named_errors(path):
            actions[name]()
        outcomes[name] = error.value, time.monotonic() - began

    threads = [threading.Thread(target=act, args=(name,)) for name in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert outcomes.keys() == set(actions)
    return outcomes


@pytest.mark.s3
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (SLOW_DOWN, "the store is overloaded .*run it again later"),
        nightly("reset", "the store does not answer .*check the network and AWS_ENDPOINT_URL"),
        ("gone", "the store does not answer .*check the network and AWS_ENDPOINT_URL"),
    ],
    ids=["overloaded", "reset", "gone"],
)
def test_patience_ends_in_one_line_for_all_that_waits(
    proxy: FaultyProxy, environment: pytest.MonkeyPatch, url: str, fault: Fault, said: str
) -> None:
    path = storage.join(url, "file")
    storage.write_bytes(path, b"x")
    environment.setenv(PATIENCE, "2")
    begun = threading.Event()

    def ending_commit() -> None:
        with storage.Commit(url) as writer, writer.file("a") as local:
            local.write_bytes(bytes(20 * MIB))
            begun.set()
            failing.wait()

    failing = threading.Event()
    actions = {name: functools.partial(after, failing, act, path) for name, act in ACTIONS.items()}

    def fail() -> None:
        begun.wait()
        with contextlib.ExitStack() as faults:
            if fault == "gone":
                faults.enter_context(proxy.gone())
            else:
                proxy.share, proxy.fault = 1.0, fault
            failing.set()
            over.wait()

    over, failed = threading.Event(), threading.Thread(target=fail)
    failed.start()
    outcomes = messages({**actions, "open commit": ending_commit}, path)
    over.set()
    failed.join()
    for name, (error, seconds) in outcomes.items():
        assert isinstance(error, UnavailableError), name
        assert re.search(f"{url}.*{said}", str(error)), name
        assert "\n" not in str(error), name
        assert seconds < 20, name  # not the patience of each request in turn


def after(event: threading.Event, act: Callable[[str], Any], path: str) -> None:
    event.wait()
    act(path)


def once() -> Callable[[], bool]:
    """True on the first call only."""
    calls = itertools.count()
    return lambda: next(calls) == 0


@pytest.mark.s3
def test_an_answer_lost_is_no_failure(proxy: FaultyProxy, url: str) -> None:
    proxy.share, proxy.after = 1.0, True
    path = storage.join(url, "file")
    first = once()
    proxy.match = lambda method, _: method == "PUT" and first()
    assert storage.swap(path, None, b"ours")
    assert proxy.failed == 1
    assert not storage.swap(path, None, b"theirs")
    assert storage.read_bytes(path) == b"ours"
    last = once()
    proxy.match = lambda method, to: method == "POST" and "uploadId" in to and last()
    large = os.urandom(17 * MIB)
    commit(url + "-commit", {"large-{hash}": large})
    assert proxy.failed == 2
    manifest = storage.read_manifest(url + "-commit")
    assert manifest is not None
    assert storage.read_verified(url + "-commit", manifest["files"][0]["path"], manifest) == large


@pytest.mark.slow
@pytest.mark.s3
def test_jobs_wait_for_a_store_that_is_gone_for_a_while_and_say_so_once(
    proxy: FaultyProxy, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, large = pa.table({"x": np.random.default_rng(0).random(20_000)}), os.urandom(20 * MIB)
    pq.write_table(table, tmp_path / "table", row_group_size=5_000)
    commit(url, {"table": (tmp_path / "table").read_bytes(), "large": large})
    done: dict[str, Any] = {}
    actions: dict[str, Callable[[], Any]] = {
        "exists": lambda: storage.exists(url),
        "read": lambda: storage.read_bytes(storage.join(url, "large")),
        "stream": lambda: read_in_pieces(storage.join(url, "large")),
        "arrow": lambda: read_by_arrow(storage.join(url, "table")),
        "list": lambda: len(storage.list_files(url)),
        "commit": lambda: commit(url + "-new", {"large": large}),
    }
    threads = [threading.Thread(target=lambda n=name: done.update({n: actions[n]()})) for name in actions]
    with caplog.at_level(logging.WARNING, "ltrscale"):
        with proxy.gone():
            for thread in threads:
                thread.start()
            time.sleep(8)
            assert not done
        for thread in threads:
            thread.join(timeout=60)
    assert (done["exists"], done["list"]) == (True, 3)
    assert done["read"] == done["stream"] == large
    assert done["arrow"].equals(table)
    assert "commit" in done
    assert storage.read_bytes(storage.join(url + "-new", "large")) == large
    began, ended = [record.getMessage() for record in caplog.records]
    assert re.match(r"storage does not answer \(.*\); trying again for up to 180 s$", began)
    assert re.match(r"storage answers again after \d+ s$", ended)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (EXPIRED, "ExpiredToken .*the keys have expired; renew AWS_ACCESS_KEY_ID, .* and AWS_SESSION_TOKEN$"),
        (Refusal(403, "RequestTimeTooSkewed", "Clocks differ."), "RequestTimeTooSkewed .*; set this machine's$"),
        (Refusal(403, "AccessDenied", "Access Denied."), "no permission to .*check AWS_ACCESS_KEY_ID"),
    ],
    ids=lambda value: value.code if isinstance(value, Refusal) else "",
)
def test_a_permanent_refusal_is_reported_at_once_by_its_name(
    proxy: FaultyProxy, url: str, refusal: Refusal, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    pause_after = Tries.pause_after

    def noted(tries: Tries, error: Exception) -> float | None:
        pause = pause_after(tries, error)
        pauses.extend([] if pause is None else [pause])
        return pause

    monkeypatch.setattr(Tries, "pause_after", noted)
    path = storage.join(url, "file")
    storage.write_bytes(path, b"x")
    proxy.share, proxy.fault = 1.0, refusal
    asked = {name: functools.partial(act, path) for name, act in ACTIONS.items()}
    for name, (error, _) in messages(asked, path).items():
        assert not isinstance(error, UnavailableError), name
        assert "network" not in str(error), name
        if name != "arrow":  # whose HEAD request is refused without a reason
            assert re.search(remedy, str(error)), name
        assert "AWS_ACCESS_KEY_ID" in str(error) or "clock" in str(error), name
    assert pauses == [], "nothing is tried again"


def test_patience_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, "long")
    with pytest.raises(InputError, match=f"{PATIENCE}=long: not a number of seconds"):
        patience_s()


@pytest.mark.s3
def test_a_head_request_is_repeated_although_its_refusal_has_no_text(proxy: FaultyProxy, url: str) -> None:
    storage.write_bytes(url, b"x")
    proxy.share, asked = 1.0, itertools.count()
    proxy.match = lambda method, _: method == "HEAD" and next(asked) < 5
    assert storage.size(url) == 1
    assert proxy.failed == 5


@pytest.mark.s3
def test_a_refused_request_leaves_no_file_out_of_a_listing(proxy: FaultyProxy, url: str) -> None:
    for name in "abc":
        storage.write_bytes(storage.join(url, f"{name}.csv"), b"x")
    proxy.share = 1.0
    # not that of the name as it is written, which may stand for itself
    proxy.match = lambda method, path: method == "HEAD" and path.endswith(("/a.csv", "/b.csv", "/c.csv"))
    assert len(storage.list_files(storage.join(url, "*.csv"))) == 3


def make(fault: str, environment: pytest.MonkeyPatch, url: str) -> tuple[str, str]:
    """Cause a fault; returns the URL to use and the text that its error must name."""
    if fault == "wrong key":
        environment.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        return url, "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if fault == "unknown key":
        environment.setenv("AWS_ACCESS_KEY_ID", "nobody")
        return url, "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if fault == "no key":
        for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
            environment.delenv(name)
        environment.setenv("HOME", "/nowhere")
        return url, "check AWS_ACCESS_KEY_ID"
    if fault == "no bucket":
        return "s3://nowhere/runs", "check the path"
    environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    return url, "check the network and AWS_ENDPOINT_URL"


@pytest.mark.s3
@pytest.mark.parametrize("fault", ["wrong key", "unknown key", "no key", "no bucket", "no server"])
def test_what_cannot_work_is_reported_in_one_line_within_half_a_minute(
    environment: pytest.MonkeyPatch, url: str, fault: str
) -> None:
    environment.setenv(PATIENCE, "5")
    at, remedy = make(fault, environment, url)
    path = storage.join(at, "file")
    asked = {
        name: functools.partial(act, path)
        for name, act in ACTIONS.items()
        if fault != "no bucket" or name not in ("exists", "children")
    }
    assert fault != "no bucket" or not storage.exists(path)
    for name, (error, seconds) in messages(asked, path).items():
        assert str(error).startswith(path), name
        assert remedy in str(error), name
        assert "\n" not in str(error), name
        assert seconds < 30, name


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize(
    ("fault", "role"), [nightly("wrong key", "train.data"), ("no bucket", "out"), nightly("no server", "out")]
)
def test_a_job_reports_what_cannot_work_in_one_line(
    environment: pytest.MonkeyPatch, url: str, synthetic_dataset: str, fault: str, role: str, tmp_path: Path
) -> None:
    environment.setenv(PATIENCE, "2")  # less than a wait that is logged
    environment.setattr(tempfile, "tempdir", str(tmp_path))  # where a log is left that cannot be copied
    at, remedy = make(fault, environment, url)
    keys = {"train.data": synthetic_dataset, "out": str(tmp_path / "out"), role: at}
    done = run_here("pretrain", *(f"--set={key}={value}" for key, value in keys.items()))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("pretrain: ")]
    (line,) = [line for line in lines if "; the log and the metrics of this run are in " not in line]
    assert line.startswith(f"error: {at}")
    assert remedy in line


def left(folder: Path) -> list[str]:
    """All files below a folder, including hidden ones, and folders with staged files."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() or ".staging" in p.name)


WRITERS: dict[str, Callable[[Path], None]] = {
    "bytes": lambda path: path.write_bytes(bytes(3 * MIB)),
    "parquet": lambda path: pq.write_table(pa.table({"x": np.random.default_rng(0).random(400_000)}), path),
    "tensors": lambda path: safetensors.torch.save_file({"x": torch.ones(3 * MIB // 4)}, path),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_leaves_the_commit_before_whole(small_disk: Path, write: Callable[[Path], None]) -> None:
    url = str(small_disk / "run")
    commit(url, {"weights": b"old" * 1000, "more": b"old"}, version=1)
    before = left(small_disk)

    def again() -> None:
        with storage.Commit(url) as writer:
            with writer.file("more") as path:
                path.write_bytes(b"new")
            with writer.file("weights") as path:
                write(path)
            writer.finish({"version": 2})

    with pytest.raises(InputError, match=r"run/weights: disk full: more than the 2,0\d\d,\d+ bytes free are") as error:
        again()
    assert "choose another directory" in str(error.value)
    manifest = storage.read_manifest(url)
    assert manifest is not None
    assert manifest["version"] == 1
    assert storage.read_verified(url, "weights", manifest) == b"old" * 1000
    assert storage.read_verified(url, "more", manifest) == b"old"
    assert left(small_disk) == before


def test_a_full_disk_is_reported_before_a_file_of_known_size_is_written(small_disk: Path) -> None:
    with (
        pytest.raises(InputError, match=r"run/weights: disk full: 3,145,728 bytes are needed, [\d,]+ are free in"),
        storage.Commit(str(small_disk / "run")) as writer,
        writer.file("weights", size=3 * MIB),
    ):
        pytest.fail("was written to")
    assert left(small_disk) == []


def test_a_manifest_without_room_leaves_the_commit_before_whole(small_disk: Path) -> None:
    url = str(small_disk / "run")
    commit(url, {"same": b"old"}, version=1)

    def again() -> None:
        with storage.Commit(url) as writer:
            with writer.file("same") as path:
                path.write_bytes(b"new")
            (small_disk / "filler").write_bytes(bytes(small_disk_free(small_disk)))
            writer.finish({"long": "x" * 100_000})

    with pytest.raises(InputError, match=r"manifest\.json: disk full: 100,\d+ bytes are needed, 0 are free"):
        again()
    manifest = storage.read_manifest(url)
    assert manifest is not None
    assert storage.read_verified(url, "same", manifest) == b"old"
    assert left(small_disk) == ["filler", "run/manifest.json", "run/same"]


@pytest.mark.parametrize("label", [1, -1], ids=["data", "quarantine"])
def test_a_full_disk_stops_prepare_in_one_line(small_disk: Path, tmp_path: Path, label: int) -> None:
    values = np.random.default_rng(0).random(1_000)
    lines = (
        f"{label} qid:{i // 100} " + " ".join(f"{f}:{v}" for f, v in enumerate(values[:60], 1)) for i in range(900)
    )
    (tmp_path / "log.txt").write_text("\n".join(lines))
    (small_disk / "filler").write_bytes(bytes(small_disk_free(small_disk) - 8192))
    config = PrepareConfig.model_validate({"inputs": str(tmp_path / "log.txt"), "source": {"kind": "letor"}})
    with pytest.raises(InputError, match=r"out: disk full: more than the [\d,]+ bytes free are needed"):
        prepare(config, str(small_disk / "out"))
    assert left(small_disk) == ["filler"]


def test_a_full_disk_for_query_ids_is_one_line(small_disk: Path) -> None:
    hashes = np.random.default_rng(0).integers(2**63, size=3 * MIB // 8, dtype=np.uint64)
    seen = SeenHashes(small_disk, memory_hashes=4)
    seen.add(hashes[:8])
    with pytest.raises(InputError, match=r"disk/run-.*: disk full: "):
        seen.add(hashes)


@pytest.mark.parametrize("write", [storage.write_bytes, lambda url, data: storage.swap(url, None, data)])
def test_a_file_without_room_leaves_nothing(small_disk: Path, write: Callable[[str, bytes], object]) -> None:
    with pytest.raises(InputError, match=r"deep/file: disk full: 3,145,728 bytes are needed, [\d,]+ are free in"):
        write(str(small_disk / "deep" / "file"), bytes(3 * MIB))
    assert left(small_disk) == []


def small_disk_free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
