"""Sections from records: leaderboard, slices, periods, gate, study, search, learning curves, features and cost."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.opening import FEW_GROUPS
from ltrscale.evaluation.measure.page import leaderboard, leaders_chart, slice_rows
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import definitions, how_intervals, number, verdicts
from ltrscale.evaluation.studies.study import Study
from ltrscale.evaluation.studies.study_page import cost_rows, curves_chart, differences_chart, sentences
from ltrscale.evaluation.weeks.decay import Decay, curves, drift_rows, drifted, fell, metric_rows
from ltrscale.evaluation.weeks.falls import falls_said
from ltrscale.evaluation.weeks.verdict import Verdict, importances_of, verdict_blocks
from ltrscale.experiments.report.sources import SUMMARY, Sources, minutes, pretrained_for, records
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Charts, LeftOut, Points, Table, Text
from ltrscale.storage import join
from ltrscale.tuning.history import History, ended, history_chart
from ltrscale.tuning.space import label

_POINTS = 150
"""Maximum points of a curve; more are averaged in runs."""

_MOST_FEATURES = 20

LinePoints = list[tuple[float, float]]

_TRIALS_SHOWN = 10


def leaders(sources: Sources) -> Iterator[Block]:
    """The methods by the primary metric."""
    evaluation, primary = sources.evaluation, sources.primary
    defined = evaluation.methods[0].slices[ALL].summaries[primary].groups
    of_all = f"{defined:,} of {evaluation.test.groups:,} test groups, which have a relevant document,"
    caption = f"{metric_label(primary)}: means over {of_all} and their 95% intervals"
    yield Chart(leaders_chart(evaluation, ALL), caption)
    yield Table(*leaderboard(evaluation))
    compared = {method.name: method.slices[ALL].comparisons.get(primary) for method in evaluation.methods}
    lines = verdicts(compared, primary)
    names = evaluation.methods[0].slices[ALL].summaries
    left_out, policies = evaluation.leave_out_constant, evaluation.policies
    lines += definitions(names, evaluation.relevant_from, leave_out_constant=left_out, stated=policies)
    lines += how_intervals([method.slices[ALL] for method in evaluation.methods], evaluation.resamples)
    yield Points(lines, caption="How to read the figures", folded=True)


def slices(sources: Sources) -> Iterator[Block]:
    """Differences from the baseline by slice, or means without a baseline."""
    evaluation, primary = sources.evaluation, sources.primary
    shown = [name for name in evaluation.test.slices if not name.startswith("period=")]
    rows = []
    for name in shown:
        for method in sources.others:
            scope = method.slices[name]
            summary, compared = scope.summaries[primary], scope.comparisons.get(primary)
            row = charts.interval_row(name, summary, series=method.name, faded=summary.groups < FEW_GROUPS)
            if evaluation.baseline is not None:
                ends = (None, None, None) if compared is None else (compared.difference, compared.low, compared.high)
                row |= dict(zip(("mean", "low", "high"), ends, strict=True))
            if row["mean"] is not None:
                rows.append(row)
    title = metric_label(primary)
    if evaluation.baseline is not None:
        title = f"{title} - {evaluation.baseline}"
    if rows:
        caption = (
            f"{title} by slice, with 95% intervals; slices of fewer than {FEW_GROUPS} groups with the metric are faded"
        )
        at = None if evaluation.baseline is None else 0.0
        yield Chart(charts.interval_chart(rows, title=title, at=at, order=sources.methods), caption)
    yield Table(*slice_rows(evaluation), caption="All slices and methods", folded=True)
    if evaluation.conditions:
        yield Points([f"{name}: {condition}" for name, condition in evaluation.conditions.items()])
    yield Text(
        "A group may be in several slices. p is adjusted by Holm over methods and slices together, and over methods "
        "for all groups."
    )


def weeks(sources: Sources, drift: str | None) -> Iterator[Block]:
    """The metric by period, and drift if a drift report is given."""
    if drift is not None:
        yield from _decay(Decay.read(drift))
        return
    evaluation, primary = sources.evaluation, sources.primary
    metric = metric_label(primary)
    periods = [name for name in evaluation.test.slices if name.startswith("period=")]
    if not periods:
        raise InputError("the evaluation is not sliced by period; run jobs.evaluate with evaluate.slice_by=[period]")
    if len(periods) == 1:
        header, table = slice_rows(evaluation)  # a curve has at least two periods
        caption = f"{metric} in the only period, {periods[0].removeprefix('period=')}"
        yield Table(header[1:], [row[1:] for row in table if row[0] == periods[0]], caption=caption)
        yield LeftOut(_NO_DRIFT)
        return
    rows = []
    for method in evaluation.methods:
        for name in periods:
            summary = method.slices[name].summaries[primary]
            ends = {"y": summary.mean, "low": summary.low, "high": summary.high}
            rows.append({"x": name.removeprefix("period="), "series": method.name, **ends})
    by_method = {
        method.name: {name.removeprefix("period="): method.slices[name].summaries[primary] for name in periods}
        for method in evaluation.methods
    }
    yield from map(Text, falls_said(by_method, primary))
    spec = charts.lines(rows, x="period", y=metric, ordinal=True, order=sources.methods)
    yield Chart(spec, f"{metric} by period, with 95% intervals")
    yield LeftOut(_NO_DRIFT)


_NO_DRIFT = "drift needs the directory of a drift report; run jobs.drift on the evaluation and set drift=DIR"


def _decay(decay: Decay) -> Iterator[Block]:
    yield Text(drifted(decay.drift))
    if len(decay.drift.periods) == 1:  # a curve has at least two
        yield Table(*metric_rows(decay), caption="By method, in the only period")
        yield Table(*drift_rows(decay), caption="Drift of features, lists, labels and scores, in the only period")
        return
    yield from fell(decay)
    yield from curves(decay)
    yield Table(*metric_rows(decay), caption="By method and period", folded=True)
    yield Table(*drift_rows(decay), caption="Drift of features, lists, labels and scores", folded=True)


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
    results = _study(url)
    metric = metric_label(results.primary)
    yield from map(Text, sentences(results))
    yield Chart(
        curves_chart(results), f"{metric} by the number of labelled groups; dots side by side belong to one number"
    )
    if results.opponents:
        against = results.opponents[0]
        caption = f"Differences from {against}; a cross marks where a method falls behind or overtakes it"
        yield Chart(differences_chart(results, against), caption)
    means = [
        [name, *(number(p.estimates["all"][results.primary].mean) if p else "-" for p in points)]
        for name in results.methods
        if any(points := [results.find(name, n) for n in results.labelled])
    ]
    yield Table(["method", *results.labelled], means, caption=f"{metric} by the number of labelled groups")


def _study(url: str | None) -> Study:
    if url is None:
        raise InputError("no study is named; run jobs.study and set study=DIR")
    return Study.read(join(url, SUMMARY))


def study_costs(url: str | None) -> Iterator[Block]:
    """The cost of a study's methods."""
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
    trials = ended(History(url).trials())
    valued = [(trial, trial.result.value) for trial in trials if trial.result.value is not None]
    if not valued:
        raise InputError(f"{url}: no trial has a value yet; let jobs.tune run on")
    spec = history_chart([trial for trial, _ in valued], "validation metric")
    yield Chart(spec, "The search, trial by trial")
    ranked = sorted(valued, key=lambda pair: -pair[1])[:_TRIALS_SHOWN]
    keys = list(dict.fromkeys(key for trial, _ in ranked for key in trial.params))

    def shown(params: Mapping[str, object], key: str) -> str:
        value = params.get(key)
        return "as given" if key not in params else f"{value:.4g}" if isinstance(value, float) else label(value)

    cells = [[f"{trial.number}", number(value), *(shown(trial.params, key) for key in keys)] for trial, value in ranked]
    caption = f"The best of {len(trials)} trials, by their last value on validation"
    yield Table(["trial", "metric", *keys], cells, caption=caption)


def learning_curves(sources: Sources) -> Iterator[Block]:
    """Loss and validation metric of each method's first bundle, and the loss of pretraining."""
    curves: dict[str, dict[str, LinePoints]] = defaultdict(dict)
    for name, url in sources.bundles():
        try:
            bundle = sources.opened(url)
            kind = "networks" if bundle.parts else "trees"
            for curve_name, curve in curves_of(records(url)).items():
                curves[f"{kind}: {curve_name}"][name] = curve
            if bundle.parts and (before := pretrained_for(bundle)) is not None:
                loss = curves_of(records(before)).get("loss")
                curves["pretraining: loss"] |= {name: loss} if loss else {}
        except InputError as error:
            yield LeftOut(f"{name}: {error}")
    shown = []
    for title, by_method in curves.items():
        rows = [{"x": x, "y": y, "series": name} for name, curve in by_method.items() for x, y in thinned(curve)]
        across = "trees" if title.startswith("trees") else "step"
        y = title.partition(": ")[2]
        few = max(map(len, by_method.values())) <= _POINTS // 2
        shown.append(Chart(charts.lines(rows, x=across, y=y, dots=few, order=sources.methods), f"{title}, by {across}"))
    if not shown:
        raise InputError("no bundle has a run record with a loss or a validation metric; keep run/ beside bundles")
    yield Charts(shown)
    yield Text(
        f"A curve is that of the first bundle of its method; of more than {_POINTS} points, means of runs are drawn. "
        "Losses of different kinds, and of different pretext tasks, are not comparable."
    )


def curves_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, LinePoints]:
    """The curves of a run: the loss by step, and each validation metric by step or tree, over all phases.

    When a run returns to an earlier step or tree, because it was resumed or restarted, its former records from there on
    are dropped. Metrics are this package's, not a library's of the same name.

    Example:
        >>> steps = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": None}]
        >>> steps += [{"epoch": 1, "validation_map": 0.5}]
        >>> curves_of(steps)
        {'loss': [(1, 3.0), (2, 2.0)], 'validation_map': [(3, 0.5)]}
    """
    curves: dict[str, dict[float, float]] = defaultdict(dict)
    phase, before, at, last = None, 0, 0, 0.0
    starts: dict[str | None, int] = {}  # the step before each phase
    for line in lines:
        if line.get("phase", phase) != phase:
            phase = line.get("phase")
            before = starts.setdefault(phase, at)
            at = before
        if "step" in line and "loss" in line:
            # steps of a phase that count from 1 continue those of the phase before
            at = line["step"] + (before if line["step"] + before > at or line["step"] <= at - before else 0)
        x_value = line.get("tree", at if "step" in line or "epoch" in line else None)
        if x_value is None:
            continue
        if x_value < last:
            curves = defaultdict(
                dict, {name: {x: y for x, y in points.items() if x < x_value} for name, points in curves.items()}
            )
            starts = {name: start for name, start in starts.items() if start < x_value}
        last = x_value
        if "step" in line and line.get("loss") is not None:  # None if no group has a loss
            curves["loss"][x_value] = line["loss"]
        for name, value in line.items():
            is_own = name.startswith("validation_") and not name.endswith(("_lightgbm", "_xgboost", "_catboost"))
            if is_own and isinstance(value, float):
                curves[name][x_value] = value
    return {name: sorted(curve.items()) for name, curve in curves.items() if curve}


def thinned(curve: LinePoints) -> LinePoints:
    """The curve with at most 150 points: means of runs of equal length.

    Example:
        >>> thinned([(1, 3.0)]), len(thinned([(step, 1.0) for step in range(1000)]))
        ([(1, 3.0)], 143)
    """
    run = -(-len(curve) // _POINTS)
    runs = (curve[i : i + run] for i in range(0, len(curve), run))
    return [(part[-1][0], statistics.fmean(y for _, y in part)) for part in runs] if run > 1 else list(curve)


def feature_blocks(sources: Sources) -> Iterator[Block]:
    """Importances of the trees of each method, and how often each feature is missing."""
    of_methods: dict[str, dict[str, float]] = {}
    for name, url in sources.bundles():
        try:
            importances = importances_of(sources.opened(url))
            of_methods |= {} if importances is None else {name: importances}
        except InputError as error:
            yield LeftOut(f"{name}: {error}")
    if of_methods:
        most = {
            name: max(of.get(name, 0.0) for of in of_methods.values()) for name in set().union(*of_methods.values())
        }
        top = sorted(most, key=lambda name: (-most[name], name))[:_MOST_FEATURES]
        rows = [
            {"name": name, "value": of.get(name, 0.0), "series": method}
            for name in top
            for method, of in of_methods.items()
        ]
        caption = f"The {len(top)} most important of {len(most)} columns to trees: shares of the gain of all splits"
        yield Chart(charts.bars(rows, title="share of the gain", order=sources.methods), caption)
    else:
        yield LeftOut("no method of the evaluation has trees, which alone have importances; evaluate one of trees too")
    yield from _alone(sources, of_methods)
    yield from _missing_values(sources)


def _alone(sources: Sources, of_methods: Mapping[str, Mapping[str, float]]) -> Iterator[Block]:
    """How well each feature ranks alone, with its importance, and questions on suspicious features."""
    features = sources.alone
    if not features or not features[0].lists:
        return
    for name, question in sources.questions.items():
        shares = [
            f"{importances[name]:.0%} of the importance to {method}"
            for method, importances in of_methods.items()
            if name in importances
        ]
        yield Text(f"{question} It has {' and '.join(shares)}." if shares else question)
    if sources.memorised:
        yield Text(
            f"{' '.join(sources.memorised.values())} That is an id or another value that tells training lists apart, "
            "which is worth nothing for new ones, unless it matters beside another feature only: leave it out "
            "(leave_out of a method) and see whether anything is lost."
        )
    rows = [
        [
            feature.name,
            f"{feature.ndcg:.3f}",
            *(
                f"{importances[feature.name]:.1%}" if feature.name in importances else "-"
                for importances in of_methods.values()
            ),
            "-" if feature.there is None else feature.there.stated,
        ]
        for feature in features[:_MOST_FEATURES]
    ]
    header = ["feature", f"NDCG@{features[0].k} alone", *(f"importance to {method}" for method in of_methods), "there"]
    caption = f"Features that rank best alone, in the better direction; a random order has {features[0].random:.3f}"
    yield Table(header, rows, caption=f"{caption}, on {features[0].lists:,} test lists with a relevant document")


def _missing_values(sources: Sources) -> Iterator[Block]:
    """How often each feature is missing in each data set of the test split, from the manifests."""
    for url in sources.evaluation.test.data:
        manifest = open_dataset(url).manifest
        documents = manifest.counts().documents
        if not manifest.summaries:
            yield LeftOut(f"{url}: the manifest has no summaries of features; prepare the data again")
            continue
        summaries = zip(manifest.features, manifest.summaries, strict=True)
        shares = {feature.name: summary.missing / max(1, documents) for feature, summary in summaries}
        some = sorted((name for name, share in shares.items() if share), key=lambda name: -shares[name])
        caption = f"{url}: {len(some)} of {len(shares)} features are missing in some of {documents:,} documents"
        if not some:
            yield Text(f"{caption}.")
            continue
        rows = [{"name": name, "value": shares[name], "series": "missing"} for name in some[:_MOST_FEATURES]]
        limit = f"; the {_MOST_FEATURES} most often missing" if len(some) > _MOST_FEATURES else ""
        yield Chart(charts.bars(rows, title="share of documents without it"), caption + limit)


def cost(sources: Sources, study: str | None) -> Iterator[Block]:
    """Minutes and documents per second of each method's first bundle, from its run record."""
    rows = []
    for name, url in sources.bundles():
        try:
            before = pretrained_for(sources.opened(url))
            rows.append([name, *_spent(url), *(("-", "-") if before is None else _spent(before))])
        except InputError as error:
            yield LeftOut(f"{name}: {error}")
    if rows:
        header = ["method", "training, min", "documents/s", "pretraining, min", "documents/s of pretraining"]
        yield Table(header, rows)
        yield Text(
            "Of the first bundle of each method, as its run recorded it, on the machine of that run: the median "
            "documents/s over epochs, and the time of the last run, which is a part for one that was interrupted."
        )
    yield from study_costs(study)


def _spent(url: str) -> tuple[str, str]:
    spent = minutes(url)
    rates = [line["documents_per_s"] for line in records(url) if "documents_per_s" in line]
    return "-" if spent is None else f"{spent:.2f}", f"{statistics.median(rates):,.0f}" if rates else "-"
