"""Tables of Delta Lake and Apache Iceberg: the files of a version, and what the table serves of each.

A version is a fixed list of Parquet files. Only the tables' own libraries read their logs; what is new since a version
of Delta Lake follows from the actions of its commits. A version of Iceberg with rows that differ from those of its
files is refused.
"""

import importlib.util
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from ltrscale import storage
from ltrscale.errors import InputError, UnavailableError
from ltrscale.ingest.tables import LakeFile

Lake = Literal["delta", "iceberg"]

_LIBRARIES: dict[Lake, str] = {"delta": "deltalake", "iceberg": "pyiceberg"}
_METADATA = re.compile(r"/v?([0-9]+)(?:-[0-9a-f-]+)?(?:\.gz)?\.metadata\.json$")


class TableVersion(NamedTuple):
    """A version of a table: its files, with what it serves of each; None for a file as it is."""

    number: int
    files: Sequence[tuple[str, LakeFile | None]]
    rewritten: Sequence[tuple[str, LakeFile | None]] = ()
    """Files with rows of an earlier version that were rewritten since: as they were, and as they are."""


def table_version(url: str, lake: Lake, version: int | None, since: int | None) -> TableVersion:
    """A version of a table at a directory or, for Iceberg, perhaps a metadata file (`.metadata.json`).

    With `since`, an earlier version of Delta Lake, only the files that were added after it.

    Raises:
        InputError: the table cannot be read, or has no such rows.
    """
    library = _LIBRARIES[lake]
    if importlib.util.find_spec(library) is None:
        raise InputError(f"{url}: {lake} tables are read with {library}, which is not installed; pip install {library}")
    try:
        if lake == "iceberg":
            found = _iceberg(url, version)
        else:
            found = _delta(url, version) if since is None else _delta_since(url, version, since)
    except (InputError, UnavailableError):
        raise
    except Exception as error:  # the libraries' errors have no common base
        raise InputError(f"{url}: cannot be read as a table: {error}; check the path, table and version") from error
    if not found.files:
        added = "" if since is None else f" that were added after version {since}"
        raise InputError(f"{url}: version {found.number} has no rows{added}; choose another one")
    return found


def _delta(url: str, version: int | None) -> TableVersion:
    from deltalake import DeltaTable

    if not storage.exists(storage.join(url, "_delta_log")):  # our error is better if the store refuses access
        raise InputError(f"{url}: no Delta table is there; check the path")
    with storage.delta_options(url) as options:
        table = DeltaTable(storage.absolute(url), version=version, storage_options=options)
        vectors = pa.table(table.deletion_vectors().read_all())
        added = pa.table(table.get_add_actions(flatten=True))
        schema = pa.schema(table.schema().to_arrow())
    columns = {column["name"]: column for column in json.loads(table.schema().to_json())["fields"]}
    stored = {name: column["metadata"].get(_PHYSICAL, name) for name, column in columns.items()}
    # columns within a column have other names in the files too
    whole = [name for name in stored if stored[name] == name or "struct<" not in str(schema.field(name).type)]
    served = pa.schema([schema.field(name) for name in whole])
    deleted = {
        _place(url, path): np.flatnonzero(~kept.values.to_numpy(zero_copy_only=False))
        for path, kept in zip(vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True)
    }
    partitions = table.metadata().partition_columns
    files = []
    for action in added.select(["path", *(f"partition.{name}" for name in partitions)]).to_pylist():
        values = {name: action[f"partition.{name}"] for name in partitions}
        texts = {name: None if value is None else str(value) for name, value in values.items()}
        place = _place(url, action["path"])
        files.append((place, LakeFile(served, stored, texts, deleted.get(place, np.zeros(0, np.int64)))))
    return TableVersion(table.version(), sorted(files, key=lambda file: file[0]))


_PHYSICAL = "delta.columnMapping.physicalName"


def _place(url: str, path: str) -> str:
    """The place of a file that a log of Delta Lake names, by a path below the table's directory or by a URL."""
    path = unquote(path).removeprefix("file://")
    return path if path.startswith("/") or "://" in path else storage.join(storage.absolute(url), path)


def _delta_since(url: str, version: int | None, since: int) -> TableVersion:
    """The files that were added after a version, and those with rows of it that were rewritten."""
    before, now = _delta(url, since), _delta(url, version)
    if now.number <= since:
        raise InputError(f"{url}: version {now.number} is not newer than since = {since}; wait for one, or lower since")
    rows_of = dict.fromkeys((place for place, _ in before.files), "old")  # of each file; all others are new
    rewritten = set[str]()
    for number in range(since + 1, now.number + 1):
        added, removed = _commit(url, number)
        sources = {rows_of.get(place, "new") for place in removed}
        earlier = {place for place in removed if rows_of.get(place) == "old"}
        if any(removed.values()) and sources - {"new"}:
            rewritten |= earlier
            rows = "rewritten"
        elif len(sources) > 1 and "new" in sources:
            raise InputError(
                f"{url}: version {number} has put rows from before and after version {since} into the same files; read "
                f"up to version {number - 1} first, then set since to {number}"
            )
        else:
            rows = "rewritten" if "rewritten" in sources else max(sources, default="new")
        for place in removed:
            rows_of.pop(place, None)
        rows_of |= dict.fromkeys(added, rows)
    new = [file for file in now.files if rows_of.get(file[0], "new") == "new"]
    were = [file for file in before.files if file[0] in rewritten and storage.exists(file[0])]
    return TableVersion(now.number, new, [*were, *(file for file in now.files if rows_of.get(file[0]) == "rewritten")])


def _commit(url: str, version: int) -> tuple[list[str], dict[str, bool]]:
    """The files that a commit adds and removes; of these, whether their rows change, as they do not if compacted."""
    data = storage.read_if_there(storage.join(url, "_delta_log", f"{version:020}.json"))
    if data is None:
        raise InputError(f"{url}: its log no longer has version {version}; set since to a newer one, or leave it out")
    actions = [json.loads(line) for line in data.splitlines() if line.strip()]
    removed = [action["remove"] for action in actions if "remove" in action]
    added = [_place(url, action["add"]["path"]) for action in actions if "add" in action]
    return added, {_place(url, action["path"]): action.get("dataChange", True) for action in removed}


def _iceberg(url: str, version: int | None) -> TableVersion:
    table = _static_table(_newest_metadata(url))
    current = table.current_snapshot() if version is None else table.snapshot_by_id(version)
    if current is None:
        raise InputError(f"{url}: no snapshot {version or ''}; leave version out for the newest one")
    _check_names(url, table)
    tasks = list(table.scan(snapshot_id=current.snapshot_id).plan_files())
    if any(task.delete_files for task in tasks):
        raise InputError(f"{url}: deleted rows are still in its files; rewrite the data files of the table")
    if other := next((task.file.file_path for task in tasks if task.file.file_format != "PARQUET"), None):
        raise InputError(f"{url}: {other} is no Parquet; rewrite the table as Parquet")
    paths = (task.file.file_path for task in tasks)
    local = (path.removeprefix("file://") if path.startswith("file:///") else path for path in paths)
    return TableVersion(current.snapshot_id, [(path, None) for path in sorted(local)])


def _static_table(metadata: str) -> Any:
    """The table of a metadata file, read through `storage` instead of with settings from the table."""
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import StaticTable

    class StoredFile(PyArrowFile):  # type: ignore[misc]
        def open(self, seekable: bool = True) -> pa.BufferReader:  # noqa: ARG002
            # at once, because pyiceberg reads whole files, and an outage is then told from a bad table
            return pa.BufferReader(storage.read_bytes(self.location))

    class Stored(PyArrowFileIO):  # type: ignore[misc]
        def new_input(self, location: str) -> StoredFile:
            filesystem, path = storage.arrow_filesystem(location)
            return StoredFile(location, path, filesystem)

    files, catalog = Stored(), NoopCatalog("static")
    return StaticTable(
        ("static", metadata), FromInputFile.table_metadata(files.new_input(metadata)), metadata, files, catalog
    )


def _check_names(url: str, table: Any) -> None:
    """Check that no column was renamed or replaced by another of its name: files keep the old names."""
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    for schema in table.schemas().values():
        for column in schema.fields:
            name, number = names.setdefault(column.field_id, column.name), ids.setdefault(column.name, column.field_id)
            if (name, number) != (column.name, column.field_id):
                raise InputError(f"{url}: column {column.name!r} was renamed or replaced; rewrite the table")


def _newest_metadata(url: str) -> str:
    if url.endswith(".metadata.json"):
        return url
    paths = storage.list_files(storage.join(url, "metadata", "*.metadata.json"))
    numbered = [(int(match[1]), path) for path in paths if (match := _METADATA.search(path))]
    return storage.absolute(max(numbered)[1])
