"""Evaluate bundles on the test split: metrics of every group, slices, comparison with a baseline, report.

Shapes: N documents, Q groups, T trials (bundles of all methods), K methods, M metrics.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import load
from ltrscale.bundle.provenance import Provenance
from ltrscale.config import Config, Operational, digest, members, validate
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split, SplitsWithTest, Texts
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import Run, run_here
from ltrscale.errors import InputError
from ltrscale.evaluation.blocks import Tally, block_numbers
from ltrscale.evaluation.corrected import Correction, Gathered, PropensitiesConfig, summarised
from ltrscale.evaluation.debiasing import debiased, otherwise
from ltrscale.evaluation.group_file import GROUPS, GroupFile
from ltrscale.evaluation.judged import Judged
from ltrscale.evaluation.measuring import Measuring, committed_row_groups
from ltrscale.evaluation.outliers import OutlierConfig, OutlierDetector, fit_outliers
from ltrscale.evaluation.page import document
from ltrscale.evaluation.report import EvaluatedData, Evaluation, MethodResult
from ltrscale.evaluation.seen import Seen
from ltrscale.evaluation.shown import AS_SHOWN, POSITIONS, check_shown, has_positions
from ltrscale.evaluation.slices import ALL, ConditionText, SliceName, Slicer, check_few, in_order
from ltrscale.evaluation.summarise import Comparison, Scope, judged_together, scopes
from ltrscale.progress import Report
from ltrscale.ranking.calibration import Calibration, calibration
from ltrscale.ranking.choices import LetorMetricConfig, MetricConfig
from ltrscale.ranking.graded import ClickNDCGConfig, GainNDCGConfig, Gains
from ltrscale.ranking.letor import LetorPrecisionConfig
from ltrscale.ranking.metrics import Metric, PrecisionConfig
from ltrscale.ranking.pointwise import SigmoidConfig
from ltrscale.reports.findings import write_report

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
    [0, 1, 10]; `column` takes the column `gains` of the data set (columns.gain in prepare), such as revenue, as the
    gain of each document, whatever its label. Empty for none."""
    policy: Literal["expected", "letor4"] = "expected"
    """Definition of the metrics: `expected` is ours; `letor4` adds those of LETOR 4.0's script beside ours, for
    comparison with published figures."""
    leave_out_constant: bool = False
    """Leave groups whose labels are all equal out of the means, also where these are relevant and any order is ideal;
    a group of one document is one of them. BUYL23 does, in its text and its public code."""
    as_shown: bool = True
    """Evaluate the order in which lists were shown, too, as the method `as_shown`, where the test split has positions;
    `baseline` may name it. A study does not."""
    propensities: PropensitiesConfig | None = None
    """Correct the metrics for the positions at which the documents were shown, too, by the propensities of jobs.clicks.
    A study does not read it."""
    judged: str | None = None
    """Data set with a group for each query of the test periods, which has all of its judged documents, in the list of
    candidates or not: the ideal of NDCG, and the relevant documents that recall and MAP divide by, are then theirs. A
    query without a candidate counts, too, as a list that misses everything. Empty takes the list alone. A study, whose
    models are measured one by one, does not read it."""
    outliers: OutlierConfig = OutlierConfig()
    """How outlier groups are found, which are a slice of their own."""
    slices: dict[SliceName, ConditionText] = Field(default_factory=dict)
    """Query groups to judge by themselves too, by name: a condition such as `n_documents > 50`, `meta_device in ['ios',
    'android']`, `max_label >= 4` (BUYL23's purchase lists), `min_label == max_label`, `missing`, `drifted`,
    `any(price is null)`, `period == '2026-W07'`. docs/methods.md has the grammar and all columns. A study judges all
    and outlier groups."""
    slice_by: Texts = ()
    """Columns whose every value is a slice: `period`, `meta_NAME` with at most 100 values; numbers such as
    `n_documents` and `n_relevant` are cut into bands 0, 1, 2, 3..5, 6..10, 11..20, 21..50 and so on."""
    resamples: int = Field(default=10_000, ge=100)
    """Number of bootstrap resamples, and of random sign patterns of the test, where there is one draw of labels. There
    are more patterns, 40 for each, where more comparisons than a fortieth of that are adjusted together: p is at least
    1 / (patterns + 1), and Holm multiplies it by their number."""
    seed: int = 0
    """Seed of the resampling."""
    docs_per_batch: Operational[int] = Field(default=65_536, ge=1)
    """Documents scored in one batch; the result does not depend on it."""

    @model_validator(mode="after")
    def _has_the_primary_cutoff(self) -> Self:
        if self.primary_cutoff not in self.ndcg_at:
            raise ValueError(f"primary_cutoff {self.primary_cutoff} is not in ndcg_at {list(self.ndcg_at)}; add it")
        return self

    @model_validator(mode="after")
    def _judges_by_one_policy(self) -> Self:
        if self.judged is not None and (self.leave_out_constant or self.policy == "letor4" or self.gains == "column"):
            raise ValueError("judged: no part of leave_out_constant, policy letor4 or gains column; leave one out")
        return self

    @model_validator(mode="after")
    def _leaves_out_by_one_policy(self) -> Self:
        if self.leave_out_constant and self.policy == "letor4":
            raise ValueError("leave_out_constant: LETOR's script counts every group; leave out one of both settings")
        return self


class EvaluateConfig(EvaluateSettings):
    """The bundles to evaluate, the groups, and the settings of the evaluation."""

    models: dict[str, Texts] = Field(default_factory=dict)
    """Bundles of each method by its name; several bundles of one method are its trials, over other labels or seeds.
    Five different draws of labels, the same ones for all methods, are the fewest that judge."""
    scores: dict[str, str] = Field(default_factory=dict)
    """Methods without a bundle, by name: the directory of scores that jobs.score made on the test split's data set."""
    splits: SplitsWithTest
    """Metrics are measured on the labelled groups of `test`; outlier rules are fitted on all groups of `validation`."""
    clicks: bool = False
    """Report NDCG of the column `clicks` too, as `click_ndcg`, beside that of the labels: the two part ways on real
    logs."""

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
        known = {*self.trials, *([AS_SHOWN] if self.as_shown else [])}
        if self.baseline is not None and self.baseline not in known:
            raise ValueError(
                f"baseline {self.baseline!r} is not among the models {', '.join(self.trials)}; or set null"
            )
        if both := self.scores.keys() & self.models.keys():
            raise ValueError(f"models and scores both have a method {min(both)!r}; give them different names")
        if empty := [name for name, urls in self.models.items() if not urls]:
            raise ValueError(f"models.{empty[0]} has no bundle; name one")
        return self

    @classmethod
    def recorded(cls, url: str) -> Self:
        """The config of the evaluation that is committed to a directory.

        Raises:
            InputError: none is.
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


def evaluate(
    config: EvaluateConfig,
    out: str,
    *,
    made_by: Mapping[str, Any],
    report: Report,
    run: Run = run_here,
    threads: int = 0,
) -> Evaluation:
    """Evaluate every bundle on the labelled groups of the test split and commit the findings to a directory.

    The directory holds `report.md` with its picture, `metrics.json` (`Evaluation.read` reads it), `groups.parquet`
    (every metric of every group and trial, null where undefined, and the slices of the group) and `outliers.json`.
    Memory does not grow with the number of groups, and the figures do not depend on `run`.

    Args:
        config: see `EvaluateConfig`.
        out: URL of the directory.
        made_by: origin, recorded in the manifest; see `ltrscale.config.made_by`.
        report: receives the means of each method.
        run: runs the work on each part of the test split, here or with Ray.
        threads: of a tree model; 0 takes all cores.

    Raises:
        InputError: splits overlap, a bundle or a period's scores are missing, a bundle was made for other features or
            gives scores that are not finite, or a slice names a column that does not exist.
    """
    check_disjoint(config.splits)
    test = select(config.splits.test, labelled=True)
    methods = _methods(config, test)
    trials = [_trial(name, i, url, config) for name, urls in methods.items() for i, url in enumerate(urls)]
    detector = fit_detector(config, config.splits.validation, test)
    judged = None if config.judged is None else Judged.read(config.judged, config.splits.test)
    correction = correction_of(config, test)
    measuring = Measuring(
        models=tuple(trial.url for trial in trials),
        scores={url: committed_row_groups(url, config.splits.test) for url in config.scores.values()},
        slicer=Slicer.make(
            config.slices,
            config.slice_by,
            detector=detector,
            selection=test,
            relevant_from=config.relevant_from,
            training=partial(_seen_in_training, config, test),
        ),
        metrics=partial(values_of, metrics=metrics_of(config), settings=config, judged=judged),
        features=test.features,
        docs_per_batch=config.docs_per_batch,
        threads=threads,
        logits=tuple(t for t, trial in enumerate(trials) if trial.logits),
        on_clicks=partial(values_of, metrics=_on_clicks(config), settings=config) if config.clicks else None,
        correction=correction,
    )
    test = measuring.open(test)
    with storage.Commit(out) as commit:
        with commit.file(GROUPS) as path, GroupFile(path, list(_all_metrics(config)), trials) as file:
            tallies = _measure(measuring, test, config, file, run, judged)
        evaluation = _summarise(tallies, trials, test, detector, config, judged, correction)
        also = {"outliers.json": detector.model_dump_json(indent=1) + "\n"}
        write_report(commit, evaluation, document(evaluation, out), also=also)
        commit.finish({"made_by": made_by})
    for method in evaluation.methods:
        means = {name: summary.mean for name, summary in method.slices[ALL].summaries.items()}
        report({"method": method.name, **means})
    return evaluation


def correction_of(settings: EvaluateSettings, test: Selection) -> Correction | None:
    """By what metrics are corrected for positions; None for no correction.

    Raises:
        InputError: test groups have no positions, and the baseline or the correction needs them; or as
            `Correction.read`.
    """
    if settings.baseline == AS_SHOWN:
        check_shown(test, f"baseline {AS_SHOWN}")
    if settings.propensities is None:
        return None
    check_shown(test, "propensities")
    return Correction.read(settings.propensities, settings.ndcg_at)


def _methods(config: EvaluateConfig, test: Selection) -> dict[str, Texts]:
    """Scores or bundles of each method, and last the order that was shown, if there is one."""
    return config.trials | ({AS_SHOWN: (POSITIONS,)} if config.as_shown and has_positions(test) else {})


@dataclass(frozen=True)
class _Trial:
    """The `number`-th bundle of a method, or its scores."""

    method: str
    number: int
    url: str
    kind: str
    labelled_groups: int | None = None
    """Number of labelled groups that it was trained on; None if the bundle does not state it."""
    validation_groups: int | None = None
    """Number of labelled groups that it was selected on; None if the bundle does not state it."""
    labels: str | None = None
    """Identity of all these labels; None if the bundle does not state it."""
    debiased: str | None = None
    """How its training corrected for positions."""
    otherwise: str | None = None
    """Identity of its settings but for that and the seed."""
    logits: bool = False
    """Whether its scores are logits of labels 0 and 1, for it was trained with the pointwise sigmoid loss."""


def _trial(method: str, number: int, url: str, config: EvaluateConfig) -> _Trial:
    """What a bundle or committed scores say of themselves."""
    if url == POSITIONS:
        return _Trial(method, number, url, "order shown")
    if method in config.scores:
        return _Trial(method, number, url, "scores")
    bundle = load(url)
    return _Trial(
        method,
        number,
        url,
        bundle.kind,
        labelled_groups=bundle.count("labelled_groups"),
        validation_groups=bundle.count("validation_groups"),
        labels=validate(Provenance, bundle.made_by, url).labels(),
        debiased=debiased(bundle.config),
        otherwise=digest(otherwise(bundle.config)),
        logits=bundle.config.get("loss") == SigmoidConfig().model_dump(mode="json"),
    )


@dataclass
class _Tallies:
    """The sums of each slice, and counts of all groups."""

    slices: dict[str, Tally]
    clicks: dict[int, Tensor] = field(default_factory=dict)
    """See `Values.clicks`."""
    documents: int = 0
    unshown: int = 0
    """Documents without a position."""
    corrected: Gathered = field(default_factory=Gathered)
    """What metrics corrected for positions need."""


def _measure(
    measuring: Measuring, test: Selection, config: EvaluateConfig, file: GroupFile, run: Run, judged: Judged | None
) -> _Tallies:
    """Score the test groups with every bundle, in one pass over the data; queries without a list come last."""
    shape = len(measuring.models), len(_all_metrics(config))
    tallies = _Tallies({name: Tally(*shape) for name in (ALL, *measuring.slicer.names)})
    without = [] if judged is None else [measuring.without_list(*each, shape) for each in judged.without_list()]
    groups = test.n_groups + sum(len(values.gids_Q) for values in without)
    for values in itertools.chain(measuring.on(test, run), without):
        first = tallies.slices[ALL].groups
        blocks_Q = block_numbers(values.gids_Q, first=first, groups=groups)
        tallies.slices[ALL].add(blocks_Q, values.values_QTM)
        for name, member_Q in values.slices.items():
            tally = tallies.slices.setdefault(name, Tally(*shape))
            tally.add(blocks_Q[member_Q], values.values_QTM[member_Q])
        check_few(list(tallies.slices), config.slice_by)
        for t, tally_CB in values.clicks.items():
            tallies.clicks[t] = tallies.clicks.get(t, 0) + tally_CB
        tallies.documents += int(values.documents_Q.sum())
        tallies.unshown += values.unshown
        if values.corrected is not None:
            tallies.corrected.add(blocks_Q, values.corrected)
        file.add(values)
    return tallies


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


def _seen_in_training(config: EvaluateConfig, test: Selection) -> Seen:
    """The values of features in all groups of the training periods, with labels or without."""
    train = Split(data=config.splits.train.data, periods=config.splits.train.periods)
    groups = select(train, labelled=False).serving(test.features, whose="the test split", where="the training split")
    return Seen.of(iterate(groups, docs_per_batch=config.docs_per_batch), groups.features)


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


def _on_clicks(config: EvaluateConfig) -> dict[str, Metric]:
    """The metrics of clicks, by name."""
    metrics = [ClickNDCGConfig(k=k) for k in config.ndcg_at] if config.clicks else []
    return {metric.name: metric for metric in metrics}


def _all_metrics(config: EvaluateConfig) -> dict[str, Metric]:
    """Every metric, those of clicks last, by name."""
    return metrics_of(config) | _on_clicks(config)


def _cutoffs(cls: type[Metric], config: EvaluateSettings) -> tuple[int, ...]:
    """Cut-offs of a metric: its own key's, or else those of NDCG."""
    if not cls.has_cutoff():
        return (1,)  # made once; the value is not used
    return config.precision_at if issubclass(cls, PrecisionConfig | LetorPrecisionConfig) else config.ndcg_at


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


def _summarise(
    tallies: _Tallies,
    trials: Sequence[_Trial],
    test: Selection,
    detector: OutlierDetector,
    config: EvaluateConfig,
    judged: Judged | None,
    correction: Correction | None,
) -> Evaluation:
    """Compute all figures of the report."""
    of_methods = [list(of_method) for _, of_method in itertools.groupby(trials, key=lambda trial: trial.method)]
    calibrations_T = iter([_calibration(tallies, t) for t in range(len(trials))])
    found = _scopes(tallies, of_methods, config)
    methods = tuple(
        MethodResult(
            name=of_method[0].method,
            bundles=tuple(trial.url for trial in of_method),
            kinds=tuple(trial.kind for trial in of_method),
            labelled_groups=tuple(trial.labelled_groups for trial in of_method),
            validation_groups=tuple(trial.validation_groups for trial in of_method),
            labels=tuple(trial.labels for trial in of_method),
            debiased=tuple(trial.debiased for trial in of_method),
            otherwise=tuple(trial.otherwise for trial in of_method),
            calibration=tuple(next(calibrations_T) for _ in of_method),
            slices={slice_: of_slice[k] for slice_, of_slice in found.items()},
        )
        for k, of_method in enumerate(of_methods)
    )
    validation = select(config.splits.validation, labelled=False)
    return Evaluation(
        methods=methods,
        baseline=config.baseline,
        primary=f"ndcg@{config.primary_cutoff}",
        leads=_leads(tallies, of_methods, methods, config),
        relevant_from=config.relevant_from,
        leave_out_constant=config.leave_out_constant,
        policies={name: metric.policy for name, metric in _on_clicks(config).items()}
        | {
            name: metric.policy if judged is None else Judged.policy(metric)
            for name, metric in metrics_of(config).items()
        },
        resamples=config.resamples,
        test=EvaluatedData(
            data=config.splits.test.data,
            periods=tuple(dict.fromkeys(row_group.period for row_group in test.row_groups)),
            hash=test.hash,
            groups=tallies.slices[ALL].groups,
            documents=tallies.documents,
            slices={name: tallies.slices[name].groups for name in found},
            judged=config.judged,
            unlisted=0 if judged is None else len(judged.unlisted),
            unshown=tallies.unshown,
        ),
        conditions=config.slices,
        corrected=None
        if correction is None
        else summarised(
            correction,
            tallies.corrected,
            [(of_method[0].method, [trial.labels for trial in of_method]) for of_method in of_methods],
            baseline=config.baseline,
            samples=config.resamples,
            seed=config.seed,
        ),
        validation_groups=sum(row_group.labelled for row_group in validation.row_groups),
        detector=detector,
    )


def _calibration(tallies: _Tallies, t: int) -> Calibration | None:
    """That of a trial; None if its scores are no logits, or the labels of some documents no clicks."""
    if (tally_CB := tallies.clicks.get(t)) is None:
        return None
    found = calibration(tally_CB)
    return found if found.documents == tallies.documents else None


def _scopes(
    tallies: _Tallies, of_methods: Sequence[Sequence[_Trial]], config: EvaluateConfig
) -> dict[str, list[Scope]]:
    """Summaries and comparisons of each method, by slice: all groups by themselves, and the others as one family."""
    ends = np.cumsum([len(of_method) for of_method in of_methods])[:-1]
    called = [of_method[0].method for of_method in of_methods]
    baseline = None if config.baseline is None else called.index(config.baseline)
    named = [name for name in tallies.slices if "=" not in name]
    by_value = [in_order([n for n in tallies.slices if n.startswith(f"{column}=")]) for column in config.slice_by]
    names = [*named, *itertools.chain(*by_value)]
    methods = len(called) - 1
    found = {}
    for name in names:
        blocks = tallies.slices[name].blocks()
        found[name] = scopes(
            [replace(blocks, sums_BTM=sums_BtM) for sums_BtM in np.split(blocks.sums_BTM, ends, axis=1)],
            list(_all_metrics(config)),
            baseline=baseline,
            samples=config.resamples,
            seed=config.seed,
            labels_K=[[trial.labels for trial in of_method] for of_method in of_methods],
            together=methods if name == ALL else methods * (len(names) - 1),
        )
    return {ALL: found.pop(ALL), **judged_together(found)}


def _leads(
    tallies: _Tallies, of_methods: Sequence[Sequence[_Trial]], methods: Sequence[MethodResult], config: EvaluateConfig
) -> dict[str, Comparison]:
    """The difference of every other method from the best one in the primary metric, over all groups."""
    primary = f"ndcg@{config.primary_cutoff}"
    means = [mean for method in methods if (mean := method.slices[ALL].summaries[primary].mean) is not None]
    if not 1 < len(means) == len(methods):
        return {}  # there are no others, or no group defines the metric
    best, column = int(np.argmax(means)), list(_all_metrics(config)).index(primary)
    blocks, ends = tallies.slices[ALL].blocks(), np.cumsum([len(of_method) for of_method in of_methods])[:-1]
    found = scopes(
        [
            replace(blocks, sums_BTM=sums_BtM[..., [column]], defined_BM=blocks.defined_BM[:, [column]])
            for sums_BtM in np.split(blocks.sums_BTM, ends, axis=1)
        ],
        [primary],
        baseline=best,
        samples=config.resamples,
        seed=config.seed,
        labels_K=[[trial.labels for trial in of_method] for of_method in of_methods],
    )
    return {m.name: of.comparisons[primary] for k, (m, of) in enumerate(zip(methods, found, strict=True)) if k != best}
