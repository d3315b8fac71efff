"""A chart of each kind, for tests of what they are and how they are drawn."""

from ltrscale.reports import charts
from ltrscale.reports.charts import Spec


def every_kind(text: str) -> dict[str, Spec]:
    """A chart of each kind, with a text wherever one may be."""
    dots = [{"name": n, "series": s, "mean": 0.5, "low": 0.4, "high": None} for n in (text, "b") for s in (text, "z")]
    curve = [{"x": x, "y": 1.0 / x, "low": 0.1, "high": 1.0, "series": s} for x in (1, 10) for s in (text, "z")]
    ends = [{"axis": text, "place": place, "shown": text} for place in (0, 1)]
    values = [{"name": text, "value": 0.5, "series": s} for s in (text, "z")]
    return {
        "intervals": charts.interval_chart(dots, title=text, at=0.5, order=["z", text], unit="%"),
        "lines": charts.lines(curve, x=text, y=text, order=["z", text]),
        "lines with marks": charts.lines(curve, x=text, y=text, log=True, ticks=[1, 10], marks=curve[:1], level=0.0),
        "lines over names": charts.lines([{**row, "x": text} for row in curve], x=text, y=text, ordinal=True),
        "bars": charts.bars(values, title=text),
        "histogram": charts.histogram([5, 0, 1], [0, 1, 2, 3], title=text, below=None, at_least=1.5),
        "scatter": charts.scatter([{"x": 0, "y": 0, "label": 0.0}], title=text, labels=[0.0, 2.0]),
        "parallel": charts.parallel([{**end, "line": 1, "value": 0.5} for end in ends], ends, title=text),
    }
