"""The settings that all jobs with scores share: the bundles, and the processes and devices that score."""

from pydantic import Field

from ltrscale.config import Config, Operational
from ltrscale.devices import Device


class ScoreWorkersConfig(Config):
    """The processes that score under Ray, and the resources of each."""

    number: int = Field(2, ge=1)
    """Number of workers; fewer run where the cluster has less room."""
    cpus: float = Field(1, gt=0)
    """Logical CPUs of each, and threads of a tree model."""
    gpus: float = Field(0, ge=0)
    """GPUs of each; a fraction shares one among several workers."""


class ScorerConfig(Config):
    """The bundle that scores, and the way to do it."""

    bundle: str | tuple[str, ...] = Field(min_length=1)
    """Bundle that scores: a finetuned ranker or trees; of several bundles the mean of their scores."""
    docs_per_batch: Operational[int] = Field(65_536, ge=1)
    """Documents that are scored at once, and held in memory together with a row group."""
    device: Operational[Device] = "auto"
    """Where a network runs: `auto` takes the GPU where there is one; or `cpu`, `cuda`, `cuda:1`."""
    ray: Operational[bool] = False
    """Score files in parallel on a Ray cluster; the scores are the same."""
    workers: Operational[ScoreWorkersConfig] = ScoreWorkersConfig()
    """The processes that score where `ray` is set."""

    @property
    def bundles(self) -> tuple[str, ...]:
        """The bundles that score."""
        return (self.bundle,) if isinstance(self.bundle, str) else self.bundle

    @property
    def name(self) -> str:
        """The bundles, for errors."""
        return " and ".join(self.bundles)
