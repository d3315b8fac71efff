"""Committed directories: read their files, check that they are whole, delete them.

A directory consists of the files that its `manifest.json` lists. A deletion removes the manifest first. It only ever
deletes files that a manifest lists or that carry the token of a writer without a live lease, never a directory with all
its contents.
"""

import hashlib
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from ltrscale.errors import InputError
from ltrscale.storage import files, names
from ltrscale.storage.lease import check_lease
from ltrscale.storage.listing import HIDDEN_MANIFEST, MANIFEST, listed_in, read_manifest, sizes_in
from ltrscale.storage.names import is_local, join, local_path
from ltrscale.storage.unfinished import deleting

_FEW = 64
"""Files up to this number are looked at one by one; of more, a listing takes fewer requests."""
_log = logging.getLogger("ltrscale")


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
    except InputError as error:  # of a part
        _log.warning("%s", error)
        return False

    def differs(name: str) -> bool:
        path = join(url, name)
        return not files.exists(path) or files.size(path) != sizes[name]

    suspects = list(sizes)
    if len(sizes) > _FEW:  # a listing takes one request per thousand files
        actual = files.sizes_below(url)
        suspects = [name for name in sizes if actual.get(name) != sizes[name]]
    lost = suspects
    if len(sizes) <= _FEW or is_local(url):  # a listing does not follow links
        lost = [name for name, is_lost in zip(suspects, files.at_once(differs, suspects), strict=True) if is_lost]
    if lost:
        _log.warning(
            "%s: %d of %d files are missing or cut short, the first is %s", url, len(lost), len(sizes), lost[0]
        )
    return not lost


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
