"""Erases documents or query groups from a data set, by ids that neither its files nor any log name afterwards.

Only the files with such rows are written again, row group by row group. One commit lists them instead of the old ones,
and deletes these. Counts and summaries are those of the rows that are left, so all files are read.

Shapes: Q groups, N documents, M groups and K documents that are left.
"""

import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.arrays import Bits, Bools, Ints
from ltrscale.config import Config
from ltrscale.data.columns import is_id, texts
from ltrscale.data.dataset.columns import FEATURES, as_bytes, is_bytes, laid_out
from ltrscale.data.dataset.files import Counts, DataFile, DataFiles
from ltrscale.data.dataset.manifest import (
    ADDED,
    Accounting,
    Dataset,
    Erased,
    Manifest,
    read_dataset,
    stored_places,
)
from ltrscale.data.dataset.origin import MadeFirst, commands, place_beside
from ltrscale.data.dataset.row_groups import RowGroups
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Texts
from ltrscale.data.dataset.writer import Compression, commit_dataset, parquet_writer, plain_columns
from ltrscale.data.ids import hash_ids, save_hashes
from ltrscale.data.stream.readers import column_names, open_parquet, read_direct
from ltrscale.derive.rewrite import GroupBlock, GroupSummaries, counted_tables, group_block, group_table
from ltrscale.errors import InputError
from ltrscale.progress import log, progress
from ltrscale.stages.runs import holding

_DOCUMENTS = "doc_ids"
_UNIT = re.compile(r"(.*/part-[0-9]+(?:-[0-9]{5})?)-")
"""The name of a data file up to its hash."""
_Counted = tuple[pa.Table, Ints]
"""A table of groups, and the number of documents of each."""
_CODECS: dict[str, Compression] = {"ZSTD": "zstd", "UNCOMPRESSED": "none"}


class EraseJob(Config):
    """Erase rows from a data set, and name what has learnt from them."""

    data: str
    """Data set directory; its files with these rows are written again, and no others."""
    ids: str
    """File with the ids to erase, one in a line. No file that is written, and no log, repeats them."""
    column: str = "query_id"
    """Column with the ids: `query_id` or a `meta_*` column, for whole query groups, or `doc_ids`, for documents."""
    under: Texts = ()
    """Directories below which to look for data sets, bundles, scores and reports that have erased rows or learnt from
    them."""

    def run(self) -> None:
        """Erase the rows and log their number; then name what was made from rows that are erased, now or earlier.

        Killed at any time it leaves the old data set or the new one, and the same command completes it.

        Raises:
            InputError: data set, ids or column are missing, or nothing would be left.
        """
        ids = _read_ids(self.ids)
        with holding(self.data):
            before = read_dataset(self.data)
            after = _erased(before, self.column, ids)
        groups, documents, _ = np.subtract(before.manifest.counts(), after.manifest.counts())
        files = len({*before.manifest.files.paths} - {*after.manifest.files.paths})
        message = "erase: %s: erased %d documents, and with them %d whole query groups, from %d of %d files"
        log.info(message, self.data, documents, groups, files, len(before.manifest.files))
        for url, stage in made_before(after).items():
            log.warning("erase: %s (%s) has rows that %s was made of, with their ids; delete it", url, stage, self.data)
        for url, stage in made_from_erased(after, self.under).items():
            log.warning("erase: %s (%s) has erased rows or learnt from them; delete it or make it again", url, stage)


def _read_ids(url: str) -> pa.StringArray:
    ids = [line for line in storage.read_bytes(url).decode(errors="replace").splitlines() if line]
    if not ids:
        raise InputError(f"{url}: there are no ids in it; write one in a line")
    return pa.array(ids, pa.string())


def _erased(dataset: Dataset, column: str, ids: pa.StringArray) -> Dataset:
    """Commit the data set without the rows of these ids, if it has any."""
    manifest, row_groups = dataset.manifest, select(Split(data=(dataset.url,)), labelled=False).row_groups.by_file()
    urls = {storage.join(storage.absolute(dataset.url), file.path): file for file in manifest.files}
    affected = {url for url, of_file in row_groups.items() if _has_any(of_file, column, ids)}
    if not affected:
        return dataset
    left, files = _Left(manifest, column, ids), list[DataFile]()
    with storage.Commit(dataset.url) as commit, progress("erase", manifest.counts().documents) as advance:
        for url, file in urls.items():
            tables = left.tables(row_groups[url], rewrites=url in affected)
            if url in affected:
                files += _rewritten(commit, file, url, tables)
            elif sum(1 for _ in tables):  # all are read, one after the other, to be counted
                files.append(file)
            advance(sum(counts.documents for counts in file.row_groups))
        if not files:
            raise InputError(f"{dataset.url}: nothing would be left of it; delete the directory instead")
        periods = {urls[url].period for url in affected}
        return Dataset(dataset.url, commit_dataset(commit, left.manifest(dataset, files, periods, commit)))


def _has_any(row_groups: RowGroups, column: str, ids: pa.StringArray) -> bool:
    """Whether a file has a row to erase; only its column of ids is read."""
    url = row_groups[0].file.url
    names = column_names(url)
    if column not in names or not (column in ("query_id", _DOCUMENTS) or column.startswith("meta_")):
        raise InputError(f"{url}: no ids are in a column {column!r}; name query_id, doc_ids or a meta_ column")
    for table in read_direct(row_groups, [column]):
        values = table.column(column).combine_chunks()
        if _among(values.flatten() if column == _DOCUMENTS else values, ids, column).any():
            return True
    return False


def _among(values: pa.Array, ids: pa.StringArray, column: str) -> Bools:
    """A mask of the values that are among some ids."""
    if not is_id(values.type):
        raise InputError(f"column {column!r} is {values.type}; name one of text or whole numbers")
    return np.asarray(pc.is_in(texts(values)[0], value_set=ids).to_numpy(zero_copy_only=False), np.bool_)


class _Left:
    """What is left of a data set, counted as its files pass."""

    def __init__(self, manifest: Manifest, column: str, ids: pa.StringArray) -> None:
        self._manifest, self._column, self._ids = manifest, column, ids
        self._summaries = GroupSummaries(manifest)
        self._codes = {name: set[float]() for name in manifest.categories}
        self._gone = [np.empty(0, np.uint64)]
        """Hashes of the ids of the groups of which nothing is left."""

    def tables(self, row_groups: RowGroups, *, rewrites: bool) -> Iterator[_Counted]:
        """The groups of a file that are left, for each row group with any; without the ids if it is rewritten."""
        first = row_groups[0]
        names = column_names(first.file.url)
        stored = first.file.stored or self._manifest.features
        places_F = stored_places(self._manifest.features, stored)
        for table, lengths_Q in counted_tables(row_groups, names, len(stored)):
            block = group_block(table, lengths_Q, len(stored), first)
            block = self._without(block) if rewrites else block
            if not len(block):
                continue
            features_NF = laid_out(block.features_NF, places_F)
            for place, feature in enumerate(self._manifest.features):
                if feature.name in self._codes:
                    self._codes[feature.name].update(np.unique(features_NF[:, place]).tolist())
            written = group_table(block, block.keys_Q)
            self._summaries.add(block, features_NF, written)
            yield written, block.lengths_Q

    def _without(self, block: GroupBlock) -> GroupBlock:
        """The groups and documents without one of the ids."""
        if self._column == _DOCUMENTS:
            kept_N = ~_among(block.doc_ids_N, self._ids, self._column)
        else:
            values_Q = block.rows_Q.column(self._column).combine_chunks()
            kept_N = block.on_documents(~_among(values_Q, self._ids, self._column))
        lengths_Q = np.add.reduceat(kept_N, block.offsets_Q1[:-1], dtype=np.int64)
        gone = block.rows_Q.column("query_id").filter(pa.array(lengths_Q == 0))
        self._gone.append(hash_ids(gone.to_pylist()))
        return block.take(np.flatnonzero(lengths_Q), np.flatnonzero(kept_N), lengths_Q[lengths_Q > 0])

    def manifest(
        self, dataset: Dataset, files: Iterable[DataFile], periods: Iterable[str], commit: storage.Commit
    ) -> Manifest:
        """The manifest of these files; rows in the quarantine may have the ids too, and are left out."""
        old, of_files = self._manifest, DataFiles.from_iterable(files)
        first, *added = map(json.loads, commands(dataset))
        categories = {
            name: {text: code for text, code in codes.items() if code in self._codes[name]}
            for name, codes in old.categories.items()
        }
        groups, documents, _ = np.subtract(old.counts(), of_files.counts()).tolist()
        earlier = old.erased or Erased(groups=0, documents=0, periods=())
        changes = {
            "files": of_files,
            "parts": (),
            "lacking": [
                each.replace(periods=left)
                for each in old.lacking
                if (left := tuple(period for period in each.periods if period in of_files.periods))
            ],
            "categories": categories,
            "accounting": _accounting(old.accounting, groups, documents),
            "query_ids": self._query_ids(dataset.url, commit),
            "quarantine": (),
            "erased": Erased(
                groups=earlier.groups + groups,
                documents=earlier.documents + documents,
                periods=tuple(sorted({*earlier.periods, *periods})),
            ),
            "made_by": first | ({ADDED: added} if added else {}),
            **self._summaries.fields(),
        }
        return Manifest(**{**dict(old), **changes})

    def _query_ids(self, url: str, commit: storage.Commit) -> Iterator[storage.Placed]:
        """The files of hashes of query ids, without those of groups of which nothing is left."""
        gone: Bits = np.concatenate(self._gone)
        for file in self._manifest.query_ids:
            hashes = np.load(io.BytesIO(storage.read_verified(url, file.path, {"files": [vars(file)]})))
            kept = hashes[~np.isin(hashes, gone)]
            if len(kept) == len(hashes):
                yield file
            elif len(kept):
                with commit.file("query-ids/part-{hash}.npy") as path:
                    save_hashes(path, kept)
                yield commit.files[-1]


def _accounting(old: Accounting, groups: int, documents: int) -> Accounting:
    """The accounting with some kept rows as rejected ones."""
    changes = {
        "rows_kept": old.rows_kept - documents,
        "rows_rejected": old.rows_rejected + documents,
        "groups_kept": old.groups_kept - groups,
        "groups_rejected": old.groups_rejected + groups,
        "rules": {**old.rules, "erased": old.rules.get("erased", 0) + documents},
    }
    return old.model_copy(update=changes)


def _rewritten(commit: storage.Commit, file: DataFile, url: str, tables: Iterator[_Counted]) -> list[DataFile]:
    """Write a file again with these row groups, in its own form; nothing if there are none."""
    if (first := next(tables, None)) is None:
        return []
    metadata = open_parquet(url).metadata
    in_bytes = is_bytes(metadata.schema.to_arrow_schema().field(FEATURES).type)
    codec = _CODECS.get(metadata.row_group(0).column(0).compression, "lz4")
    name = match[1] if (match := _UNIT.match(file.path)) else file.path.removesuffix(".parquet")
    counts, longest = list[Counts](), 0
    with commit.file(f"{name}-{{hash}}.parquet") as path, ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for table, lengths_Q in itertools.chain([first], tables):
            stored = as_bytes(table) if in_bytes else table
            writer = writer or stack.enter_context(
                parquet_writer(str(path), stored.schema, plain=plain_columns(stored.schema), compression=codec)
            )
            writer.write_table(stored, row_group_size=len(stored))
            counts.append(Counts(len(table), int(lengths_Q.sum()), len(table) - table.column("labels").null_count))
            longest = max(longest, int(lengths_Q.max()))
    return [DataFile(**vars(commit.files[-1]), period=file.period, longest=longest, row_groups=tuple(counts))]


def made_before(dataset: Dataset) -> dict[str, str]:
    """What `prepare` has made of raw rows beside a data set from which something was erased.

    Returns:
        The stage of each, by its place.
    """
    places = [place_beside(dataset.url, made) for made in get_args(MadeFirst)] if dataset.manifest.erased else []
    documents = {place: storage.read_manifest(place) for place in places}
    return {place: str(_made_by(document).get("stage", "")) for place, document in documents.items() if document}


def made_from_erased(dataset: Dataset, under: Iterable[str]) -> dict[str, str]:
    """The outputs below some directories that have rows which are erased from a data set, or learnt from them.

    These are the outputs whose origin names content of the data set that has changed since, in a period from which
    something was erased, and those whose origin names one of them.

    Returns:
        The stage of each, by its place.
    """
    documents = dict[str, dict[str, Any]]()
    for folder in under if dataset.manifest.erased else ():
        for name in storage.below(folder):
            place, _, file = storage.join(storage.absolute(folder), name).rpartition("/")
            if file in (storage.MANIFEST, storage.HIDDEN_MANIFEST):
                documents[place] = storage.read_manifest(place, file) or {}
    found = {place for place, document in documents.items() if _reads_erased(document, dataset)}
    outputs, before = {place.partition("/period=")[0] for place in found}, set[str]()
    while outputs != before:
        before = outputs
        heirs = {place for place, document in documents.items() if not outputs.isdisjoint(_inputs(document))}
        outputs = before | {place.partition("/period=")[0] for place in heirs}
    stages = {place.partition("/period=")[0]: document for place, document in documents.items()}
    return {place: str(_made_by(stages[place]).get("stage", "")) for place in sorted(outputs)}


def _made_by(document: Mapping[str, Any]) -> Mapping[str, Any]:
    made_by = document.get("made_by")
    return made_by if isinstance(made_by, Mapping) else {}


def _inputs(document: Mapping[str, Any]) -> dict[str, str]:
    """The content of each input that an output's origin names, by its place."""
    inputs = _made_by(document).get("inputs")
    return {storage.absolute(url): content for url, content in dict(inputs or {}).items()}


def _reads_erased(document: Mapping[str, Any], dataset: Dataset) -> bool:
    """Whether an output was made from other content of the data set than it has, in a period with something erased."""
    manifest, content = dataset.manifest, _inputs(document).get(storage.absolute(dataset.url))
    if content is None or manifest.erased is None:
        return False
    periods = _periods_read(document, dataset.url)
    if periods is None:
        return content != manifest.hash
    return content != manifest.hash_of(periods) and not periods.isdisjoint(manifest.erased.periods)


def _periods_read(document: Mapping[str, Any], url: str) -> set[str] | None:
    """The periods of a data set that an output's origin names; None if it does not, as for a whole data set."""
    if "period" in document:  # of scores
        return {str(document["period"])}
    config = _made_by(document).get("config")
    splits = config.get("splits") if isinstance(config, Mapping) else None
    if not isinstance(splits, list):
        return None
    read = [split for split in splits if storage.absolute(url) in map(storage.absolute, split["data"])]
    return {period for split in read for period in split["periods"]}
