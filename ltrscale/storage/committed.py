"""Committed directories: reading their manifests and files, checking that they are whole, deleting them.

A directory consists of the files that its `manifest.json` lists. A deletion removes the manifest first. Only files that
a manifest lists, or that carry the token of a writer whose lease is over, are ever deleted; never a directory with
whatever it contains.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ltrscale.errors import InputError, UnavailableError
from ltrscale.storage import files, names
from ltrscale.storage import lease as leases
from ltrscale.storage.names import is_local, join, local_path
from ltrscale.storage.parts import names_to_delete, sizes_in

T = TypeVar("T")

MANIFEST = "manifest.json"
HIDDEN_MANIFEST = "_manifest.json"
"""The manifest's name in a directory of tables, whose readers skip names that begin with an underscore."""
KEPT = ".kept.json"
"""Lists files that the next commit deletes, as it would those in quarantine: what a failed commit has left on purpose,
and what a commit that was killed was about to delete."""
UNFINISHED = ".unfinished.json"
"""Lists the files of long work whose process ended, and says how to go on; see `Commit.save`."""
_REQUESTS = 16  # at a time
_FEW = 64
_MOST_A_TURN = 64
_STAGED = re.compile(r"(^|/)\.[^/]+\.[0-9a-f]{8}$")
"""The temporary name of a small file until it is renamed (`files.write_bytes`)."""
_log = logging.getLogger("ltrscale")


def read_manifest(url: str, name: str = MANIFEST) -> dict[str, Any] | None:
    """The manifest of this name in a committed directory, or None where none is committed."""
    data = files.read_if_there(join(url, name))
    return None if data is None else parse_manifest(data, join(url, name))


def parse_manifest(data: bytes, path: str) -> dict[str, Any]:
    """The content of a manifest that was read from `path`."""
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:  # json raises RecursionError for deep nesting
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
    listed = listed_in(manifest)
    if name not in listed:
        raise InputError(f"{join(url, name)}: the manifest does not list it; make the directory again")
    path = names.listed_file(url, name)
    data = files.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != listed[name]:
        raise InputError(f"{path}: its content is not what was committed (hash differs); make the directory again")
    return data


def listed_in(manifest: Mapping[str, Any] | None) -> dict[str, str]:
    """The content hashes of a manifest's files by name, those beside the data too."""
    return {str(f["path"]): str(f["sha256"]) for f in names.files_in(manifest or {})}


def is_whole(url: str, manifest: Mapping[str, Any]) -> bool:
    """Whether all files that a manifest and its parts list are there with their sizes; logs the first that is not."""
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
    if len(sizes) > _FEW:  # a listing takes one request for a thousand files
        actual = files.sizes_below(url)
        lost = [name for name in sizes if actual.get(name) != sizes[name]]
    if len(sizes) <= _FEW or is_local(url):  # a listing follows no links
        lost = [name for name, is_lost in zip(lost, at_once(differs, lost), strict=True) if is_lost]
    if lost:
        _log.warning(
            "%s: %d of %d files are missing or cut short, the first is %s", url, len(lost), len(sizes), lost[0]
        )
    return not lost


def at_once(function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """The function's result for each item, in order; the calls run at once, since they mostly wait for storage."""
    # a thread takes several items at a time, since handing each over costs more than many a call
    some = max(1, min(_MOST_A_TURN, len(items) // (4 * _REQUESTS)))
    turns = [items[i : i + some] for i in range(0, len(items), some)]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        results = pool.map(lambda turn: [function(item) for item in turn], turns)
        return [result for of_turn in results for result in of_turn]


def withdraw(url: str, own: re.Pattern[str] | None = None, *, name: str = MANIFEST) -> None:
    """Delete a committed directory: its manifest first, then the files that this lists, then folders left empty.

    So nobody sees a manifest without its files. Where nothing is committed, nothing is deleted. Files that only a lost
    or damaged part of the manifest lists stay there, which is logged.

    Args:
        url: the directory.
        own: names of files that only the caller's writers put directly there: they are deleted too, and they alone
            where the manifest is missing or damaged.
        name: of the manifest.
    """
    try:
        manifest = read_manifest(url, name)
    except InputError:
        if own is None:
            raise
        manifest = {}
    if manifest is None and own is None:
        return
    listed = names_to_delete(url, manifest or {})
    if own is not None:
        listed += [path for path in files.below(url) if own.fullmatch(path)]
    check_lease(url)
    files.remove(join(url, name))
    for path in listed:
        files.remove_with_folders(names.listed_file(url, path), url)
    if is_local(url):
        files.remove_empty(local_path(url), local_path(url).parent)


def withdraw_below(url: str, loose: Collection[str]) -> None:
    """Withdraw all committed directories at and below a directory, and delete the files there with these names.

    Args:
        url: the directory.
        loose: names of files, such as `log.txt` or `run/log.txt`.
    """
    paths = files.below(url)
    for name in paths:
        folder, _, last = name.rpartition("/")
        if last in (MANIFEST, HIDDEN_MANIFEST):
            withdraw(join(url, folder), name=last)
    for name in paths:
        if any(f"/{name}".endswith(f"/{ending}") for ending in loose):
            files.remove_with_folders(names.listed_file(url, name), url)


def kept_at(url: str) -> set[str]:
    """The files of a directory whose deletion is left to its next commit."""
    data = files.read_if_there(join(url, KEPT))
    return set() if data is None else set(names_in(url, parse_manifest(data, join(url, KEPT))))


def write_kept(url: str, paths: Collection[str]) -> None:
    """Leave the deletion of these files and no others to the next commit, whatever becomes of this process."""
    if paths:
        files.write_bytes(join(url, KEPT), json.dumps({"quarantine": sorted(paths)}).encode())
    else:
        files.remove(join(url, KEPT))


def delete_kept(url: str) -> None:
    """Delete the files that a commit which did not end has left in a directory, but those that are committed there.

    Call it only where no other writer can commit. Nothing is deleted beside a manifest with a part that cannot be read.
    """
    if not (kept := kept_at(url)):
        return
    try:
        committed = _listed_at(url)
    except UnavailableError:
        raise
    except InputError as error:
        _log.warning("%s; files of an earlier commit stay there", error)
        return
    check_lease(url)
    for name in kept:
        if name not in committed:
            files.remove_with_folders(names.listed_file(url, name), url)
    write_kept(url, ())


def check_lease(url: str) -> None:
    """Check that this process still holds its lease at or above a directory, if it has one.

    Raises:
        LeaseLost: another job has taken over.
    """
    if (lease := leases.covering(url)) is not None:
        lease.check()


def sweep(url: str, tokens: Collection[str]) -> None:
    """Delete the files that writers with these tokens have left below a directory: staged ones and unlisted ones.

    Those that a commit which was killed was about to delete go too. Call it only when their lease is over. Nothing is
    deleted below a manifest with a part that cannot be read.
    """
    delete_kept(url)
    # tokens come from a file that others may have written; `(?!)` matches nothing
    token_pattern = re.compile(
        "|".join(rf"-{token}\b" for token in tokens if re.fullmatch("[0-9a-f]{8}", token)) or r"(?!)"
    )
    leftovers = [name for name in files.below(url) if token_pattern.search(name) or _STAGED.search(name)]
    folders = {folder for name in leftovers for folder in _folders(name)}
    listed, unknown = set[str](), list[str]()
    for folder in folders:
        try:
            listed.update(f"{folder}{path}" for path in _listed_at(join(url, folder)))
        except UnavailableError:
            raise
        except InputError as error:
            _log.warning("%s; files of an earlier writer stay there", error)
            unknown.append(folder)
    orphans = [name for name in leftovers if name not in listed and not name.startswith(tuple(unknown))]
    for name in orphans:
        files.remove_with_folders(names.listed_file(url, name), url)
    if orphans:
        _log.info("%s: removed %d files that an earlier writer had left", url, len(orphans))


def _folders(name: str) -> list[str]:
    """The folders above a file, each with a slash at its end, from the directory itself ("") down to the file's own."""
    parts = name.split("/")[:-1]
    return ["".join(f"{part}/" for part in parts[:i]) for i in range(len(parts) + 1)]


def _listed_at(url: str) -> set[str]:
    """The files that the manifests of a directory list, and its unfinished work."""
    documents = (read_manifest(url, name) for name in (MANIFEST, HIDDEN_MANIFEST, UNFINISHED))
    return {name for document in documents for name in names_in(url, document)}


def names_in(url: str, manifest: Mapping[str, Any] | None) -> list[str]:
    """The files that the manifest of a directory and its parts list, quarantine included."""
    return list(sizes_in(url, manifest or {}))
