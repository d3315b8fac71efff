"""Conditions against Python's own evaluation of the same text, and the errors of texts that are none."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.evaluation.measure.conditions import GroupColumns, columns_named
from ltrscale.ingest.categories import encode

NUMBERS = pa.float64()
GROUPS = {"n": NUMBERS, "class": NUMBERS, "device": pa.string(), "outlier": pa.bool_(), "same": NUMBERS}
DOCUMENTS = {"price": NUMBERS, "odd name (usd)": NUMBERS, "same": NUMBERS}
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

Pair = tuple[str, str]
"""A condition in our language, and the same in Python over a dictionary `row` of the columns."""


def compared(sign: str, one: Any, other: Any) -> bool:
    return one is not None and other is not None and OPERATORS[sign](one, other)


def simple(names: Sequence[str]) -> st.SearchStrategy[Pair]:
    """Single tests of columns of groups, and of the documents' where `names` has them."""

    def value(name: str) -> Pair:
        return (name if name.isidentifier() else f"`{name}`", f"row[{name!r}]")

    numbers = st.sampled_from([value(name) for name in names if name in {**DOCUMENTS, "n": 0, "class": 0}])
    constants = st.sampled_from(["0", "-1", "1.5", "2", "1e0"]).map(lambda text: (text, text))
    signs = st.sampled_from(list(OPERATORS))
    device = value("device")
    texts = st.sampled_from([("'a'", "'a'"), ('"b"', "'b'"), device])

    def test(sign: str, one: Pair, other: Pair) -> Pair:
        return f"{one[0]} {sign} {other[0]}", f"compared({sign!r}, {one[1]}, {other[1]})"

    return st.one_of(
        st.builds(test, signs, numbers, st.one_of(numbers, constants)),
        st.builds(test, signs, constants, numbers),
        st.builds(test, signs, st.just(device), texts),
        st.just(("outlier", "(row['outlier'] is True)")),
        st.just(("outlier == false", "compared('==', row['outlier'], False)")),
        st.builds(lambda v: (f"{v[0]} is null", f"({v[1]} is None)"), numbers),
        st.builds(lambda v: (f"{v[0]} is not null", f"({v[1]} is not None)"), numbers),
        st.builds(lambda v: (f"{v[0]} in [0, 2]", f"({v[1]} in [0, 2])"), numbers),
        st.just(("device not in ['a', 'c']", "(row['device'] not in ['a', 'c'])")),
    )


def conditions(tests: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    """Tests joined with few parentheses, so that both languages must agree on precedence."""

    def wrapped(frame: str, *pairs: Pair) -> Pair:
        ours, python = zip(*pairs, strict=True)
        return frame.format(*ours), frame.format(*python)

    frames = st.sampled_from(["not {}", "({})"]), st.sampled_from(["{} and {}", "{} or {}"])
    return st.recursive(
        tests,
        lambda inner: st.builds(wrapped, frames[0], inner) | st.builds(wrapped, frames[1], inner, inner),
        max_leaves=6,
    )


def over(word: str, pair: Pair) -> Pair:
    return f"{word}({pair[0]})", f"{word}({pair[1]} for row in [dict(row, **d) for d in row['documents']])"


INSIDE = conditions(simple(["n", "class", *DOCUMENTS]))
WHOLE = conditions(st.one_of(simple(["n", "class"]), st.builds(over, st.sampled_from(["any", "all"]), INSIDE)))
NUMBER = st.sampled_from([None, -1.0, 0.0, 1.0, 1.5, 2.0])
DOCUMENT = st.fixed_dictionaries(dict.fromkeys(DOCUMENTS, NUMBER))
GROUP = st.fixed_dictionaries(
    {
        "n": NUMBER,
        "class": NUMBER,
        "device": st.sampled_from([None, "a", "b", "c"]),
        "outlier": st.sampled_from([None, True, False]),
        "same": NUMBER,
        "documents": st.lists(DOCUMENT, max_size=3),
    }
)


@given(pair=WHOLE, rows=st.lists(GROUP, min_size=1, max_size=6))
def test_conditions_are_what_python_makes_of_them(pair: Pair, rows: list[dict[str, Any]]) -> None:
    ours, python = pair
    documents = [document for row in rows for document in row["documents"]]
    columns = GroupColumns(
        {name: pa.array([row[name] for row in rows], type_) for name, type_ in GROUPS.items()},
        {name: pa.array([d[name] for d in documents], type_) for name, type_ in DOCUMENTS.items()},
        np.cumsum([0, *(len(row["documents"]) for row in rows)]),
    )
    expected = [eval(python, {"compared": compared, "row": row}) for row in rows]
    assert columns.where(ours).tolist() == expected
    assert columns_named(ours) <= {*GROUPS, *DOCUMENTS, "any", "all"}


ONE = GroupColumns(
    {"n": pa.array([3]), "device": pa.array(["a\\n'b"]), "in": pa.array([True]), "same": pa.array([1.0])},
    {"price": pa.array([0.1], pa.float32()), "same": pa.array([2.0]), "hue": pa.array(encode(pa.array(["red"])))},
    np.array([0, 1]),
    categories=("hue",),
)


@pytest.mark.parametrize(
    "condition",
    [
        "any(same == 2) and same == 1",  # a document's column comes before its group's
        """device == "a\\n'b" and `in`""",  # texts have no escapes, and words can be columns
        "1 < n <= 3 and\n not 3 < n",
        "any(price == 0.1) and any(price == 1e-1) and all(price < 1e39)",
        "any(hue in ['blue', 'red']) and any('red' == hue) and not any(hue == 'blue')",
    ],
)
def test_conditions_hold_as_written(condition: str) -> None:
    assert ONE.where(condition).tolist() == [True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 1: invalid syntax at the end; write one such as n_documents > 50 and"),
        ("n >", "column 4: invalid syntax at the end"),
        ("n > 5 m", "column 7: invalid syntax at 'm'"),
        ("(n > 5", r"column 1: '\(' was never closed"),
        ("n = 5", "column 3: invalid syntax at '= 5'"),
        ("n > 1; n", "column 6: invalid syntax at '; n'"),
        ("n > 1 # 2", "column 7: invalid syntax at '# 2'"),
        ("n in 5", r"n in 5 is no condition; .* in a list of constants such as \['a', 'b'\]"),
        ("device in []", "is no condition"),
        ("device in [a]", "is no condition"),
        ("n is 5", "is no condition; is takes null"),
        ("5", "5 is no condition"),
        ("n + 1 > 2", "n \\+ 1 is neither a column nor a constant"),
        ("__import__('os')", r"__import__\('os'\) is no condition"),
        ("any(x for x in n)", "column 5: invalid syntax at 'x for x in n"),
        ("not " * 20_000 + "outlier", "too many levels"),
        ("1 < 2", "1 < 2 compares two constants"),
        ("devise == 'a'", "no column 'devise'; did you mean 'device'"),
        ("price > 5", r"'price' is a column of documents; put any\(...\) or all\(...\) around its test"),
        ("any(prize > 5)", "no column 'prize'; did you mean 'price'"),
        ("any(all(price > 5))", "inside another"),
        ("n == 'a'", "n == 'a' compares a number with a text"),
        ("any(hue < 'red')", "hue < 'red' compares a number with a text"),
        ("n", "n is no condition"),
    ],
)
def test_texts_that_are_no_conditions_are_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ONE.where(text)
