"""A document in Markdown, with pictures of its charts beside it, and its opening in a terminal."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ltrscale.markdown import escape, one_line
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Charts, Command, Document, LeftOut, Points, Table, Text, is_figure

REPORT = "report.md"


def files(document: Document) -> dict[str, bytes]:
    """The document in Markdown and the pictures that it shows, by file name."""
    pictures = {name: charts.png(chart.spec) for name, chart in document.charts.items()}
    return {**pictures, REPORT: markdown(document).encode()}


def markdown(document: Document) -> str:
    """The document in Markdown, which names the pictures beside it."""
    pictures = {id(chart): name for name, chart in document.charts.items()}
    parts = [f"# {escape(document.title)}", *_markdown(document.opening, pictures), *map(escape, document.made_from)]
    for section in document.sections:
        question = [f"**{escape(section.question)}**"] if section.question else []
        parts += [f"## {escape(section.name)}", *question, *_markdown(section.blocks, pictures)]
    return "\n\n".join(parts) + "\n"


def _markdown(blocks: Iterable[Block], pictures: Mapping[int, str]) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Points | Table) and block.caption:
            yield f"*{escape(block.caption)}*"
        match block:
            case Text(text):
                yield escape(text)
            case Command(line):
                yield f"```sh\n{line}\n```"
            case Points(texts):
                yield _list(texts, escape)
            case Table(header, rows):
                yield table(header, rows)
            case Chart(_, shows):
                yield f"![{escape(shows)}]({pictures[id(block)]})"
            case Charts(every):
                yield from _markdown(every, pictures)
            case LeftOut(why):
                yield f"*Left out: {escape(why)}*"


def terminal(document: Document) -> str:
    """What the document opens with, without charts."""
    return "\n\n".join(_plain(document.opening))


def _plain(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        caption = f"{one_line(block.caption)}:\n" if isinstance(block, Points | Table) and block.caption else ""
        match block:
            case Text(text):
                yield one_line(text)
            case Command(line):
                yield line
            case Points(texts):
                yield caption + _list(texts, one_line)
            case Table(header, rows):
                yield caption + table(header, rows, one_line)
            case LeftOut(why):
                yield f"Left out: {one_line(why)}"


def _list(texts: Iterable[str], plain: Callable[[str], str]) -> str:
    return "\n".join(f"- {plain(text)}" for text in texts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], plain: Callable[[str], str] = escape) -> str:
    """A table with aligned columns, so that it reads well in a terminal too; numbers are right-aligned.

    Example:
        >>> print(table(["method", "MAP"], [["gbdt", "0.5"]]))
        | method | MAP |
        | ------ | --: |
        | gbdt   | 0.5 |
    """
    cells = [[plain(text) for text in row] for row in (header, *rows)]
    widths = [max(2, *map(len, column)) for column in zip(*cells, strict=True)]  # a ruler has a dash and a colon
    right = [all(is_figure(row[i]) for row in cells[1:]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return f"| {' | '.join(padded)} |"

    ruler = [("-" * (w - 1) + ":") if r else "-" * w for w, r in zip(widths, right, strict=True)]
    return "\n".join([line(cells[0]), line(ruler), *map(line, cells[1:])])
