"""The job of an evaluation: its settings, its inputs and its page; `evaluate` computes."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

from ltrscale.config import Operational
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.stream.plan import run_here
from ltrscale.evaluation.measure.page import document
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateConfig, judged_split
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.late import Late
from ltrscale.progress import Report
from ltrscale.reports.document import Document
from ltrscale.reports.findings import ReportStage
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.on_ray import run_with_ray
from ltrscale.stages.inputs import content_of, hashes_of
from ltrscale.stages.provenance import check_unseen, scored_by
from ltrscale.stages.stage import Origin

if TYPE_CHECKING:
    from ltrscale.evaluation.measure import evaluate
else:
    evaluate = Late("ltrscale.evaluation.measure.evaluate")


class EvaluateJob(ReportStage):
    """Evaluate bundles on the test split, with slices and significance."""

    stage: ClassVar = "evaluate"
    evaluate: EvaluateConfig
    ray: Operational[bool] = False
    """Measure parts of the test split in parallel on a Ray cluster, a CPU each; the figures are the same."""

    def page(self) -> Document:
        """The report of the committed findings."""
        return document(Evaluation.read(self.out), self.out)

    def check(self) -> None:
        """Refuse splits that overlap, and bundles that have seen test periods."""
        config = self.evaluate
        check_disjoint(config.splits)
        for url in [*config.bundles, *(url for split in config.scored for url in scored_by(split))]:
            check_unseen(url, config.splits.test)

    def inputs(self) -> dict[str, str]:
        """The inputs by their types, the scores, judgements and propensities of the test periods, what drift needs."""
        config = self.evaluate
        judged = [] if config.judged is None else [judged_split(config.judged, config.splits.test)]
        clicks = [] if config.propensities is None else [config.propensities.clicks]
        train = [config.splits.train] if config.by_period else []
        return hashes_of(self, *config.scored, *judged, *train) | {url: content_of(url) for url in clicks}

    def work(self, origin: Origin, report: Report) -> None:
        """Evaluate, and commit the report."""
        with ray_cluster(1) if self.ray else nullcontext():
            run, threads = (run_with_ray, 1) if self.ray else (run_here, 0)
            found = evaluate.evaluate(self.evaluate, self.out, made_by=origin, run=run, threads=threads)
        for method in found.methods:
            means = {name: summary.mean for name, summary in method.slices[ALL].summaries.items()}
            report({"method": method.name, **means})
