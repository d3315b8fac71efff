"""JSON lines: the types of a file's columns, and its rows (see `textrows`); each line is an object."""

import json
import re
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import json as arrow_json

from ltrscale.errors import InputError
from ltrscale.ingest.textrows import SNIFFED_LINES, TextReader, line_blocks


def read_schema(url: str) -> pa.Schema:
    """The keys of the first 1,000 lines as columns, in the order in which they appear.

    A column has the type of most of its values: bool, int64, or float64 if a number has a fraction, string, a list for
    arrays, of which those of numbers can be read, or a struct of nothing for objects, which cannot; it is null if it
    has no value.

    Raises:
        InputError: the file is missing, empty or damaged, or none of these lines is an object.
    """
    lines = next(line_blocks(url), None)
    if lines is None:
        raise InputError(f"{url}: the file is empty; a file of JSON lines has an object per line")
    kinds: dict[str, Counter[type]] = {}
    for i in range(min(len(lines), SNIFFED_LINES)):
        for name, value in _object(lines.text[lines.starts_M[i] : lines.ends_M[i]]).items():
            kinds.setdefault(name, Counter())[type(value)] += value is not None
    if not kinds:
        raise InputError(f"{url}: no line is a JSON object; one object per line is read, not an array of them")
    return pa.schema([(name, _type_of(found)) for name, found in kinds.items()])


_TYPES: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    list: pa.list_(pa.null()),
    dict: pa.struct([]),
}


def _type_of(found: Counter[type]) -> pa.DataType:
    if found[float]:
        found[float] += found.pop(int, 0)
    [(kind, n)] = found.most_common(1)
    return _TYPES[kind] if n else pa.null()


def _object(line: bytes) -> dict[str, object]:
    """The object of a line, empty if there is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class JsonReader(TextReader):
    """Reads JSON lines (see `TextReader`); numbers are float64, and other columns keep their types.

    A key that a line lacks is null, and other keys are ignored.
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
        parsed = arrow_json.read_json(
            pa.BufferReader(text),
            # one block: pyarrow must not cut the text at another place
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=text.size + 1),
            parse_options=arrow_json.ParseOptions(explicit_schema=self._types(), unexpected_field_behavior="ignore"),
        )
        return parsed.select(self.columns)

    def _empty(self) -> pa.Table:
        return self._types().empty_table()

    def _explain(self, message: str, line: bytes) -> tuple[str, str]:
        if found := re.search(r"Column\(/(.*)\) changed from (\w+) to (\w+)", message):
            return f"column {found[1]!r} is {found[3]} here and {found[2]} elsewhere", repr(_object(line).get(found[1]))
        return f"not a JSON object with values that fit: {' '.join(message.split())}", ""

    def _query_of(self, line: bytes) -> str:
        query = _object(line).get(self.query)
        return str(query) if isinstance(query, str | int) else ""
