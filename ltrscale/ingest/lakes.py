"""Tables of Delta Lake and Apache Iceberg as lists of Parquet files: those of one version, which never change.

Only the tables' own libraries read their logs. A version whose rows are not simply those of its files is refused.
"""

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from ltrscale import storage
from ltrscale.errors import InputError

Lake = Literal["delta", "iceberg"]

_LIBRARIES: dict[Lake, str] = {"delta": "deltalake", "iceberg": "pyiceberg"}
_METADATA = re.compile(r"/v?([0-9]+)(?:-[0-9a-f-]+)?(?:\.gz)?\.metadata\.json$")


class TableVersion(NamedTuple):
    """A version of a table and its files, sorted."""

    version: int
    files: tuple[str, ...]


def snapshot(url: str, lake: Lake, version: int | None) -> TableVersion:
    """The files of a table.

    Args:
        url: the table's directory; for Iceberg perhaps a metadata file, `.metadata.json`.
        lake: the kind of table.
        version: a version of Delta Lake or the id of an Iceberg snapshot; the newest one by default.

    Raises:
        InputError: there is no such table or version, its library is not installed, or deleted rows are still in files.
    """
    library = _LIBRARIES[lake]
    if importlib.util.find_spec(library) is None:
        raise InputError(f"{url}: {lake} tables are read with {library}, which is not installed; pip install {library}")
    with _named(url):
        found = _delta(url, version) if lake == "delta" else _iceberg(url, version)
    if not found.files:
        raise InputError(f"{url}: version {found.version} has no rows; choose another one")
    return found


@contextmanager
def _named(url: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the libraries have errors of their own, without a common base
        raise InputError(f"{url}: cannot be read as a table: {error}; check the path, table and version") from error


def _delta(url: str, version: int | None) -> TableVersion:
    from deltalake import DeltaTable

    table = DeltaTable(storage.absolute(url), version=version, storage_options=_options())
    if table.deletion_vectors().read_all().num_rows:
        raise InputError(f"{url}: deleted rows are still in its files; run OPTIMIZE or REORG TABLE ... APPLY (PURGE)")
    configuration = table.metadata().configuration
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        raise InputError(f"{url}: its columns have other names in its files (column mapping); write the table anew")
    return TableVersion(table.version(), tuple(sorted(table.file_uris())))


def _options() -> dict[str, str]:
    """The settings that a store other than Amazon's needs; the others are in the environment."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return {"AWS_ALLOW_HTTP": "true"} if endpoint.startswith("http://") else {}


def _iceberg(url: str, version: int | None) -> TableVersion:
    from pyiceberg.table import StaticTable

    table = StaticTable.from_metadata(_newest_metadata(url))
    current = table.current_snapshot() if version is None else table.snapshot_by_id(version)
    if current is None:
        raise InputError(f"{url}: no snapshot {version or ''}; leave version out for the newest one")
    _check_names(url, table)
    tasks = list(table.scan(snapshot_id=current.snapshot_id).plan_files())
    if any(task.delete_files for task in tasks):
        raise InputError(f"{url}: deleted rows are still in its files; rewrite the data files of the table")
    if other := next((task.file.file_path for task in tasks if task.file.file_format != "PARQUET"), None):
        raise InputError(f"{url}: {other} is no Parquet; rewrite the table as Parquet")
    return TableVersion(current.snapshot_id, tuple(sorted(_plain(task.file.file_path) for task in tasks)))


def _check_names(url: str, table: Any) -> None:
    """Check that no column was renamed, nor replaced by another of its name: files have the names of their time."""
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    for schema in table.schemas().values():
        for column in schema.fields:
            known, same = names.setdefault(column.field_id, column.name), ids.setdefault(column.name, column.field_id)
            if (known, same) != (column.name, column.field_id):
                raise InputError(f"{url}: column {column.name!r} was renamed or replaced; rewrite the table")


def _newest_metadata(url: str) -> str:
    if url.endswith(".metadata.json"):
        return url
    paths = storage.list_files(storage.join(url, "metadata", "*.metadata.json"))
    numbered = [(int(found[1]), path) for path in paths if (found := _METADATA.search(path))]
    return storage.absolute(max(numbered)[1])


def _plain(path: str) -> str:
    """A path as in lists of local files."""
    return path.removeprefix("file://") if path.startswith("file:///") else path
