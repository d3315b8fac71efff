"""The stages that make trees, of labels or of more, and that export them; each is a job of its own too but one."""

from typing import ClassVar, Self

from pydantic import model_validator

from ltrscale import storage
from ltrscale.bundle import load
from ltrscale.config import Config
from ltrscale.data.dataset.split import Split, Splits, Texts
from ltrscale.errors import InputError, UnavailableError
from ltrscale.launch.workers import ONE, Workers
from ltrscale.progress import Report
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.ensemble import EnsembleConfig, check_draws, choose
from ltrscale.trees.export import ParityConfig, check_parity, publish
from ltrscale.trees.gbdt import train_gbdt
from ltrscale.trees.semi import SemiConfig, train_semi
from ltrscale.trees.stacking import StackConfig, StackMember, train_stack
from ltrscale.workflows.origins import bundle_hashes, check_unseen, dataset_hashes
from ltrscale.workflows.stage import LabelledStage, Origin, Stage


class _Ensemble(Config):
    """What an ensemble depends on besides the data."""

    gbdt: GBDTConfig
    ensemble: EnsembleConfig


class GBDTJob(LabelledStage):
    """Train gradient boosted trees on labelled groups."""

    stage: ClassVar = "train_gbdt"
    gbdt: GBDTConfig = LightGBMConfig()
    """The library that grows the trees, with its settings."""
    ensemble: EnsembleConfig | None = None
    """Train several models, below `out/candidates`, and take the mean of some; empty for one model."""
    workers: Workers = ONE
    """Workers that each hold a share of the training groups; for data beyond one machine."""

    @model_validator(mode="after")
    def _has_different_candidates(self) -> Self:
        if self.ensemble is not None:
            check_draws(self.gbdt)
        return self

    def settings(self) -> Config:
        """Of the trees, and of the ensemble where there is one."""
        return self.gbdt if self.ensemble is None else _Ensemble(gbdt=self.gbdt, ensemble=self.ensemble)

    def work(self, origin: Origin, report: Report) -> None:
        """Train trees; of an ensemble each candidate, where that is not done yet, and then choose."""
        if self.ensemble is None:
            train_gbdt(self.gbdt, self.splits, self.out, made_by=origin, report=report, workers=self.workers)
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


class SemiJob(LabelledStage):
    """Train trees on labelled groups with the help of the training split's other groups."""

    stage: ClassVar = "train_semi"
    semi: SemiConfig

    def settings(self) -> SemiConfig:
        """All of them."""
        return self.semi

    def work(self, origin: Origin, report: Report) -> None:
        """Train, and commit the bundle."""
        train_semi(self.semi, self.splits, self.out, made_by=origin, report=report)


class _Stacked(Config):
    """What a stack depends on besides the data and the content of its bundles."""

    stack: StackConfig
    members: tuple[str, ...]


class StackedJob(LabelledStage):
    """Train trees over the scores of models that are trained already."""

    stage: ClassVar = "stack"
    stack: StackConfig
    members: dict[str, StackMember]

    def check(self) -> None:
        """Refuse splits that overlap, and ready bundles that may have seen labels of the training split."""
        super().check()
        for name, member in self.members.items():
            if not member.folds:
                check_ready(name, member.bundle, self.splits)

    def settings(self) -> _Stacked:
        """Of the stack, and the names of its members."""
        return _Stacked(stack=self.stack, members=tuple(self.members))

    def made_from(self) -> list[str]:
        """All members, of all folds."""
        return [url for member in self.members.values() for url in (member.bundle, *member.folds)]

    def work(self, origin: Origin, report: Report) -> None:
        """Train, and commit the bundle that holds all members."""
        train_stack(self.stack, self.members, self.splits, self.out, made_by=origin, report=report)


def check_ready(name: str, url: str, splits: Splits) -> None:
    """Check that a bundle has not seen the labels that the trees are to learn from."""
    try:
        check_unseen(url, splits.train)
    except UnavailableError:  # which says nothing of the bundle
        raise
    except InputError as error:
        raise InputError(
            f"bundles.{name}: {url} was trained or selected on labels of the training split, whose groups it would "
            f"score too well; list its method under members, or train the stack on other periods ({error})"
        ) from error


class _Exported(ParityConfig):
    """What an export depends on besides its inputs."""

    periods: Texts


class ExportJob(ParityConfig, Stage):
    """Export a bundle of LightGBM trees as the library's own text, with a note on its features."""

    stage: ClassVar = "export"
    out: str
    """Directory of the export."""
    bundle: str
    """Bundle of one LightGBM model."""
    data: str
    """Data set directory on whose documents the scores are compared."""
    periods: Texts = ()
    """Periods `P` or ranges `A..B`, both ends included; empty for all."""

    def identity(self) -> _Exported:
        """What is compared, and how far scores may be apart."""
        return _Exported(rows=self.rows, tolerance=self.tolerance, periods=self.periods)

    def inputs(self) -> dict[str, str]:
        """Of the data set and the bundle."""
        return dataset_hashes([self._split]) | bundle_hashes([self.bundle])

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Compare scores, then publish; nothing is published where they are further apart than allowed."""
        files, parity = check_parity(load(self.bundle), self._split, self)
        publish(files, parity, self.out, made_by=origin)

    @property
    def _split(self) -> Split:
        return Split(data=(self.data,), periods=self.periods)
