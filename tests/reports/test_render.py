"""A document has the same texts in Markdown, in HTML and, as far as it opens with them, in a terminal.

Names, URLs and errors in it create no markup.
"""

from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ltrscale.bundle import BundleConfig
from ltrscale.bundle.files import _card
from ltrscale.data.dataset.manifest import Feature
from ltrscale.reports import charts
from ltrscale.reports.document import Chart, Command, Document, LeftOut, Points, Section, Table, Text
from ltrscale.reports.render import REPORT, files, html, markdown, table, terminal
from ltrscale.texts import as_code, escape

HOSTILE = ["a|b", "`a`", "a\n# b", "<script>x</script>", "<img src=x>", "[x](javascript:y)", "[x][y]", "[x]: y", "\\|",
           "![x](y)", "\x1b[31m", "a\r| b", "`a` `b`", "`a|b`", "``"]  # fmt: skip


def plain(text: str) -> str:
    """A line without escaped characters and code."""
    kept, rest, in_code = "", iter(text), False
    for c in rest:
        if c == "`":
            in_code = not in_code
        elif not in_code:
            kept += "_" if c == "\\" and next(rest, "") else c
    assert not in_code
    return kept


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_makes_no_markup(text: str) -> None:
    for shown in (escape(text), as_code(text)):
        assert shown.isprintable()
        assert not any(mark in plain(shown) for mark in ("|", "<s", "<i", "</", "](", "][", "]:"))
    assert as_code(text).count("`") == 2


@settings(derandomize=True)
@given(st.lists(st.lists(st.text("a|`\\<>[]()! \n\x1b", max_size=8), min_size=2, max_size=2), min_size=1, max_size=3))
def test_a_table_has_its_columns_whatever_stands_in_them(rows: list[list[str]]) -> None:
    lines = table(Table(["one", "two"], rows)).split("\n")
    assert len(lines) == 2 + len(rows)
    for line in lines:
        assert line.replace("\\\\", "").replace("\\|", "").count("|") == 3


def test_plain_cells_stay_as_they_are() -> None:
    assert table(Table(["method", "p"], [["my_method-1.0", "< 0.1 [0.1, 0.2]"], ["s3://a_b", "-"]])) == (
        "| method        |                p |\n"
        "| ------------- | ---------------: |\n"
        "| my_method-1.0 | < 0.1 [0.1, 0.2] |\n"
        "| s3://a_b      |                - |"
    )


def test_the_card_of_a_bundle_shows_texts() -> None:
    metrics = {"a|b\n\n# c": "[x](javascript:y)"}
    config = BundleConfig(
        kind="pretrained", part={}, features=(Feature(name="f"),), dataset_hash="`<b>", metrics=metrics
    )
    text = _card(config, "A pretrained encoder")
    assert "| a\\|b  # c | [x\\](javascript:y) |\n" in text
    assert "hash `'<b>`\n" in text


def test_a_narrow_column_has_a_ruler_that_is_one() -> None:
    assert table(Table(["a", "1"], [["b", "2"]])) == "| a  |  1 |\n| -- | -: |\n| b  |  2 |"


CHART = charts.lines([{"x": 1, "y": 2.0, "series": "a"}, {"x": 2, "y": 1.0, "series": "a"}], x="x", y="y")
OPENING = (
    Text("first <b> | text"),
    Command("python -m jobs.evaluate"),
    Points(["a `point`", "another"], "points"),
    Table(["name", "value"], [["one|two", "0.5"]], "a table"),
    Chart(CHART, "a curve", "curve"),
    LeftOut("nothing is there"),
)
SECTION = Section("All of it", [Chart(CHART, "small", small=True), Chart(CHART, "other", small=True)], "What is there?")
FOUND = Document("A title", OPENING, [SECTION, Section("More", [Text("last")])], ["Made from data."])
OPENED = "first <b> | text", "python -m jobs.evaluate", "a `point`", "another", "points", "one|two", "nothing is there"
BELOW = ("A title", "a curve", "small", "All of it", "What is there?", "More", "last", "Made from data.")


@pytest.mark.slow
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
    assert table(Table(["name", "value"], [["one|two", "0.5"]])) in page
    assert "| one|two |   0.5 |" in printed


@pytest.mark.slow
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


def test_two_charts_of_one_name_are_a_defect() -> None:
    twice = Document("t", [Chart(CHART, "a curve", "curve")], [Section("s", [Chart(CHART, "another", "curve")])])
    with pytest.raises(AssertionError, match=r"have one name: curve\.png, curve\.png"):
        markdown(twice)
