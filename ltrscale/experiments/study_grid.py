"""The grid of a study, its cells, and the stages that measure and summarise them."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from ltrscale.config import Config, Operational
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.split import SplitsWithTest
from ltrscale.evaluation.measure.outliers import OutlierConfig
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.studies.measured import describe_test, measure_groups
from ltrscale.evaluation.studies.study import Design, Model, study_of
from ltrscale.evaluation.studies.study_page import document
from ltrscale.origin import settings_of
from ltrscale.progress import Report
from ltrscale.reports.findings import commit_report
from ltrscale.stages.inputs import BundleUrl, OutputUrl, bundle_hashes, dataset_hashes
from ltrscale.stages.stage import Origin, Settings, Stage, with_splits
from ltrscale.stages.unseen import check_unseen
from ltrscale.storage import join

SUMMARY = "summary"
"""Directory of the results, below a study's."""
MOST_STUDY_DRAWS = 10_000

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


class TestGroups(Stage):
    """Describe the test groups."""

    stage: ClassVar = "study_test"
    splits: SplitsWithTest
    evaluate: EvaluateSettings

    def check(self) -> None:
        """Refuse splits that overlap."""
        check_disjoint(self.splits)

    def own_settings(self) -> OutlierConfig:
        """Settings of outliers."""
        return self.evaluate.outliers

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Fit the outlier rules, and commit."""
        describe_test(self.evaluate, self.splits, self.out, made_by=origin)


class Measurement(Stage):
    """Measure a model on the test groups."""

    stage: ClassVar = "measure"
    bundle: BundleUrl
    splits: SplitsWithTest
    evaluate: EvaluateSettings
    threads: Operational[int]

    def check(self) -> None:
        """Refuse a bundle that has seen test periods."""
        check_unseen(self.bundle, self.splits.test)

    def identity(self) -> Settings:
        """The metrics, and the test periods."""
        metrics = {
            "metrics": [*self.evaluate.measured],
            **self.evaluate.model_dump(mode="json", include={"relevant_from", "leave_out_constant"}),
        }
        return with_splits(metrics, self.splits.test)

    def inputs(self) -> dict[str, str]:
        """Content of the data sets and the bundle."""
        return dataset_hashes([self.splits.test]) | bundle_hashes([self.bundle])

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Measure, and commit."""
        measure_groups(self.bundle, self.splits.test, self.evaluate, self.out, threads=self.threads, made_by=origin)


class StudySummary(Stage):
    """Summarise the models measured so far."""

    stage: ClassVar = "study"
    test: OutputUrl
    design: Design
    models: tuple[Model, ...]

    def own_settings(self) -> Settings:
        """The design and the models."""
        return {"design": settings_of(self.design), "models": [settings_of(model) for model in self.models]}

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Summarise, and commit the report."""
        study = study_of(self.design, self.models, self.test)
        commit_report(self.out, study, document(study), made_by=origin)
