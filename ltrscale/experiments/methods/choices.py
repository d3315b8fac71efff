"""The methods that a pipeline can train and compare, and the job that stacks some of them."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ltrscale.config import Config, by_kind
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.split import Splits
from ltrscale.experiments.methods.base import MethodName, SeedRun, check_methods
from ltrscale.experiments.methods.composed import (
    BlendMethod,
    CombinedMethod,
    EnsembleMethod,
    SelfTrainedMethod,
    StackMethod,
    TunedMethod,
    check_stacked,
    train_stacked,
)
from ltrscale.experiments.methods.neural import InContextMethod, NeuralMethod
from ltrscale.experiments.methods.trees import FeatureMethod, GBDTMethod, SemiMethod
from ltrscale.runtime.launch import cluster_for
from ltrscale.runtime.workers import ONE, Workers
from ltrscale.storage import join
from ltrscale.training.presets import Preset
from ltrscale.trees.stacking import StackConfig, check_ready

Method = Annotated[
    GBDTMethod
    | SemiMethod
    | NeuralMethod
    | InContextMethod
    | TunedMethod
    | CombinedMethod
    | EnsembleMethod
    | BlendMethod
    | SelfTrainedMethod
    | StackMethod
    | FeatureMethod,
    Field(discriminator="kind"),
]


def with_preset(preset: Preset, methods: Mapping[str, Any]) -> dict[str, Any]:
    """The methods, as in a config, with this preset for those that name none and have presets."""
    kinds = by_kind(Method)

    def filled(settings: Any) -> Any:
        kind = kinds.get(str(settings.get("kind"))) if isinstance(settings, Mapping) else None
        return settings if kind is None else kind.with_preset(preset, settings, methods)

    return {name: filled(given) for name, given in methods.items()}


class StackJob(Config):
    """Train members, each once without every fold and once on all groups, and trees over their scores."""

    out: str
    """Directory of the bundle, which is complete; members are trained in `out/training`, which may be deleted."""
    splits: Splits
    """Training and validation; the test split is not read."""
    members: dict[MethodName, Method] = Field(default_factory=dict)
    """Methods whose scores the trees see: no stacks, blends or orders of a feature."""
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
        check_stacked("members", self.members, self.members)
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
        run = SeedRun(self.members, self.splits, self.seed, self.workers, join(self.out, "training"))
        with cluster_for(self.workers):  # one cluster for all stages
            train_stacked(run, tuple(self.members), self.bundles, self.stack, self.out)
