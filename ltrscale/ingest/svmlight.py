"""Rows of LETOR / svmlight text: `label qid:ID 1:value 2:value ... # docid = X`, one document per line.

- `qid` is any word of UTF-8; rows have none if the file comes with a file of group sizes.
- Indices are decimal, of at most 18 digits, from 1, rising. Dense rows have exactly 1 to F; in sparse rows omitted
  features are 0.
- Values and labels are decimal numbers or inf. Nothing (`3:`), NULL and NaN, in upper or lower case, are missing: NaN.
  A number too large for float32 is infinite, too.
- A comment goes from `#` to the end of the line; one that begins with `docid = X` names the document.
- Words are separated by blanks, tabs or carriage returns. A line without words, or with a comment only, is not a row.

Rows of the common shape are parsed together: one pass finds the separators, and Arrow casts all indices and all values
in place. Any other row takes the slow path (`_parse_row`), which finds its values or the rule that it breaks. Both
accept the same rows and return the same numbers.

Shapes: L lines of a text, R rows among them, S separators, V values, N rows of a block, F features.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.arrays import Bools, Floats, Ints
from ltrscale.ingest.lines import LineTexts, shown_line
from ltrscale.ingest.rows import Rejection, RowBlock, Rule

_SEPARATES = bytes(byte in b" \t\r\v\f\n:" for byte in range(256))  # as `bytes.split`, which the slow path uses
_NEWLINE, _COLON, _ZERO = b"\n:0"
_MISSING = (b"", b"null", b"nan")
_INDEX = re.compile(rb"[0-9]{1,18}")
_DOC_ID = re.compile(rb"\s*docid\s*=\s*(\S+)")


@dataclass(frozen=True)
class RowFormat:
    """The format that the rows of a file must have."""

    n_features: int
    dense: bool
    qid: bool


class _Row(NamedTuple):
    """One parsed row."""

    query_id: str
    label: np.float32
    features_F: Floats


class _Rows(NamedTuple):
    """Parsed rows; `at_R` are their lines, counted from 0."""

    at_R: Ints
    ids: list[str]
    labels_R: Floats
    features_RF: Floats


class _Words(NamedTuple):
    """Words of a text, by the index of their first byte and of the byte after their last."""

    starts: Ints
    ends: Ints


class _Layout(NamedTuple):
    """The places of the words in rows of the common shape, and the lines that are not rows."""

    blank_L: Bools
    at_R: Ints
    counts_R: Ints
    labels_R: _Words
    ids_R: _Words
    indices_V: _Words
    values_V: _Words


def parse_lines(text: bytes, file: str, first_line: int, row_format: RowFormat) -> RowBlock:
    """Parse whole lines, each with a newline at its end; `first_line` is the number of the first one.

    Rows that break a rule are in `rejected`. Without qid the query ids are empty.
    """
    comments: list[bytes] | None = None
    bare = text
    if b"#" in text:
        parts = [line.partition(b"#") for line in text.split(b"\n")]
        bare, comments = b"\n".join([part[0] for part in parts]), [part[2] for part in parts]
    layout = _find_layout(bare, row_format)
    try:
        rows = _convert(bare, layout, row_format)
    except pa.ArrowInvalid:  # some word is no number: all rows take the slow path, which finds it
        rows = _stack([], row_format)
    left_L = ~layout.blank_L
    left_L[rows.at_R] = False
    rejected: list[Rejection] = []
    if left_L.any():
        slow = []
        lines = text.split(b"\n")
        for index in np.flatnonzero(left_L).tolist():
            words = lines[index].partition(b"#")[0].split()
            row = _parse_row(words, row_format)
            if isinstance(row, _Row):
                slow.append((index, row))
            else:
                query_id = _query_id(words) if row_format.qid else ""
                rejected.append(Rejection(file, first_line + index, row, shown_line(lines[index]), query_id))
        rows = _merge(rows, _stack(slow, row_format))
    return RowBlock(
        file=file,
        lines_N=rows.at_R + first_line,
        query_ids_N=pa.array(rows.ids, pa.string()),
        features_NF=rows.features_RF,
        labels_N=rows.labels_R,
        doc_ids_N=None if comments is None else _doc_ids([comments[index] for index in rows.at_R.tolist()]),
        rejected=rejected,
        texts=LineTexts(text, first_line),
    )


def count_features(line: bytes, *, qid: bool) -> int:
    """The number of features of a line that is a good dense row; 0 for any other line."""
    words = line.partition(b"#")[0].split()
    n_features = max(0, len(words) - 1 - qid)
    row = _parse_row(words, RowFormat(n_features=n_features, dense=True, qid=qid)) if n_features else None
    return n_features if isinstance(row, _Row) else 0


def _doc_ids(comments: Sequence[bytes]) -> pa.StringArray | None:
    matches = [_DOC_ID.match(comment) for comment in comments]
    if not any(matches):
        return None
    return pa.array([match and match[1].decode(errors="backslashreplace") for match in matches], pa.string())


def _stack(rows: Sequence[tuple[int, _Row]], row_format: RowFormat) -> _Rows:
    features_RF = np.empty((len(rows), row_format.n_features), np.float32)
    for r, (_, row) in enumerate(rows):
        features_RF[r] = row.features_F
    return _Rows(
        np.array([index for index, _ in rows], np.int64),
        [row.query_id for _, row in rows],
        np.array([row.label for _, row in rows], np.float32),
        features_RF,
    )


def _merge(first: _Rows, second: _Rows) -> _Rows:
    """All rows in the order of their lines."""
    at_R = np.concatenate([first.at_R, second.at_R])
    order = np.argsort(at_R)
    ids = [*first.ids, *second.ids]
    return _Rows(
        at_R[order],
        [ids[r] for r in order.tolist()],
        np.concatenate([first.labels_R, second.labels_R])[order],
        np.concatenate([first.features_RF, second.features_RF])[order],
    )


class _Scan:
    """The separators of a text, each of which ends a word (maybe an empty one), and its lines."""

    def __init__(self, text: bytes) -> None:
        self.bytes = np.frombuffer(text, np.uint8)
        self.ends_S = np.flatnonzero(np.frombuffer(text.translate(_SEPARATES), np.bool_))
        self.starts_S = np.concatenate([[0], self.ends_S[:-1] + 1])
        kinds_S = self.bytes[self.ends_S]
        colon_S = kinds_S == _COLON
        self.colons = np.flatnonzero(colon_S)
        self.newlines_L = np.flatnonzero(kinds_S == _NEWLINE)
        stops_L = np.searchsorted(self.colons, self.newlines_L)
        self.colons_before_L = np.concatenate([[0], stops_L[:-1]])
        self.colons_L = stops_L - self.colons_before_L
        """Number of colons in each line."""
        self.first_colon_L = np.append(self.colons, len(self.ends_S))[self.colons_before_L]
        """The separator that is the line's first colon, or a later line's if it has none."""

        bare_S = (self.ends_S > self.starts_S) & ~colon_S
        bare_S[1:] &= ~colon_S[:-1]
        bare = np.flatnonzero(bare_S)
        line_of_bare = np.searchsorted(self.newlines_L, bare)
        self.bare_L = np.bincount(line_of_bare, minlength=len(self.newlines_L))
        """Number of words without a colon in each line."""
        self.label_L = np.zeros(len(self.newlines_L), np.int64)
        """The separator after the line's last such word, which is the label of a good row."""
        self.label_L[line_of_bare] = bare
        self.ascii = text.isascii()

    def words(self, separators: Ints) -> _Words:
        """The words that these separators end."""
        return _Words(self.starts_S[separators], self.ends_S[separators])


def _usual_lines(scan: _Scan, row_format: RowFormat) -> Bools:
    """The lines that have the separators of `label (qid:ID) (index:value)*`, without indices that begin with 0."""
    n_words = row_format.n_features + row_format.qid
    usual_L: Bools = scan.colons_L == n_words if row_format.dense else scan.colons_L >= row_format.qid
    usual_L &= (scan.bare_L == 1) & (scan.label_L < scan.first_colon_L)
    starts, ends = scan.words(scan.colons)
    odd = (starts == ends) | (scan.bytes[starts] == _ZERO)
    odd[1:] |= np.diff(scan.colons) == 1
    usual_L[np.searchsorted(scan.newlines_L, scan.colons[odd])] = False
    if not scan.ascii:
        usual_L[np.searchsorted(scan.ends_S[scan.newlines_L], np.flatnonzero(scan.bytes >= 128))] = False
    if row_format.qid:
        first = scan.first_colon_L[usual_L]
        starts, ends = scan.words(first)
        is_qid = (ends - starts == 3) & (np.diff(scan.words(first + 1), axis=0)[0] > 0)
        for i, byte in enumerate(b"qid"):
            is_qid &= scan.bytes[starts + i] == byte
        usual_L[usual_L] = is_qid
    return usual_L


def _find_layout(text: bytes, row_format: RowFormat) -> _Layout:
    scan = _Scan(text)
    usual_L = _usual_lines(scan, row_format)
    kept = np.repeat(usual_L, scan.colons_L)
    if row_format.qid:
        kept[scan.colons_before_L[usual_L]] = False
    colons = scan.colons[kept]
    qids_R = scan.first_colon_L[usual_L] + 1 if row_format.qid else np.empty(0, np.int64)
    return _Layout(
        blank_L=(scan.bare_L == 0) & (scan.colons_L == 0),
        at_R=np.flatnonzero(usual_L),
        counts_R=scan.colons_L[usual_L] - row_format.qid,
        labels_R=scan.words(scan.label_L[usual_L]),
        ids_R=scan.words(qids_R),
        indices_V=scan.words(colons),
        values_V=scan.words(colons + 1),
    )


def _convert(text: bytes, layout: _Layout, row_format: RowFormat) -> _Rows:
    """Cast the words of the rows of common shape; rows that need the slow path are left out.

    Raises:
        pa.ArrowInvalid: a word is no number.
    """
    n_rows, n_features = len(layout.at_R), row_format.n_features
    values_V, odd_V = _cast_numbers(text, layout.values_V)
    labels_R, odd_R = _cast_numbers(text, layout.labels_R)
    ends_R = np.cumsum(layout.counts_R)
    good_R = ~odd_R
    good_R[np.searchsorted(ends_R, np.flatnonzero(odd_V), side="right")] = False
    if row_format.dense:
        good_R &= _rising(text, layout.indices_V, n_features)
        features_RF = values_V.reshape(n_rows, n_features)
    else:
        indices_V = _cast(text, layout.indices_V, pa.int32())
        falls_V = np.diff(indices_V, prepend=0) <= 0
        starts_R = (ends_R - layout.counts_R)[layout.counts_R > 0]
        falls_V[starts_R] = indices_V[starts_R] <= 0
        bad_values = np.flatnonzero(falls_V | (indices_V > n_features))
        good_R[np.searchsorted(ends_R, bad_values, side="right")] = False
        row_V = np.repeat(np.arange(n_rows), layout.counts_R)
        sound_V = np.repeat(good_R, layout.counts_R)
        features_RF = np.zeros((n_rows, n_features), np.float32)
        features_RF[row_V[sound_V], indices_V[sound_V] - 1] = values_V[sound_V]
    ids = [""] * n_rows
    if row_format.qid:
        starts, ends = layout.ids_R
        ids = [text[start:end].decode() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    if good_R.all():
        return _Rows(layout.at_R, ids, labels_R, features_RF)
    good_rows = np.flatnonzero(good_R)
    return _Rows(
        layout.at_R[good_rows], [ids[r] for r in good_rows.tolist()], labels_R[good_rows], features_RF[good_rows]
    )


def _rising(text: bytes, indices_V: _Words, n_features: int) -> Bools:
    """Which rows have the indices 1 to F, by comparing digits, which takes half the time of a cast."""
    bytes_ = np.frombuffer(text, np.uint8)
    starts_RF, ends_RF = (words.reshape(-1, n_features) for words in indices_V)
    index_F = np.arange(1, n_features + 1)
    good_R: Bools = (ends_RF - starts_RF == np.char.str_len(index_F.astype(str))).all(axis=1)
    power = 1
    while power <= n_features:  # compare the digit of this power in all indices that have one
        digits = (ord("0") + index_F[power - 1 :] // power % 10).astype(np.uint8)
        good_R &= (bytes_[ends_RF[:, power - 1 :] - len(str(power))] == digits).all(axis=1)
        power *= 10
    return good_R


def _cast_numbers(text: bytes, words: _Words) -> tuple[Floats, Bools]:
    """The numbers, NaN where missing, and which words the slow path must parse (nan and inf have many spellings)."""
    bytes_ = np.frombuffer(text, np.uint8)
    starts, ends = words
    suspects = np.flatnonzero((starts == ends) | (bytes_[starts] | 32 == ord("n")))
    lengths = (ends - starts)[suspects]
    letters = bytes_.take(starts[suspects, None] + np.arange(4), mode="clip") | 32
    missing = np.zeros(len(suspects), dtype=bool)
    for word in _MISSING:
        same = letters[:, : len(word)] == np.frombuffer(word, np.uint8)
        missing |= (lengths == len(word)) & same.all(axis=1)
    absent = suspects[missing]
    numbers = _cast(text, words, pa.float32(), absent)
    odd = ~np.isfinite(numbers)
    odd[absent] = False  # the cast leaves an undefined value for a null
    numbers[absent] = np.nan
    return numbers, odd


def _cast(text: bytes, words: _Words, kind: pa.DataType, absent: Ints | None = None) -> NDArray[Any]:
    """Cast words in place: as an array of strings in which every second one, the text between two words, is null."""
    n = len(words.starts)
    offsets = np.empty(2 * n + 1, np.int32)
    offsets[:-1:2], offsets[1::2] = words
    offsets[-1] = len(text)
    bitmap = np.full((2 * n + 7) // 8, 0b01010101, np.uint8)  # Arrow's validity bits, the lowest first: words only
    if absent is not None and len(absent):
        np.bitwise_and.at(bitmap, absent // 4, ~(np.uint8(1) << (absent % 4 * 2).astype(np.uint8)))
    strings = pa.StringArray.from_buffers(2 * n, pa.py_buffer(offsets), pa.py_buffer(text), pa.py_buffer(bitmap))
    cast = pc.cast(strings, kind)
    return np.frombuffer(cast.buffers()[1], kind.to_pandas_dtype())[: 2 * n : 2].copy()


def _query_id(words: Sequence[bytes]) -> str:
    """The query id of a row, or "" if it has none or one that cannot be read."""
    if len(words) < 2 or not words[1].startswith(b"qid:"):
        return ""
    try:
        return words[1].removeprefix(b"qid:").decode()
    except UnicodeDecodeError:
        return ""


def _parse_row(words: Sequence[bytes], row_format: RowFormat) -> _Row | Rule:
    """A row, or the rule that it breaks."""
    query_id = _query_id(words) if row_format.qid else ""
    if row_format.qid and not query_id:
        return "unparsable"
    pairs = [word.partition(b":") for word in words[1 + row_format.qid :]]
    if not all(colon and _INDEX.fullmatch(index) for index, colon, _ in pairs):
        return "unparsable"
    indices = [int(index) for index, _, _ in pairs]
    numbers = _parse_numbers([words[0], *(value for _, _, value in pairs)])
    if numbers is None or any(one >= next_ for one, next_ in pairwise([0, *indices])):
        return "unparsable"
    n_features = row_format.n_features
    if max(indices, default=0) > n_features or (row_format.dense and len(indices) < n_features):
        return "feature_count"
    features_F = np.zeros(n_features, np.float32)
    features_F[np.array(indices, np.int64) - 1] = numbers[1:]
    return _Row(query_id, numbers[0], features_F)


def _parse_numbers(words: Sequence[bytes]) -> Floats | None:
    """The numbers, NaN where missing; None if a word is neither a number nor missing."""
    present = [None if word.lower() in _MISSING else word for word in words]
    try:
        cast = pa.array(present, pa.binary()).cast(pa.string()).cast(pa.float32())
    except pa.ArrowInvalid:
        return None
    numbers: Floats = cast.to_numpy(zero_copy_only=False)
    return numbers if np.isnan(numbers).sum() == cast.null_count else None  # -nan and nan(x) are no numbers
