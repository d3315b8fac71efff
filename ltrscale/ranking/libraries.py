"""What other programs compute under the name of a metric: their rules, and any metric under any rules.

Each rule was read off the program's documentation or source, and the tests compare every policy of a program that is
installed with the program itself. Versions: LightGBM 4.7, XGBoost 3.2, CatBoost 1.2, pytrec_eval-terrier 0.5,
scikit-learn 1.9, ranx 0.3, LETOR 4.0's script of 2009-04-24, allRank 1.4.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ltrscale.batch import group_index, sum_by_group
from ltrscale.ranking.graded import gain_dcg
from ltrscale.ranking.letor import LETOR
from ltrscale.ranking.metrics import Metric, NDCGConfig, exponential_gain, rank_discounts
from ltrscale.ranking.rules import Rules


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
# allRank's MRR looks for the best label; a group of zeros has its first document at rank 1.
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
) -> Tensor:
    """A metric under the given rules, shape [Q], float64; NaN where a group is left out.

    Under `Rules()` it is the metric itself. A tie that the rules break becomes an order of distinct scores, so that one
    kernel computes all.

    Args:
        rules: what the formula leaves open; `ties: block` is for average precision only.
        metric: of a kind in `KINDS`; its threshold counts where the rules say so.
        scores_N: not NaN.
        labels_N: finite, not negative.
        offsets_Q1: offsets of the groups.
        names_N: integers in the order of the items' names, for `ties: item`.

    Raises:
        ValueError: a score is NaN, or the items have no names and the rules need them.

    Example:
        >>> tied = torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([0, 2])
        >>> [under(Rules(ties=ties), NDCGConfig(k=1), *tied).item() for ties in ("expected", "input")]
        [0.5, 0.0]
    """
    if metric.kind not in KINDS:
        raise ValueError(f"{metric.name}: no program's rules are known; take one of {', '.join(KINDS)}")
    if rules.scores == "float32":
        scores_N = scores_N.float()
    if rules.ties not in ("expected", "block"):
        scores_N = _ordered(rules, scores_N, labels_N, offsets_Q1, names_N)
    if isinstance(metric, NDCGConfig):
        values_Q = _ndcg(rules, metric.k, scores_N, labels_N, offsets_Q1)
    else:
        relevant_N = _relevant(rules, metric, labels_N, offsets_Q1).double()
        if metric.kind == "map" and rules.ties == "block":
            values_Q = _block_precision(scores_N, relevant_N, offsets_Q1)
        else:
            values_Q = metric.replace(threshold=1.0).of(scores_N, relevant_N, offsets_Q1)
    if "short" in metric.ruled_by:
        lengths_Q, k = offsets_Q1.diff(), int(metric.model_dump()["k"])
        if rules.short == "zero":
            values_Q = torch.where((lengths_Q < k) & ~values_Q.isnan(), 0.0, values_Q)
        elif rules.short == "padded" and metric.kind == "precision":  # NDCG: what is filled up has no gain
            values_Q = values_Q * lengths_Q.clamp(max=k) / k
    return values_Q if rules.undefined == "left_out" else values_Q.nan_to_num(nan=float(rules.undefined == "one"))


def _ordered(rules: Rules, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, names_N: Tensor | None) -> Tensor:
    """Distinct scores, shape [N], in the order that the rules give to documents: minus their rank, from 0."""
    if scores_N.isnan().any():
        raise ValueError("scores contain NaN, so that no ranking is defined")
    keys = [-scores_N, group_index(offsets_Q1)]
    if rules.ties == "worst":
        keys.insert(0, labels_N)
    elif rules.ties == "item":
        if names_N is None:
            raise ValueError("ties: item needs the names of the items")
        keys.insert(0, -names_N)
    order_N = torch.arange(len(scores_N), device=scores_N.device)
    for key_N in keys:  # the last key counts most, and a stable sort keeps what the keys before it did
        order_N = order_N[key_N[order_N].argsort(stable=True)]
    places_N = torch.arange(len(scores_N), device=scores_N.device) - offsets_Q1[group_index(offsets_Q1)]
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
    return (labels_N > 0) & (labels_N == best_Q[group_index(offsets_Q1)])


def _ndcg(rules: Rules, k: int, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """NDCG at k, with the gain, the discount and the ideal of the rules."""
    discounts = rank_discounts if rules.discount == "log2" else _letor_discounts
    gains_N = exponential_gain(labels_N) if rules.gain == "exponential" else labels_N.double()
    dcg_Q = gain_dcg(scores_N, gains_N, offsets_Q1, k=k, discounts=discounts)
    pool_N = gains_N
    if rules.ideal == "ranked":  # the scores are minus the ranks, from 0
        pool_N = torch.where(scores_N > -k, gains_N, 0.0)
    best_k = max(k, len(scores_N)) if rules.ideal == "uncut" else k
    ideal_Q = gain_dcg(pool_N, pool_N, offsets_Q1, k=best_k, discounts=discounts)
    return torch.where(ideal_Q.isnan() & ~dcg_Q.isnan(), 0.0, dcg_Q / ideal_Q)  # relevant documents, but none ranked


def _letor_discounts(k: int) -> Tensor:
    """1 at ranks 1 and 2, and 1 / log2(r) at every later rank r."""
    return 1 / torch.log2(torch.arange(1, k + 1, dtype=torch.float64).clamp(min=2))


def _block_precision(scores_N: Tensor, relevant_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Average precision where each document of a tied block counts at the block's last rank, shape [Q]."""
    groups_N = group_index(offsets_Q1)
    order_N = scores_N.argsort(descending=True, stable=True)
    order_N = order_N[groups_N[order_N].argsort(stable=True)]  # groups are in the order of their rows again
    ranked_scores_N = scores_N[order_N]
    new_N = (ranked_scores_N[1:] != ranked_scores_N[:-1]) | (groups_N.diff() != 0)
    sizes_B = torch.cat([new_N.nonzero().flatten() + 1, torch.tensor([len(scores_N)])]).diff(prepend=torch.tensor([0]))
    end_N = (sizes_B.cumsum(0) - 1).repeat_interleave(sizes_B)
    ranked_N = relevant_N[order_N]
    found_N = ranked_N.cumsum(0)[end_N] - (ranked_N.cumsum(0) - ranked_N)[offsets_Q1[:-1][groups_N]]
    precision_N = found_N / (end_N - offsets_Q1[:-1][groups_N] + 1)
    return sum_by_group(precision_N * ranked_N, offsets_Q1) / sum_by_group(relevant_N, offsets_Q1)
