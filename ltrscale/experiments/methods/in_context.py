"""A pretrained network that reads labelled groups as examples, as a method of a pipeline."""

from collections.abc import Mapping, Sequence
from typing import Literal

from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, ReadingMethod, SeedRun
from ltrscale.training.blend import BlendConfig, BlendJob
from ltrscale.training.in_context import InContextConfig, InContextJob


class InContextMethod(ReadingMethod):
    """A network that was pretrained on synthetic problems ranks after reading some labelled groups; none is trained.

    It takes a moment and has nothing to tune: made for some tens to some hundreds of labelled groups with numeric
    features. Runs with other seeds read other samples; where all groups fit into one they are the same.
    """

    kind: Literal["in_context"] = "in_context"
    in_context: InContextConfig = InContextConfig()

    @property
    def is_one_model(self) -> bool:
        return True

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        return MethodTraits(family="in context")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        reading = self.in_context.reading.replace(seed=run.seed)
        settings = self.in_context.replace(reading=reading)
        InContextJob(out=out, splits=self.splits_in(run), in_context=settings).run()

    def average(self, run: SeedRun, bundles: Sequence[str], out: str) -> None:
        named = {f"reading-{i}": url for i, url in enumerate(bundles)}
        BlendJob(out=out, splits=self.splits_in(run), bundles=named, blend=BlendConfig(weights="equal")).run()
