"""Why the first item of each query ranks above those below it, as a table beside ranked items."""

from typing import ClassVar

import pyarrow.parquet as pq

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.bundle.explanations import Reasoner, as_table
from ltrscale.config import Operational
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.scored import read_named
from ltrscale.devices import Device, choose_device
from ltrscale.progress import Report, progress
from ltrscale.stages.inputs import BundleUrls, DataUrl
from ltrscale.stages.stage import Origin, Stage

_DEPTH = 10
"""The first item is compared with those up to this rank."""


class ExplainItems(Stage):
    """Explain the first item of every query of a data set."""

    stage: ClassVar = "explain_items"
    bundles: BundleUrls
    """Bundles that rank by the mean of their scores."""
    data: DataUrl
    """Data set directory."""
    device: Operational[Device] = "auto"
    """Where a network runs."""
    out: Operational[str]
    """Directory of the explanations."""

    def work(self, origin: Origin, report: Report) -> None:
        """Explain, and commit a table for each period."""
        opened = {url: bundles.load(url) for url in self.bundles}
        selection = bundles.with_tokens_of(select(Split(data=(self.data,)), labelled=False), opened.values())
        names = open_dataset(self.data).manifest.names_of_categories
        reasoner = Reasoner.from_bundles(opened, selection.features, names, device=choose_device(self.device))
        with storage.Commit(self.out) as commit, progress("explain", selection.n_documents) as advance:
            for period, row_groups in selection.row_groups.by_period().items():
                with (
                    commit.file(f"period={period}/explanations.parquet") as path,
                    pq.ParquetWriter(path, as_table([]).schema) as writer,
                ):
                    for part in read_named(selection.only(row_groups)):
                        writer.write_table(as_table(reasoner.explain_firsts(part.groups, part.ids, _DEPTH)))
                        advance(part.groups.n_documents)
            commit.finish({"made_by": origin})
        report({"stage": self.stage, "queries": selection.n_groups})
