"""Test groups with scores, and the sections that read them: embeddings, agreement, rank 1 and outliers.

Shapes: N documents, Q groups, M chosen groups, F features, D embedding.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle, scorers_of, with_tokens_of
from ltrscale.bundle.explanations import Driver, Reasoner, drivers_of
from ltrscale.data.dataset.manifest import places
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import Selection, scored_row_groups, select
from ltrscale.data.stream import scored
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.plan import spread
from ltrscale.data.stream.readers import read_direct
from ltrscale.data.stream.scored import read_named
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.agreement import kendall_tau, top_overlap
from ltrscale.evaluation.measure.explain import driven, driver_table, drivers_chart
from ltrscale.evaluation.measure.measuring import order_shown
from ltrscale.evaluation.measure.outliers import histograms
from ltrscale.evaluation.measure.page import outlier_rules
from ltrscale.evaluation.measure.report import read_group_rows
from ltrscale.evaluation.measure.settings import AS_SHOWN
from ltrscale.experiments.report.sources import Sources, pretrained_for
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, LeftOut, Points, Table, TableRow, Text

META, _META_SHOWN = "meta_", 3


@dataclass(frozen=True)
class GroupsAndScores:
    """Test groups of one row group of the data, with the scores of some methods."""

    groups: QueryGroups
    ids: pa.Table
    """A row per group: `query_id` and, if the data has them, `doc_ids`, `gains` and `meta_*`."""
    scores: Mapping[str, Tensor]


def chosen_groups(test: Selection, numbers_M: NDArray[np.int64]) -> Selection:
    """The groups with these numbers, in the reading order of an evaluation."""
    chosen_Q = np.zeros(test.n_groups, np.bool_)
    chosen_Q[numbers_M] = True
    return test.taking(chosen_Q)


def read_groups_scored(
    sources: Sources, selection: Selection, methods: Sequence[str] = ()
) -> Iterator[GroupsAndScores]:
    """The groups of a selection, with the scores of the first trial of each method."""
    evaluated = sources.evaluated
    committed = {
        name: scored_row_groups(evaluated.scores[name], selection.row_groups)
        for name in methods
        if name in evaluated.scores
    }
    bundles = {name: sources.opened(url) for name, url in sources.bundles() if name in methods}
    selection = with_tokens_of(selection, bundles.values())
    scorers = scorers_of(bundles, features=selection.features)
    also = ["gains", *(_meta_of(selection.row_groups[0]) if len(selection.row_groups) else ())]
    for i, (_, groups, ids) in enumerate(read_named(selection, also)):
        scores = {name: scorer(groups).double() for name, scorer in scorers.items()}
        scores |= {AS_SHOWN: order_shown(groups)} if AS_SHOWN in methods else {}
        for name, of_scores in committed.items():
            (of_groups,) = read_direct([of_scores[i]], scored.COLUMNS)
            scores[name] = scored.look_up(evaluated.scores[name], scored.scores_from_tables([of_groups]))(
                groups
            ).double()
        yield GroupsAndScores(groups, ids, {name: scores[name] for name in methods})


def _meta_of(row_group: RowGroup) -> list[str]:
    """The columns that describe a group to readers, such as the query text."""
    with storage.open_input(row_group.file.url) as stream:
        names = pq.read_schema(stream).names
    return [name for name in names if name.startswith(META)][:_META_SHOWN]


def primary_values(sources: Sources, methods: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """The primary metric of every test group by the first trial of each method, NaN where undefined."""
    rows = read_group_rows(sources.url, ["gid", "method", "trial", sources.evaluation.primary])
    first = (pc.field("trial") == 0) & (pc.field("gid") >= 0)  # queries without a list have negative ids
    return {
        name: rows.filter(first & (pc.field("method") == name))[sources.evaluation.primary].to_numpy()
        for name in methods
    }


def labels_in(groups: QueryGroups) -> Tensor:
    """The labels of labelled groups."""
    assert groups.labels_N is not None
    return groups.labels_N


_OVERLAP_AT = 5
_EXPLAINED, _RANKS, _SENTENCES = 2, 5, 3
_HISTOGRAMS = 12
_COUNTED_AT_ONCE = 65_536


def embeddings(sources: Sources, of: Mapping[str, str], *, documents: int, seed: int) -> Iterator[Block]:
    """t-SNE of documents in the embeddings of the given bundles by title, or of the evaluation's networks."""
    bundles: dict[str, Bundle] = {}
    problems: list[str] = []
    for title, url in (of or dict(_networks(sources, problems))).items():
        try:
            bundles[title] = sources.opened(url)
        except InputError as error:
            problems.append(f"{title}: {error}")
    yield from map(LeftOut, problems)
    if not bundles:
        raise InputError("the evaluation has no single network; name bundles of networks under embeddings")
    batches = [
        part.groups
        for part in read_groups_scored(sources, with_tokens_of(_sampled(sources, documents, seed), bundles.values()))
    ]
    labels_N = torch.cat([labels_in(groups) for groups in batches]).numpy()
    shown = []
    for title, bundle in bundles.items():
        try:
            embedded_ND = torch.cat(list(map(_embedder(bundle, sources.test), batches)))
            shown.append(_scatter(title, _project(embedded_ND.numpy(), seed), labels_N))
        except InputError as error:
            yield LeftOut(f"{title}: {error}")
    yield from shown
    yield Text(
        f"t-SNE (van der Maaten and Hinton 2008) of the {len(labels_N):,} documents of "
        f"{sum(groups.n_groups for groups in batches):,} test groups with a relevant document, drawn with seed "
        f"{seed}; size and colour are the label, as in HOU24's figures 4, 6 and 7. Only neighbourhoods "
        "mean something: neither axes nor distances between clusters do. An encoder of pretraining alone has seen no "
        "label; a supervised network is shown before its last layer."
    )


def _networks(sources: Sources, problems: list[str]) -> Iterator[tuple[str, str]]:
    """Title and bundle of each network to show; each encoder once."""
    encoders = set()
    for name, url in sources.bundles():
        try:
            bundle = sources.opened(url)
            before = pretrained_for(bundle) if bundle.parts else None
        except InputError as error:
            problems.append(f"{name}: {error}")
            continue
        if bundle.parts and (before or url) not in encoders:
            encoders.add(before or url)
            yield (f"{name}, pretrained" if before else f"{name}, supervised"), before or url


def _sampled(sources: Sources, documents: int, seed: int) -> Selection:
    """Random test groups with a defined primary metric, until they have enough documents."""
    (defined_Q,) = primary_values(sources, [sources.evaluation.methods[0].name]).values()
    numbers = np.flatnonzero(~np.isnan(defined_Q))
    if not len(numbers):
        raise InputError("no test group has a relevant document; evaluate other periods")
    order = np.random.default_rng(seed).permutation(numbers)
    mean = sources.evaluation.test.documents / sources.test.n_groups
    return chosen_groups(sources.test, order[: max(1, round(documents / mean))])


def _embedder(bundle: Bundle, test: Selection) -> Callable[[QueryGroups], Tensor]:
    """A function from a batch to embeddings [N, D], of a pretrained encoder or before a ranker's last layer."""
    columns, embed = places(bundle.features, test.features, whose=bundle.url, on_purpose=True), bundle.embedder()
    if columns is None:
        return embed
    return lambda groups: embed(replace(groups, features_NF=groups.features_NF[:, columns]))


def _project(embedded_ND: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Two t-SNE coordinates per document, deterministic by seed."""
    from sklearn.manifold import TSNE  # importing scikit-learn takes seconds, and only this picture needs it

    perplexity = min(30.0, (len(embedded_ND) - 1) / 3)
    return np.asarray(TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(embedded_ND), np.float32)


def _scatter(title: str, places_N2: NDArray[np.float32], labels_N: NDArray[np.float32]) -> Chart:
    order = np.argsort(labels_N, kind="stable")  # draw relevant documents on top
    rows = [
        {"x": round(float(x), 2), "y": round(float(y), 2), "label": float(label)}
        for (x, y), label in zip(places_N2[order], labels_N[order], strict=True)
    ]
    levels = sorted(set(labels_N.tolist()))
    return Chart(
        charts.scatter(rows, title=title, labels=levels), f"{title}: {len(rows):,} documents by label", small=True
    )


def orders_alike(sources: Sources, most: int, *, seed: int) -> Iterator[Block]:
    """How similar the orders of each pair of methods are, on at most `most` groups."""
    names = [method.name for method in sources.evaluation.methods]
    if len(names) < 2:
        raise InputError("the evaluation has one method; evaluate two to see whether they agree")
    groups = sources.test.n_groups
    size = min(groups, most)
    numbers_M = np.random.default_rng(seed).permutation(groups)[:size]
    pairs = list(itertools.combinations(names, 2))
    taus: dict[tuple[str, str], list[Tensor]] = {pair: [] for pair in pairs}
    shared: dict[tuple[str, str], list[Tensor]] = {pair: [] for pair in pairs}
    for part in read_groups_scored(sources, chosen_groups(sources.test, numbers_M), names):
        offsets_Q1 = part.groups.offsets_Q1
        for first, second in pairs:
            scores = part.scores[first], part.scores[second]
            taus[first, second].append(kendall_tau(*scores, offsets_Q1))
            shared[first, second].append(top_overlap(*scores, offsets_Q1, k=_OVERLAP_AT))
    rows: list[TableRow] = [
        {
            "method": first,
            "other": second,
            "Kendall's tau-b": f"{float(torch.cat(taus[first, second]).nanmean()):.3f}",
            f"first {_OVERLAP_AT} in common": f"{float(torch.cat(shared[first, second]).nanmean()):.1%}",
        }
        for first, second in pairs
    ]
    yield Table.from_rows(rows, f"Means over {size:,} of {groups:,} test groups")
    yield Text(
        "1 is the same order, 0 none in common, -1 the opposite. Groups were drawn at random, labels play no part."
    )


def rank_one(sources: Sources, most: int, *, seed: int) -> Iterator[Block]:
    """What drives rank 1 in the best two methods with bundles, on at most `most` test groups."""
    bundles = dict(sources.bundles())
    names = [method.name for method in sources.evaluation.ranked if method.name in bundles][:_EXPLAINED]
    groups = sources.test.n_groups
    selection = chosen_groups(sources.test, np.random.default_rng(seed).permutation(groups)[:most])
    by_method: dict[str, tuple[Driver, ...]] = {}
    for name in names:
        try:
            bundle = sources.opened(bundles[name])
            reading = with_tokens_of(selection, [bundle])
            reasoner = Reasoner.from_bundles({bundles[name]: bundle}, reading.features, sources.categories)
            parts = read_named(reading)
            explanations = [each for p in parts for each in reasoner.explain_firsts(p.groups, p.ids, _RANKS)]
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
        f"The document of rank 1 against those of ranks 2 to {_RANKS}, in {min(most, groups):,} of {groups:,} test "
        "groups drawn at random: what each feature adds to the difference of their scores. docs/methods.md defines it; "
        "jobs.explain says it of any query and any two items."
    )


def outliers(sources: Sources, documents: int) -> Iterator[Block]:
    """The evaluation's outlier rules, over histograms of the validation split."""
    detector = sources.evaluation.detector
    yield from outlier_rules(detector)
    if not detector.rules:
        return
    whole = select(sources.evaluated.splits.validation, labelled=False)
    sample = spread(whole, documents=documents)
    ruled = {i: f.name for i, f in enumerate(sample.features) if f.name in detector.rules and f.kind == "numeric"}
    charted = dict(itertools.islice(ruled.items(), _HISTOGRAMS))
    counted = histograms(lambda: iterate(sample, docs_per_batch=_COUNTED_AT_ONCE), list(charted))
    shown = []
    for column, name in charted.items():
        if (histogram := counted.get(column)) is not None:
            rule = detector.rules[name]
            spec = charts.histogram(
                histogram.counts_B.tolist(),
                histogram.edges_B1.tolist(),
                title=name,
                below=rule.below,
                at_least=rule.at_least,
            )
            shown.append(Chart(spec, f"{name}: documents by value; outliers are red", small=True))
    yield from shown
    of = f"{sample.n_documents:,} of {whole.n_documents:,} documents of the validation split"
    limit = f", the first {_HISTOGRAMS} features with a rule" if len(ruled) > _HISTOGRAMS else ""
    yield Text(f"Counts are of {of}{limit}. Rules were fitted on all of them.")
