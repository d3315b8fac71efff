"""What a candidate leans on, and the gate's check that no feature that may be a leak is among it.

`ltrscale.ingest.outcome` finds such features and asks of them; `bounds.expected` has the answer.
"""

from collections.abc import Mapping

from ltrscale.bundle import Bundle, boosters
from ltrscale.storage import join


def importances_of(bundle: Bundle) -> dict[str, float] | None:
    """The importance of each column that trees see, the highest first; None for a network."""
    if (forest := bundle.forest) is None:
        return None
    every = tuple(feature.name for feature in bundle.features)
    seen = every if forest.sees is None else forest.sees  # a stack may see none
    names = [*seen, *(f"component {i}" for i in range(forest.projection)), *forest.members]
    models = {join(bundle.url, name): content for name, content in bundle.contents.items()}
    shares = boosters.importances(forest.library, models, len(names))
    return dict(sorted(zip(names, shares.tolist(), strict=True), key=lambda pair: -pair[1]))


def leaning(bundle: Bundle) -> Mapping[str, float | None]:
    """The features that a ranker leans on, with their importance to plain trees.

    A network, or trees that see components or other rankers' scores, lean on every feature that they read.
    """
    every: dict[str, float | None] = dict.fromkeys(feature.name for feature in bundle.features)
    if bundle.forest is None or bundle.forest.projection or bundle.forest.members:
        return every
    return {name: share for name, share in (importances_of(bundle) or {}).items() if share > 0}
