"""A trial: methods trained with one seed on one sample of labelled groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ltrscale.data.dataset.sample import Fold
from ltrscale.data.dataset.split import Splits
from ltrscale.draws import mix
from ltrscale.launch.workers import WorkersConfig
from ltrscale.storage import join
from ltrscale.training.combine import CombineConfig
from ltrscale.trees.stacking import StackConfig, StackMember
from ltrscale.workflows.methods import (
    CombinedMethod,
    EnsembleMethod,
    GBDTMethod,
    Method,
    NeuralMethod,
    SemiMethod,
    StackMethod,
    TunedMethod,
)
from ltrscale.workflows.searched import FinetuneSearch, GBDTSearch, Searched
from ltrscale.workflows.stages import CombineJob, FinetuneJob, PretrainJob
from ltrscale.workflows.tree_stages import GBDTJob, SemiJob, StackedJob
from ltrscale.workflows.tune import TuneJob


@dataclass(frozen=True)
class Trial:
    """All methods trained with one seed; the methods that a method builds on are trained first, and nothing twice.

    Args:
        methods: by name.
        splits: with the seed's sample of labelled groups.
        seed: replaces the seeds of the stages.
        workers: data-parallel workers of the neural stages.
        out: directory for everything: `METHOD/model`, `METHOD/pretrained`, `folds/K-of-N/METHOD/model`.
        encoders: the trial that pretrains for this one; empty to pretrain here. Encoders see no labels, so those of one
            trial serve all folds and all samples of labelled groups.
    """

    methods: Mapping[str, Method]
    splits: Splits
    seed: int
    workers: WorkersConfig
    out: str
    encoders: "Trial | None" = None

    def model(self, name: str) -> str:
        """Train a method; returns its bundle's directory."""
        method, out = self.methods[name], self._folder(name, "model")
        match method:
            case GBDTMethod():
                candidates = method.ensemble.candidates if method.ensemble else 1
                trees = method.gbdt.replace(seed=self.seed * candidates)  # trials share no candidate
                GBDTJob(out=out, splits=self.splits, gbdt=trees, ensemble=method.ensemble).run()
            case SemiMethod():
                SemiJob(out=out, splits=self.splits, semi=method.semi.with_seed(self.seed)).run()
            case NeuralMethod():
                self._finetune(method, self.pretrained(name), out, self.seed)
            case TunedMethod():
                (stage,) = self._tuned(name, method).stages(out)
                stage.run()
            case CombinedMethod():
                self._combine([self.model(part) for part in method.parts], method.combine, out)
            case EnsembleMethod():
                self._combine(self._runs(method, name), CombineConfig(how="mean"), out)
            case StackMethod():
                self.stack(method.members, {}, method.stack, out)
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
        trials = [self._without(settings.fold(k, held_out=False)) for k in range(settings.folds)]
        of_members = {
            name: StackMember(bundle=self.model(name), folds=tuple(trial.model(name) for trial in trials))
            for name in members
        }
        of_ready = {name: StackMember(bundle=url) for name, url in ready.items()}
        StackedJob(out=out, splits=self.splits, stack=settings, members=of_members | of_ready).run()

    def _without(self, fold: Fold) -> "Trial":
        """The trial on all labelled groups except those of a fold."""
        out = self._folder("folds", f"{fold.number}-of-{fold.of}")
        train = {**self.splits.train.model_dump(), "fold": fold.model_dump()}
        return replace(self, splits=self.splits.replace(train=train), out=out, encoders=self.encoders or self)

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
        PretrainJob(out=out, train=self.splits.train, pretrain=settings, workers=self.workers).run()
        return out

    def _finetune(self, method: NeuralMethod, pretrained: str | None, out: str, seed: int) -> None:
        settings = method.finetune.replace(seed=seed)
        FinetuneJob(out=out, pretrained=pretrained, splits=self.splits, finetune=settings, workers=self.workers).run()

    def _tuned(self, name: str, tuned: TunedMethod) -> Searched:
        """The job of the tuned method, with the settings that the search found."""
        method, settings = self.methods[tuned.of], tuned.model_dump(include={"space", "trials", "search"})
        job: Searched
        if isinstance(method, GBDTMethod):
            job = GBDTSearch(splits=self.splits, gbdt=method.gbdt.replace(seed=self.seed))
        else:
            assert isinstance(method, NeuralMethod)
            job = FinetuneSearch(
                splits=self.splits,
                finetune=method.finetune.replace(seed=self.seed),
                pretrained=self.pretrained(tuned.of),
                workers=self.workers,
            )
        return TuneJob(out=self._folder(name, "search"), job=job, **settings).best_here()

    def _runs(self, ensemble: EnsembleMethod, name: str) -> list[str]:
        """The runs of an ensemble: the method's own, and more from the same pretrained encoder."""
        method = self.methods[ensemble.of]
        assert isinstance(method, NeuralMethod)
        runs = [self.model(ensemble.of)]
        for run in range(1, ensemble.runs):
            runs.append(self._folder(name, f"run-{run}"))
            self._finetune(method, self.pretrained(ensemble.of), runs[-1], mix("run", self.seed, run) % 2**31)
        return runs

    def _combine(self, bundles: list[str], settings: CombineConfig, out: str) -> None:
        settings = settings.replace(seed=self.seed)
        CombineJob(out=out, bundles=tuple(bundles), splits=self.splits, combine=settings, workers=self.workers).run()
