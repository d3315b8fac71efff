"""Every chart follows the schema of Vega-Lite, is drawn, and says what its rows say, whatever texts they have."""

from collections.abc import Callable

import altair
import pytest

from ltrscale.reports import charts
from ltrscale.reports.charts import Spec

BAD = "</script><!--`|'\"\\ datum.x] }"
DOTS = [{"name": n, "series": s, "mean": 0.5, "low": 0.4, "high": None} for n in (BAD, "b") for s in (BAD, "z")]
CURVE = [{"x": x, "y": 1.0 / x, "low": 0.1, "high": 1.0, "series": s} for x in (1, 10) for s in (BAD, "z")]
ENDS = [{"axis": BAD, "place": place, "shown": BAD} for place in (0, 1)]
BARS = [{"name": BAD, "value": 0.5, "series": s} for s in (BAD, "z")]
CHARTS: dict[str, Callable[[], Spec]] = {
    "intervals": lambda: charts.interval_chart(DOTS, title=BAD, at=0.5, order=["z", BAD]),
    "intervals on a logarithmic scale": lambda: charts.interval_chart(DOTS[:1], title=BAD, log=True, unit="~s"),
    "lines": lambda: charts.lines(CURVE, x=BAD, y=BAD, order=["z", BAD]),
    "lines with marks": lambda: charts.lines(CURVE, x=BAD, y=BAD, log=True, ticks=[1, 10], marks=CURVE[:1], level=0.0),
    "lines over names": lambda: charts.lines([{**row, "x": BAD} for row in CURVE], x=BAD, y=BAD, ordinal=True),
    "bars": lambda: charts.bars(BARS, title=BAD),
    "histogram": lambda: charts.histogram([5, 0, 1], [0, 1, 2, 3], title=BAD, below=None, at_least=1.5),
    "scatter": lambda: charts.scatter([{"x": 0, "y": 0, "label": 0.0}], title=BAD, labels=[0.0, 2.0]),
    "heatmap": lambda: charts.heatmap([{"one": BAD, "other": BAD, "value": 1.0}], title=BAD),
    "parallel": lambda: charts.parallel([{**end, "line": 1, "value": 0.5} for end in ENDS], ENDS, title=BAD),
    "beside": lambda: charts.chart_row(charts.bars(BARS, title=BAD), charts.titled(charts.bars(BARS, title="b"), BAD)),
    "above": lambda: charts.above(charts.bars(BARS, title=BAD), charts.bars(BARS, title="b")),
}


@pytest.mark.slow
@pytest.mark.parametrize("made", CHARTS.values(), ids=CHARTS)
def test_follows_the_schema_and_is_drawn(made: Callable[[], Spec]) -> None:
    spec = made()
    altair.Chart.from_dict({**spec, "config": charts.theme(dark=True)})
    picture = charts.png(spec)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 2000
    assert picture == charts.png(made())


def test_a_series_has_one_colour_in_all_charts_of_a_page() -> None:
    both = (CHARTS["lines"](), CHARTS["intervals"]())
    colours = [spec["layer"][-1]["encoding"]["color"] for spec in both]
    assert [colour["scale"]["domain"] for colour in colours] == [["z", BAD]] * 2
    assert [colour["legend"]["values"] for colour in colours] == [[BAD, "z"]] * 2


def test_bins_beyond_a_threshold_are_marked() -> None:
    spec = charts.histogram([5, 2, 0, 1], [0, 1, 2, 3, 4], title="x", below=1.0, at_least=3.0)
    assert [(row["low"], row["beyond"]) for row in spec["data"]["values"]] == [(0, True), (1, False), (3, True)]
