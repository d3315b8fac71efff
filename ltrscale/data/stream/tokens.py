"""Token lists of a window's queries and documents: views of Arrow's buffers until a micro-batch copies them.

Shapes: R rows (queries or documents), R1 = R + 1 offsets, M taken rows, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ltrscale.batch import Tokens
from ltrscale.data.dataset.tokens import LISTS, TokenField


@dataclass(frozen=True)
class TokenRows:
    """The token lists of some rows: row r has `ids_T[starts_R[r] : starts_R[r] + lengths_R[r]]`."""

    ids_T: NDArray[np.int32]
    starts_R: NDArray[np.int64]
    lengths_R: NDArray[np.int64]

    def take(self, rows_M: NDArray[np.int64]) -> "TokenRows":
        """These rows, in this order; no token is copied."""
        return TokenRows(self.ids_T, self.starts_R[rows_M], self.lengths_R[rows_M])

    def part(self, first: int, last: int) -> "TokenRows":
        """The rows `first` to `last`, exclusive."""
        return TokenRows(self.ids_T, self.starts_R[first:last], self.lengths_R[first:last])

    def copied(self) -> "TokenRows":
        """The same rows with only their own tokens in memory, end to end."""
        ends_R = np.cumsum(self.lengths_R)
        starts_R = ends_R - self.lengths_R
        index_T = np.repeat(self.starts_R - starts_R, self.lengths_R)
        index_T += np.arange(len(index_T))
        return TokenRows(self.ids_T[index_T], starts_R, self.lengths_R)

    @staticmethod
    def joined(parts: Sequence["TokenRows"]) -> "TokenRows":
        """The rows of all parts, one part after the other."""
        first = np.cumsum([0, *(len(part.ids_T) for part in parts[:-1])])
        return TokenRows(
            np.concatenate([part.ids_T for part in parts]),
            np.concatenate([part.starts_R + start for part, start in zip(parts, first.tolist(), strict=True)]),
            np.concatenate([part.lengths_R for part in parts]),
        )

    @staticmethod
    def to_batch(parts: Sequence["TokenRows"]) -> Tokens:
        """The rows of all parts as tensors: the only copy of a token that a stream makes."""
        whole = TokenRows.joined([part.copied() for part in parts]) if len(parts) > 1 else parts[0].copied()
        offsets_R1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(whole.lengths_R)])
        return Tokens(torch.from_numpy(whole.ids_T), torch.from_numpy(offsets_R1))


def decode(
    field: TokenField, columns: Sequence[pa.ListArray], rows_Q: NDArray[np.int64], lengths_Q: NDArray[np.int64]
) -> TokenRows:
    """The token lists of some groups, or of their documents, from the columns of a field.

    Args:
        field: of queries or of documents.
        columns: those that `field.columns` names, for all rows of some tables.
        rows_Q: the rows to decode, in order; a row may repeat.
        lengths_Q: documents of these rows' groups.

    Raises:
        ValueError: the columns are not those of a token field with such documents; says why.
    """
    if any(column.type != LISTS or column.null_count or column.values.null_count for column in columns):
        raise ValueError("it must have a list of int32 in every row")
    ids, starts_R1 = columns[0], columns[0].offsets.to_numpy().astype(np.int64)
    ids_T: NDArray[np.int32] = ids.values.to_numpy()
    groups = TokenRows(ids_T, starts_R1[:-1], np.diff(starts_R1)).take(rows_Q)
    if field.of == "query":
        return groups
    of_documents = columns[1].offsets.to_numpy().astype(np.int64)
    documents = TokenRows(columns[1].values.to_numpy(), of_documents[:-1], np.diff(of_documents)).take(rows_Q)
    if not np.array_equal(documents.lengths_R, lengths_Q):
        raise ValueError("it does not have one list of tokens for each document")
    lengths_N = documents.copied().ids_T.astype(np.int64)
    bounds_N1 = np.concatenate([[0], np.cumsum(lengths_N)])
    firsts_Q = bounds_N1[np.cumsum(lengths_Q) - lengths_Q]
    if (lengths_N < 0).any() or not np.array_equal(bounds_N1[np.cumsum(lengths_Q)] - firsts_Q, groups.lengths_R):
        raise ValueError("the lengths of its lists do not add up to the tokens of a group")
    starts_N = np.repeat(groups.starts_R - firsts_Q, lengths_Q) + bounds_N1[:-1]
    return TokenRows(ids_T, starts_N, lengths_N)


def check_ids(rows: TokenRows, size: int) -> None:
    """Check that all tokens are in a vocabulary of this size; of tokens that no row has it checks some, too.

    Raises:
        ValueError: one is not; names it.
    """
    if len(rows.ids_T) and (int(rows.ids_T.min()) < 0 or int(rows.ids_T.max()) >= size):
        bad = rows.ids_T[(rows.ids_T < 0) | (rows.ids_T >= size)][0]
        raise ValueError(f"token {bad} is not in the vocabulary of {size:,}")
