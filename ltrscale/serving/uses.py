"""Which columns of a raw table a bundle reads when it scores, and how: as those of the rows that it has learnt from."""

from collections.abc import Collection, Mapping
from typing import Any

from ltrscale.bundle import Bundle
from ltrscale.config import validate
from ltrscale.data.dataset.origin import fills_of, prepare_settings_of
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.source import Needs

ROW = "__row__"
"""The column that holds the numbers of rows."""


def uses_in_scoring(columns: Mapping[str, Any], bundle: Bundle, *, named: Collection[str] = ()) -> dict[str, Any]:
    """The uses of columns that give rows their scores; `ROW` names the documents.

    Args:
        columns: uses of columns; those that scoring does not need are left out.
        bundle: has the features to find.
        named: uses of columns that the caller of `predict` named.

    Raises:
        InputError: a use does not exist or does not fit the others; a named one does not matter.
    """
    mapping = validate(ColumnMapping, columns, "Ranker.predict")
    read = _scoring(mapping, bundle).replace(item=ROW)
    if idle := [use for use in named if getattr(read, use) != getattr(mapping, use)]:
        raise InputError(f"Ranker.predict: scores do not depend on {', '.join(idle)}; leave out what is not read")
    return _plain(read)


def with_fills(columns: Mapping[str, Any], bundle: Bundle) -> dict[str, Any]:
    """Uses of columns with the numbers that filled missing values in training, also where these were medians."""
    rest = {use: value for use, value in columns.items() if use not in ("fill", "fill_periods")}
    return rest | ({"fill": fills} if (fills := fills_of(bundle.read_as)) else {})


def uses_of(bundle: Bundle) -> tuple[dict[str, Any], dict[str, Any]]:
    """The uses of columns, and the further keys of `prepare`, with which the training rows of a bundle were read.

    A bundle that does not know them, or whose rows were no items, has its features as columns.

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
    """A mapping as plain data; it states the features even if there are none, so that none are looked for."""
    return {"features": [], "categorical": [], **mapping.model_dump(mode="json", exclude_defaults=True)}
