"""Passes over the input before any unit is written: for texts to learn from, and for the medians that fill gaps.

Shapes: N rows, F features.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from ltrscale.arrays import Bools, Floats
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.ids import SeenHashes, hash_ids
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import Unit, UnitSettings
from ltrscale.ingest.mapping import Fill
from ltrscale.ingest.rows import RowBlock
from ltrscale.ingest.texts import TokenizerConfig

_MOST_VALUES = 1 << 20


def training_texts(
    settings: UnitSettings, units: Sequence[Unit], tokenizer: TokenizerConfig, folder: Path
) -> Iterator[list[str]]:
    """The texts of all token fields in the periods that a tokenizer is trained on, each distinct text once."""
    if not tokenizer.learns_from:
        return
    fields = {field.column for field in settings.config.source.token_fields}
    seen = SeenHashes(folder)
    read = settings.config.source.open(settings.features, first=settings.first.url, encoders={})
    for unit in units:
        for block in chain.from_iterable(map(read, unit.files)):
            wanted_N = pa.array(_in_periods(block, unit, settings.config.period, tokenizer.learns_from))
            for column in (column for name, column in block.columns.items() if name in fields):
                texts = column.filter(wanted_N).unique().drop_null().to_pylist()
                new = ~seen.add(hash_ids(texts))
                yield [text for text, is_new in zip(texts, new.tolist(), strict=True) if is_new]


def find_fills(settings: UnitSettings, units: Sequence[Unit], existing: Dataset | None) -> dict[str, float]:
    """The fill value of each filled feature; from the data set that is added to, if there is one."""
    mapping = settings.config.source.mapping
    fills = mapping.fills_of(settings.features) if mapping else {}
    if existing is not None:
        _check_same(existing, fills)
        return existing.manifest.fills
    constants = {name: float(np.float32(value)) for name, value in fills.items() if value != "median"}
    return constants | _medians([name for name, value in fills.items() if value == "median"], settings, units)


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


def _medians(names: Sequence[str], settings: UnitSettings, units: Sequence[Unit]) -> dict[str, float]:
    """The medians of some features over rows of the configured periods, by default over all rows."""
    if not names:
        return {}
    source = settings.config.source
    assert source.mapping is not None
    periods = source.mapping.fill_periods
    places = [[feature.name for feature in settings.features].index(name) for name in names]
    values = [_Values() for _ in names]
    read = source.open(settings.features, first=settings.first.url, encoders={}, encoding=settings.encoding)
    for unit in units:
        for file in unit.files:
            for block in read(file):
                rows_NF = block.features_NF[_in_periods(block, unit, settings.config.period, periods)]
                for place, each in zip(places, values, strict=True):
                    each.add(rows_NF[:, place])
    if empty := [name for name, each in zip(names, values, strict=True) if not each.seen]:
        where = f" in {', '.join(periods)}" if periods else ""
        raise InputError(f"fill: {empty[0]!r} has no value{where}, so no median; give a number, or other fill_periods")
    return {name: each.median() for name, each in zip(names, values, strict=True)}


def _in_periods(block: RowBlock, unit: Unit, default: str, wanted: Sequence[str]) -> Bools:
    """A mask of the rows in some periods, given by name or as ranges A..B; all rows if none are given."""
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
