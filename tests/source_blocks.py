"""What a source reads of one file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ltrscale.data.dataset.manifest import Feature
from ltrscale.ingest import grouplogs, items
from ltrscale.ingest.rows import Rejection, RowBlock, concat
from ltrscale.ingest.source import Encoders, File, Source


def features_of(source: Source, path: Path | str) -> tuple[Feature, ...]:
    return source.find_features([File(url=str(path))])


def blocks_of(
    source: Source,
    path: Path | str,
    *,
    features: Sequence[Feature] | None = None,
    first: str = "the first file",
    encoders: Encoders | None = None,
    rows: int = 1 << 16,
) -> list[RowBlock]:
    """All blocks of a file, each of at most this many rows of it."""
    used = features_of(source, path) if features is None else features
    with patch.object(items, "_ROWS", rows), patch.object(grouplogs, "_GROUPS", rows):
        read = source.open(used, first=first, encoders={} if encoders is None else encoders)
        return [*read(File(url=str(path)))]


def rows_of(source: Source, path: Path | str, **more: Any) -> tuple[RowBlock, list[Rejection]]:
    """All rows of a file as one block, and all rejections."""
    blocks = blocks_of(source, path, **more)
    return concat(blocks), [one for block in blocks for one in block.rejected]
