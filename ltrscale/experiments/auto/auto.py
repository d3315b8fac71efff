"""The best ranker of a log by one command, in a budget of minutes.

First come trees, trees with searched settings, a linear ranker, an in-context ranker, a network, TabM, and the network
pretrained, each in its share of the budget. Then come models with other seeds while they fit, and a student of the
better network once each kind of network has three models. The ranker is their blend, with weights chosen on validation.
Test judges once, then the ranker's members are refitted on all labels. Below `out` are

    auto.json                     decisions and minutes so far; a restart continues from it
    models/METHOD/model/          bundles, as a pipeline makes them; models/runs/K/ has those of other seeds
    means/METHOD/                 the mean of all models of a method
    blend/                        the ranker
    evaluation/                   all methods on test, with report
    final/                        the ranker with members refitted on all labels
    leaderboard/report.md         methods, their minutes, and what to do next
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter

from ltrscale import bundle, storage
from ltrscale.config import Config, Operational, validate
from ltrscale.data.dataset.disjoint import check_splits, joined_splits
from ltrscale.data.dataset.manifest import one_view, open_dataset
from ltrscale.data.dataset.selection import only_relevant, select
from ltrscale.data.dataset.split import Split, Splits, SplitsWithTest, with_relative_named
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.evaluation.measure.evaluate import EvaluateJob
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateConfig, EvaluateSettings
from ltrscale.experiments.auto.plan import (
    KNOWN_METHODS,
    PRETRAINED_NETWORK,
    SCRATCH,
    STUDENT,
    TEACHERS,
    TREES,
    TUNED,
    AutoSizes,
    Planned,
)
from ltrscale.experiments.auto.record import AutoRecord, Board, BoardRow, Entry, Forecast, RecordKeeper, document
from ltrscale.experiments.first.pipeline import LogSize, divided
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.experiments.methods.composed import Method
from ltrscale.experiments.records import Spent, timed
from ltrscale.experiments.refit import RefitJob
from ltrscale.processor import Busy, cores
from ltrscale.progress import log
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.findings import commit_report, print_report
from ltrscale.runtime import under_torchrun
from ltrscale.runtime.launch import cluster_for
from ltrscale.runtime.workers import ONE, Workers
from ltrscale.signals import ending_by
from ltrscale.stages.runs import recorded
from ltrscale.storage import join
from ltrscale.training.blend import BlendConfig, BlendJob

BUDGETS = {"quick": 5.0, "good": 60.0, "best": 600.0}
_HALF = "trees_half"
"""Trees trained on half of the labels; their gap to `trees` shows what more labels would bring."""
_RECORD, _BOARD, _EVALUATION = "auto.json", "leaderboard", "evaluation"
_MEASURED, _MEASURED_S = 4096, 1.0
"""Documents of a batch, and seconds, to measure how fast a model scores."""
_LATEST = 1.03
"""A refit must end by this share of the budget."""


class AutoJob(Config):
    """The best ranker of a data set, in a budget of minutes."""

    out: Operational[str]
    """Directory for everything; the ranker is `final`, or `blend` where nothing is refitted."""
    data: str
    """A data set directory that jobs.prepare made."""
    splits: Splits | None = None
    """Training, validation and test; without `test` nothing judges, and the refit is on the first two. Empty takes the
    last sixth of the periods for test, and the sixth before it for validation."""
    budget: Literal["quick", "good", "best"] | Annotated[float, Field(gt=0)] = "good"
    """`quick` is 5 minutes, `good` 60, `best` 600; or a number of minutes."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Metrics, slices and outliers of the test; the baseline is trees_tuned, or trees where nothing was searched.
    NDCG at `primary_cutoff` chooses on validation, too: trees, epochs, trials and weights."""
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
        """Train, blend, judge, refit and report; resumes an interrupted run by its recorded decisions.

        Raises:
            InputError: splits overlap or have no label, `out` has another job's output, or no model could be trained.
            Stopped: the process was asked to stop.
        """
        out = join(self.out, _BOARD)
        self.train()
        print_report(out, document(Board.read(out), self.evaluation()))

    def train(self) -> str:
        """Do the work of `run` without printing; returns the ranker's bundle."""
        if under_torchrun.is_running():  # torchrun ends all processes together, even if only one model is late
            raise InputError("jobs.auto does not run under torchrun; start it alone, with workers for Ray")
        with recorded(self.out, self, "auto"):
            began = time.monotonic()
            with cluster_for(self.workers), one_view():
                splits = self.resolved()
                check_splits(splits)
                run = _Auto.begun(self, splits, began)
                with run.kept.beating():
                    return run.run()

    def evaluation(self) -> Evaluation | None:
        """The evaluation on test; None without a test split."""
        tested = self.splits is None or self.splits.test is not None
        return Evaluation.read(join(self.out, _EVALUATION)) if tested else None

    def resolved(self) -> Splits:
        """The splits with their data set and periods."""
        if self.splits is not None:
            return with_relative_named(self.splits.on(self.data), "splits")
        parts = divided(open_dataset(self.data).manifest.periods)
        if not all(parts):
            raise InputError(f"{self.data}: too few periods for training, validation and test; set splits")
        names = zip(("train", "validation", "test"), parts, strict=True)
        values = {name: {"data": self.data, "periods": list(periods)} for name, periods in names}
        return validate(Splits, values, "splits")


@dataclass
class _Auto:
    """A run and its record."""

    config: AutoJob
    splits: Splits
    kept: RecordKeeper
    sizes: AutoSizes

    @classmethod
    def begun(cls, config: AutoJob, splits: Splits, began: float) -> Self:
        """Continue from the record of an earlier process, or start a new one."""
        everything = select(splits.train, labelled=False)
        read = {name: select(split, labelled=True) for name, split in splits.by_name.items()}
        labelled, judged = (only_relevant(read[name]) for name in ("train", "validation"))
        data = [selection.hash for selection in (everything, labelled, judged)]
        of = ":".join([*data, str(config.seed), config.evaluate.primary])
        url = join(config.out, _RECORD)
        kept = RecordKeeper(url, AutoRecord.resumed(url, of, config.minutes), began)
        tested = 0
        if "test" in read:
            every = config.evaluate.needs_every_list
            tested = (read["test"] if every else only_relevant(read["test"])).n_documents
        sizes = AutoSizes(
            log=LogSize(everything.n_documents, labelled.n_documents, len(everything.features)),
            lists=labelled.n_groups,
            judged=judged.n_documents,
            tested=tested,
            numbers=sum(feature.kind == "numeric" for feature in everything.features),
            longest=max(selection.longest for selection in (everything, *read.values())),  # a refit reads all
            cores=cores(),
            workers=config.workers.most,
        )
        log.info(
            "auto: %s lists to learn from with %s documents, of %s in all; %g minutes, %.1f of them spent",
            *(f"{n:,}" for n in (sizes.lists, sizes.log.informative, sizes.log.documents)),
            *(config.minutes, kept.record.minutes),
        )
        kept.keep()
        return cls(config, splits, kept, sizes)

    def run(self) -> str:
        """Train all models; blend, judge, refit, report; returns the ranker."""
        self.train_all()
        rankers = self.means()
        if not rankers:
            raise InputError(f"{self.config.out}: {self.config.minutes:g} minutes are too few for a model; give more")
        # one member per method, and one for trees with and without a search, which differ little: fewer candidates
        # make a lucky choice less likely
        members = {
            name: url
            for name, url in rankers.items()
            if f"{name}_mean" not in rankers and not (TUNED in rankers and name.removesuffix("_mean") == TREES)
        }
        rankers["blend"] = self.blend("blend", members, "greedy")
        self.kept.keep()
        if self.splits.test is not None:
            self.judge(rankers, SplitsWithTest.from_splits(self.splits))
            self.kept.keep()
        refitted = None
        if self.refitting and self.record.refitted is not False:
            refitted = self.refit(rankers["blend"])
            self.kept.keep(refitted=refitted is not None)
        if refitted is None:  # one left by a smaller budget would be taken for the ranker
            storage.withdraw(join(self.config.out, "final"))
        if self.record.ended is None:
            self.kept.keep(ended=self.kept.spent, others=None if self.config.workers.most > 1 else self.kept.others)
        self.report(rankers, refitted)
        return refitted or rankers["blend"]

    def train_all(self) -> None:
        """Try the methods, then train more models of each."""
        _, *others = (name for name in KNOWN_METHODS if name != STUDENT)  # whose turn comes later
        for name in (TREES, _HALF, *others):
            self.try_first(name)
        while (entry := self.next()) is not None:
            self.train(entry)

    @property
    def record(self) -> AutoRecord:
        return self.kept.record

    @property
    def forecast(self) -> Forecast:
        cutoff = self.config.evaluate.primary_cutoff
        return Forecast(self.record, self.sizes, spent=self.kept.spent, refits=self.refitting, cutoff=cutoff)

    @cached_property
    def refitting(self) -> bool:
        """Whether to refit the ranker's models; false if the labels cannot be joined."""
        if not self.config.refit:
            return False
        try:
            joined_splits(self.splits.train, self.splits.validation)
            if self.splits.test is not None:
                joined_splits(self.splits.validation, self.splits.test)
        except InputError as error:
            log.info("auto: nothing will be refitted: %s", error)
            return False
        return True

    def try_first(self, name: str) -> None:
        """Decide the settings of the first model of a method, and train it."""
        known = (entry for entry in self.record.entries if (entry.method, entry.number) == (name, 0))
        if (entry := next(known, None)) is None:
            entry = self.decided(name, self.forecast.first(_alike(name)))
        self.train(entry)

    def decided(self, name: str, plan: Planned) -> Entry:
        """The entry of a method's first model, as left out if it does not fit."""
        forecast = self.forecast
        late = forecast.takes(name, plan) > forecast.left and name != TREES  # at least one must be tried
        if plan.settings is None or late:
            says = f"takes {plan.minutes:.1f} minutes, which are not left" if late else plan.says
            log.info("auto: no %s: %s", name, says)
            state: Literal["late", "left out"] = "late" if late or plan.too_long else "left out"
            return self.kept.note(Entry(method=name, says=says, state=state))
        if name != _HALF:
            self.kept.keep(methods={**self.record.methods, name: dict(plan.settings)})
        return self.kept.note(Entry(method=name, says=plan.says, foretold=plan.minutes))

    def next(self) -> Entry | None:
        """The next model: an unfinished one, the student, or one more of the method with the fewest models."""
        for entry in self.record.entries:
            if entry.state == "begun":
                return entry
        if (student := self.student()) is not None:
            return student
        if (name := self.forecast.more()) is None:
            return None
        return self.kept.note(Entry(method=name, number=len(self.record.done(name)), says="another seed"))

    def student(self) -> Entry | None:
        """The student of the better network; None before there are enough of each network, or if already decided."""
        networks = {name: self.record.done(name) for name in (SCRATCH, PRETRAINED_NETWORK) if self.record.done(name)}
        decided = any(entry.method == STUDENT for entry in self.record.entries)
        if decided or not networks or min(map(len, networks.values())) < TEACHERS:
            return None

        def mean(name: str) -> float:
            return sum(self.validated(entry.url) or 0.0 for entry in networks[name]) / len(networks[name])

        teacher = max(networks, key=mean)
        return self.decided(STUDENT, self.forecast.first(STUDENT, teacher))

    def train(self, entry: Entry) -> None:
        """Train a begun model, within the time left."""
        if entry.state != "begun":
            return

        busy = Busy.now()

        def noted(**outcome: Any) -> Entry:
            spent, used = Spent.read(self.place(entry)), (Busy.now().own - busy.own) / 60
            minutes = {"minutes": spent.seconds / 60 if spent else 0.0, "processor": entry.processor + used}
            return self.kept.note(entry.replace(**minutes, **outcome))

        try:
            limit = time.monotonic() + max(0.0, self.forecast.left) * 60
            url = _in_time(limit, lambda: self.model(entry))
        except InputError as error:
            if entry.method == TREES or isinstance(error, UnavailableError):
                raise
            log.warning("auto: no %s: %s", entry.name, error)  # half of few labels may have no relevant document
            noted(state="left out", says=str(error))
            return
        if url is None:
            log.info("auto: %s was not ready in time", entry.name)
            noted(state="late", says="not ready in time")
            return
        ready = noted(state="done", url=url, scores=self.scored(entry, url))
        metric = metric_label(self.config.evaluate.primary)
        log.info("auto: %s in %.1f minutes, validation %s %s", ready.name, ready.minutes, metric, self.validated(url))

    def scored(self, entry: Entry, url: str) -> float | None:
        """Documents of validation that the first model of a method scores a second; it takes some seconds at most."""
        if entry.number or entry.method == _HALF:
            return None
        opened, validation = bundle.load(url), select(self.splits.validation, labelled=True)
        scorer = opened.scorer(features=validation.features)
        began, documents = time.monotonic(), 0
        for groups in iterate(bundle.with_tokens_of(validation, [opened]), docs_per_batch=_MEASURED):
            scorer(groups)
            documents += groups.n_documents
            if time.monotonic() - began > _MEASURED_S:
                break
        return round(documents / max(time.monotonic() - began, 1e-9), 1)

    def model(self, entry: Entry) -> str:
        """Train a model with the recorded settings of its method; returns its bundle."""
        adapter: TypeAdapter[Method] = TypeAdapter(Method)
        methods: dict[str, AnyMethod] = {name: adapter.validate_python(of) for name, of in self.record.methods.items()}
        run = SeedRun(methods, self.learnt, self.config.seed, self.config.workers, join(self.config.out, "models"))
        with timed(self.place(entry), self.record.methods[_alike(entry.method)]):
            if entry.method == _HALF:
                splits = run.splits.replace(train=_part(run.splits.train, 0.5))
                return replace(run, splits=splits, out=run.place("half")).model(TREES)
            return run.repeated(entry.method, entry.number + 1)[-1]

    def place(self, entry: Entry) -> str:
        """The directory of a model."""
        below = ["half"] if entry.method == _HALF else ["runs", str(entry.number)] if entry.number else []
        return join(self.config.out, "models", *below, _alike(entry.method))

    @property
    def learnt(self) -> Splits:
        return Splits.model_validate(self.splits.model_dump(exclude={"test"}))

    def means(self) -> dict[str, str]:
        """The first model of each method, and the mean of its models if there are several."""
        rankers: dict[str, str] = {}
        for name in KNOWN_METHODS:
            members = {entry.name: entry.url for entry in self.record.done(name)}
            rankers |= {name: members[name]} if members else {}
            if len(members) > 1:
                rankers[f"{name}_mean"] = self.blend(join("means", name), members, "equal")
        return rankers

    def blend(self, folder: str, members: Mapping[str, str], weights: Any, splits: Splits | None = None) -> str:
        """Commit a blend of models; returns its bundle."""
        out, metric = join(self.config.out, folder), self.config.evaluate.primary
        settings = BlendConfig(weights=weights, metric=metric, seed=self.config.seed)
        BlendJob(out=out, splits=splits or self.learnt, bundles=dict(members), blend=settings).run()
        return out

    def judge(self, rankers: Mapping[str, str], splits: SplitsWithTest) -> None:
        """Evaluate all rankers on test, or on a drawn part of it where the time is too short for all."""
        if self.record.test_share is None:
            self.kept.keep(test_share=round(self.forecast.test_share, 4))
        if (share := self.record.test_share or 1.0) < 1:
            log.info("auto: test is a drawn part, %.2g of its lists: scoring all takes longer than is left", share)
            splits = splits.replace(test=_part(splits.test, share))
        baseline = next(name for name in (TUNED, TREES, *rankers) if name in rankers)
        models = {name: (url,) for name, url in rankers.items()}
        settings = self.config.evaluate.replace(baseline=baseline).model_dump()
        evaluation = EvaluateConfig(**settings, models=models, splits=splits)
        EvaluateJob(out=join(self.config.out, _EVALUATION), evaluate=evaluation).run()

    def refit(self, blend: str) -> str | None:
        """Refit the ranker's models on all labels; None if there is no time."""
        weights, learnt_all = bundle.load(blend).blended, self.learnt
        if self.splits.test is not None:  # the bundle records what its members have seen
            joined = joined_splits(self.splits.train, self.splits.validation)
            learnt_all = Splits(train=joined, validation=self.splits.test)
        limit = time.monotonic() + (_LATEST * self.config.minutes - self.kept.spent) * 60
        members: dict[str, str] = {}
        for name in weights:
            again: dict[str, str] = {}
            for entry in self.record.done(name.removesuffix("_mean")):
                out = join(self.config.out, "refit", entry.name)
                job = RefitJob(out=out, bundle=entry.url, also=self.splits.test, workers=self.config.workers)
                try:
                    ready = _in_time(limit, partial(_bundle_of, job))
                except InputError as error:
                    if isinstance(error, UnavailableError):
                        raise
                    log.warning("auto: nothing is refitted: %s", error)  # the blend that test judged remains
                    return None
                if ready is None:
                    log.info("auto: no time to refit; a larger budget has it")
                    return None
                self.kept.keep()
                again[entry.name] = out
            mean = join("refit", "means", name)
            members[name] = again[name] if name in again else self.blend(mean, again, "equal", learnt_all)
        return self.blend("final", members, weights, learnt_all)

    def report(self, rankers: Mapping[str, str], final: str | None) -> None:
        """Commit the leaderboard, and print its opening."""
        weights = dict(bundle.load(rankers["blend"]).blended)
        board = Board(
            rows=tuple(self.row(name, url) for name, url in rankers.items()),
            weights=weights,
            metric=self.config.evaluate.primary,
            left_out={e.name: e.says for e in self.record.entries if e.state in ("late", "left out")},
            late=tuple(e.method for e in self.record.entries if e.state == "late" and e.number == 0),
            half=next((self.validated(entry.url) for entry in self.record.done(_HALF)), None),
            final=final or rankers["blend"],
            refitted=final is not None,
            budget=self.config.minutes,
            minutes=round(self.record.ended or self.kept.spent, 2),
            test_share=self.record.test_share,
            others=self.record.others,
        )
        page = document(board, self.config.evaluation())
        commit_report(join(self.config.out, _BOARD), board, page, made_by={"stage": "auto"})

    def row(self, name: str, url: str) -> BoardRow:
        """A ranker's row of the leaderboard; a mean has the minutes of its models, and the blend those of the run."""
        entries = self.record.done(name.removesuffix("_mean"))
        minutes = sum(entry.minutes for entry in entries) if name != "blend" else self.record.ended or self.kept.spent
        says = f"{len(bundle.load(url).blended)} of these" if name == "blend" else f"{len(entries)} models"
        if name in KNOWN_METHODS:
            minutes, says = entries[0].minutes, entries[0].says
        return BoardRow(name=name, says=says, minutes=round(minutes, 2), validation=self.validated(url), url=url)

    def validated(self, url: str) -> float | None:
        """A bundle's validation metric that chooses; None for `in_context` at cut-offs other than 5 and 10."""
        value = bundle.load(url).metrics.get(f"validation_{self.config.evaluate.primary}")
        return round(float(value), 6) if isinstance(value, int | float) else None


def _alike(name: str) -> str:
    """The method with the same settings."""
    return TREES if name == _HALF else name


def _in_time(limit: float, work: Callable[[], str]) -> str | None:
    """Work until `limit`, a time of `time.monotonic()`; None if it was not done by then."""
    with ending_by(limit):
        try:
            return work()
        except Stopped as stopped:
            if not stopped.is_late:
                raise
            return None


def _bundle_of(job: RefitJob) -> str:
    job.run()
    return job.out


def _part(split: Split, share: float) -> Split:
    """The split with a drawn share of its labels."""
    sizes = split.size or {"labelled_fraction": 1.0}
    part = {key: n * share if isinstance(n, float) else max(1, int(n * share)) for key, n in sizes.items()}
    return split.replace(**part)
