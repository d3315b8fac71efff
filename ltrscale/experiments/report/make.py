"""Makes the report: the opening text, all sections, and one line for each section that cannot be shown."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.errors import InputError
from ltrscale.evaluation.bounds import GateVerdict
from ltrscale.evaluation.measure.page import headline, opening, slices
from ltrscale.evaluation.measure.periods import drifted
from ltrscale.experiments.report.advice import next_step
from ltrscale.experiments.report.sources import Sources
from ltrscale.late import Late
from ltrscale.progress import Report, log
from ltrscale.reports.document import Block, Command, Document, LeftOut, Points, Section, Text
from ltrscale.reports.render import files
from ltrscale.stages.inputs import content_of
from ltrscale.stages.stage import Origin, Stage

if TYPE_CHECKING:
    from ltrscale.evaluation.studies import study_page
    from ltrscale.experiments.report import differences, groups, recorded
    from ltrscale.tuning import results
else:
    study_page, results = Late("ltrscale.evaluation.studies.study_page"), Late("ltrscale.tuning.results")
    differences, groups = Late("ltrscale.experiments.report.differences"), Late("ltrscale.experiments.report.groups")
    recorded = Late("ltrscale.experiments.report.recorded")

_FEATURES_ASKED = 2
"""Maximum number of features that the opening asks about."""

HTML = "report.html"

_AGREEMENT_GROUPS, _EXPLAINED_GROUPS = 500, 40
"""Test groups on which methods are compared in order, and those whose first document is explained."""
_HISTOGRAM_DOCUMENTS = 200_000
"""Documents of the validation split, in whole row groups at equal distances, that the histograms count."""


class ReportJob(Stage):
    """Make one page of HTML, and the same as Markdown, from an evaluation and what is named beside it."""

    stage: ClassVar = "report"
    fixed: ClassVar = {
        "drift": None,
        "agreement_groups": _AGREEMENT_GROUPS,
        "explained_groups": _EXPLAINED_GROUPS,
        "histogram_documents": _HISTOGRAM_DOCUMENTS,
    }
    out: Operational[str]
    """Directory of the report; open `report.html` there."""
    evaluation: str
    """Directory that jobs.evaluate made; what it records says where bundles and data are."""
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
    titles: str | None = None
    """Column with the titles of documents, in the raw rows that made the data set or in a table that joined them, to
    show beside ids; by default one with such a name, in any of ten languages, as far as these files are there."""
    embeddings: dict[str, str] = Field(default_factory=dict)
    """Bundles whose embeddings are pictured, by title; by default the networks of the evaluation: the encoder as
    pretraining left it, or else the layer before the last one of a network that learnt from labels alone."""
    documents: int = Field(1000, ge=10, le=20_000)
    """Documents of the embedding pictures: about 1,000 in HOU24, figures 4, 6 and 7."""
    seed: int = 0
    """Of the samples of groups, and of t-SNE."""

    def run(self, *, show: bool = True) -> bool:
        """Make the report, and print its path if `show` is set."""
        ran = super().run()
        if show:
            sys.stdout.write(storage.join(self.out, HTML) + "\n")
        return ran

    def inputs(self) -> dict[str, str]:
        """Content of the named outputs, the bundles and the data; missing ones count as absent."""
        sources = Sources.open(self.evaluation, self.compare)
        study = None if self.study is None else storage.join(self.study, study_page.SUMMARY)
        places = [self.evaluation, self.gate, study, *self.embeddings.values()]
        urls = [url for url in places if url is not None] + sources.evaluated.bundles
        urls += [url for split in sources.evaluated.splits.by_name.values() for url in split.data]
        contents = {url: _content_or_absent(url) for url in dict.fromkeys(urls)}
        if self.search is not None and storage.exists(trials := storage.join(self.search, results.TABLE)):
            contents[self.search] = storage.fingerprint(trials)
        return contents

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Commit `report.html`, and `report.md` with its pictures; raises as `document`."""
        document = self.document()
        with storage.Commit(self.out) as commit:
            commit.write(files(document, page=HTML))
            commit.finish({"made_by": origin})

    def document(self) -> Document:
        """All sections with content; the others become one line each at the end.

        Raises:
            InputError: there is no evaluation, or it lacks a method in `compare`.
        """
        sources = Sources.open(self.evaluation, self.compare)
        of_methods = f"Made from the evaluation {self.evaluation} of {', '.join(sources.methods)}."
        all_sections = _sections(self, sources)
        lines = [
            f"{section.name}: {block.why}"
            for section in all_sections
            if not section.shows
            for block in section.blocks
            if isinstance(block, LeftOut)
        ]
        sections = [section for section in all_sections if section.shows]
        if lines:
            sections.append(
                Section("Not shown", [Points(lines)], "What else could stand here, and what would bring it?")
            )
        texts = _paragraphs(sources, gate=self.gate)
        return Document(
            headline(sources.evaluation), texts, tuple(sections), (sources.evaluation.test.described, of_methods)
        )


def _sections(job: ReportJob, sources: Sources) -> list[Section]:
    """All sections, without content from unreadable sources."""

    def section(name: str, question: str, blocks: Iterator[Block]) -> Section:
        log.info("report: %s", name)
        section_blocks: list[Block] = []
        try:
            section_blocks.extend(blocks)
        except InputError as error:
            log.info("report: left out of %s: %s", name, error)
            section_blocks.append(LeftOut(str(error)))
        return Section(name, section_blocks, question)

    pictured = groups.embeddings(sources, job.embeddings, documents=job.documents, seed=job.seed)
    agreement = groups.orders_alike(sources, _AGREEMENT_GROUPS, seed=job.seed)
    lasting = "Does quality last after training, and how far has the data drifted?"
    needed = "How many labelled groups does each method need, and where do they cross?"
    return [
        section("Leaderboard", "Which method ranks best, and how sure is that?", recorded.leaders(sources)),
        section(
            "Slices", "For which groups is a method better or worse than the baseline?", slices(sources.evaluation)
        ),
        section("Periods", lasting, recorded.judged_periods(sources.evaluation)),
        section("Gate", "May the candidate replace the model in production?", recorded.gate(job.gate)),
        section("Learning curves", "Has each model learnt, and long enough?", recorded.learning_curves(sources)),
        section("Study", needed, recorded.study(job.study)),
        section("Search", "What has the search for settings found?", recorded.search(job.search)),
        section("Features", "Which features matter to trees, and which are missing?", recorded.feature_blocks(sources)),
        section("Rank 1", "What drives rank 1?", groups.rank_one(sources, _EXPLAINED_GROUPS, seed=job.seed)),
        section("Outliers", "Which values count as outliers?", groups.outliers(sources, _HISTOGRAM_DOCUMENTS)),
        section("Embeddings", "Do networks place documents of equal relevance together?", pictured),
        section("Agreement", "Do the methods rank alike?", agreement),
        section(
            "Differences",
            "In which groups do two methods differ most?",
            differences.differing(sources, job.lists, job.titles),
        ),
        section("Quarantine", "What was left out of the data, and why?", recorded.quarantine(sources)),
        section("Cost", "What has each model cost?", recorded.cost(sources, job.study)),
    ]


def _content_or_absent(url: str) -> str:
    try:
        return content_of(url)
    except InputError:
        return "absent"


def _paragraphs(sources: Sources, *, gate: str | None) -> list[Text | Command]:
    """The opening of the report; it skips unreadable sources, which sections report."""
    evaluation, verdict = sources.evaluation, _verdict(gate)
    questions = _open_questions(sources, verdict)
    step, command = next_step(evaluation, verdict, [*questions])
    texts = [
        " ".join(opening(evaluation)),
        "" if evaluation.by_period is None else drifted(evaluation.by_period),
        _memorised(sources),
        *(f"Before this is believed: {question}" for question in [*questions.values()][:_FEATURES_ASKED]),
        step,
    ]
    return [*(Text(text) for text in texts if text), *([Command(command)] if command else [])]


def _verdict(gate: str | None) -> GateVerdict | None:
    try:
        return None if gate is None else GateVerdict.read(gate)
    except InputError:
        return None


def _open_questions(sources: Sources, verdict: GateVerdict | None) -> dict[str, str]:
    """The questions on features that rank too well alone, without those that the gate's settings answer."""
    checks = verdict.checks if verdict else ()
    expected = {check.where for check in checks if check.bound == "expected" and check.holds}
    try:
        return {name: question for name, question in sources.questions.items() if name not in expected}
    except InputError:
        return {}


def _memorised(sources: Sources) -> str:
    """A sentence on the features that trees have memorised; empty without one."""
    try:
        memorised = [*sources.memorised]
    except InputError:
        return ""
    if not memorised:
        return ""
    more = len(memorised) - _FEATURES_ASKED
    names = ", ".join(memorised[:_FEATURES_ASKED]) + (f" and {more} more" if more > 0 else "")
    return f"Probably memorised, for alone they rank like chance: {names} (see section Features)."
