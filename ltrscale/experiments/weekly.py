"""The weekly update: adds new rows, and puts a new model into service if it passes the gate.

    OUT/service.json            the model in service, of OUT/service/ (`service`)
    OUT/first/                  the first model, if none was in service
    OUT/new/                    the new rows as a data set, before they join the training data
    OUT/weeks/PERIOD/arrival/   the model in service on the new periods, and their drift
                    /candidates/KEY/     the candidate, and with `refit` as `final` the candidate retrained, also on the
                                periods that judged it; KEY is a hash of rows, settings and production
                    /gate/      both models on periods that neither has seen; the verdict
                    /export/
                    /week.json  inputs and outcome of the week

Every part is a stage that is skipped if it is up to date, so the same command resumes a stopped week.
"""

import operator
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

from pydantic import Field

from ltrscale import storage
from ltrscale.bundle_manifest import content_hash
from ltrscale.config import Config, Operational, load, validate
from ltrscale.data.dataset.goals import GoalName
from ltrscale.data.dataset.manifest import Dataset, one_view, open_dataset
from ltrscale.data.dataset.origin import prepare_settings_of, read_as
from ltrscale.data.dataset.periods import in_few_words, with_periods_named
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.errors import InputError, Refused, suggestion
from ltrscale.evaluation.bounds import Bounds, GoalBounds, drift_checks
from ltrscale.evaluation.gate import GateJob
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import PRODUCTION, EvaluateConfig, EvaluateSettings
from ltrscale.experiments.methods.base import MethodName, SeedRun
from ltrscale.experiments.next_commands import predict_command, weekly_command
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.experiments.refit import RefitJob
from ltrscale.experiments.service import (
    SERVICE,
    InService,
    Week,
    check_new,
    copied,
    folder_of,
    forget,
    put_into_service,
    registered,
    take_back,
    unseen_periods,
)
from ltrscale.ingest.inputs import Inputs, PrepareConfig, list_inputs
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.origin import digest, result_of
from ltrscale.progress import log
from ltrscale.runtime.launch import cluster_for
from ltrscale.serving.export import ExportJob, FormatName, Registry, put_alias
from ltrscale.stages.runs import recorded
from ltrscale.storage import join


class WeeklyJob(Config):
    """Add a new period, and put a model that has learnt from newer ones into service, unless it is refused."""

    fixed: ClassVar = {"drift": {"documents": 1_000_000}}

    out: Operational[str]
    """Directory for everything; `OUT/service.json` names the bundle in service, a copy that nothing writes again."""
    pipeline: str
    """Config of a pipeline, such as shop/pipeline.yaml, whose data set grows, and which has the settings of the
    method."""
    method: MethodName = "trees"
    """The method of the pipeline that is trained."""
    inputs: Operational[Inputs] = ()
    """Files, directories or patterns with the rows of the new period, in the format of the data set; empty where the
    newest period has been added already."""
    splits: SplitsWithTest = SplitsWithTest(
        train=Split(periods=("all but last 2",)),
        validation=Split(periods=("last 1 but 1",)),
        test=Split(periods=("last 1",)),
    )
    """Periods to learn from, to select on, and to judge on, counted from the new one. Of `test` those count that the
    model in service has not learnt from either."""
    production: str | None = None
    """The bundle in service before the first week, such as a pipeline's. Without it the first week begins with a model
    of the method on the periods before the new one, which goes into service without being compared."""
    max_rejected: float | None = Field(None, ge=0, le=1)
    """Share of rejected new rows above which nothing is done; by default that of the data set."""
    bounds: Bounds = Bounds(refuse="worse", feature_psi=5.0)
    """What the new period and the candidate must keep to, as for jobs.gate. By default a candidate is refused that is
    shown to be worse, and a period in which some feature is plainly broken."""
    goals: dict[GoalName, GoalBounds] = Field(default_factory=dict, exclude_if=operator.not_)
    """Bounds on further goals, as for jobs.gate. A network of the method that keeps goals (`finetune.goals.keep`) keeps
    those of the model in service."""
    refit: bool = False
    """After the gate has said yes, train the candidate once more, as long as validation found best, on the validation
    and test periods too, and put that model into service: it knows the newest periods, and has not been judged."""
    export: FormatName | None = None
    """Export what goes into service for this program, as jobs.export."""
    registry: Registry | None = None
    """Register what goes into service in MLflow's registry, as `jobs.export --to mlflow`; the alias `in_service` is
    its."""
    rollback: Operational[bool] = False
    """Put the model that was in service before the present one into service again, and do nothing else."""
    dry_run: Operational[bool] = False
    """Print what would be done, and do nothing."""
    ray: Operational[bool] = False
    """Read and measure in parallel on a Ray cluster; the results are the same."""

    @cached_property
    def pipeline_config(self) -> PipelineJob:
        """The pipeline; an `InputError` if it lacks the method, or changes the data set before training."""
        config = load(PipelineJob, self.pipeline)
        if self.method not in config.methods:
            hint = suggestion(self.method, config.methods, "its methods are")
            raise InputError(f"method: {self.pipeline} has no method {self.method!r}; {hint}")
        changed = {"relabel": config.relabel, "learn_from": config.learn_from or None}
        if keys := [key for key, value in changed.items() if value is not None]:
            raise InputError(f"{self.pipeline}: {keys[0]}: new periods join a data set of jobs.prepare; leave it out")
        if self.refit and not config.methods[self.method].is_one_model:
            raise InputError(
                f"refit: {self.method} makes several models, which cannot be trained once more; leave it out"
            )
        return config

    @property
    def data(self) -> str:
        """The data set to extend."""
        return self.pipeline_config.data or join(self.pipeline_config.out, "data")

    @property
    def settings_hash(self) -> str:
        """Hash of all that determines a week's outcome, besides its rows and the model in service."""
        of_pipeline = self.pipeline_config.model_dump(mode="json", include={"methods", "seeds", "evaluate"})
        return digest([result_of(self).model_dump(mode="json", exclude={"out", "inputs"}), of_pipeline])

    @property
    def evaluate(self) -> EvaluateSettings:
        """The pipeline's settings without its baseline; the model in service is the baseline."""
        return self.pipeline_config.evaluate.replace(baseline=None)

    def reading(self, *, add: bool) -> PrepareConfig:
        """The `prepare` settings that made the data set, applied to the new rows."""
        before = open_dataset(self.data)
        made_by = before.manifest.made_by
        if made_by.get("stage") != "prepare":
            raise InputError(
                f"{self.data}: made by {made_by.get('stage')}; periods join a data set of jobs.prepare only"
            )
        limit = {} if self.max_rejected is None else {"max_rejected": self.max_rejected}
        overrides = {"inputs": self.inputs, "add": add, "expect": {}}
        return validate(
            PrepareConfig,
            {**made_by["config"], **prepare_settings_of(read_as(before)), **limit, **overrides},
            self.data,
        )

    def named(self, periods: list[str]) -> SplitsWithTest:
        """The splits with the existing periods, by name."""
        splits = self.splits.on(self.data)
        by_name = {
            name: with_periods_named(split, f"splits.{name}", known=periods) for name, split in splits.by_name.items()
        }
        return SplitsWithTest.from_splits(splits.replace(**by_name))

    def run(self) -> None:
        """Do the remaining work of a week; with `dry_run` only print it.

        Raises:
            Refused: the new period, or the candidate, was refused, now or by an earlier run of the same command.
            InputError: as the stages.
        """
        if self.dry_run:
            sys.stdout.write("".join(f"{line}\n" for line in self._plan()))
            return
        if self.rollback:
            with recorded(self.out, self, "weekly"):
                now = take_back(self.out, self.registry)
                log.info("weekly: %s of %s is in service again (export: %s)", now.bundle, now.period, now.export)
            return
        with recorded(self.out, self, "weekly"), cluster_for(self.pipeline_config.workers):
            week = self._run()
            forget(self.out)
        if week.outcome == "refused":
            raise Refused(*week.reasons, f"{week.period}: {self._serving()} stays in service")

    # the steps of a week

    def _run(self) -> Week:
        before = InService.read(self.out)
        if before is not None:
            before.check()
        new = self._arrived()
        earlier = Week.read(self.out, new.manifest.periods[-1])
        content = new.manifest.hash_of(self._new_periods(new))
        if earlier is None or (earlier.content, earlier.settings) != (content, self.settings_hash):
            earlier = self._begin_week(new, content, earlier)
        elif earlier.outcome != "under way":
            message = "weekly: %s is done: %s; other rows or settings would be judged anew; what serves: %s"
            log.info(message, earlier.period, earlier.outcome, self._serving())
            return earlier
        if before is not None and before.period > earlier.period:
            raise InputError(
                f"{earlier.period}: was stopped, and {before.bundle} of {before.period} is in service since, "
                "which an older model must not replace; nothing is left to do"
            )
        week = self._judged_week(new, earlier)
        week.write(self.out)
        message = "weekly: %s: %s; %s names what serves: %s"
        log.info(message, week.period, week.outcome, join(self.out, SERVICE), self._serving())
        if (now := InService.read(self.out)) is not None:
            rank = predict_command(now.bundle, self.data, join(self.out, "predictions"))
            log.info("next, to rank new rows: %s", rank)
        if command := weekly_command(f"{self.out.rstrip('/')}.yaml"):
            log.info("next, when the next period is there: %s", command)
        return week

    def _arrived(self) -> Dataset:
        """The new periods as a separate data set, so that refused rows never reach the main one."""
        if not self.inputs:
            return open_dataset(self.data)
        out = join(self.out, "new")
        PrepareJob(out=out, prepare=self.reading(add=False), ray=self.ray).run()
        return open_dataset(out)

    def _new_periods(self, new: Dataset) -> list[str]:
        """The new periods; the last one, if `new` is the whole data set."""
        return [*new.manifest.periods] if self.inputs else [new.manifest.periods[-1]]

    def _begin_week(self, new: Dataset, content: str, earlier: Week | None) -> Week:
        """Start a week, and record its periods and the model in service."""
        periods, all_periods = self._new_periods(new), open_dataset(self.data).manifest.periods
        is_begun = earlier is not None and earlier.content == content
        check_new(new, periods, self.data, all_periods, joins=bool(self.inputs), is_begun=is_begun)
        before = [period for period in all_periods if period not in periods]
        splits_before, splits = self.named(before), self.named([*before, *periods])
        production = self._baseline(earlier) or self._first_model(splits_before)
        unseen_periods(splits, production)  # raises if there are none
        if InService.read(self.out) is None:
            production = copied(production, self.out)
            put_into_service(self.out, production, (splits_before.test.periods or ("",))[-1])
            log.info("weekly: %s is in service to begin with, compared with no other", production)
        week = Week(
            period=periods[-1],
            content=content,
            settings=self.settings_hash,
            production=production,
            before=splits_before,
            splits=splits,
            bundle=earlier.bundle if earlier is not None else None,
        )
        week.write(self.out)
        return week

    def _baseline(self, earlier: Week | None) -> str | None:
        """The bundle to compare the candidate with, in service or named as `production`; None if there is neither.

        A week that is judged again keeps its former baseline, if that model still exists.
        """
        if (in_service := InService.read(self.out)) is None:
            return self.production
        kept = [served.bundle for served in in_service.earlier]
        if earlier is not None and earlier.bundle == in_service.bundle and earlier.production in kept:
            return earlier.production
        return in_service.bundle

    def _serving(self) -> str:
        in_service = InService.read(self.out)
        return "nothing" if in_service is None else in_service.bundle

    def _first_model(self, before: SplitsWithTest) -> str:
        """Train the first model, and evaluate it alone."""
        log.info("weekly: nothing is in service; the first model learns from the periods before the new one")
        folder = join(self.out, "first")
        bundle = self._trained(before, folder)
        config = EvaluateConfig(**self.evaluate.model_dump(), models={PRODUCTION: (bundle,)}, splits=before)
        EvaluateJob(out=join(folder, "evaluation"), evaluate=config, ray=self.ray).run()
        return bundle

    def _trained(self, splits: SplitsWithTest, folder: str, production: str | None = None) -> str:
        """Train the method with the first seed of the pipeline, against what is in service; returns the bundle."""
        seed, methods = self.pipeline_config.seeds[0], self.pipeline_config.methods
        if production is not None:
            methods = {name: method.keeping(production) for name, method in methods.items()}
        with one_view():
            return SeedRun(methods, splits.drawn(seed), seed, self.pipeline_config.workers, folder).model(self.method)

    def _judged_week(self, new: Dataset, week: Week) -> Week:
        """Do all remaining steps of a week; returns its outcome."""
        folder = folder_of(self.out, week.period)
        if reasons := self._drifted(new, week, join(folder, "arrival")):
            return week.replace(outcome="refused", reasons=reasons)
        if self.inputs and not {*new.manifest.periods} <= {*open_dataset(self.data).manifest.periods}:
            PrepareJob(out=self.data, prepare=self.reading(add=True), ray=self.ray).run()
        bundle = self._trained(week.splits, join(folder, week.candidate), week.production)
        judged = content_hash(bundle)
        test = unseen_periods(week.splits, week.production)  # neither model has learnt from these
        gate = GateJob(
            out=join(folder, "gate"),
            production=week.production,
            candidate=bundle,
            splits=week.splits.replace(test=test),
            evaluate=self.evaluate,
            bounds=self.bounds,
            goals=self.goals,
            ray=self.ray,
        )
        try:
            gate.run()
        except Refused as refused:
            return week.replace(outcome="refused", reasons=str(refused).split("\n"))
        if content_hash(bundle) != judged:
            raise InputError(f"{bundle}: another run has replaced it while it was judged; run the same command again")
        if self.refit:
            final = join(folder, week.candidate, "final")
            RefitJob(out=final, bundle=bundle, also=week.splits.test, workers=self.pipeline_config.workers).run()
            bundle = final
        return week.replace(outcome="in service", bundle=self._serve(week, bundle))

    def _serve(self, week: Week, bundle: str) -> str:
        """Copy a bundle, export and register it if configured, and put it into service; returns the copy."""
        bundle, export = copied(bundle, self.out), None
        if self.export is not None:
            made, periods = join(folder_of(self.out, week.period), "export"), week.splits.test.periods
            ExportJob(out=made, bundle=bundle, to=self.export, data=self.data, periods=periods).run()
            export = copied(made, self.out)
        version = registered(bundle, self.registry)
        put_into_service(self.out, bundle, week.period, export=export, version=version)
        if self.registry is not None and version is not None:
            put_alias(self.registry, version)
        return bundle

    def _drifted(self, new: Dataset, week: Week, out: str) -> list[str]:
        """The bounds on drift that the new periods break, as seen by the model in service."""
        moving = self.bounds.find_moving(open_dataset(self.data).manifest.features)
        test = week.splits.test.replace(data=new.url, periods=self._new_periods(new))
        splits = week.before.replace(test=test)
        settings = self.evaluate.replace(slice_by=(), slices={}, by_period=True)
        config = EvaluateConfig(**settings.model_dump(), models={PRODUCTION: (week.production,)}, splits=splits)
        EvaluateJob(out=out, evaluate=config, ray=self.ray).run(show=False)
        drift = Evaluation.read(out).drift()
        return [check.reason for check in drift_checks(drift, self.bounds, moving, PRODUCTION) if not check.holds]

    def _plan(self) -> Iterator[str]:
        """The steps of a run, one line each."""
        if self.rollback:
            in_service = InService.read(self.out)
            earlier = () if in_service is None else in_service.earlier
            again = earlier[0].bundle if earlier else "nothing, for nothing was before it"
            yield f"weekly: dry run, nothing is written; in service again: {again}"
            return
        periods = open_dataset(self.data).manifest.periods
        before, new = ([*periods], "NEW") if self.inputs else ([*periods[:-1]], periods[-1])
        production = self._baseline(None if self.inputs else Week.read(self.out, new))
        splits, first = self.named([*before, new]), self.named(before)
        # nothing has learnt from new rows
        test = splits.test if self.inputs or production is None else unseen_periods(splits, production)
        yield f"weekly: dry run, nothing is written; {self.data} has {in_few_words(periods)}"
        if self.inputs:
            files = [file.url for file in list_inputs(self.inputs) if not file.is_rewritten]
            sizes = sum(map(storage.size, files)) / 1e6
            yield f"- read {', '.join(files[:3])} ({len(files)} files, {sizes:,.1f} MB) into {join(self.out, 'new')}"
        if production is None:
            yield f"- train {self.method} on {_shown(first.train)} as the first model, for nothing is in service"
        yield f"- drift of {new} from {_shown(first.train)}; refuse it by bounds, and leave {self.data} as it is"
        if self.inputs:
            yield f"- add {new} to {self.data}"
        on = f"on {_shown(splits.train)}, validate on {_shown(splits.validation)}"
        yield f"- train {self.method} of {self.pipeline} {on}"
        yield (
            f"- gate, bounds.refuse {self.bounds.refuse}: the candidate against {production or 'the first model'} on "
            f"{_shown(test)}; refused: the old model stays, status 3"
        )
        if self.refit:
            yield "- refit the candidate on the validation and test periods too"
        if self.export:
            yield f"- export for {self.export}"
        if self.registry:
            yield f"- register as {self.registry.name}"
        yield f"- put a copy of it into service: {join(self.out, SERVICE)}"


def _shown(split: Split) -> str:
    return in_few_words(split.periods or ())
