"""The leaderboard of `jobs.auto`: the methods with their minutes, the ranker, and what to do next."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import against, against_header, number
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import Block, Document, Points, Section, Table, Text
from ltrscale.reports.findings import Findings, write_report


class BoardRow(Config):
    """A method of the leaderboard."""

    name: str
    says: str
    """Trees, trials or epochs, or the number of models in a mean."""
    minutes: float
    """Training time; for a mean, the total of its models."""
    validation: float | None
    """The metric that chose, on validation."""
    url: str
    """The bundle."""


class Board(Findings):
    """`metrics.json` of a leaderboard."""

    called: ClassVar = "a leaderboard"
    made_by_job: ClassVar = "jobs.auto"
    rows: tuple[BoardRow, ...]
    weights: dict[str, float]
    """Weights of the models in the blend."""
    metric: str = "ndcg@5"
    """The metric that chose on validation."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Why methods have no model, by name."""
    half: float | None
    """Validation metric of trees trained on half of the labels."""
    final: str
    """The ranker's bundle."""
    refitted: bool
    budget: float
    """Minutes available."""
    minutes: float
    """Minutes spent before this page."""

    def validated(self, name: str) -> float | None:
        """The metric of a method on validation; None without the method."""
        return next((row.validation for row in self.rows if row.name == name), None)


def write_board(board: Board, evaluation: Evaluation | None, out: str, *, made_by: Mapping[str, Any]) -> None:
    """Commit `report.md` and `metrics.json` to a directory."""
    with storage.Commit(out) as commit:
        write_report(commit, board, document(board, evaluation))
        commit.finish({"made_by": made_by})


def document(board: Board, evaluation: Evaluation | None) -> Document:
    """The page."""
    opening: list[Block] = [
        Text(f"The ranker is {board.final}. {_about(board)}"),
        Table(*_leaderboard(board, evaluation)),
        Text(advised(board)),
    ]
    return Document("Leaderboard", opening, [Section("How to read", [Points(list(_how_to_read(board, evaluation)))])])


def _about(board: Board) -> str:
    single = len(board.weights) == 1
    weights = ", ".join(f"{weight:.2f} {name}" for name, weight in board.weights.items())
    what = f"It is {next(iter(board.weights))} alone" if single else f"It is the mean of {weights}"
    learnt = "; its members have learnt once more, from all labels" if board.refitted else ""
    return f"{what}{learnt}. {board.minutes:.1f} of {board.budget:g} minutes."


def _leaderboard(board: Board, evaluation: Evaluation | None) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the methods, sorted by test, or by validation if there is no test."""
    header = ["method", "what", "minutes", f"validation {metric_label(board.metric)}"]
    if evaluation is None:
        rows = sorted(board.rows, key=lambda row: -(row.validation or 0.0))
        return header, [[row.name, row.says, f"{row.minutes:.1f}", number(row.validation)] for row in rows]
    primary = evaluation.primary
    of_test = {method.name: method.slices[ALL] for method in evaluation.methods}

    def tested(name: str) -> float:
        mean = of_test[name].summaries[primary].mean
        return float("-inf") if mean is None else mean

    cells = []
    for row in sorted(board.rows, key=lambda row: -tested(row.name)):
        scope = of_test[row.name]
        difference = against(scope.comparisons.get(primary)) if evaluation.baseline is not None else []
        mean = scope.summaries[primary].mean
        cells.append([row.name, row.says, f"{row.minutes:.1f}", number(row.validation), number(mean), *difference])
    return [*header, metric_label(primary), *against_header(primary, evaluation.baseline)], cells


def advised(board: Board) -> str:
    """The sentence on what would help: more labels, or more pretraining."""
    parts, gains = [], {}
    trees, scratch, pretrained = map(board.validated, ("trees", "scratch", "pretrained"))
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
    yield "Minutes of a mean are those of all its models; a blend has all models of the run."
    for name, why in board.left_out.items():
        yield f"No {name}: {why}."
