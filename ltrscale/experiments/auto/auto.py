"""The best ranker of a log by one command, in a budget of minutes.

First come trees, trees with searched settings, a linear ranker, an in-context ranker, a network, TabM, and the network
pretrained, each in its share of the budget. Then come models with other seeds while they fit, and a student of the
better network once each kind of network has three models. The ranker is their blend, with weights chosen on validation.
Test judges once, then the ranker's members are refitted on all labels. `plan` decides what to train next,
`first_models` what fits into a number of minutes, `record` stores both, and this module carries it out. Below `out` are

    auto.json                     decisions and minutes so far; a restart continues from it
    models/METHOD/model/          bundles, as a pipeline makes them; models/runs/K/ has those of other seeds
    means/METHOD/                 the mean of all models of a method
    blend/                        the ranker
    evaluation/                   all methods on test, with report
    final/                        the ranker with members refitted on all labels
    leaderboard/report.md         methods, their minutes, and what to do next
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from ltrscale import bundle, storage
from ltrscale.config import Config, Operational, validate
from ltrscale.data.dataset.disjoint import check_splits, joined_splits
from ltrscale.data.dataset.manifest import one_view, open_dataset
from ltrscale.data.dataset.periods import with_relative_named
from ltrscale.data.dataset.relevant import only_relevant
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits, SplitsWithTest
from ltrscale.data.stream.batches import iterate
from ltrscale.devices import multiplies_bfloat16
from ltrscale.errors import InputError, Stopped
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateConfig, EvaluateSettings
from ltrscale.experiments.auto.first_models import KNOWN_METHODS, TREES, TUNED, AutoSizes
from ltrscale.experiments.auto.leaderboard import Board, document, final_board
from ltrscale.experiments.auto.plan import RunState, next_model, share_of_test
from ltrscale.experiments.auto.record import HALF, AutoRecord, Entry, RecordKeeper, validation_metric
from ltrscale.experiments.first.configs import divided
from ltrscale.experiments.methods.base import Method, SeedRun
from ltrscale.experiments.methods.composed import AnyMethod
from ltrscale.experiments.records import Spent, timed
from ltrscale.experiments.refit import RefitJob
from ltrscale.experiments.sizes import LogSize
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
from ltrscale.training.combine import BlendConfig, BlendJob

BUDGETS = {"quick": 5.0, "good": 60.0, "best": 600.0}
_RECORD, _BOARD, _EVALUATION = "auto.json", "leaderboard", "evaluation"
_SCORED_AT_ONCE, _SCORED_S = 4096, 1.0
"""Documents of a batch, and seconds, to measure how fast a model scores."""
_LATEST = 1.03
"""A refit must end by this share of the budget."""
_EQUAL = BlendConfig(weights="equal")


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
                sizes, data = _sizes_of(self, splits)
                url, of = join(self.out, _RECORD), f"{data}:{self.seed}:{self.evaluate.primary}"
                kept = RecordKeeper(url, AutoRecord.resumed(url, of, self.minutes), began)
                log.info(
                    "auto: %s lists to learn from with %s documents, of %s in all; %g minutes, %.1f of them spent",
                    *(f"{n:,}" for n in (sizes.lists, sizes.log.informative, sizes.log.documents)),
                    *(self.minutes, kept.record.minutes),
                )
                kept.keep()
                with kept.beating():
                    return _Run(self, splits, kept, sizes).run()

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


def _sizes_of(config: AutoJob, splits: Splits) -> tuple[AutoSizes, str]:
    """The sizes of the data and of this machine, and a hash of the data to learn from."""
    everything = select(splits.train, labelled=False)
    read = {name: select(split, labelled=True) for name, split in splits.by_name.items()}
    labelled, judged = only_relevant(read["train"]), only_relevant(read["validation"])
    tested = 0
    if "test" in read:
        every = config.evaluate.metrics_need_every_list
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
        bfloat16=multiplies_bfloat16(),
    )
    return sizes, ":".join(selection.hash for selection in (everything, labelled, judged))


@dataclass
class _Run:
    """A run: it carries out what `plan` decides, and records decisions and results."""

    config: AutoJob
    splits: Splits
    kept: RecordKeeper
    sizes: AutoSizes

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
        rankers["blend"] = self.blend("blend", members, BlendConfig())
        if self.splits.test is not None:
            self.judge(rankers, SplitsWithTest.from_splits(self.splits))
        self.kept.keep()
        refitted = None
        if self.refit_splits is not None and self.record.refitted is not False:
            refitted = self.refit(rankers["blend"], self.refit_splits)
            self.kept.keep(refitted=refitted is not None)
        if refitted is None:  # one left by a smaller budget would be taken for the ranker
            storage.withdraw(join(self.config.out, "final"))
        if self.record.ended is None:
            self.kept.keep(ended=self.kept.spent, others=None if self.config.workers.most > 1 else self.kept.others)
        board = final_board(self.record, rankers, refitted, self.config.evaluate.primary)
        page = document(board, self.config.evaluation())
        commit_report(join(self.config.out, _BOARD), board, page, made_by={"stage": "auto"})
        return board.final

    def train_all(self) -> None:
        """Train one model after the other; each decision is recorded before it is carried out."""
        while (decision := next_model(self.state)) is not None:
            entry = decision.entry
            self.kept.note(entry, decision.settings)
            if entry.state == "begun":
                self.train(entry)
            else:
                log.info("auto: no %s: %s", entry.name, entry.says)

    @property
    def record(self) -> AutoRecord:
        return self.kept.record

    @property
    def state(self) -> RunState:
        """What has been done and spent by now."""
        refits, cutoff = self.refit_splits is not None, self.config.evaluate.primary_cutoff
        return RunState(self.record, self.sizes, self.kept.spent, refits, cutoff)

    @cached_property
    def refit_splits(self) -> Splits | None:
        """All labels, for a refit; None if nothing is to be refitted, or if the labels cannot be joined."""
        if not self.config.refit:
            return None
        splits = self.splits
        try:
            joined = joined_splits(splits.train, splits.validation)
            if splits.test is None:
                return self.learnt
            joined_splits(splits.validation, splits.test)
        except InputError as error:
            log.info("auto: nothing will be refitted: %s", error)
            return None
        return Splits(train=joined, validation=splits.test)

    @property
    def learnt(self) -> Splits:
        """The splits without test."""
        return Splits.model_validate(self.splits.model_dump(exclude={"test"}))

    def train(self, entry: Entry) -> None:
        """Train a model in the time that is left, and record how it ended."""
        busy, limit = Busy.now(), time.monotonic() + max(0.0, self.state.minutes_left) * 60
        outcome: dict[str, Any]
        try:
            with ending_by(limit):
                url = self.model(entry)
        except Stopped as stopped:
            if not stopped.is_late:
                raise
            log.info("auto: %s was not ready in time", entry.name)
            outcome = {"state": "late", "says": "not ready in time"}
        except InputError as error:
            if entry.method == TREES:
                raise
            log.warning("auto: no %s: %s", entry.name, error)  # half of few labels may have no relevant document
            outcome = {"state": "left out", "says": str(error)}
        else:
            value = validation_metric(url, self.config.evaluate.primary)
            outcome = {"state": "done", "url": url, "scores": self.scored(entry, url), "validation": value}
        spent, used = Spent.read(self.place(entry)), (Busy.now().own - busy.own) / 60
        took: dict[str, float] = {}
        if spent:
            took = {"minutes": spent.seconds / 60, "start": spent.start_s / 60, "documents": spent.documents}
        ended = entry.replace(**took, processor=entry.processor + used, **outcome)
        self.kept.note(ended)
        if ended.state == "done":
            values = (ended.minutes, metric_label(self.config.evaluate.primary), ended.validation)
            log.info("auto: %s in %.1f minutes, validation %s %s", ended.name, *values)

    def model(self, entry: Entry) -> str:
        """Train a model with the recorded settings of its method; returns its bundle."""
        adapter: TypeAdapter[AnyMethod] = TypeAdapter(AnyMethod)
        methods: dict[str, Method] = {name: adapter.validate_python(of) for name, of in self.record.methods.items()}
        run = SeedRun(methods, self.learnt, self.config.seed, self.config.workers, join(self.config.out, "models"))
        with timed(self.place(entry), self.record.methods[entry.trained_as]):
            if entry.method == HALF:
                splits = run.splits.replace(train=_part(run.splits.train, 0.5))
                return replace(run, splits=splits, out=run.place("half")).model(TREES)
            return run.repeated(entry.method, entry.number + 1)[-1]

    def place(self, entry: Entry) -> str:
        """The directory of a model."""
        return join(self.config.out, "models", entry.place)

    def scored(self, entry: Entry, url: str) -> float | None:
        """Documents of validation that the first model of a method scores a second; it takes some seconds at most."""
        if entry.number or entry.method == HALF:
            return None
        opened, validation = bundle.load(url), select(self.splits.validation, labelled=True)
        scorer = opened.scorer(features=validation.features)
        began, documents = time.monotonic(), 0
        for groups in iterate(bundle.with_tokens_of(validation, [opened]), docs_per_batch=_SCORED_AT_ONCE):
            scorer(groups)
            documents += groups.n_documents
            if time.monotonic() - began > _SCORED_S:
                break
        return round(documents / max(time.monotonic() - began, 1e-9), 1)

    def means(self) -> dict[str, str]:
        """The first model of each method, and the mean of its models if there are several."""
        rankers: dict[str, str] = {}
        for name in KNOWN_METHODS:
            members = {entry.name: entry.url for entry in self.record.done(name)}
            rankers |= {name: members[name]} if members else {}
            if len(members) > 1:
                rankers[f"{name}_mean"] = self.blend(join("means", name), members, _EQUAL)
        return rankers

    def blend(self, folder: str, members: Mapping[str, str], how: BlendConfig, splits: Splits | None = None) -> str:
        """Commit a blend of models; returns its bundle."""
        out = join(self.config.out, folder)
        settings = how.replace(metric=self.config.evaluate.primary, seed=self.config.seed)
        BlendJob(out=out, splits=splits or self.learnt, bundles=dict(members), blend=settings).run()
        return out

    def judge(self, rankers: Mapping[str, str], splits: SplitsWithTest) -> None:
        """Evaluate all rankers on test, or on a drawn part of it where the time is too short for all."""
        if self.record.test_share is None:
            self.kept.keep(test_share=round(share_of_test(self.state), 4))
        if (share := self.record.test_share or 1.0) < 1:
            log.info("auto: test is a drawn part, %.2g of its lists: scoring all takes longer than is left", share)
            splits = splits.replace(test=_part(splits.test, share))
        baseline = next(name for name in (TUNED, TREES, *rankers) if name in rankers)
        models = {name: (url,) for name, url in rankers.items()}
        settings = self.config.evaluate.replace(baseline=baseline).model_dump()
        evaluation = EvaluateConfig(**settings, models=models, splits=splits)
        EvaluateJob(out=join(self.config.out, _EVALUATION), evaluate=evaluation).run()

    def refit(self, blend: str, splits: Splits) -> str | None:
        """Refit the ranker's models on all labels, and blend them alike; None if there is no time for it."""
        weights = bundle.load(blend).blended
        limit = time.monotonic() + (_LATEST * self.config.minutes - self.kept.spent) * 60
        members: dict[str, str] = {}
        try:
            for name in weights:
                again: dict[str, str] = {}
                for entry in self.record.done(name.removesuffix("_mean")):
                    again[entry.name] = out = join(self.config.out, "refit", entry.name)
                    with ending_by(limit):
                        RefitJob(out=out, bundle=entry.url, also=self.splits.test, workers=self.config.workers).run()
                mean = join("refit", "means", name)
                members[name] = again[name] if name in again else self.blend(mean, again, _EQUAL, splits)
        except Stopped as stopped:
            if not stopped.is_late:
                raise
            log.info("auto: no time to refit; a larger budget has it")
            return None
        except InputError as error:
            log.warning("auto: nothing is refitted: %s", error)  # the blend that test judged remains
            return None
        return self.blend("final", members, BlendConfig(weights=dict(weights)), splits)


def _part(split: Split, share: float) -> Split:
    """The split with a drawn share of its labels."""
    sizes = split.size or {"labelled_fraction": 1.0}
    part = {key: n * share if isinstance(n, float) else max(1, int(n * share)) for key, n in sizes.items()}
    return split.replace(**part)
