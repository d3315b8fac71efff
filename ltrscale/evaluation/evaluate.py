"""Evaluate bundles on the test split: metrics of every group, outlier groups, comparison with a baseline, report.

Shapes: N documents, Q groups, T trials (bundles of all methods), K methods, M metrics, S resamples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Scorer, load
from ltrscale.config import Config, members, validate
from ltrscale.data.dataset.split import Selection, Split, SplitsWithTest, Texts, check_disjoint, select
from ltrscale.data.stream import scored
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.crossed import Floats
from ltrscale.evaluation.outliers import OutlierConfig, OutlierDetector, fit_outliers
from ltrscale.evaluation.pages import write_report
from ltrscale.evaluation.provenance import Provenance
from ltrscale.evaluation.report import EvaluatedData, Evaluation, MethodResult, page, plot
from ltrscale.evaluation.summarise import Scope, scopes
from ltrscale.progress import Report, progress
from ltrscale.ranking.calibration import Calibration, calibration, tally
from ltrscale.ranking.choices import LetorMetricConfig, MetricConfig
from ltrscale.ranking.graded import GainNDCGConfig, Gains
from ltrscale.ranking.letor import LetorPrecisionConfig
from ltrscale.ranking.metrics import Metric, PrecisionConfig
from ltrscale.ranking.pointwise import SigmoidConfig

GROUPS = "groups.parquet"
"""The file with every metric of every group and trial."""
_PICTURE = "ndcg.png"

CutOff = Annotated[int, Field(ge=1)]


class EvaluateSettings(Config):
    """How methods are evaluated and compared."""

    baseline: str | None = "gbdt"
    """The method to compare the others with; null for no comparison."""
    ndcg_at: tuple[CutOff, ...] = Field(default=(1, 5, 10), min_length=1)
    """Cut-offs of NDCG, and of every other metric with a cut-off except precision."""
    precision_at: tuple[CutOff, ...] = (5,)
    """Cut-offs of precision."""
    primary_cutoff: int = 5
    """The NDCG cut-off of the comparison column and the picture."""
    relevant_from: float = Field(default=1.0, gt=0)
    """Lowest label of a relevant document for MRR, MAP and precision."""
    grades: int = Field(default=4, ge=1)
    """The highest label, for ERR: 4 as in Chapelle et al. 2009; higher labels count as this one."""
    gains: Gains | None = None
    """Report NDCG with other gains too, as `gain_ndcg`: a list has the gains of labels 0, 1, 2, ..., such as
    [0, 1, 10]; `weights` takes the `weights` column of the data set, such as revenue, as the gain of each document,
    whatever its label. Empty for none."""
    policy: Literal["expected", "letor4"] = "expected"
    """Definition of the metrics: `expected` is ours; `letor4` adds those of LETOR 4.0's script beside ours, for
    comparison with published figures."""
    leave_out_constant: bool = False
    """Leave groups whose labels are all equal out of the means, also where these are relevant and any order is ideal;
    a group of one document is one of them. BUYL23 does, in its text and its public code."""
    outliers: OutlierConfig = OutlierConfig()
    """How outlier groups are found."""
    resamples: int = Field(default=10_000, ge=100)
    """Number of bootstrap resamples, and of random sign patterns of the test, where there is one draw of labels."""
    seed: int = 0
    """Seed of the resampling."""
    docs_per_batch: int = Field(default=65_536, ge=1)
    """Documents scored in one batch; the result does not depend on it."""

    @model_validator(mode="after")
    def _has_the_primary_cutoff(self) -> Self:
        if self.primary_cutoff not in self.ndcg_at:
            raise ValueError(f"primary_cutoff {self.primary_cutoff} is not in ndcg_at {list(self.ndcg_at)}; add it")
        return self

    @model_validator(mode="after")
    def _leaves_out_by_one_policy(self) -> Self:
        if self.leave_out_constant and self.policy == "letor4":
            raise ValueError("leave_out_constant: LETOR's script counts every group; leave out one of both settings")
        return self


class EvaluateConfig(EvaluateSettings):
    """The bundles to evaluate, the groups, and the settings of the evaluation."""

    models: dict[str, Texts] = Field(min_length=1)
    """Bundles of each method by its name; several bundles of one method are its trials, over other labels or seeds.
    Five different draws of labels, the same ones for all methods, are the fewest that judge."""
    scores: dict[str, str] = Field(default_factory=dict)
    """Methods without a bundle, by name: the directory of scores that jobs.score made on the test split's data set."""
    splits: SplitsWithTest
    """Metrics are measured on the labelled groups of `test`; outlier rules are fitted on all groups of `validation`."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.baseline is not None and self.baseline not in self.trials:
            raise ValueError(
                f"baseline {self.baseline!r} is not among the models {', '.join(self.trials)}; or set null"
            )
        if both := self.scores.keys() & self.models.keys():
            raise ValueError(f"models and scores both have a method {min(both)!r}; give them different names")
        if empty := [name for name, urls in self.models.items() if not urls]:
            raise ValueError(f"models.{empty[0]} has no bundle; name one")
        return self

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


def evaluate(config: EvaluateConfig, out: str, *, made_by: Mapping[str, Any], report: Report) -> Evaluation:
    """Evaluate every bundle on the labelled groups of the test split and commit the findings to a directory.

    The directory holds `report.md` with its picture, `metrics.json` (`Evaluation.read` reads it), `groups.parquet`
    (every metric of every group and trial, null where undefined) and `outliers.json`.

    Args:
        config: see `EvaluateConfig`.
        out: URL of the directory.
        made_by: origin, recorded in the manifest; see `ltrscale.config.made_by`.
        report: receives the means of each method.

    Raises:
        InputError: splits overlap, a bundle or a period's scores are missing, a bundle was made for other features or
            gives scores that are not finite.
    """
    check_disjoint(config.splits)
    test = select(config.splits.test, labelled=True)
    trials = [_trial(name, i, url, test, config) for name, urls in config.trials.items() for i, url in enumerate(urls)]
    measured = _measure(test, trials, fit_detector(config, config.splits.validation, test), config)
    evaluation = _summarise(measured, trials, test, config)
    with storage.Commit(out) as commit:
        with commit.file(GROUPS) as path, pq.ParquetWriter(path, _schema(measured.metrics)) as writer:
            for t, trial in enumerate(trials):
                writer.write_table(_group_table(measured, t, trial))
        text = page(evaluation, picture=_PICTURE, out=out)
        also = {"outliers.json": measured.detector.model_dump_json(indent=1) + "\n"}
        write_report(commit, evaluation, page=text, picture=_PICTURE, plot=plot, also=also)
        commit.finish({"made_by": made_by})
    for method in evaluation.methods:
        means = {name: summary.mean for name, summary in method.everywhere.summaries.items()}
        report({"method": method.name, **means})
    return evaluation


@dataclass(frozen=True)
class _Trial:
    """The `number`-th bundle of a method, or its scores."""

    method: str
    number: int
    url: str
    kind: str
    scorer: Scorer
    labelled_groups: int | None = None
    """Number of labelled groups that it was trained on; None if the bundle does not state it."""
    validation_groups: int | None = None
    """Number of labelled groups that it was selected on; None if the bundle does not state it."""
    labels: str | None = None
    """Identity of all these labels; None if the bundle does not state it."""
    logits: bool = False
    """Whether its scores are logits of labels 0 and 1, for it was trained with the pointwise sigmoid loss."""


def _trial(method: str, number: int, url: str, test: Selection, config: EvaluateConfig) -> _Trial:
    """Open a bundle or committed scores for evaluation."""
    if method in config.scores:
        return _Trial(method, number, url, "scores", committed_scorer(url, config.splits.test))
    bundle = load(url)
    return _Trial(
        method,
        number,
        url,
        bundle.kind,
        bundle.scorer(features=test.features),
        labelled_groups=bundle.count("labelled_groups"),
        validation_groups=bundle.count("validation_groups"),
        labels=validate(Provenance, bundle.made_by, url).labels(),
        logits=bundle.config.get("loss") == SigmoidConfig().model_dump(mode="json"),
    )


@dataclass(frozen=True)
class _Measured:
    """Every metric of every group and trial; NaN where undefined."""

    metrics: tuple[str, ...]
    values_QTM: Floats
    gids_Q: NDArray[np.int64]
    periods_Q: list[str]
    documents_Q: NDArray[np.int64]
    outlier_Q: NDArray[np.bool_]
    detector: OutlierDetector
    calibrations_T: list[Calibration | None]
    """None where scores are no logits, or labels no clicks."""


def fit_detector(config: EvaluateSettings, validation_split: Split, test: Selection) -> OutlierDetector:
    """The outlier rules, fitted on all groups of the validation split."""
    validation = select(validation_split, labelled=False)
    validation = validation.serving(test.features, whose="the test split", where="the validation split")
    return fit_outliers(
        lambda: iterate(validation, docs_per_batch=config.docs_per_batch),
        validation.features,
        config.outliers,
        data=validation.hash,
    )


def metrics_of(config: EvaluateSettings) -> dict[str, Metric]:
    """Every metric of the chosen policies, by name."""
    classes: list[type[Metric]] = [*members(MetricConfig)]
    if config.policy == "letor4":
        classes += members(LetorMetricConfig)
    metrics: list[Metric] = [
        cls.made(k=k, threshold=config.relevant_from, grades=config.grades)
        for cls in classes
        for k in _cutoffs(cls, config)
    ]
    if config.gains is not None:
        metrics += [GainNDCGConfig(k=k, gains=config.gains) for k in config.ndcg_at]
    return {metric.name: metric for metric in metrics}


def _cutoffs(cls: type[Metric], config: EvaluateSettings) -> tuple[int, ...]:
    """Cut-offs of a metric: its own key's, or else those of NDCG."""
    if not cls.has_cutoff():
        return (1,)  # made once; the value is not used
    return config.precision_at if issubclass(cls, PrecisionConfig | LetorPrecisionConfig) else config.ndcg_at


def by_period(selection: Selection, docs_per_batch: int) -> Iterator[tuple[str, QueryGroups]]:
    """The groups of a selection, with their period."""
    for period in dict.fromkeys(row_group.period for row_group in selection.row_groups):
        part = replace(selection, row_groups=tuple(r for r in selection.row_groups if r.period == period))
        for groups in iterate(part, docs_per_batch=docs_per_batch):
            yield period, groups


def _measure(test: Selection, trials: Sequence[_Trial], detector: OutlierDetector, config: EvaluateConfig) -> _Measured:
    """Score the test groups with every bundle, in one pass over the data."""
    metrics = metrics_of(config)
    values, gids, documents, outlier = [], [], [], []
    periods: list[str] = []
    none_yet = tally(torch.zeros(0), torch.zeros(0))
    tallies = [none_yet if trial.logits else None for trial in trials]
    with progress("evaluate", test.n_documents) as advance:
        for period, groups in by_period(test, config.docs_per_batch):
            assert groups.labels_N is not None
            assert groups.ids_Q is not None
            values_TMQ = []
            clicks = bool(((groups.labels_N == 0) | (groups.labels_N == 1)).all())
            for t, trial in enumerate(trials):
                scores_N = trial.scorer(groups)
                if not torch.isfinite(scores_N).all():
                    raise InputError(f"{trial.url}: gives scores that are not finite (period {period}); train it again")
                values_TMQ.append(values_of(scores_N, groups, metrics, config))
                so_far = tallies[t]
                tallies[t] = None if so_far is None or not clicks else so_far + tally(scores_N, groups.labels_N)
            values.append(torch.stack(values_TMQ).permute(2, 0, 1).numpy())
            gids.append(groups.ids_Q.numpy())
            documents.append(groups.lengths_Q.numpy())
            outlier.append(detector.outlier_groups(groups).numpy())
            periods += [period] * groups.n_groups
            advance(groups.n_documents)
    return _Measured(
        tuple(metrics),
        np.concatenate(values),
        np.concatenate(gids),
        periods,
        np.concatenate(documents),
        np.concatenate(outlier),
        detector,
        [None if tally_CB is None else calibration(tally_CB) for tally_CB in tallies],
    )


def values_of(
    scores_N: Tensor, groups: QueryGroups, metrics: Mapping[str, Metric], settings: EvaluateSettings
) -> Tensor:
    """The metrics of each group, shape [M, Q], float64; NaN where undefined or left out."""
    assert groups.labels_N is not None
    try:
        values_MQ = torch.stack([metric.of_groups(scores_N, groups) for metric in metrics.values()]).double()
    except ValueError as error:  # the gains that the user chose do not fit these groups
        raise InputError(f"evaluate.{error}") from error
    if not settings.leave_out_constant:
        return values_MQ
    highest_Q, lowest_Q = (
        torch.segment_reduce(groups.labels_N, extreme, offsets=groups.offsets_Q1) for extreme in ("max", "min")
    )
    return values_MQ.masked_fill(highest_Q == lowest_Q, torch.nan)


def _summarise(measured: _Measured, trials: Sequence[_Trial], test: Selection, config: EvaluateConfig) -> Evaluation:
    """Compute all figures of the report."""
    of_methods = [[trial for trial in trials if trial.method == name] for name in config.trials]
    labels_K = [[trial.labels for trial in of_method] for of_method in of_methods]
    of_trials = iter(measured.calibrations_T)
    calibrations_K = [tuple(next(of_trials) for _ in of_method) for of_method in of_methods]
    everywhere = _scopes(measured.values_QTM, measured.metrics, labels_K, config)
    outliers = _scopes(measured.values_QTM[measured.outlier_Q], measured.metrics, labels_K, config)
    methods = []
    for k, ((name, urls), of_method) in enumerate(zip(config.trials.items(), of_methods, strict=True)):
        methods.append(
            MethodResult(
                name=name,
                bundles=urls,
                kinds=tuple(trial.kind for trial in of_method),
                labelled_groups=tuple(trial.labelled_groups for trial in of_method),
                validation_groups=tuple(trial.validation_groups for trial in of_method),
                labels=tuple(labels_K[k]),
                calibration=calibrations_K[k],
                everywhere=everywhere[k],
                outliers=outliers[k],
            )
        )
    validation = select(config.splits.validation, labelled=False)
    data = EvaluatedData(
        data=config.splits.test.data,
        periods=tuple(dict.fromkeys(measured.periods_Q)),
        hash=test.hash,
        groups=len(measured.gids_Q),
        documents=int(measured.documents_Q.sum()),
        outlier_groups=int(measured.outlier_Q.sum()),
    )
    return Evaluation(
        methods=tuple(methods),
        baseline=config.baseline,
        primary=f"ndcg@{config.primary_cutoff}",
        relevant_from=config.relevant_from,
        leave_out_constant=config.leave_out_constant,
        policies={name: metric.policy for name, metric in metrics_of(config).items()},
        resamples=config.resamples,
        test=data,
        validation_groups=sum(row_group.labelled for row_group in validation.row_groups),
        detector=measured.detector,
    )


def _scopes(
    values_QTM: Floats, metrics: Sequence[str], labels_K: Sequence[Sequence[str | None]], config: EvaluateConfig
) -> list[Scope]:
    """Summaries and comparisons of each method over the given groups."""
    ends = np.cumsum([len(urls) for urls in config.trials.values()])[:-1]
    baseline = None if config.baseline is None else list(config.trials).index(config.baseline)
    values_K = np.split(values_QTM, ends, axis=1)
    return scopes(values_K, metrics, baseline=baseline, samples=config.resamples, seed=config.seed, labels_K=labels_K)


def _schema(metrics: Sequence[str]) -> pa.Schema:
    """Columns of `groups.parquet`, one row for each group and trial."""
    columns = {
        "gid": pa.int64(),
        "period": pa.string(),
        "documents": pa.int64(),
        "outlier": pa.bool_(),
        "method": pa.string(),
        "trial": pa.int32(),
    }
    return pa.schema([*columns.items(), *((metric, pa.float64()) for metric in metrics)])


def _group_table(measured: _Measured, t: int, trial: _Trial) -> pa.Table:
    """The rows of one trial."""
    q = len(measured.gids_Q)
    values_QM = measured.values_QTM[:, t]
    return pa.table(
        [
            measured.gids_Q,
            measured.periods_Q,
            measured.documents_Q,
            measured.outlier_Q,
            [trial.method] * q,
            [trial.number] * q,
            *(pa.array(values_Q, mask=np.isnan(values_Q)) for values_Q in values_QM.T),
        ],
        schema=_schema(measured.metrics),
    )


def committed_scorer(url: str, split: Split) -> Scorer:
    """The function that looks up the committed scores of a batch of the split's groups, float64.

    Raises:
        InputError: as `scored.committed`.
    """
    known = scored.committed(url, split)

    def score(groups: QueryGroups) -> Tensor:
        if (scores_N := known.find(groups)) is None:
            raise InputError(f"{url}: does not have a score for each document of the test groups; score them again")
        return scores_N

    return score
