"""The grid of a study: which models it trains, and what they share."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from ltrscale.config import Config, digest
from ltrscale.experiments.methods.base import AnyMethod
from ltrscale.storage import join

MOST_STUDY_DRAWS = 10_000

LabelledCount = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)]


class GridConfig(Config):
    """A part of the study: every method with every number of labelled groups, draw and seed."""

    labelled: tuple[LabelledCount, ...] = Field(min_length=1)
    """Labelled groups of the training split that are used: a number, see `counts`, or as a decimal up to 1.0 a share of
    all (HOU24: .001 to 1)."""
    draws: int = Field(5, ge=1, lt=MOST_STUDY_DRAWS)
    """Random samples of that size; fewer than five judge nothing, and ten cost twice as much for intervals that are a
    third narrower. With the same number a smaller sample is part of a larger one."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """Of pretraining; finetuning and trees mix the draw in. Several are averaged for each draw."""
    methods: tuple[str, ...] = ()
    """Names of methods; empty for all. Methods that these are built on come along."""


class Cell(Config):
    """One model of the study."""

    labelled: LabelledCount
    draw: int
    seed: int
    method: str

    @property
    def run(self) -> str:
        """The directory of the models that share labelled groups and seed, below that of the study."""
        return join("models", str(self.labelled), f"draw-{self.draw}", f"seed-{self.seed}")

    @property
    def folder(self) -> str:
        """The directory of the model."""
        return join(self.run, self.method)


def shared_encoders(methods: Mapping[str, AnyMethod]) -> dict[str, AnyMethod]:
    """The methods, of which those with the same pretraining share the encoder of the first."""
    owners: dict[str, str] = {}
    shared: dict[str, AnyMethod] = {}
    for name, method in methods.items():
        pretraining = method.pretraining()
        owner = name if pretraining is None else owners.setdefault(digest(pretraining), name)
        shared[name] = method if owner == name else method.starting_as(owner)
    return shared
