"""The score of a query of a feature is the engines': compared, document by document, with what their references say."""

import itertools
from typing import Any

import numpy as np
import pytest
from reference import serving as reference

from ltrscale.errors import InputError
from ltrscale.serving.ltr_plugins import _above, _query_scores
from ltrscale.serving.trees import missing_goes_left

VALUES = (-2.5, -1.0, -0.3, 0.0, 0.25, 1.0, 7.0, 3e38, None)
"""Of a field; None where a document has none."""
LARGEST = np.finfo(np.float32).max


def score(body: dict[str, Any], document: dict[str, float]) -> float | None:
    fields = {name: np.array([document.get(name, np.nan)], np.float32) for name in ("a", "b")}
    found = float(_query_scores({"boost_mode": "replace", **body}, fields)[0])
    return None if np.isnan(found) else found


def agree(body: dict[str, Any], document: dict[str, float]) -> bool:
    """Both give the same score, or both refuse; returns whether they refuse."""
    document = {name: float(np.float32(value)) for name, value in document.items()}
    try:
        expected = reference.function_score(body, document)
    except ValueError:
        with pytest.raises(InputError) as error:
            score(body, document)
        assert "\n" not in str(error.value)
        return True
    assert score(body, document) == (None if expected is None else pytest.approx(expected, rel=1e-6))
    return False


@pytest.mark.parametrize("factor", [1, 0.1, -1])
def test_a_field_has_the_engines_value_or_is_refused(factor: float) -> None:
    body = {"query": {"exists": {"field": "a"}}, "field_value_factor": {"field": "a", "factor": factor}}
    refused = [agree(body, {} if value is None else {"a": value}) for value in VALUES]
    assert 0 < sum(refused) < len(refused)


def test_the_first_function_that_holds_gives_the_score_and_no_other_is_computed() -> None:
    functions = [
        {"filter": {"range": {"a": {"gt": 0, "lte": 1}}}, "field_value_factor": {"field": "a"}},
        {"filter": {"range": {"b": {"gte": -1, "lt": 1}}}, "weight": 2},
        {"filter": {"range": {"a": {"lte": 0}}}, "field_value_factor": {"field": "b"}},
    ]
    body = {"query": {"exists": {"field": "a"}}, "score_mode": "first", "functions": functions}
    refused = []
    for a, b in itertools.product(VALUES, VALUES):
        document = {name: value for name, value in (("a", a), ("b", b)) if value is not None}
        refused.append(agree(body, document))
    assert 0 < sum(refused) < len(refused)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"field_value_factor": {"field": "b"}}, "'b' has no value in some documents, and field_value_factor no `mis"),
        ({"field_value_factor": {"field": "a", "factor": -1}}, "field_value_factor of 'a' is negative, -3"),
        ({"field_value_factor": {"field": "c"}}, "no field 'c'"),
    ],
)
def test_what_an_engine_refuses_is_refused_in_one_line(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        score({"query": {"exists": {"field": "a"}}, **body}, {"a": 3.0})
    assert "\n" not in str(error.value)


def test_trees_that_take_zeros_for_missing_are_refused() -> None:
    with pytest.raises(InputError, match=r"missing_type 'Zero', which no export has; train without zero_as_missing"):
        missing_goes_left({"missing_type": "Zero"})


@pytest.mark.parametrize("mode", [{"boost_mode": "multiply"}, {"score_mode": "sum"}])
def test_a_query_that_an_engine_would_multiply_or_sum_is_refused(mode: dict[str, str]) -> None:
    body = {"query": {"exists": {"field": "a"}}, "field_value_factor": {"field": "a"}, **mode}
    with pytest.raises(InputError, match="would not replace the query's score"):
        score(body, {"a": 1.0})


@pytest.mark.parametrize(
    ("threshold", "above"),
    [(1.0, np.nextafter(np.float32(1), np.float32(2))), (0.1, np.float32(0.1)), (1e300, LARGEST)],
)
def test_a_number_of_single_precision_is_below_what_is_above_a_threshold(threshold: float, above: np.float32) -> None:
    assert _above(threshold) == above
    assert _above(float(LARGEST)) == LARGEST
