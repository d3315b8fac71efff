"""The units of work of `prepare`: runs of input files, each handled from reading to finished data files.

Where the input is cut depends on the list of files and their sizes alone. A unit that knows where it goes on from those
before it (`Start`) writes the same files whatever machine handles it, and whenever.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.ingest.inputs import PrepareConfig
from ltrscale.data.ingest.sources import File, find_features


@dataclass(frozen=True)
class Unit:
    """Input files with one fixed period (or none), handled together; `bytes` is their size."""

    number: int
    files: tuple[File, ...]
    sizes: tuple[int, ...]

    @property
    def period(self) -> str:
        """The fixed period, which is the scope of the query ids; empty where there is none."""
        return self.files[0].period or ""

    @property
    def bytes(self) -> int:
        """Bytes of its files."""
        return sum(self.sizes)

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].url}{more}"


def cut_units(
    files: Sequence[File], sizes: Sequence[int], *, unit_bytes: float, sort: bool, first: int = 0
) -> list[Unit]:
    """Cut the input into units: consecutive files of one fixed period of at most `unit_bytes`, or one larger file.

    With `sort`, all files of a fixed period are one unit, wherever they stand. Numbers begin with `first`.

    Example:
        >>> files = [File(url=name) for name in "abcd"]
        >>> [str(unit) for unit in cut_units(files, [5, 5, 20, 1], unit_bytes=10, sort=False)]
        ['a and 1 more', 'c', 'd']
    """
    runs: list[list[int]] = []
    if sort:
        runs = [[i for i, f in enumerate(files) if f.period == p] for p in dict.fromkeys(f.period for f in files)]
    else:
        room = 0.0
        for i, size in enumerate(sizes):
            if not i or files[i].period != files[i - 1].period or size > room:
                runs.append([])
                room = unit_bytes
            runs[-1].append(i)
            room -= size
    return [Unit(k, tuple(files[i] for i in run), tuple(sizes[i] for i in run)) for k, run in enumerate(runs, first)]


@dataclass(frozen=True)
class Work:
    """What all units have in common: how to read, what to write, where; `taken` are periods that may not be added to.

    `first` is the file whose features all others must have.
    """

    config: PrepareConfig
    features: tuple[Feature, ...]
    first: File
    out: str
    taken: frozenset[str] = frozenset()


def open_work(config: PrepareConfig, files: Sequence[File], out: str, taken: Iterable[str] = ()) -> Work:
    """Look at the inputs' features.

    Raises:
        InputError: they cannot be told, or differ between files.
    """
    return Work(config, find_features(config.source, files), files[0], out, frozenset(taken))


@dataclass(frozen=True)
class Start:
    """Where a unit goes on: the gid of its first group, which is the number of groups before, and their documents."""

    gid: int = 0
    documents: int = 0
