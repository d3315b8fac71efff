"""The grid of a study, and its cells."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ltrscale.config import Config
from ltrscale.storage import join

MOST_STUDY_DRAWS = 10_000
"""Upper limit of draws; pretrainings that are crossed with the draws have seeds at this distance."""

LabelledCount = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)]


class GridConfig(Config):
    """A part of the study: every method with every number of labelled groups, in every draw of them."""

    labelled: tuple[LabelledCount, ...] = Field(min_length=1)
    """Labelled groups of the training split that are used: a number, see `counts`, or as a decimal up to 1.0 a share of
    all (HOU24: .001 to 1)."""
    draws: int = Field(5, ge=1, lt=MOST_STUDY_DRAWS)
    """Random samples of that size; fewer than five judge nothing, and ten cost twice as much for intervals that are a
    third narrower. With the same number a smaller sample is part of a larger one."""
    pretrainings: int | None = Field(None, ge=1)
    """Empty gives each draw its own pretraining, so that intervals hold for other pretrainings as for other labels.
    Where that is too dear, a number of encoders, each of which serves all draws: three give an interval, a wider one.
    With one, all that is said of pretraining holds for this encoder, and its share has no verdict."""
    methods: tuple[str, ...] = ()
    """Names of methods; empty for all. Methods that these are built on come along."""


@dataclass(frozen=True)
class Cell:
    """One model of the study."""

    labelled: LabelledCount
    draw: int
    pretraining: int | None
    """Number of the pretraining that is crossed with the draws; None for the draw's own, or without pretraining."""
    method: str

    @property
    def encoder_seed(self) -> int:
        """The seed of the pretraining that it starts from."""
        return self.draw if self.pretraining is None else self.pretraining

    @property
    def run(self) -> str:
        """The directory, below the study's, of models with the same labelled groups and pretraining."""
        crossed = [] if self.pretraining is None else [f"pretraining-{self.pretraining}"]
        return join("models", str(self.labelled), f"draw-{self.draw}", *crossed)

    @property
    def folder(self) -> str:
        """The directory of the model."""
        return join(self.run, self.method)
