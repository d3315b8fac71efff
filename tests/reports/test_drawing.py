"""Charts are drawn whatever names they have, and one that cannot be drawn costs a line in place of a picture."""

import subprocess
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from chart_kinds import every_kind
from kept_drawing import DRAW
from nightly import nightly

from ltrscale.reports import charts, drawing
from ltrscale.reports.document import Chart, Document, Section, Text
from ltrscale.reports.drawing import draw, drawable
from ltrscale.reports.render import REPORT, files
from ltrscale.texts import escape

CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x200B, 0x202E, 0x2028, 0xD800, 0xFEFF, 0xFFFE)]
GOOD = charts.bars([{"name": "a", "value": 0.5, "series": "s"}], title="share")
TALL = {**GOOD, "height": 10**9}
"""A chart that ends the process that draws it: no memory holds its picture."""
NO_DATA = {**GOOD, "title": np.float32(1.0)}


@pytest.fixture(autouse=True)
def no_chart_is_left_out() -> Iterator[None]:
    """Charts are left out here on purpose."""
    return


@pytest.fixture(autouse=True)
def as_the_product_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process for each call."""
    monkeypatch.setattr(drawing, "_draw", DRAW)


@cache
def sizes(name: str) -> dict[str, int]:
    """The bytes of the picture of each kind of chart with this name."""
    specs = every_kind(name)
    found = dict(zip(specs, draw([drawable(spec) for spec in specs.values()]), strict=True))
    assert [why for why in found.values() if isinstance(why, str)] == []
    return {kind: len(picture) for kind, picture in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("constructor", "__proto__"),
        *(nightly(n) for n in drawing._OWN_NAMES if n not in ("constructor", "__proto__")),
    ],
)
def test_a_name_that_javascript_knows_is_drawn_as_any_other(name: str) -> None:
    """A picture in which Vega has drawn nothing is far smaller."""
    expected = sizes("an ordinary one")
    assert {kind for kind, size in sizes(name).items() if size < 0.6 * expected[kind]} == set()


@pytest.mark.slow
def test_a_name_that_javascript_knows_is_not_drawn_as_it_is() -> None:
    """If it is one day, the space behind it can go."""
    [left_out] = draw([every_kind("constructor")["bars"]])
    assert "Operator not defined" in str(left_out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["".join(CONTROLS), *map(nightly, CONTROLS)], ids=ascii)
def test_control_characters_are_drawn(name: str) -> None:
    assert min(sizes(name).values()) > 2000
    assert len(drawable(name)) == len(name)


@pytest.mark.slow
def test_what_ends_the_drawing_costs_its_own_picture_only() -> None:
    found = draw([GOOD, TALL, NO_DATA, {"mark": "nothing"}, GOOD])
    assert [isinstance(picture, bytes) for picture in found] == [True, False, False, False, True]
    assert found[0] == found[-1]
    assert all(isinstance(why, bytes) or (0 < len(why) < 300 and "\n" not in why) for why in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit(3)", "status 3"),
        ("import time; time.sleep(60)", "more than 1 s"),
        ("import os; os.kill(os.getpid(), 9)", "status -9"),
    ],
)
def test_a_program_that_does_not_draw_leaves_all_charts_out(
    program: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_PROGRAM", program)
    monkeypatch.setattr(drawing, "_WAIT_S", 1.0 if "sleep" in program else 60.0)
    found = draw([GOOD, GOOD])
    assert len(found) == 2
    assert all(isinstance(each, str) and why in each for each in found)


def test_an_interpreter_that_is_gone_leaves_all_charts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing.sys, "executable", "/none/python")
    assert all("did not start" in str(each) for each in draw([GOOD]))


@pytest.mark.slow
def test_a_short_address_space_ends_only_the_drawing() -> None:
    """As under `ulimit -v` on shared machines: the library that draws reserves many gigabytes of addresses."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30)); "
        "from ltrscale.reports import charts, drawing; "
        "print(drawing.draw([charts.bars([dict(name='a', value=1, series='s')], title='t')]))"
    )
    done = subprocess.run([drawing.sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "drawing ended with status" in done.stdout


@pytest.mark.slow
def test_a_chart_that_cannot_be_drawn_is_a_line_of_the_report(caplog: pytest.LogCaptureFixture) -> None:
    small = [Chart(GOOD, "small", small=True), Chart(TALL, "a | tall one", "tall", small=True)]
    document = Document("t", [Chart(NO_DATA, "first"), Text("x")], [Section("s", [*small, Chart(GOOD, "last", "end")])])
    made = files(document, page="page.html")
    page, report = made.pop("page.html").decode(), made.pop(REPORT).decode()
    assert [*made] == ["chart-00.png", "end.png"]
    assert all(picture.startswith(b"\x89PNG") for picture in made.values())
    for shows in ("first", "a | tall one"):
        why = f"the chart of {shows!r} cannot be drawn"
        assert f"*Left out: {escape(why)}" in report
        assert "Left out: the chart of &#39;" + shows in page
        assert any(message.startswith(f"report: left out: {why}") for message in caplog.messages)
    assert report.count("![") == 2
    assert page.count('class="chart"') == 2
    assert len(caplog.messages) == 2
