"""Conditions on query groups: the language in which slices are written, and the columns that it names.

Conditions, such as `n_documents > 50 and meta_device == 'mobile'`, are read by Python's parser, and nothing in them is
executed. A word that the grammar lacks, or any name in backquotes, is a column: of the query group, or inside
`any(...)` and `all(...)` of each document. A comparison with a missing value is false, whatever the operator; so is
`in`, and `not in` is its opposite. `all` holds for a group without documents.

Numbers compare as they were typed: a constant beside a float32 is rounded to the nearest float32 too, so that a price
of 0.1 equals 0.1. Whole numbers compare as whole numbers, even beyond 2^53; beside a fraction they are float64.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

import ast
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator

from ltrscale.arrays import Bools, Ints
from ltrscale.errors import nearest
from ltrscale.ingest.categories import encode

_ValueKind = Literal["number", "text", "truth"]
"""What a column holds."""

_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_WHOLE = pa.decimal128(38)
"""Holds the integers of every type, signed or not, and larger constants."""
_TOKEN = re.compile(
    r"(?P<quote>['\"])(?P<text>.*?)(?P=quote)|`(?P<name>[^`]+)`|(?P<word>(?<![\w.])[^\W\d]\w*)|[\s#]", re.S
)
_WORDS = ("and", "or", "not", "in", "is", "any", "all", "null", "true", "false")
_EXAMPLE = "write one such as n_documents > 50 and meta_device == 'ios'"


@cache
def parse(text: str) -> ast.expr:
    """Parse the text of a condition; its names are columns, besides `any` and `all`, and null is None.

    Raises:
        ValueError: the text is not a condition; the message says where.
    """
    text = text.strip()
    meant: dict[str, ast.expr] = {"null": ast.Constant(None), "true": ast.Constant(True), "false": ast.Constant(False)}

    def stand_in(token: re.Match[str]) -> str:
        """A name of the same length, so that Python's own keywords and escapes mean nothing."""
        kind = token.lastgroup
        if kind is None:
            return "?" if token[0] == "#" else " "  # lines are joined, so a comment would hide the next one
        if token[0] in _WORDS:
            return token[0]
        name = chr(0x4E00 + len(meant)).ljust(len(token[0]), "_")
        meant[name] = ast.Constant(token[kind]) if kind == "text" else ast.Name(token[kind])
        return name

    try:
        condition: ast.expr = _Meant(meant).visit(ast.parse(_TOKEN.sub(stand_in, text), mode="eval").body)
    except SyntaxError as error:
        at = error.offset or len(text) + 1
        problem, found = error.msg.partition(".")[0], repr(text[at - 1 :]) if text[at - 1 :] else "the end"
        raise ValueError(f"column {at}: {problem} at {found}; {_EXAMPLE}") from error
    except (MemoryError, RecursionError) as error:
        raise ValueError("too many levels of parentheses and not") from error
    return condition


class _Meant(ast.NodeTransformer):
    """Puts what names stand for in their places."""

    def __init__(self, meant: Mapping[str, ast.expr]) -> None:
        self._meant = meant

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._meant.get(node.id, node)


def columns_named(condition: str) -> set[str]:
    """The words of a condition that may be columns of groups or of documents."""
    return {node.id for node in ast.walk(parse(condition)) if isinstance(node, ast.Name)}


def value_kind(type_: pa.DataType) -> _ValueKind | None:
    """What a column of a type holds; None if conditions cannot use it."""
    if pa.types.is_boolean(type_):
        return "truth"
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "text"
    return "number" if pa.types.is_integer(type_) or pa.types.is_floating(type_) or type_ == _WHOLE else None


@dataclass(frozen=True, eq=False)
class GroupColumns:
    """The columns of some groups [Q] and of their documents [N]; null is missing."""

    groups: Mapping[str, pa.Array]
    documents: Mapping[str, pa.Array]
    offsets_Q1: Ints
    categories: Collection[str] = ()
    """Columns of documents that hold codes of texts."""

    def where(self, condition: str) -> Bools:
        """Whether a condition holds for each group, shape [Q]; what is wrong with it is found without groups too.

        Raises:
            ValueError: the text is no condition, names an unknown column, or compares a number with a text.

        Example:
            >>> columns = GroupColumns({}, {"price": pa.array([1.0, None, 9.0])}, np.array([0, 2, 3]))
            >>> columns.where("any(price is null) or all(price > 5)").tolist()
            [True, True]
            >>> columns.where("any(prise > 5)")
            Traceback (most recent call last):
            ValueError: no column 'prise'; did you mean 'price'?
        """
        return self._where(parse(condition), inside=False)

    def _where(self, node: ast.expr, *, inside: bool) -> Bools:
        """Whether part of a condition holds for each group, or inside `any` and `all` for each document."""
        match node:
            case ast.BoolOp(op, parts):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return np.asarray(join.reduce([self._where(part, inside=inside) for part in parts]))
            case ast.UnaryOp(ast.Not(), inner):
                return ~self._where(inner, inside=inside)
            case ast.Call(ast.Name("any" | "all" as word), [inner], []):
                if inside:
                    raise ValueError("any(...) or all(...) inside another; a document has no documents")
                holds_N = self._where(inner, inside=True)
                times_Q = np.diff(np.concatenate([[0], np.cumsum(holds_N)])[self.offsets_Q1])
                return np.asarray(times_Q > 0 if word == "any" else times_Q == np.diff(self.offsets_Q1))
            case ast.Compare(left, signs, others):  # a < b < c is a < b and b < c
                pairs = zip([left, *others], signs, others, strict=False)
                return np.asarray(np.logical_and.reduce([self._compared(*pair, inside=inside) for pair in pairs]))
            case ast.Name(name) if value_kind((column := self._column(name, inside=inside)).type) == "truth":
                return _truths(column)
        raise ValueError(f"{ast.unparse(node)} is no condition; {_EXAMPLE}")

    def _compared(self, left: ast.expr, sign: ast.cmpop, right: ast.expr, *, inside: bool) -> Bools:
        match sign, right:
            case ast.IsNot(), _:
                return ~self._compared(left, ast.Is(), right, inside=inside)
            case ast.NotIn(), _:
                return ~self._compared(left, ast.In(), right, inside=inside)
            case ast.Is(), ast.Constant(None) if isinstance(left, ast.Name):
                return _truths(self._column(left.id, inside=inside).is_null())
            case ast.In(), ast.List([_, *_] as items) if not any(isinstance(item, ast.Name) for item in items):
                found = [self._compared(left, ast.Eq(), item, inside=inside) for item in items]
                return np.asarray(np.logical_or.reduce(found))
        text = ast.unparse(ast.Compare(left, [sign], [right]))
        if type(sign) not in _COMPARE:
            raise ValueError(f"{text} is no condition; is takes null, and in a list of constants such as ['a', 'b']")
        if inside and isinstance(sign, ast.Eq | ast.NotEq):
            left, right = self._coded(left, right), self._coded(right, left)
        one, other = self._value(left, inside=inside), self._value(right, inside=inside)
        if isinstance(one, pa.Scalar) and isinstance(other, pa.Scalar):
            raise ValueError(f"{text} compares two constants; name a column")
        if value_kind(one.type) != value_kind(other.type):
            raise ValueError(f"{text} compares a {value_kind(one.type)} with a {value_kind(other.type)}")
        return _truths(_COMPARE[type(sign)](*_to_one_type(one, other)))

    def _coded(self, value: ast.expr, beside: ast.expr) -> ast.expr:
        """The code in place of a text beside a category."""
        match value, beside:
            case ast.Constant(str() as text), ast.Name(name) if name in self.categories:
                return ast.Constant(int(encode(pa.array([text]))[0]))  # the same in every data set
        return value

    def _value(self, node: ast.expr, *, inside: bool) -> pa.Array | pa.Scalar:
        match node:
            case ast.Name(name):
                return self._column(name, inside=inside)
            case ast.Constant(bool() | int() | float() | str() as value):
                return _scalar(value)
            case ast.UnaryOp(ast.USub() | ast.UAdd(), ast.Constant(int() | float())):
                return _scalar(ast.literal_eval(node))
        raise ValueError(f"{ast.unparse(node)} is neither a column nor a constant; {_EXAMPLE}")

    def _column(self, name: str, *, inside: bool) -> pa.Array:
        if inside and name in self.documents:
            return self.documents[name]
        if name in self.groups:
            of_groups = self.groups[name]
            lengths_Q = np.diff(self.offsets_Q1)
            return of_groups.take(pa.array(np.repeat(np.arange(len(lengths_Q)), lengths_Q))) if inside else of_groups
        if name in self.documents:
            raise ValueError(f"{name!r} is a column of documents; put any(...) or all(...) around its test")
        raise ValueError(f"no column {name!r}; did you mean {nearest(name, [*self.groups, *self.documents])!r}?")


def _scalar(value: float | str) -> pa.Scalar:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1.7e18 compares digit by digit too
    if isinstance(value, int) and not isinstance(value, bool):
        return pa.scalar(value, _WHOLE) if abs(value) < 10**_WHOLE.precision else pa.scalar(float(str(value)))
    return pa.scalar(value)


def _to_one_type(left: pa.Array | pa.Scalar, right: pa.Array | pa.Scalar) -> tuple[Any, Any]:
    """Both sides of a comparison as numbers of one type: the narrowest floating type of the two, else `_WHOLE`."""
    kinds = (left.type, right.type)
    if floating := [kind for kind in kinds if pa.types.is_floating(kind)]:
        nearest_to = min(floating, key=lambda kind: kind.bit_width)
    elif value_kind(left.type) == "number":
        nearest_to = _WHOLE
    else:
        return left, right  # texts or truths
    return pc.cast(left, nearest_to, safe=False), pc.cast(right, nearest_to, safe=False)


def _truths(column: pa.Array) -> Bools:
    return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _is_condition(text: str) -> str:
    parse(text)
    return text


ConditionText = Annotated[str, AfterValidator(_is_condition)]
