"""Why a document ranks above others: for two items, for the first item of a query, for the first items of many queries.

Of a pretrained encoder, which ranks nothing, the same job says which features solve its contrast: its loss with each
feature permuted in one of two views. A feature that identifies the document within its group makes the contrast easy:
without its value the other view is hard to find. Features that describe the document share the work, so no single one
matters much.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, M chosen groups, F features, P projection.
"""

from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ltrscale import bundle
from ltrscale.arrays import Bools, Ints
from ltrscale.batch import group_index
from ltrscale.bundle import PretrainedBundle
from ltrscale.bundle.explanations import Driver, Explanation, Reasoner, as_table, drivers_of
from ltrscale.bundle.opened import fitting
from ltrscale.config import Config, Strict, validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Periods, Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.data.stream.plan import spread
from ltrscale.data.stream.readers import read_direct
from ltrscale.data.stream.scored import NamedGroups, read_named
from ltrscale.draws import mix, permutation
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.conditions import ConditionText
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.slices import Slicer
from ltrscale.models.features import FeatureKind
from ltrscale.pretext.augment import AugmentConfig, Draw, MaskConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.pretext.contrast import Contrastive, SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer, Siamese, negatives
from ltrscale.pretext.watch import collapse_measures
from ltrscale.progress import Report, progress
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Points, Section, Table, TableRow, Text, cell
from ltrscale.reports.findings import Findings, ReportStage, commit_report
from ltrscale.stages.inputs import BundleUrl, hashes_of
from ltrscale.stages.stage import Origin

TABLE = "explanations.parquet"
_SHOWN, _LISTED, _AT_ONCE = 15, 20, 512
_EXPLAINED, _CONTRASTED = 200, 2000
"""Queries by default: of a ranker, and of an encoder."""


class ExplainJob(ReportStage):
    """Explain why items rank where they do, or which features solve the contrast of a pretrained encoder."""

    stage: ClassVar = "explain"
    bundle: BundleUrl
    """Bundle that ranks, or that jobs.pretrain made by a method that compares two views of a document."""
    data: str
    """Data set directory, for an encoder preferably that of its pretraining; only `where` reads labels."""
    periods: Periods = None
    """Periods, ranges or periods counted from the newest, as in a split; all if left out."""
    query: str | None = None
    """The id of the query to explain; by default many queries are explained, and the means are shown."""
    items: tuple[str, str] | None = None
    """Ids of two items of the query: why the first ranks above the second. By default the first item is explained."""
    where: ConditionText | None = None
    """Explain the labelled queries that meet a condition, such as `n_documents > 20`, as slices do."""
    depth: int = Field(10, ge=2)
    """The first item of a query is compared with those of ranks 2 to this one."""
    queries: int | None = Field(None, ge=1)
    """The largest number of queries to explain, drawn at random: by default 200. For an encoder about this many are
    read, in whole row groups: by default 2000."""
    seed: int = 0
    """Seed of that draw, and of an encoder's views and permutations."""

    @model_validator(mode="after")
    def _names_a_query(self) -> Self:
        if self.items and self.query is None:
            raise ValueError("items are those of one query; set query to its id")
        if self.where and self.query is not None:
            raise ValueError("where chooses among queries; leave out query, or where")
        return self

    @property
    def split(self) -> Split:
        """The groups to choose from."""
        return Split(data=(self.data,), periods=self.periods)

    def page(self) -> Document:
        """The report of the committed findings."""
        if isinstance(bundle.load(self.bundle), PretrainedBundle):
            return contrast_page(Contrast.read(self.out))
        return document(Explained.read(self.out))

    def splits_read(self) -> list[Split]:
        """The documents."""
        return [self.split]

    def inputs(self) -> dict[str, str]:
        """Content of the bundle and the documents."""
        return hashes_of(self, self.split)

    def work(self, origin: Origin, report: Report) -> None:
        """Explain, and commit the report with `explanations.parquet`, the ten largest reasons of each explanation.

        Raises:
            InputError: the bundle can neither score nor was pretrained, the data lack its features, or there is no
                such query or item.
        """
        opened = bundle.load(self.bundle)
        if isinstance(opened, PretrainedBundle):
            self._contrast(opened, origin, report)
            return
        selection = bundle.with_tokens_of(select(self.split, labelled=self.where is not None), [opened])
        names = open_dataset(self.data).manifest.names_of_categories
        reasoner = Reasoner.from_bundles({self.bundle: opened}, selection.features, names)
        chosen_M, explanations = self._chosen(selection), list[Explanation]()
        with progress("explain", len(chosen_M)) as advance:
            for part in read_named(selection, chosen_M=chosen_M):
                explanations += self._explained(reasoner, part)
                advance(part.groups.n_groups)
        if not explanations:
            raise InputError(f"{self.data}: no chosen query has two documents; choose others")
        found = Explained(
            bundle=self.bundle,
            data=self.data,
            depth=self.depth,
            queries=len(explanations),
            drivers=drivers_of(explanations),
            explanations=tuple(explanations[:_LISTED]),
        )
        commit_report(self.out, found, document(found), made_by=origin, tables={TABLE: as_table(explanations)})
        report({"queries": len(explanations), **{driver.feature: driver.share for driver in found.drivers[:_SHOWN]}})

    def _contrast(self, encoder: PretrainedBundle, origin: Origin, report: Report) -> None:
        if self.query is not None or self.where is not None:
            raise InputError(f"{self.bundle}: an encoder, which ranks nothing; leave out query, items and where")
        found = contrast_of(encoder, self.split, groups=self.queries or _CONTRASTED, seed=self.seed)
        commit_report(self.out, found, contrast_page(found), made_by=origin)
        report({"loss": found.loss, "uninformed": found.uninformed, "accuracy": found.accuracy})

    def _chosen(self, selection: Selection) -> Ints:
        """Numbers of the groups to explain, in order."""
        numbers_M = np.arange(selection.n_groups)
        if self.query is not None:
            ids = [table["query_id"].to_pylist() for table in read_direct(selection.row_groups, ["query_id"])]
            numbers_M = np.flatnonzero(np.concatenate(ids) == self.query)
        elif self.where is not None:
            numbers_M = np.flatnonzero(_meeting(self.where, selection))
        if not len(numbers_M):
            asked = f"query {self.query!r}" if self.query is not None else f"group where {self.where}"
            raise InputError(f"{self.data}: there is no {asked}; check periods, or choose another")
        return np.sort(numbers_M[permutation(len(numbers_M), "explain", self.seed)[: self.queries or _EXPLAINED]])

    def _explained(self, reasoner: Reasoner, part: NamedGroups) -> list[Explanation]:
        if self.items is None:
            return reasoner.explain_firsts(part.groups, part.ids, self.depth)
        chosen = []
        for q, start in enumerate(part.groups.offsets_Q1[:-1].tolist()):
            ids = part.ids["doc_ids"][q].as_py() or [] if "doc_ids" in part.ids.column_names else []
            if absent := [item for item in self.items if item not in ids]:
                some = f"; it has {', '.join(map(str, ids[:5]))}" if ids else "; the data set has no ids of items"
                raise InputError(f"items: query {self.query!r} has no item {absent[0]!r}{some}")
            one, other = (start + ids.index(item) for item in self.items)
            chosen.append((one, [other]))
        return reasoner.explain(part.groups, part.ids, chosen)


def _meeting(condition: str, selection: Selection) -> Bools:
    """Whether each group of a selection meets a condition."""
    names = tuple(feature.name for feature in selection.features)
    nothing = OutlierDetector(data="", features=names, gap=None, share=0.0, rules={})
    slicer = Slicer.make({"where": condition}, (), detector=nothing, selection=selection, relevant_from=1)
    parts = read_named(selection, slicer.stored)
    return np.concatenate([slicer.find(p.groups, p.row_group.file.period, p.ids)["where"] for p in parts])


class Explained(Findings):
    """`metrics.json` of explanations."""

    called: ClassVar = "an explanation"
    made_by_job: ClassVar = "jobs.explain"
    bundle: str
    data: str
    depth: int
    queries: int
    """Number of explanations, one per query."""
    drivers: tuple[Driver, ...]
    """What lifts the first documents on average, the largest first; empty if they have no lead."""
    explanations: tuple[Explanation, ...]
    """The first explanations."""


def document(found: Explained) -> Document:
    """The report: the parts of a single explanation, or for several what drives the first rank on average."""
    first, *others = found.explanations
    sections = [Section("How to read the figures", [Text(_HOW_TO_READ)])]
    if not others:
        rows: list[TableRow] = [
            {"feature": p.feature, "value": p.value, "against": p.against, "adds": f"{p.adds:+.4f}"}
            for p in first.reasons[:_SHOWN]
        ]
        bars = [{"name": p.feature, "value": p.adds, "series": "adds"} for p in first.reasons[:_SHOWN]]
        chart = Chart(charts.bars(bars, title="adds to the difference", unit=""), "what each feature adds", "parts")
        opening = [Text(first.sentence()), Text(f"The difference of the scores is {first.difference:+.4f}.")]
        return Document(f"Query {first.query}", [*opening, Table.from_rows(rows), chart], sections)
    chart = Chart(drivers_chart({"": found.drivers}), "what each feature adds to the lead of rank 1", "drivers")
    sentences = Points([f"{each.query}: {each.sentence()}" for each in found.explanations])
    means: list[Block] = [Text(driven(found.drivers, found.queries)), driver_table(found.drivers), chart]
    return Document("What drives rank 1", means, [Section("Queries", [sentences]), *sections])


_HOW_TO_READ = (
    "Figures are parts of the difference of two scores, and add up to it; against several items they are means, beside "
    "the median of their values. They say what the model does with a feature, not what the feature does to shoppers. "
    "docs/methods.md defines them."
)


def driven(drivers: tuple[Driver, ...], queries: int) -> str:
    """A sentence on what drives rank 1."""
    lifting = [f"{driver.feature} ({driver.share:.0%} of the lead)" for driver in drivers if driver.share > 0][:3]
    if not lifting:
        return f"Over {queries:,} queries no feature lifts the first item above the others."
    return f"Over {queries:,} queries the first item leads by {', '.join(lifting)}."


def driver_table(drivers: tuple[Driver, ...], caption: str = "") -> Table:
    """The first drivers; folded behind its caption, if it has one."""
    rows: list[TableRow] = [
        {
            "feature": d.feature,
            "adds": f"{d.adds:+.4f}",
            "share of the lead": f"{d.share:.1%}",
            "adds most in": f"{d.first:.1%}",
        }
        for d in drivers[:_SHOWN]
    ]
    return Table.from_rows(rows, caption, folded=bool(caption))


def drivers_chart(by_method: dict[str, tuple[Driver, ...]]) -> charts.Spec:
    """The shares of the lead by feature, a bar for each method."""
    order = dict.fromkeys(d.feature for drivers in by_method.values() for d in drivers[:_SHOWN])
    shares = {name: {d.feature: d.share for d in drivers} for name, drivers in by_method.items()}
    rows = [
        {"name": feature, "value": of_method.get(feature, 0.0), "series": name}
        for feature in [*order][:_SHOWN]
        for name, of_method in shares.items()
    ]
    return charts.bars(rows, title="share of the lead of rank 1", order=[*by_method])


class _Permuted(Strict):
    """The contrast with one feature permuted among the documents of each group, in one of the two views."""

    name: str
    kind: FeatureKind
    masked: float
    """Rate at which the views mask the feature."""
    loss: float
    accuracy: float | None
    """Share of documents with the other view found; None if no document has a negative."""


class Contrast(Findings):
    """`metrics.json` of the contrast."""

    called: ClassVar = "a contrast"
    made_by_job: ClassVar = "jobs.explain"
    bundle: str
    data: str
    method: str
    groups: int
    documents: int
    loss: float
    """Mean over documents, with the views as in training."""
    uninformed: float
    """The loss if all similarities were equal."""
    accuracy: float | None
    features: tuple[_Permuted, ...]
    """In order of the loss without the feature, the highest first."""


class _Pretraining(Config, extra="ignore"):
    """The pretraining settings that define the contrast."""

    method: MethodConfig
    augment: AugmentConfig
    mask: MaskConfig
    stream: StreamConfig


def contrast_of(opened: PretrainedBundle, split: Split, *, groups: int, seed: int) -> Contrast:
    """Measure the contrast as trained and with each feature permuted, on about so many groups of a split.

    Raises:
        InputError: the bundle was not pretrained by a method that compares two views, or the data lack its features.
    """
    settings = validate(_Pretraining, opened.config, opened.url)
    method = settings.method
    if not isinstance(method, Siamese) or opened.projector() is None:
        raise InputError(
            f"{opened.url}: pretrained with {method.kind}, which does not compare two views of a document; "
            "name a bundle of another method, such as simclr_rank"
        )
    whole = select(split, labelled=False).serving(opened.features, whose=opened.url)
    sample = spread(whole, documents=round(groups * whole.n_documents / whole.n_groups))
    net = _pretrained(opened, settings, sample)
    stream = GroupStream(whole, settings.stream).config  # as many streams as in training on these groups
    sums_V4 = _contrast_sums(net, method, stream, sample, seed=seed)
    (loss, uninformed, matched, contrasted), *permuted = sums_V4.tolist()
    n = sample.n_documents
    rates = [0.0] * len(permuted) if net.rates_F is None else net.rates_F.tolist()
    features = [
        _Permuted(
            name=feature.name,
            kind=kind,
            masked=rate,
            loss=sums[0] / n,
            accuracy=sums[2] / sums[3] if sums[3] else None,
        )
        for feature, kind, rate, sums in zip(opened.features, net.transform.kinds, rates, permuted, strict=True)
    ]
    return Contrast(
        bundle=opened.url,
        data=", ".join(split.data),
        method=method.kind,
        groups=sample.n_groups,
        documents=n,
        loss=loss / n,
        uninformed=uninformed / n,
        accuracy=matched / contrasted if contrasted else None,
        features=tuple(sorted(features, key=lambda feature: -feature.loss)),
    )


def _pretrained(opened: PretrainedBundle, settings: _Pretraining, sample: Selection) -> Pretrainer:
    """The pretrained network in inference mode; the marginals that corrupt views are those of the first documents."""
    architecture, transform = opened.architecture, opened.transform()
    marginals_SF = None
    if settings.method.needs_marginals(settings.augment):
        first = next(iter(iterate(sample)))
        marginals_SF = transform(first.features_NF, first.offsets_Q1)
    names = [feature.name for feature in opened.features]
    rates_F = torch.tensor(settings.mask.rates(transform.kinds, names))
    net = Pretrainer(transform, architecture.network, settings.method, settings.augment, marginals_SF, rates_F)
    with fitting(opened.url):
        absent, unknown = net.load_state_dict(opened.weights(), strict=False)
        if unknown or any(not name.startswith("predictor.") for name in absent):  # a bundle holds no predictor
            raise ValueError(f"weights {', '.join([*absent, *unknown])}")
    return net.eval()


@torch.no_grad()
def _contrast_sums(net: Pretrainer, method: Siamese, stream: StreamConfig, sample: Selection, *, seed: int) -> Tensor:
    """Loss, loss if uninformed, anchors found and anchors with negatives, summed over the sample, shape [1 + F, 4]."""
    # The first row has the views as trained; each other row has one feature permuted in the second view.
    budget = max(1, stream.docs_per_batch // stream.streams) if method.contrasts_batch else _AT_ONCE
    sums_V4, generator = torch.zeros(1 + len(sample.features), 4, dtype=torch.float64), torch.Generator()
    with progress("contrast", sample.n_documents * len(sums_V4)) as advance:
        for number, groups in enumerate(iterate(sample, docs_per_batch=budget)):
            generator.manual_seed(mix("contrast", seed, number))
            features_NF, offsets_Q1 = groups.features_NF, groups.offsets_Q1
            if method.regroups:
                features_NF = features_NF[torch.randperm(len(features_NF), generator=generator)]
            x_NF = net.transform(features_NF, offsets_Q1)
            draw = Draw(net.transform.numeric_F, offsets_Q1, generator, net.marginals_SF, net.rates_F, groups)
            first_NF, second_NF = method.views(net, x_NF, draw)
            z0_NP, among_Q1 = net.project(first_NF, draw), method.among(offsets_Q1)
            order_N = _shuffled(among_Q1, generator)
            for row, sums_4 in enumerate(sums_V4):
                view_NF = second_NF.clone()
                if row:
                    view_NF[:, row - 1] = second_NF[order_N, row - 1]
                z1_NP = net.project(view_NF, draw)
                members = net.encoder.members
                of_members = zip(z0_NP.chunk(members, 1), z1_NP.chunk(members, 1), strict=True)
                sums = [_batch_sums(net, method, *each, among_Q1) for each in of_members]
                sums_4 += torch.stack(sums).mean(0)
                advance(len(x_NF))
    return sums_V4


def _batch_sums(net: Pretrainer, method: Siamese, z0_NP: Tensor, z1_NP: Tensor, among_Q1: Tensor) -> Tensor:
    """The four sums of a micro-batch; for SimSiam the loss is SimCLR-Rank's, because its bundle holds no predictor."""
    n = len(z0_NP)
    judge = method if isinstance(method, Contrastive) else SimCLRRankConfig()
    losses_N = judge.compare(net, z0_NP, z1_NP, among_Q1)
    uninformed_N = judge.uninformed(negatives(among_Q1, n))
    *_, contrasted, matched = collapse_measures(z0_NP, z1_NP, among_Q1, anchors=_AT_ONCE, negatives=n)
    return torch.stack([losses_N.double().sum(), uninformed_N.double().sum(), matched, contrasted])


def _shuffled(offsets_Q1: Tensor, generator: torch.Generator) -> Tensor:
    """The documents in an order that is random within each group, shape [N]."""
    group_N = group_index(offsets_Q1)
    return (group_N + torch.rand(len(group_N), generator=generator, dtype=torch.float64)).argsort()


def contrast_page(result: Contrast) -> Document:
    """The report, with the features that raise the loss most first."""
    rows: list[TableRow] = [
        {
            "permuted feature": f.name,
            "kind": f.kind,
            "masked": f"{f.masked:g}",
            "loss": f.loss,
            "rise": f"{f.loss - result.loss:+.4f}",
            "found": cell(f.accuracy, ".1%"),
        }
        for f in result.features
    ]
    opening = (
        Text(
            f"Bundle {result.bundle} on {result.data}: {result.groups:,} query groups, {result.documents:,} documents."
        ),
        Text(
            f"The loss of {result.method} is {result.loss:.4f}, which is "
            f"{result.loss / max(result.uninformed, 1e-9):.0%} of {result.uninformed:.4f}, the loss without any "
            f"knowledge; the other view is found for {cell(result.accuracy, '.1%')} of documents."
        ),
        Table.from_rows(rows[:_SHOWN]),
    )
    sections = [Section("How to read the table", [Points(_OF_CONTRAST)])]
    if len(rows) > _SHOWN:
        sections.append(Section("All features", [Table.from_rows(rows)]))
    return Document("Contrast", opening, sections)


_OF_CONTRAST = (
    "Each row has one feature permuted among the compared documents, in one of the two views. loss is the "
    "mean over documents, rise its difference from the loss as trained, found the share of the documents whose other "
    "view is the closest, masked the rate at which the views hide the feature.",
    "A feature far above the others names the document. If it says nothing about relevance, as an id, leave it out or "
    "mask it with pretrain.mask.columns. If many features share the work, the contrast is sound. SimSiam, which has "
    "none, is judged by the loss of SimCLR-Rank.",
)
