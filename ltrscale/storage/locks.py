"""Files that one of several writers replaces, in an atomic step, and locks of local directories."""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ltrscale.errors import InputError
from ltrscale.storage import conditions, files
from ltrscale.storage.faults import named_errors
from ltrscale.storage.names import is_local, local_path

_LOCK_S, _LOCK_POLL_S = 120.0, 0.005
_locks = threading.local()


def claim(url: str, data: bytes) -> bool:
    """Write a file only if none exists, without a temporary one on a local disk, so a kill may leave an empty file.

    Returns whether its content is there now. An empty file counts as none.
    """
    if not is_local(url):
        return swap(url, None, data)
    path = local_path(url)
    with exclusively(str(path.parent)), named_errors(url, "write", need=len(data)):
        if current := files.read_if_there(url):
            return current == data
        try:
            path.write_bytes(data)
            files.flush(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        files.flush(path.parent)
    return True


def swap(url: str, old: bytes | None, new: bytes | None, *, token: str | None = None) -> bool:
    """Replace `old` by `new` in one atomic step; None stands for no file. Returns whether `new` is there now.

    Of several writers that start from the same `old`, one succeeds. A file that already has the content `new` counts as
    written, because S3 may have stored it, lost the answer, and refused the retry. `token` as in `files.write_bytes`.
    """
    if not is_local(url):
        return conditions.swap_if_unchanged(url, old, new) or files.read_if_there(url) == new
    with exclusively(str(local_path(url).parent)):
        current = files.read_if_there(url)
        if current == old != new:
            if new is None:
                files.remove(url)
            else:
                files.write_bytes(url, new, token=token)
        return current in (old, new)


@contextmanager
def exclusively(folder: str) -> Iterator[None]:
    """Keep all other processes of this machine out of a local directory's commits while the block runs.

    The kernel locks the directory itself, and unlocks it when the holder dies. A nested block for the same thread and
    directory takes no second lock. Remote stores use conditions instead.

    Raises:
        InputError: another process holds the lock for minutes.
    """
    path = local_path(folder).absolute()
    locked: set[Path] = _locks.__dict__.setdefault("paths", set())
    if path in locked:
        yield
        return
    with named_errors(folder, "write"):
        descriptor = _locked(path)
    locked.add(path)
    try:
        yield
    finally:
        locked.discard(path)
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Make, open and lock a directory; returns the descriptor that holds the lock."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if _is_locked(path, descriptor):
                return descriptor
            if time.monotonic() > deadline:
                raise InputError(
                    f"{path}: another process has been committing there for {_LOCK_S:.0f} s; "
                    "wait for it, or end it where it hangs"
                )
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(_LOCK_POLL_S)


def _is_locked(path: Path, descriptor: int) -> bool:
    """Lock an open directory, unless another process has; returns whether the lock holds."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # a lock on a directory that was deleted or made again meanwhile keeps nobody out
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
            raise
        conditions.warn(str(path.anchor), f"{path}: this file system has no locks")
        return True
