"""The course of a search: unfinished trials, then new ones, until enough have ended; by Ray Tune or in this process."""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ltrscale.errors import InputError, Stopped
from ltrscale.progress import Report, log
from ltrscale.runtime.engine import ray_cluster
from ltrscale.signals import ending_by
from ltrscale.tuning.attempts import TrialFunction, attempt
from ltrscale.tuning.history import LATE, History, Result, Trial, best, counted, ended, unfinished
from ltrscale.tuning.space import Params, SearchConfig

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
        """Run the trials one by one in this process, as `run`; returns all. ASHA and resources do not apply.

        Raises:
            InputError: no trial has completed.
            Stopped: a trial was asked to stop; the same call resumes it.
            UnavailableError: a trial met an outage; likewise.
        """
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
    for name in ("ray.tune", "ray.train", "ray.air"):  # `TrialsLog` logs the trials
        logging.getLogger(name).setLevel(logging.CRITICAL)
