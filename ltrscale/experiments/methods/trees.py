"""Trees as methods of a pipeline, and the order of one feature."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from ltrscale.bundle import FeatureOrder
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits
from ltrscale.evaluation.studies.traits import MethodTraits
from ltrscale.experiments.methods.base import Method, ReadingMethod, SeedRun
from ltrscale.experiments.methods.students import Student
from ltrscale.training.settings import Preset
from ltrscale.training.untrained import FeatureJob
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.ensemble import AverageJob, EnsembleConfig, check_draws
from ltrscale.trees.gbdt import GBDTJob, LearningTrees
from ltrscale.trees.semi import SemiConfig, SemiJob
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
    def preset_settings(cls, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
        """The trees of a preset."""
        return {"gbdt": trees_of_preset(preset, given.get("gbdt"))}

    @property
    def is_one_model(self) -> bool:
        return self.ensemble is None

    @property
    def is_searchable(self) -> bool:
        return self.ensemble is None

    def check_differs(self, where: str) -> None:
        check_draws(self.gbdt, where=where)

    def with_threads(self, threads: int) -> Self:
        return self.replace(gbdt=limited(self.gbdt, threads))

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        return MethodTraits(family="trees", unlabelled="none")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        candidates = self.ensemble.candidates if self.ensemble else 1
        # distinct candidates per run; seeds of repeated runs are large, and libraries take 31 bits
        trees = self.gbdt.replace(seed=run.seed * candidates % 2**30)
        GBDTJob(out=out, splits=self.splits_in(run), gbdt=trees, ensemble=self.ensemble).run()

    def search_job(self, run: SeedRun, name: str) -> GBDTSearch:
        return GBDTSearch(splits=self.splits_in(run), gbdt=self.gbdt.replace(seed=run.seed))

    def average(self, run: SeedRun, bundles: Sequence[str], out: str) -> None:
        AverageJob(out=out, bundles=tuple(bundles), splits=self.splits_in(run)).run()

    def takes(self, student: Student) -> bool:
        return isinstance(student, LearningTrees) and self.is_one_model and self.gbdt.goes_on

    def train_student(self, student: Student, run: SeedRun, name: str, scores: Splits, start: str, out: str) -> None:
        assert isinstance(student, LearningTrees)
        first = student.trees.replace(seed=run.seed, per_query=self.gbdt.per_query)
        GBDTJob(out=start, splits=scores, gbdt=first).run()
        trees = self.gbdt.replace(seed=run.seed)
        GBDTJob(out=out, splits=self.splits_in(run), gbdt=trees, start=start).run()


def limited(trees: GBDTConfig, threads: int) -> GBDTConfig:
    """The trees with a number of threads, if they would take all cores."""
    return trees.replace(num_threads=trees.num_threads or threads)


def trees_of_preset(preset: Preset, given: Any) -> dict[str, Any]:
    """A cell of HOU24's grid, with LightGBM's defaults otherwise; other libraries get only the inputs."""
    inputs = {"per_query": True} if preset == "hou24" else {}
    kind = given.get("kind", "lightgbm") if isinstance(given, Mapping) else "lightgbm"
    if kind != "lightgbm":
        return {"kind": kind, **inputs}
    stop = {"early_stopping_rounds": 20 if preset == "hou24" else None}  # LightGBM does not stop early by default
    grid = {"num_leaves": 31, "min_data_in_leaf": 20, "feature_fraction": 1, "num_trees": 100, "learning_rate": 0.1}
    return {"kind": kind, **grid, **stop, **inputs}


class SemiMethod(ReadingMethod):
    """Gradient boosted trees on the labelled groups, helped by the unlabelled ones."""

    kind: Literal["semi_gbdt"] = "semi_gbdt"
    semi: SemiConfig

    @classmethod
    def preset_settings(cls, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
        """The trees, and settings of principal components and pseudo-labels if the method uses them."""
        semi = given.get("semi")
        semi = semi if isinstance(semi, Mapping) else {}
        settings: dict[str, Any] = {"gbdt": trees_of_preset(preset, semi.get("gbdt"))}
        if semi.get("first") is not None:
            settings["first"] = trees_of_preset(preset, semi["first"])
        if preset == "hou24":
            settings["pca_scaled"] = False
            if semi.get("pseudo_labels") is not None:
                settings["pseudo_labels"] = {"grades": 5, "bins": "even"}
        return {"semi": settings}

    def check_differs(self, where: str) -> None:
        check_draws(self.semi.gbdt, where=where)

    def with_threads(self, threads: int) -> Self:
        first = None if self.semi.first is None else limited(self.semi.first, threads)
        return self.replace(semi=self.semi.replace(gbdt=limited(self.semi.gbdt, threads), first=first))

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        used = [("PCA", self.semi.pca), ("pseudo-labels", self.semi.pseudo_labels)]
        return MethodTraits(family="trees", unlabelled=" + ".join(word for word, value in used if value is not None))

    def train(self, run: SeedRun, name: str, out: str) -> None:
        SemiJob(out=out, splits=self.splits_in(run), semi=self.semi.with_seed(run.seed)).run()


class FeatureMethod(FeatureOrder, Method):
    """The order of one feature, such as BM25: a baseline that learns nothing."""

    kind: Literal["feature"] = "feature"

    can_teach: ClassVar = False
    can_be_member: ClassVar = False

    def check_inputs(self, splits: Splits) -> None:
        self.among(select(splits.train, labelled=True).features)

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        return MethodTraits(family="feature")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        order = FeatureOrder(feature=self.feature, ascending=self.ascending)
        FeatureJob(out=out, splits=run.splits, order=order).run()
