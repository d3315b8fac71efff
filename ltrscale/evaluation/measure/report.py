"""The results of an evaluation."""

from typing import Annotated, ClassVar

from pydantic import Field

from ltrscale.config import Config
from ltrscale.evaluation.measure.corrected import Corrected
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.statistics.summarise import Comparison, Scope
from ltrscale.ranking.calibration import Calibration
from ltrscale.reports.findings import Findings


class Sliced(Config):
    """Results of a method by slice."""

    slices: dict[str, Scope]
    """`all` groups, `outliers`, those of `slices` in the config, and the values of the columns of `slice_by`."""


class MethodResult(Sliced):
    """One method: its bundles, one for each trial, and its results by slice."""

    name: str
    bundles: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each bundle: neural, trees or feature; `scores`; `order shown`."""
    labelled_groups: tuple[int | None, ...]
    """Number of labelled groups that each bundle was trained on; None if it does not state it."""
    validation_groups: tuple[int | None, ...]
    """Number of labelled groups that each bundle was selected on; None if it does not state it."""
    labels: tuple[str | None, ...]
    """Identity of the labels that each bundle was trained and selected on; None if it does not state it."""
    debiased: tuple[str | None, ...]
    """How the training of each bundle corrected for positions: `dla`, `weights` or `unbiased`; None if it did not."""
    otherwise: tuple[str | None, ...]
    """Identity of each bundle's settings without that correction and the seed; None for scores and the order shown."""
    calibration: tuple[Calibration | None, ...]
    """Each bundle's probabilities against the clicks; None where its scores are no logits of labels 0 and 1."""


class EvaluatedData(Config):
    """The groups that the methods were evaluated on."""

    data: tuple[str, ...]
    periods: tuple[str, ...]
    hash: str
    groups: int
    documents: int
    slices: dict[str, int]
    """Groups of each slice."""
    judged: str | None = None
    """The data set with all judged documents of each query; None if the lists' own labels are all that counts."""
    unlisted: int = 0
    """Those of `groups` that are queries with judgements and without a list."""
    unshown: int = 0
    """Those of `documents` without a position, where there are positions."""


class Evaluation(Findings):
    """`metrics.json` of an evaluation."""

    called: ClassVar = "an evaluation"
    made_by_job: ClassVar = "jobs.evaluate"
    methods: Annotated[tuple[MethodResult, ...], Field(min_length=1)]
    baseline: str | None
    primary: str
    """The metric of the comparison column and the picture."""
    leads: dict[str, Comparison]
    """Over all groups and in the primary metric, the difference of every other method from the best one."""
    relevant_from: float
    leave_out_constant: bool
    """Whether groups of equal labels are left out of the means."""
    policies: dict[str, str]
    """What the formula of each metric leaves open, such as ties."""
    resamples: int
    test: EvaluatedData
    conditions: dict[str, str]
    """The condition of each slice that the config names."""
    validation_groups: int
    """All labelled groups of the validation split."""
    corrected: Corrected | None
    """The metrics corrected for positions, where they were asked for."""
    detector: OutlierDetector
