"""Parsing LETOR text against scikit-learn and XGBoost, and the memory of `prepare`."""

from pathlib import Path

import numpy as np
import xgboost

from jobs.bench.measure import N_FEATURES, Row, apart, resident_peak, write_letor
from ltrscale import storage
from ltrscale.devices import cpu_seconds
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.letor import read_letor
from ltrscale.ingest.prepare import prepare

_LISTS_OF_50_MB, _LISTS_OF_500_MB = 400, 4_000
_PARSED_LISTS, _ROUNDS = 160, 9


def bench_prepare_memory() -> list[Row]:
    """Prepare LETOR text of about 50 and 500 MB, one process each, and compare their peak resident memory."""
    with storage.scratch.directory() as folder:
        small, large = (
            _peak_of_prepare(folder / str(groups), groups) for groups in (_LISTS_OF_50_MB, _LISTS_OF_500_MB)
        )
    return [
        Row(
            name="prepare: peak memory, an input 10 times larger",
            ratio=large / small,
            goal=1.2,
            at_least=False,
            ours=f"{large / 2**20:.0f} MB",
            peer=f"{small / 2**20:.0f} MB",
            note=f"{_LISTS_OF_50_MB} and {_LISTS_OF_500_MB} web search lists, {N_FEATURES} features, one period",
        )
    ]


def _peak_of_prepare(folder: Path, groups: int) -> int:
    """Peak resident bytes, including imports, of a process that prepares this number of groups."""
    folder.mkdir()
    write_letor(folder / "log.txt", groups)
    peak = apart(_prepare, str(folder))
    (folder / "log.txt").unlink()
    return peak


def _prepare(folder: str) -> int:
    config = PrepareConfig.model_validate({"inputs": f"{folder}/log.txt", "source": {"kind": "letor"}})
    prepare(config, f"{folder}/out")
    return resident_peak()


def bench_letor() -> list[Row]:
    """Parse an MSLR-like file with our reader, XGBoost's and scikit-learn's, in turns; medians of CPU seconds.

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
        n = write_letor(path, _PARSED_LISTS)

        def parse() -> None:
            rows = sum(len(block) for block in read_letor(str(path), n_features=N_FEATURES, dense=True))
            assert rows == n

        def parse_with_xgboost() -> None:
            with xgboost.config_context(verbosity=0):  # it warns that text input will go
                matrix = xgboost.DMatrix(f"{path}?format=libsvm", nthread=1)
            assert (matrix.num_row(), len(matrix.get_uint_info("group_ptr"))) == (n, _PARSED_LISTS + 1)

        def parse_with_sklearn() -> None:
            features_NF, *_ = load_svmlight_file(str(path), dtype=np.float32, query_id=True)
            assert features_NF.shape[0] == n

        ours_s, *peers_s = cpu_seconds(parse, parse_with_xgboost, parse_with_sklearn, repeats=_ROUNDS)
    return [
        Row(
            name=f"LETOR text against {peer}",
            ratio=peer_s / ours_s,
            goal=goal,
            ours=f"{n / ours_s / 1000:.0f} k docs/CPU-s",
            peer=f"{n / peer_s / 1000:.0f} k docs/CPU-s",
            note=f"{n:,} documents, {N_FEATURES} features, plain text",
        )
        for peer, goal, peer_s in zip(("XGBoost", "scikit-learn"), (1, 6), peers_s, strict=True)
    ]
