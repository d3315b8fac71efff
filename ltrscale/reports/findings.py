"""The results of an analysis, committed with their report: `metrics.json` and a Markdown document.

A document becomes Markdown with pictures of its charts, its opening in a terminal, and one HTML page with live charts
that needs no network.

Pictures are drawn in a separate process: if it fails or crashes, only a chart is lost. The drawing library aborts when
memory or address space is short, and has done so at a control character.
"""

import base64
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Self, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.config import Strict
from ltrscale.errors import InputError
from ltrscale.markdown import escape, one_line
from ltrscale.progress import log
from ltrscale.reports import charts
from ltrscale.reports.charts import VEGA_LITE_VERSION, WIDTH, Spec, theme
from ltrscale.reports.document import Block, Chart, Command, Document, LeftOut, Points, Table, Text, is_figure

_PROGRAM = "from ltrscale.reports.findings import draw_lines; draw_lines()"
_WAIT_S = 120.0
"""Time limit for the pictures of a document; each takes about 0.1 s."""


_OWN_NAMES = (
    *("constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable"),
    *("toLocaleString", "toString", "valueOf", "__proto__"),
    *("__defineGetter__", "__defineSetter__", "__lookupGetter__", "__lookupSetter__"),
)
"""Properties of every JavaScript object (ECMA-262, 20.1.3 and B.2.2). Vega's look-ups of texts find these."""


def drawable(value: Any) -> Any:
    """A specification without what pictures or browsers cannot read.

    Control characters become visible, and numbers that are not finite become null. A text in `_OWN_NAMES` gets an
    invisible trailing space.
    """
    match value:
        case str():
            text = value if value.isprintable() else "".join(map(_visible, value))
            return f"{text} " if text in _OWN_NAMES else text
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {drawable(key): drawable(inner) for key, inner in value.items()}
        case list() | tuple():
            return [drawable(inner) for inner in value]
    return value


def _visible(character: str) -> str:
    """The symbol for a control character; `U+FFFD` for others that XML or JavaScript does not allow in text."""
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\ufffd" if 0xD800 <= code < 0xE000 or code in (0x2028, 0x2029, 0xFFFE, 0xFFFF) else character


def draw(specs: Sequence[Spec]) -> list[bytes | str]:
    """The picture of each chart as PNG on white, or a line that says why there is none."""
    drawn: list[bytes | str] = []
    while len(drawn) < len(specs):
        found, end = _draw(specs[len(drawn) :])
        drawn += found
        if len(drawn) < len(specs):
            drawn.append(end)  # for the chart at which the process ended; the next process continues after it
    return drawn


def _draw(specs: Sequence[Spec]) -> tuple[list[bytes | str], str]:
    """The pictures from one process, in order, and how it ended."""
    lines = b"".join(_asked(spec) + b"\n" for spec in specs)
    found_here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(  # own session: Ctrl-C must reach only the job, which stops between its steps
            [sys.executable, "-c", _PROGRAM],
            input=lines,
            capture_output=True,
            timeout=_WAIT_S,
            env=found_here,
            start_new_session=True,
            check=False,
        )
        output, end = done.stdout, f"drawing ended with status {done.returncode}: {_first_words(done.stderr)}"
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"drawing took more than {_WAIT_S:.0f} s"
    except OSError as error:
        output, end = b"", f"drawing did not start: {error}"
    return [_answer(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")], end


def _asked(spec: Spec) -> bytes:
    try:
        return json.dumps(spec).encode()
    except (TypeError, ValueError) as error:
        return json.dumps(f"no plain data: {error}").encode()


def _answer(line: bytes) -> bytes | str:
    answer = json.loads(line)
    return base64.b64decode(answer["png"]) if "png" in answer else str(answer["error"])


def _first_words(text: bytes) -> str:
    """The first meaningful line of a crash."""
    lines = (line.strip("# ") for line in text.decode(errors="replace").splitlines())
    return next((line[:200] for line in lines if line), "no word")


def draw_lines() -> None:
    """Draw the charts from standard input, one JSON per line, and answer with a line for each."""
    for line in sys.stdin.buffer:
        try:
            answer = {"png": base64.b64encode(_png(json.loads(line))).decode()}
        except Exception as error:  # any error costs only this chart
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _png(spec: Spec | str) -> bytes:
    import vl_convert

    if isinstance(spec, str):
        raise TypeError(spec)
    fixed = {**spec, "width": WIDTH} if spec.get("width") == "container" else spec
    config = {**theme(dark=False), "background": "white", "font": "DejaVu Sans, sans-serif"}
    picture: bytes = vl_convert.vegalite_to_png(fixed, vl_version=VEGA_LITE_VERSION, scale=1.5, config=config)
    return picture


class Findings(Strict):
    """The results of a stage, as committed."""

    called: ClassVar[str]
    """Name in messages, with its article."""
    made_by_job: ClassVar[str]
    file: ClassVar[str] = "metrics.json"

    @classmethod
    def read(cls, url: str) -> Self:
        """Read the results committed in a directory; raises `InputError` if there are none, or they do not fit."""
        manifest = storage.read_manifest(url)
        if manifest is None:
            kind = cls.called.partition(" ")[2]
            raise InputError(f"{url}: no {kind} is committed there; make it with {cls.made_by_job}")
        try:
            return cls.model_validate_json(storage.read_verified(url, cls.file, manifest))
        except ValueError as error:
            file_url = storage.join(url, cls.file)
            raise InputError(
                f"{file_url}: not {cls.called} ({error}); delete the directory and make it again with {cls.made_by_job}"
            ) from error

    def to_json(self) -> str:
        """The content of the file."""
        return self.model_dump_json(indent=1) + "\n"


def write_report(commit: storage.Commit, findings: Findings, document: Document | None = None) -> None:
    """Write to a commit: results, and the document that shows them."""
    pages = {} if document is None else files(document)
    commit.write({findings.file: findings.to_json().encode(), **pages})


def commit_report(
    out: str,
    findings: Findings,
    document: Document | None = None,
    *,
    made_by: Mapping[str, Any],
    tables: Mapping[str, pa.Table] | None = None,
) -> None:
    """Commit results, the document that shows them, and tables in Parquet by file name to a directory."""
    with storage.Commit(out) as commit:
        for name, rows in (tables or {}).items():
            with commit.file(name) as path:
                pq.write_table(rows, path)
        write_report(commit, findings, document)
        commit.finish({"made_by": made_by})


def print_report(url: str, document: Document) -> None:
    """Print a committed report's opening and its location."""
    sys.stdout.write(f"{terminal(document)}\n\n{storage.join(url, REPORT)}\n")


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
            case Table(header, rows):
                yield above + table(header, rows, plain)
            case Chart(shows=shows) if pictures is not None:
                yield f"![{plain(shows)}]({pictures[id(block)]})"
            case LeftOut(why):
                why = f"Left out: {plain(why)}"
                yield why if pictures is None else f"*{why}*"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], plain: Callable[[str], str] = escape) -> str:
    """A Markdown table with aligned columns, readable in a terminal too; numbers are right-aligned."""
    cells = [[plain(text) for text in row] for row in (header, *rows)]
    widths = [max(2, *map(len, column)) for column in zip(*cells, strict=True)]  # a ruler has a dash and a colon
    right = [all(is_figure(row[i]) for row in cells[1:]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return f"| {' | '.join(padded)} |"

    ruler = [("-" * (w - 1) + ":") if r else "-" * w for w, r in zip(widths, right, strict=True)]
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
        themes={"light": charts.theme(dark=False), "dark": charts.theme(dark=True)},
        javascript=_javascript() if all_charts else "",
    )


@cache
def _javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, safe inside a script element."""
    import vl_convert

    text: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=charts.VEGA_LITE_VERSION)
    assert "</script" not in text.lower()
    assert "<!--" not in text
    return text
