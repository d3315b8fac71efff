"""A stack as a method of a pipeline: trees over the scores of other methods."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field

from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.experiments.methods.gbdt import limited
from ltrscale.trees.stacking import StackConfig, StackedJob, StackMember


class StackMethod(AnyMethod):
    """Trees over the scores of other methods of the same seed and over raw features."""

    kind: Literal["stack"] = "stack"
    members: tuple[str, ...] = Field(min_length=1)
    """Names of methods other than stacks and orders of a feature; each is trained again for every fold."""
    stack: StackConfig = StackConfig()

    can_teach: ClassVar = False
    can_be_member: ClassVar = False

    def built_on(self) -> tuple[str, ...]:
        """The members."""
        return self.members

    def check(self, where: str, name: str, methods: Mapping[str, AnyMethod]) -> None:
        """Check that the members can be members."""
        if wrong := [m for m in self.members if m not in methods or not methods[m].can_be_member]:
            raise ValueError(
                f"{where}.members: {wrong[0]!r} is unknown, a stack or of kind feature; name another method, or the "
                "feature under stack.features"
            )

    def with_threads(self, threads: int) -> Self:
        """The method with this number of threads for the trees of the stack."""
        return self.replace(stack={**self.stack.model_dump(), "gbdt": limited(self.stack.gbdt, threads)})

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        """Of several families."""
        return MethodTraits(family="mixed")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        """Train the members, and stack."""
        train_stacked(run, self.members, {}, self.stack, out)


def train_stacked(
    run: SeedRun, members: Sequence[str], ready: Mapping[str, str], settings: StackConfig, out: str
) -> None:
    """Train each member on all groups and once without each fold, then trees over their scores.

    Members without a fold are in `folds/K-of-N/METHOD`. Stacks with the same number of folds share them.

    Args:
        run: which trains.
        members: names of methods.
        ready: bundles from elsewhere that have seen no label of the training split, by name.
        settings: of the stack.
        out: directory of the bundle.
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
