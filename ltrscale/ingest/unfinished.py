"""The units that an interrupted run of `prepare` has finished, from which the same command resumes.

Every few minutes the files, counts, query ids and categories of the units finished so far, in order, are saved beside
the new data set (`storage.Commit.save`), with what warnings and errors name. The result and the messages equal those of
an uninterrupted run, except for the last digits of means and deviations, which are merged from two halves.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from ltrscale import storage
from ltrscale.data.dataset.feature_column import with_lists
from ltrscale.data.dataset.manifest import Dataset, Manifest, parse_dataset_manifest
from ltrscale.data.ids import QueryIds, save_hashes
from ltrscale.errors import without_credentials
from ltrscale.ingest.additions import mapped_ids
from ltrscale.ingest.assembly import LikePlaces, Written
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.rows import Rejection
from ltrscale.ingest.tables import parquet_schema
from ltrscale.origin import as_text, digest
from ltrscale.progress import log

_SAVE_S = 120.0
"""The most seconds of work that an interruption costs, apart from the units in progress."""
_CATEGORY = "category "


class Unfinished:
    """The saved state of one command; loads what an earlier process has saved.

    Args:
        commit: the commit of the data set.
        origin: the command, including its inputs.
        existing: the data set to add to.
    """

    def __init__(self, commit: storage.Commit, origin: Mapping[str, Any], existing: Dataset | None) -> None:
        self._commit = commit
        # "4" is the form of the saved state; one of an earlier version is other work
        self._identity = digest("4" + as_text(origin) + (existing.manifest.hash if existing else ""))
        self.units = 0
        """The number of finished units."""
        self.manifest: Manifest | None = None
        """The manifest of these units alone."""
        self._hashes: dict[str, storage.Placed] = {}
        """The files of query ids, and of the values of categories."""
        self._saved_at = time.monotonic()
        self._saved = commit.saved if commit.saved.get("identity") == self._identity else {}
        if saved := self._saved:
            commit.adopt(storage.Placed(**file) for file in saved["files"])
            self.units, self.manifest = saved["units"], parse_dataset_manifest(saved["manifest"], commit.url)
            self._hashes = {name: storage.Placed(**file) for name, file in saved["hashes"].items()}
            log.info("prepare: resumes after %d units that an earlier process has finished", self.units)

    def restore(self, totals: Written, ids: QueryIds, folder: Path) -> None:
        """Add the query ids of the finished units to `ids`, and to `totals` what is not in their manifest."""
        if self.manifest is None:
            return
        sets = {"kept": [ids.kept, ids.groups], "others": [ids.others, ids.groups], "unread": [ids.unread]}
        for name, file in self._hashes.items():
            if name.startswith(_CATEGORY):
                hashes = mapped_ids(self._commit.url, file, folder)
                totals.encoders[name.removeprefix(_CATEGORY)] = CategoryEncoder(hashes)
            for each in sets.get(name, []):
                each.push(mapped_ids(self._commit.url, file, folder))
        totals.places = LikePlaces.restored(self._saved["places"], len(self.manifest.features))
        totals.first_rejections = [Rejection(**rejection) for rejection in self._saved["first_rejections"]]
        if totals.schema is None and self.manifest.files:
            totals.schema = schema_of_groups(self._commit.url, self.manifest)
            totals.schema_of = self._saved["schema_of"]

    @property
    def is_due(self) -> bool:
        """True if minutes of work would be lost without a save."""
        return time.monotonic() - self._saved_at >= _SAVE_S

    def save(self, units: int, manifest: Manifest, ids: QueryIds, totals: Written) -> None:
        """Save the first `units` units."""
        outdated = [file.path for file in self._hashes.values()]
        known = {name: partial(save_hashes, hashes=encoder.known) for name, encoder in totals.encoders.items()}
        writes: dict[str, Callable[[Path], None]] = {_CATEGORY + name: write for name, write in known.items()}
        writes |= {"kept": ids.kept.save, "others": ids.others.save, "unread": ids.unread.save}
        self._hashes = {name: self._put(f"{units}-{i}", write) for i, (name, write) in enumerate(writes.items())}
        document = {
            "identity": self._identity,
            "units": units,
            "manifest": manifest.model_dump(mode="json"),
            "hashes": {name: vars(file) for name, file in self._hashes.items()},
            "schema_of": without_credentials(totals.schema_of),
            "places": totals.places.state(),
            "first_rejections": [
                {**vars(rejection), "file": without_credentials(rejection.file)}
                for rejection in totals.first_rejections
            ],
        }
        self._commit.save(document, without=outdated)
        self._saved_at = time.monotonic()

    def _put(self, name: str, write: Callable[[Path], None]) -> storage.Placed:
        with self._commit.file(f"unfinished/{name}-{{hash}}.npy") as path:
            write(path)
        return self._commit.files[-1]


def schema_of_groups(url: str, manifest: Manifest) -> pa.Schema:
    """The columns of the groups in a data set's files, of which there is at least one."""
    return with_lists(parquet_schema(storage.listed_file(url, manifest.files[0].path)))
