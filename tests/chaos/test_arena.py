"""The arena of a chaos run: a server that keeps its data, and a disk that is filled and emptied."""

import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_until

from jobs.s3 import environment
from ltrscale import storage
from ltrscale.errors import UnavailableError
from tests.chaos.arena import BUCKET, Arena
from tests.chaos.faults import Fault, Havoc
from tests.chaos.processes import marked


def answers() -> bool:
    with suppress(UnavailableError):
        return bool(storage.read_bytes(f"{BUCKET}/kept"))
    return False


@pytest.mark.nightly
@pytest.mark.s3
def test_what_is_stored_outlives_every_fault(tmp_path: Path) -> None:
    arena = Arena(tmp_path, f"test-{time.time_ns()}")
    with arena.opened():
        havoc = Havoc(arena)
        storage.write_bytes(f"{BUCKET}/kept", b"bytes")
        for number, kind in enumerate(("crash", "freeze", "outage", "busy", "full")):
            if kind == "full" and not arena.small_disk:
                continue
            assert havoc.do(Fault(number, 0.0, kind, 0.5, 0.0, 0.0), [])  # type: ignore[arg-type]
            assert havoc.do(Fault(number, 0.0, kind, 0.5, 0.0, 0.0), []) is None  # the first is still there
            if kind == "full":
                assert shutil.disk_usage(arena.disk).free == 0
            time.sleep(0.6)
            havoc.pass_time()
            assert not havoc.active
        arena.s3.make_bucket(BUCKET.removeprefix("s3://"))
        wait_until(answers)  # the server recovers from a full disk
        assert storage.read_bytes(f"{BUCKET}/kept") == b"bytes"
        assert shutil.disk_usage(arena.disk).free > 1 << 20
        assert arena.left_on_disk() == []
        with environment(AWS_ENDPOINT_URL=arena.proxy.url):
            assert storage.read_bytes(f"{BUCKET}/kept") == b"bytes"
    assert marked(arena.mark) == []
    assert not arena.disk.is_mount()
    arena.remove()
    assert not arena.scratch.exists()
