"""What other programs compute under a metric's name: their rules, any metric under any rules, and LETOR's script.

Rules come from the documentation or source of the programs; the tests compare them with each program that is installed.
Versions: LightGBM 4.7, XGBoost 3.2, CatBoost 1.2, pytrec_eval-terrier 0.5, scikit-learn 1.9, ranx 0.3, LETOR 4.0's
script of 2009-04-24, allRank 1.4.3.

LETOR's metrics are for comparison with published figures only. Their policy differs from that of
`ltrscale.ranking.metrics` in five ways, all of which change the mean:
- a group without a relevant document counts as 0;
- documents with equal scores keep the order of the input;
- the discount of NDCG is 1 at ranks 1 and 2, and 1 / log2(r) at every later rank r;
- NDCG@k of a list shorter than k is 0, even if its order is perfect: the script computes NDCG only at the ranks that
  the list has. Half of MQ2008's lists have 8 documents or fewer, which is why its published NDCG@10 is about half of
  its NDCG@5;
- precision at k divides by k whatever the length of the list.

Gains are 2^y - 1. Rules: `Eval-Score-4.0.pl` of Jun Xu and Tie-Yan Liu (Qin and Liu, Introducing LETOR 4.0 Datasets,
2013). LETOR 3.0's script gives the same values on lists of k documents or more. Values are float64 whatever the type of
the scores; scores may be infinite. As in `metrics`, a score that is NaN, and k below 1, is a ValueError.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from ltrscale.late import Late
from ltrscale.ranking.graded import gain_dcg
from ltrscale.ranking.metric import FirstRanks, Metric, Rules, Threshold
from ltrscale.ranking.metrics import MAPConfig, NDCGConfig, PrecisionConfig, exponential_gain, rank_discounts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ltrscale import batch
    from ltrscale.ranking import ranked
else:
    torch = Late("torch")
    batch, ranked = Late("ltrscale.batch"), Late("ltrscale.ranking.ranked")

LETOR = Rules(ties="input", discount="letor", short="zero", undefined="zero")
"""The script's rules for NDCG."""


class Policy(NamedTuple):
    """The rules of a program for one metric."""

    program: str
    spelled: str
    """The metric as the program spells it, with {k} for the cut-off."""
    kind: str
    """Our kind of metric."""
    rules: Rules


# LightGBM and CatBoost call a document relevant above .5, trec_eval and ranx from 1 on: the same for whole labels.
_LIGHTGBM = Rules(ties="input", relevant="from_1", undefined="one")
# Without a cut-off, XGBoost's map and ndcg stop at rank 32. For map it takes labels 0 and 1 only.
_XGBOOST = Rules(scores="float32", ties="input", relevant="from_1", undefined="one")
_CATBOOST = Rules(ties="worst", relevant="from_1", undefined="zero")
_TREC = Rules(scores="float32", ties="item", relevant="from_1", gain="linear", short="padded", undefined="zero")
_SKLEARN = Rules(relevant="from_1", gain="linear", undefined="zero")
# ranx sorts unstably, and lists of up to 15 documents happen to keep the order of the input.
_RANX = Rules(ties="input", relevant="from_1", gain="linear", short="padded", undefined="zero")
# allRank's MRR looks for the best label; a group of zeros has its first document at rank 1. It sorts unstably too, and
# lists of up to 16 documents keep the order of the input.
_ALLRANK = Rules(scores="float32", ties="input", relevant="best", undefined="one")

POLICIES = (
    Policy("LightGBM", "ndcg@{k}", "ndcg", _LIGHTGBM),
    Policy("LightGBM", "map@(longest list)", "map", _LIGHTGBM),
    Policy("XGBoost", "ndcg@{k}", "ndcg", _XGBOOST),
    Policy("XGBoost", "ndcg@{k}-", "ndcg", _XGBOOST.replace(undefined="zero")),
    Policy("XGBoost", "map@(longest list)", "map", _XGBOOST),
    Policy("XGBoost", "pre@{k}", "precision", _XGBOOST.replace(undefined="zero")),
    Policy("CatBoost", "NDCG:top={k}", "ndcg", _CATBOOST.replace(gain="linear", undefined="one")),
    Policy("CatBoost", "NDCG:top={k};type=Exp", "ndcg", _CATBOOST.replace(undefined="one")),
    Policy("CatBoost", "MAP", "map", _CATBOOST),
    Policy("CatBoost", "MRR", "mrr", _CATBOOST),
    Policy("CatBoost", "PrecisionAt:top={k}", "precision", _CATBOOST),
    Policy("CatBoost", "RecallAt:top={k}", "recall", _CATBOOST.replace(undefined="one")),
    Policy("trec_eval", "ndcg_cut.{k}", "ndcg", _TREC),
    Policy("trec_eval", "map", "map", _TREC),
    Policy("trec_eval", "recip_rank", "mrr", _TREC),
    Policy("trec_eval", "P.{k}", "precision", _TREC),
    Policy("trec_eval", "recall.{k}", "recall", _TREC),
    Policy("trec_eval", "success.{k}", "success", _TREC),
    Policy("scikit-learn", "ndcg_score(k={k})", "ndcg", _SKLEARN),
    Policy("scikit-learn", "average_precision_score", "map", _SKLEARN.replace(ties="block")),
    Policy("ranx", "ndcg@{k}", "ndcg", _RANX),
    Policy("ranx", "ndcg_burges@{k}", "ndcg", _RANX.replace(gain="exponential")),
    Policy("ranx", "map", "map", _RANX),
    Policy("ranx", "mrr", "mrr", _RANX),
    Policy("ranx", "precision@{k}", "precision", _RANX),
    Policy("ranx", "recall@{k}", "recall", _RANX),
    Policy("ranx", "hit_rate@{k}", "success", _RANX),
    Policy("LETOR 4.0", "NDCG@{k}", "ndcg", LETOR),
    Policy("LETOR 4.0", "MAP", "map", LETOR.replace(relevant="from_1")),
    Policy("LETOR 4.0", "P@{k}", "precision", LETOR.replace(relevant="from_1", short="padded")),
    Policy("allRank", "ndcg(ats=[{k}])", "ndcg", _ALLRANK),
    Policy("allRank", "mrr()", "mrr", _ALLRANK),
)
"""The metrics of each program that are comparable with ours."""
PROGRAMS = tuple(dict.fromkeys(policy.program for policy in POLICIES))
KINDS = tuple(dict.fromkeys(policy.kind for policy in POLICIES))
"""Kinds of metrics that `under` computes."""


def under(
    rules: Rules,
    metric: Metric,
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    names_N: Tensor | None = None,
    retrieved_N: Tensor | None = None,
) -> Tensor:
    """A metric under the given rules, shape [Q], float64; NaN where a group is left out.

    Under `Rules()` it is the metric itself. Ties that the rules break become distinct scores, so that one kernel
    computes all. As in trec_eval, a document that was not retrieved counts in the ideal and in the number of relevant
    documents, but has no rank: the length of a list is the number of retrieved documents.

    Args:
        rules: what the formula leaves open; `ties: block` is for average precision only.
        metric: of a kind in `KINDS`; its threshold counts where the rules say so.
        scores_N: not NaN where a document was retrieved.
        labels_N: finite, not negative.
        offsets_Q1: offsets of the groups.
        names_N: integers in the order of the items' names, for `ties: item`.
        retrieved_N: which documents were retrieved, bool; None for all.

    Raises:
        ValueError: a score is NaN, or the items have no names and the rules need them.

    Example:
        >>> tied = torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([0, 2])
        >>> [under(Rules(ties=ties), NDCGConfig(k=1), *tied).item() for ties in ("expected", "input")]
        [0.5, 0.0]
    """
    if metric.kind not in KINDS:
        raise ValueError(f"{metric.name}: no program's rules are known; take one of {', '.join(KINDS)}")
    kept_N = torch.ones_like(labels_N, dtype=torch.bool) if retrieved_N is None else retrieved_N
    worth_N = _worth(rules, metric, labels_N, offsets_Q1)
    lists = batch.to_offsets(batch.sum_by_group(kept_N.long(), offsets_Q1))
    scores_N, ranked_N = scores_N[kept_N], worth_N[kept_N]
    if rules.scores == "float32":
        scores_N = scores_N.float()
    if rules.ties not in ("expected", "block"):
        scores_N = _ordered(rules, scores_N, labels_N[kept_N], lists, None if names_N is None else names_N[kept_N])
    if isinstance(metric, NDCGConfig):
        values_Q = _ndcg_under(rules, metric.k, (scores_N, ranked_N, lists), (worth_N, offsets_Q1))
    else:
        values_Q = _relevance_metric(
            rules, metric, (scores_N, ranked_N, lists), batch.sum_by_group(worth_N, offsets_Q1)
        )
    if "short" in metric.ruled_by:
        lengths_Q, k = lists.diff(), int(metric.model_dump()["k"])
        if rules.short == "zero":
            values_Q = torch.where((lengths_Q < k) & ~values_Q.isnan(), 0.0, values_Q)
        elif rules.short == "padded" and metric.kind == "precision":  # padding has no gain in NDCG
            values_Q = values_Q * lengths_Q.clamp(max=k) / k
    return values_Q if rules.undefined == "left_out" else values_Q.nan_to_num(nan=float(rules.undefined == "one"))


def _worth(rules: Rules, metric: Metric, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Gains for NDCG; for other metrics 1 if relevant, else 0. Shape [N], float64."""
    if not isinstance(metric, NDCGConfig):
        return _relevant(rules, metric, labels_N, offsets_Q1).double()
    return exponential_gain(labels_N) if rules.gain == "exponential" else labels_N.double()


def _relevance_metric(rules: Rules, metric: Metric, lists: tuple[Tensor, Tensor, Tensor], relevant_Q: Tensor) -> Tensor:
    """A metric of relevant documents, from scores, relevance and offsets of the retrieved; `relevant_Q` counts all."""
    if metric.kind == "map" and rules.ties == "block":
        values_Q = _block_precision(*lists)
    else:
        values_Q = metric.replace(threshold=1.0).values(*lists)
    _, relevant_N, offsets_Q1 = lists
    if metric.kind in ("map", "recall"):  # both divide by the number of relevant documents
        values_Q = values_Q * (batch.sum_by_group(relevant_N, offsets_Q1) / relevant_Q)
    return torch.where(values_Q.isnan() & (relevant_Q > 0), 0.0, values_Q)  # none of them was retrieved


def _ordered(rules: Rules, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, names_N: Tensor | None) -> Tensor:
    """Distinct scores in the order that the rules give to documents: minus the rank, counted from 0; shape [N]."""
    if scores_N.isnan().any():
        raise ValueError("scores contain NaN, so that no ranking is defined")
    keys = [-scores_N, batch.group_index(offsets_Q1)]
    if rules.ties == "worst":
        keys.insert(0, labels_N)
    elif rules.ties == "item":
        if names_N is None:
            raise ValueError("ties: item needs the names of the items")
        keys.insert(0, -names_N)
    order_N = torch.arange(len(scores_N), device=scores_N.device)
    for key_N in keys:  # stable sort: the last key counts most
        order_N = order_N[key_N[order_N].argsort(stable=True)]
    places_N = torch.arange(len(scores_N), device=scores_N.device) - offsets_Q1[batch.group_index(offsets_Q1)]
    return torch.empty(len(scores_N), dtype=torch.float64, device=scores_N.device).scatter_(
        0, order_N, -places_N.double()
    )


def _relevant(rules: Rules, metric: Metric, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Which documents are relevant, shape [N]."""
    if rules.relevant == "threshold":
        relevant_N: Tensor = labels_N.float() >= metric.model_dump()["threshold"]  # as the labels of a data set
        return relevant_N
    if rules.relevant == "from_1":
        return labels_N >= 1
    best_Q = torch.segment_reduce(labels_N.double(), "max", offsets=offsets_Q1)
    return (labels_N > 0) & (labels_N == best_Q[batch.group_index(offsets_Q1)])


def _ndcg_under(rules: Rules, k: int, lists: tuple[Tensor, Tensor, Tensor], pool: tuple[Tensor, Tensor]) -> Tensor:
    """NDCG@k under the rules; `lists` are scores, gains, offsets of the retrieved, `pool` gains, offsets of all."""
    discounts = rank_discounts if rules.discount == "log2" else _letor_discounts
    scores_N, gains_N, offsets_Q1 = lists
    dcg_Q = gain_dcg(scores_N, gains_N, offsets_Q1, k=k, discounts=discounts)
    best_N, best_Q1 = pool
    if rules.ideal == "ranked":  # the scores are minus the ranks, from 0
        best_N, best_Q1 = torch.where(scores_N > -k, gains_N, 0.0), offsets_Q1
    best_k = max(k, len(best_N)) if rules.ideal == "uncut" else k
    ideal_Q = gain_dcg(best_N, best_N, best_Q1, k=best_k, discounts=discounts)
    without_Q = torch.where(batch.sum_by_group(*pool) > 0, 0.0, torch.nan)  # relevant documents, but none ranked
    return torch.where(dcg_Q > 0, dcg_Q / ideal_Q, without_Q)


def _letor_discounts(k: int) -> Tensor:
    """1 at ranks 1 and 2, and 1 / log2(r) at every later rank r."""
    return 1 / torch.log2(torch.arange(1, k + 1, dtype=torch.float64).clamp(min=2))


def _block_precision(scores_N: Tensor, relevant_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Average precision where each document of a tied block counts at the block's last rank, shape [Q]."""
    groups_N = batch.group_index(offsets_Q1)
    order_N = scores_N.argsort(descending=True, stable=True)
    order_N = order_N[groups_N[order_N].argsort(stable=True)]  # restore the order of groups
    ranked_scores_N = scores_N[order_N]
    new_N = (ranked_scores_N[1:] != ranked_scores_N[:-1]) | (groups_N.diff() != 0)
    sizes_B = torch.cat([new_N.nonzero().flatten() + 1, torch.tensor([len(scores_N)])]).diff(prepend=torch.tensor([0]))
    end_N = (sizes_B.cumsum(0) - 1).repeat_interleave(sizes_B)
    ranked_N = relevant_N[order_N]
    found_N = ranked_N.cumsum(0)[end_N] - (ranked_N.cumsum(0) - ranked_N)[offsets_Q1[:-1][groups_N]]
    precision_N = found_N / (end_N - offsets_Q1[:-1][groups_N] + 1)
    return batch.sum_by_group(precision_N * ranked_N, offsets_Q1) / batch.sum_by_group(relevant_N, offsets_Q1)


class _LetorMetric(Metric):
    """A metric under the rules of LETOR's script."""

    ours: ClassVar[type[Metric]]
    """The metric under our rules, which has the same keys."""

    def values(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The value of each group, shape [Q]; an empty group has 0."""
        metric = self.ours.model_validate(self.model_dump(exclude={"kind"}))
        return under(self.rules, metric, scores_N, labels_N, offsets_Q1)


class LetorNDCGConfig(_LetorMetric):
    """NDCG of LETOR's script.

    Source: `Eval-Score-4.0.pl` of LETOR 4.0.
    Proof: loop.
    """

    kind: Literal["letor_ndcg"] = "letor_ndcg"
    ours: ClassVar[type[Metric]] = NDCGConfig
    label: ClassVar[str] = "LETOR NDCG"
    rules: ClassVar[Rules] = LETOR
    ruled_by: ClassVar[tuple[str, ...]] = ("gain", "discount", "ideal", "short")
    k: FirstRanks = 5


class LetorMAPConfig(_LetorMetric):
    """Average precision of LETOR's script, where labels from 1 on are relevant; in that of MSLR-WEB, from 2 on.

    Source: `Eval-Score-4.0.pl` of LETOR 4.0.
    Proof: loop.
    """

    kind: Literal["letor_map"] = "letor_map"
    ours: ClassVar[type[Metric]] = MAPConfig
    label: ClassVar[str] = "LETOR MAP"
    rules: ClassVar[Rules] = LETOR
    threshold: Threshold = 1.0


class LetorPrecisionConfig(_LetorMetric):
    """Precision of LETOR's script.

    Source: `Eval-Score-4.0.pl` of LETOR 4.0.
    Proof: loop.
    """

    kind: Literal["letor_precision"] = "letor_precision"
    ours: ClassVar[type[Metric]] = PrecisionConfig
    label: ClassVar[str] = "LETOR P"
    cut_as_precision: ClassVar[bool] = True
    rules: ClassVar[Rules] = LETOR.replace(short="padded")
    ruled_by: ClassVar[tuple[str, ...]] = ("short",)
    k: FirstRanks = 5
    threshold: Threshold = 1.0


class LetorMeanNDCGConfig(Metric):
    """The mean of NDCG over all ranks, as in LETOR's script.

    Source: `Eval-Score-4.0.pl` of LETOR 4.0.
    Proof: loop.
    """

    kind: Literal["letor_mean_ndcg"] = "letor_mean_ndcg"
    label: ClassVar[str] = "LETOR MeanNDCG"
    rules: ClassVar[Rules] = LETOR
    ruled_by: ClassVar[tuple[str, ...]] = ("gain", "discount", "ideal")

    def values(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The mean of NDCG@1 to NDCG@n of each group of n documents, shape [Q]; an empty group has 0.

        Example:
            >>> scores, labels = torch.tensor([3.0, 2.0]), torch.tensor([0.0, 1.0])
            >>> LetorMeanNDCGConfig().values(scores, labels, torch.tensor([0, 2]))  # (0 + 1) / 2
            tensor([0.5000], dtype=torch.float64)
        """
        values_Q = torch.zeros(len(offsets_Q1) - 1, dtype=torch.float64, device=offsets_Q1.device)
        ordered_N = _ordered(self.rules, scores_N, labels_N, offsets_Q1, None)
        for ranking in ranked.rankings(ordered_N, exponential_gain(labels_N), offsets_Q1):
            discounts_L = _letor_discounts(len(ranking.rank_L)).to(scores_N.device)
            dcg_ML, ideal_ML = (
                (gains_ML * discounts_L).cumsum(-1) for gains_ML in (ranking.values_ML, ranking.best_ML)
            )
            ndcg_ML = torch.where(ranking.mask_ML & (ideal_ML > 0), dcg_ML / ideal_ML, 0.0)
            values_Q[ranking.groups_M] = ndcg_ML.sum(-1) / ranking.lengths_M
        return values_Q
