"""Sections that show what an evaluation and its companions have found: leaderboard, slices, weeks, study, search."""

from collections.abc import Iterator

from ltrscale.errors import InputError
from ltrscale.evaluation.measure.opening import FEW_GROUPS
from ltrscale.evaluation.measure.page import leaderboard, leaders_chart, slice_rows
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import definitions, how_intervals, number, verdicts
from ltrscale.evaluation.studies.study import Study
from ltrscale.evaluation.studies.study_page import cost_rows, curves_chart, differences_chart, sentences
from ltrscale.evaluation.weeks.decay import Decay, curves, drift_rows, drifted, metric_rows
from ltrscale.evaluation.weeks.verdict import Verdict, verdict_blocks
from ltrscale.experiments.report.sources import SUMMARY, Sources
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, LeftOut, Points, Table, Text
from ltrscale.storage import join
from ltrscale.tuning.history import History, ended
from ltrscale.tuning.results import history_chart
from ltrscale.tuning.space import label

_TRIALS_SHOWN = 10


def leaders(sources: Sources) -> Iterator[Block]:
    """The methods by the primary metric."""
    evaluation, primary = sources.evaluation, sources.primary
    defined = evaluation.methods[0].slices[ALL].summaries[primary].groups
    of_all = f"{defined:,} of {evaluation.test.groups:,} test groups, which have a relevant document,"
    said = f"{metric_label(primary)}: means over {of_all} and their 95% intervals"
    yield Chart(leaders_chart(evaluation, ALL), said)
    yield Table(*leaderboard(evaluation))
    compared = {method.name: method.slices[ALL].comparisons.get(primary) for method in evaluation.methods}
    lines = verdicts(compared, primary)
    names = evaluation.methods[0].slices[ALL].summaries
    left_out, policies = evaluation.leave_out_constant, evaluation.policies
    lines += definitions(names, evaluation.relevant_from, leave_out_constant=left_out, stated=policies)
    lines += how_intervals([method.slices[ALL] for method in evaluation.methods], evaluation.resamples)
    yield Points(lines, caption="How to read the figures", folded=True)


def slices(sources: Sources) -> Iterator[Block]:
    """Differences from the baseline by slice, or means where there is no baseline."""
    evaluation, primary = sources.evaluation, sources.primary
    shown = [name for name in evaluation.test.slices if not name.startswith("period=")]
    rows = []
    for name in shown:
        for method in sources.others:
            scope = method.slices[name]
            summary, found = scope.summaries[primary], scope.comparisons.get(primary)
            row = charts.interval_row(name, summary, series=method.name, faded=summary.groups < FEW_GROUPS)
            if evaluation.baseline is not None:
                ends = (None, None, None) if found is None else (found.difference, found.low, found.high)
                row |= dict(zip(("mean", "low", "high"), ends, strict=True))
            if row["mean"] is not None:
                rows.append(row)
    what = metric_label(primary)
    if evaluation.baseline is not None:
        what = f"{what} - {evaluation.baseline}"
    if rows:
        said = (
            f"{what} by slice, with 95% intervals; slices of fewer than {FEW_GROUPS} groups with the metric are faded"
        )
        at = None if evaluation.baseline is None else 0.0
        yield Chart(charts.interval_chart(rows, title=what, at=at, order=sources.methods), said)
    yield Table(*slice_rows(evaluation), caption="All slices and methods", folded=True)
    if evaluation.conditions:
        yield Points([f"{name}: {condition}" for name, condition in evaluation.conditions.items()])
    yield Text(
        "A group may be in several slices. p is adjusted by Holm over methods and slices together, and over methods "
        "for all groups."
    )


def weeks(sources: Sources, drift: str | None) -> Iterator[Block]:
    """The metric by period, and drift where a drift report is named."""
    evaluation, primary = sources.evaluation, sources.primary
    what = metric_label(primary)
    if drift is not None:
        yield from _decay(Decay.read(drift))
        return
    periods = [name for name in evaluation.test.slices if name.startswith("period=")]
    if not periods:
        raise InputError("the evaluation is not sliced by period; run jobs.evaluate with evaluate.slice_by=[period]")
    if len(periods) == 1:
        yield _of_one_period(evaluation, periods[0])
        yield LeftOut(_NO_DRIFT)
        return
    rows = []
    for method in evaluation.methods:
        for name in periods:
            summary = method.slices[name].summaries[primary]
            ends = {"y": summary.mean, "low": summary.low, "high": summary.high}
            rows.append({"x": name.removeprefix("period="), "series": method.name, **ends})
    spec = charts.lines(rows, x="period", y=what, ordinal=True, order=sources.methods)
    yield Chart(spec, f"{what} by period, with 95% intervals")
    yield LeftOut(_NO_DRIFT)


_NO_DRIFT = "drift needs the directory of a drift report; run jobs.drift on the evaluation and set drift=DIR"


def _of_one_period(evaluation: Evaluation, name: str) -> Table:
    """A row for each method: a curve has at least two periods."""
    header, rows = slice_rows(evaluation)
    caption = f"{metric_label(evaluation.primary)} in the only period, {name.removeprefix('period=')}"
    return Table(header[1:], [row[1:] for row in rows if row[0] == name], caption=caption)


def _decay(found: Decay) -> Iterator[Block]:
    yield Text(drifted(found.drift))
    if len(found.drift.periods) == 1:  # a curve has at least two
        yield Table(*metric_rows(found), caption="By method, in the only period")
        yield Table(*drift_rows(found), caption="Drift of features, lists, labels and scores, in the only period")
        return
    yield from curves(found)
    yield Table(*metric_rows(found), caption="By method and period", folded=True)
    yield Table(*drift_rows(found), caption="Drift of features, lists, labels and scores", folded=True)


def gate(url: str | None) -> Iterator[Block]:
    """The verdict of a gate and its checks."""
    if url is None:
        raise InputError("no gate is named; run jobs.gate and set gate=DIR")
    verdict = Verdict.read(url)
    broken = "1 bound is" if len(verdict.reasons) == 1 else f"{len(verdict.reasons)} bounds are"
    yield Text("The candidate passes." if verdict.passed else f"The candidate is refused: {broken} broken.")
    yield from verdict_blocks(verdict)


def study(url: str | None) -> Iterator[Block]:
    """The curves of a study by the number of labelled groups, with crossovers."""
    found = _study(url)
    what = metric_label(found.primary)
    yield from map(Text, sentences(found))
    yield Chart(curves_chart(found), f"{what} by the number of labelled groups; dots side by side belong to one number")
    if found.opponents:
        against = found.opponents[0]
        said = f"Differences from {against}; a cross marks where a method falls behind or overtakes it"
        yield Chart(differences_chart(found, against), said)
    means = [
        [name, *(number(p.estimates["all"][found.primary].mean) if p else "-" for p in points)]
        for name in found.methods
        if any(points := [found.find(name, n) for n in found.labelled])
    ]
    yield Table(["method", *found.labelled], means, caption=f"{what} by the number of labelled groups")


def _study(url: str | None) -> Study:
    """The study.

    Raises:
        InputError: none is named, or none is there.
    """
    if url is None:
        raise InputError("no study is named; run jobs.study and set study=DIR")
    return Study.read(join(url, SUMMARY))


def study_costs(url: str | None) -> Iterator[Block]:
    """What the methods of a study have cost."""
    if url is not None:
        caption = (
            "Minutes of training one model by the number of labelled groups, and documents a second, in the study; n/a "
            "for trees, which train in no steps that count documents"
        )
        yield Table(*cost_rows(_study(url)), caption=caption)


def search(url: str | None) -> Iterator[Block]:
    """The course of a search and its best trials."""
    if url is None:
        raise InputError("no search is named; run jobs.tune and set search=DIR")
    trials = [(trial, trial.result) for trial in ended(History(url).trials()) if trial.result is not None]
    valued = [(trial, result.value) for trial, result in trials if result.value is not None]
    if not valued:
        raise InputError(f"{url}: no trial has a value yet; let jobs.tune run on")
    spec = history_chart([trial for trial, _ in valued], "validation metric")
    yield Chart(spec, "The search, trial by trial")
    ranked = sorted(valued, key=lambda pair: -pair[1])[:_TRIALS_SHOWN]
    keys = list(dict.fromkeys(key for trial, _ in ranked for key in trial.begun.params))
    cells = [
        [f"{trial.number}", number(value), *(_setting(trial.begun.params, key) for key in keys)]
        for trial, value in ranked
    ]
    caption = f"The best of {len(trials)} trials, by their last value on validation"
    yield Table(["trial", "metric", *keys], cells, caption=caption)


def _setting(params: dict[str, object], key: str) -> str:
    value = params.get(key)
    return "as given" if key not in params else f"{value:.4g}" if isinstance(value, float) else label(value)
