"""Processes one unit of the input: read, validate, group, partition by period, then write or just count.

Memory holds one block of rows, the open group, and a few megabytes per period that wait for their row group.

Shapes: Q groups, N rows or documents, F features, K features that may still follow the place, P pairs of neighbours.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.arrays import Bits, Floats, Ints
from ltrscale.data.dataset.files import Counts, DataFiles, total_of
from ltrscale.data.dataset.manifest import Accounting, Feature
from ltrscale.data.dataset.summaries import FeatureStats, LabelCounts
from ltrscale.data.dataset.tokens import TokenSummary, is_of_documents, summarise, summed
from ltrscale.data.dataset.writer import DatasetWriter
from ltrscale.data.ids import QueryIds
from ltrscale.errors import InputError
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.inputs import PrepareConfig, Unit, UnitSettings
from ltrscale.ingest.rows import Quarantine, Rejection, RowBlock, row_periods
from ltrscale.ingest.sort import sort_rows
from ltrscale.ingest.source import Reader
from ltrscale.ingest.texts import FULL
from ltrscale.ingest.validate import Groups, Validator, to_table, total_accounting
from ltrscale.progress import Advance

_FEWEST_PAIRS = 20
"""Pairs of documents to compare; fewer may agree by chance."""
_PERIOD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")


class LikePlaces:
    """Finds features that follow the place, from streamed groups; few candidates are left after the first groups."""

    def __init__(self, n_features: int) -> None:
        self._pairs = 0
        self._rises_F = np.ones(n_features, np.bool_)
        self._falls_F = np.ones(n_features, np.bool_)

    def add(self, features_NF: Floats, positions_N: pa.Array, offsets_Q1: Ints) -> None:
        """Add whole groups; documents without a position are left out."""
        places_N = np.asarray(positions_N.to_numpy(zero_copy_only=False), np.float64)
        group_N = np.repeat(np.arange(len(offsets_Q1) - 1), np.diff(offsets_Q1))
        order_N = np.lexsort((places_N, group_N))
        before_P, after_P = order_N[:-1], order_N[1:]
        rises_P = (group_N[before_P] == group_N[after_P]) & (places_N[before_P] < places_N[after_P])  # NaN is no place
        self._pairs += int(rises_P.sum())
        columns_K = np.flatnonzero(self._rises_F | self._falls_F)
        x_NK = features_NF[:, columns_K]
        step_PK = x_NK[after_P[rises_P]] - x_NK[before_P[rises_P]]
        self._rises_F[columns_K] &= (step_PK > 0).all(axis=0)
        self._falls_F[columns_K] &= (step_PK < 0).all(axis=0)

    def merge(self, other: "LikePlaces") -> None:
        """Add the groups of another instance."""
        self._pairs += other._pairs
        self._rises_F &= other._rises_F
        self._falls_F &= other._falls_F

    def state(self) -> dict[str, Any]:
        """All that it knows, as plain data."""
        rises, falls = (np.flatnonzero(each_F).tolist() for each_F in (self._rises_F, self._falls_F))
        return {"pairs": self._pairs, "rises": rises, "falls": falls}

    @classmethod
    def restored(cls, state: Mapping[str, Any], n_features: int) -> Self:
        """The instance that had this state."""
        restored, numbers_F = cls(n_features), np.arange(n_features)
        restored._pairs = state["pairs"]
        restored._rises_F = np.isin(numbers_F, state["rises"])
        restored._falls_F = np.isin(numbers_F, state["falls"])
        return restored

    def among(self, features: Sequence[Feature]) -> list[str]:
        """The names of the features that order every list alike."""
        alike_F = (self._rises_F | self._falls_F) if self._pairs >= _FEWEST_PAIRS else np.zeros(len(features), np.bool_)
        return [feature.name for feature, alike in zip(features, alike_F, strict=True) if alike]


class Written:
    """What one or several units have written: data files, quarantine, and the manifest's statistics of them alone.

    The accounting excludes query ids that only rejected rows have, since other units may have rows with them.
    """

    def __init__(self, n_features: int, schema_of: str) -> None:
        self.units = 0
        self.files: list[DataFiles] = []
        self.schema: pa.Schema | None = None
        self.schema_of = schema_of
        """The columns of the groups, and where they were found first."""
        self.accounting = Accounting()
        self.stats, self.labels, self.places = FeatureStats(n_features), LabelCounts(), LikePlaces(n_features)
        self.encoders: dict[str, CategoryEncoder] = {}
        self.tokens: dict[str, TokenSummary] = {}
        self.quarantine: tuple[str, ...] = ()
        self.first_rejections: list[Rejection] = []
        self.kept_ids: Bits = np.empty(0, np.uint64)
        """Of one unit, the sorted hashes of the query ids of kept groups; none for a fixed period, whose ids are
        separate."""
        self.other_ids: Bits = np.empty(0, np.uint64)
        """Those of all its other groups with an id that is new in it."""

    def check_columns(self, schema: pa.Schema, where: str) -> None:
        """Refuse, with an InputError, groups with other columns than those before: one reader serves all files."""
        self.schema = self.schema or schema
        types, other_types = (dict(zip(each.names, each.types, strict=True)) for each in (schema, self.schema))
        for name in types | other_types:
            if types.get(name) != other_types.get(name):
                kinds = f"{types.get(name, 'missing')} where it is {other_types.get(name, 'missing')}"
                raise InputError(
                    f"{where}: column {name!r} of its groups is {kinds} in {self.schema_of}; "
                    "prepare the two apart, or give the input the same columns and types"
                )

    def add(self, unit: "Written") -> None:
        """Add another unit, in order."""
        if self.schema is None:
            self.schema, self.schema_of = unit.schema, unit.schema_of
        elif unit.schema is not None:
            self.check_columns(unit.schema, unit.schema_of)
        self.units += unit.units
        self.files += unit.files
        self.accounting = total_accounting([self.accounting, unit.accounting])
        self.stats.merge(unit.stats)
        self.labels.merge(unit.labels)
        self.places.merge(unit.places)
        for name, encoder in unit.encoders.items():
            self.encoders.setdefault(name, CategoryEncoder()).merge(encoder)
        self.tokens = summed([self.tokens, unit.tokens])
        self.quarantine += unit.quarantine
        self.first_rejections += unit.first_rejections[: 5 - len(self.first_rejections)]


@dataclass(frozen=True)
class Survey:
    """The groups of a unit, each query id once: hash and documents of the kept groups, and hashes of the others."""

    rows: int
    kept_Q: Bits
    documents_Q: NDArray[np.int32]
    others_Q: Bits


def write_unit(
    settings: UnitSettings,
    unit: Unit,
    before: Counts,
    *,
    commit: storage.Commit,
    ids: QueryIds,
    folder: Path,
    advance: Advance,
) -> Written:
    """Read a unit and write its data files and quarantine through the commit.

    `before` counts what earlier units have written. `ids` must have the unit's query ids that occur in earlier units,
    and receives those of this unit; `folder` is for temporary files.

    Raises:
        InputError: a file is missing, cannot be decoded, or has other features than the first; a period is no valid
            directory name or is in the data set already.
    """
    config, done = settings.config, Written(len(settings.features), str(unit))
    quarantine = Quarantine(commit, number=unit.number)
    validator = _validator(settings, unit, ids, quarantine)
    writer = DatasetWriter(
        commit,
        n_features=len(settings.features),
        compression=config.compression,
        prefix=f"part-{unit.number:05}",
        before=(before.groups, before.documents),
    )
    kept, others = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for groups in _groups(settings, unit, validator, done.encoders, folder, advance):
        (others if unit.period else kept).append(groups.hashes_Q)
        done.stats.add(groups.rows.features_NF, groups.offsets_Q1)
        if "positions" in groups.rows.columns:
            done.places.add(groups.rows.features_NF, groups.rows.columns["positions"], groups.offsets_Q1)
        done.labels.add(groups.rows.labels_N)
        table = to_table(groups, before.groups + validator.counts["groups_kept"] - len(groups))
        done.tokens = summed([done.tokens, summarise(table), _cut_off(groups)])
        done.check_columns(table.schema, groups.rows.file)
        writer.add(_periods(groups, settings, unit), table)
        del groups, table  # as in `_groups`
    done.units, done.files, done.accounting = 1, [writer.close()], validator.accounting()
    done.quarantine, done.first_rejections = quarantine.close(), quarantine.first
    done.kept_ids, done.other_ids = (np.sort(np.concatenate(each)) for each in (kept, [*others, *validator.others]))
    return done


def write_units(
    settings: UnitSettings,
    units: Sequence[Unit],
    before: Counts,
    *,
    commit: storage.Commit,
    ids: QueryIds,
    folder: Path,
    advance: Advance,
    take: Callable[[Written], None],
) -> None:
    """Write units one after the other, as `write_unit`; `take` receives them."""
    for unit in units:
        written = write_unit(settings, unit, before, commit=commit, ids=ids, folder=folder, advance=advance)
        before = total_of([before, *(files.counts() for files in written.files)])
        take(written)


def completed(block: RowBlock, config: PrepareConfig, features: Sequence[Feature]) -> RowBlock:
    """The block with infinite features (also beyond float32) set to missing and missing ones filled, as configured."""
    missing_NF = np.isnan(block.features_NF)
    if config.infinite == "missing":
        missing_NF |= np.isinf(block.features_NF)
    if not missing_NF.any():
        return block
    fill = config.source.fills
    fills_F = np.array([fill.get(feature.name, np.nan) for feature in features], np.float32)
    return replace(block, features_NF=np.where(missing_NF, fills_F, block.features_NF))


def _cut_off(groups: Groups) -> dict[str, TokenSummary]:
    """How much was cut off the texts of some groups, by column; for query texts, the group's first row counts."""
    summaries, columns = {}, groups.rows.columns
    for name in (name.removeprefix(FULL) for name in columns if name.startswith(FULL)):
        cut_N = columns[FULL + name].to_numpy() - pc.list_value_length(columns[name]).to_numpy()
        cut = cut_N if is_of_documents(name) else cut_N[groups.offsets_Q1[:-1]]
        summaries[name] = TokenSummary(cut_lists=int((cut > 0).sum()), cut_tokens=int(cut.sum()))
    return summaries


def survey_unit(settings: UnitSettings, unit: Unit, *, folder: Path) -> Survey:
    """Read a unit and report the groups that it would keep if it were the first; raises as `write_unit`."""
    validator = _validator(settings, unit, QueryIds(folder), None)
    hashes, documents = [np.empty(0, np.uint64)], [np.empty(0, np.int32)]

    for groups in _groups(settings, unit, validator, {}, folder, silent):
        _periods(groups, settings, unit)  # raises before anything is written
        hashes.append(groups.hashes_Q)
        documents.append(np.diff(groups.offsets_Q1).astype(np.int32))
        del groups
    others_Q = np.concatenate([np.empty(0, np.uint64), *validator.others])
    return Survey(validator.counts["rows_in"], np.concatenate(hashes), np.concatenate(documents), others_Q)


def silent(units: float, of_total: float | None = None) -> None:
    """Ignore progress."""


def _validator(settings: UnitSettings, unit: Unit, ids: QueryIds, quarantine: Quarantine | None) -> Validator:
    config, mapping = settings.config, settings.config.source.mapping
    return Validator(
        ids,
        quarantine,
        max_group=config.max_group,
        missing_labels=config.source.missing_labels,
        duplicates=config.duplicates,
        unjudged=mapping.unjudged if mapping else "reject",
        features=[feature.name for feature in settings.features],
        scope=unit.period,
    )


def _groups(
    settings: UnitSettings,
    unit: Unit,
    validator: Validator,
    encoders: dict[str, CategoryEncoder],
    folder: Path,
    advance: Advance,
) -> Iterator[Groups]:
    """Read and validate a unit."""
    for blocks in _streams(settings, unit, settings.open(encoders), folder, advance):
        for block in blocks:
            assert block.features_NF.shape[1] == len(settings.features)
            if groups := validator.add(completed(block, settings.config, settings.features)):
                yield groups
            del block, groups  # frees their memory before the next block is read
            pa.default_memory_pool().release_unused()  # Arrow would keep tens of megabytes of freed memory
        if groups := validator.end():
            yield groups


def _streams(
    settings: UnitSettings, unit: Unit, read: Reader, folder: Path, advance: Advance
) -> Iterator[Iterator[RowBlock]]:
    """Inputs of whole groups: each file, or all files sorted (read and yielded, so each pass counts half the bytes)."""
    config = settings.config
    passes = 2 if config.sort else 1
    files = (_counted(read(f), size / passes, advance) for f, size in zip(unit.files, unit.sizes, strict=True))
    if not config.sort:
        return files
    rows = sort_rows(chain.from_iterable(files), memory_limit=config.sort_memory, scratch=folder)
    return iter([_counted(rows, unit.bytes / passes, advance)])


def _counted(blocks: Iterable[RowBlock], size: float, advance: Advance) -> Iterator[RowBlock]:
    """Yield the blocks; each counts as done, with its rows and share of `size`, when the next one is requested."""
    done = 0.0
    for block in blocks:
        rows, share = len(block), block.share
        yield block
        del block  # see _groups
        advance(rows, (share - done) * size)
        done = share
    advance(0, (1 - done) * size)


def _periods(groups: Groups, settings: UnitSettings, unit: Unit) -> pa.StringArray:
    """The period of each group, that of its first row, checked to be a valid directory name and not taken."""
    firsts = pa.array(groups.offsets_Q1[:-1])
    coded = row_periods(groups.rows, unit.period, settings.config.period).take(firsts).dictionary_encode()
    for period in coded.dictionary.to_pylist():
        _check_period(period, groups.rows.file, settings)
    return coded.dictionary.take(coded.indices)


def _check_period(period: str, file: str, settings: UnitSettings) -> None:
    if period in settings.taken:
        raise InputError(
            f"{file}: period {period!r} is in {settings.out} already, and only new periods can be added, or late "
            "events with the features that it has; leave its rows out of the inputs, or prepare them into another "
            "directory (a job takes several data sets)"
        )
    if not _PERIOD.fullmatch(period) or ".." in period:  # a split writes a range of periods as A..B
        raise InputError(
            f"{file}: period {period[:100]!r} cannot name a directory; use letters, digits, . _ + and -, at most 100"
        )
