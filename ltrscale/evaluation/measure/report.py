"""What an evaluation commits: `metrics.json`, with what the trials of each method state about themselves.

Trials are the bundles or committed scores of a method. `group_file` writes the metrics of every group beside it.
"""

import math
import operator
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from ltrscale.config import Strict
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.corrected import Corrected
from ltrscale.evaluation.measure.drift import ByPeriod
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.settings import AS_SHOWN
from ltrscale.evaluation.measure.slices import ALL, OF_PERIOD, OUTLIERS
from ltrscale.evaluation.pages import ComparedMethods
from ltrscale.evaluation.statistics.summarise import Comparison, Scope
from ltrscale.ranking.metrics import Calibration
from ltrscale.reports.document import span


class MethodTrial(Strict):
    """One bundle of a method, or its scores; None where a bundle does not state it, or where there is no bundle."""

    url: str
    kind: str
    """Kind of the bundle: neural, trees or feature; `scores`; `order shown`."""
    labelled_groups: int | None = None
    """Number of labelled groups it was trained on."""
    validation_groups: int | None = None
    """Number of labelled groups it was selected on."""
    labels: str | None = None
    """Identity of all these labels."""
    debiased: str | None = None
    """How its training corrected for positions: `dla`, `weights` or `unbiased`; None if it did not."""
    logits: bool = False
    """Whether its scores are logits of labels 0 and 1, from training with the pointwise sigmoid loss."""
    calibration: Calibration | None = None
    """Its probabilities against the clicks; None where scores are not logits, or labels not 0 and 1."""


class MethodResult(Strict):
    """One method: its trials, and its results by slice."""

    name: str
    trials: tuple[MethodTrial, ...]
    slices: dict[str, Scope]
    """`all` groups, `outliers`, those of `slices` in the config, and the values of the columns of `slice_by`."""

    @property
    def kinds(self) -> set[str]:
        """The kinds of its trials."""
        return {trial.kind for trial in self.trials}

    @property
    def periods(self) -> dict[str, Scope]:
        """Its results on each period with labels; empty if the evaluation has no slices by period."""
        by_name = self.slices.items()
        return {name.removeprefix(OF_PERIOD): scope for name, scope in by_name if name.startswith(OF_PERIOD)}


def by_mean(methods: Sequence[MethodResult], primary: str) -> list[MethodResult]:
    """The methods by their mean over all groups; the order that was shown, a reference, is last.

    Most labels, such as clicks, come from people who saw that order, so they favour it over the rest.
    """

    def place(method: MethodResult) -> tuple[bool, float]:
        mean = method.slices[ALL].summaries[primary].mean
        return method.name == AS_SHOWN, math.inf if mean is None else -mean

    return sorted(methods, key=place)


class EvaluatedData(Strict):
    """The groups that the methods were evaluated on."""

    data: tuple[str, ...]
    periods: tuple[str, ...]
    hash: str
    groups: int
    documents: int
    slices: dict[str, int]
    """Groups of each slice."""
    goals: dict[str, float] = Field(default_factory=dict, exclude_if=operator.not_)
    """The goals that the methods were evaluated on, with their weights; empty for the labels of no name."""
    judged: str | None = None
    """The data set with all judged documents of each query; None if only the lists' own labels count."""
    unlisted: int = 0
    """Groups that are queries with judgements and without a list."""
    unshown: int = 0
    """Documents without a position, if the order shown is measured."""

    @property
    def described(self) -> str:
        """The data and its size, in one sentence."""
        of = " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in self.goals.items())
        labels = f"labels {of}; " if of else ""
        return (
            f"Test data: {', '.join(self.data)}, {span(self.periods)}; {labels}{self.groups:,} labelled query groups, "
            f"{self.documents:,} documents, {self.slices[OUTLIERS]:,} outlier groups (selection {self.hash[:12]})."
        )


class Evaluation(ComparedMethods):
    """`metrics.json` of an evaluation."""

    called: ClassVar = "an evaluation"
    made_by_job: ClassVar = "jobs.evaluate"
    methods: Annotated[tuple[MethodResult, ...], Field(min_length=1)]
    leads: dict[str, Comparison]
    """Over all groups and in the primary metric, the difference of every other method from the first of `ranked`."""
    test: EvaluatedData
    conditions: dict[str, str]
    """The condition of each slice that the config names."""
    corrected: Corrected | None
    """The metrics corrected for positions, if requested."""
    detector: OutlierDetector
    by_period: ByPeriod | None = None
    """The drift of the test periods, if requested."""
    drift_failed: str | None = Field(default=None, exclude_if=lambda why: why is None)
    """Why drift was requested and not measured."""

    @model_validator(mode="after")
    def _from_the_best(self) -> Self:
        if (best := self.ranked[0].name) in self.leads:
            raise ValueError(f"its leads are not those of {best}, as an older version had them")
        return self

    def drift(self) -> ByPeriod:
        """The drift of the test periods; InputError says why it is missing."""
        if self.by_period is None:
            why = self.drift_failed or "not measured; run jobs.evaluate with evaluate.by_period=true"
            raise InputError(f"drift: {why}")
        return self.by_period

    @property
    def ranked(self) -> list[MethodResult]:
        """The methods, the best one first; the order that was shown is last."""
        return by_mean(self.methods, self.primary)
