"""Metrics corrected for positions: each label is weighted by the inverse probability that its position is examined.

Weighted by `1 / theta_p`, labels that only an examined document can have equal its worth on average (Joachims,
Swaminathan and Schnabel 2017, section 4). The figure is a self-normalised ratio over all groups (Swaminathan and
Joachims 2015, section 4): the share of the weighted gain of all documents in the first k ranks, discounted as in DCG,

    sum over q, d of w_d g_d discount(rank_d) / sum over q, d of w_d g_d,  g = 2^y - 1, w = min(clip, 1 / theta).

NDCG cannot be corrected group by group: its ideal takes the best of the known labels, which no weights can correct.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, P positions, T trials, K cut-offs, M = 2 K figures: the corrected
ones, then the same with all weights 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from pydantic import Field

from ltrscale.arrays import Doubles
from ltrscale.config import Config, Strict
from ltrscale.errors import InputError
from ltrscale.evaluation.click_log_page import UnderstoodLog, Way
from ltrscale.evaluation.pages import with_interval
from ltrscale.evaluation.statistics.blocks import Blocks
from ltrscale.evaluation.statistics.summarise import Comparison, Scope
from ltrscale.late import Late
from ltrscale.ranking.graded import gain_dcg
from ltrscale.ranking.metrics import exponential_gain
from ltrscale.reports.document import Figure, Points, Table, TableRow
from ltrscale.storage import read_manifest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ltrscale import batch
    from ltrscale.batch import QueryGroups
else:
    torch, batch = Late("torch"), Late("ltrscale.batch")


class PropensitiesConfig(Config):
    """The examination probabilities of positions, which correct metrics."""

    clicks: str
    """Directory that jobs.clicks made, from a log that was shown in the same way as the test split."""
    way: Way = "harvested"
    """Which of its estimates: `ratio` mistakes relevance for examination, and corrects too much for good rankers."""
    clip: float = Field(default=100.0, gt=1)
    """The largest weight, relative to the first position; larger ones are clipped to it and counted."""


class WeightCounts(NamedTuple):
    """Relevant documents, the only ones with a weight, and the sums of their weights."""

    relevant: int = 0
    unknown: int = 0
    clipped: int = 0
    weights: float = 0.0
    squares: float = 0.0

    def plus(self, other: WeightCounts) -> WeightCounts:
        """The sum of both."""
        return WeightCounts._make(a + b for a, b in zip(self, other, strict=True))

    @property
    def effective(self) -> float:
        """The number of documents of equal weight that would say as much: `(sum w)^2 / sum w^2` (Kish 1965)."""
        return self.weights**2 / self.squares if self.squares else 0.0


@dataclass(frozen=True, eq=False)
class CorrectedSums:
    """The contribution of some groups to the corrected metrics."""

    blocks: Blocks
    """Each group is a block: `sums_BTM` has the discounted gains, `defined_BM` the total gains they are divided by."""
    counts: WeightCounts


@dataclass(frozen=True, eq=False)
class Correction:
    """Weights by position, and the cut-offs of the figures."""

    config: PropensitiesConfig
    propensities_P: Doubles
    """Relative to the first position; NaN where unknown."""
    cutoffs: tuple[int, ...]

    @classmethod
    def read(cls, config: PropensitiesConfig, cutoffs: Sequence[int]) -> Self:
        """The propensities that jobs.clicks found.

        Raises:
            InputError: jobs.clicks was not run there, or could not estimate them in this way.
        """
        if (read_manifest(config.clicks) or {}).get("made_by", {}).get("stage") != "clicks":
            raise InputError(
                f"evaluate.propensities.clicks: {config.clicks}: not made by jobs.clicks; name a directory that it made"
            )
        figures = UnderstoodLog.read(config.clicks).propensities.by(config.way)
        if figures is None:
            raise InputError(
                f"evaluate.propensities: {config.clicks} has none by `{config.way}`: positions do not overlap, or too "
                "few documents were shown often; see its report, or set way to ratio, which corrects too much"
            )
        values = [np.nan if figure.mean is None or figure.mean <= 0 else figure.mean for figure in figures]
        return cls(config, np.array(values), tuple(cutoffs))

    @property
    def figures(self) -> list[str]:
        """The names of the M figures."""
        return [f"{kind} {k}" for kind in ("corrected", "plain") for k in self.cutoffs]

    def sums(self, scores_T: Sequence[Tensor], groups: QueryGroups) -> CorrectedSums:
        """The sums of some groups, for the scores of each trial."""
        assert groups.labels_N is not None
        offsets_Q1, gains_N = groups.offsets_Q1, exponential_gain(groups.labels_N.double())
        inverse_N = self._inverse(groups.shown_N)
        known_N = ~inverse_N.isnan()
        weights_N = inverse_N.nan_to_num(0.0).clamp(max=self.config.clip)
        worth_2N = torch.stack([gains_N * weights_N, gains_N * known_N])
        sums_TMQ = [
            torch.stack([gain_dcg(scores_N, w_N, offsets_Q1, k=k) for w_N in worth_2N for k in self.cutoffs])
            for scores_N in scores_T
        ]
        sums_QTM = torch.stack(sums_TMQ).nan_to_num(0.0).permute(2, 0, 1).numpy()  # a group without gain adds nothing
        mass_2Q = torch.stack([batch.sum_by_group(worth_N, offsets_Q1) for worth_N in worth_2N])
        mass_QM = mass_2Q.repeat_interleave(len(self.cutoffs), dim=0).T.numpy()
        relevant_N = gains_N > 0
        used_N = weights_N[relevant_N & known_N]
        counts = WeightCounts(
            relevant=int(relevant_N.sum()),
            unknown=int((relevant_N & ~known_N).sum()),
            clipped=int((relevant_N & (inverse_N > self.config.clip)).sum()),
            weights=float(used_N.sum()),
            squares=float(used_N.square().sum()),
        )
        return CorrectedSums(Blocks(sums_QTM, mass_QM, groups.n_groups, np.arange(groups.n_groups)), counts)

    def _inverse(self, positions_N: Tensor) -> Tensor:
        """The inverse propensity of each position; NaN if there is none or it is unknown."""
        last = len(self.propensities_P)
        table = torch.from_numpy(np.append(1 / self.propensities_P, np.nan))
        whole_N = (positions_N >= 1) & (positions_N <= last) & (positions_N == positions_N.round())
        return table[torch.where(whole_N, positions_N - 1, last).long()]


class _CorrectedMethod(Strict):
    """The figures of one method by cut-off."""

    name: str
    corrected: dict[int, Figure]
    plain: dict[int, Figure]
    """With all weights 1: the labels as they are."""
    comparisons: dict[int, Comparison]
    """Corrected differences from the baseline; none for the baseline itself."""


class Corrected(Strict):
    """The corrected metrics of an evaluation."""

    source: PropensitiesConfig
    propensities: tuple[float | None, ...]
    """By position, relative to the first."""
    relevant: int
    """Documents with a gain."""
    unknown: int
    """Documents without a position, or at a position of unknown propensity: they are left out."""
    clipped: int
    """Documents with a clipped weight."""
    effective: float
    """The number of documents of equal weight that would say as much."""
    methods: tuple[_CorrectedMethod, ...]


def summarised(correction: Correction, counts: WeightCounts, methods: Mapping[str, Scope]) -> Corrected:
    """The corrected metrics, from the summaries and comparisons of each method in `Correction.figures`."""

    def figures(scope: Scope, kind: str) -> dict[int, Figure]:
        of_cutoffs = {k: scope.summaries[f"{kind} {k}"] for k in correction.cutoffs}
        return {k: Figure(mean=s.mean, low=s.low, high=s.high) for k, s in of_cutoffs.items()}

    return Corrected(
        source=correction.config,
        propensities=tuple(None if np.isnan(value) else float(value) for value in correction.propensities_P),
        relevant=counts.relevant,
        unknown=counts.unknown,
        clipped=counts.clipped,
        effective=counts.effective,
        methods=tuple(
            _CorrectedMethod(
                name=name,
                corrected=figures(scope, "corrected"),
                plain=figures(scope, "plain"),
                comparisons={
                    k: c for k in correction.cutoffs if (c := scope.comparisons.get(f"corrected {k}")) is not None
                },
            )
            for name, scope in methods.items()
        ),
    )


def section(corrected: Corrected, k: int, raw: Mapping[str, str], baseline: str | None) -> tuple[Table, Points]:
    """The table at a cut-off beside the raw metric, and the notes on its basis."""
    rows: list[TableRow] = []
    for method in corrected.methods:
        row: TableRow = {
            "method": method.name,
            f"NDCG@{k}": raw[method.name],
            f"share@{k}": method.plain[k].mean,
        }
        row[f"share@{k} corrected [95%]"] = method.corrected[k]
        if baseline is not None:
            c = method.comparisons.get(k)
            row |= {f"corrected - {baseline} [95%]": with_interval(c), "p": None if c is None else c.p_holm}
        rows.append(row)
    return Table.from_rows(rows, "Corrected for positions"), Points(_what_corrects(corrected, k))


def _what_corrects(corrected: Corrected, k: int) -> list[str]:
    source, n_known = corrected.source, len(corrected.propensities) - corrected.propensities.count(None)
    weighted = corrected.relevant - corrected.unknown
    curve = ", ".join("-" if value is None else f"{value:.2f}" for value in corrected.propensities)
    lines = [
        f"share@{k} is the part of the gain (2^y - 1) of all relevant documents that stands in the first {k} ranks, "
        "each discounted as in DCG. Corrected, each document counts by the inverse of the propensity of the position "
        "at which it was shown (Joachims et al. 2017), self-normalised (Swaminathan and Joachims 2015).",
        f"Propensities are those of {source.clicks} ({source.way}), relative to the first position: {curve}. "
        f"Weights above {source.clip:g} are cut: {corrected.clipped:,} of {weighted:,}. Intervals take them as known.",
        f"The effective sample is {corrected.effective:,.0f} documents of {weighted:,} with a label above 0.",
    ]
    if corrected.unknown:
        lines.append(
            f"{corrected.unknown:,} of {corrected.relevant:,} relevant documents are left out: they have no position, "
            f"or one whose propensity is not known (known are {n_known}); jobs.clicks looks deeper with a larger depth."
        )
    return lines
