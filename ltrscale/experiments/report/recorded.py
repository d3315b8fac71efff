"""Sections from records: leaderboard, periods, gate, study, search, learning curves, features, cost, quarantine."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.evaluation.bounds import GateVerdict, verdict_blocks
from ltrscale.evaluation.measure.page import how_to_read_evaluation, results
from ltrscale.evaluation.measure.periods import period_blocks
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.studies.study import Study
from ltrscale.evaluation.studies.study_page import ABOUT_COSTS, SUMMARY, costs, curves
from ltrscale.evaluation.studies.study_page import document as studied
from ltrscale.experiments.report.sources import Sources, minutes, pretrained_for, records
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, LeftOut, Points, Table, TableRow, Text, cell
from ltrscale.storage import join
from ltrscale.tuning.history import History, ended, value_of
from ltrscale.tuning.results import history_chart, trial_table

_POINTS = 150
"""Maximum points of a curve; more are averaged in runs."""
_MOST_FEATURES, _TRIALS_SHOWN = 20, 10
_LinePoints = list[tuple[float, float]]


def leaders(sources: Sources) -> Iterator[Block]:
    """The methods by the primary metric."""
    evaluation = sources.evaluation
    yield from results(evaluation)
    yield Points(how_to_read_evaluation(evaluation), caption="How to read the figures", folded=True)


def judged_periods(evaluation: Evaluation) -> Iterator[Block]:
    """The metric by period, and drift if the evaluation measured it."""
    if not evaluation.methods[0].periods:
        raise InputError("the evaluation is not sliced by period; run jobs.evaluate with evaluate.by_period=true")
    yield from period_blocks(evaluation)
    if evaluation.by_period is None and evaluation.drift_failed is None:
        yield LeftOut("the evaluation has not measured drift; run jobs.evaluate with evaluate.by_period=true")


def gate(url: str | None) -> Iterator[Block]:
    """The verdict of a gate and its checks."""
    if url is None:
        raise InputError("no gate is named; run jobs.gate and set gate=DIR")
    verdict = GateVerdict.read(url)
    broken = "1 bound is" if len(verdict.reasons) == 1 else f"{len(verdict.reasons)} bounds are"
    yield Text("The candidate passes." if verdict.passed else f"The candidate is refused: {broken} broken.")
    yield from verdict_blocks(verdict)


def study(url: str | None) -> Iterator[Block]:
    """The opening of a study's page, and the differences from its first opponent."""
    if url is None:
        raise InputError("no study is named; run jobs.study and set study=DIR")
    found = Study.read(join(url, SUMMARY))
    yield from studied(found).opening
    for other in found.opponents[:1]:
        yield from curves(found, other)


def search(url: str | None) -> Iterator[Block]:
    """The course of a search and its best trials."""
    if url is None:
        raise InputError("no search is named; run jobs.tune and set search=DIR")
    history = History(url)
    if history.identity() is None:
        raise InputError(f"{url}: no search is there; name the directory that jobs.tune made")
    trials = ended(history.trials())
    valued = [trial for trial in trials if trial.result.value is not None]
    if not valued:
        raise InputError(f"{url}: no trial has a value yet; let jobs.tune run on")
    yield Chart(history_chart(valued, "validation metric"), "The search, trial by trial")
    best = sorted(valued, key=lambda trial: -value_of(trial))[:_TRIALS_SHOWN]
    yield Text(f"The best of {len(trials)} trials, by their last value on validation:")
    yield trial_table(best, "metric", {key: key for trial in best for key in trial.params})


def learning_curves(sources: Sources) -> Iterator[Block]:
    """Loss and validation metric of each method's first bundle, and the loss of pretraining."""
    curves: dict[str, dict[str, _LinePoints]] = defaultdict(dict)
    for name, url in sources.bundles():
        try:
            bundle = sources.opened(url)
            kind = "networks" if bundle.parts else "trees"
            for curve_name, curve in _curves_of(records(url)).items():
                curves[f"{kind}: {curve_name}"][name] = curve
            if bundle.parts and (before := pretrained_for(bundle)) is not None:
                loss = _curves_of(records(before)).get("loss")
                curves["pretraining: loss"] |= {name: loss} if loss else {}
        except InputError as error:
            yield LeftOut(f"{name}: {error}")
    shown = []
    for title, by_method in curves.items():
        rows = [{"x": x, "y": y, "series": name} for name, curve in by_method.items() for x, y in _thinned(curve)]
        across = "trees" if title.startswith("trees") else "step"
        y = title.partition(": ")[2]
        few = max(map(len, by_method.values())) <= _POINTS // 2
        spec = charts.lines(rows, x=across, y=y, dots=few, order=sources.methods)
        shown.append(Chart(spec, f"{title}, by {across}", small=True))
    if not shown:
        raise InputError("no bundle has a run record with a loss or a validation metric; keep run/ beside bundles")
    yield from shown
    yield Text(
        f"A curve is that of the first bundle of its method; of more than {_POINTS} points, means of runs are drawn. "
        "Losses of different kinds, and of different pretext tasks, are not comparable."
    )


def _curves_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, _LinePoints]:
    """Loss by step, and validation metrics by step or tree, without what a resumed run repeats."""
    curves: dict[str, dict[float, float]] = defaultdict(dict)
    step, last = 0, 0.0
    for line in lines:
        if "step" in line and "loss" in line:
            step = line["step"]  # of the whole run: a phase goes on from the one before
        x_value = line.get("tree", step if "step" in line or "epoch" in line else None)
        if x_value is None:
            continue
        if x_value < last:
            curves = defaultdict(
                dict, {name: {x: y for x, y in points.items() if x < x_value} for name, points in curves.items()}
            )
        last = x_value
        if "step" in line and line.get("loss") is not None:  # None if no group has a loss
            curves["loss"][x_value] = line["loss"]
        for name, value in line.items():
            is_own = name.startswith("validation_") and not name.endswith(("_lightgbm", "_xgboost", "_catboost"))
            if is_own and isinstance(value, float):
                curves[name][x_value] = value
    return {name: sorted(curve.items()) for name, curve in curves.items() if curve}


def _thinned(curve: _LinePoints) -> _LinePoints:
    """The curve with at most 150 points: means of runs of equal length."""
    run = -(-len(curve) // _POINTS)
    runs = (curve[i : i + run] for i in range(0, len(curve), run))
    return [(part[-1][0], statistics.fmean(y for _, y in part)) for part in runs] if run > 1 else list(curve)


def feature_blocks(sources: Sources) -> Iterator[Block]:
    """Importances of the trees of each method, and how often each feature is missing."""
    of_methods, unread = sources.importances
    yield from unread
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
    yield from _single_features(sources, of_methods)
    yield from _missing_values(sources)


def _single_features(sources: Sources, of_methods: Mapping[str, Mapping[str, float]]) -> Iterator[Block]:
    """How well each feature ranks alone, with its importance, and questions on suspicious features."""
    features = sources.single_features
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
    rows: list[TableRow] = [
        {
            "feature": feature.name,
            f"NDCG@{feature.k} alone": f"{feature.ndcg:.3f}",
            **{f"importance to {method}": cell(of.get(feature.name), ".1%") for method, of in of_methods.items()},
            "there": None if feature.there is None else feature.there.stated,
        }
        for feature in features[:_MOST_FEATURES]
    ]
    caption = f"Features that rank best alone, in the better direction; a random order has {features[0].random:.3f}"
    yield Table.from_rows(rows, f"{caption}, on {features[0].lists:,} test lists with a relevant document")


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
            of_runs = {**_spent(url, "training"), **({} if before is None else _spent(before, "pretraining"))}
            rows.append({"method": name, **of_runs})
        except InputError as error:
            yield LeftOut(f"{name}: {error}")
    if rows:
        yield Table.from_rows(rows)
        yield Text(
            "Of the first bundle of each method, as its run recorded it, on the machine of that run: the median "
            "documents/s over epochs, and the time of the last run, which is a part for one that was interrupted."
        )
    if study is not None:
        yield costs(Study.read(join(study, SUMMARY)))
        yield Text(ABOUT_COSTS)


def _spent(url: str, what: str) -> dict[str, str]:
    rates = [line["documents_per_s"] for line in records(url) if "documents_per_s" in line]
    rate = cell(statistics.median(rates) if rates else None, ",.0f")
    return {f"{what}, min": cell(minutes(url), ".2f"), f"{what}, documents/s": rate}


def quarantine(sources: Sources) -> Iterator[Block]:
    """Rows and groups read, kept and rejected per data set, the rules that rejected them, and losses of texts."""
    splits = sources.evaluated.splits.by_name.values()
    rows, rules, texts = list[TableRow](), list[TableRow](), list[TableRow]()
    for url in dict.fromkeys(url for split in splits for url in split.data):
        manifest = open_dataset(url).manifest
        a = manifest.accounting
        of_rows = {"rows": a.rows_in, "kept": a.rows_kept, "rejected": a.rows_rejected, "merged": a.rows_merged}
        of_groups = {"groups": a.groups_in, "kept groups": a.groups_kept, "rejected groups": a.groups_rejected}
        rows.append({"data set": url, **of_rows, **of_groups, "files": len(manifest.quarantine)})
        rules += [{"data set": url, "rule": rule, "rows": n} for rule, n in a.rules.items()]
        for column, s in manifest.token_summaries.items():
            counts = {"texts": s.lists, "empty": s.empty, "tokens kept": s.tokens, "longest": s.longest}
            cuts = {"texts cut": s.cut_lists, "tokens cut": s.cut_tokens}
            texts.append({"data set": url, "tokens": column, **counts, **cuts})
    yield Table.from_rows(rows, "Rows are kept, rejected, or merged with another row of their document")
    yield Table.from_rows(rules, "Why rows were rejected") if rules else Text("No rule has rejected a row.")
    if texts:
        yield Table.from_rows(texts, "Texts of queries and documents")
