"""A document of sections, and the two forms in which it is written: HTML with live charts, Markdown with pictures.

Texts are plain wherever they come from: both forms escape them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from ltrscale.evaluation import charts
from ltrscale.evaluation.pages import bullets, is_figure, markdown
from ltrscale.markdown import escape


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
    """Behind which the list waits until it is opened; empty for a list that is open."""


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


@dataclass(frozen=True)
class Chart:
    """A chart, and in words what it shows."""

    spec: charts.Spec
    shows: str


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
    """A part of the document that answers one question."""

    name: str
    """Short, for the table of contents and for links."""
    question: str
    blocks: Sequence[Block]

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
    """A title, an opening, a summary and sections."""

    title: str
    opening: Sequence[Text | Command]
    """What was found, in words."""
    summary: Sequence[str]
    """What the document was made from."""
    sections: Sequence[Section] = field(default_factory=tuple)

    def charts(self) -> list[Chart]:
        """All charts, in order."""
        blocks = [block for section in self.sections for block in section.blocks]
        return [
            chart
            for block in blocks
            for chart in ((block,) if isinstance(block, Chart) else block.charts if isinstance(block, Charts) else ())
        ]


def html(document: Document) -> str:
    """One page with everything inside: style, charts as data, and the JavaScript that draws them."""
    environment = Environment(
        loader=PackageLoader("ltrscale.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.tests |= {
        cls.__name__.lower(): _is(cls) for cls in (Text, Command, Points, Table, Chart, Charts, LeftOut)
    }
    numbers = {id(chart): number for number, chart in enumerate(document.charts())}
    return environment.get_template("page.html.jinja").render(
        document=document,
        number=lambda chart: numbers[id(chart)],
        specifications=[chart.spec for chart in document.charts()],
        themes={"light": charts.theme(dark=False), "dark": charts.theme(dark=True)},
        javascript=_javascript(),
    )


def _is(cls: type) -> Callable[[object], bool]:
    return lambda block: isinstance(block, cls)


_GLOBALS = "window.vegaEmbed = vegaEmbed;"
"""What the script leaves behind for the page."""


@cache
def _javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, which does not end the element that it stands in."""
    import vl_convert

    text: str = vl_convert.javascript_bundle(_GLOBALS, vl_version=charts.VERSION)
    assert "</script" not in text.lower()
    assert "<!--" not in text
    return text


def picture_name(number: int) -> str:
    """The file name of the picture of a chart."""
    return f"chart-{number:02d}.png"


def pictures(document: Document) -> Mapping[str, bytes]:
    """The pictures of all charts, by file name."""
    return {picture_name(i): charts.png(chart.spec) for i, chart in enumerate(document.charts())}


def in_markdown(document: Document) -> str:
    """The document in Markdown, with the pictures beside it."""
    numbers = {id(chart): number for number, chart in enumerate(document.charts())}
    parts = [f"# {escape(document.title)}"]
    parts += [part for block in document.opening for part in _markdown(block, numbers)]
    parts += map(escape, document.summary)
    for section in document.sections:
        parts += [f"## {escape(section.name)}", f"**{escape(section.question)}**"]
        for block in section.blocks:
            parts += _markdown(block, numbers)
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block, numbers: Mapping[int, int]) -> list[str]:
    match block:
        case Text(text):
            return [escape(text)]
        case Command(line):
            return [f"```sh\n{line}\n```"]
        case Points(texts, caption):
            return [*_emphasised(caption), bullets(map(escape, texts))]
        case Table():
            return [*_emphasised(block.caption), markdown(block.header, block.rows)]
        case Chart():
            return [f"![{escape(block.shows)}]({picture_name(numbers[id(block)])})"]
        case Charts():
            return [part for chart in block.charts for part in _markdown(chart, numbers)]
        case LeftOut(why):
            return [f"*Left out: {escape(why)}*"]


def _emphasised(text: str) -> list[str]:
    return [f"*{escape(text)}*"] if text else []
