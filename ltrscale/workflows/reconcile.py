"""The stage that explains why other programs' figures differ."""

from typing import ClassVar

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.evaluation import reconcile as reconciliation
from ltrscale.evaluation.reconcile import BundleSource, ReconcileConfig
from ltrscale.evaluation.scored_table import TableSource
from ltrscale.progress import Report
from ltrscale.reports.findings import print_report
from ltrscale.stages.origins import bundle_hashes, dataset_hashes
from ltrscale.stages.stage import Origin, Stage


class ReconcileJob(ReconcileConfig, Stage):
    """Say which rules explain the difference between our figures and those of other programs."""

    stage: ClassVar = "reconcile"
    out: Operational[str]
    """Directory of the report."""

    def run(self) -> bool:
        """Make the report, and print its table."""
        ran = super().run()
        print_report(self.out, reconciliation.document(reconciliation.Reconciliation.read(self.out)))
        return ran

    def inputs(self) -> dict[str, str]:
        """Content of the table, or of the data set and the bundle or the scores."""
        source = self.source
        if isinstance(source, TableSource):
            return {source.path: storage.fingerprint(source.path)}
        if isinstance(source, BundleSource):
            return dataset_hashes([source.split]) | bundle_hashes([source.bundle])
        return dataset_hashes([source.split, source.split.with_scores(source.scores)])

    def work(self, origin: Origin, report: Report) -> None:
        """Compare, and commit the report."""
        reconciliation.reconcile(self, self.out, made_by=origin, report=report)
