"""The best ranker of a log by one command, in a budget of minutes.

Trees, trees with searched settings, a network and the same one pretrained come first, each in its share of the budget;
then more models of each, with other seeds, as long as they fit. Their blend is the ranker: validation chooses its
weights. Test judges once, and the ranker's members learn once more from all labels. Below `out` are

    auto.json                     what was decided and what it took; a later process goes on by it
    models/METHOD/model/          bundles, as a pipeline makes them; models/runs/K/ has those of other seeds
    means/METHOD/                 the mean of all models of a method
    blend/                        the ranker
    evaluation/                   all methods on test, with report
    final/                        the ranker with members that have learnt from all labels
    leaderboard/report.md         methods, what they took, and what to do next
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter

from ltrscale import bundle, storage
from ltrscale.config import Config, validate
from ltrscale.data.dataset.disjoint import check_disjoint, joined_splits
from ltrscale.data.dataset.manifest import one_view, open_dataset
from ltrscale.data.dataset.selection import only_relevant, select
from ltrscale.data.dataset.split import Splits, SplitsWithTest, with_relative_named
from ltrscale.errors import InputError, Stopped
from ltrscale.evaluation.measure.evaluate import EvaluateJob
from ltrscale.evaluation.measure.settings import EvaluateConfig, EvaluateSettings
from ltrscale.experiments.auto.page import Board, Row, write_board
from ltrscale.experiments.auto.plan import PRETRAINED_NETWORK, SCRATCH, TREES, TUNED, Choice, Speed, choose
from ltrscale.experiments.first.pipeline import LogSize, divided
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.experiments.methods.choices import Method
from ltrscale.experiments.refit import RefitJob
from ltrscale.progress import log
from ltrscale.runtime.launch import cluster_for
from ltrscale.runtime.workers import ONE, Workers
from ltrscale.signals import ending_by, is_late
from ltrscale.stages.runs import check_replaceable, recorded
from ltrscale.storage import join
from ltrscale.training.blend import BlendConfig, BlendJob

BUDGETS = {"quick": 5.0, "good": 60.0, "best": 600.0}
FIRST = (TREES, TUNED, SCRATCH, PRETRAINED_NETWORK)
"""The methods in the order in which they are tried."""
MOST_MODELS = 10
"""Models of a method."""
_RECORD = "auto.json"
_RESERVED = 0.1
"""Share of the budget for blend, test and leaderboard."""
_REFIT = 1.2
"""A refit reads validation too."""


class Entry(Config):
    """A model that was begun: one of a method, and what became of it."""

    method: str
    number: int = 0
    """0 for the first model of the method, which searches and pretrains; others have other seeds."""
    says: str = ""
    """What it is, or why it is not there."""
    minutes: float = 0.0
    """What it took, over all processes."""
    state: Literal["begun", "done", "late", "left out"] = "begun"
    url: str = ""
    validation: float | None = None

    @property
    def name(self) -> str:
        """Of the model, among the members of the blend."""
        return self.method if self.number == 0 else f"{self.method}-{self.number}"


class Record(Config):
    """`auto.json`: all that was decided by the clock, so that a process that goes on decides the same."""

    of: str
    """The hash of the data."""
    minutes: float = 0.0
    """Spent so far, over all processes."""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    entries: tuple[Entry, ...] = ()


class AutoConfig(Config):
    """The best ranker of a data set, in a budget of minutes."""

    out: str
    """Directory for everything; the ranker is `final`, or `blend` where nothing is refitted."""
    data: str
    """A data set directory that jobs.prepare made."""
    splits: SplitsWithTest | None = None
    """Training, validation and test. Empty takes the last sixth of the periods for test, and the sixth before it for
    validation."""
    budget: Literal["quick", "good", "best"] | Annotated[float, Field(gt=0)] = "good"
    """`quick` is 5 minutes, `good` 60, `best` 600; or a number of minutes."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Metrics, slices and outliers of the test; the baseline is trees_tuned, or trees where nothing was searched."""
    refit: bool = True
    """Let the ranker's members learn once more, from the labels of validation and test too."""
    seed: int = 0
    """Of everything."""
    workers: Workers = ONE
    """Data-parallel workers of the networks."""

    @property
    def minutes(self) -> float:
        """The budget."""
        return BUDGETS[self.budget] if isinstance(self.budget, str) else self.budget

    def run(self) -> None:
        """Train, blend, judge, refit and report; goes on after any end by what was decided before.

        Raises:
            InputError: splits overlap or have no label, `out` has another job's output, or no model could be trained.
            Stopped: the process was asked to stop.
        """
        check_replaceable(self.out, "auto")
        with recorded(self.out, self, "auto"), cluster_for(self.workers), one_view():
            splits = self.resolved()
            check_disjoint(splits)
            Auto.begun(self, splits).run()

    def resolved(self) -> SplitsWithTest:
        """The splits with their data set and periods."""
        if self.splits is not None:
            return with_relative_named(self.splits.on(self.data), "splits")
        names = dict(zip(("train", "validation", "test"), divided(open_dataset(self.data).manifest.periods), strict=True))
        if not all(names.values()):
            raise InputError(f"{self.data}: has too few periods to divide into training, validation and test; set splits")
        values = {name: {"data": self.data, "periods": list(periods)} for name, periods in names.items()}
        return validate(SplitsWithTest, values, "splits")


@dataclass
class Auto:
    """A run: the record so far, and the clock."""

    config: AutoConfig
    splits: SplitsWithTest
    record: Record
    size: LogSize
    judged: int
    """Documents of the validation groups that models are judged on."""
    began: float = field(default_factory=time.monotonic)
    before: float = 0.0
    """Minutes of earlier processes."""

    @classmethod
    def begun(cls, config: AutoConfig, splits: SplitsWithTest) -> Self:
        """Read the record of an earlier process, or begin."""
        everything = select(splits.train)
        labelled = only_relevant(select(splits.train, labelled=True))
        judged = only_relevant(select(splits.validation, labelled=True))
        size = LogSize(everything.n_documents, labelled.n_documents, len(everything.features))
        of = ":".join(selection.hash for selection in (everything, labelled, judged))
        url = join(config.out, _RECORD)
        record = Record(of=of)
        if storage.exists(url):
            found = validate(Record, _json(url), url)
            if found.of != of:
                raise InputError(f"{url}: begun on other data; name another out, or remove this directory")
            record = found
        log.info(
            "auto: %s lists to learn from, %s documents with and %s without their labels; %.0f minutes",
            f"{labelled.n_groups:,}", f"{size.told_apart:,}", f"{size.documents:,}", config.minutes,
        )  # fmt: skip
        return cls(config, splits, record, size, judged.n_documents, before=record.minutes)

    @property
    def spent(self) -> float:
        """Minutes so far, over all processes."""
        return self.before + (time.monotonic() - self.began) / 60

    @property
    def left(self) -> float:
        """Minutes for further models and their refit."""
        return self.config.minutes * (1 - _RESERVED) - self.spent - self.refit_minutes()

    def run(self) -> None:
        """Try the methods, then more models of each; blend, judge, refit, report."""
        for name in FIRST:
            self.try_first(name)
        while (entry := self.next()) is not None:
            self.train(entry)
        members = {entry.name: entry.url for entry in self.done()}
        if not members:
            raise InputError(f"{self.config.out}: no model could be trained in {self.config.minutes:g} minutes; give more")
        rankers = {**self.means(), "blend": self.blend("blend", members, "greedy")}
        self.judge(rankers)
        final = self.refit(rankers["blend"]) if self.config.refit else None
        self.report(rankers, final)

    def done(self, method: str | None = None) -> list[Entry]:
        """The models that are there."""
        return [e for e in self.record.entries if e.state == "done" and method in (None, e.method)]

    def try_first(self, name: str) -> None:
        """Decide the settings of the first model of a method, and train it."""
        known = next((entry for entry in self.record.entries if (entry.method, entry.number) == (name, 0)), None)
        if known is None:
            choice = choose(
                name, self.size, self.config.minutes, self.speed(), cores=os.cpu_count() or 1, judged=self.judged
            )
            known = self.decided(name, choice)
        self.train(known)

    def decided(self, name: str, choice: Choice) -> Entry:
        """The entry of a first model; it is left out where it does not fit."""
        if choice.settings is None or choice.minutes * (1 + _REFIT) > self.left:
            why = choice.why if choice.settings is None else f"takes {choice.minutes:.1f} minutes, which are not left"
            log.info("auto: no %s: %s", name, why)
            return self.note(Entry(method=name, says=why, state="left out"))
        methods = {**self.record.methods, name: dict(choice.settings)}
        self.record = self.record.replace(methods=methods)
        return self.note(Entry(method=name, says=choice.why))

    def speed(self) -> Speed:
        """The speed of this machine, from the models so far."""
        speed = Speed()
        for method, kind in ((TREES, "trees"), (SCRATCH, "networks")):
            for entry in self.done(method)[:1]:
                foretold = choose(method, self.size, self.config.minutes, Speed(), cores=os.cpu_count() or 1, judged=self.judged)
                # early stopping may end it sooner, so it is slower than foretold or as fast
                speed = speed._replace(**{kind: min(1.0, foretold.minutes / max(entry.minutes, 1e-9))})
        return speed

    def next(self) -> Entry | None:
        """The next model: one that an earlier process began, or one more of the method that has the fewest."""
        if begun := [entry for entry in self.record.entries if entry.state == "begun"]:
            return begun[0]
        counts = {name: len(self.done(name)) for name in FIRST[1:] if self.done(name)} or {TREES: len(self.done(TREES))}
        late = {entry.method for entry in self.record.entries if entry.state == "late"}
        fits = {
            name: count
            for name, count in counts.items()
            if 0 < count < MOST_MODELS and name not in late and (1 + _REFIT) * self.again_minutes(name) < self.left
        }
        if not fits:
            return None
        name = min(fits, key=lambda name: (fits[name], FIRST.index(name)))
        return self.note(Entry(method=name, number=fits[name], says="another seed"))

    def again_minutes(self, name: str) -> float:
        """Minutes of one more model of a method: without search, and from the same encoder."""
        entries = self.done(name)
        if len(entries) > 1:
            return max(entry.minutes for entry in entries[1:])
        first = entries[0].minutes
        if name == TUNED:
            return first / int(self.record.methods[TUNED]["trials"]) * 2
        return first if name != PRETRAINED_NETWORK else max((e.minutes for e in self.done(SCRATCH)), default=first)

    def refit_minutes(self) -> float:
        """Minutes that the refit of all models takes at most."""
        if not self.config.refit:
            return 0.0
        return _REFIT * sum(self.again_minutes(entry.method) for entry in self.done())

    def train(self, entry: Entry) -> None:
        """Train a model, unless it is there, or was late or left out before."""
        if entry.state not in ("begun", "done"):
            return
        began = time.monotonic()
        limit = began + max(0.0, self.left if entry.state == "begun" else self.config.minutes) * 60
        url = None
        with self._in_time(limit):
            url = self.model(entry)
        minutes = entry.minutes + (time.monotonic() - began) / 60
        if entry.state == "done":
            return
        if url is None:
            log.info("auto: %s is left: no time", entry.name)
            self.note(entry.replace(state="late", minutes=minutes, says="not ready in time"))
            return
        value = bundle.load(url).metrics.get("validation_ndcg@5")
        value = float(value) if isinstance(value, int | float) else None
        log.info("auto: %s in %.1f minutes, validation NDCG@5 %s", entry.name, minutes, "-" if value is None else f"{value:.4f}")
        self.note(entry.replace(state="done", url=url, minutes=minutes, validation=value))

    @contextmanager
    def _in_time(self, limit: float) -> Iterator[None]:
        """Run the block until a time at most."""
        with ending_by(limit):
            try:
                yield
            except Stopped:
                if not is_late():
                    raise

    def model(self, entry: Entry) -> str:
        """The bundle of a model; trains what is not there."""
        return self.seed_run().repeated(entry.method, entry.number + 1)[-1]

    def seed_run(self) -> SeedRun:
        """The run of all models."""
        adapter: TypeAdapter[Method] = TypeAdapter(Method)
        methods: dict[str, AnyMethod] = {name: adapter.validate_python(of) for name, of in self.record.methods.items()}
        splits = Splits.model_validate(self.splits.model_dump())
        return SeedRun(methods, splits, self.config.seed, self.config.workers, join(self.config.out, "models"))

    def note(self, entry: Entry) -> Entry:
        """Keep what became of a model."""
        key = (entry.method, entry.number)
        others = [e for e in self.record.entries if (e.method, e.number) != key]
        place = next((i for i, e in enumerate(self.record.entries) if (e.method, e.number) == key), len(others))
        entries = (*others[:place], entry, *others[place:])
        self.record = self.record.replace(entries=tuple(e.model_dump() for e in entries), minutes=self.spent)
        storage.write_bytes(join(self.config.out, _RECORD), (self.record.model_dump_json(indent=1) + "\n").encode())
        return entry

    def means(self) -> dict[str, str]:
        """Of each method its first model, and the mean of all where there are several."""
        rankers: dict[str, str] = {}
        for name in FIRST:
            members = {entry.name: entry.url for entry in self.done(name)}
            if members:
                rankers[name] = members[name] if name in members else next(iter(members.values()))
            if len(members) > 1:
                rankers[f"{name}_mean"] = self.blend(join("means", name), members, "equal")
        return rankers

    def blend(self, folder: str, members: dict[str, str], weights: Any, splits: Splits | None = None) -> str:
        """Blend models; returns the bundle."""
        out = join(self.config.out, folder)
        settings = BlendConfig(weights=weights, seed=self.config.seed)
        of = splits or Splits.model_validate(self.splits.model_dump())
        BlendJob(out=out, splits=of, bundles=members, blend=settings).run()
        return out

    def judge(self, rankers: dict[str, str]) -> None:
        """Measure all methods on test, once."""
        baseline = next(name for name in (TUNED, TREES, *rankers) if name in rankers)
        settings = {**self.config.evaluate.model_dump(), "baseline": baseline}
        models = {name: (url,) for name, url in rankers.items()}
        evaluation = EvaluateConfig.model_validate({**settings, "models": models, "splits": self.splits.model_dump()})
        EvaluateJob(out=join(self.config.out, "evaluation"), evaluate=evaluation).run()

    def refit(self, blend: str) -> str | None:
        """The ranker with members that have learnt from all labels; None if there is no time, or no way."""
        opened = bundle.load(blend)
        assert isinstance(opened, bundle.BlendBundle)
        weights = opened.blend.weights
        urls = {entry.name: entry.url for entry in self.done()}
        try:
            learnt = joined_splits(self.splits.train, self.splits.validation)
        except InputError as error:
            log.info("auto: nothing is refitted: %s", error)
            return None
        limit = time.monotonic() + (self.config.minutes * 1.02 - self.spent) * 60
        members: dict[str, str] = {}
        with self._in_time(limit):
            for name in weights:
                out = join(self.config.out, "refit", name)
                also = self.splits.test
                RefitJob(out=out, bundle=urls[name], also=also, workers=self.config.workers).run()
                members[name] = out
        if len(members) < len(weights):
            log.info("auto: no time to refit; the same command with a larger budget does")
            return None
        splits = Splits.model_validate({"train": learnt.model_dump(), "validation": self.splits.test.model_dump()})
        return self.blend("final", members, dict(weights), splits)

    def report(self, rankers: dict[str, str], final: str | None) -> None:
        """Commit the leaderboard."""
        of_method: Callable[[str], float] = lambda name: sum(e.minutes for e in self.done(name.removesuffix("_mean")))
        first = {name: entries[0] for name in FIRST if (entries := self.done(name))}
        rows = []
        for name, url in rankers.items():
            value = bundle.load(url).metrics.get("validation_ndcg@5")
            minutes = first[name].minutes if name in first else of_method(name) if name != "blend" else self.spent
            says = first[name].says if name in first else f"{len(self.done(name.removesuffix('_mean')))} models"
            validation = float(value) if isinstance(value, int | float) else None
            rows.append(Row(name=name, validation=validation, minutes=minutes, says=says if name != "blend" else "", url=url))
        opened = bundle.load(rankers["blend"])
        assert isinstance(opened, bundle.BlendBundle)
        left_out = {e.name: e.says for e in self.record.entries if e.state in ("late", "left out")}
        board = Board(
            rows=tuple(rows),
            weights=opened.blend.weights,
            left_out=left_out,
            final=final or rankers["blend"],
            refitted=final is not None,
            budget=self.config.minutes,
            minutes=self.spent,
        )
        write_board(board, join(self.config.out, "leaderboard"), evaluation=join(self.config.out, "evaluation"))


def _json(url: str) -> Any:
    import json

    try:
        return json.loads(storage.read_bytes(url))
    except ValueError as error:
        raise InputError(f"{url}: not JSON ({error}); remove it, and the same command begins anew") from error
