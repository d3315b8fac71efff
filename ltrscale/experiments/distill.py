"""Distillation: a teacher scores all groups, students learn its scores, and all are compared (BUYL23, section 7).

    out/scores/period=P        the teacher's scores, unless they are committed elsewhere
    out/students/NAME          a bundle each, trained on all groups of the training periods
    out/direct                 trees trained on the labels of the training split
    out/evaluation             teacher, students and direct trees on the test split
    out/agreement              of students and direct trees with the teacher
    out/export/NAME            trees as LightGBM's own text, after a parity check
    out/report.md              all results in one table, with metrics.json and a picture

Each output is a stage, skipped if it is up to date.

Shapes: Q groups, t trials of a method, M metrics.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.bundle import load, with_tokens_of
from ltrscale.config import Config, Operational, Strict
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.selection import check_teaches, select
from ltrscale.data.dataset.split import Split, Splits, SplitsWithTest, with_relative_named
from ltrscale.data.stream.batches import StreamConfig, iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.agreement import Agreement, AgreementJob
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.page import how_to_read_evaluation
from ltrscale.evaluation.measure.report import GROUPS, Evaluation, read_group_metrics
from ltrscale.evaluation.measure.settings import EvaluateConfig, EvaluateSettings
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS
from ltrscale.evaluation.pages import columns_against, cutoffs, with_interval
from ltrscale.evaluation.statistics.blocks import Blocks
from ltrscale.evaluation.statistics.summarise import Comparison, scopes
from ltrscale.experiments.methods.base import MethodName
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoders import MLPConfig
from ltrscale.models.ranker import HeadConfig
from ltrscale.processor import cpu_seconds
from ltrscale.progress import Report, log
from ltrscale.ranking.choices import metric_label
from ltrscale.ranking.loss import SquaredErrorConfig
from ltrscale.reports import charts
from ltrscale.reports.document import Chart, Document, Points, Section, Table, TableRow, Text, cell
from ltrscale.reports.findings import Findings, commit_report, print_report
from ltrscale.reports.render import REPORT
from ltrscale.runtime.launch import cluster_for
from ltrscale.runtime.workers import ONE, Workers, WorkersConfig
from ltrscale.scoring.score import ScoreJob
from ltrscale.serving.export import ExportJob
from ltrscale.stages.inputs import BundleUrl, OutputUrl
from ltrscale.stages.provenance import check_unseen, scored_by
from ltrscale.stages.runs import recorded
from ltrscale.stages.stage import Origin, Stage
from ltrscale.storage import join
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob
from ltrscale.training.settings import OptimizerConfig
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob, TreesStudent

TEACHER, DIRECT = "teacher", "direct"
"""Names, among the methods, of the teacher and of the trees trained on the labels."""


class MLPStudent(Config):
    """A network that scores each document independently, trained by squared error against standardised scores."""

    exported: ClassVar = False
    kind: Literal["mlp"] = "mlp"
    finetune: FinetuneConfig = FinetuneConfig(
        network=NetworkConfig(encoder=MLPConfig(dropout=0.0)),  # the teacher's scores are less noisy than clicks
        head=HeadConfig(layers=1),
        loss=SquaredErrorConfig(standardise=True),
        epochs=20,
        patience=5,
        stream=StreamConfig(docs_per_batch=8192),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=None),
    )

    @model_validator(mode="after")
    def _is_pointwise(self) -> Self:
        if self.finetune.context is not None:
            raise ValueError(f"finetune.context {self.finetune.context.kind} scores whole lists; leave it out")
        if self.finetune.network.transform.per_query:
            raise ValueError("finetune.network.transform.per_query needs whole lists; leave it out")
        if self.finetune.network.numbers.within_lists:
            raise ValueError("finetune.network.numbers.within_lists needs whole lists; leave it out")
        return self

    def job(self, out: str, splits: Splits, workers: WorkersConfig) -> FinetuneJob:
        """The job that trains it on the scores that the splits name."""
        return FinetuneJob(out=out, splits=splits, finetune=self.finetune, workers=workers)


StudentConfig = Annotated[TreesStudent | MLPStudent, Field(discriminator="kind")]

_TIMED_DOCUMENTS, _TURNS = 10_000, 3
"""Documents of the test split that are scored in one batch to measure speed, and turns of each method."""


class DistillJob(Config):
    """Distil a teacher into students, and compare them with it and with trees trained on the labels."""

    fixed: ClassVar = {
        "overlap_at": [1, 5, 10],
        "parity": {"rows": 10_000, "tolerance": None},
        "speed": {"documents": 10_000, "repeats": 3},
        "docs_per_batch": 65_536,
    }

    out: Operational[str]
    """Directory for everything; read `out/report.md` first."""
    data: str
    """Data set directory; splits that name none read this one."""
    teacher: str | None = None
    """Bundle of the teacher, of any kind that scores."""
    scores: str | None = None
    """Directory of the teacher's committed scores (jobs.score), instead of the teacher, which is then not opened."""
    splits: SplitsWithTest
    """Students learn from all groups of the training periods; direct trees from the labelled groups of the training
    split."""
    student_fraction: float = Field(1.0, gt=0, le=1)
    """Share of the groups of the training periods that students learn from, a random sample."""
    students: dict[MethodName, StudentConfig] = Field(min_length=1)
    """Students by their name in the table."""
    direct: GBDTConfig | None = LightGBMConfig()
    """Trees trained on the labels, for comparison with the students; null leaves them out."""
    evaluate: EvaluateSettings = EvaluateSettings(baseline=None)
    """Metrics and outliers."""
    ray: Operational[bool] = False
    """Let the teacher score on a Ray cluster."""
    workers: Workers = ONE
    """Data-parallel workers of students and direct trees."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.teacher is None) == (self.scores is None):
            raise ValueError("name a teacher, or the scores that jobs.score made with it; not both")
        if self.evaluate.baseline is not None:
            raise ValueError("evaluate.baseline: leave it out; students are compared with direct, or with the teacher")
        if reserved := {TEACHER, DIRECT} & self.students.keys():
            raise ValueError(f"students.{min(reserved)}: the report uses this name for another method; choose another")
        if self.splits.train.data not in ((), (self.data,)) or self.splits.test.data not in ((), (self.data,)):
            raise ValueError("splits: train and test read the data set that data names; leave their data out")
        if self.splits.train.scores or self.splits.test.scores:
            raise ValueError("splits: leave scores out; name them at the top, as scores")
        return self

    @one_view()
    def run(self) -> None:
        """Score, train students and direct trees, evaluate, compare, export, report; skips stages that are up to date.

        Raises:
            InputError: the teacher was trained or selected on test periods; as the stages.
        """
        with recorded(self.out, self, "distill"), cluster_for(self.workers):
            self._check()
            self._score()
            models = {name: join(self.out, "students", name) for name in self.students}
            train = self._scored(self._splits.train).replace(labelled_fraction=self.student_fraction)
            for name, out in models.items():
                self.students[name].job(out, self._splits.replace(train=train), self.workers).run()
            if self.direct is not None:
                models[DIRECT] = join(self.out, DIRECT)
                GBDTJob(out=models[DIRECT], splits=self._splits, gbdt=self.direct, workers=self.workers).run()
            self._compare(models)
            periods = self._splits.test.periods
            for name in (name for name, student in self.students.items() if student.exported):
                out = join(self.out, "export", name)
                ExportJob(out=out, bundle=models[name], data=self.data, periods=periods).run()
            DistillSummary(
                out=self.out,
                evaluation=join(self.out, "evaluation"),
                agreement=join(self.out, "agreement"),
                models=({TEACHER: self.teacher} if self.teacher else {}) | models,
                test=self._splits.test,
                seed=self.evaluate.seed,
            ).run()
        print_report(self.out, document(Distillation.read(self.out), self.out))

    @cached_property
    def _splits(self) -> SplitsWithTest:
        return with_relative_named(self.splits.on(self.data), "splits")

    @property
    def _scores(self) -> str:
        return self.scores or join(self.out, "scores")

    def _check(self) -> None:
        """Check splits, labels and the periods that the teacher has seen."""
        check_disjoint(self._splits)
        for name, split in self._splits.by_name.items():
            if name != "train" or self.direct:
                check_teaches(select(split, labelled=True), name)
        if self.teacher is not None:
            teachers = [self.teacher]
        else:
            for split in (self._scored(self._splits.train), self._scored(self._splits.test)):
                select(split, labelled=True)  # raises where a period has no scores
            teachers = scored_by(self._scored(self._splits.test))
        if len(teachers) > 1:
            raise InputError(f"{self._scores}: scores of several bundles ({', '.join(teachers)}); score anew with one")
        for url in teachers:
            check_unseen(url, self._splits.test)

    def _scored(self, split: Split) -> Split:
        """All groups of a split's periods, with the teacher's scores as labels."""
        return Split(data=split.data, periods=split.periods, scores=self._scores, leave_out=split.leave_out)

    def _score(self) -> None:
        if self.teacher is None:
            return
        selected = [select(split, labelled=False) for split in (self._splits.train, self._splits.test)]
        periods = tuple(sorted({file.period for selection in selected for file in selection.row_groups.own_files}))
        ScoreJob(
            out=self._scores,
            bundle=self.teacher,
            data=self.data,
            periods=periods,
            layout="scores",
            docs_per_batch=self.evaluate.docs_per_batch,
            ray=self.ray,
        ).run()

    def _compare(self, models: Mapping[str, str]) -> None:
        """Evaluate all methods on labelled test groups; compare their rankings with the teacher's on all of them."""
        baseline = TEACHER if self.direct is None else DIRECT
        settings = self.evaluate.replace(baseline=baseline, as_shown=False)
        config = EvaluateConfig(
            **settings.model_dump(), models=dict(models), scores={TEACHER: self._scores}, splits=self._splits
        )
        EvaluateJob(out=join(self.out, "evaluation"), evaluate=config).run(show=False)
        AgreementJob(
            out=join(self.out, "agreement"),
            models=dict(models),
            scores=self._scores,
            test=self._scored(self._splits.test),
            **self.evaluate.model_dump(include={"resamples", "seed", "docs_per_batch"}),
        ).run()


class ServingCost(Strict):
    """Cost of training and using a method."""

    kind: str
    """Kind of the bundle: neural, trees or feature."""
    bytes: int
    documents_per_second: float
    """Scoring speed on one thread, by processor time."""
    trained_on: int | None
    """Query groups it was trained on, with labels or a teacher's scores; None if its bundle does not state it."""


class Distillation(Findings):
    """`metrics.json` of a distillation."""

    called: ClassVar = "a distillation"
    made_by_job: ClassVar = "jobs.distill"
    evaluation: Evaluation
    """How well all methods rank, the teacher included."""
    against_teacher: dict[str, Comparison]
    """The primary metric against the teacher by method, on the groups that define it; none for the teacher itself."""
    agreement: Agreement
    costs: dict[str, ServingCost]
    """By method, as far as it has a bundle."""


class DistillSummary(Stage):
    """Gather the figures of all methods, and measure their cost."""

    stage: ClassVar = "distill"
    record: ClassVar = storage.HIDDEN_RUN
    """Not that of the job, which has the same `out`."""
    evaluation: OutputUrl
    agreement: OutputUrl
    models: dict[str, BundleUrl]
    test: Split
    seed: int

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Gather and measure, and commit the report."""
        evaluation = Evaluation.read(self.evaluation)
        found = Distillation(
            evaluation=evaluation,
            against_teacher=self._against_teacher(evaluation),
            agreement=Agreement.read(self.agreement),
            costs=_measure_costs(self.models, self.test),
        )
        commit_report(self.out, found, document(found, self.out), made_by=origin)

    def _against_teacher(self, evaluation: Evaluation) -> dict[str, Comparison]:
        primary, names = evaluation.primary, [method.name for method in evaluation.methods]
        column = list(evaluation.methods[0].slices[ALL].summaries).index(primary)
        of_primary = [values_QtM[:, :, [column]] for values_QtM in read_group_metrics(self.evaluation, evaluation)]
        (with_teacher,) = scopes(
            [[*map(Blocks.from_values, of_primary)]],
            [primary],
            baseline=names.index(TEACHER),
            samples=evaluation.resamples,
            seed=self.seed,
            labels_K=[[trial.labels for trial in method.trials] for method in evaluation.methods],
        )
        compared = {name: scope.comparisons.get(primary) for name, scope in zip(names, with_teacher, strict=True)}
        return {name: comparison for name, comparison in compared.items() if comparison is not None}


def _measure_costs(models: Mapping[str, str], test: Split) -> dict[str, ServingCost]:
    """Size and speed of each method's bundle; all score the same documents, in turns, on one thread."""
    bundles = {name: load(url) for name, url in models.items()}
    selection = with_tokens_of(select(test, labelled=False), bundles.values())
    groups = next(iterate(selection, docs_per_batch=_TIMED_DOCUMENTS))
    scorers = [bundle.scorer(features=selection.features, threads=1) for bundle in bundles.values()]
    log.info("distill: measuring the speed of %d methods on %d documents", len(models), groups.n_documents)
    seconds = cpu_seconds(*[lambda scorer=scorer: scorer(groups) for scorer in scorers], repeats=_TURNS)
    return {
        name: ServingCost(
            kind=bundle.kind,
            bytes=sum(map(len, bundle.contents.values())),
            documents_per_second=groups.n_documents / time,
            trained_on=bundle.count("labelled_groups"),
        )
        for (name, bundle), time in zip(bundles.items(), seconds, strict=True)
    }


def _side_by_side(found: Distillation) -> Table:
    """One row per method: NDCG, difference from the baseline, outlier groups, agreement, size and speed."""
    evaluation, models = found.evaluation, found.agreement.models
    primary, measures = evaluation.primary, next(iter(models.values()))
    rows: list[TableRow] = []
    for method in evaluation.methods:
        scope, cost, agreement = method.slices[ALL], found.costs.get(method.name), models.get(method.name, {})
        rows.append(
            {
                "method": method.name,
                **{metric_label(name): scope.summaries[name].mean for name in cutoffs(scope.summaries)},
                **columns_against(primary, evaluation.baseline, scope),
                f"{metric_label(primary)} - {TEACHER} [95%]": with_interval(found.against_teacher.get(method.name)),
                f"Outlier-{metric_label(primary)}": method.slices[OUTLIERS].summaries[primary].mean,
                **{f"{name} [95%]": cell(agreement.get(name), ".3f") for name in measures},
                "groups": None if cost is None else cost.trained_on,
                "MB": None if cost is None else f"{cost.bytes / 1e6:.2f}",
                "docs/s": None if cost is None else f"{cost.documents_per_second:,.0f}",
            }
        )
    return Table.from_rows(rows)


def document(found: Distillation, out: str) -> Document:
    """The report, with links to the other outputs below `out`."""
    evaluation, label = found.evaluation, metric_label(found.evaluation.primary)
    kinds = {TEACHER: "teacher", evaluation.baseline: "baseline"}
    rows = [
        charts.interval_row(
            method.name, method.slices[ALL].summaries[evaluation.primary], series=kinds.get(method.name, "method")
        )
        for method in evaluation.methods
    ]
    spec = charts.interval_chart(rows, title=label, order=["teacher", "baseline", "method"])
    how_to_read = [
        *how_to_read_evaluation(evaluation),
        f"tau is Kendall's tau-b with the teacher, overlap@K the share of the first K documents that both have: means "
        f"over those of the {found.agreement.groups:,} test groups, labelled or not, that define them.",
        "groups are the query groups that a method was trained on, students with the teacher's scores. MB is weights "
        "or trees in the bundle, docs/s what one thread scores in a second of processor time.",
    ]
    further = [
        f"the evaluation, with all metrics: {join(out, 'evaluation', REPORT)}",
        f"the agreement of every group: {join(out, 'agreement', GROUPS)}",
        f"the trees of students for LightGBM alone: {join(out, 'export')}",
    ]
    return Document(
        "Distillation",
        (Text(evaluation.test.described), _side_by_side(found), Chart(spec, f"{label} of each method", "methods")),
        (Section("How to read the table", [Points(how_to_read)]), Section("More", [Points(further)])),
    )
