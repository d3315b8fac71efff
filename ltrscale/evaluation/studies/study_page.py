"""The report of a study: one sentence of advice, tables in the shape of HOU24's, curves with intervals, crossovers.

The columns of a table are numbers of labelled groups, where the paper's are data sets.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

from ltrscale.evaluation.pages import definitions, skewed_draws, with_error
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.statistics.estimates import MOST_DRAWS
from ltrscale.evaluation.studies.study import Design, Family, Model, ScopeName, Study, Versus, study_of
from ltrscale.origin import settings_of
from ltrscale.progress import Report
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Figure, Points, Section, Table, TableRow, Text, cell, span
from ltrscale.reports.findings import commit_report
from ltrscale.stages.inputs import OutputUrl
from ltrscale.stages.stage import Origin, Settings, Stage

SUMMARY = "summary"
"""Directory of the results, below a study's."""
_BESIDE = 1.035
"""Curves hide no others: each is moved along the logarithmic axis by this factor from the one before."""
_FALL = 2.0
"""Standard errors of the smallest fall of a metric that is remarked on."""
_FAMILIES: dict[Family, str] = {"trees": "GBDT", "not pretrained": "No pretrain DL", "pretrained": "Pretrained DL"}
_STRATEGIES = {"LP": "linear probing", "MP": "multilayer probing", "FF": "full finetuning"}
_UNDECIDED = (
    "What would decide the open differences, if they are in truth as found: any one of three; a dash where more than "
    f"{MOST_DRAWS:,} draws, or no number at all, would do"
)


class StudySummary(Stage):
    """Summarise the models measured so far."""

    stage: ClassVar = "study"
    test: OutputUrl
    design: Design
    models: tuple[Model, ...]

    def own_settings(self) -> Settings:
        """The design and the models."""
        return {"design": settings_of(self.design), "models": [settings_of(model) for model in self.models]}

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Summarise, and commit the report."""
        study = study_of(self.design, self.models, self.test)
        commit_report(self.out, study, document(study), made_by=origin)


def document(study: Study) -> Document:
    """The report: advice, tables in the shape of HOU24's, curves and differences."""
    every = {name: dict.fromkeys(study.labelled, name) for name in study.methods}
    undecided = [row for other in study.opponents for row in _deciding(study, other)]
    opening = (
        *_progress(study),
        *map(Text, sentences(study)),
        Text(_about_data(study)),
        *_means(study, every, about=" of each method (HOU24, table 1)"),
        *([Table.from_rows(undecided, _UNDECIDED)] if undecided else []),
        *curves(study),
    )
    sections = []
    for other in study.opponents:
        clause = "" if other == study.baseline else ", which is not pretrained"
        sections.append(Section(f"Against {other}{clause}", list(_against(study, other))))
    sections += [
        *_tables_of_hou24(study),
        Section("Time", [costs(study), Text(ABOUT_COSTS)]),
        Section("How to read", [Points(_how_to_read(study))]),
    ]
    return Document("Study", opening, sections)


def sentences(study: Study) -> list[str]:
    """Advice on methods of families other than the baseline's, pretraining's share, and trees that get worse."""
    lines = []
    if study.baseline is not None:
        family = study.methods[study.baseline].family
        others = [name for name, about in study.methods.items() if about.family != family]
        lines.append(_advice(study, dict.fromkeys(others, study.baseline)))
    if study.controls:
        lines.append(f"Pretraining's own share: {_advice(study, study.controls)}")
    return [*lines, *_worse_with_more(study)]


def _worse_with_more(study: Study) -> list[str]:
    """The largest fall of untuned trees as labels are added, if it is at least `_FALL` standard errors."""
    lines = []
    for name, about in study.methods.items():
        if about.family != "trees" or about.tuned:
            continue
        curve = [(n, estimate) for n in study.labelled if (estimate := study.primary_at(name, n, "all"))]
        falls = [
            ((before.mean - after.mean) / error, at, before, n, after)
            for (at, before), (n, after) in itertools.combinations(curve, 2)
            if (error := math.hypot(before.over_draws or 0.0, after.over_draws or 0.0)) > 0
        ]
        falls = [fall for fall in falls if fall[0] >= _FALL]
        if not falls:
            continue
        errors, at, before, n, after = max(falls, key=lambda fall: fall[0])
        draws = min(before.draws, after.draws)
        few = "" if draws >= FEWEST_DRAWS else f", over {draws} draws, which judge nothing"
        lines.append(
            f"{name} gets worse with more labels: {metric_label(study.primary)} {cell(before.mean)} at {at} and "
            f"{cell(after.mean)} at {n} labelled groups ({errors:.1f} standard errors{few}). Its settings are the "
            "same at each number; a search at each (kind: tuned) is the fairer opponent."
        )
    return lines


def _advice(study: Study, pairs: Mapping[str, str]) -> str:
    """One sentence: at which numbers of labels the method that validation chose beats its counterpart in `pairs`."""
    verdicts: list[tuple[str, str, str]] = []  # number, verdict, words
    for n in study.labelled:
        if (best := study.best(pairs, n)) is None:
            continue
        against = pairs[best]
        versus = study.against(against).get(best)
        if versus is None or (difference := versus.estimates.get(n)) is None:
            continue
        encoder = " for this encoder" if difference.pretrainings == 1 else ""
        match difference.verdict:
            case "above":
                verdicts.append((n, f"{best} beats {against}{encoder}", cell(difference, "+.4f")))
            case "below":
                verdicts.append((n, f"{against} beats {best}{encoder}", cell(difference, "+.4f")))
            case "open" if difference.draws < FEWEST_DRAWS:
                verdicts.append((n, f"fewer than {FEWEST_DRAWS} draws cannot judge {best} against {against}", ""))
            case "open" if difference.low is None:
                verdicts.append((n, f"one encoder cannot judge {best} against {against}", f"{difference.mean:+.4f}"))
            case "open":
                verdicts.append((n, f"the data cannot tell {best} from {against}{encoder}", cell(difference, "+.4f")))
    points = [point for point in study.points if point.method in pairs]
    if points and all(point.validation is None for point in points):
        return (
            f"No method reports {metric_label(study.primary)} on validation, by which one would be chosen: set the "
            "methods' validation_metric or stop_on, or another primary_cutoff."
        )
    if not verdicts:
        others = " or ".join(dict.fromkeys(pairs.values()))
        return f"No method can be judged against {others} yet." if others else "No method can be judged yet."
    parts = []
    for words, run in itertools.groupby(verdicts, key=lambda each: each[1]):
        each = list(run)
        where = f"at {each[0][0]}" if len(each) == 1 else f"from {each[0][0]} to {each[-1][0]}"
        figures = ", ".join(figure for _, _, figure in each if figure)
        parts.append(f"{where} labelled groups {words}{f' ({figures})' if figures else ''}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _progress(study: Study) -> Iterator[Block]:
    if study.models < study.planned:
        yield Text(f"{study.models} of {study.planned} models are measured; the others are missing below.")
    if study.failed:
        shown = [f"{name}: {why}" for name, why in study.failed.items()]
        yield Points(shown, f"{len(study.failed)} tasks failed; the same command tries them again")


def _about_data(study: Study) -> str:
    draws = sorted({e.draws for p in study.points for e in p.estimates["all"].values()})
    counts = ", ".join(
        name if number is None or f"{number:.0f}" == name else f"{name} ({number:,.0f} in all)"
        for name, number in study.trained_on.items()
    )
    counted = "Training groups with a relevant document" if study.counts == "relevant" else "Labelled training groups"
    if study.validation_share is not None:
        validation = f"validation labels are {study.validation_share:g} of the training labels, drawn with them"
    elif study.validation_size:
        ((size, count),) = study.validation_size.items()
        validation = f"validation labels are a sample ({size}: {count:g}), drawn anew with those of training"
    else:
        validation = "all labelled groups of the validation split choose epochs, trees and settings, as in the papers"
    drawn = span(list(map(str, draws)))
    defined = max(e.groups for p in study.points for e in p.estimates["all"].values())
    return (
        f"{counted}: {counts}; draws of each number: {drawn}{_pretrainings(study)}; {validation}. "
        f"{study.test.described} {defined:,} groups have a relevant document."
    )


def _pretrainings(study: Study) -> str:
    """How many pretrainings each method has."""
    if not study.in_family("pretrained"):
        return ""
    numbers = sorted({e.pretrainings or 0 for p in study.points for e in p.estimates["all"].values()} - {0})
    if not numbers:
        return ", each with its own pretraining"
    return f", crossed with {' and '.join(map(str, numbers))} pretraining{'s' if numbers != [1] else ''}"


def _grid(study: Study, rows: Mapping[str, Mapping[str, str]], caption: str, header: str = "method") -> Table:
    """A table with a column for each number of labelled groups; a dash where a row has no value."""
    return Table.from_rows(
        [{header: row, **{n: of.get(n) for n in study.labelled}} for row, of in rows.items()], caption
    )


def _reported_scopes(study: Study) -> dict[ScopeName, str]:
    """The groups that are reported, with the name of the metric there."""
    label = metric_label(study.primary)
    labels: dict[ScopeName, str] = {"all": label, "outliers": f"Outlier-{label}"}
    return labels if any(p.estimates["outliers"] for p in study.points) else {"all": label}


def _means(
    study: Study, rows: Mapping[str, Mapping[str, str | None]], header: str = "method", about: str = ""
) -> Iterator[Table]:
    """A table for all groups and one for outlier groups: mean and standard error over draws, as in the paper.

    A row names the method that stands at each number of labelled groups.
    """
    for groups, label in _reported_scopes(study).items():
        means: dict[str, dict[str, str]] = {}
        for row, of in rows.items():
            estimates = {n: study.primary_at(method, n, groups) for n, method in of.items() if method is not None}
            means[row] = {n: with_error(e.mean, e.over_draws) for n, e in estimates.items() if e is not None}
        yield _grid(study, means, f"{label}{about}", header)


def _against(study: Study, other: str) -> Iterator[Block]:
    """Differences with crossed intervals, detectable differences, crossovers."""
    for groups, label in _reported_scopes(study).items():
        if versus := study.against(other, groups):
            signed = {name: {n: cell(e, "+.4f") for n, e in v.estimates.items()} for name, v in versus.items()}
            yield _grid(study, signed, f"{label}: difference [95% interval]")
            if groups == "all":
                seen = {name: {n: cell(e.detectable) for n, e in v.estimates.items()} for name, v in versus.items()}
                yield _grid(study, seen, "Smallest difference that this design would see with a power of 80%")
            crossings = [row for v in versus.values() for row in _crossings(v)]
            yield Table.from_rows(crossings, f"{label}: crossovers; an end beyond the numbers is a dash")
    if other == study.opponents[0]:
        yield from curves(study, other)


def _deciding(study: Study, other: str) -> Iterator[TableRow]:
    """For each open difference from a method, the draws, labels or test groups that would see it."""
    for method, versus in study.against(other).items():
        for n, difference in versus.estimates.items():
            if (needs := difference.needs) is not None:
                number = study.labelled[n]
                labels = None if needs.labels is None or number is None else needs.labels * number
                groups = None if needs.groups is None else needs.groups * difference.groups
                row: TableRow = {"method": f"{method} - {other}", "labelled groups": n, "draws": difference.draws}
                row |= {"difference": f"{difference.mean:+.4f}", "decided by draws": needs.draws}
                yield {**row, "by labelled groups": cell(labels, ",.0f"), "by test groups": cell(groups, ",.0f")}


def _crossings(versus: Versus) -> list[TableRow]:
    """Where a method falls behind another or overtakes it."""
    rows: list[TableRow] = [
        {
            "method": versus.method,
            "order": "falls behind" if x.falls else "overtakes",
            "at": cell(x.at, ",.0f"),
            "from": cell(x.low, ",.0f"),
            "to": cell(x.high, ",.0f"),
        }
        for x in versus.crossovers
    ]
    means = [difference.mean for difference in versus.estimates.values()]
    if len(means) == 1:
        order = f"measured at {next(iter(versus.estimates))} only"
    else:
        order = "ahead throughout" if min(means) > 0 else "behind throughout" if max(means) < 0 else "no crossover"
    return rows or [{"method": versus.method, "order": order, "at": None, "from": None, "to": None}]


def _tables_of_hou24(study: Study) -> Iterator[Section]:
    """The tables of HOU24 for which this study has methods."""
    families = {title: study.in_family(family) for family, title in _FAMILIES.items() if study.in_family(family)}
    if len(families) > 1:
        best = {title: {n: study.best(names, n) for n in study.labelled} for title, names in families.items()}
        title = "The best of each family, chosen on validation (HOU24, table 2)"
        yield Section(title, list(_means(study, best, "family")))
    if study.baseline is not None:
        yield Section(f"Percent of {study.baseline} (HOU24, table 3)", list(_percent_of(study, study.baseline)))

    about = study.methods.items()
    strategies = {name: _STRATEGIES[of.strategy] for name, of in about if of.pretext and of.strategy}
    unlabelled = {name: of.unlabelled for name, of in about if of.unlabelled}
    traits = [("strategy", "Strategies of finetuning (HOU24, table 4)", strategies)]
    for pretext in dict.fromkeys(of.pretext for _, of in about if of.pretext):
        found = {name: of.augment for name, of in about if (of.pretext, of.strategy) == (pretext, "FF") and of.augment}
        traits.append(("augmentation", f"Augmentations of {pretext} (HOU24, tables 14 and 15)", found))
    traits.append(("unlabelled groups", "Trees with and without unlabelled groups (HOU24, table 16)", unlabelled))
    for header, title, values in traits:
        if len(set(values.values())) > 1:
            named = sorted((f"{value}: {name}", name) for name, value in values.items())
            rows = {row: dict.fromkeys(study.labelled, name) for row, name in named}
            yield Section(title, list(_means(study, rows, header)))


def _percent_of(study: Study, baseline: str) -> Iterator[Table]:
    """The change against the baseline in percent of its mean, with its interval."""
    for groups, label in _reported_scopes(study).items():
        bases = {n: e.mean for n in study.labelled if (e := study.primary_at(baseline, n, groups)) and e.mean}
        rows: dict[str, dict[str, str]] = {}
        for name, versus in study.against(baseline, groups).items():
            for n, e in versus.estimates.items():
                if n in bases:
                    mean, low, high = (None if v is None else v / bases[n] for v in (e.mean, e.low, e.high))
                    rows.setdefault(name, {})[n] = cell(Figure(mean=mean, low=low, high=high), "+.2%")
        yield _grid(study, {baseline: dict.fromkeys(bases, "+0.00%"), **rows}, label)


def costs(study: Study) -> Table:
    """Minutes and documents per second of each method."""
    rows = []
    for name, cost in study.costs.items():
        no_steps = cost.minutes and cost.documents_per_s is None
        rows.append(
            {
                "method": name,
                "pretraining, min": cell(cost.pretraining_minutes, ".2f"),
                "pretraining, documents/s": cell(cost.pretraining_documents_per_s, ",.0f"),
                **{f"{n}, min": cell(cost.minutes.get(n), ".2f") for n in study.labelled},
                "training, documents/s": "n/a" if no_steps else cell(cost.documents_per_s, ",.0f"),
                "scoring, documents/s": cell(cost.scored_documents_per_s, ",.0f"),
            }
        )
    return Table.from_rows(rows)


ABOUT_COSTS: Final = (
    "Minutes are of training one model, without its pretraining and the methods it is built on, by the number of "
    "labelled groups; those of a tuned method contain all its trials. Documents per second are on the CPUs of one "
    "model; trees train in no steps that count documents (n/a)."
)
"""How to read `costs`."""


def _how_to_read(study: Study) -> list[str]:
    lines = [
        "Figures after ± are standard errors over the draws of labelled groups, as in the paper; intervals in brackets "
        "hold for other draws, pretrainings and test groups, for one comparison at a time. Differences are of the "
        f"draws that both methods have; fewer than {FEWEST_DRAWS} judge nothing. docs/study.md has the method.",
        *skewed_draws(_skewed(study)),
    ]
    if any(e.pretrainings == 1 for p in study.points for e in p.estimates["all"].values()):
        lines.append(
            "One encoder serves all draws, so that intervals of pretrained methods hold for this encoder, and "
            "pretraining's own share has no verdict. Leave out pretrainings: 1 to give each draw its own."
        )
    return [*lines, *definitions(study.policies, leave_out_constant=study.leave_out_constant)]


def _skewed(study: Study) -> dict[str, bool]:
    """Whether the draws of each judged difference look skewed."""
    return {
        f"{v.method} - {v.against} at {n}": e.skewed
        for v in study.versus
        if v.groups == "all"
        for n, e in v.estimates.items()
        if e.draws >= FEWEST_DRAWS
    }


def curves(study: Study, against: str | None = None) -> Iterator[Chart]:
    """The metric by the number of labelled groups, or the differences from a method with marks at the crossovers."""
    titles = {"all": "all groups", "outliers": "outlier groups"}
    what = metric_label(study.primary) if against is None else f"{metric_label(study.primary)} - {against}"
    for groups in _reported_scopes(study):
        versus = {} if against is None else study.against(against, groups)
        rows, middle = [], (len(study.methods) - 1) / 2
        for i, name in enumerate(study.methods):
            of_method = {n: study.primary_at(name, n, groups) for n in study.labelled}
            estimates = of_method if against is None else versus[name].estimates if name in versus else {}
            points = {x: e for n, e in estimates.items() if e is not None and (x := study.labelled[n]) is not None}
            rows += charts.curve_rows(name, points, shift=_BESIDE ** (i - middle))
        if not rows:
            continue
        spec = charts.lines(
            rows,
            x="labelled groups",
            y=what,
            log=True,
            ticks=[number for number in study.labelled.values() if number is not None],
            order=list(study.methods),
            marks=[{"x": x.at, "series": name} for name, v in versus.items() for x in v.crossovers],
            level=None if against is None else 0.0,
        )
        crosses = "; a cross marks where a method falls behind or overtakes it" if against else ""
        file = f"{'differences' if against else 'curves'}{'' if groups == 'all' else f'-{groups}'}"
        yield Chart(spec, f"{what} by the number of labelled groups, {titles[groups]}{crosses}", file)
