"""Search over the settings of a job: each trial runs the job's stages in a separate directory.

The metric is the validation metric of the bundle that a trial commits. Below `out` are the history and the outputs of
the trials (`trials/00007/...`), the table and report of the search, and the best settings as configs for the jobs.

Optuna proposes trials, Ray Tune runs them, and the history records them. However a search ends, the next one with the
same history resumes it: the sampler and ASHA receive the ended trials, unfinished trials run again with their
parameters in their directory, then new trials follow. The proposal for trial n depends only on the seed, n and the
history. So with one trial at a time, an interrupted search gives the same result as an uninterrupted one.
"""

import functools
import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from ltrscale import config as configs
from ltrscale import storage
from ltrscale.config import Operational, recordable
from ltrscale.data.dataset.disjoint import check_splits
from ltrscale.data.dataset.manifest import Dataset, one_view
from ltrscale.data.dataset.preflight import contents_of_read, difference
from ltrscale.errors import InputError, Stopped
from ltrscale.origin import digest
from ltrscale.progress import Report, called, log
from ltrscale.reports.render import REPORT
from ltrscale.runtime.engine import ray_cluster
from ltrscale.signals import ending_by, stop_on_signal
from ltrscale.stages.runs import RUN_FILES, holding
from ltrscale.stages.stage import Origin, Settings, Stage
from ltrscale.storage import join
from ltrscale.tuning.history import (
    LATE,
    History,
    Result,
    Trial,
    TrialFunction,
    attempt,
    best,
    counted,
    ended,
    lying_in,
    trials_by_value,
    unfinished,
)
from ltrscale.tuning.results import RESULTS, SearchOutcome, write_results
from ltrscale.tuning.searched import Assigned, Searched, check_space, given_params, with_params
from ltrscale.tuning.space import Params, ReportValue, SearchConfig, Space

if TYPE_CHECKING:
    from ltrscale.tuning.under_tune import Proposals


@dataclass(frozen=True)
class Search:
    """A search that can run, here or under Ray Tune, as often as it is interrupted."""

    config: SearchConfig
    trial: TrialFunction
    history: History
    """Opened for this search."""
    given: Params | None
    """Parameters of the config as given, if the space contains it."""
    same: Callable[[Params], str]
    """A text of parameters, equal for equal settings; none is tried twice."""

    def run(self, report: Report, *, stopping: Callable[[], bool] = lambda: False, cluster_cpus: int = 1) -> None:
        """Run trials until `config.trials` have ended, its minutes are up, or every setting has been tried.

        `report` receives a record of each trial that ends; a cluster that this call starts has `cluster_cpus` at least.

        Raises:
            Stopped: the search was asked to stop; the same call resumes it.
            UnavailableError: a trial met an outage; likewise.
            InputError: no trial has completed.
        """
        trials = self.history.trials()
        left_s = self._left_s(trials, self.config.concurrent)
        if len(ended(trials)) < self.config.trials and left_s > 0:
            with ray_cluster(cluster_cpus):
                proposals = self._proposals(trials)
                from ltrscale.tuning.under_tune import run_under_tune

                run_under_tune(
                    self.config,
                    self.trial,
                    self.history,
                    trials,
                    proposals,
                    report=report,
                    stopping=stopping,
                    left_s=left_s,
                )
            if stopping():
                raise Stopped("asked to stop; the same command resumes the trials that have not ended")
            trials = self.history.trials()
        self._check_any_complete(trials)

    def run_here(self) -> list[Trial]:
        """Run the trials one by one in this process, as `run`; returns all. ASHA and resources do not apply."""
        past = self.history.trials()
        end_s, proposals = time.monotonic() + self._left_s(past, 1), self._proposals(past)
        before = len(ended(past))
        for n in range(self.config.trials - before):
            if time.monotonic() >= end_s:
                log.info("tune: its %g minutes are up after %d trials", self.config.minutes, before + n)
                break
            proposal = proposals.suggest(str(n))
            if proposals.exhausted:
                break
            number = proposal["number"]
            self.history.end(number, self._attempt(proposal["params"], self.history.folder(number), end_s))
            proposals.on_trial_complete(str(n))
        trials = self.history.trials()
        self._check_any_complete(trials)
        return trials

    def _proposals(self, past: Sequence[Trial]) -> "Proposals":
        _set_up_tune()
        from ltrscale.tuning.under_tune import Proposals  # after that, and only in processes that search

        return Proposals(self.config, self.history, past, given=self.given, same=self.same)

    def _left_s(self, past: Sequence[Trial], at_once: int) -> float:
        """The time left for trials, of which earlier attempts have taken some, this many at once."""
        if self.config.minutes is None:
            return math.inf
        return 60 * self.config.minutes - sum(trial.result.seconds for trial in past) / at_once

    def _attempt(self, params: Params, folder: str, end_s: float) -> Result:
        """Run a trial in this process, until the minutes are up at the latest."""
        try:
            with ending_by(end_s):
                return attempt(self.trial, params, folder, None)
        except Stopped as stopped:
            if not stopped.is_late or time.monotonic() < end_s:
                raise
            return Result(state="stopped", seconds=unfinished(folder).seconds, reason=LATE)

    def _check_any_complete(self, trials: Sequence[Trial]) -> None:
        """Raise an `InputError` with the most common reason if no trial has completed."""
        if not trials or best(trials) is not None:
            return
        all_failed = all(trial.result.state == "failed" for trial in trials)
        problem = f"all {len(trials)} trials failed" if all_failed else f"no trial completed: {counted(trials)}"
        if reasons := [trial.result.reason for trial in trials if trial.result.reason is not None]:
            common = max(reasons, key=reasons.count)
            problem += f", {reasons.count(common)} of them with: {common}"
        raise InputError(f"{self.history.url}: {problem}")


def _set_up_tune() -> None:
    """Keep Ray Tune from printing, logging, writing files and catching Ctrl-C; must run before its import."""
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # only the older output can be silenced
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"  # a trial may end without a report
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    os.environ["TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S"] = "0"
    for name in ("ray.tune", "ray.train", "ray.air"):  # `Scribe` logs the trials
        logging.getLogger(name).setLevel(logging.CRITICAL)


_WRITTEN = (*RESULTS, "best.yaml", "best-pretrain.yaml", "best-finetune.yaml")
"""Files beside the history."""
_STARTER_CPUS = 0.1
"""CPUs of a trial that only waits for its workers."""


class TuneJob(SearchConfig, Stage):
    """Search over the settings of a job."""

    stage: ClassVar = "tune"
    out: Operational[str]
    """Directory of the search: its history, the outputs of the trials, table, report and best settings."""
    job: Annotated[Searched, Field(discriminator="kind")]
    """The job that a trial runs; trial 0 has its settings as given."""
    fresh: Operational[bool] = False
    """Start anew; removes the history in `out` with the outputs of its trials."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.asha is not None and not self.job.judges_on_the_way:
            raise ValueError("asha judges pretraining along the way: set job.pretrain.keep_every to some epochs")
        return self

    def check(self) -> None:
        """Refuse a space that does not fit the job, and splits that overlap or have nothing to learn from."""
        check_space(self.job, self.space)
        check_splits(self.job.splits)

    def identity(self) -> Settings:
        """Settings and space, with all periods named."""
        space = {key: dimension.model_dump(mode="json") for key, dimension in self.space.items()}
        return {"job": self.job.identity(), "space": space}

    def is_done(self, origin: Origin) -> bool:  # noqa: ARG002
        """Always false: the history decides which trials remain, and each run rewrites the results."""
        return False

    def recorded_as(self) -> Self:
        """The config without `fresh`: repeating the search must not delete it."""
        return self.replace(fresh=False)

    def clear(self) -> None:
        """Remove the history and the results of a search that starts `fresh`."""
        if self.fresh:
            History(self.out).remove(RUN_FILES)
            for name in _WRITTEN:
                storage.remove(join(self.out, name))

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Run the remaining trials on the data sets as they are when the search starts; write the results."""
        history, identity = History(self.out, self.space), self.history_identity()
        before = history.identity()
        if before is not None and "data" in before and (changed := difference(before["data"], identity["data"])):
            raise InputError(f"{history.url}: the search there {changed}, or remove its history with --fresh")
        history.open(identity)
        config, cpus = self._resources()
        with one_view() as view, stop_on_signal() as stopping:
            cluster_cpus = math.ceil(self.concurrent * cpus)
            self._search(config, history, view).run(report, stopping=stopping, cluster_cpus=cluster_cpus)
        self._write_found()

    def _resources(self) -> tuple[SearchConfig, float]:
        """The config with what the process of a trial takes, and the CPUs of a trial with its workers."""
        workers = self.job.workers
        if workers.most == 1 and workers.gpus == 0:
            return self, self.cpus
        # the workers compute, and need a CPU each to read
        cpus = _STARTER_CPUS + workers.most * (workers.cpus + 1)
        return self.model_copy(update={"cpus": _STARTER_CPUS, "gpus": 0.0}), cpus

    def best_here(self, number: int = 1) -> list[Searched]:
        """Run the remaining trials one by one in this process; returns at most `number` jobs, best first.

        Writes only the history. A history of another search, space or data is removed first, so that the same settings
        always end with the same trials.
        """
        self.check()
        with holding(self.out), one_view() as view:
            history, identity = History(self.out, self.space), self.history_identity()
            if history.is_of_another(identity):
                log.info("tune: %s holds another search, which starts anew", self.out)
                history.remove(RUN_FILES)
            history.open(identity)
            trials = self._search(self, history, view).run_here()
        return [self._with(trial.params).job for trial in trials_by_value(trials)[:number]]

    def history_identity(self) -> dict[str, Any]:
        """All that a trial's value depends on besides its parameters."""
        return recordable({**self.identity(), "inputs": self.inputs(), "data": contents_of_read(self.job.reads())})

    def _with(self, params: Params) -> Assigned[Searched]:
        """The job with the parameters of a trial."""
        return with_params(self.job, self.space, params)

    def _search(self, config: SearchConfig, history: History, view: Mapping[str, Dataset]) -> Search:
        trial = functools.partial(_run_trial, self.job, self.space, view=view)
        return Search(config, trial, history, given_params(self.job, self.space), self._same)

    def _same(self, params: Params) -> str:
        """A text that is equal for parameters that give the same settings."""
        try:
            return digest(self._with(params).job.result())
        except InputError:  # the trial itself will fail with this error
            return digest(params)

    def _write_found(self) -> None:
        """Write table, report, pictures and the best settings."""
        storage.check_lease(self.out)
        everything = History(self.out).trials()
        trials, commands = lying_in(self.space, everything), []
        if (leader := best(trials)) is not None:
            for name, stage in self._with(leader.params).job.jobs(self.out).items():
                url = join(self.out, name)
                storage.write_bytes(url, configs.dump(stage).encode())
                commands.append(f"{called(stage.stage)} --config {shlex.quote(url)}")

        def used(trial: Trial, key: str) -> bool:
            try:
                return key in self._with(trial.params).used
            except InputError:
                return True

        outcome = SearchOutcome(self.space, trials, self.job.metric, used, len(everything) - len(trials))
        write_results(self.out, outcome, commands=commands)
        if leader is not None:
            log.info(
                "best of %d trials: trial %d, %s %.4f: %s",
                len(trials), leader.number, self.job.metric, leader.result.value, join(self.out, REPORT),
            )  # fmt: skip


def _run_trial(
    job: Searched,
    space: Space,
    params: Params,
    folder: str,
    report: ReportValue,
    *,
    view: Mapping[str, Dataset] | None = None,
) -> float:
    """Run the job with these parameters in this directory, on the data sets as the search opened them."""
    with one_view(view):
        return with_params(job, space, params).job.run(folder, report)
