"""Files at a URL: read, write, list, delete."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from ltrscale.errors import InputError
from ltrscale.storage import conditions
from ltrscale.storage.faults import named_errors
from ltrscale.storage.filesystems import filesystem
from ltrscale.storage.urls import is_local, join, local_path

_BLOCK = 1 << 20
_PART = 8 << 20
"""Bytes of a part of an upload to S3: what is sent again when a request fails."""
_MOST_PARTS = 10_000
_LOCK_S, _LOCK_POLL_S = 120.0, 0.005
_locks = threading.local()


def exists(url: str) -> bool:
    """Whether a file or directory is there."""
    fs, path = filesystem(url)
    with named_errors(url):
        return bool(fs.exists(path))


@contextmanager
def open_input(url: str) -> Iterator[BinaryIO]:
    """Open a file for reading bytes; it can seek."""
    fs, path = filesystem(url)
    with named_errors(url):
        stream = fs.open(path, "rb")
    with stream:
        yield cast(BinaryIO, stream)


def read_bytes(url: str) -> bytes:
    """The whole of a file."""
    fs, path = filesystem(url)
    with named_errors(url):
        return bytes(fs.cat_file(path))


def write_bytes(url: str, data: bytes) -> None:
    """Write a whole file; a reader sees the old bytes or the new ones."""
    fs, path = filesystem(url)
    with named_errors(url, "write", need=len(data)):
        if is_local(url):
            with _staged(Path(path), data) as temporary:
                temporary.replace(path)
        else:
            fs.pipe_file(path, data)


def read_if_there(url: str) -> bytes | None:
    """The whole of a file, or None where there is none."""
    fs, path = filesystem(url)
    with named_errors(url):
        try:
            return bytes(fs.cat_file(path))
        except (FileNotFoundError, NotADirectoryError):
            return None


def create_exclusively(url: str, data: bytes) -> bool:
    """Write a file only where there is none, in one atomic step; returns whether its content is there now."""
    return swap(url, None, data)


def swap(url: str, old: bytes | None, new: bytes | None) -> bool:
    """Put `new` in the place of `old` in one atomic step; None stands for no file. Returns whether `new` is there now.

    Of several writers that start from the same `old`, one gets through. A file that has just the content `new` counts
    as written: S3 may have taken it and lost the answer, and refuse the retry.
    """
    with exclusively(url.rpartition("/")[0]):
        if is_local(url):
            there = read_if_there(url)
            return there == new or (there == old and _replace(url, new))
        return conditions.swap(url, old, new) or read_if_there(url) == new


def _replace(url: str, new: bytes | None) -> bool:
    if new is None:
        remove(url)
    else:
        write_bytes(url, new)
    return True


@contextmanager
def exclusively(folder: str) -> Iterator[None]:
    """Keep all other processes on this machine out of a local directory's commits while the block runs.

    The lock is the kernel's, on the directory itself: nothing of it remains when its holder dies. A block inside
    another one of the same thread and directory takes no second lock. Remote stores have conditions instead.

    Raises:
        InputError: another process keeps it for minutes.
    """
    if not is_local(folder):
        yield
        return
    path = local_path(folder).absolute()
    locked: set[Path] = _locks.__dict__.setdefault("paths", set())
    if path in locked:
        yield
        return
    with named_errors(folder, "write"):
        path.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
    locked.add(path)
    try:
        yield
    finally:
        locked.discard(path)
        os.close(descriptor)


def _locked(path: Path) -> int:
    """An open descriptor of a directory, with the lock."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
            path.mkdir(parents=True, exist_ok=True)  # it was deleted while we waited
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{path}: another process has been committing there for {_LOCK_S:.0f} s; "
                    "wait for it, or end it where it hangs"
                ) from None
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
                raise
            conditions.warn(str(path.anchor), f"{path}: this file system has no locks")
            return descriptor
        os.close(descriptor)
        time.sleep(_LOCK_POLL_S)


def put(local: Path, url: str, digest: str) -> None:
    """Move a local file to a URL; for a local one they must be on the same file system.

    Args:
        local: the file.
        url: its new place.
        digest: hash of its content; S3 keeps it beside the object, for `is_there`.
    """
    fs, path = filesystem(url)
    bytes_ = local.stat().st_size
    with named_errors(url, "write", need=bytes_):
        if is_local(url):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            local.replace(path)
            return
        if url.startswith("s3://"):
            chunk = max(_PART, -(-bytes_ // _MOST_PARTS))
            fs.put_file(str(local), path, chunksize=chunk, Metadata={conditions.DIGEST: digest})
        else:
            fs.put_file(str(local), path)
        local.unlink()


def put_over(local: Path, url: str, digest: str, stamp: str | None) -> bool:
    """Move a local file to a URL only where what is there still has this stamp (`conditions.stamp`); None: nothing.

    Returns:
        Whether it is there now. On a local disk the caller keeps others out by `exclusively`.
    """
    if is_local(url) or not url.startswith("s3://"):
        put(local, url, digest)
        return True
    done = conditions.put_file(local, url, digest, stamp)
    if done:
        local.unlink()
    return done


def is_there(url: str, bytes_: int, digest: str) -> bool:
    """Whether a file is there with this size and content hash.

    A local file is read. Of an object on S3 the hash is the one that was put beside it, and S3 has checked what it
    received; elsewhere the size must do.
    """
    if not is_local(url):
        return conditions.describes(url, bytes_, digest)
    path = local_path(url)
    with named_errors(url):
        return path.is_file() and path.stat().st_size == bytes_ and sha256(path) == digest


@contextmanager
def _staged(target: Path, data: bytes) -> Iterator[Path]:
    """A file beside `target` with the data on the disk; what the block does with its name is flushed too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        flush(temporary)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
    flush(target.parent)


def flush(path: Path) -> None:
    """Wait until a file's content, or the names in a directory, would survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a directory
            raise
    finally:
        os.close(descriptor)


def list_files(url: str) -> list[str]:
    """The files of a path: itself, what a glob matches, or all below a directory; sorted, hidden ones left out.

    Raises:
        InputError: nothing is there.
    """
    fs, path = filesystem(url)
    with named_errors(url):
        if any(c in path for c in "*?["):
            matches = fs.glob(path, detail=True)  # not `isfile`, which answers no where a request fails
            found = [p for p, i in matches.items() if i["type"] == "file" or (is_local(url) and Path(p).is_file())]
        elif fs.isdir(path):
            found = list(fs.find(path))
        else:
            found = [path] if fs.exists(path) else []
    head, *pattern = re.split(r"[*?[]", path, maxsplit=1)
    spelled_out = head.count("/") + (not pattern or head[-1:] != "/")  # parts, which may be hidden ones
    found = [p for p in found if not any(part[:1] in "._" for part in p.split("/")[spelled_out:])]
    if not found:
        raise InputError(f"{url}: no file there; check the path or the pattern")
    return sorted(p if is_local(url) else fs.unstrip_protocol(p) for p in found)


def children(url: str) -> list[str]:
    """What lies directly in a directory, files and directories, sorted; hidden ones left out, nothing where none is."""
    fs, path = filesystem(url)
    with named_errors(url):
        try:
            entries = fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
    names = {entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry.rstrip("/") != path.rstrip("/")}
    return sorted(join(url, name) for name in names if name[:1] not in "._")


def below(url: str) -> list[str]:
    """The names of all files below a directory, hidden ones too, sorted; links are not followed."""
    fs, path = filesystem(url)
    with named_errors(url):
        if is_local(url):
            found = [str(Path(folder, name)) for folder, _, names in os.walk(path) for name in names]
        else:
            found = fs.find(path)
    return sorted(name.removeprefix(path).lstrip("/") for name in found)


def size(url: str) -> int:
    """Bytes of a file."""
    fs, path = filesystem(url)
    with named_errors(url):
        return int(fs.size(path))


def fingerprint(url: str) -> str:
    """What tells a changed file from an unchanged one without reading it: size with ETag or modification time."""
    fs, path = filesystem(url)
    with named_errors(url):
        info = fs.info(path)
    stamp = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("LastModified")
    return f"{info['size']}-{str(stamp).strip(chr(34))}"


def sha256(path: Path) -> str:
    """Hash of a local file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def remove(url: str) -> None:
    """Delete a file; nothing happens where none is. Directories are never deleted with what is in them."""
    fs, path = filesystem(url)
    with named_errors(url, "delete"):
        if is_local(url):
            Path(path).unlink(missing_ok=True)
        elif fs.exists(path):
            fs.rm_file(path)


def remove_with_folders(url: str, root: str) -> None:
    """Delete a file, and the folders below `root` that this leaves empty."""
    remove(url)
    if is_local(url):
        remove_empty(local_path(url).parent, local_path(root))


def remove_empty(folder: Path, root: Path) -> None:
    """Delete a local folder and those above it, below `root`, as far as they are empty."""
    with contextlib.suppress(OSError):
        while folder != root and folder.is_relative_to(root):
            folder.rmdir()
            folder = folder.parent
