"""What `prepare` adds to: a data set, or the units that an interrupted run has finished.

The manifest of a data set with an addition lists the old files and the new ones, and every count is the sum. `made_by`
comes from the first command; the additions are listed in it under `added`.

Every few minutes the files, counts, query ids and categories of the units finished so far, in order, are saved beside
the new data set (`storage.Commit.save`), with what warnings and errors name. The same command with the same inputs
resumes from them. The result and the messages equal those of an uninterrupted run, except for the last digits of means
and deviations, which are merged from two halves.
"""

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ltrscale import storage
from ltrscale.arrays import Bits
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import ADDED, Dataset, Feature, Manifest, parse_dataset_manifest
from ltrscale.data.dataset.origin import commands
from ltrscale.data.dataset.summaries import FeatureStats, LabelCounts
from ltrscale.data.dataset.tokens import summed
from ltrscale.data.ids import QueryIds, save_hashes
from ltrscale.errors import InputError, without_credentials
from ltrscale.ingest.assembly import Written
from ltrscale.ingest.categories import CategoryEncoder, merged_texts
from ltrscale.ingest.inputs import UnitSettings
from ltrscale.ingest.places import LikePlaces
from ltrscale.ingest.rows import Rejection
from ltrscale.ingest.tables import parquet_schema
from ltrscale.ingest.validate import total_accounting
from ltrscale.origin import as_text, digest
from ltrscale.progress import log

_SAVE_S = 120.0
"""The most seconds of work that an interruption costs, apart from the units in progress."""
_COPY = 1 << 24
_UNIT = re.compile(r"/part-([0-9]+)-")


def holds_inputs(out: str, origin: Mapping[str, Any]) -> bool:
    """True if this command with these inputs has made or extended the data set, and no file is missing."""
    manifest = storage.read_manifest(out)
    if manifest is None or manifest.get("format") != "ltrscale-dataset":
        return False
    dataset = Dataset(out, parse_dataset_manifest(manifest, storage.join(out, storage.MANIFEST)))
    return as_text(origin) in commands(dataset) and storage.is_whole(out, manifest)


def check_nothing_added(out: str, before: Mapping[str, Any]) -> None:
    """Refuse, with an InputError, to replace a data set with additions, which would lose them."""
    of_parts = sum(part.get("additions", 0) for part in before.get("parts", []))
    if additions := of_parts + len(before.get("made_by", {}).get(ADDED, [])):
        raise InputError(
            f"{out}: {additions} additions are there, which making the data set again would delete; "
            "set prepare.add to add to them, or delete the directory first"
        )


def check_addable(before: Dataset, work: UnitSettings) -> tuple[Feature, ...]:
    """The features of a data set, in the order in which to read inputs that are added; an InputError if they differ."""
    stage = before.manifest.made_by.get("stage")
    if stage != "prepare":
        raise InputError(
            f"{before.url}: made by {stage or 'something else'}; periods can be added to a data set of prepare only"
        )
    _check_tokens(before, work)
    features, dataset_features = work.features, before.manifest.features
    if work.config.source.takes_any_order and set(features) == set(dataset_features):
        return dataset_features
    for i in range(max(len(features), len(dataset_features))):
        new, old = (
            f"{which[i].name!r} ({which[i].kind})" if i < len(which) else "missing"
            for which in (features, dataset_features)
        )
        if new != old:
            raise InputError(
                f"{before.url}: feature {i + 1} of the inputs is {new} where the data set has {old}; "
                "prepare them with the same columns, or into another directory"
            )
    return dataset_features


def _check_tokens(dataset: Dataset, work: UnitSettings) -> None:
    input_fields, dataset_fields = work.config.source.token_fields, dataset.manifest.tokens
    if unmatched := [
        field for field in (*input_fields, *dataset_fields) if (field in input_fields) != (field in dataset_fields)
    ]:
        field, owner = unmatched[0], "inputs" if unmatched[0] in input_fields else "data set"
        raise InputError(
            f"{dataset.url}: tokens {field.name!r} of each {field.of} (at most {field.max_tokens}) are in the {owner} "
            "only; prepare both with the same columns.tokens"
        )


def next_unit(before: Manifest) -> int:
    """The number of the first unit of an addition, one above the largest in the names of the data set's files."""
    names = [*before.files.paths, *before.quarantine]
    return 1 + max((int(number) for name in names for number in _UNIT.findall(name)), default=-1)


def recall_ids(before: Dataset, ids: QueryIds, folder: Path) -> None:
    """Add the recorded query ids of a data set to `ids`; ids in fixed periods are separate, and not recorded.

    The hashes are copied to `folder` and mapped from there.
    """
    recorded = before.manifest.query_ids
    if not recorded and (unknown := {*before.manifest.periods} - _fixed_periods(before)):
        raise InputError(
            f"{before.url}: made by an earlier version, which recorded no query ids of period {min(unknown)!r}; "
            "prepare it again"
        )
    for file in sorted(recorded, key=lambda file: -file.bytes):  # largest first, to avoid needless merges
        ids.groups.push(_mapped(before.url, file, folder))


def _fixed_periods(before: Dataset) -> set[str | None]:
    """The periods that the commands of a data set named for whole inputs; None stands for inputs without one."""
    try:
        return {entry["period"] for made_by in commands(before) for entry in json.loads(made_by)["config"]["inputs"]}
    except (LookupError, TypeError) as error:
        raise InputError(f"{before.url}: its manifest does not name its inputs; prepare it again") from error


def _mapped(url: str, file: storage.Placed, folder: Path) -> Bits:
    """The hashes in a file of a data set, mapped from a checked copy in `folder`."""
    place, copy = storage.listed_file(url, file.path), folder / f"ids-{secrets.token_hex(8)}"
    with storage.open_input(place) as stream, copy.open("wb") as target:
        shutil.copyfileobj(stream, target, _COPY)
    if storage.sha256(copy) != file.sha256:
        raise InputError(f"{place}: its content is not what was committed (hash differs); make the directory again")
    try:
        hashes: Bits = np.load(copy, mmap_mode="r")
    except ValueError as error:
        raise InputError(f"{place}: no array of hashes ({error}); make the directory again") from error
    return hashes


def record_ids(
    ids: QueryIds, before: Dataset | None, commit: storage.Commit, folder: Path
) -> tuple[storage.Placed, ...]:
    """Write a file with the hashes of the kept query ids, if there are any; returns all such files of the data set.

    Earlier files less than twice as long are merged into it, so that many additions leave few files.
    """
    files = [*before.manifest.query_ids] if before else []
    if not len(ids.kept):
        return tuple(files)
    while files and files[-1].bytes < 2 * 8 * len(ids.kept):
        ids.kept.push(_mapped(commit.url, files.pop(), folder))
    with commit.file("query-ids/part-{hash}.npy", size=8 * len(ids.kept)) as path:
        ids.kept.save(path)
    return (*files, commit.files[-1])


def with_addition(before: Manifest, new: Manifest) -> Manifest:
    """The manifest of a data set with an addition; `new` covers the addition alone, but all files of query ids."""
    made_by = {**before.made_by, ADDED: [*before.made_by.get(ADDED, []), new.made_by]}
    return joined_manifests(before, new).model_copy(update={"made_by": made_by})


def joined_manifests(before: Manifest, new: Manifest) -> Manifest:
    """The manifest of the files of both, with `made_by` and the files of query ids from `new`."""
    stats, added = (
        FeatureStats.from_summaries(part.summaries, part.counts().documents, part.grouped) for part in (before, new)
    )
    stats.merge(added)
    labels = LabelCounts.from_counts(before.label_counts)
    labels.merge(LabelCounts.from_counts(new.label_counts))
    uncounted = any(part.counts().labelled and not part.label_counts for part in (before, new))  # too many labels
    # None where either data set has too many texts to record
    texts = {name: merged_texts(before.categories.get(name), new.categories.get(name)) for name in before.categories}
    return Manifest(
        features=before.features,
        files=DataFiles.joined([before.files, new.files]),
        parts=before.parts,
        summaries=stats.summaries(),
        label_counts={} if uncounted else labels.counts(),
        grouped=stats.grouped,
        tokens=before.tokens,
        token_summaries=summed([before.token_summaries, new.token_summaries]),
        vocabulary=before.vocabulary,
        accounting=total_accounting([before.accounting, new.accounting]),
        categories={name: dict(sorted(merged.items())) for name, merged in texts.items() if merged is not None},
        raw=before.raw,
        fills=before.fills,
        query_ids=new.query_ids,
        quarantine=(*before.quarantine, *new.quarantine),
        made_by=new.made_by,
    )


class Unfinished:
    """The saved state of one command; loads what an earlier process has saved.

    Args:
        commit: the commit of the data set.
        origin: the command, including its inputs.
        before: the data set to add to.
    """

    def __init__(self, commit: storage.Commit, origin: Mapping[str, Any], before: Dataset | None) -> None:
        self._commit = commit
        # "2" is the form of the saved state; one of an earlier version is other work
        self._identity = digest("2" + as_text(origin) + (before.manifest.hash if before else ""))
        self.units = 0
        """The number of finished units."""
        self.manifest: Manifest | None = None
        """The manifest of these units alone."""
        self._ids: dict[str, storage.Placed] = {}
        self._categories: dict[str, storage.Placed] = {}
        self._saved_at = time.monotonic()
        self._saved = commit.saved if commit.saved.get("identity") == self._identity else {}
        if saved := self._saved:
            commit.adopt(storage.Placed(**file) for file in saved["files"])
            self.units, self.manifest = saved["units"], parse_dataset_manifest(saved["manifest"], commit.url)
            self._ids, self._categories = (
                {name: storage.Placed(**file) for name, file in saved[key].items()} for key in ("ids", "categories")
            )
            log.info("prepare: resumes after %d units that an earlier process has finished", self.units)

    def restore(self, totals: Written, ids: QueryIds, folder: Path) -> None:
        """Add the query ids of the finished units to `ids`, and to `totals` what is not in their manifest."""
        if self.manifest is None:
            return
        sets = {"kept": [ids.kept, ids.groups], "others": [ids.others, ids.groups], "unread": [ids.unread]}
        for name, file in self._ids.items():
            for each in sets[name]:
                each.push(_mapped(self._commit.url, file, folder))
        for name, file in self._categories.items():
            totals.encoders[name] = CategoryEncoder(_mapped(self._commit.url, file, folder))
        totals.places = LikePlaces.restored(self._saved["places"], len(self.manifest.features))
        totals.first_rejections = [Rejection(**rejection) for rejection in self._saved["first_rejections"]]
        if totals.schema is None and self.manifest.files:
            totals.schema = parquet_schema(storage.listed_file(self._commit.url, self.manifest.files[0].path))
            totals.schema_of = self._saved["schema_of"]

    @property
    def is_due(self) -> bool:
        """True if minutes of work would be lost without a save."""
        return time.monotonic() - self._saved_at >= _SAVE_S

    def save(self, units: int, manifest: Manifest, ids: QueryIds, totals: Written) -> None:
        """Save the first `units` units."""
        outdated = [file.path for file in (*self._ids.values(), *self._categories.values())]
        sets = {"kept": ids.kept, "others": ids.others, "unread": ids.unread}
        self._ids = {name: self._put(f"{units}-{name}", each.save) for name, each in sets.items()}
        self._categories = {
            name: self._put(f"{units}-category-{i}", partial(save_hashes, hashes=encoder.known))
            for i, (name, encoder) in enumerate(totals.encoders.items())
        }
        document = {
            "identity": self._identity,
            "units": units,
            "manifest": manifest.model_dump(mode="json"),
            "ids": {name: vars(file) for name, file in self._ids.items()},
            "categories": {name: vars(file) for name, file in self._categories.items()},
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
