"""Spaces: errors, draws, and setting a dotted key."""

from datetime import date
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ltrscale.errors import InputError
from ltrscale.tuning.searched import _set_at, _value_at
from ltrscale.tuning.space import Dimension, cells, from_optuna, is_in, label, to_optuna


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"low": 2, "high": 2}, "low 2 is not below high 2"),
        ({"low": 3, "high": 2}, "swap them"),
        ({"choices": []}, "one value at least"),
        ({"choices": [1, 2, 1]}, "each only once"),
        ({"choices": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]}, "each only once"),
        ({"choices": [float("nan")]}, "not JSON compliant"),
        ({"choices": [{date(2026, 1, 5): 1}]}, "keys must be str"),
        ({"choices": [1], "low": 0, "high": 1}, "exclude each other"),
        ({"choices": [1], "log": True}, "exclude each other"),
        ({"low": 1}, "give low and high, or choices"),
        ({}, "give low and high, or choices"),
        ({"low": 0, "high": 1, "log": True}, "log needs low above 0"),
        ({"low": 1, "high": 9, "log": True, "step": 2}, "log needs low above 0 and no step"),
        ({"low": 0.5, "high": 3, "integer": True}, "integer needs whole numbers"),
        ({"low": 0, "high": 1, "step": 0.3}, "do not meet high"),
        ({"low": 0, "high": 1, "step": 0.3333333333333333}, "do not meet high"),
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
    "same labels": Dimension(choices=(1, "1", '"1"', True, "true", {"kind": "x"}, "x")),
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
    space = {"a": SPACE["a"], "d": SPACE["d"], "e": Dimension(low=0, high=0.3, step=0.1)}
    found = list(cells(space, 1000))
    assert len(found) == 100
    assert all(is_in(space, cell) for cell in found), "0 + 3 * 0.1 is above 0.3"
    assert list(cells(SPACE, 1000)) == []  # a range of real numbers cannot be counted


def test_the_first_cells_of_a_huge_space_need_no_list_of_its_values() -> None:
    huge = {"a": Dimension(low=0, high=1e12, integer=True), "b": Dimension(low=1, high=1e12, integer=True)}
    assert list(cells(huge, 3)) == [{"a": 0, "b": 1}, {"a": 0, "b": 2}, {"a": 0, "b": 3}]


def test_a_choice_is_named_by_its_label_or_by_its_json_where_another_has_that_label() -> None:
    assert label({"kind": "x", "hidden": [1, 2], "y": None}) == "x, hidden [1, 2], y null"
    for choices, names in (
        ((1, 1.5, "b", {"kind": "x", "b": 1, "a": 2}), ["1", "1.5", "b", "x, b 1, a 2"]),
        ((1, "1", {"b": 1, "a": 2}), ["1", '"1"', '{"a": 2, "b": 1}']),
    ):
        dimension = Dimension(choices=choices)
        assert [dimension.name(choice) for choice in choices] == names
        assert dimension.distribution().choices == tuple(names)  # type: ignore[attr-defined]


def test_a_mapping_is_the_same_choice_in_any_order_of_its_keys() -> None:
    space, params = {"c": Dimension(choices=({"b": 1, "a": 2}, "x"))}, {"c": {"a": 2, "b": 1}}
    assert is_in(space, params)
    assert to_optuna(space, params) == {"c": "b 1, a 2"}


def test_values_of_yaml_are_those_of_json_that_a_history_keeps() -> None:
    values = {"choices": [date(2026, 1, 5), {1: (2, 3)}], "when": {"splits.train.periods": date(2026, 1, 5)}}
    dimension = Dimension.model_validate(values)
    assert dimension.choices == ("2026-01-05", {"1": [2, 3]})
    assert dimension.when == {"splits.train.periods": "2026-01-05"}


@given(st.recursive(st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3)))
def test_what_is_set_ated_is_found_and_nothing_else_changes(values: Any) -> None:
    if not isinstance(values, dict):
        return
    before = {key: value for key, value in values.items() if key != "a"}
    values["a"] = {}
    _set_at(values, "a.b.c", 7)
    assert _value_at(values, "a.b.c") == 7
    assert {key: value for key, value in values.items() if key != "a"} == before


@pytest.mark.parametrize(("key", "message"), [("a.b", "below a plain value"), ("l.5", "not an index of a list of 2")])
def test_a_key_that_leads_nowhere_is_named(key: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _set_at({"a": 1, "l": [1, 2]}, key, 0)
