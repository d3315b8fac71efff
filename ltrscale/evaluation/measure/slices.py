"""Slices: query groups that an evaluation judges separately, in addition to all groups together.

The groups with outliers are a slice. Others are the groups that meet a condition, or that have one value of a column.
A group may be in several. Columns of a group are `query_id` and `meta_*` of its data set, and those of `_COMPUTED`;
columns of documents are `label` and the features by their names. docs/methods.md explains all.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from pydantic import AfterValidator

from ltrscale import storage
from ltrscale.arrays import Bools, Ints
from ltrscale.batch import QueryGroups, sum_by_group
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError, nearest
from ltrscale.evaluation.measure.outliers import OutlierDetector, Seen
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


ALL, OUTLIERS = "all", "outliers"
"""The slices that every evaluation has."""
_MOST_VALUES = 100
"""The largest number of different values in a column for slices."""
_ENDS = [-1, 0, *(step * 10**power for power in range(9) for step in (1, 2, 5))]
"""The last number of each band except the highest."""
_INNER = (f"{last}" if last == end + 1 else f"{end + 1}..{last}" for end, last in pairwise(_ENDS))
_BANDS = ("below 0", *_INNER, f"{_ENDS[-1] + 1}..")
_COMPUTED: Mapping[str, pa.DataType] = {
    "n_documents": pa.int64(),
    "n_relevant": pa.int64(),
    "min_label": pa.float32(),
    "max_label": pa.float32(),
    "period": pa.string(),
    "outlier": pa.bool_(),
    "missing": pa.bool_(),
    "drifted": pa.bool_(),
}
"""The columns of groups that every evaluation has."""
_OF_FEATURES = {"missing", "drifted"}


def _is_condition(text: str) -> str:
    parse(text)
    return text


def _is_name(name: str) -> str:
    if name in (ALL, OUTLIERS) or "=" in name or not name.strip():
        raise ValueError(f"{name!r} cannot name a slice: {ALL}, {OUTLIERS} and names with = are taken")
    return name


ConditionText = Annotated[str, AfterValidator(_is_condition)]
SliceName = Annotated[str, AfterValidator(_is_name)]


@dataclass(frozen=True, eq=False)
class Slicer:
    """Finds the slices of query groups. `make` checks its settings against a selection."""

    conditions: Mapping[str, str]
    by: tuple[str, ...]
    detector: OutlierDetector
    relevant_from: float
    named: frozenset[str]
    """What conditions and `by` name, columns of groups and of documents."""
    stored: tuple[str, ...]
    """Columns of the data set that `find` needs."""
    needs_features: bool
    categories: frozenset[str] = frozenset()
    seen: Seen | None = None
    """The values seen in training, if `drifted` is named."""

    @classmethod
    def make(
        cls,
        conditions: Mapping[str, str],
        by: Sequence[str],
        *,
        detector: OutlierDetector,
        selection: Selection,
        relevant_from: float,
        training: Callable[[], Seen] | None = None,
    ) -> Self:
        """The slicer for a selection's groups; the first file decides which columns exist.

        Args:
            conditions: text of each slice's condition, by the name of the slice.
            by: columns with a slice for every value; numbers are cut into bands.
            detector: finds outlier values.
            selection: the groups.
            relevant_from: lowest label of a relevant document.
            training: looks at the training groups; called only if `drifted` is named.

        Raises:
            InputError: a column does not exist, or is compared with something of another kind.
        """
        stored, features = _stored_types(selection), {feature.name for feature in selection.features}
        of_groups = {name: pa.array([], type_) for name, type_ in {**stored, **_COMPUTED}.items()}
        if training is None:
            del of_groups["drifted"]
        of_documents = {name: pa.array([], pa.float32()) for name in ("label", *features)}
        categories = frozenset(feature.name for feature in selection.features if feature.kind == "categorical")
        none = GroupColumns(of_groups, of_documents, np.zeros(1, np.int64), categories)
        for name, condition in conditions.items():
            try:
                none.where(condition)
            except ValueError as error:
                raise InputError(f"slices.{name}: {error}") from error
        for name in by:
            if name not in of_groups:
                raise InputError(f"slice_by: no column {name!r}; did you mean {nearest(name, of_groups)!r}?")
        if "period" in by:  # known before a group is read
            check_few([f"period={period}" for period in selection.row_groups.by_period()], ["period"])
        named = frozenset(by).union(*map(columns_named, conditions.values()))
        return cls(
            conditions,
            tuple(by),
            detector,
            relevant_from,
            named,
            tuple(sorted(named & stored.keys())),
            bool(detector.rules) or not named.isdisjoint(features | _OF_FEATURES),
            categories,
            training() if training is not None and "drifted" in named else None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The slices that exist for any groups."""
        return (OUTLIERS, *self.conditions)

    def find(self, groups: QueryGroups, period: str, stored: pa.Table) -> dict[str, Bools]:
        """Whether each group is in each slice, by name, shape [Q]; slices by a column's values as they occur.

        Groups are labelled, with features if `needs_features`, and of one period; `stored` has their columns `stored`.

        Raises:
            InputError: a column of `slice_by` holds fractions, or a file lacks a column.
        """
        outlier_Q = np.zeros(groups.n_groups, np.bool_)
        if self.detector.rules:
            outlier_Q = self.detector.outlier_groups(groups).numpy()
        of_groups = {name: _plain(stored.column(name)) for name in self.stored}
        of_groups |= {name: self._computed(name, groups, period, outlier_Q) for name in self.named & _COMPUTED.keys()}
        of_documents = {
            name: pa.array(groups.features_NF[:, i].numpy(), from_pandas=True)
            for i, name in enumerate(self.detector.features)
            if name in self.named
        }
        if "label" in self.named:
            assert groups.labels_N is not None
            of_documents["label"] = pa.array(groups.labels_N.numpy())
        columns = GroupColumns(of_groups, of_documents, groups.offsets_Q1.numpy(), self.categories)
        members = {OUTLIERS: outlier_Q}
        members |= {name: columns.where(condition) for name, condition in self.conditions.items()}
        for name in self.by:
            values = of_groups[name]
            members |= dict(_by_value(name, _bands(name, values) if value_kind(values.type) == "number" else values))
        return members

    def _computed(self, name: str, groups: QueryGroups, period: str, outlier_Q: Bools) -> pa.Array:
        """A column that the data set lacks; the extreme label of a list without documents is null."""
        assert groups.labels_N is not None
        match name:
            case "n_documents":
                return pa.array(groups.lengths_Q.numpy())
            case "n_relevant":
                relevant_N = groups.labels_N >= self.relevant_from
                return pa.array(sum_by_group(relevant_N.long(), groups.offsets_Q1).numpy())
            case "min_label" | "max_label":
                values_Q = torch.segment_reduce(groups.labels_N, name[:3], offsets=groups.offsets_Q1)
                return pa.array(values_Q.numpy(), mask=(groups.lengths_Q == 0).numpy())
            case "outlier":
                return pa.array(outlier_Q)
            case "missing":
                missing_N = groups.features_NF.isnan().any(dim=1)
                return pa.array(sum_by_group(missing_N.long(), groups.offsets_Q1).numpy() > 0)
            case "drifted":
                assert self.seen is not None
                return pa.array(self.seen.lacks(groups).numpy())
        return pa.array([period] * groups.n_groups, pa.string())


def in_order(names: Sequence[str]) -> list[str]:
    """The names of slices by the values of one column, with numbers in numeric order and null last."""

    def key(name: str) -> tuple[bool, list[tuple[int, str]]]:
        value = name.partition("=")[2]
        parts = re.split(r"(\d+)", value)
        return value == "null", [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return sorted(names, key=key)


def _stored_types(selection: Selection) -> dict[str, pa.DataType]:
    """The columns with one value per group in the first file of a selection, if conditions can use them."""
    url = selection.row_groups[0].file.url
    filesystem, path = storage.arrow_filesystem(url)
    with storage.named_errors(url):
        schema: pa.Schema = storage.patiently(lambda: pq.read_schema(path, filesystem=filesystem))
    types = {
        field.name: field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        for field in schema
        if field.name == "query_id" or field.name.startswith("meta_")
    }
    return {name: type_ for name, type_ in types.items() if value_kind(type_)}


def _plain(stored: pa.ChunkedArray) -> pa.Array:
    """A stored column without dictionaries, and with NaN as null."""
    column = stored.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column


def _bands(name: str, column: pa.Array) -> pa.Array:
    """The band of each whole number: 0, 1, 2, 3..5, 6..10, 11..20, 21..50, and so on."""
    values_Q = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # bands end where it is exact
    missing_Q = np.isnan(values_Q)
    if (np.floor(values_Q[~missing_Q]) != values_Q[~missing_Q]).any():
        raise InputError(f"slice_by: {name} holds fractions; write conditions under slices, such as {name} > 0.5")
    bands_Q = np.searchsorted(_ENDS, np.where(missing_Q, 0.0, values_Q))
    return pa.array(_BANDS).take(pa.array(bands_Q, mask=missing_Q))


def _by_value(name: str, column: pa.Array) -> Iterator[tuple[str, Bools]]:
    """The slice of each value that occurs."""
    values = column.unique()
    if len(values) > _MOST_VALUES:
        raise _too_many(name)
    for value in values:
        valid = value.is_valid
        holds = pc.equal(column, value).fill_null(False) if valid else column.is_null()
        text = str(value.as_py()).lower() if isinstance(value.as_py(), bool) else str(value.as_py())
        yield f"{name}={text if valid else 'null'}", np.asarray(holds.to_numpy(zero_copy_only=False), np.bool_)


def check_few(names: Sequence[str], by: Sequence[str]) -> None:
    """Check that no column makes too many slices; InputError names it."""
    for column in by:
        if sum(name.startswith(f"{column}=") for name in names) > _MOST_VALUES:
            raise _too_many(column)


def _too_many(column: str) -> InputError:
    problem = f"slice_by: {column} has more than {_MOST_VALUES} values"
    return InputError(f"{problem}; write conditions under slices for those that matter")
