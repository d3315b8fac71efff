"""What a directory lists: its manifest with the parts of it, and the record of what unfinished work leaves.

Parts keep the manifest itself short, so that an addition writes little. A part is a Parquet file with entries of the
manifest as rows: files of the directory, with `path`, `bytes` and `sha256`; files in quarantine, with only a path; and
others, without. The manifest lists its parts beside its own files.

Unfinished work leaves files to go on with, and files to delete, to the next commit. What a dead writer has left is
known by its token, and deleted by the next holder of the directory.
"""

import hashlib
import io
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ltrscale.errors import InputError
from ltrscale.storage import files, writers
from ltrscale.storage import lease as leases
from ltrscale.storage.names import is_local, join, listed_file, listed_path

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest.json"
HIDDEN_MANIFEST = "_manifest.json"
"""The manifest's name in a directory of tables; readers of tables skip names that begin with an underscore."""
UNFINISHED = ".unfinished.json"
"""What unfinished work leaves to the next commit: the files of long work with a document to resume from, see
`Commit.save`; under `stale` files to delete, which a failed commit kept on purpose or a killed one was about to
delete; under `ends` the hash of a manifest that, once it is there, completes the long work."""
_log = logging.getLogger("ltrscale")
_LISTS = ("files", "parts", "query_ids")
"""Keys of a manifest that hold entries of files."""
_PATHS = ("quarantine", "stale")
"""Keys of a manifest, and of a record of unfinished work, that hold paths alone."""
_FEW = 64
"""Files up to this number are looked at one by one; of more, a listing takes fewer requests."""


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


def _files_in(manifest: Mapping[str, Any]) -> Iterator[tuple[str, int | None, Any]]:
    """The entries of the files that a manifest itself lists, with their keys and their numbers in lists."""
    for key in _LISTS:
        for number, entry in enumerate(manifest.get(key, [])):
            yield key, number, entry
    for key in ("vocabulary", "statistics"):
        file = manifest.get(key)
        if isinstance(file, Mapping) and file.get("path") is not None:
            yield key, None, file


def listed_in(manifest: Mapping[str, Any] | None) -> dict[str, str]:
    """Content hashes of a manifest's files by name, including the files beside the data."""
    return {str(file["path"]): str(file["sha256"]) for *_, file in _files_in(manifest or {})}


def sizes_in(
    url: str, manifest: Mapping[str, Any] | None, *, without: Collection[str] = (), despite_damage: bool = False
) -> dict[str, int | None]:
    """The bytes of all files that a manifest and its parts list, by name; None for those with a path alone.

    Args:
        url: the directory.
        manifest: its manifest; None lists nothing.
        without: names of parts to leave unread.
        despite_damage: log a lost or damaged part instead of raising; the files that only it lists are unknown.

    Raises:
        InputError: as `read_manifest_part`, or a part lists a path that cannot be below the directory.
    """
    manifest = manifest or {}
    sizes: dict[str, int | None] = {str(file["path"]): file.get("bytes") for *_, file in _files_in(manifest)}
    sizes |= {str(path): None for key in _PATHS for path in manifest.get(key, [])}
    for part in manifest.get("parts", []):
        try:
            sizes |= {} if part["path"] in without else _sizes_in_part(url, part)
        except InputError as error:
            if not despite_damage:
                raise
            _log.warning("%s; files that only this part lists stay there", error)
    return sizes


def _sizes_in_part(url: str, part: Mapping[str, Any]) -> dict[str, int | None]:
    rows = read_manifest_part(url, part, ["path", "bytes"])
    rows = rows.filter(rows["path"].is_valid())
    try:
        paths = [listed_path(path) for path in rows["path"].to_pylist()]
    except ValueError as error:
        raise InputError(f"{url}: {part['path']}: {error}; do not use the directory, make it again") from None
    return dict(zip(paths, rows["bytes"].to_pylist(), strict=True))


def read_verified(url: str, name: str, manifest: Mapping[str, Any]) -> bytes:
    """A file of a committed directory, checked against the content hash in its manifest.

    Raises:
        InputError: the manifest does not list the file, or the file is missing or was changed.
    """
    listed = listed_in(manifest)
    if name not in listed:
        raise InputError(f"{join(url, name)}: the manifest does not list it; make the directory again")
    place = listed_file(url, name)
    return _checked(files.read_bytes(place), listed[name], place)


def _checked(data: bytes, sha256: str, place: str) -> bytes:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise InputError(f"{place}: its content is not what was committed (hash differs); make the directory again")
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


def read_manifest_part(url: str, part: Mapping[str, Any], columns: Sequence[str] | None = None) -> "pa.Table":
    """The rows of a part of a directory's manifest, with all columns or some.

    Raises:
        InputError: the part is missing, or differs from what was committed.
    """
    import pyarrow as pa  # imported late: most manifests have no parts
    import pyarrow.parquet as pq

    place = listed_file(url, str(part["path"]))
    data = files.read_if_there(place)
    if data is None:
        raise InputError(f"{place}: missing, though the manifest lists it; make the directory again")
    content = io.BytesIO(_checked(data, part["sha256"], place))
    try:
        return pq.read_table(content, columns=columns and list(columns), use_threads=False)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{place}: no part of a manifest ({error}); make the directory again") from error


def check_files(manifest: Mapping[str, Any], where: str) -> None:
    """Check the files that a manifest lists: unique paths below its directory, with content hash and size.

    Raises:
        InputError: an entry is invalid; names the entry.
    """
    for key in _LISTS:
        if not isinstance(manifest.get(key, []), list):
            raise InputError(f"{where}: {key} is no list; make the directory again")
    seen = set[str]()
    for place, number, file in _files_in(manifest):
        fault = _file_fault(file)
        if fault is None and file["path"] in seen:
            fault = f"{file['path']!r} is listed twice"
        if fault:
            dotted = place if number is None else f"{place}.{number}"
            raise InputError(f"{where}: {dotted}: {fault}; do not use the directory, make it again")
        seen.add(file["path"])
    for key in _PATHS:
        paths = manifest.get(key, [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise InputError(f"{where}: {key} is no list of paths; make the directory again")
        for path in paths:
            try:
                listed_path(path)
            except ValueError as error:
                raise InputError(f"{where}: {key}: {error}; do not use the directory, make it again") from None


def are_hashes(texts: Sequence[str]) -> bool:
    """True if each text is a content hash, as SHA-256 is written: 64 digits, lower case.

    Example:
        >>> are_hashes(["0f" * 32]), are_hashes(["0F" * 32]), are_hashes(["0f" * 31 + " f"])
        (True, False, False)
    """
    digits = "".join(texts)
    try:  # a regular expression takes a tenth of a second for a hundred thousand
        return {*map(len, texts)} <= {64} and bytes.fromhex(digits).hex() == digits
    except ValueError:
        return False


def _file_fault(file: Any) -> str | None:
    """The fault of an entry in a manifest's list of files; None if it is valid."""
    if not isinstance(file, dict) or not isinstance(file.get("path"), str):
        return "no path"
    try:
        listed_path(file["path"])
    except ValueError as error:
        return str(error)
    digest, size = file.get("sha256"), file.get("bytes", 0)
    if not isinstance(digest, str) or not are_hashes([digest]):
        return f"sha256 of {file['path']!r} is no content hash of 64 digits"
    if type(size) is not int or not 0 <= size < 1 << 63:  # `type`, since a bool is an int too
        return f"bytes of {file['path']!r} is no size"
    return None


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
        files.remove_with_folders(listed_file(url, name), url)
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
            files.remove_with_folders(listed_file(url, name), url)
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
        files.remove_with_folders(listed_file(url, name), url)
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
        files.remove_with_folders(listed_file(url, name), url)


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
