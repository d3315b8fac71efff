"""Slices: query groups that an evaluation judges separately, in addition to all groups together.

The groups with outliers are a slice. Others are conditions (see `conditions`), or the values of a column. A group may
be in several. The columns of a group are those of its data set, `query_id` and `meta_*`, and

    n_documents, n_relevant      lengths of the list, and documents with a label from `relevant_from` on
    min_label, max_label         equal in a list of constant labels
    period                       such as '2026-W07'
    outlier                      true with an outlier value, as under `outliers`
    missing                      true where some document misses some feature
    drifted                      true with a number outside the range that it has in training, or a code not seen there

Columns of documents, for `any(...)` and `all(...)`, are `label` and the features by their names.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups, sum_by_group
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError, nearest
from ltrscale.evaluation.measure.conditions import (
    Condition,
    GroupColumns,
    Truths,
    ValueKind,
    check,
    columns_in,
    parse,
    with_codes,
)
from ltrscale.evaluation.measure.outliers import OutlierDetector, Seen
from ltrscale.ingest.categories import encode

ALL, OUTLIERS = "all", "outliers"
"""The slices that every evaluation has."""
MOST_VALUES = 100
"""The largest number of different values in a column for slices."""
_ENDS = np.array([-1, 0, *(step * 10**power for power in range(9) for step in (1, 2, 5))], np.float64)
"""The last number of each band except the highest."""


class _Given(NamedTuple):
    """The inputs from which the columns of some groups are computed."""

    groups: QueryGroups
    period: str
    outlier_Q: Truths
    relevant_from: float
    seen: Seen | None

    @property
    def labels_N(self) -> Tensor:
        assert self.groups.labels_N is not None
        return self.groups.labels_N

    def extreme_label(self, extreme: str) -> pa.Array:
        """The lowest or highest label of each group; null for a group without documents."""
        values_Q = torch.segment_reduce(self.labels_N, extreme, offsets=self.groups.offsets_Q1)
        return pa.array(values_Q.numpy(), mask=(self.groups.lengths_Q == 0).numpy())

    def counts(self, holds_N: Tensor) -> NDArray[np.int64]:
        """The number of documents in each group for which something holds."""
        return sum_by_group(holds_N.long(), self.groups.offsets_Q1).numpy()

    def drifted(self) -> pa.Array:
        """Whether each group has a value that training lacks."""
        assert self.seen is not None
        return pa.array(self.seen.lacks(self.groups).numpy())


class _Column(NamedTuple):
    """A column of groups that every evaluation has."""

    kind: ValueKind
    values: Callable[[_Given], pa.Array]
    reads_features: bool = False


_OF_GROUPS: Mapping[str, _Column] = {
    "n_documents": _Column("number", lambda given: pa.array(given.groups.lengths_Q.numpy())),
    "n_relevant": _Column("number", lambda given: pa.array(given.counts(given.labels_N >= given.relevant_from))),
    "min_label": _Column("number", lambda given: given.extreme_label("min")),
    "max_label": _Column("number", lambda given: given.extreme_label("max")),
    "period": _Column("text", lambda given: pa.array([given.period] * given.groups.n_groups, pa.string())),
    "outlier": _Column("truth", lambda given: pa.array(given.outlier_Q)),
    "missing": _Column(
        "truth",
        lambda given: pa.array(given.counts(given.groups.features_NF.isnan().any(dim=1)) > 0),
        reads_features=True,
    ),
    "drifted": _Column("truth", _Given.drifted, reads_features=True),
}


def _is_condition(text: str) -> str:
    parse(text)
    return text


def _is_name(name: str) -> str:
    if name in (ALL, OUTLIERS) or "=" in name or not name.strip():
        raise ValueError(f"{name!r} cannot name a slice: {ALL}, {OUTLIERS} and names with = are taken")
    return name


ConditionText = Annotated[str, AfterValidator(_is_condition)]
SliceName = Annotated[str, AfterValidator(_is_name)]


@dataclass(frozen=True, eq=False)
class Slicer:
    """Finds the slices of query groups. `make` checks its settings against a selection."""

    conditions: Mapping[str, Condition]
    by: tuple[str, ...]
    detector: OutlierDetector
    relevant_from: float
    kinds: Mapping[str, ValueKind]
    """Kinds of the groups' columns."""
    stored: tuple[str, ...]
    """Columns of the data set that `find` needs."""
    needs_features: bool
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
        """The slicer for a selection's groups; the first file tells which columns exist.

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
        in_data = _stored_kinds(selection)
        groups = in_data | {name: column.kind for name, column in _OF_GROUPS.items()}
        documents: dict[str, ValueKind] = {"label": "number", **{f.name: "number" for f in selection.features}}
        categories = [f.name for f in selection.features if f.kind == "categorical"]

        def code_of(text: str) -> int:
            return int(encode(pa.array([text]))[0])  # the same in every data set

        parsed = {name: with_codes(parse(text), categories, code_of) for name, text in conditions.items()}
        for name, condition in parsed.items():
            try:
                check(condition, groups, documents)
            except ValueError as error:
                raise InputError(f"slices.{name}: {error}") from error
        for name in by:
            if name not in groups:
                raise InputError(f"slice_by: no column {name!r}; did you mean {nearest(name, groups)!r}?")
        if "period" in by:  # known before a group is read
            check_few([f"period={period}" for period in selection.row_groups.by_period()], ["period"])
        used = {pair for condition in parsed.values() for pair in columns_in(condition)} | {
            (name, False) for name in by
        }
        features = {f.name for f in selection.features}
        reading = {name for name, column in _OF_GROUPS.items() if column.reads_features}
        training_drift = training() if training is not None and ("drifted", False) in used else None
        return cls(
            parsed,
            tuple(by),
            detector,
            relevant_from,
            {name: groups[name] for name, _ in sorted(used) if name in groups},
            tuple(sorted({name for name, _ in used} & in_data.keys() - _OF_GROUPS.keys())),
            bool(detector.rules) or any((inside and name in features) or name in reading for name, inside in used),
            training_drift,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The slices that exist for any groups."""
        return (OUTLIERS, *self.conditions)

    def find(self, groups: QueryGroups, period: str, stored: pa.Table) -> dict[str, Truths]:
        """Whether each group is in each slice, by name, shape [Q]; slices by a column's values as they occur.

        Args:
            groups: labelled groups, with their features if `needs_features`.
            period: the period of all groups.
            stored: the groups' columns `stored`.

        Raises:
            InputError: a column of `slice_by` holds fractions, or a file lacks a column.
        """
        outlier_Q = np.zeros(groups.n_groups, np.bool_)
        if self.detector.rules:
            outlier_Q = self.detector.outlier_groups(groups).numpy()
        inputs = _Given(groups, period, outlier_Q, self.relevant_from, self.seen)
        of_groups = {
            name: column.values(inputs)
            if (column := _OF_GROUPS.get(name))
            else _undictionaried(stored.column(name), kind)
            for name, kind in self.kinds.items()
        }
        columns = GroupColumns(of_groups, dict(self._of_documents(inputs)), groups.offsets_Q1.numpy())
        members = {OUTLIERS: outlier_Q}
        members |= {name: columns.where(condition) for name, condition in self.conditions.items()}
        for name in self.by:
            values = _bands(name, columns.groups[name]) if self.kinds[name] == "number" else columns.groups[name]
            members |= dict(_by_value(name, values))
        return members

    def _of_documents(self, inputs: _Given) -> Iterator[tuple[str, pa.Array]]:
        """The columns of documents that a condition names."""
        names = {name for condition in self.conditions.values() for name, inside in columns_in(condition) if inside}
        for i, name in enumerate(self.detector.features):
            if name in names - {"label"}:
                yield name, pa.array(inputs.groups.features_NF[:, i].numpy(), from_pandas=True)
        if "label" in names:
            yield "label", pa.array(inputs.labels_N.numpy())


def in_order(names: Sequence[str]) -> list[str]:
    """The names of slices by the values of one column, with numbers in numeric order and null last.

    Example:
        >>> in_order(["n=11..20", "n=null", "n=2"])
        ['n=2', 'n=11..20', 'n=null']
    """

    def key(name: str) -> tuple[bool, list[tuple[int, str]]]:
        value = name.partition("=")[2]
        parts = re.split(r"(\d+)", value)
        return value == "null", [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return sorted(names, key=key)


def _stored_kinds(selection: Selection) -> dict[str, ValueKind]:
    """The columns with one value per group in the first file of a selection, if conditions can use them."""
    url = selection.row_groups[0].url
    filesystem, path = storage.arrow_filesystem(url)
    with storage.named_errors(url):
        schema: pa.Schema = storage.patiently(lambda: pq.read_schema(path, filesystem=filesystem))
    return {
        field.name: kind
        for field in schema
        if (field.name == "query_id" or field.name.startswith("meta_")) and (kind := _kind_of(field.type)) is not None
    }


def _kind_of(type_: pa.DataType) -> ValueKind | None:
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_boolean(type_):
        return "truth"
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "text"
    return "number" if pa.types.is_integer(type_) or pa.types.is_floating(type_) else None


def _undictionaried(stored: pa.ChunkedArray, kind: ValueKind) -> pa.Array:
    """A stored column without dictionaries, and with NaN as null."""
    column = stored.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind == "number" and pa.types.is_floating(column.type):
        return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column


def _bands(name: str, column: pa.Array) -> pa.Array:
    """The band of each whole number: 0, 1, 2, 3..5, 6..10, 11..20, 21..50, and so on."""
    values_Q = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # bands end where it is exact
    missing_Q = np.isnan(values_Q)
    if (np.floor(values_Q[~missing_Q]) != values_Q[~missing_Q]).any():
        raise InputError(f"slice_by: {name} holds fractions; write conditions under slices, such as {name} > 0.5")
    bands_Q = np.searchsorted(_ENDS, np.where(missing_Q, 0.0, values_Q))
    texts = pa.array([_band(band) for band in range(len(_ENDS) + 1)])
    return texts.take(pa.array(bands_Q, mask=missing_Q))


def _band(band: int) -> str:
    if band == 0:
        return "below 0"
    first = int(_ENDS[band - 1]) + 1
    if band == len(_ENDS):
        return f"{first}.."
    last = int(_ENDS[band])
    return f"{first}" if first == last else f"{first}..{last}"


def _by_value(name: str, column: pa.Array) -> Iterator[tuple[str, Truths]]:
    """The slice of each value that occurs."""
    values = column.unique()
    if len(values) > MOST_VALUES:
        raise _too_many(name)
    for value in values:
        valid = value.is_valid
        holds = pc.equal(column, value).fill_null(False) if valid else column.is_null()
        text = str(value.as_py()).lower() if isinstance(value.as_py(), bool) else str(value.as_py())
        yield f"{name}={text if valid else 'null'}", np.asarray(holds.to_numpy(zero_copy_only=False), np.bool_)


def check_few(names: Sequence[str], by: Sequence[str]) -> None:
    """Check that no column makes too many slices; InputError names it."""
    for column in by:
        if sum(name.startswith(f"{column}=") for name in names) > MOST_VALUES:
            raise _too_many(column)


def _too_many(column: str) -> InputError:
    problem = f"slice_by: {column} has more than {MOST_VALUES} values"
    return InputError(f"{problem}; write conditions under slices for those that matter")
