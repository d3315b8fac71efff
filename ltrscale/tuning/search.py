"""A search: Optuna proposes trials, Ray Tune runs them, and the history records the rest of the work.

After any end of a search, such as a killed driver or a lost cluster, the next search with the same history resumes it:
the sampler and ASHA receive the ended trials, trials that began run again with their parameters in their directory,
then new trials follow. The proposal for trial n depends only on the seed, n and the history. So with one trial at a
time an interrupted search ends as an uninterrupted one.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ltrscale import storage
from ltrscale.errors import InputError, Stopped
from ltrscale.progress import Report, log, progress
from ltrscale.runtime import ray_internals
from ltrscale.runtime.engine import ray_cluster
from ltrscale.tuning.history import History, Result, TrialRecord, best, ended
from ltrscale.tuning.space import STEP, VALUE, AshaConfig, Params, SearchConfig

ReportValue = Callable[[int, float], None]
"""Reports to the search a step, as ASHA counts steps, and the metric there; greater is better."""
TrialFunction = Callable[[Params, str, ReportValue], float]
"""`trial(params, folder, report) -> value`: runs a trial in a separate process, and resumes it after an interruption.

Params are empty for the config as given. The function is pickled.
"""


def run_search(
    config: SearchConfig,
    trial: TrialFunction,
    history: History,
    *,
    given: Params | None,
    same: Callable[[Params], str],
    report: Report,
    stopping: Callable[[], bool] = lambda: False,
    cluster_cpus: int = 1,
) -> None:
    """Run trials until `config.trials` have ended, or every setting of the space has been tried.

    Args:
        config: the space, and the number of trials.
        trial: does the work of one trial.
        history: opened for this search.
        given: parameters of the config as given, if the space contains it.
        same: maps parameters to a text that is equal for equal settings, which are tried only once.
        report: receives a record of each trial that ends.
        stopping: whether to end the search early.
        cluster_cpus: minimum logical CPUs of a cluster that this call starts.

    Raises:
        Stopped: the search was asked to stop; the same call resumes it.
        InputError: all trials have failed.
    """
    if len(ended(history.trials())) < config.trials:
        with ray_cluster(cluster_cpus):
            _run(config, trial, history, given, same, report, stopping)
        if stopping():
            raise Stopped("asked to stop; the same command resumes the trials that have not ended")
    check_any_complete(history)


def search_here(
    config: SearchConfig, trial: TrialFunction, history: History, *, given: Params | None, same: Callable[[Params], str]
) -> TrialRecord:
    """Run the trials of a search one after the other in this process; returns the best.

    Proposals are those of `run_search` with one trial at a time. The arguments are its, too; the resources of the
    config and its ASHA do not apply.

    Raises:
        InputError: all trials have failed.
        Stopped: a trial was asked to stop; the same call resumes it.
    """
    _set_up_tune()
    from ltrscale.tuning.under_tune import Proposals

    past = history.trials()
    proposals = Proposals(config, history, past, given=given, same=same)
    for name in map(str, range(config.trials - len(ended(past)))):
        proposal = proposals.suggest(name)
        if proposals.exhausted:
            break
        number = proposal["number"]
        history.end(number, attempt(trial, proposal["params"], history.folder(number), None))
        proposals.on_trial_complete(name)
    check_any_complete(history)
    leader = best(history.trials())
    assert leader is not None
    return leader


def check_any_complete(history: History) -> None:
    """Raise an `InputError` with the most common reason if all trials have failed."""
    results = [t.result for t in history.trials() if t.result is not None]
    reasons = [result.reason for result in results if result.state == "failed"]
    if results and len(reasons) == len(results):
        common = max(reasons, key=reasons.count)
        raise InputError(
            f"{history.url}: all {len(results)} trials failed, {reasons.count(common)} of them with: {common}"
        )


def _run(
    config: SearchConfig,
    trial: TrialFunction,
    history: History,
    given: Params | None,
    same: Callable[[Params], str],
    report: Report,
    stopping: Callable[[], bool],
) -> None:
    _set_up_tune()
    ray_internals.keep_keys_out_of_trials()
    from ray import tune  # after the environment is set, and only in processes that search

    from ltrscale.tuning.under_tune import Asha, EndsOnRequest, Proposals, Scribe

    past = history.trials()
    left = config.trials - len(ended(past))
    proposals = Proposals(config, history, past, given=given, same=same)
    with storage.scratch.directory() as scratch, progress("tune", left, "trials") as advance:
        tuner = tune.Tuner(
            tune.with_resources(_trainable(config, trial, history), {"CPU": config.cpus, "GPU": config.gpus}),
            tune_config=tune.TuneConfig(
                search_alg=proposals,
                scheduler=Asha(config.asha, past) if config.asha else None,
                num_samples=left,
                max_concurrent_trials=config.concurrent,
                reuse_actors=True,  # starting a process takes longer than a short trial
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(scratch),
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=config.max_failures),
                callbacks=[Scribe(history, config, past, report=report, advance=advance, stopping=stopping)],
                stop=EndsOnRequest(stopping),
            ),
        )
        tuner.fit()
    if proposals.exhausted:
        log.info("every setting of the space was tried; the search ends before its %d trials", config.trials)


def _set_up_tune() -> None:
    """Keep Ray Tune from printing, logging, writing files and catching Ctrl-C; must run before its import."""
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # only the older output can be silenced
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"  # a trial may end without a report
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    os.environ["TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S"] = "0"
    for name in ("ray.tune", "ray.train", "ray.air"):  # the scribe logs the trials
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _trainable(config: SearchConfig, trial: TrialFunction, history: History) -> Callable[[dict[str, Any]], None]:
    """The function that Ray Tune runs in the process of a trial, which later trials may reuse."""

    def run(proposal: dict[str, Any]) -> None:
        number = proposal["number"]
        if history.result(number) is None:
            log.setLevel(logging.INFO)
            try:
                result = attempt(trial, proposal["params"], history.folder(number), config.asha)
            except Stopped:
                sys.exit()  # Ray Tune's own way to end a trial; the scribe records the result
            history.end(number, result)

    return run


def attempt(trial: TrialFunction, params: Params, folder: str, asha: AshaConfig | None) -> Result:
    """Run a trial until it finishes or fails."""
    curve, start = _Curve(asha), time.monotonic()
    value, reason = None, None
    try:
        value = float(trial(params, folder, curve))
        if not math.isfinite(value):
            reason = f"the metric is {value}"
    except Stopped:
        raise
    except InputError as error:
        reason = str(error)
    except Exception as error:  # any error ends only this trial; the others go on
        log.exception("the trial failed")
        reason = " ".join(f"{type(error).__name__}: {error}".split())
    return Result(
        state="complete" if reason is None else "failed",
        value=value if reason is None else None,
        curve=tuple(curve.points),
        seconds=round(time.monotonic() - start, 3),
        reason=reason,
    )


class _Curve:
    """Keeps values at steps 5% apart, and reports to Ray Tune those at which ASHA decides."""

    def __init__(self, asha: AshaConfig | None) -> None:
        self.points: list[tuple[int, float]] = []
        self._asha, self._rung = asha, float(asha.grace if asha else math.inf)
        self._last, self._next = 0, 1

    def __call__(self, step: int, value: float) -> None:
        """Record a value; steps that were reported before are skipped, for a resumed run repeats some."""
        decides = step >= self._rung
        if not math.isfinite(value) or step <= self._last or (step < self._next and not decides):
            return
        self.points.append((step, value))
        self._last, self._next = step, math.ceil(step * 1.05)  # so that the curve of a long trial stays short
        if not decides:
            return
        from ray import tune

        assert self._asha is not None
        while self._rung <= step:
            self._rung *= self._asha.reduction
        try:
            tune.report({STEP: step, VALUE: value})
        except SystemExit as error:  # Ray Tune ends a trial this way
            raise Stopped("other trials are better at this step") from error
