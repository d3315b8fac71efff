"""The report: its opening with the next step, all sections, and one line for each section that cannot be shown."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.errors import InputError
from ltrscale.evaluation.bounds import GateVerdict
from ltrscale.evaluation.measure.page import (
    best_of,
    competitor_of,
    headline,
    is_beyond_chance,
    opening,
    serving_of,
    slices,
)
from ltrscale.evaluation.measure.periods import drifted
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import AS_SHOWN
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.experiments.report.sources import Sources
from ltrscale.late import Late
from ltrscale.progress import Report, called, log
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
        contents = dict.fromkeys(urls, "absent")
        for url in contents:
            with suppress(InputError):
                contents[url] = content_of(url)
        if self.search is not None and storage.exists(trials := storage.join(self.search, results.TABLE)):
            contents[self.search] = storage.fingerprint(trials)
        return contents

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Commit `report.html`, and `report.md` with its pictures."""
        document = self.document()
        with storage.Commit(self.out) as commit:
            commit.write(files(document, page=HTML))
            commit.finish({"made_by": origin})

    def document(self) -> Document:
        """All sections with content; the others become one line each at the end."""
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


def _paragraphs(sources: Sources, *, gate: str | None) -> list[Text | Command]:
    """The opening of the report; it skips unreadable sources, which sections report."""
    evaluation = sources.evaluation
    verdict: GateVerdict | None = None
    questions: dict[str, str] = {}
    memorised: list[str] = []
    with suppress(InputError):
        verdict = None if gate is None else GateVerdict.read(gate)
    with suppress(InputError):
        checks = verdict.checks if verdict else ()
        expected = {check.where for check in checks if check.bound == "expected" and check.holds}
        questions = {name: question for name, question in sources.questions.items() if name not in expected}
    with suppress(InputError):
        memorised = [*sources.memorised]
    step, command = next_step(evaluation, verdict, [*questions])
    more = len(memorised) - _FEATURES_ASKED
    names = ", ".join(memorised[:_FEATURES_ASKED]) + (f" and {more} more" if more > 0 else "")
    texts = [
        " ".join(opening(evaluation)),
        "" if evaluation.by_period is None else drifted(evaluation.by_period),
        f"Probably memorised, for alone they rank like chance: {names} (see section Features)." if memorised else "",
        *(f"Before this is believed: {question}" for question in [*questions.values()][:_FEATURES_ASKED]),
        step,
    ]
    return [*(Text(text) for text in texts if text), *([Command(command)] if command else [])]


def next_step(evaluation: Evaluation, verdict: GateVerdict | None, features: Sequence[str] = ()) -> tuple[str, str]:
    """The next step: a sentence, and its command if any; `features` are suspicious ones."""
    best, competitor, serving = best_of(evaluation), competitor_of(evaluation), serving_of(evaluation)
    if verdict is not None:
        if verdict.passed:
            return "Next: the gate lets the candidate pass; jobs.export and jobs.predict take its bundle.", ""
        return f"Next: the gate refuses the candidate, {verdict.reasons[0]}; its section has every bound.", ""
    if best is None:
        return "", ""
    if features:
        return _answer(features)
    if competitor is None or serving is None:
        return "Next: evaluate another method beside it, such as trees (methods of jobs.pipeline has several).", ""
    shown = evaluation.leads.get(AS_SHOWN)
    if shown is not None and shown.difference > 0:
        return (
            "Next: labels that the shown order favours less, such as clicks corrected for position (jobs.clicks), "
            "or a test on users (jobs.interleave)."
        ), ""
    # the order shown has no bundle: a gate compares with the baseline instead, if that is not the best itself
    production = competitor if serving == AS_SHOWN and competitor == evaluation.baseline else serving
    leads = [evaluation.leads[name] for name in {competitor, production} - {best.name}]
    if any(lead.p_holm is None for lead in leads):
        return (
            "Next: more draws of labels, with the config of the pipeline; models that are trained are kept:",
            f"{called('pipeline')} --config pipeline.yaml --set 'seeds={list(range(FEWEST_DRAWS))}'",
        )
    if not all(map(is_beyond_chance, leads)):
        return "Next: take the one that costs less, or see with jobs.study what more labels, draws or groups bring.", ""
    if production == best.name:
        return f"Next: keep {production}; nothing here ranks better, and jobs.study shows what more labels bring.", ""
    return _gate(evaluation, production=production, candidate=best.name)


def _answer(features: Sequence[str]) -> tuple[str, str]:
    """What to do if the features are legitimate or not, and the command if not."""
    text = (
        f"Next: that answer. If yes, name {', '.join(features)} in bounds.expected of jobs.gate, which otherwise "
        "refuses what leans on it. If no, train without it, with the config of the pipeline:"
    )
    left_out = shlex.quote(f"splits.train.leave_out={json.dumps([*features], ensure_ascii=False)}")
    return text, f"{called('pipeline')} --config pipeline.yaml --set {left_out}"


def _gate(evaluation: Evaluation, *, production: str, candidate: str) -> tuple[str, str]:
    """A sentence, and the command of the gate if both methods have bundles."""
    bundles = {m.name: m.trials[0].url for m in evaluation.methods if m.name != AS_SHOWN and "scores" not in m.kinds}
    if not {production, candidate} <= bundles.keys():
        return f"Next: {candidate} may go into production; jobs.export and jobs.predict take its bundle.", ""
    text = f"Next: the gate, before {candidate} goes into production, with your splits in place of the example's:"
    bundle_keys = {"production": production, "candidate": candidate}
    settings = " ".join(f"--set {key}={shlex.quote(bundles[name])}" for key, name in bundle_keys.items())
    return text, f"{called('gate')} --config jobs/configs/start/gate.yaml --set out=gate {settings}"
