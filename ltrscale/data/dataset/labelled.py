"""The labelled groups of a split: a fold or its complement, their queries, and which are relevant.

A manifest only counts labelled groups; queries and labels are read from the files.

Shapes: Q labelled groups of a row group.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.arrays import Bools
from ltrscale.config import Config
from ltrscale.data.dataset.columns import LabelWeights, weighed
from ltrscale.data.dataset.row_groups import RowGroup, RowGroups
from ltrscale.draws import permutation
from ltrscale.errors import InputError


class OuterFold(Config):
    """One fold of some groups, or all others. Groups are dealt at random; fold sizes differ by at most one."""

    number: int = Field(ge=0)
    """Number of the fold, from 0."""
    of: int = Field(ge=2)
    """Number of folds."""
    held_out: bool = False
    """True serves the groups of the fold, False all others."""
    seed: int = 0
    """Seed by which groups are dealt to folds."""

    @model_validator(mode="after")
    def _is_there(self) -> Self:
        if self.number >= self.of:
            raise ValueError(f"there is no fold {self.number} of {self.of}; number them from 0 to {self.of - 1}")
        return self


class Fold(OuterFold):
    """One fold of the labelled groups, or all others. Groups are dealt at random; fold sizes differ by at most one."""

    within: OuterFold | None = None
    """Deal only the groups that this fold serves; empty for all labelled groups that are used."""


def fold_of(dealt: Fold | None, number: int, of: int, *, held_out: bool, seed: int) -> Fold:
    """A fold of the groups that a split serves, or its complement if not `held_out`; `dealt` is the split's own fold.

    Raises:
        InputError: the split serves a fold within a fold.
    """
    if dealt is not None and dealt.within is not None:
        raise InputError("train.fold.within: leave it out; the groups of train are dealt to folds once more")
    within = None if dealt is None else OuterFold(**dealt.model_dump(exclude={"within"}))
    return Fold(number=number, of=of, held_out=held_out, seed=seed, within=within)


def keep_fold(kept: Bools, fold: OuterFold, where: str) -> Bools:
    """Mask of the groups of a fold if it is `held_out`, else of the others; `kept` marks those that are dealt.

    Raises:
        InputError: there are fewer groups than folds.
    """
    if isinstance(fold, Fold) and fold.within is not None:
        kept = keep_fold(kept, fold.within, where)
    numbers = np.flatnonzero(kept)
    if len(numbers) < fold.of:
        raise InputError(f"{where}: {len(numbers)} labelled groups cannot fill {fold.of} folds; lower fold.of")
    is_in_fold = permutation(len(numbers), "fold", fold.seed) % fold.of == fold.number
    served = np.zeros_like(kept)
    served[numbers[is_in_fold == fold.held_out]] = True
    return served


T = TypeVar("T")

_THREADS = 8
_FILES_KNOWN = 4096
_COPY = re.compile(r"#\d+$")
"""The suffix that `jobs.relabel` adds to the query id of a copy."""


def relevant_in(row_groups: Sequence[RowGroup], weights: LabelWeights, *, differing: bool = False) -> list[Bools]:
    """Which labelled groups of each row group have a relevant document: a label above 0.

    With `differing` they must have a second label too: only such groups can teach or test an order. It reads only the
    labels, once per process and file.

    Raises:
        InputError: a file cannot be read, lacks the column, or has other groups than its manifest lists.
    """
    files = {file.url: file.sha256 for file in RowGroups.from_iterable(row_groups).own_files}
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda file: _in_file(*file, weights, differing), files.items())
        by_url = dict(zip(files, found, strict=True))
    relevant = []
    for row_group in row_groups:
        url, index, labelled = row_group.file.url, row_group.index, row_group.labelled
        n = len(by_url[url][index]) if index < len(by_url[url]) else 0
        if n != labelled:
            raise InputError(
                f"{url}: row group {index} has {n} labelled groups where the manifest lists {labelled}; "
                "prepare the data set again"
            )
        relevant.append(by_url[url][index])
    return relevant


def labelled_queries(url: str) -> list[list[str]]:
    """The query ids of the labelled groups of a data file by row group; copies have the id of their original.

    Raises:
        InputError: the file cannot be read.
    """

    def query_ids(file: pq.ParquetFile, number: int) -> list[str]:
        ids = _labelled(file, number, ["query_id"])["query_id"].to_pylist()
        return [_COPY.sub("", query) for query in ids]

    return [*each_row_group(url, query_ids, "query_id")]


@lru_cache(_FILES_KNOWN)
def _in_file(
    url: str,
    sha256: str,  # noqa: ARG001 - other content, another answer
    weights: LabelWeights,
    differing: bool,
) -> list[Bools]:
    def is_counted(file: pq.ParquetFile, number: int) -> Bools:
        columns = _labelled(file, number, [name for name, _ in weights])
        labels_N = weighed(weights, lambda name: columns[name].values.to_numpy(zero_copy_only=False))
        offsets_Q1 = columns[weights[0][0]].offsets.to_numpy()
        starts_Q, ends_Q = offsets_Q1[:-1], offsets_Q1[1:]
        relevant_Q = _any_between(labels_N > 0, starts_Q, ends_Q)
        if not differing:
            return relevant_Q
        # do not compare the first document of a list with the last one of the previous list
        return relevant_Q & _any_between(np.diff(labels_N) != 0, starts_Q, np.maximum(ends_Q - 1, starts_Q))

    return [*each_row_group(url, is_counted, ", ".join(name for name, _ in weights))]


def _any_between(flags_N: Bools, starts_Q: NDArray[np.int32], ends_Q: NDArray[np.int32]) -> Bools:
    """Whether a flag is set from each start up to its end, shape [Q]."""
    set_N1 = np.concatenate([[0], np.cumsum(flags_N)])
    last = len(flags_N)  # an empty list at the end starts past all flags
    return np.asarray(set_N1[np.minimum(ends_Q, last)] > set_N1[np.minimum(starts_Q, last)])


def each_row_group(url: str, function: Callable[[pq.ParquetFile, int], T], column: str) -> Iterator[T]:
    """The results of a function of a data file for the number of each of its row groups, lazily.

    Raises:
        InputError: the file cannot be read; names the `column`.
    """
    filesystem, path = storage.arrow_filesystem(url)
    # one request per row group, retried alone: a busy store may never answer all requests in a row
    pre_buffer = not storage.is_local(url)
    try:
        with storage.named_errors(url), storage.patiently(lambda: filesystem.open_input_file(path)) as source:
            file = storage.patiently(
                lambda: pq.ParquetFile(source, pre_buffer=pre_buffer, page_checksum_verification=True)
            )
            for number in range(file.num_row_groups):
                yield storage.patiently(partial(function, file, number))
    except (pa.ArrowException, UnicodeDecodeError, KeyError) as error:
        raise InputError(
            f"{url}: its column {column!r} cannot be read ({error}); prepare the data set again"
        ) from error


def _labelled(file: pq.ParquetFile, number: int, columns: Sequence[str]) -> dict[str, pa.Array]:
    """Columns of the labelled groups of a row group."""
    table = file.read_row_group(number, columns=sorted({"labels", *columns}), use_threads=False)
    labelled = table.filter(pc.is_valid(table["labels"]))
    return {name: labelled[name].combine_chunks() for name in columns}
