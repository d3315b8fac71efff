"""Every chart follows the schema of Vega-Lite, is drawn, and says what its rows say, whatever texts they have."""

from pathlib import Path

import altair
import pytest
from chart_kinds import every_kind
from headless import opened

from ltrscale.reports import charts
from ltrscale.reports.document import Chart, Document, Section
from ltrscale.reports.drawing import draw
from ltrscale.reports.render import html

BAD = "</script><!--`|'\"\\ datum.x] }"


@pytest.mark.slow
def test_each_follows_the_schema_and_is_drawn() -> None:
    specs = every_kind(BAD)
    for spec in specs.values():
        altair.Chart.from_dict({**spec, "config": charts.theme(dark=True)})
    found = draw([*specs.values()])
    for picture in found:
        assert isinstance(picture, bytes), picture
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 2000
    assert found == draw([*specs.values()])


def crowded() -> dict[str, charts.Spec]:
    """Charts with more names and numbers on an axis than a telephone has room for."""
    weeks = [{"x": f"2026-W{i:02d}", "y": i, "series": "a"} for i in range(1, 53)]
    numbers = [{"x": x, "y": x, "series": "a"} for x in (10, 12, 15, 20, 30, 1000)]
    axes = [{"line": 0, "axis": f"finetune.key_{i}", "place": 0.5, "shown": "x", "value": 1.0} for i in range(10)]
    return {
        "weeks": charts.lines(weeks, x="period", y="PSI", ordinal=True),
        "numbers": charts.lines(numbers, x="groups", y="y", log=True, ticks=[row["x"] for row in numbers]),
        "search": charts.parallel(axes, [], title="value"),
        "counts": charts.histogram([10**9, 5], [-1e-7, 0.0, 1e-7], title="x", below=None, at_least=None),
    }


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 360])
def test_labels_of_an_axis_do_not_lie_over_each_other(width: int, tmp_path: Path) -> None:
    blocks = [Chart(spec, name) for name, spec in crowded().items()]
    page = tmp_path / "page.html"
    page.write_text(html(Document("Charts", [], [Section("all", blocks)])))
    found = opened(page, tmp_path, width=width, dark=False)
    assert found.problems == []
    assert found.overlaps == []
    assert all(w > 50 for w, _ in found.charts)


@pytest.mark.slow
def test_the_browser_sees_labels_over_each_other(tmp_path: Path) -> None:
    spec = crowded()["weeks"]
    spec["layer"][0]["encoding"]["x"]["axis"] = {"labelOverlap": False}
    page = tmp_path / "page.html"
    page.write_text(html(Document("Charts", [], [Section("all", [Chart(spec, "weeks")])])))
    assert "2026-W01 over 2026-W02" in opened(page, tmp_path, width=360, dark=False).overlaps


def test_a_series_has_one_colour_in_all_charts_of_a_page() -> None:
    both = (every_kind(BAD)["lines"], every_kind(BAD)["intervals"])
    colours = [spec["layer"][-1]["encoding"]["color"] for spec in both]
    assert [colour["scale"]["domain"] for colour in colours] == [["z", BAD]] * 2
    assert [colour["legend"]["values"] for colour in colours] == [[BAD, "z"]] * 2


def test_bins_beyond_a_threshold_are_marked() -> None:
    spec = charts.histogram([5, 2, 0, 1], [0, 1, 2, 3, 4], title="x", below=1.0, at_least=3.0)
    assert [(row["low"], row["beyond"]) for row in spec["data"]["values"]] == [(0, True), (1, False), (3, True)]
