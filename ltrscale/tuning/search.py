"""A search: Ray Tune runs trials of what Optuna proposes, and the history says what is left to do.

Whatever ends the search, a killed driver or a lost cluster, the next one with the same history goes on: ended trials
are told to the sampler and to ASHA, begun ones run again with their parameters in their directory, then new ones
follow. What is proposed for trial n depends on the seed, n and the history alone, so with one trial at a time a search
that was interrupted ends as if it had not been.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ltrscale import ray_internals, storage
from ltrscale.engine import ray_cluster
from ltrscale.errors import InputError, Stopped
from ltrscale.progress import Report, log, progress
from ltrscale.tuning.history import History, Result, ended
from ltrscale.tuning.space import STEP, VALUE, AshaConfig, Params, SearchConfig

ReportValue = Callable[[int, float], None]
"""Tells the search of a step, counted as ASHA counts them, and the metric there; greater is better."""
TrialFunction = Callable[[Params, str, ReportValue], float]
"""`trial(params, folder, report) -> value`: a trial in a process of its own, which can go on where it was cut off.

Params are empty for the config as it is given. It is pickled.
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
    """Run trials until so many have ended, or nothing is left in the space that was not tried.

    Args:
        config: the space, and how much of it is tried.
        trial: does the work of one trial.
        history: opened for this search.
        given: parameters of the config as it is given, where the space contains it.
        same: equal texts for parameters of which one trial tells all.
        report: receives a record of each trial that ends.
        stopping: whether the search is to end early.
        cluster_cpus: logical CPUs of a cluster of our own, at least.

    Raises:
        Stopped: it was asked to; the same call goes on.
        InputError: all trials have failed.
    """
    if len(ended(history.trials())) < config.trials:
        with ray_cluster(cluster_cpus):
            _run(config, trial, history, given, same, report, stopping)
        if stopping():
            raise Stopped("asked to stop; the same command goes on with the trials that have not ended")
    check_any_complete(history)


def check_any_complete(history: History) -> None:
    """Check that a trial has come to its end.

    Raises:
        InputError: all have failed; tells the most common reason.
    """
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
    from ray import tune  # here, for the many processes that never search

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
                reuse_actors=True,  # to start a process takes longer than many a trial
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
    """Let Ray Tune, which is still to be imported, leave output, log, files and Ctrl-C to us."""
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # its older output can be silenced
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"  # a trial may end without having reported
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    os.environ["TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S"] = "0"
    for name in ("ray.tune", "ray.train", "ray.air"):  # trials are logged by the scribe
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _trainable(config: SearchConfig, trial: TrialFunction, history: History) -> Callable[[dict[str, Any]], None]:
    """What Ray Tune runs in the process of a trial, which later trials may share."""

    def run(proposal: dict[str, Any]) -> None:
        number = proposal["number"]
        if history.result(number) is None:
            log.setLevel(logging.INFO)
            try:
                result = attempt(trial, proposal["params"], history.folder(number), config.asha)
            except Stopped:
                sys.exit()  # as Ray Tune wants it; its scribe records the result
            history.end(number, result)

    return run


def attempt(trial: TrialFunction, params: Params, folder: str, asha: AshaConfig | None) -> Result:
    """Run a trial to its end, or to the error that ends it."""
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
    except Exception as error:  # whatever it is, the other trials go on
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
    """Keeps values at steps some percent apart, and tells Ray Tune of those where ASHA decides."""

    def __init__(self, asha: AshaConfig | None) -> None:
        self.points: list[tuple[int, float]] = []
        self._asha, self._rung = asha, float(asha.grace if asha else math.inf)
        self._last, self._next = 0, 1

    def __call__(self, step: int, value: float) -> None:
        """Take note; steps that were reported before are passed over, as those of a run that was resumed."""
        decides = step >= self._rung
        if not math.isfinite(value) or step <= self._last or (step < self._next and not decides):
            return
        self.points.append((step, value))
        self._last, self._next = step, math.ceil(step * 1.05)
        if decides:
            self._tell(step, value)

    def _tell(self, step: int, value: float) -> None:
        from ray import tune

        assert self._asha is not None
        while self._rung <= step:
            self._rung *= self._asha.reduction
        try:
            tune.report({STEP: step, VALUE: value})
        except SystemExit as error:  # how Ray Tune ends a trial
            raise Stopped("other trials are better at this step") from error
