"""The front of several goals: the methods of a comparison by their metric on the labels of each goal.

A method dominates another if its mean is at least as high on every goal and higher on one. Those that no other
dominates are the trade-offs to choose from.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from ltrscale.config import Strict
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.statistics.summarise import Summary
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Points, Section, Table, Text, cell
from ltrscale.reports.findings import Findings, commit_report


class TradeOff(Strict):
    """A method's primary metric on the labels of each goal."""

    method: str
    of_goals: dict[str, Summary]
    dominated_by: str | None
    """A method that is at least as good by every goal and better by one; None on the front."""

    @property
    def means(self) -> list[float]:
        """The mean on each goal."""
        return [-1.0 if summary.mean is None else summary.mean for summary in self.of_goals.values()]


class Front(Findings):
    """`front.json` of a comparison on several goals."""

    called: ClassVar = "a front"
    made_by_job: ClassVar = "jobs.pipeline"
    file: ClassVar = "front.json"
    primary: str
    trade_offs: tuple[TradeOff, ...]

    @property
    def kept(self) -> list[TradeOff]:
        """The methods on the front, by the first goal."""
        return sorted((t for t in self.trade_offs if t.dominated_by is None), key=lambda t: t.means, reverse=True)

    @classmethod
    def from_evaluations(cls, evaluations: Mapping[str, Evaluation]) -> Self:
        """The front of the methods of several evaluations, one on the labels of each goal.

        Raises:
            InputError: they are of other methods, or in another primary metric.
        """
        first = next(iter(evaluations.values()))
        found: dict[str, dict[str, Summary]] = {method.name: {} for method in first.methods}
        for goal, evaluation in evaluations.items():
            if [m.name for m in evaluation.methods] != [*found] or evaluation.primary != first.primary:
                raise InputError(f"{goal}: its evaluation has other methods or another metric; run both again")
            for method in evaluation.methods:
                found[method.name][goal] = method.slices[ALL].summaries[first.primary]
        alone = [TradeOff(method=name, of_goals=of, dominated_by=None) for name, of in found.items()]
        trade_offs = tuple(each.replace(dominated_by=_dominating(each, alone)) for each in alone)
        return cls(primary=first.primary, trade_offs=trade_offs)


def _dominating(one: TradeOff, others: Sequence[TradeOff]) -> str | None:
    """The first method that dominates one.

    Example:
        >>> of = dict(low=None, high=None, trials=(), std_error=None, groups=9, undefined=0, as_zero=None, as_one=None)
        >>> figures = {"a": (0.5, 0.2), "b": (0.4, 0.2), "c": (0.1, 0.3)}
        >>> goals = {m: {str(g): Summary(mean=v, **of) for g, v in enumerate(vs)} for m, vs in figures.items()}
        >>> offs = [TradeOff(method=m, of_goals=each, dominated_by=None) for m, each in goals.items()]
        >>> [_dominating(each, offs) for each in offs]
        [None, 'a', None]
    """
    for other in others:
        pairs = [*zip(other.means, one.means, strict=True)]
        if all(theirs >= own for theirs, own in pairs) and any(theirs > own for theirs, own in pairs):
            return other.method
    return None


def summarise_front(evaluations: Mapping[str, str], out: str, *, made_by: Mapping[str, Any]) -> Front:
    """Read the evaluation of each goal, and commit the front to a directory: `report.md` and `front.json`."""
    front = Front.from_evaluations({goal: Evaluation.read(url) for goal, url in evaluations.items()})
    commit_report(out, front, front_page(front), made_by=made_by)
    return front


def front_page(front: Front) -> Document:
    """The table of trade-offs, and a chart of each goal against the first."""
    label, kept = metric_label(front.primary), front.kept
    names = ", ".join(trade_off.method for trade_off in kept)
    opening = [
        Text(f"{len(kept)} of {len(front.trade_offs)} methods are dominated by no other: {names}."),
        _table(front),
    ]
    draws = min(summary.draws for each in front.trade_offs for summary in each.of_goals.values())
    few = [f"With fewer than {FEWEST_DRAWS} draws of labels, intervals are of the test groups alone."]
    points = [
        f"{label} on the labels of each goal, with 95% intervals over draws of labels and test groups.",
        "A method dominates another if its means are at least as high for every goal, and one is higher.",
        *(few if draws < FEWEST_DRAWS else []),
    ]
    return Document(
        "Trade-offs between goals", [*opening, *_charts(front, label)], [Section("How to read", [Points(points)])]
    )


def _table(front: Front) -> Block:
    rest = [each for each in front.trade_offs if each.dominated_by is not None]
    return Table.from_rows(
        [
            {
                "method": each.method,
                **{goal: cell(summary) for goal, summary in each.of_goals.items()},
                "dominated by": each.dominated_by or "-",
            }
            for each in (*front.kept, *rest)
        ]
    )


def _charts(front: Front, label: str) -> Iterator[Block]:
    first, *others = front.trade_offs[0].of_goals
    for x, y in itertools.product([first], others):
        rows = [
            charts.tradeoff_row(each.method, each.of_goals[x], each.of_goals[y], faded=each.dominated_by is not None)
            for each in front.trade_offs
        ]
        spec = charts.tradeoffs(rows, x=f"{label} of {x}", y=f"{label} of {y}")
        yield Chart(spec, f"{label} of each method for {x} and {y}", f"front-{x}-{y}")
