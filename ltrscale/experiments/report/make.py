"""Making the report: every section from its sources, and one line for what cannot be shown."""

import sys
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.errors import InputError
from ltrscale.experiments.report import data, groups, models, results
from ltrscale.experiments.report.opening import paragraphs
from ltrscale.experiments.report.sources import SUMMARY, ReportConfig, Sources
from ltrscale.progress import log
from ltrscale.reports.document import Block, Document, LeftOut, Points, Section
from ltrscale.reports.findings import write_files
from ltrscale.reports.html import html
from ltrscale.reports.markdown import files
from ltrscale.stages.origins import content_of
from ltrscale.stages.stage import Origin, Stage
from ltrscale.tuning.results import TABLE

HTML = "report.html"
_ABSENT = "absent"


class _Part(NamedTuple):
    """A section that is to be made."""

    name: str
    question: str
    blocks: Callable[[Sources], Iterator[Block]]


_PARTS = (
    _Part("Leaderboard", "Which method ranks best, and how sure is that?", results.leaders),
    _Part("Slices", "For which groups is a method better or worse than the baseline?", results.slices),
    _Part("Periods", "Does quality last after training, and how far has the data drifted?", results.weeks),
    _Part("Gate", "May the candidate replace the model in production?", results.gate),
    _Part("Learning curves", "Has each model learnt, and long enough?", models.learning_curves),
    _Part("Study", "How many labelled groups does each method need, and where do they cross?", results.study),
    _Part("Search", "What has the search for settings found?", results.search),
    _Part("Features", "Which features matter to trees, and which are missing?", models.features),
    _Part("Outliers", "Which values count as outliers?", data.outliers),
    _Part("Embeddings", "Do networks place documents of equal relevance together?", groups.embeddings),
    _Part("Agreement", "Do the methods rank alike?", groups.agreement),
    _Part("Differences", "In which groups do two methods differ most?", groups.differing),
    _Part("Quarantine", "What was left out of the data, and why?", data.quarantine),
    _Part("Cost", "What has each model cost?", models.cost),
)


def make_document(sources: Sources) -> Document:
    """All sections, each with what its sources give; those that have nothing are a line each at the end."""
    test = sources.evaluation.test
    made_from = (
        f"{', '.join(test.data)}: periods {test.periods[0]} to {test.periods[-1]}, {test.groups:,} labelled groups, "
        f"{test.documents:,} documents (selection {test.hash[:12]}).",
        f"Made from the evaluation {sources.config.evaluation}.",
    )
    every = [Section(part.name, _blocks(part, sources), part.question) for part in _PARTS]
    lines = [
        f"{section.name}: {block.why}"
        for section in every
        if not section.shows
        for block in section.blocks
        if isinstance(block, LeftOut)
    ]
    sections = [section for section in every if section.shows]
    if lines:
        sections.append(Section("Not shown", [Points(lines)], "What else could stand here, and what would bring it?"))
    names = ", ".join(method.name for method in sources.evaluation.methods)
    return Document(f"Evaluation of {names}", paragraphs(sources), tuple(sections), made_from)


def _blocks(part: _Part, sources: Sources) -> list[Block]:
    """The blocks of a section; the rest is left out where a source cannot be read."""
    log.info("report: %s", part.name)
    blocks: list[Block] = []
    try:
        blocks.extend(part.blocks(sources))
    except InputError as error:
        log.info("report: left out of %s: %s", part.name, error)
        blocks.append(LeftOut(str(error)))
    return blocks


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
        """Commit `report.html`, and `report.md` with its pictures.

        Raises:
            InputError: there is no evaluation, or `compare` names a method that it lacks.
        """
        document = make_document(Sources.open(self))
        with storage.Commit(self.out) as commit:
            write_files(commit, files(document) | {HTML: html(document).encode()})
            commit.finish({"made_by": origin})


def _content(url: str) -> str:
    try:
        return content_of(url)
    except InputError:
        return _ABSENT
