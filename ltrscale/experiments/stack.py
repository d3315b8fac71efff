"""Stacking as a separate job: train members out of fold, then trees over their scores (SUN23, section 3.4)."""

from typing import Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.split import Splits
from ltrscale.experiments.methods.base import SeedRun
from ltrscale.experiments.methods.choices import Member, MethodName, check_methods
from ltrscale.experiments.methods.stack import train_stacked
from ltrscale.runtime.launch import cluster_for
from ltrscale.runtime.workers import ONE, Workers
from ltrscale.storage import join
from ltrscale.trees.stacking import StackConfig, check_ready

TRAINING = "training"
"""Folder below the job's `out` in which members are trained."""


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
        if both := self.members.keys() & self.bundles.keys():
            raise ValueError(f"bundles.{min(both)} has the name of a member; choose another")
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
