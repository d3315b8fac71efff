"""Parts of a manifest: tables that keep the manifest itself short, so that an addition writes little.

A manifest lists its parts beside its own files. A part is a Parquet file with entries of the manifest as rows: files of
the directory, with `path`, `bytes` and `sha256`; files in quarantine, with only a path; and others, without.
"""

import hashlib
import io
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ltrscale.errors import InputError, UnavailableError
from ltrscale.storage.files import read_if_there
from ltrscale.storage.names import check_listed_paths, files_in, listed_file

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("ltrscale")


def read_manifest_part(url: str, part: Mapping[str, Any], columns: Sequence[str] | None = None) -> "pa.Table":
    """The rows of a part of a directory's manifest, with all columns or some.

    Raises:
        InputError: the part is missing, or differs from what was committed.
    """
    import pyarrow as pa  # imported late: most manifests have no parts
    import pyarrow.parquet as pq

    place = listed_file(url, str(part["path"]))
    data = read_if_there(place)
    if data is None:
        raise InputError(f"{place}: missing, though the manifest lists it; make the directory again")
    if hashlib.sha256(data).hexdigest() != part["sha256"]:
        raise InputError(f"{place}: its content is not what was committed (hash differs); make the directory again")
    try:
        return pq.read_table(io.BytesIO(data), columns=columns and list(columns), use_threads=False)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{place}: no part of a manifest ({error}); make the directory again") from error


def sizes_in(url: str, manifest: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, int | None]:
    """The bytes of all files that a manifest and its parts list, by name; None for files in quarantine.

    Args:
        url: the directory.
        manifest: its manifest.
        without: names of parts to leave unread.

    Raises:
        InputError: as `read_manifest_part`, or a part lists a path that cannot be below the directory.
    """
    sizes: dict[str, int | None] = {str(file["path"]): file.get("bytes") for file in files_in(manifest)}
    sizes |= dict.fromkeys(map(str, manifest.get("quarantine", [])))
    for part in manifest.get("parts", []):
        if part["path"] not in without:
            rows = read_manifest_part(url, part, ["path", "bytes"])
            rows = rows.filter(rows["path"].is_valid())
            paths = rows["path"].to_pylist()
            try:
                check_listed_paths(paths)
            except ValueError as error:
                raise InputError(f"{url}: {part['path']}: {error}; do not use the directory, make it again") from None
            sizes |= dict(zip(paths, rows["bytes"].to_pylist(), strict=True))
    return sizes


def no_longer_listed(url: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The files that one manifest of a directory lists and the next does not, as in `names_to_delete`.

    Parts that both manifests have are not read.

    Raises:
        InputError: as `sizes_in`, for the next manifest.
    """
    both = {part["path"] for part in before.get("parts", [])} & {part["path"] for part in now.get("parts", [])}
    listed = sizes_in(url, now, both)
    return [name for name in names_to_delete(url, before, both) if name not in listed]


def names_to_delete(url: str, manifest: Mapping[str, Any], without: Collection[str] = ()) -> list[str]:
    """The files that a manifest and its parts list, to delete a directory or make it again.

    A lost or damaged part is logged: the files that only it lists are unknown and stay there.
    """
    parts = manifest.get("parts", [])
    names = [*sizes_in(url, manifest, {part["path"] for part in parts})]
    for part in parts:
        try:
            names += sizes_in(url, {"parts": [part]}, without)
        except UnavailableError:
            raise
        except InputError as error:
            _log.warning("%s; files that only this part lists stay there", error)
    return [*dict.fromkeys(names)]
