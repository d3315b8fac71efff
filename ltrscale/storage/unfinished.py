"""What unfinished work leaves to the next commit of a directory: files to go on with, and files to delete.

What a dead writer has left is known by its token, and deleted by the next holder of the directory.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ltrscale.errors import InputError
from ltrscale.storage import files, names, writers
from ltrscale.storage import lease as leases
from ltrscale.storage.listing import HIDDEN_MANIFEST, MANIFEST, listed_in, read_manifest, sizes_in
from ltrscale.storage.names import join

UNFINISHED = ".unfinished.json"
"""What unfinished work leaves to the next commit: the files of long work with a document to resume from, see
`Commit.save`; under `stale` files to delete, which a failed commit kept on purpose or a killed one was about to
delete; under `ends` the hash of a manifest that, once it is there, completes the long work."""
_log = logging.getLogger("ltrscale")


def read_unfinished(url: str) -> tuple[dict[str, Any], set[str]]:
    """The document to resume from with its `files`, empty if there is none, and the files left to delete."""
    record = read_manifest(url, UNFINISHED) or {}
    # earlier versions have called them `quarantine`
    stale = {name for key in ("stale", "quarantine") for name in record.pop(key, [])}
    record.pop("ends", None)
    return record, stale


def write_unfinished(url: str, saved: Mapping[str, Any], stale: Collection[str], *, ends: str | None = None) -> None:
    """Replace what is left to the next commit, in one step."""
    to_delete = {"stale": sorted(stale)} if stale else {}
    record = {**saved, **to_delete, **({} if ends is None else {"ends": ends})}
    if record:
        files.write_bytes(join(url, UNFINISHED), json.dumps(record).encode())
    else:
        files.remove(join(url, UNFINISHED))


@contextmanager
def deleting(
    url: str, paths: Collection[str], *, saved: Mapping[str, Any] | None = None, ends: bytes | None = None
) -> Iterator[None]:
    """Delete files that the block makes useless; if this process is killed, the next commit deletes them.

    `saved` replaces the document to resume from, in the step that records the files. `ends` is the manifest that the
    block puts in place, if it completes the saved work there.
    """
    if not paths and saved is None and ends is None:
        yield
        return
    before, left = read_unfinished(url)  # `left` by an earlier commit that could not read a part
    saved = before if saved is None else saved
    write_unfinished(url, saved, left | {*paths}, ends=None if ends is None else hashlib.sha256(ends).hexdigest())
    yield
    for name in paths:
        files.remove_with_folders(names.listed_file(url, name), url)
    if paths or ends is not None:
        write_unfinished(url, saved if ends is None else {}, left - {*paths})


def settle(url: str) -> dict[str, Any]:
    """Delete the uncommitted files that are left to the next commit; returns the document to resume from, if any.

    Call it only where no other writer can commit. Nothing is deleted beside a manifest with an unreadable part.
    """
    if (record := read_manifest(url, UNFINISHED)) is None:
        return {}
    leases.check_lease(url)
    saved, stale = read_unfinished(url)
    if (ends := record.get("ends")) is not None:
        data = files.read_if_there(join(url, MANIFEST))
        saved = {} if data is not None and hashlib.sha256(data).hexdigest() == ends else saved
    try:
        committed = listed_at(url, (MANIFEST, HIDDEN_MANIFEST)) if stale else set[str]()
    except InputError as error:
        _log.warning("%s; files of an earlier commit stay there", error)
    else:
        for name in stale - committed - listed_in(saved).keys():
            files.remove_with_folders(names.listed_file(url, name), url)
        stale = set()
    if record != saved:
        write_unfinished(url, saved, stale)
    return saved


def listed_at(url: str, documents: Sequence[str] = (MANIFEST, HIDDEN_MANIFEST, UNFINISHED)) -> set[str]:
    """The files that some documents of a directory list."""
    return {path for name in documents for path in sizes_in(url, read_manifest(url, name))}


def sweep(url: str, tokens: Collection[str]) -> None:
    """Delete what writers with these tokens have left below a directory: staged files and unlisted ones.

    This includes files that a killed commit was about to delete, and leftovers of other dead writers that held a
    directory below. Call it only when the lease of these writers is over. Nothing is deleted below a manifest with an
    unreadable part.
    """
    left_there = writers.left_by(tokens)
    found = files.below(url)
    leased = [folder for folder in _folders_of(found, leases.LEASE) if folder]
    for folder in leased:
        with leases.hold(join(url, folder), only_left=True) as before:
            if before:
                sweep(join(url, folder), before)
    for folder in _folders_of(found, UNFINISHED):
        if not folder.startswith(tuple(leased)):  # another writer may be about to commit these files
            try:
                settle(join(url, folder))
            except leases.LeaseLost:
                raise
            except InputError as error:  # of a damaged record, which blocks only work in that folder
                _log.warning("%s", error)
            files.remove_empty(join(url, folder), url)
    orphans = _orphans(url, [name for name in found if left_there.search(name)])
    for name in orphans:
        files.remove_with_folders(names.listed_file(url, name), url)
    for folder in files.folders_below(url):
        if left_there.search(folder):
            files.remove_empty(join(url, folder), url)
    if orphans:
        _log.info("%s: removed %d files that an earlier writer had left", url, len(orphans))


def sweep_helpers(url: str) -> None:
    """Delete files left by helper processes of this holder of a directory, unless another process has taken them over.

    A helper may have died after its file was in place. Call it at the end of the work, when no helper runs any more.
    """
    if (place := writers.place(url)) not in writers.SHARED:
        return
    left_there = writers.left_by([writers.HELD[place].token])
    leftovers = [name for name in files.below(url) if left_there.search(name)]
    for name in _orphans(url, leftovers):
        files.remove_with_folders(names.listed_file(url, name), url)


def _orphans(url: str, leftovers: Sequence[str]) -> list[str]:
    """The files that no manifest and no unfinished work above them lists."""
    listed, unknown = set[str](), list[str]()
    for folder in {folder for name in leftovers for folder in _folders(name)}:
        try:
            listed.update(f"{folder}{path}" for path in listed_at(join(url, folder)))
        except InputError as error:
            _log.warning("%s; files of an earlier writer stay there", error)
            unknown.append(folder)
    return [name for name in leftovers if name not in listed and not name.startswith(tuple(unknown))]


def _folders_of(paths: Iterable[str], last: str) -> list[str]:
    """The folders that contain a file of this name, with a trailing slash, parents first."""
    return [path.removesuffix(last) for path in paths if path.rpartition("/")[2] == last]


def _folders(name: str) -> list[str]:
    """The folders above a file with a trailing slash, from the directory itself ("") down to the file's own."""
    parts = name.split("/")[:-1]
    return ["".join(f"{part}/" for part in parts[:i]) for i in range(len(parts) + 1)]
