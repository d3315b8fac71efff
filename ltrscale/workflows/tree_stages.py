"""The stages that train trees; each but `StackedJob` and `AverageJob` can also run as a separate job."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.config import Config, Operational
from ltrscale.data.dataset.split import Splits
from ltrscale.errors import InputError, UnavailableError
from ltrscale.launch.workers import ONE, Workers
from ltrscale.progress import Report
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.origins import bundle_hashes, check_unseen
from ltrscale.stages.stage import LabelledStage, Origin
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.ensemble import EnsembleConfig, average, check_draws, choose
from ltrscale.trees.gbdt import train_gbdt
from ltrscale.trees.semi import SemiConfig, train_semi
from ltrscale.trees.stacking import StackConfig, StackMember, train_stack


class _Ensemble(Config):
    """The settings of an ensemble."""

    gbdt: GBDTConfig
    ensemble: EnsembleConfig


class GBDTJob(LabelledStage):
    """Train gradient boosted trees on labelled groups."""

    stage: ClassVar = "train_gbdt"
    gbdt: GBDTConfig = LightGBMConfig()
    """The library that grows the trees, with its settings."""
    ensemble: EnsembleConfig | None = None
    """Train several models, below `out/candidates`, and average the best; empty for one model."""
    start: BundleUrl | None = None
    """Bundle of one LightGBM model to go on from: trees are added to its scores; empty starts from equal scores."""
    workers: Operational[Workers] = ONE
    """Workers that each hold a share of the training groups, for data that one machine cannot hold."""

    @model_validator(mode="after")
    def _has_different_candidates(self) -> Self:
        if self.ensemble is not None:
            check_draws(self.gbdt)
            if self.start is not None:
                raise ValueError("ensemble and start exclude each other; leave one of them out")
        return self

    def own_settings(self) -> Config:
        """Settings of the trees, and of the ensemble if there is one."""
        return self.gbdt if self.ensemble is None else _Ensemble(gbdt=self.gbdt, ensemble=self.ensemble)

    def work(self, origin: Origin, report: Report) -> None:
        """Train trees; for an ensemble train each candidate that is not up to date, then choose."""
        if self.ensemble is None:
            settings: dict[str, Any] = {"workers": self.workers, "start": self.start}
            train_gbdt(self.gbdt, self.splits, self.out, made_by=origin, report=report, **settings)
            return
        first = self.gbdt.seed
        candidates = [self._candidate(seed) for seed in range(first, first + self.ensemble.candidates)]
        for candidate in candidates:
            candidate.run()
        urls = [candidate.out for candidate in candidates]
        choose(self.gbdt, self.ensemble, urls, self.splits.validation, self.out, made_by=origin)

    def _candidate(self, seed: int) -> Self:
        out = storage.join(self.out, "candidates", f"seed-{seed}")
        return self.replace(out=out, gbdt=self.gbdt.replace(seed=seed), ensemble=None)


class AverageJob(LabelledStage):
    """Average the scores of runs of the same trees."""

    stage: ClassVar = "average"
    bundles: tuple[BundleUrl, ...] = Field(min_length=1)
    """Of one model each, which differ in their seed."""

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Judge the mean on validation, and commit it."""
        average(self.bundles, self.splits.validation, self.out, made_by=origin)


class SemiJob(LabelledStage):
    """Train trees on labelled groups, helped by the training split's other groups."""

    stage: ClassVar = "train_semi"
    semi: SemiConfig

    def work(self, origin: Origin, report: Report) -> None:
        """Train, and commit the bundle."""
        train_semi(self.semi, self.splits, self.out, made_by=origin, report=report)


class _Stacked(Config):
    """The settings of a stack, the names of its members in their order, and their bundles."""

    stack: StackConfig
    members: tuple[str, ...]
    bundles: tuple[StackMember, ...]


class StackedJob(LabelledStage):
    """Train trees over the scores of trained models."""

    stage: ClassVar = "stack"
    stack: StackConfig
    members: dict[str, StackMember]

    def check(self) -> None:
        """Refuse splits that overlap, and ready bundles that may have seen labels of the training split."""
        super().check()
        for name, member in self.members.items():
            if not member.folds:
                check_ready(name, member.bundle, self.splits)

    def own_settings(self) -> _Stacked:
        """Settings of the stack, and its members."""
        return _Stacked(stack=self.stack, members=tuple(self.members), bundles=tuple(self.members.values()))

    def inputs(self) -> dict[str, str]:
        """Content of the data sets, and of the bundles of all members, of all folds."""
        bundles = [url for member in self.members.values() for url in (member.bundle, *member.folds)]
        return super().inputs() | bundle_hashes(bundles)

    def work(self, origin: Origin, report: Report) -> None:
        """Train, and commit the bundle, which holds all members."""
        train_stack(self.stack, self.members, self.splits, self.out, made_by=origin, report=report)


def check_ready(name: str, url: str, splits: Splits) -> None:
    """Check that a bundle has not seen the labels that the trees will learn from."""
    try:
        check_unseen(url, splits.train)
    except UnavailableError:  # storage does not answer, which is no verdict on the bundle
        raise
    except InputError as error:
        raise InputError(
            f"bundles.{name}: {url} was trained or selected on labels of the training split, whose groups it would "
            f"score too well; list its method under members, or train the stack on other periods ({error})"
        ) from error
