"""Which columns of a raw log a bundle's features come from, and how they are read: as for its training data.

The exports, `Ranker` and the model in MLflow's registry read rows in this way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature, RawColumns
from ltrscale.data.dataset.origin import RAW, fills_of, prepare_settings_of
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.source import Needs, Source

if TYPE_CHECKING:
    from ltrscale.bundle import Bundle

ROW = "__row__"
"""The column of row numbers."""


def _recorded(bundle: Bundle) -> tuple[PrepareConfig, str]:
    """The recorded settings of `prepare`, and where they are recorded, for errors."""
    where = f"{bundle.url}: read_as of its config.json"
    return validate(PrepareConfig, {**prepare_settings_of(bundle.read_as), "inputs": "X"}, where), where


def recorded_source(bundle: Bundle) -> Source | None:
    """The source of a bundle's training data; None if it does not record how they were read."""
    return _recorded(bundle)[0].source if bundle.read_as else None


def reading_raw(bundle: Bundle, names: Sequence[str]) -> tuple[PrepareConfig, tuple[Feature, ...]] | None:
    """The settings of `prepare` that read some of a bundle's features from raw rows, and these features in its order.

    None if it is unknown how the rows were read, if they were not items, or if they lack a feature that a job such as
    `jobs.relabel` added later.
    """
    if RAW not in bundle.read_as or not names:
        return None
    config, where = _recorded(bundle)
    log_columns, columns = validate(RawColumns, bundle.read_as[RAW], where).reads, config.source.mapping
    if columns is None or columns.sources_of(names).keys() - log_columns.keys():
        return None
    features = tuple(feature for feature in bundle.features if feature.name in names)
    needs = Needs(features, fills=fills_of(bundle.read_as))
    return config.replace(source=config.source.for_scoring(needs)), features


def uses_in_scoring(
    columns: Mapping[str, Any], bundle: Bundle, where: str, *, named: Collection[str] = ()
) -> dict[str, Any]:
    """The uses of columns that scores depend on; `ROW` identifies the documents, `where` is for errors.

    Uses that scoring does not need are left out; `named` are those that the caller gave.

    Raises:
        InputError: a use does not exist or does not fit the others; scores do not depend on a named use.
    """
    mapping = validate(ColumnMapping, columns, where)
    read = _scoring(mapping, bundle).replace(item=ROW)
    if idle := [use for use in named if getattr(read, use) != getattr(mapping, use)]:
        raise InputError(f"{where}: scores do not depend on {', '.join(idle)}; leave out what is not read")
    return _plain(read)


def how_read(columns: Mapping[str, Any], settings: Mapping[str, Any], bundle: Bundle, where: str) -> dict[str, Any]:
    """What decides a bundle's feature values in rows read with these uses of columns and settings of `prepare`.

    Readers for which this is equal see the same features, though they may reject different rows.
    """
    mapping = validate(ColumnMapping, columns, where)
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
    config, _ = _recorded(bundle)
    if (mapping := config.source.mapping) is not None:
        # `score` reads labels too
        labels = {"label": mapping.label, "labels": mapping.labels, "grades": mapping.grades}
        columns = _plain(_scoring(mapping, bundle).replace(**labels))
    return columns, config.model_dump(mode="json", exclude={"inputs", "source", "sort"}, exclude_defaults=True)


def _scoring(mapping: ColumnMapping, bundle: Bundle) -> ColumnMapping:
    """What `jobs.predict` needs of a mapping for rows of a fixed period."""
    positions, tokens = bundle.reads_positions, bundle.reads_tokens
    needs = Needs(bundle.features, positions=positions, tokens=tokens, fills=fills_of(bundle.read_as))
    return Items(columns=mapping).for_scoring(needs).columns


def _plain(mapping: ColumnMapping) -> dict[str, Any]:
    """A mapping as plain data; it lists the features even if there are none, so that none are inferred."""
    return {"features": [], "categorical": [], **mapping.model_dump(mode="json", exclude_defaults=True)}
