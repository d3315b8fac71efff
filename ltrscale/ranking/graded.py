"""Further metrics: DCG, ERR, rank-biased precision, NDCG with custom gains. The policy is that of `metrics`.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group and the first K ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ltrscale.late import Late
from ltrscale.ranking.metric import FirstRanks, Metric, Threshold
from ltrscale.ranking.metrics import (
    NDCGConfig,
    UnfitLabelsError,
    exponential_gain,
    gain_ndcg,
    ideal_dcg,
    ndcg,
    rank_discounts,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ltrscale.batch import QueryGroups
    from ltrscale.ranking import ranked
else:
    torch, ranked = Late("torch"), Late("ltrscale.ranking.ranked")

Gains = Literal["column"] | Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)]
"""The gains of labels 0, 1, 2, ..., or those in the column `gains`."""


def dcg(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int) -> Tensor:
    """Discounted cumulative gain of the first k ranks, shape [Q].

    `DCG@k = sum over ranks r <= k of (2^y - 1) / log2(1 + r)`.

    Example:
        >>> dcg(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0]), torch.tensor([0, 2]), k=1)
        tensor([3.], dtype=torch.float64)
    """
    return _dcg(scores_N, labels_N, offsets_Q1, k, exponential_gain, rank_discounts)


class DCGConfig(Metric):
    """Discounted cumulative gain of the first ranks, not divided by the ideal; SUN23's metric.

    Source: Järvelin and Kekäläinen 2002, gain of Burges et al. 2005; SUN23, section 4.
    Proof: laws; mean over all orders that ties allow; scikit-learn.
    """

    kind: Literal["dcg"] = "dcg"
    function = staticmethod(dcg)
    definition: ClassVar[str] = "DCG is NDCG before the division by the ideal."
    normalised: ClassVar[bool] = False
    ruled_by: ClassVar[tuple[str, ...]] = ("gain", "discount")
    k: FirstRanks = 5


def gain_dcg(
    scores_N: Tensor,
    gains_N: Tensor,
    offsets_Q1: Tensor,
    *,
    k: int,
    discounts: Callable[[int], Tensor] = rank_discounts,
) -> Tensor:
    """DCG of the first k ranks for given gains, shape [Q]; NaN where no gain is above 0.

    Example:
        >>> gain_dcg(torch.tensor([2.0, 1.0]), torch.tensor([5.0, 20.0]), torch.tensor([0, 2]), k=1)
        tensor([5.], dtype=torch.float64)
    """
    return _dcg(scores_N, gains_N.double(), offsets_Q1, k, lambda gains: gains, discounts)


def _dcg(
    scores_N: Tensor,
    values_N: Tensor,
    offsets_Q1: Tensor,
    k: int,
    gain: Callable[[Tensor], Tensor],
    discounts: Callable[[int], Tensor],
) -> Tensor:
    """DCG for gains that rise with the values, from 0 at 0."""
    values_Q = ranked.undefined(offsets_Q1)
    for ranking in ranked.rankings(scores_N, values_N, offsets_Q1, k):
        gains_MK = ranking.expected(gain(ranking.values_ML), k)
        dcg_M = gains_MK @ discounts(gains_MK.shape[1]).to(scores_N.device)
        values_Q[ranking.groups_M] = torch.where(ranking.best_ML[:, 0] > 0, dcg_M, torch.nan)
    return values_Q


def err(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int, grades: int = 4) -> Tensor:
    """Expected reciprocal rank of the first k ranks, shape [Q] (Chapelle et al. 2009, equation 4).

    `sum over ranks r <= k of 1/r R_r prod over i < r of (1 - R_i)` with `R = (2^y - 1) / 2^grades`. Ties take the
    expectation over their orders: the chance that p of e tied documents satisfy nobody is `E_p / C(e, p)`, where E_p is
    the elementary symmetric polynomial of degree p of their 1 - R.

    Args:
        scores_N: not NaN.
        labels_N: grades, finite and not negative; those above `grades` count as `grades`.
        offsets_Q1: offsets of the groups.
        k: cut-off.
        grades: the highest grade of the data set, not of the group, so that values of groups can be compared.

    Example:
        >>> err(torch.tensor([3.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([0, 2]), k=2, grades=1)  # 1/2 * 1/2
        tensor([0.2500], dtype=torch.float64)
    """
    values_Q = ranked.undefined(offsets_Q1)
    for ranking in ranked.rankings(scores_N, labels_N, offsets_Q1, k):
        satisfies_ML = exponential_gain(ranking.values_ML.double().clamp(max=grades)) / 2**grades
        stopped_MK = -ranked.survival(ranking, satisfies_ML, k).diff()
        value_M = (stopped_MK / ranking.rank_L[:k]).sum(-1)
        values_Q[ranking.groups_M] = torch.where(ranking.best_ML[:, 0] > 0, value_M, torch.nan)
    return values_Q


class ERRConfig(Metric):
    """Expected reciprocal rank: of the document that satisfies a user who goes down the list.

    Source: Chapelle et al. 2009.
    Proof: laws; mean over all orders that ties allow.
    """

    kind: Literal["err"] = "err"
    function = staticmethod(err)
    definition: ClassVar[str] = (
        "ERR is the expected reciprocal rank at which a user stops who goes down the list and is satisfied by a "
        "document with probability (2^y - 1) / 2^G, G being the highest grade."
    )
    normalised: ClassVar[bool] = False
    k: FirstRanks = 5
    grades: int = Field(4, ge=1, le=1000)
    """The highest grade, 4 as in the paper's five grades; higher labels count as this one."""


def rbp(
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    k: int | None = None,
    persistence: float = 0.8,
    threshold: float = 1.0,
) -> Tensor:
    """Rank-biased precision of the first k ranks, or of all, shape [Q] (Moffat and Zobel 2008, equation 4).

    `(1 - p) * sum over ranks r of p^(r - 1) [y >= threshold]`; no list of n documents is worth more than `1 - p^n`.

    Example:
        >>> scores, labels = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0])
        >>> rbp(scores, labels, torch.tensor([0, 3]), persistence=0.5)  # 1/2 (1 + 1/4)
        tensor([0.6250], dtype=torch.float64)
    """
    values_Q = ranked.undefined(offsets_Q1)
    for ranking in ranked.rankings(scores_N, labels_N, offsets_Q1, 1 if k is None else k):
        relevant_ML = (ranking.values_ML >= threshold).double()
        weights_K = (1 - persistence) * persistence ** (ranking.rank_L[:k] - 1).double()
        value_M = ranking.expected(relevant_ML, k) @ weights_K
        values_Q[ranking.groups_M] = torch.where(ranking.best_ML[:, 0] >= threshold, value_M, torch.nan)
    return values_Q


class RBPConfig(Metric):
    """Rank-biased precision: the share of relevant documents among those that a user sees who may stop at each rank.

    Source: Moffat and Zobel 2008.
    Proof: laws; mean over all orders that ties allow.
    """

    kind: Literal["rbp"] = "rbp"
    function = staticmethod(rbp)
    definition: ClassVar[str] = (
        "RBP is the expected share of relevant documents among those seen by a user who goes from each rank to the "
        "next with probability `persistence`."
    )
    normalised: ClassVar[bool] = False
    k: int | None = Field(None, ge=1)
    """Cut-off: the first ranks that count; empty takes the whole list."""
    threshold: Threshold = 1.0
    persistence: float = Field(0.8, gt=0, lt=1)
    """The chance that a user goes on to the next rank: .95 if patient, .5 if not."""


class GainNDCGConfig(Metric):
    """NDCG whose gains come from a table by label, or from the documents' own column, such as revenue.

    Source: Järvelin and Kekäläinen 2002, whose gains are a table.
    Proof: laws; mean over all orders that ties allow; scikit-learn.
    """

    kind: Literal["gain_ndcg"] = "gain_ndcg"
    label: ClassVar[str] = "Gain-NDCG"
    k: FirstRanks = 5
    gains: Gains

    @property
    def policy(self) -> str:
        """The policy of NDCG, with other gains."""
        of_ndcg = NDCGConfig(k=self.k).policy
        table = "" if self.gains == "column" else f"{', '.join(f'{g:g}' for g in self.gains)} by label"
        text = table or "of the column `gains`, 0 where it has none"
        return of_ndcg.replace("gain 2^y - 1", f"gain {text}").replace("without relevance", "without gain")

    def values(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The value of each group, shape [Q]; needs a table of gains."""
        assert self.gains != "column", "gains of documents come with groups: call of_groups"
        return gain_ndcg(scores_N, _table_gain(labels_N, self.gains), offsets_Q1, k=self.k)

    def divisor(self, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The ideal DCG; needs a table of gains."""
        assert self.gains != "column", "judged documents have labels alone"
        return ideal_dcg(_table_gain(labels_N, self.gains), offsets_Q1, k=self.k)

    def values_on(self, scores_N: Tensor, groups: QueryGroups) -> Tensor:
        """The value of each group, shape [Q]; in the column of gains, a missing gain counts as 0.

        Raises:
            UnfitLabelsError: the groups have no gains, one is negative, or a label is not in the table.
        """
        if self.gains != "column":
            return super().values_on(scores_N, groups)
        if groups.gains_N is None:
            raise UnfitLabelsError(
                "gains: column needs the column `gains` of the data set; prepare it with columns.gain"
            )
        gains_N = groups.gains_N.nan_to_num(0.0)
        if bool((gains_N < 0).any()):
            raise UnfitLabelsError(
                "gains: column has a gain below 0; prepare the data set with columns.gain, which checks it"
            )
        return gain_ndcg(scores_N, gains_N, groups.offsets_Q1, k=self.k)


class ClickNDCGConfig(Metric):
    """NDCG of clicks, each worth 1, which an evaluation shows beside that of labels.

    Source: Hager et al. 2024, where the two part ways on a real log.
    Proof: NDCG of clicks as labels.
    """

    kind: Literal["click_ndcg"] = "click_ndcg"
    label: ClassVar[str] = "Click-NDCG"
    definition: ClassVar[str] = (
        "Click-NDCG is NDCG of the clicks: it rewards an order for agreeing with the one that was shown."
    )
    k: FirstRanks = 5

    @property
    def policy(self) -> str:
        """The policy of NDCG, for clicks."""
        return NDCGConfig(k=self.k).policy.replace("gain 2^y - 1", "gain 1 of a click").replace("relevance", "click")

    def values(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """NDCG of each group, shape [Q]; the labels are clicks, NaN where unknown."""
        return ndcg(scores_N, (labels_N > 0).double(), offsets_Q1, k=self.k)


def _table_gain(labels_N: Tensor, gains: Sequence[float]) -> Tensor:
    """The gain of each label 0, 1, 2, ... by a table, float64."""
    in_table_N = (labels_N == labels_N.round()) & (labels_N >= 0) & (labels_N < len(gains))
    if not bool(in_table_N.all()):
        first = labels_N[~in_table_N][0].item()
        raise UnfitLabelsError(f"gains has no gain for label {first:g}; it has those of labels 0 to {len(gains) - 1}")
    return torch.tensor(gains, dtype=torch.float64, device=labels_N.device)[labels_N.long()]
