"""Leaks: features that may be known only after users have acted, found by looking at each feature alone.

No check can distinguish a leak from an honest feature as good as the labels, so people have to answer: jobs.prepare and
the report ask about suspicious features, and the gate refuses until `bounds.expected` has the answer.
"""

from collections.abc import Mapping, Sequence

from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.relevant import only_relevant
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import first_groups
from ltrscale.data.stream.parts import spread
from ltrscale.progress import log
from ltrscale.ranking.single_feature import SingleFeature, single_features
from ltrscale.texts import one_line

_DOCUMENTS = 100_000
"""Documents to examine, in lists with a relevant document; ten times as many labels are read to find them."""
_LONGEST_NAME = 64
ASK = "is it known when the list is shown?"


def examine_features(split: Split, *, k: int = 5, relevant_from: float = 1.0) -> list[SingleFeature]:
    """Examine how each feature of a split ranks without the others, the best first.

    It reads a sample of the labelled groups: whole row groups at equal distances, about 100,000 documents. Nothing is
    found if scores serve as labels, because they do not say what users did. `k` is the cut-off of NDCG.

    Raises:
        InputError: as `select`, or a file cannot be read.
    """
    if split.scores is not None:
        return []
    sample = only_relevant(spread(select(split, labelled=True), documents=10 * _DOCUMENTS))
    groups = first_groups(spread(sample, documents=_DOCUMENTS), _DOCUMENTS)  # row groups may be larger than the sample
    assert groups.labels_N is not None
    features = single_features(
        groups.features_NF,
        groups.labels_N,
        groups.offsets_Q1,
        names=[feature.name for feature in sample.features],
        categorical=[feature.kind == "categorical" for feature in sample.features],
        k=k,
        relevant_from=relevant_from,
    )
    names = category_names(split.data)
    return sorted((_named(feature, names) for feature in features), key=lambda feature: -feature.lift)


def category_names(urls: Sequence[str]) -> dict[str, dict[int, str]]:
    """The texts of categorical features by code, if these data sets have recorded them."""
    texts: dict[str, dict[int, str]] = {}
    for url in urls:
        for name, of_codes in open_dataset(url).manifest.names_of_categories.items():
            texts.setdefault(name, {}).update(of_codes)
    return texts


def _named(feature: SingleFeature, names: Mapping[str, Mapping[int, str]]) -> SingleFeature:
    """The feature with the name of its most common code, if known."""
    there = feature.there
    if there is None or there.usual is None or (text := names.get(feature.name, {}).get(int(there.usual))) is None:
        return feature
    return feature.replace(there=there.replace(usual_name=one_line(text)[:_LONGEST_NAME]))


def questions(found: Sequence[SingleFeature]) -> dict[str, str]:
    """What to ask of each suspicious feature, the best first.

    Example:
        >>> seconds = SingleFeature(name="seconds", k=5, ndcg=0.97, random=0.34, lists=900, varies=1.0, there=None)
        >>> print(questions([seconds, seconds.replace(name="price", ndcg=0.5)])["seconds"])
        seconds alone ranks at NDCG@5 0.970 (random order 0.340, the best other feature 0.500): is it known when ...
    """
    honest = [feature.ndcg for feature in found if not feature.suspicious]
    best_other = f", the best other feature {max(honest):.3f}" if honest else ""
    texts = {}
    for feature in sorted(found, key=lambda feature: -feature.lift):
        if feature.ranks:
            order = f"random order {feature.random:.3f}{best_other}"
            texts[feature.name] = f"{feature.name} alone ranks at NDCG@{feature.k} {feature.ndcg:.3f} ({order}): {ASK}"
        elif feature.suspicious and feature.there is not None:
            texts[feature.name] = f"{feature.name} is {feature.there.stated}: {ASK}"
    return texts


def ask_of_leaks(out: str) -> None:
    """Log what is odd about features alone, and warn of those that may be known only after users have acted."""
    found = examine_features(Split(data=out))
    if equal := [feature.name for feature in found if not feature.varies and feature.lists]:
        log.info(
            "prepare: equal within every query: %s; alone they order no list, and trees and networks use them beside "
            "features of the documents only",
            ", ".join(equal),
        )
    if names := [feature.name for feature in found if feature.names_query]:
        log.info(
            "prepare: nearly unique to a query: %s; trees and networks memorise queries by them, worth nothing for new "
            "ones; leave out what is an id, such as a user or a session (columns.meta keeps it)",
            ", ".join(names),
        )
    for question in questions(found).values():
        log.warning("prepare: %s If not, leave it out of prepare.source.columns", question)
