"""A trial: methods trained with one seed on one sample of labelled groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ltrscale.data.dataset.periods import with_periods_named
from ltrscale.data.dataset.sample import Fold
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.experiments.methods import (
    CombinedMethod,
    EnsembleMethod,
    FeatureMethod,
    GBDTMethod,
    Method,
    NetworkStudent,
    NeuralMethod,
    ReadingMethod,
    SelfTrainedMethod,
    SemiMethod,
    StackMethod,
    TunedMethod,
    built_on,
    searched,
)
from ltrscale.launch.workers import WorkersConfig
from ltrscale.scoring.score import ScoreJob
from ltrscale.storage import join
from ltrscale.training.combine import CombineConfig
from ltrscale.training.combine import CombineJob
from ltrscale.training.feature import FeatureJob
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.finetune import FinetuneJob
from ltrscale.training.pretrain import PretrainJob
from ltrscale.trees.ensemble import AverageJob
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.semi import SemiJob
from ltrscale.trees.stacking import StackConfig
from ltrscale.trees.stacking import StackedJob
from ltrscale.trees.stacking import StackMember
from ltrscale.tuning.searched import FinetuneSearch
from ltrscale.tuning.searched import GBDTSearch
from ltrscale.tuning.searched import Searched
from ltrscale.tuning.tune import TuneJob


@dataclass(frozen=True)
class Trial:
    """All methods trained with one seed; the methods that a method builds on are trained first, and nothing twice.

    Args:
        methods: by name.
        splits: with the seed's sample of labelled groups.
        seed: replaces the seeds of the stages.
        workers: data-parallel workers of the neural stages.
        out: directory for everything: `METHOD/model`, `METHOD/pretrained`, `METHOD/scores`, `METHOD/student`,
            `METHOD/search`, `folds/K-of-N/METHOD/model`, `runs/K/METHOD/model`.
        encoders: the trial that pretrains for this one; empty to pretrain here. Encoders see no labels, so those of one
            trial serve all folds, all runs and all samples of labelled groups.
    """

    methods: Mapping[str, Method]
    splits: Splits
    seed: int
    workers: WorkersConfig
    out: str
    encoders: "Trial | None" = None
    learn_from: Mapping[str, Splits] = field(default_factory=dict)
    """Other labels than those of `splits`, by name; samples and folds of `splits` leave them as they are."""
    searches: "Trial | None" = None
    """The trial whose searches find the settings of this one, which is a further run of it; empty to search here."""

    def model(self, name: str) -> str:
        """Train a method; returns its bundle's directory."""
        method, out = self.methods[name], self._folder(name, "model")
        match method:
            case GBDTMethod():
                candidates = method.ensemble.candidates if method.ensemble else 1
                # trials share no candidate; seeds of further runs are large, and libraries take 31 bits
                trees = method.gbdt.replace(seed=self.seed * candidates % 2**30)
                GBDTJob(out=out, splits=self._read_by(method), gbdt=trees, ensemble=method.ensemble).run()
            case SemiMethod():
                SemiJob(out=out, splits=self._read_by(method), semi=method.semi.with_seed(self.seed)).run()
            case NeuralMethod():
                self._finetune(method.finetune, self._start(method, name), out, self._read_by(method))
            case TunedMethod():
                (stage,) = self._tuned(name, method).stages(out)
                stage.run()
            case CombinedMethod():
                self._combine([self.model(part) for part in method.parts], method.combine, out)
            case EnsembleMethod():
                self._average(method, out)
            case SelfTrainedMethod():
                self._self_train(method, name, out)
            case StackMethod():
                self.stack(method.members, {}, method.stack, out)
            case FeatureMethod():
                FeatureJob(out=out, splits=self.splits, order=method.order).run()
        return out

    def stack(self, members: Sequence[str], ready: Mapping[str, str], settings: StackConfig, out: str) -> None:
        """Train each member on all groups and once without each fold, then trees over their scores.

        Members without a fold are in `folds/K-of-N/METHOD`. Stacks with the same number of folds share them.

        Args:
            members: names of methods.
            ready: bundles from elsewhere that have seen no label of the training split, by name.
            settings: of the stack.
            out: directory of the bundle.
        """
        settings = settings.replace(seed=self.seed, gbdt={**settings.gbdt.model_dump(), "seed": self.seed})
        trials = [self._without(settings.fold(k, self.splits.train, held_out=False)) for k in range(settings.folds)]
        of_members = {
            name: StackMember(
                bundle=self.model(name),
                folds=() if self._learns_elsewhere(name) else tuple(trial.model(name) for trial in trials),
            )
            for name in members
        }
        of_ready = {name: StackMember(bundle=url) for name, url in ready.items()}
        StackedJob(out=out, splits=self.splits, stack=settings, members=of_members | of_ready).run()

    def _without(self, fold: Fold) -> "Trial":
        """The trial on all labelled groups except those of a fold."""
        out = self._folder("folds", f"{fold.number}-of-{fold.of}")
        train = {**self.splits.train.model_dump(), "fold": fold.model_dump()}
        return replace(
            self, splits=self.splits.replace(train=train), out=out, encoders=self.encoders or self, searches=None
        )

    def _learns_elsewhere(self, name: str) -> bool:
        """Whether a method, and what it starts from, learns from `learn_from` alone."""
        method = self.methods[name]
        if not isinstance(method, ReadingMethod) or method.learns_from is None:
            return False
        return all(self._learns_elsewhere(other) for other in built_on(method))

    def _read_by(self, method: ReadingMethod) -> Splits:
        """The splits that a method learns from, without the features that it leaves out."""
        splits = self.splits if method.learns_from is None else self.learn_from[method.learns_from]
        return splits.leaving_out(method.leave_out)

    def _start(self, method: NeuralMethod, name: str) -> str | None:
        """The bundle that a network starts from: a ranker that has learnt before, or a pretrained encoder."""
        if method.starts_from is None:
            return self.pretrained(name)
        first = self.encoders if self.encoders is not None and self._learns_elsewhere(method.starts_from) else self
        return first.model(method.starts_from)

    def _folder(self, *names: str) -> str:
        return join(self.out, *names)

    def pretrained(self, name: str) -> str | None:
        """The pretrained encoder that a method starts from."""
        if self.encoders is not None:
            return self.encoders.pretrained(name)
        method = self.methods[name]
        assert isinstance(method, NeuralMethod)
        if method.pretrained_as is not None:
            return self.pretrained(method.pretrained_as)
        if method.pretrain is None:
            return None
        out, settings = self._folder(name, "pretrained"), method.pretrain.replace(seed=self.seed)
        PretrainJob(out=out, train=self._read_by(method).train, pretrain=settings, workers=self.workers).run()
        return out

    def _finetune(self, settings: FinetuneConfig, start: str | None, out: str, splits: Splits) -> None:
        settings = settings.replace(seed=self.seed)
        FinetuneJob(out=out, pretrained=start, splits=splits, finetune=settings, workers=self.workers).run()

    def _tuned(self, name: str, tuned: TunedMethod) -> Searched:
        """The job of the tuned method, with the settings that the search found."""
        if self.searches is not None:
            found = self.searches._tuned(name, tuned)
            if isinstance(found, GBDTSearch):
                return found.replace(gbdt=found.gbdt.replace(seed=self.seed))
            assert isinstance(found, FinetuneSearch)
            return found.replace(finetune=found.finetune.replace(seed=self.seed))
        method, settings = self.methods[tuned.of], tuned.model_dump(include={"space", "trials", "search"})
        job: Searched
        if isinstance(method, GBDTMethod):
            job = GBDTSearch(splits=self._read_by(method), gbdt=method.gbdt.replace(seed=self.seed))
        else:
            assert isinstance(method, NeuralMethod)
            job = FinetuneSearch(
                splits=self._read_by(method),
                finetune=method.finetune.replace(seed=self.seed),
                pretrained=self.pretrained(tuned.of),
                workers=self.workers,
            )
        return TuneJob(out=self._folder(name, "search"), job=job, **settings).best_here()

    def _runs(self, name: str, number: int) -> list[str]:
        """Runs of a method: its own, and more with other seeds, from the same pretrained encoder and search."""
        further = [
            replace(
                self,
                seed=mix("run", self.seed, run) % 2**31,
                out=self._folder("runs", str(run)),
                encoders=self.encoders or self,
                searches=self.searches or self,
            )
            for run in range(1, number)
        ]
        return [trial.model(name) for trial in (self, *further)]

    def _average(self, method: EnsembleMethod, out: str) -> None:
        """The mean of runs of a method."""
        runs, one = self._runs(method.of, method.runs), searched(method.of, self.methods)
        if isinstance(one, GBDTMethod):
            AverageJob(out=out, bundles=tuple(runs), splits=self._read_by(one)).run()
        else:
            self._combine(runs, CombineConfig(how="mean"), out)

    def _self_train(self, method: SelfTrainedMethod, name: str, out: str) -> None:
        """Let runs of a method score all training groups, and train a student on the scores, then on the labels."""
        student_as, student = method.student_as or method.of, self._folder(name, "student")
        settings, alike = method.student, self.methods[student_as]
        assert isinstance(alike, ReadingMethod)
        labels = self._read_by(alike)
        scored = self._scored(method, name, labels.train)
        scores = labels.replace(train={**scored.model_dump(), "leave_out": labels.train.leave_out})
        match alike:
            case NeuralMethod(finetune=finetune):
                assert isinstance(settings, NetworkStudent)
                pretrained = self.pretrained(student_as)
                self._finetune(settings.of(finetune), pretrained, student, scores)
                head_epochs = finetune.head_epochs if pretrained else 0  # as the method itself is trained
                last = finetune.replace(keep_head=True, heads=1, probe_epochs=0, head_epochs=head_epochs)
                self._finetune(last, student, out, labels)
            case GBDTMethod(gbdt=trees):
                assert not isinstance(settings, NetworkStudent)
                first = settings.trees.replace(seed=self.seed, per_query=trees.per_query)
                GBDTJob(out=student, splits=scores, gbdt=first).run()
                GBDTJob(out=out, splits=labels, gbdt=trees.replace(seed=self.seed), start=student).run()

    def _scored(self, method: SelfTrainedMethod, name: str, split: Split) -> Split:
        """The groups of a training split, or a sample of them, with the mean scores of a method's runs as labels."""
        train, scores = with_periods_named(split), self._folder(name, "scores")
        if len(train.data) > 1:
            raise InputError(f"{name} learns scores of one data set, train has {', '.join(train.data)}; name one")
        runs = tuple(self._runs(method.of, method.runs))
        ScoreJob(out=scores, bundle=runs, data=train.data[0], periods=train.periods, layout="scores").run()
        everything = Split(data=train.data, periods=train.periods, scores=scores, labelled_seed=train.labelled_seed)
        share = 1.0 if method.groups is None else method.groups / select(everything, labelled=True).n_groups
        return everything.replace(labelled_fraction=min(1.0, share))

    def _combine(self, bundles: list[str], settings: CombineConfig, out: str) -> None:
        settings = settings.replace(seed=self.seed)
        CombineJob(out=out, bundles=tuple(bundles), splits=self.splits, combine=settings, workers=self.workers).run()
