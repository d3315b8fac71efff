"""Spaces: errors, draws, and setting a dotted key."""

from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ltrscale.errors import InputError
from ltrscale.tuning.assigned import _assign, _find
from ltrscale.tuning.space import Dimension, cells, from_optuna, is_in, label, to_optuna


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"low": 2, "high": 2}, "low 2 is not below high 2"),
        ({"low": 3, "high": 2}, "swap them"),
        ({"choices": []}, "one value at least"),
        ({"choices": [1, 2, 1]}, "each only once"),
        ({"choices": [1], "low": 0, "high": 1}, "exclude each other"),
        ({"choices": [1], "log": True}, "exclude each other"),
        ({"low": 1}, "give low and high, or choices"),
        ({}, "give low and high, or choices"),
        ({"low": 0, "high": 1, "log": True}, "log needs low above 0"),
        ({"low": 1, "high": 9, "log": True, "step": 2}, "log needs low above 0 and no step"),
        ({"low": 0.5, "high": 3, "integer": True}, "integer needs whole numbers"),
        ({"low": 0, "high": 1, "step": 0.3}, "do not meet high"),
        ({"low": 0, "high": 1, "step": 0}, "greater than 0"),
        ({"low": 0, "high": float("inf")}, "finite"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Dimension.model_validate(values)


SPACE = {
    "a": Dimension(low=1, high=9, integer=True, step=2),
    "b": Dimension(low=1e-4, high=1, log=True),
    "c": Dimension(choices=({"kind": "x", "t": 0.1}, {"kind": "y"}, None, True, "true story", 3)),
    "d": Dimension(low=0, high=1, step=0.25),
}


@given(st.integers(0, 2**31 - 1))
def test_what_optuna_draws_lies_in_the_space_and_goes_there_and_back(seed: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    drawn = study.ask(fixed_distributions={key: dimension.distribution() for key, dimension in SPACE.items()}).params
    params = from_optuna(SPACE, drawn)
    assert is_in(SPACE, params)
    assert to_optuna(SPACE, params) == drawn
    assert isinstance(params["a"], int)


@pytest.mark.parametrize(
    ("key", "value"),
    [("a", 2), ("a", 11), ("a", "1"), ("a", True), ("b", 0), ("b", None), ("c", {"kind": "x"}), ("c", 1), ("d", 0.3)],
)
def test_what_cannot_be_drawn_is_not_in_the_space(key: str, value: Any) -> None:
    assert not SPACE[key].contains(value)


def test_cells_are_all_that_can_be_drawn() -> None:
    space = {"a": SPACE["a"], "d": SPACE["d"]}
    found = list(cells(space))
    assert len(found) == 25
    assert all(is_in(space, cell) for cell in found)
    assert list(cells(SPACE)) == []  # a range of real numbers cannot be counted


def test_labels_of_different_choices_differ() -> None:
    assert label({"kind": "x", "hidden": [1, 2], "y": None}) == "x, hidden [1, 2], y null"
    assert label(1) != label(1.5)


@given(st.recursive(st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3)))
def test_what_is_assigned_is_found_and_nothing_else_changes(values: Any) -> None:
    if not isinstance(values, dict):
        return
    before = {key: value for key, value in values.items() if key != "a"}
    values["a"] = {}
    _assign(values, "a.b.c", 7)
    assert _find(values, "a.b.c") == 7
    assert {key: value for key, value in values.items() if key != "a"} == before


@pytest.mark.parametrize(("key", "message"), [("a.b", "below a plain value"), ("l.5", "not an index of a list of 2")])
def test_a_key_that_leads_nowhere_is_named(key: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _assign({"a": 1, "l": [1, 2]}, key, 0)
