"""Making the report: every section from its sources, and one line for what cannot be shown."""

import sys
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.errors import InputError
from ltrscale.experiments.report import data, groups, models, results
from ltrscale.experiments.report.opening import paragraphs
from ltrscale.experiments.report.sources import SUMMARY, Sources
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
    blocks: Iterator[Block]


class ReportJob(Stage):
    """Make one page of HTML, and the same as Markdown, from an evaluation and what is named beside it."""

    stage: ClassVar = "report"
    out: Operational[str]
    """Directory of the report; open `report.html` there."""
    evaluation: str
    """Directory that jobs.evaluate made; what it records says where bundles and data are."""
    drift: str | None = None
    """Directory that jobs.drift made, for the decay curve and the drift of features."""
    gate: str | None = None
    """Directory that jobs.gate made, for its verdict."""
    study: str | None = None
    """Directory that jobs.study made, for the curves by the number of labelled groups."""
    search: str | None = None
    """Directory that jobs.tune made, for the course of the search."""
    compare: tuple[str, str] | None = None
    """The two methods whose most different groups are listed; by default the baseline and the best other method."""
    lists: int = Field(3, ge=0, le=100)
    """Groups to list where the first method is ahead, and as many where the second is."""
    embeddings: dict[str, str] = Field(default_factory=dict)
    """Bundles whose embeddings are pictured, by title; by default the networks of the evaluation: the encoder as
    pretraining left it, or else the layer before the last one of a network that learnt from labels alone."""
    documents: int = Field(1000, ge=10, le=20_000)
    """Documents of the embedding pictures: about 1,000 in HOU24, figures 4, 6 and 7."""
    agreement_groups: int = Field(500, ge=1, le=100_000)
    """Test groups on which methods are compared in order."""
    histogram_documents: int = Field(200_000, ge=1)
    """Documents of the validation split, in whole row groups at equal distances, that the histograms count."""
    seed: int = 0
    """Of the samples of groups, and of t-SNE."""

    def run(self, *, show: bool = True) -> bool:
        """Make the report, and print its place if `show` is set."""
        ran = super().run()
        if show:
            sys.stdout.write(storage.join(self.out, HTML) + "\n")
        return ran

    def inputs(self) -> dict[str, str]:
        """Content of what is named, of the bundles and of the data; what is not there counts as absent."""
        sources = Sources.open(self.evaluation, self.compare)
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
        document = make_document(self)
        with storage.Commit(self.out) as commit:
            write_files(commit, files(document) | {HTML: html(document).encode()})
            commit.finish({"made_by": origin})


def make_document(job: ReportJob) -> Document:
    """All sections, each with what its sources give; those that have nothing are a line each at the end.

    Raises:
        InputError: there is no evaluation, or `compare` names a method that it lacks.
    """
    sources = Sources.open(job.evaluation, job.compare)
    test = sources.evaluation.test
    made_from = (
        f"{', '.join(test.data)}: periods {test.periods[0]} to {test.periods[-1]}, {test.groups:,} labelled groups, "
        f"{test.documents:,} documents (selection {test.hash[:12]}).",
        f"Made from the evaluation {job.evaluation}.",
    )
    every = [Section(part.name, _blocks(part), part.question) for part in _parts(job, sources)]
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
    return Document(
        f"Evaluation of {names}", paragraphs(sources, gate=job.gate, drift=job.drift), tuple(sections), made_from
    )


def _blocks(part: _Part) -> list[Block]:
    """The blocks of a section; the rest is left out where a source cannot be read."""
    log.info("report: %s", part.name)
    blocks: list[Block] = []
    try:
        blocks.extend(part.blocks)
    except InputError as error:
        log.info("report: left out of %s: %s", part.name, error)
        blocks.append(LeftOut(str(error)))
    return blocks


def _parts(job: ReportJob, sources: Sources) -> tuple[_Part, ...]:
    """All sections, none of which is made yet."""
    pictured = groups.embeddings(sources, job.embeddings, documents=job.documents, seed=job.seed)
    alike = groups.orders_alike(sources, job.agreement_groups, seed=job.seed)
    studied = results.study(job.study)
    return (
        _Part("Leaderboard", "Which method ranks best, and how sure is that?", results.leaders(sources)),
        _Part("Slices", "For which groups is a method better or worse than the baseline?", results.slices(sources)),
        _Part(
            "Periods",
            "Does quality last after training, and how far has the data drifted?",
            results.weeks(sources, job.drift),
        ),
        _Part("Gate", "May the candidate replace the model in production?", results.gate(job.gate)),
        _Part("Learning curves", "Has each model learnt, and long enough?", models.learning_curves(sources)),
        _Part("Study", "How many labelled groups does each method need, and where do they cross?", studied),
        _Part("Search", "What has the search for settings found?", results.search(job.search)),
        _Part("Features", "Which features matter to trees, and which are missing?", models.feature_blocks(sources)),
        _Part("Outliers", "Which values count as outliers?", data.outliers(sources, job.histogram_documents)),
        _Part("Embeddings", "Do networks place documents of equal relevance together?", pictured),
        _Part("Agreement", "Do the methods rank alike?", alike),
        _Part("Differences", "In which groups do two methods differ most?", groups.differing(sources, job.lists)),
        _Part("Quarantine", "What was left out of the data, and why?", data.quarantine(sources)),
        _Part("Cost", "What has each model cost?", models.cost(sources, job.study)),
    )


def _content(url: str) -> str:
    try:
        return content_of(url)
    except InputError:
        return _ABSENT
