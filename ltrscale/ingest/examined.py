"""Turns batches of items into blocks of rows: what a config asks of their columns, and the faults of unusable rows.

First the columns of a file are matched with those that the config names, and the features found.

Shapes: N rows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale.arrays import Bools, Floats, Ints
from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.ids import parts
from ltrscale.data.times import Clock, instants, is_time, periods
from ltrscale.data.vectors import Vectors, is_vector, lists_of_texts
from ltrscale.errors import InputError, nearest, suggestion
from ltrscale.ingest.mapping import ColumnMapping, ListColumns, named_columns
from ltrscale.ingest.names import is_unnamed
from ltrscale.ingest.rows import TEXT_LENGTH, RawTexts, Rejection, Rule, plain_value


def resolve_features(
    schema: pa.Schema, mapping: ColumnMapping, file: str, *, keys: Collection[str] = ()
) -> list[Feature]:
    """The features that a mapping finds in a file, in the order that ColumnMapping states.

    `keys` are the join columns of tables; patterns do not match them.
    """
    _require_named(schema, mapping, file)
    categorical = dict.fromkeys(_chosen(schema, mapping, mapping.categorical, "categorical", file, keys))
    numeric = dict.fromkeys(_chosen(schema, mapping, mapping.features, "features", file, keys))
    made, parts = mapping.sources(), mapping.date_features()
    features = [Feature(name=name) for name in numeric if name not in categorical]
    features += [Feature(name=name) for name in made if name not in parts or parts[name][1] == "days_before"]
    features += [Feature(name=name, kind="categorical") for name in categorical]
    features += [Feature(name=name, kind="categorical") for name, (_, part) in parts.items() if part != "days_before"]
    for name in sorted(made.keys() & {*schema.names}):
        use = "dates" if name in parts else "vectors"
        raise InputError(f"{file}: column {name!r} has the name of a feature of {use}; rename it, or drop it there")
    for feature in features:
        if feature.name not in made:
            require(schema, feature.name, feature.kind, file)
    for name in mapping.dates:
        require(schema, name, "dates", file)
    for name, size in mapping.vector_columns.items():
        kind = require(schema, name, "vectors", file)
        if size and pa.types.is_fixed_size_list(kind) and kind.list_size != size:
            found = f"{kind.list_size} numbers in each row, where vectors states {size}"
            raise InputError(f"{file}: column {name!r} has {found}; write vectors: {{{name}: {kind.list_size}}}")
    return features


def with_optional(schema: pa.Schema, mapping: ColumnMapping) -> pa.Schema:
    """The columns of a file, plus the optional ones that it lacks."""
    for name in (name for name in mapping.optional if name not in schema.names):
        numeric = name in mapping.features and name not in mapping.categorical
        kind = pa.list_(pa.float32()) if name in mapping.vectors else pa.float32() if numeric else pa.string()
        schema = schema.append(pa.field(name, kind))
    return schema


def resolve_groups(schema: pa.Schema, mapping: ListColumns, file: str) -> list[Feature]:
    """The features of a file with one group per row."""
    _require_named(schema, mapping, file)
    if not mapping.matrix:
        for name in (*mapping.features, *mapping.categorical):
            if not named_columns(schema.names, [name]):
                raise InputError(f"{file}: features: no column is named {name!r}; {_remedy(name, schema.names)}")
        categorical = named_columns(schema.names, mapping.categorical)
        names = mapping.feature_columns(schema)
        for name in names:
            require(schema, name, f"list of {_kind(name, categorical)} features", file)
        return [Feature(name=name, kind=_kind(name, categorical)) for name in names]
    inner = require(schema, mapping.features[0], "features", file).value_type
    n = mapping.n_features or len(mapping.names) or (inner.list_size if pa.types.is_fixed_size_list(inner) else 0)
    if not n:
        raise InputError(
            f"{file}: column {mapping.features[0]!r}: its lists do not state the number of features; "
            "set n_features or names"
        )
    names = [*mapping.names] or [str(i + 1) for i in range(n)]
    for name in mapping.categorical:
        if name not in names:
            raise InputError(f"{file}: categorical: no feature is named {name!r}; {_remedy(name, names)}")
    return [Feature(name=name, kind=_kind(name, mapping.categorical)) for name in names]


def _kind(name: str, categorical: Sequence[str]) -> Literal["numeric", "categorical"]:
    return "categorical" if name in categorical else "numeric"


def missing(schema: pa.Schema, mapping: ColumnMapping | ListColumns, file: str) -> list[str]:
    """The columns that a mapping names (without patterns) and a file lacks, each with its use and the nearest name."""
    uses = mapping.named_in(schema.names, file) + [(name, "feature") for name in mapping.features]
    uses += [(name, "tokens") for name in mapping.token_columns]
    if isinstance(mapping, ColumnMapping):
        uses += [(name, "dates") for name in mapping.dates] + [(name, "vectors") for name in mapping.vector_columns]
    if isinstance(mapping, ColumnMapping) or not mapping.matrix:  # otherwise they are features within the one column
        uses += [(name, "feature") for name in mapping.categorical]
    descriptions, present = [], {*schema.names}
    for name, use in uses:
        if not name.endswith("*") and name not in present:
            closest = nearest(name, schema.names, alike=0.7)
            descriptions.append(f"{name!r} ({use}{f', perhaps {closest!r}' if closest else ''})")
    return descriptions


def check_same_features(
    schema: pa.Schema,
    found: Sequence[Feature],
    features: Sequence[Feature],
    mapping: ColumnMapping | ListColumns,
    file: str,
    first: str,
) -> None:
    """Refuse, with an InputError, a file without the features of the first one, in any order, or with others."""
    items, present, known = isinstance(mapping, ColumnMapping), {*schema.names}, {*features}
    made = mapping.sources()
    for feature in features:
        for column in made.get(feature.name, (feature.name,)):
            if column not in present:
                remedy = _remedy(column, schema.names)
                raise InputError(f"{file}: column {column!r} is missing, which {first} has; {remedy}")
        if feature.name not in made:
            require(schema, feature.name, feature.kind if items else f"list of {feature.kind} features", file)
    for feature in found:
        if feature not in known:
            raise InputError(
                f"{file}: column {feature.name!r} ({feature.kind}) is not among the features of {first}; "
                f"{'name it under features or categorical and under optional, ' if items else ''}"
                "list it under exclude, or prepare the two apart"
            )


def _require_named(schema: pa.Schema, mapping: ColumnMapping | ListColumns, file: str) -> None:
    for name, use in mapping.named_in(schema.names, file):
        require(schema, name, use, file)
    items = isinstance(mapping, ColumnMapping)
    for field, text in mapping.token_fields.items():
        if text.lengths is not None:
            if items:
                raise InputError(f"{field.name}: lengths are for groups, one per row; an item has its own tokens")
            require(schema, text.lengths, "lengths of tokens", file)
        one = items or field.of == "query"
        use = "text" if one else "token ids" if text.lengths is not None else "texts of documents"
        require(schema, text.column, use, file)


def _chosen(
    schema: pa.Schema, mapping: ColumnMapping, patterns: Sequence[str], use: str, file: str, keys: Collection[str]
) -> Iterator[str]:
    names, plain = schema.names, {*schema.names}.intersection(patterns)
    used = {*mapping.beside_features(), *mapping.dates, *mapping.vector_columns, *keys, *patterns}
    used |= {*named_columns(names, mapping.exclude)}
    for pattern in patterns:
        matched = [pattern] if pattern in plain and pattern[-1:] != "*" else named_columns(names, [pattern])
        if not matched:
            optional = "" if pattern.endswith("*") else "; list it under optional where files may lack it"
            raise InputError(
                f"{file}: {use}: no column is named {pattern!r}; {_remedy(pattern, schema.names)}{optional}"
            )
        if pattern == "*":
            types = {n: schema.field(schema.get_all_field_indices(n)[0]).type for n in matched}
            # skip the index of a data frame, and columns that are all null, which a cast would take for numbers
            numbers = [n for n, kind in types.items() if cols.is_number(kind) and not pa.types.is_null(kind)]
            matched = [name for name in numbers if not is_unnamed(name)]
        yield from (name for name in matched if name == pattern or name not in used)


def _list_of(test: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda kind: cols.is_list(kind) and test(cols.value_type(kind.value_type))


def _is_text(kind: pa.DataType) -> bool:
    return cols.is_single(kind) or _NUMBERS[0](kind)


_Fit = tuple[Callable[[pa.DataType], bool], str]
_ID: _Fit = cols.is_id, "text or whole numbers"
_TIMES: _Fit = is_time, "time stamps, dates, seconds since 1970 or text"
_NUMBERS: _Fit = _list_of(cols.is_number), "lists of numbers"
_FITS: dict[str, _Fit] = {
    **dict.fromkeys(("query", "item", "period_column"), _ID),
    "graded label": (cols.is_id, "text or numbers"),
    **dict.fromkeys(("time", "dates"), _TIMES),
    "vectors": (lambda kind: is_vector(kind) or cols.is_text(kind), "lists of numbers, or their text"),
    "categorical": (cols.is_single, "single values"),
    "meta": (cols.is_kept, "single values, or lists or structs of them"),
    "features": (
        lambda kind: _NUMBERS[0](kind) or _list_of(_NUMBERS[0])(kind),
        "lists of numbers, or lists of such lists",
    ),
    "docs": (_list_of(cols.is_id), "lists of text or of whole numbers"),
    **dict.fromkeys(("labels", "lengths of tokens", "list of numeric features"), _NUMBERS),
    **dict.fromkeys((f"list of {name}" for name in ("positions", "clicks", "weights", "gains")), _NUMBERS),
    "text": (_is_text, "text or lists of token ids"),
    "texts of documents": (_list_of(_is_text), "lists of these"),
    "token ids": (_NUMBERS[0], "lists of token ids"),
    "list of categorical features": (_list_of(cols.is_single), "lists of single values"),
}


def require(schema: pa.Schema, name: str, use: str, file: str) -> pa.DataType:
    """The type of a column; it must occur once and fit its use."""
    use = "query" if use == f"within {name}" else use
    indices = schema.get_all_field_indices(name)
    if not indices:
        unlabelled = f"; if the data have no labels, set prepare.source.columns.{use} to null"
        remedy = _remedy(name, schema.names) + (unlabelled if use in ("label", "labels") else "")
        raise InputError(f"{file}: no column {name!r} ({use}); {remedy}")
    if len(indices) > 1:
        raise InputError(f"{file}: {len(indices)} columns are named {name!r} ({use}); rename all but one")
    kind = cols.value_type(schema.field(indices[0]).type)
    fits, expected = _FITS.get(use, (cols.is_number, "numbers"))
    if not fits(kind):
        remedy = "list it under categorical or exclude" if use == "numeric" else "convert it or name another column"
        if use in ("numeric", "categorical") and is_vector(kind):
            size = kind.list_size if pa.types.is_fixed_size_list(kind) else "LENGTH"
            remedy = f"its numbers are features as vectors: {{{name}: {size}}}"
        if use == "label" and cols.is_text(kind):
            remedy = "give each of its values a grade, as grades: {good: 1, bad: 0}, or name another column"
        raise InputError(f"{file}: column {name!r} ({use}) should hold {expected} and is {kind}; {remedy}")
    return kind


def _remedy(name: str, names: Sequence[str]) -> str:
    return suggestion(name.rstrip("*"), names, "its columns are")


class Examined:
    """The rows of a batch and their faults; the first fault of a row counts."""

    def __init__(self, batch: pa.RecordBatch, file: str) -> None:
        self.batch, self.file = batch, file
        self.bad_N = np.zeros(len(batch), dtype=bool)
        self._findings: dict[int, tuple[Rule, str, str]] = {}

    def reject(
        self, bad_N: Bools, reason: str, rule: Rule = "unparsable", *, column: str | None = None, fault: str = ""
    ) -> None:
        """Record a fault of some rows: the column with the bad values, and perhaps the fault in words."""
        for i in np.flatnonzero(bad_N & ~self.bad_N).tolist():
            shown = reason
            if column is not None:
                value = repr(plain_value(self.batch.column(column)[i]))
                shown = f"{value} {fault}" if fault else f"{reason} ({value})"
            self._findings[i] = rule, reason, shown
        self.bad_N |= bad_N

    def reject_each(self, faults: Mapping[int, str], rule: Rule) -> None:
        """Record faults of single rows, each with its own description."""
        for i, reason in faults.items():
            if not self.bad_N[i]:
                self._findings[i] = rule, reason, reason
                self.bad_N[i] = True

    def texts(self, name: str, *, required: bool = False) -> pa.StringArray:
        """A column as text; rows that are not UTF-8, or lack a required value, are rejected."""
        text_N, broken_N = cols.texts(self.batch.column(name))
        self.reject(broken_N, f"column {name!r} is not text in UTF-8")
        if required:
            lacking_N = pc.or_kleene(pc.is_null(text_N), pc.equal(text_N, "")).to_numpy(zero_copy_only=False)
            self.reject(lacking_N, f"column {name!r} has no value")
        return text_N

    def periods(self, mapping: ColumnMapping | ListColumns, queries_N: pa.StringArray) -> pa.StringArray | None:
        """The period of each row, if a column or the query determines it."""
        if mapping.period == "part":
            return pa.array(parts(queries_N.fill_null("").to_pylist()), pa.string())
        if mapping.period_column is not None and mapping.period_column in self.batch.schema.names:
            return self.texts(mapping.period_column, required=True)
        if mapping.time is None:
            return None
        periods_N, bad_N = periods(self.batch.column(mapping.time), mapping.period, mapping.clock)
        self.reject(bad_N, f"column {mapping.time!r} is not a time stamp", column=mapping.time)
        return periods_N

    def labels(self, mapping: ColumnMapping) -> Floats:
        """The labels, NaN if missing; rows with a value that has no grade are rejected."""
        name, grades = mapping.label, mapping.grades
        if name is None:
            return np.full(len(self.batch), np.nan, np.float32)
        if not isinstance(grades, dict):
            labels_N = cols.float_column(self.batch.column(name))
            if grades is None:
                return labels_N
            # in float32 like the labels, or 0.1 would not reach the cut point 0.1
            grades_N = np.searchsorted(np.array(grades, np.float32), labels_N, side="right").astype(np.float32)
            return np.where(np.isnan(labels_N), np.float32(np.nan), grades_N)
        # many tools write a column of integers as floats if it has a null
        values_N = pc.replace_substring_regex(self.texts(name), r"^(-?\d+)\.0$", r"\1")
        index_N = pc.index_in(values_N, pa.array(list(grades), pa.string()))
        unknown_N = pc.and_(pc.is_valid(values_N), pc.is_null(index_N)).to_numpy(zero_copy_only=False)
        fault = f"has no grade ({', '.join(grades)} have one)"
        self.reject(unknown_N, f"column {name!r} {fault}", "bad_label", column=name, fault=fault)
        return cols.float_column(pa.array(list(grades.values()), pa.float32()).take(index_N))

    def seconds(self, name: str, clock: Clock) -> tuple[Ints, Bools]:
        """A time column in seconds since 1970, and a mask of rows without a time; unreadable rows are rejected."""
        column = self.batch.column(name)
        seconds_N, bad_N = instants(column, clock)
        missing_N = bad_N & column.is_null().to_numpy(zero_copy_only=False)
        self.reject(bad_N & ~missing_N, f"column {name!r} is not a time or date", column=name)
        return seconds_N, bad_N

    def vectors(self, name: str, size: int | None) -> Vectors:
        """A column of vectors; rows with a vector of the wrong length or with a gap are rejected."""
        column = cols.without_dictionary(self.batch.column(name))
        if cols.is_text(column.type):
            column, bad_N = lists_of_texts(column)
            self.reject(bad_N, f"column {name!r} is not a list of numbers", column=name)
        found = Vectors(column)
        other_N = found.lengths_N >= 0 if size is not None else np.zeros(len(self.batch), bool)
        other_N &= found.lengths_N != (size or 0)
        lengths = ((i, int(found.lengths_N[i])) for i in np.flatnonzero(other_N).tolist())
        self.reject_each({i: f"column {name!r} has {n} numbers, not {size}" for i, n in lengths}, "unparsable")
        self.reject(found.broken_N, f"column {name!r} lacks a number in its list")
        return found

    def meta(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """Columns of groups, unchanged, keyed by their names in the data set."""
        columns = {}
        for name in names:
            column = cols.without_dictionary(self.batch.column(name))
            key = f"meta_{name.removeprefix('meta_')}"  # reading a data set again keeps its column names
            columns[key] = self.texts(name) if cols.is_text(column.type) else column
        return columns

    def rejections(
        self, lines_N: Ints, texts: RawTexts, query_ids_N: pa.StringArray, rows_N: Ints | None = None
    ) -> list[Rejection]:
        """One rejection for each bad row, in order, counted as `rows_N` input rows (1 by default)."""
        rejected = []
        for i in np.flatnonzero(self.bad_N).tolist():
            rule, reason, finding = self._findings[i]
            line, rows = int(lines_N[i]), 1 if rows_N is None else int(rows_N[i])
            text, query = f"{reason}: {texts(line)}"[:TEXT_LENGTH], query_ids_N[i].as_py() or ""
            rejected.append(Rejection(self.file, line, rule, text, query, rows, finding))
        return rejected
