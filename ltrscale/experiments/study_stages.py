"""The stages of a study that measure its models, and summarise those measured so far."""

from typing import ClassVar

from ltrscale.config import Operational
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
from ltrscale.stages.provenance import check_unseen
from ltrscale.stages.stage import Origin, Settings, Stage, with_splits

SUMMARY = "summary"
"""Directory of the results, below a study's."""


class TestGroups(Stage):
    """Describe the test groups."""

    __test__: ClassVar = False  # for pytest
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
        """The metrics with the settings that their names leave out, and the test periods."""
        always = self.evaluate.model_dump(mode="json", include={"relevant_from", "leave_out_constant"})
        # without defaults, so that measurements without these keys stay up to date
        changed = self.evaluate.model_dump(mode="json", include={"grades", "gains"}, exclude_defaults=True)
        return with_splits({"metrics": [*self.evaluate.measured], **always, **changed}, self.splits.test)

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
