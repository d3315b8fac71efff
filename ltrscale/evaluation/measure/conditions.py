"""Conditions on query groups, in a small language such as `n_documents > 50 and meta_device == 'mobile'`.

    condition   = conjunction { "or" conjunction }
    conjunction = negation { "and" negation }
    negation    = "not" negation | test
    test        = "(" condition ")" | ("any" | "all") "(" condition ")" | value [ relation ]
    relation    = ("==" | "!=" | "<" | "<=" | ">" | ">=") value
                | ["not"] "in" "[" constant { "," constant } "]" | "is" ["not"] "null"
    value       = NAME | `ANY NAME` | constant
    constant    = NUMBER | 'TEXT' | "TEXT" | true | false

A name is a column of the query group. Inside `any(...)` and `all(...)` the condition applies to each document and can
name its columns too; these come first where a group's column has the same name. `all` holds for a group without
documents. A comparison with a missing value is false, whatever the operator; so is `in`, and `not in` is its opposite.
A category of documents is compared with a text, which stands for its code (`with_codes`).

Numbers compare as they were typed. Features and labels are float32, which cannot represent 0.1 exactly, so a constant
beside them is rounded to the nearest float32 too, and a price of 0.1 equals 0.1. Whole numbers compare as whole
numbers, even beyond 2^53; beside a fraction they are rounded to the nearest float64.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, R rows of either.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.errors import nearest

ValueKind = Literal["number", "text", "truth"]
"""What a column holds."""
Truths = NDArray[np.bool_]

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_WHOLE = pa.decimal128(38)
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
    """A boolean column by itself."""

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
    """The names in a condition, and for each whether it is inside `any` or `all`."""
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
    """Check that a condition names columns of groups or documents of the given kinds, and compares like with like.

    Raises:
        ValueError: says what is wrong, and the nearest name for an unknown one.

    Example:
        >>> check(parse("meta_devise == 'mobile'"), {"meta_device": "text"}, {})
        Traceback (most recent call last):
        ValueError: no column 'meta_devise'; did you mean 'meta_device'?
    """
    for name, document in columns_in(condition):
        if name not in groups and not (document and name in documents):
            if name in documents:
                raise ValueError(f"{name!r} is a column of documents; put any(...) or all(...) around its test")
            suggestion = nearest(name, [*groups, *documents])
            raise ValueError(f"no column {name!r}; did you mean {suggestion!r}?")
    _check_kinds(condition, groups, {**groups, **documents})


def with_codes(
    condition: Condition, categories: Collection[str], code: Callable[[str], int], *, inside: bool = False
) -> Condition:
    """The condition with codes instead of the texts that documents' categories are compared with by == and !=.

    `categories` are columns of documents that hold codes; `inside` means that the condition applies to a document.

    Example:
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


def _check_kinds(condition: Condition, kinds_here: Mapping[str, ValueKind], inside: Mapping[str, ValueKind]) -> None:
    match condition:
        case Junction(_, parts):
            for part in parts:
                _check_kinds(part, kinds_here, inside)
        case Not(inner):
            _check_kinds(inner, kinds_here, inside)
        case Over(_, inner):
            if kinds_here is inside:
                raise ValueError("any(...) or all(...) inside another; a document has no documents")
            _check_kinds(inner, inside, inside)
        case Holds(ColumnName(name)) if kinds_here[name] != "truth":
            raise ValueError(f"{name!r} is a {kinds_here[name]}, which is no condition; compare it with something")
        case Compared(left, sign, right):
            kinds = [_kind(value, kinds_here) for value in (left, right)]
            if isinstance(left, Constant) and isinstance(right, Constant):
                raise ValueError(f"{left.value!r} {sign} {right.value!r} compares two constants; name a column")
            if kinds[0] != kinds[1]:
                raise ValueError(f"{sign} compares a {kinds[0]} with a {kinds[1]}")
            if kinds[0] == "truth" and sign not in ("==", "!="):
                raise ValueError(f"true and false have no order; write == in place of {sign}")


def _kind(value: Value, kinds: Mapping[str, ValueKind]) -> ValueKind:
    match value:
        case ColumnName(name):
            return kinds[name]
        case Constant(bool()):
            return "truth"
        case Constant(str()):
            return "text"
    return "number"


@dataclass(frozen=True, eq=False)
class GroupColumns:
    """The columns of some groups [Q] and of their documents [N]; null is missing."""

    groups: Mapping[str, pa.Array]
    documents: Mapping[str, pa.Array]
    offsets_Q1: NDArray[np.int64]

    def where(self, condition: Condition) -> Truths:
        """Whether a checked condition holds for each group, shape [Q].

        Example:
            >>> columns = GroupColumns({}, {"price": pa.array([1.0, None, 9.0])}, np.array([0, 2, 3]))
            >>> columns.where(parse("any(price is null) or all(price > 5)")).tolist()
            [True, True]
        """
        return self._where(condition, self.groups, len(self.offsets_Q1) - 1)

    def _where(self, condition: Condition, rows: Mapping[str, pa.Array], n: int) -> Truths:
        match condition:
            case Junction(word, parts):
                join = np.logical_and if word == "and" else np.logical_or
                return np.asarray(join.reduce([self._where(part, rows, n) for part in parts]))
            case Not(inner):
                return ~self._where(inner, rows, n)
            case Over(word, inner):
                lengths_Q = np.diff(self.offsets_Q1)
                rows_N = pa.array(np.repeat(np.arange(len(lengths_Q)), lengths_Q))
                of_groups = {name: column.take(rows_N) for name, column in self.groups.items()}
                holds_N = self._where(inner, of_groups | {**self.documents}, int(self.offsets_Q1[-1]))
                times_Q = np.diff(np.concatenate([[0], np.cumsum(holds_N)])[self.offsets_Q1])
                return np.asarray(times_Q > 0 if word == "any" else times_Q == lengths_Q)
            case Compared(left, sign, right):
                one, other = (rows[v.name] if isinstance(v, ColumnName) else _scalar(v) for v in (left, right))
                return _truths(_COMPARE[sign](*_of_one_type(one, other)))
            case Missing(ColumnName(name)):
                return _truths(rows[name].is_null())
            case Holds(ColumnName(name)):
                return _truths(rows[name])
        return np.zeros(n, np.bool_)  # a constant is never missing


def _scalar(constant: Constant) -> pa.Scalar:
    whole = isinstance(constant.value, int) and not isinstance(constant.value, bool)
    return pa.scalar(constant.value, _WHOLE if whole else None)


def _of_one_type(left: pa.Array | pa.Scalar, right: pa.Array | pa.Scalar) -> tuple[Any, Any]:
    """Both sides of a comparison as numbers of one type: the narrowest floating type of the two, else `_WHOLE`."""
    kinds = (left.type, right.type)
    if floating := [kind for kind in kinds if pa.types.is_floating(kind)]:
        nearest_to = min(floating, key=lambda kind: kind.bit_width)
    elif all(pa.types.is_integer(kind) or pa.types.is_decimal(kind) for kind in kinds):
        nearest_to = _WHOLE
    else:
        return left, right  # texts or truths
    return pc.cast(left, nearest_to, safe=False), pc.cast(right, nearest_to, safe=False)


def _truths(column: pa.Array) -> Truths:
    return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


_TOKEN = re.compile(
    r"\s*(?:(?P<name>[^\W\d]\w*)|`(?P<quoted>[^`]+)`|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|'(?P<text>[^']*)'|\"(?P<text2>[^\"]*)\"|(?P<sign>==|!=|<=|>=|[<>()\[\],]))"
)
_WORDS = ("and", "or", "not", "in", "is", "null", "any", "all", "true", "false")
_MOST_DEEP = 50


def parse(text: str) -> Condition:
    """Parse the text of a condition.

    Raises:
        ValueError: the text is not a condition; the message says where.

    Example:
        >>> parse("not n_documents > 50")
        Not(inner=Compared(left=ColumnName(name='n_documents'), operator='>', right=Constant(value=50)))
    """
    parser = _Parser(text)
    condition = parser.condition()
    parser.expect("end")
    return condition


class _Token(NamedTuple):
    """`kind` is word, name, number, text, sign or end; `at` is the place in the text, from 0."""

    kind: str
    text: str
    at: int


def _tokens_of(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise ValueError(f"column {at + 1}: {text[at]!r} has no meaning here")
        kind = str(match.lastgroup)
        value = match[kind]
        plain = "word" if kind == "name" and value in _WORDS else {"quoted": "name", "text2": "text"}.get(kind, kind)
        yield _Token(plain, value, match.start(kind))
        at = match.end()
    yield _Token("end", "", len(text))


class _Parser:
    """Recursive descent: one method per grammar rule above, in the same order."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens_of(text))
        self._next, self._deep = 0, 0

    def condition(self) -> Condition:
        return self._joined("or", lambda: self._joined("and", self._negation))

    def _joined(self, word: Literal["and", "or"], part: Callable[[], Condition]) -> Condition:
        parts = [part()]
        while self._take(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Junction(word, tuple(parts))

    def _negation(self) -> Condition:
        self._deep += 1
        if self._deep > _MOST_DEEP:
            raise ValueError(f"more than {_MOST_DEEP} levels of parentheses and not")
        condition = Not(self._negation()) if self._take("not") else self._test()
        self._deep -= 1
        return condition

    def _test(self) -> Condition:
        if self._take("("):
            return self._closed(self.condition())
        words: tuple[Literal["any", "all"], ...] = ("any", "all")
        for word in words:
            if self._take(word):
                self.expect("(")
                return Over(word, self._closed(self.condition()))
        return self._relation(self._value())

    def _relation(self, left: Value) -> Condition:
        token = self._tokens[self._next]
        if token.text in _COMPARE and self._take(token.text):
            return Compared(left, token.text, self._value())
        if self._take("is"):
            negated = self._take("not")
            self.expect("null")
            return Not(Missing(left)) if negated else Missing(left)
        negated = self._take("not")
        if negated or token.text == "in":
            self.expect("in")
            is_in = Junction("or", tuple(Compared(left, "==", constant) for constant in self._constants()))
            return Not(is_in) if negated else is_in
        if isinstance(left, Constant):
            raise ValueError(f"column {token.at + 1}: a constant is no condition; compare it with a column")
        return Holds(left)

    def _constants(self) -> Iterator[Constant]:
        self.expect("[")
        while True:
            constant = self._value()
            if isinstance(constant, ColumnName):
                raise ValueError(f"{constant.name!r} is in a list, which has constants alone; put a text in quotes")
            yield constant
            if not self._take(","):
                break
        self.expect("]")

    def _value(self) -> Value:
        token = self._tokens[self._next]
        if (token.kind == "word" and token.text not in ("true", "false")) or token.kind in ("sign", "end"):
            self._fail("a column or a constant")
        self._next += 1
        match token.kind:
            case "name":
                return ColumnName(token.text)
            case "number":
                return Constant(_number_of(token.text))
            case "text":
                return Constant(token.text)
        return Constant(token.text == "true")

    def _closed(self, inner: Condition) -> Condition:
        self.expect(")")
        return inner

    def _take(self, text: str) -> bool:
        """Whether this word or sign comes next; steps over it if so."""
        token = self._tokens[self._next]
        matches = token.kind in ("word", "sign") and token.text == text
        self._next += matches
        return matches

    def expect(self, expected: str) -> None:
        """Step over this word or sign, or check that the text ends."""
        if not (self._tokens[self._next].kind == "end" if expected == "end" else self._take(expected)):
            self._fail("and, or, or the end" if expected == "end" else repr(expected))

    def _fail(self, expected: str) -> None:
        token = self._tokens[self._next]
        problem = "the condition ends" if token.kind == "end" else f"{token.text!r} stands"
        raise ValueError(f"column {token.at + 1}: {problem} where {expected} should be")


def _number_of(text: str) -> int | float:
    """A number, as an int if it is whole and has few enough digits for `_WHOLE`."""
    exact = Decimal(text)
    whole = abs(exact) < 10**_WHOLE.precision and exact == exact.to_integral_value()
    return int(exact) if whole else float(text)
