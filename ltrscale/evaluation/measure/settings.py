"""The settings of an evaluation: what is evaluated, and how."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.config import Config, Operational, members, validate
from ltrscale.data.dataset.split import Split, SplitsWithTest, Texts, with_periods_named
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.conditions import ConditionText
from ltrscale.evaluation.measure.corrected import PropensitiesConfig
from ltrscale.evaluation.measure.outliers import OutlierConfig
from ltrscale.evaluation.measure.slices import SliceName
from ltrscale.ranking.choices import LetorMetricConfig, MetricConfig, MetricName, metric_named
from ltrscale.ranking.graded import ClickNDCGConfig, GainNDCGConfig, Gains
from ltrscale.ranking.metric import Metric
from ltrscale.stages.inputs import BundleUrls

AS_SHOWN = "as_shown"
"""The method that ranks each list in the order in which it was shown: what a ranker is to replace."""
PRODUCTION, CANDIDATE = "production", "candidate"
"""The methods that a gate compares: the bundle in service, and its possible replacement."""
POSITIONS = "positions"
"""The column by which `as_shown` ranks; it stands where other methods have a bundle or scores."""
CutOff = Annotated[int, Field(ge=1)]


class EvaluateSettings(Config):
    """How methods are evaluated and compared."""

    baseline: str | None = "gbdt"
    """The method to compare the others with; null for no comparison."""
    ndcg_at: tuple[CutOff, ...] = Field(default=(1, 5, 10), min_length=1)
    """Cut-offs of NDCG, and of every other metric with a cut-off except precision."""
    precision_at: tuple[CutOff, ...] = (5,)
    """Cut-offs of precision."""
    metrics: tuple[MetricName, ...] = ()
    """Metrics to report in addition to the standard ones, by name, such as `rbp(persistence=0.95)`."""
    primary_cutoff: int = 5
    """The NDCG cut-off of the comparison column and the picture."""
    relevant_from: float = Field(default=1.0, gt=0)
    """Lowest label of a relevant document for MRR, MAP and precision."""
    grades: int = Field(default=4, ge=1)
    """The highest label, for ERR: 4 as in Chapelle et al. 2009; higher labels count as this one."""
    gains: Gains | None = None
    """Report NDCG with other gains too, as `gain_ndcg`: a list has the gains of labels 0, 1, 2, ..., such as
    [0, 1, 10]; `column` takes the column `gains` of the data set (columns.gain in prepare), such as revenue, as the
    gain of each document, whatever its label. Empty for none."""
    policy: Literal["expected", "letor4"] = "expected"
    """Definition of the metrics: `expected` is ours; `letor4` adds those of LETOR 4.0's script, for comparison with
    published figures."""
    leave_out_constant: bool = False
    """Leave groups with all labels equal out of the means, even where all are relevant and any order is ideal; a group
    of one document is one of them. BUYL23 does this, in its text and its public code."""
    as_shown: bool = True
    """Also evaluate the order in which lists were shown, as the method `as_shown`, where the test split has positions;
    `baseline` may name it. A study does not."""
    propensities: PropensitiesConfig | None = None
    """Also correct the metrics for the positions at which the documents were shown, by the propensities of jobs.clicks.
    A study does not read it."""
    judged: str | None = None
    """Data set with a group for each query of the test periods, with all its judged documents, in the list of
    candidates or not. They then give the ideal of NDCG, and the relevant documents that recall and MAP divide by. A
    query without a candidate counts too, as a list that misses everything. Empty uses the list alone. A study does not
    read it, because its models are measured one by one."""
    outliers: OutlierConfig = OutlierConfig()
    """How outlier groups are found; they form their own slice."""
    slices: dict[SliceName, ConditionText] = Field(default_factory=dict)
    """Query groups to judge separately too, by name: a condition such as `n_documents > 50`, `meta_device in ['ios',
    'android']`, `max_label >= 4` (BUYL23's purchase lists), `min_label == max_label`, `missing`, `drifted`,
    `any(price is null)`, `period == '2026-W07'`. docs/methods.md has the grammar and all columns. A study judges all
    and outlier groups."""
    slice_by: Texts = ()
    """Columns with a slice for every value: `period`, `meta_NAME` with at most 100 values; numbers such as
    `n_documents` and `n_relevant` are cut into bands 0, 1, 2, 3..5, 6..10, 11..20, 21..50 and so on."""
    by_period: bool = False
    """Also judge each test period: a slice for each, the periods since the end of training, and how far its features,
    lists, labels and scores have drifted from those of training and validation. A study does not read it."""
    resamples: int = Field(default=10_000, ge=100)
    """Number of bootstrap resamples, and of random sign patterns of the test, with one draw of labels. The number of
    patterns is at least 40 per comparison that is adjusted with others: p is at least 1 / (patterns + 1), and Holm
    multiplies it by their number."""
    seed: int = 0
    """Seed of the resampling."""
    docs_per_batch: Operational[int] = Field(default=65_536, ge=1)
    """Documents scored in one batch; the result does not depend on it."""

    @property
    def measured(self) -> dict[str, Metric]:
        """Every metric, by name: of the chosen policies, and those that `metrics` and `gains` add."""
        classes: list[type[Metric]] = [*members(MetricConfig)]
        if self.policy == "letor4":
            classes += members(LetorMetricConfig)
        keys: dict[str, Any] = {"threshold": self.relevant_from, "grades": self.grades}
        metrics: list[Metric] = []
        for cls in classes:
            cutoffs = self.precision_at if cls.cut_as_precision else self.ndcg_at
            metrics += [cls.made(k=k, **keys) for k in (cutoffs if cls.needs_cutoff() else (None,))]
        metrics += [metric_named(name, **keys) for name in self.metrics]
        if self.gains is not None:
            metrics += [GainNDCGConfig(k=k, gains=self.gains) for k in self.ndcg_at]
        return {metric.name: metric for metric in metrics}

    @property
    def metrics_need_every_list(self) -> bool:
        """Whether a metric needs the scores of lists without a label above 0: one of judgements, gains or positions."""
        return self.judged is not None or self.gains is not None or self.propensities is not None

    @property
    def primary(self) -> str:
        """The metric of the comparison column and the picture."""
        return f"ndcg@{self.primary_cutoff}"

    @property
    def sliced_by(self) -> Texts:
        """The columns with a slice for every value."""
        return tuple(dict.fromkeys(("period", *self.slice_by))) if self.by_period else self.slice_by

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.primary_cutoff not in self.ndcg_at:
            raise ValueError(f"primary_cutoff {self.primary_cutoff} is not in ndcg_at {list(self.ndcg_at)}; add it")
        if self.judged is not None and (self.leave_out_constant or self.policy == "letor4" or self.gains == "column"):
            raise ValueError("judged: no part of leave_out_constant, policy letor4 or gains column; leave one out")
        if self.leave_out_constant and self.policy == "letor4":
            raise ValueError("leave_out_constant: LETOR's script counts every group; leave out one of both settings")
        return self


class EvaluateConfig(EvaluateSettings):
    """The bundles to evaluate, the groups, and the settings of the evaluation."""

    models: dict[str, BundleUrls] = Field(default_factory=dict)
    """Bundles of each method by its name; several bundles of one method are its trials, with other labels or seeds.
    A verdict needs at least five different draws of labels, the same ones for all methods."""
    scores: dict[str, str] = Field(default_factory=dict)
    """Methods without a bundle, by name: the directory of scores that jobs.score made on the test split's data set."""
    splits: SplitsWithTest
    """Metrics are measured on the labelled groups of `test`; outlier rules are fitted on all groups of `validation`."""
    clicks: bool = False
    """Also report NDCG of the column `clicks`, as `click_ndcg`, beside that of the labels: they differ on real logs."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.trials:
            raise ValueError("models and scores are both empty; name a bundle or a directory of scores")
        if self.as_shown and AS_SHOWN in self.trials:
            raise ValueError(f"{AS_SHOWN} is the order that was shown; rename that method, or set as_shown to false")
        if POSITIONS in (url for urls in self.trials.values() for url in urls):
            raise ValueError(
                f"{POSITIONS!r} stands for the order that was shown; write that directory as ./{POSITIONS}"
            )
        names = {*self.trials, *([AS_SHOWN] if self.as_shown else [])}
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(
                f"baseline {self.baseline!r} is not among the models {', '.join(self.trials)}; or set null"
            )
        if shared := self.scores.keys() & self.models.keys():
            raise ValueError(f"models and scores both have a method {min(shared)!r}; give them different names")
        if empty := [name for name, urls in self.models.items() if not urls]:
            raise ValueError(f"models.{empty[0]} has no bundle; name one")
        return self

    @property
    def measured_on_clicks(self) -> dict[str, Metric]:
        """The metrics of clicks, by name."""
        metrics = [ClickNDCGConfig(k=k) for k in self.ndcg_at] if self.clicks else []
        return {metric.name: metric for metric in metrics}

    @classmethod
    def recorded(cls, url: str) -> Self:
        """The config of the evaluation that is committed to a directory.

        Raises:
            InputError: there is none.
        """
        made_by = (storage.read_manifest(url) or {}).get("made_by", {})
        if made_by.get("stage") != "evaluate":
            raise InputError(f"evaluation: {url}: not made by jobs.evaluate; name a directory that it made")
        return validate(cls, made_by["config"], url)

    @property
    def trials(self) -> dict[str, Texts]:
        """Scores or bundles of each method, in the order of the report."""
        return {**{name: (url,) for name, url in self.scores.items()}, **self.models}

    @property
    def bundles(self) -> list[str]:
        """All bundles, one method after the other."""
        return [url for urls in self.models.values() for url in urls]

    @property
    def scored(self) -> list[Split]:
        """The test split with each of the scores as its labels."""
        return [self.splits.test.with_scores(url) for url in self.scores.values()]


def judged_split(url: str, test: Split) -> Split:
    """The judgements of a data set for the periods of a test split."""
    return Split(data=(url,), periods=with_periods_named(test).periods)
