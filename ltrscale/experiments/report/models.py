"""Sections on the models: learning curves, importances of features and what they miss, cost."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.evaluation.weeks.verdict import importances_of
from ltrscale.experiments.report.results import study_costs
from ltrscale.experiments.report.sources import Sources, minutes, pretrained_for, records
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Charts, LeftOut, Table, Text

_POINTS = 150
"""Of a curve; more are averaged in runs."""
_FEATURES_SHOWN = 20

LinePoints = list[tuple[float, float]]


def learning_curves(sources: Sources) -> Iterator[Block]:
    """Loss and validation metric of each method's first bundle, and the loss of pretraining."""
    curves: dict[str, dict[str, LinePoints]] = defaultdict(dict)
    for name, url in sources.bundles():
        try:
            bundle = sources.opened(url)
            kind = "networks" if bundle.parts else "trees"
            for what, curve in curves_of(records(url)).items():
                curves[f"{kind}: {what}"][name] = curve
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

    Where a run goes back to an earlier step or tree, because it was resumed or trained anew, what was recorded from
    there on counts no more. Metrics are those that the house computes, not a library's own of the same name.

    Example:
        >>> steps = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": None}]
        >>> steps += [{"epoch": 1, "validation_map": 0.5}]
        >>> curves_of(steps)
        {'loss': [(1, 3.0), (2, 2.0)], 'validation_map': [(3, 0.5)]}
    """
    found: dict[str, dict[float, float]] = defaultdict(dict)
    phase, before, at, last = None, 0, 0, 0.0
    begun: dict[str | None, int] = {}  # phases, and the step after which each began
    for line in lines:
        if line.get("phase", phase) != phase:
            phase = line.get("phase")
            before = begun.setdefault(phase, at)
            at = before
        if "step" in line and "loss" in line:
            # a phase that counts its steps from 1 continues where the one before has ended
            at = line["step"] + (before if line["step"] + before > at or line["step"] <= at - before else 0)
        place = line.get("tree", at if "step" in line or "epoch" in line else None)
        if place is None:
            continue
        if place < last:
            found = defaultdict(dict, {name: {x: y for x, y in of.items() if x < place} for name, of in found.items()})
            begun = {name: start for name, start in begun.items() if start < place}
        last = place
        if "step" in line and line.get("loss") is not None:  # none if no group has one, as where none is relevant
            found["loss"][place] = line["loss"]
        for name, value in line.items():
            ours = name.startswith("validation_") and not name.endswith(("_lightgbm", "_xgboost", "_catboost"))
            if ours and isinstance(value, float):
                found[name][place] = value
    return {name: sorted(curve.items()) for name, curve in found.items() if curve}


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
            found = importances_of(sources.opened(url))
            of_methods |= {} if found is None else {name: found}
        except InputError as error:
            yield LeftOut(f"{name}: {error}")
    if of_methods:
        most = {
            name: max(of.get(name, 0.0) for of in of_methods.values()) for name in set().union(*of_methods.values())
        }
        top = sorted(most, key=lambda name: (-most[name], name))[:_FEATURES_SHOWN]
        rows = [
            {"name": name, "value": of.get(name, 0.0), "series": method}
            for name in top
            for method, of in of_methods.items()
        ]
        said = f"The {len(top)} most important of {len(most)} columns to trees: shares of the gain of all splits"
        yield Chart(charts.bars(rows, title="share of the gain", order=sources.methods), said)
    else:
        yield LeftOut("no method of the evaluation has trees, which alone have importances; evaluate one of trees too")
    yield from _alone(sources, of_methods)
    yield from _missing(sources)


def _alone(sources: Sources, of_methods: Mapping[str, Mapping[str, float]]) -> Iterator[Block]:
    """What each feature says of the labels by itself, beside its importance; suspicious ones are a question."""
    found = sources.alone
    if not found or not found[0].lists:
        return
    for name, question in sources.questions.items():
        shares = [f"{of[name]:.0%} of the importance to {method}" for method, of in of_methods.items() if name in of]
        yield Text(f"{question} It has {' and '.join(shares)}." if shares else question)
    rows = [
        [
            feature.name,
            f"{feature.ndcg:.3f}",
            *(f"{of[feature.name]:.1%}" if feature.name in of else "-" for of in of_methods.values()),
            "-" if feature.there is None else feature.there.stated,
        ]
        for feature in found[:_FEATURES_SHOWN]
    ]
    header = ["feature", f"NDCG@{found[0].k} alone", *(f"importance to {method}" for method in of_methods), "there"]
    said = f"Features that rank best alone, in the better direction; a random order has {found[0].random:.3f}"
    yield Table(header, rows, caption=f"{said}, on {found[0].lists:,} test lists with a relevant document")


def _missing(sources: Sources) -> Iterator[Block]:
    """How often each feature is missing in each data set of the test split, as its manifest counts."""
    for url in sources.evaluation.test.data:
        manifest = open_dataset(url).manifest
        documents = manifest.counts().documents
        if not manifest.summaries:
            yield LeftOut(f"{url}: the manifest has no summaries of features; prepare the data again")
            continue
        named = zip(manifest.features, manifest.summaries, strict=True)
        shares = {feature.name: summary.missing / max(1, documents) for feature, summary in named}
        some = sorted((name for name, share in shares.items() if share), key=lambda name: -shares[name])
        said = f"{url}: {len(some)} of {len(shares)} features are missing in some of {documents:,} documents"
        if not some:
            yield Text(f"{said}.")
            continue
        rows = [{"name": name, "value": shares[name], "series": "missing"} for name in some[:_FEATURES_SHOWN]]
        more = f"; the {_FEATURES_SHOWN} most often missing" if len(some) > _FEATURES_SHOWN else ""
        yield Chart(charts.bars(rows, title="share of documents without it"), said + more)


def cost(sources: Sources, study: str | None) -> Iterator[Block]:
    """Minutes and documents a second of each method's first bundle, as its run recorded them."""
    rows = []
    for name, url in sources.bundles():
        try:
            before = pretrained_for(sources.opened(url))
            rows.append([name, *_cost(url), *(("-", "-") if before is None else _cost(before))])
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


def _cost(url: str) -> tuple[str, str]:
    spent = minutes(url)
    rates = [line["documents_per_s"] for line in records(url) if "documents_per_s" in line]
    return "-" if spent is None else f"{spent:.2f}", f"{statistics.median(rates):,.0f}" if rates else "-"
