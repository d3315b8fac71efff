"""Random numbers as pure functions of their purpose: the same on every machine, however many others are drawn."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15


def mix(*parts: int | str) -> int:
    """A 63-bit number from integers and texts, the same on every machine and in every version.

    Example:
        >>> mix("order", 1, 2) == mix("order", 1, 2), mix("order", 1, 2) == mix("order", 12)
        (True, False)
    """
    # 63 bits, which fit a signed 64-bit integer
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def permutation(n: int, *parts: int | str) -> NDArray[np.int64]:
    """The permutation of 0 .. n - 1 that `parts` determine, shape [n].

    It sorts the raw output of PCG64, which numpy promises not to change; `Generator.permutation` has no such promise.
    """
    bits = np.random.PCG64(mix(*parts)).random_raw(n)
    order = np.argsort(bits)  # in a third of the time of a stable sort, which only equal bits need
    rising = bits[order]
    order = order if (rising[1:] > rising[:-1]).all() else np.argsort(bits, kind="stable")
    return order.astype(np.int64, copy=False)


def among_first(n: int, k: int, *parts: int | str) -> NDArray[np.bool_]:
    """Which of 0 .. n - 1 are among the first k of their permutation, shape [n], without sorting them all."""
    if k >= n:
        return np.ones(n, np.bool_)
    # place k is found by its upper bits, so that memory holds the bits of one piece at a time
    ends = np.cumsum(sum(np.bincount(_upper(bits), minlength=1 << 16) for _, bits in _pieces(n, *parts)))
    upper = int(np.searchsorted(ends, k, side="right"))
    is_first, equal = np.empty(n, np.bool_), []
    for start, bits in _pieces(n, *parts):
        is_first[start : start + len(bits)] = _upper(bits) < upper
        places = np.flatnonzero(_upper(bits) == upper)
        equal.append((start + places, bits[places]))
    places, bits = map(np.concatenate, zip(*equal, strict=True))
    n_lower = int(ends[upper - 1]) if upper else 0
    is_first[places[np.argsort(bits, kind="stable")[: k - n_lower]]] = True
    return is_first


def _pieces(n: int, *parts: int | str) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """The raw output that `permutation` sorts, in pieces, each with its first place."""
    draws = np.random.PCG64(mix(*parts))
    return ((start, draws.random_raw(min(_A_PIECE, n - start))) for start in range(0, n, _A_PIECE))


def _upper(bits: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (bits >> np.uint64(48)).astype(np.int64)


_A_PIECE = 1 << 18


def splitmix64(state: NDArray[np.uint64], number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output `number`, counted from 0, of the SplitMix64 generator in this state (Steele, Lea and Flood 2014).

    Different numbers give different outputs in the same state.

    Example:
        >>> hex(splitmix64(np.zeros(1, np.uint64), np.zeros(1, np.uint64))[0])
        '0xe220a8397b1dcdaf'
    """
    z = state + (number + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def random_bits(of: Sequence[int | str], *counters: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Sixty-four random bits for each tuple of counters; they depend on the tuple and on `of` alone.

    The last counter numbers the outputs of a SplitMix64 generator, and the counters before it determine the
    generator's state in the same way, in integer arithmetic that is exact everywhere. With one counter, different
    values give different bits. `of` is a seed and a name, for example; the draws for different ones are unrelated.

    Example:
        >>> seven, eight, again = random_bits((1, "click"), np.array([7, 8, 7])).tolist()
        >>> seven == again, seven == eight
        (True, False)
    """
    state = np.full(counters[0].shape, mix(*of), np.uint64)
    for counter in counters:
        state = splitmix64(state, counter.astype(np.uint64))
    return state


def uniforms(of: Sequence[int | str], *counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), from the upper 53 bits of `random_bits`.

    Example:
        >>> uniforms(("example",), np.array([3, 8])).round(3).tolist()
        [0.45, 0.69]
    """
    return (random_bits(of, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def open_uniforms(of: Sequence[int | str], *counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in (0, 1), whose logarithm is finite: those of `uniforms` plus half the distance between two of them."""
    return np.minimum(uniforms(of, *counters) + 2.0**-54, 1 - 2.0**-53)  # the largest sum would round up to 1
