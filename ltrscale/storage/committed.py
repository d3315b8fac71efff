"""Committed directories: what is read of them, whether they are whole, and how they are deleted.

A directory is what its `manifest.json` lists. Whatever is deleted loses its manifest first, and only files that a
manifest lists, or that bear the token of a writer whose lease is over, are ever deleted; never a directory with what
happens to be in it.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ltrscale.errors import InputError
from ltrscale.storage import files, names
from ltrscale.storage import lease as leases
from ltrscale.storage.urls import is_local, join, local_path

T = TypeVar("T")

MANIFEST = "manifest.json"
KEPT = ".kept.json"
"""Lists what a commit that failed has left on purpose; the next one deletes it."""
_REQUESTS = 16  # at a time
_STAGED = re.compile(r"(^|/)\.[^/]+\.[0-9a-f]{8}$")
"""What a small file is called until it takes its place."""
_log = logging.getLogger("ltrscale")


def read_manifest(url: str) -> dict[str, Any] | None:
    """The manifest of a committed directory, or None where none is committed."""
    data = files.read_if_there(join(url, MANIFEST))
    return None if data is None else parse_manifest(data, join(url, MANIFEST))


def parse_manifest(data: bytes, path: str) -> dict[str, Any]:
    """The content of a manifest that was read from `path`."""
    try:
        manifest = json.loads(data)
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
    listed = listed_in(manifest)
    if name not in listed:
        raise InputError(f"{join(url, name)}: the manifest does not list it; make the directory again")
    path = names.listed_file(url, name)
    data = files.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != listed[name]:
        raise InputError(f"{path}: its content is not what was committed (hash differs); make the directory again")
    return data


def listed_in(manifest: Mapping[str, Any] | None) -> dict[str, str]:
    """The content hashes of a manifest's files by name."""
    return {str(f["path"]): str(f["sha256"]) for f in (manifest or {}).get("files", [])}


def is_whole(url: str, manifest: Mapping[str, Any]) -> bool:
    """Whether all files that a manifest lists are there in their sizes; says which one is not."""

    def missing(file: Mapping[str, Any]) -> bool:
        path = join(url, str(file["path"]))
        return not files.exists(path) or files.size(path) != file["bytes"]

    listed = manifest.get("files", [])
    lost = [file["path"] for file, gone in zip(listed, at_once(missing, listed), strict=True) if gone]
    if lost:
        _log.warning(
            "%s: %d of %d files are missing or cut short, the first is %s", url, len(lost), len(listed), lost[0]
        )
    return not lost


def at_once(function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """What a function that waits for storage returns for each item."""
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(function, items))


def withdraw(url: str, own: re.Pattern[str] | None = None) -> None:
    """Delete a committed directory: its manifest first, then the files that this lists, then folders left empty.

    So nobody sees a manifest without its files. Where nothing is committed, nothing is deleted.

    Args:
        url: the directory.
        own: names of files that none but the caller's writers put directly there: they are deleted too, and where
            the manifest is missing or damaged they are all there is.
    """
    try:
        manifest = read_manifest(url)
    except InputError:
        if own is None:
            raise
        manifest = {}
    if manifest is None and own is None:
        return
    listed = names_in(manifest)
    if own is not None:
        listed += [name for name in files.below(url) if own.fullmatch(name)]
    check_lease(url)
    files.remove(join(url, MANIFEST))
    for name in listed:
        files.remove_with_folders(names.listed_file(url, name), url)
    if is_local(url):
        files.remove_empty(local_path(url), local_path(url).parent)


def withdraw_below(url: str, loose: Collection[str]) -> None:
    """Withdraw all committed directories at and below a directory, and delete the files there with these names.

    Args:
        url: the directory.
        loose: names of files, such as `log.txt` or `run/log.txt`.
    """
    there = files.below(url)
    for name in there:
        if name.rpartition("/")[2] == MANIFEST:
            withdraw(join(url, name.rpartition("/")[0]))
    for name in there:
        if any(f"/{name}".endswith(f"/{ending}") for ending in loose):
            files.remove_with_folders(names.listed_file(url, name), url)


def delete_kept(url: str) -> None:
    """Delete what a commit that failed has left on purpose in a directory."""
    data = files.read_if_there(join(url, KEPT))
    if data is not None:
        for name in listed_in(parse_manifest(data, join(url, KEPT))):
            files.remove_with_folders(names.listed_file(url, name), url)
        files.remove(join(url, KEPT))


def check_lease(url: str) -> None:
    """Check that the lease that this process holds at or above a directory, if any, is still its own.

    Raises:
        LeaseLost: another job has taken over.
    """
    if (lease := leases.covering(url)) is not None:
        lease.check()


def sweep(url: str, tokens: Collection[str]) -> None:
    """Delete what writers with these tokens have left below a directory: what they staged, and what no manifest lists.

    To be called when their lease is over.
    """
    bear = re.compile("|".join(rf"-{token}\b" for token in tokens if re.fullmatch("[0-9a-f]{8}", token)) or r"(?!)")
    found = [name for name in files.below(url) if bear.search(name) or _STAGED.search(name)]
    folders = {folder for name in found for folder in _folders(name)}
    listed = {f"{folder}{path}" for folder in folders for path in names_in(read_manifest(join(url, folder)))}
    orphans = [name for name in found if name not in listed]
    for name in orphans:
        files.remove_with_folders(names.listed_file(url, name), url)
    if orphans:
        _log.info("%s: removed %d files that a writer before had left", url, len(orphans))


def _folders(name: str) -> list[str]:
    """The folders of a file's name with a slash at their ends, from the directory itself, "", down to its own."""
    parts = name.split("/")[:-1]
    return ["".join(f"{part}/" for part in parts[:i]) for i in range(len(parts) + 1)]


def names_in(manifest: Mapping[str, Any] | None) -> list[str]:
    """The files that a manifest lists, quarantine included."""
    return [*listed_in(manifest), *map(str, (manifest or {}).get("quarantine", []))]
