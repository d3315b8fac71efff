"""Leaks: features that may be known only after users have acted, found by looking at each one alone, and the question.

Nothing can tell a leak from an honest feature that is as good as the labels. So a suspicious one is a question, which
people answer: jobs.prepare and the report ask it, and the gate refuses until `bounds.expected` has the answer.
"""

from collections.abc import Iterator, Sequence

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection, only_relevant, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import spread
from ltrscale.ranking.alone import Alone, alone

_DOCUMENTS = 100_000
"""Documents that are looked at, of lists with a relevant document; ten times as many labels are read to find these."""
ASK = "is it known when the list is shown?"


def look_alone(split: Split, *, k: int = 5, relevant_from: float = 1.0) -> list[Alone]:
    """Look at each feature of a split alone, the best first.

    It reads a sample of the labelled groups: whole row groups at equal distances, about 100,000 documents.

    Args:
        split: periods and labels; scores that serve as labels say nothing of what users did, so of these none is found.
        k: cut-off of NDCG.
        relevant_from: the lowest label of a relevant document.

    Raises:
        InputError: as `select`, or a file cannot be read.
    """
    if split.scores is not None:
        return []
    sample = only_relevant(spread(select(split, labelled=True), documents=10 * _DOCUMENTS))
    groups = _read(spread(sample, documents=_DOCUMENTS))
    assert groups.labels_N is not None
    found = alone(
        groups.features_NF,
        groups.labels_N,
        groups.offsets_Q1,
        names=[feature.name for feature in sample.features],
        categorical=[feature.kind == "categorical" for feature in sample.features],
        k=k,
        relevant_from=relevant_from,
    )
    return sorted(found, key=lambda feature: -feature.lift)


def _read(selection: Selection) -> QueryGroups:
    """The first groups of a selection: row groups may be larger than the sample."""
    parts: list[QueryGroups] = []
    for groups in iterate(selection):
        parts.append(groups)
        if sum(part.n_documents for part in parts) >= _DOCUMENTS:
            break
    return QueryGroups.concat(parts)


def questions(found: Sequence[Alone]) -> dict[str, str]:
    """What to ask of each suspicious feature, the best first.

    Example:
        >>> seconds = Alone(name="seconds", k=5, ndcg=0.97, random=0.34, lists=900, varies=1.0, there=None)
        >>> print(questions([seconds, seconds.replace(name="price", ndcg=0.5)])["seconds"])
        seconds alone ranks at NDCG@5 0.970 (random order 0.340, the best other feature 0.500): is it known when ...
    """
    honest = [feature.ndcg for feature in found if not feature.suspicious]
    other = f", the best other feature {max(honest):.3f}" if honest else ""
    asked = {}
    for feature in sorted(found, key=lambda feature: -feature.lift):
        if feature.ranks:
            order = f"random order {feature.random:.3f}{other}"
            asked[feature.name] = f"{feature.name} alone ranks at NDCG@{feature.k} {feature.ndcg:.3f} ({order}): {ASK}"
        elif feature.suspicious and feature.there is not None:
            asked[feature.name] = f"{feature.name} is {feature.there.stated}: {ASK}"
    return asked


def of_queries(found: Sequence[Alone]) -> Iterator[str]:
    """A line on the features that are equal within every list, and one on those that name the query."""
    if equal := [feature.name for feature in found if not feature.varies and feature.lists]:
        yield (
            f"equal within every query: {', '.join(equal)}; alone they order no list, and trees and networks use them "
            "beside features of the documents only"
        )
    if names := [feature.name for feature in found if feature.names_query]:
        yield (
            f"nearly unique to a query: {', '.join(names)}; trees and networks memorise queries by them, worth "
            "nothing for new ones; leave out what is an id, such as a user or a session (columns.meta keeps it)"
        )
