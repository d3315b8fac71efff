"""The leaderboard of `jobs.auto`: the methods with their minutes, the ranker, and what to do next."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import Field

from ltrscale import bundle
from ltrscale.config import Strict
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import columns_against
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.experiments.auto.first_models import PRETRAINED_NETWORK, SCRATCH, TREES
from ltrscale.experiments.auto.plan import HALF, AutoRecord, validation_metric
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import Block, Document, Points, Section, Table, TableRow, Text
from ltrscale.reports.findings import Findings

_SHARED = 0.1
"""The share of the processors from which on others' use is said."""


class BoardRow(Strict):
    """A method of the leaderboard."""

    name: str
    says: str
    """Trees, trials or epochs, or the number of models in a mean."""
    minutes: float
    """Training time; for a mean, the total of its models."""
    validation: float | None
    """The metric that chose, on validation."""
    url: str


class Board(Findings):
    """`metrics.json` of a leaderboard."""

    called: ClassVar = "a leaderboard"
    made_by_job: ClassVar = "jobs.auto"
    rows: tuple[BoardRow, ...]
    weights: dict[str, float]
    metric: str = "ndcg@5"
    """The metric that chose on validation."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Why methods have no model, by name."""
    late: tuple[str, ...] = ()
    """Those for which the time was too short."""
    half: float | None
    """Validation metric of trees trained on half of the labels."""
    final: str
    """The ranker's bundle."""
    refitted: bool
    budget: float
    minutes: float
    """Minutes spent before this page."""
    test_share: float | None = None
    """The share of the test lists that judged; None without test."""
    others: float | None = None
    """The share of the machine's processors that other programs used meanwhile, where it is known."""


def final_board(record: AutoRecord, rankers: Mapping[str, str], final: str | None, metric: str) -> Board:
    """The results of a run that has ended: all rankers with their bundles, and the refitted one if there is one."""
    assert record.ended is not None
    weights, minutes = dict(bundle.load(rankers["blend"]).blended), record.ended

    def row(name: str, url: str) -> BoardRow:
        entries = record.done(name.removesuffix("_mean"))
        if name == "blend":
            spent, says = minutes, f"{len(weights)} of these"
        elif name.endswith("_mean"):
            spent, says = sum(entry.minutes for entry in entries), f"{len(entries)} models"
        else:
            spent, says = entries[0].minutes, entries[0].says
        validation = validation_metric(url, metric)
        return BoardRow(name=name, says=says, minutes=round(spent, 2), validation=validation, url=url)

    return Board(
        rows=tuple(row(name, url) for name, url in rankers.items()),
        weights=weights,
        metric=metric,
        left_out={entry.name: entry.says for entry in record.entries if entry.state in ("late", "left out")},
        late=tuple(entry.method for entry in record.entries if entry.state == "late" and entry.number == 0),
        half=next((validation_metric(entry.url, metric) for entry in record.done(HALF)), None),
        final=final or rankers["blend"],
        refitted=final is not None,
        budget=record.budget,
        minutes=round(minutes, 2),
        test_share=record.test_share,
        others=record.others,
    )


def document(board: Board, evaluation: Evaluation | None) -> Document:
    """The page."""
    opening: list[Block] = [
        Text(f"The ranker is {board.final}. {_about(board)}"),
        _leaderboard(board, evaluation),
        Text(advised(board)),
    ]
    return Document("Leaderboard", opening, [Section("How to read", [Points(list(_how_to_read(board, evaluation)))])])


def _about(board: Board) -> str:
    single = len(board.weights) == 1
    weights = ", ".join(f"{weight:.2f} {name}" for name, weight in board.weights.items())
    what = f"It is {next(iter(board.weights))} alone" if single else f"It is the mean of {weights}"
    learnt = "; its members have learnt once more, from all labels" if board.refitted else ""
    return f"{what}{learnt}. {board.minutes:.1f} of {board.budget:g} minutes."


def _leaderboard(board: Board, evaluation: Evaluation | None) -> Table:
    """A row for each method, sorted by test, or by validation if there is no test."""
    of_test = {m.name: m.slices[ALL] for m in evaluation.methods} if evaluation is not None else {}
    rows: list[tuple[float, TableRow]] = []
    for each in board.rows:
        row: TableRow = {"method": each.name, "what": each.says, "minutes": f"{each.minutes:.1f}"}
        row[f"validation {metric_label(board.metric)}"] = mean = each.validation
        if evaluation is not None:
            scope = of_test[each.name]
            row[metric_label(evaluation.primary)] = mean = scope.summaries[evaluation.primary].mean
            row |= columns_against(evaluation.primary, evaluation.baseline, scope)
        rows.append((float("-inf") if mean is None else mean, row))
    return Table.from_rows([row for _, row in sorted(rows, key=lambda pair: -pair[0])])


def advised(board: Board) -> str:
    """The sentence on what would help: more minutes if methods had none, else more labels or more pretraining."""
    if board.late:
        return f"What to do next: more minutes; there were too few for {', '.join(board.late)}."
    parts, gains = [], {}
    validation = {row.name: row.validation for row in board.rows}
    trees, scratch, pretrained = map(validation.get, (TREES, SCRATCH, PRETRAINED_NETWORK))
    if board.half is not None and trees is not None:
        gains["label more lists"] = trees - board.half
        parts.append(f"from half of the labels to all, trees gained {trees - board.half:+.4f}")
    if scratch is not None and pretrained is not None:
        gains["pretrain longer, with a larger budget"] = pretrained - scratch
        parts.append(f"pretraining gave {pretrained - scratch:+.4f} over the same network without it")
    if not parts:
        return "What to do next: a larger budget, which has room for networks."
    best = max(gains, key=lambda name: gains[name])
    nothing = "that brought nothing here" if len(gains) == 1 else "neither brought anything here"
    advice = best if gains[best] > 0 else f"{nothing}, so look for features that tell more"
    return f"What to do next: {advice}. On validation {', and '.join(parts)}."


def _how_to_read(board: Board, evaluation: Evaluation | None) -> Iterator[str]:
    judged = "nothing else has judged"
    if evaluation is not None:
        judged = f"test, which chose nothing, judged once: {evaluation.test.groups:,} labelled groups"
    yield f"Validation chose settings, epochs and the weights of the blend, so its figures flatter; {judged}."
    if evaluation is not None:
        yield (
            "Its intervals hold for other queries. What other labels or another seed would change can be as large, and "
            f"needs {FEWEST_DRAWS} draws of labels or more, each with its own run."
        )
    if board.test_share is not None and board.test_share < 1:
        yield f"Test is a drawn part, {board.test_share:.2g} of its lists: scoring all would have taken too long."
    if board.others is not None and board.others > _SHARED:
        yield (
            f"Other programs used {board.others:.0%} of this machine's processors meanwhile: on a quiet one more "
            "models fit into the same minutes."
        )
    yield "Minutes of a mean are those of all its models; a blend has all models of the run."
    for name, why in board.left_out.items():
        yield f"No {name}: {why}."
