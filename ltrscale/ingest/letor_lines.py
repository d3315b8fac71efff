"""Parses lines of LETOR / svmlight text: rows `label qid:ID 1:value 2:value ... # docid = X`.

- A line is one document. `qid` is any word of UTF-8, usually the first after the label; rows have none if the file
  comes with a file of group sizes.
- Indices are decimal with at most 18 digits, from 1, or from 0 as scikit-learn writes them. A row has each at most
  once, in any order. Dense rows have exactly F of them; in sparse rows omitted features are 0.
- Values and labels are decimal numbers or inf. Nothing (`3:`), NULL and NaN, in upper or lower case, are missing: NaN.
  A number too large for float32 is infinite too.
- A comment goes from `#` to the end of the line; one that begins with `docid = X` names the document.
- Words are separated by blanks, tabs or carriage returns. A line without words, or with a comment only, is not a row.

Rows of the common shape are parsed together: one pass finds the separators, and Arrow casts all indices and values in
place. Any other row takes the slow path (`_parse_row`), which finds its values or the rule that it breaks. Both accept
the same rows and return the same numbers.

Shapes: F features, L lines of a text, S words that end in a space or colon, R rows of the common shape, V values, W any
words. Words `_S2` are the places of their first byte and of the byte after their last.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.arrays import Bools, Floats, Ints
from ltrscale.ingest.lines import Lines, shown_line
from ltrscale.ingest.rows import Rejection, RowBlock, Rule

_TAB, _NEWLINE, _RETURN, _BLANK, _ONE, _COLON = b"\t\n\r 1:"
_MISSING = (b"", b"null", b"nan")
_INDEX = re.compile(rb"[0-9]{1,18}")
_DOC_ID = re.compile(rb"\s*docid\s*=\s*(\S+)")


@dataclass(frozen=True)
class RowFormat:
    """The format that the rows of a file must have."""

    n_features: int
    dense: bool
    qid: bool
    first: int = 1
    """The index of the first feature."""


class _BadRowError(Exception):
    def __init__(self, found: str, rule: Rule = "unparsable") -> None:
        self.found, self.rule = found, rule


class _Row(NamedTuple):
    query_id: str
    label: np.float32
    features_F: Floats


_Words = NDArray[np.int32]
"""Starts and ends of words in a text, in the type of Arrow's offsets."""


class _Rows(NamedTuple):
    """Parsed rows; `at_R` are their lines, counted from 0."""

    at_R: Ints
    ids_R: pa.StringArray
    labels_R: Floats
    features_RF: Floats


def parse_lines(lines: Lines, file: str, row_format: RowFormat) -> RowBlock:
    """Parse whole lines. Rows that break a rule are in `rejected`. Without qid the query ids are empty."""
    comments: list[bytes] | None = None
    bare = lines.text
    if b"#" in bare:
        parts = [line.partition(b"#") for line in bare.split(b"\n")]
        bare, comments = b"\n".join([part[0] for part in parts]), [part[2] for part in parts]
    rows, left = _parse_usual(bare, row_format)
    slow: dict[int, _Row] = {}
    rejected: list[Rejection] = []
    for index in left:
        line = lines.bytes_of(index)
        words = line.partition(b"#")[0].split()
        try:
            slow[index] = _parse_row(words, row_format)
        except _BadRowError as bad:
            query_id, shown = _query_id(words) if row_format.qid else "", shown_line(line)
            found = f"{bad.found}: {shown[:40]!r}"
            rejected.append(Rejection(file, lines.first + index, bad.rule, shown, query_id, found=found))
    if slow:
        rows = _merged(rows, slow)
    return RowBlock(
        file=file,
        lines_N=rows.at_R + lines.first,
        query_ids_N=rows.ids_R,
        features_NF=rows.features_RF,
        labels_N=rows.labels_R,
        doc_ids_N=None if comments is None else _doc_ids([comments[index] for index in rows.at_R.tolist()]),
        rejected=rejected,
        texts=lines,
    )


def dense_format(line: bytes, *, qid: bool, first: int | None) -> RowFormat | None:
    """The format of a good dense row, with its first index if that is known; None for any other line."""
    words = line.partition(b"#")[0].split()
    n_features = max(0, len(words) - 1 - qid)
    for start in ((1, 0) if first is None else (first,)) if n_features else ():
        with suppress(_BadRowError):
            _parse_row(words, row_format := RowFormat(n_features, True, qid, start))
            return row_format
    return None


def _doc_ids(comments: Sequence[bytes]) -> pa.StringArray | None:
    matches = [_DOC_ID.match(comment) for comment in comments]
    if not any(matches):
        return None
    return pa.array([match and match[1].decode(errors="backslashreplace") for match in matches], pa.string())


def _merged(rows: _Rows, slow: Mapping[int, _Row]) -> _Rows:
    """All rows in line order."""
    at_R = np.concatenate([rows.at_R, list(slow)])
    order = np.argsort(at_R)
    ids, labels, features = zip(*slow.values(), strict=True)
    return _Rows(
        at_R[order],
        pa.concat_arrays([rows.ids_R, pa.array(ids, pa.string())]).take(pa.array(order)),
        np.concatenate([rows.labels_R, labels])[order],
        np.concatenate([rows.features_RF, features])[order],
    )


def _parse_usual(text: bytes, row_format: RowFormat) -> tuple[_Rows, list[int]]:
    """The rows of the common shape, and the lines for the slow path."""
    bytes_ = np.frombuffer(text, np.uint8)
    # the whitespace of `bytes.split`, which the slow path uses; bytes below a tab wrap around
    separates = (bytes_ - _TAB <= _RETURN - _TAB) | (bytes_ == _BLANK) | (bytes_ == _COLON)
    ends_S = np.flatnonzero(separates).astype(np.int32)
    starts_S = np.roll(ends_S + 1, 1)
    starts_S[:1] = 0
    kinds_S = bytes_.take(ends_S)
    newlines_L, colon_S = ends_S[kinds_S == _NEWLINE], kinds_S == _COLON
    gap_S = (starts_S == ends_S) & ~colon_S & ~np.append(False, colon_S[:-1])  # in a run of spaces
    if gap_S.any():  # as at the end of each row of MSLR
        starts_S, ends_S, colon_S = (each_S[~gap_S] for each_S in (starts_S, ends_S, colon_S))
    words_S2 = np.column_stack([starts_S, ends_S])
    stops_L = np.searchsorted(ends_S, newlines_L, side="right")
    counts_L = np.diff(stops_L, prepend=0)
    if row_format.dense:
        usual_L = counts_L == 1 + 2 * (row_format.qid + row_format.n_features)
    else:
        usual_L = (counts_L % 2 == 1) & (counts_L > 2 * row_format.qid)
    odd_S = colon_S == np.append(False, colon_S[:-1])  # right of a line's first word only: spaces and colons take turns
    odd_S[(stops_L - counts_L)[counts_L > 0]] ^= True
    usual_L[np.searchsorted(stops_L, np.flatnonzero(odd_S), side="right")] = False
    if not text.isascii():
        usual_L[np.searchsorted(newlines_L, np.flatnonzero(bytes_ >= 128))] = False
    try:
        rows = _convert(text, words_S2, counts_L, usual_L, row_format)
    except pa.ArrowInvalid:  # all rows take the slow path, which finds the bad word
        rows = _convert(text, words_S2, counts_L, np.zeros_like(usual_L), row_format)
    left_L = counts_L > 0
    left_L[rows.at_R] = False
    return rows, np.flatnonzero(left_L).tolist()


def _convert(text: bytes, words_S2: _Words, counts_L: Ints, usual_L: Bools, row_format: RowFormat) -> _Rows:
    """The rows of the usual lines, but for those that the slow path must judge; raises ArrowInvalid on a bad word."""
    n_features, counts_R = row_format.n_features, counts_L[usual_L]
    if not usual_L.all():
        words_S2 = words_S2[np.repeat(usual_L, counts_L)]
    n_head = 1 + 2 * row_format.qid
    if row_format.dense:
        words_RW2 = words_S2.reshape(-1, n_head + 2 * n_features, 2)
        head_RK2, pairs_V22 = words_RW2[:, :n_head], words_RW2[:, n_head:].reshape(-1, 2, 2)
    else:
        heads_RK = (np.cumsum(counts_R) - counts_R)[:, None] + np.arange(n_head)
        head_RK2, pairs_V22 = words_S2[heads_RK], np.delete(words_S2, heads_RK, axis=0).reshape(-1, 2, 2)
    row_V = np.repeat(np.arange(len(counts_R)), counts_R // 2 - row_format.qid)
    labels_R, odd_R = _cast_numbers(text, head_RK2[:, 0])
    values_V, odd_V = _cast_numbers(text, pairs_V22[:, 1])
    good_R = ~odd_R
    good_R[row_V[odd_V]] = False
    ids_R = pa.repeat("", len(good_R))
    if row_format.qid:
        ids_R2 = head_RK2[:, 2]
        good_R &= _are(text, head_RK2[:, 1:2], [b"qid"]) & (ids_R2[:, 0] < ids_R2[:, 1])
        ids_R = _strings(text, ids_R2).drop_null()
    if row_format.dense:
        indices = [b"%d" % i for i in range(row_format.first, row_format.first + n_features)]
        good_R &= _are(text, pairs_V22[:, 0].reshape(-1, n_features, 2), indices)
        features_RF = values_V.reshape(-1, n_features)
    else:
        starts_V, ends_V = pairs_V22[:, 0].T
        columns_V = _cast(text, pairs_V22[:, 0], pa.int32()) - row_format.first
        digits_V = (np.frombuffer(text, np.uint8)[starts_V] - _ONE <= 8) | (ends_V - starts_V == 1)  # no 01, no sign
        columns_V[~digits_V | (columns_V >= n_features)] = -1
        good_R[row_V[columns_V < 0]] = False
        sound_V = good_R[row_V]
        row_V, places = row_V[sound_V], (row_V[sound_V], columns_V[sound_V])
        features_RF = np.zeros((len(good_R), n_features), np.float32)
        features_RF[places] = values_V[sound_V]
        filled_RF = np.zeros(features_RF.shape, dtype=bool)
        filled_RF[places] = True
        good_R &= np.count_nonzero(filled_RF, axis=1) == np.bincount(row_V, minlength=len(good_R))
    at_R = np.flatnonzero(usual_L)
    if good_R.all():
        return _Rows(at_R, ids_R, labels_R, features_RF)
    return _Rows(at_R[good_R], ids_R.filter(pa.array(good_R)), labels_R[good_R], features_RF[good_R])


def _are(text: bytes, words_RW2: _Words, names: Sequence[bytes]) -> Bools:
    """A mask of the rows whose words have these names."""
    bytes_, lengths_W = np.frombuffer(text, np.uint8), np.array([len(name) for name in names])
    letters_WB = np.array(names)[:, None].view(np.uint8)
    are_R: Bools = (words_RW2[..., 1] - words_RW2[..., 0] == lengths_W).all(axis=1)
    for b in range(letters_WB.shape[1]):
        longer_W = lengths_W > b
        are_R &= (bytes_.take(words_RW2[:, longer_W, 0] + b, mode="clip") == letters_WB[longer_W, b]).all(axis=1)
    return are_R


def _cast_numbers(text: bytes, words_W2: _Words) -> tuple[Floats, Bools]:
    """The numbers (NaN if missing), and a mask of words for the slow path, since nan and inf have many spellings."""
    starts_W, ends_W = words_W2.T
    letters_W = np.frombuffer(text, np.uint8).take(starts_W) | 32
    suspects = np.flatnonzero((starts_W == ends_W) | (letters_W == ord("n")))
    lower = pc.ascii_lower(_strings(text, words_W2[suspects]).drop_null())
    absent = suspects[pc.is_in(lower, pa.array(_MISSING, pa.string())).to_numpy(zero_copy_only=False)]
    numbers = _cast(text, words_W2, pa.float32(), absent)
    odd = ~np.isfinite(numbers)
    odd[absent] = False  # the cast leaves an undefined value for a null
    numbers[absent] = np.nan
    return numbers, odd


def _cast(text: bytes, words_W2: _Words, kind: pa.DataType, absent: Ints | None = None) -> NDArray[Any]:
    cast = pc.cast(_strings(text, words_W2, absent), kind)
    return np.frombuffer(cast.buffers()[1], kind.to_pandas_dtype())[::2].copy()


def _strings(text: bytes, words_W2: _Words, absent: Ints | None = None) -> pa.StringArray:
    """Words in place, each followed by a null for the text up to the next word; words in `absent` are null too."""
    offsets = np.append(words_W2, np.int32(len(text)))
    valid = np.tile([True, False], len(words_W2))
    if absent is not None:
        valid[2 * absent] = False
    bitmap = np.packbits(valid, bitorder="little")
    return pa.StringArray.from_buffers(len(valid), pa.py_buffer(offsets), pa.py_buffer(text), pa.py_buffer(bitmap))


def _query_id(words: Sequence[bytes]) -> str:
    """The query id of a row, or "" if it has none, several or an unreadable one."""
    queries = [word for word in words[1:] if word.startswith(b"qid:")]
    try:
        return queries[0].removeprefix(b"qid:").decode() if len(queries) == 1 else ""
    except UnicodeDecodeError:
        return ""


def _parse_row(words: Sequence[bytes], row_format: RowFormat) -> _Row:
    query_id, n_features, first = _query_id(words) if row_format.qid else "", row_format.n_features, row_format.first
    if row_format.qid and not query_id:
        raise _BadRowError("there is not one qid:ID after the label")
    rest = [word for word in words[1:] if not (row_format.qid and word.startswith(b"qid:"))]
    pairs = [word.partition(b":") for word in rest]
    if odd := [word for word, pair in zip(rest, pairs, strict=True) if not (pair[1] and _INDEX.fullmatch(pair[0]))]:
        raise _BadRowError(f"{_shown(odd[0])} is no feature as index:value")
    texts = [words[0], *(value for _, _, value in pairs)]
    numbers = _parse_numbers(texts)
    if numbers is None:
        raise _BadRowError(f"{_shown(next(each for each in texts if _parse_numbers([each]) is None))} is no number")
    columns = [int(index) - first for index, _, _ in pairs]
    if min(columns, default=0) < 0:
        raise _BadRowError("index 0, where the first feature has 1: set source.first_index to 0 if all rows count so")
    if len({*columns}) < len(columns):
        twice = next(column for column in columns if columns.count(column) > 1)
        raise _BadRowError(f"index {twice + first} is there twice")
    if (last := max(columns, default=0)) >= n_features:
        found = f"index {last + first}, where the last feature has {n_features - 1 + first}"
        raise _BadRowError(found, "feature_count")
    if row_format.dense and len(columns) < n_features:
        found = f"{len(columns)} of {n_features} features; set source.dense to false if zeros are left out"
        raise _BadRowError(found, "feature_count")
    features_F = np.zeros(n_features, np.float32)
    features_F[np.array(columns, np.int64)] = numbers[1:]
    return _Row(query_id, numbers[0], features_F)


def _shown(word: bytes) -> str:
    return repr(word[:50].decode(errors="replace"))


def _parse_numbers(words: Sequence[bytes]) -> Floats | None:
    """The numbers, NaN where missing; None if a word is neither a number nor missing."""
    present = [None if word.lower() in _MISSING else word for word in words]
    try:
        cast = pa.array(present, pa.binary()).cast(pa.string()).cast(pa.float32())
    except pa.ArrowInvalid:
        return None
    numbers: Floats = cast.to_numpy(zero_copy_only=False)
    return numbers if np.isnan(numbers).sum() == cast.null_count else None  # -nan and nan(x) are not numbers
