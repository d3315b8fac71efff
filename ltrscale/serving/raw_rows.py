"""Features of raw rows, made as for training, with only Python's standard library (3.9 or later).

It is one long file because every export has a copy of it. It reads two files in its folder: `raw_rows.json`, the recipe
of each feature, and `features.json`, the columns of the exported model.

    import raw_rows

    raw_rows.features(row)   # the values of the model's features, in order; NaN if missing
    raw_rows.inputs(row)     # the same as the model reads them: categories of trees as the index of their code

A row is a dict with the columns of the raw log: values as in the log's file (fields of a CSV file are text) or Python
numbers, dates and times. A row that cannot be used raises `RowError`, with the reason why the preparation of the
training data would have rejected it.

From top to bottom: `RawRows` reads files, then the values of a row, then makes features of them; below it are the rules
for categories, numbers, vectors and times, and at the end the functions of a service.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import lzma
import math
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, Union
from zoneinfo import ZoneInfo

RECIPE, MODEL = "raw_rows.json", "features.json"
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LIST = re.compile(r"[ \t\r\n]*\[.*\][ \t\r\n]*", re.DOTALL)
_BETWEEN = re.compile(r"[ \t\r\n]*,[ \t\r\n]*|[ \t\r\n]+")
_NO_NUMBER = re.compile(r"([+-]?)(inf|infinity|nan(?:\([a-z0-9_]*\))?)", re.IGNORECASE)
_FIELD = r'(?:"(?:[^"]|"")*"|[^"{delimiter}]*)'
_WELL_QUOTED, _OPEN = _FIELD + "(?:{delimiter}" + _FIELD + ")*", "(?:" + _FIELD + r'{delimiter})*"(?:[^"]|"")*'
_MISPLACED = "a quote, carriage return or NUL out of place, or too long a line"
_NOT_CLOSED = (
    "a quoted field that does not end in its line: line ends within quotes are not read; write them as blanks, or the "
    "file as Parquet or JSON lines"
)
_JSON = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
_KINDS = {"number": "number", "integer": "number", "boolean": "boolean", "text": "string", "numbers": "array"}
_CODES = 1 << 24
_WHOLE_FLOAT = re.compile(r"-?(0|[1-9][0-9]{0,15})\.0")
_EPOCH, _EPOCH_SECONDS, _DAY, _SLOT = datetime(1970, 1, 1, tzinfo=timezone.utc), 10**11, 86400, 900
_ZONE = re.compile(r" ?(UTC|GMT|Z|[-+][0-9]{2}(?::?[0-9]{2})?)$")
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
_ISO = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d|\d{8}|\d{4}-?W\d\d(?:-?\d)?)"
    r"(?:.(?P<h>\d\d)(?::?(?P<m>\d\d)(?::?(?P<s>\d\d)(?:[.,](?P<f>\d+))?)?)?"
    r"(?P<zone>Z|[+-]\d\d(?::?\d\d(?::?\d\d)?)?)?)?",
    re.ASCII | re.DOTALL,
)


class RowError(ValueError):
    """A row that cannot be used; `rule` is the reason's name in the quarantine of prepared data."""

    def __init__(self, found: str, rule: str = "unparsable") -> None:
        super().__init__(found)
        self.rule = rule


Row = Union[Mapping[str, Any], RowError]


class RawRows:
    """A recipe, applied to one row at a time.

    Args:
        recipe: content of `raw_rows.json`.
        codes: the codes of each categorical column that has a list of them.
        folder: folder of the tables to join.
    """

    def __init__(self, recipe: Mapping[str, Any], codes: Mapping[str, list[int]], folder: Path) -> None:
        self.recipe = recipe
        self.names: list[str] = [feature["name"] for feature in recipe["features"]]
        self._places = [
            {float(code): float(i) for i, code in enumerate(codes[name])} if name in codes else None
            for name in self.names
        ]
        self._tables = [_table(join, folder) for join in recipe["joins"]]
        self._missing = frozenset(recipe["csv"]["missing"])
        zone = recipe["times"]["zone"]
        self._zone = timezone.utc if zone == "UTC" else ZoneInfo(zone)

    def features(self, row: Row) -> list[float]:
        """The values of the model's features, each a number in single precision; NaN if missing.

        Raises:
            RowError: the row cannot be used, or lacks a column.
        """
        if isinstance(row, RowError):
            raise row
        values = {name: self._read(name, row) for name, about in self.recipe["columns"].items() if "table" not in about}
        for join, table in zip(self.recipe["joins"], self._tables):
            values.update(self._joined(join, table, values, row))
        values.update({name: self._vector(name, values[name], n) for name, n in self.recipe["vectors"].items()})
        seconds = {name: self._seconds(name, values[name]) for name in self.recipe["times"]["columns"]}
        if (time := self.recipe["times"]["row"]) is not None and seconds[time] is None:
            raise RowError(f"column {time!r} is not a time stamp (None)")
        found = [self._feature(feature, values, seconds) for feature in self.recipe["features"]]
        return self._completed(found)

    def inputs(self, row: Row) -> list[float]:
        """The row of the model's matrix: `features`, with categories of trees as the index of their code."""
        pairs = zip(self.features(row), self._places)
        return [value if places is None else places.get(value, math.nan) for value, places in pairs]

    def read(self, path: str | Path) -> Iterator[Row]:
        """The rows of a CSV or JSON Lines file, possibly compressed as .gz or .xz, with the columns of the log.

        A line that is not a row yields the error that says why; `features` raises it.

        Raises:
            RowError: the file has no line of column names.
        """
        return (row for _, row in self.numbered(path))

    def numbered(self, path: str | Path) -> Iterator[tuple[int, Row]]:
        """The rows of a file as from `read`, with their line numbers."""
        form, name = self.recipe["csv"], str(path)
        with _opened(name, "utf-8-sig" if form["encoding"] == "utf-8" else form["encoding"]) as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line not in ("\n", "\r\n"))
            if re.search(r"\.(jsonl|ndjson)(\.gz|\.xz)?$", name):
                yield from ((number, _object(line)) for number, line in lines)
                return
            usual = "\t" if ".tsv" in Path(name).name else ";" if form["decimal"] == "," else ","
            delimiter = form["delimiter"] or usual
            names = form.get("header") or self._header(name, lines, delimiter)
            yield from ((number, self._row(line, names, delimiter)) for number, line in lines)

    def _header(self, file: str, lines: Iterator[tuple[int, str]], delimiter: str) -> list[str]:
        try:
            return self._fields(next(lines)[1], delimiter)
        except (StopIteration, RowError) as error:
            raise RowError(f"{file}: no line of column names ({str(error) or 'the file is empty'})") from error

    def _row(self, line: str, names: list[str], delimiter: str) -> Row:
        try:
            fields = self._fields(line, delimiter)
            if len(fields) != len(names):
                raise RowError(f"{len(fields)} columns where the header has {len(names)}")
            row = dict(zip(names, fields))
            return row if self.recipe["rows"] == "csv" else {n: self._of_text(n, text) for n, text in row.items()}
        except RowError as error:
            return error

    def _of_text(self, name: str, text: str) -> Any:
        """A CSV value as the type that other log formats have."""
        reads = self.recipe["columns"].get(name, {}).get("reads")
        if text in self._missing:
            return None
        if reads == "boolean":
            return bool(self._boolean(name, text))
        if reads == "integer" and re.fullmatch("-?[0-9]+", text):
            return int(text)
        numeric = any(f["column"] == name and f["kind"] == "numeric" for f in self.recipe["features"])
        return self._number(name, text) if reads in ("number", "integer") and numeric else text

    def _fields(self, line: str, delimiter: str) -> list[str]:
        """The fields of a line; no field contains a line end."""
        text, quotes = line.rstrip("\n"), self.recipe["csv"]["quotes"]
        text = text[:-1] if text.endswith("\r") else text
        whole, unclosed = (form.format(delimiter=re.escape(delimiter)) for form in (_WELL_QUOTED, _OPEN))
        if "\r" in text or "\0" in text or (quotes and '"' in text and not re.fullmatch(whole, text)):
            clean = "\r" not in text and "\0" not in text
            raise RowError(_NOT_CLOSED if clean and re.fullmatch(unclosed, text) else _MISPLACED)
        try:
            return next(csv.reader([text], delimiter=delimiter)) if quotes and '"' in text else text.split(delimiter)
        except csv.Error as error:  # a field is too long
            raise RowError(str(error)) from error

    def _read(self, name: str, row: Mapping[str, Any]) -> Any:
        """A value of the row, as the log's file would give it."""
        about, form = self.recipe["columns"][name], self.recipe["rows"]
        if name not in row and form != "json" and not about.get("optional"):
            raise RowError(f"no column {name!r}; give None where it has no value")
        value = row.get(name)
        if about["reads"] == "numbers" and value is not None and hasattr(value, "tolist"):  # an array
            value = value.tolist()
        # as pandas has a missing time, and Python's JSON anything that is missing
        if value is None or (value != value and (form == "json" or not isinstance(value, float))):
            return None
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:  # from bytes that are not text in `read`
                raise RowError(f"column {name!r} is not text in UTF-8") from None
        if form == "json":
            return _json_value(name, value, about["reads"])
        return self._csv_value(name, value, about["reads"]) if form == "csv" else value

    def _csv_value(self, name: str, value: Any, reads: str) -> Any:
        if isinstance(value, str) and value in self._missing:
            return None
        if reads == "boolean":
            return self._boolean(name, value)
        if reads == "number":
            return self._number(name, value)
        return None if value != value else value

    def _boolean(self, name: str, value: Any) -> float:
        words = self.recipe["csv"]
        if value in words["true"] or value in words["false"]:
            return float(value in words["true"])
        if not isinstance(value, str) and value in (0, 1):
            return float(value)
        raise RowError(f"column {name!r} is not true or false ({value!r})")

    def _number(self, name: str, value: Any) -> float:
        """The nearest single-precision number to a CSV text or a number."""
        if not isinstance(value, str):
            return _plain(name, value)
        text, decimal = value.strip(" \t"), self.recipe["csv"]["decimal"]
        if decimal != ".":
            text = text.replace(".", "?").replace(decimal, ".")
        found = _number_of(text)
        if found is None:
            raise RowError(f"column {name!r} is not a number ({value!r})")
        return found

    def _joined(
        self, join: Mapping[str, Any], table: Mapping[str, list[Any]] | None, values: Mapping[str, Any], row: Any
    ) -> dict[str, Any]:
        """The columns of a table for the row; they come from the row if the table is not in the folder."""
        if table is None:
            return {name: self._read(name, row) for name in join["columns"]}
        parts = [_key(values[name]) for name in join["key"]]
        key = None if None in parts else "\x1f".join(part for part in parts if part is not None)
        found = table.get(key) if key is not None else None
        if found is not None:
            return dict(zip(join["columns"], found))
        if join["rows"] == "matched":
            shown = "no value" if key is None else repr(key.replace("\x1f", ", "))
            raise RowError(f"{', '.join(join['key'])} {shown} is not in {join['path']}", "not_joined")
        return {name: join["fill"].get(name) for name in join["columns"]}

    def _vector(self, name: str, value: Any, size: int | None) -> list[float] | None:
        """A list of single-precision numbers; None if missing."""
        if value is None:
            return None
        about = self.recipe["columns"][name]
        if isinstance(value, str) and about["reads"] == "text":
            found = _listed(name, value)
        elif isinstance(value, (list, tuple)):
            is_json = self.recipe["rows"] == "json" and "table" not in about
            found = [_plain(name, _json_number(name, each, value) if is_json else each) for each in value]
        else:
            raise RowError(f"column {name!r} is not a list of numbers ({value!r})")
        if size is not None and len(found) != size:
            raise RowError(f"column {name!r} has {len(found)} numbers, not {size}")
        if any(math.isnan(each) for each in found):
            raise RowError(f"column {name!r} lacks a number in its list")
        return found

    def _seconds(self, name: str, value: Any) -> int | None:
        """The seconds since 1970 of a time; None if missing."""
        if value is None:
            return None
        found = self._instant(value.decode(errors="replace") if isinstance(value, bytes) else value)
        if found is None:
            raise RowError(f"column {name!r} is not a time or date ({value!r})")
        return found

    def _instant(self, value: Any) -> int | None:
        formats = self.recipe["times"]["formats"]
        if isinstance(value, date):
            at = value if isinstance(value, datetime) else datetime(value.year, value.month, value.day)
            return self._utc(at)
        if not isinstance(value, str):
            if formats == ["iso"]:
                return _epoch(_double(value)) if hasattr(value, "__float__") else None
            value = _key(value) or ""
        return next((at for at in (self._by_format(value.strip(), form) for form in formats) if at is not None), None)

    def _by_format(self, text: str, form: str) -> int | None:
        if _FOREIGN_DIGIT.search(text):
            return None
        try:
            if form != "iso":
                at = datetime.strptime(text, form)
                if at.tzinfo is None and text.endswith(("UTC", "GMT")):
                    at = at.replace(tzinfo=timezone.utc)
                return None if "%Z" in form and at.tzinfo is None else self._utc(at)
            if _NUMBER.fullmatch(text) or _NO_NUMBER.fullmatch(text):
                return _epoch(float(text))
            text = _ZONE.sub(lambda zone: zone[1] if zone[1][0] in "+-" else "Z", text)
            return self._utc(datetime.fromisoformat(text) if sys.version_info >= (3, 11) else iso_time(text))
        except (ValueError, OverflowError):
            return None

    def _utc(self, at: datetime) -> int:
        return ((at if at.tzinfo else at.replace(tzinfo=self._zone)) - _EPOCH) // timedelta(seconds=1)

    def _feature(self, feature: Mapping[str, Any], values: Mapping[str, Any], seconds: Mapping[str, Any]) -> float:
        column, part = feature["column"], feature.get("part")
        if "place" in feature:
            return math.nan if values[column] is None else values[column][feature["place"]]
        if "similarity" in feature:
            return _similarity(feature["similarity"], column, feature["other"], values)
        if part is None:
            value = values[column]
            return self._category(column, value) if feature["kind"] == "categorical" else _plain(column, value)
        at = seconds[column]
        if at is None:
            return math.nan
        if part == "days_before":
            return _single((seconds[self.recipe["times"]["row"]] - at) / _DAY)
        local = at + _offset(at // _SLOT * _SLOT, self._zone)
        return float((local // _DAY + 3) % 7 if part == "weekday" else local // 3600 % 24)

    def _category(self, name: str, value: Any) -> float:
        """The code of a category: a whole number below 2^24 is its own code, any other text is hashed."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return math.nan
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                raise RowError(f"column {name!r} is not text in UTF-8") from None
        about = self.recipe["columns"][name]
        if isinstance(value, (bool, float)) and "table" not in about and self.recipe["rows"] == "csv":
            raise RowError(f"column {name!r} is text in the log ({value!r}); give the text that stands there")
        return float(code(_text(value)))

    def _completed(self, found: list[float]) -> list[float]:
        """Fill missing values; an infinite one may reject the row."""
        infinite = [f"{name} {value:g}" for name, value in zip(self.names, found) if math.isinf(value)]
        if infinite and self.recipe["infinite"] == "reject":
            raise RowError(", ".join(infinite[:3]), "infinite")
        fills = (feature.get("fill", math.nan) for feature in self.recipe["features"])
        return [value if math.isfinite(value) else fill for value, fill in zip(found, fills)]


def code(text: str) -> int:
    """The code of a category's text."""
    if text.isascii() and text.isdigit() and len(text) <= 8 and str(int(text)) == text and int(text) < _CODES:
        return int(text)
    hashed = hashlib.blake2b(b"category\0" + text.encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(hashed.digest(), "little") >> 40


def _text(value: Any) -> str:
    """The text of a category; many tools turn whole numbers into floats if there are missing values."""
    if isinstance(value, bool) or (hasattr(value, "is_integer") and value.is_integer()):
        return str(int(value))
    text = str(value)
    return str(int(text[:-2])) if _WHOLE_FLOAT.fullmatch(text) else text


def _key(value: Any) -> str | None:
    """The text of a key; None if missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)


def _plain(name: str, value: Any) -> float:
    """A number in single precision; NaN if missing."""
    if value is None:
        return math.nan
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise RowError(f"column {name!r} is not a number ({value!r})")
    return _nearest(_double(value), value)


def _similarity(kind: str, one: str, other: str, values: Mapping[str, Any]) -> float:
    """The similarity of two vectors, in single precision; NaN if one is missing."""
    x, y = values[one], values[other]
    if x is None or y is None:
        return math.nan
    if len(x) != len(y):
        raise RowError(f"columns {one!r} and {other!r} have {len(x)} and {len(y)} numbers")
    dot = _dot(x, y)
    if not math.isfinite(dot):
        return math.inf
    if kind == "dot":
        return _single(dot) if x else math.nan
    norms = math.sqrt(_dot(x, x)) * math.sqrt(_dot(y, y))
    return _single(dot / norms) if norms else math.nan


def _dot(x: list[float], y: list[float]) -> float:
    total = 0.0
    for a, b in zip(x, y):  # in the order of training's preparation; sum() rounds differently
        total += a * b
    return total


def _json_value(name: str, value: Any, reads: str) -> Any:
    here, there = _json_type(value), _KINDS.get(reads)
    if there is not None and here != there:
        raise RowError(f"column {name!r} is {here} here and {there} elsewhere ({value!r})")
    if reads == "integer" and (not isinstance(value, int) or not -(2**63) <= value < 2**63):
        raise RowError(f"column {name!r} is not a whole number of 64 bits ({value!r})")
    return _double(value) if reads == "number" else value


def _json_type(value: Any) -> str:
    return _JSON.get(type(value), type(value).__name__)


def _json_number(name: str, value: Any, whole: Any) -> float | None:
    """A number in a list of JSON; None if missing."""
    if value is not None and (here := _json_type(value)) != "number":
        raise RowError(f"column {name!r} is a list of {here}s here and a list of numbers elsewhere ({whole!r})")
    return None if value is None else _double(value)


def _listed(name: str, text: str) -> list[float]:
    """The numbers of a text such as [0.5, -2e3], in single precision; NaN for anything else."""
    if not _LIST.fullmatch(text):
        raise RowError(f"column {name!r} is not a list of numbers ({text!r})")
    inner = text.strip(" \t\r\n")[1:-1].strip(" \t\r\n")
    numbers = map(_number_of, _BETWEEN.split(inner) if inner else ())
    return [math.nan if number is None else number for number in numbers]


def _number_of(text: str) -> float | None:
    """The nearest single-precision number to a text; None if it is not a number."""
    if _NUMBER.fullmatch(text):
        near = float(text)
        return _nearest(near, Decimal(text)) if near and math.isfinite(near) else near
    word = _NO_NUMBER.fullmatch(text)
    if word is None:
        return None
    return math.nan if word[2][0] in "nN" else math.copysign(math.inf, -1 if word[1] == "-" else 1)


def _double(value: Any) -> float:
    """The nearest double-precision number; infinite beyond the largest, as digits of a file are."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _single(value: float) -> float:
    """The nearest single-precision number."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _nearest(near: float, exact: Any) -> float:
    """The nearest single-precision number to an exact number, which `near` approximates in double precision."""
    # rounding twice goes wrong if `near` is halfway between two single-precision numbers
    found = _single(near)
    if not math.isfinite(near) or near == found or not isinstance(exact, (int, Decimal)):
        return found
    (bits,) = struct.unpack("<i", struct.pack("<f", abs(found)))
    bits += -1 if abs(found) > abs(near) else 1
    other = math.copysign(struct.unpack("<f", struct.pack("<i", bits))[0], near)
    top = math.copysign(2.0**128, near)  # the number after the largest, if there were one
    if (found if math.isfinite(found) else top) / 2 + (other if math.isfinite(other) else top) / 2 != near:
        return found
    return max(found, other) if exact > near else min(found, other) if exact < near else found


def _epoch(value: float) -> int | None:
    """Seconds since 1970 from s, ms, us or ns; None if it cannot be one, or is a day such as 20260214."""
    if 19_000_101 <= value <= 21_001_231 and value == int(value):
        try:
            date(int(value) // 10_000, int(value) // 100 % 100, int(value) % 100)
        except ValueError:
            pass
        else:
            return None
    for _ in range(3):
        value = value / 1000 if abs(value) >= _EPOCH_SECONDS else value
    return math.floor(value) if abs(value) < _EPOCH_SECONDS else None


def _offset(seconds: int, zone: tzinfo) -> int:
    """Seconds by which local time is ahead of UTC; 0 in years outside Python's range."""
    try:
        offset = datetime.fromtimestamp(seconds, zone).utcoffset()
    except (ValueError, OverflowError, OSError):
        return 0
    return round(offset.total_seconds()) if offset else 0


def iso_time(text: str) -> datetime:
    """Parse a time in ISO 8601; before 3.11 Python itself reads only some of its forms."""
    found = _ISO.fullmatch(text)
    if found is None:
        raise ValueError(text)
    digits = found["date"].replace("-", "")
    if "W" in digits:
        day = date.fromisocalendar(int(digits[:4]), int(digits[5:7]), int(digits[7:] or 1))
    else:
        day = date(int(digits[:4]), int(digits[4:6]), int(digits[6:]))
    hour, minute, second = (int(found[name] or 0) for name in "hms")
    micro, zone = int(((found["f"] or "") + "000000")[:6]), None
    if found["zone"]:
        parts = re.findall(r"\d\d", found["zone"])
        ahead = timedelta(**dict(zip(("hours", "minutes", "seconds"), map(int, parts))))
        zone = timezone(-ahead if found["zone"][0] == "-" else ahead)
    return datetime(day.year, day.month, day.day, hour, minute, second, micro, zone)


def _object(line: str) -> Row:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else RowError("not a JSON object")


def _table(join: Mapping[str, Any], folder: Path) -> dict[str, list[Any]] | None:
    """The rows of a table to join, by key; None if it is not in the folder."""
    if join["table"] is None:
        return None
    with _opened(str(folder / join["table"]), "utf-8") as file:
        return {key: values for key, *values in map(json.loads, file)}


def _opened(name: str, encoding: str) -> Any:
    packed = gzip if name.endswith(".gz") else lzma if name.endswith(".xz") else None
    if packed is not None:
        return packed.open(name, "rt", encoding=encoding, errors="surrogateescape", newline="\n")
    return Path(name).open(encoding=encoding, errors="surrogateescape", newline="\n")


@cache
def beside(folder: str) -> RawRows:
    """Load the recipe from a folder."""
    recipe = json.loads((Path(folder) / RECIPE).read_text(encoding="utf-8"))
    columns = json.loads((Path(folder) / MODEL).read_text(encoding="utf-8"))["columns"]
    return RawRows(recipe, {column["name"]: column["codes"] for column in columns if column.get("codes")}, Path(folder))


def features(row: Row) -> list[float]:
    """The values of the model's features for a raw row."""
    return beside(str(Path(__file__).parent)).features(row)


def inputs(row: Row) -> list[float]:
    """The row of the model's matrix for a raw row."""
    return beside(str(Path(__file__).parent)).inputs(row)


def read(path: str | Path) -> Iterable[Row]:
    """The rows of a file in the form of the log."""
    return beside(str(Path(__file__).parent)).read(path)


def numbered(path: str | Path) -> Iterable[tuple[int, Row]]:
    """The rows of a file with their line numbers."""
    return beside(str(Path(__file__).parent)).numbered(path)
