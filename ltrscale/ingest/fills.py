"""Numbers for missing values: constants, and medians of the first rows, which a data set keeps for all that come later.

Shapes: N rows, F features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ltrscale.data.dataset.manifest import Dataset, Feature
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig, Unit, UnitSettings
from ltrscale.ingest.mapping import Fill
from ltrscale.ingest.rows import RowBlock

_MOST_VALUES = 1 << 20


def find_fills(work: UnitSettings, units: Sequence[Unit], before: Dataset | None) -> dict[str, float]:
    """The number for a missing value of each feature that is filled; those of the data set that is added to, if any.

    Raises:
        InputError: no numeric feature is named so; a feature has no value to take a median of; the data set that is
            added to fills other features, or with other numbers.
    """
    wanted = work.config.source.wanted_fills(work.features)
    if before is not None:
        _check_same(before, wanted)
        return before.manifest.fills
    found = {name: float(np.float32(value)) for name, value in wanted.items() if value != "median"}
    return found | _medians([name for name, value in wanted.items() if value == "median"], work, units)


def filled(config: PrepareConfig, fills: Mapping[str, float]) -> PrepareConfig:
    """The config with the numbers that were found."""
    return config.replace(source=config.source.filled(fills))


def completed(block: RowBlock, config: PrepareConfig, features: Sequence[Feature]) -> RowBlock:
    """The block with missing features filled, and infinite ones (also beyond float32) missing, as the config says."""
    missing_NF = np.isnan(block.features_NF)
    if config.infinite == "missing":
        missing_NF |= np.isinf(block.features_NF)
    if not missing_NF.any():
        return block
    fill = config.source.fills
    fills_F = np.array([fill.get(feature.name, np.nan) for feature in features], np.float32)
    return replace(block, features_NF=np.where(missing_NF, fills_F, block.features_NF))


def _check_same(before: Dataset, wanted: Mapping[str, Fill]) -> None:
    there = before.manifest.fills
    for name in sorted(wanted.keys() | there.keys()):
        ours, theirs = wanted.get(name), there.get(name)
        same = ours == "median" or (ours is not None and float(np.float32(ours)) == theirs)
        if (ours is None) != (theirs is None) or not same:
            says = "stay missing" if theirs is None else f"are {theirs:g}"
            raise InputError(
                f"{before.url}: missing values of {name!r} {says} there; prepare with the same fill, or into another "
                "directory"
            )


def _medians(names: Sequence[str], work: UnitSettings, units: Sequence[Unit]) -> dict[str, float]:
    """The medians of some features over the rows of the periods that the config names, of all rows by default."""
    if not names:
        return {}
    source = work.config.source
    assert source.mapping is not None
    periods = source.mapping.fill_periods
    places = [[feature.name for feature in work.features].index(name) for name in names]
    values = [_Values() for _ in names]
    read = source.open(work.features, first=work.first.url, encoders={}, encoding=work.encoding)
    for unit in units:
        for file in unit.files:
            for block in read(file):
                rows_NF = block.features_NF[in_periods(block, unit, work.config.period, periods)]
                for place, each in zip(places, values, strict=True):
                    each.add(rows_NF[:, place])
    if empty := [name for name, each in zip(names, values, strict=True) if not each.seen]:
        where = f" in {', '.join(periods)}" if periods else ""
        raise InputError(f"fill: {empty[0]!r} has no value{where}, so no median; give a number, or other fill_periods")
    return {name: each.median() for name, each in zip(names, values, strict=True)}


def in_periods(block: RowBlock, unit: Unit, default: str, wanted: Sequence[str]) -> NDArray[np.bool_]:
    """The rows of some periods, named or as ranges A..B; all rows where none is named."""
    if not wanted:
        return np.ones(len(block), bool)
    ranges = [(first, last if dots else first) for first, dots, last in (each.partition("..") for each in wanted)]
    if unit.period or block.periods_N is None:
        names, index_N = [unit.period or block.period or default], np.zeros(len(block), np.int64)
    else:
        coded = block.periods_N.fill_null(default).dictionary_encode()
        names, index_N = coded.dictionary.to_pylist(), coded.indices.to_numpy()
    inside = np.array([any(first <= name <= last for first, last in ranges) for name in names], bool)
    return inside[index_N] if len(block) else np.zeros(0, bool)


class _Values:
    """Values of a feature for their median: every one or, of more than a million, every second, fourth, ... one."""

    def __init__(self) -> None:
        self.seen, self._step, self._kept = 0, 1, [np.empty(0, np.float32)]

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Add the finite ones."""
        values_n = values_N[np.isfinite(values_N)]
        self._kept.append(values_n[-self.seen % self._step :: self._step].copy())
        self.seen += len(values_n)
        while sum(map(len, self._kept)) > _MOST_VALUES:
            self._kept, self._step = [np.concatenate(self._kept)[::2]], 2 * self._step

    def median(self) -> float:
        """The median, in single precision."""
        return float(np.float32(np.median(np.concatenate(self._kept).astype(np.float64))))
