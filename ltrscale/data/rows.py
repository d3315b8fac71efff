"""RowBlock: what every reader of raw input yields, and Rejection: what it says of rows it cannot use.

Shapes: N rows (documents) of a block, F features.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Rule = Literal[
    "unparsable",
    "feature_count",
    "infinite",
    "bad_label",
    "empty_group",
    "duplicate_document",
    "returning_query",
    "group_too_long",
]
"""Why a row or group was rejected; docs/data.md explains each."""


@dataclass(frozen=True)
class Rejection:
    """One rejected row, or a run of rows of one group rejected together.

    `line` is the 1-based line (text) or row (Parquet) of the first of `rows` input rows; an empty group has 0 rows.
    `text` is the offending text, cut at 1,000 characters. `query_id` is "" where it could not be read.
    """

    file: str
    line: int
    rule: Rule
    text: str
    query_id: str = ""
    rows: int = 1


@dataclass
class RowBlock:
    """Consecutive rows of one input file, parsed; the rows of a query may go on in the next block.

    Rows that could not be parsed are in `rejected` and nowhere else. `lines_N` are input positions (1-based, rising).
    Labels are NaN where a row has none. `periods_N` is None where the file has one period, `period`.
    `starts_N` is True where a reader knows that a new group starts (a file of group sizes, a group a row); None means
    that a group starts where the query id changes.
    """

    file: str
    lines_N: NDArray[np.int64]
    query_ids_N: pa.StringArray
    features_NF: NDArray[np.float32]
    labels_N: NDArray[np.float32]
    period: str = ""
    periods_N: pa.StringArray | None = None
    doc_ids_N: pa.StringArray | None = None
    starts_N: NDArray[np.bool_] | None = None
    columns: dict[str, pa.Array] = field(default_factory=dict)
    """Carried along: `positions`, `clicks`, `weights` of each document; `meta_*` of a group's first row."""
    rejected: list[Rejection] = field(default_factory=list)
    hash_collisions: int = 0

    def __len__(self) -> int:
        return len(self.lines_N)


class BlockReader(Protocol):
    """Reads one input file block by block; memory does not grow with the file."""

    def __call__(self, url: str) -> Iterator[RowBlock]:
        """Yield the file's rows in order.

        Raises:
            InputError: the file is missing, its container cannot be decoded (the offset is named), or its schema does
                not fit the config.
        """
        ...
