"""Semi-supervised trees as a method of a pipeline."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.experiments.methods.gbdt import limited, trees_of_preset
from ltrscale.experiments.methods.reading import ReadingMethod
from ltrscale.training.presets import Preset
from ltrscale.trees.ensemble import check_draws
from ltrscale.trees.semi import SemiConfig, SemiJob


class SemiMethod(ReadingMethod):
    """Gradient boosted trees on the labelled groups, helped by the unlabelled ones."""

    kind: Literal["semi_gbdt"] = "semi_gbdt"
    semi: SemiConfig

    @classmethod
    def of_preset(cls, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
        """The trees, and what principal components and pseudo-labels are made of where a method asks for them."""
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
        """Check that the trees draw rows or columns."""
        check_draws(self.semi.gbdt, where=where)

    def with_threads(self, threads: int) -> Self:
        """The method with this number of threads."""
        first = None if self.semi.first is None else limited(self.semi.first, threads)
        gbdt = limited(self.semi.gbdt, threads)
        return self.replace(semi={**self.semi.model_dump(), "gbdt": gbdt, "first": first})

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        """Trees, by what they learn of groups without labels."""
        used = [("PCA", self.semi.pca), ("pseudo-labels", self.semi.pseudo_labels)]
        return MethodTraits(family="trees", unlabelled=" + ".join(word for word, value in used if value is not None))

    def train(self, run: SeedRun, name: str, out: str) -> None:
        """Train the trees."""
        SemiJob(out=out, splits=self.splits_in(run), semi=self.semi.with_seed(run.seed)).run()
