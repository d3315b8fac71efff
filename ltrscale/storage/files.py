"""Files at a URL: read, write, list, delete."""

import contextlib
import errno
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import fsspec

from ltrscale.errors import InputError
from ltrscale.storage.faults import named_errors
from ltrscale.storage.filesystems import filesystem
from ltrscale.storage.urls import is_local, join, local_path

_BLOCK = 1 << 20
_PART = 8 << 20
"""Bytes of a part of an upload to S3: what is sent again when a request fails."""
_MOST_PARTS = 10_000


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


def create_exclusively(url: str, data: bytes) -> bool:
    """Write a file only where there is none, in one atomic step; returns whether its content is there now.

    A file with just this content counts as written: S3 may have taken it and lost the answer, and refuse the retry.
    """
    fs, path = filesystem(url)
    with named_errors(url, "write", need=len(data)):
        if is_local(url):
            with _staged(Path(path), data) as temporary, contextlib.suppress(FileExistsError):
                os.link(temporary, path)
                return True
        elif _put_where_none_is(fs, path, data):
            return True
    return read_bytes(url) == data


def _put_where_none_is(fs: fsspec.AbstractFileSystem, path: str, data: bytes) -> bool:
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except OSError as error:
        if "PreconditionFailed" in str(error) or "At least one of the pre-conditions" in str(error):
            return False
        raise
    return True


def put(local: Path, url: str) -> None:
    """Move a local file to a URL; for a local one they must be on the same file system."""
    fs, path = filesystem(url)
    bytes_ = local.stat().st_size
    with named_errors(url, "write", need=bytes_):
        if is_local(url):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            local.replace(path)
            return
        part = {"chunksize": max(_PART, -(-bytes_ // _MOST_PARTS))} if url.startswith("s3://") else {}
        fs.put_file(str(local), path, **part)
        local.unlink()


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
    """Delete a file or a directory with all in it; nothing happens where nothing is."""
    fs, path = filesystem(url)
    with named_errors(url, "delete"):
        if fs.exists(path):
            fs.rm(path, recursive=True)


def remove_with_folder(url: str) -> None:
    """Delete a file, and its folder where that leaves it empty."""
    remove(url)
    if is_local(url):
        with contextlib.suppress(OSError):
            local_path(url).parent.rmdir()
