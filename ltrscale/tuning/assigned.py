"""Parameters assigned to the settings of a job, and the check that every value of a space fits there."""

import copy
import itertools
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from ltrscale import config as configs
from ltrscale.errors import InputError
from ltrscale.tuning.searched import Searched
from ltrscale.tuning.space import Params, Space, label

SearchedT = TypeVar("SearchedT", bound=Searched)


class Assigned(NamedTuple, Generic[SearchedT]):
    """A job with parameters, and the keys of them that it uses; a key is unused if its `when` does not hold."""

    job: SearchedT
    used: set[str]


def with_params(job: SearchedT, space: Space, params: Params) -> Assigned[SearchedT]:
    """The job with these parameters.

    Keys with a `when` are set after those without, in the order of the space, once it holds: another may make it hold.

    Raises:
        InputError: a key is unknown, or a value does not fit.
    """
    # without defaults, which as explicit settings would override a preset
    values = job.model_dump(mode="json", exclude_unset=True)
    keys = [key for key in space if key in params and not space[key].when]
    for key in keys:
        _merge_at(values, key, params[key])
    filled = configs.validate(type(job), values, "space")
    waiting, before = [key for key in space if key in params and space[key].when], 0
    while len(waiting) != before:
        before = len(waiting)
        for key in list(waiting):
            if _has(filled, space[key].when):
                _merge_at(values, key, params[key])
                filled = configs.validate(type(job), values, "space")
                waiting.remove(key)
    return Assigned(filled, params.keys() - waiting)


def _has(job: Searched, required: Params) -> bool:
    """Whether the job has these values at these dotted keys."""
    settings = job.model_dump(mode="json")
    return all(_value_at(settings, key) == value for key, value in required.items())


def given_params(job: Searched, space: Space) -> Params | None:
    """Parameters that leave the job unchanged; None if the space does not contain its settings."""
    params: Params = {}
    settings = job.model_dump(mode="json")
    for key, dimension in space.items():
        value = _value_at(settings, key)
        in_range = dimension.choices is None and dimension.contains(value)
        candidates = [value] if in_range else dimension.probes()
        same = [candidate for candidate in candidates if _is_unchanged(job, {**params, key: candidate}, space)]
        if not same:
            return None
        params[key] = same[0]
    return params


def _is_unchanged(job: Searched, params: Params, space: Space) -> bool:
    try:
        return with_params(job, space, params).job.result() == job.result()
    except InputError:
        return False


def check_space(job: Searched, space: Space) -> None:
    """Raise an `InputError` unless the job has every key, takes its values, and trials stay comparable."""
    checked: dict[str, Params] = {}
    while left := [key for key in space if key not in checked]:
        found = {key: params for key in left if (params := _enabling(job, space, key, checked)) is not None}
        if not found:
            never = label(space[left[0]].when)
            raise InputError(f"space.{left[0]}.when: never holds ({never}); check these keys and their values")
        for key, enabling in found.items():
            _check_values(job, space, key, enabling)
        checked |= found
    _check_together(job, space)


def _enabling(job: Searched, space: Space, key: str, checked: Mapping[str, Params]) -> Params | None:
    """Values of checked keys, each with those that enable it, which make the `when` of a key hold; None without any."""
    params: Params = {}
    required: Params = {}
    for name, value in space[key].when.items():
        required[name] = value
        tries = (
            {**params, **enabling, other: choice}
            for other, enabling in checked.items()
            for choice in space[other].choices or ([value] if other == name and space[other].contains(value) else ())
        )
        enabled = next(
            (tried for tried in itertools.chain([params], tries) if _leads_to(job, space, tried, required)), None
        )
        if enabled is None:
            return None
        params = enabled
    return params


def _leads_to(job: Searched, space: Space, params: Params, required: Params) -> bool:
    try:
        return _has(with_params(job, space, params).job, required)
    except InputError:
        return False


def _check_values(job: Searched, space: Space, key: str, enabling: Params) -> None:
    """Check one key, with values of other keys that make its `when` hold."""
    for probe in space[key].probes():
        try:
            filled, used = with_params(job, space, {**enabling, key: probe})
        except InputError as error:
            if space[key].choices is None and _is_refused_as("int_from_float", error):
                raise InputError(f"space.{key}: takes whole numbers only; add integer: true") from error
            raise InputError(f"space.{key}: {label(probe)} does not fit: {error}") from error
        assert key in used
        if filled.metric != job.metric or filled.splits.validation != job.splits.validation:
            raise InputError(f"space.{key}: changes what trials are compared by; leave it out of the space")


def _check_together(job: Searched, space: Space) -> None:
    """Check that no choice removes a setting that another key needs."""
    firsts = {key: dimension.probes()[0] for key, dimension in space.items()}
    for key, dimension in space.items():
        for choice in dimension.choices or ():
            try:
                with_params(job, space, {**firsts, key: choice})
            except InputError as error:
                if _is_refused_as("extra_forbidden", error):
                    raise InputError(
                        f"space.{key}: with {label(choice)} another key of the space has no meaning; give that key a "
                        f"when ({error})"
                    ) from error


def _is_refused_as(kind: str, error: InputError) -> bool:
    """Whether the settings were refused with this type of pydantic's errors."""
    cause = error.__cause__
    return isinstance(cause, ValidationError) and any(details["type"] == kind for details in cause.errors())


def _merge_at(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a mapping is merged into an existing one."""
    existing, value = _value_at(values, key), copy.deepcopy(value)  # a copy, because later keys may change parts of it
    both_mappings = isinstance(existing, Mapping) and isinstance(value, Mapping)
    _set_at(values, key, configs.overlay({"_": existing}, {"_": value})["_"] if both_mappings else value)


def _set_at(values: Any, key: str, value: Any) -> None:
    """Set a dotted key of plain data; setting another `kind` clears the settings of the old kind.

    Raises:
        InputError: the key leads through a plain value, or beyond the end of a list.

    Example:
        >>> config = {"method": {"kind": "simclr_rank", "temperature": 0.1}, "hidden": [64, 64]}
        >>> _set_at(config, "method.kind", "simsiam")
        >>> _set_at(config, "hidden.1", 32)
        >>> config
        {'method': {'kind': 'simsiam'}, 'hidden': [64, 32]}
    """
    first, _, rest = key.partition(".")
    if isinstance(values, list):
        if not first.isdecimal() or int(first) >= len(values):
            raise InputError(f"space: {key}: {first!r} is not an index of a list of {len(values)}; count from 0")
        slot: Any = int(first)
    elif isinstance(values, dict):
        slot = first
    else:
        raise InputError(f"space: {key}: {first!r} is below a plain value; check the dots")
    if not rest:
        if slot == "kind" and _value_at(values, "kind") not in (None, value):
            values.clear()
        values[slot] = value
        return
    if isinstance(values, dict) and values.get(slot) is None:
        values[slot] = {}
    _set_at(values[slot], rest, value)


def _value_at(values: Any, key: str) -> Any:
    """The value at a dotted key of plain data; None if the key does not exist."""
    for part in key.split("."):
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values
