"""List lengths like those of web search, so that every benchmark measures the same shape."""

import numpy as np
from numpy.typing import NDArray

LONGEST = 1251


def mslr_lengths(n_groups: int, seed: int) -> NDArray[np.int64]:
    """Lengths of groups distributed like those of MSLR-WEB: a lognormal cut at its longest list.

    The mean is about 124, the length of the list that the average document is in (E[L^2] / E[L]) about 178.

    Example:
        >>> lengths_Q = mslr_lengths(50_000, seed=0)
        >>> bool(abs(lengths_Q.mean() - 124) < 2), bool(abs((lengths_Q**2).sum() / lengths_Q.sum() - 178) < 4)
        (True, True)
    """
    spread = np.log(178 / 124)  # of a lognormal, E[L^2] / E[L] is the mean times exp(sigma^2)
    lengths_Q = np.random.default_rng(seed).lognormal(np.log(124) - spread / 2, np.sqrt(spread), n_groups)
    return np.clip(np.rint(lengths_Q), 1, LONGEST).astype(np.int64)
