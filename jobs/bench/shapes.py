"""Lists and text with the shape of web search data, shared by all benchmarks."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.data.dataset.manifest import Feature, Manifest
from ltrscale.data.dataset.writer import Compression, DatasetWriter

LONGEST = 1251
N_FEATURES = 136
_DIFFERENT_ROWS = 1000
_GROUPS_A_BLOCK = 400


def mslr_lengths(n_groups: int, seed: int) -> NDArray[np.int64]:
    """Group lengths distributed like those of MSLR-WEB: a lognormal cut at its longest list.

    The mean is about 124; the average document is in a list of about 178 (E[L^2] / E[L]).

    Example:
        >>> lengths_Q = mslr_lengths(50_000, seed=0)
        >>> bool(abs(lengths_Q.mean() - 124) < 2), bool(abs((lengths_Q**2).sum() / lengths_Q.sum() - 178) < 4)
        (True, True)
    """
    spread = np.log(178 / 124)  # of a lognormal, E[L^2] / E[L] is the mean times exp(sigma^2)
    lengths_Q = np.random.default_rng(seed).lognormal(np.log(124) - spread / 2, np.sqrt(spread), n_groups)
    return np.clip(np.rint(lengths_Q), 1, LONGEST).astype(np.int64)


def write_letor(path: Path, n_groups: int) -> int:
    """Write LETOR text that looks like MSLR's; returns its number of documents.

    Half of the columns are counts, half have six digits, and more than a third of the values are 0. The same thousand
    rows repeat, so that writing takes no longer than the measurement.
    """
    rng = np.random.default_rng(0)
    shape = (_DIFFERENT_ROWS, N_FEATURES)
    values = rng.lognormal(1.5, 1.5, shape)
    values[:, ::2] = np.floor(values[:, ::2])
    values[rng.random(shape) < 1 / 3] = 0
    rows = [" ".join(f"{f}:{value:g}" for f, value in enumerate(row, 1)) for row in values.tolist()]
    lengths_Q = mslr_lengths(n_groups, seed=0)
    with path.open("w", newline="") as file:
        for query, length in enumerate(lengths_Q.tolist()):
            file.writelines(f"{i % 5} qid:{query} {rows[(query + i) % _DIFFERENT_ROWS]} \r\n" for i in range(length))
    return int(lengths_Q.sum())


def write_dataset(url: str, compression: Compression, *, groups: int) -> None:
    """Write a data set of one period, whose list lengths and compressibility resemble those of MSLR-WEB.

    A thousand groups have about 68 MB before compression. The content is deterministic.
    """
    rng = np.random.default_rng(0)
    lengths_Q = mslr_lengths(groups, seed=0)
    with storage.Commit(url) as commit:
        writer = DatasetWriter(commit, n_features=N_FEATURES, compression=compression)
        for first in range(0, groups, _GROUPS_A_BLOCK):
            block_Q = lengths_Q[first : first + _GROUPS_A_BLOCK]
            n = int(block_Q.sum())
            features_NF = np.where(rng.random((n, N_FEATURES)) < 0.4, 0, rng.normal(size=(n, N_FEATURES)).round(2))
            columns = {
                "gid": pa.array(np.arange(first, first + len(block_Q))),
                "features": _lists(features_NF, block_Q * N_FEATURES),
                "labels": _lists(rng.integers(0, 5, n), block_Q),
            }
            writer.add("all", pa.table(columns))
        files = tuple(writer.close())
        features = tuple(Feature(name=f"f{i}") for i in range(N_FEATURES))
        commit.finish(Manifest(features=features, files=files).model_dump(mode="json"))


def _lists(values: np.ndarray, lengths_Q: NDArray[np.int64]) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths_Q)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel().astype(np.float32)))
