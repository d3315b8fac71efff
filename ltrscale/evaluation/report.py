"""What an evaluation found, and how it is shown: one table for all methods, a page in Markdown, a picture."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.evaluation.outliers import OutlierDetector

METRICS = "metrics.json"
_RULES_SHOWN = 10


class Summary(Config):
    """A metric of one method over query groups; None where no group defines it."""

    mean: float | None
    """Over the groups where the metric is defined, and over trials."""
    low: float | None
    """Lower end of the 95% bootstrap interval of the mean over groups."""
    high: float | None
    """Upper end."""
    trials: tuple[float | None, ...]
    """The mean of each trial."""
    std_error: float | None
    """Of the mean over trials; None with one trial."""
    groups: int
    """Groups where the metric is defined."""
    undefined: int
    """Groups where it is not: no document is relevant."""
    as_zero: float | None
    """The mean with 0 in place of undefined values."""
    as_one: float | None
    """The mean with 1 in place of undefined values."""


class Comparison(Config):
    """A method against the baseline on the groups that both define; positive differences speak for the method."""

    difference: float
    low: float
    """Lower end of the 95% bootstrap interval of the difference."""
    high: float
    """Upper end."""
    p: float
    """Two-sided p value of the sign-flip test."""
    p_holm: float
    """The same, adjusted for the number of methods compared."""


class Scope(Config):
    """What was found on some of the groups, by metric."""

    summaries: dict[str, Summary]
    comparisons: dict[str, Comparison]
    """With the baseline; empty for the baseline itself, and where no group defines the metric."""


class MethodResult(Config):
    """One method: its bundles, one a trial, and what was found on all groups and on outlier groups."""

    name: str
    bundles: tuple[str, ...]
    kinds: tuple[str, ...]
    """Neural or tree, of each bundle."""
    labelled_groups: tuple[int | None, ...]
    """Groups on whose labels each bundle was trained, where it tells."""
    everywhere: Scope
    outliers: Scope


class EvaluatedData(Config):
    """The groups that the methods were evaluated on."""

    data: tuple[str, ...]
    periods: tuple[str, ...]
    hash: str
    groups: int
    documents: int
    outlier_groups: int


class Evaluation(Config):
    """`metrics.json` of an evaluation."""

    methods: tuple[MethodResult, ...]
    baseline: str | None
    primary: str
    """The metric of the comparison column and the picture."""
    relevant_from: float
    resamples: int
    test: EvaluatedData
    detector: OutlierDetector


def read_evaluation(url: str) -> Evaluation:
    """Read back what `evaluate` committed.

    Raises:
        InputError: no evaluation is committed there.
    """
    if storage.read_manifest(url) is None:
        raise InputError(f"{url}: no evaluation is committed there; make it with jobs.evaluate")
    where = storage.join(url, METRICS)
    try:
        return Evaluation.model_validate_json(storage.read_bytes(where))
    except ValueError as error:
        raise InputError(f"{where}: not an evaluation ({error}); evaluate again") from error


def print_table(url: str) -> None:
    """Write the table of a committed evaluation to standard output, and where its report stands."""
    sys.stdout.write(f"{table(read_evaluation(url))}\n\n{storage.join(url, 'report.md')}\n")


def metric_label(metric: str) -> str:
    """How a metric is written in tables.

    Example:
        >>> metric_label("ndcg@5"), metric_label("precision@10"), metric_label("map")
        ('NDCG@5', 'P@10', 'MAP')
    """
    return metric.upper().replace("PRECISION", "P")


def table(evaluation: Evaluation) -> str:
    """One row per method, as a Markdown table whose columns line up, so that it reads well in a terminal too.

    NDCG at each cut-off with the standard error over trials where there are several, the same on outlier groups for
    the primary cut-off, the paired difference from the baseline with its interval and adjusted p value, and how many
    groups define the primary metric.
    """
    primary = evaluation.primary
    cutoffs = [name for name in evaluation.methods[0].everywhere.summaries if name.startswith("ndcg@")]
    n_outliers = evaluation.methods[0].outliers.summaries[primary].groups
    header = ["method", *map(metric_label, cutoffs), f"Outlier-{metric_label(primary)} (n={n_outliers})"]
    if evaluation.baseline is not None:
        header += [f"{metric_label(primary)} - {evaluation.baseline} [95%]", "p"]
    rows = []
    for method in evaluation.methods:
        summaries = method.everywhere.summaries
        row = [method.name, *(_mean(summaries[name]) for name in cutoffs), _mean(method.outliers.summaries[primary])]
        if evaluation.baseline is not None:
            row += _against(method.everywhere.comparisons.get(primary))
        rows.append([*row, f"{summaries[primary].groups:,}", f"{summaries[primary].undefined:,}"])
    return _markdown([*header, "groups", "undefined"], rows)


def page(evaluation: Evaluation, *, picture: str) -> str:
    """The whole report in Markdown; `picture` is the file name of the plot."""
    parts = [
        "# Evaluation",
        _data(evaluation),
        table(evaluation),
        _how_to_read(evaluation),
        f"![{metric_label(evaluation.primary)} of each method with its interval]({picture})",
        "## All metrics",
        _all_metrics(evaluation),
    ]
    if evaluation.baseline is not None:
        parts += [f"## Against {evaluation.baseline}", _comparisons(evaluation)]
    parts += ["## Outliers", _outliers(evaluation.detector), "## Methods", _methods(evaluation.methods)]
    return "\n\n".join(parts) + "\n"


def plot(evaluation: Evaluation, path: Path) -> None:
    """Draw the primary metric of each method with its 95% interval as PNG; on outlier groups too, if there are any."""
    methods = evaluation.methods
    label = metric_label(evaluation.primary)
    shown = [(label, [method.everywhere for method in methods])]
    if methods[0].outliers.summaries[evaluation.primary].groups:
        shown.append((f"Outlier-{label}", [method.outliers for method in methods]))
    figure = Figure(figsize=(4.5 * len(shown), 1.6 + 0.36 * len(methods)), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (title, scopes) in zip(panels, shown, strict=True):
        summaries = [scope.summaries[evaluation.primary] for scope in scopes]
        axes.set_title(f"{title}, {summaries[0].groups:,} groups", fontsize=10)
        for row, (method, summary) in enumerate(zip(methods, summaries, strict=True)):
            if summary.mean is None or summary.low is None or summary.high is None:
                continue
            colour = "tab:gray" if method.name == evaluation.baseline else "tab:blue"
            axes.plot([summary.low, summary.high], [row, row], color=colour, linewidth=2)
            axes.plot(summary.mean, row, "o", color=colour)
            if method.name == evaluation.baseline:
                axes.axvline(summary.mean, color=colour, linestyle=":", linewidth=1, zorder=0)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(methods)), [method.name for method in methods])
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    figure.supxlabel("mean and its 95% bootstrap interval over query groups", fontsize=9)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})


def _data(evaluation: Evaluation) -> str:
    test = evaluation.test
    first, last = test.periods[0], test.periods[-1]
    periods = f"period `{first}`" if first == last else f"{len(test.periods)} periods, `{first}` to `{last}`"
    return (
        f"Test data: {', '.join(f'`{url}`' for url in test.data)}, {periods}; {test.groups:,} labelled query groups, "
        f"{test.documents:,} documents, {test.outlier_groups:,} outlier groups (selection `{test.hash[:12]}`)."
    )


def _how_to_read(evaluation: Evaluation) -> str:
    several = any(len(method.bundles) > 1 for method in evaluation.methods)
    lines = [
        "NDCG has gain 2^y - 1 and discount 1 / log2(1 + rank), the ideal taken from the full list; lists shorter than "
        "the cut-off are evaluated at their length. MRR, MAP and P call a document relevant from label "
        f"{evaluation.relevant_from:g} on. Documents with equal scores get the expectation over their orders.",
        "A group without a relevant document leaves a metric undefined: it is left out of the mean and counted; the "
        "means with 0 and with 1 in its place stand under All metrics.",
        f"Intervals are percentiles of {evaluation.resamples:,} bootstrap resamples of query groups; p is that of the "
        "paired sign-flip test over groups, adjusted for the number of methods by Holm. With fewer than about 30 "
        "groups both say little.",
    ]
    if several:
        lines.insert(2, "± is the standard error of the mean over trials; tests use each group's mean over trials.")
    return "\n".join(f"- {line}" for line in lines)


def _all_metrics(evaluation: Evaluation) -> str:
    rows = []
    for title, scopes in _scopes(evaluation):
        for metric in evaluation.methods[0].everywhere.summaries:
            for name, scope in scopes:
                s = scope.summaries[metric]
                interval = f"[{_number(s.low)}, {_number(s.high)}]"
                counts = [f"{s.groups:,}", f"{s.undefined:,}", _number(s.as_zero), _number(s.as_one)]
                rows.append([title, metric_label(metric), name, _mean(s), interval, *counts])
    header = ["groups", "metric", "method", "mean", "95% interval", "defined", "undefined", "with 0", "with 1"]
    return _markdown(header, rows)


def _comparisons(evaluation: Evaluation) -> str:
    rows = []
    for title, scopes in _scopes(evaluation):
        for metric in evaluation.methods[0].everywhere.summaries:
            for name, scope in scopes:
                if c := scope.comparisons.get(metric):
                    rows.append([title, metric_label(metric), name, _against(c)[0], f"{c.p:.4f}", f"{c.p_holm:.4f}"])
    return _markdown(["groups", "metric", "method", "difference [95%]", "p", "p (Holm)"], rows)


def _scopes(evaluation: Evaluation) -> Iterable[tuple[str, list[tuple[str, Scope]]]]:
    yield "all", [(method.name, method.everywhere) for method in evaluation.methods]
    if evaluation.test.outlier_groups:
        yield "outliers", [(method.name, method.outliers) for method in evaluation.methods]


def _outliers(detector: OutlierDetector) -> str:
    """The rules in short; `outliers.json` has them all."""
    how = "by the named features only" if detector.gap is None else f"beyond gaps of {detector.gap} of 100 bins"
    text = (
        f"A group with an outlier value is an outlier group. Rules were fitted on the validation split, {how}; "
        f"{detector.share:.2%} of its groups are outliers. {len(detector.rules)} of {len(detector.features)} features "
        "have a rule (all in `outliers.json`)"
    )
    lines = []
    for name, rule in list(detector.rules.items())[:_RULES_SHOWN]:
        conditions = [
            *([f"< {rule.below:g}"] if rule.below is not None else []),
            *([f">= {rule.at_least:g}"] if rule.at_least is not None else []),
            *(["missing"] if rule.missing else []),
        ]
        lines.append(f"- `{name}`: {' or '.join(conditions)}")
    more = f", the first {_RULES_SHOWN} of them:" if len(detector.rules) > _RULES_SHOWN else ":" if lines else "."
    return "\n".join([text + more, *([""] if lines else []), *lines])


def _methods(methods: Sequence[MethodResult]) -> str:
    rows = [
        [method.name, kind, "-" if groups is None else f"{groups:,}", f"`{url}`"]
        for method in methods
        for kind, groups, url in zip(method.kinds, method.labelled_groups, method.bundles, strict=True)
    ]
    text = (
        "A job leaves its whole configuration in `run/config.yaml` beside this page; "
        "`python -m jobs.evaluate --config run/config.yaml --set out=DIRECTORY` repeats the evaluation."
    )
    return f"{_markdown(['method', 'kind', 'labelled groups trained on', 'bundle'], rows)}\n\n{text}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _mean(summary: Summary) -> str:
    spread = "" if summary.std_error is None else f" ± {summary.std_error:.4f}"
    return _number(summary.mean) + spread


def _against(comparison: Comparison | None) -> list[str]:
    """Difference with interval, and the adjusted p value."""
    if comparison is None:
        return ["-", "-"]
    c = comparison
    return [f"{c.difference:+.4f} [{c.low:+.4f}, {c.high:+.4f}]", f"{c.p_holm:.4f}"]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of one width; numbers to the right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(row[i][:1] in "0123456789+-<" for row in cells[1:]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return f"| {' | '.join(padded)} |"

    ruler = [("-" * (w - 1) + ":") if r else "-" * w for w, r in zip(widths, right, strict=True)]
    return "\n".join([line(cells[0]), line(ruler), *map(line, cells[1:])])
