"""Names of committed files without the random token of their writer, so that two runs can be compared."""

import re
from collections.abc import Iterable
from typing import TypeVar

from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Manifest

_WRITER = re.compile(r"(-[0-9a-f]{8})-[0-9a-f]{8}(?=\.\w+$)")
FileT = TypeVar("FileT", bound=Config)


def without_writer(name: str) -> str:
    """The name of a committed file without its writer's token."""
    return _WRITER.sub(r"\1", name)


def files_without_writer(files: Iterable[FileT]) -> tuple[FileT, ...]:
    """The same files, with names without the writer's token."""
    return tuple(file.replace(path=without_writer(file.path)) for file in files)  # type: ignore[attr-defined]


def manifest_without_writer(manifest: Manifest) -> Manifest:
    """A manifest in which the names of files have no writer's token."""
    quarantine = tuple(map(without_writer, manifest.quarantine))
    files, query_ids = (files_without_writer(listed) for listed in (manifest.files, manifest.query_ids))
    return manifest.replace(files=files, query_ids=query_ids, quarantine=quarantine)
