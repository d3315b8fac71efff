"""Score files: a bundle's scores for the documents of a data set, committed period by period.

    period=P/NAME-HASH.parquet   for a data file NAME.parquet, with its rows and row groups:
                                 gid int64, scores list<double>, one value per document, never null
    period=P/manifest.json       written last: the files, their data files, counts, origin

Query ids, document ids and features are in the data set only.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.config import Config, validate
from ltrscale.data.dataset.manifest import Counts, DataFile, Dataset, ListedPath, Period
from ltrscale.errors import InputError

SCORES = "scores"
"""The column with the scores."""
REMEDY = "score the period again with jobs.score"
_FORMAT: Final = "ltrscale-scores"
_SCHEMA = pa.schema([("gid", pa.int64()), (SCORES, pa.list_(pa.float64()))])


class ScoreFile(Config):
    """The scores of one data file."""

    path: ListedPath
    """Name in the directory of the period."""
    bytes: int
    sha256: str
    data: ListedPath
    """Path of the data file in its data set at the time of scoring."""
    data_sha256: str
    """Content hash of the data file that was scored."""


class PeriodScores(Config):
    """`manifest.json` of a scored period."""

    format: Literal["ltrscale-scores"] = _FORMAT
    version: Literal[1] = 1
    period: Period
    files: tuple[ScoreFile, ...]
    """One for each data file of the period, in the order of the data set's manifest."""
    groups: int
    documents: int
    bundle_hash: str
    """Content hash of the bundle that scored."""
    made_by: dict[str, Any]
    """The places of bundle and data set, for people to read."""

    def is_of(self, files: Sequence[DataFile]) -> bool:
        """Whether these data files were scored, in this order, whatever their names."""
        return [file.data_sha256 for file in self.files] == [file.sha256 for file in files]


class Scored(NamedTuple):
    """Scores of some query groups, one after the other: ids [Q], offsets [Q + 1], scores [N]."""

    gids_Q: NDArray[np.int64]
    offsets_Q1: NDArray[np.int64]
    scores_N: NDArray[np.float64]


class Found(NamedTuple):
    """The committed scores of a data file: their URL and content hash."""

    url: str
    sha256: str


def period_url(url: str, period: str) -> str:
    """The directory of a period below a directory of scores."""
    return storage.join(url, f"period={period}")


def file_name(file: DataFile) -> str:
    """The name of a data file's scores for `Commit.file`.

    It contains the hash of the scores, so that new scores do not overwrite committed ones.

    Example:
        >>> file_name(DataFile(path="period=a/part-0.parquet", period="a", bytes=0, sha256="", row_groups=()))
        'part-0-{hash}.parquet'
    """
    return f"{PurePosixPath(file.path).stem}-{{hash}}.parquet"


def read_period(url: str, period: str) -> PeriodScores | None:
    """The manifest of a scored period below a directory of scores, or None if none is committed.

    Raises:
        InputError: something else is committed there, or scores in a version that this package does not read.
    """
    directory = period_url(url, period)
    values = storage.read_manifest(directory)
    if values is None:
        return None
    where = storage.join(directory, storage.MANIFEST)
    if values.get("format") != _FORMAT:
        raise InputError(f"{where}: not scores but {values.get('format', 'something else')!r}; check the path")
    return validate(PeriodScores, values, where)


def find_scores(url: str, dataset: Dataset, periods: Iterable[str]) -> dict[str, Found]:
    """The score files of some periods of a data set, by the path of the data file.

    Raises:
        InputError: a period is not scored there, was scored from other files than the data set has now, or the
            periods were scored by several bundles.
    """
    found: dict[str, Found] = {}
    first: PeriodScores | None = None
    for period in periods:
        scores = read_period(url, period)
        if scores is None:
            raise InputError(f"{url}: period {period!r} is not scored there; score {dataset.url} with jobs.score")
        files = [file for file in dataset.manifest.files if file.period == period]
        if not scores.is_of(files):
            raise InputError(
                f"{url}: period {period!r} was scored from other files than {dataset.url} has now; "
                "score it again with jobs.score"
            )
        first = first or scores
        if scores.bundle_hash != first.bundle_hash:
            both = f"periods {first.period!r} and {period!r} were scored by different bundles"
            raise InputError(f"{url}: {both}; score them again with one by jobs.score")
        directory = period_url(url, period)
        for file, of_file in zip(files, scores.files, strict=True):
            found[file.path] = Found(storage.listed_file(directory, of_file.path), of_file.sha256)
    return found


def write_file(path: Path, row_groups: Sequence[Counts], batches: Iterable[Scored]) -> Counts:
    """Write the scores of a data file in its row groups; its groups arrive in file order, in batches of any size.

    Memory holds the scores of one batch and one row group.

    Returns:
        The groups and documents written, all counted as labelled, to compare with the manifest.
    """
    waiting: list[pa.Table] = []
    groups = documents = 0
    rest = [counts.groups for counts in row_groups][::-1]
    with pq.ParquetWriter(
        path, _SCHEMA, compression="zstd", use_dictionary=False, write_statistics=["gid"], write_page_checksum=True
    ) as writer:
        for batch in batches:
            assert len(batch.scores_N) == batch.offsets_Q1[-1]
            groups, documents = groups + len(batch.gids_Q), documents + len(batch.scores_N)
            waiting.append(_table(batch))
            while rest and sum(map(len, waiting)) >= rest[-1]:
                table, n = pa.concat_tables(waiting), rest.pop()
                # one chunk: the ends of batches must not show in the bytes of the file
                writer.write_table(table.slice(0, n).combine_chunks(), row_group_size=n)
                waiting = [table.slice(n)]
    return Counts(groups, documents, groups)


def _table(batch: Scored) -> pa.Table:
    lists = pa.ListArray.from_arrays(pa.array(batch.offsets_Q1.astype(np.int32)), pa.array(batch.scores_N))
    return pa.table([pa.array(batch.gids_Q), lists], schema=_SCHEMA)
