"""A document has the same texts in Markdown, in HTML and, as far as it opens with them, in a terminal."""

from html import unescape

from ltrscale.markdown import escape
from ltrscale.reports import charts
from ltrscale.reports.document import Chart, Charts, Command, Document, LeftOut, Points, Section, Table, Text
from ltrscale.reports.findings import REPORT, files, html, markdown, table, terminal

CHART = charts.lines([{"x": 1, "y": 2.0, "series": "a"}, {"x": 2, "y": 1.0, "series": "a"}], x="x", y="y")
OPENING = (
    Text("first <b> | text"),
    Command("python -m jobs.evaluate"),
    Points(["a `point`", "another"], "points"),
    Table(["name", "value"], [["one|two", "0.5"]], "a table"),
    Chart(CHART, "a curve", "curve"),
    LeftOut("nothing is there"),
)
SECTION = Section("All of it", [Charts([Chart(CHART, "small"), Chart(CHART, "other")])], "What is there?")
FOUND = Document("A title", OPENING, [SECTION, Section("More", [Text("last")])], ["Made from data."])
OPENED = "first <b> | text", "python -m jobs.evaluate", "a `point`", "another", "points", "one|two", "nothing is there"
BELOW = ("A title", "a curve", "small", "All of it", "What is there?", "More", "last", "Made from data.")


def test_each_form_has_every_text() -> None:
    page, printed, web = markdown(FOUND), terminal(FOUND), unescape(html(FOUND))
    for text in OPENED:
        assert escape(text) in page
        assert text in printed
        assert text in web
    for text in BELOW:
        assert text in page
        assert text not in printed
        assert text in web
    assert table(["name", "value"], [["one|two", "0.5"]]) in page
    assert "| one|two |   0.5 |" in printed


def test_pictures_lie_beside_the_page_that_names_them() -> None:
    names = ["curve.png", "chart-01.png", "chart-02.png"]
    assert list(FOUND.charts) == names
    assert list(files(FOUND)) == [*names, REPORT]
    assert all(f"]({name})" in markdown(FOUND) for name in names)
    assert all(files(FOUND)[name].startswith(b"\x89PNG") for name in names)


def test_what_waits_is_folded() -> None:
    folded = Document("t", [Points(["a"], "behind", folded=True), Points(["b"], "before")])
    web = html(folded)
    assert web.count("<details>") == 1
    assert "<summary>behind</summary>" in web
    assert "<p>before</p>" in web
