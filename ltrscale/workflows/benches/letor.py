"""LETOR text parsing against scikit-learn's reader, in CPU seconds."""

import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from ltrscale.data.letor import read_letor
from ltrscale.workflows.benches.row import Row
from ltrscale.workflows.benches.shapes import mslr_lengths

_DOCUMENTS = 20_000
_FEATURES = 136
_ROUNDS = 3


def bench_letor() -> list[Row]:
    """Parse one MSLR-like file with our reader and with scikit-learn's, in turn; medians of CPU seconds."""
    from sklearn.datasets import load_svmlight_file  # here, for it is no dependency of the package itself

    with TemporaryDirectory(prefix="ltrscale-bench-") as folder:
        path = Path(folder) / "letor.txt"
        _write_letor(path)
        ours, peer = [], []
        for _ in range(_ROUNDS):
            start = time.process_time()
            rows = sum(len(block) for block in read_letor(str(path), n_features=_FEATURES, dense=True))
            middle = time.process_time()
            features_NF, *_ = load_svmlight_file(str(path), dtype=np.float32, query_id=True)
            ours.append(middle - start)
            peer.append(time.process_time() - middle)
            assert rows == features_NF.shape[0] == _DOCUMENTS
    ours_s, peer_s = median(ours), median(peer)
    return [
        Row(
            name="LETOR text against scikit-learn",
            ratio=peer_s / ours_s,
            goal=6,
            at_least=True,
            ours=f"{_DOCUMENTS / ours_s / 1000:.0f} k docs/CPU-s",
            peer=f"{_DOCUMENTS / peer_s / 1000:.0f} k docs/CPU-s",
            note=f"{_DOCUMENTS} documents, {_FEATURES} features, plain text",
        )
    ]


def _write_letor(path: Path) -> None:
    """Rows that look like MSLR's: half of the columns are counts, half have six digits, and above a third is 0."""
    rng = np.random.default_rng(0)
    shape = (_DOCUMENTS, _FEATURES)
    values_NF = rng.lognormal(1.5, 1.5, shape)
    values_NF[:, ::2] = np.floor(values_NF[:, ::2])
    values_NF[rng.random(shape) < 1 / 3] = 0
    labels_N = rng.integers(0, 5, _DOCUMENTS)
    lengths_Q = mslr_lengths(_DOCUMENTS, seed=0)  # more groups than are needed, whatever their lengths
    query_N = np.repeat(np.arange(len(lengths_Q)), lengths_Q)[:_DOCUMENTS]
    with path.open("w", newline="") as file:
        for label, query, values_F in zip(labels_N.tolist(), query_N.tolist(), values_NF.tolist(), strict=True):
            features = " ".join(f"{i}:{value:g}" for i, value in enumerate(values_F, 1))
            file.write(f"{label} qid:{query} {features} \r\n")
