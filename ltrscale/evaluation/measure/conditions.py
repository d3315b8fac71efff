"""Conditions on query groups, such as `n_documents > 50 and meta_device == 'mobile'`: a small language of our own.

`grammar` has the language and its rules; here are what a condition consists of, the check of its columns, and the
groups for which it holds.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, R rows of either.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.errors import nearest

ValueKind = Literal["number", "text", "truth"]
"""What a column holds."""
Truths = NDArray[np.bool_]

COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
"""The comparisons, by their operators."""
WHOLE = pa.decimal128(38)
"""Holds the integers of every type, signed or not, and larger constants."""


@dataclass(frozen=True)
class ColumnName:
    """A column."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A number, a text, or true or false."""

    value: int | float | str | bool


Value = ColumnName | Constant


@dataclass(frozen=True)
class Compared:
    """`left operator right`."""

    left: Value
    operator: str
    right: Value


@dataclass(frozen=True)
class Missing:
    """`value is null`."""

    value: Value


@dataclass(frozen=True)
class Holds:
    """A column of truths by itself."""

    column: ColumnName


@dataclass(frozen=True)
class Not:
    """`not condition`."""

    inner: "Condition"


@dataclass(frozen=True)
class Junction:
    """`and` or `or` between conditions."""

    word: Literal["and", "or"]
    parts: tuple["Condition", ...]


@dataclass(frozen=True)
class Over:
    """`any` or `all` of a group's documents."""

    word: Literal["any", "all"]
    inner: "Condition"


Condition = Compared | Missing | Holds | Not | Junction | Over


def columns_in(condition: Condition, *, document: bool = False) -> Iterator[tuple[str, bool]]:
    """The names in a condition, each with whether it stands inside `any` or `all`."""
    match condition:
        case Junction(_, parts):
            for part in parts:
                yield from columns_in(part, document=document)
        case Not(inner):
            yield from columns_in(inner, document=document)
        case Over(_, inner):
            yield from columns_in(inner, document=True)
        case Compared(left, _, right):
            yield from ((value.name, document) for value in (left, right) if isinstance(value, ColumnName))
        case Missing(ColumnName(name)) | Holds(ColumnName(name)):
            yield name, document


def check(condition: Condition, groups: Mapping[str, ValueKind], documents: Mapping[str, ValueKind]) -> None:
    """Check that the columns of a condition exist and that it compares like with like.

    Args:
        condition: the condition.
        groups: kinds of the columns of groups.
        documents: kinds of the columns of documents.

    Raises:
        ValueError: says what is wrong, and the nearest name for an unknown one.

    Example:
        >>> from ltrscale.evaluation.measure.grammar import parse
        >>> check(parse("meta_devise == 'mobile'"), {"meta_device": "text"}, {})
        Traceback (most recent call last):
        ValueError: no column 'meta_devise'; did you mean 'meta_device'?
    """
    for name, document in columns_in(condition):
        if name not in groups and not (document and name in documents):
            if name in documents:
                raise ValueError(f"{name!r} is a column of documents; put any(...) or all(...) around its test")
            near = nearest(name, [*groups, *documents])
            raise ValueError(f"no column {name!r}; did you mean {near!r}?")
    _check_kinds(condition, groups, {**groups, **documents})


def with_codes(
    condition: Condition, categories: Collection[str], code: Callable[[str], int], *, inside: bool = False
) -> Condition:
    """The condition with codes in the place of the texts that documents' categories are compared with by == and !=.

    Args:
        condition: the condition.
        categories: columns of documents that hold codes.
        code: the code of a text.
        inside: whether it is a condition on a document.

    Example:
        >>> from ltrscale.evaluation.measure.grammar import parse
        >>> with_codes(parse("any(hue in ['red'])"), ["hue"], {"red": 7}.__getitem__) == parse("any(hue in [7])")
        True
    """
    again = partial(with_codes, categories=categories, code=code)
    match condition:
        case Junction(word, parts):
            return Junction(word, tuple(again(part, inside=inside) for part in parts))
        case Not(inner):
            return Not(again(inner, inside=inside))
        case Over(word, inner):
            return Over(word, again(inner, inside=True))
        case Compared(ColumnName(name), "==" | "!=" as sign, Constant(str() as text)) if inside and name in categories:
            return Compared(ColumnName(name), sign, Constant(code(text)))
        case Compared(Constant(str() as text), "==" | "!=" as sign, ColumnName(name)) if inside and name in categories:
            return Compared(Constant(code(text)), sign, ColumnName(name))
    return condition


def _check_kinds(condition: Condition, here: Mapping[str, ValueKind], inside: Mapping[str, ValueKind]) -> None:
    match condition:
        case Junction(_, parts):
            for part in parts:
                _check_kinds(part, here, inside)
        case Not(inner):
            _check_kinds(inner, here, inside)
        case Over(_, inner):
            if here is inside:
                raise ValueError("any(...) or all(...) inside another; a document has no documents")
            _check_kinds(inner, inside, inside)
        case Holds(ColumnName(name)) if here[name] != "truth":
            raise ValueError(f"{name!r} is a {here[name]}, which is no condition; compare it with something")
        case Compared(left, sign, right):
            kinds = [_kind(value, here) for value in (left, right)]
            if isinstance(left, Constant) and isinstance(right, Constant):
                raise ValueError(f"{left.value!r} {sign} {right.value!r} compares two constants; name a column")
            if kinds[0] != kinds[1]:
                raise ValueError(f"{sign} compares a {kinds[0]} with a {kinds[1]}")
            if kinds[0] == "truth" and sign not in ("==", "!="):
                raise ValueError(f"true and false have no order; write == in place of {sign}")


def _kind(value: Value, here: Mapping[str, ValueKind]) -> ValueKind:
    match value:
        case ColumnName(name):
            return here[name]
        case Constant(bool()):
            return "truth"
        case Constant(str()):
            return "text"
    return "number"


@dataclass(frozen=True, eq=False)
class GroupColumns:
    """The columns of some groups [Q] and of their documents [N], in which null is missing."""

    groups: Mapping[str, pa.Array]
    documents: Mapping[str, pa.Array]
    offsets_Q1: NDArray[np.int64]

    def where(self, condition: Condition) -> Truths:
        """Whether a checked condition holds for each group, shape [Q].

        Example:
            >>> from ltrscale.evaluation.measure.grammar import parse
            >>> columns = GroupColumns({}, {"price": pa.array([1.0, None, 9.0])}, np.array([0, 2, 3]))
            >>> columns.where(parse("any(price is null) or all(price > 5)")).tolist()
            [True, True]
        """
        return _where(condition, self.groups, len(self.offsets_Q1) - 1, self)

    def of_documents(self) -> Mapping[str, pa.Array]:
        """The columns of documents and, at each document, those of its group, shape [N]."""
        rows_N = pa.array(np.repeat(np.arange(len(self.offsets_Q1) - 1), np.diff(self.offsets_Q1)))
        return {**{name: column.take(rows_N) for name, column in self.groups.items()}, **self.documents}


def _where(condition: Condition, rows: Mapping[str, pa.Array], n: int, columns: GroupColumns) -> Truths:
    """Whether a condition holds in each of n rows, which are groups or documents."""
    match condition:
        case Junction(word, parts):
            join = operator.and_ if word == "and" else operator.or_
            truths = _where(parts[0], rows, n, columns)
            for part in parts[1:]:
                truths = join(truths, _where(part, rows, n, columns))
            return truths
        case Not(inner):
            return ~_where(inner, rows, n, columns)
        case Over(word, inner):
            offsets_Q1 = columns.offsets_Q1
            holds_N = _where(inner, columns.of_documents(), int(offsets_Q1[-1]), columns)
            before_N1 = np.concatenate([[0], np.cumsum(holds_N)])
            times_Q = np.diff(before_N1[offsets_Q1])
            return np.asarray(times_Q > 0 if word == "any" else times_Q == np.diff(offsets_Q1))
        case Compared(left, sign, right):
            one, other = (rows[v.name] if isinstance(v, ColumnName) else _scalar(v) for v in (left, right))
            return _truths(COMPARE[sign](*_of_one_type(one, other)))
        case Missing(ColumnName(name)):
            return _truths(rows[name].is_null())
        case Holds(ColumnName(name)):
            return _truths(rows[name])
    return np.zeros(n, np.bool_)  # a constant is never missing


def _scalar(constant: Constant) -> pa.Scalar:
    whole = isinstance(constant.value, int) and not isinstance(constant.value, bool)
    return pa.scalar(constant.value, WHOLE if whole else None)


def _of_one_type(one: pa.Array | pa.Scalar, other: pa.Array | pa.Scalar) -> tuple[Any, Any]:
    """Both sides of a comparison as numbers of one type: the narrowest floating one of the two, else `WHOLE`."""
    kinds = (one.type, other.type)
    if floating := [kind for kind in kinds if pa.types.is_floating(kind)]:
        nearest_to = min(floating, key=lambda kind: kind.bit_width)
    elif all(pa.types.is_integer(kind) or pa.types.is_decimal(kind) for kind in kinds):
        nearest_to = WHOLE
    else:
        return one, other  # texts or truths
    return pc.cast(one, nearest_to, safe=False), pc.cast(other, nearest_to, safe=False)


def _truths(column: pa.Array) -> Truths:
    return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)
