"""Write directories that appear whole or not at all: a manifest, put in place last, lists the files of a directory.

To withdraw one removes its manifest first. Only files that a manifest lists, or whose names prove the writer, are ever
deleted, never a directory with all its contents.
"""

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ltrscale.errors import InputError, UnavailableError
from ltrscale.storage import files, names, scratch, writers
from ltrscale.storage import lease as leases
from ltrscale.storage.faults import disk_full, is_disk_full, named_errors
from ltrscale.storage.lease import check_lease
from ltrscale.storage.listing import (
    HIDDEN_MANIFEST,
    MANIFEST,
    UNFINISHED,
    deleting,
    listed_in,
    parse_manifest,
    read_manifest,
    read_unfinished,
    settle,
    sizes_in,
    write_unfinished,
)
from ltrscale.storage.names import is_local, join, local_path
from ltrscale.storage.stores import stamp


@dataclass(frozen=True)
class Placed:
    """A file of a directory as manifests list it: its name there, bytes and content hash."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - for pydantic, which reads manifests

    path: str
    bytes: int
    sha256: str


_turns: dict[str, threading.Lock] = {}
"""Who of this process's threads commits, by the remote directory's `place`."""


class Commit:
    """Writes the files of one directory and, last, its manifest.

    A context manager: `file` gives a local path to write to, and puts the file in place at the end of its block;
    `finish` commits. Leaving without `finish`, by an error or not, deletes the files that were put in place. A
    committed directory is replaced: the new manifest replaces the old one, then files that only the old one lists are
    deleted.

    A name with `{hash}` gets the first eight digits of the content's hash and the writer's token. It belongs to this
    writer alone, and its file is in place at the end of the block. Any other name may be used by several writers, so
    its file waits until `finish`, which first withdraws an old manifest that lists the name. A failure before this
    point, such as a full disk, leaves the old commit whole. The manifest is put after all files were seen in their
    places, and only if no other writer has put one since this commit began (see `swap`). A writer fails before that if
    another job has taken over its lease (see `lease`).

    Other processes can put files in place for this commit: each through a commit that is `helping`, which it ends by
    `leave`; the main commit takes the files over by `adopt`. A helping commit uses only names with `{hash}`. `manifest`
    is another name for the manifest, such as `HIDDEN_MANIFEST`.

    Long work survives its process by `save`, which records the files in place and a document to resume from. The next
    commit to the directory finds both in `saved`, and takes the files over by `adopt` or deletes them when it finishes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Commit(f"{folder}/out") as commit:
        ...     with commit.file("part-{hash}.txt") as path:
        ...         _ = path.write_text("hello")
        ...     commit.finish({"kind": "example"})
        ...     read_manifest(f"{folder}/out")["files"][0]["path"].startswith("part-2cf24dba-")
        True
    """

    def __init__(self, url: str, *, helping: bool = False, manifest: str = MANIFEST) -> None:
        self.url = url
        self._name, self._manifest = manifest, join(url, manifest)
        self.files: list[Placed] = []
        self.finished = False
        self._helping = helping
        self._token = writers.token_at(url)
        self._kept: set[str] = set()
        self._waiting: dict[str, tuple[Placed, Path]] = {}
        self._before = None if helping else files.read_if_there(self._manifest)
        previous = None if self._before is None else parse_manifest(self._before, self._manifest)
        self._previous = previous or {}
        self.replaced = listed_in(previous)
        """Content hashes, by name, of the files that the manifest to replace lists itself."""
        self.saved: dict[str, Any] = {}
        """The document of an unfinished commit, with its `files`; empty if there is none."""
        if not helping and files.read_if_there(join(url, UNFINISHED)) is not None:
            with self._exclusively():  # another writer may be about to commit or delete these files
                self.saved = settle(url)
        # refuse a name that leads out of the directory now: `finish` deletes some of these
        for name in (*self.replaced, *map(str, self._previous.get("quarantine", [])), *listed_in(self.saved)):
            names.listed_file(url, name)
        with named_errors(url, "write"):
            if is_local(url):
                root = local_path(url)
                self._new_folders = [folder for folder in (root, *root.parents) if not folder.exists()]
                # beside the final places, so a rename puts a file in place; the token lets `sweep` find leftovers
                self._staging = root / writers.staging_name(self._token)
                self._staging.mkdir(parents=True)
            else:
                self._staging = scratch.make()

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def file(self, name: str, *, size: int = 0) -> Iterator[Path]:
        """A local path to write; the file is in place under `name` at the end of the block, or of the commit.

        With `{hash}` a name belongs to this writer alone, see above. `size` is approximate, so that a full disk is
        reported before the block writes.

        Raises:
            InputError: the disk is full, now or while the block writes.
        """
        local = self._staging / secrets.token_hex(8)
        with self._room(join(self.url, name), local, size):
            yield local
        digest = files.sha256(local)
        path = name.replace("{hash}", f"{digest[:8]}-{self._token}")
        placed = Placed(path, local.stat().st_size, digest)
        if placed.path != name:
            files.put(local, join(self.url, placed.path), digest)
        else:
            assert not self._helping
            self._waiting[name] = placed, local
        self.files.append(placed)

    @contextmanager
    def _room(self, url: str, local: Path, size: int) -> Iterator[None]:
        """Report a full disk in one line, and delete the unfinished file to free its space."""
        if shutil.disk_usage(self._staging).free < size:
            raise disk_full(url, size, self._staging)
        try:
            yield
        except Exception as error:
            local.unlink(missing_ok=True)
            if is_disk_full(error):
                raise disk_full(url, size, self._staging) from error
            raise

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write files with these contents, by their names; raises as `file`."""
        for name, content in contents.items():
            with self.file(name, size=len(content)) as path:
                path.write_bytes(content)

    def keep(self, names: Iterable[str]) -> None:
        """Leave these files in place even if the directory is not committed."""
        self._kept.update(names)

    def leave(self) -> tuple[Placed, ...]:
        """End a helping commit: its files stay, for the main commit to take over."""
        self._flush()
        self.finished = True
        return tuple(self.files)

    def adopt(self, placed: Iterable[Placed]) -> None:
        """Take over the files of a helping commit, or those in `saved`.

        Without `finish` they are deleted with the others, except those in `saved`.
        """
        self.files += placed

    def save(self, document: Mapping[str, Any], *, without: Iterable[str] = ()) -> None:
        """Let the files in place outlive this process, except those in `without`, with a document to resume from.

        Files that only an earlier `save` named are deleted.
        """
        left_out = set(without)
        self.files = [placed for placed in self.files if placed.path not in left_out]
        before = listed_in(self.saved)
        self.saved = {**document, "files": [vars(placed) for placed in self.files]}
        self._flush()
        with self._exclusively():
            check_lease(self.url)  # another writer's record is not ours to replace
            with deleting(self.url, before.keys() - listed_in(self.saved).keys(), saved=self.saved):
                pass

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Commit: write the manifest; its `files` are the files put in place, unless it brings its own list.

        Raises:
            InputError: another writer has committed the directory since this commit began, or has taken over its lease;
                or a file that was put in place is gone.
        """
        document = {"files": [vars(f) for f in self.files], **manifest}
        data = (json.dumps(document, indent=1) + "\n").encode()
        self._see(placed for placed in self.files if placed.path not in self._waiting)
        before, now = ({part["path"] for part in each.get("parts", [])} for each in (self._previous, document))
        listed = sizes_in(self.url, document, without=before & now).keys() | {file.path for file in self.files}
        stale = sizes_in(self.url, self._previous, without=before & now, despite_damage=True).keys() - listed
        if self.saved:  # `stale` already has its files that the old manifest lists
            stale |= listed_in(self.saved).keys() - sizes_in(self.url, document).keys()
        self._flush()
        with self._exclusively():
            check_lease(self.url)
            current = files.read_if_there(self._manifest)
            if current not in (self._before, data):
                raise self._lost()
            with deleting(self.url, stale, ends=data if self.saved else None):
                replaced = self._place_waiting(data)
                # the manifest is there already where another writer committed the same content
                if current != data and not leases.swap(self._manifest, replaced, data):
                    raise self._lost()
                if not is_local(self.url) and not all(self._is_there(placed) for placed, _ in self._waiting.values()):
                    # this process was suspended for so long that another has taken over the directory
                    leases.swap(self._manifest, data, None)
                    raise self._lost()
                self.finished = True

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Keep other writers out, by a lock on a local disk, by a lease on a remote store unless one is held above.

        Threads take turns: a lease is a process's, so one thread would take another's for its own.
        """
        if is_local(self.url):
            with leases.exclusively(self.url):
                yield
            return
        with _turns.setdefault(writers.place(self.url), threading.Lock()), contextlib.ExitStack() as lease:
            if writers.covering(self.url) is None:
                lease.enter_context(leases.hold(self.url))
            yield

    def _lost(self) -> InputError:
        return InputError(f"{self.url}: another writer has committed it meanwhile; run one writer at a time")

    def _place_waiting(self, manifest: bytes) -> bytes | None:
        """Put files with shared names in place and withdraw an old manifest of theirs; returns the one to replace."""
        url, old_manifest = self._manifest, self._before
        if not self._waiting:
            return old_manifest
        stamps = {name: stamp(join(self.url, name)) for name in self._waiting}
        # reserve the manifest's bytes on the disk, so that writing it last finds space
        reserve = self._staging / MANIFEST
        with named_errors(url, "write", need=len(manifest)):
            reserve.write_bytes(manifest)
        if old_manifest is not None and any(
            self.replaced.get(placed.path) not in (None, placed.sha256) for placed, _ in self._waiting.values()
        ):
            if not leases.swap(url, old_manifest, None):
                raise self._lost()
            old_manifest = None
        for name, (placed, local) in self._waiting.items():
            if not files.put_over(local, join(self.url, name), placed.sha256, stamps[name]):
                raise self._lost()
        reserve.unlink()
        self._flush_folders()
        self._see(placed for placed, _ in self._waiting.values())
        return old_manifest

    def _is_there(self, placed: Placed) -> bool:
        return files.is_there(join(self.url, placed.path), placed.bytes, placed.sha256)

    def _see(self, placed: Iterable[Placed]) -> None:
        """Check that files are in their places, with their sizes and hashes."""
        expected = list(placed)
        for file, is_there in zip(expected, files.at_once(self._is_there, expected), strict=True):
            if not is_there:
                raise InputError(
                    f"{join(self.url, file.path)}: deleted or changed by others before it was committed; "
                    "run the same command again"
                )

    def _flush(self) -> None:
        """Flush files and directory names, all at once because each flush makes the disk write its journal."""
        if is_local(self.url):
            root = local_path(self.url)
            waiting = {name: local for name, (_, local) in self._waiting.items()}
            with named_errors(self.url, "write"):
                for placed in self.files:
                    files.flush(waiting.get(placed.path, root / placed.path))
            self._flush_folders()

    def _flush_folders(self) -> None:
        if is_local(self.url):
            root = local_path(self.url)
            parents = {folder for file in self.files for folder in (root / file.path).parents}
            folders = {folder for folder in parents if folder.is_relative_to(root) and folder.exists()}
            with named_errors(self.url, "write"):
                for path in [*folders, *(folder.parent for folder in self._new_folders)]:
                    files.flush(path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            for local in self._staging.iterdir():
                local.unlink()
            self._staging.rmdir()
        if self.finished:
            return
        # where storage has failed, deleting may fail too; report the first error
        with contextlib.suppress(InputError, UnavailableError) if error else contextlib.nullcontext():
            own_files = {placed.path for placed in self.files if placed.path not in self._waiting}
            # perhaps our own: S3 may have stored it and lost the answer
            committed = sizes_in(self.url, read_manifest(self.url, self._name))
            for name in own_files - self._kept - committed.keys() - listed_in(self.saved).keys():
                files.remove_with_folders(join(self.url, name), self.url)
            if kept := own_files & self._kept:
                with self._exclusively():
                    check_lease(self.url)  # another writer's record is not ours to replace
                    saved, left = read_unfinished(self.url)
                    write_unfinished(self.url, saved, left | kept)


def withdraw(url: str, own: re.Pattern[str] | None = None, *, name: str = MANIFEST) -> None:
    """Delete a committed directory: its manifest first, then the files that it lists, then empty folders.

    So nobody sees a manifest without its files. Nothing is deleted if nothing is committed. Files that only a lost or
    damaged part of the manifest lists stay there, which is logged.

    Files directly there whose names match `own`, with the first digits of the content's hash as the first group, are
    the caller's. They are deleted too, and only they if the manifest is missing or damaged.
    """
    try:
        manifest = read_manifest(url, name)
    except InputError:
        if own is None:
            raise
        manifest = {}
    if manifest is not None or own is not None:
        listed = {*sizes_in(url, manifest, despite_damage=True)}
        if own is not None:
            listed.update(path for path in files.below(url) if (match := own.fullmatch(path)) and _has_hash(url, match))
        check_lease(url)
        with deleting(url, listed):
            files.remove(join(url, name))
    if is_local(url):  # also if nothing is committed: a killed withdrawal may have left the folder
        files.remove_empty(url, str(local_path(url).parent))


def _has_hash(url: str, name: re.Match[str]) -> bool:
    """True if a file's content has the hash in its name, which a foreign file of such a name does not."""
    with files.open_input(names.listed_file(url, name.string)) as stream:
        digest = hashlib.file_digest(stream, "sha256")  # type: ignore[arg-type]  # fsspec's files have `readinto`
    return digest.hexdigest().startswith(name[1])


def withdraw_below(url: str, loose: Collection[str]) -> None:
    """Withdraw all committed directories at and below a directory, and delete the files there with these endings."""
    paths = files.below(url)
    for name in paths:
        folder, _, last = name.rpartition("/")
        if last in (MANIFEST, HIDDEN_MANIFEST):
            withdraw(join(url, folder), name=last)
    for name in paths:
        if any(f"/{name}".endswith(f"/{ending}") for ending in loose):
            files.remove_with_folders(names.listed_file(url, name), url)
