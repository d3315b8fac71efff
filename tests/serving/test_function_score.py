"""The score of `function_score` is the engines': compared, document by document, with what their references say."""

import itertools
import typing
from typing import Any

import numpy as np
import pytest
from reference import serving as reference

from ltrscale.config import validate
from ltrscale.errors import InputError
from ltrscale.serving.function_score import FunctionScore, Modifier

MODES = ("multiply", "sum", "avg", "first", "max", "min")
BOOSTS = ("multiply", "replace", "sum", "avg", "max", "min")
VALUES = (-2.5, -1.0, -0.3, 0.0, 0.25, 1.0, 7.0, 3e38, None)
"""Of a field; None where a document has none."""


def score(body: dict[str, Any], document: dict[str, float]) -> float | None:
    fields = {name: np.array([document.get(name, np.nan)], np.float32) for name in ("a", "b")}
    found = float(validate(FunctionScore, body, "query").of(fields, 1)[0])
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


@pytest.mark.parametrize("modifier", typing.get_args(Modifier))
def test_every_modifier_has_the_engines_value_or_is_refused(modifier: str) -> None:
    refused = []
    for value, factor, missing in itertools.product(VALUES, (1, 0.1, -1), (None, 2, -1)):
        factors = {"field": "a", "modifier": modifier, "factor": factor} | (
            {} if missing is None else {"missing": missing}
        )
        body = {"field_value_factor": factors, "boost_mode": "replace"}
        refused.append(agree(body, {} if value is None else {"a": value}))
    assert 0 < sum(refused) < len(refused)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("boost", BOOSTS)
def test_functions_are_combined_as_the_modes_say(mode: str, boost: str) -> None:
    functions = [
        {"filter": {"range": {"a": {"gt": 0}}}, "field_value_factor": {"field": "a"}, "weight": 3},
        {"filter": {"exists": {"field": "b"}}, "field_value_factor": {"field": "b", "modifier": "ln2p"}, "weight": 0.1},
        {"filter": {"range": {"b": {"gte": -1, "lt": 1}}}, "weight": 2},
    ]
    query = {"query": {"exists": {"field": "a"}}, "score_mode": mode, "boost_mode": boost, "max_boost": 5}
    refused = []
    for a, b in itertools.product(VALUES, VALUES):
        document = {name: value for name, value in (("a", a), ("b", b)) if value is not None}
        refused.append(agree({**query, "functions": functions}, document))
    assert 0 < sum(refused) < len(refused)


def test_a_function_that_is_not_reached_is_not_computed() -> None:
    first = {"filter": {"range": {"a": {"lte": 0}}}, "weight": 0}
    body = {
        "functions": [first, {"field_value_factor": {"field": "a"}}],
        "score_mode": "first",
        "boost_mode": "replace",
    }
    assert (score(body, {"a": -3.0}), score(body, {"a": 3.0})) == (0, 3)
    with pytest.raises(InputError, match="field_value_factor of 'a' is negative, -3"):
        score({**body, "functions": body["functions"][::-1]}, {"a": -3.0})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            {"field_value_factor": {"field": "a"}},
            "'a' has no value in some documents, and field_value_factor no `missing`",
        ),
        ({"field_value_factor": {"field": "c"}}, "no field 'c'"),
        ({"field_value_factor": {"field": "a", "missing": -4, "modifier": "ln1p"}}, "of a is negative or not a number"),
        ({"functions": [{"weight": -1}]}, "weight"),
        ({"script_score": {}}, "unknown key"),
        ({"functions": [{"weight": 1}], "field_value_factor": {"field": "a"}}, "either functions or one"),
        (
            {"query": {"match_all": {}, "exists": {"field": "a"}}, "functions": [{"weight": 1}]},
            "a query is of one kind",
        ),
    ],
)
def test_what_an_engine_refuses_is_refused_in_one_line(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        score(body, {})
    assert "\n" not in str(error.value)
