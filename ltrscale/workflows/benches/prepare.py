"""Peak memory of `prepare` on an input, and on one that is ten times larger."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ltrscale.data.prepare import PrepareConfig, prepare
from ltrscale.workflows.benches.row import Row
from ltrscale.workflows.benches.shapes import mslr_lengths

_GROUPS = 400
_FEATURES = 136


def bench_prepare_memory() -> list[Row]:
    """Prepare LETOR text of about 50 and 500 MB, a process each, and compare their peak resident memory."""
    with TemporaryDirectory(prefix="ltrscale-bench-") as folder:
        small, large = (_peak_of_prepare(Path(folder) / str(groups), groups) for groups in (_GROUPS, 10 * _GROUPS))
    return [
        Row(
            name="prepare: peak memory, an input 10 times larger",
            ratio=large / small,
            goal=1.2,
            at_least=False,
            ours=f"{large / 2**20:.0f} MB",
            peer=f"{small / 2**20:.0f} MB",
            note=f"{_GROUPS} and {10 * _GROUPS} web search lists of text with {_FEATURES} features, one period",
        )
    ]


def _peak_of_prepare(folder: Path, groups: int) -> int:
    """Bytes that a process needs at most, imports and all, which prepares so many groups."""
    folder.mkdir()
    _write_letor(folder / "log.txt", groups)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        peak = pool.submit(_prepare, str(folder)).result()
    (folder / "log.txt").unlink()
    return peak


def _prepare(folder: str) -> int:
    config = PrepareConfig.model_validate({"inputs": f"{folder}/log.txt", "source": {"kind": "letor"}})
    prepare(config, f"{folder}/out")
    # not ru_maxrss, which a process takes over from the one that started it
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _write_letor(path: Path, groups: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(1.5, 1.5, (1000, _FEATURES))
    rows = [" ".join(f"{f}:{v:.3f}" for f, v in enumerate(row, 1)) + "\n" for row in values.tolist()]
    with path.open("w") as file:
        for query, length in enumerate(mslr_lengths(groups, seed=0).tolist()):
            file.writelines(f"{i % 5} qid:{query} {rows[(query + i) % 1000]}" for i in range(length))
