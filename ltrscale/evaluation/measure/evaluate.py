"""Evaluate bundles on the test split: metrics of every group, slices, comparison with a baseline, report.

Shapes: Q groups, T trials (bundles of all methods), M metrics.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import Run, run_here
from ltrscale.evaluation.measure.corrected import Correction
from ltrscale.evaluation.measure.figures import Tallies, figures
from ltrscale.evaluation.measure.group_file import GROUPS, GroupFile
from ltrscale.evaluation.measure.judged import Judged, judged_split
from ltrscale.evaluation.measure.metrics import all_metrics, clicks_metrics, metrics_of, values_of
from ltrscale.evaluation.measure.outliers import OutlierDetector, fit_outliers
from ltrscale.evaluation.measure.page import document
from ltrscale.evaluation.measure.parts import Measuring, committed_row_groups
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.seen import Seen
from ltrscale.evaluation.measure.settings import EvaluateConfig, EvaluateSettings
from ltrscale.evaluation.measure.shown import AS_SHOWN, check_shown
from ltrscale.evaluation.measure.slices import ALL, Slicer
from ltrscale.evaluation.measure.trials import MethodTrial, trials_of
from ltrscale.evaluation.statistics.blocks import Tally
from ltrscale.progress import Report
from ltrscale.reports.findings import print_report, write_report
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.on_ray import run_with_ray
from ltrscale.stages.stage import Origin, Stage, check_unseen, content_of, hashes_of, scored_by


class EvaluateJob(Stage):
    """Evaluate bundles on the test split, with slices and significance."""

    stage: ClassVar = "evaluate"
    out: Operational[str]
    """Directory of the report."""
    evaluate: EvaluateConfig
    ray: Operational[bool] = False
    """Measure parts of the test split in parallel on a Ray cluster, a CPU each; the figures are the same."""

    def run(self, *, show: bool = True) -> bool:
        """Evaluate, and print the table if `show` is set."""
        ran = super().run()
        if show:
            print_report(self.out, document(Evaluation.read(self.out), self.out))
        return ran

    def check(self) -> None:
        """Refuse splits that overlap, and bundles that have seen test periods."""
        config = self.evaluate
        check_disjoint(config.splits)
        for url in [*config.bundles, *(url for split in config.scored for url in scored_by(split))]:
            check_unseen(url, config.splits.test)

    def inputs(self) -> dict[str, str]:
        """The inputs by their types, and the scores, judgements and propensities of the test periods."""
        config = self.evaluate
        judged = [] if config.judged is None else [judged_split(config.judged, config.splits.test)]
        clicks = [] if config.propensities is None else [config.propensities.clicks]
        return hashes_of(self, *config.scored, *judged) | {url: content_of(url) for url in clicks}

    def work(self, origin: Origin, report: Report) -> None:
        """Evaluate, and commit the report."""
        if not self.ray:
            evaluate(self.evaluate, self.out, made_by=origin, report=report)
            return
        with ray_cluster(1):
            evaluate(self.evaluate, self.out, made_by=origin, report=report, run=run_with_ray, threads=1)


def evaluate(
    config: EvaluateConfig,
    out: str,
    *,
    made_by: Mapping[str, Any],
    report: Report,
    run: Run = run_here,
    threads: int = 0,
) -> Evaluation:
    """Evaluate every bundle on the labelled groups of the test split and commit the figures to a directory.

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
    trials = trials_of(config, test)
    detector = fit_detector(config, config.splits.validation, test)
    judged = None if config.judged is None else Judged.read(config.judged, config.splits.test)
    correction = correction_of(config, test)
    measuring = _measuring(config, test, trials, detector, judged, correction, threads)
    test = measuring.open(test)
    with storage.Commit(out) as commit:
        with commit.file(GROUPS) as path, GroupFile(path, list(all_metrics(config)), trials) as file:
            tallies = _measure(measuring, test, config, file, run, judged)
        evaluation = figures(tallies, trials, test, config, detector=detector, judged=judged, correction=correction)
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


def _measuring(
    config: EvaluateConfig,
    test: Selection,
    trials: Sequence[MethodTrial],
    detector: OutlierDetector,
    judged: Judged | None,
    correction: Correction | None,
    threads: int,
) -> Measuring:
    """What measures each part of the test split, here or in another process."""
    return Measuring(
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
        on_clicks=partial(values_of, metrics=clicks_metrics(config), settings=config) if config.clicks else None,
        correction=correction,
    )


def _measure(
    measuring: Measuring, test: Selection, config: EvaluateConfig, file: GroupFile, run: Run, judged: Judged | None
) -> Tallies:
    """Score the test groups with every bundle, in one pass over the data; queries without a list come last."""
    shape = len(measuring.models), len(all_metrics(config))
    tallies = Tallies({name: Tally(*shape) for name in (ALL, *measuring.slicer.names)})
    without = [] if judged is None else [measuring.without_list(*each, shape) for each in judged.without_list()]
    groups = test.n_groups + sum(len(values.gids_Q) for values in without)
    for values in itertools.chain(measuring.on(test, run), without):
        tallies.add(values, groups=groups, slice_by=config.slice_by)
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
