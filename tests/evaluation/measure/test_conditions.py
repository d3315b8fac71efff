"""Conditions against Python's own evaluation of the same text, and the errors of texts that are none."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.evaluation.measure.conditions import GroupColumns, ValueKind, check, columns_in, parse

GROUPS: dict[str, ValueKind] = {"n": "number", "m": "number", "device": "text", "outlier": "truth", "same": "number"}
DOCUMENTS: dict[str, ValueKind] = {"price": "number", "odd name (usd)": "number", "same": "number"}
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

    numbers = st.sampled_from([value(name) for name in names if name in {**DOCUMENTS, "n": 0, "m": 0}])
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
    """Texts without more parentheses than chance puts there, so that both languages must agree on precedence."""

    def joined(pairs: list[Pair], words: list[str]) -> Pair:
        return tuple(  # type: ignore[return-value]
            " ".join(part for pair in zip(side, [*words, ""], strict=False) for part in pair if part)
            for side in zip(*pairs, strict=True)
        )

    return st.recursive(
        tests,
        lambda inner: st.one_of(
            st.builds(lambda pair: (f"not {pair[0]}", f"not {pair[1]}"), inner),
            st.builds(lambda pair: (f"({pair[0]})", f"({pair[1]})"), inner),
            st.lists(inner, min_size=2, max_size=3).flatmap(
                lambda pairs: st.lists(
                    st.sampled_from(["and", "or"]), min_size=len(pairs) - 1, max_size=len(pairs) - 1
                ).map(lambda words: joined(pairs, words))
            ),
        ),
        max_leaves=6,
    )


def over(word: str, pair: Pair) -> Pair:
    return f"{word}({pair[0]})", f"{word}({pair[1]} for row in [dict(row, **d) for d in row['documents']])"


INSIDE = conditions(simple(["n", "m", *DOCUMENTS]))
WHOLE = conditions(st.one_of(simple(["n", "m"]), st.builds(over, st.sampled_from(["any", "all"]), INSIDE)))
NUMBER = st.sampled_from([None, -1.0, 0.0, 1.0, 1.5, 2.0])
DOCUMENT = st.fixed_dictionaries(dict.fromkeys(DOCUMENTS, NUMBER))
GROUP = st.fixed_dictionaries(
    {
        "n": NUMBER,
        "m": NUMBER,
        "device": st.sampled_from([None, "a", "b", "c"]),
        "outlier": st.sampled_from([None, True, False]),
        "same": NUMBER,
        "documents": st.lists(DOCUMENT, max_size=3),
    }
)
TYPES = {"number": pa.float64(), "text": pa.string(), "truth": pa.bool_()}


@given(pair=WHOLE, rows=st.lists(GROUP, min_size=1, max_size=6))
def test_conditions_are_what_python_makes_of_them(pair: Pair, rows: list[dict[str, Any]]) -> None:
    ours, python = pair
    condition = parse(ours)
    check(condition, GROUPS, DOCUMENTS)
    documents = [document for row in rows for document in row["documents"]]
    columns = GroupColumns(
        {name: pa.array([row[name] for row in rows], TYPES[kind]) for name, kind in GROUPS.items()},
        {name: pa.array([d[name] for d in documents], TYPES[kind]) for name, kind in DOCUMENTS.items()},
        np.cumsum([0, *(len(row["documents"]) for row in rows)]),
    )
    expected = [eval(python, {"compared": compared, "row": row}) for row in rows]
    assert columns.where(condition).tolist() == expected
    assert {name for name, _ in columns_in(condition)} <= {*GROUPS, *DOCUMENTS}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 1: the condition ends where a column or a constant should be"),
        ("n >", "column 4: the condition ends where a column"),
        ("n > 5 m", "column 7: 'm' stands where and, or, or the end should be"),
        ("(n > 5", r"column 7: the condition ends where '\)' should be"),
        ("n = 5", "column 3: '=' has no meaning here"),
        ("n in 5", r"column 6: '5' stands where '\[' should be"),
        ("device in [a]", "'a' is in a list, which has constants alone; put a text in quotes"),
        ("5", "column 2: a constant is no condition"),
        ("__import__('os')", r"column 11: '\(' stands where"),
        ("not " * 200 + "outlier", "more than 50 levels"),
        ("1 < 2", "1 < 2 compares two constants"),
        ("devise == 'a'", "no column 'devise'; did you mean 'device'"),
        ("price > 5", r"'price' is a column of documents; put any\(...\) or all\(...\) around its test"),
        ("any(prize > 5)", "no column 'prize'; did you mean 'price'"),
        ("any(all(price > 5))", "inside another"),
        ("n == 'a'", "== compares a number with a text"),
        ("n", "'n' is a number, which is no condition"),
        ("outlier > true", "true and false have no order"),
    ],
)
def test_texts_that_are_no_conditions_are_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(parse(text), GROUPS, DOCUMENTS)


def test_a_document_s_column_comes_before_its_group_s() -> None:
    columns = GroupColumns({"same": pa.array([1.0])}, {"same": pa.array([2.0])}, np.array([0, 1]))
    assert columns.where(parse("any(same == 2) and same == 1")).tolist() == [True]
