"""Delete what writers have left that died before they committed it."""

import logging
from collections.abc import Collection, Iterable, Sequence

from ltrscale.errors import InputError
from ltrscale.storage import files, names, writers
from ltrscale.storage import lease as leases
from ltrscale.storage.names import join
from ltrscale.storage.unfinished import UNFINISHED, listed_at, settle

_log = logging.getLogger("ltrscale")


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
