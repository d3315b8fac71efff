"""The language of conditions on query groups, such as `n_documents > 50 and meta_device == 'mobile'`.

    condition   = conjunction { "or" conjunction }
    conjunction = negation { "and" negation }
    negation    = "not" negation | test
    test        = "(" condition ")" | ("any" | "all") "(" condition ")" | value [ relation ]
    relation    = ("==" | "!=" | "<" | "<=" | ">" | ">=") value
                | ["not"] "in" "[" constant { "," constant } "]" | "is" ["not"] "null"
    value       = NAME | `ANY NAME` | constant
    constant    = NUMBER | 'TEXT' | "TEXT" | true | false

A name is a column of the query group. Inside `any(...)` and `all(...)` the condition is one on each document, and names
its columns too, which come first where a group's column has the same name. `all` holds for a group without documents.
A comparison with a missing value is false, whatever the operator; so is `in`, and `not in` is its opposite. A category
of documents is compared with a text, which stands for its code (`with_codes`).

Numbers compare as they were typed. Features and labels are float32, which has no 0.1 but a nearest value, so a constant
beside them becomes the nearest float32 too, and a price of 0.1 equals 0.1. Whole numbers compare as whole numbers,
beyond 2^53 as well; beside a fraction they become the nearest float64.
"""

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Literal, NamedTuple

from ltrscale.evaluation.measure.conditions import (
    COMPARE,
    WHOLE,
    ColumnName,
    Compared,
    Condition,
    Constant,
    Holds,
    Junction,
    Missing,
    Not,
    Over,
    Value,
)

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[^\W\d]\w*)|`(?P<quoted>[^`]+)`|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|'(?P<text>[^']*)'|\"(?P<text2>[^\"]*)\"|(?P<sign>==|!=|<=|>=|[<>()\[\],]))"
)
_WORDS = ("and", "or", "not", "in", "is", "null", "any", "all", "true", "false")
_MOST_DEEP = 50


def parse(text: str) -> Condition:
    """The condition that a text states.

    Raises:
        ValueError: the text is no condition; the message says where.

    Example:
        >>> parse("not n_documents > 50")
        Not(inner=Compared(left=ColumnName(name='n_documents'), operator='>', right=Constant(value=50)))
    """
    parser = _Parser(text)
    condition = parser.condition()
    parser.expect("end")
    return condition


class _Token(NamedTuple):
    """`kind` is word, name, number, text or sign, or end; `at` the place in the text, from 0."""

    kind: str
    text: str
    at: int


def _tokens(text: str) -> Iterator[_Token]:
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
    """Recursive descent: one method for each rule of the grammar above, in its order."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
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
        if token.text in COMPARE and self._take(token.text):
            return Compared(left, token.text, self._value())
        if self._take("is"):
            negated = self._take("not")
            self.expect("null")
            return Not(Missing(left)) if negated else Missing(left)
        negated = self._take("not")
        if negated or token.text == "in":
            self.expect("in")
            among = Junction("or", tuple(Compared(left, "==", constant) for constant in self._constants()))
            return Not(among) if negated else among
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
                return Constant(_number(token.text))
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

    def expect(self, what: str) -> None:
        """Step over this word or sign, or check that the text ends."""
        if not (self._tokens[self._next].kind == "end" if what == "end" else self._take(what)):
            self._fail("and, or, or the end" if what == "end" else repr(what))

    def _fail(self, expected: str) -> None:
        token = self._tokens[self._next]
        problem = "the condition ends" if token.kind == "end" else f"{token.text!r} stands"
        raise ValueError(f"column {token.at + 1}: {problem} where {expected} should be")


def _number(text: str) -> int | float:
    """A number, as an int if it is whole and has few enough digits for `WHOLE`."""
    exact = Decimal(text)
    whole = abs(exact) < 10**WHOLE.precision and exact == exact.to_integral_value()
    return int(exact) if whole else float(text)
