"""A report as data: a title, an opening, and sections of texts, tables and charts.

All texts are plain; each output format escapes them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ltrscale.config import Strict


class Figure(Strict):
    """An estimate with its 95% interval; None where unknown."""

    mean: float | None
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval is known and does not contain 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


_TableCell = str | float | Figure | None
"""A value of a table: a text, a count, a figure, or an estimate with its interval; None where there is none."""
TableRow = dict[str, _TableCell]
"""Values by column."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Command:
    """A command line, as typed."""

    line: str


@dataclass(frozen=True)
class Points:
    """A list of short texts."""

    texts: Sequence[str]
    caption: str = ""
    folded: bool = False
    """True if the list is collapsed behind its caption."""


@dataclass(frozen=True)
class Table:
    """A table; columns of numbers are aligned right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    shades: Sequence[int] = ()
    """Index of each row's label colour, from `charts.shade`; empty for none."""
    folded: bool = False
    """True if the table is collapsed behind its caption."""

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, _TableCell]], caption: str = "", *, form: str = ".4f", folded: bool = False
    ) -> Self:
        """A table of rows by column, each value as `cell` shows it; columns are those of all rows in their order.

        Example:
            >>> found = Table.from_rows([{"method": "gbdt", "MAP": 0.5}, {"method": "mlp", "groups": 1200}])
            >>> found.header, found.rows
            (['method', 'MAP', 'groups'], [['gbdt', '0.5000', '-'], ['mlp', '-', '1,200']])
        """
        header = list(dict.fromkeys(name for row in rows for name in row))
        return cls(header, [[cell(row.get(name), form) for name in header] for row in rows], caption, folded=folded)

    @property
    def right(self) -> list[bool]:
        """Which columns are aligned right: those of figures, or of placeholders for them."""
        columns = ([row[i] for row in self.rows] for i in range(len(self.header)))
        return [all(text[:1] in "0123456789+-<" or text == "n/a" for text in column) for column in columns]


def cell(value: _TableCell, form: str = ".4f") -> str:
    """A value as text: a figure, and an estimate with its interval if it has one, in this form; a dash for None.

    Example:
        >>> cell(Figure(mean=0.5, low=0.4, high=0.6), ".2f"), cell(0.5), cell(1200), cell(None)
        ('0.50 [0.40, 0.60]', '0.5000', '1,200', '-')
    """
    match value:
        case None:
            return "-"
        case str():
            return value
        case int():
            return f"{value:,}"
        case float():
            return f"{value:{form}}"
    ends = "" if value.low is None or value.high is None else f" [{value.low:{form}}, {value.high:{form}}]"
    return cell(value.mean, form) + (ends if value.mean is not None else "")


def span(periods: Sequence[str]) -> str:
    """The first period to the last."""
    return " to ".join(dict.fromkeys([periods[0], periods[-1]]))


@dataclass(frozen=True)
class Chart:
    """A chart, and a description of it."""

    spec: dict[str, Any]
    """A Vega-Lite specification."""
    shows: str
    name: str = ""
    """Name of its picture, such as `curves`; by default its number in the document."""
    small: bool = False
    """True for one of several side by side, as far as there is room."""


@dataclass(frozen=True)
class LeftOut:
    """Something that cannot be shown: why, and how to get it."""

    why: str


Block = Text | Command | Points | Table | Chart | LeftOut


@dataclass(frozen=True)
class Section:
    """A part of the document."""

    name: str
    """Name in the table of contents and in links."""
    blocks: Sequence[Block]
    question: str = ""
    """The question that the section answers."""

    @property
    def anchor(self) -> str:
        """The identifier for links."""
        return self.name.lower().replace(" ", "-")

    @property
    def shows(self) -> bool:
        """True if it shows anything."""
        return any(not isinstance(block, LeftOut) for block in self.blocks)


@dataclass(frozen=True)
class Document:
    """A title, an opening and sections."""

    title: str
    opening: Sequence[Block]
    """The findings, which a terminal shows too."""
    sections: Sequence[Section] = ()
    made_from: Sequence[str] = ()
    """Data and outputs that the document was made from; shown below the opening."""

    @property
    def charts(self) -> dict[str, Chart]:
        """All charts in order, by the file name of their picture."""
        blocks = itertools.chain(self.opening, *(section.blocks for section in self.sections))
        charts = [block for block in blocks if isinstance(block, Chart)]
        names = [f"{chart.name or f'chart-{number:02d}'}.png" for number, chart in enumerate(charts)]
        assert len(set(names)) == len(names), f"two charts of a document have one name: {', '.join(names)}"
        return dict(zip(names, charts, strict=True))

    def with_charts(self, made: Callable[[Chart], Chart | LeftOut]) -> "Document":
        """The document with each chart replaced."""

        def replaced(blocks: Sequence[Block]) -> list[Block]:
            return [made(block) if isinstance(block, Chart) else block for block in blocks]

        sections = [replace(section, blocks=replaced(section.blocks)) for section in self.sections]
        return replace(self, opening=replaced(self.opening), sections=sections)
