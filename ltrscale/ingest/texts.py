"""Columns of texts or token ids: the configs that name them, and their lists of ids with the rows that have none.

A column of lists has ids. A column of text has ids with spaces between them where the tokenizer says `ids`, and raw
text otherwise. Texts repeat in a log (a query has many rows, a document many queries), so each different text of a
block is tokenized once.

Shapes: N rows, T tokens, K different texts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, StringConstraints, model_validator

from ltrscale.config import Config
from ltrscale.data import columns as cols
from ltrscale.data.dataset.tokens import LISTS, NAME, Owner, TokenField
from ltrscale.ingest.vocabularies import Encoding, TokenizerConfig

FULL = "full_"
"""Begins the column of a `RowBlock` with the number of tokens that a text had before it was cut."""
_SHOWN = 40

FieldName = Annotated[str, StringConstraints(pattern=NAME)]


class TextColumn(Config):
    """A column with texts or ids, and what becomes of them."""

    column: str
    """The column."""
    max_tokens: int = Field(default=128, ge=1)
    """The most tokens that are kept, the first ones; the manifest counts what is cut."""
    missing: Literal["reject", "empty"] = "reject"
    """A row without a text (null or empty) is rejected, or kept with no tokens."""
    lengths: str | None = None
    """For `groups`, where `column` has the ids of all documents end to end: the column with the ids of each."""


class TokenColumns(Config):
    """The token fields of a log, and the tokenizer that they share."""

    tokenizer: TokenizerConfig
    """What makes ids of texts, or `ids` that are ready."""
    query: dict[FieldName, TextColumn] = Field(default_factory=dict)
    """Fields of the query, by name: the first row of a group has the text."""
    document: dict[FieldName, TextColumn] = Field(default_factory=dict)
    """Fields of documents, by name, such as title and body."""

    @model_validator(mode="after")
    def _some_field(self) -> Self:
        if not self.query and not self.document:
            raise ValueError("tokens: name at least one field under query or document")
        if lengths := [name for name, text in self.query.items() if text.lengths is not None]:
            raise ValueError(f"query.{lengths[0]}: lengths are those of documents; leave them out")
        return self

    def fields(self) -> dict[TokenField, TextColumn]:
        """The fields of the data set, with the columns that they are read from."""
        owners: dict[Owner, Mapping[str, TextColumn]] = {"query": self.query, "document": self.document}
        return {
            TokenField(name=name, of=of, max_tokens=text.max_tokens): text
            for of, named in owners.items()
            for name, text in named.items()
        }

    @property
    def columns(self) -> list[str]:
        """All columns that are read."""
        texts = self.fields().values()
        return [column for text in texts for column in (text.column, text.lengths) if column is not None]


@dataclass(frozen=True)
class TokenReader:
    """Turns columns into lists of ids; without an encoding it leaves texts as they are, to train a tokenizer."""

    columns: TokenColumns
    encoding: Encoding | None

    def read(self, field: TokenField, values: pa.Array, text: TextColumn) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """The columns of a `RowBlock` for one field, and the faults of the rows that cannot be used.

        Args:
            field: the field.
            values: a text or a list of ids in each row.
            text: the field's settings.
        """
        if self.encoding is None:
            is_text = cols.is_text(cols.value_type(values.type))
            return {field.column: cols.texts(values)[0] if is_text else pa.nulls(len(values), pa.string())}, {}
        ids = _of_lists(values) if cols.is_list(values.type) else self._of_texts(cols.texts(values)[0])
        faults = {i: f"{field.name} {fault}" for i, fault in ids.faults.items()}
        if text.missing == "reject":
            faults |= dict.fromkeys(np.flatnonzero(ids.missing_N).tolist(), f"{field.name} has no text")
        faults |= self._outside(field.name, ids)
        return _cut(field, ids), faults

    def _of_texts(self, texts: pa.StringArray) -> "_Ids":
        """The ids of texts, each different text once."""
        assert self.encoding is not None
        coded = texts.dictionary_encode()
        if not self.encoding.content:
            distinct = _of_numbers(coded.dictionary)
        else:
            ids_T, lengths_K = self.encoding(coded.dictionary.to_pylist())
            distinct = _Ids(ids_T, lengths_K, np.zeros(len(lengths_K), bool), {})
        missing_N = pc.or_kleene(texts.is_null(), pc.equal(texts, "")).to_numpy(zero_copy_only=False)
        place_N = coded.indices.fill_null(0).to_numpy().astype(np.int64)
        return distinct.take(place_N, missing_N)

    def _outside(self, name: str, ids: "_Ids") -> dict[int, str]:
        """The rows with an id that the vocabulary does not have."""
        assert self.encoding is not None
        size = self.columns.tokenizer.limit(self.encoding.vocabulary)
        bad_T = (ids.ids_T < 0) | (ids.ids_T >= size)
        if not bad_T.any():
            return {}
        row_T = np.repeat(np.arange(len(ids.lengths_N)), ids.lengths_N)
        rows, first = np.unique(row_T[bad_T], return_index=True)
        values = ids.ids_T[bad_T][first]
        return {
            i: f"{name}: token {value} is not in the vocabulary of {size:,}"
            for i, value in zip(rows.tolist(), values.tolist(), strict=True)
        }


@dataclass(frozen=True)
class _Ids:
    """The ids of some rows end to end, rows without a text, and the faults of rows that cannot be read."""

    ids_T: NDArray[np.int64]
    lengths_N: NDArray[np.int64]
    missing_N: NDArray[np.bool_]
    faults: dict[int, str]

    def take(self, place_N: NDArray[np.int64], missing_N: NDArray[np.bool_]) -> "_Ids":
        """One of these rows at each place; none where a text is missing."""
        if not len(self.lengths_N):
            return _Ids(self.ids_T, np.zeros(len(place_N), np.int64), missing_N, {})
        lengths_N = np.where(missing_N, 0, self.lengths_N[place_N])
        starts_N = (np.cumsum(self.lengths_N) - self.lengths_N)[place_N]
        bad = np.array(sorted(self.faults), np.int64)
        rows = np.flatnonzero(np.isin(place_N, bad) & ~missing_N).tolist()
        faults = {i: self.faults[int(place_N[i])] for i in rows}
        return _Ids(self.ids_T[_runs(starts_N, lengths_N)], lengths_N, missing_N, faults)


def _of_lists(values: pa.Array) -> _Ids:
    """Ids that are ready in lists."""
    flat, lengths_N = values.flatten(), pc.list_value_length(values).fill_null(0).to_numpy().astype(np.int64)
    missing_N = values.is_null().to_numpy(zero_copy_only=False)
    if not len(flat):
        return _Ids(np.empty(0, np.int64), np.zeros(len(values), np.int64), missing_N, {})
    numbers_T = cols.without_dictionary(flat).cast(pa.float64()).fill_null(np.nan).to_numpy()
    bad_T = numbers_T != np.floor(numbers_T)  # NaN too
    row_T = np.repeat(np.arange(len(values)), lengths_N)
    ids_T = np.where(bad_T, 0, numbers_T).astype(np.int64)
    faults = dict.fromkeys(np.unique(row_T[bad_T]).tolist(), "has a token that is no whole number")
    return _Ids(ids_T, lengths_N, missing_N, faults)


def _of_numbers(texts: pa.StringArray) -> _Ids:
    """Ids in texts, with white space between them."""
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts))
    lengths_N = pc.list_value_length(words).fill_null(0).to_numpy().astype(np.int64)
    flat = words.flatten()
    row_T = np.repeat(np.arange(len(texts)), lengths_N)
    empty_T = pc.equal(flat, "").to_numpy(zero_copy_only=False)  # the only part of an empty text
    good_T = pc.match_substring_regex(flat, r"^-?[0-9]{1,18}$").to_numpy(zero_copy_only=False)
    ids_T = pc.if_else(pa.array(good_T), flat, "0").cast(pa.int64()).to_numpy()[~empty_T]
    bad = np.flatnonzero(~good_T & ~empty_T)
    faults: dict[int, str] = {}
    for i in bad.tolist():
        faults.setdefault(int(row_T[i]), f"has {flat[i].as_py()[:_SHOWN]!r}, which is no token id")
    lengths_N = np.bincount(row_T[~empty_T], minlength=len(texts)).astype(np.int64)
    return _Ids(ids_T, lengths_N, np.zeros(len(texts), bool), faults)


def _cut(field: TokenField, ids: _Ids) -> dict[str, pa.Array]:
    """At most `max_tokens` of each row's ids, and how many there were."""
    kept_N = np.minimum(ids.lengths_N, field.max_tokens)
    starts_N = np.cumsum(ids.lengths_N) - ids.lengths_N
    ids_T = ids.ids_T[_runs(starts_N, kept_N)]
    inside_T = np.clip(ids_T, 0, np.iinfo(np.int32).max).astype(np.int32)  # rows with others are rejected
    bounds = np.concatenate([[0], np.cumsum(kept_N)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(bounds), pa.array(inside_T))
    return {field.column: lists.cast(LISTS), FULL + field.column: pa.array(ids.lengths_N)}


def _runs(starts_N: NDArray[np.int64], lengths_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indices of runs with these starts and lengths, one run after the other."""
    index_T: NDArray[np.int64] = np.repeat(starts_N - (np.cumsum(lengths_N) - lengths_N), lengths_N)
    index_T += np.arange(len(index_T))
    return index_T
