"""Slices: query groups that an evaluation judges separately, in addition to all groups together.

The groups with outliers are a slice. Others are the groups that meet a condition (`conditions`), or that have one value
of a column. A group may be in several. Columns of a group are `query_id` and `meta_*` of its data set, and those of
`_COMPUTED`; columns of documents are `label` and the features by their names. docs/methods.md explains all.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import AfterValidator

from ltrscale import storage
from ltrscale.arrays import Bools
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError, nearest
from ltrscale.evaluation.measure.conditions import GroupColumns, columns_named, value_kind
from ltrscale.evaluation.measure.outliers import OutlierDetector, Seen
from ltrscale.late import Late

if TYPE_CHECKING:
    import torch

    from ltrscale import batch
    from ltrscale.batch import QueryGroups
else:
    torch, batch = Late("torch"), Late("ltrscale.batch")

ALL, OUTLIERS = "all", "outliers"
"""The slices that every evaluation has."""
OF_PERIOD = "period="
"""Prefix of the slices of periods."""
_MOST_VALUES = 100
"""The largest number of different values in a column for slices."""
_ENDS = [-1, 0, *(step * 10**power for power in range(9) for step in (1, 2, 5))]
"""The last number of each band except the highest."""
_INNER = (f"{last}" if last == end + 1 else f"{end + 1}..{last}" for end, last in pairwise(_ENDS))
_BANDS = ("below 0", *_INNER, f"{_ENDS[-1] + 1}..")
_COMPUTED: Mapping[str, pa.DataType] = {
    "n_documents": pa.int64(),
    "n_relevant": pa.int64(),
    "min_label": pa.float32(),
    "max_label": pa.float32(),
    "period": pa.string(),
    "outlier": pa.bool_(),
    "missing": pa.bool_(),
    "drifted": pa.bool_(),
}
"""The columns of groups that every evaluation has."""
_OF_FEATURES = {"missing", "drifted"}


def _is_name(name: str) -> str:
    if name in (ALL, OUTLIERS) or "=" in name or not name.strip():
        raise ValueError(f"{name!r} cannot name a slice: {ALL}, {OUTLIERS} and names with = are taken")
    return name


SliceName = Annotated[str, AfterValidator(_is_name)]


@dataclass(frozen=True, eq=False)
class Slicer:
    """Finds the slices of query groups. `make` checks its settings against a selection."""

    conditions: Mapping[str, str]
    by: tuple[str, ...]
    detector: OutlierDetector
    relevant_from: float
    named: frozenset[str]
    """What conditions and `by` name, columns of groups and of documents."""
    stored: tuple[str, ...]
    """Columns of the data set that `find` needs."""
    needs_features: bool
    categories: frozenset[str] = frozenset()
    seen: Seen | None = None
    """The values seen in training, if `drifted` is named."""

    @classmethod
    def make(
        cls,
        conditions: Mapping[str, str],
        by: Sequence[str],
        *,
        detector: OutlierDetector,
        selection: Selection,
        relevant_from: float,
        training: Callable[[], Seen] | None = None,
    ) -> Self:
        """The slicer for a selection's groups; the first file decides which columns exist.

        Args:
            conditions: text of each slice's condition, by the name of the slice.
            by: columns with a slice for every value; numbers are cut into bands.
            detector: finds outlier values.
            selection: the groups.
            relevant_from: lowest label of a relevant document.
            training: looks at the training groups; called only if `drifted` is named.

        Raises:
            InputError: a column does not exist, or is compared with something of another kind.
        """
        stored, features = _stored_types(selection), {feature.name for feature in selection.features}
        of_groups = {name: pa.array([], type_) for name, type_ in {**stored, **_COMPUTED}.items()}
        if training is None:
            del of_groups["drifted"]
        of_documents = {name: pa.array([], pa.float32()) for name in ("label", *features)}
        categories = frozenset(feature.name for feature in selection.features if feature.kind == "categorical")
        none = GroupColumns(of_groups, of_documents, np.zeros(1, np.int64), categories)
        for name, condition in conditions.items():
            try:
                none.where(condition)
            except ValueError as error:
                raise InputError(f"slices.{name}: {error}") from error
        for name in by:
            if name not in of_groups:
                raise InputError(f"slice_by: no column {name!r}; did you mean {nearest(name, of_groups)!r}?")
        if "period" in by:  # known before a group is read
            check_few([f"{OF_PERIOD}{period}" for period in selection.row_groups.by_period()], ["period"])
        named = frozenset(by).union(*map(columns_named, conditions.values()))
        return cls(
            conditions,
            tuple(by),
            detector,
            relevant_from,
            named,
            tuple(sorted(named & stored.keys())),
            bool(detector.rules) or not named.isdisjoint(features | _OF_FEATURES),
            categories,
            training() if training is not None and "drifted" in named else None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The slices that exist for any groups."""
        return (OUTLIERS, *self.conditions)

    def find(self, groups: QueryGroups, period: str, stored: pa.Table) -> dict[str, Bools]:
        """Whether each group is in each slice, by name, shape [Q]; slices by a column's values as they occur.

        Groups are labelled, with features if `needs_features`, and of one period; `stored` has their columns `stored`.

        Raises:
            InputError: a column of `slice_by` holds fractions, or a file lacks a column.
        """
        outlier_Q = np.zeros(groups.n_groups, np.bool_)
        if self.detector.rules:
            outlier_Q = self.detector.outlier_groups(groups).numpy()
        of_groups = {name: _plain(stored.column(name)) for name in self.stored}
        of_groups |= {name: self._computed(name, groups, period, outlier_Q) for name in self.named & _COMPUTED.keys()}
        of_documents = {
            name: pa.array(groups.features_NF[:, i].numpy(), from_pandas=True)
            for i, name in enumerate(self.detector.features)
            if name in self.named
        }
        if "label" in self.named:
            assert groups.labels_N is not None
            of_documents["label"] = pa.array(groups.labels_N.numpy())
        columns = GroupColumns(of_groups, of_documents, groups.offsets_Q1.numpy(), self.categories)
        members = {OUTLIERS: outlier_Q}
        members |= {name: columns.where(condition) for name, condition in self.conditions.items()}
        for name in self.by:
            values = of_groups[name]
            members |= dict(_by_value(name, _bands(name, values) if value_kind(values.type) == "number" else values))
        return members

    def _computed(self, name: str, groups: QueryGroups, period: str, outlier_Q: Bools) -> pa.Array:
        """A column that the data set lacks; the extreme label of a list without documents is null."""
        assert groups.labels_N is not None
        match name:
            case "n_documents":
                return pa.array(groups.lengths_Q.numpy())
            case "n_relevant":
                relevant_N = groups.labels_N >= self.relevant_from
                return pa.array(batch.sum_by_group(relevant_N.long(), groups.offsets_Q1).numpy())
            case "min_label" | "max_label":
                values_Q = torch.segment_reduce(groups.labels_N, name[:3], offsets=groups.offsets_Q1)
                return pa.array(values_Q.numpy(), mask=(groups.lengths_Q == 0).numpy())
            case "outlier":
                return pa.array(outlier_Q)
            case "missing":
                missing_N = groups.features_NF.isnan().any(dim=1)
                return pa.array(batch.sum_by_group(missing_N.long(), groups.offsets_Q1).numpy() > 0)
            case "drifted":
                assert self.seen is not None
                return pa.array(self.seen.lacks(groups).numpy())
            case "period":
                return pa.array([period] * groups.n_groups, pa.string())
        raise AssertionError(name)


def in_order(names: Sequence[str]) -> list[str]:
    """The names of slices by the values of one column, with numbers in numeric order and null last."""

    def key(name: str) -> tuple[bool, bool, list[tuple[int, str]]]:
        value = name.partition("=")[2]
        parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", value)]
        return value == "null", value != _BANDS[0], parts  # the band below 0 does not begin with its number

    return sorted(names, key=key)


def check_few(names: Sequence[str], by: Sequence[str]) -> None:
    """Check that no column makes too many slices; InputError names it."""
    for column in by:
        if sum(name.startswith(f"{column}=") for name in names) > _MOST_VALUES:
            raise _too_many(column)


def _stored_types(selection: Selection) -> dict[str, pa.DataType]:
    """The columns with one value per group in the first file of a selection, if conditions can use them."""
    url = selection.row_groups[0].file.url
    filesystem, path = storage.arrow_filesystem(url)
    with storage.named_errors(url):
        schema: pa.Schema = storage.patiently(lambda: pq.read_schema(path, filesystem=filesystem))
    types = {
        field.name: field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        for field in schema
        if field.name == "query_id" or field.name.startswith("meta_")
    }
    return {name: type_ for name, type_ in types.items() if value_kind(type_)}


def _plain(stored: pa.ChunkedArray) -> pa.Array:
    """A stored column without dictionaries, and with NaN as null."""
    column = stored.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column


def _bands(name: str, column: pa.Array) -> pa.Array:
    """The band of each whole number: 0, 1, 2, 3..5, 6..10, 11..20, 21..50, and so on."""
    values_Q = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # bands end where it is exact
    missing_Q = np.isnan(values_Q)
    if (np.floor(values_Q[~missing_Q]) != values_Q[~missing_Q]).any():
        raise InputError(f"slice_by: {name} holds fractions; write conditions under slices, such as {name} > 0.5")
    bands_Q = np.searchsorted(_ENDS, np.where(missing_Q, 0.0, values_Q))
    return pa.array(_BANDS).take(pa.array(bands_Q, mask=missing_Q))


def _by_value(name: str, column: pa.Array) -> Iterator[tuple[str, Bools]]:
    """The slice of each value that occurs."""
    values = column.unique()
    if len(values) > _MOST_VALUES:
        raise _too_many(name)
    for value in values:
        valid = value.is_valid
        holds = pc.equal(column, value).fill_null(False) if valid else column.is_null()
        text = str(value.as_py()).lower() if isinstance(value.as_py(), bool) else str(value.as_py())
        yield f"{name}={text if valid else 'null'}", np.asarray(holds.to_numpy(zero_copy_only=False), np.bool_)


def _too_many(column: str) -> InputError:
    problem = f"slice_by: {column} has more than {_MOST_VALUES} values"
    return InputError(f"{problem}; write conditions under slices for those that matter")
