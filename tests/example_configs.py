"""Small configs for the tests of reading configs and of their help."""

from typing import Annotated, Literal

from pydantic import Field

from ltrscale.config import Config


class Circle(Config):
    """A round one."""

    kind: Literal["circle"] = "circle"
    radius: float = Field(default=1.0, gt=0)
    """From the centre."""


class Square(Config):
    """One with corners."""

    kind: Literal["square"] = "square"
    side: float = 1.0


Shape = Annotated[Circle | Square, Field(discriminator="kind")]


class Job(Config):
    name: str = "job"
    """What it is called."""
    shape: Shape = Circle()
    steps: tuple[int, ...] = ()
    tags: dict[str, str] = Field(default_factory=dict)
    shapes: tuple[Circle, ...] = ()


class Strict(Config):
    out: str
    job: Job = Job()


class Tuned(Config):
    """A config with a field whose default differs from that of the field's class."""

    job: Job = Job(name="tuned", shape=Circle(radius=5.0), tags={"a": "1"})
    shape: Shape = Square(side=7.0)
