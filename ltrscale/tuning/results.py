"""The results of a search for people: a table of its trials, a report, and Optuna's pictures."""

import csv
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState, create_trial
from optuna.visualization import matplotlib as pictures

from ltrscale import storage
from ltrscale.markdown import code, escape
from ltrscale.storage import join
from ltrscale.tuning.history import TrialRecord, best, ended
from ltrscale.tuning.space import Dimension, Space, is_in, label, to_optuna

TABLE, REPORT = "trials.csv", "report.md"
PICTURES = ("history.png", "parallel.png", "importances.png")
_LONGEST_LABEL = 24
_FEWEST_FOR_IMPORTANCES = 4


@dataclass(frozen=True)
class Outcome:
    """A finished search, as the report shows it."""

    space: Space
    trials: Sequence[TrialRecord]
    metric: str
    used: Callable[[TrialRecord, str], bool]
    """Whether a trial's config uses this key, which depends on the key's `when`."""

    @property
    def keys(self) -> dict[str, str]:
        """Each key with its shortest ending that no other key has."""
        return {key: _ending(key, self.space) for key in self.space}

    def shown(self, trial: TrialRecord, key: str, *, exactly: bool = False) -> str:
        """A trial's value of a key, in four digits or exactly; empty if its config does not use the key or set it."""
        params = trial.begun.params
        if key not in params or not self.used(trial, key):
            return ""
        value = params[key]
        return f"{value:.4g}" if isinstance(value, float) and not exactly else label(value)


def write_results(out: str, outcome: Outcome, *, commands: Sequence[str]) -> None:
    """Write the table of the trials, the report, and pictures if there are values to compare.

    Args:
        out: directory of the search.
        outcome: the finished search.
        commands: shell commands that train with the best settings again.
    """
    drawn = _draw(out, outcome)
    storage.write_bytes(join(out, TABLE), _table(outcome).encode())
    storage.write_bytes(join(out, REPORT), _report(outcome, commands, drawn).encode())


def _ending(key: str, space: Space) -> str:
    parts = key.split(".")
    for count in range(1, len(parts)):
        ending = ".".join(parts[-count:])
        if sum(other == ending or other.endswith(f".{ending}") for other in space) == 1:
            return ending
    return key


def _table(outcome: Outcome) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["trial", "state", outcome.metric, "seconds", *outcome.space, "reason"])
    for trial in ended(outcome.trials):
        result = trial.result
        assert result is not None
        value = "" if result.value is None else repr(result.value)
        params = [outcome.shown(trial, key, exactly=True) for key in outcome.space]
        rows.writerow([trial.number, result.state, value, result.seconds, *params, result.reason or ""])
    return text.getvalue()


def _report(outcome: Outcome, commands: Sequence[str], drawn: Sequence[str]) -> str:
    trials, leader = ended(outcome.trials), best(outcome.trials)
    states = [t.result.state for t in trials if t.result]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("complete", "stopped", "failed") if s in states)
    lines = ["# Search", "", f"{len(trials)} trials: {counts}. Metric: {outcome.metric} on the validation split.", ""]
    if leader is not None:
        lines += ["## Best", "", *_best(outcome, leader, trials), ""]
        lines += ["Train it again:", "", "```sh", *commands, "```", ""]
    if drawn:
        lines += [*(f"![{name}]({name})" for name in drawn), ""]
    lines += ["## Trials, best first", "", *_rows(outcome, trials), ""]
    if failed := [t for t in trials if t.result and t.result.state == "failed"]:
        lines += [
            "## Failed",
            "",
            *(f"- trial {t.number}: {escape(t.result.reason or '')}" for t in failed if t.result),
            "",
        ]
    return "\n".join(lines)


def _best(outcome: Outcome, leader: TrialRecord, trials: Sequence[TrialRecord]) -> list[str]:
    assert leader.result is not None
    assert leader.result.value is not None
    value, first = leader.result.value, next((t.result for t in trials if t.number == 0), None)
    if leader.number == 0:
        compared = "no trial is better than the settings as given"
    elif first is None or first.value is None:
        compared = "with the settings as given the trial failed"
    else:
        compared = f"the settings as given (trial 0) have {first.value:.4f}, a difference of {value - first.value:+.4f}"
    settings = [f"- {code(key)}: {escape(shown)}" for key in outcome.space if (shown := outcome.shown(leader, key))]
    return [f"Trial {leader.number}: {value:.4f}; {compared}.", "", *settings]


def _rows(outcome: Outcome, trials: Sequence[TrialRecord]) -> list[str]:
    """All trials, the best first."""

    def order(trial: TrialRecord) -> tuple[bool, float, int]:
        value = trial.result.value if trial.result else None
        return value is None, -(value or 0.0), trial.number

    rows = [f"| trial | {outcome.metric} | state | seconds | {' | '.join(map(escape, outcome.keys.values()))} |"]
    rows.append("|---" * (4 + len(outcome.space)) + "|")
    for trial in sorted(trials, key=order):
        assert trial.result is not None
        value = "-" if trial.result.value is None else f"{trial.result.value:.4f}"
        given = trial.number == 0 and not trial.begun.params
        params = ["as given" if given else escape(outcome.shown(trial, key)) or "-" for key in outcome.space]
        rows.append(
            f"| {trial.number} | {value} | {trial.result.state} | {trial.result.seconds:.0f} | {' | '.join(params)} |"
        )
    return rows


def _draw(out: str, outcome: Outcome) -> list[str]:
    """Draw Optuna's pictures of the trials that have a value; returns the names of the pictures."""
    study = _study(outcome)
    values = {trial.value for trial in study.trials}
    if len(values) < 2:  # nothing to compare
        return []
    history, parallel, importances = PICTURES
    plots: dict[str, tuple[Callable[[], Axes], int]] = {
        history: (lambda: pictures.plot_optimization_history(study, target_name=outcome.metric), 1),
        parallel: (
            lambda: pictures.plot_parallel_coordinate(study, target_name=outcome.metric),
            1 + len(outcome.space),
        ),
    }
    if len(outcome.space) > 1 and len(study.trials) >= _FEWEST_FOR_IMPORTANCES:
        plots[importances] = (lambda: pictures.plot_param_importances(study, target_name=outcome.metric), 1)
    for name, (draw, columns) in plots.items():
        _save(join(out, name), draw, columns=columns)
    return list(plots)


def _study(outcome: Outcome) -> optuna.Study:
    """A study of the trials that have a value, with key names short enough for the axes of a picture."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    space = {key: _legible(dimension) for key, dimension in outcome.space.items()}
    for trial in ended(outcome.trials):
        assert trial.result is not None
        if trial.result.value is not None and is_in(outcome.space, trial.begun.params):
            drawn = to_optuna(outcome.space, trial.begun.params)
            study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE,
                    value=trial.result.value,
                    params={outcome.keys[key]: space[key][1].get(value, value) for key, value in drawn.items()},
                    distributions={outcome.keys[key]: distribution for key, (distribution, _) in space.items()},
                )
            )
    return study


def _legible(dimension: Dimension) -> tuple[BaseDistribution, dict[str, Any]]:
    """A dimension for pictures, and the name of each choice in them; numbers remain numbers, in their order."""
    if dimension.choices is None:
        return dimension.distribution(), {}
    names: dict[str, Any] = {}
    if all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in dimension.choices):
        names = {label(choice): choice for choice in dimension.choices}
        return CategoricalDistribution(dimension.choices), names
    for place, name in enumerate(map(label, dimension.choices), start=1):
        short = name if len(name) <= _LONGEST_LABEL else f"{name[: _LONGEST_LABEL - 3]}..."
        names[name] = f"{place}: {short}" if short in names.values() else short
    return CategoricalDistribution(list(names.values())), names


def _save(url: str, draw: Callable[[], Axes], *, columns: int) -> None:
    """Save Optuna's picture, wide enough that the names of its axes do not overlap."""
    with warnings.catch_warnings(), pyplot.rc_context():
        warnings.simplefilter("ignore")  # Optuna calls its pictures experimental
        axes = draw()
        figure = axes.figure
        assert isinstance(figure, Figure)
        figure.set_size_inches(max(7.0, 2.4 * columns), 5.0)
        for side in figure.axes:
            side.tick_params(which="both", labelsize=8)
            for text in [*side.get_yticklabels(), *side.get_yticklabels(minor=True)]:
                text.set_bbox({"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5})
        image = io.BytesIO()
        # without matplotlib's version in the file, so that a new version does not change its bytes
        figure.savefig(image, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None})
        pyplot.close(figure)
    storage.write_bytes(url, image.getvalue())
