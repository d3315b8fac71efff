"""Names of committed files without the random token of their writer, so that two runs can be compared."""

import re
from collections.abc import Iterable
from dataclasses import replace

from ltrscale.data.dataset.files import DataFile
from ltrscale.data.dataset.manifest import Manifest

_WRITER = re.compile(r"(-[0-9a-f]{8})-[0-9a-f]{8}(?=\.\w+$)")


def without_writer(name: str) -> str:
    """The name of a committed file without its writer's token."""
    return _WRITER.sub(r"\1", name)


def files_without_writer(files: Iterable[DataFile]) -> tuple[DataFile, ...]:
    """The same files, with names without the writer's token."""
    return tuple(file._replace(path=without_writer(file.path)) for file in files)


def manifest_without_writer(manifest: Manifest) -> Manifest:
    """A manifest in which the names of files have no writer's token."""
    quarantine = tuple(map(without_writer, manifest.quarantine))
    query_ids = tuple(replace(file, path=without_writer(file.path)) for file in manifest.query_ids)
    return manifest.replace(files=files_without_writer(manifest.files), query_ids=query_ids, quarantine=quarantine)
