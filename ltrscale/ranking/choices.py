"""The closed union of metrics that a config may name. Add one line here for each new member."""

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from ltrscale.config import by_kind, kind_of
from ltrscale.ranking.graded import ClickNDCGConfig, DCGConfig, ERRConfig, GainNDCGConfig, RBPConfig
from ltrscale.ranking.libraries import LetorMAPConfig, LetorMeanNDCGConfig, LetorNDCGConfig, LetorPrecisionConfig
from ltrscale.ranking.metric import Metric, Name
from ltrscale.ranking.metrics import MAPConfig, MRRConfig, NDCGConfig, PrecisionConfig, RecallConfig, SuccessConfig

MetricConfig = Annotated[
    NDCGConfig
    | MRRConfig
    | MAPConfig
    | PrecisionConfig
    | RecallConfig
    | SuccessConfig
    | DCGConfig
    | ERRConfig
    | RBPConfig,
    Field(discriminator="kind"),
]
LetorMetricConfig = Annotated[
    LetorNDCGConfig | LetorMeanNDCGConfig | LetorMAPConfig | LetorPrecisionConfig, Field(discriminator="kind")
]
"""Metrics under LETOR's policy."""

_BY_NAME: dict[str, type[Metric]] = by_kind(MetricConfig)
_BY_KIND: dict[str, type[Metric]] = _BY_NAME | by_kind(LetorMetricConfig | GainNDCGConfig | ClickNDCGConfig)


def _spelled(cls: type[Metric]) -> str:
    """How to write a metric's name, with the defaults of its own keys."""
    keys = tuple((key, str(cls.model_fields[key].default)) for key in cls.own_keys())
    cutoff = "@K" if cls.needs_cutoff() else "[@K]" if "k" in cls.model_fields else ""
    return f"{Name(kind_of(cls), keys)}{cutoff}"


_FORMS = [*map(_spelled, sorted(_BY_NAME.values(), key=lambda cls: not cls.needs_cutoff()))]
METRICS = f"{', '.join(_FORMS[:-1])} or {_FORMS[-1]}"
"""The names of all metrics, for messages to the user."""


def metric_named(name: str, *, threshold: float = 1.0, grades: int = 4) -> Metric:
    """The metric with a given name, such as ndcg@5.

    Args:
        name: ndcg@K, precision@K, mrr, map or another of `METRICS`.
        threshold: lowest label of a relevant document; NDCG ignores it.
        grades: the highest label, for ERR.

    Raises:
        ValueError: no metric has this name.

    Example:
        >>> metric_named("precision@2")
        PrecisionConfig(kind='precision', k=2, threshold=1.0)
        >>> metric_named("rbp(persistence=0.9)").name
        'rbp(persistence=0.9)'
        >>> metric_named("rbp(persistence=2)")
        Traceback (most recent call last):
        ValueError: 'rbp(persistence=2)': persistence: Input should be less than 1
    """
    try:
        parts = Name.parsed(name)
        cls = _BY_NAME[parts.kind]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name!r} is no metric; take {METRICS}") from error
    if cls.needs_cutoff() if parts.k is None else "k" not in cls.model_fields:
        raise ValueError(f"{name!r} is no metric; take {METRICS}")
    if unknown := dict(parts.keys).keys() - cls.own_keys():
        raise ValueError(f"{name!r}: {parts.kind} has no key {min(unknown)!r} in its name; write {_spelled(cls)}")
    try:
        return cls.made(k=parts.k, threshold=threshold, grades=grades, own=parts.keys)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"{name!r}: {problem['loc'][0]}: {problem['msg']}") from error


MetricName = Annotated[str, AfterValidator(lambda name: metric_named(name).name)]
"""The canonical name of a metric, under which figures are stored."""


def metric_class(name: str) -> type[Metric]:
    """The config class for a metric name, with or without cut-off, also where `metric_named` cannot select it."""
    return _BY_KIND[Name.parsed(name).kind]


def metric_label(name: str) -> str:
    """The name of a metric in tables and in the log; marks metrics under LETOR's policy.

    Example:
        >>> metric_label("ndcg@5"), metric_label("precision@10"), metric_label("map")
        ('NDCG@5', 'P@10', 'MAP')
        >>> metric_label("letor_mean_ndcg"), metric_label("rbp(persistence=0.9)@5")
        ('LETOR MeanNDCG', 'RBP(persistence=0.9)@5')
    """
    parts = Name.parsed(name)
    return str(parts._replace(kind=metric_class(name).label or parts.kind.upper()))
