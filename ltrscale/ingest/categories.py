"""Codes of categorical values; a code depends only on its value, not on other data.

An integer in [0, 2**24) is its own code. Every other value is hashed: its code is the upper 24 bits of a 64-bit hash of
its text, so a value has the same code in every file, week and version. Codes are exact in float32. Text that is the
plain decimal form of an integer, perhaps with `.0`, counts as that integer, so that CSV and Parquet of the same log
agree.

Shapes: N rows.
"""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale.arrays import N_CODES, Bits, Bools, Floats
from ltrscale.data.ids import hash_ids

_SHIFT = np.uint64(40)  # the upper 24 of 64 bits are the code
_MOST_VALUES = 1 << 22
_MOST_TEXTS = 4096
_WHOLE_FLOAT = re.compile(r"-?(0|[1-9][0-9]{0,15})\.0")
"""A whole number written as a float, with at most 16 digits before the point."""
_PLAIN = re.compile(r"0|[1-9][0-9]{0,7}")
"""A whole number as a text that may be its own code."""
RecordedCodes = dict[str, int] | None
"""The codes of texts; None if there are too many to record."""


def encode(column: pa.Array) -> Floats:
    """The code of each value; NaN if null or not a number.

    Example:
        >>> encode(pa.array(["7", "berlin", None, "-1"])).tolist()
        [7.0, 6113811.0, nan, 6998243.0]
        >>> encode(pa.array([7, -1])).tolist(), encode(pa.array(["7.0", "-1.0"])).tolist()
        ([7.0, 6998243.0], [7.0, 6998243.0])
    """
    identities_N, missing_N, _ = _identities(column)
    return _codes(identities_N, missing_N)


class CategoryEncoder:
    """Encodes one column block by block and counts `collisions`: pairs of different values with one code.

    It remembers 8 bytes for each of the first 2**22 distinct values (32 MiB). With more values `collisions` is a lower
    bound; that many values collide anyway. `texts` maps the texts of hashed values to codes, at most 4,096.
    """

    def __init__(self, known: Bits | None = None) -> None:
        self.collisions = 0
        """New collisions, without those among the initial values."""
        self.texts: RecordedCodes = {}
        self.known: Bits = np.empty(0, dtype=np.uint64) if known is None else known
        """The remembered values, 64 bits each, sorted."""

    def encode(self, column: pa.Array) -> Floats:
        """The codes of a block; see the function `encode`."""
        identities_N, missing_N, hashed = _identities(column)
        self.texts = merged_texts(self.texts, hashed)
        self.note(np.unique(identities_N[~missing_N]))
        return _codes(identities_N, missing_N)

    def note(self, values: Bits) -> None:
        """Remember values, such as those that another encoder of the column knows."""
        places = np.searchsorted(self.known, values)
        new = np.ones(len(values), dtype=bool)
        inside = places < len(self.known)
        new[inside] = self.known[places[inside]] != values[inside]
        remaining = _MOST_VALUES - len(self.known)
        fresh = np.flatnonzero(new)[:remaining]
        if len(fresh):
            codes = np.unique(values[fresh] >> _SHIFT)
            pairs_before = self._pairs(codes)
            self.known = np.insert(self.known, places[fresh], values[fresh])
            self.collisions += self._pairs(codes) - pairs_before

    def merge(self, other: "CategoryEncoder") -> None:
        """Remember the values and texts of another encoder of the column."""
        self.note(other.known)
        self.texts = merged_texts(self.texts, other.texts)

    def _pairs(self, codes: Bits) -> int:
        """The number of pairs of known values that share one of these codes (sorted, so a code's values are a run)."""
        first = np.searchsorted(self.known, codes << _SHIFT)
        last = np.searchsorted(self.known, (codes << _SHIFT) | np.uint64((1 << 40) - 1), side="right")
        return int(((last - first) * (last - first - 1) // 2).sum())


def merged_texts(a: RecordedCodes, b: RecordedCodes) -> RecordedCodes:
    """The texts of both; None if there are too many, or either is None."""
    if a is None or b is None:
        return None
    merged = a if b.keys() <= a.keys() else {**a, **b}
    return merged if len(merged) <= _MOST_TEXTS else None


def _codes(identities_N: Bits, missing_N: Bools) -> Floats:
    codes_N = (identities_N >> _SHIFT).astype(np.float32)
    codes_N[missing_N] = np.nan
    return codes_N


def _identities(column: pa.Array) -> tuple[Bits, Bools, RecordedCodes]:
    """A 64-bit identity of each value (the code is its upper bits), a mask of missing ones, and hashed texts' codes."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    values = encoded.dictionary
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    identities = np.zeros(len(values) + 1, dtype=np.uint64)
    identities[:-1], hashed = _identities_of_distinct(values)
    missing = np.ones(len(values) + 1, dtype=bool)
    missing[:-1] = values.is_null().to_numpy(zero_copy_only=False)
    index_N = encoded.indices.cast(pa.int64()).fill_null(len(values)).to_numpy()
    return identities[index_N], missing[index_N], hashed


def _identities_of_distinct(values: pa.Array) -> tuple[Bits, RecordedCodes]:
    """The identities of a dictionary's values (arbitrary for null), and the codes of hashed texts."""
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    if pa.types.is_integer(values.type):
        integers = values.fill_null(0).to_numpy()
        plain = (integers >= 0) & (integers < N_CODES)
        hashed = [str(integer) for integer in integers[~plain]]
    else:
        texts = [_text(value) for value in values.to_pylist()]
        plain = np.array([_PLAIN.fullmatch(text) is not None and int(text) < N_CODES for text in texts], dtype=bool)
        integers = np.array([int(text) if ok else 0 for text, ok in zip(texts, plain, strict=True)], dtype=np.int64)
        hashed = [text for text, ok in zip(texts, plain, strict=True) if not ok]
    identities: Bits = np.where(plain, integers, 0).astype(np.uint64) << _SHIFT
    identities[~plain] = hash_ids(hashed, scope="category")
    if len(hashed) > _MOST_TEXTS:
        return identities, None
    null = values.is_null().to_numpy(zero_copy_only=False)[~plain]
    codes = (identities[~plain] >> _SHIFT).tolist()
    return identities, {text: code for text, code, none in zip(hashed, codes, null, strict=True) if not none}


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():  # many tools turn integers into floats if there are nulls
        return str(int(value))
    text = value if isinstance(value, str) else str(value)
    return str(int(text[:-2])) if _WHOLE_FLOAT.fullmatch(text) else text  # as the same tools write CSV
