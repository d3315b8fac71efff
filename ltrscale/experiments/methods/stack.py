"""Stacks, trees over the scores of other methods (SUN23, section 3.4): as a method of a pipeline, and as a job."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.split import Splits
from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, MethodName, SeedRun, check_methods
from ltrscale.experiments.methods.composed import CombinedMethod, EnsembleMethod, SelfTrainedMethod, TunedMethod
from ltrscale.experiments.methods.neural import NeuralMethod
from ltrscale.experiments.methods.trees import GBDTMethod, SemiMethod, limited
from ltrscale.runtime.launch import cluster_for
from ltrscale.runtime.workers import ONE, Workers
from ltrscale.storage import join
from ltrscale.trees.stacking import StackConfig, StackedJob, StackMember, check_ready

Member = Annotated[
    GBDTMethod | SemiMethod | NeuralMethod | TunedMethod | CombinedMethod | EnsembleMethod | SelfTrainedMethod,
    Field(discriminator="kind"),
]
"""The possible members of a stack."""


class StackMethod(AnyMethod):
    """Trees over the scores of other methods of the same seed and over raw features."""

    kind: Literal["stack"] = "stack"
    members: tuple[str, ...] = Field(min_length=1)
    """Names of methods other than stacks and orders of a feature; each is trained again for every fold."""
    stack: StackConfig = StackConfig()

    can_teach: ClassVar = False
    can_be_member: ClassVar = False

    def built_on(self) -> tuple[str, ...]:
        return self.members

    def check(self, where: str, name: str, methods: Mapping[str, AnyMethod]) -> None:
        if wrong := [m for m in self.members if m not in methods or not methods[m].can_be_member]:
            raise ValueError(
                f"{where}.members: {wrong[0]!r} is unknown, a stack or of kind feature; name another method, or the "
                "feature under stack.features"
            )

    def with_threads(self, threads: int) -> Self:
        return self.replace(stack={**self.stack.model_dump(), "gbdt": limited(self.stack.gbdt, threads)})

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        return MethodTraits(family="mixed")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        train_stacked(run, self.members, {}, self.stack, out)


def train_stacked(
    run: SeedRun, members: Sequence[str], ready: Mapping[str, str], settings: StackConfig, out: str
) -> None:
    """Train each member on all groups and once without each fold, then trees over their scores.

    Members without a fold are in `folds/K-of-N/METHOD`; stacks with the same number of folds share them. The `ready`
    bundles, by name, must not have seen labels of the training split.
    """
    settings = settings.replace(seed=run.seed, gbdt={**settings.gbdt.model_dump(), "seed": run.seed})
    folds = [run.without(settings.fold(k, run.splits.train, held_out=False)) for k in range(settings.folds)]
    of_members = {
        name: StackMember(
            bundle=run.model(name),
            folds=() if run.learns_elsewhere(name) else tuple(fold.model(name) for fold in folds),
        )
        for name in members
    }
    of_ready = {name: StackMember(bundle=url) for name, url in ready.items()}
    StackedJob(out=out, splits=run.splits, stack=settings, members=of_members | of_ready).run()


TRAINING = "training"
"""Folder below the job's `out` for training members."""


class StackJob(Config):
    """Train members, each once without every fold and once on all groups, and trees over their scores."""

    out: str
    """Directory of the bundle, which is complete; members are trained in `out/training`, which may be deleted."""
    splits: Splits
    """Training and validation; the test split is not read."""
    members: dict[MethodName, Member] = Field(default_factory=dict)
    """Methods whose scores the trees see."""
    bundles: dict[MethodName, str] = Field(default_factory=dict)
    """Bundles whose scores the trees see too; they must not have seen labels of the training split."""
    stack: StackConfig = StackConfig()
    seed: int = 0
    """Replaces the seeds of members, folds and trees."""
    workers: Workers = ONE
    """Data-parallel workers of the neural members."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.members and not self.bundles:
            raise ValueError("members and bundles are both empty; name at least one")
        if shared := self.members.keys() & self.bundles.keys():
            raise ValueError(f"bundles.{min(shared)} has the name of a member; choose another")
        check_methods(self.members, self.workers, where="members")
        return self

    @one_view()
    def run(self) -> None:
        """Train members and stack, and commit the stack's bundle; skips stages that are up to date.

        Raises:
            InputError: as the stages; a ready bundle may have seen labels of the training split.
        """
        check_disjoint(self.splits)
        for name, url in self.bundles.items():
            check_ready(name, url, self.splits)
        run = SeedRun(self.members, self.splits, self.seed, self.workers, join(self.out, TRAINING))
        with cluster_for(self.workers):  # one cluster for all stages
            train_stacked(run, tuple(self.members), self.bundles, self.stack, self.out)
