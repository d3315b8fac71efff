"""JSON lines: the types of a file's columns, and its rows (see `lines.TextReader`). Each line is an object."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
from pyarrow import json as arrow_json

from ltrscale.errors import InputError
from ltrscale.ingest.lines import SNIFFED_LINES, TextReader, line_blocks
from ltrscale.ingest.rows import Cause


def json_schema(url: str) -> pa.Schema:
    """The keys of the first 1,000 lines as columns, in the order in which they appear.

    A column has the type of most of its values: bool, int64, float64 if a number has a fraction, string, a list for
    arrays (only arrays of numbers can be read), or an empty struct for objects (which cannot be read). It is null if it
    has no value.
    """
    kinds: dict[str, Counter[type]] = {}
    for each in sniffed_objects(url):
        for name, value in each.items():
            kinds.setdefault(name, Counter())[type(value)] += value is not None and value == value
    if not kinds:
        raise InputError(f"{url}: no line is a JSON object; one object per line is read, not an array of them")
    return pa.schema([(name, _json_type(counts)) for name, counts in kinds.items()])


def sniffed_objects(url: str) -> list[dict[str, object]]:
    """The objects of the first 1,000 lines, empty where a line has none."""
    lines = next(line_blocks(url), None)
    if lines is None:
        raise InputError(f"{url}: the file is empty; a file of JSON lines has an object per line")
    return [_object(lines.bytes_of(i)) for i in range(min(len(lines), SNIFFED_LINES))]


_TYPES: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    list: pa.list_(pa.null()),
    dict: pa.struct([]),
}


def _json_type(counts: Counter[type]) -> pa.DataType:
    if counts[float]:
        counts[float] += counts.pop(int, 0)
    [(kind, n)] = counts.most_common(1)
    return _TYPES[kind] if n else pa.null()


def _object(line: bytes) -> dict[str, object]:
    """The object of a line; empty if the line has none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_STRING_OR_NAN = re.compile(rb'"(?:[^"\\\n]|\\[^\n])*"|NaN\b')


@dataclass
class JsonReader(TextReader):
    """Reads JSON lines (see `TextReader`); numbers are float64, and other columns keep their types.

    A key that a line lacks is null, and so is NaN, which Python writes; other keys are ignored.
    """

    def _types(self) -> pa.Schema:
        return pa.schema([(name, self._type(name)) for name in self.columns])

    def _type(self, name: str) -> pa.DataType:
        kind = self.schema.field(name).type
        if name in self.numbers and not pa.types.is_boolean(kind):
            return pa.float64()
        if pa.types.is_list(kind):
            return pa.list_(pa.float64())  # token ids; one with a fraction is named as such
        return pa.string() if pa.types.is_null(kind) else kind

    def _convert(self, text: pa.Buffer) -> pa.Table:
        if b"NaN" in (lines := text.to_pybytes()):
            text = pa.py_buffer(_STRING_OR_NAN.sub(lambda found: b"null" if found[0] == b"NaN" else found[0], lines))
        parsed = arrow_json.read_json(
            pa.BufferReader(text),
            # one block: pyarrow must not cut the text at another place
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=text.size + 1),
            parse_options=arrow_json.ParseOptions(explicit_schema=self._types(), unexpected_field_behavior="ignore"),
        )
        return parsed.select(self.columns)

    def _explain(self, message: str, line: bytes) -> tuple[str, str, Cause]:
        if match := re.search(r"Column\(/(.*)\) changed from (\w+) to (\w+)", message):
            name, kinds = match[1].removesuffix("/[]"), [match[3], match[2]]
            here, there = kinds if name == match[1] else [f"a list of {kind}s" for kind in kinds]
            return f"column {name!r} is {here} here and {there} elsewhere", repr(_object(line).get(name)), ""
        return f"not a JSON object with values that fit: {' '.join(message.split())}", "", ""

    def _query_of(self, line: bytes) -> str:
        query = _object(line).get(self.query)
        return str(query) if isinstance(query, str | int) else ""


_Tree = dict[str, Any]
"""A type for each key, or the tree of an object; a key that ends in [] has a list of them."""


class NestedReader(JsonReader):
    """Reads the values at paths such as `event.object.id` and `items[].id`, and nothing else (see `JsonReader`).

    A path without a value in the first 1,000 lines has values of a given type, by default texts, so that a later value
    of another type is a bad line, and not one that nobody reads.
    """

    @classmethod
    def of(cls, url: str, paths: Sequence[str], types: Mapping[str, pa.DataType], batch_rows: int) -> Self:
        """The reader of these paths; whole numbers are also numbers with fractions where `types` says so."""
        objects, tree = sniffed_objects(url), _Tree()
        for path in paths:
            *above, last = path.split(".")
            below = tree
            for step in above:
                below = below.setdefault(step, {})
            below[last] = _type_at(objects, path, types.get(path, pa.string()))
        schema = _struct(tree)
        return cls(url, schema, schema.names, (), "", batch_rows)

    def _type(self, name: str) -> pa.DataType:
        kind: pa.DataType = self.schema.field(name).type
        return kind


def _type_at(objects: Iterable[dict[str, object]], path: str, default: pa.DataType) -> pa.DataType:
    values: list[Any] = [*objects]
    for step in path.split("."):
        values = [value.get(step.removesuffix("[]")) for value in values if isinstance(value, dict)]
        if step.endswith("[]"):
            values = [element for value in values if isinstance(value, list) for element in value]
    kinds = Counter(type(value) for value in values if value is not None and value == value)
    kind = _json_type(kinds) if kinds else default
    wider = pa.types.is_integer(kind) and pa.types.is_floating(default)
    return default if wider or pa.types.is_nested(kind) else kind


def _struct(tree: _Tree) -> pa.Schema:
    fields = []
    for key, below in tree.items():
        kind = pa.struct([*_struct(below)]) if isinstance(below, dict) else below
        fields.append((key.removesuffix("[]"), pa.list_(kind) if key.endswith("[]") else kind))
    return pa.schema(fields)
