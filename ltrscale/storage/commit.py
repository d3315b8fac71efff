"""Directories that are there whole or not at all: a manifest, put in place last, lists what belongs to one."""

import contextlib
import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ltrscale.errors import InputError
from ltrscale.storage import files, names
from ltrscale.storage.faults import disk_full, is_disk_full, named_errors
from ltrscale.storage.urls import is_local, join, local_path

MANIFEST = "manifest.json"


def read_manifest(url: str) -> dict[str, Any] | None:
    """The manifest of a committed directory, or None where none is committed."""
    path = join(url, MANIFEST)
    if not files.exists(path):
        return None
    try:
        manifest = json.loads(files.read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); delete the directory and make it again") from error
    if not isinstance(manifest, dict):
        raise InputError(f"{path}: not a manifest; delete the directory and make it again")
    names.check_files(manifest, path)
    return manifest


def read_verified(url: str, name: str, manifest: Mapping[str, Any]) -> bytes:
    """A file of a committed directory, checked against the content hash in its manifest.

    Raises:
        InputError: the manifest does not list the file, or the file is missing or was changed.
    """
    path = names.listed_file(url, name)
    listed = _listed(manifest)
    if name not in listed:
        raise InputError(f"{path}: the manifest does not list it; make the directory again")
    data = files.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != listed[name]:
        raise InputError(f"{path}: its content is not what was committed (hash differs); make the directory again")
    return data


@dataclass(frozen=True)
class Placed:
    """A file put in place by a commit: its name in the directory, bytes and content hash."""

    path: str
    bytes: int
    sha256: str


def _listed(manifest: Mapping[str, Any] | None) -> dict[str, str]:
    """The content hashes of a manifest's files by name."""
    return {str(f["path"]): str(f["sha256"]) for f in (manifest or {}).get("files", [])}


class Commit:
    """Writes the files of one directory and, last, its manifest.

    A context manager: `file` gives a local path to write to and puts the file in place at the end of its block;
    `finish` commits. Leaving without `finish`, by an error or not, takes back what was put in place. A directory
    that is committed already is replaced: the new manifest takes the place of the old one, then files that only the
    old one lists are deleted. A new file that has an old one's name and other content waits until `finish`, which then
    withdraws the old manifest first: whatever fails before, a full disk for one, leaves the old commit whole.

    Other processes can put files in place for it: each through a commit with `part`, which it ends by `leave`; the
    whole commit takes them over by `adopt`. A part must not use the name of a file that is committed already, but
    for equal content.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Commit(f"{folder}/out") as commit:
        ...     with commit.file("part-{hash}.txt") as path:
        ...         _ = path.write_text("hello")
        ...     commit.finish({"kind": "example"})
        ...     read_manifest(f"{folder}/out")["files"][0]["path"]
        'part-2cf24dba.txt'
    """

    def __init__(self, url: str, *, part: bool = False) -> None:
        self.url = url
        self.files: list[Placed] = []
        self.finished = False
        self._kept: set[str] = set()
        self._waiting: dict[str, Path] = {}
        self._previous = None if part else read_manifest(url)
        self._replaced = _listed(self._previous)
        for name in self._replaced:  # some of which are deleted at the end
            names.listed_file(url, name)
        with named_errors(url, "write"):
            if is_local(url):
                root = local_path(url)
                self._new_folders = [folder for folder in (root, *root.parents) if not folder.exists()]
                self._staging = root / f".staging-{secrets.token_hex(4)}"
                self._staging.mkdir(parents=True)
            else:
                self._staging = Path(tempfile.mkdtemp(prefix="ltrscale-"))

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def file(self, name: str, *, size: int = 0) -> Iterator[Path]:
        """A local path to write; at the end of the block the file is in place under `name`.

        `{hash}` in the name becomes the first eight digits of the content's hash, so that two writers cannot touch
        each other's files. With `size`, about the bytes that the file will have, a full disk is told before it is
        written to.

        Raises:
            InputError: the disk is full, here or, later, where the block writes.
        """
        local = self._staging / secrets.token_hex(8)
        with self._room(join(self.url, name), local, size):
            yield local
        digest = files.sha256(local)
        placed = Placed(name.replace("{hash}", digest[:8]), local.stat().st_size, digest)
        replaced = self._replaced.get(placed.path)
        if replaced in (None, digest):
            if replaced:
                files.flush(local)  # it takes the place of one that is in use
            files.put(local, join(self.url, placed.path))
        else:
            self._waiting[placed.path] = local
        self.files.append(placed)

    def keep(self, names: Iterable[str]) -> None:
        """Leave these files in place even if the directory is not committed."""
        self._kept.update(names)

    def leave(self) -> tuple[Placed, ...]:
        """End a part: its files stay, for the whole commit to take over."""
        self._flush()
        self.finished = True
        return tuple(self.files)

    def adopt(self, placed: Iterable[Placed]) -> None:
        """Take over the files of a part; without `finish` they are taken back with the others."""
        self.files += placed

    @contextmanager
    def _room(self, url: str, local: Path, size: int) -> Iterator[None]:
        """Turn what is raised where the disk is full into one line, and give the room back that was used in vain."""
        if shutil.disk_usage(self._staging).free < size:
            raise disk_full(url, size, self._staging)
        try:
            yield
        except Exception as error:
            local.unlink(missing_ok=True)
            if is_disk_full(error):
                raise disk_full(url, size, self._staging) from error
            raise

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Commit: write the manifest, whose `files` are those put in place unless it brings its own list.

        Raises:
            InputError: another writer has committed the directory since this commit began.
        """
        document = {"files": [vars(f) for f in self.files], **manifest}
        data = (json.dumps(document, indent=1) + "\n").encode()
        url = join(self.url, MANIFEST)
        self._check_unchanged()
        if self._waiting:
            self._replace_waiting(url, data)
        self._flush()
        if self._previous is not None and not self._waiting:
            self._check_unchanged()  # again, for to flush may take seconds
            files.write_bytes(url, data)
        elif not files.create_exclusively(url, data):
            raise InputError(f"{self.url}: another writer committed it meanwhile; choose another directory")
        self.finished = True
        for name in self._replaced.keys() - _listed(document).keys() - {f.path for f in self.files}:
            files.remove_with_folder(join(self.url, name))

    def _check_unchanged(self) -> None:
        if self._previous is not None and read_manifest(self.url) != self._previous:
            raise InputError(f"{self.url}: another writer replaced it meanwhile; run one writer at a time")

    def _replace_waiting(self, url: str, manifest: bytes) -> None:
        """Withdraw the old commit, once there is room for all of the new one, and replace the files that it shares."""
        reserve = self._staging / MANIFEST
        with named_errors(url, "write", need=len(manifest)):
            reserve.write_bytes(manifest)
        files.remove(url)
        for name, local in self._waiting.items():
            files.put(local, join(self.url, name))
        reserve.unlink()

    def _flush(self) -> None:
        """Wait until the files, and the names of the directories down to them, would survive a crash of the machine.

        All at once and only here: a file system's journal is written for each time that is waited for.
        """
        if is_local(self.url):
            root = local_path(self.url)
            placed = [root / file.path for file in self.files]
            folders = {folder for path in placed for folder in path.parents if folder.is_relative_to(root)}
            with named_errors(self.url, "write"):
                for path in [*placed, *folders, *(folder.parent for folder in self._new_folders)]:
                    files.flush(path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        if self.finished:
            return
        # where storage has failed, what cannot be taken back either is left, and the first error is the one to tell
        with contextlib.suppress(InputError) if error else contextlib.nullcontext():
            # what is committed now may list files of ours too: the commit before, or a writer of equal content who won
            needed = _listed(read_manifest(self.url)).keys() | self._kept
            for name in {placed.path for placed in self.files} - needed:
                files.remove_with_folder(join(self.url, name))
