"""Columns of time stamps and dates: reading them in any form, and the features and periods made from them.

Shapes: N rows.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Literal
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.data.columns import is_number, is_number_text, is_text, texts, without_dictionary

PeriodUnit = Literal["week", "day", "hour"]

DatePart = Literal["days_before", "weekday", "hour"]
"""Features of a time: days before the row's own time, weekday (Monday is 0) and hour of the day."""

ISO = "iso"
"""The format of ISO 8601 text and of numbers since 1970."""

DAY_NUMBER = "%Y%m%d"
"""The format of days that are written as numbers, such as 20260214."""

_DAYS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", DAY_NUMBER, "%d %b %Y")
_HALF_DAYS = (" %I:%M %p", " %I:%M:%S %p")
USUAL_FORMATS = (
    ISO,
    *(day + clock for day in _DAYS for clock in ("", " %H:%M:%S", " %H:%M", *_HALF_DAYS)),
    *("%Y-%m-%d" + clock for clock in _HALF_DAYS),
    "%a, %d %b %Y %H:%M:%S %Z",  # of mail and of HTTP: RFC 1123
    "%d/%b/%Y:%H:%M:%S %z",  # of Apache's log, with and without its brackets
    "[%d/%b/%Y:%H:%M:%S %z]",
)
"""The formats that are tried where none is named."""

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EPOCH_SECONDS = 10**11  # the year 5138: a larger number must have a finer unit
_FINER = ("ms", "us", "ns")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_NUMBERS = 19_000_101, 21_001_231
_YEAR_1 = -62_135_596_800  # the first year that Python supports
_HOUR, _DAY = 3600, 86400
_ZONE = re.compile(r" ?(UTC|GMT|Z|[-+][0-9]{2}(?::?[0-9]{2})?)$")
"""A zone at the end of a text; ISO 8601 allows no blank before it, and no name but Z."""
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
_SLOT = 900  # clocks are put forward and back at full quarters of an hour


def is_time(kind: pa.DataType) -> bool:
    """Whether a column of this type can be read as instants: time stamps, dates, epochs, text."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind)) or is_number(kind) or is_text(kind)


@dataclass(frozen=True)
class Clock:
    """How a log writes times.

    `zone` applies to times that state none, and decides when days begin. `formats` of text are tried in order: `iso`,
    or codes of `strptime`. Where clocks are put back, an hour occurs twice, and the first is meant; where they are put
    forward, the skipped hour is read as if it existed.
    """

    zone: str = "UTC"
    formats: tuple[str, ...] = (ISO,)

    @property
    def tz(self) -> tzinfo:
        """The zone."""
        return UTC if self.zone == "UTC" else ZoneInfo(self.zone)

    def utc(self, local_N: Ints) -> Ints:
        """Seconds since 1970 of local times, which are seconds since 1970 on a local clock."""
        return local_N - self._offsets(local_N, lambda at: datetime.fromtimestamp(at, UTC).replace(tzinfo=self.tz))

    def local(self, seconds_N: Ints) -> Ints:
        """The inverse of `utc`."""
        return seconds_N + self._offsets(seconds_N, lambda at: datetime.fromtimestamp(at, self.tz))

    def _offsets(self, seconds_N: Ints, local_time: Callable[[int], datetime]) -> Ints:
        """Seconds by which local time is ahead of UTC; 0 in years that Python does not support."""
        if self.tz is UTC:
            return np.zeros_like(seconds_N)
        slots, index_N = np.unique(seconds_N // _SLOT, return_inverse=True)
        offsets = np.zeros(len(slots), np.int64)
        for i, slot in enumerate(slots.tolist()):
            try:
                offset = local_time(slot * _SLOT).utcoffset()
            except (ValueError, OverflowError, OSError):
                continue
            assert offset is not None
            offsets[i] = round(offset.total_seconds())
        return offsets[index_N]


UTC_CLOCK = Clock()


def periods(column: pa.Array, period: PeriodUnit, clock: Clock = UTC_CLOCK) -> tuple[pa.StringArray, Bools]:
    """The period of each instant, and the rows whose time stamp is missing or cannot be read.

    Numbers are time since 1970: seconds below 10**11, otherwise milli-, micro- or nanoseconds, the first unit that puts
    them below 10**11 seconds; so seconds and milliseconds can be distinguished from March 1973 on. A number that spells
    a day from 1900 to 2100, such as 20260214, is read only by the format `%Y%m%d`.

    Example:
        >>> names, bad = periods(pa.array(["2026-02-14T09:30:00+01:00", "1771057800", "soon"]), "hour")
        >>> names.to_pylist(), bad.tolist()
        (['2026-02-14T08', '2026-02-14T08', None], [False, False, True])
    """
    seconds_N, bad_N = instants(column, clock)
    hours, index_N = np.unique(clock.local(seconds_N) // _HOUR, return_inverse=True)
    names_N = pa.array([_period_name(int(hour), period) for hour in hours], pa.string()).take(pa.array(index_N))
    names_N = pc.if_else(pa.array(bad_N), pa.scalar(None, pa.string()), names_N)
    return names_N, names_N.is_null().to_numpy(zero_copy_only=False)


def _period_name(hour: int, period: PeriodUnit) -> str | None:
    try:
        instant = datetime.fromtimestamp(hour * _HOUR, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    match period:
        case "week":
            year, week, _ = instant.isocalendar()
            return f"{year:04d}-W{week:02d}"
        case "day":
            return f"{instant:%Y-%m-%d}"
        case "hour":
            return f"{instant:%Y-%m-%dT%H}"


def _is_day_number(number: float) -> bool:
    """True if a number spells a day from 1900 to 2100; as seconds, these lie in August 1970."""
    if not _DAY_NUMBERS[0] <= number <= _DAY_NUMBERS[1] or number % 1:
        return False
    year, month_and_day = divmod(int(number), 10_000)
    try:
        date(year, *divmod(month_and_day, 100))
    except ValueError:
        return False
    return True


def part_of(part: DatePart, seconds_N: Ints, row_seconds_N: Ints | None, clock: Clock = UTC_CLOCK) -> Doubles:
    """A feature of times in seconds since 1970, on the clock's zone; `days_before` needs the times of the rows too.

    Example:
        >>> part_of("weekday", np.array([0]), None).tolist()  # 1970 began on a Thursday
        [3.0]
    """
    match part:
        case "days_before":
            assert row_seconds_N is not None
            return (row_seconds_N - seconds_N) / _DAY
        case "weekday":
            return ((clock.local(seconds_N) // _DAY + 3) % 7).astype(np.float64)
        case "hour":
            return (clock.local(seconds_N) // _HOUR % 24).astype(np.float64)


def instants(column: pa.Array, clock: Clock = UTC_CLOCK) -> tuple[Ints, Bools]:
    """Seconds since 1970, and the rows whose time is missing or cannot be read, which have 0."""
    column = without_dictionary(column)
    missing_N = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("s"), safe=False)
    if pa.types.is_timestamp(column.type):
        seconds_N = column.cast(pa.int64()).fill_null(0).to_numpy() // _PER_SECOND[column.type.unit]
        return (clock.utc(seconds_N) if column.type.tz is None else seconds_N), missing_N
    if clock.formats != (ISO,):
        encoded = texts(column)[0].dictionary_encode()  # each distinct value is read once
        seconds = _one_by_one(encoded.dictionary, clock)
        return _or_bad(seconds.take(encoded.indices))
    if not is_text(column.type):
        return _numbers_since_1970(column)
    text, _ = texts(column)
    # the casts are fast, and fail where one value has another form: with a zone, without one, a number
    for target in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        try:
            seconds_N, missing_N = instants(text.cast(target), clock)
        except pa.ArrowInvalid:
            continue
        if (seconds_N >= _YEAR_1).all():  # Arrow reads a year 0, which Python cannot
            return seconds_N, missing_N
    return _or_bad(_one_by_one(text, clock))


def microseconds(column: pa.Array, clock: Clock = UTC_CLOCK) -> tuple[Ints, Bools]:
    """As `instants`, in microseconds. Of text, digits after the seconds of a clock count, as in 09:30:00.25.

    Example:
        >>> microseconds(pa.array(["1970-01-01 00:00:01.25", "1"]))[0].tolist()
        [1250000, 1000000]
    """
    column = without_dictionary(column)
    seconds_N, bad_N = instants(column, clock)
    if pa.types.is_timestamp(column.type):
        per_second = _PER_SECOND[column.type.unit]
        rest_N = column.cast(pa.int64()).fill_null(0).to_numpy() % per_second * 10**6 // per_second
    elif is_text(column.type):
        digits_N = pc.struct_field(pc.extract_regex(texts(column)[0], r":[0-9]{2}[.,](?P<digits>[0-9]{1,6})"), "digits")
        rest_N = pc.utf8_rpad(digits_N.fill_null("0"), 6, "0").cast(pa.int64()).to_numpy()
    elif is_number(column.type) and clock.formats == (ISO,):
        values_N = column.cast(pa.float64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False)
        units_N = np.digitize(np.abs(values_N), [_EPOCH_SECONDS * 1000**i for i in range(len(_FINER))])
        rest_N = np.clip(np.rint(values_N * 10.0**6 / 1000.0**units_N) - seconds_N * 10**6, 0, 10**6 - 1)
    else:
        rest_N = np.zeros_like(seconds_N)
    return np.where(bad_N, 0, seconds_N * 10**6 + rest_N.astype(np.int64)), bad_N


def _one_by_one(column: pa.StringArray, clock: Clock) -> pa.Int64Array:
    """Read each value separately; null for one that cannot be read."""
    return pa.array([_by_format(text or "", clock) for text in column.to_pylist()], pa.int64())


def _or_bad(seconds_N: pa.Int64Array) -> tuple[Ints, Bools]:
    return seconds_N.fill_null(0).to_numpy(), seconds_N.is_null().to_numpy(zero_copy_only=False)


def _by_format(text: str, clock: Clock) -> int | None:
    text = text.strip()
    if _FOREIGN_DIGIT.search(text):
        return None
    for form in clock.formats:
        seconds = _iso(text, clock) if form == ISO else _stamp(text, form, clock)
        if seconds is not None:
            return seconds
    return None


def format_of(text: str) -> str | None:
    """The first of `USUAL_FORMATS` that reads a time; None where none does.

    Example:
        >>> format_of("05/Jan/2026:10:00:00 +0000"), format_of("13/1/2026 9:30 PM"), format_of("soon")
        ('%d/%b/%Y:%H:%M:%S %z', '%d/%m/%Y %I:%M %p', None)
    """
    return next((form for form in USUAL_FORMATS if _by_format(text, Clock(formats=(form,))) is not None), None)


def _stamp(text: str, form: str, clock: Clock) -> int | None:
    """Seconds since 1970 of text in a format, with UTC and GMT as zone names on every machine."""
    try:
        at = datetime.strptime(text, form)
        if at.tzinfo is None and text.endswith(("UTC", "GMT")):
            at = at.replace(tzinfo=UTC)
        return None if "%Z" in form and at.tzinfo is None else _seconds(at, clock)
    except (ValueError, OverflowError):
        return None


def _numbers_since_1970(column: pa.Array) -> tuple[Ints, Bools]:
    """Numbers as seconds since 1970, in float64: exact enough for periods of an hour or more."""
    values_N = column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
    near_N = (values_N >= _DAY_NUMBERS[0]) & (values_N <= _DAY_NUMBERS[1])
    days = [value for value in np.unique(values_N[near_N]).tolist() if _is_day_number(value)]
    values_N = np.where(np.isin(values_N, days), np.nan, values_N) if days else values_N
    for _ in _FINER:
        values_N = np.where(np.abs(values_N) >= _EPOCH_SECONDS, values_N / 1000, values_N)
    bad_N = ~(np.abs(values_N) < _EPOCH_SECONDS)
    return np.floor(np.where(bad_N, 0, values_N)).astype(np.int64), bad_N


def _iso(text: str, clock: Clock) -> int | None:
    """Seconds since 1970 of ISO 8601 text or of a number; None where it cannot be read."""
    if is_number_text(text):
        value = float(text)
        if _is_day_number(value):
            return None
        for _ in _FINER:
            value = value / 1000 if abs(value) >= _EPOCH_SECONDS else value
        return math.floor(value) if abs(value) < _EPOCH_SECONDS else None
    try:
        zoned = _ZONE.sub(lambda zone: zone[1] if zone[1][0] in "+-" else "Z", text)
        return _seconds(datetime.fromisoformat(zoned), clock)
    except (ValueError, OverflowError):
        return None


def _seconds(instant: datetime, clock: Clock) -> int:
    return ((instant if instant.tzinfo else instant.replace(tzinfo=clock.tz)) - _EPOCH) // timedelta(seconds=1)
