"""A document as one page of HTML, with live charts, that opens without a network."""

from collections.abc import Callable
from functools import cache
from typing import get_args

from jinja2 import Environment, PackageLoader, StrictUndefined

from ltrscale.reports import charts
from ltrscale.reports.document import Block, Document

_GLOBALS = "window.vegaEmbed = vegaEmbed;"
"""What the script leaves behind for the page."""


def html(document: Document) -> str:
    """One page with everything inside: style, charts as data, and the JavaScript that draws them."""
    environment = Environment(
        loader=PackageLoader("ltrscale.reports", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.tests |= {cls.__name__.lower(): _is(cls) for cls in get_args(Block)}
    every = document.charts.values()
    numbers = {id(chart): number for number, chart in enumerate(every)}
    return environment.get_template("page.html.jinja").render(
        document=document,
        number=lambda chart: numbers[id(chart)],
        specifications=[chart.spec for chart in every],
        themes={"light": charts.theme(dark=False), "dark": charts.theme(dark=True)},
        javascript=_javascript(),
    )


def _is(cls: type) -> Callable[[object], bool]:
    return lambda block: isinstance(block, cls)


@cache
def _javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, which does not end the element that it stands in."""
    import vl_convert

    text: str = vl_convert.javascript_bundle(_GLOBALS, vl_version=charts.VEGA_LITE_VERSION)
    assert "</script" not in text.lower()
    assert "<!--" not in text
    return text
