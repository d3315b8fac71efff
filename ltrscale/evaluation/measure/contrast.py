"""Which features solve the contrast of a pretrained encoder: its loss with each feature permuted in one of two views.

A feature that identifies the document within its group makes the contrast easy: without its value the other view is
hard to find. Features that describe the document share the work, so no single one matters much.

Shapes: N documents, F features, P projection, Q1 = Q + 1 offsets.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ltrscale import bundle
from ltrscale.batch import group_index
from ltrscale.bundle.opened import fitting
from ltrscale.config import Config, Strict, validate
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.data.stream.parts import spread
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.models.features import FeatureKind
from ltrscale.pretext.augment import AugmentConfig, Draw, MaskConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.pretext.contrast import Contrastive, SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer, Siamese, negatives
from ltrscale.pretext.watch import collapse_measures
from ltrscale.progress import progress
from ltrscale.reports.document import Document, Points, Section, Table, TableRow, Text, cell
from ltrscale.reports.findings import Findings

_AT_ONCE = 512
_ROWS_SHOWN = 15


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


class _Settings(Config, extra="ignore"):
    """The pretraining settings that define the contrast."""

    method: MethodConfig
    augment: AugmentConfig
    mask: MaskConfig
    stream: StreamConfig


def contrast_of(opened: bundle.PretrainedBundle, split: Split, *, groups: int, seed: int) -> Contrast:
    """Measure the contrast as trained and with each feature permuted, on about so many groups of a split.

    Raises:
        InputError: the bundle was not pretrained by a method that compares two views, or the data lack its features.
    """
    settings = validate(_Settings, opened.config, opened.url)
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


def _pretrained(opened: bundle.PretrainedBundle, settings: _Settings, sample: Selection) -> Pretrainer:
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


def document(result: Contrast) -> Document:
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
        Table.from_rows(rows[:_ROWS_SHOWN]),
    )
    sections = [Section("How to read the table", [Points(_HOW_TO_READ)])]
    if len(rows) > _ROWS_SHOWN:
        sections.append(Section("All features", [Table.from_rows(rows)]))
    return Document("Contrast", opening, sections)


_HOW_TO_READ = (
    "Each row has one feature permuted among the compared documents, in one of the two views. loss is the "
    "mean over documents, rise its difference from the loss as trained, found the share of the documents whose other "
    "view is the closest, masked the rate at which the views hide the feature.",
    "A feature far above the others names the document. If it says nothing about relevance, as an id, leave it out or "
    "mask it with pretrain.mask.columns. If many features share the work, the contrast is sound. SimSiam, which has "
    "none, is judged by the loss of SimCLR-Rank.",
)
