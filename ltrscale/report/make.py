"""Making the report: every section from its sources, and one line for what cannot be shown."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ltrscale import storage
from ltrscale.errors import InputError
from ltrscale.progress import log
from ltrscale.report import data, groups, models, results
from ltrscale.report.document import Block, Document, LeftOut, Points, Section, html, in_markdown, pictures
from ltrscale.report.opening import paragraphs
from ltrscale.report.sources import ReportConfig, Sources

HTML, MARKDOWN = "report.html", "report.md"


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
    summary = (
        f"{', '.join(test.data)}: periods {test.periods[0]} to {test.periods[-1]}, {test.groups:,} labelled groups, "
        f"{test.documents:,} documents (selection {test.hash[:12]}).",
        f"Made from the evaluation {sources.config.evaluation}.",
    )
    every = [Section(part.name, part.question, _blocks(part, sources)) for part in _PARTS]
    lines = [
        f"{section.name}: {block.why}"
        for section in every
        if not section.shows
        for block in section.blocks
        if isinstance(block, LeftOut)
    ]
    sections = [section for section in every if section.shows]
    if lines:
        sections.append(Section("Not shown", "What else could stand here, and what would bring it?", [Points(lines)]))
    names = ", ".join(method.name for method in sources.evaluation.methods)
    return Document(f"Evaluation of {names}", paragraphs(sources), summary, tuple(sections))


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


def make_report(config: ReportConfig, out: str, *, made_by: Mapping[str, Any]) -> None:
    """Commit `report.html`, and `report.md` with its pictures, to a directory.

    Args:
        config: see `ReportConfig`.
        out: URL of the directory.
        made_by: origin, recorded in the manifest; see `ltrscale.config.made_by`.

    Raises:
        InputError: there is no evaluation, or `compare` names a method that it lacks.
    """
    document = make_document(Sources.open(config))
    with storage.Commit(out) as commit:
        for name, data_ in pictures(document).items():
            with commit.file(name) as path:
                path.write_bytes(data_)
        for name, text in {MARKDOWN: in_markdown(document), HTML: html(document)}.items():
            with commit.file(name) as path:
                path.write_text(text, encoding="utf-8")
        commit.finish({"made_by": made_by})
