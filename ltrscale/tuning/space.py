"""The search space, a range of numbers or a list of choices for each key of a job's config; settings of the search."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, Self

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import AfterValidator, Field, model_validator

from ltrscale.config import Config, Operational
from ltrscale.origin import as_text

VALUE, STEP = "value", "step"
"""Names of the metric and the step in a trial's reports."""

Params = dict[str, Any]
"""A value for every key of a space."""

ReportValue = Callable[[int, float], None]
"""Reports a step, as ASHA counts steps, and the metric there to the search; greater is better."""


def _as_json(value: Any) -> Any:
    """The value as histories keep it: a date of YAML is a text, and so are the keys of mappings."""
    try:
        return json.loads(json.dumps(value, default=str, allow_nan=False))
    except TypeError as error:  # of a key such as a date
        raise ValueError(str(error)) from error


_Plain = Annotated[Any, AfterValidator(_as_json)]


class Dimension(Config):
    """The values that one key may take: a range from `low` to `high`, both included, or `choices`."""

    low: float | None = None
    """Least value."""
    high: float | None = None
    """Greatest value."""
    log: bool = False
    """Draw evenly on a logarithmic scale."""
    integer: bool = False
    """Whole numbers only."""
    step: float | None = Field(None, gt=0)
    """Only `low`, `low + step`, `low + 2 step`, ..."""
    choices: tuple[_Plain, ...] | None = None
    """Instead of a range: values of any kind, such as a method with its settings."""
    when: dict[str, _Plain] = Field(default_factory=dict)
    """Use the key only where the config has these values, such as {pretrain.method.kind: simclr_rank}."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log or self.integer or self.step is not None:
                raise ValueError("choices and a range exclude each other; leave one of them out")
            if len(self._names()) < max(1, len(self.choices)):
                raise ValueError("choices needs one value at least, and each only once")
            return self
        if self.low is None or self.high is None:
            raise ValueError("give low and high, or choices")
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}; swap them, or leave the key out")
        # on a logarithmic scale Optuna allows only step 1 between integers
        if self.log and (self.low <= 0 or self.step not in (None, 1 if self.integer else None)):
            raise ValueError("log needs low above 0 and no step")
        if self.integer and any(x is not None and x != int(x) for x in (self.low, self.high, self.step)):
            raise ValueError("integer needs whole numbers for low, high and step")
        # as decimals, because Optuna takes less than high where their steps do not meet it
        if self.step is not None and (Decimal(str(self.high)) - Decimal(str(self.low))) % Decimal(str(self.step)):
            raise ValueError(f"steps of {self.step:g} from low {self.low:g} do not meet high {self.high:g}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Low and high of a range."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    def probes(self) -> list[Any]:
        """Values that test whether the key accepts the whole range: every choice, or both ends and a point between."""
        if self.choices is not None:
            return list(self.choices)
        low, high = self.bounds
        if self.integer:
            return [int(low), int(high)]
        between = low + (self.step or (high - low) / math.e)  # of a continuous range never a whole number
        return [low, high, between]

    def values(self) -> Iterable[Any] | None:
        """All values, as Optuna draws them; None if the range is continuous."""
        if self.choices is not None:
            return self.choices
        low, high = self.bounds
        step = self.step or (1 if self.integer else None)
        if step is None:
            return None
        number = int if self.integer else float
        return (number(min(low + i * step, high)) for i in range(round((high - low) / step) + 1))

    def contains(self, value: Any) -> bool:
        """Whether the search can draw this value."""
        if self.choices is not None:
            return as_text(value) in self._names()
        low, high = self.bounds
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            return False
        step = self.step or (1 if self.integer else None)
        return step is None or abs((value - low) / step - round((value - low) / step)) < 1e-9

    def _names(self) -> dict[str, str]:
        """The name of each choice, by its JSON: its label, or that JSON if two have the same label."""
        texts, labels = ([*map(text_of, self.choices or ())] for text_of in (as_text, label))
        return dict(zip(texts, labels if len({*labels}) == len(labels) else texts, strict=True))

    def name(self, value: Any) -> str:
        """A value as text for people; choices have different names."""
        return self._names().get(as_text(value), label(value))

    def distribution(self) -> BaseDistribution:
        """The dimension for Optuna; choices become their names, because Optuna takes only plain values."""
        if self.choices is not None:
            return CategoricalDistribution([*self._names().values()])
        low, high = self.bounds
        if self.integer:
            return IntDistribution(int(low), int(high), log=self.log, step=int(self.step or 1))
        return FloatDistribution(low, high, log=self.log, step=self.step)


class SamplerConfig(Config):
    """How the next trial's parameters are chosen."""

    kind: Literal["tpe", "gp", "random"] = "tpe"
    """Tree-structured Parzen estimator; Gaussian process with expected improvement; random draws."""
    seed: int = 0
    """Seed of the draws."""
    startup: int = Field(10, ge=1)
    """Trials with random parameters before the sampler proposes any."""


class AshaConfig(Config):
    """Asynchronous successive halving: trials that lag behind at step grace, grace * reduction, ... are stopped."""

    grace: int = Field(20, ge=1)
    """Steps (trees, or epochs) that every trial completes."""
    reduction: float = Field(3, gt=1)
    """One in this many trials continues after each of these steps."""


class SearchConfig(Config):
    """The trials of a search, and their resources."""

    fixed: ClassVar = {"max_failures": 1}

    space: dict[str, Dimension] = Field(min_length=1)
    """Dotted keys below `job`, each with the values that it may take: {low, high, log, integer, step} or {choices}."""
    trials: Operational[int] = Field(30, ge=1)
    """Total number of trials; the first is the job as given."""
    minutes: Operational[float | None] = Field(None, gt=0)
    """Also end after this much time of trials, side by side if `concurrent`; a trial that runs then is stopped.
    Interrupted attempts count. More minutes continue the search. Empty for no limit."""
    concurrent: Operational[int] = Field(1, ge=1)
    """Trials that run at a time."""
    search: Operational[SamplerConfig] = SamplerConfig()
    """What proposes the next trial; another one continues the search from the trials that have ended."""
    asha: Operational[AshaConfig | None] = None
    """Stops trials that lag behind; empty lets every trial finish."""
    cpus: Operational[float] = Field(1, gt=0)
    """Logical CPUs of a trial, which has as many threads."""
    gpus: Operational[float] = Field(0, ge=0)
    """GPUs of a trial; a fraction shares one GPU among several trials."""


Space = dict[str, Dimension]


def label(value: Any) -> str:
    """A value as short text for people.

    Example:
        >>> label({"kind": "simclr_rank", "temperature": 0.1}), label("adam"), label(True)
        ('simclr_rank, temperature 0.1', 'adam', 'true')
    """
    if isinstance(value, Mapping):
        parts = [f"{key} {label(inner)}" for key, inner in value.items() if key != "kind"]
        return ", ".join([*([label(value["kind"])] if "kind" in value else []), *parts])
    return value if isinstance(value, str) else json.dumps(value)


def to_optuna(space: Space, params: Params) -> Params:
    """Values as Optuna stores them: choices by their names."""
    return {key: params[key] if space[key].choices is None else space[key].name(params[key]) for key in space}


def as_trial(space: Space, params: Params, *, state: TrialState, value: float | None, **more: Any) -> FrozenTrial:
    """An Optuna trial with parameters of the space; `more` goes to `create_trial`."""
    distributions = {key: dimension.distribution() for key, dimension in space.items()}
    return create_trial(state=state, value=value, params=to_optuna(space, params), distributions=distributions, **more)


def from_optuna(space: Space, drawn: Mapping[str, Any]) -> Params:
    """Values for the config; the inverse of `to_optuna`."""
    params = {}
    for key, dimension in space.items():
        choices = {dimension.name(choice): choice for choice in dimension.choices or ()}
        params[key] = choices[drawn[key]] if choices else drawn[key]
    return params


def cells(space: Space, most: int) -> Iterator[Params]:
    """The first combinations of values; nothing if a dimension is continuous.

    Example:
        >>> list(cells({"a": Dimension(choices=("x", "y")), "b": Dimension(low=1, high=2, integer=True)}, 3))
        [{'a': 'x', 'b': 1}, {'a': 'x', 'b': 2}, {'a': 'y', 'b': 1}]
    """
    values = [choices for dimension in space.values() if (choices := dimension.values()) is not None]
    if len(values) == len(space):
        combinations = itertools.product(*(itertools.islice(choices, most) for choices in values))
        yield from (dict(zip(space, cell, strict=True)) for cell in itertools.islice(combinations, most))


def is_in(space: Space, params: Params) -> bool:
    """Whether the search can draw these values."""
    return params.keys() == space.keys() and all(space[key].contains(value) for key, value in params.items())
