"""Commits of a data set: put the manifest in place with its parts, and read the commands that made it.

Each addition writes a new manifest, which stays short: above `_FEW_FILES` files it moves them to a part, together with
the quarantine and the additions. A new part absorbs the previous one while that is less than twice as long, as in a
log-structured merge tree. So n files need at most log2(n) parts, and an addition writes at most log2(n) times its own
size in the long run.
"""

import itertools
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data.dataset.files import ADDITION, DataFiles, part_table
from ltrscale.data.dataset.manifest import Dataset, Manifest, ManifestPart, read_dataset
from ltrscale.errors import InputError
from ltrscale.origin import as_text

_FEW_FILES, _FEW_ROW_GROUPS = 256, 1 << 14
_PART = "parts/part-{hash}.parquet"
ADDED = "added"


def commit_dataset(commit: storage.Commit, manifest: Manifest) -> Manifest:
    """Commit a data set whose manifest has all files, those of its parts too; returns it with its new parts."""
    files = manifest.files
    if manifest.parts:  # which list all but the previous manifest's own files and the new ones
        unlisted = commit.replaced.keys() | {placed.path for placed in commit.files}
        files = files.where(unlisted.__contains__, files.paths)
        assert len(files) + sum(part.files for part in manifest.parts) == len(manifest.files)
    own = manifest.model_copy(update={"files": files})
    if len(files) > _FEW_FILES or len(files.counts_R3) > _FEW_ROW_GROUPS:
        own = _moved_to_part(commit, own)
    commit.finish(own.model_dump(mode="json"))
    return own.model_copy(update={"files": manifest.files})


def _moved_to_part(commit: storage.Commit, manifest: Manifest) -> Manifest:
    """Move files, quarantine and additions of the manifest to a part; the newest addition stays, for look-ups."""
    added, parts = manifest.made_by.get(ADDED, []), list(manifest.parts)
    table = part_table(manifest.files, manifest.quarantine, map(as_text, added[:-1]))
    files, n_additions = len(manifest.files), len(added[:-1])
    while parts and parts[-1].files < 2 * files:
        last = parts.pop()
        table = pa.concat_tables([storage.read_manifest_part(commit.url, vars(last)), table])
        files, n_additions = files + last.files, n_additions + last.additions
    with commit.file(_PART) as path:
        pq.write_table(table, path, compression="zstd")
    parts.append(ManifestPart(**vars(commit.files[-1]), files=files, additions=n_additions))
    made_by = {**manifest.made_by, **({ADDED: added[-1:]} if added else {})}
    return manifest.model_copy(
        update={"files": DataFiles.from_iterable([]), "parts": tuple(parts), "quarantine": (), "made_by": made_by}
    )


def commands(dataset: Dataset) -> Iterator[str]:
    """The commands that made a data set and each addition to it (`made_by`), as JSON with sorted keys, oldest first.

    Raises:
        InputError: a part of the manifest cannot be read, and no later addition has replaced it.
    """
    manifest, number = dataset.manifest, 0
    try:
        for command in _commands(dataset):
            yield command
            number += 1
    except InputError:
        now = read_dataset(dataset.url)
        if now.manifest.parts == manifest.parts or next(_commands(now)) != next(_commands(dataset)):
            raise
        # later additions have replaced the part by a longer one, so the current commands begin with the earlier ones
        added = sum(part.additions for part in manifest.parts) + len(manifest.made_by.get(ADDED, []))
        yield from itertools.islice(_commands(now), number, 1 + added)


def _commands(dataset: Dataset) -> Iterator[str]:
    yield as_text({key: value for key, value in dataset.manifest.made_by.items() if key != ADDED})
    for part in dataset.manifest.parts:
        if part.additions:
            rows = storage.read_manifest_part(dataset.url, vars(part), ["kind", "made_by"])
            yield from rows.filter(pc.equal(rows["kind"], ADDITION))["made_by"].to_pylist()
    yield from map(as_text, dataset.manifest.made_by.get(ADDED, []))
