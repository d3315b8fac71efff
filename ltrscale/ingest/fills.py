"""Finds the values that fill missing ones: numbers of the config, or medians over the input.

Shapes: N rows, F features.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ltrscale.arrays import Floats
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.errors import InputError
from ltrscale.ingest.assembly import in_periods
from ltrscale.ingest.inputs import Unit, UnitSettings
from ltrscale.ingest.mapping import Fill

_MOST_VALUES = 1 << 20


def find_fills(work: UnitSettings, units: Sequence[Unit], before: Dataset | None) -> dict[str, float]:
    """The fill value of each filled feature; from the data set that is added to, if there is one."""
    mapping = work.config.source.mapping
    fills = mapping.fills_of(work.features) if mapping else {}
    if before is not None:
        _check_same(before, fills)
        return before.manifest.fills
    constants = {name: float(np.float32(value)) for name, value in fills.items() if value != "median"}
    return constants | _medians([name for name, value in fills.items() if value == "median"], work, units)


def _check_same(dataset: Dataset, new_fills: Mapping[str, Fill]) -> None:
    old_fills = dataset.manifest.fills
    for name in sorted(new_fills.keys() | old_fills.keys()):
        new, old = new_fills.get(name), old_fills.get(name)
        same = new == "median" or (new is not None and float(np.float32(new)) == old)
        if (new is None) != (old is None) or not same:
            state = "stay missing" if old is None else f"are {old:g}"
            raise InputError(
                f"{dataset.url}: missing values of {name!r} {state} there; prepare with the same fill, or into another "
                "directory"
            )


def _medians(names: Sequence[str], work: UnitSettings, units: Sequence[Unit]) -> dict[str, float]:
    """The medians of some features over rows of the configured periods, by default over all rows."""
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


class _Values:
    """Values of a feature for their median; beyond a million, only every second, fourth, ... value."""

    def __init__(self) -> None:
        self.seen, self._step, self._kept = 0, 1, [np.empty(0, np.float32)]

    def add(self, values_N: Floats) -> None:
        """Add the finite ones."""
        values_n = values_N[np.isfinite(values_N)]
        self._kept.append(values_n[-self.seen % self._step :: self._step].copy())
        self.seen += len(values_n)
        while sum(map(len, self._kept)) > _MOST_VALUES:
            self._kept, self._step = [np.concatenate(self._kept)[::2]], 2 * self._step

    def median(self) -> float:
        return float(np.float32(np.median(np.concatenate(self._kept).astype(np.float64))))
