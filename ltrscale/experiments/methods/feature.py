"""The order of a feature as a method of a pipeline."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from ltrscale.bundle import FeatureOrder
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits
from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.training.combine import FeatureJob


class FeatureMethod(FeatureOrder, AnyMethod):
    """The order of one feature, such as BM25: a baseline that learns nothing."""

    kind: Literal["feature"] = "feature"

    can_teach: ClassVar = False
    can_be_member: ClassVar = False

    @property
    def order(self) -> FeatureOrder:
        """The order itself."""
        return FeatureOrder(feature=self.feature, ascending=self.ascending)

    def check_features(self, splits: Splits) -> None:
        """Check that the feature exists."""
        self.among(select(splits.train, labelled=True).features)

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        """A feature."""
        return MethodTraits(family="feature")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        """Commit the order."""
        FeatureJob(out=out, splits=run.splits, order=self.order).run()
