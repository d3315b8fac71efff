"""What scikit-learn users expect of a ranker: errors that are theirs too, and arguments with nested keys."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from pydantic import Field
from sklearn.exceptions import NotFittedError

from ltrscale.config import Config, by_kind, check_keys, overlay, validate
from ltrscale.errors import InputError, suggestion
from ltrscale.experiments.methods.base import ReadingMethod
from ltrscale.experiments.methods.single import GBDTMethod, NeuralMethod, SemiMethod
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.ranking.choices import MetricName
from ltrscale.runtime.workers import Workers
from ltrscale.trees.configs import GBDTConfig

P = ParamSpec("P")
T = TypeVar("T")
_NESTED = ("settings", "prepare")
"""Arguments with nested keys."""


class WrongInput(InputError, ValueError):  # noqa: N818 - named as InputError is
    """An invalid input of a ranker, where scikit-learn users expect a ValueError."""


class NotFitted(InputError, NotFittedError):  # type: ignore[misc]  # noqa: N818 - named as its parent is
    """The ranker has no model yet."""


def as_value_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Let a method's `InputError`s be ValueErrors too.

    Subclasses of `InputError` stay as they are, and so does an outage: unreachable storage is not a wrong value.
    """

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except InputError as error:
            if type(error) is not InputError:
                raise
            # keeps the traceback and cause, without a second error of the same text
            raise WrongInput(str(error)).with_traceback(error.__traceback__) from error.__cause__

    return checked


AUTO = "auto"
"""The method that chooses among all others."""


class Arguments(Config):
    """The checked arguments of a ranker; `Ranker` documents them."""

    method: str
    settings: dict[str, Any] | None
    prepare: dict[str, Any] | None
    metric: MetricName
    validation_fraction: float = Field(gt=0, lt=1)
    seed: int = Field(ge=0)
    workers: Workers
    directory: str | None
    minutes: float = Field(gt=0)

    def as_method(self) -> ReadingMethod:
        """The method's config in a pipeline."""
        config, method_settings = _config_of(self.method)
        settings, where = overlay(method_settings, self.settings or {}), f"Ranker({self.method!r}).settings"
        method = validate(config, settings, where)
        if overlay(settings, method_settings) != settings:
            raise InputError(f"{where}: their kind is that of another method; give it as method")
        return method


def _config_of(method: str) -> tuple[type[ReadingMethod], dict[str, Any]]:
    """The config class of a method in a pipeline, and the settings that its name implies."""
    trees, pretexts = by_kind(GBDTConfig), by_kind(FeatureMethodConfig)
    if method in trees:
        return GBDTMethod, {"gbdt": {"kind": method}}
    if method in pretexts:
        return NeuralMethod, {"pretrain": {"method": {"kind": method}}}
    if method == "neural":
        return NeuralMethod, {}
    if method == "semi_gbdt":
        return SemiMethod, {}
    if method == AUTO:
        raise InputError(f"Ranker({AUTO!r}) chooses its methods and settings, and pretrains by itself: leave these out")
    hint = suggestion(method, [*trees, "neural", "semi_gbdt", AUTO, *pretexts], "the methods are")
    raise InputError(f"Ranker.method: {method!r} is unknown; {hint}")


def inner_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """The nested values of the arguments, by their scikit-learn names.

    Example:
        >>> inner_values({"settings": {"gbdt": {"num_trees": 50, "seed": 1}}, "prepare": None, "seed": 0})
        {'settings__gbdt__num_trees': 50, 'settings__gbdt__seed': 1}
    """
    return dict(pair for name in _NESTED for pair in _inner(name, params[name]) if pair[0] != name)


def _inner(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _inner(f"{name}__{key}", inner)
    else:
        yield name, value


def new_values(arguments: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """A ranker's arguments after a change; only keys are checked, because other values may still change.

    `params` are named as arguments are, or `settings__gbdt__num_trees` and the like.
    """
    new = {name: value for name, value in params.items() if name in arguments}
    nested = set()
    for name, value in params.items():
        head, *path = name.split("__")
        if name in arguments:
            continue
        if head not in _NESTED or not path or not all(path):
            raise InputError(f"Ranker has no argument {name!r}; {suggestion(head, arguments, 'its arguments are')}")
        new[head] = _changed(new.get(head, arguments[head]), path, value)
        nested.add(head)
    if "settings" in nested:
        method = str(new.get("method", arguments["method"]))
        config, method_settings = _config_of(method)
        check_keys(config, overlay(method_settings, new["settings"]), f"Ranker({method!r}).settings")
    if "prepare" in nested:
        check_keys(PrepareConfig, new["prepare"], "prepare")
    return new


def _changed(settings: Any, path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of settings with another value at a path; rankers may share the original."""
    values = settings if isinstance(settings, Mapping) else {}
    key, *inner_path = path
    return {**values, key: _changed(values.get(key), inner_path, value) if inner_path else value}
