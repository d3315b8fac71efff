"""Hashes of ids, and the set of those seen so far: sorted runs, small ones in memory and large ones on disk.

Memory stays bounded however many queries a log has: a run is at least twice as long as the next, as in a log-structured
merge tree, so there are few runs, and those above `memory_hashes` are memory-mapped files (8 bytes per query on disk).
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ltrscale.arrays import Bits, Bools
from ltrscale.storage import named_errors

_MEMORY_HASHES = 1 << 20
_MERGE_BLOCK = 1 << 16


def hash_ids(ids: Iterable[str], *, scope: str = "") -> Bits:
    """A 64-bit hash of each id within a scope: BLAKE2b, the same on every machine and in every version.

    Ids in different scopes have unrelated hashes. Two of n ids share a hash with a probability of about n^2 / 2^65:
    one in 3,700 for 100 million ids.

    Example:
        >>> [hex(value) for value in hash_ids(["a", "b"], scope="train")[:1]]
        ['0x8aae98e86ab48a95']
    """
    base = hashlib.blake2b(scope.encode() + b"\0", digest_size=8)
    digests = bytearray()
    for text in ids:
        one = base.copy()
        one.update(text.encode(errors="surrogatepass"))  # an id from broken text may have lone surrogates
        digests += one.digest()
    return np.frombuffer(bytes(digests), dtype="<u8").astype(np.uint64, copy=False)


_PARTS = 6


def parts(ids: Iterable[str]) -> list[str]:
    """The part of each query, `part-1` to `part-6`, by a hash of its id: parts of a log that has no times.

    Example:
        >>> parts(["shoes", "coat", "shoes"])
        ['part-6', 'part-5', 'part-6']
    """
    return [f"part-{number + 1}" for number in (hash_ids(ids, scope="part") % _PARTS).tolist()]


def save_hashes(path: Path, hashes: Bits) -> None:
    """Write hashes as a NumPy array to exactly this path."""
    with named_errors(str(path), "write"), path.open("wb") as stream:
        np.save(stream, hashes)


class QueryIds:
    """Hashes of query ids: of all, kept and other groups, and of rejected rows; `folder` as in `SeenHashes`."""

    def __init__(self, folder: Path) -> None:
        self.groups, self.kept, self.others, self.unread = (SeenHashes(folder) for _ in range(4))

    def lost(self) -> Bits:
        """Hashes of the ids that only rejected rows have."""
        return np.concatenate([np.empty(0, np.uint64), *(h[~self.groups.has(h)] for h in self.unread.blocks())])


class SeenHashes:
    """An exact set of 64-bit hashes that grows on disk; the caller makes `folder` and deletes it."""

    def __init__(self, folder: Path, *, memory_hashes: int = _MEMORY_HASHES) -> None:
        self._folder = folder
        self._memory_hashes = memory_hashes
        self._runs: list[Bits] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def add(self, hashes: Bits) -> Bools:
        """Add hashes; True for each that was in the set before, or occurs earlier in this call."""
        values, first = np.unique(hashes, return_index=True)
        old = self.has(values)
        is_in = np.ones(len(hashes), dtype=bool)
        is_in[first] = old
        if not old.all():
            self.push(values[~old])
        return is_in

    def has(self, hashes: Bits) -> Bools:
        """Whether each hash is in the set."""
        is_in = np.zeros(len(hashes), dtype=bool)
        for run in self._runs:
            places = np.searchsorted(run, hashes)
            is_in |= run[np.minimum(places, len(run) - 1)] == hashes
        return is_in

    def save(self, path: Path) -> None:
        """Write all hashes, sorted, as a NumPy array."""
        while len(self._runs) > 1:
            last = self._runs.pop()
            self._runs.append(self._merge(self._runs.pop(), last))
        save_hashes(path, self._runs[0] if self._runs else np.empty(0, np.uint64))

    def blocks(self) -> Iterator[Bits]:
        """All hashes, each once, a bounded number at a time."""
        for run in self._runs:
            for start in range(0, len(run), _MERGE_BLOCK):
                yield run[start : start + _MERGE_BLOCK]

    def push(self, run: Bits) -> None:
        """Add unique sorted hashes that are not in the set; deletes a mapped file once merged."""
        # merges from the end while the previous run is less than twice as long
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = self._merge(self._runs.pop(), run)
        self._runs += [run] if len(run) else []

    def _merge(self, a: Bits, b: Bits) -> Bits:
        if len(a) + len(b) <= self._memory_hashes:
            return np.sort(np.concatenate([a, b]), kind="stable")
        path = self._folder / f"run-{secrets.token_hex(8)}"
        with named_errors(str(path), "write"), path.open("wb") as stream:
            i = j = 0
            while i < len(a) or j < len(b):
                head_a, head_b = a[i : i + _MERGE_BLOCK], b[j : j + _MERGE_BLOCK]
                # all values up to the smaller of the two last ones are in the two heads
                limit = min(head[-1] for head in (head_a, head_b) if len(head))
                take_a, take_b = (int(np.searchsorted(head, limit, side="right")) for head in (head_a, head_b))
                stream.write(np.sort(np.concatenate([head_a[:take_a], head_b[:take_b]]), kind="stable").tobytes())
                i, j = i + take_a, j + take_b
        for old in (a, b):
            if isinstance(old, np.memmap):
                Path(str(old.filename)).unlink()
        return np.memmap(path, dtype=np.uint64, mode="r")
