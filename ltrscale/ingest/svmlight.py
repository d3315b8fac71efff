"""Rows of LETOR / svmlight text: `label qid:ID 1:value 2:value ... # docid = X`, one document per line.

- `qid` is any word of UTF-8, usually the first after the label; rows have none if the file comes with a file of group
  sizes.
- Indices are decimal with at most 18 digits, from 1, or from 0 as scikit-learn writes them. A row has each at most
  once, in any order. Dense rows have exactly F of them; in sparse rows omitted features are 0.
- Values and labels are decimal numbers or inf. Nothing (`3:`), NULL and NaN, in upper or lower case, are missing: NaN.
  A number too large for float32 is infinite too.
- A comment goes from `#` to the end of the line; one that begins with `docid = X` names the document.
- Words are separated by blanks, tabs or carriage returns. A line without words, or with a comment only, is not a row.

Rows of the common shape are parsed together: one pass finds the separators, and Arrow casts all indices and values in
place. If all lines of a text are dense rows with one blank between words, as in most files, the colons alone locate the
words (`_even_layout`). Any other row takes the slow path (`_parse_row`), which finds its values or the rule that it
breaks. All paths accept the same rows and return the same numbers.

Shapes: L lines of a text, R rows among them, S separators, V values, N rows of a block, F features, W words with a
colon: the features' and the qid.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.arrays import Bools, Floats, Ints
from ltrscale.ingest.lines import LineTexts, shown_line
from ltrscale.ingest.rows import Rejection, RowBlock, Rule

_TAB, _NEWLINE, _RETURN, _BLANK, _ZERO, _COLON = b"\t\n\r 0:"
_MISSING = (b"", b"null", b"nan")
_INDEX = re.compile(rb"[0-9]{1,18}")
_PLAIN = re.compile(rb"[!-~]+")  # a query id in ASCII
_DOC_ID = re.compile(rb"\s*docid\s*=\s*(\S+)")


@dataclass(frozen=True)
class RowFormat:
    """The format that the rows of a file must have."""

    n_features: int
    dense: bool
    qid: bool
    first: int = 1
    """The index of the first feature."""


class _Fault(NamedTuple):
    """The rule that a row breaks, and where."""

    rule: Rule
    found: str


class _Row(NamedTuple):
    query_id: str
    label: np.float32
    features_F: Floats


class _Rows(NamedTuple):
    """Parsed rows; `at_R` are their lines, counted from 0."""

    at_R: Ints
    ids_R: pa.StringArray
    labels_R: Floats
    features_RF: Floats


_Places = NDArray[np.integer[Any]]


class _Words(NamedTuple):
    """Words of a text: indices of their first byte and of the byte after their last; arrays of one shape."""

    starts: _Places
    ends: _Places


class _Layout(NamedTuple):
    """Word places in rows of the common shape, and the lines that are not rows; `indices_V` is None for dense rows."""

    blank_L: Bools
    at_R: Ints
    counts_R: Ints
    labels_R: _Words
    ids_R: pa.StringArray
    indices_V: _Words | None
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
    rows, left_L = _parse_usual(bare, row_format)
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
                query_id, shown = _query_id(words) if row_format.qid else "", shown_line(lines[index])
                rejected.append(
                    Rejection(file, first_line + index, row.rule, shown, query_id, found=f"{row.found}: {shown[:40]!r}")
                )
        rows = _merge(rows, _stack(slow, row_format))
    return RowBlock(
        file=file,
        lines_N=rows.at_R + first_line,
        query_ids_N=rows.ids_R,
        features_NF=rows.features_RF,
        labels_N=rows.labels_R,
        doc_ids_N=None if comments is None else _doc_ids([comments[index] for index in rows.at_R.tolist()]),
        rejected=rejected,
        texts=LineTexts(text, first_line),
    )


def dense_format(line: bytes, *, qid: bool, first: int | None = None) -> RowFormat | None:
    """The format of a good dense row, with its first index if that is known; None for any other line."""
    words = line.partition(b"#")[0].split()
    n_features = max(0, len(words) - 1 - qid)
    formats = [RowFormat(n_features, True, qid, start) for start in ((1, 0) if first is None else (first,))]
    return next((each for each in formats if n_features and isinstance(_parse_row(words, each), _Row)), None)


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
        pa.array([row.query_id for _, row in rows], pa.string()),
        np.array([row.label for _, row in rows], np.float32),
        features_RF,
    )


def _merge(first: _Rows, second: _Rows) -> _Rows:
    """All rows in line order."""
    at_R = np.concatenate([first.at_R, second.at_R])
    order = np.argsort(at_R)
    return _Rows(
        at_R[order],
        pa.concat_arrays([first.ids_R, second.ids_R]).take(pa.array(order)),
        np.concatenate([first.labels_R, second.labels_R])[order],
        np.concatenate([first.features_RF, second.features_RF])[order],
    )


def _parse_usual(text: bytes, row_format: RowFormat) -> tuple[_Rows, Bools]:
    """The rows of the common shape, and a mask of lines for the slow path."""
    layout, rows = _even_layout(text, row_format), None
    if layout is not None:
        with suppress(pa.ArrowInvalid):  # some word is not a number, perhaps because it has a blank
            rows = _convert(text, layout, row_format)
    if layout is None or rows is None:
        layout = _scanned_layout(text, row_format)
        try:
            rows = _convert(text, layout, row_format)
        except pa.ArrowInvalid:  # all rows take the slow path, which finds the bad word
            rows = _stack([], row_format)
    left_L = ~layout.blank_L
    left_L[rows.at_R] = False
    return rows, left_L


def _even_layout(text: bytes, row_format: RowFormat) -> _Layout | None:
    """The layout if all lines are dense rows with one blank between words; else None, or a layout with a non-number."""
    bytes_, n_words = np.frombuffer(text, np.uint8), row_format.n_features + row_format.qid
    newlines_L, colons = np.flatnonzero(bytes_ == _NEWLINE), np.flatnonzero(bytes_ == _COLON)
    if not (row_format.dense and len(colons) == len(newlines_L) * n_words):
        return None
    colons_LW = colons.astype(np.int32).reshape(-1, n_words)  # the type of Arrow's offsets
    starts_L = np.concatenate([[0], newlines_L[:-1] + 1])
    value = text[colons[-1] + 1 :]
    n_ending = len(value) - len(value.rstrip())  # all lines must end like the last one
    ends_L = (newlines_L + 1 - n_ending).astype(np.int32)
    if not ((starts_L < colons_LW[:, 0]) & (colons_LW[:, -1] < ends_L)).all():
        return None
    endings = bytes_[ends_L[:, None] + np.arange(n_ending)]
    blanks_LF, good_L = _indices_before(bytes_, colons_LW[:, row_format.qid :], row_format.first)
    labels, ids_L = _Words(starts_L, blanks_LF[:, 0]), pa.repeat("", len(newlines_L))
    if row_format.qid:
        names, ids = _Words(colons_LW[:, 0] - 3, colons_LW[:, 0]), _Words(colons_LW[:, 0] + 1, blanks_LF[:, 0])
        labels = _Words(starts_L, names.starts - 1)
        good_L &= _are_qid(bytes_, names) & _is_space(bytes_[labels.ends]) & (ids.starts <= ids.ends)
        ids_L = _strings(text, ids).drop_null() if good_L.all() else ids_L
        good_L &= all(map(_PLAIN.fullmatch, ids_L.cast(pa.binary()).unique().to_pylist()))
    if not ((good_L & (labels.starts < labels.ends)).all() and _is_space(endings).all()):
        return None
    return _Layout(
        blank_L=~good_L,
        at_R=np.arange(len(newlines_L)),
        counts_R=np.full(len(newlines_L), row_format.n_features),
        labels_R=labels,
        ids_R=ids_L,
        indices_V=None,
        values_V=_Words(colons_LW[:, row_format.qid :] + 1, np.column_stack([blanks_LF[:, 1:], ends_L])),
    )


def _indices_before(bytes_: NDArray[np.uint8], colons_RF: _Places, first: int) -> tuple[_Places, Bools]:
    """The bytes before the indices of these colons, and a mask of valid rows (faster by digits than by a cast)."""
    n_rows, n_features = colons_RF.shape
    index_F = np.arange(first, first + n_features)
    good_R = np.ones(n_rows, dtype=bool)
    places_FR = colons_RF.T.astype(np.int64, order="C")  # `take` needs contiguous arrays
    done, power = 0, 1  # from `done` on, indices below `power` have a space here, others a digit
    while done < n_features:
        places_FR -= 1
        longer = power - first if power > 1 else 0
        spaces, digits = np.split(bytes_.take(places_FR[done:]), [longer - done])
        good_R &= _is_space(spaces).all(axis=0)
        good_R &= (digits == (_ZERO + index_F[longer:, None] // power % 10).astype(np.uint8)).all(axis=0)
        done, power = longer, 10 * power
    return colons_RF - (np.char.str_len(index_F.astype(str)) + 1).astype(colons_RF.dtype), good_R


def _is_space(bytes_: NDArray[np.uint8]) -> Bools:
    """A mask of the whitespace of `bytes.split`, which the slow path uses."""
    is_space: Bools = bytes_ - _TAB <= _RETURN - _TAB  # bytes below a tab wrap around
    is_space |= bytes_ == _BLANK
    return is_space


def _are_qid(bytes_: NDArray[np.uint8], words: _Words) -> Bools:
    """A mask of the words that are `qid`; none of the words may end the text."""
    are: Bools = words.ends - words.starts == 3
    for i, byte in enumerate(b"qid"):
        are &= bytes_[words.starts + i] == byte
    return are


class _Scan:
    """The lines of a text and its separators, each of which ends a (possibly empty) word."""

    def __init__(self, text: bytes) -> None:
        self.bytes = np.frombuffer(text, np.uint8)
        self.ends_S = np.flatnonzero(_is_space(self.bytes) | (self.bytes == _COLON))
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
        """The separator of the line's first colon, or a later line's if it has none."""

        bare_S = (self.ends_S > self.starts_S) & ~colon_S
        bare_S[1:] &= ~colon_S[:-1]
        bare = np.flatnonzero(bare_S)
        line_of_bare = np.searchsorted(self.newlines_L, bare)
        self.bare_L = np.bincount(line_of_bare, minlength=len(self.newlines_L))
        """Number of words without a colon in each line."""
        self.label_L = np.zeros(len(self.newlines_L), np.int64)
        """The separator after the line's last word without a colon, which is the label in a good row."""
        self.label_L[line_of_bare] = bare
        self.ascii = text.isascii()

    def words(self, separators: Ints) -> _Words:
        """The words that these separators end."""
        return _Words(self.starts_S[separators], self.ends_S[separators])


def _usual_lines(scan: _Scan, row_format: RowFormat) -> Bools:
    """A mask of lines with the separators of `label (qid:ID) (index:value)*`, without indices such as 01."""
    n_words = row_format.n_features + row_format.qid
    usual_L: Bools = scan.colons_L == n_words if row_format.dense else scan.colons_L >= row_format.qid
    usual_L &= (scan.bare_L == 1) & (scan.label_L < scan.first_colon_L)
    starts, ends = scan.words(scan.colons)
    odd = (starts == ends) | ((scan.bytes[starts] == _ZERO) & (ends - starts > 1 - row_format.first))
    odd[1:] |= np.diff(scan.colons) == 1
    usual_L[np.searchsorted(scan.newlines_L, scan.colons[odd])] = False
    if not scan.ascii:
        usual_L[np.searchsorted(scan.ends_S[scan.newlines_L], np.flatnonzero(scan.bytes >= 128))] = False
    if row_format.qid:
        first = scan.first_colon_L[usual_L]
        ids = scan.words(first + 1)
        usual_L[usual_L] = _are_qid(scan.bytes, scan.words(first)) & (ids.starts < ids.ends)
    return usual_L


def _scanned_layout(text: bytes, row_format: RowFormat) -> _Layout:
    """The layout of any text."""
    scan = _Scan(text)
    usual_L = _usual_lines(scan, row_format)
    kept = np.repeat(usual_L, scan.colons_L)
    if row_format.qid:
        kept[scan.colons_before_L[usual_L]] = False
    colons = scan.colons[kept]
    if row_format.dense:
        colons_RF = colons.reshape(-1, row_format.n_features)
        _, good_R = _indices_before(scan.bytes, scan.ends_S[colons_RF], row_format.first)
        usual_L[usual_L], colons = good_R, colons_RF[good_R].ravel()
    ids_R = pa.repeat("", int(usual_L.sum()))
    if row_format.qid:
        ids_R = _strings(text, scan.words(scan.first_colon_L[usual_L] + 1)).drop_null()
    return _Layout(
        blank_L=(scan.bare_L == 0) & (scan.colons_L == 0),
        at_R=np.flatnonzero(usual_L),
        counts_R=scan.colons_L[usual_L] - row_format.qid,
        labels_R=scan.words(scan.label_L[usual_L]),
        ids_R=ids_R,
        indices_V=None if row_format.dense else scan.words(colons),
        values_V=scan.words(colons + 1),
    )


def _convert(text: bytes, layout: _Layout, row_format: RowFormat) -> _Rows:
    """Cast the words of rows of the common shape, without rows for the slow path; raises ArrowInvalid on a bad word."""
    n_rows, n_features = len(layout.at_R), row_format.n_features
    may_miss = b"n" in text or b"N" in text
    values_V, odd_V = _cast_numbers(text, layout.values_V, may_miss)
    labels_R, odd_R = _cast_numbers(text, layout.labels_R, may_miss)
    ends_R = np.cumsum(layout.counts_R)
    good_R = ~odd_R
    good_R[np.searchsorted(ends_R, np.flatnonzero(odd_V), side="right")] = False
    if layout.indices_V is None:
        features_RF = values_V.reshape(n_rows, n_features)
    else:
        columns_V = _cast(text, layout.indices_V, pa.int32()) - row_format.first
        outside = np.flatnonzero((columns_V < 0) | (columns_V >= n_features))
        good_R[np.searchsorted(ends_R, outside, side="right")] = False
        row_V = np.repeat(np.arange(n_rows), layout.counts_R)
        good_R[_with_one_twice(columns_V, row_V)] = False
        sound_V = np.repeat(good_R, layout.counts_R)
        features_RF = np.zeros((n_rows, n_features), np.float32)
        features_RF[row_V[sound_V], columns_V[sound_V]] = values_V[sound_V]
    if good_R.all():
        return _Rows(layout.at_R, layout.ids_R, labels_R, features_RF)
    return _Rows(layout.at_R[good_R], layout.ids_R.filter(pa.array(good_R)), labels_R[good_R], features_RF[good_R])


def _with_one_twice(columns_V: Ints, row_V: Ints) -> Ints:
    """The rows that have a column twice; only rows with columns out of order are checked."""
    falls_V = (np.diff(columns_V, prepend=-1) <= 0) & (np.diff(row_V, prepend=-1) == 0)
    if not falls_V.any():
        return np.empty(0, np.int64)
    places = np.flatnonzero(np.isin(row_V, row_V[falls_V]))
    places = places[np.lexsort((columns_V[places], row_V[places]))]
    same = (np.diff(columns_V[places]) == 0) & (np.diff(row_V[places]) == 0)
    twice: Ints = row_V[places[1:][same]]
    return twice


def _cast_numbers(text: bytes, words: _Words, may_miss: bool) -> tuple[Floats, Bools]:
    """The numbers (NaN if missing), and a mask of words for the slow path, since nan and inf have many spellings."""
    absent = _find_absent(np.frombuffer(text, np.uint8), words, may_miss)
    numbers = _cast(text, words, pa.float32(), absent)
    odd = ~np.isfinite(numbers)
    odd[absent] = False  # the cast leaves an undefined value for a null
    numbers[absent] = np.nan
    return numbers, odd


def _find_absent(bytes_: NDArray[np.uint8], words: _Words, may_miss: bool) -> Ints:
    suspect = words.starts == words.ends
    if may_miss:
        suspect |= bytes_[words.starts] | 32 == ord("n")
    suspects = np.flatnonzero(suspect)
    if not len(suspects):
        return suspects
    starts, ends = words.starts[suspect], words.ends[suspect]
    letters = bytes_.take(starts[:, None] + np.arange(4), mode="clip") | 32
    missing = np.zeros(len(suspects), dtype=bool)
    for word in _MISSING:
        same = letters[:, : len(word)] == np.frombuffer(word, np.uint8)
        missing |= (ends - starts == len(word)) & same.all(axis=1)
    return suspects[missing]


def _cast(text: bytes, words: _Words, kind: pa.DataType, absent: Ints | None = None) -> NDArray[Any]:
    cast = pc.cast(_strings(text, words, absent), kind)
    return np.frombuffer(cast.buffers()[1], kind.to_pandas_dtype())[::2].copy()


def _strings(text: bytes, words: _Words, absent: Ints | None = None) -> pa.StringArray:
    """Words in place, each followed by a null for the text up to the next word; words in `absent` are null too."""
    n = words.starts.size
    offsets = np.empty(2 * n + 1, np.int32)
    pairs = offsets[:-1].reshape(*words.starts.shape, 2)
    pairs[..., 0], pairs[..., 1] = words
    offsets[-1] = len(text)
    bitmap = np.full((2 * n + 7) // 8, 0b01010101, np.uint8)  # Arrow's validity bits, lowest first: words only
    if absent is not None and len(absent):
        np.bitwise_and.at(bitmap, absent // 4, ~(np.uint8(1) << (absent % 4 * 2).astype(np.uint8)))
    return pa.StringArray.from_buffers(2 * n, pa.py_buffer(offsets), pa.py_buffer(text), pa.py_buffer(bitmap))


def _query_id(words: Sequence[bytes]) -> str:
    """The query id of a row, or "" if it has none, several or an unreadable one."""
    queries = [word for word in words[1:] if word.startswith(b"qid:")]
    try:
        return queries[0].removeprefix(b"qid:").decode() if len(queries) == 1 else ""
    except UnicodeDecodeError:
        return ""


def _parse_row(words: Sequence[bytes], row_format: RowFormat) -> _Row | _Fault:
    """A row, or the rule that it breaks."""
    query_id, n_features, first = _query_id(words) if row_format.qid else "", row_format.n_features, row_format.first
    if row_format.qid and not query_id:
        return _Fault("unparsable", "there is not one qid:ID after the label")
    rest = [word for word in words[1:] if not (row_format.qid and word.startswith(b"qid:"))]
    pairs = [word.partition(b":") for word in rest]
    if odd := [word for word, pair in zip(rest, pairs, strict=True) if not (pair[1] and _INDEX.fullmatch(pair[0]))]:
        return _Fault("unparsable", f"{_shown(odd[0])} is no feature as index:value")
    texts = [words[0], *(value for _, _, value in pairs)]
    numbers = _parse_numbers(texts)
    if numbers is None:
        return _Fault(
            "unparsable", f"{_shown(next(each for each in texts if _parse_numbers([each]) is None))} is no number"
        )
    columns = [int(index) - first for index, _, _ in pairs]
    if min(columns, default=0) < 0:
        return _Fault(
            "unparsable", "index 0, where the first feature has 1: set source.first_index to 0 if all rows count so"
        )
    if len({*columns}) < len(columns):
        twice = next(column for column in columns if columns.count(column) > 1)
        return _Fault("unparsable", f"index {twice + first} is there twice")
    if max(columns, default=0) >= n_features:
        return _Fault(
            "feature_count", f"index {max(columns) + first}, where the last feature has {n_features - 1 + first}"
        )
    if row_format.dense and len(columns) < n_features:
        fault = f"{len(columns)} of {n_features} features; set source.dense to false if zeros are left out"
        return _Fault("feature_count", fault)
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
