"""Finds the columns of a file that a config names, checks that they fit their uses, and resolves the features."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import pyarrow as pa

from ltrscale.data import columns as cols
from ltrscale.data.columns import is_vector
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.times import is_time
from ltrscale.errors import InputError, nearest, suggestion
from ltrscale.ingest.mapping import ColumnMapping, ListColumns, Use, named_columns
from ltrscale.ingest.names import is_unnamed


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
    uses: list[tuple[str, str]] = [*mapping.named_in(schema.names, file)]
    uses += [(name, "feature") for name in mapping.features]
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
    schema: pa.Schema, mapping: ColumnMapping, patterns: Sequence[str], key: str, file: str, keys: Collection[str]
) -> Iterator[str]:
    names, plain = schema.names, {*schema.names}.intersection(patterns)
    used = {*mapping.beside_features(), *mapping.dates, *mapping.vector_columns, *keys, *patterns}
    used |= {*named_columns(names, mapping.exclude)}
    for pattern in patterns:
        matched = [pattern] if pattern in plain and pattern[-1:] != "*" else named_columns(names, [pattern])
        if not matched:
            optional = "" if pattern.endswith("*") else "; list it under optional where files may lack it"
            raise InputError(
                f"{file}: {key}: no column is named {pattern!r}; {_remedy(pattern, schema.names)}{optional}"
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
    return cols.is_single(kind) or _NUMBERS.test(kind)


class _Fit(NamedTuple):
    """The types of columns that fit a use."""

    test: Callable[[pa.DataType], bool]
    words: str
    """What they hold, for error messages."""


_ID = _Fit(cols.is_id, "text or whole numbers")
_TIMES = _Fit(is_time, "time stamps, dates, seconds since 1970 or text")
_NUMBER = _Fit(cols.is_number, "numbers")
_NUMBERS = _Fit(_list_of(cols.is_number), "lists of numbers")
_LISTED = ("numeric features", "positions", "clicks", "weights", "gains")
_FITS: dict[Use, _Fit] = {
    **dict.fromkeys(("query", "item", "id", "period_column"), _ID),
    **dict.fromkeys(("label", "positions", "clicks", "weights", "gains", "numeric", "number"), _NUMBER),
    **dict.fromkeys(("time", "dates"), _TIMES),
    **dict.fromkeys(("labels", "lengths of tokens", *(f"list of {each}" for each in _LISTED)), _NUMBERS),
    "graded label": _Fit(cols.is_id, "text or numbers"),
    "vectors": _Fit(lambda kind: is_vector(kind) or cols.is_text(kind), "lists of numbers, or their text"),
    "categorical": _Fit(cols.is_single, "single values"),
    "meta": _Fit(cols.is_kept, "single values, or lists or structs of them"),
    "features": _Fit(
        lambda kind: _NUMBERS.test(kind) or _list_of(_NUMBERS.test)(kind),
        "lists of numbers, or lists of such lists",
    ),
    "docs": _Fit(_list_of(cols.is_id), "lists of text or of whole numbers"),
    "list of categorical features": _Fit(_list_of(cols.is_single), "lists of single values"),
    "text": _Fit(_is_text, "text or lists of token ids"),
    "texts of documents": _Fit(_list_of(_is_text), "lists of these"),
    "token ids": _Fit(_NUMBERS.test, "lists of token ids"),
}


def require(schema: pa.Schema, name: str, use: Use, file: str) -> pa.DataType:
    """The type of a column; it must occur once and fit its use."""
    indices = schema.get_all_field_indices(name)
    if not indices:
        unlabelled = f"; if the data have no labels, set prepare.source.columns.{use} to null"
        remedy = _remedy(name, schema.names) + (unlabelled if use in ("label", "labels") else "")
        raise InputError(f"{file}: no column {name!r} ({use}); {remedy}")
    if len(indices) > 1:
        raise InputError(f"{file}: {len(indices)} columns are named {name!r} ({use}); rename all but one")
    kind = cols.value_type(schema.field(indices[0]).type)
    fit = _FITS[use]
    if not fit.test(kind):
        remedy = "list it under categorical or exclude" if use == "numeric" else "convert it or name another column"
        if use in ("numeric", "categorical") and is_vector(kind):
            size = kind.list_size if pa.types.is_fixed_size_list(kind) else "LENGTH"
            remedy = f"its numbers are features as vectors: {{{name}: {size}}}"
        if use == "label" and cols.is_text(kind):
            remedy = "give each of its values a grade, as grades: {good: 1, bad: 0}, or name another column"
        raise InputError(f"{file}: column {name!r} ({use}) should hold {fit.words} and is {kind}; {remedy}")
    return kind


def _remedy(name: str, names: Sequence[str]) -> str:
    return suggestion(name.rstrip("*"), names, "its columns are")
