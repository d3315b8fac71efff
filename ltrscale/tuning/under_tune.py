"""Trials under Ray Tune, by its interfaces: a searcher that proposes trials, a scheduler, a stopper and a callback."""

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState
from ray import cloudpickle, tune
from ray.exceptions import RayTaskError
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from ltrscale import storage
from ltrscale.draws import mix
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.progress import Advance, Report, log, progress
from ltrscale.runtime import ray_internals
from ltrscale.tuning.history import (
    LATE,
    History,
    Result,
    Trial,
    TrialFunction,
    as_study,
    attempt,
    best,
    ended,
    state_of,
)
from ltrscale.tuning.space import (
    STEP,
    VALUE,
    AshaConfig,
    Params,
    SamplerConfig,
    SearchConfig,
    cells,
    from_optuna,
    is_in,
    to_optuna,
)

_REDRAWS = 20
"""How often the sampler may propose what was tried before."""
_MOST_CELLS = 100_000
"""Combinations of values to look through after that."""
_FOREVER = 10**9
"""A step that no trial reaches."""
_RESTARTS = 1
"""How often a trial restarts after its process has died, for instance for lack of memory."""


class _Unsaved:
    """Pickles no state for Ray Tune: a search is restored from the history."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Proposals(_Unsaved, Searcher):  # type: ignore[misc]
    """Proposes trials: first those that have not ended, or in a new search the config as given; then Optuna's."""

    def __init__(
        self,
        config: SearchConfig,
        history: History,
        past: Sequence[Trial],
        *,
        given: Params | None,
        same: Callable[[Params], str],
    ) -> None:
        super().__init__(metric=VALUE, mode="max")
        self._config, self._history, self._same = config, history, same
        self._numbers: dict[str, int] = {}
        self._asked: dict[str, optuna.Trial] = {}
        self._seen = {same(trial.params) for trial in past}
        unfinished = [trial for trial in past if trial.result.state == "running"]
        self._again = unfinished if past else [Trial(number=0, params=given or {})]
        self._next = history.next_number()
        self.exhausted = False
        self._distributions = {key: dimension.distribution() for key, dimension in config.space.items()}
        self._study = as_study(config.space, past, sampler=RandomSampler())

    def suggest(self, trial_id: str) -> Any:
        """The next trial, recorded in the history as begun."""
        if self._again:
            begun = self._again.pop(0)
            self._enqueue(trial_id, begun.params)
        else:
            params = self._draw(trial_id)
            if params is None:
                self.exhausted = True
                return Searcher.FINISHED
            begun = Trial(number=self._next, params=params)
            self._next += 1
        self._numbers[trial_id] = begun.number
        self._seen.add(self._same(begun.params))
        self._history.begin(begun)
        return {"number": begun.number, "params": begun.params}

    def _enqueue(self, trial_id: str, params: Params) -> None:
        """Add a trial that Optuna did not propose to its study, if the space contains the parameters."""
        if is_in(self._config.space, params):
            self._study.enqueue_trial(to_optuna(self._config.space, params))
            self._asked[trial_id] = self._study.ask(self._distributions)

    def _draw(self, trial_id: str) -> Params | None:
        """Parameters that no trial has used; None if all have been tried."""
        for redraw in range(_REDRAWS):
            seed = mix("proposal", self._config.search.seed, self._next, redraw) % 2**31
            # a new sampler for each draw: a kept one would depend on the trials that this process happened to run
            self._study.sampler = _sampler(self._config.search, seed)
            proposed = self._study.ask(self._distributions)
            params = from_optuna(self._config.space, proposed.params)
            if self._same(params) not in self._seen:
                self._asked[trial_id] = proposed
                return params
            self._study.tell(proposed, state=TrialState.FAIL)
        for cell in cells(self._config.space, _MOST_CELLS):  # few are left, and draws miss them
            if self._same(cell) not in self._seen:
                self._enqueue(trial_id, cell)
                return cell
        return None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Report the value of a trial, or its failure, to the sampler."""
        proposed = self._asked.pop(trial_id, None)
        if proposed is None:
            return
        if (recorded := self._history.result(self._numbers[trial_id])) is not None:
            value = recorded.value
        else:  # Ray Tune has ended it, and the scribe records it after this
            value = None if error else (result or {}).get(VALUE)
        self._study.tell(proposed, value, state=state_of(value))

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the history is enough."""


def _sampler(search: SamplerConfig, seed: int) -> BaseSampler:
    match search.kind:
        case "tpe":
            return TPESampler(n_startup_trials=search.startup, seed=seed)
        case "gp":
            return GPSampler(n_startup_trials=search.startup, seed=seed)
        case "random":
            return RandomSampler(seed)


class Asha(ASHAScheduler):  # type: ignore[misc]
    """Ray Tune's ASHA that also knows trials of earlier processes, and never stops trial 0, the config as given."""

    def __init__(self, config: AshaConfig, past: Sequence[Trial]) -> None:
        grace, reduction = config.grace, config.reduction
        super().__init__(STEP, VALUE, "max", max_t=_FOREVER, grace_period=grace, reduction_factor=reduction)
        for trial in ended(past):
            known = SimpleNamespace(trial_id=f"past-{trial.number}", config={"number": trial.number})
            self.on_trial_add(None, known)
            for step, value in trial.result.curve:
                self.on_trial_result(None, known, {STEP: step, VALUE: value})

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        action = super().on_trial_result(controller, trial, result)
        return str(self.CONTINUE if trial.config["number"] == 0 else action)


class Ending(_Unsaved, tune.Stopper):  # type: ignore[misc]
    """Ends the trials that run: at a request, when the time left is up, or after an outage."""

    def __init__(self, stopping: Callable[[], bool], left_s: float) -> None:
        self._stopping, self._left_s, self._end_s = stopping, left_s, math.inf
        self.outage: UnavailableError | None = None
        """The outage that a trial met after Ray Tune had restarted it."""

    def start_clock(self) -> None:
        """Count the time left from here, unless an earlier trial has started the clock."""
        self._end_s = min(self._end_s, time.monotonic() + self._left_s)

    def is_late(self) -> bool:
        return time.monotonic() >= self._end_s

    def stop_all(self) -> bool:
        return self._stopping() or self.is_late() or self.outage is not None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        return False


class Scribe(_Unsaved, TrialProgressCallback):  # type: ignore[misc]
    """Logs and reports the trials that end, and records what their processes cannot; replaces Ray Tune's reporter."""

    def __init__(
        self, history: History, past: Sequence[Trial], ending: Ending, most: int, report: Report, advance: Advance
    ) -> None:
        self._history, self._ending = history, ending
        self._most, self._report, self._advance = most, report, advance
        self._ended = ended(past)
        self._curves: dict[int, list[tuple[int, float]]] = {}
        self._began: dict[int, float] = {}
        self._before = {trial.number: trial.result.seconds for trial in past}

    def record_late(self) -> None:
        """Record the trials that ran when the time was up; Ray Tune has ended them without a word."""
        for number in self._began:
            if self._history.result(number) is None:
                self._record(number, state="stopped", value=self._last_value(number), reason=LATE)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        self._began.setdefault(trial.config["number"], time.monotonic())  # its process may have died since
        self._ending.start_clock()

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        """Log why a trial restarts: its process has died, or it met an outage or an input error."""
        log.warning("trial %d: %s; it starts again", trial.config["number"], _cause(trial) or _death(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any  # noqa: ARG002
    ) -> None:  # fmt: skip
        """Keep a trial's value at a step at which ASHA decides."""
        points = self._curves.setdefault(trial.config["number"], [])
        if VALUE in result and (not points or result[STEP] > points[-1][0]):
            points.append((result[STEP], result[VALUE]))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        """Log the result of a trial that finished; record and log that of a trial that ASHA stopped."""
        if (recorded := self._history.result(trial.config["number"])) is not None:
            self._add(trial, recorded)
        elif not self._ending.stop_all():  # otherwise it runs again next time, or is late
            self._end(trial, state="stopped", value=self._last_value(trial.config["number"]))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        """Record the failure of a trial that was restarted in vain; an outage is none, and ends the search."""
        cause = _cause(trial)
        if isinstance(cause, UnavailableError):
            self._ending.outage = cause
        elif not self._ending.stop_all():
            died = f"{_death(trial)}, {trial.num_failures} times; lower concurrent, or give trials more memory"
            self._end(trial, state="failed", reason=died if cause is None else str(cause))

    def _seconds(self, number: int) -> float:
        """Time of all attempts at a trial."""
        now = time.monotonic()
        return round(self._before.get(number, 0.0) + now - self._began.get(number, now), 3)

    def _last_value(self, number: int) -> float | None:
        points = self._curves.get(number)
        return points[-1][1] if points else None

    def _record(self, number: int, **outcome: Any) -> Result:
        curve = tuple(self._curves.get(number, ()))
        return self._history.end(number, Result(curve=curve, seconds=self._seconds(number), **outcome))

    def _end(self, trial: Any, **outcome: Any) -> None:
        self._add(trial, self._record(trial.config["number"], **outcome))

    def _add(self, trial: Any, result: Result) -> None:
        """Log the result beside the best so far, and report it."""
        number, params = trial.config["number"], trial.config["params"]
        self._ended.append(Trial(number=number, params=params, result=result))
        self._report({"trial": number, **result.model_dump(mode="json", exclude={"curve"})})
        leader = best(self._ended)
        so_far = f" (best {leader.result.value:.4f}, trial {leader.number})" if leader else ""
        how = " when stopped" if result.state == "stopped" else ""
        outcome = f"{result.state}: {result.reason}" if result.value is None else f"{result.value:.4f}"
        log.info(
            "trial %d: %s%s in %.0f s%s; %d of %d",
            number, outcome, how, result.seconds, so_far, len(self._ended), self._most,
        )  # fmt: skip
        self._advance(1)


def _error(trial: Any) -> Exception | None:
    """What the trial met last; None if its process died without an error of Ray."""
    path = trial.pickled_error_file  # written at once; `get_pickled_error` reads a copy, which comes later
    return cloudpickle.loads(Path(path).read_bytes()) if path and Path(path).exists() else None


def _cause(trial: Any) -> InputError | UnavailableError | None:
    """What a trial met outside its attempt, such as a damaged record; None if its process died."""
    error = _error(trial)
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, InputError | UnavailableError) else None


def _death(trial: Any) -> str:
    """Ray's error for a process that died, in a few words."""
    error = _error(trial)
    text = " ".join(str(error).split())
    return f"its process died ({type(error).__name__}: {text[:160]})" if error is not None else "its process died"


def run_under_tune(
    config: SearchConfig,
    trial: TrialFunction,
    history: History,
    past: Sequence[Trial],
    proposals: Proposals,
    *,
    report: Report,
    stopping: Callable[[], bool],
    left_s: float,
) -> None:
    """Run the remaining trials side by side, each in a process of its own, on the cluster that is connected."""
    ray_internals.keep_keys_out_of_trials()
    remaining = config.trials - len(ended(past))
    with storage.scratch.directory() as scratch, progress("tune", remaining, "trials") as advance:
        ending = Ending(stopping, left_s)
        scribe = Scribe(history, past, ending, config.trials, report, advance)
        tuner = tune.Tuner(
            tune.with_resources(_trainable(config, trial, history), {"CPU": config.cpus, "GPU": config.gpus}),
            tune_config=tune.TuneConfig(
                search_alg=proposals,
                scheduler=Asha(config.asha, past) if config.asha else None,
                num_samples=remaining,
                max_concurrent_trials=config.concurrent,
                reuse_actors=True,  # starting a process takes longer than a short trial
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(scratch),
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=_RESTARTS),
                callbacks=[scribe],
                stop=ending,
            ),
        )
        tuner.fit()
    if ending.outage is not None:
        raise ending.outage
    if ending.is_late() and not stopping():
        scribe.record_late()
        log.info("tune: its %g minutes are up; the same command with more continues", config.minutes)
    elif proposals.exhausted:
        log.info("every setting of the space was tried; the search ends before its %d trials", config.trials)


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
