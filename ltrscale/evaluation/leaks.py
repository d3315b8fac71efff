"""What a candidate leans on, and the gate's check that no feature that may be a leak is among it.

`ltrscale.ingest.leaks` finds such features and asks of them; `bounds.expected` has the answer.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from ltrscale import boosters
from ltrscale.bundle import Bundle
from ltrscale.data.dataset.manifest import Feature, matching
from ltrscale.evaluation.gate import Check
from ltrscale.evaluation.slices import ALL
from ltrscale.ingest.leaks import ASK, questions
from ltrscale.ranking.alone import Alone
from ltrscale.storage import join


def importances(bundle: Bundle) -> dict[str, float] | None:
    """The importance of each column that trees see, the highest first; None for a network."""
    if bundle.trees is None:
        return None
    every = tuple(feature.name for feature in bundle.features)
    seen = every if bundle.trees.sees is None else bundle.trees.sees  # a stack may see none
    names = [*seen, *(f"component {i}" for i in range(bundle.trees.projection)), *bundle.trees.members]
    models = {join(bundle.url, name): content for name, content in bundle.contents.items()}
    shares = boosters.importances(bundle.trees.library, models, len(names))
    return dict(sorted(zip(names, shares.tolist(), strict=True), key=lambda pair: -pair[1]))


def leaning(bundle: Bundle) -> Mapping[str, float | None]:
    """The features that a ranker leans on, with their importance to plain trees.

    A network, or trees that see components or other rankers' scores, lean on every feature that they read.
    """
    every: dict[str, float | None] = dict.fromkeys(feature.name for feature in bundle.features)
    if bundle.trees is None or bundle.trees.projection or bundle.trees.members:
        return every
    return {name: share for name, share in (importances(bundle) or {}).items() if share > 0}


def check_leaks(found: Sequence[Alone], candidate: Bundle, expected: Collection[str]) -> Iterator[Check]:
    """One check for each suspicious feature that the candidate leans on, or one that holds.

    Args:
        found: see `look`.
        candidate: the bundle.
        expected: patterns of features that are known when the list is shown, however well they rank.

    Raises:
        InputError: a pattern matches no feature of the data.
    """
    every = [Feature(name=feature.name) for feature in found]
    allowed = {f.name for pattern in expected for f in matching(pattern, every, key="bounds.expected")}
    leant_on, asked = leaning(candidate), questions(found)
    for name in [name for name in asked if name in leant_on]:
        share = leant_on[name]
        gain = "" if share is None else f", and has {share:.0%} of the candidate's gain"
        stated = asked[name].removesuffix(f": {ASK}") + gain
        if name in allowed:
            yield Check(bound="expected", where=name, holds=True, reason=f"{stated}; bounds.expected names it")
        else:
            remedy = f"{ASK} If so, name it in bounds.expected; else train without it (leave_out)"
            yield Check(bound="expected", where=name, holds=False, reason=f"{stated}: {remedy}")
    if not any(name in leant_on for name in asked):
        best = next((f"; the best, {f.name}, reaches NDCG@{f.k} {f.ndcg:.3f}" for f in found if f.name in leant_on), "")
        stated = (
            f"no feature of the candidate ranks as the labels do by itself, or is there for relevant ones only{best}"
        )
        yield Check(bound="expected", where=ALL, holds=True, reason=stated)
