"""Token columns of a data set: their names in the files, their entries in the manifest, and their Arrow forms.

A token field is a list of tokens for each query (`query_tokens_NAME`, one list per row) or for each document. The lists
of a group's documents are concatenated in `document_tokens_NAME`, and `document_lengths_NAME` has their lengths. This
one level of lists can be cut by numpy without a loop. Ids count from 0 in the vocabulary of the data set, which all
fields share.

Shapes: N rows with a list of tokens each (queries or documents), Q groups, T tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, Field

from ltrscale import storage
from ltrscale.arrays import Ints, offsets
from ltrscale.config import Strict

Owner = Literal["query", "document"]
Special = Literal["pad", "unk", "cls", "sep", "mask"]
SPECIAL: tuple[Special, ...] = ("pad", "unk", "cls", "sep", "mask")
"""The special tokens that every vocabulary has: padding, unknown, start, separator, mask."""
NAME = r"^[A-Za-z][A-Za-z0-9_]{0,63}$"
LISTS = pa.list_(pa.int32())
"""The type of all token columns."""


class TokenField(Strict):
    """Token lists of queries or documents."""

    name: str = Field(pattern=NAME)
    of: Owner
    max_tokens: int = Field(ge=1)
    """The most tokens of a list; longer texts were cut."""

    @property
    def column(self) -> str:
        """The column with the ids of the tokens."""
        return f"{self.of}_tokens_{self.name}"

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of the field."""
        return (self.column,) if self.of == "query" else (self.column, lengths_of(self.column))


class TokenSummary(Strict):
    """Counts of a token field: its lists, and what `max_tokens` cut off."""

    lists: int = 0
    empty: int = 0
    tokens: int = 0
    longest: int = 0
    cut_lists: int = 0
    cut_tokens: int = 0

    def __add__(self, other: "TokenSummary") -> "TokenSummary":
        sums = {name: value + getattr(other, name) for name, value in self}
        return TokenSummary(**sums | {"longest": max(self.longest, other.longest)})


class Vocabulary(Strict):
    """The vocabulary of all token fields: the number of ids, the special ids, and the file with the tokenizer."""

    size: int = Field(ge=1)
    """Ids are below it, special ones included."""
    special: dict[Special, int]
    path: Annotated[str, AfterValidator(storage.listed_path)] | None = None
    """A file of the data set directory, a tokenizer of the library `tokenizers`; none where only ids are known."""
    bytes: int = 0
    sha256: str = ""

    def same_as(self, other: Self | None) -> bool:
        """True if both give the same id to every token."""
        return other is not None and self.identity() == other.identity()

    def identity(self) -> list[Any]:
        """Everything but the place of the file."""
        return [self.size, sorted(self.special.items()), self.sha256]


def lengths_of(column: str) -> str:
    """The column with the number of tokens of each document that belongs to a column of tokens of documents."""
    return column.replace("_tokens_", "_lengths_", 1)


def is_of_documents(column: str) -> bool:
    """True if a column has the tokens of documents."""
    return column.startswith("document_tokens_")


def to_columns(name: str, tokens_N: pa.ListArray, offsets_Q1: Ints) -> dict[str, pa.ListArray]:
    """The two columns of a document field, from one list per document; no list is null.

    Example:
        >>> columns = to_columns("document_tokens_t", pa.array([[5], [], [6, 7]], LISTS), np.array([0, 2, 3]))
        >>> [column.to_pylist() for column in columns.values()]
        [[[5], [6, 7]], [[1, 0], [2]]]
    """
    lengths_N = pc.list_value_length(tokens_N).to_numpy().astype(np.int32)
    bounds_N1 = offsets(lengths_N)
    return {
        name: pa.ListArray.from_arrays(pa.array(bounds_N1[offsets_Q1].astype(np.int32)), tokens_N.flatten()),
        lengths_of(name): pa.ListArray.from_arrays(pa.array(offsets_Q1.astype(np.int32)), pa.array(lengths_N)),
    }


def from_columns(tokens_Q: pa.ListArray, lengths_Q: pa.ListArray) -> pa.ListArray:
    """One list per document from the two columns of a field: the inverse of `to_columns`.

    Raises:
        ValueError: the lengths do not match the tokens.
    """
    lengths_N = lengths_Q.flatten().to_numpy()
    bounds_N1 = offsets(lengths_N)
    ends_Q1 = bounds_N1[offsets(pc.list_value_length(lengths_Q).fill_null(0).to_numpy())]
    if (lengths_N < 0).any() or not np.array_equal(
        np.diff(ends_Q1), pc.list_value_length(tokens_Q).fill_null(0).to_numpy()
    ):
        raise ValueError("the lengths of the documents' tokens do not add up to the tokens")
    return pa.ListArray.from_arrays(pa.array(bounds_N1.astype(np.int32)), tokens_Q.flatten())


def token_bytes(table: pa.Table) -> Ints:
    """Bytes of each group's tokens in a table of a data set's columns, shape [Q]."""
    bytes_Q = np.zeros(len(table), np.int64)
    for name in table.schema.names:
        if name.startswith(("query_tokens_", "document_tokens_", "document_lengths_")):
            bytes_Q += 4 * pc.list_value_length(table.column(name)).to_numpy()
    return bytes_Q


def summarise(table: pa.Table) -> dict[str, TokenSummary]:
    """Counts of a table's token fields, by column; the table does not say what was cut off."""
    summaries = {}
    for column in (name for name in table.schema.names if name.startswith(("query_tokens_", "document_tokens_"))):
        lengths = pc.list_value_length(table.column(column))
        if is_of_documents(column):
            lengths = pc.list_flatten(table.column(lengths_of(column)))
        lengths_N = lengths.to_numpy()
        summaries[column] = TokenSummary(
            lists=len(lengths_N),
            empty=int((lengths_N == 0).sum()),
            tokens=int(lengths_N.sum()),
            longest=int(lengths_N.max(initial=0)),
        )
    return summaries


def put_vocabulary(vocabulary: Vocabulary, content: bytes, commit: storage.Commit) -> Vocabulary:
    """Write a tokenizer in JSON as the vocabulary's file; returns the vocabulary that names it."""
    commit.write({"tokenizer-{hash}.json": content})
    return vocabulary.replace(**vars(commit.files[-1]))


def summed(parts: Iterable[Mapping[str, TokenSummary]]) -> dict[str, TokenSummary]:
    """The counts of all parts together, by column."""
    sums: dict[str, TokenSummary] = {}
    for part in parts:
        for column, summary in part.items():
            sums[column] = sums.get(column, TokenSummary()) + summary
    return sums
