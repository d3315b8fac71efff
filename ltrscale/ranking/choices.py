"""The closed unions of ranking losses and metrics that a config may name. Add one line here for each new member."""

import re
from typing import Annotated

from pydantic import Field

from ltrscale.config import by_kind
from ltrscale.ranking.graded import ClickNDCGConfig, DCGConfig, ERRConfig, GainNDCGConfig
from ltrscale.ranking.letor import LetorMAPConfig, LetorMeanNDCGConfig, LetorNDCGConfig, LetorPrecisionConfig
from ltrscale.ranking.losses import (
    ApproxNDCGConfig,
    AttentionAllocationConfig,
    GumbelApproxNDCGConfig,
    ListMLEConfig,
    ListNetConfig,
    SoftmaxConfig,
)
from ltrscale.ranking.metrics import (
    MAPConfig,
    Metric,
    MRRConfig,
    NDCGConfig,
    PrecisionConfig,
    RecallConfig,
    SuccessConfig,
)
from ltrscale.ranking.pairwise import HingeConfig, LambdaRankConfig, RankNetConfig, SoftmaxNegativesConfig
from ltrscale.ranking.pointwise import SigmoidConfig, SquaredErrorConfig
from ltrscale.ranking.sorting import GumbelNeuralSortNDCGConfig, NeuralSortNDCGConfig, PiRankConfig

LossConfig = Annotated[
    SigmoidConfig
    | SquaredErrorConfig
    | RankNetConfig
    | HingeConfig
    | LambdaRankConfig
    | SoftmaxConfig
    | SoftmaxNegativesConfig
    | AttentionAllocationConfig
    | ListNetConfig
    | ListMLEConfig
    | ApproxNDCGConfig
    | GumbelApproxNDCGConfig
    | NeuralSortNDCGConfig
    | GumbelNeuralSortNDCGConfig
    | PiRankConfig,
    Field(discriminator="kind"),
]

MetricConfig = Annotated[
    NDCGConfig | MRRConfig | MAPConfig | PrecisionConfig | RecallConfig | SuccessConfig | DCGConfig | ERRConfig,
    Field(discriminator="kind"),
]
LetorMetricConfig = Annotated[
    LetorNDCGConfig | LetorMeanNDCGConfig | LetorMAPConfig | LetorPrecisionConfig, Field(discriminator="kind")
]
"""Metrics under LETOR's policy."""

_CUT, _WHOLE = (
    [kind for kind, cls in by_kind(MetricConfig).items() if cls.has_cutoff() == cut] for cut in (True, False)
)
METRIC = rf"^(({'|'.join(_CUT)})@[1-9]\d*|{'|'.join(_WHOLE)})$"
"""A regular expression that matches the name of a metric, such as ndcg@5."""
METRICS = f"{', '.join([*(f'{kind}@K' for kind in _CUT), *_WHOLE[:-1]])} or {_WHOLE[-1]}"
"""The names of all metrics, for messages to the user."""


def named(name: str, *, threshold: float = 1.0) -> Metric:
    """The metric with a given name, such as ndcg@5.

    Args:
        name: ndcg@K, precision@K, mrr, map or another of `METRICS`.
        threshold: lowest label of a relevant document; NDCG ignores it.

    Raises:
        ValueError: no metric has this name.

    Example:
        >>> named("precision@2")
        PrecisionConfig(kind='precision', k=2, threshold=1.0)
    """
    if not re.match(METRIC, name):
        raise ValueError(f"{name!r} is no metric; take {METRICS}")
    return metric_class(name).made(k=int(name.partition("@")[2] or 1), threshold=threshold)


_CLASSES: dict[str, type[Metric]] = by_kind(MetricConfig | LetorMetricConfig | GainNDCGConfig | ClickNDCGConfig)


def metric_class(name: str) -> type[Metric]:
    """The config of the metric with a given name, with its cut-off or without; those that no name selects included.

    Example:
        >>> metric_class("letor_precision@5").__name__
        'LetorPrecisionConfig'
    """
    return _CLASSES[name.partition("@")[0]]


def metric_label(name: str) -> str:
    """The name of a metric in tables and in the log; metrics under LETOR's policy are marked.

    Example:
        >>> metric_label("ndcg@5"), metric_label("precision@10"), metric_label("map")
        ('NDCG@5', 'P@10', 'MAP')
        >>> metric_label("letor_mean_ndcg"), metric_label("letor_precision@5")
        ('LETOR MeanNDCG', 'LETOR P@5')
    """
    kind, at, k = name.partition("@")
    return (metric_class(kind).label or kind.upper()) + at + k
