"""What a study says in a few sentences: the method to take at each number of labels, and trees that get worse."""

import itertools
import math
from collections.abc import Mapping

from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.studies.study import Study
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import cell

_FALL = 2.0
"""Standard errors of the smallest fall of a metric that is remarked on."""


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
