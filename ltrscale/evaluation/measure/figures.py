"""All figures of an evaluation: sums of every slice as the groups come, then means, intervals and comparisons.

Shapes: Q groups, B blocks of groups, T trials of all methods, K methods, M metrics.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from ltrscale.data.dataset.selection import Selection, select
from ltrscale.evaluation.measure.corrected import Corrected, Correction, Gathered, summarised
from ltrscale.evaluation.measure.judged import Judged
from ltrscale.evaluation.measure.metrics import all_metrics, clicks_metrics, metrics_of
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.parts import GroupValues
from ltrscale.evaluation.measure.report import EvaluatedData, Evaluation, MethodResult
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.evaluation.measure.slices import ALL, check_few, in_order
from ltrscale.evaluation.measure.trials import MethodTrial
from ltrscale.evaluation.statistics.blocks import Blocks, Tally, block_numbers
from ltrscale.evaluation.statistics.summarise import Comparison, Scope, judged_together, scopes
from ltrscale.ranking.calibration import Calibration, calibration


@dataclass
class Tallies:
    """The sums of each slice, and counts of all groups."""

    slices: dict[str, Tally]
    clicks: dict[int, Tensor] = field(default_factory=dict)
    """See `GroupValues.clicks`."""
    documents: int = 0
    unshown: int = 0
    """Documents without a position."""
    corrected: Gathered = field(default_factory=Gathered)
    """What metrics corrected for positions need."""

    def add(self, values: GroupValues, *, groups: int, slice_by: Sequence[str]) -> None:
        """Add the groups of a row group; `groups` are there in all.

        Raises:
            InputError: a column of `slice_by` has too many values.
        """
        blocks_Q = block_numbers(values.gids_Q, first=self.slices[ALL].groups, groups=groups)
        self.slices[ALL].add(blocks_Q, values.values_QTM)
        for name, member_Q in values.slices.items():
            tally = self.slices.setdefault(name, Tally(*values.values_QTM.shape[1:]))
            tally.add(blocks_Q[member_Q], values.values_QTM[member_Q])
        check_few(list(self.slices), slice_by)
        for t, tally_CB in values.clicks.items():
            self.clicks[t] = self.clicks.get(t, 0) + tally_CB
        self.documents += int(values.documents_Q.sum())
        self.unshown += values.unshown
        if values.corrected is not None:
            self.corrected.add(blocks_Q, values.corrected)

    def calibration(self, t: int) -> Calibration | None:
        """That of a trial; None if its scores are no logits, or the labels of some documents no clicks."""
        if (tally_CB := self.clicks.get(t)) is None:
            return None
        calibrated = calibration(tally_CB)
        return calibrated if calibrated.documents == self.documents else None


def figures(
    tallies: Tallies,
    trials: Sequence[MethodTrial],
    test: Selection,
    config: EvaluateConfig,
    *,
    detector: OutlierDetector,
    judged: Judged | None,
    correction: Correction | None,
) -> Evaluation:
    """Compute all figures of the report."""
    methods = {name: list(of) for name, of in itertools.groupby(trials, key=lambda trial: trial.method)}
    by_slice = _by_slice(tallies, methods, config)
    calibrations_T = iter([tallies.calibration(t) for t in range(len(trials))])
    results = tuple(
        MethodResult(
            name=name,
            bundles=tuple(trial.url for trial in of_method),
            kinds=tuple(trial.kind for trial in of_method),
            labelled_groups=tuple(trial.labelled_groups for trial in of_method),
            validation_groups=tuple(trial.validation_groups for trial in of_method),
            labels=tuple(trial.labels for trial in of_method),
            debiased=tuple(trial.debiased for trial in of_method),
            otherwise=tuple(trial.otherwise for trial in of_method),
            calibration=tuple(next(calibrations_T) for _ in of_method),
            slices={slice_: scopes_K[k] for slice_, scopes_K in by_slice.items()},
        )
        for k, (name, of_method) in enumerate(methods.items())
    )
    validation = select(config.splits.validation, labelled=False)
    return Evaluation(
        methods=results,
        baseline=config.baseline,
        primary=config.primary,
        leads=_leads(tallies, methods, results, config),
        relevant_from=config.relevant_from,
        leave_out_constant=config.leave_out_constant,
        policies=_policies(config, judged),
        resamples=config.resamples,
        test=EvaluatedData(
            data=config.splits.test.data,
            periods=tuple(dict.fromkeys(row_group.period for row_group in test.row_groups)),
            hash=test.hash,
            groups=tallies.slices[ALL].groups,
            documents=tallies.documents,
            slices={name: tallies.slices[name].groups for name in by_slice},
            judged=config.judged,
            unlisted=0 if judged is None else len(judged.unlisted),
            unshown=tallies.unshown,
        ),
        conditions=config.slices,
        corrected=_corrected(tallies, methods, config, correction),
        validation_groups=sum(row_group.labelled for row_group in validation.row_groups),
        detector=detector,
    )


_Methods = Mapping[str, Sequence[MethodTrial]]
"""The trials of each method, by its name and in the order of all trials."""


def _scopes(
    blocks: Blocks,
    metrics: Sequence[str],
    methods: _Methods,
    config: EvaluateConfig,
    *,
    baseline: int | None,
    together: int | None = None,
) -> list[Scope]:
    """Summaries and comparisons of each method from the sums of all trials."""
    ends = np.cumsum([len(of_method) for of_method in methods.values()])[:-1]
    return scopes(
        [replace(blocks, sums_BTM=sums_BtM) for sums_BtM in np.split(blocks.sums_BTM, ends, axis=1)],
        metrics,
        baseline=baseline,
        samples=config.resamples,
        seed=config.seed,
        labels_K=[[trial.labels for trial in of_method] for of_method in methods.values()],
        together=together,
    )


def _by_slice(tallies: Tallies, methods: _Methods, config: EvaluateConfig) -> dict[str, list[Scope]]:
    """Summaries and comparisons of each method, by slice: all groups by themselves, and the others as one family."""
    baseline = None if config.baseline is None else list(methods).index(config.baseline)
    with_names = [name for name in tallies.slices if "=" not in name]
    by_value = [in_order([n for n in tallies.slices if n.startswith(f"{column}=")]) for column in config.slice_by]
    names = [*with_names, *itertools.chain(*by_value)]
    others = len(methods) - 1
    by_slice = {
        name: _scopes(
            tallies.slices[name].blocks(),
            list(all_metrics(config)),
            methods,
            config,
            baseline=baseline,
            together=others if name == ALL else others * (len(names) - 1),
        )
        for name in names
    }
    return {ALL: by_slice.pop(ALL), **judged_together(by_slice)}


def _leads(
    tallies: Tallies, methods: _Methods, results: Sequence[MethodResult], config: EvaluateConfig
) -> dict[str, Comparison]:
    """The difference of every other method from the best one in the primary metric, over all groups."""
    primary = config.primary
    means = [mean for method in results if (mean := method.slices[ALL].summaries[primary].mean) is not None]
    if not 1 < len(means) == len(results):
        return {}  # there are no others, or no group defines the metric
    best, column = int(np.argmax(means)), list(all_metrics(config)).index(primary)
    blocks = tallies.slices[ALL].blocks()
    blocks = replace(blocks, sums_BTM=blocks.sums_BTM[..., [column]], defined_BM=blocks.defined_BM[:, [column]])
    scopes_K = _scopes(blocks, [primary], methods, config, baseline=best)
    return {
        name: scope.comparisons[primary] for name, scope in zip(methods, scopes_K, strict=True) if scope.comparisons
    }


def _policies(config: EvaluateConfig, judged: Judged | None) -> dict[str, str]:
    """What the formula of each metric leaves open."""
    on_clicks = {name: metric.policy for name, metric in clicks_metrics(config).items()}
    on_labels = metrics_of(config).items()
    return on_clicks | {name: metric.policy if judged is None else Judged.policy(metric) for name, metric in on_labels}


def _corrected(
    tallies: Tallies, methods: _Methods, config: EvaluateConfig, correction: Correction | None
) -> Corrected | None:
    """The metrics corrected for positions, if they are asked for."""
    if correction is None:
        return None
    return summarised(
        correction,
        tallies.corrected,
        [(name, [trial.labels for trial in of_method]) for name, of_method in methods.items()],
        baseline=config.baseline,
        samples=config.resamples,
        seed=config.seed,
    )
