"""The columns of data files: features, labels by the name of a goal, and tokens.

For each group `features` has the values of its documents, one after the other, in float32. Files hold it as lists, or
as bytes, little-endian: one value of Parquet for each group, so that reading takes a fraction of the time. In memory it
is lists, which of bytes are a view.

A data set may have several labels, its goals, of which a job reads a weighted sum. The first goal is the column
`labels`, which says which groups have labels; each further one is a column `label_NAME`.

A token field is a list of tokens for each query (`query_tokens_NAME`, one list per row) or for each document. The lists
of a group's documents are concatenated in `document_tokens_NAME`, and `document_lengths_NAME` has their lengths. This
one level of lists can be cut by numpy without a loop. Ids count from 0 in the vocabulary of the data set, which all
fields share.

Shapes: N documents, or rows with a list of tokens each (queries or documents), Q groups, Q1 = Q + 1 bounds of their
values, F features, S of them stored, T tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, Field

from ltrscale import storage
from ltrscale.arrays import Floats, Ints, offsets
from ltrscale.config import Strict
from ltrscale.data.columns import Rows
from ltrscale.errors import InputError, suggestion

FEATURES = "features"
_LISTS = pa.list_(pa.field("element", pa.float32()))  # the name that elements have in lists from Parquet
_WIDTH = 4
GOAL = "label_"
"""What the columns of all goals but the first begin with."""
GoalName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$", max_length=64)]
GoalWeight = Annotated[float, Field(ge=0, le=1e6)]
LabelWeights = tuple[tuple[str, float], ...]
"""The columns whose weighted sum serves as labels, in the order of their names, with weights above 0."""
LABELS: LabelWeights = (("labels", 1.0),)
Owner = Literal["query", "document"]
Special = Literal["pad", "unk", "cls", "sep", "mask"]
SPECIAL: tuple[Special, ...] = ("pad", "unk", "cls", "sep", "mask")
"""The special tokens that every vocabulary has: padding, unknown, start, separator, mask."""
NAME = r"^[A-Za-z][A-Za-z0-9_]{0,63}$"
LISTS = pa.list_(pa.int32())
"""The type of all token columns."""


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold values as bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def with_lists(schema: pa.Schema, name: str = FEATURES) -> pa.Schema:
    """The schema that `as_lists` gives these columns."""
    place = schema.get_field_index(name)
    return schema.set(place, pa.field(name, _LISTS)) if place >= 0 and is_bytes(schema.types[place]) else schema


def as_lists(rows: Rows, name: str = FEATURES) -> Rows:
    """The rows with a column of bytes as lists that share their memory; other columns stay as they are.

    Raises:
        pa.ArrowInvalid: bytes are no whole number of values; names the row, from 0.

    Example:
        >>> as_lists(pa.table({"features": [np.float32([1.5, -0.0]).tobytes(), None, b""]}))["features"].to_pylist()
        [[1.5, -0.0], None, []]
    """
    place = rows.schema.get_field_index(name)
    if place < 0 or not is_bytes(rows.schema.types[place]):
        return rows
    column: pa.Array | pa.ChunkedArray = rows.column(place)
    if isinstance(column, pa.ChunkedArray):
        return rows.set_column(place, name, pa.chunked_array([*map(_lists, column.chunks)], _LISTS))
    return rows.set_column(place, name, _lists(column))


def _lists(column: pa.Array) -> pa.ListArray:
    if not len(column):
        return pa.array([], _LISTS)
    bits = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    _, bounds, content = column.buffers()
    bounds_Q1 = np.frombuffer(bounds, bits)[column.offset :][: len(column) + 1]
    cut_Q = np.diff(bounds_Q1) % _WIDTH > 0
    if cut_Q.any():
        row = int(cut_Q.argmax())
        size = bounds_Q1[row + 1] - bounds_Q1[row]
        raise pa.ArrowInvalid(f"row {row} has features of {size} bytes, which is no whole number of float32 values")
    first, last = int(bounds_Q1[0]), int(bounds_Q1[-1])
    content = pa.py_buffer(b"") if content is None else content.slice(first, last - first)
    values = pa.Array.from_buffers(pa.float32(), (last - first) // _WIDTH, [None, content])
    bounds = pa.array((bounds_Q1 - first) // _WIDTH, pa.int32())
    return pa.ListArray.from_arrays(bounds, values, _LISTS, mask=column.is_null() if column.null_count else None)


def laid_out(stored_NS: Floats, places_F: Ints | None) -> Floats:
    """The values of features by their places in a file, missing at -1; the stored values themselves if None."""
    if places_F is None:
        return stored_NS
    features_NF = stored_NS[:, places_F]
    features_NF[:, places_F < 0] = np.nan
    return features_NF


def as_bytes(table: pa.Table) -> pa.Table:
    """The rows with `features` as bytes that share the memory of the lists, of which none is null and none has a null.

    The bytes have 64-bit bounds, because those of a table may pass 2 GiB.
    """
    lists = table.column(FEATURES).combine_chunks()
    assert not lists.null_count
    assert not lists.values.null_count
    bounds_Q1 = (lists.offsets.to_numpy().astype(np.int64) + lists.values.offset) * _WIDTH
    content = lists.values.buffers()[1] or pa.py_buffer(b"")
    values = pa.Array.from_buffers(pa.large_binary(), len(lists), [None, pa.py_buffer(bounds_Q1), content])
    return table.set_column(table.schema.get_field_index(FEATURES), FEATURES, values)


def _some_weight(labels: str | dict[str, float]) -> str | dict[str, float]:
    if isinstance(labels, dict) and not any(labels.values()):
        raise ValueError("each weight is 0; give a goal a weight above 0")
    return labels


Labels = Annotated[GoalName | dict[GoalName, GoalWeight], AfterValidator(_some_weight)]
"""The labels that a job reads: `labels`, `relevance`, a goal, or a weighted sum of these."""


def goals_of(labels: str | Mapping[str, float]) -> dict[str, float]:
    """The goals that labels are the weighted sum of; none for `labels` and `relevance`, which have no name."""
    if isinstance(labels, str):
        return {} if labels in ("labels", "relevance") else {labels: 1.0}
    return dict(labels)


def goal_column(name: str, goals: Sequence[str]) -> str:
    """The column of a goal, or of `labels` and `relevance`, in a data set with these goals.

    Raises:
        InputError: the data set has no such goal; names the nearest.

    Example:
        >>> goal_column("click", ["click", "order"]), goal_column("order", ["click", "order"])
        ('labels', 'label_order')
    """
    if name in ("labels", "relevance") or name in goals[:1]:
        return "labels" if name in goals else name
    if name not in goals:
        known = suggestion(name, goals, "its goals are") if goals else "it has none; prepare it with columns.labels"
        raise InputError(f"labels: the data set has no goal {name!r}; {known}")
    return f"{GOAL}{name}"


def label_weights(labels: str | Mapping[str, float], goals: Sequence[str]) -> LabelWeights:
    """The columns of a split's labels, in a data set with these goals.

    Raises:
        InputError: as `goal_column`.

    Example:
        >>> label_weights({"order": 1.0, "click": 0.2, "cart": 0.0}, ["click", "cart", "order"])
        (('label_order', 1.0), ('labels', 0.2))
    """
    named = {labels: 1.0} if isinstance(labels, str) else labels
    return tuple(sorted((goal_column(name, goals), float(weight)) for name, weight in named.items() if weight))


def weighed(weights: LabelWeights, values: Callable[[str], Floats]) -> Floats:
    """The weighted sum of columns, whose values a function reads; a single column of weight 1 stays as it is.

    Example:
        >>> columns = {"labels": np.array([1, 0], np.float32), "label_order": np.array([1, 1], np.float32)}
        >>> weighed((("label_order", 1.0), ("labels", 0.5)), columns.__getitem__).tolist()
        [1.5, 1.0]
    """
    if len(weights) == 1 and weights[0][1] == 1.0:
        return values(weights[0][0])
    # in float64, so that 0.1 + 0.2 becomes the float32 nearest to 0.3
    total_N = sum(weight * values(name).astype(np.float64) for name, weight in weights)
    return np.asarray(total_N, np.float32)


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
