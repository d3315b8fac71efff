"""The transformer of raw rows in every export of an item model, so that a service prepares rows exactly as training.

raw_rows.py      the transformer: a copy of the module of that name, which needs only Python
raw_rows.json    its recipe: the columns of a raw row, and how to make each feature of the model from them
raw_rows_*.jsonl a small table to join with the rows: a list of key and values per line

It reads columns in the same way as for training; so do `jobs.predict` and the registry's model.
"""

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ltrscale.bundle import Bundle
from ltrscale.config import validate
from ltrscale.data.columns import is_list
from ltrscale.data.dataset.manifest import Feature, RawColumns
from ltrscale.data.dataset.origin import RAW, fills_of, prepare_settings_of
from ltrscale.errors import InputError
from ltrscale.ingest.csvjson import NULLS, booleans
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.items import Items, load_tables
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.source import Needs
from ltrscale.ingest.tables import Join, Joined
from ltrscale.serving import raw_rows
from ltrscale.serving.format import Files

CODE = "raw_rows.py"
_MOST_ROWS, _MOST_NUMBERS = 200_000, 5_000_000
"""Limits of an exported table, and of the numbers in its lists: about 100 MB of text."""


def reading_raw(bundle: Bundle, names: Sequence[str]) -> tuple[PrepareConfig, tuple[Feature, ...]] | None:
    """The settings of `prepare` that read some of a bundle's features from raw rows, and these features in its order.

    None if it is unknown how the rows were read, if they were not items, or if they lack a feature that a job such as
    `jobs.relabel` added later.
    """
    if RAW not in bundle.read_as or not names:
        return None
    where = f"{bundle.url}: read_as of its config.json"
    config = validate(PrepareConfig, {**prepare_settings_of(bundle.read_as), "inputs": "X"}, where)
    log_columns, columns = validate(RawColumns, bundle.read_as[RAW], where).reads, config.source.mapping
    if columns is None or columns.sources_of(names).keys() - log_columns.keys():
        return None
    features = tuple(feature for feature in bundle.features if feature.name in names)
    fills = fills_of(bundle.read_as)
    source = config.source.for_scoring(Needs(features, fills=fills))
    return config.replace(source=source), features


def write_raw(bundle: Bundle, names: Sequence[str]) -> Files:
    """The files of the transformer for an exported model's columns, in their order; empty if `reading_raw` is None.

    Raises:
        InputError: a joined table cannot be read.
    """
    reading = reading_raw(bundle, names)
    if reading is None:
        return {}
    config, features = reading
    source = config.source
    assert isinstance(source, Items)
    columns, raw = source.columns, RawColumns.model_validate(bundle.read_as[RAW])
    joins, files = [], Files()
    for number, joined in enumerate(load_tables(source.joins, columns, features), 1):
        join, table = joined.join, _table(joined)
        name = None if table is None else f"raw_rows_{number}.jsonl"
        joins.append(
            {**join.model_dump(mode="json"), "columns": list(join.columns), "key": list(join.key), "table": name}
        )
        if table is not None:
            files[f"raw_rows_{number}.jsonl"] = table
    by_name, made = {feature.name: feature for feature in features}, _made(columns)
    dated = sorted({made[name]["column"] for name in names if "part" in made.get(name, {})})
    recipe = {
        "format": "ltrscale-raw-rows",
        "version": 1,
        "about": _ABOUT,
        "rows": raw.rows,
        "csv": {
            "delimiter": columns.delimiter,
            "decimal": columns.decimal,
            "encoding": columns.encoding,
            "quotes": columns.quotes,
            "header": list(columns.header),
            "missing": list(NULLS),
            **dict(zip(("true", "false"), booleans(), strict=True)),
        },
        "times": {
            "zone": columns.time_zone,
            "formats": list(columns.time_format),
            "row": columns.time,
            "columns": [*([columns.time] if columns.time else []), *(name for name in dated if name != columns.time)],
        },
        "vectors": columns.vector_columns,
        "infinite": config.infinite,
        "columns": _columns(columns, source.joins, [by_name[name] for name in names], raw),
        "joins": joins,
        "features": [_feature(by_name[name], columns, made) for name in names],
    }
    text = json.dumps(recipe, indent=1, ensure_ascii=False) + "\n"
    return {CODE: inspect.getsource(raw_rows).encode(), raw_rows.RECIPE: text.encode(), **files}


_ABOUT = {
    "rows": "the form of the log's files: csv, json (lines) or parquet",
    "csv": "how values are written in CSV text; `missing` are words for no value, `true` and `false` for booleans",
    "times": "the zone of times without one, the formats that are tried in order, the time of the row itself",
    "vectors": "the columns with lists of numbers, with their length; null where it is that of the list beside it",
    "columns": "what the log has in each column of a row; `table` is the number of the table that has the column; a "
    "row may lack an `optional` one",
    "features": "in the order of features.json: `column` has the value, as it is (a number in single precision; the "
    "code of a category: a whole number below 2^24 is its own, other text is hashed), `part` of it (of a time), the "
    "number at `place` of its list, from 0, or the `similarity` of its list to that of `other`; "
    "`fill` stands for a missing value",
}


def _columns(
    columns: ColumnMapping, joins: Sequence[Join], features: Sequence[Feature], raw: RawColumns
) -> dict[str, dict[str, Any]]:
    """The columns that features, times and joins read, and those from tables."""
    tables = {name: i for i, join in enumerate(joins, 1) for name in join.columns}
    used = columns.sources_of(feature.name for feature in features)
    used |= dict.fromkeys([columns.time] if columns.time else [])
    used |= dict.fromkeys(name for join in joins for name in (*join.key, *join.columns))
    return {
        name: {
            "reads": raw.reads.get(name, "value"),
            **({"table": tables[name]} if name in tables else {}),
            **({"optional": True} if name in columns.optional else {}),
        }
        for name in used
    }


def _feature(feature: Feature, columns: ColumnMapping, made: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    fill = columns.fill_of(feature)
    of = made.get(feature.name, {"column": feature.name})
    return {"name": feature.name, "kind": feature.kind, **of, **({} if fill is None else {"fill": fill})}


def _made(columns: ColumnMapping) -> dict[str, dict[str, Any]]:
    """The sources of features that are not columns themselves."""
    made: dict[str, dict[str, Any]] = {}
    made |= {name: {"column": column, "part": part} for name, (column, part) in columns.date_features().items()}
    made |= {name: {"column": column, "place": i} for name, (column, i) in columns.vector_features().items()}
    return made | {
        name: {"column": one, "similarity": kind, "other": other}
        for name, (kind, one, other) in columns.similarity_features().items()
    }


def _table(joined: Joined) -> bytes | None:
    """A table's rows as lists of key and values, one per line; None if too many, or of a type that JSON lacks."""
    if len(joined.keys_K) > _MOST_ROWS or not all(_is_plain(array.type) for array in joined.columns.values()):
        return None
    if sum(len(array.flatten()) for array in joined.columns.values() if is_list(array.type)) > _MOST_NUMBERS:
        return None
    rows = zip(joined.keys_K.to_pylist(), *(array.to_pylist() for array in joined.columns.values()), strict=True)
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows if row[0] is not None).encode()


def _is_plain(kind: pa.DataType) -> bool:
    types = pa.types
    kind = kind.value_type if is_list(kind) else kind
    numeric = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    return bool(numeric or types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind))


ROW = "__row__"
"""The column of row numbers."""


def uses_in_scoring(columns: Mapping[str, Any], bundle: Bundle, *, named: Collection[str] = ()) -> dict[str, Any]:
    """The uses of columns that scores depend on; `ROW` identifies the documents.

    Uses that scoring does not need are left out; `named` are those that the caller of `predict` gave.

    Raises:
        InputError: a use does not exist or does not fit the others; scores do not depend on a named use.
    """
    mapping = validate(ColumnMapping, columns, "Ranker.predict")
    read = _scoring(mapping, bundle).replace(item=ROW)
    if idle := [use for use in named if getattr(read, use) != getattr(mapping, use)]:
        raise InputError(f"Ranker.predict: scores do not depend on {', '.join(idle)}; leave out what is not read")
    return _plain(read)


def how_read(columns: Mapping[str, Any], settings: Mapping[str, Any], bundle: Bundle) -> dict[str, Any]:
    """What decides a bundle's feature values in rows read with these uses of columns and settings of `prepare`.

    Readers for which this is equal see the same features, though they may reject different rows.
    """
    mapping = validate(ColumnMapping, columns, "Ranker")
    read = _scoring(mapping, bundle)
    return {
        "fill": {feature.name: mapping.fill_of(feature) for feature in bundle.features},
        "infinite": settings.get("infinite", "reject"),
        **{use: getattr(read, use) for use in ("dates", "vectors", "similarities", "positions", "tokens")},
        **{use: getattr(read, use) if read.dates else None for use in ("time", "time_zone", "time_format")},
    }


def with_fills(columns: Mapping[str, Any], bundle: Bundle) -> dict[str, Any]:
    """Uses of columns with training's fill values for missing values, including computed medians."""
    other_uses = {use: value for use, value in columns.items() if use not in ("fill", "fill_periods")}
    return other_uses | ({"fill": fills} if (fills := fills_of(bundle.read_as)) else {})


def uses_of(bundle: Bundle) -> tuple[dict[str, Any], dict[str, Any]]:
    """The uses of columns and other keys of `prepare` that read the training rows of a bundle.

    If the bundle does not record them, or its rows were not items, each feature is a column.

    Raises:
        InputError: the bundle's record is damaged.
    """
    columns: dict[str, Any] = {
        use: [feature.name for feature in bundle.features if feature.kind == kind]
        for kind, use in (("numeric", "features"), ("categorical", "categorical"))
    }
    if not bundle.read_as:
        return columns, {}
    where = f"{bundle.url}: read_as of its config.json"
    config = validate(PrepareConfig, {**prepare_settings_of(bundle.read_as), "inputs": "X"}, where)
    if (mapping := config.source.mapping) is not None:
        # `score` reads labels too
        columns = _plain(_scoring(mapping, bundle).replace(label=mapping.label, grades=mapping.grades))
    return columns, config.model_dump(mode="json", exclude={"inputs", "source", "sort"}, exclude_defaults=True)


def _scoring(mapping: ColumnMapping, bundle: Bundle) -> ColumnMapping:
    """What `jobs.predict` needs of a mapping for rows of a fixed period."""
    positions, tokens = bundle.reads_positions, bundle.reads_tokens
    needs = Needs(bundle.features, positions=positions, tokens=tokens, fills=fills_of(bundle.read_as))
    return Items(columns=mapping).for_scoring(needs).columns


def _plain(mapping: ColumnMapping) -> dict[str, Any]:
    """A mapping as plain data; it lists the features even if there are none, so that none are inferred."""
    return {"features": [], "categorical": [], **mapping.model_dump(mode="json", exclude_defaults=True)}
