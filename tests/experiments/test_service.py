"""What is in service: whoever looks at any moment finds all of a bundle that was put there."""

import errno
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from nightly import nightly

from ltrscale import bundle, storage
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError, UnavailableError
from ltrscale.experiments.service import InService, Week, copied, forget, put_into_service, take_back
from ltrscale.serving.export import Registry, put_alias
from ltrscale.stages.runs import holding

LOOKS = 4_000
"""In each of the five cases."""


def ranker(url: Path, number: int) -> str:
    """A bundle that differs by its number."""
    order = bundle.FeatureOrder(feature="age", ascending=True)
    feature = Feature(name="age", kind="numeric")
    config = {"number": number}
    about = bundle.BundleFacts(config=config, features=(feature,), dataset_hash="0", metrics={}, made_by={})
    bundle.save_order(str(url), order, about)
    return str(url)


def look(out: Path) -> str:
    """The hash of the model in service, all of whose files are read and compared with it."""
    now = json.loads((out / "service.json").read_bytes())
    folder = Path(now["bundle"])
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for file in manifest["files"]:
        assert hashlib.sha256((folder / file["path"]).read_bytes()).hexdigest() == file["sha256"], file
    assert bundle.content_hash(str(folder)) == now["hash"] == folder.name
    return str(now["hash"])


class Reader(threading.Thread):
    """Looks until it is asked to end, and so many times at least."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self.out, self.over, self.looks, self.seen, self.faults = out, threading.Event(), 0, set[str](), list[str]()

    def run(self) -> None:
        while not self.over.is_set() or self.looks < LOOKS:
            try:
                self.seen.add(look(self.out))
            except Exception as error:  # whatever it is, it is a defect
                self.faults.append(f"look {self.looks}: {error!r}")
            self.looks += 1


@contextmanager
def failing(at: int, fail: Callable[[], object]) -> Iterator[None]:
    """Call `fail` in place of a change to the disk: of that with this number."""
    count = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count - 1 == at:
                fail()
            return change(*args, **kwargs)

        return changed

    with patch.multiple(os, **{name: counted(getattr(os, name)) for name in ("replace", "unlink", "rmdir", "mkdir")}):
        yield


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def serve(out: str, url: str, at: int, fail: Callable[[], object]) -> None:
    """Put a bundle into service as the weekly job does; one change to the disk fails."""
    try:
        with holding(out), failing(at, fail):
            put_into_service(out, copied(url, out), "2026-W12")
            forget(out)
    except (InputError, OSError):
        assert fail is fill


CHANGES = 24
"""More than a model in service takes, so that the last processes end undisturbed."""


@pytest.mark.slow
@pytest.mark.parametrize("how", [*map(nightly, ("killed", "full", "stopped", "twins")), "taken back"])
def test_a_reader_finds_a_whole_bundle_at_every_look(tmp_path: Path, how: str) -> None:
    out, processes = tmp_path / "out", get_context("forkserver")
    processes.set_forkserver_preload(["ltrscale.experiments.weekly", "pytest"])
    passed = [ranker(tmp_path / f"passed-{number}", number) for number in range(3)]
    serve(str(out), passed[0], -1, kill)
    reader = Reader(out)
    reader.start()
    for number in range(CHANGES):
        url = passed[number % 3]
        ranker(tmp_path / "candidate", number)  # one that no gate passes, made anew where the one before was
        at = number if how in ("killed", "full") else -1
        arguments = (str(out), url, at, fill if how == "full" else kill)
        started = [processes.Process(target=serve, args=arguments) for _ in range(2 if how == "twins" else 1)]
        for process in started:
            process.start()
        if how == "stopped":
            for pid in [process.pid for process in started if process.pid] * 5:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.005)
                os.kill(pid, signal.SIGCONT)
        for process in started:
            process.join()
            assert process.exitcode == 0 or how == "killed"
        if how == "taken back" and number % 3 == 2:
            with holding(str(out)):
                take_back(str(out), None)
    serve(str(out), passed[0], -1, kill)
    reader.over.set()
    reader.join()
    assert reader.faults == []
    assert reader.looks >= LOOKS
    hashes = {bundle.content_hash(url) for url in passed}
    assert reader.seen <= hashes
    assert look(out) == bundle.content_hash(passed[0])
    left = {path.name for path in (out / "service").iterdir()}
    now = InService.read(str(out))
    assert now is not None
    assert left == {now.hash, *(served.hash for served in now.earlier)} <= hashes
    assert {path.name for path in out.iterdir()} == {"service", "service.json"}, "nothing is left over"


@pytest.mark.slow
def test_the_last_models_stay_and_older_ones_go(tmp_path: Path) -> None:
    out, served = str(tmp_path / "out"), list[str]()
    for number in range(9):
        served.append(copied(ranker(tmp_path / "candidate", number), out))
        put_into_service(out, served[-1], f"2026-W{number + 10}")
        (tmp_path / "out" / "service" / "notes.txt").write_text("of the shop")
        forget(out)
    now = InService.read(out)
    assert now is not None
    assert now.bundle == served[8]
    assert [one.bundle for one in now.earlier] == served[7:2:-1]
    assert [*map(os.path.exists, served)] == [False] * 3 + [True] * 6
    assert (tmp_path / "out" / "service" / "notes.txt").exists()
    for number in (7, 6, 5):
        assert take_back(out, None).bundle == served[number]
    assert Path(served[8]).exists(), "who has just read the file can still open it"
    forget(out)
    assert [*map(os.path.exists, served[6:])] == [False] * 3


def test_a_damaged_earlier_model_is_passed_over(tmp_path: Path) -> None:
    out, served = str(tmp_path / "out"), list[str]()
    for number in range(3):
        served.append(copied(ranker(tmp_path / "candidate", number), out))
        put_into_service(out, served[-1], f"2026-W{number + 10}")
    Path(served[1], "config.json").unlink()
    assert take_back(out, None).bundle == served[0]
    with pytest.raises(InputError, match=r"service.json: names nothing whole that was in service before; nothing is"):
        take_back(out, None)


def test_an_outage_is_no_damage_of_an_earlier_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*_: object) -> bytes:
        raise UnavailableError("bucket: no answer")

    out = str(tmp_path / "out")
    for number in range(3):
        put_into_service(out, copied(ranker(tmp_path / "candidate", number), out), f"2026-W{number + 10}")
    before = InService.read(out)
    assert before is not None
    with monkeypatch.context() as patched:
        patched.setattr(storage, "read_verified", no_answer)
        for look in (before.check, lambda: take_back(out, None)):
            with pytest.raises(UnavailableError, match=r"^bucket: no answer$"):
                look()
    assert InService.read(out) == before
    assert take_back(out, None).bundle == before.earlier[0].bundle


@pytest.mark.filterwarnings("ignore")  # of MLflow's libraries
def test_a_model_is_taken_back_though_the_registry_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    out = str(tmp_path / "out")
    for number in range(2):
        with holding(out):
            put_into_service(out, copied(ranker(tmp_path / f"passed-{number}", number), out), "2026-W12")

    def no_answer(_: str) -> None:
        raise mlflow.MlflowException("no answer")

    for name in ("set_tracking_uri", "set_registry_uri"):
        monkeypatch.setattr(mlflow, name, lambda _: None)
    monkeypatch.setattr(mlflow, "set_experiment", no_answer)
    registry = Registry(name="shop", store="http://127.0.0.1:1")
    with (
        holding(out),
        pytest.raises(InputError, match=r"is in service again, .*: shop: .* cannot be registered: MLflow does not"),
    ):
        take_back(out, registry)
    assert look(tmp_path / "out") == bundle.content_hash(str(tmp_path / "passed-0"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UnavailableError, match="shop: its alias in_service cannot name version 1: MLflow does not"):
        put_alias(registry, "1")


def test_a_copy_that_was_changed_is_found_by_whoever_opens_it(tmp_path: Path) -> None:
    place = copied(ranker(tmp_path / "candidate", 1), str(tmp_path))
    assert bundle.load(place).content_hash == Path(place).name
    ranker(Path(place), 2)  # all of another bundle, by its own manifest
    with pytest.raises(InputError, match=r"holds the bundle with the hash .*, not the one that its name says"):
        bundle.load(place)
    with pytest.raises(InputError, match="does not hold the files whose hash is its name"):
        copied(ranker(tmp_path / "candidate", 1), str(tmp_path))


@pytest.mark.parametrize("damage", [b"", b"\0" * 64, b'{"bundle": ', b"[]", b"{}", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", ["service.json", "weeks/2026-W12/week.json"])
def test_damaged_records_are_said_in_one_line_with_the_remedy(tmp_path: Path, name: str, damage: bytes) -> None:
    storage.write_bytes(str(tmp_path / name), damage)
    with pytest.raises(InputError, match=r"\A.*" + name + r": .*; delete it, and [^\n]*\Z"):
        InService.read(str(tmp_path)) if name == "service.json" else Week.read(str(tmp_path), "2026-W12")
