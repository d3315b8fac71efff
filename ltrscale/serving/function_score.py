"""Queries `function_score` of Elasticsearch and OpenSearch, and the score that these engines compute for one.

A query holds for some documents. For each of them, functions that hold for it give values, which `score_mode` combines,
and `boost_mode` combines the result with the query's own score, which is 1 for the queries here. Values are computed in
double precision, the score in single. An engine ends a search with an error if a field's value gives a negative result,
if a document lacks the field and the function names no value for that, or if the score is negative or NaN.

Source: the references of both engines ("Function score query"), and where they are silent their `FunctionScoreQuery`
and `FieldValueFactorFunction`.

Shapes: N documents, K functions.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.errors import InputError

Fields = Mapping[str, NDArray[np.float32]]
"""The values [N] of each field; NaN where a document has none."""
_Values = NDArray[np.float64]
Modifier = Literal["none", "log", "log1p", "log2p", "ln", "ln1p", "ln2p", "square", "sqrt", "reciprocal"]
_MODIFIERS: dict[str, Callable[[_Values], _Values]] = {
    "none": lambda x: x,
    "log": np.log10,
    "log1p": lambda x: np.log10(x + 1),
    "log2p": lambda x: np.log10(x + 2),
    "ln": np.log,
    "ln1p": np.log1p,
    "ln2p": lambda x: np.log1p(x + 1),
    "square": np.square,
    "sqrt": np.sqrt,
    "reciprocal": np.reciprocal,
}
_BOOSTS: dict[str, Callable[[_Values], _Values]] = {
    "replace": lambda x: x,
    "multiply": lambda x: x,  # by the query's score of 1
    "sum": lambda x: 1 + x,
    "avg": lambda x: (1 + x) / 2,
    "max": lambda x: np.maximum(1, x),
    "min": lambda x: np.minimum(1, x),
}


class OfField(Config):
    """The name of a field."""

    field: str


class RangeBounds(Config):
    """Limits of a range; those that are given hold."""

    gt: float | None = None
    gte: float | None = None
    lt: float | None = None
    lte: float | None = None

    def hold(self, values_N: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Documents within all limits; none that lacks a value."""
        tests = ((self.gt, np.greater), (self.gte, np.greater_equal), (self.lt, np.less), (self.lte, np.less_equal))
        held_N = ~np.isnan(values_N)
        for limit, test in tests:
            if limit is not None:
                held_N &= test(values_N, limit)
        return held_N


class Query(Config):
    """A query that gives each document for which it holds the score 1; without a key, all documents."""

    match_all: dict[str, Any] | None = Field(None, max_length=0)
    exists: OfField | None = None
    range: dict[str, RangeBounds] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.match_all is not None) + (self.exists is not None) + len(self.range) > 1:
            raise ValueError("a query is of one kind")
        return self

    def holds(self, fields: Fields, documents: int) -> NDArray[np.bool_]:
        """Documents for which it holds, shape [N]."""
        held_N = np.ones(documents, np.bool_)
        if self.exists is not None:
            held_N &= ~np.isnan(_field(fields, self.exists.field))
        for field, bounds in self.range.items():
            held_N &= bounds.hold(_field(fields, field))
        return held_N


class FieldValueFactor(OfField):
    """`modifier(factor * value)`, of the value of a field."""

    factor: float = 1
    """In single precision."""
    modifier: Modifier = "none"
    missing: float | None = None
    """The value of documents without one."""

    def of(self, values_N: NDArray[np.float32]) -> _Values:
        """The results.

        Raises:
            InputError: a result is negative; a document has no value, and `missing` is not given.
        """
        lacking_N = np.isnan(values_N)
        if self.missing is None and lacking_N.any():
            raise InputError(f"{self.field!r} has no value in some documents, and field_value_factor no `missing`")
        found_N = np.where(lacking_N, self.missing or 0.0, values_N.astype(np.float64))
        with np.errstate(all="ignore"):  # an invalid result is an error of the whole query
            results_N = _MODIFIERS[self.modifier](found_N * np.float64(np.float32(self.factor)))
        if (results_N < 0).any():
            raise InputError(f"field_value_factor of {self.field!r} is negative, {results_N[results_N < 0].min():.3g}")
        return results_N


class Function(Config):
    """A value for the documents for which the filter holds: a field's, times the weight, or the weight alone."""

    filter: Query = Query()
    field_value_factor: FieldValueFactor | None = None
    weight: float = Field(1, ge=0)

    def of(self, fields: Fields, rows_n: NDArray[np.int64]) -> _Values:
        """Values of some documents. Raises what `FieldValueFactor.of` does."""
        weight = np.float64(np.float32(self.weight))
        if self.field_value_factor is None:
            return np.full(len(rows_n), weight)
        return weight * self.field_value_factor.of(_field(fields, self.field_value_factor.field)[rows_n])


class FunctionScore(Config):
    """The body of a `function_score`."""

    query: Query = Query()
    field_value_factor: FieldValueFactor | None = None
    """The only function, instead of `functions`."""
    functions: tuple[Function, ...] = ()
    score_mode: Literal["multiply", "sum", "avg", "first", "max", "min"] = "multiply"
    boost_mode: Literal["multiply", "replace", "sum", "avg", "max", "min"] = "multiply"
    max_boost: float = float(np.finfo(np.float32).max)

    @model_validator(mode="after")
    def _either(self) -> Self:
        if bool(self.functions) == (self.field_value_factor is not None):
            raise ValueError("a function_score has either functions or one field_value_factor")
        return self

    def of(self, fields: Fields, documents: int) -> NDArray[np.float32]:
        """The scores of documents [N]; NaN where the query does not hold.

        Raises:
            InputError: an engine ends the search with an error; the message names the field.

        Example:
            >>> body = {"query": {"exists": {"field": "age"}}, "field_value_factor": {"field": "age"}}
            >>> ages_N = np.array([3.0, np.nan], np.float32)
            >>> FunctionScore.model_validate(body).of({"age": ages_N}, 2).tolist()
            [3.0, nan]
        """
        functions = self.functions or (Function(field_value_factor=self.field_value_factor),)
        held_N = self.query.holds(fields, documents)
        applies_KN = np.stack([held_N & function.filter.holds(fields, documents) for function in functions])
        if self.score_mode == "first":
            applies_KN &= np.cumsum(applies_KN, axis=0) == 1  # later ones are not computed
        values_KN = np.zeros(applies_KN.shape)
        for function, applies_N, values_N in zip(functions, applies_KN, values_KN, strict=True):
            values_N[applies_N] = function.of(fields, np.flatnonzero(applies_N))
        with np.errstate(all="ignore"):
            combined_N = self._combined(values_KN, applies_KN, np.array([f.weight for f in functions]))
            scores_N = _BOOSTS[self.boost_mode](np.minimum(combined_N, self.max_boost)).astype(np.float32)
        if not (scores_N >= 0).all():
            used = sorted({f.field_value_factor.field for f in functions if f.field_value_factor})
            raise InputError(f"function_score of {', '.join(used)} is negative or not a number")
        return np.where(held_N, scores_N, np.float32(math.nan))

    def _combined(self, values_KN: _Values, applies_KN: NDArray[np.bool_], weights_K: _Values) -> _Values:
        """The functions' values together; 1 where none applies."""
        weight_N = (weights_K[:, None] * applies_KN).sum(0)
        match self.score_mode:
            case "multiply":
                return np.asarray(np.where(applies_KN, values_KN, 1.0).prod(0))
            case "sum" | "avg":
                divisor_N = weight_N if self.score_mode == "avg" else np.ones_like(weight_N)
                return np.where(weight_N != 0, values_KN.sum(0) / divisor_N, 1.0)
            case "first":
                return np.where(applies_KN.any(0), values_KN.sum(0), 1.0)
            case "max":
                found_N = np.where(applies_KN, values_KN, -math.inf).max(0)
                return np.where(found_N == -math.inf, 1.0, found_N)
            case "min":
                found_N = np.where(applies_KN, values_KN, math.inf).min(0)
                return np.where(found_N == math.inf, 1.0, found_N)


def _field(fields: Fields, field: str) -> NDArray[np.float32]:
    if field not in fields:
        raise InputError(f"no field {field!r}")
    return fields[field]
