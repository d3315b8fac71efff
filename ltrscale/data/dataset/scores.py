"""Score files: a bundle's scores for the documents of a data set, committed period by period.

    period=P/NAME-HASH.parquet   for a data file NAME.parquet, with its row groups, in one of the layouts
    period=P/_manifest.json      written last: the files, their data files, counts, origin

The layouts and their columns:

    scores   a row per query group: gid int64, scores list<double>, one value per document, never null
    lists    the same with query_id string, item_ids list<string> and ranks list<int32>
    items    a row per document, the best of each group first: query_id, item_id, score double, rank int32

The last two may also have group columns `meta_*`. Ranks count from 1; tied documents keep the order of the data. The
names of all other files begin with an underscore or a dot, so that readers of Parquet directories skip them.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.arrays import Doubles, Ints, offsets, place_in_group
from ltrscale.config import Strict, validate
from ltrscale.data.columns import is_per_document, spread_over_documents
from ltrscale.data.dataset.files import Counts, DataFile, DataFiles, ListedPath, PeriodName
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.writer import parquet_writer
from ltrscale.errors import InputError

SCORES = "scores"
"""The column with the scores."""
_AT_ONCE = 1024
"""Manifests read before they are parsed."""
SCORE_AGAIN = "score the period again with jobs.score"
Layout = Literal["scores", "lists", "items"]
_FORMAT: Final = "ltrscale-scores"
_SCHEMA = pa.schema([("gid", pa.int64()), (SCORES, pa.list_(pa.float64()))])
_NUMBERS = ("gid", SCORES, "score", "rank", "ranks")


@dataclass(frozen=True)
class ScoreFile(storage.Placed):
    """The scores of one data file, in the directory of the period."""

    data: ListedPath
    """Path of the data file in its data set at the time of scoring."""
    data_sha256: str
    """Content hash of the data file that was scored."""


class PeriodScores(Strict):
    """`_manifest.json` of a scored period."""

    format: Literal["ltrscale-scores"] = _FORMAT
    version: Literal[1] = 1
    period: PeriodName
    files: tuple[ScoreFile, ...]
    """One for each data file of the period, in the order of the data set's manifest."""
    groups: int
    documents: int
    bundle_hash: str
    """Content hash of the bundle that scored."""
    made_by: dict[str, Any]
    """The places of bundle and data set, for people to read."""
    layout: Layout
    """The columns of the files."""
    meta: tuple[str, ...]
    """The columns `meta_*` of the data set that the files have too."""

    def is_of(self, contents: Sequence[str]) -> bool:
        """True if exactly the data files with these content hashes were scored, in this order, under any names."""
        return [file.data_sha256 for file in self.files] == list(contents)


class ScoredGroups(NamedTuple):
    """Scores of some query groups, concatenated: ids [Q], offsets [Q + 1], scores [N]."""

    gids_Q: Ints
    offsets_Q1: Ints
    scores_N: Doubles


class WrongIdsError(ValueError):
    """The document ids of a data file do not fit its documents."""


class Found(NamedTuple):
    """The committed scores of a data file: their URL and content hash."""

    url: str
    sha256: str


def period_url(url: str, period: str) -> str:
    """The directory of a period below a directory of scores."""
    return storage.join(url, f"period={period}")


def file_name(file: DataFile) -> str:
    """The name of a data file's scores for `Commit.file`.

    The name contains the hash of the scores, so that new scores do not overwrite committed ones.
    """
    return f"{PurePosixPath(file.path).stem}-{{hash}}.parquet"


def scored_periods(url: str) -> list[str]:
    """The periods that have a directory below a directory of scores, sorted."""
    names = [child.rsplit("/", 1)[-1] for child in storage.children(url)]
    return [name.removeprefix("period=") for name in names if name.startswith("period=")]


def read_period(url: str, period: str) -> PeriodScores | None:
    """The manifest of a scored period below a directory of scores, or None if none is committed.

    Raises:
        InputError: something else is committed there, or scores in a version that this package does not read.
    """
    (scores,) = read_periods(url, [period])
    return scores


def read_periods(url: str, periods: Sequence[str]) -> Iterator[PeriodScores | None]:
    """Like `read_period`, for several periods in order."""
    for first in range(0, len(periods), _AT_ONCE):
        some = periods[first : first + _AT_ONCE]
        paths = [storage.join(period_url(url, period), storage.HIDDEN_MANIFEST) for period in some]
        # read concurrently but parse one by one, because parsing threads would wait for each other
        for path, data in zip(paths, storage.at_once(storage.read_if_there, paths), strict=True):
            yield None if data is None else _parsed(data, path)


def _parsed(data: bytes, path: str) -> PeriodScores:
    """The manifest of a scored period, read from `path`."""
    values = storage.parse_manifest(data, path)
    if values.get("format") != _FORMAT:
        raise InputError(f"{path}: not scores but {values.get('format', 'something else')!r}; check the path")
    return validate(PeriodScores, values, path)


def find_scores(url: str, dataset: Dataset, periods: Iterable[str]) -> dict[str, Found]:
    """The score files of some periods of a data set, by path of the data file.

    Raises:
        InputError: a period is not scored there, has one row per document, was scored from files that differ from the
            data set's, or several bundles scored the periods.
    """
    by_path: dict[str, Found] = {}
    first: PeriodScores | None = None
    none, periods = DataFiles.from_iterable([]), list(periods)
    for period, scores in zip(periods, read_periods(url, periods), strict=True):
        if scores is None:
            raise InputError(f"{url}: period {period!r} is not scored there; score {dataset.url} with jobs.score")
        if scores.layout == "items":
            raise InputError(
                f"{url}: period {period!r} has one row per document, which cannot serve as labels; "
                "score it into another directory with jobs.score and layout lists"
            )
        files = dataset.manifest.files.by_period.get(period, none)
        if not scores.is_of(files.sha256):
            raise InputError(
                f"{url}: period {period!r} was scored from other files than {dataset.url} has now; "
                "score it again with jobs.score"
            )
        first = first or scores
        if scores.bundle_hash != first.bundle_hash:
            problem = f"periods {first.period!r} and {period!r} were scored by different bundles"
            raise InputError(f"{url}: {problem}; score them again with one by jobs.score")
        directory = period_url(url, period)
        storage.check_links(directory, [file.path for file in scores.files])
        for name, file in zip(files.paths, scores.files, strict=True):
            by_path[name] = Found(f"{directory}/{file.path}", file.sha256)
    return by_path


def write_file(
    path: Path,
    row_groups: Sequence[Counts],
    batches: Iterable[ScoredGroups],
    names: Iterable[pa.Table] = (),
    *,
    layout: Layout = "scores",
) -> Counts:
    """Write the scores of a data file in its row groups; groups arrive in file order, in batches of any size.

    Memory holds the scores of one batch and one row group. `names` are columns of each row group of the data file for
    the layouts that name groups: `gid`, `query_id`, `doc_ids` if there are any, and the `meta_*` to add.

    Returns:
        The groups and documents written, all counted as labelled, to compare with the manifest.

    Raises:
        WrongIdsError: a group's number of document ids differs from its number of documents.
    """
    waiting: list[pa.Table] = []
    groups = documents = 0
    group_counts, of_data = [counts.groups for counts in row_groups][::-1], iter(names)
    writer: pq.ParquetWriter | None = None
    with ExitStack() as stack:
        for batch in batches:
            assert len(batch.scores_N) == batch.offsets_Q1[-1]
            groups, documents = groups + len(batch.gids_Q), documents + len(batch.scores_N)
            waiting.append(_table(batch))
            while group_counts and sum(map(len, waiting)) >= group_counts[-1]:
                table, n = pa.concat_tables(waiting), group_counts.pop()
                waiting = [table.slice(n)]
                # one chunk, so that the file's bytes do not depend on the batches
                table = table.slice(0, n).combine_chunks()
                if layout != "scores":
                    table = _with_names(table, next(of_data), layout)
                writer = writer or stack.enter_context(parquet_writer(str(path), table.schema, plain=_NUMBERS))
                writer.write_table(table, row_group_size=len(table))
    return Counts(groups, documents, groups)


def _table(batch: ScoredGroups) -> pa.Table:
    lists = pa.ListArray.from_arrays(pa.array(batch.offsets_Q1.astype(np.int32)), pa.array(batch.scores_N))
    return pa.table([pa.array(batch.gids_Q), lists], schema=_SCHEMA)


def _with_names(table: pa.Table, of_data: pa.Table, layout: Layout) -> pa.Table:
    """Add ids and ranks to a row group, in a layout."""
    assert of_data["gid"].equals(table["gid"]), "the rows of scores and data differ"
    lists = table[SCORES].combine_chunks()
    lengths_Q, scores_N = lists.value_lengths().to_numpy(), lists.flatten().to_numpy()
    offsets_Q1 = offsets(lengths_Q)
    item_ids_N = _item_ids(of_data, lengths_Q)
    ranks_N = (1 + place_in_group(offsets_Q1, -scores_N)).astype(np.int32)  # tied documents keep their order
    meta = [name for name in of_data.column_names if name.startswith("meta_")]
    if layout == "lists":
        columns = {"gid": table["gid"], "query_id": of_data["query_id"]}
        per_document = {"item_ids": item_ids_N, SCORES: scores_N, "ranks": ranks_N}
        columns |= {
            name: pa.ListArray.from_arrays(pa.array(offsets_Q1.astype(np.int32)), pa.array(values_N))
            for name, values_N in per_document.items()
        }
        return pa.table(columns | {name: of_data[name] for name in meta})
    group_N = np.repeat(np.arange(len(table)), lengths_Q)
    order_N, group_N = np.lexsort((ranks_N, group_N)), pa.array(group_N)
    columns = {"query_id": of_data["query_id"].take(group_N), "item_id": item_ids_N.take(pa.array(order_N))}
    columns |= {"score": pa.array(scores_N[order_N]), "rank": pa.array(ranks_N[order_N])}
    return pa.table(columns | {name: of_data[name].take(group_N) for name in meta}).combine_chunks()


def _item_ids(of_data: pa.Table, lengths_Q: Ints) -> pa.StringArray:
    """The id of each document; null where there is none."""
    if "doc_ids" not in of_data.column_names:
        return pa.nulls(int(lengths_Q.sum()), pa.string())
    lists = of_data["doc_ids"].combine_chunks()
    if not is_per_document(lists, lengths_Q):
        raise WrongIdsError("doc_ids has not one id for each document of a query group")
    return spread_over_documents(lists, lengths_Q)
