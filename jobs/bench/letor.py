"""LETOR text parsing against scikit-learn's reader, in CPU seconds."""

import time
from statistics import median

import numpy as np

from jobs.bench.measure import Row
from jobs.bench.shapes import N_FEATURES, write_letor
from ltrscale import storage
from ltrscale.data.ingest.letor import read_letor
from ltrscale.errors import InputError

_GROUPS = 160
_ROUNDS = 3


def bench_letor() -> list[Row]:
    """Parse an MSLR-like file with our reader and with scikit-learn's, in turns; medians of CPU seconds.

    Raises:
        InputError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError as error:
        missing = "only: benchmark 'letor' needs scikit-learn"
        raise InputError(f"{missing}; pip install 'ltrscale[dev]' or leave it out") from error

    with storage.scratch.directory() as folder:
        path = folder / "letor.txt"
        n = write_letor(path, _GROUPS)
        ours, peer = [], []
        for _ in range(_ROUNDS):
            start = time.process_time()
            rows = sum(len(block) for block in read_letor(str(path), n_features=N_FEATURES, dense=True))
            middle = time.process_time()
            features_NF, *_ = load_svmlight_file(str(path), dtype=np.float32, query_id=True)
            ours.append(middle - start)
            peer.append(time.process_time() - middle)
            assert rows == features_NF.shape[0] == n
    ours_s, peer_s = median(ours), median(peer)
    return [
        Row(
            name="LETOR text against scikit-learn",
            ratio=peer_s / ours_s,
            goal=6,
            at_least=True,
            ours=f"{n / ours_s / 1000:.0f} k docs/CPU-s",
            peer=f"{n / peer_s / 1000:.0f} k docs/CPU-s",
            note=f"{n:,} documents, {N_FEATURES} features, plain text",
        )
    ]
