"""The mean of several runs as a method of a pipeline."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, SeedRun


class EnsembleMethod(AnyMethod):
    """The mean score of several runs of one method that differ in their seed.

    Networks have other initial weights and another order of the data, trees other samples of rows and columns. Runs of
    a tuned method all have the settings that its search found. Compare a mean with a mean: three networks are ahead of
    one model of trees by their number alone.
    """

    kind: Literal["ensemble"] = "ensemble"
    of: str
    """Name of a method of kind neural, gbdt or tuned; its own run counts as the first."""
    runs: int = Field(3, ge=2)
    """Total number of runs; DASALC-ens takes 3 to 5."""

    def built_on(self) -> tuple[str, ...]:
        """The method that is run."""
        return (self.of,)

    def check(self, where: str, name: str, methods: Mapping[str, AnyMethod]) -> None:
        """Check that the runs make one model each, which differ."""
        if self.of not in methods or not methods[self.of].is_one_model:
            raise ValueError(f"{where}.of: {self.of!r} is not a neural method, nor one of a single gbdt")
        methods[self.of].check_differs(f"{where}.runs")

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        """As its method."""
        of = methods[self.of].about(methods)
        return MethodTraits(family=of.family, tuned=of.tuned)

    def train(self, run: SeedRun, name: str, out: str) -> None:
        """Train each run, and average."""
        run.methods[self.of].average(run, run.repeated(self.of, self.runs), out)
