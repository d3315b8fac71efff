"""One writer at a time: leases of jobs on directories, locks of local directories, files replaced in an atomic step.

A running job, known by a token, keeps `.lease` in its output directory and renews it every few seconds. A second job
for the same directory waits, or ends and names the running one. A dead holder on this host is replaced at once. Any
other holder is replaced when its lease was not renewed for a while by the observer's clock, so clocks need not agree.
Every commit below the directory checks that the lease still has the committing job's token, so a holder that was
suspended and wakes up cannot commit. Files that a commit puts in place carry the token in their names, so the next
holder knows which ones a dead holder has left.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ltrscale.errors import InputError, UnavailableError
from ltrscale.storage import files, stores, writers
from ltrscale.storage.faults import named_errors
from ltrscale.storage.names import is_local, join, local_path

LEASE = ".lease"
WHEN_BUSY = "LTRSCALE_IF_RUNNING"
"""The environment variable for what a second job does: `wait` (the default) or `end`."""
_RENEW_S, _LAPSE_S, _LOOK_S = 5.0, 45.0, 1.0  # several renewals may fail before another job takes over
_LOCK_S, _LOCK_POLL_S = 120.0, 0.005
_locks = threading.local()
_log = logging.getLogger("ltrscale")


class LeaseLost(InputError):  # noqa: N818 - the name states the event
    """Another job has taken over the directory."""


def check_lease(url: str) -> None:
    """Check that this process still holds its lease, if any, at or above a directory.

    Raises:
        LeaseLost: another job has taken over.
    """
    if (lease := writers.covering(url)) is None:
        return
    current = _lease_in(files.read_if_there(join(lease.url, LEASE)))
    if current.get("token") != lease.token:
        cause = f"{_who(current)} has taken over" if current else "it was removed"
        raise LeaseLost(
            f"{lease.url}: this job no longer holds the directory: {cause}, because this one had not renewed its "
            f"lease for {_LAPSE_S:.0f} s or longer; give the same command again"
        )


@contextmanager
def hold(url: str, *, only_left: bool = False) -> Iterator[tuple[str, ...]]:
    """Hold a directory while the block runs; takes no second lease if this process holds it already.

    With `only_left` it is held only if a dead holder has left its lease, and otherwise no token is yielded. The lease
    of another machine is watched until it is renewed or lapses.

    Yields:
        The tokens of earlier holders that have not released it, for `listing.sweep` to remove their leftovers.

    Raises:
        InputError: another job runs there, and this one should not wait.
    """
    place = writers.place(url)
    if place in writers.HELD:
        yield ()
        return
    holder = _Holder(join(url, LEASE))
    busy = os.environ.get(WHEN_BUSY, "wait")
    previous = holder.acquire("leave" if only_left else "end" if busy == "end" else "wait")
    if previous is None:
        yield ()
        return
    writers.HELD[place] = writers.Lease(place, holder.token)
    renewer = threading.Thread(target=holder.renew, name="lease", daemon=True)
    renewer.start()
    try:
        yield previous
    finally:
        del writers.HELD[place]
        writers.SHARED.discard(place)
        holder.over.set()
        renewer.join()
        holder.release()


@dataclass(eq=False)
class _Holder:
    """A lease of this process, and the last content written to its file."""

    file: str
    token: str = field(default_factory=writers.new_token)
    over: threading.Event = field(default_factory=threading.Event)
    _written: bytes = b""
    _before: tuple[str, ...] = ()
    _beat: int = 0

    def acquire(self, busy: Literal["wait", "end", "leave"]) -> tuple[str, ...] | None:
        """Take the lease once free; returns the tokens of holders that left theirs, None if `leave` gives up."""
        watched, since, looked, warned = b"", 0.0, 0.0, False
        while True:
            current = files.read_if_there(self.file)
            now = time.monotonic()
            if busy == "leave" and (current is None or _lives(_lease_in(current)) or watched not in (b"", current)):
                return None
            # a slow look means that the store did not answer and may have hidden a renewal, so start over
            if current != watched or now - looked > 3 * _LOOK_S:
                watched, since = current or b"", now
            looked = now
            other = _lease_in(current)
            # empty: its writer died before the first byte, or is about to write, which `claim` detects
            if not current or _lives(other) is False or now - since > _LAPSE_S:
                self._before = () if current is None else _tokens(other)
                if self._write(current):
                    return self._before
                continue
            if busy == "end":
                raise InputError(
                    f"{self._folder}: {_who(other)} is running there; wait for it, or choose another directory"
                )
            if not warned and busy == "wait":
                _log.warning("%s: %s is running there; waiting for it", self._folder, _who(other))
                warned = True
            time.sleep(_LOOK_S)

    @property
    def _folder(self) -> str:
        return self.file.rpartition("/")[0]

    def _write(self, old: bytes | None) -> bool:
        self._beat += 1
        lease = {"token": self.token, "beat": self._beat, "before": self._before, **_me()}
        new = (json.dumps(lease, indent=1) + "\n").encode()
        if old:
            # until the rename, the lease there has the token that identifies the staged file
            left_with = _lease_in(old).get("token")
            written = swap(self.file, old, new, token=left_with if writers.is_token(left_with) else self.token)
        else:
            written = claim(self.file, new)
        if written:
            self._written = new
        return written

    def renew(self) -> None:
        while not self.over.wait(_RENEW_S):
            try:
                if not self._write(self._written):
                    _log.warning("%s: another job has taken over; this one cannot commit any more", self._folder)
                    return
            except (InputError, UnavailableError) as error:
                _log.debug("%s: lease not renewed, trying again", error)

    def release(self) -> None:
        """Release the directory unless another job has it; a lease that cannot be released lapses."""
        with contextlib.suppress(InputError, UnavailableError):
            swap(self.file, self._written, None)


def _lease_in(data: bytes | None) -> dict[str, Any]:
    """Parse a lease's file; empty if it is missing or unreadable."""
    with contextlib.suppress(ValueError):
        lease = json.loads(data or b"")
        return lease if isinstance(lease, dict) else {}
    return {}


def _me() -> dict[str, Any]:
    """The facts that identify this process for others."""
    return {
        "host": platform.node(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "command": Path(sys.argv[0]).name,
    }


def _who(lease: dict[str, Any]) -> str:
    process = f"process {lease.get('pid', '?')} on {lease.get('host', '?')}"
    return f"{process} ({shlex.quote(str(lease.get('command', '?')))})"


def _lives(lease: dict[str, Any]) -> bool | None:
    """True if the holder is a live process of this machine; None if it belongs to another machine."""
    pid = lease.get("pid")
    if not isinstance(pid, int) or lease.get("machine") != _machine():
        return None
    # compare the start time too, because the system reuses the ids of dead processes
    return _started(pid) == lease.get("started")


def _machine() -> str:
    """Id of this boot of the machine and of the process id namespace, because each container counts its own ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux: an id that never matches, so the lease of a dead holder must lapse
        return secrets.token_hex(8)


def _started(pid: int) -> str | None:
    """Start time of a process in ticks since boot; None if it does not run."""
    try:
        state, *stats = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else stats[18]  # a zombie has an entry until its parent waits


def _tokens(lease: dict[str, Any]) -> tuple[str, ...]:
    """The tokens of a holder and of earlier ones that have not released the directory."""
    previous = lease.get("before")
    return (*(map(str, previous) if isinstance(previous, list) else ()), str(lease.get("token", "")))


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
        return stores.swap_if_unchanged(url, old, new) or files.read_if_there(url) == new
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
        stores.warn(str(path.anchor), f"{path}: this file system has no locks")
        return True
