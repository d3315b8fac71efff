"""Files and directories at any fsspec URL; no other module opens URLs.

Stages hand each other directories. A directory is what its `manifest.json` lists: data files are put in place first and
the manifest last, with a conditional put, so a reader sees all of a stage's output or none of it, and of two writers
one wins and the other is told. The same rule holds on a local disk and on S3.

An S3 endpoint other than Amazon's is named by the environment variable `AWS_ENDPOINT_URL`, as in Amazon's own tools.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import fsspec
from botocore.exceptions import BotoCoreError, NoCredentialsError  # type: ignore[import-untyped]

from ltrscale.errors import InputError

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL and the path on it; a plain path is local."""
    options = {"use_listings_cache": False} if url.startswith("s3://") else {}
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError) as error:
        raise InputError(f"{url}: {error}; use a local path, s3://, gs:// or another fsspec URL") from error
    return fs, path


def arrow_filesystem(url: str) -> tuple[Any, str]:
    """The pyarrow file system of a URL and the path on it: memory-mapped files, pyarrow's own S3, or fsspec's."""
    from pyarrow import fs as arrow  # here, for what never reads Parquet

    fs, path = filesystem(url)
    if is_local(url):
        return arrow.LocalFileSystem(use_mmap=True), path
    if not url.startswith("s3://"):
        return arrow.PyFileSystem(arrow.FSSpecHandler(fs)), path
    with named_errors(url):
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            scheme, _, host = endpoint.rpartition("://")
            return arrow.S3FileSystem(endpoint_override=host, scheme=scheme or "https"), path
        return arrow.FileSystem.from_uri(url)[0], path


def is_local(url: str) -> bool:
    """Whether the URL is on this machine's disk."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """The path of a local URL."""
    return Path(url.removeprefix("file://"))


def join(url: str, *parts: str) -> str:
    """Append path parts to a URL."""
    return "/".join([url.rstrip("/") or "/", *(part.strip("/") for part in parts)]) if parts else url


@contextmanager
def named_errors(url: str, doing: str = "read") -> Iterator[None]:
    """Turn what a file system raises into one line that names the URL."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{url}: no such file, directory or bucket; check the path") from error
    except (PermissionError, NoCredentialsError) as error:
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if url.startswith("s3://") else "your credentials"
        remedy = "check its mode" if is_local(url) else f"check {keys}"
        raise InputError(f"{url}: no permission to {doing} ({error}); {remedy}") from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"{url}: cannot {doing}: {error.strerror}; name a file where a file is wanted") from error
    except (OSError, BotoCoreError) as error:  # s3fs lets some of botocore's errors through
        endpoint = " and AWS_ENDPOINT_URL" if url.startswith("s3://") else ""
        remedy = "check the disk" if is_local(url) else f"check the network{endpoint}"
        raise InputError(f"{url}: cannot {doing}: {error}; {remedy}") from error


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
    with named_errors(url, "write"):
        if not is_local(url):
            fs.pipe_file(path, data)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        temporary.write_bytes(data)
        temporary.replace(target)


def list_files(url: str) -> list[str]:
    """The files of a path: itself, what a glob matches, or all below a directory; sorted, hidden ones left out.

    Raises:
        InputError: nothing is there.
    """
    fs, path = filesystem(url)
    with named_errors(url):
        if any(c in path for c in "*?["):
            found = [p for p in fs.glob(path) if fs.isfile(p)]
        elif fs.isdir(path):
            found = list(fs.find(path))
        else:
            found = [path] if fs.exists(path) else []
    prefix = path.split("*")[0].count("/")
    found = [p for p in found if not any(part[:1] in "._" for part in p.split("/")[prefix + 1 :])]
    if not found:
        raise InputError(f"{url}: no file there; check the path or the pattern")
    return sorted(p if is_local(url) else fs.unstrip_protocol(p) for p in found)


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


def _remove_with_folder(url: str) -> None:
    """Delete a file, and its folder where that leaves it empty."""
    remove(url)
    if is_local(url):
        with contextlib.suppress(OSError):
            local_path(url).parent.rmdir()


def read_manifest(url: str) -> dict[str, Any] | None:
    """The manifest of a committed directory, or None where none is committed."""
    path = join(url, MANIFEST)
    if not exists(path):
        return None
    try:
        manifest = json.loads(read_bytes(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); delete the directory and make it again") from error
    if not isinstance(manifest, dict):
        raise InputError(f"{path}: not a manifest; delete the directory and make it again")
    return manifest


def read_verified(url: str, name: str, manifest: Mapping[str, Any]) -> bytes:
    """A file of a committed directory, checked against the content hash in its manifest.

    Raises:
        InputError: the manifest does not list the file, or the file is missing or was changed.
    """
    path = join(url, name)
    listed = {str(f["path"]): str(f["sha256"]) for f in manifest.get("files", [])}
    if name not in listed:
        raise InputError(f"{path}: the manifest does not list it; make the directory again")
    data = read_bytes(path)
    if hashlib.sha256(data).hexdigest() != listed[name]:
        raise InputError(f"{path}: its content is not what was committed (hash differs); make the directory again")
    return data


def create_exclusively(url: str, data: bytes) -> bool:
    """Write a file only where there is none, in one atomic step; returns whether it was written."""
    fs, path = filesystem(url)
    with named_errors(url, "write"):
        if not is_local(url):
            try:
                fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if "PreconditionFailed" in str(error) or "At least one of the pre-conditions" in str(error):
                    return False
                raise
            return True
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        temporary.write_bytes(data)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True


@dataclass(frozen=True)
class Placed:
    """A file put in place by a commit: its name in the directory, bytes and content hash."""

    path: str
    bytes: int
    sha256: str


def _listed(manifest: Mapping[str, Any] | None) -> set[str]:
    return {str(f["path"]) for f in (manifest or {}).get("files", [])}


class Commit:
    """Writes the files of one directory and, last, its manifest.

    A context manager: `file` gives a local path to write to and puts the file in place at the end of its block;
    `finish` commits. Leaving without `finish`, by an error or not, takes back what was put in place. A directory
    that is committed already is replaced: the new manifest takes the place of the old one, then files that only the
    old one lists are deleted; where a new file has an old one's name the old manifest is withdrawn first.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Commit(f"{folder}/out") as commit:
        ...     with commit.file("part-{hash}.txt") as path:
        ...         _ = path.write_text("hello")
        ...     commit.finish({"kind": "example"})
        ...     read_manifest(f"{folder}/out")["files"][0]["path"]
        'part-2cf24dba.txt'
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: list[Placed] = []
        self.finished = False
        self._kept: set[str] = set()
        self._previous = read_manifest(url)
        self._withdrawn = False
        if is_local(url):
            with named_errors(url, "write"):
                self._staging = local_path(url) / f".staging-{secrets.token_hex(4)}"
                self._staging.mkdir(parents=True)
        else:
            self._staging = Path(tempfile.mkdtemp(prefix="ltrscale-"))

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def file(self, name: str, *, keep: bool = False) -> Iterator[Path]:
        """A local path to write; at the end of the block the file is in place under `name`.

        `{hash}` in the name becomes the first eight digits of the content's hash, so that two writers cannot touch
        each other's files. `keep` leaves the file there even if the directory is not committed.
        """
        local = self._staging / secrets.token_hex(8)
        yield local
        digest = sha256(local)
        placed = Placed(name.replace("{hash}", digest[:8]), local.stat().st_size, digest)
        self._place(local, placed.path)
        self.files.append(placed)
        if keep:
            self._kept.add(placed.path)

    def _place(self, local: Path, name: str) -> None:
        if name in _listed(self._previous) and not self._withdrawn:
            remove(join(self.url, MANIFEST))
            self._withdrawn = True
        target = join(self.url, name)
        with named_errors(target, "write"):
            if is_local(target):
                local_path(target).parent.mkdir(parents=True, exist_ok=True)
                local.replace(local_path(target))
            else:
                fs, path = filesystem(target)
                fs.put_file(str(local), path)
                local.unlink()

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Commit: write the manifest, whose `files` are those put in place unless it brings its own list.

        Raises:
            InputError: another writer has committed the directory since this commit began.
        """
        document = {"files": [vars(f) for f in self.files], **manifest}
        data = (json.dumps(document, indent=1) + "\n").encode()
        url = join(self.url, MANIFEST)
        if self._previous is not None and not self._withdrawn:
            if read_manifest(self.url) != self._previous:
                raise InputError(f"{self.url}: another writer replaced it meanwhile; run one writer at a time")
            write_bytes(url, data)
        elif not create_exclusively(url, data):
            raise InputError(f"{self.url}: another writer committed it meanwhile; choose another directory")
        self.finished = True
        for name in _listed(self._previous) - _listed(document) - {f.path for f in self.files}:
            _remove_with_folder(join(self.url, name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        if not self.finished:
            # what is committed now may list files of ours too: the commit before, or a writer of equal content who won
            needed = _listed(read_manifest(self.url)) | self._kept
            for name in {placed.path for placed in self.files} - needed:
                _remove_with_folder(join(self.url, name))
