"""Several networks in one ranker, as a method of a pipeline."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from ltrscale.data.stream.batches import StreamConfig
from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.training.combine import CombineConfig, CombineJob


class CombinedMethod(AnyMethod):
    """One ranker that combines the rankers of several neural methods with the same seed."""

    kind: Literal["combined"] = "combined"
    parts: tuple[str, ...] = Field(min_length=2)
    """Names of neural methods."""
    combine: CombineConfig = CombineConfig(how="concat")

    def built_on(self) -> tuple[str, ...]:
        """The parts."""
        return self.parts

    def check(self, where: str, name: str, methods: Mapping[str, AnyMethod]) -> None:
        """Check that the parts are networks that read the same features."""
        if wrong := [part for part in self.parts if part not in methods or not methods[part].is_network]:
            raise ValueError(f"{where}.parts: {wrong[0]!r} is not a neural method")
        if len({methods[part].left_out(methods) for part in self.parts}) > 1:
            raise ValueError(f"{where}.parts leave out different features; combine rankers of the same ones")

    def streams(self) -> Sequence[StreamConfig]:
        """That of the training of a common head."""
        return [self.combine.stream] if self.combine.how == "concat" else []

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        """Pretrained, if one of the parts is."""
        families = {methods[part].about(methods).family for part in self.parts}
        return MethodTraits(family="pretrained" if "pretrained" in families else "not pretrained")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        """Combine the parts."""
        bundles, settings = tuple(map(run.model, self.parts)), self.combine.replace(seed=run.seed)
        CombineJob(out=out, bundles=bundles, splits=run.splits, combine=settings, workers=run.workers).run()
