"""Boosted trees as a method of a pipeline."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import model_validator

from ltrscale.data.dataset.split import Splits
from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.experiments.methods.reading import ReadingMethod
from ltrscale.experiments.methods.students import Student
from ltrscale.training.presets import Preset
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.ensemble import AverageJob, EnsembleConfig, check_draws
from ltrscale.trees.gbdt import GBDTJob, LearningTrees
from ltrscale.tuning.searched import GBDTSearch


class GBDTMethod(ReadingMethod):
    """Gradient boosted trees on the labelled groups."""

    kind: Literal["gbdt"] = "gbdt"
    gbdt: GBDTConfig = LightGBMConfig()
    """The library that grows the trees, with its settings."""
    ensemble: EnsembleConfig | None = None
    """Average several models that validation chooses; empty for one model."""

    @model_validator(mode="after")
    def _has_different_candidates(self) -> Self:
        if self.ensemble is not None:
            check_draws(self.gbdt)
        return self

    @classmethod
    def of_preset(cls, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
        """The trees of a preset."""
        return {"gbdt": trees_of_preset(preset, given.get("gbdt"))}

    @property
    def is_one_model(self) -> bool:
        """Whether there is no ensemble."""
        return self.ensemble is None

    @property
    def is_searchable(self) -> bool:
        """Whether there is no ensemble."""
        return self.ensemble is None

    def check_differs(self, where: str) -> None:
        """Check that the trees draw rows or columns."""
        check_draws(self.gbdt, where=where)

    def with_threads(self, threads: int) -> Self:
        """The method with this number of threads."""
        return self.replace(gbdt=limited(self.gbdt, threads))

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        """Trees of the labels alone."""
        return MethodTraits(family="trees", unlabelled="none")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        """Train one model, or several of which validation chooses."""
        candidates = self.ensemble.candidates if self.ensemble else 1
        # runs share no candidate; seeds of repeated runs are large, and libraries take 31 bits
        trees = self.gbdt.replace(seed=run.seed * candidates % 2**30)
        GBDTJob(out=out, splits=self.splits_in(run), gbdt=trees, ensemble=self.ensemble).run()

    def search_job(self, run: SeedRun, name: str) -> GBDTSearch:
        """The job that trains one model."""
        return GBDTSearch(splits=self.splits_in(run), gbdt=self.gbdt.replace(seed=run.seed))

    def average(self, run: SeedRun, bundles: Sequence[str], out: str) -> None:
        """Average the scores of several models."""
        AverageJob(out=out, bundles=tuple(bundles), splits=self.splits_in(run)).run()

    def takes(self, student: Student) -> bool:
        """Trees of LightGBM can go on from those that have learnt scores."""
        return isinstance(student, LearningTrees) and self.is_one_model and self.gbdt.goes_on

    def train_student(self, student: Student, run: SeedRun, name: str, scores: Splits, start: str, out: str) -> None:
        """Grow trees on scores, and add trees on the labels."""
        assert isinstance(student, LearningTrees)
        first = student.trees.replace(seed=run.seed, per_query=self.gbdt.per_query)
        GBDTJob(out=start, splits=scores, gbdt=first).run()
        trees = self.gbdt.replace(seed=run.seed)
        GBDTJob(out=out, splits=self.splits_in(run), gbdt=trees, start=start).run()


def limited(trees: GBDTConfig, threads: int) -> dict[str, Any]:
    """Settings of trees with this number of threads, if they would take all cores."""
    return {**trees.model_dump(), "num_threads": trees.num_threads or threads}


def trees_of_preset(preset: Preset, given: Any) -> dict[str, Any]:
    """A cell of HOU24's grid, in LightGBM's defaults otherwise; other libraries get the inputs alone."""
    inputs = {"per_query": True} if preset == "hou24" else {}
    kind = given.get("kind", "lightgbm") if isinstance(given, Mapping) else "lightgbm"
    if kind != "lightgbm":
        return {"kind": kind, **inputs}
    stop = {"early_stopping_rounds": 20 if preset == "hou24" else None}  # LightGBM's default is none
    grid = {"num_leaves": 31, "min_data_in_leaf": 20, "feature_fraction": 1, "num_trees": 100, "learning_rate": 0.1}
    return {"kind": kind, **grid, **stop, **inputs}
