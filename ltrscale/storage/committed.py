"""Committed directories: read their manifests and files, check that they are whole, delete them.

A directory consists of the files that its `manifest.json` lists. A deletion removes the manifest first. It only ever
deletes files that a manifest lists or that carry the token of a writer without a live lease, never a directory with all
its contents.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from ltrscale.errors import InputError, UnavailableError
from ltrscale.storage import files, names, writers
from ltrscale.storage import lease as leases
from ltrscale.storage.lease import check_lease
from ltrscale.storage.listing import check_files, listed_in, sizes_in
from ltrscale.storage.names import is_local, join, local_path

T = TypeVar("T")

MANIFEST = "manifest.json"
HIDDEN_MANIFEST = "_manifest.json"
"""The manifest's name in a directory of tables; readers of tables skip names that begin with an underscore."""
UNFINISHED = ".unfinished.json"
"""What unfinished work leaves to the next commit: the files of long work with a document to resume from, see
`Commit.save`; under `stale` files to delete, which a failed commit kept on purpose or a killed one was about to
delete; under `ends` the hash of a manifest that, once it is there, completes the long work."""
_REQUESTS = 16  # at a time
_FEW = 64
_MOST_A_BATCH = 64
_log = logging.getLogger("ltrscale")


def read_manifest(url: str, name: str = MANIFEST) -> dict[str, Any] | None:
    """The manifest of this name in a committed directory; None if none is committed."""
    data = files.read_if_there(join(url, name))
    return None if data is None else parse_manifest(data, join(url, name))


def parse_manifest(data: bytes, path: str) -> dict[str, Any]:
    """Parse a manifest read from `path`."""
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:  # json raises RecursionError for deep nesting
        raise InputError(f"{path}: not JSON ({error}); delete the directory and make it again") from error
    if not isinstance(manifest, dict):
        raise InputError(f"{path}: not a manifest; delete the directory and make it again")
    check_files(manifest, path)
    return manifest


def read_verified(url: str, name: str, manifest: Mapping[str, Any]) -> bytes:
    """A file of a committed directory, checked against the content hash in its manifest.

    Raises:
        InputError: the manifest does not list the file, or the file is missing or was changed.
    """
    listed = listed_in(manifest)
    if name not in listed:
        raise InputError(f"{join(url, name)}: the manifest does not list it; make the directory again")
    path = names.listed_file(url, name)
    data = files.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != listed[name]:
        raise InputError(f"{path}: its content is not what was committed (hash differs); make the directory again")
    return data


def is_whole(url: str, manifest: Mapping[str, Any]) -> bool:
    """True if all files of a manifest and its parts exist with their sizes; logs the first that does not."""
    try:
        sizes = {name: size for name, size in sizes_in(url, manifest).items() if size is not None}
    except UnavailableError:
        raise
    except InputError as error:  # of a part
        _log.warning("%s", error)
        return False

    def differs(name: str) -> bool:
        path = join(url, name)
        return not files.exists(path) or files.size(path) != sizes[name]

    lost = list(sizes)
    if len(sizes) > _FEW:  # a listing takes one request per thousand files
        actual = files.sizes_below(url)
        lost = [name for name in sizes if actual.get(name) != sizes[name]]
    if len(sizes) <= _FEW or is_local(url):  # a listing does not follow links
        lost = [name for name, is_lost in zip(lost, at_once(differs, lost), strict=True) if is_lost]
    if lost:
        _log.warning(
            "%s: %d of %d files are missing or cut short, the first is %s", url, len(lost), len(sizes), lost[0]
        )
    return not lost


def at_once(function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """Results of a function for each item, in order; the calls run concurrently, as they mostly wait for storage."""
    # several items per call of a thread, because handing over one can cost more than its call
    some = max(1, min(_MOST_A_BATCH, len(items) // (4 * _REQUESTS)))
    batches = [items[i : i + some] for i in range(0, len(items), some)]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        results = pool.map(lambda batch: [function(item) for item in batch], batches)
        return [result for of_batch in results for result in of_batch]


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
        return files.sha256_of(stream).startswith(name[1])


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
    check_lease(url)
    saved, stale = read_unfinished(url)
    if (ends := record.get("ends")) is not None:
        data = files.read_if_there(join(url, MANIFEST))
        saved = {} if data is not None and hashlib.sha256(data).hexdigest() == ends else saved
    try:
        committed = _listed_at(url, (MANIFEST, HIDDEN_MANIFEST)) if stale else set[str]()
    except UnavailableError:
        raise
    except InputError as error:
        _log.warning("%s; files of an earlier commit stay there", error)
    else:
        for name in stale - committed - listed_in(saved).keys():
            files.remove_with_folders(names.listed_file(url, name), url)
        stale = set()
    if record != saved:
        write_unfinished(url, saved, stale)
    return saved


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
            except (UnavailableError, leases.LeaseLost):
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
            listed.update(f"{folder}{path}" for path in _listed_at(join(url, folder)))
        except UnavailableError:
            raise
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


def _listed_at(url: str, documents: Sequence[str] = (MANIFEST, HIDDEN_MANIFEST, UNFINISHED)) -> set[str]:
    """The files that some documents of a directory list."""
    return {path for name in documents for path in sizes_in(url, read_manifest(url, name))}
