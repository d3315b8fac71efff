"""Resumes an interrupted `prepare`: finished units are not read again.

Every few minutes the files, counts, query ids and categories of the units finished so far, in order, are saved beside
the new data set (`storage.Commit.save`). The same command with the same inputs resumes from them. The result equals
that of an uninterrupted run, except for the last digits of means and deviations, which are merged from two halves.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ltrscale import storage
from ltrscale.arrays import Bits
from ltrscale.data.dataset.manifest import Dataset, Manifest, parse_dataset_manifest
from ltrscale.data.ids import QueryIds, save_hashes
from ltrscale.ingest.additions import mapped_ids
from ltrscale.origin import as_text, digest
from ltrscale.progress import log

_SAVE_S = 120.0
"""The most seconds of work that an interruption costs, apart from the units in progress."""
_SETS = ("kept", "others", "unread")


class Unfinished:
    """The saved state of one command; loads what an earlier process has saved.

    Args:
        commit: the commit of the data set.
        origin: the command, including its inputs.
        before: the data set to add to.
    """

    def __init__(self, commit: storage.Commit, origin: Mapping[str, Any], before: Dataset | None) -> None:
        self._commit = commit
        self._identity = digest(as_text(origin) + (before.manifest.hash if before else ""))
        self.units = 0
        """The number of finished units."""
        self.manifest: Manifest | None = None
        """The manifest of these units alone."""
        self._id_files: dict[str, storage.Placed] = {}
        self._category_files: dict[str, storage.Placed] = {}
        self._saved_at = time.monotonic()
        if commit.saved.get("identity") == self._identity:
            commit.adopt(storage.Placed(**file) for file in commit.saved["files"])
            self.units = commit.saved["units"]
            self.manifest = parse_dataset_manifest(commit.saved["manifest"], commit.url)
            self._id_files = _listed(commit.saved["ids"])
            self._category_files = _listed(commit.saved.get("categories", {}))  # older versions saved none
            log.info("prepare: resumes after %d units that an earlier process has finished", self.units)

    def restore(self, ids: QueryIds, folder: Path) -> None:
        """Add the query ids of the finished units to `ids`."""
        for name, file in self._id_files.items():
            of_name, hashes = getattr(ids, name), mapped_ids(self._commit.url, file, folder)
            if len(of_name):  # ids of a data set that records none; they were saved too
                of_name.add(hashes)
            else:
                of_name.push(hashes)
            if name != "unread":
                ids.groups.push(mapped_ids(self._commit.url, file, folder))

    def categories(self, folder: Path) -> dict[str, Bits]:
        """The values of each categorical feature in the finished units, as `Written.categories`."""
        return {name: mapped_ids(self._commit.url, file, folder) for name, file in self._category_files.items()}

    @property
    def is_due(self) -> bool:
        """True if minutes of work would be lost without a save."""
        return time.monotonic() - self._saved_at >= _SAVE_S

    def save(self, units: int, manifest: Manifest, ids: QueryIds, categories: Mapping[str, Bits]) -> None:
        """Save the first `units` units."""
        outdated = [file.path for file in (*self._id_files.values(), *self._category_files.values())]
        self._id_files = {name: self._put(f"{units}-{name}", getattr(ids, name).save) for name in _SETS}
        self._category_files = {
            name: self._put(f"{units}-category-{i}", partial(save_hashes, hashes=values))
            for i, (name, values) in enumerate(categories.items())
        }
        document = {
            "identity": self._identity,
            "units": units,
            "manifest": manifest.model_dump(mode="json"),
            "ids": {name: vars(file) for name, file in self._id_files.items()},
            "categories": {name: vars(file) for name, file in self._category_files.items()},
        }
        self._commit.save(document, without=outdated)
        self._saved_at = time.monotonic()

    def _put(self, name: str, write: Callable[[Path], None]) -> storage.Placed:
        with self._commit.file(f"unfinished/{name}-{{hash}}.npy") as path:
            write(path)
        return self._commit.files[-1]


def _listed(files: Mapping[str, Any]) -> dict[str, storage.Placed]:
    return {name: storage.Placed(**file) for name, file in files.items()}
