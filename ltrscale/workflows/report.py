"""The stage that makes the report that people look at."""

import sys
from typing import ClassVar

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.errors import InputError
from ltrscale.report.make import HTML, make_report
from ltrscale.report.sources import SUMMARY, ReportConfig, Sources
from ltrscale.stages.origins import content_of
from ltrscale.stages.stage import Origin, Stage
from ltrscale.tuning.results import TABLE

_ABSENT = "absent"


class ReportJob(ReportConfig, Stage):
    """Make one page of HTML, and the same as Markdown, from an evaluation and what is named beside it."""

    stage: ClassVar = "report"
    out: Operational[str]
    """Directory of the report; open `report.html` there."""

    def run(self, *, show: bool = True) -> bool:
        """Make the report, and print its place if `show` is set."""
        ran = super().run()
        if show:
            sys.stdout.write(storage.join(self.out, HTML) + "\n")
        return ran

    def inputs(self) -> dict[str, str]:
        """Content of what is named, of the bundles and of the data; what is not there counts as absent."""
        sources = Sources.open(self)
        study = None if self.study is None else storage.join(self.study, SUMMARY)
        named = [self.evaluation, self.drift, self.gate, study, *self.embeddings.values()]
        urls = [url for url in named if url is not None] + sources.evaluated.bundles
        urls += [url for split in sources.evaluated.splits.by_name.values() for url in split.data]
        found = {url: _content(url) for url in dict.fromkeys(urls)}
        if self.search is not None and storage.exists(trials := storage.join(self.search, TABLE)):
            found[self.search] = storage.fingerprint(trials)
        return found

    def work(self, origin: Origin, report: object) -> None:  # noqa: ARG002
        """Make and commit the report."""
        make_report(self, self.out, made_by=origin)


def _content(url: str) -> str:
    try:
        return content_of(url)
    except InputError:
        return _ABSENT
