"""What `prepare` goes on from: a data set that it adds to, and the units that an interrupted run has finished.

The manifest of a data set with an addition lists the old files and the new ones, and every count is the sum. `made_by`
comes from the first command; the additions are listed in it under `added`.

Every few minutes the files, counts, query ids and categories of the units finished so far, in order, are saved beside
the new data set (`storage.Commit.save`), with what warnings and errors name. The result and the messages equal those of
an uninterrupted run, except for the last digits of means and deviations, which are merged from two halves.
"""

import json
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ltrscale import storage
from ltrscale.arrays import Bits
from ltrscale.data.columns import is_number, value_type
from ltrscale.data.dataset.columns import summed, with_lists
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import (
    ADDED,
    Dataset,
    Feature,
    FeatureSummary,
    Lacking,
    Manifest,
    RawColumns,
    parse_dataset_manifest,
)
from ltrscale.data.dataset.origin import commands
from ltrscale.data.dataset.summaries import FeatureStats, LabelCounts
from ltrscale.data.ids import QueryIds, save_hashes
from ltrscale.errors import InputError, without_credentials
from ltrscale.ingest.assembly import LikePlaces, Written
from ltrscale.ingest.categories import CategoryEncoder, RecordedCodes, merged_texts
from ltrscale.ingest.inputs import UnitSettings
from ltrscale.ingest.mapping import named_columns
from ltrscale.ingest.rows import Rejection, row_periods
from ltrscale.ingest.source import File, Source
from ltrscale.ingest.tables import parquet_schema, read_schema
from ltrscale.ingest.validate import total_accounting
from ltrscale.origin import as_text, digest
from ltrscale.progress import log

_COPY = 1 << 24
_UNIT = re.compile(r"/part-([0-9]+)-")
_SAVE_S = 120.0
"""The most seconds of work that an interruption costs, apart from the units in progress."""
_CATEGORY = "category "


def holds_inputs(out: str, origin: Mapping[str, Any]) -> bool:
    """True if this command with these inputs has made or extended the data set, and no file is missing."""
    manifest = storage.read_manifest(out)
    if manifest is None or manifest.get("format") != "ltrscale-dataset":
        return False
    dataset = Dataset(out, parse_dataset_manifest(manifest, storage.join(out, storage.MANIFEST)))
    return as_text(origin) in commands(dataset) and storage.is_whole(out, manifest)


def check_nothing_added(out: str, manifest: Mapping[str, Any]) -> None:
    """Refuse, with an InputError, to replace a data set with additions, which would lose them."""
    of_parts = sum(part.get("additions", 0) for part in manifest.get("parts", []))
    if additions := of_parts + len(manifest.get("made_by", {}).get(ADDED, [])):
        raise InputError(
            f"{out}: {additions} additions are there, which making the data set again would delete; "
            "set prepare.add to add to them, or delete the directory first"
        )


def check_addable(existing: Dataset, settings: UnitSettings) -> tuple[Feature, ...]:
    """The features of a data set, in the order in which to read inputs that are added; an InputError if they differ."""
    stage = existing.manifest.made_by.get("stage")
    if stage != "prepare":
        raise InputError(
            f"{existing.url}: made by {stage or 'something else'}; periods can be added to a data set of prepare only"
        )
    _check_tokens(existing, settings)
    _check_goals(existing, settings.config.source.goals)
    features, dataset_features = settings.features, existing.manifest.features
    if settings.config.source.takes_any_order:
        return _in_order(existing, features, settings.first.url)
    for i in range(max(len(features), len(dataset_features))):
        new, old = (
            f"{which[i].name!r} ({which[i].kind})" if i < len(which) else "missing"
            for which in (features, dataset_features)
        )
        if new != old:
            raise InputError(
                f"{existing.url}: feature {i + 1} of the inputs is {new} where the data set has {old}; "
                "prepare them with the same columns, or into another directory"
            )
    return dataset_features


def _in_order(existing: Dataset, features: Sequence[Feature], url: str) -> tuple[Feature, ...]:
    """The features of inputs in the order of a data set, new ones last; logs which come and go."""
    known, here = {feature.name: feature for feature in existing.manifest.features}, {*features}
    for feature in features:
        if known.get(feature.name, feature) != feature:
            _refuse_type(existing, known[feature.name], feature.kind, url)
    new = tuple(feature for feature in features if feature.name not in known)
    kept = tuple(feature for feature in existing.manifest.features if feature in here)
    if new:
        names = ", ".join(feature.name for feature in new)
        log.warning("prepare: the inputs have features that %s lacks so far: %s", existing.url, names)
    if gone := [name for name in known if known[name] not in here]:
        log.warning("prepare: the inputs lack features of %s: %s", existing.url, ", ".join(gone))
    return kept + new


def taken_periods(old: Manifest, features: Sequence[Feature], *, late: bool) -> frozenset[str]:
    """The periods that nothing can be added to; `late` groups join those whose files have the same features."""
    same = [period for period in old.periods if old.stored.get(period, old.features) == tuple(features)]
    return frozenset(old.periods).difference(same if late else ())


def check_types(existing: Dataset, source: Source, file: File) -> None:
    """Refuse, with an InputError, a file whose columns have other types than those of a data set's features."""
    mapping = source.mapping
    if mapping is None:
        return
    url, features = file.url, existing.manifest.features
    schema = read_schema(url, mapping.dialect(url), file.lake)
    unused = {*named_columns(schema.names, mapping.exclude), *mapping.sources()}
    for feature in features:
        if feature.name in schema.names and feature.name not in unused and feature.kind == "numeric":
            kind = value_type(schema.field(schema.get_all_field_indices(feature.name)[0]).type)
            if not is_number(kind):
                _refuse_type(existing, feature, str(kind), url)
    for name, size in mapping.vectors.items():
        before = [feature for feature in features if re.fullmatch(rf"{re.escape(name)}\.[0-9]+", feature.name)]
        now = {made for made, (column, _) in mapping.vector_features().items() if column == name}
        if before and now and {feature.name for feature in before} != now:
            _refuse_type(existing, before[0], f"one of {size}, with other places than before", url)


def _refuse_type(existing: Dataset, feature: Feature, kind: str, url: str) -> None:
    manifest, name = existing.manifest, feature.name
    stored = manifest.stored_names(manifest.periods)
    period = max(period for period in manifest.periods if name in stored.get(period, [name]))
    raise InputError(
        f"{url}: column {name!r} is {kind}, and {feature.kind} until period {period!r} of {existing.url}; a feature "
        "keeps its type: convert the column, give it another name, or list it under exclude"
    )


def check_rewritten(settings: UnitSettings, files: Sequence[File], existing: Dataset | None) -> None:
    """Name the periods of a data set whose rows a table has rewritten since they were read.

    Raises:
        InputError: rows of periods that the data set lacks were written with them.
    """
    periods, read = set[str](), settings.open({})
    for file in (file for file in files if file.is_rewritten):
        for block in read(file):
            periods.update(row_periods(block, file.period or "", settings.config.period).unique().to_pylist())
    if new := sorted(periods - {*existing.manifest.periods} if existing else ()):
        raise InputError(
            f"{settings.out}: the table has written period {new[0]!r} together with rows of earlier ones that it has "
            "rewritten, and since reads neither; prepare all of the table into another directory"
        )
    if periods:
        log.warning(
            "prepare: the table has rewritten rows of %s, which stay in %s as they were; erase there what the table "
            "has deleted (jobs.erase), or prepare all of the table again",
            ", ".join(sorted(periods)),
            settings.out,
        )


def _check_goals(existing: Dataset, goals: tuple[str, ...]) -> None:
    if goals != (before := existing.manifest.goals):
        there, here = (", ".join(names) or "one without a name" for names in (before, goals))
        raise InputError(
            f"{existing.url}: its labels are {there}, those of the inputs {here}; name them as they are there"
        )


def _check_tokens(dataset: Dataset, settings: UnitSettings) -> None:
    input_fields, dataset_fields = settings.config.source.token_fields, dataset.manifest.tokens
    if unmatched := [
        field for field in (*input_fields, *dataset_fields) if (field in input_fields) != (field in dataset_fields)
    ]:
        field, owner = unmatched[0], "inputs" if unmatched[0] in input_fields else "data set"
        raise InputError(
            f"{dataset.url}: tokens {field.name!r} of each {field.of} (at most {field.max_tokens}) are in the {owner} "
            "only; prepare both with the same columns.tokens"
        )


def next_unit(manifest: Manifest) -> int:
    """The number of the first unit of an addition, one above the largest in the names of the data set's files."""
    names = [*manifest.files.paths, *manifest.quarantine]
    return 1 + max((int(number) for name in names for number in _UNIT.findall(name)), default=-1)


def recall_ids(existing: Dataset, ids: QueryIds, folder: Path) -> None:
    """Add the recorded query ids of a data set to `ids`; ids in fixed periods are separate, and not recorded.

    The hashes are copied to `folder` and mapped from there.
    """
    recorded = existing.manifest.query_ids
    if not recorded and (unknown := {*existing.manifest.periods} - _fixed_periods(existing)):
        raise InputError(
            f"{existing.url}: made by an earlier version, which recorded no query ids of period {min(unknown)!r}; "
            "prepare it again"
        )
    for file in sorted(recorded, key=lambda file: -file.bytes):  # largest first, to avoid needless merges
        ids.groups.push(mapped_ids(existing.url, file, folder))


def _fixed_periods(existing: Dataset) -> set[str | None]:
    """The periods that the commands of a data set named for whole inputs; None stands for inputs without one."""
    try:
        return {entry["period"] for made_by in commands(existing) for entry in json.loads(made_by)["config"]["inputs"]}
    except (LookupError, TypeError) as error:
        raise InputError(f"{existing.url}: its manifest does not name its inputs; prepare it again") from error


def mapped_ids(url: str, file: storage.Placed, folder: Path) -> Bits:
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
    ids: QueryIds, existing: Dataset | None, commit: storage.Commit, folder: Path
) -> tuple[storage.Placed, ...]:
    """Write a file with the hashes of the kept query ids, if there are any; returns all such files of the data set.

    Earlier files less than twice as long are merged into it, so that many additions leave few files.
    """
    files = [*existing.manifest.query_ids] if existing else []
    if not len(ids.kept):
        return tuple(files)
    while files and files[-1].bytes < 2 * 8 * len(ids.kept):
        ids.kept.push(mapped_ids(commit.url, files.pop(), folder))
    with commit.file("query-ids/part-{hash}.npy", size=8 * len(ids.kept)) as path:
        ids.kept.save(path)
    return (*files, commit.files[-1])


def with_addition(old: Manifest, new: Manifest) -> Manifest:
    """The manifest of a data set with an addition; `new` covers the addition alone, but all files of query ids."""
    made_by = {**old.made_by, ADDED: [*old.made_by.get(ADDED, []), new.made_by]}
    return joined_manifests(old, new).model_copy(update={"made_by": made_by})


def joined_manifests(old: Manifest, new: Manifest) -> Manifest:
    """The manifest of the files of both, with `made_by` and the files of query ids from `new`."""
    features = (*old.features, *(feature for feature in new.features if feature not in old.features))
    stats, added = (
        FeatureStats.from_summaries(_summaries(part, features), part.counts().documents, part.grouped)
        for part in (old, new)
    )
    stats.merge(added)
    labels = LabelCounts.from_counts(old.label_counts)
    labels.merge(LabelCounts.from_counts(new.label_counts))
    uncounted = any(part.counts().labelled and not part.label_counts for part in (old, new))  # too many labels
    # None where either data set has too many texts to record
    names = old.categories if features == old.features else dict.fromkeys((*old.categories, *new.categories))
    texts = {name: merged_texts(_texts(old, name), _texts(new, name)) for name in names}
    return Manifest(
        version=max(old.version, new.version),
        features=features,
        files=DataFiles.joined([old.files, new.files]),
        parts=old.parts,
        lacking=_lacking(features, old, new),
        summaries=stats.summaries(),
        goals=new.goals,
        label_counts={} if uncounted else labels.counts(),
        grouped=stats.grouped,
        tokens=old.tokens,
        token_summaries=summed([old.token_summaries, new.token_summaries]),
        vocabulary=old.vocabulary,
        accounting=total_accounting([old.accounting, new.accounting]),
        categories={name: dict(sorted(merged.items())) for name, merged in texts.items() if merged is not None},
        erased=old.erased,
        raw=old.raw if features == old.features else _raw(old, new),
        fills=old.fills,
        query_ids=new.query_ids,
        quarantine=(*old.quarantine, *new.quarantine),
        made_by=new.made_by,
    )


def _lacking(features: Sequence[Feature], *parts: Manifest) -> tuple[Lacking, ...]:
    """What the periods of some manifests lack of the features of all."""
    periods_by_names = defaultdict[tuple[str, ...], list[str]](list)
    for part in parts:
        whole = Lacking(features=(), periods=tuple(sorted({*part.periods} - part.stored.keys())))
        for each in (whole, *part.lacking):
            stored = {feature.name for feature in part.features} - {*each.features}
            absent = tuple(feature.name for feature in features if feature.name not in stored)
            periods_by_names[absent] += each.periods
    return tuple(
        Lacking(features=names, periods=tuple(sorted({*periods})))
        for names, periods in periods_by_names.items()
        if names and periods
    )


def _summaries(part: Manifest, features: Sequence[Feature]) -> Sequence[FeatureSummary]:
    """The summaries of features of a data set, without values for those that it lacks."""
    if part.features == features:
        return part.summaries
    by_name = dict(zip((feature.name for feature in part.features), part.summaries, strict=True))
    absent = FeatureSummary(missing=part.counts().documents, unique_in_group=0.0 if part.grouped else None)
    return [by_name.get(feature.name, absent) for feature in features]


def _texts(part: Manifest, name: str) -> RecordedCodes:
    """The codes of a feature's texts: None if they are too many, and none without the feature."""
    return part.categories.get(name, None if name in {feature.name for feature in part.features} else {})


def _raw(old: Manifest, new: Manifest) -> RawColumns | None:
    if old.raw is None or new.raw is None:
        return None
    return old.raw.model_copy(update={"reads": {**new.raw.reads, **old.raw.reads}})


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
