"""One job writes a directory at a time; on a local disk and on a real S3 server."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_until

from ltrscale import storage
from ltrscale.errors import InputError
from ltrscale.storage import lease as leases
from ltrscale.storage import writers

HOLDER = """
import sys, time
from ltrscale import storage
with storage.hold(sys.argv[1]):
    with storage.Commit(sys.argv[1]) as commit:
        with commit.file("part-{hash}.txt") as path:
            path.write_text("theirs")
        print("held", flush=True)
        sys.stdin.readline()
        try:
            commit.finish({"writer": "other process"})
            print("committed", flush=True)
        except storage.LeaseLost as error:
            print(f"lost: {error}", flush=True)
"""


_CLOCK = re.compile(r"(?<!date)(?<!datetime\.)\btime\.time(_ns)?\b|from time import")


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "new")
    return storage.join(request.getfixturevalue("s3"), tmp_path.name)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed more often and lapse sooner."""
    for name, seconds in (("_RENEW_S", 0.2), ("_LAPSE_S", 2.0), ("_LOOK_S", 0.1)):
        monkeypatch.setattr(leases, name, seconds)


@contextmanager
def other_process(url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the directory and has placed a file; it commits when it reads a line."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def below(url: str) -> list[str]:
    return storage.files.below(url)


def commit(url: str, text: str) -> None:
    with storage.Commit(url) as writer:
        with writer.file("part-{hash}.txt") as path:
            path.write_text(text)
        writer.finish({"writer": text})


@pytest.mark.slow
def test_a_second_job_waits_until_the_first_has_ended(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []
    monkeypatch.setattr(leases, "_LOOK_S", 0.1)

    def second() -> None:
        first_ready.wait()
        with storage.hold(url):
            events.append("second")

    def waiting() -> list[str]:
        return [message for message in caplog.messages if "is running there" in message]

    first_ready = threading.Event()
    thread = threading.Thread(target=second)
    writers.HELD.clear()
    with other_process(url) as process:
        thread.start()
        first_ready.set()
        # A first look at S3 takes as long as a busy machine lets it: the word that it waits says when it has looked.
        wait_until(waiting)
        time.sleep(0.5)
        assert events == []
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        thread.join(30)
    assert events == ["second"]
    (line,) = waiting()
    assert f"process {process.pid} on " in line
    assert leases.LEASE not in below(url)


@pytest.mark.slow
def test_a_second_job_that_is_not_to_wait_says_who_is_running(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(storage.WHEN_BUSY, "end")
    with (
        other_process(url) as process,
        pytest.raises(InputError, match=rf"process {process.pid} on .* is running there; wait for it"),
        storage.hold(url),
    ):
        pass


@pytest.mark.slow
def test_a_dead_holder_of_this_machine_is_replaced_at_once_and_swept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write_bytes(storage.join(url, "users-own.txt"), b"")
    with other_process(url) as process:
        process.kill()
        process.wait()
    left = [name for name in below(url) if name.startswith(("part-", ".staging-"))]
    assert left
    monkeypatch.setattr(leases, "_LAPSE_S", math.inf)
    with storage.hold(url) as before:
        storage.sweep(url, before)
        assert below(url) == [leases.LEASE, "users-own.txt"]
        commit(url, "ours")
    assert len(below(url)) == 3


@pytest.mark.slow
def test_only_what_a_dead_holder_has_left_is_taken_over(url: str) -> None:
    with storage.hold(url, only_left=True) as before:
        assert (before, storage.share_leases()) == ((), ())
    with other_process(url) as process:
        with storage.hold(url, only_left=True) as before:
            assert (before, storage.share_leases()) == ((), ()), "at once, though it is running there"
        process.kill()
        process.wait()
        with storage.hold(url, only_left=True) as before:
            assert len(before) == len(storage.share_leases()) == 1
    assert leases.LEASE not in below(url)


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_a_lease_of_another_machine_is_taken_over_when_it_lapses_and_not_while_it_is_renewed(tmp_path: Path) -> None:
    lease, over = tmp_path / leases.LEASE, threading.Event()

    def renew() -> None:
        beat = 0
        while not over.wait(0.2):
            beat += 1
            storage.write_bytes(
                str(lease), json.dumps({"token": "01234567", "machine": "another", "beat": beat}).encode()
            )

    renew_first = threading.Thread(target=renew)
    renew_first.start()
    wait_until(lease.exists)
    with storage.hold(str(tmp_path), only_left=True) as before:
        assert before == ()
    over.set()
    renew_first.join()
    with storage.hold(str(tmp_path), only_left=True) as before:
        assert before == ("01234567",)


def test_a_lease_that_was_left_empty_is_taken_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_LAPSE_S", math.inf)
    (tmp_path / leases.LEASE).touch()
    with storage.hold(str(tmp_path)):
        assert below(str(tmp_path)) == [leases.LEASE]


@pytest.mark.slow
def test_what_a_dead_holder_has_committed_stays(url: str) -> None:
    with other_process(url) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "committed\n"
        process.wait()
    manifest = storage.read_manifest(url)
    assert manifest is not None
    token = manifest["files"][0]["path"][-12:-4]
    with storage.hold(url):
        storage.sweep(url, [token])
    assert storage.is_whole(url, manifest)


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_a_holder_that_was_stopped_cannot_commit_when_it_wakes_up(url: str) -> None:
    with other_process(url) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        os.kill(process.pid, signal.SIGSTOP)
        with storage.hold(url) as before:
            assert len(before) == 1
            process.stdin.write("\n")
            process.stdin.flush()
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.readline().startswith("lost: ")
            commit(url, "ours")
    manifest = storage.read_manifest(url)
    assert manifest is not None
    assert manifest["writer"] == "ours"
    assert storage.is_whole(url, manifest)


def test_nothing_waits_by_a_clock_that_may_jump() -> None:
    reading = {path.name for path in Path(storage.__file__).parents[1].rglob("*.py") if _CLOCK.search(path.read_text())}
    stamps, comparing_clocks = {"metrics_file.py", "trackers.py", "tracking.py"}, {"stores.py", "doctor.py"}
    ages_of_files = {"readers.py"}  # a jump removes some early, or later
    assert reading <= stamps | comparing_clocks | ages_of_files


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_lease_that_is_renewed_does_not_lapse(url: str) -> None:
    with storage.hold(url):
        first = storage.read_bytes(storage.join(url, leases.LEASE))
        wait_until(lambda: storage.read_bytes(storage.join(url, leases.LEASE)) != first)
        second = storage.read_bytes(storage.join(url, leases.LEASE))
        assert json.loads(second)["token"] == json.loads(first)["token"]


def test_a_process_that_acts_for_the_holder_is_fenced_with_it(tmp_path: Path) -> None:
    url = str(tmp_path / "out")
    with storage.hold(url):
        (lease,) = storage.share_leases()
        assert lease == storage.writers.covering(f"{url}/period=a")
        assert storage.writers.covering(f"{url}-b") is None
        (tmp_path / "out" / leases.LEASE).write_text(json.dumps({"token": "other"}))
        with pytest.raises(storage.LeaseLost, match="has taken over"):
            commit(f"{url}/period=a", "x")
        with pytest.raises(storage.LeaseLost):
            storage.check_lease(f"{url}/period=b")
    assert storage.share_leases() == ()


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_a_damaged_lease_lapses_like_one_of_a_dead_host(tmp_path: Path) -> None:
    url = str(tmp_path)
    for text in ("{", "[]", json.dumps({"token": 1, "pid": "x", "before": None}), "\x00"):
        (tmp_path / leases.LEASE).write_text(text)
        with storage.hold(url) as before:
            storage.sweep(url, before)
            assert json.loads((tmp_path / leases.LEASE).read_text())["token"] == storage.share_leases()[0].token
        assert not (tmp_path / leases.LEASE).exists()


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_a_lease_does_not_lapse_while_the_store_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder needs the same store, so it could not renew the lease either."""
    (tmp_path / leases.LEASE).write_text(json.dumps({"token": "01234567", "machine": "another"}))
    read, reads, away_s = storage.files.read_if_there, [], 3.0

    def slow(url: str) -> bytes | None:
        reads.append(url)
        if len(reads) == 5:
            time.sleep(away_s)
        return read(url)

    monkeypatch.setattr(storage.files, "read_if_there", slow)
    began = time.monotonic()
    with storage.hold(str(tmp_path)) as before:
        assert time.monotonic() - began > away_s + leases._LAPSE_S
    assert before == ("01234567",)
