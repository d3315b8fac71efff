"""The ranking losses that a config may name, and what each counts as a group with something to rank."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.ranking import losses, pairwise, sorting
from ltrscale.ranking.losses import has_relevance
from ltrscale.ranking.neuralsort import Mode
from ltrscale.ranking.pairwise import has_pairs


class SigmoidConfig(Config):
    """Sigmoid cross entropy of every document on its own (QIN21)."""

    kind: Literal["sigmoid"] = "sigmoid"
    highest_label: float = Field(1.0, gt=0)
    """Labels are divided by this: 4 for grades from 0 to 4."""


class SquaredErrorConfig(Config):
    """Squared error of every document on its own, for labels that are a teacher's scores."""

    kind: Literal["squared_error"] = "squared_error"
    standardise: bool = False
    """Regress on labels standardised per query group, whose zero and scale then say nothing."""


class RankNetConfig(Config):
    """RankNet: logistic loss of every pair in the wrong order."""

    kind: Literal["ranknet"] = "ranknet"
    sigma: float = Field(1.0, gt=0)
    """Steepness of the logistic."""


class HingeConfig(Config):
    """Pairwise hinge, the loss of RankSVM; with an identity encoder and a head of one layer it is that model."""

    kind: Literal["hinge"] = "hinge"


class LambdaRankConfig(Config):
    """LambdaRank: pairwise logistic loss weighted by the change of NDCG."""

    kind: Literal["lambdarank"] = "lambdarank"
    sigma: float = Field(1.0, gt=0)
    """Steepness of the logistic."""
    truncation: int | None = Field(None, ge=1)
    """Only pairs with one document ranked this high count; empty for all pairs."""
    normalise: Literal["ideal", "lightgbm"] = "ideal"
    """`lightgbm` also divides by score distances and by the group's summed gradient, as that library does."""


class SoftmaxConfig(Config):
    """Listwise softmax cross entropy."""

    kind: Literal["softmax"] = "softmax"


class SoftmaxNegativesConfig(Config):
    """Softmax of each relevant document against sampled irrelevant ones of its list (SUN23)."""

    kind: Literal["softmax_negatives"] = "softmax_negatives"
    negatives: int = Field(7, ge=1)
    """Irrelevant documents drawn for each relevant one, T - 1."""
    threshold: float = Field(1.0, gt=0)
    """Documents are relevant from this label on; SUN23 takes 2 of 0 to 4."""


class AttentionAllocationConfig(Config):
    """Cross entropy between the share of attention that documents deserve by label and their softmax (SUN23)."""

    kind: Literal["attention_allocation"] = "attention_allocation"


class ListMLEConfig(Config):
    """ListMLE: likelihood of the best order under the Plackett-Luce model."""

    kind: Literal["list_mle"] = "list_mle"


class ApproxNDCGConfig(Config):
    """ApproxNDCG: NDCG with ranks smoothed by sigmoids."""

    kind: Literal["approx_ndcg"] = "approx_ndcg"
    temperature: float = Field(0.1, gt=0)
    """Of the sigmoids."""


class GumbelApproxNDCGConfig(Config):
    """ApproxNDCG of scores with Gumbel noise, a mean over samples."""

    kind: Literal["gumbel_approx_ndcg"] = "gumbel_approx_ndcg"
    temperature: float = Field(0.1, gt=0)
    """Of the sigmoids."""
    samples: int = Field(8, ge=1)
    """Noisy copies of each list."""
    scale: float = Field(1.0, ge=0)
    """Of the noise."""


class NeuralSortNDCGConfig(Config):
    """NDCG of the relaxed order of NeuralSort."""

    kind: Literal["neural_sort_ndcg"] = "neural_sort_ndcg"
    temperature: float = Field(1.0, gt=0)
    """Of the relaxed sort."""
    k: int | None = Field(None, ge=1)
    """Cut-off of the NDCG; empty for the whole list."""


class GumbelNeuralSortNDCGConfig(Config):
    """NeuralSort's NDCG of scores with Gumbel noise, a mean over samples."""

    kind: Literal["gumbel_neural_sort_ndcg"] = "gumbel_neural_sort_ndcg"
    temperature: float = Field(1.0, gt=0)
    """Of the relaxed sort."""
    k: int | None = Field(None, ge=1)
    """Cut-off of the NDCG; empty for the whole list."""
    samples: int = Field(8, ge=1)
    """Noisy copies of each list."""
    scale: float = Field(1.0, ge=0)
    """Of the noise."""


class PiRankConfig(Config):
    """PiRank: NDCG through a relaxed sort, by divide and conquer where lists are long."""

    kind: Literal["pirank"] = "pirank"
    temperature: float = Field(1.0, gt=0)
    """Of the relaxed sort."""
    k: int | None = Field(None, ge=1)
    """Cut-off of the NDCG; empty for the whole list."""
    depth: int = Field(1, ge=1)
    """Levels of divide and conquer; 1 sorts the list at once."""
    mode: Mode = "soft"
    """`straight_through` takes the exact order going forward and the gradient of the relaxed one going back."""


LossConfig = Annotated[
    SigmoidConfig
    | SquaredErrorConfig
    | RankNetConfig
    | HingeConfig
    | LambdaRankConfig
    | SoftmaxConfig
    | SoftmaxNegativesConfig
    | AttentionAllocationConfig
    | ListMLEConfig
    | ApproxNDCGConfig
    | GumbelApproxNDCGConfig
    | NeuralSortNDCGConfig
    | GumbelNeuralSortNDCGConfig
    | PiRankConfig,
    Field(discriminator="kind"),
]

WEIGHTED = (SigmoidConfig, SquaredErrorConfig, SoftmaxConfig, SoftmaxNegativesConfig, AttentionAllocationConfig)
"""Losses that take document weights."""


def ranking_loss(
    config: LossConfig, scores_N: Tensor, groups: QueryGroups, *, weights_N: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The loss of each group, and which groups have something to rank; the others have loss 0.

    Args:
        config: which loss.
        scores_N: of the documents.
        groups: labels and offsets.
        weights_N: of the documents, for the losses in `WEIGHTED`.
        generator: of the losses that draw.

    Returns:
        The losses [Q] and a bool mask [Q].
    """
    assert groups.labels_N is not None
    labels_N, offsets_Q1 = groups.labels_N, groups.offsets_Q1
    data = (scores_N, labels_N, offsets_Q1)
    match config:
        case SigmoidConfig(highest_label=highest):
            loss_Q = losses.sigmoid_cross_entropy(*data, highest_label=highest, weights_N=weights_N)
            return loss_Q, groups.lengths_Q > 0
        case SquaredErrorConfig(standardise=standardise):
            loss_Q = losses.squared_error(*data, standardise=standardise, weights_N=weights_N)
            return loss_Q, groups.lengths_Q > 0
        case RankNetConfig(sigma=sigma):
            return pairwise.ranknet(*data, sigma=sigma), has_pairs(labels_N, offsets_Q1)
        case HingeConfig():
            return pairwise.hinge(*data), has_pairs(labels_N, offsets_Q1)
        case LambdaRankConfig():
            loss_Q = pairwise.lambdarank(
                *data, sigma=config.sigma, truncation=config.truncation, normalise=config.normalise
            )
            return loss_Q, has_pairs(labels_N, offsets_Q1)
        case SoftmaxNegativesConfig(negatives=negatives, threshold=threshold):
            loss_Q = pairwise.softmax_negatives(
                *data, negatives=negatives, threshold=threshold, weights_N=weights_N, generator=generator
            )
            return loss_Q, has_pairs(labels_N >= threshold, offsets_Q1)
        case SoftmaxConfig():
            return losses.softmax(*data, weights_N=weights_N), has_relevance(labels_N, offsets_Q1)
        case AttentionAllocationConfig():
            return losses.attention_allocation(*data, weights_N=weights_N), has_pairs(labels_N, offsets_Q1)
        case ListMLEConfig():
            return losses.list_mle(*data), has_pairs(labels_N, offsets_Q1)
    return _relaxed_ndcg(config, data, generator), has_relevance(labels_N, offsets_Q1)


_RelaxedConfig = (
    ApproxNDCGConfig | GumbelApproxNDCGConfig | NeuralSortNDCGConfig | GumbelNeuralSortNDCGConfig | PiRankConfig
)


def _relaxed_ndcg(
    config: _RelaxedConfig,
    data: tuple[Tensor, Tensor, Tensor],
    generator: torch.Generator,
) -> Tensor:
    """The losses that are 1 minus some smooth NDCG."""
    temperature = config.temperature
    match config:
        case ApproxNDCGConfig():
            return losses.approx_ndcg(*data, temperature=temperature)
        case GumbelApproxNDCGConfig():
            return losses.gumbel_approx_ndcg(
                *data, temperature=temperature, samples=config.samples, scale=config.scale, generator=generator
            )
        case NeuralSortNDCGConfig():
            return sorting.neural_sort_ndcg(*data, temperature=temperature, k=config.k)
        case GumbelNeuralSortNDCGConfig():
            return sorting.gumbel_neural_sort_ndcg(
                *data,
                temperature=temperature,
                k=config.k,
                samples=config.samples,
                scale=config.scale,
                generator=generator,
            )
        case PiRankConfig():
            return sorting.pirank(
                *data,
                temperature=temperature,
                k=config.k,
                depth=config.depth,
                mode=config.mode,
            )
