"""The results of a search as files: a table of the trials, a report with charts, a storage for optuna-dashboard."""

import csv
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from ltrscale import storage
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Command, Document, Points, Section, Table, Text
from ltrscale.reports.render import REPORT, files
from ltrscale.storage import join
from ltrscale.tuning.history import Trial, as_study, best, counted, ended, value_of
from ltrscale.tuning.space import Dimension, Space, as_trial, is_in, label

TABLE, JOURNAL = "trials.csv", "optuna.journal"
RESULTS = (TABLE, JOURNAL, REPORT, "history.png", "parallel.png", "importances.png")
"""The files that `write_results` writes."""
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
    """True if a trial's config uses this key, which depends on the key's `when`."""
    left_out: int = 0
    """Trials of an earlier space that lie outside this one."""

    @cached_property
    def keys(self) -> dict[str, str]:
        """Each key with its shortest ending that no other key has."""
        return {key: _ending(key, self.space) for key in self.space}

    def shown(self, trial: Trial, key: str, *, exactly: bool = False) -> str:
        """A trial's value of a key, in four digits or exactly; empty if its config does not use the key or set it."""
        if key not in trial.params or not self.used(trial, key):
            return ""
        value = trial.params[key]
        return _shown(trial, key) if isinstance(value, float) and not exactly else self.space[key].name(value)


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
    endings = (".".join(parts[-count:]) for count in range(1, len(parts)))
    return next((ending for ending in endings if sum(f".{k}".endswith(f".{ending}") for k in space) == 1), key)


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
    outside = f" {outcome.left_out} more lie outside the space, which has changed." if outcome.left_out else ""
    opening = Text(
        f"{len(trials)} trials: {counted(trials)}. Metric: {outcome.metric} on the validation split.{outside}"
    )
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
    value, first = value_of(leader), next((trial for trial in trials if trial.number == 0), None)
    if leader is first:
        compared = "no trial is better than the settings as given"
    elif first is not None and first.result.state == "complete":
        given = value_of(first)
        compared = f"the settings as given (trial 0) have {given:.4f}, a difference of {value - given:+.4f}"
    else:
        how = ": ".join(filter(None, [first.result.state, first.result.reason])) if first else "is missing"
        compared = f"the trial of the settings as given is not complete ({how})"
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
    """The metric of each trial that has one, and the best so far of those that are complete."""
    rows: list[dict[str, float | str]] = [{"x": t.number, "y": value_of(t), "series": "trial"} for t in trials]
    complete = [trial for trial in trials if trial.result.state == "complete"]
    highest = itertools.accumulate(map(value_of, complete), max)
    rows += [{"x": t.number, "y": y, "series": "best so far"} for t, y in zip(complete, highest, strict=True)]
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
            rows.append({**row, "shown": outcome.shown(trial, key) or dimension.name(value)})
        for value in dimension.choices or dimension.bounds:
            text = dimension.name(value)[:_LONGEST_LABEL] if dimension.choices else f"{value:g}"
            ends.append({"axis": outcome.keys[key], "place": scaled(value), "shown": text})
    return charts.parallel(rows, ends, title=outcome.metric)


def _scale(dimension: Dimension) -> Callable[[Any], float]:
    """Map a value to its place on the axis, from 0 to 1."""
    if dimension.choices is not None:
        names = [dimension.name(choice) for choice in dimension.choices]
        return lambda value: names.index(dimension.name(value)) / max(1, len(names) - 1)
    change: Callable[[float], float] = math.log if dimension.log else float
    low, high = map(change, dimension.bounds)
    return lambda value: (change(value) - low) / (high - low)


def _importances(outcome: SearchOutcome, trials: Sequence[Trial]) -> charts.Spec:
    """Optuna's importance of each setting to the metric, as shares that sum to 1."""
    shares = optuna.importance.get_param_importances(as_study(outcome.space, trials))
    rows = [{"name": outcome.keys[key], "value": share, "series": "importance"} for key, share in shares.items()]
    return charts.bars(rows, title=f"importance to {outcome.metric}")
