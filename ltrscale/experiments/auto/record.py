"""The time-dependent decisions of a run of `jobs.auto`, their results, and what fits into the remaining minutes.

The leaderboard shows them: the methods with their minutes, the ranker, and what to do next.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Strict
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import columns_against
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.experiments.auto.plan import (
    IN_CONTEXT,
    KNOWN_METHODS,
    LINEAR,
    PRETRAINED_NETWORK,
    SCRATCH,
    STUDENT,
    TREES,
    TUNED,
    AutoSizes,
    Planned,
    Speed,
    planned,
)
from ltrscale.experiments.first.pipeline import SCORED
from ltrscale.experiments.records import read_record, record_bytes
from ltrscale.processor import Busy
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import Block, Document, Points, Section, Table, TableRow, Text
from ltrscale.reports.findings import Findings

_BEAT_S = 5.0
"""Interval of saving the time; a killed process loses at most this."""


class Entry(Strict):
    """A model of a method, with its state."""

    method: str
    number: int = 0
    """0 for the method's first model, which searches and pretrains; the others have other seeds."""
    says: str = ""
    """Description, or why there is no model."""
    foretold: float = 0.0
    """Planned minutes; 0 for a model with another seed."""
    minutes: float = 0.0
    """Minutes spent, over all processes."""
    processor: float = 0.0
    """Minutes of processors for it, of this process and the children that have ended."""
    scores: float | None = None
    """Documents that the model scored a second, with reading; None if it was not measured."""
    state: Literal["begun", "done", "late", "left out"] = "begun"
    """`late`: the time is too short for it; `left out`: the data do not fit it."""
    url: str = ""

    @property
    def name(self) -> str:
        """Name of the model among the members of the blend."""
        return self.method if self.number == 0 else f"{self.method}-{self.number}"


class AutoRecord(Strict):
    """`auto.json`: all time-dependent decisions, so that a resumed run decides the same."""

    of: str
    """Hash of the data, the seed, and the metric that chooses."""
    budget: float
    """Minutes of the budget."""
    minutes: float = 0.0
    """Spent so far, over all processes."""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    test_share: float | None = None
    """The share of the test lists that there was time to score; None until known."""
    refitted: bool | None = None
    """Whether there was time for a refit; None until known."""
    ended: float | None = None
    """Minutes spent when the ranker was complete."""
    others: float | None = None
    """The share of the machine's processors that other programs used until then, in the last process; None if unknown.
    """

    @classmethod
    def resumed(cls, url: str, of: str, budget: float) -> Self:
        """The record of an earlier process, without models left out for another budget; or an empty one.

        Raises:
            InputError: the earlier process had other data, another seed or another metric.
        """
        record = read_record(cls, url, "remove it, and the same command begins anew")
        if record is None:
            return cls(of=of, budget=budget)
        if record.of != of:
            raise InputError(
                f"{url}: begun on other data, or with another seed or primary_cutoff; name another out or remove it"
            )
        if record.budget == budget:
            return record
        kept = tuple(entry for entry in record.entries if entry.state in ("begun", "done"))
        return record.replace(budget=budget, entries=kept, test_share=None, refitted=None, ended=None)

    def done(self, method: str) -> list[Entry]:
        """The finished models of a method."""
        return [entry for entry in self.entries if (entry.state, entry.method) == ("done", method)]

    def noted(self, entry: Entry) -> Self:
        """The record with an entry added or updated."""
        entries = {(known.method, known.number): known for known in self.entries}
        entries[entry.method, entry.number] = entry
        return self.replace(entries=tuple(entries.values()))


@dataclass
class RecordKeeper:
    """Keeps the record in its file, with the time spent, which a thread writes regularly while `beating`."""

    url: str
    record: AutoRecord
    """Starts with the minutes of earlier processes."""
    began: float = field(default_factory=time.monotonic)
    """Start of this process, by `time.monotonic()`."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._before, self._busy = self.record.minutes, Busy.now()

    @property
    def others(self) -> float | None:
        """The share of the machine's processors that others have used since this process began; None if unknown."""
        return Busy.now().others_since(self._busy, time.monotonic() - self.began)

    @property
    def spent(self) -> float:
        """Minutes so far, over all processes."""
        return self._before + (time.monotonic() - self.began) / 60

    def keep(self, **decided: Any) -> None:
        """Write the record with the time so far and new decisions."""
        with self._lock:
            storage.check_lease(self.url)
            self.record = self.record.replace(**decided, minutes=self.spent)
            storage.write_bytes(self.url, record_bytes(self.record))

    def note(self, entry: Entry) -> Entry:
        """Write the record with an entry added or updated."""
        with self._lock:
            self.record = self.record.noted(entry)
            self.keep()
        return entry

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Write the time every few seconds while the block runs."""
        over = threading.Event()

        def beats() -> None:
            while not over.wait(_BEAT_S):
                with suppress(InputError):  # the run's next write raises the same error, and ends it
                    self.keep()

        thread = threading.Thread(target=beats, name="record", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


MOST_MODELS = 10
"""Maximum number of models of a method."""
_RESERVED, _LEAST_RESERVED = 0.1, 0.1
"""Share of the budget for blend, test and leaderboard, and further minutes."""
_MOST_TEST, _LEAST_TEST = 0.02, 0.01
"""The largest share of the budget to test a model, and the least share of the test lists to judge on."""
_REFIT = 1.2
"""Time of a refit relative to training, because it reads validation too."""


def _chosen_at(cutoff: int, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a method, with NDCG at a cut-off to choose trees, epochs and trials."""
    by: dict[str, dict[str, Any]] = {"gbdt": {"stop_on": cutoff}, "finetune": {"validation_metric": f"ndcg@{cutoff}"}}
    return {key: {**value, **by[key]} if key in by else value for key, value in settings.items()}


@dataclass(frozen=True)
class Forecast:
    """The minutes that models will take, and those that remain."""

    record: AutoRecord
    """Models so far, and the budget."""
    sizes: AutoSizes
    spent: float
    """Minutes so far, over all processes."""
    refits: bool
    """Whether the ranker's models will be refitted."""
    cutoff: int
    """Cut-off of the NDCG that chooses."""

    @property
    def left(self) -> float:
        """Minutes for further models, their refit and their test."""
        done = {name: self.record.done(name) for name in KNOWN_METHODS}
        tested = sum(len(entries) * self.test_minutes(name) for name, entries in done.items())
        refitted = sum(len(entries) * self._again_minutes(name) for name, entries in done.items() if entries)
        # in-context rankers score slowly, and their plan includes that
        slow = sum(max(0.0, entry.foretold - entry.minutes) for entry in done[IN_CONTEXT])
        rest = (self._with_refit - 1) * refitted + tested + slow
        return self.record.budget * (1 - _RESERVED) - _LEAST_RESERVED - self.spent - rest

    def first(self, name: str, teacher: str = SCRATCH) -> Planned:
        """The plan of a method's first model for its share of the budget, or less if less time is left.

        One that does not fit into its share may take a third of what is left, while that is half of the budget.
        """
        budget, tested = self.record.budget, self.test_minutes(name)
        plan, left = self._planned(name, budget, teacher), max(0.0, self.left - tested)
        if plan.settings is None and left > budget / 2:
            plan = self._planned(name, left / 3 / KNOWN_METHODS[name].share, teacher)
        takes = self.takes(name, plan) - tested
        return plan if takes <= left else self._planned(name, budget * left / takes, teacher)

    def takes(self, name: str, plan: Planned) -> float:
        """Minutes of a first model, its refit (without search and pretraining) and its test."""
        if plan.settings is None:
            return 0.0
        again = self._without_start(name, plan.minutes, plan.settings)
        return plan.minutes + (self._with_refit - 1) * again + self.test_minutes(name)

    def more(self) -> str | None:
        """The method to train one more model of: the one with the fewest; None if none fits."""
        counts = {name: len(self.record.done(name)) for name, known in KNOWN_METHODS.items() if known.again}
        counts = counts if any(counts.values()) else {TREES: len(self.record.done(TREES))}
        failed = {entry.method for entry in self.record.entries if entry.state in ("late", "left out")}
        fits = [
            name
            for name, count in counts.items()
            if 0 < count < MOST_MODELS
            and name not in failed
            and self._with_refit * self._again_minutes(name) + self.test_minutes(name) < self.left
        ]
        return min(fits, key=lambda name: counts[name], default=None)

    @property
    def _with_refit(self) -> float:
        """Factor from minutes of training to minutes with refit."""
        return 1 + _REFIT if self.refits else 1.0

    def _again_minutes(self, name: str) -> float:
        """Minutes of one more model of a method, without search or pretraining."""
        first, *others = (entry.minutes for entry in self.record.done(name))
        return max(others) if others else self._without_start(name, first, self.record.methods[name])

    def test_minutes(self, name: str) -> float:
        """Minutes to score the test split with a model, or the part of it that there is time for."""
        return min(_MOST_TEST * self.record.budget, self._whole_test(name))

    def _whole_test(self, name: str) -> float:
        """Minutes to score the whole test split with a model, once for all rankers that contain it."""
        measured = [entry.scores for entry in self.record.done(name) if entry.scores]
        slower = KNOWN_METHODS[name].slower if name in KNOWN_METHODS else 1.0
        return self.sizes.tested / (measured[0] if measured else self.speed.scored / slower) / 60

    @cached_property
    def speed(self) -> Speed:
        """The speed of this machine, from the models so far."""
        first = {name: entries[0] for name in (TREES, LINEAR, SCRATCH) if (entries := self.record.done(name))}

        def relative(*names: str) -> float:
            for entry in (first[name] for name in names if name in first):
                if entry.foretold:  # at most 1: a short time may be early stopping
                    return min(1.0, entry.foretold / max(entry.minutes, 1e-9))
            return 1.0

        networks = relative(SCRATCH, LINEAR)
        scored = (first[name].scores for name in (SCRATCH, LINEAR) if name in first)
        return Speed(relative(TREES), networks, next(filter(None, scored), SCORED * networks))

    @property
    def test_share(self) -> float:
        """The share of the test lists that every model can score in the time left, or in half of it before a refit."""
        needed = sum(len(self.record.done(name)) * self._whole_test(name) for name in KNOWN_METHODS)
        left = self.record.budget - self.spent
        return min(1.0, max(_LEAST_TEST, (left if not self.refits else left / 2) / max(needed, 1e-9)))

    def _planned(self, name: str, budget: float, teacher: str) -> Planned:
        """The plan of a method's first model for its share of a budget, on this machine."""
        plan = planned(name, self.sizes, budget, self.speed, left=self.left, teacher=teacher)
        return plan._replace(settings=plan.settings and _chosen_at(self.cutoff, plan.settings))

    def _without_start(self, name: str, minutes: float, settings: Mapping[str, Any]) -> float:
        """Minutes of a method's first model without its search, pretraining or teachers."""
        if name == TUNED:
            return 2 * minutes / int(settings["trials"])
        if name in (PRETRAINED_NETWORK, STUDENT):
            return min(minutes, max((entry.minutes for entry in self.record.done(SCRATCH)), default=minutes))
        return minutes


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
    late: tuple[str, ...] = ()
    """Those for which the time was too short."""
    half: float | None
    """Validation metric of trees trained on half of the labels."""
    final: str
    """The ranker's bundle."""
    refitted: bool
    budget: float
    """Minutes available."""
    minutes: float
    """Minutes spent before this page."""
    test_share: float | None = None
    """The share of the test lists that judged; None without test."""
    others: float | None = None
    """The share of the machine's processors that other programs used meanwhile, where it is known."""

    def validated(self, name: str) -> float | None:
        """The metric of a method on validation; None without the method."""
        return next((row.validation for row in self.rows if row.name == name), None)


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
