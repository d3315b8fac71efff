"""Cross-validation: the same comparison of methods on each fold of a collection, and over all folds.

Each fold is a run of the pipeline below `out/FOLD`, which skips stages that are up to date. The summary of all folds is
a separate stage, in `out/summary` (and `out/summary-relevance`, if the evaluation is on both labels).
"""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from ltrscale.config import Config, validate
from ltrscale.data.dataset.split import LabelColumn
from ltrscale.evaluation.studies.folds import Crossval, document, summarise_folds
from ltrscale.experiments.pipeline import PipelineConfig, evaluation_on
from ltrscale.progress import Report, log
from ltrscale.reports.findings import print_report
from ltrscale.runtime.launch import cluster_for
from ltrscale.stages.runs import recorded
from ltrscale.stages.stage import Origin, OutputUrl, Settings, Stage
from ltrscale.storage import join

PLACE = "{fold}"
"""Placeholder for the name of the fold in a pipeline's texts."""
_SUMMARY = "summary"

FoldName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
"""Also a directory's name."""


class FoldPipeline(PipelineConfig):
    """The pipeline that runs on each fold; `{fold}` in a text stands for the fold's name."""

    out: str = ""
    """Leave it out: each fold writes to the directory of its name below the outer `out`."""

    @model_validator(mode="after")
    def _has_no_out(self) -> Self:
        if self.out:
            raise ValueError("pipeline.out: leave it out; each fold has the directory of its name below out")
        if self.splits.test is None:
            raise ValueError("pipeline.splits.test: a cross-validation compares on test groups; name them")
        return self


class CrossvalJob(Config):
    """A comparison of methods on each fold of a collection, and over all folds."""

    out: str
    """Directory for everything: `FOLD/...` as the pipeline makes it, `summary/report.md`."""
    folds: tuple[FoldName, ...] = Field(min_length=2)
    """Names of the folds, such as [Fold1, Fold2, Fold3, Fold4, Fold5]."""
    pipeline: FoldPipeline

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.folds)) < len(self.folds) or any(fold.startswith(_SUMMARY) for fold in self.folds):
            raise ValueError(f"folds need different names that do not begin with {_SUMMARY}")
        values = self.pipeline.model_dump()
        if _with_fold(values, self.folds[0]) == _with_fold(values, self.folds[1]):
            raise ValueError(
                f"no text of pipeline has {PLACE}, so that all folds would be the same; write it where the folds "
                f"differ, such as prepare.inputs: data/MQ2008/{PLACE}/train.txt"
            )
        return self

    def run(self) -> None:
        """Run the pipeline on each fold, then summarise; skips stages that are up to date."""
        with recorded(self.out, self, "crossval"), cluster_for(self.pipeline.workers):  # one cluster for all folds
            for fold in self.folds:
                log.info("fold %s", fold)
                self.of(fold).run()
            summaries = [self._summarised(column) for column in self.pipeline.evaluate_on]
        for out in summaries:
            print_report(out, document(Crossval.read(out)))

    def of(self, fold: str) -> PipelineConfig:
        """The pipeline of one fold."""
        values = {**_with_fold(self.pipeline.model_dump(), fold), "out": join(self.out, fold)}
        return validate(PipelineConfig, values, f"fold {fold}")

    def _summarised(self, column: LabelColumn) -> str:
        name = evaluation_on(column)
        out = join(self.out, name.replace("evaluation", _SUMMARY))
        evaluations = {fold: join(self.out, fold, name) for fold in self.folds}
        CrossvalSummary(out=out, evaluations=evaluations, seed=self.pipeline.evaluate.seed).run()
        return out


class CrossvalSummary(Stage):
    """Summarise the evaluations of all folds."""

    stage: ClassVar = "crossval"
    evaluations: dict[str, OutputUrl]
    """Directory of each fold's evaluation."""
    seed: int

    def identity(self) -> Settings:
        """The folds in their order, the evaluation of each, and the seed of the intervals."""
        return {"folds": [*self.evaluations], "evaluations": [*self.evaluations.values()], "seed": self.seed}

    def work(self, origin: Origin, report: Report) -> None:
        """Summarise, and commit the report."""
        summarise_folds(self.evaluations, self.out, seed=self.seed, made_by=origin, report=report)


def _with_fold(value: Any, fold: str) -> Any:
    """The value with the fold's name in place of `{fold}` in all its texts."""
    match value:
        case str():
            return value.replace(PLACE, fold)
        case dict():
            return {key: _with_fold(item, fold) for key, item in value.items()}
        case list() | tuple():
            return [_with_fold(item, fold) for item in value]
        case _:
            return value
