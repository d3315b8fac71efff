"""Files that writers have named, compared by what is in them."""

import re
from collections.abc import Iterable
from typing import TypeVar

from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Manifest

_WRITER = re.compile(r"(-[0-9a-f]{8})-[0-9a-f]{8}(?=\.\w+$)")
FileT = TypeVar("FileT", bound=Config)


def without_writer(name: str) -> str:
    """The name of a file that a commit has placed, without its writer's token."""
    return _WRITER.sub(r"\1", name)


def files_without_writer(files: Iterable[FileT]) -> tuple[FileT, ...]:
    """The same files as any writer would have listed them."""
    return tuple(file.replace(path=without_writer(file.path)) for file in files)  # type: ignore[attr-defined]


def manifest_without_writer(manifest: Manifest) -> Manifest:
    """A manifest as any writer would have committed it."""
    quarantine = tuple(map(without_writer, manifest.quarantine))
    return manifest.replace(files=files_without_writer(manifest.files), quarantine=quarantine)
