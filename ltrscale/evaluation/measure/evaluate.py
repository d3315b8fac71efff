"""Evaluate bundles on the test split: metrics of every group, slices, comparison with a baseline, report.

The sums of every slice are added up as the groups arrive; means, intervals and comparisons follow from them.

Shapes: Q groups, B blocks of groups, T trials of all methods, K methods, M metrics.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
from torch import Tensor

from ltrscale import storage
from ltrscale.bundle import Bundle, load, with_tokens_of
from ltrscale.config import validate
from ltrscale.data.dataset.columns import goals_of
from ltrscale.data.dataset.row_groups import RowGroups
from ltrscale.data.dataset.selection import Selection, scored_row_groups, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.plan import Run, run_here
from ltrscale.data.stream.readers import read_direct
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.corrected import Corrected, Correction, WeightCounts, summarised
from ltrscale.evaluation.measure.drift import ByPeriod
from ltrscale.evaluation.measure.measuring import GroupValues, Judged, Measuring, values_of
from ltrscale.evaluation.measure.outliers import OutlierDetector, Seen, fit_outliers
from ltrscale.evaluation.measure.page import document
from ltrscale.evaluation.measure.periods import measure_periods
from ltrscale.evaluation.measure.report import (
    GROUPS,
    EvaluatedData,
    Evaluation,
    GroupFile,
    MethodResult,
    MethodTrial,
    by_mean,
)
from ltrscale.evaluation.measure.settings import AS_SHOWN, POSITIONS, EvaluateConfig, EvaluateSettings
from ltrscale.evaluation.measure.slices import ALL, Slicer, check_few, in_order
from ltrscale.evaluation.statistics.blocks import Blocks, Tally, block_numbers
from ltrscale.evaluation.statistics.summarise import Comparison, Scope, judged_together, scopes
from ltrscale.progress import log
from ltrscale.ranking.loss import SigmoidConfig
from ltrscale.ranking.metrics import Calibration, calibration
from ltrscale.reports.findings import write_report
from ltrscale.stages.provenance import Provenance


def evaluate(
    config: EvaluateConfig, out: str, *, made_by: Mapping[str, Any], run: Run = run_here, threads: int = 0
) -> Evaluation:
    """Evaluate every bundle on the labelled groups of the test split and commit the figures to a directory.

    The directory holds `report.md` with its picture, `metrics.json` (`Evaluation.read` reads it), `groups.parquet`
    (every metric of every group and trial, null where undefined, and the slices of the group) and `outliers.json`.
    `run` does the work on each part of the test split, here or with Ray, with this many `threads` of a tree model, 0
    for all cores. Memory does not grow with the number of groups, and the figures do not depend on `run`.

    Raises:
        InputError: a bundle or a period's scores are missing, a bundle was made for other features or gives scores that
            are not finite, or a slice names a column that does not exist.
    """
    basis = _Basis.read(config)
    measuring = basis.measuring(threads)
    measuring.open()
    with storage.Commit(out) as commit:
        with commit.file(GROUPS) as path, GroupFile(path, basis.metrics, basis.methods) as file:
            tallies = _tallied(measuring, basis, file, run)
        evaluation = _computed(tallies, basis)
        write_report(commit, evaluation, document(evaluation, out))
        commit.write({"outliers.json": f"{basis.detector.model_dump_json(indent=1)}\n".encode()})
        commit.finish({"made_by": made_by})
    return evaluation


def correction_of(settings: EvaluateSettings, test: Selection) -> Correction | None:
    """The correction of metrics for positions; None for no correction.

    Raises:
        InputError: test groups have no positions, but the baseline or the correction needs them; or as
            `Correction.read`.
    """
    needing = [f"baseline {AS_SHOWN}"] if settings.baseline == AS_SHOWN else []
    needing += [] if settings.propensities is None else ["propensities"]
    if needing and not _has_positions(test):
        raise InputError(
            f"evaluate.{needing[0]}: {test.row_groups[0].file.url} has no positions; map the column in prepare as "
            "columns.positions, or leave it out"
        )
    return None if settings.propensities is None else Correction.read(settings.propensities, settings.ndcg_at)


def _has_positions(selection: Selection) -> bool:
    """Whether any group has positions; reads until it finds one."""
    for _, of_data_set in itertools.groupby(selection.row_groups, key=lambda row_group: row_group.file.gid_base):
        for table in read_direct(RowGroups.from_iterable(of_data_set), [POSITIONS]):
            if POSITIONS not in table.column_names:
                break  # a data set has the column in all files or in none
            if table[POSITIONS].null_count < len(table):
                return True
    return False


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


@dataclass(frozen=True, eq=False)
class _Basis:
    """What an evaluation measures, and by which rules."""

    config: EvaluateConfig
    test: Selection
    methods: Mapping[str, tuple[MethodTrial, ...]]
    detector: OutlierDetector
    judged: Judged | None
    correction: Correction | None

    @classmethod
    def read(cls, config: EvaluateConfig) -> Self:
        """Open what the config names; the test groups have the tokens that the bundles read."""
        bundles = {url: load(url) for url in config.bundles}
        test = with_tokens_of(select(config.splits.test, labelled=True), bundles.values())
        return cls(
            config,
            test,
            _trials_of(config, bundles, test),
            fit_detector(config, config.splits.validation, test),
            None if config.judged is None else Judged.read(config.judged, config.splits.test),
            correction_of(config, test),
        )

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, those of clicks last."""
        return [*self.config.measured, *self.config.measured_on_clicks]

    @property
    def trials(self) -> list[MethodTrial]:
        """The trials of all methods, one method after the other."""
        return list(itertools.chain(*self.methods.values()))

    def measuring(self, threads: int) -> Measuring:
        """The measuring of each part of the test split, here or in another process."""
        config, test, trials = self.config, self.test, self.trials
        return Measuring(
            models=tuple(trial.url for trial in trials),
            scores={url: scored_row_groups(url, test.row_groups) for url in config.scores.values()},
            slicer=Slicer.make(
                config.slices,
                config.sliced_by,
                detector=self.detector,
                selection=test,
                relevant_from=config.relevant_from,
                training=partial(_seen_in_training, config, test),
            ),
            metrics=partial(values_of, metrics=config.measured, settings=config, judged=self.judged),
            features=test.features,
            docs_per_batch=config.docs_per_batch,
            threads=threads,
            logits=tuple(t for t, trial in enumerate(trials) if trial.logits),
            on_clicks=partial(values_of, metrics=config.measured_on_clicks, settings=config) if config.clicks else None,
            correction=self.correction,
            every_list=self.needs_every_list,
        )

    @property
    def needs_every_list(self) -> bool:
        """Whether a figure needs scores of lists without a label above 0; those of clicks and calibration do."""
        return self.config.metrics_need_every_list or self.config.clicks or any(trial.logits for trial in self.trials)

    def scopes(
        self, slices: Sequence[Blocks], metrics: Sequence[str], *, baseline: str | None, together: int | None = None
    ) -> list[dict[str, Scope]]:
        """By slice, the summaries and comparisons of each method, from the sums of all trials."""
        names, ends = list(self.methods), np.cumsum([len(trials) for trials in self.methods.values()])[:-1]
        found = scopes(
            [
                [replace(blocks, sums_BTM=sums_BtM) for sums_BtM in np.split(blocks.sums_BTM, ends, axis=1)]
                for blocks in slices
            ],
            metrics,
            baseline=None if baseline is None else names.index(baseline),
            samples=self.config.resamples,
            seed=self.config.seed,
            labels_K=[[trial.labels for trial in trials] for trials in self.methods.values()],
            together=together,
        )
        return [dict(zip(names, scopes_K, strict=True)) for scopes_K in found]


def _trials_of(
    config: EvaluateConfig, bundles: Mapping[str, Bundle], test: Selection
) -> dict[str, tuple[MethodTrial, ...]]:
    """The trials of each method, in the order of the report; the order that was shown is last, if there is one."""
    scores = {name: (MethodTrial(url=url, kind="scores"),) for name, url in config.scores.items()}
    models = {name: tuple(_trial_of(bundles[url]) for url in urls) for name, urls in config.models.items()}
    shown = config.as_shown and _has_positions(test)
    return scores | models | ({AS_SHOWN: (MethodTrial(url=POSITIONS, kind="order shown"),)} if shown else {})


def _trial_of(bundle: Bundle) -> MethodTrial:
    """The trial of a bundle, with what it states about itself."""
    config = bundle.config
    return MethodTrial(
        url=bundle.url,
        kind=bundle.kind,
        labelled_groups=bundle.count("labelled_groups"),
        validation_groups=bundle.count("validation_groups"),
        labels=validate(Provenance, bundle.made_by, bundle.url).labels(),
        debiased=_debiased(config),
        logits=config.get("loss") == SigmoidConfig().model_dump(mode="json"),
    )


def _debiased(config: Mapping[str, Any]) -> str | None:
    """How the training of a bundle with this config corrected for positions, such as `dla`; None if it did not."""
    return "unbiased" if config.get("unbiased") else (config.get("debias") or {}).get("kind")


def _seen_in_training(config: EvaluateConfig, test: Selection) -> Seen:
    """The values of features in all groups of the training periods, with labels or without."""
    train = Split(data=config.splits.train.data, periods=config.splits.train.periods)
    groups = select(train, labelled=False).serving(test.features, whose="the test split", where="the training split")
    return Seen.from_groups(iterate(groups, docs_per_batch=config.docs_per_batch), groups.features)


@dataclass
class _Tallies:
    """The sums of each slice, and counts of all groups, from which all figures follow."""

    slices: dict[str, Tally]
    clicks: dict[int, Tensor] = field(default_factory=dict)
    """Tallies of scores against clicks, by trial."""
    documents: int = 0
    unshown: int = 0
    """Documents without a position."""
    weights: WeightCounts = field(default_factory=WeightCounts)
    """Relevant documents, and the sums of their weights, of the metrics corrected for positions."""
    corrected: Tally | None = None
    """Sums of these metrics; None if they are not measured."""

    def add(self, values: GroupValues, *, groups: int, slice_by: Sequence[str]) -> None:
        """Add groups, of `groups` in all; InputError if a column of `slice_by` has too many values."""
        blocks_Q = block_numbers(values.gids_Q, first=self.slices[ALL].groups, groups=groups)
        values_QTM = values.values_TMQ.transpose(2, 0, 1)
        self.slices[ALL].add(blocks_Q, Blocks.from_values(values_QTM))
        for name, member_Q in values.slices.items():
            tally = self.slices.setdefault(name, Tally(*values_QTM.shape[1:]))
            tally.add(blocks_Q[member_Q], Blocks.from_values(values_QTM[member_Q]))
        check_few(list(self.slices), slice_by)
        for t, tally_CB in values.clicks.items():
            self.clicks[t] = self.clicks.get(t, 0) + tally_CB
        self.documents += int(values.documents_Q.sum())
        self.unshown += values.unshown
        if (sums := values.corrected) is not None:
            self.corrected = self.corrected or Tally(*sums.blocks.sums_BTM.shape[1:])
            self.corrected.add(blocks_Q, sums.blocks)
            self.weights = self.weights.plus(sums.counts)

    def calibration(self, t: int) -> Calibration | None:
        """The calibration of a trial; None if its scores are not logits, or if some labels are not clicks."""
        if (tally_CB := self.clicks.get(t)) is None:
            return None
        calibrated = calibration(tally_CB)
        return calibrated if calibrated.documents == self.documents else None


def _tallied(measuring: Measuring, basis: _Basis, file: GroupFile, run: Run) -> _Tallies:
    """Score the test groups with every bundle, in one pass over the data; queries without a list come last."""
    shape = len(measuring.models), len(basis.metrics)
    tallies = _Tallies({name: Tally(*shape) for name in (ALL, *measuring.slicer.names)})
    without_list = [] if basis.judged is None else basis.judged.without_list()
    unlisted = [measuring.without_list(*each) for each in without_list]
    groups = basis.test.n_groups + sum(len(values.gids_Q) for values in unlisted)
    for values in itertools.chain(measuring.on(basis.test, run), unlisted):
        tallies.add(values, groups=groups, slice_by=basis.config.sliced_by)
        file.add(values)
    return tallies


def _computed(tallies: _Tallies, basis: _Basis) -> Evaluation:
    config, judged = basis.config, basis.judged
    policies = {
        name: metric.policy if judged is None else Judged.policy(metric) for name, metric in config.measured.items()
    }
    policies |= {name: metric.policy for name, metric in config.measured_on_clicks.items()}
    by_slice = _by_slice(tallies, basis)
    calibrations = {trial.url: tallies.calibration(t) for t, trial in enumerate(basis.trials)}
    results = tuple(
        MethodResult(
            name=name,
            trials=tuple(trial.replace(calibration=calibrations[trial.url]) for trial in trials),
            slices={slice_: scopes_K[k] for slice_, scopes_K in by_slice.items()},
        )
        for k, (name, trials) in enumerate(basis.methods.items())
    )
    drift, drift_failed = _drift(config, results)
    return Evaluation(
        methods=results,
        baseline=config.baseline,
        primary=config.primary,
        leads=_leads_of_best(tallies, results, basis),
        leave_out_constant=config.leave_out_constant,
        policies=policies,
        resamples=config.resamples,
        test=EvaluatedData(
            data=config.splits.test.data,
            periods=tuple(dict.fromkeys(file.period for file in basis.test.row_groups.own_files)),
            hash=basis.test.hash,
            groups=tallies.slices[ALL].groups,
            documents=tallies.documents,
            slices={name: tallies.slices[name].groups for name in by_slice},
            goals=goals_of(config.splits.test.labels),
            judged=config.judged,
            unlisted=0 if judged is None else len(judged.unlisted),
            unshown=tallies.unshown,
        ),
        conditions=config.slices,
        corrected=_corrected(tallies, basis),
        detector=basis.detector,
        by_period=drift,
        drift_failed=drift_failed,
    )


def _corrected(tallies: _Tallies, basis: _Basis) -> Corrected | None:
    if (correction := basis.correction) is None or tallies.corrected is None:
        return None
    (of_methods,) = basis.scopes([tallies.corrected.blocks()], correction.figures, baseline=basis.config.baseline)
    return summarised(correction, tallies.weights, of_methods)


def _drift(config: EvaluateConfig, results: Sequence[MethodResult]) -> tuple[ByPeriod | None, str | None]:
    """The drift of the test periods, if requested, or why it cannot be measured: this costs no other figure."""
    if not config.by_period:
        return None, None
    try:
        return measure_periods(config, results), None
    except InputError as error:
        log.warning("evaluate: drift is not measured: %s", error)
        return None, str(error)


def _by_slice(tallies: _Tallies, basis: _Basis) -> dict[str, list[Scope]]:
    """Summaries and comparisons of each method, by slice: all groups alone, and the other slices as one family."""
    config = basis.config
    with_names = [name for name in tallies.slices if "=" not in name]
    by_value = [in_order([n for n in tallies.slices if n.startswith(f"{column}=")]) for column in config.sliced_by]
    names = [*with_names, *itertools.chain(*by_value)]
    slices = basis.scopes(
        [tallies.slices[name].blocks() for name in names],
        basis.metrics,
        baseline=config.baseline,
        together=(len(basis.methods) - 1) * max(1, len(names) - 1),
    )
    by_slice = {name: list(of_methods.values()) for name, of_methods in zip(names, slices, strict=True)}
    return {ALL: by_slice.pop(ALL), **judged_together(by_slice)}


def _leads_of_best(tallies: _Tallies, results: Sequence[MethodResult], basis: _Basis) -> dict[str, Comparison]:
    """How all other methods, including the order shown, differ from the best in the primary metric on all groups."""
    primary = basis.config.primary
    means = [mean for method in results if (mean := method.slices[ALL].summaries[primary].mean) is not None]
    if not 1 < len(means) == len(results):
        return {}  # there is no other method, or no group defines the metric
    best, column = by_mean(results, primary)[0].name, basis.metrics.index(primary)
    blocks = tallies.slices[ALL].blocks()
    blocks = replace(blocks, sums_BTM=blocks.sums_BTM[..., [column]], defined_BM=blocks.defined_BM[:, [column]])
    (of_methods,) = basis.scopes([blocks], [primary], baseline=best)
    return {name: scope.comparisons[primary] for name, scope in of_methods.items() if scope.comparisons}
