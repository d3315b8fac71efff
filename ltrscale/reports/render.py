"""A document as Markdown with pictures of its charts, its opening for a terminal, and one HTML page.

The page has live charts and needs no network.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import get_args

from ltrscale.progress import log
from ltrscale.reports.charts import VEGA_LITE_VERSION, theme
from ltrscale.reports.document import Block, Chart, Command, Document, LeftOut, Points, Table, Text
from ltrscale.reports.drawing import draw, drawable
from ltrscale.texts import escape, one_line

REPORT = "report.md"


def files(document: Document, *, page: str | None = None) -> dict[str, bytes]:
    """The document in Markdown with its pictures, by file name; and its HTML page under the name `page`, if given.

    A chart that cannot be drawn is left out of both, with a line there and in the log.
    """
    shown, pictures = _drawn(document)
    pages = {REPORT: markdown(shown).encode()} | ({} if page is None else {page: html(shown).encode()})
    return {name: pictures[id(chart)] for name, chart in shown.charts.items()} | pages


def _drawn(document: Document) -> tuple[Document, dict[int, bytes]]:
    """The document without charts that cannot be drawn, and the pictures by the charts' `id`."""
    blocks: dict[int, Chart | LeftOut] = {}
    drawn: dict[int, bytes] = {}
    every = [(chart, replace(chart, spec=drawable(chart.spec))) for chart in document.charts.values()]
    for (chart, plain), picture in zip(every, draw([plain.spec for _, plain in every]), strict=True):
        blocks[id(chart)] = plain
        if isinstance(picture, bytes):
            drawn[id(plain)] = picture
        else:
            why = f"the chart of {plain.shows!r} cannot be drawn ({picture})"
            blocks[id(chart)] = LeftOut(why)
            log.warning("report: left out: %s", why)
    return document.with_charts(lambda chart: blocks[id(chart)]), drawn


def markdown(document: Document) -> str:
    """The document in Markdown, with links to the picture files."""
    pictures = {id(chart): name for name, chart in document.charts.items()}
    parts = [
        f"# {escape(document.title)}",
        *_texts(document.opening, escape, pictures),
        *map(escape, document.made_from),
    ]
    for section in document.sections:
        question = [f"**{escape(section.question)}**"] if section.question else []
        parts += [f"## {escape(section.name)}", *question, *_texts(section.blocks, escape, pictures)]
    return "\n\n".join(parts) + "\n"


def terminal(document: Document) -> str:
    """The opening of the document, without charts."""
    return "\n\n".join(_texts(document.opening, one_line))


def _texts(
    blocks: Iterable[Block], plain: Callable[[str], str], pictures: Mapping[int, str] | None = None
) -> Iterator[str]:
    """The blocks as Markdown with links to pictures; for a terminal, without pictures, as plain text."""
    for block in blocks:
        caption = plain(block.caption) if isinstance(block, Points | Table) and block.caption else ""
        above = (f"{caption}:\n" if pictures is None else f"*{caption}*\n\n") if caption else ""
        match block:
            case Text(text):
                yield plain(text)
            case Command(line):
                yield line if pictures is None else f"```sh\n{line}\n```"
            case Points(texts):
                yield above + "\n".join(f"- {plain(text)}" for text in texts)
            case Table():
                yield above + table(block, plain)
            case Chart(shows=shows) if pictures is not None:
                yield f"![{plain(shows)}]({pictures[id(block)]})"
            case LeftOut(why):
                why = f"Left out: {plain(why)}"
                yield why if pictures is None else f"*{why}*"


def table(shown: Table, plain: Callable[[str], str] = escape) -> str:
    """A Markdown table with aligned columns, readable in a terminal too; numbers are right-aligned."""
    cells = [[plain(text) for text in row] for row in (shown.header, *shown.rows)]
    widths = [max(2, *map(len, column)) for column in zip(*cells, strict=True)]  # a ruler has a dash and a colon

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, shown.right, strict=True))
        return f"| {' | '.join(padded)} |"

    ruler = [("-" * (w - 1) + ":") if r else "-" * w for w, r in zip(widths, shown.right, strict=True)]
    return "\n".join([line(cells[0]), line(ruler), *map(line, cells[1:])])


def html(document: Document) -> str:
    """One page with everything inside: style, charts as data, and the JavaScript that draws them."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only pages need it

    environment = Environment(
        loader=PackageLoader("ltrscale.reports", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.tests |= {
        cls.__name__.lower(): lambda block, cls=cls: isinstance(block, cls) for cls in get_args(Block)
    }
    all_charts = document.charts.values()
    numbers = {id(chart): number for number, chart in enumerate(all_charts)}
    return environment.get_template("page.html.jinja").render(
        document=document,
        number=lambda chart: numbers[id(chart)],
        specifications=[chart.spec for chart in all_charts],
        themes={"light": theme(dark=False), "dark": theme(dark=True)},
        javascript=_javascript() if all_charts else "",
    )


@cache
def _javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, safe inside a script element."""
    import vl_convert

    text: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE_VERSION)
    assert "</script" not in text.lower()
    assert "<!--" not in text
    return text
