"""Names, URLs and errors create no markup in reports."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ltrscale.bundle import BundleConfig
from ltrscale.bundle.saving import bundle_card
from ltrscale.data.dataset.manifest import Feature
from ltrscale.markdown import as_code, escape
from ltrscale.reports.findings import table

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


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.lists(st.text("a|`\\<>[]()! \n\x1b", max_size=8), min_size=2, max_size=2), min_size=1, max_size=3))
def test_a_table_has_its_columns_whatever_stands_in_them(rows: list[list[str]]) -> None:
    lines = table(["one", "two"], rows).split("\n")
    assert len(lines) == 2 + len(rows)
    for line in lines:
        assert line.replace("\\\\", "").replace("\\|", "").count("|") == 3


def test_plain_cells_stay_as_they_are() -> None:
    assert table(["method", "p"], [["my_method-1.0", "< 0.1 [0.1, 0.2]"], ["s3://a_b", "-"]]) == (
        "| method        |                p |\n"
        "| ------------- | ---------------: |\n"
        "| my_method-1.0 | < 0.1 [0.1, 0.2] |\n"
        "| s3://a_b      |                - |"
    )


def test_the_card_of_a_bundle_shows_texts() -> None:
    metrics = {"a|b\n\n# c": "[x](javascript:y)"}
    config = BundleConfig(kind="pretrained", features=(Feature(name="f"),), dataset_hash="`<b>", metrics=metrics)
    text = bundle_card(config, "A pretrained encoder")
    assert "| a\\|b  # c | [x\\](javascript:y) |\n" in text
    assert "hash `'<b>`\n" in text


def test_a_narrow_column_has_a_ruler_that_is_one() -> None:
    assert table(["a", "1"], [["b", "2"]]) == "| a  |  1 |\n| -- | -: |\n| b  |  2 |"
