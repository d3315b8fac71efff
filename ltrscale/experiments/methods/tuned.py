"""A method with the settings that a search finds."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.tuning.searched import Searched
from ltrscale.tuning.space import SamplerConfig, Space
from ltrscale.tuning.tune import TuneJob


class TunedMethod(AnyMethod):
    """Another method with the settings that a search finds best on the validation groups.

    Each sample of labelled groups has its own search: the trials of a seed learn from its labels alone.
    """

    kind: Literal["tuned"] = "tuned"
    of: str
    """Name of a method of kind gbdt or neural, which is trial 0; pretraining is not part of a trial."""
    space: Space = Field(min_length=1)
    """Values of dotted keys of that method, `gbdt.NAME` or `finetune.NAME`, as in jobs.tune."""
    trials: int = Field(30, ge=1)
    """Number of trials; HOU24 uses up to 150 on its industrial log, and grids of 27 cells on public data."""
    search: SamplerConfig = SamplerConfig()

    @property
    def is_one_model(self) -> bool:
        """Always: the model with the best settings."""
        return True

    def check(self, where: str, name: str, methods: Mapping[str, AnyMethod]) -> None:
        """Check that a search may vary the settings of its method."""
        if self.of not in methods or not methods[self.of].is_searchable:
            raise ValueError(f"{where}.of: {self.of!r} is not a neural method nor one of a single gbdt")

    def encoder(self, name: str, methods: Mapping[str, AnyMethod]) -> str | None:
        """That of its method."""
        return methods[self.of].encoder(self.of, methods)

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        """As its method, and tuned."""
        return methods[self.of].about(methods).replace(tuned=True)

    def train(self, run: SeedRun, name: str, out: str) -> None:
        """Train with the settings that the search finds."""
        (stage,) = self._best(run, name).stages(out)
        stage.run()

    def average(self, run: SeedRun, bundles: Sequence[str], out: str) -> None:
        """Average as its method."""
        run.methods[self.of].average(run, bundles, out)

    def _best(self, run: SeedRun, name: str) -> Searched:
        """The job of its method with the best settings; repeated runs have those of the first."""
        if run.searches is not None:
            return self._best(run.searches, name).with_seed(run.seed)
        job, settings = (
            run.methods[self.of].search_job(run, self.of),
            self.model_dump(include={"space", "trials", "search"}),
        )
        return TuneJob(out=run.place(name, "search"), job=job, **settings).best_here()
