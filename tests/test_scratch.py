"""Scratch directories: their owner, who can read them, and how they are removed."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from nightly import nightly

from ltrscale.errors import InputError
from ltrscale.storage import scratch

LIMIT_S = 30
MAKES = "from ltrscale.storage import scratch; print(scratch.make(), flush=True)"
WAITS = f"import time; {MAKES}; time.sleep(1000)"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the scratch of this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"ltrscale-{os.getuid()}"


def python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def waiting(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a scratch directory, and the directory."""
    assert root
    with python(WAITS) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def run(code: str) -> Path:
    """Run a process to its end; returns its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return Path(done.stdout.strip())


def test_only_the_owner_can_look_inside(root: Path) -> None:
    root.mkdir(mode=0o755)
    with scratch.directory() as folder:
        assert folder.is_relative_to(root)
        for path in (root, folder.parent, folder):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (folder / "file").write_text("")
    assert not folder.exists()


@pytest.mark.slow
def test_a_process_leaves_nothing(root: Path) -> None:
    made = run(MAKES)
    assert made.is_relative_to(root)
    assert list(root.iterdir()) == []


@pytest.mark.slow
def test_what_a_killed_process_left_goes_when_the_next_one_starts(
    root: Path, waiting: tuple[subprocess.Popen[str], Path]
) -> None:
    process, left = waiting
    (left / "file").write_text("")
    run(MAKES)
    assert (left / "file").exists()  # its process lives
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT_S)
    assert (left / "file").exists()
    run(MAKES)
    assert list(root.iterdir()) == []


@pytest.mark.slow
def test_a_child_keeps_its_parents_directory(root: Path) -> None:
    code = f"import os; {MAKES}; child = os.fork(); child or (print(scratch.make()), exit()); os.waitpid(child, 0)"
    done = run(f"{code}; print(len(os.listdir({str(root)!r})))")
    parents, childs, left = str(done).splitlines()
    assert Path(parents).parent != Path(childs).parent
    assert left == "1"


@pytest.mark.slow
def test_nothing_that_is_not_ours_is_removed(root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "inside").mkdir(parents=True)
    (root / "abandond" / "deep").mkdir(parents=True)
    (root / "abandond" / "deep" / "link").symlink_to(precious)
    (root / "a_link_x").symlink_to(precious)
    (root / "a_file_x").write_text("")
    (root / "longer-than-our-names").mkdir()
    run(MAKES)
    assert sorted(path.name for path in root.iterdir()) == ["a_file_x", "a_link_x", "longer-than-our-names"]
    assert (precious / "inside").is_dir()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_name_that_is_taken_is_named(kind: str, root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "link":
        root.symlink_to(elsewhere)
    else:
        root.write_text("")
    with pytest.raises(InputError, match=r"no directory of this user.*TMPDIR"):
        scratch.make()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_another_users_directory_is_not_taken(root: Path) -> None:
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(InputError, match="no directory of this user"):
        scratch.make()


def test_a_path_that_must_be_short_is_below_tmp(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert root
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert scratch.make().is_relative_to(deep)
    short = scratch.make(longest=50)
    assert len(str(short)) <= 50
    assert short.is_relative_to(Path("/tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [6, nightly(20)])
def test_a_directory_that_is_being_made_is_not_taken_for_one_that_was_left(root: Path, number: int) -> None:
    """Several processes start at once, and each finds its own files."""
    code = "from ltrscale.storage import scratch; f = scratch.make() / 'file'; f.write_text(''); print(f.exists())"
    root.mkdir()
    holder = os.open(root, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    processes = [python(code) for _ in range(number)]
    os.close(holder)  # all of them go at once
    assert [process.communicate(timeout=LIMIT_S)[0].strip() for process in processes] == ["True"] * number
    assert list(root.iterdir()) == []


def test_a_lasting_directory_outlives_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (scratch.lasting("kept") / "file").touch()
    for _ in range(2):
        with scratch.directory():
            pass
    monkeypatch.setattr(scratch, "_own", {})
    scratch.make()
    assert (scratch.lasting("kept") / "file").exists()
    with pytest.raises(AssertionError):
        scratch.lasting("examples")
