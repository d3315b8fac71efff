"""The metrics of an evaluation, and their values for each group.

Shapes: N documents, Q groups, M metrics.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.config import members
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.judged import Judged
from ltrscale.evaluation.measure.settings import EvaluateConfig, EvaluateSettings
from ltrscale.ranking.choices import LetorMetricConfig, MetricConfig, metric_named
from ltrscale.ranking.graded import ClickNDCGConfig, GainNDCGConfig
from ltrscale.ranking.metric import Metric


def metrics_of(config: EvaluateSettings) -> dict[str, Metric]:
    """Every metric of the chosen policies, and those that `metrics` adds, by name."""
    classes: list[type[Metric]] = [*members(MetricConfig)]
    if config.policy == "letor4":
        classes += members(LetorMetricConfig)
    metrics: list[Metric] = [
        cls.made(k=k, threshold=config.relevant_from, grades=config.grades)
        for cls in classes
        for k in _cutoffs(cls, config)
    ]
    metrics += [metric_named(name, threshold=config.relevant_from, grades=config.grades) for name in config.metrics]
    if config.gains is not None:
        metrics += [GainNDCGConfig(k=k, gains=config.gains) for k in config.ndcg_at]
    return {metric.name: metric for metric in metrics}


def clicks_metrics(config: EvaluateConfig) -> dict[str, Metric]:
    """The metrics of clicks, by name."""
    metrics = [ClickNDCGConfig(k=k) for k in config.ndcg_at] if config.clicks else []
    return {metric.name: metric for metric in metrics}


def all_metrics(config: EvaluateConfig) -> dict[str, Metric]:
    """Every metric, those of clicks last, by name."""
    return metrics_of(config) | clicks_metrics(config)


def _cutoffs(cls: type[Metric], config: EvaluateSettings) -> tuple[int | None, ...]:
    """Cut-offs of a metric: its own key's, or else those of NDCG; none where it can do without."""
    if not cls.needs_cutoff():
        return (None,)
    return config.precision_at if cls.cut_as_precision else config.ndcg_at


def values_of(
    scores_N: Tensor,
    groups: QueryGroups,
    metrics: Mapping[str, Metric],
    settings: EvaluateSettings,
    judged: Judged | None = None,
) -> Tensor:
    """The metrics of each group, shape [M, Q], float64; NaN where undefined or left out."""
    assert groups.labels_N is not None
    try:
        if judged is not None:
            return judged.values(list(metrics.values()), scores_N, groups)
        values_MQ = torch.stack([metric.of_groups(scores_N, groups) for metric in metrics.values()]).double()
    except ValueError as error:  # the gains that the user chose do not fit these groups
        raise InputError(f"evaluate.{error}") from error
    if not settings.leave_out_constant:
        return values_MQ
    highest_Q, lowest_Q = (
        torch.segment_reduce(groups.labels_N, extreme, offsets=groups.offsets_Q1) for extreme in ("max", "min")
    )
    return values_MQ.masked_fill(highest_Q == lowest_Q, torch.nan)
