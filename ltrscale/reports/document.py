"""A report as data: a title, what it opens with, and sections of texts, tables and charts.

Texts are plain wherever they come from: each form that a document is written in escapes them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ltrscale.reports.charts import Spec


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Command:
    """A command line, as it is typed."""

    line: str


@dataclass(frozen=True)
class Points:
    """A list of short texts."""

    texts: Sequence[str]
    caption: str = ""
    folded: bool = False
    """Whether the list waits behind its caption until it is opened."""


@dataclass(frozen=True)
class Table:
    """A table; columns of numbers are aligned right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    shades: Sequence[int] = ()
    """Of each row, the colour of its label; see `charts.shade`. Empty for none."""
    folded: bool = False
    """Whether the table waits behind its caption until it is opened."""

    @property
    def right(self) -> list[bool]:
        """Which columns are aligned right."""
        return [all(is_figure(row[i]) for row in self.rows) for i in range(len(self.header))]


def is_figure(text: str) -> bool:
    """Whether a cell holds a figure, or says that there is none, and so is aligned right.

    Example:
        >>> [is_figure(text) for text in ("+0.1 [-0.1, 0.3]", "-", "n/a", "gbdt")]
        [True, True, True, False]
    """
    return text[:1] in "0123456789+-<" or text == "n/a"


@dataclass(frozen=True)
class Chart:
    """A chart, and in words what it shows."""

    spec: Spec
    shows: str
    name: str = ""
    """Of its picture, such as `curves`; its number among the charts of the document by default."""


@dataclass(frozen=True)
class Charts:
    """Small charts side by side, as far as there is room."""

    charts: Sequence[Chart]


@dataclass(frozen=True)
class LeftOut:
    """Something that cannot be shown: why, and what would bring it."""

    why: str


Block = Text | Command | Points | Table | Chart | Charts | LeftOut


@dataclass(frozen=True)
class Section:
    """A part of the document."""

    name: str
    """For the table of contents and for links."""
    blocks: Sequence[Block]
    question: str = ""
    """Which the section answers."""

    @property
    def anchor(self) -> str:
        """The identifier for links."""
        return self.name.lower().replace(" ", "-")

    @property
    def shows(self) -> bool:
        """Whether it shows anything."""
        return any(not isinstance(block, LeftOut) for block in self.blocks)


@dataclass(frozen=True)
class Document:
    """A title, an opening and sections."""

    title: str
    opening: Sequence[Block]
    """What was found, which a terminal shows too."""
    sections: Sequence[Section] = ()
    made_from: Sequence[str] = ()
    """Data and outputs that the document was made from, below the opening."""

    @property
    def charts(self) -> dict[str, Chart]:
        """All charts in order, by the file name of their picture."""
        charts = [
            *_charts_in(self.opening),
            *(chart for section in self.sections for chart in _charts_in(section.blocks)),
        ]
        return {f"{chart.name or f'chart-{number:02d}'}.png": chart for number, chart in enumerate(charts)}

    def with_charts(self, made: Callable[[Chart], Chart | LeftOut]) -> "Document":
        """The document with something in place of each chart."""
        sections = [replace(section, blocks=_with_charts(section.blocks, made)) for section in self.sections]
        return replace(self, opening=_with_charts(self.opening, made), sections=sections)


def _with_charts(blocks: Sequence[Block], made: Callable[[Chart], Chart | LeftOut]) -> list[Block]:
    replaced: list[Block] = []
    for block in blocks:
        match block:
            case Chart():
                replaced.append(made(block))
            case Charts(every):
                new = [made(chart) for chart in every]
                drawn = [chart for chart in new if isinstance(chart, Chart)]
                replaced += [Charts(drawn)] if drawn else []
                replaced += [each for each in new if isinstance(each, LeftOut)]
            case _:
                replaced.append(block)
    return replaced


def _charts_in(blocks: Sequence[Block]) -> Iterator[Chart]:
    for block in blocks:
        match block:
            case Chart():
                yield block
            case Charts(charts):
                yield from charts
