"""Every chart follows the schema of Vega-Lite, is drawn, and says what its rows say, whatever texts they have."""

import altair
import pytest
from chart_kinds import every_kind

from ltrscale.reports import charts
from ltrscale.reports.drawing import pictures

BAD = "</script><!--`|'\"\\ datum.x] }"


@pytest.mark.slow
def test_each_follows_the_schema_and_is_drawn() -> None:
    specs = every_kind(BAD)
    for spec in specs.values():
        altair.Chart.from_dict({**spec, "config": charts.theme(dark=True)})
    found = pictures([*specs.values()])
    for picture in found:
        assert isinstance(picture, bytes), picture
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 2000
    assert found == pictures([*specs.values()])


def test_a_series_has_one_colour_in_all_charts_of_a_page() -> None:
    both = (every_kind(BAD)["lines"], every_kind(BAD)["intervals"])
    colours = [spec["layer"][-1]["encoding"]["color"] for spec in both]
    assert [colour["scale"]["domain"] for colour in colours] == [["z", BAD]] * 2
    assert [colour["legend"]["values"] for colour in colours] == [[BAD, "z"]] * 2


def test_bins_beyond_a_threshold_are_marked() -> None:
    spec = charts.histogram([5, 2, 0, 1], [0, 1, 2, 3, 4], title="x", below=1.0, at_least=3.0)
    assert [(row["low"], row["beyond"]) for row in spec["data"]["values"]] == [(0, True), (1, False), (3, True)]
