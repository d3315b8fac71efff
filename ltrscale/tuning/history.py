"""The stored trials of a search, which are all it needs to resume, and its results as files.

`trials/00007/trial.json` exists once trial 7 has begun, `result.json` once it has ended. A result is written once and
never changes. The results are a table of the trials, a report with pictures, and a storage for optuna-dashboard.
"""

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from pydantic import Field

from ltrscale import storage
from ltrscale.config import Strict, validate
from ltrscale.errors import InputError
from ltrscale.origin import by_content
from ltrscale.progress import log
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Command, Document, Points, Section, Table, Text
from ltrscale.reports.findings import files
from ltrscale.storage import join
from ltrscale.tuning.space import Dimension, Space, as_trial, is_in, label

_SEARCH, _TRIALS, _BEGUN, _ENDED = "search.json", "trials", "trial.json", "result.json"


LATE = "the search's minutes were up"


class Result(Strict):
    """The state of a trial, and how it has ended."""

    state: Literal["running", "complete", "stopped", "failed"]
    """`running`: not ended; `complete`: it finished; `stopped`: early, because other trials were better at the same
    step, or the search's minutes were up; `failed`: it raised an error, or its process died."""
    value: float | None = None
    """The metric; of a stopped trial, at its last step, if there was one."""
    curve: tuple[tuple[int, float], ...] = ()
    """Steps, and the metric at each."""
    seconds: float = Field(0.0, ge=0)
    """Time since its last start."""
    reason: str | None = None
    """Cause of a failure, or `LATE`."""


class Trial(Strict):
    """A trial that has begun."""

    number: int = Field(ge=0)
    """From 0, in the order of their beginnings."""
    params: dict[str, Any]
    """A value for every key of the space; trial 0 may have none, which means the config as given."""
    result: Result = Result(state="running")


def lying_in(space: Space, trials: Sequence[Trial]) -> list[Trial]:
    """The trials that a search of a space can reuse: trial 0, and those that the space contains."""
    return [trial for trial in trials if trial.number == 0 or is_in(space, trial.params)]


@dataclass(frozen=True)
class History:
    """The history below a directory."""

    url: str
    space: Space | None = None
    """Trials outside it, left by a search of another space, are ignored; None reads all."""

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin a history, or check that the existing one belongs to this search.

        Only the values of the space's keys may change; an `InputError` names the first other difference.
        """
        url = join(self.url, _SEARCH)
        stored = json.loads(json.dumps(identity))  # tuples become lists, as in the file
        if storage.create_exclusively(url, _json_lines(stored)):
            return
        before = _identity_in(url)
        if not _is_same(fixed := _without_values(before), going_on := _without_values(stored)):
            raise InputError(
                f"{self.url}: holds the history of another search, which differs in "
                f"{_first_difference(fixed, going_on)}; choose another out, or remove that history with --fresh"
            )
        if before.get("space") != stored.get("space"):
            storage.check_lease(self.url)
            storage.write_bytes(url, _json_lines({**before, "space": stored["space"]}))
            known, kept = len(History(self.url).trials()), len(self.trials())
            log.info(
                "tune: the space has changed: %d of the %d trials go on, %d lie outside", kept, known, known - kept
            )

    def identity(self) -> dict[str, Any] | None:
        """The identity of the existing history; None if no history exists."""
        url = join(self.url, _SEARCH)
        if not storage.exists(url):
            return None
        return _identity_in(url)

    def is_of_another(self, identity: Mapping[str, Any]) -> bool:
        """Whether a history exists and belongs to another search."""
        before = self.identity()
        return before is not None and not _is_same(before, json.loads(json.dumps(identity)))

    def folder(self, number: int) -> str:
        """The directory of a trial."""
        return join(self.url, _TRIALS, f"{number:05d}")

    def begin(self, trial: Trial) -> None:
        """Record that a trial begins, or restarts; an `InputError` if another process has already begun it."""
        storage.check_lease(self.url)
        url = join(self.folder(trial.number), _BEGUN)
        if not storage.create_exclusively(url, _json_lines(trial.model_dump(mode="json", exclude={"result"}))):
            raise InputError(f"{url}: another process has begun this trial meanwhile; run one search at a time here")

    def end(self, number: int, result: Result) -> Result:
        """Record the result of a trial, unless it already has one; returns the recorded result."""
        storage.check_lease(self.url)
        url = join(self.folder(number), _ENDED)
        if storage.create_exclusively(url, _json_lines(result.model_dump(mode="json"))):
            return result
        return _result_in(url)

    def result(self, number: int) -> Result | None:
        """The result of a trial; None if it has not ended."""
        url = join(self.folder(number), _ENDED)
        return _result_in(url) if storage.exists(url) else None

    def trials(self) -> list[Trial]:
        """The trials that have begun, by number."""
        trials = []
        for folder in storage.children(join(self.url, _TRIALS)):
            url = join(folder, _BEGUN)
            if storage.exists(url):
                trial = validate(Trial, _read(url), url)
                if folder != self.folder(trial.number):
                    raise InputError(f"{url}: number {trial.number} does not match its directory; remove it")
                trials.append(trial.replace(result=self.result(trial.number) or Result(state="running")))
        trials.sort(key=lambda trial: trial.number)
        return trials if self.space is None else lying_in(self.space, trials)

    def next_number(self) -> int:
        """A number above those of all trials, including those outside the space; at least 1."""
        names = (folder.rpartition("/")[2] for folder in storage.children(join(self.url, _TRIALS)))
        return max((int(name) for name in names if name.isdecimal()), default=0) + 1

    def remove(self, loose: Collection[str] = ()) -> None:
        """Delete the history, the outputs that trials committed, and the files named `loose` below the trials."""
        for folder in storage.children(join(self.url, _TRIALS)):
            if storage.exists(join(folder, _BEGUN)):  # there may be unrelated folders
                storage.withdraw_below(folder, loose)
                for name in (_ENDED, _BEGUN):  # the marker goes last, so an interrupted removal can resume
                    storage.remove_with_folders(join(folder, name), self.url)
        storage.remove(join(self.url, _SEARCH))


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities are equal, ignoring where the inputs are stored."""
    # `data` lists files by URL; the inputs already state their content
    first, second = ({key: value for key, value in identity.items() if key != "data"} for identity in (one, other))
    return bool(by_content(first) == by_content(second))


def _result_in(url: str) -> Result:
    result = validate(Result, _read(url), url)
    if result.state == "running":
        raise InputError(f"{url}: is no result, as the trial has not ended; remove it")
    return result


def _identity_in(url: str) -> dict[str, Any]:
    identity = _read(url)
    space = identity.get("space", {}) if isinstance(identity, dict) else None
    if not isinstance(space, dict) or not all(isinstance(dimension, dict) for dimension in space.values()):
        raise InputError(f"{url}: does not say what was searched; start anew with --fresh")
    assert isinstance(identity, dict)
    return identity


def _without_values(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity without the ranges and choices of its space; each key's `when` stays, as it changes the settings."""
    space = {key: {"when": dimension.get("when")} for key, dimension in identity.get("space", {}).items()}
    return {**identity, "space": space}


def ended(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that have ended."""
    return [trial for trial in trials if trial.result.state != "running"]


def trials_by_value(trials: Sequence[Trial]) -> list[Trial]:
    """The complete trials, highest value first; of equal values, the earlier trial first."""
    complete = [trial for trial in trials if trial.result.state == "complete" and trial.result.value is not None]
    return sorted(complete, key=lambda trial: (-value_of(trial), trial.number))


def value_of(trial: Trial) -> float:
    """The value of a trial that has one."""
    assert trial.result.value is not None
    return trial.result.value


def best(trials: Sequence[Trial]) -> Trial | None:
    """The first of `trials_by_value`; None if no trial is complete."""
    return next(iter(trials_by_value(trials)), None)


def as_study(space: Space, trials: Sequence[Trial], **options: Any) -> optuna.Study:
    """The ended trials that the space contains as a study of Optuna; `options` go to `create_study`."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", **options)
    for trial in ended(trials):
        if is_in(space, trial.params):
            value = trial.result.value
            study.add_trial(as_trial(space, trial.params, state=state_of(value), value=value))
    return study


def state_of(value: float | None) -> TrialState:
    """Optuna's state of an ended trial with this value."""
    return TrialState.FAIL if value is None else TrialState.COMPLETE


def _json_lines(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _read(url: str) -> Any:
    try:
        return json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{url}: not JSON ({error}); remove the directory of this trial, or start anew with --fresh"
        ) from error


def _first_difference(a: Any, b: Any, key: str = "") -> str:
    """The first dotted key at which two plain values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in [*a, *(name for name in b if name not in a)]:
            if a.get(name) != b.get(name) or (name in a) != (name in b):
                return _first_difference(a.get(name), b.get(name), f"{key}.{name}" if key else str(name))
    return key or "everything"


TABLE, JOURNAL = "trials.csv", "optuna.journal"
PICTURES = ("history.png", "parallel.png", "importances.png")
_LONGEST_LABEL = 24
_FEWEST_FOR_IMPORTANCES = 4
_TICKS = 20


def _shown(trial: Trial, key: str) -> str:
    """A trial's value of a key, in four digits; empty if it sets none."""
    value = trial.params.get(key, "")
    return f"{value:.4g}" if isinstance(value, float) else label(value)


@dataclass(frozen=True)
class SearchOutcome:
    """A finished search, as the report shows it."""

    space: Space
    trials: Sequence[Trial]
    metric: str
    used: Callable[[Trial, str], bool]
    """Whether a trial's config uses this key, which depends on the key's `when`."""
    left_out: int = 0
    """Trials of an earlier space that lie outside this one."""

    @property
    def keys(self) -> dict[str, str]:
        """Each key with its shortest ending that no other key has."""
        return {key: _ending(key, self.space) for key in self.space}

    def shown(self, trial: Trial, key: str, *, exactly: bool = False) -> str:
        """A trial's value of a key, in four digits or exactly; empty if its config does not use the key or set it."""
        if not self.used(trial, key):
            return ""
        return label(trial.params[key]) if exactly and key in trial.params else _shown(trial, key)


def write_results(out: str, outcome: SearchOutcome, *, commands: Sequence[str]) -> None:
    """Write the table, the report with `commands` that train again, Optuna's journal, and pictures."""
    written = {TABLE: _table(outcome).encode(), JOURNAL: _journal(out, outcome), **files(document(outcome, commands))}
    for name, content in written.items():
        storage.write_bytes(join(out, name), content)


def _journal(out: str, outcome: SearchOutcome) -> bytes:
    """The ended trials as a storage for optuna-dashboard."""
    states = {"complete": TrialState.COMPLETE, "stopped": TrialState.PRUNED, "failed": TrialState.FAIL}
    with storage.scratch.directory() as folder:
        journal = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
        study = as_study({}, [], storage=journal, study_name=out.rstrip("/"))
        study.set_user_attr("metric", outcome.metric)
        for trial in ended(outcome.trials):
            inside = is_in(outcome.space, trial.params)  # Optuna refuses other parameters
            study.add_trial(
                as_trial(
                    outcome.space if inside else {},
                    trial.params,
                    state=states[trial.result.state],
                    value=trial.result.value if trial.result.state == "complete" else None,
                    intermediate_values=dict(trial.result.curve),
                    user_attrs={"trial": trial.number, "seconds": trial.result.seconds},
                )
            )
        return (folder / JOURNAL).read_bytes()


def _ending(key: str, space: Space) -> str:
    parts = key.split(".")
    for count in range(1, len(parts)):
        ending = ".".join(parts[-count:])
        if sum(other == ending or other.endswith(f".{ending}") for other in space) == 1:
            return ending
    return key


def _table(outcome: SearchOutcome) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["trial", "state", outcome.metric, "seconds", *outcome.space, "reason"])
    for trial in ended(outcome.trials):
        result = trial.result
        value = "" if result.value is None else repr(result.value)
        params = [outcome.shown(trial, key, exactly=True) for key in outcome.space]
        rows.writerow([trial.number, result.state, value, result.seconds, *map(_cell, [*params, result.reason or ""])])
    return text.getvalue()


def _cell(text: str) -> str:
    """The text, escaped if a spreadsheet would take it for a formula.

    Example:
        >>> [_cell(text) for text in ("=HYPERLINK(A1)", "@SUM(A1)", "-1+A1", "-1e-05", "mlp", "")]
        ["'=HYPERLINK(A1)", "'@SUM(A1)", "'-1+A1", '-1e-05', 'mlp', '']
    """
    is_formula = text.startswith(tuple("=+-@\t\r")) and not re.fullmatch(r"-[0-9.]+(e[+-]?[0-9]+)?|-inf", text)
    return f"'{text}" if is_formula else text


def document(outcome: SearchOutcome, commands: Sequence[str]) -> Document:
    """The report of a search; `commands` train again with the best settings."""
    trials, leader = ended(outcome.trials), best(outcome.trials)
    states = [trial.result.state for trial in trials]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("complete", "stopped", "failed") if s in states)
    outside = f" {outcome.left_out} more lie outside the space, which has changed." if outcome.left_out else ""
    opening = Text(f"{len(trials)} trials: {counts}. Metric: {outcome.metric} on the validation split.{outside}")
    table = trial_table(trials, outcome.metric, outcome.keys, outcome.shown)
    sections = [Section("Trials, best first", [table])]
    if leader is not None:
        again = (Text("Train it again:"), Command("\n".join(commands)))
        sections.insert(0, Section("Best", [*_best(outcome, leader, trials), *again]))
    failed = {trial.number: trial.result.reason or "" for trial in trials if trial.result.state == "failed"}
    if failed:
        sections.append(Section("Failed", [Points([f"trial {number}: {why}" for number, why in failed.items()])]))
    return Document("Search", (opening, *_result_charts(outcome)), sections)


def _best(outcome: SearchOutcome, leader: Trial, trials: Sequence[Trial]) -> Iterator[Block]:
    value, first = value_of(leader), next((trial.result for trial in trials if trial.number == 0), None)
    if leader.number == 0:
        compared = "no trial is better than the settings as given"
    elif first is None or first.value is None:
        compared = "with the settings as given the trial failed"
    else:
        compared = f"the settings as given (trial 0) have {first.value:.4f}, a difference of {value - first.value:+.4f}"
    yield Text(f"Trial {leader.number}: {value:.4f}; {compared}.")
    if settings := [f"{key}: {shown}" for key in outcome.space if (shown := outcome.shown(leader, key))]:
        yield Points(settings)


def trial_table(
    trials: Sequence[Trial], metric: str, keys: Mapping[str, str], shown: Callable[[Trial, str], str] = _shown
) -> Table:
    """The trials, best first, those without a value last; `keys` have the name of each column."""

    def order(trial: Trial) -> tuple[bool, float, int]:
        return trial.result.value is None, -(trial.result.value or 0.0), trial.number

    return Table.from_rows(
        [
            {
                "trial": f"{trial.number}",
                metric: trial.result.value,
                "state": trial.result.state,
                "seconds": f"{trial.result.seconds:.0f}",
                **{name: "as given" if not trial.params else shown(trial, key) or "-" for key, name in keys.items()},
            }
            for trial in sorted(trials, key=order)
        ]
    )


def _result_charts(outcome: SearchOutcome) -> Iterator[Chart]:
    """Charts of the trials that have a value, if there are at least two values."""
    valued = [trial for trial in outcome.trials if trial.result.value is not None]
    drawn = [trial for trial in valued if is_in(outcome.space, trial.params)]
    if len({value_of(trial) for trial in valued}) < 2:  # nothing to compare
        return
    metric = outcome.metric
    yield Chart(history_chart(valued, metric), f"{metric} of each trial, and the best so far", "history")
    if drawn:
        yield Chart(_parallel(outcome, drawn), f"the settings of each trial, coloured by {metric}", "parallel")
    if len(outcome.space) > 1 and len(drawn) >= _FEWEST_FOR_IMPORTANCES and len(set(map(value_of, drawn))) > 1:
        yield Chart(_importances(outcome, drawn), f"importance of each setting to {metric}", "importances")


def history_chart(trials: Sequence[Trial], metric: str) -> charts.Spec:
    """The metric of each trial that has one, and the best so far."""
    rows: list[dict[str, float | str]] = [{"x": t.number, "y": value_of(t), "series": "trial"} for t in trials]
    highest = itertools.accumulate(map(value_of, trials), max)
    rows += [{"x": t.number, "y": y, "series": "best so far"} for t, y in zip(trials, highest, strict=True)]
    ticks = [trial.number for trial in trials] if len(trials) <= _TICKS else []
    return charts.lines(rows, x="trial", y=metric, ticks=ticks)


def _parallel(outcome: SearchOutcome, trials: Sequence[Trial]) -> charts.Spec:
    """Every trial as a line over the axes of its settings, coloured by the metric."""
    rows: list[dict[str, object]] = []
    ends: list[dict[str, object]] = []
    for key, dimension in outcome.space.items():
        scaled = _scale(dimension)
        for trial in trials:
            value = trial.params[key]
            row = {"line": trial.number, "axis": outcome.keys[key], "place": scaled(value), "value": value_of(trial)}
            rows.append({**row, "shown": outcome.shown(trial, key) or label(value)})
        for value in dimension.choices or dimension.bounds:
            text = label(value)[:_LONGEST_LABEL] if dimension.choices else f"{value:g}"
            ends.append({"axis": outcome.keys[key], "place": scaled(value), "shown": text})
    return charts.parallel(rows, ends, title=outcome.metric)


def _scale(dimension: Dimension) -> Callable[[Any], float]:
    """Map a value to its place on the axis, from 0 to 1."""
    if dimension.choices is not None:
        names = [label(choice) for choice in dimension.choices]
        return lambda value: names.index(label(value)) / max(1, len(names) - 1)
    change: Callable[[float], float] = math.log if dimension.log else float
    low, high = map(change, dimension.bounds)
    return lambda value: (change(value) - low) / (high - low)


def _importances(outcome: SearchOutcome, trials: Sequence[Trial]) -> charts.Spec:
    """Optuna's importance of each setting to the metric, as shares that sum to 1."""
    shares = optuna.importance.get_param_importances(as_study(outcome.space, trials))
    rows = [{"name": outcome.keys[key], "value": share, "series": "importance"} for key, share in shares.items()]
    return charts.bars(rows, title=f"importance to {outcome.metric}")
