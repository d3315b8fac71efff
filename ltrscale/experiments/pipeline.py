"""The pipeline: from a raw log to an evaluated comparison of methods, stage by stage.

Every method is trained once for each seed, which determines the sample of labelled groups, the initial weights and the
data order. All methods of a seed see the same labelled groups. Stages that are up to date are skipped, so an
interrupted or changed pipeline runs only the remaining stages.

With `folds` everything runs once for each fold of a collection, below `out/FOLD`, and a summary compares the methods
over the test groups of all folds. The commands that a pipeline or a week logs as the next ones are here too.
"""

import itertools
import posixpath
import re
import shlex
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.bundle import load
from ltrscale.config import Config, Operational, validate
from ltrscale.data.dataset.columns import GoalName, goal_column
from ltrscale.data.dataset.disjoint import check_splits
from ltrscale.data.dataset.manifest import one_view, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits, SplitsWithTest, with_relative_named
from ltrscale.derive.relabel import RelabelConfig, RelabelJob
from ltrscale.derive.rewrite import columns_in
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate import correction_of
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.settings import AS_SHOWN, EvaluateConfig, EvaluateSettings
from ltrscale.evaluation.studies.summaries import FoldSummary, FrontSummary
from ltrscale.experiments.methods.base import MethodName, SeedRun, check_methods
from ltrscale.experiments.methods.composed import AnyMethod, with_preset
from ltrscale.experiments.refit import RefitJob, RefitSettings
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.progress import called, log
from ltrscale.runtime.launch import cluster_for
from ltrscale.runtime.workers import ONE, Workers
from ltrscale.simulate.synthetic import SyntheticLogConfig
from ltrscale.stages.runs import recorded
from ltrscale.storage import join
from ltrscale.training.settings import Preset

FOLD = "{fold}"
"""Placeholder for the fold's name in a pipeline's texts."""
_EVALUATION, _SUMMARY = "evaluation", "summary"


class LearnFrom(Config):
    """Labels for some methods to learn, other than those that all are tested on."""

    relabel: RelabelConfig | None = None
    """Simulate feedback on the pipeline's data set, or clean clicks, for these methods alone; empty keeps its
    labels."""
    splits: Splits
    """Their training and validation groups; splits that name no data set read this one."""


class PipelineJob(Config):
    """A comparison of methods on one data set."""

    fixed: ClassVar = {"match": None}

    out: Operational[str]
    """Directory for everything: `data/`, `relabelled/`, `learn-from/NAME/`, `seed-0/METHOD/...`,
    `evaluation/report.md`, `final/METHOD`; with folds all of these below `FOLD/`, and `summary/report.md`."""
    folds: tuple[MethodName, ...] = ()
    """Names of a collection's folds, such as [Fold1, Fold2, Fold3, Fold4, Fold5]: all is done for each of them, with
    its name in place of `{fold}` in every text, and a summary compares over all."""
    synthetic: SyntheticLogConfig | None = None
    """Make a synthetic log and prepare it."""
    prepare: PrepareConfig | None = None
    """How the raw log becomes a data set."""
    data: str | None = None
    """A data set directory that jobs.prepare made, instead of `prepare`."""
    relabel: RelabelConfig | None = None
    """Append exact-match features to the prepared data set, simulate feedback, or clean clicks."""
    splits: Splits
    """Periods for training, validation and test; splits that name no data set read this one. Without `test` methods
    are trained, and not compared."""
    learn_from: dict[MethodName, LearnFrom] = Field(default_factory=dict)
    """Other labels, such as clicks, for the methods that name them as `learns_from`; a network may then start from the
    ranker of such a method (`starts_from`) and learn those of `splits`."""
    seeds: tuple[int, ...] = (0,)
    """One model of every method for each seed; they replace the seeds of the stages."""
    pretrain_once: bool = False
    """Pretrain with the first seed alone, for all: much faster, but intervals leave out the chance in pretraining."""
    preset: Preset | None = None
    """The preset of every method that names none: the same features for trees and networks, pretrained or not."""
    methods: dict[MethodName, AnyMethod] = Field(min_length=1)
    """Methods to compare, by their name in the table."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Metrics, baseline and outliers."""
    evaluate_on: tuple[GoalName, ...] = Field(("labels",), min_length=1)
    """Labels of the test split, one evaluation for each: `labels`, goals by name, or `relevance`, the labels before
    relabelling. Several goals also make `front/report.md`: which methods no other dominates."""
    refit: RefitSettings | None = None
    """Final models: methods to train once more, with the first seed, on the training and validation groups together,
    for as many epochs or trees as validation chose: `final/METHOD`."""
    workers: Workers = ONE
    """Data-parallel workers of the neural stages."""

    @model_validator(mode="before")
    @classmethod
    def _is_not_of_crossval(cls, values: Any) -> Any:
        """Refuse old configs of jobs.crossval."""
        if isinstance(values, Mapping) and "pipeline" in values:
            raise ValueError("pipeline: write what is below it beside folds; jobs.crossval is jobs.pipeline with folds")
        return values

    @model_validator(mode="before")
    @classmethod
    def _one_preset_for_all(cls, values: Any) -> Any:
        """Give methods without a preset that of the comparison."""
        if not isinstance(values, Mapping) or values.get("preset") not in typing.get_args(Preset):
            return values  # no preset, or an unknown one, which field validation refuses
        methods = values.get("methods")
        return {**values, "methods": with_preset(values["preset"], methods)} if isinstance(methods, Mapping) else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        as_shown = (AS_SHOWN,) if self.evaluate.as_shown else ()
        if as_shown and AS_SHOWN in self.methods:
            raise ValueError(f"methods: {AS_SHOWN} is the order that was shown; rename it, or unset evaluate.as_shown")
        if self.splits.test is not None and self.evaluate.baseline not in (None, *self.methods, *as_shown):
            names = ", ".join(self.methods)
            raise ValueError(
                f"evaluate.baseline {self.evaluate.baseline!r} is not among the methods {names}; or set null"
            )
        if (self.prepare is None) == (self.data is None):
            raise ValueError("set data to a prepared data set, or prepare to make one; not both")
        if self.synthetic is not None and self.prepare is None:
            raise ValueError("synthetic makes a log that must be prepared; set prepare instead of data")
        if self.splits.test is not None and self.splits.test.labels != "labels":
            raise ValueError("splits.test.labels: leave it out; evaluate_on says which labels methods are tested on")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds must be different numbers, at least one")
        if len(set(self.evaluate_on)) < len(self.evaluate_on):
            raise ValueError("evaluate_on names a column twice")
        check_methods(self.methods, self.workers, learn_from=self.learn_from)
        if self.refit is not None:
            self.refit.check(self.methods)
            if self.refit.test and self.splits.test is None:
                raise ValueError("refit.test: there is no test split to learn from; leave it out")
        self._check_folds()
        return self

    def _check_folds(self) -> None:
        if not self.folds:
            return
        if self.splits.test is None:
            raise ValueError("splits.test: folds are compared on test groups; name them")
        if not 1 < len(set(self.folds)) == len(self.folds) or any(fold.startswith(_SUMMARY) for fold in self.folds):
            raise ValueError(f"folds need two or more different names that do not begin with {_SUMMARY}")
        values = self.model_dump(mode="json", exclude={"out", "folds"})
        if _with_fold(values, self.folds[0]) == _with_fold(values, self.folds[1]):
            raise ValueError(
                f"no text has {FOLD}, so that all folds would be the same; write it where the folds differ, such as "
                f"prepare.inputs: data/MQ2008/{FOLD}/train.txt"
            )

    def run(self) -> None:
        """Prepare, relabel, train every method with every seed, evaluate; skips stages that are up to date.

        Raises:
            InputError: as the stages; a split that cannot be read is reported before training.
        """
        with recorded(self.out, self, "pipeline"), cluster_for(self.workers):  # one cluster for all stages
            if not self.folds:
                self._run_stages()
                return
            for fold in self.folds:
                log.info("fold %s", fold)
                self.for_fold(fold).run()
            for column in self.evaluate_on:
                out, evaluated = join(self.out, _of_labels(_SUMMARY, column)), _of_labels(_EVALUATION, column)
                evaluations = {fold: join(self.out, fold, evaluated) for fold in self.folds}
                FoldSummary(out=out, evaluations=evaluations, seed=self.evaluate.seed).run()

    def for_fold(self, fold: str) -> "PipelineJob":
        """The pipeline of one fold."""
        values = _with_fold(self.model_dump(mode="json", exclude={"out", "folds"}), fold)
        return validate(PipelineJob, {**values, "out": join(self.out, fold)}, f"fold {fold}")

    # the stages of a pipeline without folds, in their order

    def _run_stages(self) -> None:
        data = self.data or join(self.out, "data")
        if self.prepare is not None:
            PrepareJob(out=data, prepare=self.prepare, synthetic=self.synthetic).run()
        data = _relabelled(data, self.relabel, join(self.out, "relabelled"))
        sources = {
            name: source.splits.on(_relabelled(data, source.relabel, join(self.out, "learn-from", name)))
            for name, source in self.learn_from.items()
        }
        with one_view():  # only now, because the stages above make the data sets
            splits = with_relative_named(self.splits.on(data), "splits")
            learn_from = {name: with_relative_named(of, f"learn_from.{name}.splits") for name, of in sources.items()}
            self._check_data(splits, learn_from)
            models = self._train(splits, learn_from)
            self._evaluate(models, splits)
            if self.refit is not None:
                test_too = splits.test if self.refit.test else None
                for name in self.refit.methods:
                    bundle, out = models[name][0], self._final(name)
                    RefitJob(out=out, bundle=bundle, also=test_too, workers=self.workers).run()
            self._log_next(data, {name: bundles[0] for name, bundles in models.items()})

    def _check_data(self, splits: Splits, learn_from: Mapping[str, Splits]) -> None:
        """Refuse before training what would fail after it."""
        check_splits(splits)
        for url in splits.test.data if splits.test else ():
            dataset = open_dataset(url)
            columns = {goal_column(name, dataset.manifest.goals) for name in self.evaluate_on}
            if missing := columns - {*columns_in(dataset)}:
                raise InputError(
                    f"evaluate_on: {url} has no {min(missing)!r}, which relabelled data sets have; leave it out"
                )
        if splits.test is not None:
            correction_of(self.evaluate, select(splits.test, labelled=True))
        for source in learn_from.values():
            check_splits(source.replace(test=splits.test))
        for seed, (name, method) in itertools.product(self.seeds, self.methods.items()):
            try:
                method.check_inputs(splits.drawn(seed))
            except InputError as error:
                raise InputError(f"methods.{name}.{error}") from error

    def _train(self, splits: Splits, learn_from: Mapping[str, Splits]) -> dict[str, list[str]]:
        """Train every method with every seed; returns the bundles of each method, by seed."""
        models: dict[str, list[str]] = {name: [] for name in self.methods}
        encoders: SeedRun | None = None
        for seed in self.seeds:
            others = {name: source.drawn(seed) for name, source in learn_from.items()}
            out = join(self.out, f"seed-{seed}")
            run = SeedRun(self.methods, splits.drawn(seed), seed, self.workers, out, encoders, others)
            if self.pretrain_once and encoders is None:
                encoders = run
            for name in self.methods:
                log.info("seed %d: %s", seed, name)
                models[name].append(run.model(name))
        return models

    def _evaluate(self, models: dict[str, list[str]], splits: Splits) -> None:
        if splits.test is None:
            log.info("splits.test is left out: nothing is evaluated")
            return
        for column in self.evaluate_on:
            tested = SplitsWithTest.from_splits(splits.replace(test=splits.test.replace(labels=column)))
            evaluation = EvaluateConfig(**self.evaluate.model_dump(), models=models, splits=tested)
            EvaluateJob(out=join(self.out, _of_labels(_EVALUATION, column)), evaluate=evaluation).run()
        goals = {name: join(self.out, _of_labels(_EVALUATION, name)) for name in self.evaluate_on}
        if len(goals) > 1 and "relevance" not in goals:
            FrontSummary(out=join(self.out, "front"), evaluations=goals).run()

    def _final(self, name: str) -> str:
        return join(self.out, "final", name)

    def _log_next(self, data: str, bundles: Mapping[str, str]) -> None:
        """Log the bundles of the first seed, and the next commands for the best one on validation."""
        folder = join(self.out, f"seed-{self.seeds[0]}")
        log.info("bundles: %s/METHOD/model, where METHOD is %s", folder, " or ".join(bundles))
        best = best_on_validation(bundles)
        bundle, refitted = bundles[best], None
        if self.refit is not None and best in self.refit.methods:
            bundle = self._final(best)
        elif self.methods[best].is_one_model:
            refitted = self._final(best)
        evaluation = join(self.out, _of_labels(_EVALUATION, self.evaluate_on[0])) if self.splits.test else None
        for line in after_pipeline(bundle, data, self.out, refitted=refitted, evaluation=evaluation):
            log.info("next, %s", line)


def _with_fold(value: Any, fold: str) -> Any:
    """The value with `{fold}` replaced by the fold's name in all texts, but not in keys."""
    match value:
        case str():
            return value.replace(FOLD, fold)
        case dict():
            return {key: _with_fold(item, fold) for key, item in value.items()}
        case list() | tuple():
            return [_with_fold(item, fold) for item in value]
        case _:
            return value


def _relabelled(data: str, relabel: RelabelConfig | None, out: str) -> str:
    """The relabelled data set in `out`, or the original one without `relabel`."""
    if relabel is None:
        return data
    RelabelJob(data=data, out=out, relabel=relabel).run()
    return out


def _of_labels(name: str, column: str) -> str:
    """Name of a directory, below the pipeline's, with results on these labels."""
    return name if column == "labels" else f"{name}-{column}"


def best_on_validation(bundles: Mapping[str, str]) -> str:
    """The method with the best bundle, by the first validation metric that all have; without one, the first."""
    metrics: dict[str, dict[str, float]] = {}
    for name, url in bundles.items():
        of_bundle = load(url).metrics.items()
        found = {key: v for key, v in of_bundle if re.match(r"validation_(?!groups)", key)}
        metrics[name] = {key: float(value) for key, value in found.items() if isinstance(value, int | float)}
    first = next(iter(bundles))
    shared = next((key for key in metrics[first] if all(key in each for each in metrics.values())), None)
    if shared is None:
        return first
    best = max(metrics, key=lambda name: metrics[name][shared])
    log.info("best on validation, with the first seed: %s (%s %.4f)", best, shared, metrics[best][shared])
    return best


def after_pipeline(bundle: str, data: str, out: str, *, refitted: str | None, evaluation: str | None) -> Iterator[str]:
    """What to do with a pipeline's bundle, a line each; with its refit into `refitted` first, unless that is None."""
    if refitted is not None:
        yield f"to learn from the validation groups too: {command('refit', out=refitted, bundle=bundle)}"
        bundle = refitted
    if evaluation is not None:
        yield f"a page of HTML to look at: {command('report', evaluation=evaluation, out=join(out, 'page'))}"
    if re.match(r"\d{4}-", open_dataset(data).manifest.periods[-1]):  # periods are times
        ranked = {"bundle": bundle, "data": data, "out": join(out, "ranked")}
        yield f"to rank the newest period: {command('score', **ranked, layout='items', periods='last 1')}"
    predict = predict_command(bundle, data, join(out, "predictions"))
    yield f"to rank a file of raw rows, such as a new one: {predict}"
    if weekly := weekly_command(posixpath.join(posixpath.dirname(out.rstrip("/")) or ".", "weekly.yaml")):
        yield f"when the next period is there: {weekly}"


def command(job: str, **settings: str) -> str:
    """A command line that sets some keys.

    Example:
        >>> command("refit", out="runs/final", bundle="runs/the trees")
        "python -m jobs.refit --set out=runs/final --set 'bundle=runs/the trees'"
    """
    return f"{called(job)}{_set(settings)}"


def predict_command(bundle: str, data: str, out: str) -> str:
    """The command that ranks a file of raw rows: the data set's last file, to be replaced by a new one.

    It accepts the same share of bad rows as the data set.
    """
    made_by = open_dataset(data).manifest.made_by
    latest = (made_by.get("added") or [made_by])[-1].get("config", {})
    inputs = latest.get("inputs") or [{"path": "NEW_ROWS"}]
    allowed = latest.get("max_rejected", default := PrepareConfig.model_fields["max_rejected"].default)
    words = (("bundle", bundle), ("inputs", inputs[-1]["path"]), ("out", out))
    options = "".join(f" --{key} {shlex.quote(value)}" for key, value in words)
    return f"{called('predict')}{options}{_set({} if allowed == default else {'max_rejected': f'{allowed:g}'})}"


def weekly_command(config: str) -> str | None:
    """The command for the next period; None if its config does not exist."""
    return f"{called('weekly')} --config {shlex.quote(config)} --inputs NEW_ROWS" if storage.exists(config) else None


def _set(settings: Mapping[str, str]) -> str:
    return "".join(f" --set {shlex.quote(f'{key}={value}')}" for key, value in settings.items())
