"""Scratch directories, which only their owner can read and which disappear with the process that made them.

A process has one directory, `$TMPDIR/ltrscale-UID/NAME`, for all its scratch files. It locks the directory while it
lives, and removes it when it ends. The system releases the lock however a process ends, so the next process that makes
scratch removes the unlocked directories.
"""

import atexit
import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ltrscale.errors import InputError

_NAME = re.compile(r"[a-z0-9_]{8}")
"""The unprefixed names that `tempfile` gives to directories."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_lock = threading.Lock()
_own: dict[Path, tuple[Path, int]] = {}
"""This process's directory below a root, and the descriptor that locks it."""


def make(*, longest: int | None = None) -> Path:
    """A new empty directory, removed at the end of this process at the latest.

    If TMPDIR is so deep that the path would be above `longest` bytes, the directory is made below /tmp.

    Raises:
        InputError: another user's directory has the name of ours.
        OSError: the disk is full or cannot be written to.
    """
    base = Path(tempfile.gettempdir())
    root = base / f"ltrscale-{os.getuid()}"
    if longest is not None and len(os.fsencode(root)) + 2 * len("/12345678") > longest:
        root = Path("/tmp", root.name)
    with _lock:
        if root not in _own or not _own[root][0].is_dir():
            _own[root] = _make_own(root)
        return Path(tempfile.mkdtemp(prefix="", dir=_own[root][0]))


@contextmanager
def directory(*, longest: int | None = None) -> Iterator[Path]:
    """A new empty directory while the block runs; arguments and errors as for `make`."""
    folder = make(longest=longest)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the end of the process removes the rest


def lasting(name: str) -> Path:
    """The directory of this name that all processes of this user share; it outlives them. Raises as `make`."""
    assert not _NAME.fullmatch(name)  # it would look like that of a process that has ended
    root = Path(tempfile.gettempdir(), f"ltrscale-{os.getuid()}")
    with _root_opened(root):
        (root / name).mkdir(exist_ok=True)
    return root / name


def _make_own(root: Path) -> tuple[Path, int]:
    """Make and lock this process's directory, and remove those of processes that are gone."""
    with _root_opened(root) as opened:
        with _flocked(opened):  # until it is locked, the new directory must not look abandoned
            folder = Path(tempfile.mkdtemp(prefix="", dir=root))
            descriptor = os.open(folder, _FOLDER)
            # fine on a file system without locks: then nobody else can lock the directory to remove it, either
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        for path in root.iterdir():
            if _NAME.fullmatch(path.name):
                _remove_if_left(path, opened)
    return folder, descriptor


@contextmanager
def _root_opened(root: Path) -> Iterator[int]:
    """Open the parent directory of all our processes, made if need be, and check that it is this user's alone."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    try:
        opened = os.open(root, _FOLDER)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise _foreign(root) from error
        raise
    try:
        if os.fstat(opened).st_uid != os.getuid():
            raise _foreign(root)
        os.fchmod(opened, 0o700)
        yield opened
    finally:
        os.close(opened)


def _foreign(root: Path) -> InputError:
    return InputError(f"{root}: is no directory of this user, so scratch is not safe there; remove it, or set TMPDIR")


def _remove_if_left(path: Path, root: int) -> None:
    """Remove the directory of a process that has ended."""
    with contextlib.suppress(OSError):  # its process lives, another process was faster, or it is not a directory
        folder = os.open(path, _FOLDER)
        try:
            with _flocked(root):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(folder).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)  # follows no links
        finally:
            os.close(folder)


@contextmanager
def _flocked(descriptor: int) -> Iterator[None]:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


@atexit.register
def _end() -> None:
    for folder, descriptor in _own.values():
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
    _own.clear()


def _forked() -> None:
    """Forget the parent's directory in a child process, which makes its own and must not remove the parent's."""
    _own.clear()
    _lock.release()


# the lock is held across a fork, or a child forked during `make` would inherit a lock that nobody releases
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forked)
