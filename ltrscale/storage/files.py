"""Files at a URL: read, write, list, delete."""

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from ltrscale.errors import InputError
from ltrscale.storage import stores, writers
from ltrscale.storage.faults import named_errors
from ltrscale.storage.names import is_local, join, local_path
from ltrscale.storage.stores import filesystem

T = TypeVar("T")

_PART = 8 << 20
"""Bytes in one part of an upload to S3, and the amount that is sent again when a request fails."""
_MOST_PARTS = 10_000  # S3's limit for one upload
_GLOB = re.compile(r"[*?[]")
_REQUESTS = 16
"""Calls that `at_once` runs at a time."""
_MOST_A_BATCH = 64
"""Items that a thread of `at_once` takes at a time; more would spare no time, and leave threads idle at the end."""


def exists(url: str) -> bool:
    """True if a file or directory exists."""
    fs, path = filesystem(url)
    with named_errors(url):
        return bool(fs.exists(path))


@contextmanager
def open_input(url: str) -> Iterator[BinaryIO]:
    """Open a seekable file for reading bytes."""
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


def write_bytes(url: str, data: bytes, *, token: str | None = None) -> None:
    """Write a whole file; a reader sees the old bytes or the new ones.

    The temporary file that is renamed carries `token`, by default that of the lease.
    """
    fs, path = filesystem(url)
    with named_errors(url, "write", need=len(data)):
        if is_local(url):
            _replace(Path(path), data, token or writers.token_at(url))
        else:
            fs.pipe_file(path, data)


def read_if_there(url: str) -> bytes | None:
    """The whole of a file; None if it does not exist."""
    fs, path = filesystem(url)
    with named_errors(url):
        try:  # one request, because the file may be deleted after `exists`
            if is_local(url):  # fsspec and pathlib would take twice as long for thousands
                with open(path, "rb") as file:  # noqa: PTH123
                    return file.read()
            # s3fs asks for the size first, to read large files in pieces; those that may be missing are small
            return bytes(fs.cat_file(path, **({"max_concurrency": 1} if url.startswith("s3://") else {})))
        except (FileNotFoundError, NotADirectoryError):
            return None


def put(local: Path, url: str, digest: str) -> None:
    """Move a local file to a URL; a local URL must be on the same file system.

    S3 stores the content's hash as metadata of the object, for `is_there`.
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
            fs.put_file(str(local), path, chunksize=chunk, Metadata={stores.DIGEST: digest})
        else:
            fs.put_file(str(local), path)
        local.unlink()


def put_over(local: Path, url: str, digest: str, stamp: str | None) -> bool:
    """Move a local file to a URL if the object there still has this stamp, see `stores.stamp`; else False.

    On a local disk the caller must use `lease.exclusively`.
    """
    if not url.startswith("s3://"):
        put(local, url, digest)
        return True
    is_put = stores.put_file(local, url, digest, stamp)
    if is_put:
        local.unlink()
    return is_put


def is_there(url: str, bytes_: int, digest: str) -> bool:
    """True if a file exists with this size and content hash.

    A local file is read. An object on S3 is identified by the hash in its metadata, because S3 has checked the content
    it received; other stores are asked only for the size.
    """
    if not is_local(url):
        return stores.describes(url, bytes_, digest)
    path = local_path(url)
    with named_errors(url):
        return path.is_file() and path.stat().st_size == bytes_ and sha256(path) == digest


def _replace(target: Path, data: bytes, token: str) -> None:
    """Write and flush data to a file beside `target`, rename it, and flush the rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(writers.staged_name(target.name, token))
    try:
        temporary.write_bytes(data)
        flush(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    flush(target.parent)


def flush(path: Path) -> None:
    """Wait until a file's content or a directory's names would survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a directory
            raise
    finally:
        os.close(descriptor)


def list_files(url: str) -> list[str]:
    """The files of a path: itself, the matches of a glob, or all files below a directory; sorted, without hidden ones.

    An existing path is not a pattern, and neither is a folder of a path that exists.

    Raises:
        InputError: there is no file.
    """
    fs, path = filesystem(url)
    with named_errors(url):
        plain, pattern = _plain_and_pattern(fs, path)
        if pattern:
            matches = fs.glob(_GLOB.sub(r"[\g<0>]", plain) + pattern, detail=True)  # `isfile` hides failed requests
            paths = [p for p, i in matches.items() if i["type"] == "file" or (is_local(url) and Path(p).is_file())]
        elif fs.isdir(path):
            paths = list(fs.find(path))
        else:
            paths = [path] if fs.exists(path) else []
    # keep a hidden part that the caller wrote out, unlike one that the listing found
    head = plain + _GLOB.split(pattern, maxsplit=1)[0]
    spelled_out = head.count("/") + (not pattern or head[-1:] != "/")
    paths = [p for p in paths if not any(part[:1] in "._" for part in p.split("/")[spelled_out:])]
    if not paths:
        raise InputError(f"{url}: no file there; check the path or the pattern")
    return sorted(p if is_local(url) else fs.unstrip_protocol(p) for p in paths)


def _plain_and_pattern(fs: fsspec.AbstractFileSystem, path: str) -> tuple[str, str]:
    """Split a path before the first part that is a pattern; the second half is empty if there is no pattern."""
    parts = re.findall(r"[^/]*/|[^/]+$", path)
    for i, part in enumerate(parts):
        if _GLOB.search(part) and not fs.exists("".join(parts[: i + 1]).rstrip("/")):
            return "".join(parts[:i]), "".join(parts[i:])
    return path, ""


def children(url: str) -> list[str]:
    """The files and directories directly in a directory, sorted, without hidden ones; empty if it does not exist."""
    fs, path = filesystem(url)
    with named_errors(url):
        try:
            entries = fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
    names = {entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry.rstrip("/") != path.rstrip("/")}
    return sorted(join(url, name) for name in names if name[:1] not in "._")


def below(url: str) -> list[str]:
    """The names of all files below a directory, with hidden ones, sorted; links are not followed."""
    return sorted(sizes_below(url))


def sizes_below(url: str) -> dict[str, int]:
    """Bytes of all files below a directory, by name, as in `below`; S3 lists a thousand with each request."""
    fs, path = filesystem(url)
    with named_errors(url):
        if is_local(url):
            sizes = {}
            for file in (Path(folder, name) for folder, _, names in os.walk(path) for name in names):
                with contextlib.suppress(FileNotFoundError):  # renamed or deleted since, as temporary files are
                    sizes[str(file)] = file.lstat().st_size
        else:
            sizes = {name: int(info["size"]) for name, info in fs.find(path, detail=True).items()}
    return {name.removeprefix(path).lstrip("/"): size for name, size in sizes.items()}


def folders_below(url: str) -> list[str]:
    """The names of all folders below a local directory, sorted; object stores have none."""
    root = local_path(url)
    paths = [Path(above, name) for above, names, _ in os.walk(root) for name in names] if is_local(url) else []
    return sorted(path.relative_to(root).as_posix() for path in paths)


def size(url: str) -> int:
    """Bytes of a file."""
    fs, path = filesystem(url)
    with named_errors(url):
        return int(fs.size(path))


def fingerprint(url: str) -> str:
    """A text that changes when a file changes, found without reading the file: size with ETag or modification time."""
    fs, path = filesystem(url)
    with named_errors(url):
        info = fs.info(path)
    stamp = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("LastModified")
    return f"{info['size']}-{str(stamp).strip(chr(34))}"


def sha256(path: Path) -> str:
    """Hexadecimal hash of a local file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def remove(url: str) -> None:
    """Delete a file if it exists. A directory is never deleted with its contents."""
    fs, path = filesystem(url)
    with named_errors(url, "delete"):
        if is_local(url):
            with contextlib.suppress(NotADirectoryError):  # a part of the path is a file, so there is no file below it
                Path(path).unlink(missing_ok=True)
        elif fs.exists(path):
            fs.rm_file(path)


def remove_with_folders(url: str, root: str) -> None:
    """Delete a file, and the folders below `root` that become empty."""
    remove(url)
    remove_empty(url.rpartition("/")[0], root)


def remove_empty(url: str, root: str) -> None:
    """Delete a folder and its parents below `root` while they are empty; object stores have none."""
    folder, top = local_path(url), local_path(root)
    with contextlib.suppress(OSError):  # `rmdir` refuses a folder that is not empty
        while is_local(root) and folder != top and folder.is_relative_to(top):
            folder.rmdir()
            folder = folder.parent


def at_once(function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """Results of a function for each item, in order; the calls run concurrently, as they mostly wait for storage."""
    # several items per call of a thread, because handing over one can cost more than its call
    some = max(1, min(_MOST_A_BATCH, len(items) // (4 * _REQUESTS)))
    batches = [items[i : i + some] for i in range(0, len(items), some)]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        results = pool.map(lambda batch: [function(item) for item in batch], batches)
        return [result for of_batch in results for result in of_batch]
