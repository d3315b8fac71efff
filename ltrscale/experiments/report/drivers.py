"""The section on rank 1: the features that lift the first document of a list above the next, by the best models."""

from collections.abc import Iterator

import numpy as np

from ltrscale.bundle import with_tokens_of
from ltrscale.bundle.explanations import Driver, Explanation, Reasoner, drivers_of
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.named import read_named
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.explain import driven, driver_table, drivers_chart
from ltrscale.experiments.report.groups import chosen_groups
from ltrscale.experiments.report.sources import Sources
from ltrscale.reports.document import Block, Chart, LeftOut, Points, Text

_METHODS, _DEPTH, _SENTENCES = 2, 5, 3


def rank_one(sources: Sources, most: int, *, seed: int) -> Iterator[Block]:
    """What drives rank 1 in the best two methods with bundles, on at most `most` test groups."""
    bundles = dict(sources.bundles())
    names = [method.name for method in sources.evaluation.ranked if method.name in bundles][:_METHODS]
    groups = sources.test.n_groups
    selection = chosen_groups(sources.test, np.random.default_rng(seed).permutation(groups)[:most])
    by_method: dict[str, tuple[Driver, ...]] = {}
    for name in names:
        try:
            explanations = _explanations(sources, bundles[name], selection)
        except InputError as error:
            yield LeftOut(f"{name}: {error}")
            continue
        if drivers := drivers_of(explanations):
            by_method[name] = drivers
            yield Text(f"{name}: {driven(drivers, len(explanations))}")
            sentences = [f"{each.query}: {each.sentence()}" for each in explanations[:_SENTENCES]]
            yield Points(sentences, caption=f"The first of these queries by {name}")
    if not by_method:
        raise InputError("no method with a bundle separates the documents of a test group; evaluate one that does")
    yield Chart(drivers_chart(by_method), "the share of the lead of rank 1 that each feature adds", "drivers")
    for name, drivers in by_method.items():
        yield driver_table(drivers, name)
    yield Text(
        f"The document of rank 1 against those of ranks 2 to {_DEPTH}, in {min(most, groups):,} of {groups:,} test "
        "groups drawn at random: what each feature adds to the difference of their scores. docs/methods.md defines it; "
        "jobs.explain says it of any query and any two items."
    )


def _explanations(sources: Sources, url: str, selection: Selection) -> list[Explanation]:
    bundle = sources.opened(url)
    reading = with_tokens_of(selection, [bundle])
    reasoner = Reasoner.from_bundles({url: bundle}, reading.features, sources.categories)
    return [each for part in read_named(reading) for each in reasoner.explain_firsts(part.groups, part.ids, _DEPTH)]
