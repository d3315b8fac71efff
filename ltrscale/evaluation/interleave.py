"""Offline interleaving: pairs of rankers on the labelled groups of a split, with users who click by a click model.

Shapes: N documents, Q groups, R rankers, P pairs, M methods.
"""

import itertools
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, model_validator

from ltrscale.arrays import Doubles, Ints
from ltrscale.bundle import load, scorers_of, with_tokens_of
from ltrscale.config import Strict
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream import scored
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.impressions import (
    METHODS,
    MeasureAgreement,
    Pair,
    RankedGroups,
    Traffic,
    lift,
    measure_agreement,
    simulate,
)
from ltrscale.evaluation.measure.report import GROUPS
from ltrscale.evaluation.measure.settings import CutOff
from ltrscale.evaluation.statistics.crossed import Difference
from ltrscale.evaluation.statistics.lifts import POWER_ASKED, samples_needed
from ltrscale.progress import Report, progress
from ltrscale.ranking.choices import METRICS, MetricName, metric_label, metric_named
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Points, Section, Table, Text, cell
from ltrscale.reports.findings import Findings, ReportStage, commit_report
from ltrscale.simulate.users import PositionBased, User, attraction, highest_grade, relevance_probability
from ltrscale.stages.inputs import BundleUrl, hashes_of
from ltrscale.stages.provenance import check_unseen, scored_by
from ltrscale.stages.stage import Origin

_DOCS_PER_BATCH = 65_536


class InterleaveJob(ReportStage):
    """Compare rankers by simulated interleaving: credit, lift, and the impressions needed to see it."""

    stage: ClassVar = "interleave"
    fixed: ClassVar = {"power": 0.8, "docs_per_batch": 65_536}
    models: dict[str, BundleUrl] = Field(default_factory=dict)
    """Bundles by name. All pairs of `models` and `scores` are compared; with three or more rankers the report says how
    well a metric predicts the lift."""
    scores: dict[str, str] = Field(default_factory=dict)
    """Rankers without a bundle, by name: the directory of scores that jobs.score made on the test split's data set."""
    test: Split
    """Its labelled groups are shown to users; labels are grades of relevance, or the clicks of a log."""
    impressions: int = Field(default=100_000, ge=1)
    """Lists shown for each pair, spread evenly over the groups. With the default, the noise of clicks is small compared
    with that of choosing a thousand queries; BUYL23's comparison took two weeks of traffic."""
    user: User = PositionBased()
    """How a user examines a list: `pbm`, for which debiased credit is proved, or `cascade`."""
    noise: float = Field(default=0.1, ge=0, le=1)
    """Probability of a click on an examined but irrelevant document (epsilon), as in jobs.relabel."""
    max_relevance: float | None = Field(default=None, gt=0)
    """The highest grade; by default the highest label of the data sets."""
    depth: CutOff | None = 10
    """Positions shown, such as a page of ten; null for all."""
    eta: float | None = Field(default=None, ge=0)
    """Position bias that debiased credit assumes; by default that of a `pbm` user, and 1 for a `cascade`, which no
    power of the position fits exactly."""
    metric: MetricName = Field("ndcg@5", description=f"Offline metric to compare with the lift: {METRICS}.")
    seed: int = 0
    """Seed of coins, users and the order of ties."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if shared := self.scores.keys() & self.models.keys():
            raise ValueError(f"models and scores both have a ranker {min(shared)!r}; give them different names")
        if len(self.rankers) < 2:
            raise ValueError("models and scores name fewer than two rankers; interleaving compares pairs")
        if self.test.scores is not None:
            raise ValueError("test.scores: users click by labels; leave it out, and name the rankers under scores")
        return self

    @property
    def rankers(self) -> dict[str, str]:
        """All rankers, in the order of the report."""
        return {**self.models, **self.scores}

    @property
    def pairs(self) -> list[Pair]:
        """All pairs of rankers; the coins belong to the names, so that exchanging rankers negates every difference."""
        names = list(self.rankers)
        return [Pair(i, j, names[i] > names[j]) for i, j in itertools.combinations(range(len(names)), 2)]

    @property
    def assumed_eta(self) -> float:
        """The position bias that debiased credit assumes."""
        return self.user.assumed_eta if self.eta is None else self.eta

    @property
    def scored(self) -> list[Split]:
        """The test split with each of the scores as its labels."""
        return [self.test.with_scores(url) for url in self.scores.values()]

    def page(self) -> Document:
        """The report of the committed findings."""
        return document(Interleaved.read(self.out))

    def check(self) -> None:
        """Refuse rankers that have seen test periods."""
        for url in [*self.models.values(), *(url for split in self.scored for url in scored_by(split))]:
            check_unseen(url, self.test)

    def inputs(self) -> dict[str, str]:
        """The inputs by their types, and the scores."""
        return hashes_of(self, *self.scored)

    def work(self, origin: Origin, report: Report) -> None:
        """Compare all pairs of rankers, and commit the findings; `groups.parquet` has a row for each group and pair.

        Groups are streamed; about 100 bytes per group and pair stay in memory.

        Raises:
            InputError: a bundle or scores are missing or do not fit the data, a score is not finite, or a label
                is above the highest grade.
        """
        shown = _simulated(self)
        result = _compared_rankers(shown, self)
        tables = {GROUPS: _group_rows(shown, result)}
        commit_report(self.out, result, document(result), made_by=origin, tables=tables)
        for pair in result.pairs:
            lifts = {method: compared.lift.mean for method, compared in pair.methods.items()}
            report({"one": pair.one, "other": pair.other, self.metric: pair.metric.mean, **lifts})


class InterleavedPair(Strict):
    """Two rankers by one method."""

    credit: tuple[float, float]
    """Mean credit of both rankers for an impression; for `separate`, clicks on the ranker's own list."""
    lift: Difference
    """Relative difference in credit, first ranker minus second."""
    needed: float | None
    """Impressions until the difference is found with the required power; None for no difference at all."""


class RankerPair(Strict):
    """Two rankers."""

    one: str
    other: str
    metric: Difference
    """Difference in the offline metric, first ranker minus second, over the groups that define it."""
    methods: dict[str, InterleavedPair]


class Interleaved(Findings):
    """`metrics.json` of an offline interleaving."""

    called: ClassVar = "an interleaving"
    made_by_job: ClassVar = "jobs.interleave"
    rankers: dict[str, str]
    """The bundle or scores of each ranker."""
    means: dict[str, float]
    """The offline metric of each ranker; empty if no group defines it."""
    pairs: tuple[RankerPair, ...]
    agreement: dict[str, MeasureAgreement]
    """Agreement of the offline metric with the lift of each method, over pairs."""
    data: tuple[str, ...]
    groups: int
    defined: int
    """Groups that define the offline metric."""
    documents: int
    impressions: int
    user: User
    noise: float
    depth: int | None
    eta: float
    metric: str
    power: float


class _Measured(NamedTuple):
    """Results of every group, sorted by id: sums as in `impressions.simulate`, and the metric, NaN where undefined."""

    documents: int
    gids_Q: Ints
    impressions_Q: Ints
    sums_QPM3: Doubles
    metric_QR: Doubles


def _simulated(job: InterleaveJob) -> _Measured:
    """Score the groups with every ranker and simulate their impressions, in one pass over the data."""
    test, top = select(job.test, labelled=True), _highest_grade(job)
    bundles = {name: load(url) for name, url in job.models.items()}
    test = with_tokens_of(test, bundles.values())
    scorers = scorers_of(bundles, features=test.features)
    scorers |= {name: scored.look_up(url, scored.committed(url, job.test)) for name, url in job.scores.items()}
    traffic = Traffic(job.user, job.depth, job.assumed_eta, job.impressions / test.n_groups, job.seed)
    metric, parts, documents = metric_named(job.metric), [], 0
    with progress("interleave", test.n_documents) as advance:
        for groups in iterate(test, docs_per_batch=_DOCS_PER_BATCH):
            assert groups.labels_N is not None
            assert groups.ids_Q is not None
            scores = [scored.finite(scorers[name](groups), name) for name in job.rankers]
            if (label := float(groups.labels_N.max())) > top:
                raise InputError(f"{', '.join(job.test.data)}: label {label:g} is above max_relevance {top:g}")
            relevance_N = relevance_probability(groups.labels_N.double().numpy(), top=top)
            lists = RankedGroups(
                groups.ids_Q.numpy(),
                groups.offsets_Q1.numpy(),
                attraction(relevance_N, noise=job.noise),
                torch.stack(scores).double().numpy(),
            )
            outcome = simulate(lists, job.pairs, traffic)
            values_QR = torch.stack([metric.values(s, groups.labels_N, groups.offsets_Q1) for s in scores], dim=1)
            parts.append((groups.ids_Q.numpy(), *outcome, values_QR.numpy()))
            documents += groups.n_documents
            advance(groups.n_documents)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    # sorted, because sums of floats depend on their order, and so on the layout of the files
    order_Q = np.argsort(columns[0])
    return _Measured(documents, *(values[order_Q] for values in columns))


def _highest_grade(job: InterleaveJob) -> float:
    if job.test.labels != "labels" and job.max_relevance is None:
        raise InputError(f"the manifest does not count {job.test.labels}; give the highest grade as max_relevance")
    counts: dict[str, int] = {}
    for url in job.test.data:
        counts |= open_dataset(url).manifest.label_counts
    return highest_grade(job.max_relevance, counts)


def _compared_rankers(measured: _Measured, job: InterleaveJob) -> Interleaved:
    names, impressions = list(job.rankers), int(measured.impressions_Q.sum())
    pairs = []
    for p, (one, other, _) in enumerate(job.pairs):
        methods = {
            method: _compared_by(measured.sums_QPM3[:, p, m].T, impressions, separate=method == "separate")
            for m, method in enumerate(METHODS)
        }
        metric = Difference.from_values(measured.metric_QR[:, one] - measured.metric_QR[:, other])
        pairs.append(RankerPair(one=names[one], other=names[other], metric=metric, methods=methods))
    offline = [pair.metric for pair in pairs]
    defined_QR = measured.metric_QR[~np.isnan(measured.metric_QR[:, 0])]
    return Interleaved(
        rankers=job.rankers,
        means=dict(zip(names, defined_QR.mean(axis=0).tolist(), strict=True)) if len(defined_QR) else {},
        pairs=tuple(pairs),
        agreement={
            method: measure_agreement(offline, [pair.methods[method].lift for pair in pairs]) for method in METHODS
        },
        data=job.test.data,
        groups=len(measured.gids_Q),
        defined=len(defined_QR),
        documents=measured.documents,
        impressions=impressions,
        user=job.user,
        noise=job.noise,
        depth=job.depth,
        eta=job.assumed_eta,
        metric=job.metric,
        power=POWER_ASKED,
    )


def _compared_by(sums_3Q: Doubles, impressions: int, *, separate: bool) -> InterleavedPair:
    """The figures of one method, from both credits and the squares of each group."""
    credit_2, square = sums_3Q[:2].sum(axis=1) / max(impressions, 1), sums_3Q[2].sum() / max(impressions, 1)
    difference = float(credit_2[0] - credit_2[1])
    # separate users: half of the impressions for each ranker, so the variance of the difference is twice their sum
    variance = 2 * (square - np.square(credit_2).sum()) if separate else square - difference**2
    return InterleavedPair(
        credit=(float(credit_2[0]), float(credit_2[1])),
        lift=lift(sums_3Q[:2]),
        needed=samples_needed(difference, float(variance)),
    )


def _group_rows(measured: _Measured, result: Interleaved) -> pa.Table:
    """`groups.parquet`: a row for each pair and group, with credits summed over the group's impressions."""
    q, tables = len(measured.gids_Q), []
    for p, pair in enumerate(result.pairs):
        columns = {
            f"{method}_{name}": measured.sums_QPM3[:, p, m, i]
            for m, method in enumerate(METHODS)
            for i, name in enumerate(("one", "other", "squares"))
        }
        about = {"gid": measured.gids_Q, "one": [pair.one] * q, "other": [pair.other] * q}
        tables.append(pa.table({**about, "impressions": measured.impressions_Q, **columns}))
    return pa.concat_tables(tables)


def document(result: Interleaved) -> Document:
    """The report: a row for each pair and method, and how far the methods agree with the metric."""
    label = metric_label(result.metric)
    opening: tuple[Block, ...] = (
        Text(
            f"Test data: {', '.join(result.data)}; {result.groups:,} labelled query groups, {result.documents:,} "
            f"documents, {result.impressions:,} impressions for each pair and method. {label} is defined in "
            f"{result.defined:,} of the groups."
        ),
        Table.from_rows(
            [{"ranker": name, label: result.means.get(name), "from": url} for name, url in result.rankers.items()]
        ),
        _table_of_pairs(result),
        _chart(result),
    )
    agreements = [
        {
            "method": method,
            "pairs": a.pairs,
            "same ranker": a.same,
            "both significant": a.significant,
            "same ranker of these": a.significant_same,
            "correlation": a.correlation,
        }
        for method, a in result.agreement.items()
    ]
    sections = (
        Section(f"Agreement of {label} with the lift", [Table.from_rows(agreements)]),
        Section("How to read the tables", [Points(list(_explanations(result)))]),
    )
    return Document("Interleaving", opening, sections)


def _table_of_pairs(result: Interleaved) -> Table:
    return Table.from_rows(
        [
            {
                "pair": f"{pair.one} - {pair.other}",
                f"{metric_label(result.metric)} [95%]": cell(pair.metric, "+.4f"),
                "method": method,
                "credit": " : ".join(map(cell, compared.credit)),
                "lift [95%]": cell(compared.lift, "+.1%"),
                "p": compared.lift.p,
                "needed": cell(compared.needed, ",.0f"),
            }
            for pair in result.pairs
            for method, compared in pair.methods.items()
        ]
    )


def _explanations(result: Interleaved) -> Iterator[str]:
    user = result.user
    depth = "the whole list" if result.depth is None else f"the first {result.depth} positions"
    yield (
        f"A simulated user sees {depth}, {user.examines}, and clicks an examined document with {result.noise:g} + "
        f"{1 - result.noise:g} times the probability of its grade{user.trusts}."
    )
    yield (
        "credit is that of both rankers for a mean impression, lift the difference as a share of their mean, with an "
        f"interval over query groups. needed are the impressions that find it with a power of {result.power:.0%}, if "
        "it is the true one."
    )
    yield (
        "debiased estimates the clicks on each ranker's own list, without bias for users who examine position p with "
        f"p^-{result.eta:g}{user.beyond_credit}. separate shows each user the list of one ranker, as an A/B test does: "
        "its lift is the one that the others are to predict. docs/methods.md defines all four."
    )


def _chart(result: Interleaved) -> Chart:
    """A row for each pair and method: the lift with its interval."""
    rows = [
        charts.interval_row(f"{pair.one} - {pair.other}: {method}", compared.lift, series=method)
        for pair in result.pairs
        for method, compared in pair.methods.items()
    ]
    spec = charts.interval_chart(rows, title="lift and its 95% interval", at=0.0, unit="%")
    return Chart(spec, "lift of each pair by each method", "lift")
