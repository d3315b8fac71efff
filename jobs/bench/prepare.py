"""Peak memory of `prepare` on an input and on a ten times larger one."""

from pathlib import Path

from jobs.bench.measure import Row, apart, resident_peak
from jobs.bench.shapes import N_FEATURES, write_letor
from ltrscale import storage
from ltrscale.data.ingest.inputs import PrepareConfig
from ltrscale.data.ingest.prepare import prepare

_GROUPS = 400


def bench_prepare_memory() -> list[Row]:
    """Prepare LETOR text of about 50 and 500 MB, one process each, and compare their peak resident memory."""
    with storage.scratch.directory() as folder:
        small, large = (_peak_of_prepare(folder / str(groups), groups) for groups in (_GROUPS, 10 * _GROUPS))
    return [
        Row(
            name="prepare: peak memory, an input 10 times larger",
            ratio=large / small,
            goal=1.2,
            at_least=False,
            ours=f"{large / 2**20:.0f} MB",
            peer=f"{small / 2**20:.0f} MB",
            note=f"{_GROUPS} and {10 * _GROUPS} web search lists of text with {N_FEATURES} features, one period",
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
